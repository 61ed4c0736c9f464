"""What needs no training: sizes of models, the split of the data, alpha, and a graph."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from peerage import specs
from peerage.algorithms.mutual_learning import CyclicAlpha
from peerage.data.datasets import DATASET_INFO, DATASETS
from peerage.engine.prepare import prepare
from peerage.experiment.experiment import Experiment, display_name
from peerage.graphs.topology import TOPOLOGIES
from peerage.models import MODELS
from peerage.models.mixes import MIXES
from peerage.papers.p1.settings import PARTITIONS
from peerage.vectors import trained_parameters

Cycle = Literal["half", "full"]
QUICK = 1e6  # multiplications: a moment


@dataclass(frozen=True)
class ModelSizes:
    """The trainable parameters of the members of a mix, by number of classes."""

    mix: str

    name: ClassVar[str] = "sizes"
    products: ClassVar[float] = QUICK

    def realise(self, seed: int) -> dict[str, Any]:
        members = MIXES[self.mix].members
        counts = {data: [count(text, data) for text in members] for data in ("cifar10", "cifar100")}
        return {"setup": {"members": list(members), "parameters": counts}, "curves": {}}


def count(text: str, dataset: str) -> int:
    """The trainable parameters of a model on images of a data set."""
    model: Any = specs.parse(text, "model", MODELS)
    known = DATASET_INFO[dataset]
    with torch.device("meta"):  # shapes without values
        module = model.build(known.shape, known.classes)
    return sum(parameter.numel() for _, parameter in trained_parameters(module))


@dataclass(frozen=True)
class Allocation:
    """How many examples of each class the clients have."""

    data: str
    split: str
    nodes: int

    name: ClassVar[str] = "allocation"
    products: ClassVar[float] = QUICK

    @property
    def experiment(self) -> Experiment:
        return Experiment(
            algorithm="dec-fedavg",
            dataset=self.data,
            model="mlp:hidden=8",  # none is trained
            nodes=self.nodes,
            topology="complete",
            partition=PARTITIONS[self.split],
        )

    @property
    def dataset(self) -> str:
        return display_name(self.experiment.dataset, DATASETS)

    def realise(self, seed: int) -> dict[str, Any]:
        world = prepare(self.experiment.model_copy(update={"seed": seed}))
        return {"setup": {"allocation": world.setup["allocation"]}, "curves": {}}


@dataclass(frozen=True)
class AlphaCycles:
    """alpha in the rounds of a run."""

    cycle: Cycle
    increment: int
    rounds: int
    maximum: float = 1.0
    period: int = 10

    name: ClassVar[str] = "alpha"
    products: ClassVar[float] = QUICK

    def realise(self, seed: int) -> dict[str, Any]:
        alpha = CyclicAlpha(0.0, self.maximum, self.cycle, self.period, self.increment)
        return {"setup": {}, "curves": {"alpha": [alpha.at(t) for t in range(self.rounds)]}}


@dataclass(frozen=True)
class Links:
    """The links of a graph."""

    topology: str
    nodes: int

    name: ClassVar[str] = "links"
    products: ClassVar[float] = QUICK

    def realise(self, seed: int) -> dict[str, Any]:
        graph = specs.parse(self.topology, "topology", TOPOLOGIES).build(self.nodes, seed)
        return {"setup": {"edges": [list(edge) for edge in graph.edges()]}, "curves": {}}
