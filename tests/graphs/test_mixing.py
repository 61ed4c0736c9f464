"""Mixing quantities, against eigenvectors, naive loops and numbers by hand."""

import json
import math
from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, aslinearoperator
from support.effort import lines_at_most

from peerage.errors import InputError
from peerage.graphs import graph as graphs
from peerage.graphs import mixing
from peerage.graphs.graph import (
    Graph,
    StaticGraph,
    component_labels,
    degrees,
    is_strongly_connected,
)
from peerage.graphs.mixing import (
    degree_gain,
    describe,
    gain,
    gains,
    mean_excess_degree,
    mixing_matrix,
    mixing_time,
    power_iteration,
    second_eigenvalue,
    spectral_gap,
    stationary,
)
from peerage.graphs.topology import (
    BarabasiAlbert,
    Complete,
    DynamicRegular,
    ErdosRenyi,
    FromGraph,
    Regular,
    Ring,
    Star,
    StochasticBlocks,
    Topology,
    Torus,
    TwoGroup,
)
from peerage.randomness import numpy_stream

PATH = StaticGraph.from_edges(3, [(0, 1), (1, 2)])
PIECES = StaticGraph.from_edges(6, [(0, 1), (1, 2), (3, 4)])  # a path, a pair, a single node
KINDS = [
    BarabasiAlbert(m=2),
    Complete(),
    ErdosRenyi(p=0.4),
    Regular(k=3),
    Ring(),
    Star(),
    Torus(rows=2),
    TwoGroup(),
]
KIND = st.sampled_from(KINDS)
SIZE = st.integers(3, 12).map(lambda half: 2 * half)
SEED = st.integers(0, 10_000)
ONE_WAY = StaticGraph.from_edges(3, [(0, 1), (1, 2)], directed=True)  # no node receives from 2


@st.composite
def strong_graphs(draw: st.DrawFn) -> StaticGraph:
    """A directed cycle with further links of any direction, perhaps with weights."""
    nodes = draw(st.integers(2, 12))
    ids = st.integers(0, nodes - 1)
    cycle = [(i, (i + 1) % nodes) for i in range(nodes)]
    more = draw(st.lists(st.tuples(ids, ids).filter(lambda e: e[0] != e[1]), max_size=15))
    ends = sorted({*cycle, *more})
    rng = np.random.default_rng(draw(SEED))
    if draw(st.booleans()):
        return StaticGraph.from_edges(nodes, ends, directed=True)
    weights, own = rng.uniform(0.1, 5, len(ends)), rng.uniform(0.1, 5, nodes)
    return StaticGraph.from_edges(nodes, ends, weights=weights, self_loops=own, directed=True)


def weighed(graph: Graph, seed: int) -> StaticGraph:
    """The same links with random weights."""
    rng = np.random.default_rng(seed)
    ends = graph.edge_array()
    weights, own = rng.uniform(0.1, 5, len(ends)), rng.uniform(0.1, 5, graph.nodes)
    return StaticGraph.from_edges(graph.nodes, ends, weights=weights, self_loops=own)


def left_eigenvector(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    values, vectors = np.linalg.eig(matrix.T)
    v: NDArray[np.float64] = np.real(vectors[:, np.argmax(values.real)])
    return np.asarray(v / v.sum())


def naive_mixing_time(graph: Graph, epsilon: float) -> int:
    a = mixing_matrix(graph).toarray()
    v = left_eigenvector(a)
    power = np.eye(graph.nodes)
    for rounds in range(100_000):
        if np.abs(power - v).sum(axis=1).max() / 2 <= epsilon + 1e-12:
            return rounds
        power = power @ a
    raise AssertionError("never mixed")


# Mixing matrices


def test_weights_of_a_path_by_hand() -> None:
    uniform = [[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 2, 1 / 2]]
    data = [[1 / 3, 2 / 3, 0], [1 / 6, 2 / 6, 3 / 6], [0, 2 / 5, 3 / 5]]
    metropolis = [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]]
    np.testing.assert_allclose(mixing_matrix(PATH).toarray(), uniform, atol=1e-15)
    np.testing.assert_allclose(mixing_matrix(PATH, "data", [1, 2, 3]).toarray(), data, atol=1e-15)
    np.testing.assert_allclose(mixing_matrix(PATH, "metropolis").toarray(), metropolis, atol=1e-15)


