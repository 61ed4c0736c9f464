"""Numerical models on all cores: forked processes that each take their share of realisations."""

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

RESULT = "summary.json"  # as a run has one, which tells how it stands


def calculate(folder: Path, job: Calculation, advance: Callable[[float, str], None]) -> None:
    """Calculate all realisations of a job, and write them down at once when the last is there."""
    start = perf_counter()
    found: dict[int, dict[str, Any]] = {}
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(realised(job.model, job.seeds, cores())) as answers:
        for seed, answer in answers:
            found[seed] = answer
            advance(len(found) / len(job.seeds), f"realisation {len(found)}/{len(job.seeds)}")
    result = {
        "status": "finished",
        "model": job.model.name,
        "settings": beyond_defaults(job.model),
        "seconds": perf_counter() - start,
        "realisations": [{"seed": seed, **found[seed]} for seed in job.seeds],
    }
    write_json(folder / RESULT, result)


def recorded(folder: Path) -> tuple[RunRecord, ...]:
    """Every realisation as a record, so that it is shown like a run."""
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
    found = []
    for number, values in enumerate(zip(*curves.values(), strict=True)):
        known = dict(zip(curves, values, strict=True))
        found.append({"scope": "network", "round": number, **known})
    return tuple(found)


def realised(
    model: NumericalModel, seeds: Sequence[int], workers: int
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Seeds and what came out for them, in the order of coming; closing it ends all processes."""
    workers = min(workers, len(seeds))
    if workers == 1:
        yield from ((seed, model.realise(seed)) for seed in seeds)
        return
    team = Workers(_work, [(model, seeds[number::workers]) for number in range(workers)])
    try:
        for _, answer in team.receive(range(workers)):
            if answer is not ENDED:
                yield answer
    finally:
        team.close()


def _work(pipe: Connection, model: NumericalModel, seeds: Sequence[int]) -> None:
    """One realisation after the other."""
    for seed in seeds:
        pipe.send((True, (seed, model.realise(seed))))
