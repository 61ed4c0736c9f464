"""Outboxes: in which order messages leave, which are dropped, and what is counted and logged."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import network_of, run_skipping, skip

from peerage import DecAvg, DecHW, FedAvg
from peerage.engine.prepare import prepare
from peerage.net.peer.traffic import (
    HONEST_REASONS,
    MAX_DONE,
    OPEN_ENDED_BYTES,
    Outbox,
    message_policy,
    size_of,
)
from peerage.net.wire.header import DATA, REASONS, Header, Rejected, done
from peerage.net.wire.payload import LAYOUT_LIMIT
from peerage.net.wire.transport import QUERY_TIMEOUT, Unreachable
from peerage.requests import TensorSpec
from peerage.testing import toy

ME, OTHER = 0, 1
PATIENCE = 100.0  # seconds


def message(round: int, sequence: int = 0) -> Header:
    """As far as an outbox looks at one."""
    return replace(word(round), kind=DATA, sequence=sequence)


def word(round: int) -> Header:
    return done(run="demo", round=round, sender=ME, recipient=OTHER, sent=0)


class Line(MemoryTransport):
    """Notes what is sent; each time it does what the test says: nothing, raise, or wait for it."""

    def __init__(self) -> None:
        super().__init__(MemoryNetwork(), ME)
        self.sent: list[tuple[str, int, int]] = []
        self.waits: list[float] = []
        self.failures: list[Exception | None] = []  # of the next ones
        self.open = asyncio.Event()
        self.open.set()
        self.there = True

    def reachable(self, peer: int) -> bool:
        return self.there and peer == OTHER

    async def send(self, header: Header, payload: Any, deadline: float) -> None:
        await self.open.wait()
        self.waits.append(deadline)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        self.sent.append((header.kind, header.round, header.sequence))


class Scene:
    """An outbox and its line."""

    def __init__(self, ahead: int = 2) -> None:
        self.line, self.counters = Line(), Counter[str]()
        self.outbox = Outbox(self.line, PATIENCE, ahead, self.counters)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def put(self, *headers: Header) -> None:
        """One after the other, and then let the outbox send what it can."""
        for header in headers:
            self.outbox.put(header)
        await self.settle()


def play(act: Any, **options: Any) -> Scene:
    """Let somebody act with an outbox, and close it in the end."""

    async def main() -> Scene:
        scene = Scene(**options)
        await act(scene)
        await scene.outbox.close()
        return scene

    return run_skipping(main())


# Order


def test_messages_leave_one_after_the_other_in_their_order():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0), message(0, 1), word(0), message(1))
        assert scene.line.sent == []
        scene.line.open.set()
        await scene.settle()

    scene = play(act)
    assert scene.line.sent == [("data", 0, 0), ("data", 0, 1), ("done", 0, 0), ("data", 1, 0)]
    assert not scene.counters


def test_a_message_that_fails_does_not_hold_up_the_next():
    async def act(scene: Scene) -> None:
        scene.line.failures = [Unreachable("gone"), Rejected("shape", "odd")]
        await scene.put(message(0), message(0, 1), message(0, 2))

    assert play(act).line.sent == [("data", 0, 2)]


def test_how_long_messages_and_words_may_take():
    async def act(scene: Scene) -> None:
        await scene.put(message(0), word(0))

    assert play(act).line.waits == [PATIENCE, QUERY_TIMEOUT]


# What is dropped


def test_messages_of_more_than_ahead_rounds_ago_are_dropped():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0))  # is on its way, and cannot be called back
        await scene.put(message(0, 1), message(1), message(2), message(3))
        assert scene.counters == {"undelivered": 1}
        await scene.put(message(5))
        assert scene.counters == {"undelivered": 3}
        scene.line.open.set()
        await scene.settle()

    scene = play(act)
    assert [round for _, round, _ in scene.line.sent] == [0, 3, 5]


def test_words_that_are_dropped_are_not_counted():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0))
        await scene.put(word(0), message(1), word(1), message(4))
        scene.line.open.set()
        await scene.settle()

    scene = play(act)
    assert scene.counters == {"undelivered": 1}
    assert scene.line.sent == [("data", 0, 0), ("data", 4, 0)]


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4))
def test_what_waits_is_never_older_than_ahead_rounds(steps, ahead):
    """Rounds only grow; what was put is sent, waits, or is counted."""

    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        round = 0
        await scene.put(message(0))
        for step in steps:
            round += step
            scene.outbox.put(message(round))
            assert all(known.round >= round - ahead for known, _ in scene.outbox._waiting)
        kept = len(scene.outbox._waiting)
        assert kept + scene.counters["undelivered"] == len(steps)

    play(act, ahead=ahead)


# What is counted and logged


def test_messages_that_cannot_be_delivered_are_counted_and_words_are_not():
    async def act(scene: Scene) -> None:
        scene.line.failures = [Unreachable("gone")] * 3
        await scene.put(message(0), word(0), message(1))

    assert play(act).counters == {"undelivered": 2}


def test_a_word_to_a_peer_that_is_gone_is_not_even_tried():
    async def act(scene: Scene) -> None:
        scene.line.there = False
        await scene.put(word(0), message(0))

    scene = play(act)
    assert scene.line.sent == [("data", 0, 0)]  # a message is: the peer may come back in time
    assert not scene.counters


def test_refusals_are_counted_every_time_and_logged_once(caplog):
    async def act(scene: Scene) -> None:
        scene.line.failures = [
            Rejected("shape", "tensor x has another shape"),
            Rejected("shape", "again"),
            Rejected("dtype", "tensor x has another type"),
            Rejected("shape", "and again"),
        ]
        await scene.put(*(message(0, sequence) for sequence in range(4)))

    with caplog.at_level(logging.WARNING, "peerage.peer"):
        scene = play(act)
    assert scene.counters == {"refused shape": 3, "refused dtype": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "node 1 rejected a message: tensor x has another shape",
        "node 1 rejected a message: tensor x has another type",
    ]


@pytest.mark.parametrize("reason", REASONS)
def test_that_a_message_comes_at_the_wrong_time_is_not_logged(reason, caplog):
    async def act(scene: Scene) -> None:
        scene.line.failures = [Rejected(reason, "text")]
        await scene.put(message(0))

    assert play(act).counters == {f"refused {reason}": 1}
    assert bool(caplog.records) == (reason not in HONEST_REASONS)


def test_only_so_many_words_may_wait():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0))
        for _ in range(MAX_DONE):
            assert scene.outbox.has_room_for_done()
            scene.outbox.put(message(1))
            scene.outbox.put(word(1))
        assert not scene.outbox.has_room_for_done()
        scene.line.open.set()
        await scene.settle()
        await scene.outbox.flush(PATIENCE)
        assert scene.outbox.has_room_for_done()

    play(act)


# The end


def flushing(scene: Scene, seconds: float) -> asyncio.Task[None]:
    flush: Coroutine[Any, Any, None] = scene.outbox.flush(seconds)
    return asyncio.create_task(flush)


def test_flush_waits_for_what_is_on_its_way():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0), message(1))
        task = flushing(scene, PATIENCE)
        await scene.settle()
        assert not task.done()
        scene.line.open.set()
        await task
        assert len(scene.line.sent) == 2

    play(act)


def test_flush_waits_also_if_the_outbox_was_empty_before():
    async def act(scene: Scene) -> None:
        await scene.outbox.flush(PATIENCE)
        scene.line.open.clear()
        await scene.put(message(0))
        task = flushing(scene, PATIENCE)
        await scene.settle()
        assert not task.done()
        scene.line.open.set()
        await task

    assert play(act).line.sent == [("data", 0, 0)]


def test_flush_of_an_empty_outbox_is_over_at_once():
    async def act(scene: Scene) -> None:
        await scene.outbox.flush(PATIENCE)

    assert play(act).line.sent == []


def test_flush_gives_up_after_its_time():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0))
        task = flushing(scene, PATIENCE)
        await scene.settle()
        skip(PATIENCE / 2)
        await asyncio.sleep(0.01)
        assert not task.done()
        skip(PATIENCE / 2)
        await task

    assert play(act).line.sent == []


def test_a_closed_outbox_sends_nothing_more():
    async def act(scene: Scene) -> None:
        scene.line.open.clear()
        await scene.put(message(0), message(1))
        await scene.outbox.close()
        scene.line.open.set()
        await scene.settle()

    assert play(act).line.sent == []


# What may come


@pytest.mark.parametrize(
    ("forms", "size"),
    [
        ({}, 0),
        ({"x": TensorSpec((10,))}, 40),
        ({"x": TensorSpec((10,)), "b": TensorSpec((2, 3), torch.uint8)}, 46),
        ({"x": TensorSpec((10,)), "y": TensorSpec((5, 5))}, 140),
        ({"s": TensorSpec(())}, 4),
        ({"x": TensorSpec((None,))}, OPEN_ENDED_BYTES),
        (
            {"x": TensorSpec((None,)), "y": TensorSpec((OPEN_ENDED_BYTES,))},
            2 * (4 + 4 * OPEN_ENDED_BYTES),
        ),
    ],
)
def test_how_many_bytes_tensors_may_have(forms, size):
    assert size_of(forms) == size


@pytest.mark.parametrize("algorithm", [DecAvg(), DecHW(), FedAvg()])
def test_what_a_peer_accepts_is_what_the_algorithm_declares(algorithm):
    experiment = toy(algorithm)
    world = prepare(experiment)
    expected = message_policy(network_of(experiment, pack=True), 2, world)
    assert (expected.run, expected.me, expected.rounds) == ("test", 2, world.rounds)
    assert expected.pack
    assert expected.members == frozenset(range(world.nodes))
    assert expected.tensors.keys() == world.architectures.keys()
    for name, kind in world.architectures.items():
        forms = expected.tensors[name]
        assert forms["x"] == TensorSpec((kind.layout.size,))
        assert size_of(forms) + LAYOUT_LIMIT <= expected.max_bytes
