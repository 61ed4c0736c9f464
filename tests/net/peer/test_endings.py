"""Waiting for silent peers: a node continues as soon as their round is over."""

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import networkx as nx
import pytest
import torch
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import (
    InMemory,
    OverSockets,
    PeerHarness,
    network_of,
    run_harness,
    run_peers,
)

import peerage as pg
from peerage import DecAvg, Experiment, Node
from peerage.engine.prepare import prepare
from peerage.net.peer import peer_tracker
from peerage.net.peer.endings import Endings
from peerage.net.peer.mailbox import Mailbox
from peerage.net.peer.network import Network, Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.peer.traffic import MAX_DONE, Outbox
from peerage.net.wire.header import DATA, DONE, Header, Rejected, done
from peerage.net.wire.transport import Transport, Unreachable
from peerage.testing import toy


@dataclass(frozen=True)
class Distant(DecAvg):
    """After the exchange with its neighbours, a node waits for some other that the coin draws.

    Half of them send something. The last in the order waits for no node, so that all can continue.
    """

    async def round(self, node: Node[None]) -> None:
        await super().round(node)
        order = torch.randperm(node.num_nodes, generator=node.coin).tolist()
        sends = torch.rand(node.num_nodes, generator=node.coin) < 0.5
        position = order.index(node.id)
        if position > 0 and sends[node.id]:
            await node.send(order[position - 1], x=node.params)
        if position + 1 < len(order):
            inbox = await node.receive(order[position + 1])
            for x in inbox["x"]:
                node.params = (node.params + x) / 2


@dataclass(frozen=True)
class Far(DecAvg):
    """On a path, node 0 waits in every round for the last, which never sends it anything."""

    async def round(self, node: Node[None]) -> None:
        await super().round(node)
        if node.id == 0:
            node.note(received=len(await node.receive(node.num_nodes - 1)))


def check(experiment: Experiment, **options: Any) -> list[Peer]:
    """Real peers end with the bits of the serial engine, and nothing is missed."""
    result = pg.run(experiment)
    peers = run_peers(experiment, **options)
    for peer, wanted in zip(peers, result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert not peer.counters
    return peers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"topology": nx.path_graph(5)},
        {"topology": nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)])},
        {"topology": nx.empty_graph(5)},
        {"topology": "dynamic-regular:k=2"},
        {"faults": {"loss": 0.3}},
        {"faults": {"links": 0.5}},
        {"faults": {"nodes": 0.6}},
        {"faults": {"join": "2@3", "leave": "0@3"}},
    ],
    ids=["ring", "path", "directed", "empty", "dynamic", "loss", "links", "nodes", "late"],
)
def test_silent_peers_are_waited_for_as_in_the_simulator(changes):
    check(toy(Distant(), rounds=5, **changes))


@pytest.mark.slow
def test_silent_peers_over_real_connections(tmp_path):
    check(toy(Distant(), rounds=5), transports=OverSockets(tmp_path))


def test_silent_nodes_before_the_first_round(tmp_path):
    """Before the first round, nodes estimate the gain, and no ending of it may be missed."""
    check(toy(Distant(), rounds=3, init={"gain": "estimated"}))


# Networks that are slow, or lose endings


class Slow(MemoryTransport):
    """Every message and every question takes its time, so that some peers are rounds ahead."""

    def __init__(self, memory: MemoryNetwork, me: int) -> None:
        super().__init__(memory, me)
        self.rng = random.Random(me)

    async def send(self, header: Header, payload: Any, deadline: float) -> None:
        await asyncio.sleep(self.rng.uniform(0, 0.1 if self.me == 0 else 0.01))
        await super().send(header, payload, deadline)

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        await asyncio.sleep(self.rng.uniform(0, 0.05))
        return await super().ask(peer, question, deadline)


class Forgetful(MemoryTransport):
    """The first announcements and the first endings are lost, except those to out-neighbours."""

    def __init__(self, memory: MemoryNetwork, me: int, out_neighbours: Any) -> None:
        super().__init__(memory, me)
        self.out_neighbours = out_neighbours
        self.lost: Counter[str] = Counter()

    async def send(self, header: Header, payload: Any, deadline: float) -> None:
        told = header.recipient in self.out_neighbours(header.round)[self.me]
        if header.kind == DONE and not told and self.lost["endings"] < 2:
            self.lost["endings"] += 1
            raise Unreachable("lost")
        await super().send(header, payload, deadline)

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        if b'"done"' in question and self.lost["questions"] < 2:
            self.lost["questions"] += 1
            raise Unreachable("lost")
        return await super().ask(peer, question, deadline)


