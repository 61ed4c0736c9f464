"""The list of all studies: data, runs, time and what is already done."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from peerage.display import counted
from peerage.papers.calibrate import Speeds
from peerage.papers.runner import Store, missing_datasets
from peerage.papers.study import Job, Plan, Study


def entries(
    studies: Sequence[Study], store: Store, plan: Plan, speeds: Speeds, *, quiet: bool = False
) -> list[dict[str, Any]]:
    """One row per study; `hours_left` counts only unfinished runs.

    Both hours are None if the duration of a run is unknown.
    """
    rows = []
    wanted = {study.id: list({j.folder: j for j in study.jobs(plan)}.values()) for study in studies}
    # One call for all studies: checking a data set reads every byte of it.
    missing = missing_datasets(job for jobs in wanted.values() for job in jobs)
    for study in counted(studies, "estimating times", len(studies), quiet=quiet):
        jobs = wanted[study.id]
        left = [job for job in jobs if not store.ended(job)]
        data = list(dict.fromkeys(job.dataset for job in jobs if job.dataset is not None))
        rows.append(
            {
                "id": study.id,
                "title": study.title,
                "data": data,
                "lacking": [name for name in data if name in missing],
                "runs": len(jobs),
                "done": len(jobs) - len(left),
                "hours": total_hours(speeds, jobs),
                "hours_left": total_hours(speeds, left),
            }
        )
    return rows


def total_hours(speeds: Speeds, jobs: Sequence[Job]) -> float | None:
    seconds = [speeds.seconds(job) for job in jobs]
    known = [second for second in seconds if second is not None]
    return sum(known) / 3600 if len(known) == len(jobs) else None


def rich_list(rows: Sequence[dict[str, Any]], scale: str) -> Table:
    table = Table(
        title=f"Tables and figures at scale {scale}",
        caption="Times are estimates for this machine. Studies share runs, so one shortens "
        "another. Download missing data with `peerage data get NAME`.",
        header_style="bold",
    )
    table.add_column("id", no_wrap=True)
    table.add_column("what it is")
    table.add_column("data")
    table.add_column("runs done", justify="right")
    table.add_column("time left", justify="right", no_wrap=True)
    for row in rows:
        data = [f"{name} (missing)" if name in row["lacking"] else name for name in row["data"]]
        done = f"{row['done']} of {row['runs']}"
        left = hours(row["hours_left"]) if row["done"] < row["runs"] else "done"
        table.add_row(row["id"], Text(row["title"]), ", ".join(data) or "none", done, left)
    return table


def hours(value: float | None) -> str:
    """About two digits in seconds, minutes, hours or days.

    >>> hours(0.001), hours(0.25), hours(12.3), hours(100), hours(8200)
    ('4 s', '15 min', '12 h', '4.2 days', '342 days')
    """
    if value is None:
        return "unknown"
    if value < 1 / 60:
        return f"{max(1, round(3600 * value))} s"
    if value < 1:
        return f"{round(60 * value)} min"
    if value < 72:
        return f"{value:.2g} h"
    return f"{value / 24:.{int(value < 240)}f} days"
