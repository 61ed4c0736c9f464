"""A user's own code on other machines: shipped with its hash, and run only if it is allowed."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.command_line import error_line, peerage
from support.processes import TIMEOUT, until

from peerage.experiment.outside import file_hash
from peerage.net.deploy.up import free_ports
from peerage.net.trust.certs import Authority
from peerage.net.trust.signature import sign_network
from peerage.records.rows import read_metrics

CODE = """
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import peerage as pg

Path("imported").touch()  # in the current folder of the peer


@dataclass(frozen=True)
class Mine(pg.DecAvg):
    pass


@dataclass(frozen=True)
class Net:
    hidden: int = 8

    def build(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.hidden), nn.Linear(self.hidden, 10))


def wrong(y_true, y_pred):
    return (y_true != y_pred).mean()
"""
SETTINGS = (
    "--algorithm mine.py:Mine --model mine.py:Net:hidden=5 --metric mine.py:wrong --nodes 2 "
    "--topology ring --partition iid --rounds 2 --epochs 1"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the code, and hosts for two peers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "hosts.txt").write_text("10.0.0.10\n10.0.0.11\n")
    return tmp_path


@pytest.fixture
def homes(place: Path) -> list[Path]:
    """The folders of two peers, on their machines."""
    hosts = "".join(f"127.0.0.1:{port}\n" for port in free_ports(2))
    (place / "hosts.txt").write_text(hosts)
    assert peerage(f"export {SETTINGS}").code == 0
    found = [place / f"machine-{number}" / "peer" for number in range(2)]
    for number, home in enumerate(found):
        home.parent.mkdir()
        shutil.move(f"deploy/node-{number}", home)
        network = home / "network.toml"
        text = re.sub("^(start|message) = .*", r"\1 = 300.0", network.read_text(), flags=re.M)
        network.write_text(text)
        sign_network(Authority.load(place / "deploy" / "authority"), network)
    (place / "mine.py").unlink()
    return found


def node(home: Path, *more: str) -> subprocess.Popen[str]:
    name = next(home.glob("*.service")).stem.removeprefix("peerage-")
    flags = f"node --network network.toml --identity {name} --out run".split()
    return subprocess.Popen(
        [sys.executable, "-m", "peerage", *flags, *more],
        cwd=home,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """The exit code and the last line of every process."""
    try:
        texts = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    lines = [(text.splitlines() or [""])[-1] for text in texts]
    return list(zip(codes, lines, strict=True))


# What is exported


def test_the_code_is_in_every_folder_with_its_hash_in_the_network_file(place):
    assert peerage(f"export {SETTINGS}").code == 0
    sha256 = file_hash(Path("mine.py"))
    for folder in (place / "deploy" / "node-0", place / "deploy" / "node-1"):
        assert (folder / "code" / "mine.py").read_text() == CODE
        network = tomllib.loads((folder / "network.toml").read_text())
        assert network["code"] == [{"file": "code/mine.py", "sha256": sha256}]
        experiment = tomllib.loads((folder / "experiment.toml").read_text())
        assert experiment["algorithm"]["name"] == "code/mine.py:Mine"
        assert experiment["model"] == {"name": "code/mine.py:Net", "hidden": 5}
        assert experiment["evaluation"]["metrics"] == ["code/mine.py:wrong"]
        readme = (folder / "README.txt").read_text()
        assert f"    --allow-code {sha256}\n" in readme
        assert readme.index("3. Code") < readme.index("4. Start")
        assert str(place) not in readme


def test_folders_without_own_code_have_no_word_about_it(place):
    assert peerage("export --nodes 2 --topology ring --model logistic").code == 0
    folder = place / "deploy" / "node-0"
    assert not (folder / "code").exists()
    assert "code" not in tomllib.loads((folder / "network.toml").read_text())
    readme = (folder / "README.txt").read_text()
    assert "allow-code" not in readme
    assert "3. Start" in readme


@pytest.mark.parametrize(
    "line", ["import helper", "from helper import x", "def f():\n    import helper.part"]
)
def test_a_file_that_imports_its_neighbour_is_not_exported(line, place, monkeypatch):
    monkeypatch.syspath_prepend(place)  # as with `python -m peerage` in this folder
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    (place / "helper").mkdir()
    (place / "helper" / "__init__.py").write_text("x = 1\n")
    (place / "helper" / "part.py").touch()
    (place / "mine.py").write_text(f"{line}\n{CODE}")
    message = error_line(peerage(f"export {SETTINGS}"))
    number = line.count("\n") + 1
    assert f"mine.py line {number} imports helper, a file beside it" in message
    assert "put all into one file" in message
    assert not (place / "deploy").exists()


def test_a_folder_with_the_name_of_a_package_is_no_neighbour(place):
    (place / "torch").mkdir()
    (place / "json.py").touch()
    (place / "mine.py").write_text(f"import json\n{CODE}")
    assert peerage(f"export {SETTINGS}").code == 0


def test_two_files_of_one_name_are_not_exported(place):
    (place / "other").mkdir()
    shutil.copy("mine.py", "other/mine.py")
    line = f"export {SETTINGS} --model other/mine.py:Net"
    assert "two files of the experiment are called mine.py" in error_line(peerage(line))


# What runs


@pytest.mark.slow
def test_code_runs_after_it_was_allowed_once_and_not_before(homes, place):
    sha256 = file_hash(homes[0] / "code" / "mine.py")
    [(code, line)] = ends([node(homes[0])])
    assert code == 2
    assert f"code/mine.py with the SHA-256 {sha256} is not allowed to run here" in line
    assert f"`peerage node --allow-code {sha256}`" in line
    assert not (homes[0] / "imported").exists()
    # The same code in two folders: the peers go together.
    for code, line in ends([node(home, "--allow-code", sha256) for home in homes]):
        assert (code, "round 2 of 2" in line) == (0, True), line
    assert all((home / "imported").exists() for home in homes)
    # The permission is remembered, also by the command that writes a model.
    assert [code for code, _ in ends([node(home) for home in homes])] == [0, 0]
    assert peerage(f"model {homes[0]} --out", place / "model.safetensors").code == 0
    (place / "mine.py").write_text(CODE)
    simulated = peerage(f"run {SETTINGS} --engine serial --json --out", place / "simulated")
    summary = json.loads(simulated.lines[-1])
    last = [read_metrics(home / "run" / "metrics.jsonl")[-1] for home in homes]
    assert summary["wrong"] == (last[0]["wrong"] + last[1]["wrong"]) / 2
    # Other content than the network file says is refused, even if someone allows it.
    changed = homes[0] / "code" / "mine.py"
    changed.write_text(CODE + "# other\n")
    (homes[0] / "imported").unlink()
    [(code, line)] = ends([node(homes[0], "--allow-code", file_hash(changed))])
    assert (code, f"but the network file says {sha256}" in line) == (2, True)
    assert not (homes[0] / "imported").exists()


@pytest.mark.slow
def test_questions_to_a_peer_need_no_code(place):
    """Neither the status nor the check of health asks for permission to run code."""
    Path("hosts.txt").write_text("".join(f"127.0.0.1:{port}\n" for port in free_ports(2)))
    assert peerage(f"export {SETTINGS}").code == 0
    who = "--identity node-0 --certs deploy/node-0/certs"
    asked = peerage(f"status deploy/node-0/network.toml {who} --json")
    assert asked.code == 0
    assert [peer["name"] for peer in json.loads(asked.out)["peers"]] == ["node-0", "node-1"]
    health = peerage(f"node --network deploy/node-0/network.toml {who} --check-health")
    assert "node-0 does not answer at" in health.err


@pytest.mark.slow
def test_peers_with_other_code_at_the_same_path_refuse_each_other(homes):
    first, second = (home / "code" / "mine.py" for home in homes)
    second.write_text(CODE.replace("hidden: int = 8", "hidden: int = 9"))
    network = homes[1] / "network.toml"
    network.write_text(network.read_text().replace(file_hash(first), file_hash(second)))
    sign_network(Authority.load(homes[1].parents[1] / "deploy" / "authority"), network)
    hashes = [file_hash(first), file_hash(second)]
    pairs = zip(homes, hashes, strict=True)
    processes = [node(home, "--allow-code", sha256) for home, sha256 in pairs]
    # The first one that learns it leaves, perhaps before the other one could ask.
    until(lambda: any(process.poll() is not None for process in processes), "a peer has left")
    for process in processes:
        process.terminate()
    found = ends(processes)
    refused = [number for number, (code, _) in enumerate(found) if code == 2]
    assert refused, found
    for number in refused:
        here, there = (f'"Mine of SHA-256 {hashes[n]}"' for n in (number, 1 - number))
        line = f"runs another experiment: algorithm.name is {here} here and {there} there"
        assert line in found[number][1]


@pytest.mark.slow
def test_up_needs_no_permission_and_gives_the_numbers_of_a_simulation(place):
    flags = f"{SETTINGS} --rounds 1 --json"
    real = peerage(f"up {flags} --start-timeout 600 --message-timeout 300 --out", place / "up")
    assert real.code == 0, real.err
    simulated = peerage(f"run {flags} --engine serial --out", place / "run")
    both = [json.loads(done.lines[-1]) for done in (real, simulated)]
    assert both[0]["digest"] == both[1]["digest"]
    assert both[0]["wrong"] == both[1]["wrong"]
    assert peerage("verify", place / "up").code == 0
    assert peerage(f"model {place / 'up'} --node 0 --out", place / "model.pt").code == 0


def test_a_hash_that_no_file_has_is_refused(place):
    assert peerage("export --nodes 2 --topology ring --model logistic").code == 0
    home = place / "deploy" / "node-0"
    line = f"node --network {home}/network.toml --identity node-0 --certs {home}/certs"
    wrong = error_line(peerage(f"{line} --allow-code {'0' * 64} --out", place / "out"))
    assert wrong == f"--allow-code {'0' * 64}: no file of this network has this SHA-256; remove it"
    short = error_line(peerage(f"{line} --allow-code abc --out", place / "out"))
    assert "--allow-code 'abc' is not a SHA-256" in short
