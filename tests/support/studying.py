"""Helpers for the tests of the papers' studies: they run jobs without progress bars."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.command_line import peerage

from peerage.errors import Interrupted
from peerage.papers import runner
from peerage.papers.calibrate import Speeds
from peerage.papers.study import Job, Plan, Study

SMOKE, PAPER = Plan("smoke"), Plan("paper")


def jobs_of(id: str, plan: Plan = PAPER) -> list[Any]:
    return runner.STUDIES[id].jobs(plan)


class Silent:
    """A progress display that prints nothing and may interrupt the work at a given detail."""

    def __init__(self, stop_at: str = "") -> None:
        self.stop_at = stop_at
        self.started: list[tuple[str, float]] = []
        self.details: list[str] = []

    def __call__(self, costs: list[float]) -> "Silent":
        return self

    def start(self, label: str, number: int, count: int, cost: float, *, done: float) -> None:
        self.started.append((label, done))

    def advance(self, share: float, detail: str) -> None:
        self.details.append(detail)
        if self.stop_at and detail.startswith(self.stop_at):
            raise Interrupted("by the test")

    def finish(self) -> None:
        pass


def run_jobs(home: Path, jobs: list[Job], watcher: Silent | None = None) -> runner.Outcome:
    return runner.run_jobs(runner.Store(home), jobs, watcher or Silent(), Speeds())


def check_titles(studies: Sequence[Study], paper: str, own: Sequence[str]) -> None:
    """Titles of studies that are not in the paper begin so, and no others; claims have no stop."""
    for study in studies:
        is_own = study.id.removeprefix(f"{paper}-") in own
        assert study.title.startswith("Not in the paper: ") == is_own
        assert study.claim[-1] not in ".?"


def run_at_smoke(id: str, home: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the page of a study at smoke scale, all of whose runs have finished."""
    files = smoke_files(id, home)
    assert [path.suffix for path in files] == [".md", ".csv", ".json", ".png", ".svg"]
    saved = json.loads(files[2].read_text())
    assert {run["status"] for run in saved["runs"]} == {"finished"}
    assert len(saved["runs"]) == len(jobs_of(id, SMOKE))
    return saved, files[0].read_text()


def smoke_files(id: str, home: Path) -> list[Path]:
    """What the command writes for a study at smoke scale, none of whose runs may be missing."""
    outcome = peerage(f"reproduce {id} --scale smoke --json --out", home)
    assert outcome.code == 0, outcome.err
    last = json.loads(outcome.lines[-1])
    assert last["lacking"] == last["diverged"] == []
    return [Path(name) for name in last["files"]]
