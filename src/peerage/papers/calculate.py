"""Numerical models on all cores: each process calculates a share of the realisations."""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from peerage.files import disk_errors, write_json
from peerage.papers.study import Calculation, NumericalModel, beyond_defaults
from peerage.records.rows import Row, RunRecord
from peerage.workers import ENDED, Workers, cores

RESULT = "summary.json"  # the same name as in a run folder, for `read_status`


def calculate(folder: Path, job: Calculation, advance: Callable[[float, str], None]) -> None:
    """Calculate all realisations of a job, then write them into one file."""
    start = perf_counter()
    found: dict[int, dict[str, Any]] = {}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(realised(job.model, job.seeds, cores())) as results:
        for seed, result in results:
            found[seed] = result
            advance(len(found) / len(job.seeds), f"realisation {len(found)}/{len(job.seeds)}")
    content = {
        "status": "finished",
        "model": job.model.name,
        "settings": beyond_defaults(job.model),
        "seconds": perf_counter() - start,
        "realisations": [{"seed": seed, **found[seed]} for seed in job.seeds],
    }
    write_json(folder / RESULT, content)


def recorded(folder: Path) -> tuple[RunRecord, ...]:
    """Every realisation as a record, which tables and figures treat like a run."""
    saved = json.loads((folder / RESULT).read_text())
    summary = {"status": "finished", "algorithm": saved["model"], "seconds": saved["seconds"]}
    return tuple(
        RunRecord(
            folder=folder,
            experiment={**saved["settings"], "seed": one["seed"]},
            setup=one["setup"],
            summary=summary,
            environment={},
            network=rows(one["curves"]),
            nodes=(),
        )
        for one in saved["realisations"]
    )


def rows(curves: dict[str, list[float]]) -> tuple[Row, ...]:
    """One row per round from one list per curve."""
    return tuple(
        {"scope": "network", "round": number, **dict(zip(curves, values, strict=True))}
        for number, values in enumerate(zip(*curves.values(), strict=True))
    )


def realised(
    model: NumericalModel, seeds: Sequence[int], workers: int
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Seeds and their results, in order of arrival; closing it ends all processes."""
    workers = min(workers, len(seeds))
    if workers == 1:
        yield from ((seed, model.realise(seed)) for seed in seeds)
        return
    team = Workers(_work, [(model, seeds[number::workers]) for number in range(workers)])
    try:
        for _, message in team.receive(range(workers)):
            if message is not ENDED:
                yield message
    finally:
        team.close()


def _work(pipe: Connection, model: NumericalModel, seeds: Sequence[int]) -> None:
    for seed in seeds:
        pipe.send((True, (seed, model.realise(seed))))
