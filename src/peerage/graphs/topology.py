"""Kinds of communication graphs: `er:p=0.2`, `ring`, `regular:k=4`, ...

A kind is a frozen dataclass of its parameters, and `build(nodes, seed)` turns it into a `Graph`.
The random kinds draw again until the graph is connected; attempt a draws from the stream (seed,
"graph", a). A graph with one node has no edges, whatever the kind.

A million nodes take seconds. Beyond 5000 the random kinds are drawn edge by edge instead of pair by
pair: the same kind of graph, from other random numbers.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isfinite, isqrt, log, nan
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, SupportsFloat

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from peerage import specs
from peerage.errors import InputError
from peerage.graphs.graph import (
    Edges,
    Graph,
    Neighbours,
    StaticGraph,
    component_labels,
    is_connected,
)
from peerage.graphs.random_edges import (
    PAIRWISE_NODES,
    attached_edges,
    block_edges,
    independent_edges,
    paired_stubs,
    product_edges,
    regular_edges,
    small_world_edges,
)
from peerage.randomness import numpy_stream

MAX_EXPECTED_ISOLATED = (
    20  # isolated nodes that are expected: the chance that there are none is e^-20
)
MANY_PIECES = 50  # components in one draw: the next ones will not be connected either


@dataclass(frozen=True)
class Topology(ABC):
    """A kind of graph; a new one says in `draw` which edges it has."""

    def __post_init__(self) -> None:
        specs.check_choices(self)

    @abstractmethod
    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        """The edges of one graph; `rng` is for the random kinds, self-loops are dropped later."""

    def build(self, nodes: int, seed: int) -> Graph:
        return self.sample(nodes, seed, 0)

    def sample(self, nodes: int, seed: int, attempt: int) -> StaticGraph:
        """The graph that the stream (seed, "graph", attempt) gives, connected or not."""
        _at_least("nodes", nodes, 1)
        edges = () if nodes == 1 else self.draw(nodes, numpy_stream(seed, "graph", attempt))
        return StaticGraph.from_edges(nodes, edges, attempt)


@dataclass(frozen=True)
class RandomTopology(Topology):
    """A kind that may come out disconnected, and is then drawn again."""

    attempts: int = field(default=100, kw_only=True)
    connected: bool = field(default=True, kw_only=True)  # false: take the first graph as it is
    remedy: ClassVar[str]  # what makes a connected graph more likely

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("attempts", self.attempts, 1)

    def build(self, nodes: int, seed: int) -> Graph:
        for attempt in range(self.attempts):
            graph = self.sample(nodes, seed, attempt)
            if not self.connected or is_connected(graph):
                return graph
            pieces = int(component_labels(graph).max()) + 1
            if pieces > MANY_PIECES:
                raise InputError(
                    f"topology {_text(self)!r} with {nodes} nodes falls into {pieces} components, "
                    f"and another attempt would not help; choose {self.remedy}, or connected=false"
                )
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
        ids = np.arange(nodes)
        return np.stack([ids, (ids + 1) % nodes], axis=1)


@dataclass(frozen=True)
class Star(Topology):
    """One node talks to everyone, the others to that one only."""

    centre: Literal["first", "last"] = "first"  # a hub is the last node

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        centre = 0 if self.centre == "first" else nodes - 1
        others = np.delete(np.arange(nodes), centre)
        return np.stack([np.full(nodes - 1, centre), others], axis=1)


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

    def build(self, nodes: int, seed: int) -> Graph:
        if self.connected and nodes > 1:
            self._check_connectable(nodes)
        return super().build(nodes, seed)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        p = self._chance(nodes)
        if nodes <= PAIRWISE_NODES:
            return independent_edges(nodes, rng, lambda node: p)
        return block_edges(np.array([0, nodes]), p, 0, rng)

    def _chance(self, nodes: int) -> float:
        if self.degree is None:
            return self.p or 0.0
        _check_mean_degree(self.degree, nodes)
        return self.degree / (nodes - 1)

    def _check_connectable(self, nodes: int) -> None:
        """Isolated nodes are what keeps such a graph from being connected. Erdos, Renyi, 1960."""
        isolated = nodes * (1 - self._chance(nodes)) ** (nodes - 1)
        if isolated > MAX_EXPECTED_ISOLATED:
            enough = ceil(log(nodes)) + 1
            raise InputError(
                f"topology {_text(self)!r} with {nodes} nodes cannot be connected: about "
                f"{isolated:.0f} nodes would have no neighbour; choose a mean degree of "
                f"{enough} or more, or connected=false"
            )


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
        if nodes <= PAIRWISE_NODES:
            return list(nx.barabasi_albert_graph(nodes, self.m, seed=rng).edges)
        return attached_edges(nodes, self.m, rng)


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

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_mean_degree(self.degree, nodes)
        smallest = self.degree * (self.gamma - 2) / (self.gamma - 1)
        x = smallest * (1 - rng.random(nodes)) ** (1 / (1 - self.gamma))
        if self.kind == "chung-lu":
            if nodes > PAIRWISE_NODES:
                return product_edges(x, rng)
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
        if nodes > PAIRWISE_NODES:
            starts = np.searchsorted(group, np.arange(self.groups + 1))
            return block_edges(starts, self.p_in, self.p_out, rng)
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
        if nodes <= PAIRWISE_NODES or 4 * self.k > nodes:
            return list(nx.watts_strogatz_graph(nodes, self.k, self.p, seed=rng).edges)
        return small_world_edges(nodes, self.k, self.p, rng)


class EdgeData(NamedTuple):
    """What the user wrote down, with ids from 0 to n - 1."""

    ends: NDArray[np.int64]  # [m, 2]
    weights: NDArray[np.float64] | None = None  # [m]; that of a self-loop is the node's own
    directed: bool = False


@dataclass(frozen=True)
class UserTopology(Topology):
    """The user's own edges, which may have directions and weights."""

    @abstractmethod
    def read(self, nodes: int) -> EdgeData:
        """Checked for this number of nodes."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return self.read(nodes).ends

    def sample(self, nodes: int, seed: int, attempt: int) -> StaticGraph:
        _at_least("nodes", nodes, 1)
        ends, weights, directed = self.read(nodes)
        return StaticGraph.from_edges(nodes, ends, attempt, weights=weights, directed=directed)


@dataclass(frozen=True)
class EdgeList(UserTopology):
    """A text file with two ids from 0 to n - 1 on every line; # begins a comment.

    An undirected edge may be listed in either direction, or in both; `a b` in a directed list says
    that a sends to b. In a weighted list a positive number follows, and `a a 2.5` is the weight
    that a gives itself, which is 1 otherwise.
    """

    path: str
    directed: bool = False
    weighted: bool = False

    def read(self, nodes: int) -> EdgeData:
        try:
            text = Path(self.path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise InputError(f"cannot read the edge list {self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"the edge list {self.path} is not a text file in UTF-8") from None
        lines = text.splitlines()
        given = _listed_at_once(lines, nodes, self.directed, self.weighted)
        if given is None or "+" in text:  # numpy takes +1 for an id
            given = self._listed(lines, nodes)
        if nodes > 1 and (given.ends[:, 0] == given.ends[:, 1]).all():
            raise InputError(
                f"the edge list {self.path} joins no two of {nodes} nodes; "
                "write two node ids on every line"
            )
        return given

    def _listed(self, lines: Sequence[str], nodes: int) -> EdgeData:
        """Line by line, to say which one is wrong."""
        seen: dict[tuple[int, int], float] = {}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            where = f"{self.path}, line {number}"
            a, b = _listed_ids(words, nodes, where, self.weighted)
            weight = _listed_weight(words[2], where) if self.weighted else 1.0
            edge = (a, b) if self.directed else (min(a, b), max(a, b))
            if seen.setdefault(edge, weight) != weight:
                raise InputError(
                    f"{where}: {a} {b} has the weight {weight} here and {seen[edge]} before; "
                    "keep one"
                )
        ends = np.array(list(seen), dtype=np.int64).reshape(-1, 2)
        return EdgeData(
            ends, np.array(list(seen.values())) if self.weighted else None, self.directed
        )


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
        graph.links(0)  # what is wrong with k shows now, not in the first round
        return graph

    def of_size(self, nodes: int) -> "DynamicRegular":
        """The same for fewer nodes: with the largest degree up to k that all of them can have."""
        k = min(self.k, nodes - 1)
        return replace(self, k=max(1, k - k * nodes % 2))


@dataclass(frozen=True)
class DynamicGraph(Graph):
    """A graph that is drawn anew in round t, from the stream (seed, "graph", t)."""

    topology: DynamicRegular
    seed: int
    dynamic: ClassVar[bool] = True
    _last: dict[int, sparse.csr_array] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _among: dict[tuple[tuple[int, ...], int], Neighbours] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def links(self, round: int) -> sparse.csr_array:
        if round not in self._last:
            drawn = self.topology.sample(self.nodes, self.seed, round).links(round)
            self._last.clear()
            self._last[round] = drawn
        return self._last[round]

    def among(self, there: tuple[int, ...], round: int) -> Neighbours:
        """Whom every node hears if only these are there: a graph that is drawn for them alone."""
        if len(there) == self.nodes:
            return self.neighbours(round)
        if (there, round) not in self._among:
            heard: list[tuple[int, ...]] = [()] * self.nodes
            if len(there) > 1:
                drawn = self.topology.of_size(len(there)).sample(len(there), self.seed, round)
                for node, near in zip(there, drawn.neighbours(round), strict=True):
                    heard[node] = tuple(there[other] for other in near)
            self._among.clear()
            self._among[there, round] = tuple(heard)
        return self._among[there, round]


@dataclass(frozen=True)
class FromGraph(UserTopology):
    """Any simple networkx graph; from Python only, as it cannot be written to a file.

    Its nodes become 0..n-1 in sorted order, or in the order of insertion if they have no order. In
    a directed graph the edge (a, b) says that a sends to b. The graph is weighted if any edge has a
    `weight`; edges without one have 1, and a self-loop is the weight that a node gives itself.
    """

    graph: nx.Graph

    def __post_init__(self) -> None:
        if not isinstance(self.graph, nx.Graph):
            raise InputError(f"expected a networkx graph, got {self.graph!r}")
        if self.graph.is_multigraph():
            kind = "DiGraph" if self.graph.is_directed() else "Graph"
            raise InputError(f"the networkx graph is a multigraph; pass networkx.{kind}(graph)")
        loops = list(nx.nodes_with_selfloops(self.graph))
        if loops and not self._weighted():
            raise InputError(f"node {loops[0]!r} of the networkx graph has a self-loop; remove it")

    def _weighted(self) -> bool:
        return any("weight" in options for _, _, options in self.graph.edges(data=True))

    def read(self, nodes: int) -> EdgeData:
        if len(self.graph) != nodes:
            raise InputError(
                f"the networkx graph has {len(self.graph)} nodes, not {nodes}; make them equal"
            )
        try:
            names = sorted(self.graph)
        except TypeError:
            names = list(self.graph)
        ids = {name: number for number, name in enumerate(names)}
        triples = list(self.graph.edges(data="weight", default=1))
        ends = np.array([(ids[a], ids[b]) for a, b, _ in triples], dtype=np.int64).reshape(-1, 2)
        weights = [_edge_weight(a, b, weight) for a, b, weight in triples]
        return EdgeData(
            ends, np.array(weights) if self._weighted() else None, self.graph.is_directed()
        )


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


def _listed_at_once(
    lines: Sequence[str], nodes: int, directed: bool, weighted: bool
) -> EdgeData | None:
    """All lines of an edge list, or None if one of them is not as it should be."""
    columns = [("a", np.int64), ("b", np.int64), ("weight", np.float64)]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no line at all, or an id with a decimal point
            table = np.loadtxt(lines, dtype=columns if weighted else columns[:2], ndmin=1)
    except (ValueError, Warning):
        return None
    ends = np.stack([table["a"], table["b"]], axis=1)
    if ends.min() < 0 or ends.max() >= nodes:
        return None
    if not weighted:
        return None if (ends[:, 0] == ends[:, 1]).any() else EdgeData(ends, None, directed)
    weights = table["weight"]
    if not (np.isfinite(weights).all() and (weights > 0).all()):
        return None
    codes = (ends if directed else np.sort(ends)) @ [nodes, 1]
    order = np.argsort(codes)
    conflict = (np.diff(codes[order]) == 0) & (np.diff(weights[order]) != 0)
    return None if conflict.any() else EdgeData(ends, weights, directed)


def _listed_ids(words: list[str], nodes: int, where: str, weighted: bool) -> tuple[int, int]:
    text = " ".join(words)
    wanted = "two node ids and a weight" if weighted else "two node ids"
    ids = words[:2]
    if len(words) != 2 + weighted or not all(word.isascii() and word.isdigit() for word in ids):
        raise InputError(f"{where}: expected {wanted}, got {text!r}")
    a, b = map(int, ids)
    if max(a, b) >= nodes:
        raise InputError(f"{where}: unknown node {max(a, b)}; the ids are 0 to {nodes - 1}")
    if a == b and not weighted:
        raise InputError(f"{where}: node {a} is joined to itself; remove the line")
    return a, b


def _listed_weight(word: str, where: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        weight = nan
    if not 0 < weight < inf:
        raise InputError(f"{where}: the weight must be a positive number, got {word!r}")
    return weight


def _edge_weight(a: object, b: object, weight: object) -> float:
    if not isinstance(weight, SupportsFloat) or not 0 < float(weight) < inf:
        raise InputError(
            f"the weight of the edge from {a!r} to {b!r} must be a positive number, got {weight!r}"
        )
    return float(weight)


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
