"""What one peer knows about the tracker: from messages, answers, restarts, and their silence."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from support.networking import SkippingLoop, network_of, skip

from peerage import DecAvg, FedAvg
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.network import Network
from peerage.net.peer.peer_tracker import PeerTracker, Status
from peerage.net.peer.progress import State, View
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import MemoryNetwork, MemoryTransport
from peerage.requests import PRE_ROUND
from peerage.testing import toy

ESSENCE = {"local.lr": "0.1", "rounds": "9"}
FOUR = {"nodes": 4, "partition": "iid", "topology": "complete", "rounds": 9}
LONG = 3600.0  # seconds


@pytest.fixture(scope="module")
def known() -> tuple[Network, World]:
    """A network of four, without a hub."""
    experiment = toy(DecAvg(), **FOUR)
    return network_of(experiment), prepare(experiment)


class Talker:
    """Another peer, as far as questions go."""

    def __init__(self, tracker: PeerTracker, **said: Any) -> None:
        default = Status(tracker.settings_hash, "first", PRE_ROUND, State.MEETING, True)
        self.status = replace(default, **said)
        self.shared_settings: Any = ESSENCE
        self.asked: list[dict[str, Any]] = []
        self.refuses = False

    async def answer(self, question: bytes, identity: int) -> bytes:
        asked = json.loads(question)
        self.asked.append(asked)
        if self.refuses:
            raise Rejected("malformed", "no")
        answers = {"status": asdict(self.status), "settings": self.shared_settings}
        return json.dumps(answers.get(asked["ask"], {})).encode()

    def count(self, ask: str) -> int:
        return sum(asked["ask"] == ask for asked in self.asked)


class Scene:
    """Peer 0 of four, and some of the tracker."""

    def __init__(self, known: tuple[Network, World], me: int = 0) -> None:
        network, world = known
        self.post = MemoryNetwork()
        self.tracker = PeerTracker(network, me, world, MemoryTransport(self.post, me), ESSENCE)

    def add(self, peer: int, **said: Any) -> Talker:
        talker = Talker(self.tracker, **said)
        self.post.receivers[peer] = talker  # type: ignore[assignment]
        return talker

    def view(self, round: int = 0) -> View:
        return self.tracker.view(round)


class StandingLoop(SkippingLoop):
    """An event loop whose time only a test moves, so that it can count seconds."""

    def time(self) -> float:
        return self.skipped


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ended(work: Awaitable[Any], within: float = LONG) -> float:
    """Let time pass until the work is done; after how many seconds it was."""
    task, now = asyncio.ensure_future(work), asyncio.get_running_loop().time
    start = now()
    while not task.done():
        assert now() < start + within
        await settle()
        skip(0.05)
    await task
    return now() - start


def play(known: Any, act: Callable[[Scene], Awaitable[None]], me: int = 0) -> Scene:
    async def main() -> Scene:
        scene = Scene(known, me)
        await act(scene)
        return scene

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        return runner.run(main())


# What a peer says about itself


STATUS = Status("abc", "one", 7, "running", True)


def test_a_status_comes_back_as_it_was_said():
    raw = json.dumps(asdict(STATUS)).encode()
    assert raw == (
        b'{"settings_hash": "abc", "incarnation": "one", "round": 7, "state": "running", '
        b'"awaited": true}'
    )
    assert Status.parse(raw) == STATUS


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"null",
        b"\xff",
        b"{" * 100_000,
        b"[" * 100_000,
        *(
            json.dumps(asdict(STATUS) | change).encode()
            for change in ({"round": "x"}, {"round": None}, {"round": []}, {"round": 1e999})
        ),
        *(
            json.dumps({key: said for key, said in asdict(STATUS).items() if key != left}).encode()
            for left in asdict(STATUS)
        ),
    ],
    ids=lambda raw: raw[:80].decode(errors="replace"),
)
def test_odd_answers_are_no_status(raw):
    assert Status.parse(raw) is None


@pytest.mark.parametrize(
    ("state", "begun", "running"),
    [
        ("starting", False, True),
        ("waiting for others", False, True),
        ("running", True, True),
        ("waiting for node-1", True, True),
        ("finished", True, True),
        ("stopped: disk is full", True, False),
    ],
)
def test_what_a_state_means(state, begun, running):
    status = replace(STATUS, state=state)
    assert (status.begun, status.running) == (begun, running)


# Rounds of the others


def test_a_message_never_takes_a_peer_back(known):
    tracker = Scene(known).tracker
    for round, seen in ((3, 3), (2, 3), (5, 5), (PRE_ROUND, 5)):
        tracker.note_message(1, round)
        assert tracker.rounds == {1: seen}


def test_no_peer_is_beyond_the_last_round(known):
    tracker = Scene(known).tracker
    tracker.note_message(1, 10**6)
    assert tracker.rounds == {1: 8}


def test_an_answer_may_take_a_peer_back(known):
    async def act(scene: Scene) -> None:
        scene.tracker.note_message(1, 5)
        scene.add(1, round=3)
        scene.add(2, round=10**9)
        await scene.tracker.ask([1, 2])
        assert scene.tracker.rounds == {1: 3, 2: 8}

    play(known, act)


def test_a_restarted_peer_is_in_no_round_and_has_not_finished(known):
    tracker = Scene(known).tracker
    tracker.note_incarnation(1, "first")
    tracker.note_message(1, 5)
    tracker.finished.add(1)
    tracker.note_incarnation(1, "first")
    assert (tracker.rounds, tracker.finished) == ({1: 5}, {1})
    tracker.note_incarnation(2, "another")  # which says nothing about peer 1
    assert (tracker.rounds, tracker.finished) == ({1: 5}, {1})
    tracker.note_incarnation(1, "second")
    assert (tracker.rounds, tracker.finished) == ({}, set())
    tracker.note_message(1, 2)
    tracker.note_incarnation(1, "second")
    assert tracker.rounds == {1: 2}


def test_a_peer_that_is_heard_before_it_asks_was_not_restarted(known):
    tracker = Scene(known).tracker
    tracker.note_message(1, 5)
    tracker.note_incarnation(1, "first")
    assert tracker.rounds == {1: 5}


# Views


def test_a_view_has_all_that_is_known(known):
    scene = Scene(known)
    tracker = scene.tracker
    for peer in (1, 3):
        scene.add(peer)
    scene.post.cut = {(0, 3)}
    tracker.note_message(2, 4)
    tracker.finished.add(2)
    tracker.mismatched_peers[3] = "the learning rate"
    tracker.awaited = False
    assert scene.view(5) == View(
        round=5,
        rounds={2: 4},
        scheduled=frozenset({1, 2, 3}),
        reachable=frozenset({1}),
        finished=frozenset({2}),
        mismatched=frozenset({3}),
        hub=None,
        ahead=2,
        awaited=False,
    )


def test_a_view_does_not_change_any_more(known):
    scene = Scene(known)
    view = scene.view()
    scene.tracker.note_message(1, 3)
    scene.tracker.finished.add(1)
    scene.tracker.mismatched_peers[2] = "rounds"
    scene.add(1)
    assert view == Scene(known).view()


def test_a_peer_is_no_contact_of_itself(known):
    """Somebody may have started it twice."""
    scene = Scene(known)
    scene.add(0)
    scene.tracker.finished.add(0)
    assert scene.view().in_contact() == []
    assert not scene.view().may_run()


def test_the_schedule_says_who_takes_part():
    experiment = toy(DecAvg(), **FOUR, faults={"join": "1@3", "leave": "2@6"})
    known = network_of(experiment), prepare(experiment)
    views = [Scene(known).view(round).scheduled for round in (PRE_ROUND, 0, 1, 2, 4, 5)]
    assert views == [{2, 3}, {2, 3}, {2, 3}, {1, 2, 3}, {1, 2, 3}, {1, 3}]


def test_the_hub_is_known_to_all_but_itself():
    experiment = toy(FedAvg(), nodes=3, partition="iid")
    known = network_of(experiment), prepare(experiment)
    assert [Scene(known, me).view().hub for me in range(4)] == [3, 3, 3, None]


# Questions


def test_all_are_asked_and_those_who_answer_are_told_apart(known):
    async def act(scene: Scene) -> None:
        first = scene.add(1, round=4, state="running")
        scene.add(2).refuses = True
        answers: dict[int, Status] = {}

        async def ask() -> None:
            answers.update(await scene.tracker.ask())

        assert await ended(ask()) < 3  # peer 3 is not there, which is found out in two seconds
        assert answers == {1: first.status}
        assert first.asked == [{"ask": "status", "incarnation": scene.tracker.incarnation}]

    play(known, act)


def test_every_peer_has_a_life_of_its_own(known):
    assert len({Scene(known).tracker.incarnation for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("shared_settings", "text"),
    [
        (ESSENCE | {"local.lr": "0.2"}, "local.lr is 0.1 here and 0.2 there"),
        ({"local.lr": "0.1"}, "rounds is 9 here and not set there"),
        (ESSENCE | {"more": "1"}, "more is not set here and 1 there"),
        (
            {"local.lr": "0.2", "rounds": "8"},
            "local.lr is 0.1 here and 0.2 there; rounds is 9 here and 8 there",
        ),
        ({}, "unknown difference"),
        (ESSENCE, "unknown difference"),
        ([1, 2], "unknown difference"),
        (None, "unknown difference"),
    ],
)
def test_a_peer_with_another_experiment_is_found_and_asked_no_more(
    known, shared_settings, text, caplog
):
    async def act(scene: Scene) -> None:
        talker = scene.add(1, settings_hash="another", round=7)
        talker.shared_settings = shared_settings
        for _ in range(3):
            assert await scene.tracker.ask([1]) == {}
        assert (talker.count("status"), talker.count("settings")) == (1, 1)
        assert scene.tracker.mismatched_peers == {1: text}
        assert scene.tracker.rounds == {}  # it is in no round of ours
        assert scene.view().mismatched == {1}

    play(known, act)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"ignoring node-1, which runs another experiment: {text}"]


def test_a_difference_is_told_in_few_words(known):
    async def act(scene: Scene) -> None:
        scene.add(1, settings_hash="another").shared_settings = {
            f"k{i}": "v" * 900 for i in range(99)
        }
        await scene.tracker.ask([1])
        assert len(scene.tracker.mismatched_peers[1]) == 1000

    play(known, act)


# Meeting


def test_peers_meet_when_all_are_there(known):
    async def act(scene: Scene) -> None:
        for peer in (1, 2, 3):
            scene.add(peer, incarnation=f"life {peer}")
        assert await ended(scene.tracker.wait_for_start(LONG)) < 1
        assert scene.tracker.present_at_start == {1: "life 1", 2: "life 2", 3: "life 3"}
        assert scene.tracker.awaited
        assert not scene.tracker.started_early

    play(known, act)


def test_peers_wait_for_the_last(known):
    async def act(scene: Scene) -> None:
        for peer in (1, 2):
            scene.add(peer)
        task = asyncio.create_task(scene.tracker.wait_for_start(LONG))
        for _ in range(100):
            skip(0.5)
            await settle()
        assert not task.done()
        scene.add(3)
        await ended(task)
        assert scene.tracker.present_at_start.keys() == {1, 2, 3}

    play(known, act)


def test_missing_peers_are_named_now_and_then_and_left_out_in_the_end(known, caplog):
    async def act(scene: Scene) -> None:
        scene.add(1)
        took = await ended(scene.tracker.wait_for_start(60.0))
        assert 60 <= took < 70
        assert scene.tracker.present_at_start.keys() == {1}

    caplog.set_level(logging.INFO, "peerage.peer")
    play(known, act)
    missing = "node-2 (127.0.0.1:10002), node-3 (127.0.0.1:10003)"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == f"starting without {missing}"
    assert set(lines[:-1]) == {f"waiting for {missing} to start"}
    assert 3 <= len(lines[:-1]) <= 5  # after 3 seconds, and then every 15


def test_a_peer_that_met_nobody_does_not_say_that_it_begins(known, caplog):
    async def act(scene: Scene) -> None:
        await ended(scene.tracker.wait_for_start(5.0))
        assert scene.tracker.present_at_start == {}

    play(known, act)
    assert not any("starting without" in record.getMessage() for record in caplog.records)


def test_a_peer_that_the_others_did_not_wait_for_does_not_wait_either(known):
    async def act(scene: Scene) -> None:
        scene.add(1, round=6, state="running", awaited=False)
        assert await ended(scene.tracker.wait_for_start(LONG)) < 5
        assert not scene.tracker.awaited
        assert scene.view(2).start_round() == 6

    play(known, act)


def test_a_peer_begins_when_one_that_began_with_it_has(known, caplog):
    """The other peer had an answer from all; peers that are missing here may have left again."""

    async def act(scene: Scene) -> None:
        scene.add(1, round=0, state="running")
        assert await ended(scene.tracker.wait_for_start(LONG)) < 5
        assert (scene.tracker.awaited, scene.tracker.started_early) == (True, True)
        assert scene.view(0).start_round() == 0

    play(known, act)
    assert not caplog.records


def test_a_peer_that_was_met_is_asked_again_once_it_sends_messages(known):
    async def act(scene: Scene) -> None:
        first = scene.add(1)
        task = asyncio.create_task(scene.tracker.wait_for_start(LONG))
        for _ in range(50):
            skip(0.5)
            await settle()
        asked = first.count("status")
        assert asked == 1
        first.status = replace(first.status, state="running", round=0)
        scene.tracker.note_message(1, 0)
        await ended(task)
        assert first.count("status") == asked + 1
        assert scene.tracker.started_early

    play(known, act)


def test_the_one_with_another_experiment_is_left_out_by_the_others(known):
    async def act(scene: Scene) -> None:
        for peer in (1, 2):
            scene.add(peer)
        scene.add(3, settings_hash="another")
        assert await ended(scene.tracker.wait_for_start(LONG)) < 1
        assert scene.tracker.present_at_start.keys() == {1, 2}
        assert scene.tracker.mismatched_peers.keys() == {3}

    play(known, act)


def test_the_one_that_differs_from_most_gives_up(known):
    async def act(scene: Scene) -> None:
        scene.add(1)
        for peer in (2, 3):
            scene.add(peer, settings_hash="another").shared_settings = ESSENCE | {"local.lr": "0.2"}
        text = "node-2 runs another experiment: local.lr is 0.1 here and 0.2 there; give all peers"
        with pytest.raises(InputError, match=text):
            await ended(scene.tracker.wait_for_start(LONG))

    play(known, act)


def test_who_began_together(known):
    tracker = Scene(known).tracker
    tracker.present_at_start = {1: "first"}
    assert tracker.began_with(1, "first")
    assert not tracker.began_with(1, "second")
    assert not tracker.began_with(2, "first")
    tracker.started_early = (
        True  # it began without meeting all: the first life that asks is the one
    )
    assert tracker.began_with(2, "first")
    assert not tracker.began_with(2, "second")
    assert not tracker.began_with(1, "second")


# What a peer tells the others


def test_every_peer_that_can_be_reached_is_told_the_end(known):
    async def act(scene: Scene) -> None:
        talkers = {peer: scene.add(peer) for peer in (1, 2)}
        scene.tracker.finished.add(2)  # and has perhaps left
        assert await ended(scene.tracker.say_finished(LONG)) < 1
        told = {"ask": "finished", "incarnation": scene.tracker.incarnation}
        assert [talkers[peer].asked for peer in (1, 2)] == [[told], []]

    play(known, act)


def test_a_peer_that_refuses_to_hear_the_end_is_not_told_again(known):
    async def act(scene: Scene) -> None:
        talker = scene.add(1)
        talker.refuses = True
        await ended(scene.tracker.say_finished(LONG))
        assert len(talker.asked) == 1

    play(known, act)


class Busy(Talker):
    """Answers from the third time on."""

    async def answer(self, question: bytes, identity: int) -> bytes:
        answer = await super().answer(question, identity)
        if len(self.asked) < 3:
            await asyncio.Event().wait()
        return answer


def test_a_busy_peer_is_told_the_end_until_it_answers(known):
    async def act(scene: Scene) -> None:
        talker = scene.post.receivers[1] = Busy(scene.tracker)  # type: ignore[assignment]
        await ended(scene.tracker.say_finished(LONG))
        assert talker.count("finished") == 3

    play(known, act)


def test_telling_the_end_takes_no_longer_than_it_may(known):
    async def act(scene: Scene) -> None:
        talker = scene.post.receivers[1] = Busy(scene.tracker)  # type: ignore[assignment]
        assert await ended(scene.tracker.say_finished(1.0)) < 2
        assert talker.count("finished") == 1

    play(known, act)


def test_a_peer_announces_that_it_waits_again_and_again_and_ever_more_rarely(known):
    async def act(scene: Scene) -> None:
        stranger, neighbour = scene.add(1), scene.add(2)
        work = scene.tracker.announce(4, [1], lambda: [2])
        task, start = asyncio.create_task(work), asyncio.get_running_loop().time()
        times: list[float] = []
        while len(times) < 6:
            await asyncio.sleep(0)
            skip(0.01)
            if neighbour.count("done") > len(times):
                times.append(asyncio.get_running_loop().time() - start)
        task.cancel()
        assert stranger.asked == [{"ask": "done", "round": 4}]  # at once
        gaps = [late - early for early, late in pairwise([0, *times])]
        assert gaps == pytest.approx([1, 2, 4, 8, 15, 15], abs=0.1)

    play(known, act)


# Names


def test_names_with_and_without_addresses(known):
    tracker = Scene(known).tracker
    assert tracker.name(2) == "node-2"
    assert tracker.names({2, 1}) == "node-1 (127.0.0.1:10001), node-2 (127.0.0.1:10002)"
    assert tracker.names([3, 1], addresses=False) == "node-1, node-3"


def test_long_lists_of_names_are_cut():
    experiment = toy(DecAvg(), nodes=9, partition="iid")
    tracker = Scene((network_of(experiment), prepare(experiment))).tracker
    listed = tracker.names(tracker.other_peers, addresses=False)
    assert listed == "node-1, node-2, node-3, node-4, node-5 and 3 more"
