"""A peer that undoes a round goes back to the bits that it had, those of its optimiser as well."""

from dataclasses import dataclass

import pytest
import torch
from support.networking import run_peers

import peerage as pg
from peerage import Algorithm, LocalSGD, Node
from peerage.testing import toy

BAD = 2  # the round with the message that breaks


@dataclass(frozen=True)
class Poisoned(Algorithm[None]):
    """Node 0 learns alone and sends its model to node 1: once, one with nothing in it.

    Without `poison`, node 1 does by itself what it has to do then: it leaves the round out, and
    never listens again.
    """

    local: LocalSGD = LocalSGD()
    poison: bool = True

    async def round(self, node: Node[None]) -> None:
        if node.id == 0:
            await node.train(self.local)
            await node.send(1, **({} if node.round == BAD else {"x": node.params}))
            await node.receive(1)  # nothing comes: it waits until the round of node 1 is over
        elif self.poison or node.round != BAD:
            await node.train(self.local)
            if self.poison or node.round < BAD:
                for x in (await node.receive(0))["x"]:
                    node.params = (node.params + x) / 2


@pytest.mark.parametrize(
    "work",
    [
        LocalSGD(epochs=1),
        LocalSGD(epochs=1, momentum=0.9, keep_optimizer=True),
        LocalSGD(epochs=1, lr=0.01, optimizer="adamw", keep_optimizer=True),
    ],
    ids=["plain", "momentum", "adamw"],
)
def test_a_round_that_is_undone_leaves_nothing_behind(work):
    settings = {"nodes": 2, "partition": "iid", "topology": "complete", "rounds": 6}
    wanted = pg.run(toy(Poisoned(work, poison=False), **settings)).parameters
    peers = run_peers(toy(Poisoned(work), **settings))
    assert peers[1].counters["poisoned round"] == 1
    # Node 0 is blocked in the rounds after, and it may have sent one of its messages before.
    assert peers[1].counters.keys() <= {"poisoned round", "sender", "late"}
    assert peers[1].tracker.banned_peers == {0}
    for peer, params in zip(peers, wanted, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
