"""A communication graph: which nodes exchange messages in which round.

Links are kept as one sparse matrix, so that a million nodes fit in memory. Lists of neighbours are
made on demand.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse import csgraph

from peerage.errors import InputError

if TYPE_CHECKING:
    import networkx as nx

Neighbours = tuple[tuple[int, ...], ...]
Edges = Iterable[Sequence[int]] | NDArray[np.int64]
Vector = NDArray[np.float64]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Graph(ABC):
    """A simple graph with the ids 0..nodes-1, which may change from round to round."""

    nodes: int
    attempt: int  # number of draws before this one, rejected because they were not connected
    directed: bool = field(default=False, kw_only=True)
    weighted: bool = field(default=False, kw_only=True)
    # Self-loop weight of every node; None: 1 each.
    self_loops: Vector | None = field(default=None, kw_only=True, repr=False, compare=False)
    dynamic: ClassVar[bool] = False
    # Cache by name: the last links, and the value derived from them.
    _derived: dict[str, tuple[sparse.csr_array, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @abstractmethod
    def links(self, round: int) -> sparse.csr_array:
        """[n, n]: row i holds the weights of the neighbours of node i, without self-loops."""

    def neighbours(self, round: int) -> Neighbours:
        """The nodes from which every node receives, in order, without the node itself."""
        return self.derived("neighbours", round, _rows)

    def out_neighbours(self, round: int) -> Neighbours:
        """The nodes to which every node sends; `neighbours` unless the graph is directed."""
        if not self.directed:
            return self.neighbours(round)
        return self.derived("listeners", round, lambda links: _rows(links.T.tocsr()))

    def derived(self, name: str, round: int, make: Callable[[sparse.csr_array], Value]) -> Value:
        """`make(links)`, cached under `name` as long as the links stay the same object."""
        links = self.links(round)
        entry = self._derived.get(name)
        if entry is None or entry[0] is not links:
            entry = self._derived[name] = (links, make(links))
        value: Value = entry[1]
        return value

    def edge_array(self, round: int = 0) -> NDArray[np.int64]:
        """The edges as an array [m, 2], each once and in order; see `edges`."""
        links = self.links(round)
        links = links.T.tocsr() if self.directed else sparse.triu(links, k=1, format="csr")
        senders = np.repeat(np.arange(self.nodes), np.diff(links.indptr))
        return np.stack([senders, links.indices.astype(np.int64)], axis=1)

    def edges(self, round: int = 0) -> tuple[tuple[int, int], ...]:
        """Each edge once, with the smaller id first, or the sender first if directed."""
        a, b = self.edge_array(round).T.tolist()
        return tuple(zip(a, b, strict=True))

    def networkx(self, round: int = 0) -> "nx.Graph":
        """A networkx graph; if weighted, with a `weight` on every edge and with self-loops."""
        import networkx as nx  # 11 MB and half a second, which few callers need

        graph = nx.empty_graph(self.nodes, create_using=nx.DiGraph if self.directed else nx.Graph)
        if not self.weighted:
            graph.add_edges_from(self.edges(round))
            return graph
        links = self.links(round).tocoo()
        triples = zip(links.col.tolist(), links.row.tolist(), links.data.tolist(), strict=True)
        graph.add_weighted_edges_from(triples)
        if self.self_loops is not None:
            graph.add_weighted_edges_from((i, i, w) for i, w in enumerate(self.self_loops.tolist()))
        return graph


@dataclass(frozen=True, eq=False)
class StaticGraph(Graph):
    """The same links in every round."""

    matrix: sparse.csr_array = field(repr=False)

    @classmethod
    def from_edges(
        cls,
        nodes: int,
        edges: Edges,
        attempt: int = 0,
        *,
        weights: ArrayLike | None = None,
        directed: bool = False,
        self_loops: ArrayLike | None = None,
    ) -> "StaticGraph":
        """A graph from edges in any order; repeated edges count once, self-loops are dropped.

        Undirected edges may be given in either direction. In a directed edge (a, b), a sends to b.
        With `weights`, a self-loop sets the weight that a node gives itself.
        """
        ends = _checked_ends(nodes, edges)
        w = None if weights is None else _checked_weights(weights, len(ends), "edges")
        own = None if self_loops is None else _checked_weights(self_loops, nodes, "nodes").copy()
        loops = ends[:, 0] == ends[:, 1]
        if loops.any():
            if w is not None:
                own = np.ones(nodes) if own is None else own
                subject = "node {} gives itself".format
                looped, values = _sorted_once(ends[loops, 0], w[loops], subject)
                own[looped] = values
                w = w[~loops]
            ends = ends[~loops]
        return cls(
            nodes,
            attempt,
            _link_matrix(nodes, ends, w, directed),
            directed=directed,
            weighted=w is not None or own is not None,
            self_loops=None if own is None or (own == 1).all() else own,
        )

    def links(self, round: int) -> sparse.csr_array:
        return self.matrix

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticGraph):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[int | bytes, ...]:
        """What is the same in equal graphs, and only in these."""
        arrays = (self.matrix.indptr, self.matrix.indices, self.matrix.data, self_weights(self))
        facts = (self.nodes, self.attempt, self.directed, self.weighted)
        return *facts, *(array.tobytes() for array in arrays)


def self_weights(graph: Graph) -> Vector:
    """The weight that every node gives itself, beside the weights of its links."""
    return np.ones(graph.nodes) if graph.self_loops is None else graph.self_loops


def adjacency_matrix(graph: Graph) -> sparse.csr_array:
    """1 where node i receives from j in round 0, whatever the weight; do not change it in place."""
    links = graph.links(0)
    if not graph.weighted:
        return links
    return sparse.csr_array((np.ones(links.nnz), links.indices, links.indptr), shape=links.shape)


def degrees(graph: Graph) -> NDArray[np.int64]:
    """The number of neighbours of every node in round 0."""
    k: NDArray[np.int64] = np.diff(graph.links(0).indptr).astype(np.int64)
    return k


def components(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The ids of every connected component, in the order of their smallest ids."""
    labels = component_labels(graph)
    order = np.argsort(labels, kind="stable")
    bounds = np.cumsum([0, *np.bincount(labels)]).tolist()
    members = order.tolist()
    return tuple(tuple(members[start:end]) for start, end in pairwise(bounds))


