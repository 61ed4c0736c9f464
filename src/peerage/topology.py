"""Kinds of communication graphs: `er:p=0.2`, `ring`, `regular:k=4`, ...

A kind is a frozen dataclass of its parameters, and `build(nodes, seed)` turns it into a `Graph`.
The random kinds draw again until the graph is connected; attempt a draws from the stream (seed,
"graph", a). A graph with one node has no edges, whatever the kind.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import isfinite, isqrt
from pathlib import Path
from typing import ClassVar, Literal

import networkx as nx
import numpy as np

from peerage import specs
from peerage.errors import InputError
from peerage.graph import Edges, Graph, Neighbours, StaticGraph, is_connected
from peerage.random_edges import independent_edges, paired_stubs, regular_edges
from peerage.randomness import numpy_stream


@dataclass(frozen=True)
class Topology(ABC):
    """A kind of graph; a new one says in `draw` which edges it has."""

    given: ClassVar[bool] = False  # the edges are the user's, and are looked at even for one node

    @abstractmethod
    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        """The edges of one graph; `rng` is for the random kinds, self-loops are dropped later."""

    def build(self, nodes: int, seed: int) -> Graph:
        return self.sample(nodes, seed, 0)

    def sample(self, nodes: int, seed: int, attempt: int) -> StaticGraph:
        """The graph that the stream (seed, "graph", attempt) gives, connected or not."""
        _at_least("nodes", nodes, 1)
        alone = nodes == 1 and not self.given
        edges = () if alone else self.draw(nodes, numpy_stream(seed, "graph", attempt))
        return StaticGraph.from_edges(nodes, edges, attempt)


@dataclass(frozen=True)
class RandomTopology(Topology):
    """A kind that may come out disconnected, and is then drawn again."""

    attempts: int = field(default=100, kw_only=True)
    connected: bool = field(default=True, kw_only=True)  # false: take the first graph as it is
    remedy: ClassVar[str]  # what makes a connected graph more likely

    def __post_init__(self) -> None:
        _at_least("attempts", self.attempts, 1)

    def build(self, nodes: int, seed: int) -> Graph:
        for attempt in range(self.attempts):
            graph = self.sample(nodes, seed, attempt)
            if not self.connected or is_connected(graph):
                return graph
        raise InputError(
            f"topology {_text(self)!r} with {nodes} nodes was not connected in {self.attempts} "
            f"attempts; choose {self.remedy}, more attempts, or connected=false"
        )


@dataclass(frozen=True)
class Complete(Topology):
    """Everyone talks to everyone."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return np.stack(np.triu_indices(nodes, k=1), axis=1)


@dataclass(frozen=True)
class Ring(Topology):
    """Node i talks to i - 1 and i + 1."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return [(node, (node + 1) % nodes) for node in range(nodes)]


@dataclass(frozen=True)
class Star(Topology):
    """Node 0 talks to everyone, the others to node 0 only."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return [(0, node) for node in range(1, nodes)]


