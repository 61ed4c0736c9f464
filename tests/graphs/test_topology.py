"""Builders: the edges by hand where there is one answer, laws for random graphs."""

import pickle
from hashlib import blake2b
from math import comb
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.effort import lines_at_most

from peerage import specs
from peerage.errors import InputError
from peerage.graphs import random_edges
from peerage.graphs.graph import Graph, StaticGraph, degrees, is_connected, self_weights
from peerage.graphs.random_edges import (
    attached_edges,
    block_edges,
    product_edges,
    regular_edges,
    small_world_edges,
    successes,
)
from peerage.graphs.topology import (
    TOPOLOGIES,
    BarabasiAlbert,
    Complete,
    DynamicRegular,
    EdgeList,
    ErdosRenyi,
    FromGraph,
    HeavyTail,
    RandomTopology,
    Regular,
    Ring,
    SmallWorld,
    Star,
    StochasticBlocks,
    Topology,
    Torus,
    TwoGroup,
)
from peerage.randomness import numpy_stream

SEEDS = st.integers(0, 2**31)
SIZES = st.integers(8, 40).map(lambda half: 2 * half)  # even, so that every k has a regular graph
RANDOM = [
    BarabasiAlbert(m=3),
    ErdosRenyi(p=0.3),
    ErdosRenyi(degree=7),
    HeavyTail(degree=12),
    HeavyTail(gamma=2.5, degree=12, kind="configuration"),
    Regular(k=3),
    SmallWorld(k=6, p=0.2),
    StochasticBlocks(groups=3, p_in=0.8, p_out=0.2),
]
# Seeds of published results: what they drew when they were published.
PINNED = [
    ("er:p=0.2", 50, 0, "62cae726190c1d34"),
    ("er:degree=12", 400, 3, "68d5e10a0e36078f"),
    ("er:degree=12", 5000, 1, "85865563804bf690"),
    ("ba:m=5", 50, 7, "d7a8dc3b79f60de9"),
    ("ba:m=4", 5000, 2, "d49f35930bee71c8"),
    ("regular:k=4", 50, 0, "86e799a441385795"),
    ("regular:k=8", 5000, 5, "373f8cb746a65ec6"),
    ("regular:k=40", 60, 1, "c5b6dec7a9c724c4"),
    ("heavy-tail:degree=16", 400, 0, "af1888b03c8759e5"),
    ("heavy-tail:gamma=3.5,degree=16", 5000, 1, "8f092409a7ad6573"),
    ("heavy-tail:degree=12,kind=configuration", 400, 5, "059f3892f9fe2804"),
    (
        "heavy-tail:gamma=2.5,degree=16,kind=configuration,connected=false",
        5000,
        5,
        "160d0c2cb9ab59c6",
    ),
    ("small-world:k=6,p=0.2", 100, 0, "b3a37b4b8e004631"),
    ("small-world:k=6,p=0.2", 5000, 0, "479fe0608d06e7c8"),
    ("sbm:groups=3,p_in=0.5,p_out=0.05", 90, 1, "97ffb751d81826c1"),
    ("sbm:groups=4,p_in=0.01,p_out=0.002", 5000, 1, "a4a1f7b0e84ff694"),
    ("ring", 50, 0, "3a894cadee99f05c"),
    ("star", 50, 0, "9554e32643ae2d9d"),
    ("torus", 49, 0, "a0b8aec43e5b0d24"),
    ("torus:rows=2", 10, 0, "e21179e8ab7de56e"),
    ("complete", 12, 0, "6af7b98ca30dba08"),
    ("two-group", 50, 0, "09dc0aa6736b867c"),
    ("dynamic-regular:k=4", 50, 2, "e28c30ba4fb3fdc6"),
    ("dynamic-regular:k=4", 5000, 2, "8728b506840070e9"),
    ("er:degree=4", 40, 3, "954efb765be01f00"),
]
MANY = 20_000  # beyond the nodes whose pairs are all looked at
FIXED = [Complete(), Ring(), Star(), Torus(rows=2), TwoGroup()]


def parse(text: str) -> Topology:
    topology = specs.parse(text, "topology", TOPOLOGIES)
    assert isinstance(topology, Topology)
    return topology


def assert_simple(near: tuple[tuple[int, ...], ...], nodes: int) -> None:
    assert len(near) == nodes
    for node, others in enumerate(near):
        assert all(type(other) is int and 0 <= other < nodes for other in others)
        assert list(others) == sorted(set(others))
        assert node not in others
        assert all(node in near[other] for other in others)


def frequencies(nodes: int, drawn: list[NDArray[np.int64]]) -> NDArray[np.float64]:
    """How often every pair is an edge, [nodes, nodes]; each edge must be there once at most."""
    counts = np.zeros((nodes, nodes))
    for edges in drawn:
        low, high = edges.min(axis=1), edges.max(axis=1)
        assert len(np.unique(low * nodes + high)) == len(edges)
        assert (low < high).all()
        counts[low, high] += 1
    return (counts + counts.T) / len(drawn)


# What was there before


@pytest.mark.parametrize(("text", "nodes", "seed", "fingerprint"), PINNED)
def test_published_graphs_stay_as_they_are(
    text: str, nodes: int, seed: int, fingerprint: str
) -> None:
    edges = np.array(parse(text).build(nodes, seed).edges(), dtype="<i8")
    assert blake2b(edges.tobytes(), digest_size=8).hexdigest() == fingerprint