def component_labels(graph: Graph) -> NDArray[np.int64]:
    """The component of every node, numbered from 0 in the order of their smallest ids.

    Directions are ignored: a path in either direction joins two nodes.
    """
    return graph.derived("components", 0, _labels)


def is_connected(graph: Graph) -> bool:
    """Whether there is one component, ignoring directions."""
    return bool(component_labels(graph).max() == 0)


def is_strongly_connected(graph: Graph) -> bool:
    """Whether a directed path leads from every node to every other."""
    return bool(strong_labels(graph).max() == 0)


def strong_labels(graph: Graph) -> NDArray[np.int64]:
    """The strongly connected component of every node: equal numbers mean paths both ways."""
    if not graph.directed:
        return component_labels(graph)
    return graph.derived("strong components", 0, lambda links: _labels(links, "strong"))


def first_not_strong(graph: Graph) -> int | None:
    """The first node in a component that is not strongly connected, if there is one."""
    labels, strong = component_labels(graph), strong_labels(graph)
    if labels.max() == strong.max():
        return None
    parts = np.bincount(labels[np.unique(strong, return_index=True)[1]])
    return int(np.flatnonzero(parts[labels] > 1)[0])


def diameter(graph: Graph) -> int:
    """The longest shortest path of a connected graph.

    The nodes within reach of a node are the bits of one integer, which grows by one hop at a time.
    """
    require_connected(graph, "has no diameter")
    if not is_strongly_connected(graph):
        raise InputError("a directed graph that is not strongly connected has no diameter")
    neighbours = graph.neighbours(0)
    all_nodes = (1 << graph.nodes) - 1
    reach = [1 << node for node in range(graph.nodes)]
    hops = 0
    while any(nodes != all_nodes for nodes in reach):
        reach = [reduce(or_, (reach[j] for j in js), reach[i]) for i, js in enumerate(neighbours)]
        hops += 1
    return hops


