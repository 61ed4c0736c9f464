"""Errors of the engine `ray`: one line, exit code 2, and no folder of a run."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.command_line import TINY, error_line, peerage, start
from support.processes import TIMEOUT, gone, until

import peerage as pg
from peerage.data import in_memory
from peerage.engine.ray_cluster import (
    MAX_WORKERS,
    check_port,
    check_versions,
    connection_error,
    load_ray,
    versions,
)
from peerage.errors import InputError
from peerage.records.rows import read_status

pytestmark = [pytest.mark.slow, pytest.mark.own_engine]

RUN = f"run {TINY} --rounds 1 --engine ray"


def refused(folder, line):
    """The error of a command that must not leave a folder."""
    error = error_line(peerage(f"{line} --out", folder))
    assert not folder.exists()
    return error


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused(tmp_path / "run", RUN) == (
        "engine 'ray' needs the package ray; install it with: pip install 'peerage[ray]'"
    )


def test_too_many_workers_are_refused(tmp_path):
    error = refused(tmp_path / "run", f"{RUN} --workers {MAX_WORKERS + 1}")
    assert error == "engine 'ray' has at most 64 workers, got 65; use --workers 64 or fewer"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000"])
def test_an_address_without_a_cluster_is_refused(address):
    with pytest.raises(InputError, match=f"no Ray cluster answers at '{address}'"):
        check_port(address)


# Ray looks for a cluster among all processes, and other tests have one, so they are hidden.
HIDDEN_PROCESSES = ["unshare", "--fork", "--pid", "--mount-proc"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "auto"])
def test_no_cluster_leaves_no_folder(address, tmp_path):
    """In a process of its own, as this one may be connected."""
    if subprocess.run([*HIDDEN_PROCESSES, "true"], capture_output=True).returncode:
        pytest.skip("this machine does not let processes be hidden (unshare --pid)")
    flags = [*RUN.split(), "--address", address, "--out", str(tmp_path / "run")]
    ended = subprocess.run(
        [*HIDDEN_PROCESSES, Path(sys.executable).with_name("peerage"), *flags],
        cwd=tmp_path,
        env={**os.environ, "RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"error: no Ray cluster answers at '{address}'")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--engine pool --address auto", "address and restarts need engine ray"),
        ("--engine ray --restarts -1", "restarts must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(flags, error, tmp_path):
    assert error in refused(tmp_path / "run", f"run --rounds 1 {flags}")


@pytest.mark.parametrize("name", ["Python", "torch", "numpy", "peerage"])
def test_other_versions_are_named(name):
    here = versions()
    check_versions("far", here)
    with pytest.raises(InputError) as error:
        check_versions("far", here | {name: "0.0.1"})
    assert str(error.value) == (
        f"machine far has {name} 0.0.1, this one has {here[name]}; install the same version on all "
        "machines"
    )


def test_other_sources_of_the_same_version_are_noticed(monkeypatch, tmp_path):
    """A checkout at another commit has the same version."""
    (tmp_path / "peerage").mkdir()
    (tmp_path / "peerage" / "__init__.py").write_text("")
    here = versions()["peerage"]
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "peerage")
    versions.cache_clear()
    there = versions()["peerage"]
    versions.cache_clear()
    assert there.partition(" ")[0] == here.partition(" ")[0]
    assert there != here


def test_another_version_of_ray_or_python_in_the_cluster_is_named():
    ray = load_ray(local=True)
    from ray._private.utils import check_version_info

    with pytest.raises(RuntimeError) as raised:
        check_version_info({"ray_version": "2.1.0", "python_version": "3.9.1"}, "here")
    text = str(connection_error(ray, "auto", raised.value))
    assert "\n" not in text
    assert "Ray: 2.1.0 Python: 3.9.1" in text
    assert text.endswith("install the same versions on all machines")


@pytest.fixture
def third(machines):
    """Adds a machine with these settings, which is removed in the end."""
    added = []

    def add(**settings):
        added.append(machines.add(**settings))

    yield add
    for machine in added:
        machines.remove(machine)


def test_a_machine_with_another_torch_is_refused(third, tmp_path):
    other = tmp_path / "packages" / "torch-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    paths = os.pathsep.join([str(other.parent), os.environ.get("PYTHONPATH", "")])
    third(env_vars={"PYTHONPATH": paths})
    error = refused(tmp_path / "run", RUN)
    assert f"has torch 0.0.1, this one has {versions()['torch']}; install the same" in error


def test_a_store_that_is_too_small_is_refused(third, tmp_path):
    third(object_store_memory=80_000_000)
    x = torch.zeros(25_000, 1000)  # 100 MB
    data = in_memory(x, torch.arange(25_000) % 2, x[:100], torch.arange(100) % 2)
    experiment = pg.Experiment(
        dataset=data, model="logistic", nodes=2, topology="ring", engine={"name": "ray"}
    )
    with pytest.raises(InputError, match=r"has 80 MB of object store, .* need 10\d MB; .*memory"):
        pg.run(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# A Ray that the run starts itself


@pytest.fixture
def short_folder():
    """Sockets of Ray need short paths."""
    with tempfile.TemporaryDirectory(prefix="p-") as folder:
        yield Path(folder)


CONNECT = "import ray, sys; ray.init(address=sys.argv[1], logging_level='ERROR')"


def test_an_interrupted_run_leaves_nothing_behind(short_folder, tmp_path):
    """Ray has a token while it runs; then its processes, memory and files are gone."""
    memory = set(os.listdir("/dev/shm"))
    environment = {"TMPDIR": str(short_folder), "RAY_TMPDIR": str(short_folder)}
    environment |= dict.fromkeys(("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"), "")
    line = f"run {TINY} --rounds 100000 --engine ray --workers 2 --out"
    process = start(line, tmp_path / "run", cwd=tmp_path, environment=environment)
    try:
        records = tmp_path / "run" / "metrics.jsonl"
        until(lambda: records.exists() or process.poll() is not None, "the run began")
        family = psutil.Process(process.pid).children(recursive=True)
        check_token(family, environment)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert read_status(tmp_path / "run") == "interrupted"
    until(lambda: gone(family), "the processes of Ray were gone")
    assert set(os.listdir("/dev/shm")) <= memory
    assert list(short_folder.iterdir()) == []


def check_token(family, environment):
    """A process without the token cannot connect to the Ray of these processes."""
    [raylet] = [one for one in family if one.name() == "raylet"]
    [option] = [word for word in raylet.cmdline() if word.startswith("--gcs-address=")]
    address = option.partition("=")[2]
    command = [sys.executable, "-c", CONNECT, address]
    others = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=others, timeout=TIMEOUT)
    assert done.returncode != 0
    assert "RAY_AUTH_MODE" in done.stderr, done.stderr


# Paths of the driver

MINE = """
import peerage as pg

