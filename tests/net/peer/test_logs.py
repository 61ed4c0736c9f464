"""The log of a peer: bounded files, and nothing that another peer wrote changes its lines."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator

import pytest
from support.command_line import peerage
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import network_of

from peerage.algorithms.decavg import DecAvg
from peerage.engine.prepare import prepare
from peerage.errors import DiskError, InputError
from peerage.net.peer import logs
from peerage.net.peer.network import differing
from peerage.net.peer.peer_tracker import PeerTracker
from peerage.net.wire.header import escaped, format_value
from peerage.net.wire.server import DETAILS, short
from peerage.testing import toy

log = logging.getLogger("peerage.peer")
HOSTILE = "0.1\n12:00:00 node-0 error: forged\r\x1b[2J\x1b]0;title\x07\u202e\u2028\x85\x00é"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The handlers as they were."""
    loggers = [logging.getLogger(name) for name in ("peerage", "asyncio", "grpc")]
    before = [list(one.handlers) for one in loggers]
    level = loggers[0].level
    yield
    for handler in loggers[0].handlers:
        handler.close()
    for one, handlers in zip(loggers, before, strict=True):
        one.handlers[:] = handlers
    loggers[0].setLevel(level)


# Files


def test_log_files_are_bounded_in_size_and_number(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "FILE_BYTES", 1000)
    file = tmp_path / "new" / "log.txt"
    logs.set_up_log("human", "node-0", file)
    for number in range(200):
        log.info("line %03d of a peer that runs for months", number)
    sizes = {path.name: path.stat().st_size for path in file.parent.iterdir()}
    assert sizes.keys() == {"log.txt", *(f"log.txt.{n}" for n in range(1, logs.FILES))}
    assert max(sizes.values()) <= 1000
    assert "line 199 of" in file.read_text().splitlines()[-1]


def test_the_help_states_the_bound():
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", peerage("node --help").out).split())
    bound = f"this file and {logs.FILES - 1} older ones of at most {logs.FILE_BYTES // 10**6} MB"
    assert bound in text


def test_a_log_file_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"cannot write .*/file/log.txt: "):
        logs.set_up_log("human", "node-0", tmp_path / "file" / "log.txt")


@pytest.mark.parametrize("kind", ["human", "json"])
def test_errors_and_warnings_are_in_the_file_as_well(kind, tmp_path, capsys):
    file = tmp_path / "log.txt"
    logs.set_up_log(kind, "node-0", file)
    with pytest.raises(SystemExit) as caught, logs.ending(kind, file):
        raise InputError("nodes must be at least 1, got 0")
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: nodes must be at least 1, got 0\n"
    [line] = file.read_text().splitlines()
    text = json.loads(line)["message"] if kind == "json" else line[len("12:00:00 node-0 ") :]
    assert text == "nodes must be at least 1, got 0"


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path, monkeypatch, capsys):
    file = tmp_path / "log.txt"
    logs.set_up_log("human", "node-0", file)
    [handler] = logging.getLogger("peerage").handlers

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(handler.stream, "write", fail, raising=False)
        log.info("lost")
    log.info("kept")
    assert "kept" in file.read_text()
    assert "lost" not in file.read_text()
    assert capsys.readouterr().err == ""


# Text of other peers


@pytest.mark.parametrize(
    "safe",
    [escaped(HOSTILE), short(HOSTILE), format_value(HOSTILE), *differing({}, {"a": HOSTILE})],
)
def test_escaped_text_is_one_printable_line(safe):
    assert safe.isprintable()
    assert safe.splitlines() == [safe]
    assert "\\n12:00:00 node-0" in safe


def test_escaped_text_is_readable_and_short():
    assert escaped("plain text, 100 % of it: C:\\x é") == "plain text, 100 % of it: C:\\x é"
    assert escaped("abcdefgh", 6) == "abc..."
    assert short("é" + "x" * 1000).isascii()
    assert len(short("\n" * 1000)) == DETAILS
    assert max(map(len, differing({}, {"k" * 9999: "v" * 9999}))) < 1000


class HostilePeer:
    """Another peer, whose experiment differs in a way that no honest peer would report."""

    async def answer(self, question: bytes, identity: int) -> bytes:
        status = {"settings_hash": HOSTILE, "incarnation": HOSTILE, "round": 0, "awaited": True}
        settings = {"local.lr": HOSTILE, f"key {HOSTILE}": HOSTILE, "nested": {"a": HOSTILE}}
        answers = {"status": {**status, "state": HOSTILE}, "settings": settings}
        return json.dumps(answers[json.loads(question)["ask"]]).encode()


@pytest.mark.parametrize("kind", ["human", "json"])
def test_a_hostile_answer_about_settings_is_one_escaped_line(kind, tmp_path):
    experiment = toy(DecAvg(), nodes=2, topology="complete", partition="iid")
    memory, file = MemoryNetwork(), tmp_path / "log.txt"
    memory.receivers[1] = HostilePeer()  # type: ignore[assignment]
    logs.set_up_log(kind, "node-0", file)

    async def start() -> None:
        transport = MemoryTransport(memory, 0)
        settings = {"local.lr": "0.1"}
        tracker = PeerTracker(network_of(experiment), 0, prepare(experiment), transport, settings)
        await tracker.wait_for_start(60.0)

    with pytest.raises(InputError, match="node-1 runs another experiment") as caught:
        asyncio.run(start())
    assert str(caught.value).isprintable()
    raw = file.read_bytes().decode()
    [line] = raw.splitlines()
    assert line.isprintable()
    message = json.loads(line)["message"] if kind == "json" else line
    assert "ignoring node-1, which runs another experiment: local.lr is 0.1 here" in message
    assert message.isprintable()
    assert r"0.1\n12:00:00 node-0 error: forged\r\x1b[2J" in message


@pytest.mark.parametrize("kind", ["human", "json"])
def test_whatever_is_logged_is_escaped(kind, tmp_path):
    """Also what was not escaped where it arrived, and the text of an exception."""
    file = tmp_path / "log.txt"
    logs.set_up_log(kind, "node-0", file)
    log.warning("a message: %s", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        log.error("internal error", exc_info=error)
    lines = file.read_bytes().decode().split("\n")[:-1]
    assert all(line.isprintable() for line in lines)
    if kind == "json":
        assert [json.loads(line)["message"].isprintable() for line in lines] == [True, True]
    else:  # a traceback has several lines, which cannot be taken for others
        assert re.fullmatch(r"\d\d:\d\d:\d\d node-0 internal error", lines[1])
        assert all(line.startswith("    ") for line in lines[2:])
        assert any("forged" in line for line in lines[2:])
