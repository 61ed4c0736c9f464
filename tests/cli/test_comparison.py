"""`peerage compare` that is interrupted, and continued by the same command."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from support.command_line import TINY, error_line, peerage, start
from support.processes import TIMEOUT, until

from peerage.cli.comparison import FILE
from peerage.errors import InputError
from peerage.records.rows import RunRecord, read_status
from peerage.runs import run as running

pytestmark = pytest.mark.slow  # several runs each
LINE = f"compare {TINY} --engine serial --rounds 4 --checkpoint-every 1"
THREE = f"{LINE} --algorithms decavg,dechw,local"
NAMES = ("1-decavg", "2-dechw", "3-local")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def interrupted(algorithm: str, round: int) -> Iterator[None]:
    """Press Ctrl-C when an algorithm has finished a round."""
    call = running.call

    def press(watch: Any, row: Any, engine: Any) -> bool:
        stop = call(watch, row, engine)
        if type(engine.world.algorithm).__name__ == algorithm and row["round"] == round:
            raise KeyboardInterrupt
        return stop

    with mock.patch.object(running, "call", press):
        yield


def digests(folder: Path) -> list[str]:
    return [RunRecord.load(folder / name).summary["digest"] for name in NAMES]


@pytest.mark.parametrize("out", ["--out here", ""])
def test_an_interrupted_comparison_reports_and_is_continued(out: str) -> None:
    with interrupted("DecHW", 3):
        stopped = peerage(f"{THREE} {out}")
    assert stopped.code == 130
    assert stopped.err.splitlines()[-1] == (
        "error: interrupted in run 2 of 3, 2-dechw; run the same command again to continue"
    )
    (report,) = Path().rglob("report.html")
    folder = report.parent
    assert stopped.lines[-1] == f"Report: {report}"
    assert "3 of 4, interrupted" in stopped.out
    assert "Local" not in stopped.out
    first = (folder / "1-decavg" / "metrics.jsonl").stat().st_mtime_ns

    done = peerage(f"{THREE} {out}")
    assert done.code == 0, done.err
    assert f"continuing the comparison in {folder}, 1 of 3 runs finished" in done.err
    assert [read_status(folder / name) for name in NAMES] == ["finished"] * 3
    assert (folder / "1-decavg" / "metrics.jsonl").stat().st_mtime_ns == first  # not run again
    assert "Local" in done.out
    peerage(f"{THREE} --out whole")
    assert digests(folder) == digests(Path("whole"))


def test_a_finished_comparison_is_not_repeated_in_its_folder() -> None:
    first = json.loads(peerage(f"{THREE} --out here --json").out)
    assert json.loads(peerage(f"{THREE} --out here --json").out) == first
    peerage(f"{LINE} --algorithms local")
    peerage(f"{LINE} --algorithms local")
    assert len(list(Path("runs").iterdir())) == 2  # without --out, it is


def test_another_comparison_is_not_continued() -> None:
    with interrupted("DecHW", 1):
        peerage(f"{THREE} --out here")
        message = error_line(peerage(f"{THREE} --seed 1 --out here"))
        assert message.endswith("holds a comparison with other settings; choose another --out")
        peerage(f"{THREE}")
        peerage(f"{THREE} --seed 1")
    assert len(list(Path("runs").iterdir())) == 2


def test_a_comparison_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise InputError("no data")

    monkeypatch.setattr(running, "prepare", fail)
    assert error_line(peerage(THREE)) == "no data"
    assert not Path("runs").exists()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(home: Path) -> None:
    line = f"compare {TINY} --engine serial --rounds 100000 --algorithms local --out here"
    process = start(line, cwd=home)
    metrics = home / "here" / "1-local" / "metrics.jsonl"
    until(lambda: metrics.exists() and b'"network"' in metrics.read_bytes(), "a round")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert "Report: here/report.html" in out
    assert "run the same command again to continue" in err
    assert (home / "here" / FILE).exists()


def test_the_folder_of_a_comparison_stands_for_its_runs() -> None:
    with interrupted("Local", 2):
        peerage(f"{THREE} --out here")
    shown = peerage("report here --out again.md")
    assert shown.code == 0
    text = Path("again.md").read_text()
    assert all(name in text for name in ("DecAvg", "DecHW", "Local"))
    one_by_one = " ".join(f"here/{name}" for name in NAMES)
    peerage(f"report {one_by_one} --out each.md")
    assert Path("each.md").read_text() == text
    assert peerage("plot accuracy here --out a.svg").code == 0
    assert peerage("log here --to tensorboard --json").code == 0


def test_a_comparison_without_a_round_has_no_report() -> None:
    Path("here").mkdir()
    (Path("here") / FILE).write_text('{"runs": {"1-decavg": "0"}}')
    assert error_line(peerage("report here")) == (
        "the comparison 'here' has no recorded round yet; run it again"
    )
