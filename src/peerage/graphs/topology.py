"""Topologies: `er:p=0.2`, `ring`, `regular:k=4`, ...

A topology is a frozen dataclass of its parameters; `build(nodes, seed)` returns a `Graph`. Random
topologies draw again until the graph is connected; attempt a uses the stream (seed, "graph", a).
A graph with one node has no edges.

A million nodes take seconds. Beyond 5000 nodes, random graphs are drawn edge by edge instead of
pair by pair, so the same seed gives a different graph.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf, isfinite, isqrt, log, nan
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, SupportsFloat

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from peerage import specs
from peerage.errors import InputError, check_at_least
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

if TYPE_CHECKING:
    import networkx as nx

MAX_EXPECTED_ISOLATED = 20  # nodes; the probability that none is isolated is then e^-20
MAX_COMPONENTS = 50  # with more in one draw, further draws will not be connected either


@dataclass(frozen=True)
class Topology(ABC):
    """A rule from which a graph is built; subclasses return its edges in `draw`."""

    def __post_init__(self) -> None:
        specs.check_choices(self)

    @abstractmethod
    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        """The edges of one graph; `rng` is for random topologies. Self-loops are dropped later."""

    def build(self, nodes: int, seed: int) -> Graph:
        return self.sample(nodes, seed, 0)

    def sample(self, nodes: int, seed: int, attempt: int) -> StaticGraph:
        """The graph drawn from the stream (seed, "graph", attempt), connected or not."""
        check_at_least("nodes", nodes, 1)
        edges = () if nodes == 1 else self.draw(nodes, numpy_stream(seed, "graph", attempt))
        return StaticGraph.from_edges(nodes, edges, attempt)


@dataclass(frozen=True)
class RandomTopology(Topology):
    """A topology whose graphs may be disconnected, and are then drawn again."""

    attempts: int = field(default=100, kw_only=True)
    connected: bool = field(default=True, kw_only=True)  # false: accept the first graph
    remedy: ClassVar[str]  # what makes a connected graph more likely

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("attempts", self.attempts, 1)

    def build(self, nodes: int, seed: int) -> Graph:
        for attempt in range(self.attempts):
            graph = self.sample(nodes, seed, attempt)
            if not self.connected or is_connected(graph):
                return graph
            components = int(component_labels(graph).max()) + 1
            if components > MAX_COMPONENTS:
                raise InputError(
                    f"topology {_text(self)!r} with {nodes} nodes has {components} components, "
                    f"and another attempt would not help; choose {self.remedy}, or connected=false"
                )
        raise InputError(
            f"topology {_text(self)!r} with {nodes} nodes was not connected in {self.attempts} "
            f"attempts; choose {self.remedy}, more attempts, or connected=false"
        )


@dataclass(frozen=True)
class Complete(Topology):
    """Every pair of nodes is joined."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return np.stack(np.triu_indices(nodes, k=1), axis=1)