def test_neighbourhoods_without_data_average_uniformly() -> None:
    path = StaticGraph.from_edges(4, [(0, 1), (1, 2), (2, 3)])
    expected = np.array(
        [[1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    )
    np.testing.assert_allclose(mixing_matrix(path, "data", [0, 0, 0, 5]).toarray(), expected)
    np.testing.assert_allclose(
        mixing_matrix(path, "data", [0, 0, 0, 0]).toarray(), mixing_matrix(path).toarray()
    )


@given(KIND, SIZE, SEED)
@settings(deadline=None, max_examples=40)
def test_rows_sum_to_one_and_metropolis_is_symmetric(kind: Topology, nodes: int, seed: int) -> None:
    graph = kind.build(nodes, seed)
    d = np.random.default_rng(seed).integers(0, 4, nodes)
    for weights in ("uniform", "data", "metropolis"):
        a = mixing_matrix(graph, weights, d)
        assert isinstance(a, sparse.csr_array)
        np.testing.assert_allclose(a.sum(axis=1), 1, atol=1e-14)
        assert (a.toarray() >= 0).all()
    assert (abs(a - a.T)).max() < 1e-15
    k = degrees(graph)
    i, j = graph.edges()[0]
    assert a[i, j] == pytest.approx(1 / (1 + max(k[i], k[j])))


# Stationary vector and gain


@given(KIND, SIZE, SEED)
@settings(deadline=None, max_examples=40)
def test_closed_forms_equal_the_eigenvector(kind: Topology, nodes: int, seed: int) -> None:
    graph = kind.build(nodes, seed)
    d = np.random.default_rng(seed).integers(1, 500, nodes)
    for weights in ("uniform", "data", "metropolis"):
        a = mixing_matrix(graph, weights, d)
        v = left_eigenvector(a.toarray())
        found = stationary(graph, weights, d)
        np.testing.assert_allclose(found, v, atol=1e-12)
        np.testing.assert_allclose(found @ a, found, atol=1e-14)
        assert gain(graph, weights, d) == pytest.approx(1 / np.linalg.norm(v), rel=1e-12)
        assert gain(graph, weights, d) <= math.sqrt(nodes) + 1e-12


@given(KIND, SIZE, SEED)
@settings(deadline=None, max_examples=20)
def test_gain_equals_the_eigenvector_centrality_of_networkx(
    kind: Topology, nodes: int, seed: int
) -> None:
    for graph in (kind.build(nodes, seed), weighed(kind.build(nodes, seed), seed)):
        looped = nx.from_numpy_array(mixing_matrix(graph).toarray(), create_using=nx.DiGraph)
        centrality = nx.eigenvector_centrality_numpy(looped, weight="weight")
        v = np.array([centrality[node] for node in range(nodes)])
        np.testing.assert_allclose(stationary(graph), v / v.sum(), atol=1e-9)
        assert gain(graph) == pytest.approx(v.sum() / np.linalg.norm(v), rel=1e-9)


def test_gain_of_a_star_by_hand() -> None:
    # Closed degrees 5, 2, 2, 2, 2: their sum is 13, the sum of their squares 41.
    assert gain(Star().build(5, 0)) == pytest.approx(13 / math.sqrt(41), abs=1e-14)
    assert gain(Star().build(5, 0), "metropolis") == pytest.approx(math.sqrt(5), abs=1e-14)
    # Data of a path: d = 1, 2, 3 and s = 3, 6, 5 give v ~ 3, 12, 15.
    v = np.array([3, 12, 15]) / 30
    np.testing.assert_allclose(stationary(PATH, "data", [1, 2, 3]), v, atol=1e-15)
    assert gain(PATH, "data", [1, 2, 3]) == pytest.approx(1 / np.linalg.norm(v), abs=1e-14)


@pytest.mark.parametrize("kind", [Complete(), Ring(), Torus(), Regular(k=6)])
def test_regular_graphs_have_gain_root_n(kind: Topology) -> None:
    assert gain(kind.build(64, 0)) == pytest.approx(8, abs=1e-12)


def test_gain_of_one_node_is_one() -> None:
    assert gain(Ring().build(1, 0)) == 1


def test_gains_are_those_of_the_components() -> None:
    path = 7 / math.sqrt(17)  # closed degrees 2, 3, 2
    expected = [path, path, path, math.sqrt(2), math.sqrt(2), 1]
    np.testing.assert_allclose(gains(PIECES), expected, atol=1e-14)
    np.testing.assert_allclose(np.add.reduceat(stationary(PIECES), [0, 3, 5]), 1, atol=1e-15)
    with pytest.raises(InputError) as error:
        gain(PIECES)
    assert str(error.value) == "a graph with 3 components has one gain per component; use gains"


def test_components_without_data_are_uniform() -> None:
    found = stationary(PIECES, "data", [1, 2, 3, 0, 0, 0])
    np.testing.assert_allclose(found, [0.1, 0.4, 0.5, 0.5, 0.5, 1], atol=1e-15)


def test_some_nodes_without_data() -> None:
    # Nodes 0 and 1 hold data and send to each other; 2 and 3 only receive.
    path = StaticGraph.from_edges(4, [(0, 1), (1, 2), (2, 3)])
    found = stationary(path, "data", [1, 3, 0, 0])
    np.testing.assert_allclose(found, [0.25, 0.75, 0, 0], atol=1e-15)
    limit = power_iteration(mixing_matrix(path, "data", [1, 3, 0, 0]))
    np.testing.assert_allclose(found, limit, atol=1e-13)


def test_data_on_islands_falls_back_to_the_mean_of_all_nodes() -> None:
    # Nodes 0 and 2 never influence each other; node 1 ends at d-weighted 1/4 and 3/4 of them.
    found = stationary(PATH, "data", [1, 0, 3])
    np.testing.assert_allclose(found, [(1 + 1 / 4) / 3, 0, (1 + 3 / 4) / 3], atol=1e-12)
    limit = np.linalg.matrix_power(mixing_matrix(PATH, "data", [1, 0, 3]).toarray(), 100)
    np.testing.assert_allclose(found, limit.mean(axis=0), atol=1e-12)


def test_power_iteration_takes_directed_and_periodic_matrices() -> None:
    cycle = sparse.csr_array(np.roll(np.eye(5), 1, axis=1))
    np.testing.assert_allclose(power_iteration(cycle), np.full(5, 0.2), atol=1e-12)
    directed = np.array([[0.5, 0.5, 0], [0.2, 0.3, 0.5], [0.9, 0, 0.1]])
    found = power_iteration(sparse.csr_array(directed))
    np.testing.assert_allclose(found, left_eigenvector(directed), atol=1e-12)
    with pytest.raises(InputError, match="did not converge in 2 rounds; allow more rounds"):
        power_iteration(sparse.csr_array(directed), rounds=2)


# Weights and directions


def test_weights_of_a_graph_by_hand() -> None:
    graph = StaticGraph.from_edges(3, [(0, 1), (1, 2), (2, 2)], weights=[2, 1, 3])
    # Own weights 1, 1, 3: rows sum to 3, 4 and 4.
    expected = [[1 / 3, 2 / 3, 0], [2 / 4, 1 / 4, 1 / 4], [0, 1 / 4, 3 / 4]]
    np.testing.assert_allclose(mixing_matrix(graph).toarray(), expected, atol=1e-15)
    np.testing.assert_allclose(stationary(graph), np.array([3, 4, 4]) / 11, atol=1e-15)
    assert gain(graph) == pytest.approx(11 / math.sqrt(41), abs=1e-14)
    # What the weights are does not matter to the other kinds.
    for weights in ("uniform", "metropolis", "data"):
        a, b = (mixing_matrix(g, weights, [1, 2, 3]).toarray() for g in (graph, PATH))
        assert np.array_equal(a, b)
        assert gain(graph, weights, [1, 2, 3]) == gain(PATH, weights, [1, 2, 3])


def test_the_graphs_own_weights_are_uniform_where_it_has_none() -> None:
    graph = ErdosRenyi(p=0.3).build(20, 0)
    assert np.array_equal(mixing_matrix(graph).toarray(), mixing_matrix(graph, "uniform").toarray())
    assert np.array_equal(stationary(graph, "graph"), stationary(graph, "uniform"))


@given(KIND, SIZE, SEED)
@settings(deadline=None, max_examples=30)
def test_weighted_graphs_are_reversible(kind: Topology, nodes: int, seed: int) -> None:
    graph = weighed(kind.build(nodes, seed), seed)
    a = mixing_matrix(graph).toarray()
    v = stationary(graph)
    np.testing.assert_allclose(v, left_eigenvector(a), atol=1e-10)
    flow = v[:, None] * a
    np.testing.assert_allclose(flow, flow.T, atol=1e-15)
    values = np.abs(np.linalg.eigvals(a))
    assert abs(second_eigenvalue(graph)) == pytest.approx(np.sort(values)[-2], abs=1e-9)
    assert mixing_time(graph) == (naive_mixing_time(graph, 0.25), True)


def test_a_directed_graph_by_hand() -> None:
    # 0 receives from 2, 1 from 0, 2 from 0 and 1: v_0 = v_0/2 + v_1/2 + v_2/3 and so on.
    graph = StaticGraph.from_edges(3, [(2, 0), (0, 1), (0, 2), (1, 2)], directed=True)
    expected = [[1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(mixing_matrix(graph).toarray(), expected, atol=1e-15)
    v = np.array([4, 2, 3]) / 9
    np.testing.assert_allclose(stationary(graph), v, atol=1e-14)
    assert gain(graph) == pytest.approx(9 / math.sqrt(29), abs=1e-12)


@given(strong_graphs(), st.sampled_from(["graph", "uniform", "data"]))
@settings(deadline=None, max_examples=60)
def test_directed_graphs_agree_with_dense_eigenvectors(graph: StaticGraph, weights: str) -> None:
    d = np.arange(1, graph.nodes + 1)
    a = mixing_matrix(graph, weights, d).toarray()  # type: ignore[arg-type]
    np.testing.assert_allclose(a.sum(axis=1), 1, atol=1e-14)
    v = left_eigenvector(a)
    np.testing.assert_allclose(stationary(graph, weights, d), v, atol=1e-9)  # type: ignore[arg-type]
    assert gain(graph, weights, d) == pytest.approx(1 / np.linalg.norm(v), rel=1e-8)  # type: ignore[arg-type]


@given(strong_graphs(), st.sampled_from([0.25, 0.1, 0.01]))
@settings(deadline=None, max_examples=40)
def test_speed_of_directed_graphs(graph: StaticGraph, epsilon: float) -> None:
    values = np.abs(np.linalg.eigvals(mixing_matrix(graph).toarray()))
    assert second_eigenvalue(graph) == pytest.approx(np.sort(values)[-2], abs=1e-9)
    assert mixing_time(graph, epsilon) == (naive_mixing_time(graph, epsilon), True)


def test_long_directed_cycles_settle_without_iteration() -> None:
    ends = [(i, (i + 1) % 400) for i in range(400)]
    graph = StaticGraph.from_edges(400, [*ends, (7, 300)], directed=True)
    # Node 300 receives from two, so 7 and 299 count 2/3 of it each; 7 also sends to node 8.
    mass = np.full(400, 4.0)
    mass[8:300], mass[300] = 2, 3
    np.testing.assert_allclose(stationary(graph), mass / mass.sum(), rtol=1e-10)


def test_large_directed_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    ends = [*((i, (i + 1) % 90) for i in range(90)), *rng.integers(90, size=(300, 2)).tolist()]
    graph = StaticGraph.from_edges(90, ends, directed=True)
    assert is_strongly_connected(graph)
    v, second = stationary(graph), second_eigenvalue(graph)
    monkeypatch.setattr(mixing, "EXACT_NODES", 10)
    monkeypatch.setattr(mixing, "DENSE_NODES", 10)
    np.testing.assert_allclose(stationary(graph), v, atol=1e-12)
    assert second_eigenvalue(graph) == pytest.approx(second, abs=1e-9)
    unknown = mixing_time(graph)
    assert math.isnan(unknown.rounds)
    assert not unknown.exact
    report = describe(graph)
    assert report.as_dict()["mixing_time"] is None
    assert report.gain == pytest.approx(1 / np.linalg.norm(v))
    assert report.edges == len(graph.edges())


def test_gains_of_directed_components() -> None:
    cycle = [(0, 1), (1, 2), (2, 0)]
    pieces = StaticGraph.from_edges(6, [*cycle, (3, 4), (4, 3)], directed=True)
    expected = [math.sqrt(3)] * 3 + [math.sqrt(2)] * 2 + [1]
    np.testing.assert_allclose(gains(pieces), expected, atol=1e-13)
    assert second_eigenvalue(pieces) == 1
    assert mixing_time(pieces) == (math.inf, True)


def test_graphs_that_are_not_strongly_connected_have_no_gain() -> None:
    pieces = StaticGraph.from_edges(5, [(0, 1), (1, 0), (2, 3), (4, 3)], directed=True)
    message = (
        "the component of node {} is not strongly connected, so some nodes have no share in "
        "the consensus; add links, or make the graph undirected"
    )
    for graph, node in ((ONE_WAY, 0), (pieces, 2)):
        for quantity in (stationary, gains):
            with pytest.raises(InputError) as error:
                quantity(graph)
            assert str(error.value) == message.format(node)
    with pytest.raises(InputError, match="the component of node 0 is not strongly connected"):
        gain(ONE_WAY)
    with pytest.raises(InputError, match="the component of node 0 is not strongly connected"):
        mixing_time(ONE_WAY)


def test_report_of_a_graph_that_is_not_strongly_connected() -> None:
    report = describe(ONE_WAY)
    assert (report.directed, report.connected, report.strongly_connected) == (True, True, False)
    assert (report.edges, report.degree_min, report.degree_max) == (2, 0, 1)
    # Triangular: the eigenvalues are 1, 1/2 and 1/2.
    assert report.spectral_gap == pytest.approx(1 / 2, abs=1e-7)
    table = report.as_dict()
    assert table["gain"] is None
    assert table["component_gains"] == [None]
    assert table["mixing_time"] is None
    assert table["diameter"] is None
    assert json.loads(json.dumps(table, allow_nan=False)) == table


@pytest.mark.parametrize("directed", [False, True])
def test_nodes_that_hardly_use_their_neighbours(directed: bool) -> None:
    cycle = [(i, (i + 1) % 4) for i in range(4)]
    graph = StaticGraph.from_edges(4, cycle, self_loops=[1e18, 1, 1e18, 1], directed=directed)
    assert gain(graph) == pytest.approx(math.sqrt(2))
    still = StaticGraph.from_edges(4, cycle, self_loops=[1e18] * 4, directed=directed)
    assert gain(still) == pytest.approx(2)
    for constant in (graph, still):
        report = describe(constant)
        assert report.as_dict()["mixing_time"] is None
        assert json.dumps(report.as_dict(), allow_nan=False)


def test_metropolis_weights_are_for_undirected_graphs() -> None:
    for quantity in (mixing_matrix, stationary, gains):
        with pytest.raises(InputError, match="metropolis weights need an undirected graph"):
            quantity(ONE_WAY, "metropolis")


# Estimates


def test_gain_from_a_sample_of_degrees() -> None:
    graph = BarabasiAlbert(m=3).build(500, 0)
    assert degree_gain(degrees(graph), 500) == pytest.approx(gain(graph), rel=1e-12)
    # Closed degrees 2 and 4: sqrt(9) * 3 / sqrt(10).
    assert degree_gain([1, 3], 9) == pytest.approx(9 / math.sqrt(10), abs=1e-14)
    with pytest.raises(InputError, match="at least one node, got none"):
        degree_gain([], 9)


def test_excess_degree_by_hand() -> None:
    assert mean_excess_degree(Ring().build(10, 0)) == pytest.approx(1)
    assert mean_excess_degree(Star().build(5, 0)) == pytest.approx((16 + 4) / 8 - 1)
    assert mean_excess_degree(PATH) == pytest.approx(6 / 4 - 1)
    assert mean_excess_degree(StaticGraph.from_edges(3, [])) == 0
    many = ErdosRenyi(degree=3, connected=False).build(20_000, 0)
    assert mean_excess_degree(many) == pytest.approx(
        3, abs=0.15
    )  # that of a Poisson law is its mean


# Spectrum


@given(KIND, SIZE, SEED)
@settings(deadline=None, max_examples=40)
def test_second_eigenvalue_equals_the_dense_one(kind: Topology, nodes: int, seed: int) -> None:
    graph = kind.build(nodes, seed)
    values = np.abs(np.linalg.eigvals(mixing_matrix(graph).toarray()))
    assert abs(second_eigenvalue(graph)) == pytest.approx(np.sort(values)[-2], abs=1e-9)
    assert spectral_gap(graph) == pytest.approx(1 - np.sort(values)[-2], abs=1e-9)


def test_spectra_by_hand() -> None:
    assert second_eigenvalue(Complete().build(6, 0)) == pytest.approx(0, abs=1e-14)
    ring = 1 / 3 + 2 / 3 * math.cos(2 * math.pi / 12)
    assert second_eigenvalue(Ring().build(12, 0)) == pytest.approx(ring, abs=1e-14)
    bipartite = FromGraph(nx.complete_bipartite_graph(4, 4)).build(8, 0)
    assert second_eigenvalue(bipartite) == pytest.approx(-3 / 5, abs=1e-14)
    assert spectral_gap(bipartite) == pytest.approx(2 / 5, abs=1e-14)
    assert second_eigenvalue(PIECES) == 1
    assert spectral_gap(PIECES) == 0
    assert spectral_gap(Ring().build(1, 0)) == 1


@pytest.mark.parametrize(
    "kind", [Complete(), ErdosRenyi(p=0.2), Ring(), Star(), StochasticBlocks(), TwoGroup()]
)
def test_large_graphs_agree_with_the_dense_spectrum(
    kind: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = kind.build(90, 0)
    dense = second_eigenvalue(graph)
    monkeypatch.setattr(mixing, "DENSE_NODES", 10)
    assert second_eigenvalue(graph) == pytest.approx(dense, abs=1e-9)
    assert second_eigenvalue(graph) == second_eigenvalue(graph)


@pytest.mark.parametrize("nodes", [1001, 1024, 1025])
def test_a_large_complete_graph_has_no_second_eigenvalue(nodes: int) -> None:
    graph = Complete().build(nodes, 0)
    assert second_eigenvalue(graph) == 0
    assert spectral_gap(graph) == 1


class Whole:
    """A stream of whole numbers, which add up without any rounding."""

    def standard_normal(self, count: int) -> NDArray[np.float64]:
        return np.arange(count) - 7.0


@pytest.mark.parametrize("stream", [numpy_stream, lambda *_: Whole()])
@pytest.mark.parametrize("nodes", [11, 64, 90, 128])
def test_nothing_is_left_beside_eigenvalue_1(
    nodes: int, stream: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixing, "DENSE_NODES", 10)
    monkeypatch.setattr(mixing, "numpy_stream", stream)
    trust = 10 ** np.linspace(-2, 2, nodes)
    pairs = [(a, b, trust[a] * trust[b]) for a in range(nodes) for b in range(a, nodes)]
    weighted = nx.Graph()
    weighted.add_weighted_edges_from(pairs)  # a matrix of rank 1, as that of a complete graph is
    for kind in (Complete(), FromGraph(weighted), FromGraph(weighted.to_directed())):
        assert abs(second_eigenvalue(kind.build(nodes, 0))) < 1e-12


@pytest.mark.parametrize("scale", [0.0, 1e-300, 1e-17, 1e-16])
def test_an_operator_that_is_zero_but_for_rounding(scale: float) -> None:
    start = np.random.default_rng(3).standard_normal(50)
    assert mixing._is_zero(aslinearoperator(scale * np.eye(50)), start)


@pytest.mark.parametrize("scale", [1e-13, -1e-9, 0.5])
def test_one_eigenvalue_alone_is_not_zero(scale: float) -> None:
    start = np.random.default_rng(3).standard_normal(50)
    alone = np.full((50, 50), scale / 50)
    assert not mixing._is_zero(aslinearoperator(alone), start)


def test_an_edge_less_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = nx.complete_graph(90)
    graph.remove_edge(3, 4)
    built = FromGraph(graph).build(90, 0)
    dense = second_eigenvalue(built)
    monkeypatch.setattr(mixing, "DENSE_NODES", 10)
    assert second_eigenvalue(built) == pytest.approx(dense, abs=1e-12)
    assert abs(dense) > 0.01


@pytest.mark.parametrize(
    "failure",
    [ArpackNoConvergence("no convergence", np.empty(0), np.empty(0)), ArpackError(-9999)],
)
def test_the_dense_spectrum_helps_out(failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*args: object, **options: object) -> None:
        raise failure

    graph = Ring().build(40, 0)
    dense = second_eigenvalue(graph)
    monkeypatch.setattr(mixing, "DENSE_NODES", 10)
    monkeypatch.setattr(mixing, "eigsh", gives_up)
    assert second_eigenvalue(graph) == dense


@pytest.mark.slow
def test_large_graphs_are_never_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.linalg, "eigvalsh", None)
    # A torus of 100 x 100: (1 + 2 + 2 cos(2 pi / 100)) / 5 is the second of its eigenvalues.
    torus = (3 + 2 * math.cos(math.pi / 50)) / 5
    assert spectral_gap(Torus().build(10_000, 0)) == pytest.approx(1 - torus, rel=0.02)
    ring = Ring().build(10_000, 0)  # its gap of 1e-7 is out of reach
    assert math.isnan(second_eigenvalue(ring))
    report = describe(ring)
    assert report.as_dict()["spectral_gap"] is None
    assert report.as_dict()["mixing_time"] is None
    assert report.as_dict()["relaxation_time"] is None
    assert report.gain == pytest.approx(100)
    # Of a random regular graph it is near (1 + 2 sqrt(k - 1)) / (k + 1). Friedman, 2008.
    regular = second_eigenvalue(Regular(k=8).build(10_000, 0))
    assert abs(regular) == pytest.approx((1 + 2 * math.sqrt(7)) / 9, rel=0.005)


# Mixing time


@given(KIND, SIZE, SEED, st.sampled_from([0.25, 0.1, 0.01]))
@settings(deadline=None, max_examples=50)
def test_mixing_time_equals_a_naive_loop(
    kind: Topology, nodes: int, seed: int, epsilon: float
) -> None:
    graph = kind.build(nodes, seed)
    assert mixing_time(graph, epsilon) == (naive_mixing_time(graph, epsilon), True)


def test_mixing_times_by_hand() -> None:
    assert mixing_time(Complete().build(9, 0)) == (1, True)
    assert mixing_time(Ring().build(1, 0)) == (0, True)
    assert mixing_time(PIECES) == (math.inf, True)
    # Two nodes are at distance 1/2 before and 0 after the first round.
    assert mixing_time(Ring().build(2, 0), 0.5) == (0, True)
    assert mixing_time(Ring().build(2, 0), 0.49) == (1, True)


def test_mixing_time_of_a_long_ring_grows_as_the_square() -> None:
    times = [mixing_time(Ring().build(nodes, 0)).rounds for nodes in (100, 200)]
    assert times[1] / times[0] == pytest.approx(4, rel=0.02)


def test_many_nodes_get_the_spectral_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = BarabasiAlbert(m=2).build(40, 0)
    exact = mixing_time(graph)
    monkeypatch.setattr(mixing, "EXACT_NODES", 10)
    bound = mixing_time(graph)
    k = degrees(graph) + 1
    expected = math.log(4 * k.sum() / k.min()) / spectral_gap(graph)
    assert bound == (math.ceil(expected), False)
    assert exact.rounds <= bound.rounds
    report = describe(graph)
    assert (report.mixing_time, report.mixing_time_exact) == bound
    assert report.diameter is None


@pytest.mark.parametrize("epsilon", [0, 1, -0.1, math.nan])
def test_wrong_epsilon(epsilon: float) -> None:
    with pytest.raises(InputError, match="epsilon must lie strictly between 0 and 1, got"):
        mixing_time(PATH, epsilon)


# Report


def test_report_of_a_star() -> None:
    report = describe(Star().build(5, 0))
    assert (report.nodes, report.edges, report.components, report.attempt) == (5, 4, 1, 0)
    assert (report.degree_min, report.degree_mean, report.degree_max) == (1, 1.6, 4)
    assert report.degree_histogram == {1: 4, 4: 1}
    assert report.connected
    assert not report.dynamic
    assert report.diameter == 2
    assert report.gain == pytest.approx(13 / math.sqrt(41))
    assert report.spectral_gap == pytest.approx(0.5)
    assert report.relaxation_time == pytest.approx(2)
    assert report.mixing_time == naive_mixing_time(Star().build(5, 0), 0.25)


def test_report_of_pieces_is_ready_for_json() -> None:
    report = describe(PIECES)
    assert report.components == 3
    assert report.gain is None
    assert report.component_gains == pytest.approx((7 / math.sqrt(17), math.sqrt(2), 1))
    assert report.mixing_time == report.relaxation_time == math.inf
    table = report.as_dict()
    assert table["mixing_time"] is None
    assert table["relaxation_time"] is None
    assert table["diameter"] is None
    assert table["degree_histogram"] == {"0": 1, "1": 4, "2": 1}
    assert json.loads(json.dumps(table, allow_nan=False)) == table


def test_report_of_a_dynamic_graph_is_that_of_round_0() -> None:
    graph = DynamicRegular(k=4).build(20, 0)
    graph.neighbours(5)
    report = describe(graph)
    assert report.dynamic
    assert report.degree_histogram == {4: 20}
    assert report.mixing_time == naive_mixing_time(Regular(k=4).sample(20, 0, 0), 0.25)


def test_report_of_very_many_components() -> None:
    report = describe(StaticGraph.from_edges(3000, [(0, 1)]))
    assert report.components == len(report.component_gains) == 2999
    assert report.as_dict()["component_gains"] == pytest.approx([math.sqrt(2)] + [1] * 999)


def test_large_graphs_need_no_lists_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_rows", None)
    with lines_at_most(50_000):
        graph = ErdosRenyi(degree=8, connected=False).build(200_000, 0)
        report = describe(graph)
        k = degrees(graph)
        labels = component_labels(graph)
        gain = gains(graph)
        total = mixing_matrix(graph).sum()
    largest = labels == np.bincount(labels).argmax()
    expected = (k[largest] + 1).sum() / math.sqrt(((k[largest] + 1) ** 2).sum())
    assert gain[largest][0] == pytest.approx(expected, rel=1e-9)
    assert (gain[k == 0] == 1).all()
    assert total == pytest.approx(200_000)
    assert report.components == labels.max() + 1
    assert sum(report.degree_histogram.values()) == 200_000
    with pytest.raises(TypeError):  # the check itself works
        graph.neighbours(0)


# Errors


@pytest.mark.parametrize(
    ("weights", "examples", "message"),
    [
        ("data", None, "weights 'data' require the number of examples of every node"),
        ("data", [1, 2], "expected 3 numbers of examples, got shape (2,)"),
        ("data", [1, 2, -1], "numbers of examples must be finite and not negative"),
        ("data", [1, 2, math.inf], "numbers of examples must be finite and not negative"),
        (
            "unifrom",
            None,
            "weights must be one of graph, uniform, data, metropolis; got 'unifrom', "
            "did you mean 'uniform'?",
        ),
    ],
)
def test_wrong_weights(weights: str, examples: list[float] | None, message: str) -> None:
    for quantity in (mixing_matrix, stationary, gains, gain):
        with pytest.raises(InputError) as error:
            quantity(PATH, weights, examples)  # type: ignore[arg-type]
        assert str(error.value) == message
