"""The built graph, against networkx and by hand."""

import dataclasses
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import lines_at_most

from peerage.errors import InputError
from peerage.graphs.graph import (
    StaticGraph,
    adjacency_matrix,
    component_labels,
    components,
    degrees,
    diameter,
    is_connected,
    is_strongly_connected,
    require_connected,
    self_weights,
    strong_labels,
)

Triple = tuple[int, int, float]

PATH_AND_PAIR = StaticGraph.from_edges(6, [(2, 0), (0, 3), (4, 1)])  # 2-0-3, 1-4, 5


@st.composite
def graphs(draw: st.DrawFn) -> StaticGraph:
    nodes = draw(st.integers(1, 14))
    ids = st.integers(0, nodes - 1)
    return StaticGraph.from_edges(nodes, draw(st.lists(st.tuples(ids, ids), max_size=40)))


@st.composite
def weighted_lists(draw: st.DrawFn) -> tuple[int, list[Triple]]:
    """Edges with one weight per ordered pair of ids, some of them twice."""
    nodes = draw(st.integers(1, 9))
    ids = st.integers(0, nodes - 1)
    weights = draw(
        st.dictionaries(st.tuples(ids, ids), st.sampled_from([0.25, 1.0, 3.5]), max_size=20)
    )
    once = [(a, b, w) for (a, b), w in weights.items()]
    return nodes, once + (draw(st.lists(st.sampled_from(once), max_size=5)) if once else [])


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
        require_connected(PATH_AND_PAIR, "is in pieces")


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


# Directions and weights


def test_a_directed_edge_goes_from_the_sender_to_the_receiver() -> None:
    graph = StaticGraph.from_edges(4, [(0, 1), (2, 1), (1, 3), (3, 1), (0, 1)], directed=True)
    assert graph.neighbours(0) == ((), (0, 2, 3), (), (1,))  # the senders of each node
    assert graph.out_neighbours(0) == ((1,), (3,), (1,), (1,))
    assert graph.edges() == ((0, 1), (1, 3), (2, 1), (3, 1))
    assert degrees(graph).tolist() == [0, 3, 0, 1]
    assert graph.directed
    assert not graph.weighted
    assert is_connected(graph)
    assert not is_strongly_connected(graph)
    assert strong_labels(graph).tolist() == [0, 1, 2, 1]
    assert graph != StaticGraph.from_edges(4, graph.edges())
    assert set(graph.networkx().edges) == set(graph.edges())
    with pytest.raises(InputError, match="that is not strongly connected has no diameter"):
        diameter(graph)


def test_out_neighbours_of_an_undirected_graph_are_its_neighbours() -> None:
    assert PATH_AND_PAIR.out_neighbours(3) is PATH_AND_PAIR.neighbours(0)
    assert np.array_equal(strong_labels(PATH_AND_PAIR), component_labels(PATH_AND_PAIR))


def test_a_directed_cycle_has_a_diameter() -> None:
    cycle = StaticGraph.from_edges(5, [(i, (i + 1) % 5) for i in range(5)], directed=True)
    assert is_strongly_connected(cycle)
    assert diameter(cycle) == 4 == nx.diameter(cycle.networkx())


def test_weights_by_hand() -> None:
    graph = StaticGraph.from_edges(
        3, [(1, 0), (1, 2), (0, 1), (2, 2)], weights=[2.0, 0.5, 2.0, 4.0]
    )
    assert graph.weighted
    assert graph.links(0).toarray().tolist() == [[0, 2, 0], [2, 0, 0.5], [0, 0.5, 0]]
    assert self_weights(graph).tolist() == [1, 1, 4]
    assert adjacency_matrix(graph).toarray().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    assert degrees(graph).tolist() == [1, 2, 1]
    given = StaticGraph.from_edges(3, [(0, 1), (1, 2)], weights=[2, 0.5], self_loops=[1, 1, 4])
    assert given == graph
    assert hash(given) == hash(graph)
    assert pickle.loads(pickle.dumps(graph)) == graph
    for other in ({"weights": [2, 1]}, {"weights": [2, 0.5]}, {}):
        assert StaticGraph.from_edges(3, [(0, 1), (1, 2)], **other) != graph


