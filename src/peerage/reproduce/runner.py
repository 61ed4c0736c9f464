"""Runs the jobs of studies: skips what is finished, continues what was interrupted, shows all."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from peerage import checkpoint
from peerage.algorithms import ALGORITHMS
from peerage.data import PUBLISHED, Dataset, status
from peerage.data.datasets import DATASETS
from peerage.errors import (
    DataError,
    Diverged,
    InputError,
    Interrupted,
    did_you_mean,
)
from peerage.experiment import display_name
from peerage.prepare import load_dataset
from peerage.records import Row, RunRecord, disk_errors, read_status
from peerage.report.series import Series
from peerage.report.tables import percent
from peerage.reproduce.calibrate import Speeds
from peerage.reproduce.p0.studies import STUDIES as P0
from peerage.reproduce.study import Job, Place, Plan, Results, Study
from peerage.running import locked, resume, run

STUDIES: dict[str, Study] = {study.id: study for study in P0}


class Progress(Protocol):
    """Whoever wants to know how far the work has come."""

    def start(self, label: str, number: int, count: int, cost: float, *, done: float) -> None: ...
    def advance(self, share: float, detail: str) -> None: ...
    def finish(self) -> None: ...


@dataclass
class Outcome:
    """What became of the jobs."""

    done: int = 0
    skipped: int = 0  # were finished already
    diverged: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)  # data sets


def find(id: str) -> Study:
    if id not in STUDIES:
        raise InputError(f"unknown table or figure {id!r}; {did_you_mean(id, STUDIES)}")
    return STUDIES[id]


def jobs_of(study: Study, plan: Plan, only: Sequence[str] = ()) -> list[Job]:
    """The jobs of a study, of some methods only if these are named."""
    jobs = study.jobs(plan)
    wanted = {method for name in only for method in named(name, study, jobs)}
    return [job for job in jobs if not only or job.place[2] in wanted]


def named(name: str, study: Study, jobs: Sequence[Job]) -> set[str]:
    """The methods that a user means: by the paper's name, or all that run this algorithm."""
    methods = {job.place[2]: algorithm_of(job) for job in jobs}
    found = {method for method in methods if simplified(method) == simplified(name)}
    found = found or {method for method, algorithm in methods.items() if algorithm == name.lower()}
    if not found:
        known = {name.lower() for name in (*methods, *methods.values())}
        raise InputError(f"{study.id} has no method {name!r}; {did_you_mean(name.lower(), known)}")
    return found


def simplified(method: str) -> str:
    """Names as people type them: `decdiff-vt` for DecDiff(VT), `dechw*` for DecHW*."""
    return "".join(letter for letter in method.lower() if letter.isalnum() or letter == "*")


class Store:
    """A folder with one run folder per experiment, which all studies share."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def folder(self, job: Job) -> Path:
        return self.home / "runs" / job.folder

    def ended(self, job: Job) -> bool:
        """Whether the job's run has come to an end, also to a bad one."""
        return read_status(self.folder(job)) in ("finished", "diverged")

    def share_done(self, job: Job) -> float:
        """How much of an unfinished run an earlier process has left behind."""
        return (checkpoint.latest_round(self.folder(job)) or 0) / job.experiment.rounds

    def results(self, plan: Plan, jobs: Sequence[Job]) -> Results:
        found: dict[Place, list[RunRecord]] = {}
        algorithms: dict[Place, str] = {}
        for job in jobs:
            if self.ended(job):
                record = RunRecord.load(self.folder(job))
                found.setdefault(job.place, []).append(record)
                algorithms[job.place] = record.algorithm
        series = {
            place: Series(place[2], algorithms[place], tuple(records))
            for place, records in found.items()
        }
        return Results(plan, jobs, series)


def algorithm_of(job: Job) -> str:
    return display_name(job.experiment.algorithm, ALGORITHMS)


def dataset_of(job: Job) -> str:
    return display_name(job.experiment.dataset, DATASETS)


def lacking(jobs: Iterable[Job]) -> list[str]:
    """Data sets of the jobs that have to be fetched first."""
    names = dict.fromkeys(dataset_of(job) for job in jobs)
    return [name for name in names if PUBLISHED[name].files and status(name) != "ready"]


def carry_out(
    store: Store,
    jobs: Sequence[Job],
    progress: Callable[[list[float]], Progress],
    speeds: Speeds,
) -> Outcome:
    """Run what is left of the jobs; those whose data is missing are left out."""
    with disk_errors(store.home):
        (store.home / "runs").mkdir(parents=True, exist_ok=True)
    with locked(store.home):
        unique = list({job.folder: job for job in jobs}.values())
        left = [job for job in unique if not store.ended(job)]
        outcome = Outcome(skipped=len(unique) - len(left), lacking=lacking(left))
        left = [job for job in left if dataset_of(job) not in outcome.lacking]
        # Jobs on one data set together: it is loaded once.
        left.sort(key=lambda job: str(job.experiment.dataset))
        costs = [speeds.seconds(job) for job in left]
        shown = progress(costs)
        library = Library()
        for number, (job, cost) in enumerate(zip(left, costs, strict=True), start=1):
            shown.start(job.title, number, len(left), cost, done=store.share_done(job))
            try:
                _run(store.folder(job), job, library.get(job), shown)
                outcome.done += 1
            except Diverged:
                outcome.diverged.append(job.title)
            except (KeyboardInterrupt, Interrupted):
                raise Interrupted(
                    f"interrupted in run {number} of {len(left)}, {job.title}; give the same "
                    "command again to go on from its last round"
                ) from None
            shown.finish()
    return outcome


@dataclass
class Library:
    """The data set of the last job, which the next one usually shares."""

    spec: object = None
    loaded: Dataset | None = None

    def get(self, job: Job) -> Dataset:
        if self.loaded is None or self.spec != job.experiment.dataset:
            self.loaded = None  # before the next one needs the memory
            self.loaded = load_dataset(job.experiment)
            self.spec = job.experiment.dataset
        return self.loaded


def _run(folder: Path, job: Job, dataset: Dataset, shown: Progress) -> None:
    def watch(row: Row) -> None:
        judged = row.get("accuracy")
        accuracy = "" if judged is None else f", accuracy {percent(judged)}"
        rounds = job.experiment.rounds
        shown.advance(row["round"] / rounds, f"round {row['round']}/{rounds}{accuracy}")

    # A checkpoint in every round: an interruption costs one round at most.
    if (folder / "experiment.toml").exists():
        resume(folder, dataset=dataset, checkpoint_every=1, watch=watch)
    else:
        run(job.experiment, folder, dataset=dataset, checkpoint_every=1, watch=watch)
    # The records are what tables are made of; a finished run's checkpoints only fill the disk.
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def check_data(outcome: Outcome) -> None:
    """Say in the end what could not be run, and how it can."""
    if outcome.lacking:
        names = " ".join(outcome.lacking)
        raise DataError(
            f"runs on {names} were left out, as the data is not here; "
            f"get it with `peerage data get {names}`, then give this command again"
        )
