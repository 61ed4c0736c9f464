"""Does the jobs of studies: skips what is finished, continues what was interrupted, shows all."""

import runpy
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from peerage.data import PUBLISHED, Dataset, status
from peerage.engine.prepare import load_dataset
from peerage.errors import (
    DataError,
    Diverged,
    InputError,
    Interrupted,
    PeerageWarning,
    did_you_mean,
)
from peerage.files import disk_errors
from peerage.papers.calculate import calculate, recorded
from peerage.papers.calibrate import Speeds, mean_cost, parameters
from peerage.papers.p0.studies import STUDIES as P0
from peerage.papers.p2.studies import STUDIES as P2
from peerage.papers.p4.studies import STUDIES as P4
from peerage.papers.study import Calculation, Coordinates, Job, Plan, Results, Study, Training
from peerage.records import checkpoint
from peerage.records.rows import Row, RunRecord, read_status
from peerage.report.series import Series
from peerage.report.tables import percent
from peerage.runs.run import locked, resume, run

STUDIES: dict[str, Study] = {study.id: study for study in (*P0, *P2, *P4)}
DISK = 2e8  # bytes per second that are safely on the disk
SAVING = 0.1  # of a round at most, or checkpoints are written less often than in every round


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
    lacking: list[str] = field(default_factory=list)  # data sets that are missing


def register(study: Study) -> None:
    """Add a study from outside the package to those that `find` and the list know."""
    if STUDIES.setdefault(study.id, study) is not study:
        raise InputError(f"there is already a study {study.id!r}; give yours another id")


def find(id: str) -> Study:
    """The study with this id, or `file.py:NAME` for one that a Python file defines."""
    file, _, name = id.rpartition(":")
    if file.endswith(".py"):
        return load_study(Path(file).absolute(), name)
    if id not in STUDIES:
        raise InputError(f"unknown table or figure {id!r}; {did_you_mean(id, STUDIES)}")
    return STUDIES[id]


@cache
def load_study(path: Path, name: str) -> Study:
    """Register the study of this name from a Python file, which is run once."""
    if not path.is_file():
        raise InputError(f"study file {str(path)!r} does not exist; give the path of a file")
    try:
        defined = runpy.run_path(str(path))
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
    """The jobs of a study, or those of some methods, data sets, splits... if these are named.

    Names of one kind are alternatives, and those of several kinds must all fit.
    """
    jobs = study.jobs(plan)
    chosen: dict[str, set[Any]] = {}
    for name in only:
        coordinate, values = named(name, study, jobs)
        chosen.setdefault(coordinate, set()).update(values)
    return [
        job
        for job in jobs
        if all(getattr(job.place, coordinate) in chosen[coordinate] for coordinate in chosen)
    ]


def named(name: str, study: Study, jobs: Sequence[Job]) -> tuple[str, set[Any]]:
    """The coordinate of places that a user means, and which of its values.

    A method goes by the paper's name, or all that run this algorithm; the rest by its value.
    """
    methods = {job.place.method: job.algorithm for job in jobs}
    values: dict[str, set[Any]] = {"method": set()}  # these first
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
    """Names as people type them: `decdiff-vt` for DecDiff(VT), `dechw*` for DecHW*."""
    return "".join(letter for letter in method.lower() if letter.isalnum() or letter == "*")


