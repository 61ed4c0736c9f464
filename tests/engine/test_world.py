"""A world: what it says about itself, and what is left of it for one node."""

import torch

from peerage import DecAvg, FedAvg
from peerage.engine.prepare import prepare
from peerage.privacy import Noise
from peerage.testing import CLASSES, NODES, dealt, toy


def test_a_world_says_what_reports_show():
    world = prepare(toy(FedAvg()))
    setup = world.setup
    assert setup["examples"] == [len(part) for part in dealt()]  # of the nodes that have data
    assert [sum(row) for row in setup["allocation"]] == setup["examples"]
    assert setup["classes"] == list(world.classes) == [str(label) for label in range(CLASSES)]
    assert setup["example"] == {"shape": [4], "dtype": "float32"}
    assert setup["parameters"] == [world.layout(0).size] * (NODES + 1)
    assert setup["test_examples"] == len(world.test)
    assert "constants" not in setup


def test_a_world_for_one_node_holds_its_data_only():
    world = prepare(toy(DecAvg(), evaluation={"validation": 0.2}))
    mine = world.restrict_to_node(2, secret=7)
    assert (mine.secret, world.secret) == (7, None)
    assert len(mine.train) == len(world.parts[2]) + len(world.validation[2])
    for held, whole in ((mine.parts, world.parts), (mine.validation, world.validation)):
        assert [len(part) for part in held] == [0, 0, len(whole[2]), 0, 0]
        assert torch.equal(mine.train.y[held[2]], world.train.y[whole[2]])
        assert torch.equal(mine.train.x[held[2]], world.train.x[whole[2]])
    assert mine.setup == world.setup  # what is public stays as it was


def test_noise_is_on_what_nodes_with_data_send():
    quiet = prepare(toy(FedAvg()))
    noisy = prepare(toy(FedAvg(), noise={"sigma": 0.1, "clip": 1}))
    assert [quiet.veil(node, {}).noise.active for node in range(NODES + 1)] == [False] * (NODES + 1)
    assert [noisy.veil(node, {}).noise for node in range(NODES)] == [noisy.noise] * NODES
    assert noisy.veil(NODES, {}).noise == Noise()  # the hub has no data