# What is there, by hand


def test_complete_ring_and_star_of_four() -> None:
    assert Complete().build(4, 0).neighbours(0) == ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))
    assert Ring().build(4, 0).neighbours(0) == ((1, 3), (0, 2), (1, 3), (0, 2))
    assert Star().build(4, 0).neighbours(0) == ((1, 2, 3), (0,), (0,), (0,))
    assert Star(number=1).build(4, 0).neighbours(0) == ((1,), (0, 2, 3), (1,), (1,))
    with pytest.raises(InputError, match="number=4 is not one of the 4 nodes"):
        Star(number=4).build(4, 0)


def test_torus_of_nine_joins_opposite_sides() -> None:
    near = Torus().build(9, 0).neighbours(0)
    assert near[0] == (1, 2, 3, 6)
    assert near[4] == (1, 3, 5, 7)
    assert near[8] == (2, 5, 6, 7)


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (2, 4), (2, 2), (4, 3), (1, 6), (6, 1)])
def test_torus_is_the_periodic_grid_of_networkx(rows: int, columns: int) -> None:
    grid = nx.grid_2d_graph(rows, columns, periodic=True)
    grid = nx.relabel_nodes(grid, {(i, j): i * columns + j for i, j in grid})
    expected = {tuple(sorted(edge)) for edge in grid.edges}
    assert set(Torus(rows=rows).build(rows * columns, 0).edges()) == expected


