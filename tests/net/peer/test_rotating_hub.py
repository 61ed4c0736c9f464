"""DFML and its baselines between peers: the bits of the simulator, and an aggregator that dies."""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.networking import BROKEN, PeerHarness, run_harness, run_peers

import peerage as pg
from peerage import (
    DFML,
    DecFedAvg,
    DecFedDropout,
    DecFML,
    DecHeteroFL,
    DefKT,
    DFMLNeighbours,
    Inbox,
    LocalSGD,
    Node,
    Weights,
)
from peerage.algorithms.mutual_learning import Peak
from peerage.testing import NODES, toy

WORK = LocalSGD(epochs=1, batch_size=8)
SEVERAL = ["mlp:hidden=8", "mlp:hidden=5"]
EVERY = {
    "dfml": DFML(WORK, epochs_mutual=1),
    "dfml walk": DFML(WORK, epochs_mutual=1, aggregator="walk"),
    "dfml vanilla": DFML(WORK, epochs_mutual=1, teacher="vanilla", senders=1),
    "dfml-neighbours": DFMLNeighbours(WORK, epochs_mutual=1),
    "dec-fedavg": DecFedAvg(WORK),
    "dec-heterofl": DecHeteroFL(WORK),
    "dec-fed-dropout": DecFedDropout(WORK),
    "dec-fml": DecFML(WORK, meme="mlp:hidden=3"),
    "def-kt": DefKT(WORK, epochs_mutual=1, pairs=1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"topology": "complete"}, {"faults": {"loss": 0.3, "join": "2@3", "leave": "0@4"}}],
    ids=["ring", "complete", "faults"],
)
@pytest.mark.parametrize("name", EVERY)
def test_peers_end_with_the_bits_of_the_simulator(name, changes):
    models = {} if name == "def-kt" else {"model": SEVERAL}
    experiment = toy(EVERY[name], rounds=6, **models, **changes)
    wanted = pg.run(experiment)
    peers = run_peers(experiment)
    for peer, params in zip(peers, wanted.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
        # After a loss, a peer may be early, or wait for a message that will not be sent.
        assert "faults" in changes or not peer.counters


ROUND = 2  # in which the aggregator dies, from 0


@dataclass(frozen=True)
class Doomed(DFML):
    """The aggregator of one round has received all models when it is stopped."""

    async def aggregate(self, node: Node[Peak], inbox: Inbox) -> Mapping[int, Weights]:
        if node.round == ROUND:
            TRAINING.set()
            assert KILLED.wait(BROKEN)
        return await super().aggregate(node, inbox)


TRAINING, KILLED = threading.Event(), threading.Event()


@pytest.mark.slow
def test_an_aggregator_that_dies_costs_that_round_only(tmp_path):
    TRAINING.clear()
    KILLED.clear()
    experiment = toy(Doomed(WORK, epochs_mutual=1), topology="complete", rounds=7)
    turns = participants(experiment)
    dead, senders = turns[ROUND]
    kept: dict[int, Any] = {}

    async def act(harness: PeerHarness) -> None:
        await asyncio.to_thread(TRAINING.wait, BROKEN)
        await harness.kill(dead)
        del harness.tasks[dead]
        for sender in senders:  # has sent its model, and waits for it
            node = harness.peers[sender].shard.members[sender].node
            kept[sender] = node.params, node.state
        KILLED.set()

    peers = {peer.me: peer for peer in run_harness(experiment, tmp_path, act)}
    living = [me for me in range(NODES) if me != dead]
    for me in living:
        rows = {row["round"]: row for row in peers[me].rows}
        assert list(rows) == [*range(8)]
        for round in range(ROUND, 7):
            hub, others = turns[round]
            if hub == dead:
                expected = [0, 1]  # everybody waited for its message
            elif me == hub:
                expected = [len(set(others) - {dead}), len(others)]
            else:
                expected = [1, 1] if me in others else [0, 0]
            assert rows[round + 1]["heard"] == expected
    assert any(turns[round].aggregator != dead for round in range(ROUND + 1, 7))
    for sender in senders:
        params, state = kept[sender]
        assert not torch.equal(params, state.model.params)  # trained since the peak
        now = peers[sender].shard.members[sender].node
        assert not torch.equal(now.params, params)


def participants(experiment: pg.Experiment) -> list[Any]:
    """The aggregator and the senders of every round."""
    algorithm: Any = experiment.algorithm
    graph = tuple(tuple(j for j in range(NODES) if j != i) for i in range(NODES))
    node: Any = Node(
        id=0,
        num_nodes=NODES,
        num_examples=1,
        label_proportions=torch.ones(1),
        architecture="",
        layout=pg.Layout(()),
        params=torch.empty(0),
        buffers=torch.empty(0),
        seed=experiment.seed,
    )
    found = []
    for round in range(experiment.rounds):
        node.begin_round(round, graph)
        found.append(algorithm.participants(node))
    return found
