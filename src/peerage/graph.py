"""A built communication graph: who may talk to whom in which round."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import or_
from typing import ClassVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csgraph

from peerage.errors import InputError

Neighbours = tuple[tuple[int, ...], ...]
Edges = Iterable[Sequence[int]] | NDArray[np.int64]


@dataclass(frozen=True)
class Graph(ABC):
    """A simple undirected graph with the ids 0..nodes-1, which may change from round to round."""

    nodes: int
    attempt: int  # how many draws were rejected before this one, as they were not connected
    dynamic: ClassVar[bool] = False

    @abstractmethod
    def neighbours(self, round: int) -> Neighbours:
        """The sorted neighbours of every node, without the node itself."""

    def edges(self, round: int = 0) -> tuple[tuple[int, int], ...]:
        """Each edge once, smaller id first, in order."""
        near = self.neighbours(round)
        return tuple((i, j) for i, others in enumerate(near) for j in others if i < j)

    def networkx(self, round: int = 0) -> nx.Graph:
        graph = nx.empty_graph(self.nodes)
        graph.add_edges_from(self.edges(round))
        return graph


@dataclass(frozen=True)
class StaticGraph(Graph):
    """The same neighbours in every round."""

    adjacency: Neighbours = field(repr=False)

    @classmethod
    def from_edges(cls, nodes: int, edges: Edges, attempt: int = 0) -> "StaticGraph":
        """Edges in any order and direction; repeated ones count once, self-loops not at all."""
        listed = edges if isinstance(edges, np.ndarray) else list(edges)
        ends = np.asarray(listed, dtype=np.int64).reshape(-1, 2)
        ends = ends[ends[:, 0] != ends[:, 1]]
        both = np.concatenate([ends, ends[:, ::-1]])
        codes = np.sort(both[:, 0] * nodes + both[:, 1])  # numpy.unique takes 70 times as long
        rows, columns = np.divmod(codes[np.diff(codes, prepend=-1) > 0], nodes)
        bounds = np.searchsorted(rows, np.arange(nodes + 1)).tolist()
        flat = columns.tolist()
        near = tuple(tuple(flat[bounds[i] : bounds[i + 1]]) for i in range(nodes))
        return cls(nodes, attempt, near)

    def neighbours(self, round: int) -> Neighbours:
        return self.adjacency


def adjacency_matrix(graph: Graph) -> sparse.csr_array:
    near = graph.neighbours(0)
    bounds = np.cumsum([0, *map(len, near)])
    columns = np.fromiter(chain.from_iterable(near), dtype=np.int64, count=int(bounds[-1]))
    shape = (graph.nodes, graph.nodes)
    return sparse.csr_array((np.ones(len(columns)), columns, bounds), shape=shape)


def degrees(graph: Graph) -> NDArray[np.int64]:
    return np.array([len(others) for others in graph.neighbours(0)], dtype=np.int64)


def components(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The ids of every connected component, in the order of their smallest ids."""
    members: dict[int, list[int]] = {}
    for node, label in enumerate(component_labels(graph).tolist()):
        members.setdefault(label, []).append(node)
    return tuple(map(tuple, members.values()))


def is_connected(graph: Graph) -> bool:
    return bool(component_labels(graph).max() == 0)


def diameter(graph: Graph) -> int:
    """The longest shortest path of a connected graph.

    The ball around every node is one integer with a bit per node, and grows by a step at a time.
    """
    refuse_disconnected(graph, "has no diameter")
    near = graph.neighbours(0)
    everything = (1 << graph.nodes) - 1
    balls = [1 << node for node in range(graph.nodes)]
    steps = 0
    while any(ball != everything for ball in balls):
        balls = [reduce(or_, (balls[j] for j in others), balls[i]) for i, others in enumerate(near)]
        steps += 1
    return steps


def component_labels(graph: Graph) -> NDArray[np.int64]:
    """One number per node, equal within a component, from 0 upwards."""
    labels: NDArray[np.int64] = csgraph.connected_components(adjacency_matrix(graph))[1]
    return labels


def refuse_disconnected(graph: Graph, why: str) -> None:
    """`why` completes the sentence: a graph with several components ..."""
    if not is_connected(graph):
        raise InputError(f"a graph with {len(components(graph))} components {why}")
