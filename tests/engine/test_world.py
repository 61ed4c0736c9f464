"""What a world answers about its nodes, links, faults and models, before anything runs."""

from typing import Any

import networkx as nx
import pytest
import torch

import peerage as pg
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.graphs.topology import FromGraph
from peerage.net.peer.secret_noise import SecretNoise
from peerage.privacy import Noise
from peerage.runs.facts import RunFacts
from peerage.testing import CLASSES, NODES, toy, unequal_parts
from peerage.work.training import LocalSGD


def world_of(algorithm: Any = None, **changes: Any) -> World:
    """Five nodes on a ring, unless something else is asked for."""
    return prepare(toy(algorithm or pg.DecAvg(), **changes))


def passes(world: World, round: int, sender: int, recipient: int) -> bool:
    """Whether the first message between two nodes arrives."""
    link_faults = world.link_faults(round)
    return link_faults.link_up(sender, recipient) and not link_faults.message_lost(
        sender, recipient, 0
    )


PAIRS = [(i, j) for i in range(NODES) for j in range(NODES) if i != j]
RING = ((1, 4), (0, 2), (1, 3), (2, 4), (0, 3))


# Who is there


def test_without_a_hub_all_nodes_have_data_and_keep_their_models() -> None:
    world = world_of()
    assert (world.nodes, len(world.data_nodes), world.hub) == (NODES, NODES, None)
    assert [world.model_owner(node) for node in range(NODES)] == list(range(NODES))
    assert [len(part) for part in world.parts] == [len(part) for part in unequal_parts()]


def test_a_hub_is_the_last_node_has_no_data_and_keeps_all_models() -> None:
    world = world_of(pg.FedAvg())
    assert (world.nodes, len(world.data_nodes), world.hub) == (NODES + 1, NODES, NODES)
    assert [world.model_owner(node) for node in range(NODES + 1)] == [NODES] * (NODES + 1)
    assert len(world.parts[NODES]) == len(world.validation[NODES]) == 0
    assert world.neighbours(0) == (*[(NODES,)] * NODES, tuple(range(NODES)))


def test_a_hub_may_have_another_number() -> None:
    """As in a network of real peers that got clients later."""
    experiment = pg.Experiment(
        algorithm="fedavg",
        topology="star:number=2",
        nodes=4,
        clusters="1/3:none",
        model="logistic",
        evaluation={"validation": 0.2},
        faults={"join": "4@2"},
    )
    world = prepare(experiment)
    assert (world.nodes, world.hub, world.data_nodes) == (5, 2, [0, 1, 3, 4])
    assert len(world.parts[2]) == len(world.validation[2]) == 0
    assert all(len(world.parts[node]) and len(world.validation[node]) for node in (0, 1, 3, 4))
    assert [world.cluster_of(node) for node in range(5)].index(None) == 2
    assert world.graph.neighbours(0) == ((2,), (2,), (0, 1, 3, 4), (2,), (2,))
    assert world.setup["examples"] == [len(world.parts[node]) for node in (0, 1, 3, 4)]
    assert world.setup["hub"] == 2
    assert RunFacts.of(world).data_nodes == {0, 1, 3, 4}


def test_nodes_join_and_leave_in_the_rounds_that_were_given() -> None:
    world = world_of(faults={"join": "4@2", "leave": "0@3"})  # rounds of users begin with 1
    assert world.present(-1) == world.present(0) == [0, 1, 2, 3]
    assert world.present(1) == [0, 1, 2, 3, 4]
    assert world.present(2) == [1, 2, 3, 4]


# Links


def test_neighbours_are_those_of_the_graph() -> None:
    world = world_of()
    assert world.neighbours(0) == world.neighbours(2) == world.out_neighbours(0) == RING


def test_absent_nodes_have_no_neighbours_and_are_none() -> None:
    world = world_of(faults={"join": "4@2"})
    assert world.neighbours(0) == world.out_neighbours(0) == ((1,), (0, 2), (1, 3), (2,), ())
    assert world.neighbours(1) == RING


def test_in_a_directed_graph_out_neighbours_are_the_reverse() -> None:
    world = world_of(topology=nx.DiGraph([(node, (node + 1) % NODES) for node in range(NODES)]))
    in_neighbours, out_neighbours = world.neighbours(0), world.out_neighbours(0)
    assert in_neighbours != out_neighbours
    assert {(i, j) for j in range(NODES) for i in in_neighbours[j]} == {
        (i, j) for i in range(NODES) for j in out_neighbours[i]
    }
    assert sorted(map(len, in_neighbours)) == [1] * NODES


def test_a_dynamic_graph_is_drawn_for_the_present_nodes() -> None:
    world = world_of(topology="dynamic-regular:k=2", faults={"leave": "0@2"})
    assert all(len(near) == 2 for near in world.neighbours(0))
    after = world.neighbours(1)
    assert after[0] == ()
    assert all(len(near) == 2 and 0 not in near for near in after[1:])
    assert world.neighbours(1) == after  # drawn again, and the same


# Weights of links


def test_a_graph_without_weights_has_no_edge_weights() -> None:
    assert world_of().edge_weights(0, 0) == {}


