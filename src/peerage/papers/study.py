"""Studies: tables and figures of the papers, the jobs behind them and how they are shown."""

import json
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
from peerage.papers.papertable import Cell, PaperTable, Row, Unit
from peerage.report.series import Estimate, Series

Scale = Literal["smoke", "small", "paper"]  # seconds, minutes, the published setting
Inputs = Literal["paper", "standard"]  # of P2: in [0, 1], or with mean 0 and deviation 1
Fidelity = Literal["paper", "code"]  # as the paper says, or as its authors' scripts do

# At scale smoke, no data has to be downloaded, and all tables share their runs.
DIGITS, SMALL_MODEL, SMOKE_RATE = "digits", "digits-mlp", 0.05
SMOKE_NOTE = (
    "A trial of the machinery: tiny networks; where there is training, 8 x 8 digits and a "
    "small model stand in for all data and models."
)


@dataclass(frozen=True)
class Plan:
    """How much of a study to run."""

    scale: Scale = "small"
    seeds: int | None = None  # None: as many as the scale has by default
    fidelity: Fidelity = "paper"
    inputs: Inputs = "paper"

    def __post_init__(self) -> None:
        specs.check_choices(self)
        if self.seeds is not None and self.seeds < 1:
            raise InputError(f"seeds must be at least 1, got {self.seeds}")

    def seed_range(self, default: int) -> range:
        """The requested seeds, or `default` many."""
        return range(self.seeds or default)


def plan_of(scale: str, seeds: int | None, fidelity: str, inputs: str = "paper") -> Plan:
    """A plan from words on the command line, which it checks."""
    return Plan(cast(Scale, scale), seeds, cast(Fidelity, fidelity), cast(Inputs, inputs))


def built(plan: Plan, settings: Mapping[str, Any], stand_in: str = SMALL_MODEL) -> Experiment:
    """The experiment with these settings; at scale smoke on digits with the model `stand_in`."""
    if plan.scale == "smoke":
        smoke = {"dataset": DIGITS, "model": stand_in, "engine": {"name": "serial"}}
        settings = merged(settings, smoke)
    return Experiment(**settings)


def with_options(name: str, **options: Any) -> str:
    """A name with more options; those that are None are left out.

    >>> with_options("mnist", train=2000), with_options("hwa:scope=all", clients=10)
    ('mnist:train=2000', 'hwa:scope=all,clients=10')
    """
    text = ",".join(f"{key}={value}" for key, value in options.items() if value is not None)
    return name + ("," if ":" in name else ":") + text if text else name


class Coordinates(Hashable, Protocol):
    """Where a job belongs in tables and figures: a named tuple, different for each paper."""

    @property
    def method(self) -> str: ...  # `--only` selects by it
    @property
    def title(self) -> str: ...  # all coordinates in a few words
    def _asdict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Training:
    """One run of an experiment."""

    place: Coordinates
    experiment: Experiment

    @property
    def title(self) -> str:
        return f"{self.place.title}, seed {self.experiment.seed}"

    @cached_property
    def folder(self) -> str:
        """The same for equal work, whichever tables it belongs to."""
        # At scale smoke one data set replaces all others, so the name is that of the experiment.
        partition, seed = self.experiment.partition, f"seed{self.experiment.seed}"
        if isinstance(partition, Dirichlet):
            split = f"dir{partition.alpha:g}"
        else:
            split = display_name(partition, PARTITIONS)
        digest = short_hash(run_key(self.experiment))
        return "-".join([self.dataset, split, self.algorithm, seed, digest])

    @property
    def algorithm(self) -> str:
        return display_name(self.experiment.algorithm, ALGORITHMS)

    @property
    def dataset(self) -> str:
        return display_name(self.experiment.dataset, DATASETS)


class NumericalModel(Protocol):
    """A calculation without training: a frozen dataclass of its settings.

    If it needs data, its attribute `dataset` is the name of the data set.
    """

    @property
    def name(self) -> str: ...

    @property
    def products(self) -> float:
        """Approximate number of multiplications of one realisation."""

    def realise(self, seed: int) -> dict[str, Any]:
        """JSON values: `setup`, and `curves` with one list over the rounds per name."""


