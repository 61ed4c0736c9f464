"""Builders: the edges by hand where there is one answer, laws where chance decides."""

import pickle
import time
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage import specs
from peerage.errors import InputError
from peerage.graph import Graph, degrees, is_connected
from peerage.random_edges import regular_edges
from peerage.randomness import numpy_stream
from peerage.topology import (
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


# What is there, by hand


def test_complete_ring_and_star_of_four() -> None:
    assert Complete().build(4, 0).neighbours(0) == ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2))
    assert Ring().build(4, 0).neighbours(0) == ((1, 3), (0, 2), (1, 3), (0, 2))
    assert Star().build(4, 0).neighbours(0) == ((1, 2, 3), (0,), (0,), (0,))


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


# Rounds


def test_dynamic_graphs_are_drawn_anew_in_every_round() -> None:
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


def test_edge_list_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the edge list .*: No such file"):
        EdgeList(str(tmp_path / "missing.txt")).build(4, 0)
    with pytest.raises(InputError, match=r"cannot read the edge list .*: Is a directory"):
        EdgeList(str(tmp_path)).build(4, 0)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe0 1")
    with pytest.raises(InputError, match="is not a text file in UTF-8"):
        EdgeList(str(tmp_path / "bytes")).build(4, 0)


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
            "gamma must be larger than 2, got 2.0: the mean degree is infinite below",
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
        ("sbm:groups=7", 6, "7 groups need at least as many nodes, got 6"),
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
        (nx.DiGraph([(0, 1)]), "the networkx graph is directed; pass graph.to_undirected()"),
        (nx.MultiGraph([(0, 1)]), "the networkx graph is a multigraph; pass networkx.Graph(graph)"),
        (nx.Graph([("a", "a")]), "node 'a' of the networkx graph has a self-loop; remove it"),
        ([(0, 1)], "expected a networkx graph, got [(0, 1)]"),
    ],
)
def test_wrong_networkx_graphs(graph: nx.Graph, message: str) -> None:
    with pytest.raises(InputError) as error:
        FromGraph(graph)
    assert str(error.value) == message


def test_networkx_graph_of_another_size() -> None:
    with pytest.raises(InputError, match="graph has 3 nodes, not 1; make them equal"):
        FromGraph(nx.path_graph(3)).build(1, 0)


def test_an_unknown_kind_of_heavy_tail() -> None:
    with pytest.raises(InputError, match="kind must be chung-lu or configuration, got 'zipf'"):
        HeavyTail(kind="zipf")  # type: ignore[arg-type]


# Speed


def test_a_thousand_nodes_take_well_under_a_second() -> None:
    start = time.process_time()
    graph: Graph = ErdosRenyi(degree=8).build(1000, 0)
    dynamic = DynamicRegular(k=4).build(1000, 0)
    for round in range(10):
        dynamic.neighbours(round)
    assert time.process_time() - start < 1
    assert is_connected(graph)