def test_two_group_of_fifty_has_its_bridge_at_24_25() -> None:
    graph = TwoGroup().build(50, 0)
    across = [(i, j) for i, j in graph.edges() if (i + j) % 2]
    assert across == [(24, 25)]
    assert len(graph.edges()) == 2 * (25 * 24 // 2) + 1


def test_two_group_of_few() -> None:
    assert TwoGroup().build(2, 0).edges() == ((0, 1),)
    assert TwoGroup().build(3, 0).edges() == ((0, 1), (0, 2))
    assert TwoGroup().build(6, 0).edges() == (
        (0, 2),
        (0, 4),
        (1, 3),
        (1, 5),
        (2, 3),
        (2, 4),
        (3, 5),
    )


@pytest.mark.parametrize("name", sorted(set(TOPOLOGIES) - {"edge-list", "er"}))
def test_one_node_has_no_edges(name: str) -> None:
    graph = parse(name).build(1, 0)
    assert graph.nodes == 1
    assert graph.neighbours(0) == ((),)


def test_two_nodes_of_the_simple_kinds_share_one_edge() -> None:
    for topology in [Complete(), Ring(), Star(), Torus(rows=1), TwoGroup(), Regular(k=1)]:
        assert topology.build(2, 0).edges() == ((0, 1),)


def test_probability_one_and_zero() -> None:
    assert ErdosRenyi(p=1).build(7, 0).edges() == Complete().build(7, 0).edges()
    assert ErdosRenyi(degree=6).build(7, 0).edges() == Complete().build(7, 0).edges()
    assert ErdosRenyi(p=0, connected=False).build(7, 0).edges() == ()


def test_blocks_are_consecutive_ids() -> None:
    blocks = StochasticBlocks(groups=3, p_in=1, p_out=0, connected=False).build(7, 0)
    assert blocks.neighbours(0) == ((1, 2), (0, 2), (0, 1), (4,), (3,), (6,), (5,))


def test_small_world_without_rewiring_is_a_thick_ring() -> None:
    near = SmallWorld(k=4, p=0).build(10, 0).neighbours(0)
    assert near[0] == (1, 2, 8, 9)
    assert near[5] == (3, 4, 6, 7)


# Laws


@given(st.sampled_from(FIXED + RANDOM), SIZES, SEEDS)
@settings(deadline=None, max_examples=60)
def test_every_graph_is_simple_and_connected(topology: Topology, nodes: int, seed: int) -> None:
    graph = topology.build(nodes, seed)
    assert_simple(graph.neighbours(0), nodes)
    assert nx.is_connected(graph.networkx())
    assert graph.neighbours(7) is graph.neighbours(0)
    assert not graph.dynamic


@given(st.sampled_from(RANDOM), SIZES, SEEDS)
@settings(deadline=None, max_examples=40)
def test_the_seed_decides_the_graph(topology: Topology, nodes: int, seed: int) -> None:
    graph = topology.build(nodes, seed)
    assert topology.build(nodes, seed) == graph
    assert topology.build(nodes, seed + 1).edges() != graph.edges()
    assert pickle.loads(pickle.dumps(graph)) == graph


@given(st.integers(2, 30), st.data(), SEEDS)
@settings(deadline=None, max_examples=60)
def test_regular_graphs_have_equal_degrees(nodes: int, data: st.DataObject, seed: int) -> None:
    k = data.draw(st.integers(1, nodes - 1).filter(lambda k: nodes * k % 2 == 0))
    graph = Regular(k=k, connected=False).build(nodes, seed)
    assert_simple(graph.neighbours(0), nodes)
    assert (degrees(graph) == k).all()


def test_regular_edges_are_all_equally_likely() -> None:
    rng = numpy_stream(0, "test")
    counts = np.zeros((6, 6))
    for _ in range(2000):
        edges = regular_edges(6, 2, rng)
        counts[edges[:, 0], edges[:, 1]] += 1
    # Each of the 15 pairs is an edge with probability 2 / 5; its standard deviation is 22 in 2000.
    assert np.abs(counts[np.triu_indices(6, 1)] - 800).max() < 90


def test_the_first_connected_attempt_is_taken() -> None:
    sparse = ErdosRenyi(degree=4)
    graph = sparse.build(40, 3)
    assert graph.attempt > 0
    earlier = [sparse.sample(40, 3, attempt) for attempt in range(graph.attempt)]
    assert not any(map(is_connected, earlier))
    assert graph == sparse.sample(40, 3, graph.attempt)
    assert ErdosRenyi(degree=4, connected=False).build(40, 3) == earlier[0]


def test_erdos_renyi_has_the_wanted_density() -> None:
    # 499500 pairs: the number of edges has a standard deviation of 63.
    assert len(ErdosRenyi(degree=8).build(1000, 0).edges()) == pytest.approx(4000, abs=320)
    assert len(ErdosRenyi(p=0.1).build(300, 0).edges()) == pytest.approx(4485, abs=320)


def test_blocks_have_the_wanted_densities() -> None:
    edges = np.array(StochasticBlocks(groups=2, p_in=0.5, p_out=0.05).build(400, 0).edges())
    inside = int(((edges < 200).all(axis=1) | (edges >= 200).all(axis=1)).sum())
    assert inside == pytest.approx(0.5 * 2 * 200 * 199 / 2, abs=500)
    assert len(edges) - inside == pytest.approx(0.05 * 200 * 200, abs=220)


@pytest.mark.slow
def test_chung_lu_edges_follow_the_product_of_the_expected_degrees() -> None:
    nodes, repeats = 30, 2000
    topology = HeavyTail(gamma=2.5, degree=6, connected=False)
    mean = np.zeros(nodes)
    expected = np.zeros(nodes)
    for attempt in range(repeats):
        u = numpy_stream(0, "graph", attempt).random(nodes)
        x = 6 * 0.5 / 1.5 * (1 - u) ** (-1 / 1.5)
        probability = np.minimum(1, np.outer(x, x) / x.sum())
        expected += np.sort(probability.sum(axis=1) - probability.diagonal()) / repeats
        order = np.argsort(probability.sum(axis=1) - probability.diagonal())
        mean += degrees(topology.sample(nodes, 0, attempt))[order] / repeats
    assert np.abs(mean - expected).max() < 0.2
    assert np.abs(mean - expected).mean() < 0.05


@pytest.mark.parametrize("kind", ["chung-lu", "configuration"])
def test_heavy_tails_have_the_wanted_mean_and_a_hub(kind: str) -> None:
    graph = parse(f"heavy-tail:gamma=3.5,degree=16,kind={kind}").build(3000, 1)
    assert degrees(graph).mean() == pytest.approx(16, rel=0.08)
    assert degrees(graph).max() > 6 * 16


def test_configuration_degrees_are_at_most_the_rounded_pareto_ones() -> None:
    x = 12 * 1 / 2 * (1 - numpy_stream(5, "graph", 0).random(200)) ** (-1 / 2)
    wanted = np.minimum(np.rint(x), 199)
    drawn = degrees(HeavyTail(degree=12, kind="configuration").build(200, 5))
    assert (drawn <= wanted + 1).all()  # one more, where the sum was odd
    assert (wanted - drawn).sum() < 0.15 * wanted.sum()


def test_barabasi_albert_adds_m_edges_per_node() -> None:
    assert len(BarabasiAlbert(m=5).build(50, 7).edges()) == 5 + 5 * (50 - 6)


def test_rewiring_keeps_the_number_of_edges() -> None:
    assert len(SmallWorld(k=4, p=0.5).build(100, 0).edges()) == 200


# Many nodes


def test_successes_are_independent_trials() -> None:
    rng = numpy_stream(0, "test")
    trials = np.zeros((4000, 12))
    for row in trials:
        row[successes(12, 0.3, rng)] = 1
    # The standard deviation of a frequency is 0.007, that of a correlation 0.016.
    assert np.abs(trials.mean(axis=0) - 0.3).max() < 0.035
    correlation = np.corrcoef(trials.T) - np.eye(12)
    assert np.abs(correlation).max() < 0.075
    assert successes(5, 1.0, rng).tolist() == [0, 1, 2, 3, 4]
    assert successes(5, 0.0, rng).tolist() == successes(0, 0.5, rng).tolist() == []
    assert successes(10**12, 1e-17, rng).tolist() == []
    assert len(successes(10**15, 1e-12, rng)) == pytest.approx(1000, abs=160)


def test_blocks_drawn_by_edges_have_the_probabilities_of_their_pairs() -> None:
    rng = numpy_stream(0, "test")
    starts = np.array([0, 3, 4, 9])
    found = frequencies(9, [block_edges(starts, 0.6, 0.2, rng) for _ in range(3000)])
    group = np.array([0, 0, 0, 1, 2, 2, 2, 2, 2])
    expected = np.where(group[:, None] == group, 0.6, 0.2)
    # The standard deviation of a frequency is at most 0.009.
    assert np.abs(found - expected)[~np.eye(9, dtype=bool)].max() < 0.04


@pytest.mark.slow
def test_products_drawn_by_edges_have_the_probabilities_of_their_pairs() -> None:
    rng = numpy_stream(0, "test")
    x = np.array([0.2, 9.0, 1.0, 3.5, 0.9, 1.9, 6.0, 0.3])
    found = frequencies(8, [product_edges(x, rng) for _ in range(3000)])
    expected = np.minimum(1, np.outer(x, x) / x.sum())
    assert expected.max() == 1  # 9 with 6 is more than certain
    assert np.abs(found - expected)[~np.eye(8, dtype=bool)].max() < 0.04


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 2, 1000])
def test_attachment_is_to_ends_of_edges(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_edges, "ATTACH_BATCH", together)
    rng = numpy_stream(0, "test")
    # After 0-1, 0-2 node 3 takes two of 0, 0, 1, 2: both 1 and 2 with 2 * 1/4 * 1/3.
    three = frequencies(4, [attached_edges(4, 2, rng) for _ in range(4000)])[3]
    assert three == pytest.approx([5 / 6, 7 / 12, 7 / 12, 0], abs=0.03)
    # A tree: node 2 has one end, and one more if 3 joins it, of the six that 4 can take.
    tree = frequencies(5, [attached_edges(5, 1, rng) for _ in range(4000)])
    assert tree[2] == pytest.approx([1 / 2, 1 / 2, 0, 1 / 4, 1 / 6 * 5 / 4], abs=0.03)
    assert tree[4, 3] == pytest.approx(1 / 6, abs=0.025)


