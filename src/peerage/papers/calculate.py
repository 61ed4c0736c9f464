"""Numerical models on all cores: forked processes that each take their share of realisations."""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch

from peerage.errors import PeerageError, WorkerDied
from peerage.files import disk_errors, write_json
from peerage.papers.study import Calculation, NumericalModel, beyond_defaults
from peerage.records.rows import Row, RunRecord

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


def cores() -> int:
    return len(os.sched_getaffinity(0))


def realised(
    model: NumericalModel, seeds: Sequence[int], workers: int
) -> Generator[tuple[int, dict[str, Any]], None, None]:
    """Seeds and what came out for them, in the order of coming; closing it ends all processes."""
    workers = min(workers, len(seeds))
    if workers == 1:
        yield from ((seed, model.realise(seed)) for seed in seeds)
        return
    context = multiprocessing.get_context("fork")
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for number in range(workers):
            ours, theirs = context.Pipe(duplex=False)
            share = seeds[number::workers]
            arguments = (model, share, theirs, [*pipes, ours])
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield from _gather(pipes, len(seeds))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def _gather(pipes: Sequence[Connection], count: int) -> Iterator[tuple[int, dict[str, Any]]]:
    talking, came = list(pipes), 0
    while talking:
        for pipe in cast(list[Connection], wait(talking)):
            try:
                answer = pipe.recv()
            except EOFError:  # this one is through with its share, or dead
                talking.remove(pipe)
                continue
            if isinstance(answer, Exception):
                raise answer
            came += 1
            yield answer
    if came < count:
        raise WorkerDied("a process that calculated was killed, perhaps for lack of memory")


def _work(
    model: NumericalModel, seeds: Sequence[int], pipe: Connection, inherited: Sequence[Connection]
) -> None:
    """The life of a process: one realisation after the other, as long as somebody listens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in inherited:
        other.close()  # or nobody would notice that the parent has died
    torch.set_num_threads(1)
    with suppress(BrokenPipeError):
        try:
            for seed in seeds:
                pipe.send((seed, model.realise(seed)))
        except PeerageError as error:
            pipe.send(error)
        except BrokenPipeError:
            raise
        except Exception as error:
            pipe.send(RuntimeError("".join(traceback.format_exception(error))))
