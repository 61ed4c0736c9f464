"""Rewiring: degrees stay, the correlation of degrees becomes what was asked for."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.effort import lines_at_most

from peerage.errors import InputError
from peerage.graphs.graph import Graph, StaticGraph, degrees, is_connected
from peerage.graphs.mixing import gain
from peerage.graphs.rewiring import assortativity, rewire, with_assortativity
from peerage.graphs.topology import (
    BarabasiAlbert,
    DynamicRegular,
    ErdosRenyi,
    FromGraph,
    Regular,
    Star,
    Topology,
)

ER = ErdosRenyi(degree=10).build(300, 0)


def assert_same_degrees(one: Graph, other: Graph) -> None:
    assert np.array_equal(degrees(one), degrees(other))
    assert len(set(one.edges())) == len(other.edges())
    assert all(a < b for a, b in one.edges())


def test_assortativity_by_hand() -> None:
    # A path of four: the ends of its edges have the degrees (1, 2), (2, 2), (2, 1).
    path = FromGraph(nx.path_graph(4)).build(4, 0)
    x = [1, 2, 2, 2, 2, 1]
    y = [2, 1, 2, 2, 1, 2]
    assert assortativity(path) == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-14)
    assert assortativity(path) == pytest.approx(-1 / 2, abs=1e-14)
    assert assortativity(Star().build(9, 0)) == -1
    pair_and_triangle = StaticGraph.from_edges(6, [(0, 1), (2, 3), (3, 4), (4, 2)])
    assert assortativity(pair_and_triangle) == 1


@given(
    st.sampled_from([BarabasiAlbert(m=2), ErdosRenyi(p=0.3, connected=False)]),
    st.integers(8, 40),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_assortativity_equals_that_of_networkx(kind: Topology, nodes: int, seed: int) -> None:
    graph = kind.build(nodes, seed)
    reference = graph.networkx()
    # Where all edges join nodes of one degree, no correlation is defined.
    assume(len({degree for _, degree in reference.degree() if degree}) > 1)
    expected = nx.degree_pearson_correlation_coefficient(reference)
    assert assortativity(graph) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("target", [-0.6, -0.2, 0.0, 0.2, 0.6])
def test_targets_are_reached_and_degrees_stay(target: float) -> None:
    found = rewire(ER, target, seed=3)
    assert assortativity(found) == pytest.approx(target, abs=1e-4)
    assert_same_degrees(found, ER)
    expected = nx.degree_pearson_correlation_coefficient(found.networkx())
    assert expected == pytest.approx(target, abs=1e-4)
    assert gain(found) == pytest.approx(gain(ER), rel=1e-12) or not is_connected(found)


@given(st.integers(0, 1000), st.floats(-0.2, 0.2))
@settings(deadline=None, max_examples=15)
def test_small_graphs_come_within_a_step(seed: int, target: float) -> None:
    graph = ErdosRenyi(degree=6, connected=False).build(40, seed)
    found = rewire(graph, target, seed)
    k = degrees(graph).astype(float)
    # One more in the sum of k_u k_v over edges is this much more correlation.
    step = 2 * k.sum() / (k.sum() * (k**3).sum() - (k**2).sum() ** 2)
    assert abs(assortativity(found) - target) <= max(step, 1e-4)
    assert_same_degrees(found, graph)


def test_the_seed_decides() -> None:
    assert rewire(ER, 0.3, 1) == rewire(ER, 0.3, 1)
    assert rewire(ER, 0.3, 1) != rewire(ER, 0.3, 2)


def test_much_is_swapped_not_only_what_must_be() -> None:
    found = rewire(ER, 0.3, 1)
    shared = len(set(found.edges()) & set(ER.edges())) / len(ER.edges())
    # Few of the edges of a graph that was shuffled well stay: about the mean degree over n.
    assert shared < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("target", "side"), [(0.999, "below"), (-0.999, "above")])
def test_what_the_degrees_do_not_allow(target: float, side: str) -> None:
    with pytest.raises(InputError) as error, lines_at_most(50_000_000):  # it stops in the end
        rewire(ErdosRenyi(degree=10).build(120, 0), target, 0)
    words = str(error.value).split()
    reached = float(words[words.index("is") + 1].strip(";"))
    assert str(error.value) == (
        f"these degrees do not allow an assortativity of {target}, the nearest found is "
        f"{reached:.6f}; choose that or a value {side} it"
    )
    assert 0.8 < abs(reached) < 0.999


def test_a_graph_without_any_swap_ends() -> None:
    with pytest.raises(InputError, match=r"of 0.5, the nearest found is -1.000000; .* below it"):
        rewire(Star().build(9, 0), 0.5, 0)


def test_connected_graphs_on_demand() -> None:
    graph = ErdosRenyi(degree=3.5).build(40, 1)
    loose = [seed for seed in range(12) if not is_connected(rewire(graph, 0.2, seed))]
    assert 0 < len(loose) < 12
    with pytest.raises(InputError) as error:
        rewire(graph, 0.2, loose[0], connected=True, attempts=1)
    assert str(error.value) == (
        "no graph of assortativity 0.2 was connected in 1 attempts; "
        "choose a target nearer to 0, a graph with more edges, or connected=False"
    )
    found = rewire(graph, 0.2, loose[0], connected=True)
    assert is_connected(found)
    assert assortativity(found) == pytest.approx(0.2, abs=0.005)
    assert is_connected(with_assortativity(ER, 0.2, 0))
    assert with_assortativity(ER, None, 0) is ER


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            Regular(k=4).build(20, 0),
            "all nodes with edges have the same degree, so assortativity is undefined; "
            "choose a graph with unequal degrees, such as er or ba",
        ),
        (
            StaticGraph.from_edges(3, []),
            "all nodes with edges have the same degree, so assortativity is undefined; "
            "choose a graph with unequal degrees, such as er or ba",
        ),
        (
            StaticGraph.from_edges(3, [(0, 1), (1, 2)], directed=True),
            "assortativity requires a static undirected graph without weights; "
            "choose one such as er:p=0.2",
        ),
        (
            StaticGraph.from_edges(3, [(0, 1), (1, 2)], weights=[1, 2]),
            "assortativity requires a static undirected graph without weights; "
            "choose one such as er:p=0.2",
        ),
        (
            DynamicRegular().build(20, 0),
            "assortativity requires a static undirected graph without weights; "
            "choose one such as er:p=0.2",
        ),
    ],
)
def test_graphs_without_assortativity(graph: Graph, message: str) -> None:
    for quantity in (assortativity, lambda graph: rewire(graph, 0.1, 0)):
        with pytest.raises(InputError) as error:
            quantity(graph)
        assert str(error.value) == message


@pytest.mark.parametrize("target", [1.5, -2, float("nan"), float("inf")])
def test_wrong_targets(target: float) -> None:
    with pytest.raises(InputError, match=r"^assortativity must lie in \[-1, 1\], got"):
        rewire(ER, target, 0)
