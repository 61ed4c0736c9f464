"""What a table or a figure of a paper is to us: the jobs behind it, and how to show them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, Protocol, cast

from matplotlib.figure import Figure

from peerage import specs
from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import DATASETS
from peerage.data.partition import PARTITIONS, Dirichlet
from peerage.errors import InputError
from peerage.experiment.experiment import Experiment, display_name
from peerage.experiment.identity import run_key
from peerage.experiment.toml import merged
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.report.series import Series

Scale = Literal["smoke", "small", "paper"]  # seconds, minutes, the published setting
Fidelity = Literal["paper", "code"]  # as the paper is written, or as its authors' scripts run

TITLES = {
    "mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10", "femnist": "FEMNIST",
}  # fmt: skip

# At scale smoke: nothing to fetch, and runs that tables share.
DIGITS, SMALL_MODEL, SMOKE_RATE = "digits", "digits-mlp", 0.05
SMOKE_NOTE = (
    "A trial of the machinery: tiny networks; where there is training, scikit-learn's digits and a "
    "small model stand in for all data and models."
)


@dataclass(frozen=True)
class Plan:
    """How much of a study to run."""

    scale: Scale = "small"
    seeds: int | None = None  # as many as the scale has by default
    fidelity: Fidelity = "paper"

    def __post_init__(self) -> None:
        specs.check_choices(self)
        if self.seeds is not None and self.seeds < 1:
            raise InputError(f"seeds must be at least 1, got {self.seeds}")

    def seed_range(self, default: int) -> range:
        """The seeds that were asked for, or as many as the scale has by default."""
        return range(self.seeds or default)


def plan_of(scale: str, seeds: int | None, fidelity: str) -> Plan:
    """A plan from text that may be misspelt."""
    return Plan(cast(Scale, scale), seeds, cast(Fidelity, fidelity))


def built(plan: Plan, settings: Mapping[str, Any], stand_in: str = SMALL_MODEL) -> Experiment:
    """The experiment of these settings; at scale smoke with other data, and `stand_in` as model."""
    if plan.scale == "smoke":
        smoke = {"dataset": DIGITS, "model": stand_in, "engine": {"name": "serial"}}
        settings = merged(settings, smoke)
    return Experiment(**settings)


def with_options(name: str, **options: Any) -> str:
    """A name with more options, without those that are None.

    >>> with_options("mnist", train=2000), with_options("hwa:scope=all", clients=10)
    ('mnist:train=2000', 'hwa:scope=all,clients=10')
    """
    added = ",".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return name + ("," if ":" in name else ":") + added if added else name


class Coordinates(Hashable, Protocol):
    """Where a job belongs in tables and figures: a named tuple of the paper's own coordinates."""

    @property
    def method(self) -> str: ...  # what `--only` chooses
    @property
    def title(self) -> str: ...  # all coordinates in a few words
    def _asdict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Job(ABC):
    """A piece of work that is done once, kept in a folder of its own and shared by all studies."""

    place: Coordinates

    @property
    @abstractmethod
    def title(self) -> str: ...

    @property
    @abstractmethod
    def folder(self) -> str:
        """Equal work has an equal folder, whichever tables it belongs to."""

    @property
    @abstractmethod
    def algorithm(self) -> str: ...

    @property
    @abstractmethod
    def dataset(self) -> str | None:
        """The data set that has to be there first, if any."""


@dataclass(frozen=True)
class Training(Job):
    """One run of an experiment."""

    experiment: Experiment

    @property
    def title(self) -> str:
        return f"{self.place.title}, seed {self.experiment.seed}"

    @cached_property
    def folder(self) -> str:
        # At smoke scale one data set stands in for all: the name must not tell them apart.
        words = [self.dataset, split_name(self.experiment.partition), self.algorithm]
        return "-".join(
            [*words, f"seed{self.experiment.seed}", short_hash(run_key(self.experiment))]
        )

    @property
    def algorithm(self) -> str:
        return display_name(self.experiment.algorithm, ALGORITHMS)

    @property
    def dataset(self) -> str:
        return display_name(self.experiment.dataset, DATASETS)


class NumericalModel(Protocol):
    """What is calculated instead of trained: a frozen dataclass of its settings.

    One that needs data tells the name of the data set as `dataset`.
    """

    @property
    def name(self) -> str: ...

    @property
    def products(self) -> float:
        """About how many multiplications one realisation takes."""

    def realise(self, seed: int) -> dict[str, Any]:
        """Plain values: `setup` once, and every entry of `curves` round by round."""


