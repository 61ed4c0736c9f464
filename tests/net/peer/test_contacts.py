"""Contact in networks with many members: few connections, few questions, and still a quorum."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import LONG, StandingLoop, ended, network_of, settle, skip

from peerage import DecAvg, FedAvg
from peerage.algorithms import ALGORITHMS
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.net.peer.contacts import AT_ONCE, INTERVAL, NEXT, RECHECK, VALIDITY, near_members
from peerage.net.peer.peer_tracker import PeerTracker
from peerage.net.peer.progress import State
from peerage.net.peer.responder import Responder
from peerage.requests import PRE_ROUND
from peerage.testing import toy

MEMBERS = 24
SETTINGS = {"local.lr": "0.1"}
IDLE = 1.0  # seconds, of `network_of`


@pytest.fixture(scope="module")
def ring() -> Any:
    experiment = toy(DecAvg(), nodes=MEMBERS, topology="ring", partition="iid", rounds=9)
    return network_of(experiment), prepare(experiment)


class Counting(MemoryTransport):
    """Counts questions and connections; an answer takes a moment."""

    def __init__(self, memory: MemoryNetwork, me: int) -> None:
        super().__init__(memory, me)
        self.asked: Counter[int] = Counter()
        self.settings: Counter[int] = Counter()
        self.connected: set[int] = set()
        self.most = 0  # connections at once

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        self.connected.add(peer)
        self.most = max(self.most, len(self.connected))
        kinds = {"status": self.asked, "settings": self.settings}
        kinds.get(json.loads(question)["ask"], Counter[int]())[peer] += 1
        await asyncio.sleep(0.01)
        return await super().ask(peer, question, deadline)

    def release(self, peer: int) -> None:
        self.connected.discard(peer)


class Swarm:
    """The trackers of all members, which answer questions as peers do."""

    def __init__(self, ring: Any, strangers: tuple[int, ...] = ()) -> None:
        network, world = ring
        self.memory = MemoryNetwork()
        self.lines = [Counting(self.memory, me) for me in range(MEMBERS)]
        self.trackers = [
            PeerTracker(
                network, me, world, line, {"local.lr": "9"} if me in strangers else SETTINGS
            )
            for me, line in enumerate(self.lines)
        ]

    def join(self, me: int) -> None:
        progress = lambda: (PRE_ROUND, State.MEETING)  # noqa: E731
        unused: Any = None
        responder = Responder(self.trackers[me], unused, unused, Counter(), progress)

        class Receiver:
            async def answer(self, question: bytes, identity: int) -> bytes:
                return responder.answer(question, identity)

        self.memory.receivers[me] = Receiver()  # type: ignore[assignment]

    async def start(self, seconds: float = LONG) -> list[Any]:
        for me in range(MEMBERS):
            self.join(me)
        waits = [tracker.wait_for_start(seconds) for tracker in self.trackers]
        gathered = asyncio.gather(*waits, return_exceptions=True)
        await ended(gathered)
        return list(gathered.result())

    async def wait(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            skip(0.25)
            await settle()

    def cut(self, alone: int) -> None:
        others = set(range(MEMBERS)) - {alone}
        self.memory.cut |= {(alone, peer) for peer in others} | {(peer, alone) for peer in others}


def run(act: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        runner.run(act())


def test_connections_follow_from_the_graph_and_not_from_the_number_of_members(ring):
    network, world = ring
    assert near_members(0, world, network) == {1, 2, 3, 4, 20, 21, 22, 23}
    for topology, nodes in (("complete", 16), ("ring", 2 * NEXT + 1)):
        experiment = toy(DecAvg(), nodes=nodes, topology=topology, partition="iid")
        assert len(near_members(3, prepare(experiment), network_of(experiment))) == nodes - 1


@pytest.mark.parametrize("topology", ["ring", "dynamic-regular:k=2"])
def test_peers_that_may_exchange_messages_with_all_are_connected_to_all(topology):
    algorithm = ALGORITHMS["el"]() if topology == "ring" else DecAvg()
    experiment = toy(algorithm, nodes=16, topology=topology, partition="iid")
    assert len(near_members(0, prepare(experiment), network_of(experiment))) == 15


def test_a_client_is_connected_to_its_hub():
    experiment = toy(FedAvg(), nodes=16, topology="star", partition="iid")
    world = prepare(experiment)
    assert world.hub == 16
    assert 16 in near_members(8, world, network_of(experiment))
    assert len(near_members(16, world, network_of(experiment))) == 16


def test_all_meet_at_the_start_with_one_question_per_pair_and_few_at_once(ring):
    async def act() -> None:
        swarm = Swarm(ring)
        assert await swarm.start() == [None] * MEMBERS
        everybody = set(range(MEMBERS))
        for me, (tracker, line) in enumerate(zip(swarm.trackers, swarm.lines, strict=True)):
            assert tracker.present_at_start.keys() == everybody - {me}
            assert tracker.view(0).may_run()
            assert tracker.awaited
            assert not tracker.started_early
            assert line.most <= 2 * NEXT + AT_ONCE
        # The members of a distant pair may ask each other at the same moment.
        distant = sum(line.asked[p] for t, line in members(swarm) for p in t.contacts.distant)
        pairs = MEMBERS * (MEMBERS - 1 - 2 * NEXT) / 2
        assert pairs <= distant <= 1.5 * pairs

    run(act)


def members(swarm: Swarm) -> list[tuple[PeerTracker, Counting]]:
    return list(zip(swarm.trackers, swarm.lines, strict=True))


def test_a_distant_member_with_other_settings_is_found_by_all(ring):
    async def act() -> None:
        swarm = Swarm(ring, strangers=(12,))
        found = await swarm.start(10.0)
        assert isinstance(found[12], InputError)
        assert "local.lr" in str(found[12])
        for me, tracker in enumerate(swarm.trackers):
            if me != 12:
                assert tracker.mismatched_peers.keys() == {12}
                assert swarm.lines[me].settings.keys() == {12}

    run(act)


def test_contact_with_distant_members_lasts_while_they_answer(ring):
    async def act() -> None:
        swarm = Swarm(ring)
        await swarm.start()
        before = [line.asked.total() for line in swarm.lines]
        await swarm.wait(2 * VALIDITY * IDLE)
        for tracker, line, asked in zip(swarm.trackers, swarm.lines, before, strict=True):
            assert len(tracker.reachable_peers()) == MEMBERS - 1
            rounds = 2 * VALIDITY / INTERVAL + 1
            assert line.asked.total() - asked <= rounds * len(tracker.contacts.distant)
        del swarm.memory.receivers[12]
        swarm.memory.cut |= {(12, peer) for peer in range(MEMBERS)}
        await swarm.wait(VALIDITY * IDLE + 1)
        assert 12 not in swarm.trackers[0].reachable_peers()
        assert len(swarm.trackers[0].reachable_peers()) == MEMBERS - 2

    run(act)


def test_a_member_that_is_cut_off_has_no_quorum_any_more(ring):
    """Its distant members answered a moment ago, and no longer count without near ones."""

    async def act() -> None:
        swarm = Swarm(ring)
        await swarm.start()
        await swarm.wait(1.0)
        assert swarm.trackers[0].view(0).may_run()
        swarm.cut(0)
        await swarm.wait(1.0)
        assert not swarm.trackers[0].view(0).may_run()
        assert swarm.trackers[12].view(0).may_run()

    run(act)


def test_a_lost_neighbour_is_a_reason_to_ask_all_again(ring):
    async def act() -> None:
        swarm = Swarm(ring)
        await swarm.start()
        await swarm.wait(1.0)
        tracker, line = swarm.trackers[0], swarm.lines[0]
        before = Counter(line.asked)
        swarm.cut(1)
        await swarm.wait(0.25)
        assert len(tracker.reachable_peers()) == MEMBERS - 2  # they still count for a while
        await swarm.wait(2 * RECHECK * IDLE)
        assert len(tracker.reachable_peers()) == MEMBERS - 2  # now because they answered
        asked = line.asked - before
        for peer in tracker.contacts.distant:
            assert asked[peer] or (swarm.lines[peer].asked[0] > 0)
        before = Counter(line.asked)
        await swarm.wait(IDLE)
        assert line.asked == before  # once is enough

    run(act)


def test_a_neighbour_that_has_finished_is_not_lost(ring):
    async def act() -> None:
        swarm = Swarm(ring)
        await swarm.start()
        await swarm.wait(1.0)
        before = Counter(swarm.lines[0].asked)
        swarm.trackers[0].finished.add(1)
        swarm.cut(1)
        await swarm.wait(1.0)
        assert swarm.lines[0].asked == before

    run(act)
