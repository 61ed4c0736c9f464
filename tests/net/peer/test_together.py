"""Mutual learning at a rotating hub, between peers: the bits of the simulator."""

import pytest
import torch
from support.mutual import EVERY, SETTINGS
from support.networking import run_peers

import peerage as pg
from peerage.testing import toy


@pytest.mark.parametrize("name", EVERY)
def test_peers_that_learn_together_end_with_the_bits_of_the_simulator(name):
    experiment = toy(EVERY[name], **SETTINGS)
    wanted = pg.run(experiment).parameters
    peers = run_peers(experiment)
    for peer, params in zip(peers, wanted, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
    assert [dict(peer.counters) for peer in peers] == [{}] * len(peers)