@dataclass(frozen=True)
class Calculation(Job):
    """Some realisations of a numerical model: few, as an interruption loses those begun."""

    model: NumericalModel
    seeds: range

    @property
    def title(self) -> str:
        first, last = self.seeds[0], self.seeds[-1]
        return f"{self.place.title}, realisations {first} to {last}"

    @cached_property
    def folder(self) -> str:
        content = {"model": self.model.name, **beyond_defaults(self.model)}
        seeds = [self.seeds.start, self.seeds.stop]
        return f"{self.model.name}-seed{seeds[0]}-{short_hash({**content, 'seeds': seeds})}"

    @property
    def algorithm(self) -> str:
        return self.model.name

    @property
    def dataset(self) -> str | None:
        return getattr(self.model, "dataset", None)


def split_name(partition: Any) -> str:
    if isinstance(partition, Dirichlet):
        return f"dir{partition.alpha:g}"
    return display_name(partition, PARTITIONS)


def short_hash(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def beyond_defaults(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    plain = {field.name: getattr(value, field.name) for field in fields(value)}
    defaults = {field.name: field.default for field in fields(value)}
    return {name: option for name, option in plain.items() if option != defaults[name]}


@dataclass(frozen=True)
class Results:
    """The finished jobs of a study, seeds or realisations of one place together."""

    plan: Plan
    jobs: Sequence[Job]
    series: Mapping[Coordinates, Series]
    done: int  # jobs that have ended

    def values(self, coordinate: str) -> list[Any]:
        """All values of one coordinate of the places, in the order of the jobs."""
        return list(dict.fromkeys(getattr(job.place, coordinate) for job in self.jobs))

    def of(self, **wanted: Any) -> list[Series]:
        """What there is to show for the places with these coordinates, in the order of the jobs."""
        return list(self.places(**wanted).values())

    def places(self, **wanted: Any) -> dict[Any, Series]:
        """As `of`, by place."""
        return {
            job.place: self.series[job.place]
            for job in self.jobs
            if job.place in self.series
            and all(getattr(job.place, name) == value for name, value in wanted.items())
        }

    def by_method(self, cells: Callable[[str], Iterable[Cell]]) -> tuple[Row, ...]:
        """A row of a table for every method."""
        return tuple(((method,), tuple(cells(method))) for method in self.values("method"))

    def notes(
        self, smaller: Sequence[str], *own: str, seeds: str = "", code: str = ""
    ) -> tuple[str, ...]:
        """The notes below a table: what the scale has changed, and how many seeds there are.

        `smaller` is said at scale small, `own` always, `seeds` behind their number, and `code` if
        the study follows the authors' code.
        """
        scale = {"smoke": (SMOKE_NOTE,), "small": smaller, "paper": ()}[self.plan.scale]
        counted = (f"{counts}{seeds}" for counts in self.repetitions)
        followed = (code,) if code and self.plan.fidelity == "code" else ()
        return (*scale, *own, *counted, *followed)

    @property
    def repetitions(self) -> tuple[str, ...]:
        """A note on how many runs or realisations are behind a number; none without results."""
        words = {"seed": set[int](), "realisation": set[int]()}
        for job in self.jobs:
            if job.place in self.series:
                word = "seed" if isinstance(job, Training) else "realisation"
                words[word].add(self.series[job.place].seeds)
        known = [_counted(word, counts) for word, counts in words.items() if counts]
        return (f"{' and '.join(known)}.",) if known else ()


def _counted(word: str, counts: set[int]) -> str:
    """How many, from the fewest to the most.

    >>> _counted("seed", {1}), _counted("seed", {3, 2})
    ('1 seed', '2 to 3 seeds')
    """
    ends = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return f"{ends} {word}{'s' * (max(counts) > 1)}"


@dataclass(frozen=True)
class StudyOutput:
    """A study as people see it."""

    tables: tuple[PaperTable, ...]
    figure: Figure
    curves: tuple[str, ...] = ("accuracy", "loss")  # that are written down beside the tables
    pictures: Mapping[str, Any] | None = None  # numbers behind what is neither


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper, or one of our own beside them."""

    id: str
    title: str
    claim: str  # what the paper reports, or why we ask
    jobs: Callable[[Plan], list[Job]]
    show: Callable[[Results], StudyOutput]
    command: str = ""  # what `peerage reproduce` calls it, if that is not the id