def test_weights_of_links_are_those_of_the_graph_and_one_for_itself() -> None:
    graph = nx.cycle_graph(NODES)
    nx.set_edge_attributes(graph, {edge: 1.0 + sum(edge) for edge in graph.edges}, "weight")
    world = world_of(pg.DecAvg(weights="graph"), topology=FromGraph(graph))
    assert world.edge_weights(0, 0) == {1: 2.0, 4: 5.0, 0: 1.0}
    assert world.edge_weights(3, 2) == {2: 6.0, 4: 8.0, 3: 1.0}


# Faults of links and messages


def test_without_faults_everything_arrives() -> None:
    world = world_of()
    assert all(passes(world, round, *pair) for round in range(-1, 3) for pair in PAIRS)


@pytest.mark.parametrize("faults", [{"links": 0.5}, {"links": 0.5, "directed": True}])
def test_closed_links_are_the_same_in_both_directions_unless_directed(
    faults: dict[str, Any],
) -> None:
    world = world_of(faults=faults)
    found = {(r, i, j): passes(world, r, i, j) for r in range(20) for i, j in PAIRS}
    assert 0.4 < sum(found.values()) / len(found) < 0.6
    symmetric = all(found[r, i, j] == found[r, j, i] for r, i, j in found)
    assert symmetric == ("directed" not in faults)
    again = world_of(faults=faults)  # drawn by name: the same in every world of this seed
    assert all(passes(again, r, i, j) == open for (r, i, j), open in found.items())
    other = world_of(faults=faults, seed=1)
    assert any(passes(other, r, i, j) != open for (r, i, j), open in found.items())


def test_before_the_first_round_all_links_are_open() -> None:
    world = world_of(faults={"links": 0.0})
    assert all(passes(world, -1, *pair) for pair in PAIRS)
    assert not any(passes(world, 0, *pair) for pair in PAIRS)


def test_nothing_passes_to_or_from_absent_nodes() -> None:
    world = world_of(faults={"leave": "2@1"})
    assert {pair for pair in PAIRS if not passes(world, 0, *pair)} == {p for p in PAIRS if 2 in p}


def test_all_messages_can_be_lost() -> None:
    world = world_of(faults={"loss": 1.0})
    assert not any(passes(world, round, *pair) for round in range(3) for pair in PAIRS)


# Models and work


def test_architectures_take_turns_and_have_layouts_of_their_own() -> None:
    world = world_of(model=["mlp:hidden=8", "logistic"])
    names = [world.architecture(node).name for node in range(NODES)]
    assert names == [world.assignment[node] for node in range(NODES)]
    assert names[0] == names[2] == names[4] != names[1] == names[3]
    sizes = [world.layout(node).size for node in range(NODES)]
    assert sizes == [67, 15, 67, 15, 67]  # 4 * 8 + 8 + 8 * 3 + 3 and 4 * 3 + 3


def test_work_is_the_number_of_examples_unless_steps_are_given() -> None:
    assert [world_of().expected_cost(node) for node in range(NODES)] == [4, 8, 12, 16, 20]
    steps = world_of(pg.DecAvg(LocalSGD(steps=3)))
    assert [steps.expected_cost(node) for node in range(NODES)] == [1] * NODES


# What reports show, and what one node gets


def test_a_world_holds_what_reports_show():
    world = prepare(toy(pg.FedAvg()))
    setup = world.setup
    assert setup["examples"] == [
        len(part) for part in unequal_parts()
    ]  # of the nodes that have data
    assert [sum(row) for row in setup["allocation"]] == setup["examples"]
    assert setup["classes"] == list(world.classes) == [str(label) for label in range(CLASSES)]
    assert setup["example"] == {"shape": [4], "dtype": "float32"}
    assert setup["parameters"] == [world.layout(0).size] * (NODES + 1)
    assert setup["test_examples"] == len(world.test)
    assert "constants" not in setup


def test_a_world_for_one_node_holds_its_data_only():
    world = prepare(toy(pg.DecAvg(), evaluation={"validation": 0.2}))
    noise = SecretNoise()
    restricted = world.restrict_to_node(2, noise)
    assert (restricted.secret_noise, world.secret_noise) == (noise, None)
    assert len(restricted.train) == len(world.parts[2]) + len(world.validation[2])
    for held, whole in ((restricted.parts, world.parts), (restricted.validation, world.validation)):
        assert [len(part) for part in held] == [0, 0, len(whole[2]), 0, 0]
        assert torch.equal(restricted.train.y[held[2]], world.train.y[whole[2]])
        assert torch.equal(restricted.train.x[held[2]], world.train.x[whole[2]])
    assert restricted.setup == world.setup  # what is public stays as it was


def test_noise_is_on_what_nodes_with_data_send():
    without_noise = prepare(toy(pg.FedAvg()))
    noisy = prepare(toy(pg.FedAvg(), noise={"sigma": 0.1, "clip": 1}))
    assert [without_noise.privacy_filter(node, {}).noise.active for node in range(NODES + 1)] == [
        False
    ] * (NODES + 1)
    assert [noisy.privacy_filter(node, {}).noise for node in range(NODES)] == [noisy.noise] * NODES
    assert noisy.privacy_filter(NODES, {}).noise == Noise()  # the hub has no data