def test_small_worlds_have_the_probabilities_of_their_pairs() -> None:
    rng = numpy_stream(0, "test")
    assert len(small_world_edges(30, 4, 0.5, rng)) == 60
    ring = frequencies(12, [small_world_edges(12, 4, 0.0, rng)])
    assert ring[0].tolist() == [0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    moved = frequencies(40, [small_world_edges(40, 4, 0.5, rng) for _ in range(1000)])
    near = np.array([moved[i, (i + 1) % 40] for i in range(40)])
    far = np.array([moved[i, (i + 20) % 40] for i in range(20)])
    # Half of the edges stay; the other 40 fall on about 780 - 40 pairs evenly.
    assert near.mean() == pytest.approx(0.5 + 0.5 * 40 / 740, abs=0.012)
    assert far.mean() == pytest.approx(40 / 740, abs=0.012)


@given(st.integers(2, 12), st.data(), SEEDS)
@settings(deadline=None, max_examples=40)
def test_regular_edges_equal_a_slow_pairing(nodes: int, data: st.DataObject, seed: int) -> None:
    k = data.draw(st.integers(1, nodes - 1).filter(lambda k: nodes * k % 2 == 0))
    if 2 * k > nodes - 1:
        return
    rng = numpy_stream(seed, "test")
    edges: set[tuple[int, int]] | None = None
    while edges is None:
        edges, stubs = set(), np.repeat(np.arange(nodes), k).tolist()
        while stubs and edges is not None:
            pairs = np.sort(rng.permutation(stubs).reshape(-1, 2), axis=1).tolist()
            fresh: set[tuple[int, int]] = set()
            stubs = []
            for a, b in pairs:
                if a != b and (a, b) not in edges | fresh:
                    fresh.add((a, b))
                else:
                    stubs += [a, b]
            edges = edges | fresh if fresh else None
    assert {
        (a, b) for a, b in regular_edges(nodes, k, numpy_stream(seed, "test")).tolist()
    } == edges


def test_many_erdos_renyi_degrees_are_poisson() -> None:
    k = degrees(ErdosRenyi(degree=8, connected=False).build(MANY, 0))
    # 80 000 edges with a standard deviation of 283; that of the variance of k is 0.08.
    assert k.sum() / 2 == pytest.approx(80_000, abs=1400)
    assert k.var() == pytest.approx(8, abs=0.45)
    assert (k == 0).sum() == pytest.approx(MANY * np.exp(-8), abs=14)
    dense = ErdosRenyi(p=0.1).sample(5001, 0, 0)
    assert dense.links(0).nnz / 2 == pytest.approx(0.1 * comb(5001, 2), abs=5300)  # sd 1060


def test_many_blocks_have_the_wanted_densities() -> None:
    topology = StochasticBlocks(groups=3, p_in=0.001, p_out=0.0002, connected=False)
    ends = topology.build(MANY, 0).edge_array()
    group = ends * 3 // MANY
    sizes = np.bincount(np.arange(MANY) * 3 // MANY)
    pairs = sum(comb(int(size), 2) for size in sizes)
    inside = int((group[:, 0] == group[:, 1]).sum())
    assert inside == pytest.approx(0.001 * pairs, abs=1200)  # standard deviation 258
    across = 0.0002 * (comb(MANY, 2) - pairs)
    assert len(ends) - inside == pytest.approx(across, abs=800)  # standard deviation 163


def test_many_chung_lu_degrees_are_poisson_around_their_weights() -> None:
    k = degrees(HeavyTail(gamma=3.5, degree=8, connected=False).build(MANY, 4))
    u = numpy_stream(4, "graph", 0).random(MANY)
    x = 8 * 1.5 / 2.5 * (1 - u) ** (-1 / 2.5)
    assert x.max() ** 2 < x.sum()  # no probability is cut off at 1
    expected = x * (x.sum() - x) / x.sum()
    z = (k - expected) / np.sqrt(expected)
    assert z.mean() == pytest.approx(0, abs=0.035)  # standard deviation 0.007
    assert z.var() == pytest.approx(1, abs=0.06)  # standard deviation 0.01
    hubs = np.argsort(x)[-50:]
    assert k[hubs].sum() == pytest.approx(expected[hubs].sum(), rel=0.08)


def test_many_configuration_degrees_are_the_rounded_ones() -> None:
    k = degrees(HeavyTail(gamma=3.5, degree=8, kind="configuration").build(MANY, 1))
    u = numpy_stream(1, "graph", 0).random(MANY)
    wanted = np.rint(8 * 1.5 / 2.5 * (1 - u) ** (-1 / 2.5))
    assert (k <= wanted + 1).all()  # one more, where the sum was odd
    assert (wanted - k).sum() < 0.01 * wanted.sum()


@pytest.mark.slow
def test_many_attached_nodes_meet_m_others_and_make_a_heavy_tail() -> None:
    m = 4
    graph = BarabasiAlbert(m=m).build(MANY, 0)
    ends, k = graph.edge_array(), degrees(graph)
    assert len(ends) == m + m * (MANY - m - 1)
    assert (np.bincount(ends[:, 1], minlength=MANY)[m + 1 :] == m).all()  # m earlier ones each
    assert is_connected(graph)
    same = np.array([d for _, d in nx.barabasi_albert_graph(MANY, m, seed=1).degree])
    for least in (5, 8, 20, 60):
        share = m * (m + 1) / (least * (least + 1))  # of degrees in an endless graph
        error = 5 * np.sqrt(share / MANY)
        assert (k >= least).mean() == pytest.approx(share, abs=error)
        assert (same >= least).mean() == pytest.approx(share, abs=error)
    assert 0.3 < k.max() / same.max() < 3


def test_many_regular_nodes_stay_regular() -> None:
    assert (degrees(Regular(k=8).build(MANY, 0)) == 8).all()
    assert (degrees(DynamicRegular(k=3).build(MANY, 0)) == 3).all()


def test_many_small_world_degrees() -> None:
    k = degrees(SmallWorld(k=8, p=0.25).build(MANY, 0))
    # Half of the edges begin at the node, and those of others stay or come by chance.
    assert k.mean() == 8
    assert k.min() >= 4
    assert k.var() == pytest.approx(4 * 0.25 * 0.75 + 4 * 0.25, abs=0.1)  # sd 0.02


@pytest.mark.parametrize(
    "topology",
    [
        BarabasiAlbert(m=4),
        ErdosRenyi(degree=8, connected=False),
        HeavyTail(degree=8, connected=False),
        HeavyTail(degree=8, kind="configuration", connected=False),
        Regular(k=8),
        Ring(),
        SmallWorld(k=8),
        Star(),
        StochasticBlocks(groups=10, p_in=0.003, p_out=0.0001, connected=False),
        Torus(rows=400),
    ],
)
def test_twenty_thousand_nodes_take_no_loop_over_pairs(topology: Topology) -> None:
    # Preferential attachment draws one edge after the other; all others need no loop over nodes.
    one_by_one = isinstance(topology, BarabasiAlbert)
    with lines_at_most(2_000_000 if one_by_one else 20_000):
        graph = topology.build(20_000, 1)
    assert graph == topology.build(20_000, 1)
    links = graph.links(0)
    assert (links != links.T).nnz == 0
    assert not links.diagonal().any()


def test_what_cannot_be_connected_is_rejected_at_once() -> None:
    with pytest.raises(InputError) as error, lines_at_most(5000):
        ErdosRenyi(degree=8).build(1_000_000, 0)
    assert str(error.value) == (
        "topology 'er:degree=8' with 1000000 nodes cannot be connected: about 335 nodes would "
        "have no neighbour; choose a mean degree of 15 or more, or connected=false"
    )
    several = pytest.raises(InputError, match=r"has .* components, and another")
    with several, lines_at_most(500_000):
        StochasticBlocks(p_in=0.0001, p_out=0.0001).build(2000, 0)
    with pytest.raises(InputError) as error, lines_at_most(20_000):
        Regular(k=1).build(200, 0)
    assert str(error.value) == (
        "topology 'regular:k=1' with 200 nodes has 100 components, and another attempt "
        "would not help; choose a larger k, or connected=false"
    )
    assert is_connected(ErdosRenyi(degree=15).build(50_000, 0))


# Rounds


def test_dynamic_graphs_are_redrawn_in_every_round() -> None:
    one, two = DynamicRegular(k=4).build(20, 1), DynamicRegular(k=4).build(20, 1)
    rounds = [one.neighbours(round) for round in range(6)]
    assert one.dynamic
    assert len(set(rounds)) == 6
    for near in rounds:
        assert_simple(near, 20)
        assert all(len(others) == 4 for others in near)
    assert [two.neighbours(round) for round in reversed(range(6))] == rounds[::-1]
    assert DynamicRegular(k=4).build(20, 2).neighbours(0) != rounds[0]
    assert rounds[3] == Regular(k=4).sample(20, 1, 3).neighbours(0)


def test_dynamic_graphs_are_drawn_among_the_present_nodes() -> None:
    graph = DynamicRegular(k=4).build(9, seed=3)
    all_nodes = tuple(range(9))
    assert graph.among(all_nodes, 5) == graph.neighbours(5)
    for there, degree in [((0, 2, 3, 5, 6, 8), 4), ((1, 4, 7), 2), ((2, 5, 6, 7), 3), ((0, 8), 1)]:
        in_neighbours = graph.among(there, 5)
        assert [len(near) for near in in_neighbours] == [
            degree * (node in there) for node in all_nodes
        ]
        assert all(
            node in in_neighbours[other] for node in all_nodes for other in in_neighbours[node]
        )
    assert graph.among((4,), 5) == graph.among((), 5) == ((),) * 9
    assert graph.among((0, 2, 3, 5, 6, 8), 6) != graph.among((0, 2, 3, 5, 6, 8), 5)
    assert DynamicRegular(k=3).of_size(5) == DynamicRegular(k=2)


def test_dynamic_graphs_keep_the_last_round_only_and_travel() -> None:
    graph = DynamicRegular().build(12, 0)
    third = graph.neighbours(3)
    assert graph.neighbours(3) is third
    graph.neighbours(4)
    assert graph.neighbours(3) is not third
    assert graph.neighbours(3) == third
    copy = pickle.loads(pickle.dumps(graph))
    assert copy == graph
    assert copy.neighbours(5) == graph.neighbours(5)


def test_matchings_are_allowed_round_by_round() -> None:
    assert (degrees(DynamicRegular(k=1).build(10, 0)) == 1).all()


# Given graphs


def test_edge_list_with_comments_and_both_directions(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("# a square\n0 1\n1\t2  # tab\n\n3 2\n2 3\n  0   3\n")
    graph = EdgeList(str(file)).build(4, 0)
    assert graph.edges() == ((0, 1), (0, 3), (1, 2), (2, 3))
    assert EdgeList(str(file)).build(5, 0).neighbours(0)[4] == ()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 x", "expected two node ids, got '0 x'"),
        ("0 1 2", "expected two node ids, got '0 1 2'"),
        ("0", "expected two node ids, got '0'"),
        ("-1 0", "expected two node ids, got '-1 0'"),
        ("0 4", "unknown node 4; the ids are 0 to 3"),
        ("2 2", "node 2 is joined to itself; remove the line"),
    ],
)
def test_edge_list_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(f"# first\n0 1\n{line}\n")
    with pytest.raises(InputError) as error:
        EdgeList(str(file)).build(4, 0)
    assert str(error.value) == f"{file}, line 3: {message}"


def test_edge_list_of_one_node_is_still_checked(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("# nobody\n")
    assert EdgeList(str(file)).build(1, 0).edges() == ()
    file.write_text("0 1\n")
    with pytest.raises(InputError, match="line 1: unknown node 1; the ids are 0 to 0"):
        EdgeList(str(file)).build(1, 0)


@pytest.mark.parametrize(
    ("text", "options"), [("", {}), ("# none yet\n\n", {}), ("0 0 2.5\n", {"weighted": True})]
)
def test_an_edge_list_without_edges_is_rejected(
    tmp_path: Path, text: str, options: dict[str, bool]
) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        EdgeList(str(file), **options).build(3, 0)
    expected = (
        f"the edge list {file} has no edge between two of 3 nodes; write two node ids on every line"
    )
    assert str(error.value) == expected
    assert EdgeList(str(file), **options).build(1, 0).edges() == ()


def test_a_networkx_graph_without_edges_is_meant() -> None:
    assert FromGraph(nx.empty_graph(3)).build(3, 0).edges() == ()


def test_edge_list_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the edge list .*: No such file"):
        EdgeList(str(tmp_path / "missing.txt")).build(4, 0)
    with pytest.raises(InputError, match=r"cannot read the edge list .*: Is a directory"):
        EdgeList(str(tmp_path)).build(4, 0)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0 1")
    with pytest.raises(InputError, match="is not a text file in UTF-8"):
        EdgeList(str(tmp_path / "bytes")).build(4, 0)


def test_a_directed_edge_list_names_the_sender_first(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("0 1\n2 1\n1 0\n")
    graph = EdgeList(str(file), directed=True).build(3, 0)
    assert graph.neighbours(0) == ((1,), (0, 2), ())
    assert graph.out_neighbours(0) == ((1,), (0,), (1,))
    assert parse(f"edge-list:path={file},directed=true").build(3, 0) == graph


def test_a_weighted_edge_list(tmp_path: Path) -> None:
    file = tmp_path / "graph.txt"
    file.write_text("# weights\n0 1 2\n1 0 2.0  # again\n1 2 5e-1\n2 2 2.5\n")
    for text in (file.read_text(), file.read_text() + "2 1 +0.5\n"):  # at once, and by lines
        file.write_text(text)
        graph = EdgeList(str(file), weighted=True).build(3, 0)
        assert graph.links(0).toarray().tolist() == [[0, 2, 0], [2, 0, 0.5], [0, 0.5, 0]]
        assert self_weights(graph).tolist() == [1, 1, 2.5]
    file.write_text("0 1 2\n1 0 3\n")
    graph = EdgeList(str(file), weighted=True, directed=True).build(2, 0)
    assert graph.links(0).toarray().tolist() == [[0, 3], [2, 0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 2", "expected two node ids and a weight, got '1 2'"),
        ("1 2 3 4", "expected two node ids and a weight, got '1 2 3 4'"),
        ("1 2 x", "the weight must be a positive number, got 'x'"),
        ("1 2 0", "the weight must be a positive number, got '0'"),
        ("1 2 -1", "the weight must be a positive number, got '-1'"),
        ("1 2 inf", "the weight must be a positive number, got 'inf'"),
        ("1 2 nan", "the weight must be a positive number, got 'nan'"),
        ("1.0 2 3", "expected two node ids and a weight, got '1.0 2 3'"),
        ("+1 2 3", "expected two node ids and a weight, got '+1 2 3'"),
        ("1 4 3", "unknown node 4; the ids are 0 to 3"),
        ("1 0 3", "1 0 has weight 3.0 here and 2.0 before; keep one"),
    ],
)
def test_weighted_edge_list_errors_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "graph.txt"
    file.write_text(f"0 1 2\n{line}\n2 2 3\n")
    with pytest.raises(InputError) as error:
        EdgeList(str(file), weighted=True).build(4, 0)
    assert str(error.value) == f"{file}, line 2: {message}"


@given(st.lists(st.text("012 3x+-.#\t", max_size=6), max_size=4), st.booleans())
@settings(deadline=None, max_examples=150)
def test_reading_at_once_and_line_by_line_agree(lines: list[str], weighted: bool) -> None:
    from peerage.graphs import topology

    reader = EdgeList("here", weighted=weighted)
    at_once = None
    if not any("+" in line for line in lines):
        at_once = topology._parse_all_lines(lines, 4, False, weighted)
    if at_once is None:
        return
    slow = reader._parse_lines(lines, 4)
    built = [StaticGraph.from_edges(4, read.ends, weights=read.weights) for read in (at_once, slow)]
    assert built[0] == built[1]


def test_long_edge_lists_are_read_as_arrays(tmp_path: Path) -> None:
    graph = Regular(k=8).build(50_000, 0)
    file = tmp_path / "graph.txt"
    file.write_text("".join(f"{a} {b}\n" for a, b in graph.edges()))
    with lines_at_most(20_000):
        read = EdgeList(str(file)).build(50_000, 0)
    assert read == graph


def test_directed_and_weighted_networkx_graphs() -> None:
    sent = nx.DiGraph([("a", "b"), ("c", "b")])
    graph = FromGraph(sent).build(3, 0)
    assert graph.directed
    assert graph.neighbours(0) == ((), (0, 2), ())
    weighed = nx.Graph([("a", "b", {"weight": 2}), ("b", "c", {"colour": "red"})])
    weighed.add_edge("c", "c", weight=4)
    graph = FromGraph(weighed).build(3, 0)
    assert graph.weighted
    assert graph.links(0).toarray().tolist() == [[0, 2, 0], [2, 0, 1], [0, 1, 0]]
    assert self_weights(graph).tolist() == [1, 1, 4]
    assert not FromGraph(nx.path_graph(3)).build(3, 0).weighted


@given(st.integers(2, 8), st.booleans(), st.booleans(), SEEDS)
@settings(deadline=None, max_examples=30)
def test_graphs_travel_through_networkx(
    nodes: int, directed: bool, weighted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    ends = np.argwhere(np.triu(rng.random((nodes, nodes)) < 0.5, k=1))
    ends = rng.permuted(ends, axis=1) if directed else ends
    options = {"weights": rng.random(len(ends)) + 0.1, "self_loops": rng.random(nodes) + 0.1}
    graph = StaticGraph.from_edges(nodes, ends, directed=directed, **(options if weighted else {}))  # type: ignore[arg-type]
    assert FromGraph(graph.networkx()).build(nodes, 0) == graph


def test_networkx_graphs_are_numbered_in_sorted_or_in_insertion_order() -> None:
    named = nx.Graph([("c", "a"), ("a", "b")])
    assert FromGraph(named).build(3, 0).edges() == ((0, 1), (0, 2))
    mixed = nx.Graph([("c", 1), (1, (2, 3))])
    assert FromGraph(mixed).build(3, 0).edges() == ((0, 1), (1, 2))
    petersen = nx.petersen_graph()
    expected = {tuple(sorted(edge)) for edge in petersen.edges}
    assert set(FromGraph(petersen).build(10, 0).edges()) == expected


def test_networkx_graphs_cannot_be_written() -> None:
    with pytest.raises(InputError, match="cannot be written to a file"):
        specs.to_table(FromGraph(nx.path_graph(2)), "topology", TOPOLOGIES)


# Text


@pytest.mark.parametrize("topology", [*FIXED, *RANDOM, DynamicRegular(k=2), EdgeList("a/b.txt")])
def test_topologies_round_trip_through_text_and_tables(topology: Topology) -> None:
    assert parse(specs.text(topology, "topology", TOPOLOGIES)) == topology
    table = specs.to_table(topology, "topology", TOPOLOGIES)
    assert specs.from_table(table, "topology", TOPOLOGIES) == topology


def test_topologies_from_text() -> None:
    assert parse("er:p=0.2") == ErdosRenyi(p=0.2)
    assert parse("er:degree=8,connected=false") == ErdosRenyi(degree=8, connected=False)
    assert parse("heavy-tail:kind=configuration").kind == "configuration"  # type: ignore[attr-defined]
    assert parse("torus:rows=4") == Torus(rows=4)
    assert parse("torus:rows=none") == Torus()
    assert parse("sbm") == StochasticBlocks(groups=2, p_in=0.5, p_out=0.05)
    assert specs.text(ErdosRenyi(p=0.2), "topology", TOPOLOGIES) == "er:p=0.2"


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("er", "give exactly one of p and degree, such as er:p=0.2 or er:degree=8"),
        ("er:p=0.2,degree=8", "give exactly one of p and degree, such as er:p=0.2 or er:degree=8"),
        ("er:p=1.5", "p must lie in [0, 1], got 1.5"),
        ("er:p=nan", "p must lie in [0, 1], got nan"),
        ("er:degree=-1", "degree must be a positive number, got -1.0"),
        ("er:p=0.2,attempts=0", "attempts must be at least 1, got 0"),
        ("regular:k=0", "k must be at least 1, got 0"),
        ("dynamic-regular:k=0", "k must be at least 1, got 0"),
        ("ba:m=0", "m must be at least 1, got 0"),
        ("torus:rows=0", "rows must be at least 1, got 0"),
        ("sbm:p_in=2", "p_in must lie in [0, 1], got 2.0"),
        ("sbm:p_out=-0.1", "p_out must lie in [0, 1], got -0.1"),
        ("sbm:groups=0", "groups must be at least 1, got 0"),
        ("small-world:k=3", "k must be even, half of it on either side of the ring, got 3"),
        ("small-world:k=0", "k must be at least 2, got 0"),
        ("small-world:p=7", "p must lie in [0, 1], got 7.0"),
        (
            "heavy-tail:gamma=2",
            "gamma must be larger than 2, got 2.0; the mean degree is infinite below",
        ),
        ("heavy-tail:degree=inf", "degree must be a positive number, got inf"),
    ],
)
def test_wrong_options(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text)
    assert str(error.value) == f"topology {text.split(':')[0]!r}: {message}"


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        ("ring", 0, "nodes must be at least 1, got 0"),
        ("dynamic-regular", -3, "nodes must be at least 1, got -3"),
        ("regular:k=3", 5, "no 3-regular graph has 5 nodes; make k or nodes even"),
        ("dynamic-regular:k=3", 5, "no 3-regular graph has 5 nodes; make k or nodes even"),
        ("regular:k=6", 6, "k must be smaller than the 6 nodes, got 6"),
        ("ba:m=6", 6, "m must be smaller than the 6 nodes, got 6"),
        ("small-world:k=6", 6, "k must be smaller than the 6 nodes, got 6"),
        ("er:degree=6", 6, "degree must be at most 5 for 6 nodes, got 6.0"),
        ("heavy-tail:degree=8", 6, "degree must be at most 5 for 6 nodes, got 8.0"),
        ("sbm:groups=7", 6, "groups must be at most the 6 nodes, got 7"),
        ("torus", 8, "a square torus cannot have 8 nodes; use 4 or 9 nodes, or give rows="),
        ("torus:rows=3", 8, "a torus with 3 rows cannot have 8 nodes; use a multiple of rows"),
    ],
)
def test_wrong_numbers_of_nodes(text: str, nodes: int, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text).build(nodes, 0)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("er:attempts=3,p=0.001", "a larger p or degree"),
        ("regular:attempts=3,k=1", "a larger k"),
        ("sbm:attempts=3,p_out=0.0", "a larger p_in or p_out"),
        ("heavy-tail:attempts=3,degree=0.5", "a larger degree or gamma"),
    ],
)
def test_never_connected(text: str, remedy: str) -> None:
    with pytest.raises(InputError) as error:
        parse(text).build(20, 0)
    assert str(error.value) == (
        f"topology '{text}' with 20 nodes was not connected in 3 attempts; "
        f"choose {remedy}, more attempts, or connected=false"
    )


