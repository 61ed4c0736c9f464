"""Runs that the dashboard starts are processes that can be stopped and resumed, also later."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

import pytest
from support.dashboards import dashboard, make_run
from support.processes import TIMEOUT

from peerage.errors import InputError
from peerage.records.rows import read_status
from peerage.ui.jobs import Jobs, begin_of
from peerage.ui.metrics import last_row

SMALL = "--nodes=3 --topology=ring --model=logistic --epochs=1 --batch-size=200 --engine=serial"


def wait_for(happened: Callable[[], object]) -> None:
    end = monotonic() + TIMEOUT
    while not happened():
        assert monotonic() < end, "it did not happen"
        sleep(0.05)


@pytest.mark.slow
def test_a_run_is_started_stopped_and_resumed_by_another_dashboard(tmp_path: Path) -> None:
    first = Jobs(tmp_path)
    path = first.start([*SMALL.split(), "--rounds=100000"], "small")
    metrics = tmp_path / path / "metrics.jsonl"
    assert (first.is_alive(path), first.waiting()[0]["status"]) == (True, "running")
    wait_for(lambda: last_row(metrics).get("round", 0) > 2)
    second = Jobs(tmp_path)  # as if the dashboard had been started again
    assert second.is_alive(path)
    with pytest.raises(InputError, match="is running already"):
        second.resume(path)
    second.stop(path)
    wait_for(lambda: not first.is_alive(path))
    assert read_status(tmp_path / path) == "interrupted"
    assert "peerage resume" in second.log(path).read_text()
    done = last_row(metrics)["round"]
    second.resume(path)
    wait_for(lambda: last_row(metrics).get("round", 0) > done)
    second.stop(path)
    wait_for(lambda: not second.is_alive(path))


@pytest.mark.slow
def test_a_run_that_cannot_start_says_why(tmp_path: Path) -> None:
    jobs = dashboard(tmp_path).jobs
    path = jobs.start(["--nodes=4", "--topology=er:p=0"], "bad")
    wait_for(lambda: not jobs.is_alive(path))
    (found,) = jobs.waiting()
    assert (found["path"], found["status"]) == (path, "failed")
    assert "er" in found["message"] or "connected" in found["message"]


def test_another_process_with_the_same_number_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, "run", status="running")
    (tmp_path / ".ui").mkdir()
    file = tmp_path / ".ui" / "run.json"
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    for facts in ({"pid": os.getpid(), "began": "0"}, {"pid": "x"}, {}, {"pid": 0, "began": ""}):
        file.write_text(json.dumps(facts))
        with pytest.raises(InputError, match="stop it where it was started"):
            Jobs(tmp_path).stop("run")
    file.write_text(json.dumps({"pid": os.getpid(), "began": begin_of(os.getpid())}))
    Jobs(tmp_path).stop("run")
    assert signalled == [(os.getpid(), signal.SIGINT)]
