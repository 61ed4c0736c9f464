"""What one peer knows about the others: from messages, answers, restarts and their silence."""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import LONG, StandingLoop, ended, network_of, settle, skip

from peerage import DecAvg, FedAvg
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.finish_notice import FinishNotice
from peerage.net.peer.network import Network, remedy_for
from peerage.net.peer.peer import shared_settings_of
from peerage.net.peer.peer_tracker import PeerTracker
from peerage.net.peer.progress import State, View
from peerage.net.peer.reported_status import Status
from peerage.net.peer.versions import Versions
from peerage.net.wire.header import SCHEMA, Rejected
from peerage.net.wire.transport import CallerRefused
from peerage.requests import PRE_ROUND
from peerage.testing import toy

SETTINGS = {"local.lr": "0.1", "rounds": "9"}
FOUR = {"nodes": 4, "partition": "iid", "topology": "complete", "rounds": 9}


@pytest.fixture(scope="module")
def known() -> tuple[Network, World]:
    """A network of four, without a hub."""
    experiment = toy(DecAvg(), **FOUR)
    return network_of(experiment), prepare(experiment)


class OtherPeer:
    """Another peer, which only answers questions."""

    def __init__(self, tracker: PeerTracker, **fields: Any) -> None:
        default = Status(tracker.settings_hash, "first", PRE_ROUND, State.MEETING, True)
        self.status = replace(default, **fields)
        self.shared_settings: Any = SETTINGS
        self.asked: list[dict[str, Any]] = []
        self.rejects = False
        self.refusal: str | None = None  # of the certificate of the asking peer

    async def answer(self, question: bytes, identity: int) -> bytes:
        asked = json.loads(question)
        self.asked.append(asked)
        if self.refusal is not None:
            raise CallerRefused(0, self.refusal)
        if self.rejects:
            raise Rejected("malformed", "no")
        answers = {"status": asdict(self.status), "settings": self.shared_settings}
        return json.dumps(answers.get(asked["ask"], {})).encode()

    def count(self, ask: str) -> int:
        return sum(asked["ask"] == ask for asked in self.asked)


class Setup:
    """Peer 0 of four, and some of the others."""

    def __init__(self, known: tuple[Network, World], me: int = 0) -> None:
        network, world = known
        self.memory = MemoryNetwork()
        self.tracker = PeerTracker(network, me, world, MemoryTransport(self.memory, me), SETTINGS)

    def add(self, peer: int, **fields: Any) -> OtherPeer:
        other = OtherPeer(self.tracker, **fields)
        self.memory.receivers[peer] = other  # type: ignore[assignment]
        return other

    def view(self, round: int = 0) -> View:
        return self.tracker.view(round)


def run(known: Any, act: Callable[[Setup], Awaitable[None]], me: int = 0) -> Setup:
    async def main() -> Setup:
        setup = Setup(known, me)
        await act(setup)
        return setup

    with asyncio.Runner(loop_factory=StandingLoop) as runner:
        return runner.run(main())


# What a peer says about itself


STATUS = Status("abc", "one", 7, "running", True, Versions("0.1.0", "2.9.1", 3))


def test_a_status_survives_encoding():
    raw = json.dumps(asdict(STATUS)).encode()
    assert raw == (
        b'{"settings_hash": "abc", "incarnation": "one", "round": 7, "state": "running", '
        b'"awaited": true, "versions": {"peerage": "0.1.0", "torch": "2.9.1", "schema": 3}, '
        b'"unreachable": null, "revision": 1}'
    )
    assert Status.parse(raw) == STATUS