def test_self_weights_of_one_are_the_default() -> None:
    plain = StaticGraph.from_edges(2, [(0, 1)], weights=[3])
    assert plain.self_loops is None
    assert StaticGraph.from_edges(2, [(0, 1), (1, 1)], weights=[3, 1]) == plain
    assert StaticGraph.from_edges(2, [(0, 1)], self_loops=[1, 2]).weighted


@given(weighted_lists(), st.booleans())
@settings(deadline=None, max_examples=80)
def test_from_edges_equals_a_slow_dictionary(
    listed: tuple[int, list[Triple]], weighted: bool
) -> None:
    nodes, triples = listed
    ends = [(a, b) for a, b, _ in triples]
    weights = [w for *_, w in triples]
    in_neighbours: dict[int, dict[int, float]] = {node: {} for node in range(nodes)}
    own = [1.0] * nodes
    for a, b, w in triples:
        if a != b:
            in_neighbours[b][a] = w if weighted else 1.0
        elif weighted:
            own[a] = w
    graph = StaticGraph.from_edges(
        nodes, ends, weights=weights if weighted else None, directed=True
    )
    links = graph.links(0)
    rows = [slice(*links.indptr[node : node + 2]) for node in range(nodes)]
    found = [dict(zip(links.indices[r], links.data[r], strict=True)) for r in rows]
    assert found == list(in_neighbours.values())
    assert graph.neighbours(0) == tuple(tuple(sorted(others)) for others in in_neighbours.values())
    assert self_weights(graph).tolist() == own
    assert links.indices.dtype == links.indptr.dtype == np.int32
    assert links.data.dtype == np.float64
    assert is_strongly_connected(graph) == nx.is_strongly_connected(graph.networkx())


@given(graphs(), st.data())
@settings(deadline=None, max_examples=40)
def test_undirected_weights_are_symmetric(graph: StaticGraph, data: st.DataObject) -> None:
    edges = graph.edges()
    sizes = st.lists(st.floats(0.1, 9), min_size=len(edges), max_size=len(edges))
    weights = data.draw(sizes)
    links = StaticGraph.from_edges(graph.nodes, edges, weights=weights).links(0).toarray()
    expected = np.zeros((graph.nodes, graph.nodes))
    for (a, b), w in zip(edges, weights, strict=True):
        expected[a, b] = expected[b, a] = w
    assert np.array_equal(links, expected)


@pytest.mark.parametrize(
    ("edges", "options", "message"),
    [
        ([(0, 3)], {}, "an edge names the unknown node 3; the ids are 0 to 2"),
        ([(-1, 0)], {}, "an edge names the unknown node -1; the ids are 0 to 2"),
        ([(0, 1)], {"weights": [0]}, "weights must be positive and finite, got 0.0"),
        ([(0, 1)], {"weights": [np.nan]}, "weights must be positive and finite, got nan"),
        (
            [(0, 1)],
            {"weights": [1, 2]},
            "expected one weight for each of 1 edges, got shape (2,)",
        ),
        ([], {"self_loops": [1]}, "expected one weight for each of 3 nodes, got shape (1,)"),
        (
            [(0, 1), (1, 0)],
            {"weights": [1, 2]},
            "the edge from 1 to 0 has two weights, 1.0 and 2.0; keep one",
        ),
        (
            [(2, 2), (2, 2)],
            {"weights": [1, 2]},
            "node 2 gives itself two weights, 1.0 and 2.0; keep one",
        ),
    ],
)
def test_wrong_edges_and_weights(
    edges: list[tuple[int, int]], options: dict[str, list[float]], message: str
) -> None:
    with pytest.raises(InputError) as error:
        StaticGraph.from_edges(3, edges, **options)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_a_graph_has_nodes() -> None:
    with pytest.raises(InputError, match="a graph needs at least one node, got 0"):
        StaticGraph.from_edges(0, [])


def test_many_edges_are_sorted_as_arrays() -> None:
    ends = np.random.default_rng(0).integers(20_000, size=(100_000, 2))
    with lines_at_most(5000):
        graph = StaticGraph.from_edges(20_000, ends)
    low, high = np.sort(ends, axis=1).T
    once = np.unique(low[low < high] * 20_000 + high[low < high])
    assert np.array_equal(graph.edge_array() @ [20_000, 1], once)
    assert degrees(graph).sum() == 2 * len(once)
