"""Runs the jobs of studies: skips finished ones and continues interrupted ones."""

import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from peerage import errors
from peerage.data import PUBLISHED, Dataset, status
from peerage.engine.prepare import load_dataset
from peerage.errors import InputError, Interrupted, did_you_mean
from peerage.experiment.outside import load_module
from peerage.files import disk_errors
from peerage.papers.calculate import calculate, recorded
from peerage.papers.calibrate import Speeds, mean_cost, parameters, training_nodes
from peerage.papers.p0.studies import STUDIES as P0
from peerage.papers.p1.studies import STUDIES as P1
from peerage.papers.p2.studies import STUDIES as P2
from peerage.papers.p3.studies import STUDIES as P3
from peerage.papers.p4.studies import STUDIES as P4
from peerage.papers.study import Calculation, Coordinates, Job, Plan, Results, Study, Training
from peerage.records import checkpoint
from peerage.records.rows import Row, RunRecord, read_status
from peerage.report.series import Series
from peerage.report.tables import percent
from peerage.runs.run import locked, resume, run

PAPER_STUDIES = {study.id: study for study in (*P0, *P1, *P2, *P3, *P4)}
STUDIES: dict[str, Study] = dict(PAPER_STUDIES)  # and those that users register
DISK_RATE = 2e8  # bytes per second, a cautious estimate
MAX_SAVING = 0.1  # share of a round; above it, not every round writes a checkpoint


class Progress(Protocol):
    """Shows how far the jobs are."""

    def start(self, label: str, number: int, count: int, cost: float, *, done: float) -> None: ...
    def advance(self, share: float, detail: str) -> None: ...
    def finish(self) -> None: ...


@dataclass
class Outcome:
    """How the jobs ended; `peerage reproduce --json` prints these fields."""

    done: int = 0
    skipped: int = 0  # finished earlier
    diverged: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)  # missing data sets


def register(study: Study) -> None:
    """Add a study from outside the package; `find` and --list then know it."""
    if STUDIES.setdefault(study.id, study) is not study:
        raise InputError(f"there is already a study {study.id!r}; choose another id")


def find(id: str) -> Study:
    """The study with this id, or the study NAME of a Python file for `file.py:NAME`."""
    file, _, name = id.rpartition(":")
    if file.endswith(".py"):
        return load_study(Path(file).absolute(), name)
    if id not in STUDIES:
        raise InputError(f"unknown table or figure {id!r}; {did_you_mean(id, STUDIES)}")
    return STUDIES[id]


@cache
def load_study(path: Path, name: str) -> Study:
    """Register the study of this name from a Python file, which is executed once."""
    if not path.is_file():
        raise InputError(f"study file {str(path)!r} does not exist; check the path")
    try:
        defined = vars(load_module(path, path.read_bytes()))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"study file {str(path)!r} cannot be loaded: {reason}") from error
    known = {key: value for key, value in defined.items() if isinstance(value, Study)}
    if name not in known:
        hint = did_you_mean(name, known) if known else "it defines no Study"
        raise InputError(f"{str(path)!r} has no study {name!r}; {hint}")
    study = replace(known[name], command=f"{path.name}:{name}")
    register(study)
    return study


def jobs_of(study: Study, plan: Plan, only: Sequence[str] = ()) -> list[Job]:
    """The jobs of a study; `only` selects by method, data set, split or another coordinate.

    Names of one coordinate are alternatives; a job must match every coordinate that is named.
    """
    jobs = study.jobs(plan)
    wanted: dict[str, set[Any]] = {}
    for name in only:
        coordinate, values = find_coordinate(name, study, jobs)
        wanted.setdefault(coordinate, set()).update(values)
    return [
        job
        for job in jobs
        if all(getattr(job.place, coordinate) in wanted[coordinate] for coordinate in wanted)
    ]


def find_coordinate(name: str, study: Study, jobs: Sequence[Job]) -> tuple[str, set[Any]]:
    """The coordinate that a user means, and which of its values.

    A method is found by the paper's name or by its algorithm, other coordinates by their value.
    """
    methods = {job.place.method: job.algorithm for job in jobs}
    values: dict[str, set[Any]] = {"method": set()}  # searched first
    for job in jobs:
        for coordinate, value in job.place._asdict().items():
            values.setdefault(coordinate, set()).add(value)
    word = simplified(name)
    for coordinate, members in values.items():
        found = {value for value in members if simplified(str(value)) == word != ""}
        if coordinate == "method" and not found:
            found = {method for method in methods if methods[method] == name.lower()}
        if found:
            return coordinate, found
    known = {str(value).lower() for members in values.values() for value in members} - {""}
    hint = did_you_mean(name.lower(), known | set(methods.values()))
    raise InputError(f"{study.id} has no method {name!r}; {hint}")


def simplified(method: str) -> str:
    """Letters, digits and stars in lower case, so that `decdiff-vt` finds DecDiff(VT)."""
    return "".join(letter for letter in method.lower() if letter.isalnum() or letter == "*")