@pytest.mark.parametrize(
    "versions",
    [None, [], {}, "0.1.0", {"peerage": "0.1.0", "torch": 2, "schema": 3}, {"schema": True}],
)
def test_a_status_without_versions_of_the_right_form_has_none(versions):
    raw = json.dumps(asdict(STATUS) | {"versions": versions}).encode()
    assert Status.parse(raw) == replace(STATUS, versions=None)
    raw = json.dumps({k: v for k, v in asdict(STATUS).items() if k != "versions"}).encode()
    assert Status.parse(raw) == replace(STATUS, versions=None)


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
            for change in (
                *({"round": "x"}, {"round": None}, {"round": []}, {"round": 1e999}),
                *({"revision": 0}, {"revision": 10**9}, {"revision": "x"}),
            )
        ),
        *(
            json.dumps(
                {key: value for key, value in asdict(STATUS).items() if key != left}
            ).encode()
            for left in asdict(STATUS)
            # Peers of earlier versions do not say these.
            if left not in ("versions", "unreachable", "revision")
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


# Contact


def test_what_others_say_about_their_way_to_this_peer(known, caplog):
    """Each peer and reason is one line, and the peer is forgotten as soon as it says otherwise."""

    async def act(setup: Setup) -> None:
        one, _ = setup.add(1, unreachable="connection refused"), setup.add(2)
        for _ in range(3):
            await setup.tracker.ask([1, 2])
            assert setup.tracker.out_of_reach == {1: "connection refused"}
        one.status = replace(one.status, unreachable=None)
        await setup.tracker.ask([1, 2])
        assert setup.tracker.out_of_reach == {}

    run(known, act)
    assert caplog.messages == [
        "node-1 cannot reach this peer at 127.0.0.1:10000: connection refused; "
        "check --bind and the firewall"
    ]


def test_a_peer_that_asks_and_cannot_be_reached(known, caplog):
    async def act(setup: Setup) -> None:
        assert setup.tracker.failure_to_reach(2) == "the cable is cut"
        assert setup.tracker.failure_to_reach(2) == "the cable is cut"
        setup.add(2)
        assert setup.tracker.failure_to_reach(2) is None

    run(known, act)
    assert caplog.messages == [
        "cannot reach node-2 (127.0.0.1:10002), which asks this peer: the cable is cut; "
        "check its --bind and its firewall"
    ]


def test_most_peers_reject_this_one(known, caplog):
    """One may lie, so the peer waits on; when a second says the same, it ends at once."""
    caplog.set_level(logging.WARNING)

    async def act(setup: Setup) -> None:
        setup.add(1).refusal = "'node-0' is not a member"
        waiting = asyncio.ensure_future(setup.tracker.wait_for_start(LONG))
        for _ in range(100):
            await settle()
            skip(0.05)
        assert not waiting.done()
        assert caplog.messages == ["node-1 rejects this peer: 'node-0' is not a member"]
        setup.add(2).refusal = "'node-0' is not a member"
        with pytest.raises(InputError, match=r"^node-1, node-2 reject this peer: 'node-0' is not"):
            await ended(waiting, within=10.0)

    run(known, act)


# Rounds of the others


def test_a_message_never_takes_a_peer_back(known):
    tracker = Setup(known).tracker
    for round, seen in ((3, 3), (2, 3), (5, 5), (PRE_ROUND, 5)):
        tracker.note_message(1, round)
        assert tracker.rounds == {1: seen}


def test_no_peer_is_beyond_the_last_round(known):
    tracker = Setup(known).tracker
    tracker.note_message(1, 10**6)
    assert tracker.rounds == {1: 8}


def test_an_answer_may_take_a_peer_back(known):
    async def act(setup: Setup) -> None:
        setup.tracker.note_message(1, 5)
        setup.add(1, round=3)
        setup.add(2, round=10**9)
        await setup.tracker.ask([1, 2])
        assert setup.tracker.rounds == {1: 3, 2: 8}

    run(known, act)


def test_a_restarted_peer_is_in_no_round_and_has_not_finished(known):
    tracker = Setup(known).tracker
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


def test_a_peer_that_sends_before_it_asks_was_not_restarted(known):
    tracker = Setup(known).tracker
    tracker.note_message(1, 5)
    tracker.note_incarnation(1, "first")
    assert tracker.rounds == {1: 5}


# Views


def test_a_view_has_all_that_is_known(known):
    setup = Setup(known)
    tracker = setup.tracker
    for peer in (1, 3):
        setup.add(peer)
    setup.memory.cut = {(0, 3)}
    tracker.note_message(2, 4)
    tracker.finished.add(2)
    tracker.mismatched_peers[3] = "the learning rate"
    tracker.awaited = False
    assert setup.view(5) == View(
        round=5,
        rounds={2: 4},
        scheduled=frozenset({1, 2, 3}),
        reachable=frozenset({1}),
        finished=frozenset({2}),
        refused=frozenset({3}),
        hub=None,
        ahead=2,
        awaited=False,
    )


def test_a_view_does_not_change_any_more(known):
    setup = Setup(known)
    view = setup.view()
    setup.tracker.note_message(1, 3)
    setup.tracker.finished.add(1)
    setup.tracker.mismatched_peers[2] = "rounds"
    setup.add(1)
    assert view == Setup(known).view()


def test_banned_peers_and_those_that_have_left_do_not_count():
    experiment = toy(DecAvg(), **FOUR, faults={"leave": "2@6"})
    setup = Setup((network_of(experiment, quorum=2), prepare(experiment)), me=3)
    setup.tracker.banned_peers.add(0)
    assert (setup.view(1).others, setup.view(1).quorum) == ({1, 2}, 2)
    # This peer was down when node 2 left as scheduled, which it learns from another.
    setup.add(1)
    setup.tracker.note_message(1, 7)
    assert setup.view(1).others == {1}
    setup.add(2)
    assert setup.view(1).others == {1, 2}
    assert [setup.view(round).present for round in (1, 7)] == [True, True]
    assert not Setup((setup.tracker.network, setup.tracker.world), me=2).view(7).present


def test_a_peer_is_no_contact_of_itself(known):
    """It may have been started twice."""
    setup = Setup(known)
    setup.add(0)
    setup.tracker.finished.add(0)
    assert setup.view().in_contact() == []
    assert not setup.view().may_run()


def test_the_schedule_decides_which_peers_take_part():
    experiment = toy(DecAvg(), **FOUR, faults={"join": "1@3", "leave": "2@6"})
    known = network_of(experiment), prepare(experiment)
    views = [Setup(known).view(round).scheduled for round in (PRE_ROUND, 0, 1, 2, 4, 5)]
    assert views == [{2, 3}, {2, 3}, {2, 3}, {1, 2, 3}, {1, 2, 3}, {1, 3}]


def test_the_hub_is_known_to_all_but_itself():
    experiment = toy(FedAvg(), nodes=3, partition="iid")
    known = network_of(experiment), prepare(experiment)
    assert [Setup(known, me).view().hub for me in range(4)] == [3, 3, 3, None]


# Questions


def test_all_peers_are_asked_and_their_answers_kept_apart(known):
    async def act(setup: Setup) -> None:
        first = setup.add(1, round=4, state="running")
        setup.add(2).rejects = True
        answers: dict[int, Status] = {}

        async def ask() -> None:
            answers.update(await setup.tracker.ask())

        assert await ended(ask()) < 3  # peer 3 is not there, which is found out in two seconds
        assert answers == {1: first.status}
        assert first.asked == [{"ask": "status", "incarnation": setup.tracker.incarnation}]

    run(known, act)


def test_every_start_of_a_peer_is_a_new_incarnation(known):
    assert len({Setup(known).tracker.incarnation for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("shared_settings", "text"),
    [
        (SETTINGS | {"local.lr": "0.2"}, "local.lr is 0.1 here and 0.2 there"),
        ({"local.lr": "0.1"}, "rounds is 9 here and not set there"),
        (SETTINGS | {"more": "1"}, "more is not set here and 1 there"),
        (
            {"local.lr": "0.2", "rounds": "8"},
            "local.lr is 0.1 here and 0.2 there; rounds is 9 here and 8 there",
        ),
        ({}, "unknown difference"),
        (SETTINGS, "unknown difference"),
        ([1, 2], "unknown difference"),
        (None, "unknown difference"),
    ],
)
def test_a_peer_with_another_experiment_is_found_and_asked_no_more(
    known, shared_settings, text, caplog
):
    async def act(setup: Setup) -> None:
        other = setup.add(1, settings_hash="another", round=7)
        other.shared_settings = shared_settings
        for _ in range(3):
            assert await setup.tracker.ask([1]) == {}
        assert (other.count("status"), other.count("settings")) == (1, 1)
        assert setup.tracker.mismatched_peers == {1: f"another experiment: {text}"}
        assert setup.tracker.rounds == {}  # it is in no round of ours
        assert setup.view().refused == {1}

    run(known, act)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"ignoring node-1, which runs another experiment: {text}"]


def test_a_difference_is_described_briefly(known):
    async def act(setup: Setup) -> None:
        setup.add(1, settings_hash="another").shared_settings = {
            f"k{i}": "v" * 900 for i in range(99)
        }
        await setup.tracker.ask([1])
        assert len(setup.tracker.mismatched_peers[1]) == len("another experiment: ") + 1000

    run(known, act)


# Meeting


def test_a_peer_starts_when_all_are_present(known):
    async def act(setup: Setup) -> None:
        for peer in (1, 2, 3):
            setup.add(peer, incarnation=f"life {peer}")
        assert await ended(setup.tracker.wait_for_start(LONG)) < 1
        assert setup.tracker.present_at_start == {1: "life 1", 2: "life 2", 3: "life 3"}
        assert setup.tracker.awaited
        assert not setup.tracker.started_early

    run(known, act)


def test_peers_wait_for_the_last(known):
    async def act(setup: Setup) -> None:
        for peer in (1, 2):
            setup.add(peer)
        task = asyncio.create_task(setup.tracker.wait_for_start(LONG))
        for _ in range(100):
            skip(0.5)
            await settle()
        assert not task.done()
        setup.add(3)
        await ended(task)
        assert setup.tracker.present_at_start.keys() == {1, 2, 3}

    run(known, act)


def test_missing_peers_are_named_now_and_then_and_left_out_in_the_end(known, caplog):
    async def act(setup: Setup) -> None:
        setup.add(1)
        took = await ended(setup.tracker.wait_for_start(60.0))
        assert 60 <= took < 70
        assert setup.tracker.present_at_start.keys() == {1}

    caplog.set_level(logging.INFO, "peerage.peer")
    run(known, act)
    missing = "node-2 (127.0.0.1:10002), node-3 (127.0.0.1:10003)"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == f"starting without {missing}"
    assert set(lines[:-1]) == {f"waiting for {missing} to start"}
    assert 3 <= len(lines[:-1]) <= 5  # after 3 seconds, and then every 15


def test_a_peer_without_answers_does_not_log_that_it_starts(known, caplog):
    async def act(setup: Setup) -> None:
        await ended(setup.tracker.wait_for_start(5.0))
        assert setup.tracker.present_at_start == {}

    run(known, act)
    assert not any("starting without" in record.getMessage() for record in caplog.records)


def test_a_peer_that_the_others_did_not_wait_for_does_not_wait_either(known):
    async def act(setup: Setup) -> None:
        for peer, round in ((1, 6), (2, 7)):
            setup.add(peer, round=round, state="running", awaited=False)
        assert await ended(setup.tracker.wait_for_start(LONG)) < 5
        assert not setup.tracker.awaited
        assert setup.view(2).start_round() == 6

    run(known, act)


@pytest.mark.parametrize(
    ("first", "others", "least", "most"),
    [
        (0, 2, 60, 70),  # a new peer waits for all
        (4, 2, 1, 10),  # a restarted one briefly, if three of four are there,
        (4, 1, 60, 70),  # and else as long as a new one
        (4, 0, 60, 70),
        (9, 0, 1, 10),  # which has finished all rounds
    ],
)
def test_how_long_a_restarted_peer_waits(known, first, others, least, most):
    async def act(setup: Setup) -> None:
        for peer in range(1, others + 1):
            setup.add(peer)
        assert least <= await ended(setup.tracker.wait_for_start(60.0, first)) < most
        assert setup.tracker.present_at_start.keys() == set(range(1, others + 1))
        assert setup.tracker.awaited

    run(known, act)


def test_a_restarted_peer_starts_soon_after_there_is_a_quorum(known):
    async def act(setup: Setup) -> None:
        setup.add(1)
        task = asyncio.create_task(setup.tracker.wait_for_start(LONG, 4))
        for _ in range(100):
            skip(0.5)
            await settle()
        assert not task.done()
        setup.add(3)
        assert await ended(task) < 10

    run(known, act)


def test_a_peer_begins_when_one_that_began_with_it_has(known, caplog):
    """The other peer had an answer from all; peers that are missing here may have left again."""

    async def act(setup: Setup) -> None:
        setup.add(1, round=0, state="running")
        assert await ended(setup.tracker.wait_for_start(LONG)) < 5
        assert (setup.tracker.awaited, setup.tracker.started_early) == (True, True)
        assert setup.view(0).start_round() == 0

    run(known, act)
    assert not caplog.records


def test_a_peer_that_left_again_is_not_waited_for(known, caplog):
    """It began and failed between two questions, so this peer never had an answer from it."""

    async def act(setup: Setup) -> None:
        for peer in (1, 2):
            setup.add(peer)
        setup.tracker.note_incarnation(3, "life 3")
        took = await ended(setup.tracker.wait_for_start(LONG))
        idle = setup.tracker.network.timeouts.idle
        assert idle < took < idle + 10
        assert setup.tracker.present_at_start[3] == "life 3"

    run(known, act)
    assert [record.getMessage() for record in caplog.records] == [
        "node-3 has left before the start"
    ]


def test_a_present_peer_is_asked_again_once_it_sends_messages(known):
    async def act(setup: Setup) -> None:
        first = setup.add(1)
        task = asyncio.create_task(setup.tracker.wait_for_start(LONG))
        for _ in range(50):
            skip(0.5)
            await settle()
        asked = first.count("status")
        assert asked == 1
        first.status = replace(first.status, state="running", round=0)
        setup.tracker.note_message(1, 0)
        await ended(task)
        assert first.count("status") == asked + 1
        assert setup.tracker.started_early

    run(known, act)


def test_a_peer_with_another_experiment_is_ignored_by_the_others(known):
    async def act(setup: Setup) -> None:
        for peer in (1, 2):
            setup.add(peer)
        setup.add(3, settings_hash="another")
        assert await ended(setup.tracker.wait_for_start(LONG)) < 1
        assert setup.tracker.present_at_start.keys() == {1, 2}
        assert setup.tracker.mismatched_peers.keys() == {3}

    run(known, act)


def test_a_peer_that_differs_from_most_stops(known):
    async def act(setup: Setup) -> None:
        setup.add(1)
        for peer in (2, 3):
            setup.add(peer, settings_hash="another").shared_settings = SETTINGS | {
                "local.lr": "0.2"
            }
        text = "node-2 runs another experiment: local.lr is 0.1 here and 0.2 there; give all peers"
        with pytest.raises(InputError, match=text):
            await ended(setup.tracker.wait_for_start(LONG))

    run(known, act)


def test_a_peer_that_the_others_leave_for_another_experiment_stops(known):
    """They were restarted with other files, while this one ran."""

    async def act(setup: Setup) -> None:
        others = [setup.add(peer) for peer in (1, 2, 3)]
        await ended(setup.tracker.wait_for_start(LONG))
        for other in others:
            setup.tracker.check_experiment()
            other.status = replace(other.status, settings_hash="another")
            await setup.tracker.ask()
            if len(setup.tracker.mismatched_peers) == 2:
                break
        with pytest.raises(InputError, match="node-1 runs another experiment"):
            setup.tracker.check_experiment()

    run(known, act)


HERE = Versions("0.1.4", "2.13.0", 3)


@pytest.mark.parametrize(
    ("changes", "other"),
    [
        ({"peerage": "0.2.0"}, "Peerage 0.2.0, this peer 0.1.4"),
        ({"peerage": "1.1.4"}, "Peerage 1.1.4, this peer 0.1.4"),
        ({"peerage": "0\n2"}, r"Peerage 0\\n2, this peer 0.1.4"),
        (
            {"schema": 4},
            r"schema 4 of messages \(Peerage 0.1.4\), this peer 3 \(Peerage 0.1.4\)",
        ),
    ],
)
def test_a_peer_of_another_version_is_refused_with_both_versions(known, changes, other):
    """Also if its settings differ, which another version may cause."""

    async def act(setup: Setup) -> None:
        setup.tracker.versions = HERE
        others = {"settings_hash": "another", "versions": replace(HERE, **changes)}
        for peer in (1, 2, 3):
            setup.add(peer, **others)
        text = f"node-1 runs {other}; install the same version of Peerage on both machines"
        with pytest.raises(InputError, match=text):
            await ended(setup.tracker.wait_for_start(LONG))

    run(known, act)


def test_patch_releases_go_together_and_another_torch_is_a_warning(known, caplog):
    async def act(setup: Setup) -> None:
        setup.tracker.versions = HERE
        setup.add(1, versions=replace(HERE, peerage="0.1.0"))
        setup.add(2, versions=replace(HERE, torch="2.9.1"))
        setup.add(3, versions=None)  # an early version, which does not state them
        for _ in range(3):
            assert (await setup.tracker.ask()).keys() == {1, 2, 3}

    run(known, act)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["node-2 runs torch 2.9.1, this peer 2.13.0: last digits may differ"]


def test_versions_are_no_part_of_the_shared_settings(known, monkeypatch):
    """Else patch releases would refuse each other."""
    before = shared_settings_of(*known)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9.9")
    monkeypatch.setattr("peerage.records.environment.version", lambda name: "9.9.9")
    assert Versions.here().peerage == "9.9.9"
    assert shared_settings_of(*known) == before


def test_a_package_that_is_not_installed_has_no_version_to_compare():
    unknown = replace(HERE, peerage="unknown", torch="unknown")
    assert HERE.refusal(unknown) is HERE.caution(unknown) is None
    assert Versions.here().schema == SCHEMA


@pytest.mark.parametrize(
    ("own", "other", "remedy"),
    [
        ({"classes": "0"}, {"classes": "0, 1"}, "if this peer lacks classes .* --classes 2"),
        ({"classes": "0, 1, 2"}, {"classes": "0"}, "if that peer lacks classes .* --classes 3"),
        ({"classes": "0", "seed": "0"}, {"classes": "0, 1", "seed": "1"}, "the same files"),
        ({"classes": "cat"}, {"classes": "dog"}, "give all peers the same files"),
        ({"example": "(2,)", "classes": "0"}, {"example": "(3,)", "classes": "1"}, "same kind"),
        ({"classes": "cat"}, {}, "give all peers the same files"),
    ],
)
def test_a_peer_that_lacks_classes_learns_which_option_it_needs(own, other, remedy):
    assert re.search(remedy, remedy_for(own, other))


def test_which_peers_began_together(known):
    tracker = Setup(known).tracker
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


# What a peer reports to the others


def test_every_reachable_peer_gets_the_report_of_the_end(known):
    async def act(setup: Setup) -> None:
        others = {peer: setup.add(peer) for peer in (1, 2)}
        setup.tracker.finished.add(2)  # and has perhaps left
        assert await ended(FinishNotice(setup.tracker).tell(LONG)) < 1
        report = {"ask": "finished", "incarnation": setup.tracker.incarnation}
        assert [others[peer].asked for peer in (1, 2)] == [[report], []]

    run(known, act)


def test_a_peer_that_rejects_the_report_of_the_end_is_not_asked_again(known):
    async def act(setup: Setup) -> None:
        other = setup.add(1)
        other.rejects = True
        await ended(FinishNotice(setup.tracker).tell(LONG))
        assert len(other.asked) == 1

    run(known, act)


class Busy(OtherPeer):
    """Answers from the third time on."""

    async def answer(self, question: bytes, identity: int) -> bytes:
        answer = await super().answer(question, identity)
        if len(self.asked) < 3:
            await asyncio.Event().wait()
        return answer


def test_the_report_of_the_end_is_repeated_until_a_busy_peer_answers(known):
    async def act(setup: Setup) -> None:
        other = setup.memory.receivers[1] = Busy(setup.tracker)  # type: ignore[assignment]
        await ended(FinishNotice(setup.tracker).tell(LONG))
        assert other.count("finished") == 3

    run(known, act)


def test_reporting_the_end_has_a_time_limit(known):
    async def act(setup: Setup) -> None:
        other = setup.memory.receivers[1] = Busy(setup.tracker)  # type: ignore[assignment]
        assert await ended(FinishNotice(setup.tracker).tell(1.0)) < 2
        assert other.count("finished") == 1

    run(known, act)


def test_a_finished_peer_stays_for_one_that_was_just_lost_and_tells_it(known):
    async def act(setup: Setup) -> None:
        other = setup.add(1)
        setup.tracker.reachable_peers()
        del setup.memory.receivers[1]
        notice = FinishNotice(setup.tracker)
        await ended(notice.tell(LONG))
        staying = asyncio.create_task(ended(notice.wait_for_lost(LONG)))
        await settle()
        assert not staying.done()
        setup.memory.receivers[1] = other  # type: ignore[assignment]
        assert await staying < LONG / 2
        assert other.count("finished") == 1

    run(known, act)


@pytest.mark.parametrize(
    "why", ["told", "finished", "in the last round", "banned", "lost long ago", "never met"]
)
def test_a_finished_peer_does_not_stay_for_others(known, why):
    async def act(setup: Setup) -> None:
        setup.add(1)
        if why != "never met":
            setup.tracker.reachable_peers()
        notice = FinishNotice(setup.tracker)
        if why == "told":
            await ended(notice.tell(LONG))
        del setup.memory.receivers[1]
        if why == "finished":
            setup.tracker.finished.add(1)
        if why == "in the last round":
            setup.tracker.note_message(1, setup.tracker.world.steps - 1)
        if why == "banned":
            setup.tracker.banned_peers.add(1)
        if why == "lost long ago":
            setup.tracker.last_contact[1] -= 2 * LONG
        assert await ended(notice.wait_for_lost(LONG)) < 1

    run(known, act)


def test_a_finished_peer_does_not_stay_for_ever(known):
    async def act(setup: Setup) -> None:
        setup.add(1)
        setup.tracker.reachable_peers()
        del setup.memory.receivers[1]
        assert 5 <= await ended(FinishNotice(setup.tracker).wait_for_lost(5.0)) < 6

    run(known, act)


def test_a_peer_that_answers_that_it_has_finished_is_a_contact(known):
    async def act(setup: Setup) -> None:
        setup.add(1, state=State.FINISHED)
        setup.add(2)
        await ended(setup.tracker.ask())
        assert setup.tracker.finished == {1}

    run(known, act)


def test_a_peer_announces_that_it_waits_again_and_again_and_ever_more_rarely(known):
    async def act(setup: Setup) -> None:
        uninformed, neighbour = setup.add(1), setup.add(2)
        work = setup.tracker.announce(4, [1], lambda: [2])
        task, start = asyncio.create_task(work), asyncio.get_running_loop().time()
        times: list[float] = []
        while len(times) < 6:
            await asyncio.sleep(0)
            skip(0.01)
            if neighbour.count("done") > len(times):
                times.append(asyncio.get_running_loop().time() - start)
        task.cancel()
        assert uninformed.asked == [{"ask": "done", "round": 4}]  # at once
        gaps = [late - early for early, late in pairwise([0, *times])]
        assert gaps == pytest.approx([1, 2, 4, 8, 15, 15], abs=0.1)

    run(known, act)


# Names


def test_names_with_and_without_addresses(known):
    tracker = Setup(known).tracker
    assert tracker.name(2) == "node-2"
    assert tracker.names({2, 1}) == "node-1 (127.0.0.1:10001), node-2 (127.0.0.1:10002)"
    assert tracker.names([3, 1], addresses=False) == "node-1, node-3"


def test_long_lists_of_names_are_cut():
    experiment = toy(DecAvg(), nodes=9, partition="iid")
    tracker = Setup((network_of(experiment), prepare(experiment))).tracker
    listed = tracker.names(tracker.other_peers, addresses=False)
    assert listed == "node-1, node-2, node-3, node-4, node-5 and 3 more"
