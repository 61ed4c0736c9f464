"""Outboxes: the order of messages, which are dropped, and what is counted and logged."""

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
    MAX_DONE,
    OPEN_ENDED_BYTES,
    Outbox,
    Outgoing,
    SentBytes,
    message_policy,
    size_of,
)
from peerage.net.wire.header import DATA, HONEST_REASONS, REASONS, Header, Rejected, done
from peerage.net.wire.payload import LAYOUT_LIMIT
from peerage.net.wire.transport import QUERY_TIMEOUT, Unreachable
from peerage.requests import TensorSpec
from peerage.testing import toy

ME, OTHER = 0, 1
TIMEOUT = 100.0  # seconds


def message(round: int, sequence: int = 0) -> Header:
    """The header of a message, as far as an outbox uses it."""
    return replace(done_header(round), kind=DATA, sequence=sequence)


def done_header(round: int) -> Header:
    return done(run="demo", round=round, sender=ME, recipient=OTHER, sent=0)


class Line(MemoryTransport):
    """Records what is sent; a test can make it wait or raise an error."""

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


class Setup:
    """An outbox and its line."""

    def __init__(self, ahead: int = 2) -> None:
        self.line, self.counters = Line(), Counter[str]()
        self.outbox = Outbox(self.line, TIMEOUT, ahead, self.counters)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def put(self, *headers: Header) -> None:
        """One after the other, and then let the outbox send what it can."""
        for header in headers:
            self.outbox.put(header)
        await self.settle()


def run(act: Any, **options: Any) -> Setup:
    """Call `act` with an outbox, and close it in the end."""

    async def main() -> Setup:
        setup = Setup(**options)
        await act(setup)
        await setup.outbox.close()
        return setup

    return run_skipping(main())


# Order


def test_messages_leave_one_after_the_other_in_their_order():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0), message(0, 1), done_header(0), message(1))
        assert setup.line.sent == []
        setup.line.open.set()
        await setup.settle()

    setup = run(act)
    assert setup.line.sent == [("data", 0, 0), ("data", 0, 1), ("done", 0, 0), ("data", 1, 0)]
    assert not setup.counters


def test_a_message_that_fails_does_not_hold_up_the_next():
    async def act(setup: Setup) -> None:
        setup.line.failures = [Unreachable("gone"), Rejected("shape", "odd")]
        await setup.put(message(0), message(0, 1), message(0, 2))

    assert run(act).line.sent == [("data", 0, 2)]


def test_deadlines_of_messages_and_done_headers():
    async def act(setup: Setup) -> None:
        await setup.put(message(0), done_header(0))

    assert run(act).line.waits == [TIMEOUT, QUERY_TIMEOUT]


# What is dropped


def test_messages_of_more_than_ahead_rounds_ago_are_dropped():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0))  # is on its way, and cannot be called back
        await setup.put(message(0, 1), message(1), message(2), message(3))
        assert setup.counters == {"undelivered": 1}
        await setup.put(message(5))
        assert setup.counters == {"undelivered": 3}
        setup.line.open.set()
        await setup.settle()

    setup = run(act)
    assert [round for _, round, _ in setup.line.sent] == [0, 3, 5]


def test_dropped_done_headers_are_not_counted():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0))
        await setup.put(done_header(0), message(1), done_header(1), message(4))
        setup.line.open.set()
        await setup.settle()

    setup = run(act)
    assert setup.counters == {"undelivered": 1}
    assert setup.line.sent == [("data", 0, 0), ("data", 4, 0)]


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4))
def test_what_waits_is_never_older_than_ahead_rounds(steps, ahead):
    """Rounds only grow; every message is sent, waits, or is counted."""

    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        round = 0
        await setup.put(message(0))
        for step in steps:
            round += step
            setup.outbox.put(message(round))
            assert all(known.header.round >= round - ahead for known in setup.outbox._waiting)
        kept = len(setup.outbox._waiting)
        assert kept + setup.counters["undelivered"] == len(steps)

    run(act, ahead=ahead)


# What is counted and logged


def test_undelivered_messages_are_counted_and_done_headers_are_not():
    async def act(setup: Setup) -> None:
        setup.line.failures = [Unreachable("gone")] * 3
        await setup.put(message(0), done_header(0), message(1))

    assert run(act).counters == {"undelivered": 2}


def test_payload_bytes_count_where_they_left():
    """Counted at once if the peer was reachable, when delivered if not, never if undelivered."""
    sent = SentBytes(finished={9})
    early, late = (Outgoing(message(1), size=10, counted=counted) for counted in (True, False))
    sent.delivered(early)
    assert sent.settle(10) == 10  # the row has counted it
    sent.delivered(late)
    assert sent.settle(0) == 10
    sent.lost(late)
    assert sent.settle(0) == 0
    sent.lost(early)
    assert [sent.settle(7), sent.settle(7)] == [0, 4]  # no row is negative
    sent.lost(early._replace(header=replace(message(1), recipient=9)))
    assert sent.settle(7) == 7  # it had finished: nothing was lost