@dataclass(frozen=True)
class Ring(Topology):
    """Node i is joined to i - 1 and i + 1."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        ids = np.arange(nodes)
        return np.stack([ids, (ids + 1) % nodes], axis=1)


@dataclass(frozen=True)
class Star(Topology):
    """One node is joined to all others, which have no other neighbour."""

    centre: Literal["first", "last"] = "first"  # a hub is the last node
    number: int | None = None  # the number of the centre, instead of the first or last

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("number", self.number, 0)

    def place(self, nodes: int) -> int:
        """The number of the centre among so many nodes."""
        if self.number is None:
            return 0 if self.centre == "first" else nodes - 1
        if self.number >= nodes:
            raise InputError(
                f"number={self.number} is not one of the {nodes} nodes of the star, which are 0 to "
                f"{nodes - 1}; choose one of them"
            )
        return self.number

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        centre = self.place(nodes)
        others = np.delete(np.arange(nodes), centre)
        return np.stack([np.full(nodes - 1, centre), others], axis=1)


@dataclass(frozen=True)
class Torus(Topology):
    """A grid, numbered row by row, whose opposite sides are joined."""

    rows: int | None = None  # None: a square

    def __post_init__(self) -> None:
        if self.rows is not None:
            check_at_least("rows", self.rows, 1)

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
    """A random graph in which every node has exactly k neighbours."""

    k: int = 4
    remedy: ClassVar[str] = "a larger k"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("k", self.k, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return regular_edges(nodes, self.k, rng)


@dataclass(frozen=True)
class ErdosRenyi(RandomTopology):
    """Every pair is joined with the same probability, given as p or by the mean degree."""

    p: float | None = None
    degree: float | None = None  # p = degree / (n - 1)
    remedy: ClassVar[str] = "a larger p or degree"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.p is None) == (self.degree is None):
            raise InputError("give exactly one of p and degree, such as er:p=0.2 or er:degree=8")
        if self.p is not None:
            _check_probability("p", self.p)
        if self.degree is not None:
            _check_positive("degree", self.degree)

    def build(self, nodes: int, seed: int) -> Graph:
        if self.connected and nodes > 1:
            self._check_connectable(nodes)
        return super().build(nodes, seed)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        p = self._edge_probability(nodes)
        if nodes <= PAIRWISE_NODES:
            return independent_edges(nodes, rng, lambda node: p)
        return block_edges(np.array([0, nodes]), p, 0, rng)

    def _edge_probability(self, nodes: int) -> float:
        if self.degree is None:
            return self.p or 0.0
        _check_mean_degree(self.degree, nodes)
        return self.degree / (nodes - 1)

    def _check_connectable(self, nodes: int) -> None:
        """Raise an error if isolated nodes are nearly certain. Erdos, Renyi, 1960."""
        isolated = nodes * (1 - self._edge_probability(nodes)) ** (nodes - 1)
        if isolated > MAX_EXPECTED_ISOLATED:
            enough = ceil(log(nodes)) + 1
            raise InputError(
                f"topology {_text(self)!r} with {nodes} nodes cannot be connected: about "
                f"{isolated:.0f} nodes would have no neighbour; choose a mean degree of "
                f"{enough} or more, or connected=false"
            )


@dataclass(frozen=True)
class BarabasiAlbert(Topology):
    """Preferential attachment: from a star of m + 1 nodes, each new node joins m others by degree.

    Always connected. Barabasi, Albert, 1999, Science 286.
    """

    m: int = 5

    def __post_init__(self) -> None:
        check_at_least("m", self.m, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_below_nodes("m", self.m, nodes)
        if nodes <= PAIRWISE_NODES:
            import networkx as nx  # here, as processes that need no such graph save memory

            return list(nx.barabasi_albert_graph(nodes, self.m, seed=rng).edges)
        return attached_edges(nodes, self.m, rng)


@dataclass(frozen=True)
class HeavyTail(RandomTopology):
    """Degrees with a Pareto tail of exponent gamma and mean `degree`.

    x = x_min (1 - u)^(1 / (1 - gamma)), x_min = degree (gamma - 2) / (gamma - 1), u uniform.
    chung-lu: i and j are joined with probability min(1, x_i x_j / sum x).
    configuration: x is rounded, at most n - 1, with an even sum; stubs are paired at random, and
    self-loops and repeated edges are dropped.
    """

    gamma: float = 3.0
    degree: float = 8.0
    kind: Literal["chung-lu", "configuration"] = "chung-lu"
    remedy: ClassVar[str] = "a larger degree or gamma"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.gamma > 2 and isfinite(self.gamma)):
            raise InputError(
                f"gamma must be larger than 2, got {self.gamma}; the mean degree is infinite below"
            )
        _check_positive("degree", self.degree)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_mean_degree(self.degree, nodes)
        smallest = self.degree * (self.gamma - 2) / (self.gamma - 1)
        x = smallest * (1 - rng.random(nodes)) ** (1 / (1 - self.gamma))
        if self.kind == "chung-lu":
            if nodes > PAIRWISE_NODES:
                return product_edges(x, rng)
            total = x.sum()
            return independent_edges(nodes, rng, lambda node: x[node] * x[node + 1 :] / total)
        stubs = np.minimum(np.rint(x), nodes - 1).astype(np.int64)
        stubs[rng.integers(nodes)] += stubs.sum() % 2
        return paired_stubs(np.repeat(np.arange(nodes), stubs), rng)


@dataclass(frozen=True)
class TwoGroup(Topology):
    """Odd and even ids each form a complete graph; one bridge joins their median ids (P1 Fig. 23).

    With 50 nodes the bridge is 24-25, or 25-26 counted from 1. The median of an even number of ids
    is the lower of the two in the middle.
    """

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        groups = [np.arange(first, nodes, 2) for first in (0, 1)]
        inside = [group[np.stack(np.triu_indices(len(group), k=1), axis=1)] for group in groups]
        bridge = [[group[(len(group) - 1) // 2] for group in groups]]
        return np.concatenate([*inside, np.array(bridge)])


@dataclass(frozen=True)
class StochasticBlocks(RandomTopology):
    """Groups of consecutive ids of equal size; pairs are joined with probability p_in or p_out."""

    groups: int = 2
    p_in: float = 0.5
    p_out: float = 0.05
    remedy: ClassVar[str] = "a larger p_in or p_out"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("groups", self.groups, 1)
        _check_probability("p_in", self.p_in)
        _check_probability("p_out", self.p_out)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        if self.groups > nodes:
            raise InputError(f"groups must be at most the {nodes} nodes, got {self.groups}")
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
    """A ring joined to the k nearest nodes; each edge is rewired with probability p.

    Watts, Strogatz, 1998, Nature 393.
    """

    k: int = 4
    p: float = 0.1
    remedy: ClassVar[str] = "a larger k"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("k", self.k, 2)
        if self.k % 2:
            raise InputError(f"k must be even, half of it on either side of the ring, got {self.k}")
        _check_probability("p", self.p)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        _check_below_nodes("k", self.k, nodes)
        if nodes <= PAIRWISE_NODES or 4 * self.k > nodes:
            import networkx as nx

            return list(nx.watts_strogatz_graph(nodes, self.k, self.p, seed=rng).edges)
        return small_world_edges(nodes, self.k, self.p, rng)


class EdgeData(NamedTuple):
    """The user's edges, with ids from 0 to n - 1."""

    ends: NDArray[np.int64]  # [m, 2]
    weights: NDArray[np.float64] | None = None  # [m], with those of self-loops
    directed: bool = False