def test_a_kind_of_ones_own_is_named_by_its_repr() -> None:
    class Alone(RandomTopology):
        remedy = "company"

        def draw(self, nodes: int, rng: np.random.Generator) -> list[tuple[int, int]]:
            return []

    with pytest.raises(InputError, match=r"Alone\(attempts=2, connected=True\).*choose company"):
        Alone(attempts=2).build(3, 0)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (
            nx.MultiDiGraph([(0, 1)]),
            "the networkx graph is a multigraph; pass networkx.DiGraph(graph)",
        ),
        (nx.MultiGraph([(0, 1)]), "the networkx graph is a multigraph; pass networkx.Graph(graph)"),
        (nx.Graph([("a", "a")]), "node 'a' of the networkx graph has a self-loop; remove it"),
        ([(0, 1)], "expected a networkx graph, got [(0, 1)]"),
    ],
)
def test_wrong_networkx_graphs(graph: nx.Graph, message: str) -> None:
    with pytest.raises(InputError) as error:
        FromGraph(graph)
    assert str(error.value) == message


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "heavy", None])
def test_wrong_networkx_weights(weight: object) -> None:
    graph = nx.Graph([("a", "b", {"weight": weight})])
    with pytest.raises(InputError) as error:
        FromGraph(graph).build(2, 0)
    assert str(error.value) == (
        f"the weight of the edge from 'a' to 'b' must be a positive number, got {weight!r}"
    )


def test_networkx_graph_of_another_size() -> None:
    with pytest.raises(InputError, match="graph has 3 nodes, not 1; make them equal"):
        FromGraph(nx.path_graph(3)).build(1, 0)


def test_an_unknown_kind_of_heavy_tail() -> None:
    with pytest.raises(InputError, match="kind must be one of chung-lu, configuration; got 'zipf'"):
        HeavyTail(kind="zipf")  # type: ignore[arg-type]


# Speed


def test_a_thousand_nodes_take_no_loop_over_pairs() -> None:
    with lines_at_most(500_000):
        graph: Graph = ErdosRenyi(degree=8).build(1000, 0)
        dynamic = DynamicRegular(k=4).build(1000, 0)
        for round in range(10):
            dynamic.neighbours(round)
    assert is_connected(graph)
