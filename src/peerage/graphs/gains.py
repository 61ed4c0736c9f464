"""Gains: factors on the initial weights that compensate for averaging (P4)."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from peerage.errors import InputError
from peerage.graphs.estimation import EstimatedGain
from peerage.graphs.graph import Graph, component_labels, degrees
from peerage.graphs.mixing import gains


class Gain(Protocol):
    """A factor on the initial weights, which averaging would otherwise shrink."""

    def factors(self, graph: Graph) -> np.ndarray:
        """The factor of every node, [nodes]."""


@dataclass(frozen=True)
class NoGain:
    """Factor 1: the initial weights stay as they are."""

    def factors(self, graph: Graph) -> np.ndarray:
        return np.ones(graph.nodes)


@dataclass(frozen=True)
class ConnectedGraphGain:
    """Base of the gains that depend on the graph, which must be connected.

    The components of a disconnected graph train separately. With `per_component`, this is allowed
    and every component has its own gain.
    """

    per_component: bool = field(default=False, kw_only=True)

    def check(self, graph: Graph) -> None:
        if graph.dynamic or graph.nodes == 1:
            return
        components = int(component_labels(graph).max()) + 1
        if components == graph.nodes:
            raise InputError(
                "the graph has no edges, so nothing is averaged and no gain is needed; "
                "use --gain none"
            )
        if components > 1 and not self.per_component:
            raise InputError(
                f"the graph has {components} components, each with its own gain; connect it, or "
                "set per_component, as in --gain graph:per_component=true"
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
                "gain degree requires an undirected graph without weights; use --gain graph"
            )
        labels, closed = mixing_groups(graph), degrees(graph) + 1.0
        per_group = np.bincount(labels, closed) / np.sqrt(np.bincount(labels, closed**2))
        per_node: np.ndarray = per_group[labels]
        return per_node


@dataclass(frozen=True)
class ExponentGain(ConnectedGraphGain):
    """n^a, for an unknown graph of a known topology; a = 1/2 is exact on regular graphs (P4)."""

    a: float

    def __post_init__(self) -> None:
        if not 0 <= self.a <= 1:
            raise InputError(f"a must lie in [0, 1], got {self.a}; 0.5 is exact on regular graphs")

    def factors(self, graph: Graph) -> np.ndarray:
        self.check(graph)
        return np.array([float(size) ** self.a for size in mixing_sizes(graph)])


@dataclass(frozen=True)
class ManualGain:
    """The factor g."""

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
    """The component of every node; a single one if the graph is dynamic, as all nodes meet."""
    return np.zeros(graph.nodes, dtype=int) if graph.dynamic else component_labels(graph)


def mixing_sizes(graph: Graph) -> list[int]:
    """The number of nodes in the group of every node."""
    groups = mixing_groups(graph)
    sizes: list[int] = np.bincount(groups)[groups].tolist()
    return sizes
