"""The built graph, against networkx and by hand."""

import dataclasses
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.errors import InputError
from peerage.graph import (
    StaticGraph,
    adjacency_matrix,
    component_labels,
    components,
    degrees,
    diameter,
    is_connected,
    refuse_disconnected,
)

PATH_AND_PAIR = StaticGraph.from_edges(6, [(2, 0), (0, 3), (4, 1)])  # 2-0-3, 1-4, 5


@st.composite
def graphs(draw: st.DrawFn) -> StaticGraph:
    nodes = draw(st.integers(1, 14))
    ids = st.integers(0, nodes - 1)
    return StaticGraph.from_edges(nodes, draw(st.lists(st.tuples(ids, ids), max_size=40)))


def test_edges_in_any_order_direction_and_number() -> None:
    graph = StaticGraph.from_edges(4, [(3, 1), (1, 3), (0, 1), (0, 1), (2, 2)], attempt=5)
    assert graph.neighbours(0) == ((1,), (0, 3), (), (1,))
    assert graph.edges() == ((0, 1), (1, 3))
    assert graph.nodes == 4
    assert graph.attempt == 5
    assert graph == StaticGraph.from_edges(4, np.array([[0, 1], [1, 3]]), attempt=5)


def test_a_graph_without_edges() -> None:
    graph = StaticGraph.from_edges(3, [])
    assert graph.neighbours(0) == ((), (), ())
    assert graph.edges() == ()
    assert components(graph) == ((0,), (1,), (2,))


def test_static_graphs_are_frozen_and_travel() -> None:
    assert PATH_AND_PAIR.neighbours(9) is PATH_AND_PAIR.neighbours(0)
    assert pickle.loads(pickle.dumps(PATH_AND_PAIR)) == PATH_AND_PAIR
    with pytest.raises(dataclasses.FrozenInstanceError):
        PATH_AND_PAIR.nodes = 7  # type: ignore[misc]


def test_components_by_hand() -> None:
    assert components(PATH_AND_PAIR) == ((0, 2, 3), (1, 4), (5,))
    assert not is_connected(PATH_AND_PAIR)
    assert is_connected(StaticGraph.from_edges(1, []))
    with pytest.raises(InputError, match=r"^a graph with 3 components is in pieces$"):
        refuse_disconnected(PATH_AND_PAIR, "is in pieces")


@given(graphs())
@settings(deadline=None, max_examples=80)
def test_graphs_agree_with_networkx(graph: StaticGraph) -> None:
    same = graph.networkx()
    assert list(same.nodes) == list(range(graph.nodes))
    assert {tuple(sorted(edge)) for edge in same.edges} == set(graph.edges())
    assert degrees(graph).tolist() == [degree for _, degree in same.degree]
    assert {frozenset(part) for part in components(graph)} == set(
        map(frozenset, nx.connected_components(same))
    )
    assert np.array_equal(adjacency_matrix(graph).toarray(), nx.to_numpy_array(same))
    labels = component_labels(graph)
    assert all(len({int(labels[node]) for node in part}) == 1 for part in components(graph))
    if is_connected(graph):
        assert diameter(graph) == nx.diameter(same)


def test_a_disconnected_graph_has_no_diameter() -> None:
    with pytest.raises(InputError, match=r"^a graph with 3 components has no diameter$"):
        diameter(PATH_AND_PAIR)