@dataclass(frozen=True)
class Store:
    """A folder with one folder per job, shared by all studies."""

    home: Path

    def folder(self, job: Job) -> Path:
        return self.home / "runs" / job.folder

    def ended(self, job: Job) -> bool:
        """Whether the job has finished or diverged."""
        return read_status(self.folder(job)) in ("finished", "diverged")

    def share_done(self, job: Job) -> float:
        """The share of an unfinished job that an earlier process completed."""
        if not isinstance(job, Training):
            return 0.0
        return (checkpoint.latest_round(self.folder(job)) or 0) / job.experiment.rounds

    def records(self, job: Job) -> tuple[RunRecord, ...]:
        folder = self.folder(job)
        return recorded(folder) if isinstance(job, Calculation) else (RunRecord.load(folder),)

    def results(self, plan: Plan, jobs: Sequence[Job]) -> Results:
        found: dict[Coordinates, list[RunRecord]] = {}
        ended = [job for job in jobs if self.ended(job)]
        for job in ended:
            found.setdefault(job.place, []).extend(self.records(job))
        series = {
            place: Series(place.method, records[-1].algorithm, tuple(records))
            for place, records in found.items()
        }
        return Results(plan, jobs, series, len(ended))


def missing_datasets(jobs: Iterable[Job]) -> list[str]:
    """Data sets of the jobs that must be downloaded first."""
    names = dict.fromkeys(job.dataset for job in jobs if job.dataset is not None)
    downloads = [name for name in names if name in PUBLISHED and PUBLISHED[name].files]
    return [name for name in downloads if status(name) != "ready"]


def run_jobs(
    store: Store,
    jobs: Sequence[Job],
    progress: Callable[[list[float]], Progress],
    speeds: Speeds,
) -> Outcome:
    """Run the unfinished jobs; those whose data is missing are skipped."""
    with disk_errors(store.home):
        (store.home / "runs").mkdir(parents=True, exist_ok=True)
    with locked(store.home):
        unique = list({job.folder: job for job in jobs}.values())
        left = [job for job in unique if not store.ended(job)]
        outcome = Outcome(skipped=len(unique) - len(left), lacking=missing_datasets(left))
        left = [job for job in left if job.dataset not in outcome.lacking]
        # Jobs with the same data set follow each other, so that it is loaded once.
        left.sort(key=lambda job: str(job.experiment.dataset) if isinstance(job, Training) else "")
        costs = [speeds.seconds(job) for job in left]
        known = [cost for cost in costs if cost is not None]
        mean = fmean(known) if known else 1.0  # the progress bar needs a weight for every job
        weights = [mean if cost is None else cost for cost in costs]
        display = progress(weights)
        datasets = DatasetCache()
        for number, (job, cost) in enumerate(zip(left, costs, strict=True), start=1):
            done = store.share_done(job)
            display.start(job.title, number, len(left), weights[number - 1], done=done)
            try:
                _run_job(store.folder(job), job, datasets, display, cost)
                outcome.done += 1
            except errors.Diverged:
                outcome.diverged.append(job.title)
            except (KeyboardInterrupt, Interrupted):
                restart = "its last round" if isinstance(job, Training) else "its beginning"
                raise Interrupted(
                    f"interrupted in run {number} of {len(left)}, {job.title}; run the same "
                    f"command again to continue from {restart}"
                ) from None
            display.finish()
    return outcome


@dataclass
class DatasetCache:
    """Keeps the data set of the last job, because the next job usually needs it too."""

    spec: object = None
    loaded: Dataset | None = None

    def get(self, job: Training) -> Dataset:
        if self.loaded is None or self.spec != job.experiment.dataset:
            self.loaded = None  # frees its memory before the next one is loaded
            self.loaded = load_dataset(job.experiment)
            self.spec = job.experiment.dataset
        return self.loaded


def _run_job(
    folder: Path, job: Job, datasets: DatasetCache, display: Progress, cost: float | None
) -> None:
    if isinstance(job, Calculation):
        calculate(folder, job, display.advance)
        return
    rounds = job.experiment.rounds

    def watch(row: Row) -> None:
        value = row.get("accuracy")
        accuracy = "" if value is None else f", accuracy {percent(value)}"
        display.advance(row["round"] / rounds, f"round {row['round']}/{rounds}{accuracy}")

    dataset, every = datasets.get(job), checkpoint_interval(job, cost)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.PeerageWarning)  # the settings are chosen on purpose
        if (folder / "experiment.toml").exists():
            resume(folder, dataset=dataset, checkpoint_every=every, watch=watch)
        else:
            run(job.experiment, folder, dataset=dataset, checkpoint_every=every, watch=watch)
    # Tables need only the records; checkpoints of a finished run would fill the disk.
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def checkpoint_interval(job: Training, seconds: float | None) -> int | None:
    """Rounds between checkpoints: 1, so that an interruption loses at most one round.

    None, which leaves the interval to the run, if saving would take too much of a round, or if
    the time or the size is unknown.
    """
    cost = None if seconds is None else mean_cost(job.experiment)
    if seconds is None or cost is None:
        return None
    models = training_nodes(job.experiment)
    size = 4 * models * parameters(job.experiment) * (1 + cost.state)  # bytes
    return 1 if size / DISK_RATE <= MAX_SAVING * seconds / job.experiment.rounds else None


def check_data(outcome: Outcome) -> None:
    """Raise an error that names the missing data sets, if there are any."""
    if outcome.lacking:
        names = " ".join(outcome.lacking)
        raise errors.DataError(
            f"runs on {names} were skipped because the data is missing; "
            f"download it with `peerage data get {names}`, then run this command again"
        )