@pytest.mark.slow
def test_peers_that_are_rounds_ahead_are_asked_about_rounds_that_are_long_over():
    """On a path of eight, the far end can be seven rounds ahead of the slow one."""
    memory = MemoryNetwork()
    experiment = toy(Far(), nodes=8, partition="iid", rounds=12, topology=nx.path_graph(8))
    peers = check(experiment, transports=lambda network, me: Slow(memory, me))
    assert [row["heard"] for row in peers[0].rows] == [[0, 0]] * 13


@pytest.mark.slow
def test_announcements_and_endings_may_get_lost(monkeypatch):
    monkeypatch.setattr(peer_tracker, "RETRY_DELAY", 0.05)
    memory = MemoryNetwork()
    experiment = toy(Distant(), rounds=4)
    world = prepare(experiment)
    made: list[Forgetful] = []

    def transports(network: Network, me: int) -> Transport:
        made.append(Forgetful(memory, me, world.out_neighbours))
        return made[-1]

    check(experiment, transports=transports)
    assert sum(one.lost["endings"] for one in made) > 2
    assert sum(one.lost["questions"] for one in made) > 5


class GivesUp(MemoryTransport):
    """One message of node 0 to node 1 cannot be delivered; everything else can."""

    async def send(self, header: Header, payload: Any, deadline: float) -> None:
        sent = self.me, header.recipient, header.round, header.kind
        if sent == (0, 1, 2, DATA):
            raise Unreachable("given up")
        await super().send(header, payload, deadline)


def test_a_message_that_its_sender_has_given_up_is_not_waited_for():
    experiment, memory = toy(DecAvg(), rounds=6), MemoryNetwork()
    timeouts = Timeouts(start=300.0, message=1e6, idle=30.0)
    first, second, *_ = run_peers(
        experiment, transports=lambda network, me: GivesUp(memory, me), timeouts=timeouts
    )
    assert (first.counters, second.counters) == ({"undelivered": 1}, {"missing": 1})
    assert [row["heard"] for row in second.rows] == [[0, 0], [2, 2], [2, 2], [1, 2], *[[2, 2]] * 3]