def test_bytes_of_undelivered_and_forgotten_messages_are_subtracted():
    async def act(setup: Setup) -> None:
        setup.line.failures = [None, Unreachable("gone")]
        for round in range(2):
            setup.outbox.put(message(round), b"", 10)
        setup.outbox.put(message(2), b"", 5, counted=False)
        await setup.settle()
        assert setup.outbox.sent_bytes.settle(20) == 15
        setup.line.open.clear()
        setup.outbox.put(message(3), b"", 100)  # on its way
        setup.outbox.put(message(3), b"", 1000)
        await setup.settle()
        setup.outbox.forget()
        assert setup.outbox.sent_bytes.settle(1100) == 0

    run(act)


def test_a_done_header_to_an_unreachable_peer_is_not_sent():
    async def act(setup: Setup) -> None:
        setup.line.there = False
        await setup.put(done_header(0), message(0))

    setup = run(act)
    assert setup.line.sent == [("data", 0, 0)]  # a message is: the peer may come back in time
    assert not setup.counters


def test_rejections_are_counted_every_time_and_logged_once(caplog):
    async def act(setup: Setup) -> None:
        setup.line.failures = [
            Rejected("shape", "tensor x has another shape"),
            Rejected("shape", "again"),
            Rejected("dtype", "tensor x has another type"),
            Rejected("shape", "and again"),
        ]
        await setup.put(*(message(0, sequence) for sequence in range(4)))

    with caplog.at_level(logging.WARNING, "peerage.peer"):
        setup = run(act)
    assert setup.counters == {"refused shape": 3, "refused dtype": 1}
    assert [record.getMessage() for record in caplog.records] == [
        "node 1 rejected a message: tensor x has another shape",
        "node 1 rejected a message: tensor x has another type",
    ]


@pytest.mark.parametrize("reason", REASONS)
def test_that_a_message_comes_at_the_wrong_time_is_not_logged(reason, caplog):
    async def act(setup: Setup) -> None:
        setup.line.failures = [Rejected(reason, "text")]
        await setup.put(message(0))

    assert run(act).counters == {f"refused {reason}": 1}
    assert bool(caplog.records) == (reason not in HONEST_REASONS)


def test_the_queue_of_done_headers_is_bounded():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0))
        for _ in range(MAX_DONE):
            assert setup.outbox.has_room_for_done()
            setup.outbox.put(message(1))
            setup.outbox.put(done_header(1))
        assert not setup.outbox.has_room_for_done()
        setup.line.open.set()
        await setup.settle()
        await setup.outbox.flush(TIMEOUT)
        assert setup.outbox.has_room_for_done()

    run(act)


# The end


def flushing(setup: Setup, seconds: float) -> asyncio.Task[None]:
    flush: Coroutine[Any, Any, None] = setup.outbox.flush(seconds)
    return asyncio.create_task(flush)


def test_flush_waits_for_what_is_on_its_way():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0), message(1))
        task = flushing(setup, TIMEOUT)
        await setup.settle()
        assert not task.done()
        setup.line.open.set()
        await task
        assert len(setup.line.sent) == 2

    run(act)


def test_flush_waits_also_if_the_outbox_was_empty_before():
    async def act(setup: Setup) -> None:
        await setup.outbox.flush(TIMEOUT)
        setup.line.open.clear()
        await setup.put(message(0))
        task = flushing(setup, TIMEOUT)
        await setup.settle()
        assert not task.done()
        setup.line.open.set()
        await task

    assert run(act).line.sent == [("data", 0, 0)]


def test_flush_of_an_empty_outbox_is_over_at_once():
    async def act(setup: Setup) -> None:
        await setup.outbox.flush(TIMEOUT)

    assert run(act).line.sent == []


def test_flush_gives_up_after_its_time():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0))
        task = flushing(setup, TIMEOUT)
        await setup.settle()
        skip(TIMEOUT / 2)
        await asyncio.sleep(0.01)
        assert not task.done()
        skip(TIMEOUT / 2)
        await task

    assert run(act).line.sent == []


def test_a_closed_outbox_sends_nothing_more():
    async def act(setup: Setup) -> None:
        setup.line.open.clear()
        await setup.put(message(0), message(1))
        await setup.outbox.close()
        setup.line.open.set()
        await setup.settle()

    assert run(act).line.sent == []


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