@dataclass(frozen=True)
class Calculation:
    """A few realisations of a numerical model; an interruption loses all of them."""

    place: Coordinates
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


# Work that runs once, has its own folder and is shared by all studies that need it.
Job = Training | Calculation


def short_hash(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:10]


def beyond_defaults(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults."""
    options = {field: getattr(value, field.name) for field in fields(value)}
    return {field.name: option for field, option in options.items() if option != field.default}


@dataclass(frozen=True)
class Results:
    """The finished jobs of a study, grouped by coordinates over seeds or realisations."""

    plan: Plan
    jobs: Sequence[Job]
    series: Mapping[Coordinates, Series]
    done: int  # jobs that finished or diverged

    def values(self, coordinate: str) -> list[Any]:
        """All values of one coordinate, in the order of the jobs."""
        return list(dict.fromkeys(getattr(job.place, coordinate) for job in self.jobs))

    def of(self, **wanted: Any) -> list[Series]:
        """All series with these coordinates, in the order of the jobs."""
        return list(self.places(**wanted).values())

    def places(self, **wanted: Any) -> dict[Any, Series]:
        """As `of`, by coordinates."""
        return {
            job.place: self.series[job.place]
            for job in self.jobs
            if job.place in self.series
            and all(getattr(job.place, name) == value for name, value in wanted.items())
        }

    def cell(
        self, place: Coordinates, value: Callable[[Series], Estimate], *paper: float | None
    ) -> Cell:
        """Our estimate beside the paper's mean and deviation; ours is empty without runs."""
        ours = value(self.series[place]) if place in self.series else (None, None)
        return Cell(*ours, *paper)

    def by_method(self, cells: Callable[[str], Iterable[Cell]]) -> tuple[Row, ...]:
        """One table row per method."""
        return tuple(((method,), tuple(cells(method))) for method in self.values("method"))

    def method_table(
        self,
        title: str,
        columns: Iterable[tuple[str, ...]],
        cells: Callable[[str], Iterable[Cell]],
        unit: Unit,
        *,
        row_title: str = "method",
        **options: Any,
    ) -> PaperTable:
        """A table with one row per method."""
        rows = self.by_method(cells)
        return PaperTable(title, (row_title,), tuple(columns), rows, unit, **options)

    def notes(
        self, smaller: Sequence[str], *always: str, seeds: str = "", code: str = ""
    ) -> tuple[str, ...]:
        """The notes below a table: what the scale changes, and the number of seeds.

        `smaller` is shown at scale small, `always` at every scale, `seeds` after their number, and
        `code` if the study follows the authors' code.
        """
        scale = {"smoke": (SMOKE_NOTE,), "small": smaller, "paper": ()}[self.plan.scale]
        counts = (f"{count}{seeds}" for count in self.repetitions)
        code_notes = (code,) if code and self.plan.fidelity == "code" else ()
        return (*scale, *always, *counts, *code_notes)

    @property
    def repetitions(self) -> tuple[str, ...]:
        """A note on the number of seeds or realisations; none without results."""
        words = {"seed": set[int](), "realisation": set[int]()}
        for job in self.jobs:
            if job.place in self.series:
                word = "seed" if isinstance(job, Training) else "realisation"
                words[word].add(self.series[job.place].seeds)
        texts = [count_text(word, counts) for word, counts in words.items() if counts]
        return (f"{' and '.join(texts)}.",) if texts else ()


def count_text(word: str, counts: set[int]) -> str:
    """The smallest and the largest count.

    >>> count_text("seed", {1}), count_text("seed", {3, 2})
    ('1 seed', '2 to 3 seeds')
    """
    ends = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return f"{ends} {word}{'s' * (max(counts) > 1)}"


@dataclass(frozen=True)
class StudyOutput:
    """The tables and the figure of a study."""

    tables: tuple[PaperTable, ...]
    figure: Figure
    curves: tuple[str, ...] = ("accuracy", "loss")  # metrics in the JSON file
    pictures: Mapping[str, Any] | None = None  # numbers behind heat maps


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper, or an additional one of this project."""

    id: str
    title: str
    claim: str  # what the paper reports, or the question of an additional study
    jobs: Callable[[Plan], list[Job]]
    show: Callable[[Results], StudyOutput]
    command: str = ""  # argument of `peerage reproduce`, if not the id
