"""Gains: factors on the initial weights that make up for what averaging takes off them (P4)."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from peerage.errors import InputError
from peerage.graphs.estimation import EstimatedGain
from peerage.graphs.graph import Graph, component_labels, degrees
from peerage.graphs.mixing import gains


class Gain(Protocol):
    """A factor on the initial weights, which makes up for what averaging will take off them."""

    def factors(self, graph: Graph) -> np.ndarray:
        """The factor of every node, [nodes]."""


@dataclass(frozen=True)
class NoGain:
    """Leave the initial weights as they are."""

    def factors(self, graph: Graph) -> np.ndarray:
        return np.ones(graph.nodes)


@dataclass(frozen=True)
class ConnectedGraphGain:
    """What the kinds have in common that look at the graph: it must be in one piece.

    One in several would train as several networks, which is seldom meant; who does mean it says
    so, and every component gets a gain of its own.
    """

    per_component: bool = field(default=False, kw_only=True)

    def check(self, graph: Graph) -> None:
        if graph.dynamic or graph.nodes == 1:
            return
        pieces = int(component_labels(graph).max()) + 1
        if pieces == graph.nodes:
            raise InputError(
                "the graph has no edges: nothing is averaged, and there is nothing for a gain to "
                "make up for; use --gain none"
            )
        if pieces > 1 and not self.per_component:
            raise InputError(
                f"the graph falls into {pieces} components, each with a gain of its own; connect "
                "it, or ask for all of them, as in --gain graph:per_component=true"
            )


@dataclass(frozen=True)
class SqrtGain(ConnectedGraphGain):
    """The square root of the number of nodes: exact on complete and regular graphs."""

    def factors(self, graph: Graph) -> np.ndarray:
        self.check(graph)
        return np.array([size**0.5 for size in mixing_sizes(graph)])


@dataclass(frozen=True)
class GraphGain(ConnectedGraphGain):
    """1 / |v|, with v the stationary vector of averaging on this graph (P4)."""

    def factors(self, graph: Graph) -> np.ndarray:
        self.check(graph)
        return gains(graph)


@dataclass(frozen=True)
class DegreeGain(ConnectedGraphGain):
    """The gain of the graph from its degrees k alone: sum(k + 1) / sqrt(sum((k + 1)^2)) (P4).

    Exact for uniform averaging over undirected links.
    """

    def factors(self, graph: Graph) -> np.ndarray:
        self.check(graph)
        if graph.directed or graph.weighted:
            raise InputError(
                "degrees do not tell the gain of a directed or weighted graph; use gain graph"
            )
        labels, closed = mixing_groups(graph), degrees(graph) + 1.0
        of_group = np.bincount(labels, closed) / np.sqrt(np.bincount(labels, closed**2))
        each: np.ndarray = of_group[labels]
        return each


@dataclass(frozen=True)
class ExponentGain(ConnectedGraphGain):
    """n^a, for graphs of which only the kind is known: a = 1/2 is exact on regular ones (P4)."""

    a: float

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise InputError(f"a must lie in [0, 1], got {self.a}; 0.5 is exact on regular graphs")

    def factors(self, graph: Graph) -> np.ndarray:
        self.check(graph)
        return np.array([float(size) ** self.a for size in mixing_sizes(graph)])


@dataclass(frozen=True)
class ManualGain:
    """A given factor."""

    g: float

    def __post_init__(self) -> None:
        if not 0 < self.g < float("inf"):
            raise InputError(f"g must be a number above 0, got {self.g}")

    def factors(self, graph: Graph) -> np.ndarray:
        return np.full(graph.nodes, self.g)


GAINS: dict[str, type[Gain]] = {
    "none": NoGain,
    "sqrt": SqrtGain,
    "graph": GraphGain,
    "degree": DegreeGain,
    "estimated": EstimatedGain,
    "exponent": ExponentGain,
    "manual": ManualGain,
}


def mixing_groups(graph: Graph) -> np.ndarray:
    """One number per node, equal for nodes whose models come to be mixed: those of a component.

    Where links change from round to round, all nodes meet in time.
    """
    return np.zeros(graph.nodes, dtype=int) if graph.dynamic else component_labels(graph)


def mixing_sizes(graph: Graph) -> list[int]:
    """The number of nodes in the group of every node."""
    groups = mixing_groups(graph)
    sizes: list[int] = np.bincount(groups)[groups].tolist()
    return sizes