def test_a_silent_peer_may_be_killed_and_come_back(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(3, 4)
        await harness.kill(3)
        await harness.until(0, 8)
        harness.start(3)
        await harness.until(3, 12)

    experiment = toy(Far(), nodes=4, partition="iid", topology=nx.path_graph(4), rounds=30)
    peers = run_harness(experiment, tmp_path, act)
    assert [peer.finished for peer in peers] == [30] * 4
    assert peers[0].rows[-1]["heard"] == [0, 0]  # nothing was to come, and nothing is missing
    assert peers[3].rows[-1]["heard"] == [1, 1]


# Which peers get endings, and what is remembered


class Recorder(InMemory):
    """Records which endings are sent to which peers, and which peers announce that they wait."""

    def __init__(self) -> None:
        super().__init__()
        self.endings_sent: set[tuple[int, int, int]] = set()  # round, sender, recipient
        self.announced: set[tuple[int, int, int]] = set()  # round, awaited peer, waiting peer

    def __call__(self, network: Network, me: int) -> Transport:
        recorder = self

        class Recording(MemoryTransport):
            async def send(self, header: Header, payload: Any, deadline: float) -> None:
                if header.kind == DONE:
                    recorder.endings_sent.add((header.round, self.me, header.recipient))
                await super().send(header, payload, deadline)

            async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
                asked = json.loads(question)
                if asked["ask"] == "done":
                    recorder.announced.add((asked["round"], peer, self.me))
                return await super().ask(peer, question, deadline)

        return Recording(self.memory, me)


@pytest.fixture
def no_second_announcement(monkeypatch):
    """Peers that are slow for a second are not asked, as they would be on a busy machine."""
    monkeypatch.setattr(peer_tracker, "RETRY_DELAY", 3600.0)


@pytest.mark.usefixtures("no_second_announcement")
def test_only_out_neighbours_and_waiting_peers_get_endings():
    experiment = toy(Distant(), rounds=6, nodes=8, partition="iid")
    world, recorder = prepare(experiment), Recorder()
    check(experiment, transports=recorder)
    informed = {
        (round, sender, receiver)
        for round in range(6)
        for sender in range(8)
        for receiver in world.out_neighbours(round)[sender]
    }
    before_the_last = {one for one in informed if one[0] < 5}  # after it, some have left already
    assert before_the_last <= recorder.endings_sent <= informed | recorder.announced
    assert recorder.announced  # some waited for peers whose out-neighbours they are not,
    assert not recorder.announced & informed  # and never announced what they would learn anyway


@pytest.mark.usefixtures("no_second_announcement")
def test_algorithms_among_neighbours_announce_nothing():
    recorder = Recorder()
    check(toy(DecAvg(), rounds=3), transports=recorder)
    assert not recorder.announced


def test_members_cannot_fill_the_memory_with_announcements():
    experiment = toy(DecAvg(), rounds=10**6)

    async def flood() -> tuple[Peer, int]:
        network = network_of(experiment)
        peer = Peer(network, 0, prepare(experiment), MemoryTransport(MemoryNetwork(), 0))
        peer.endings.begin_round(5000)
        for round in range(10_000):
            for identity in (1, 2):
                question = json.dumps({"ask": "done", "round": round}).encode()
                await peer.answer(question, identity)
        queued = max(len(outbox._waiting) for outbox in peer.exchanges.outboxes.values())
        for outbox in peer.exchanges.outboxes.values():
            await outbox.close()
        return peer, queued

    peer, queued = asyncio.run(flood())
    assert queued <= MAX_DONE
    assert peer.endings._waiting == {1: 9999, 2: 9999}


@pytest.mark.parametrize("round", [-2, 3, 10**12, True, "1", None, 1.0, [1]])
def test_announcements_of_rounds_that_do_not_exist_are_rejected(round):
    experiment = toy(DecAvg(), rounds=3)

    async def ask() -> Peer:
        peer = Peer(
            network_of(experiment), 0, prepare(experiment), MemoryTransport(MemoryNetwork(), 0)
        )
        with pytest.raises(Rejected):
            await peer.answer(json.dumps({"ask": "done", "round": round}).encode(), 1)
        return peer

    peer = asyncio.run(ask())
    assert peer.counters == {"malformed": 1}
    assert not peer.endings._waiting


def told(act: Any) -> list[tuple[int, int, int]]:
    """Endings that were sent: round, recipient, number of messages."""
    endings_sent: list[tuple[int, int, int]] = []

    class Noting(Outbox):
        def put(self, header: Header, payload: Any = b"") -> None:
            endings_sent.append((header.round, header.recipient, header.sequence))

    async def setup() -> None:
        transport = MemoryTransport(MemoryNetwork(), 0)
        boxes = [Noting(transport, 1.0, 2, Counter()) for _ in range(4)]
        act(Endings("demo", 0, boxes.__getitem__, 2))
        for mailbox in boxes:
            await mailbox.close()

    asyncio.run(setup())
    return endings_sent


def test_which_peers_get_which_endings_and_when():
    def act(endings: Endings) -> None:
        endings.sent(5)[2] += 2
        endings.announced(2, 5)
        endings.announced(3, 7)
        endings.finish(5, [1])  # its out-neighbour, and the waiting peer
        endings.announced(2, 5)  # which did not receive it
        endings.announced(2, 4)  # a round that is over, and was perhaps not even run
        endings.announced(2, 6)
        endings.begin_round(9)  # rounds 6 to 8 are left out
        endings.finish(9, [])

    expected = [(5, 1, 0), (5, 2, 2), (5, 2, 2), (4, 2, 0), (7, 3, 0), (6, 2, 0)]
    assert told(act) == expected


def test_an_ending_may_be_repeated_but_not_changed():
    mailbox = Mailbox()
    mailbox.begin_round(0)
    word = {"run": "demo", "round": 0, "sender": 1, "recipient": 0}
    for _ in range(2):
        mailbox.put(done(**word, sent=1), None)
    with pytest.raises(Rejected) as caught:
        mailbox.put(done(**word, sent=2), None)
    assert caught.value.reason == "replayed"
    assert (mailbox.pending([1, 2]), mailbox.missing([1, 2])) == ([2], [1, 2])


def test_a_sender_that_is_done_is_not_waited_for():
    mailbox = Mailbox()
    mailbox.begin_round(0)
    mailbox.put(done(run="demo", round=0, sender=1, recipient=0, sent=0), None)
    assert mailbox.pending([1, 2]) == mailbox.missing([1, 2]) == [2]
    assert mailbox.take([1, 2]) == {}
