"""Who takes part in a round whose aggregator changes."""

import itertools
from collections import Counter
from typing import Any

import pytest
from support.participants import (
    COMPLETE,
    make_node,
    participants,
)

from peerage import DFML
from peerage.graphs.topology import TwoGroup


def test_the_number_of_senders():
    assert [DFML().num_senders(nodes) for nodes in (1, 2, 3, 5, 10, 50)] == [0, 1, 2, 3, 5, 25]
    assert DFML(senders=0.1).num_senders(3) == 1
    assert DFML(senders=0.99).num_senders(5) == 4
    assert DFML(senders=7).num_senders(50) == 7
    assert DFML(senders=25) == DFML(senders=25.0)


@pytest.mark.parametrize("aggregator", ["uniform", "walk", "fixed"])
def test_all_nodes_know_the_participants(aggregator):
    ring = tuple(((i - 1) % 7, (i + 1) % 7) for i in range(7))
    for graph, count in [(COMPLETE, 3), (ring, 2)]:
        found = participants(DFML(aggregator=aggregator), graph, 60)
        assert found[0].aggregator == 0
        for hub, senders in found:
            assert len(set(senders)) == count
            assert set(senders) <= set(graph[hub])
        hubs = {hub for hub, _ in found}
        assert hubs == ({0} if aggregator == "fixed" else set(range(len(graph))))


def test_a_walk_goes_from_neighbour_to_neighbour_and_uniform_draws_do_not():
    ring = tuple(((i - 1) % 12, (i + 1) % 12) for i in range(12))
    for aggregator, adjacent in (("walk", True), ("uniform", False)):
        hubs = [hub for hub, _ in participants(DFML(aggregator=aggregator), ring, 30)]
        assert all(b in ring[a] for a, b in itertools.pairwise(hubs)) == adjacent


def test_a_walk_is_the_same_for_a_node_that_joins_late():
    path = ((1,), (0, 2), (1, 3), (2,))
    graphs = dict.fromkeys(range(40), path)
    asked: list[int] = []

    def graph_of(round: int) -> Any:
        asked.append(round)
        return graphs[round]

    walk = DFML(aggregator="walk")
    steps = [walk.participants(make_node(1, path, round, graph_of)) for round in range(40)]
    assert asked == [*range(39)]  # one graph for each round
    late = make_node(1, path, 39, graphs.__getitem__)
    late.graph_of = lambda round: graphs[round]
    assert walk.participants(late) == steps[39]
    back = make_node(1, path, 20, graph_of)  # earlier than what is known: from the beginning
    assert walk.participants(back) == steps[20]


def test_a_walk_whose_aggregator_left_starts_anywhere():
    left = ((), (2,), (1,))  # node 0 is gone
    graphs = [((1, 2), (0, 2), (0, 1)), left]
    walk = DFML(aggregator="walk")
    node = make_node(1, left, 1, lambda round: graphs[round])
    assert walk.participants(node).aggregator in (1, 2)


def test_absent_nodes_are_not_drawn_and_a_network_without_links_has_an_aggregator():
    graph = ((), (2, 3), (1, 3), (1, 2), ())
    hubs = Counter(hub for hub, _ in participants(DFML(), graph, 60))
    assert set(hubs) == {1, 2, 3}
    alone = participants(DFML(), ((), (), ()), 30)
    assert {hub for hub, _ in alone} == {0, 1, 2}
    assert all(senders == () for _, senders in alone)
    assert participants(DFML(aggregator="fixed"), graph, 3)[2] == (0, ())


def test_both_groups_of_the_two_group_graph_supply_aggregators():
    graph = TwoGroup().build(12, seed=0).neighbours(0)
    found = participants(DFML(), graph, 40)
    assert {hub % 2 for hub, _ in found} == {0, 1}
    for hub, senders in found:
        assert len(senders) == min(6, len(graph[hub]))


def test_aggregators_are_uniform():
    counts = Counter(hub for hub, _ in participants(DFML(), COMPLETE, 1001)[1:])
    assert all(150 < counts[node] < 250 for node in range(5))
