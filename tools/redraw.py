"""Draw the figures of committed results again, from their JSON.

    python tools/redraw.py docs/results/p2/p2-fig3-paper-standard.json ...

For a change of how a figure looks, when the runs behind it are gone. The JSON files have the curves
over seeds and the last accuracy of each run, which suffice for studies that show nothing else. What
a figure shows of the data, such as the labels of each client in p2-fig8, is computed again from the
experiment; its data set must be in the cache.

The tables are computed as well, and must equal those of the page: this shows that the figure
belongs to the same runs. Only the PNG file is written.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from peerage.engine.prepare import prepare
from peerage.papers.runner import PAPER_STUDIES, jobs_of
from peerage.papers.study import Job, Plan, Results, Study, StudyOutput, Training
from peerage.papers.write import save_figure
from peerage.records.rows import RunRecord
from peerage.report.series import Curve, Series


@dataclass(frozen=True)
class StoredSeries:
    """The part of `Series` that a JSON file of results can answer."""

    job: Training  # of the first seed
    curves: dict[str, Any]
    last: Sequence[float]  # accuracy of each seed in the last round

    @property
    def seeds(self) -> int:
        return len(self.last)

    def rounds(self, key: str = "accuracy") -> list[int]:
        return self.curve(key).rounds

    def curve(self, key: str) -> Curve:
        points = zip(
            self.curves["rounds"], self.curves[key], self.curves[f"{key}_std"], strict=True
        )
        known = [point for point in points if point[1] is not None]
        return Curve([r for r, _, _ in known], [m for _, m, _ in known], [s for *_, s in known])

    def at(self, round: int) -> list[float]:
        if round != self.curves["rounds"][-1]:
            sys.exit(f"{self.job.title}: only the last round has values of single seeds")
        return list(self.last)

    @cached_property
    def records(self) -> tuple[RunRecord]:
        """A record without rows: facts about the data and the graph only."""
        experiment = self.job.experiment
        tables = {"experiment": experiment.table(), "summary": {}, "environment": {}}
        setup = prepare(experiment).setup
        return (RunRecord.of_rows(Path(), (), saved=False, setup=setup, **tables),)


def stored_results(study: Study, stored: dict[str, Any]) -> Results:
    """The results of a study, from its JSON file."""
    seeds = 1 + max(run["seed"] for run in stored["runs"])
    inputs = stored.get("inputs", "paper")
    plan = Plan(stored["scale"], seeds, stored["fidelity"], inputs)
    jobs = jobs_of(study, plan)
    ended = [run for run in stored["runs"] if run["status"] != "open"]
    series = {}
    for curves in stored["curves"]:
        job = next(job for job in jobs if _matches(job, curves) and isinstance(job, Training))
        last = [run["accuracy"] for run in ended if _matches(job, run)]
        series[job.place] = cast(Series, StoredSeries(job, curves, last))
    return Results(plan, jobs, series, len(ended))


def _matches(job: Job, row: dict[str, Any]) -> bool:
    return all(row[name] == value for name, value in job.place._asdict().items())


def redraw(path: Path) -> StudyOutput:
    """Draw the figure beside a JSON file, and return all that the study shows."""
    stored = json.loads(path.read_text())
    study = PAPER_STUDIES[stored["id"]]
    shown = study.show(stored_results(study, stored))
    page = path.with_suffix(".md").read_text()
    for table in shown.tables:
        if table.markdown() not in page:
            sys.exit(f"{path}: the table {table.title!r} differs from that of its page")
    save_figure(shown.figure, path.with_suffix(".png"))
    return shown


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        redraw(Path(name))