class Mine(pg.DecAvg):
    \"\"\"An algorithm in a file that only the driver sees.\"\"\"
"""
HIDE = 'mount -t tmpfs tmpfs "$0" && test -z "$(ls -A "$0")" && exec "$@"'


@pytest.fixture
def blind(machines, tmp_path):
    """A third machine, on which a folder of the driver is empty."""
    folder = tmp_path / "driver"
    folder.mkdir()
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("hiding a folder needs root")
    ray = Path(sys.executable).with_name("ray")
    options = "--num-cpus=1 --object-store-memory=268435456 --min-worker-port=0 --block"
    command = ["unshare", "--mount", "sh", "-c", HIDE, folder, ray, "start", *options.split()]
    process = subprocess.Popen(
        [*command, f"--address={machines.address}", "--max-worker-port=0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    before = machines.alive()
    until(lambda: machines.alive() > before or process.poll() is not None, "the machine joined")
    assert process.poll() is None
    yield folder
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(TIMEOUT)
    until(lambda: machines.alive() == before, "the machine was gone")


def test_machines_need_no_path_of_the_driver(blind):
    """Data, code, checkpoints and records are on the driver's machine alone."""
    (blind / "mine.py").write_text(MINE)
    x, y = torch.randn(60, 4).numpy(), (torch.arange(60) % 3).numpy()
    np.savez(blind / "data.npz", x_train=x, y_train=y, x_test=x[:30], y_test=y[:30])
    code, data = blind / "mine.py:Mine", blind / "data.npz"
    settings = f"{TINY} --rounds 2 --algorithm {code} --dataset npz:path={data}"
    for engine, workers in (("ray", 3), ("serial", 1)):
        line = f"run {settings} --engine {engine} --workers {workers} --checkpoint-every 1 --out"
        done = peerage(line, blind / engine)
        assert done.code == 0, done.err
    assert pg.load(blind / "ray").digest == pg.load(blind / "serial").digest
