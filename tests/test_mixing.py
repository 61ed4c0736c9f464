"""Mixing quantities, against eigenvectors, naive loops and numbers by hand."""

import json
import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import ArpackNoConvergence

from peerage import mixing
from peerage.errors import InputError
from peerage.graph import Graph, StaticGraph, degrees
from peerage.mixing import (
    describe,
    gain,
    gains,
    mixing_matrix,
    mixing_time,
    power_iteration,
    second_eigenvalue,
    spectral_gap,
    stationary,
)
from peerage.topology import (
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
    assert str(error.value) == "a graph with 3 components has one gain per component; ask for gains"


def test_components_without_data_are_uniform() -> None:
    found = stationary(PIECES, "data", [1, 2, 3, 0, 0, 0])
    np.testing.assert_allclose(found, [0.1, 0.4, 0.5, 0.5, 0.5, 1], atol=1e-15)


def test_some_nodes_without_data() -> None:
    # Nodes 0 and 1 hold data and hear each other; 2 and 3 only listen.
    path = StaticGraph.from_edges(4, [(0, 1), (1, 2), (2, 3)])
    found = stationary(path, "data", [1, 3, 0, 0])
    np.testing.assert_allclose(found, [0.25, 0.75, 0, 0], atol=1e-15)
    limit = power_iteration(mixing_matrix(path, "data", [1, 3, 0, 0]))
    np.testing.assert_allclose(found, limit, atol=1e-13)


def test_data_on_islands_falls_back_to_the_mean_of_all_nodes() -> None:
    # Nodes 0 and 2 never hear of each other; node 1 ends at d-weighted 1/4 and 3/4 of them.
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
    with pytest.raises(InputError, match="does not settle within 2 rounds; allow more rounds"):
        power_iteration(sparse.csr_array(directed), rounds=2)


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


def test_the_dense_spectrum_helps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*args: object, **options: object) -> None:
        raise ArpackNoConvergence("no convergence", np.empty(0), np.empty(0))

    graph = Ring().build(40, 0)
    dense = second_eigenvalue(graph)
    monkeypatch.setattr(mixing, "DENSE_NODES", 10)
    monkeypatch.setattr(mixing, "eigsh", gives_up)
    assert second_eigenvalue(graph) == dense


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


# Errors


@pytest.mark.parametrize(
    ("weights", "examples", "message"),
    [
        ("data", None, "weights 'data' need the number of examples of every node"),
        ("data", [1, 2], "expected 3 numbers of examples, got shape (2,)"),
        ("data", [1, 2, -1], "numbers of examples must be finite and not negative"),
        ("data", [1, 2, math.inf], "numbers of examples must be finite and not negative"),
        (
            "unifrom",
            None,
            "unknown weights 'unifrom'; did you mean 'uniform'? known: data, metropolis, uniform",
        ),
    ],
)
def test_wrong_weights(weights: str, examples: list[float] | None, message: str) -> None:
    for quantity in (mixing_matrix, stationary, gains, gain):
        with pytest.raises(InputError) as error:
            quantity(PATH, weights, examples)  # type: ignore[arg-type]
        assert str(error.value) == message