@dataclass(frozen=True)
class Torus(Topology):
    """A grid, numbered row by row, whose opposite sides are joined."""

    rows: int | None = None  # None: a square

    def __post_init__(self) -> None:
        if self.rows is not None:
            _at_least("rows", self.rows, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        side = isqrt(nodes)
        if self.rows is None and side**2 != nodes:
            raise InputError(
                f"a square torus cannot have {nodes} nodes; "
                f"use {side**2} or {(side + 1) ** 2} nodes, or give rows="
            )
        if self.rows is not None and nodes % self.rows:
            raise InputError(
                f"a torus with {self.rows} rows cannot have {nodes} nodes; use a multiple of rows"
            )
        grid = np.arange(nodes).reshape(self.rows or side, -1)
        right, below = np.roll(grid, -1, axis=1), np.roll(grid, -1, axis=0)
        return np.concatenate([np.stack([grid, other], axis=-1) for other in (right, below)])


@dataclass(frozen=True)
class Regular(RandomTopology):
    """A random graph in which everyone has exactly k neighbours."""

    k: int = 4
    remedy: ClassVar[str] = "a larger k"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("k", self.k, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return regular_edges(nodes, self.k, rng)


@dataclass(frozen=True)
class ErdosRenyi(RandomTopology):
    """Every pair is joined with the same probability, given as such or by the mean degree."""

    p: float | None = None
    degree: float | None = None  # p = degree / (n - 1)
    remedy: ClassVar[str] = "a larger p or degree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.p is None) == (self.degree is None):
            raise InputError("give exactly one of p and degree, such as er:p=0.2 or er:degree=8")
        if self.p is not None:
            _probability("p", self.p)
        if self.degree is not None:
            _positive("degree", self.degree)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        p = self.p or 0.0
        if self.degree is not None:
            _check_mean_degree(self.degree, nodes)
            p = self.degree / (nodes - 1)
        return independent_edges(nodes, rng, lambda node: p)


@dataclass(frozen=True)
class BarabasiAlbert(Topology):
    """Grown from a star of m + 1 nodes; each new node joins m others, popular ones more likely.

    Always connected. Barabasi, Albert, 1999, Science 286.
    """

    m: int = 5

    def __post_init__(self) -> None:
        _at_least("m", self.m, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_below_nodes("m", self.m, nodes)
        return list(nx.barabasi_albert_graph(nodes, self.m, seed=rng).edges)


@dataclass(frozen=True)
class HeavyTail(RandomTopology):
    """Degrees with a Pareto tail of exponent gamma and the given mean.

    x = x_min (1 - u)^(1 / (1 - gamma)), x_min = degree (gamma - 2) / (gamma - 1), u uniform.
    chung-lu: i and j are joined with probability min(1, x_i x_j / sum x).
    configuration: x rounded, at most n - 1, made even in sum; stubs are paired at random, and
    self-loops and repeated edges dropped.
    """

    gamma: float = 3.0
    degree: float = 8.0
    kind: Literal["chung-lu", "configuration"] = "chung-lu"
    remedy: ClassVar[str] = "a larger degree or gamma"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.gamma > 2 and isfinite(self.gamma)):
            raise InputError(
                f"gamma must be larger than 2, got {self.gamma}: the mean degree is infinite below"
            )
        _positive("degree", self.degree)
        if self.kind not in ("chung-lu", "configuration"):
            raise InputError(f"kind must be chung-lu or configuration, got {self.kind!r}")

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_mean_degree(self.degree, nodes)
        smallest = self.degree * (self.gamma - 2) / (self.gamma - 1)
        x = smallest * (1 - rng.random(nodes)) ** (1 / (1 - self.gamma))
        if self.kind == "chung-lu":
            total = x.sum()
            return independent_edges(nodes, rng, lambda node: x[node] * x[node + 1 :] / total)
        wanted = np.minimum(np.rint(x), nodes - 1).astype(np.int64)
        wanted[rng.integers(nodes)] += wanted.sum() % 2
        return paired_stubs(np.repeat(np.arange(nodes), wanted), rng)


@dataclass(frozen=True)
class TwoGroup(Topology):
    """Odd and even ids each form a complete graph; one bridge joins their median ids (P1 Fig. 23).

    With 50 nodes the bridge is 24-25, which is 25-26 counted from 1. The median of an even number
    of ids is the lower of the two in the middle.
    """

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        groups = [np.arange(first, nodes, 2) for first in (0, 1)]
        inside = [group[np.stack(np.triu_indices(len(group), k=1), axis=1)] for group in groups]
        bridge = [[group[(len(group) - 1) // 2] for group in groups]]
        return np.concatenate([*inside, np.array(bridge)])


@dataclass(frozen=True)
class StochasticBlocks(RandomTopology):
    """Groups of consecutive ids, as equal as possible; pairs are joined by p_in or p_out."""

    groups: int = 2
    p_in: float = 0.5
    p_out: float = 0.05
    remedy: ClassVar[str] = "a larger p_in or p_out"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("groups", self.groups, 1)
        _probability("p_in", self.p_in)
        _probability("p_out", self.p_out)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        if self.groups > nodes:
            raise InputError(f"{self.groups} groups need at least as many nodes, got {nodes}")
        group = np.arange(nodes) * self.groups // nodes
        same = group[:, None] == group
        return independent_edges(
            nodes, rng, lambda node: np.where(same[node, node + 1 :], self.p_in, self.p_out)
        )


@dataclass(frozen=True)
class SmallWorld(RandomTopology):
    """A ring in which everyone knows the k nearest; each edge is rewired with probability p.

    Watts, Strogatz, 1998, Nature 393.
    """

    k: int = 4
    p: float = 0.1
    remedy: ClassVar[str] = "a larger k"

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("k", self.k, 2)
        if self.k % 2:
            raise InputError(f"k must be even, half of it on either side of the ring, got {self.k}")
        _probability("p", self.p)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_below_nodes("k", self.k, nodes)
        return list(nx.watts_strogatz_graph(nodes, self.k, self.p, seed=rng).edges)


@dataclass(frozen=True)
class EdgeList(Topology):
    """A text file with two ids from 0 to n - 1 on every line; # begins a comment.

    An edge may be listed in either direction, or in both.
    """

    path: str
    given: ClassVar[bool] = True

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        try:
            lines = Path(self.path).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise InputError(f"cannot read the edge list {self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"the edge list {self.path} is not a text file in UTF-8") from None
        edges = []
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if words:
                edges.append(_listed_edge(words, nodes, f"{self.path}, line {number}"))
        return edges


@dataclass(frozen=True)
class DynamicRegular(Topology):
    """A fresh random k-regular graph in every round: the peers of EL-Oracle and FACADE (P3).

    A single round need not be connected: over the rounds everyone meets everyone.
    """

    k: int = 4

    def __post_init__(self) -> None:
        _at_least("k", self.k, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return regular_edges(nodes, self.k, rng)

    def build(self, nodes: int, seed: int) -> Graph:
        graph = DynamicGraph(nodes, 0, self, seed)
        graph.neighbours(0)  # what is wrong with k shows now, not in the first round
        return graph


@dataclass(frozen=True)
class DynamicGraph(Graph):
    """A graph that is drawn anew in round t, from the stream (seed, "graph", t)."""

    topology: Topology
    seed: int
    dynamic: ClassVar[bool] = True
    _last: dict[int, Neighbours] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def neighbours(self, round: int) -> Neighbours:
        if round not in self._last:
            drawn = self.topology.sample(self.nodes, self.seed, round).adjacency
            self._last.clear()
            self._last[round] = drawn
        return self._last[round]


@dataclass(frozen=True)
class FromGraph(Topology):
    """Any simple undirected networkx graph; from Python only, as it cannot be written to a file.

    Its nodes become 0..n-1 in sorted order, or in the order of insertion if they have no order.
    """

    graph: nx.Graph
    given: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, nx.Graph):
            raise InputError(f"expected a networkx graph, got {self.graph!r}")
        if self.graph.is_directed():
            raise InputError("the networkx graph is directed; pass graph.to_undirected()")
        if self.graph.is_multigraph():
            raise InputError("the networkx graph is a multigraph; pass networkx.Graph(graph)")
        loops = list(nx.nodes_with_selfloops(self.graph))
        if loops:
            raise InputError(f"node {loops[0]!r} of the networkx graph has a self-loop; remove it")

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        if len(self.graph) != nodes:
            raise InputError(
                f"the networkx graph has {len(self.graph)} nodes, not {nodes}; make them equal"
            )
        try:
            names = sorted(self.graph)
        except TypeError:
            names = list(self.graph)
        ids = {name: number for number, name in enumerate(names)}
        return [(ids[a], ids[b]) for a, b in self.graph.edges]


TOPOLOGIES: dict[str, type[Topology]] = {
    "ba": BarabasiAlbert,
    "complete": Complete,
    "dynamic-regular": DynamicRegular,
    "edge-list": EdgeList,
    "er": ErdosRenyi,
    "heavy-tail": HeavyTail,
    "regular": Regular,
    "ring": Ring,
    "sbm": StochasticBlocks,
    "small-world": SmallWorld,
    "star": Star,
    "torus": Torus,
    "two-group": TwoGroup,
}


def _listed_edge(words: list[str], nodes: int, where: str) -> tuple[int, int]:
    text = " ".join(words)
    if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
        raise InputError(f"{where}: expected two node ids, got {text!r}")
    a, b = map(int, words)
    if max(a, b) >= nodes:
        raise InputError(f"{where}: unknown node {max(a, b)}; the ids are 0 to {nodes - 1}")
    if a == b:
        raise InputError(f"{where}: node {a} is joined to itself; remove the line")
    return a, b


def _text(topology: Topology) -> str:
    known = type(topology) in TOPOLOGIES.values()
    return specs.text(topology, "topology", TOPOLOGIES) if known else repr(topology)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} must be at least {least}, got {value}")


def _positive(name: str, value: float) -> None:
    if not (value > 0 and isfinite(value)):
        raise InputError(f"{name} must be a positive number, got {value}")


def _probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name} must lie in [0, 1], got {value}")


def _check_below_nodes(name: str, value: int, nodes: int) -> None:
    if value >= nodes:
        raise InputError(f"{name} must be smaller than the {nodes} nodes, got {value}")


def _check_mean_degree(degree: float, nodes: int) -> None:
    if degree > nodes - 1:
        raise InputError(f"degree must be at most {nodes - 1} for {nodes} nodes, got {degree}")
