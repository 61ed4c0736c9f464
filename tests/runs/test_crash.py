"""Killed processes leave nothing behind, and their runs resume with the same result."""

import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.command_line import error_line, peerage, start
from support.processes import TIMEOUT, gone, until

import peerage as pg
from peerage.records.rows import RunRecord, read_metrics
from peerage.runs import run as running_module
from peerage.runs.run import locked
from peerage.runs.verify import OF_ENGINE

pytestmark = pytest.mark.slow  # processes that are killed

ROUNDS = 120  # enough that a signal finds the run on its way, also on a busy machine
SETTINGS = "--nodes 8 --topology ring --epochs 1 --partition dirichlet:alpha=1"


def experiment(**changes: Any) -> pg.Experiment:
    """The same as SETTINGS."""
    settings: dict[str, Any] = {
        "nodes": 8,
        "topology": "ring",
        "local": {"epochs": 1},
        "partition": "dirichlet:alpha=1",
        "rounds": ROUNDS,
    }
    return pg.Experiment(**settings | changes)


@pytest.fixture(scope="module")
def through() -> pg.Result:
    """The same run without an interruption."""
    return pg.run(experiment())


def rounds_of(folder: Path) -> int:
    """How many rounds the metrics hold so far."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return -1
    return max((row["round"] for row in read_metrics(path)), default=-1)


def shared_memory() -> set[str]:
    """What torch and Python leave there when they forget to clean up."""
    names = {path.name for path in Path("/dev/shm").glob("*")}
    return {name for name in names if name.startswith(("psm_", "torch_"))}


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A process in the middle of a run, and its workers."""
    line = f"run {SETTINGS} --rounds {ROUNDS} --workers 2 --checkpoint-every 2 --out"
    process = start(line, folder, cwd=folder.parent)
    try:
        until(lambda: rounds_of(folder) >= 4 or process.poll() is not None, "round 4 was over")
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 2
        yield process, workers
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def resume(folder: Path, options: str, through: pg.Result) -> None:
    """Go on from the command line; the result is that of the run that was not interrupted."""
    before = RunRecord.load(folder)
    assert before.status != "finished"
    assert before.rounds < ROUNDS
    done = peerage(f"resume --json {options}", folder)
    assert done.code == 0, done.err
    assert json.loads(done.lines[-1])["digest"] == through.digest
    rows = read_metrics(folder / "metrics.jsonl")
    assert without_time(rows) == without_time(through.rows)
    assert [path for path in folder.rglob("*") if path.name.startswith(".round")] == []


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in OF_ENGINE} for row in rows]


def last_line(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=TIMEOUT)
    assert out == ""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_worker_that_is_killed_ends_the_run(tmp_path: Path, through: pg.Result) -> None:
    before = shared_memory()
    with running(tmp_path / "run") as (process, workers):
        victim = workers[1]
        victim.kill()
        line = last_line(process)
        assert process.returncode == 1
        assert line.startswith(f"error: worker 1 (process {victim.pid}) was killed by signal 9")
        assert "the last checkpoint is of round " in line
        assert f"continue with `peerage resume {tmp_path / 'run'}`" in line
        assert gone(workers)
    assert shared_memory() <= before
    record = RunRecord.load(tmp_path / "run")
    assert record.status == "failed"
    assert line.endswith(record.summary["message"])
    resume(tmp_path / "run", "--engine serial", through)


@pytest.mark.parametrize(
    ("number", "group", "options"),
    [(signal.SIGINT, True, "--workers 1"), (signal.SIGTERM, False, "--workers 3")],
    ids=["Ctrl-C", "SIGTERM"],
)
def test_an_interrupted_run_can_be_resumed(
    number: signal.Signals, group: bool, options: str, tmp_path: Path, through: pg.Result
) -> None:
    before = shared_memory()
    with running(tmp_path / "run") as (process, workers):
        if group:  # what a terminal does
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        line = last_line(process)
        assert process.returncode == 130
        assert line.startswith("error: interrupted in round ")
        assert "the last checkpoint is of round " in line
        assert f"continue with `peerage resume {tmp_path / 'run'}`" in line
        assert gone(workers)
    assert shared_memory() <= before
    assert RunRecord.load(tmp_path / "run").status == "interrupted"
    resume(tmp_path / "run", options, through)


def test_workers_do_not_outlive_a_run_that_is_killed(tmp_path: Path, through: pg.Result) -> None:
    before = shared_memory()
    with running(tmp_path / "run") as (process, workers):
        error = error_line(peerage("resume", tmp_path / "run"))
        assert error == f"another process is working in {tmp_path / 'run'}; wait for it"
        taken = error_line(peerage(f"run {SETTINGS} --out", tmp_path / "run"))
        assert "already holds a run" in taken
        process.kill()
        process.wait()
        until(lambda: gone(workers), "the workers were gone")
    assert shared_memory() <= before
    assert RunRecord.load(tmp_path / "run").status == "running"  # it had no time to say more
    resume(tmp_path / "run", "", through)


def test_a_lock_that_is_about_to_go_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that a killed run has just started still hold its lock, and end at once."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > running_module.ENDING / 2:
            worker.close()

    monkeypatch.setattr(running_module, "monotonic", lambda: now[0])
    monkeypatch.setattr(running_module, "sleep", sleep)
    with ExitStack() as worker:
        worker.enter_context(locked(tmp_path))
        with locked(tmp_path):
            pass
    assert now[0] > 0


AT_ONCE = 20  # rounds between two kills at most, however late they come


def work_on(folder: Path, small: pg.Experiment) -> None:
    torch.set_num_threads(1)  # a forked process must not use the threads that its parent had
    first = max(rounds_of(folder), 0)

    def watch(row: dict[str, Any]) -> None:
        if row["round"] > first + AT_ONCE:
            signal.pause()  # until it is killed

    if (folder / "experiment.toml").exists():
        pg.resume(folder, checkpoint_every=1, watch=watch)
    else:
        pg.run(small, folder, checkpoint_every=1, watch=watch)


def work_until_killed(folder: Path, small: pg.Experiment, seconds: float) -> None:
    """Work in a process that is killed so many seconds after it has locked the folder."""
    before = rounds_of(folder)
    child = multiprocessing.get_context("fork").Process(target=work_on, args=(folder, small))
    child.start()
    assert child.pid is not None
    try:
        until(lambda: rounds_of(folder) != before or not child.is_alive(), "the run went on")
        time.sleep(seconds)
        workers = psutil.Process(child.pid).children(recursive=True) if child.is_alive() else []
    finally:
        child.kill()
        child.join()
    assert child.exitcode in (-signal.SIGKILL, 0)
    until(lambda: gone(workers), "the workers were gone")


def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end(tmp_path: Path) -> None:
    """Rounds take a moment and every one is saved, so that most kills hit a checkpoint."""
    small = experiment(model="logistic", nodes=4, rounds=100, engine={"name": "pool", "workers": 2})
    folder = tmp_path / "run"
    chance = random.Random(0)
    kills = 0
    while kills < 10 and (kills == 0 or RunRecord.load(folder).status != "finished"):
        work_until_killed(folder, small, chance.uniform(0.0, 0.1))
        kills += 1
    assert kills > 3
    if RunRecord.load(folder).status != "finished":
        pg.resume(folder, checkpoint_every=50)
    reference = pg.run(small)
    assert RunRecord.load(folder).summary["digest"] == reference.digest
    assert without_time(read_metrics(folder / "metrics.jsonl")) == without_time(reference.rows)
