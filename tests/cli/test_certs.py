"""`peerage certs` on the command line."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.command_line import error_line, peerage
from support.identities import days_from_now, files, serial_of
from support.processes import TIMEOUT

from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """For tests that change nothing."""
    made = Authority.create(tmp_path_factory.mktemp("shared") / "certs", "trial")
    made.issue("node-1")
    return made


def answer(line: str, *more: object) -> dict[str, Any]:
    ended = peerage(line, *more, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.lines[-1])
    return found


def test_from_init_to_revoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = peerage("certs init --name trial --years 3")
    assert ended.code == 0, ended.err
    assert "authority 'trial' is ready in certs" in ended.out
    ended = peerage("certs add node-0 node-1 --hosts localhost,192.0.2.7 --days 30")
    assert ended.code == 0, ended.err
    assert "node-1 is ready: certs/node-1.pem and its key certs/node-1.key" in ended.out
    assert Identity.load(Path("certs"), "node-1").name == "node-1"
    ended = peerage("certs revoke node-0")
    assert "give certs/revoked.pem to every peer" in ended.out
    assert "node-0 was already revoked" in peerage("certs revoke node-0").out
    shown = [line.split() for line in peerage("certs list").lines]
    assert shown[0][:2] == ["authority", "'trial'"]
    assert [row[:2] for row in shown[1:]] == [["node-0", "revoked"], ["node-1", "valid"]]
    assert shown[2][3] == f"{days_from_now(30):%Y-%m-%d}"
    assert shown[2][5:] == ["localhost,", "192.0.2.7"]


def test_the_same_as_json(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    made = answer("certs init --folder", folder)
    assert made["name"] == "peerage"
    assert made["folder"] == str(folder)
    until = datetime.fromisoformat(made["until"])
    assert (until - datetime.now(UTC)).days == pytest.approx(3652, abs=1)
    added = answer("certs add node-0 node-1 --folder", folder)["identities"]
    assert [one["name"] for one in added] == ["node-0", "node-1"]
    assert added[1]["key"] == str(folder / "node-1.key")
    serial = serial_of(Identity.load(folder, "node-0"))
    taken = answer("certs revoke node-0 --folder", folder)
    assert taken == {
        "name": "node-0",
        "revoked": [f"{serial:x}"],
        "list": str(folder / "revoked.pem"),
    }
    listed = answer("certs list --folder", folder)
    assert listed["authority"] == made
    assert [one["status"] for one in listed["identities"]] == ["revoked", "valid"]
    assert listed["identities"][0]["serial"] == f"{serial:x}"
    assert listed["identities"][1]["hosts"] == ["localhost", "127.0.0.1"]
    assert listed["identities"][1]["revoked"] is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("init", "authority.pem already exists, and an authority is never overwritten"),
        ("init --years 0", "years must lie between 1 and 100, got 0"),
        ("add node-1", "node-1.pem already exists, and an identity is never overwritten"),
        ("add Node-2", "such as node-3; got 'Node-2'"),
        ("add node-2 node-2", "identity 'node-2' is given twice; name each once"),
        ("add node-2 node-1", "node-1.pem already exists"),
        ("add node-2 --days 0", "days must lie between 1 and 36500, got 0"),
        ("add node-2 --days 9999", "9999 days are more than the authority 'trial' has left"),
        ("add node-2 --days many", "'many'"),
        ("add node-2 --hosts ,", "--hosts ',' names no host; write --hosts localhost,127.0.0.1"),
        ("add node-2 --hosts a:1", "without a port; got 'a:1'"),
        ("add", "Missing argument"),
        ("revoke node-11", "no identity 'node-11' was issued here; did you mean 'node-1'?"),
        ("sign gone.csr", "there is no gone.csr; make it with `peerage certs request`"),
        ("sign-network gone.toml", "there is no gone.toml; give the path of a network file"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    shared: Authority, line: str, expected: str
) -> None:
    before = files(shared.folder)
    assert expected in error_line(peerage(f"certs {line} --folder", shared.folder))
    assert files(shared.folder) == before


@pytest.mark.parametrize("line", ["add node-1", "list", "revoke node-1"])
def test_without_an_authority(tmp_path: Path, line: str) -> None:
    folder = tmp_path / "none"
    said = error_line(peerage(f"certs {line} --folder", folder))
    assert said.endswith(f"create an authority with `peerage certs init --folder {folder}`")
    assert not folder.exists()


@pytest.mark.parametrize("line", ["init", "add node-1", "list", "revoke node-1"])
def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    said = error_line(peerage(f"certs {line} --folder", tmp_path / "certs"))
    assert said.endswith('pip install "peerage[net]"')
    assert not (tmp_path / "certs").exists()


@pytest.mark.slow
def test_the_commands_load_without_the_library() -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None; import peerage.cli.certs;"
        "assert 'peerage.net.trust.certs' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=TIMEOUT)


def test_every_command_has_help() -> None:
    for command in ("init", "add", "list", "revoke"):
        ended = peerage(f"certs {command} --help")
        assert ended.code == 0
        assert "--folder" in ended.out
        assert "--json" in ended.out
