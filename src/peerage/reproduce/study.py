"""What a table or a figure of a paper is to us: the runs behind it, and how to show them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal, cast, get_args

from matplotlib.figure import Figure

from peerage import specs
from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import DATASETS
from peerage.data.partition import PARTITIONS
from peerage.errors import InputError, did_you_mean
from peerage.experiment import Experiment, display_name
from peerage.losses import LOSSES
from peerage.models import MODELS
from peerage.report.papertable import PaperTable
from peerage.report.series import Series
from peerage.topology import TOPOLOGIES
from peerage.training import LocalSGD

Scale = Literal["smoke", "small", "paper"]  # seconds, minutes, the published setting
Fidelity = Literal["paper", "code"]  # as the paper is written, or as its authors' scripts run
Place = tuple[str, float, str]  # data set, alpha, method: where a run belongs in a table


@dataclass(frozen=True)
class Plan:
    """How much of a study to run."""

    scale: Scale = "small"
    seeds: int | None = None  # as many as the scale has by default
    fidelity: Fidelity = "paper"

    def __post_init__(self) -> None:
        for name, kinds in (("scale", get_args(Scale)), ("fidelity", get_args(Fidelity))):
            value = getattr(self, name)
            if value not in kinds:
                raise InputError(f"unknown {name} {value!r}; {did_you_mean(value, kinds)}")
        if self.seeds is not None and self.seeds < 1:
            raise InputError(f"seeds must be at least 1, got {self.seeds}")


def plan_of(scale: str, seeds: int | None, fidelity: str) -> Plan:
    """A plan from text that may be misspelt."""
    return Plan(cast(Scale, scale), seeds, cast(Fidelity, fidelity))


@dataclass(frozen=True)
class Job:
    """One run of a study."""

    place: Place
    experiment: Experiment

    @property
    def title(self) -> str:
        dataset, alpha, method = self.place
        return f"{method}, {dataset}, Dir {alpha:g}, seed {self.experiment.seed}"

    @cached_property
    def folder(self) -> str:
        """Equal experiments share a folder, whichever tables they belong to."""
        digest = sha256(json.dumps(essence(self.experiment), sort_keys=True).encode()).hexdigest()
        # At smoke scale one data set stands in for all: the name must not tell them apart.
        actual = display_name(self.experiment.dataset, DATASETS)
        algorithm = display_name(self.experiment.algorithm, ALGORITHMS)
        words = [actual, f"dir{self.place[1]:g}", algorithm, f"seed{self.experiment.seed}"]
        return "-".join([*words, digest[:10]])


def essence(experiment: Experiment) -> dict[str, Any]:
    """What an experiment says beyond the defaults; how it is computed is no part of it.

    An option that a later version adds, with a default that changes nothing, leaves this as it is,
    so that finished runs stay finished.
    """
    work = experiment.work
    defaults = specs.plain(LocalSGD())
    local = {k: v for k, v in specs.plain(work).items() if k != "correct" and defaults.get(k) != v}
    return {
        "algorithm": specs.text(experiment.algorithm, "algorithm", ALGORITHMS),
        "dataset": specs.text(experiment.dataset, "dataset", DATASETS),
        "model": [specs.text(model, "model", MODELS) for model in experiment.model],
        "topology": specs.text(experiment.topology, "topology", TOPOLOGIES),
        "partition": specs.text(experiment.partition, "partition", PARTITIONS),
        "nodes": experiment.nodes,
        "rounds": experiment.rounds,
        "until": str(experiment.until),
        "seed": experiment.seed,
        "local": local,
        "loss": specs.text(work.loss, "loss", LOSSES),
        "start": experiment.init.start,
        "evaluation": experiment.evaluation.model_dump(exclude_defaults=True),
    }


@dataclass(frozen=True)
class Results:
    """The finished runs of a study, seeds of one method together."""

    plan: Plan
    jobs: Sequence[Job]
    series: Mapping[Place, Series]

    @property
    def datasets(self) -> list[str]:
        return list(dict.fromkeys(job.place[0] for job in self.jobs))

    @property
    def alphas(self) -> list[float]:
        return list(dict.fromkeys(job.place[1] for job in self.jobs))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(job.place[2] for job in self.jobs))

    def of(self, dataset: str, alpha: float) -> list[Series]:
        """The methods that have something to show for this setting, in the order of the paper."""
        wanted = [(dataset, alpha, method) for method in self.methods]
        return [self.series[place] for place in wanted if place in self.series]


@dataclass(frozen=True)
class Shown:
    """A study as people see it."""

    tables: tuple[PaperTable, ...]
    figure: Figure


@dataclass(frozen=True)
class Study:
    """One table or figure of a paper, or one of our own beside them."""

    id: str
    title: str
    claim: str  # what the paper reports, or why we ask
    jobs: Callable[[Plan], list[Job]]
    show: Callable[[Results], Shown]
