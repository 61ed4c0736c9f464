"""Everything a simulation is made of, resolved and checked, before any process is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from peerage.algorithm import Algorithm
from peerage.graph import Graph
from peerage.initialise import Architecture
from peerage.local import Examples
from peerage.vectors import Layout


@dataclass(frozen=True)
class World:
    """Shared by all workers, who inherit it by forking and never change it."""

    algorithm: Algorithm[Any]
    seed: int
    rounds: int
    graph: Graph
    train: Examples
    test: Examples
    parts: Sequence[Tensor]  # node -> indices of its training examples
    validation: Sequence[Tensor]  # node -> indices of its held-out examples, often none
    label_counts: Tensor  # [n, classes] of the training examples
    architectures: Mapping[str, Architecture]
    assignment: Sequence[str]  # node -> name of its architecture
    shared_start: bool
    gains: Sequence[float]  # node -> factor on the initial weights
    evaluate_at: str  # "exchange": at the first message after training; "end": of the round
    cache: Path | None = None  # where local work may keep what is dear to compute

    @property
    def nodes(self) -> int:
        return len(self.parts)

    def architecture(self, node: int) -> Architecture:
        return self.architectures[self.assignment[node]]

    def layout(self, node: int) -> Layout:
        return self.architecture(node).layout

    def work(self, node: int) -> int:
        """The expected cost of a node's round, in examples."""
        steps = getattr(getattr(self.algorithm, "local", None), "steps", None)
        return len(self.parts[node]) if steps is None else 1