def require_connected(graph: Graph, why: str) -> None:
    """Raise an error unless connected; `why` continues "a graph with several components ..."."""
    if not is_connected(graph):
        raise InputError(f"a graph with {component_labels(graph).max() + 1} components {why}")


def _checked_ends(nodes: int, edges: Edges) -> NDArray[np.int64]:
    if nodes < 1:
        raise InputError(f"a graph needs at least one node, got {nodes}")
    pairs = edges if isinstance(edges, np.ndarray) else list(edges)
    ends = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    if len(ends) and not 0 <= ends.min() <= ends.max() < nodes:
        node = ends[(ends < 0) | (ends >= nodes)][0]
        raise InputError(f"an edge names the unknown node {node}; the ids are 0 to {nodes - 1}")
    return ends


def _checked_weights(weights: ArrayLike, count: int, what: str) -> Vector:
    w = np.asarray(weights, dtype=np.float64)
    if w.shape != (count,):
        raise InputError(f"expected one weight for each of {count} {what}, got shape {w.shape}")
    if not (np.isfinite(w).all() and (w > 0).all()):
        wrong = w[~(np.isfinite(w) & (w > 0))][0]
        raise InputError(f"weights must be positive and finite, got {wrong}")
    return w


def _link_matrix(
    nodes: int, ends: NDArray[np.int64], weights: Vector | None, directed: bool
) -> sparse.csr_array:
    """The matrix of links, by sorting one number per link: the recipient, then the sender."""
    bits = nodes.bit_length()
    senders, recipients = ends[:, 0], ends[:, 1]
    codes = recipients << bits | senders
    if not directed:
        codes = np.concatenate([codes, senders << bits | recipients])
        weights = None if weights is None else np.concatenate([weights, weights])
    if weights is None:
        codes.sort()  # numpy.unique takes many times as long
        codes = codes[np.diff(codes, prepend=-1) > 0]
        weights = np.ones(len(codes))
    else:
        mask = (1 << bits) - 1
        codes, weights = _sorted_once(
            codes, weights, lambda code: f"the edge from {code & mask} to {code >> bits} has"
        )
    bounds = np.zeros(nodes + 1, dtype=np.int32)
    np.cumsum(np.bincount(codes >> bits, minlength=nodes), out=bounds[1:])
    columns = (codes & ((1 << bits) - 1)).astype(np.int32)
    return sparse.csr_array((weights, columns, bounds), shape=(nodes, nodes))


def _sorted_once(
    keys: NDArray[np.int64], weights: Vector, subject: Callable[[int], str]
) -> tuple[NDArray[np.int64], Vector]:
    """Every key once, in order, with its weight; `subject` begins the error about two weights."""
    order = np.argsort(keys)
    keys, weights = keys[order], weights[order]
    repeats = keys[1:] == keys[:-1]
    differ = np.flatnonzero(repeats & (weights[1:] != weights[:-1]))
    if len(differ):
        at = int(differ[0])
        low, high = sorted(weights[at : at + 2].tolist())
        raise InputError(f"{subject(int(keys[at]))} two weights, {low} and {high}; keep one")
    first = np.concatenate([[True], ~repeats]) if len(keys) else repeats
    return keys[first], weights[first]


def _rows(links: sparse.csr_array) -> Neighbours:
    flat = links.indices.tolist()
    return tuple(tuple(flat[start:end]) for start, end in pairwise(links.indptr.tolist()))


def _labels(links: sparse.csr_array, connection: str = "weak") -> NDArray[np.int64]:
    """Component of every node, numbered by smallest id, which scipy does not guarantee."""
    found = csgraph.connected_components(links, connection=connection)[1]
    _, first, labels = np.unique(found, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    numbered: NDArray[np.int64] = rank[labels]
    return numbered
