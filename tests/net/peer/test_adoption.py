"""Whose model a peer continues with after missed rounds, if some of the offers are lies."""

import pytest
import torch
from support.networking import PeerHarness, run_harness
from torch import Tensor

from peerage import DecAvg
from peerage.engine.router import Packet
from peerage.net.peer.model_transfer import choose_model
from peerage.requests import Envelope
from peerage.testing import toy


def offers(*models: Tensor) -> dict[int, Packet]:
    statistics = torch.zeros(1)
    return {
        sender: Packet(Envelope(sender, 1, 1, "net"), (), {"x": x, "b": statistics}, 0)
        for sender, x in enumerate(models, start=1)
    }


@pytest.mark.parametrize("lie", [-3e38, -1e9, 0.0, 1.2, 2.0, 1e9, 3e38])
def test_one_liar_of_three_does_not_move_the_model_beyond_the_others(lie):
    honest = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    model, sources = choose_model(torch.zeros(2), offers(*honest, torch.full((2,), lie)))
    assert sources == [1, 2, 3]
    x = model[0]
    assert bool((torch.minimum(*honest) <= x).all())
    assert bool((x <= torch.maximum(*honest)).all())


def test_of_two_models_the_nearer_one_is_used():
    near, far = torch.full((4,), 0.5), torch.full((4,), -3.0)
    model, sources = choose_model(torch.ones(4), offers(far, near))
    assert sources == [2]
    assert torch.equal(model[0], near)


@pytest.mark.parametrize(("distance", "used"), [(9.9, True), (10.1, False), (3e38, False)])
def test_a_single_model_must_not_be_far_from_the_own_one(distance, used):
    for own in (torch.zeros(4), torch.full((4,), 0.01)):  # after some initialisations, all zero
        model, sources = choose_model(own, offers(own + distance))
        assert (model is not None) == bool(sources) == used
    assert choose_model(torch.full((4,), 5.0), offers(torch.full((4,), 50.0)))[1] == [1]


def test_without_offers_the_own_model_stays():
    assert choose_model(torch.ones(2), {}) == (None, [])


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [5, 3])
def test_a_peer_that_returns_is_not_ended_by_the_model_of_one_member(nodes, tmp_path, caplog):
    """The model that node 1 offers cannot be trained."""
    caplog.set_level("INFO")
    settings = {"nodes": nodes, "topology": "complete", "partition": "iid", "rounds": 60}

    async def kill_and_restart(harness: PeerHarness) -> None:
        liar = harness.peers[1]

        def offer(round: int) -> None:
            node = liar.shard.members[1].node
            payload = {"x": torch.full_like(node.params, 3e38), "b": node.buffers}
            liar.model_server.keep(Packet(node.envelope(), (), payload, 0), round)

        liar.offer = offer  # type: ignore[method-assign]
        await harness.until(0, 3)
        await harness.kill(0)
        reached = harness.peers[2].round
        await harness.until(2, reached + 10)
        harness.start(0, rejoin="neighbour")

    peers = run_harness(toy(DecAvg(), **settings), tmp_path, kill_and_restart)
    assert peers[0].state == "finished"
    assert peers[0].finished == 60
    assert not any(peer.tracker.banned_peers for peer in peers)
    if nodes == 5:
        assert "continuing with the median of the models of node-1, node-2, node-3" in caplog.text
    else:
        assert "continuing with the model of node-2, which is trusted alone" in caplog.text