class Store:
    """A folder with one folder per job, which all studies share."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def folder(self, job: Job) -> Path:
        return self.home / "runs" / job.folder

    def ended(self, job: Job) -> bool:
        """Whether the job has come to an end, also to a bad one."""
        return read_status(self.folder(job)) in ("finished", "diverged")

    def share_done(self, job: Job) -> float:
        """How much of an unfinished job an earlier process has left behind."""
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
    """Data sets of the jobs that have to be fetched first."""
    names = dict.fromkeys(job.dataset for job in jobs if job.dataset is not None)
    fetched = [name for name in names if name in PUBLISHED and PUBLISHED[name].files]
    return [name for name in fetched if status(name) != "ready"]


def run_jobs(
    store: Store,
    jobs: Sequence[Job],
    progress: Callable[[list[float]], Progress],
    speeds: Speeds,
) -> Outcome:
    """Do what is left of the jobs; those whose data is missing are left out."""
    with disk_errors(store.home):
        (store.home / "runs").mkdir(parents=True, exist_ok=True)
    with locked(store.home):
        unique = list({job.folder: job for job in jobs}.values())
        left = [job for job in unique if not store.ended(job)]
        outcome = Outcome(skipped=len(unique) - len(left), lacking=missing_datasets(left))
        left = [job for job in left if job.dataset not in outcome.lacking]
        left.sort(key=dataset_key)
        costs = [speeds.seconds(job) for job in left]
        known = [cost for cost in costs if cost is not None]
        usual = fmean(known) if known else 1.0  # for the bar, what is unknown is as long as others
        weights = [usual if cost is None else cost for cost in costs]
        shown = progress(weights)
        library = DatasetCache()
        for number, (job, cost) in enumerate(zip(left, costs, strict=True), start=1):
            done = store.share_done(job)
            shown.start(job.title, number, len(left), weights[number - 1], done=done)
            try:
                _run_job(store.folder(job), job, library, shown, cost)
                outcome.done += 1
            except Diverged:
                outcome.diverged.append(job.title)
            except (KeyboardInterrupt, Interrupted):
                kept = "its last round" if isinstance(job, Training) else "its beginning"
                raise Interrupted(
                    f"interrupted in run {number} of {len(left)}, {job.title}; give the same "
                    f"command again to go on from {kept}"
                ) from None
            shown.finish()
    return outcome


def dataset_key(job: Job) -> str:
    """Jobs on one data set are done together: it is loaded once."""
    return str(job.experiment.dataset) if isinstance(job, Training) else ""


@dataclass
class DatasetCache:
    """The data set of the last job, which the next one usually shares."""

    spec: object = None
    loaded: Dataset | None = None

    def get(self, job: Training) -> Dataset:
        if self.loaded is None or self.spec != job.experiment.dataset:
            self.loaded = None  # before the next one needs the memory
            self.loaded = load_dataset(job.experiment)
            self.spec = job.experiment.dataset
        return self.loaded


def _run_job(
    folder: Path, job: Job, library: DatasetCache, shown: Progress, cost: float | None
) -> None:
    if isinstance(job, Calculation):
        calculate(folder, job, shown.advance)
    elif isinstance(job, Training):
        _run(folder, job, library.get(job), shown, saved_every(job, cost))


def _run(folder: Path, job: Training, dataset: Dataset, shown: Progress, every: int | None) -> None:
    def watch(row: Row) -> None:
        judged = row.get("accuracy")
        accuracy = "" if judged is None else f", accuracy {percent(judged)}"
        rounds = job.experiment.rounds
        shown.advance(row["round"] / rounds, f"round {row['round']}/{rounds}{accuracy}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PeerageWarning)  # what a study asks for, it asks on purpose
        if (folder / "experiment.toml").exists():
            resume(folder, dataset=dataset, checkpoint_every=every, watch=watch)
        else:
            run(job.experiment, folder, dataset=dataset, checkpoint_every=every, watch=watch)
    # The records are what tables are made of; a finished run's checkpoints only fill the disk.
    shutil.rmtree(folder / "checkpoint", ignore_errors=True)


def saved_every(job: Training, seconds: float | None) -> int | None:
    """Rounds between checkpoints: 1, so that an interruption costs one round at most.

    If the models are so large and the rounds so short that saving would take much of the time,
    None: the run itself then finds out how often it can afford it. So it does if the time or the
    size is unknown.
    """
    cost = None if seconds is None else mean_cost(job.experiment)
    if seconds is None or cost is None:
        return None
    nodes = 1 if job.experiment.pooled else job.experiment.nodes
    size = 4 * nodes * parameters(job.experiment) * (1 + cost.state)  # bytes
    return 1 if size / DISK <= SAVING * seconds / job.experiment.rounds else None


def check_data(outcome: Outcome) -> None:
    """Say in the end what could not be run, and how it can."""
    if outcome.lacking:
        names = " ".join(outcome.lacking)
        raise DataError(
            f"runs on {names} were left out, as the data is not here; "
            f"get it with `peerage data get {names}`, then give this command again"
        )