@dataclass(frozen=True)
class UserTopology(Topology):
    """The user's own edges, which may have directions and weights."""

    @abstractmethod
    def read(self, nodes: int) -> EdgeData:
        """The edges, checked for this number of nodes."""

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return self.read(nodes).ends

    def sample(self, nodes: int, seed: int, attempt: int) -> StaticGraph:
        check_at_least("nodes", nodes, 1)
        ends, weights, directed = self.read(nodes)
        return StaticGraph.from_edges(nodes, ends, attempt, weights=weights, directed=directed)


@dataclass(frozen=True)
class EdgeList(UserTopology):
    """A text file with two ids from 0 to n - 1 on every line; # begins a comment.

    An undirected edge may be listed in either direction, or in both. In a directed list, `a b`
    means that a sends to b. In a weighted list, a positive number follows; `a a 2.5` sets the
    weight that a gives itself, which is 1 otherwise.
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
        edges = _parse_all_lines(lines, nodes, self.directed, self.weighted)
        if edges is None or "+" in text:  # numpy takes +1 for an id
            edges = self._parse_lines(lines, nodes)
        if nodes > 1 and (edges.ends[:, 0] == edges.ends[:, 1]).all():
            raise InputError(
                f"the edge list {self.path} has no edge between two of {nodes} nodes; "
                "write two node ids on every line"
            )
        return edges

    def _parse_lines(self, lines: Sequence[str], nodes: int) -> EdgeData:
        """The edges read line by line, to name a wrong line in the error."""
        seen: dict[tuple[int, int], float] = {}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            where = f"{self.path}, line {number}"
            a, b = _parse_ids(words, nodes, where, self.weighted)
            weight = _parse_weight(words[2], where) if self.weighted else 1.0
            edge = (a, b) if self.directed else (min(a, b), max(a, b))
            if seen.setdefault(edge, weight) != weight:
                raise InputError(
                    f"{where}: {a} {b} has weight {weight} here and {seen[edge]} before; keep one"
                )
        ends = np.array(list(seen), dtype=np.int64).reshape(-1, 2)
        weights = np.array(list(seen.values())) if self.weighted else None
        return EdgeData(ends, weights, self.directed)


@dataclass(frozen=True)
class DynamicRegular(Topology):
    """A new random k-regular graph in every round, as in EL-Oracle and FACADE (P3).

    The graph of one round need not be connected; over the rounds, all pairs of nodes meet.
    """

    k: int = 4

    def __post_init__(self) -> None:
        check_at_least("k", self.k, 1)

    def draw(self, nodes: int, rng: np.random.Generator) -> Edges:
        return regular_edges(nodes, self.k, rng)

    def build(self, nodes: int, seed: int) -> Graph:
        graph = DynamicGraph(nodes, 0, self, seed)
        graph.links(0)  # raises an error about k now, not in the first round
        return graph

    def of_size(self, nodes: int) -> "DynamicRegular":
        """The topology for fewer nodes, with the largest possible degree up to k."""
        k = min(self.k, nodes - 1)
        return replace(self, k=max(1, k - k * nodes % 2))


@dataclass(frozen=True)
class DynamicGraph(Graph):
    """A graph that is drawn again in each round t, from the stream (seed, "graph", t)."""

    topology: DynamicRegular
    seed: int
    dynamic: ClassVar[bool] = True

    def links(self, round: int) -> sparse.csr_array:
        return _drawn(self.topology, self.nodes, self.seed, round).links(round)

    def among(self, present_nodes: tuple[int, ...], round: int) -> Neighbours:
        """The neighbours of every node in a graph drawn for these nodes alone."""
        if len(present_nodes) == self.nodes:
            return self.neighbours(round)
        return _drawn_among(self, present_nodes, round)


@lru_cache(maxsize=2)
def _drawn(topology: DynamicRegular, nodes: int, seed: int, round: int) -> StaticGraph:
    return topology.sample(nodes, seed, round)


@lru_cache(maxsize=2)
def _drawn_among(graph: DynamicGraph, present_nodes: tuple[int, ...], round: int) -> Neighbours:
    neighbours: list[tuple[int, ...]] = [()] * graph.nodes
    count = len(present_nodes)
    if count > 1:
        drawn = graph.topology.of_size(count).sample(count, graph.seed, round)
        for node, near in zip(present_nodes, drawn.neighbours(round), strict=True):
            neighbours[node] = tuple(present_nodes[other] for other in near)
    return tuple(neighbours)


@dataclass(frozen=True)
class FromGraph(UserTopology):
    """A simple networkx graph; from Python only, as it cannot be written to a file.

    Its nodes become 0..n-1 in sorted order, or in order of insertion if they cannot be sorted. In a
    directed graph, the edge (a, b) means that a sends to b. The graph is weighted if any edge has a
    `weight`; the others then weigh 1. A self-loop sets the weight that a node gives itself.
    """

    graph: "nx.Graph"

    def __post_init__(self) -> None:
        import networkx as nx

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
        numbers = np.array([_edge_weight(a, b, weight) for a, b, weight in triples])
        weights = numbers if self._weighted() else None
        return EdgeData(ends, weights, self.graph.is_directed())


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


def _parse_all_lines(
    lines: Sequence[str], nodes: int, directed: bool, weighted: bool
) -> EdgeData | None:
    """All lines of an edge list, or None if one of them is invalid."""
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


def _parse_ids(words: list[str], nodes: int, where: str, weighted: bool) -> tuple[int, int]:
    text = " ".join(words)
    form = "two node ids and a weight" if weighted else "two node ids"
    ids = words[:2]
    if len(words) != 2 + weighted or not all(word.isascii() and word.isdigit() for word in ids):
        raise InputError(f"{where}: expected {form}, got {text!r}")
    a, b = map(int, ids)
    if max(a, b) >= nodes:
        raise InputError(f"{where}: unknown node {max(a, b)}; the ids are 0 to {nodes - 1}")
    if a == b and not weighted:
        raise InputError(f"{where}: node {a} is joined to itself; remove the line")
    return a, b


def _parse_weight(word: str, where: str) -> float:
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


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and isfinite(value)):
        raise InputError(f"{name} must be a positive number, got {value}")


def _check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InputError(f"{name} must lie in [0, 1], got {value}")


def _check_below_nodes(name: str, value: int, nodes: int) -> None:
    if value >= nodes:
        raise InputError(f"{name} must be smaller than the {nodes} nodes, got {value}")


def _check_mean_degree(degree: float, nodes: int) -> None:
    if degree > nodes - 1:
        raise InputError(f"degree must be at most {nodes - 1} for {nodes} nodes, got {degree}")
