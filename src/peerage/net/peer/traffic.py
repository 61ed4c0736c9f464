"""What a peer accepts, and the queues of its outgoing messages."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import NamedTuple

from peerage.engine.world import World
from peerage.net.peer.network import Network
from peerage.net.wire.header import (
    DONE,
    HONEST_REASONS,
    NUMBER_LIMIT,
    Header,
    MessagePolicy,
    Rejected,
)
from peerage.net.wire.payload import LAYOUT_LIMIT
from peerage.net.wire.transport import QUERY_TIMEOUT, Transport, Unreachable, wait_for
from peerage.requests import TensorSpec

OPEN_ENDED_BYTES = 1 << 26  # bytes; least limit for a message with tensors of any length
MAX_DONE = 8  # "done" messages that may wait in an outbox before announcements are left unanswered

log = logging.getLogger("peerage.peer")


def message_policy(network: Network, me: int, world: World) -> MessagePolicy:
    """The messages that this peer accepts: those that the algorithm declares, per architecture.

    The network may be a revision that has more members than the world.
    """
    nodes = len(network.members)
    before: Mapping[str, TensorSpec] = getattr(world.pre_round, "tensors", {})
    schemas = {
        name: world.algorithm.message_schema(replace(world.dimensions(kind), nodes=nodes))
        for name, kind in world.architectures.items()
    }
    if world.noise.active:
        nonnegative = world.algorithm.nonnegative
        schemas = {
            name: {key: spec.under_noise(key in nonnegative) for key, spec in schema.items()}
            for name, schema in schemas.items()
        }
    tensors = {name: {**schema, **before} for name, schema in schemas.items()}
    largest = max(map(size_of, tensors.values()))
    return MessagePolicy(
        network.run,
        me,
        frozenset(range(nodes)),
        tensors,
        largest + LAYOUT_LIMIT,
        network.experiment.rounds + world.algorithm.has_final,
        network.pack,
        {i: m.examples for i, m in enumerate(network.members) if m.examples is not None},
        NUMBER_LIMIT if network.max_examples is None else network.max_examples,
    )


def size_of(tensors: Mapping[str, TensorSpec]) -> int:
    """The most bytes that these tensors can have together."""
    specs = tensors.values()
    known = sum(spec.dtype.itemsize * prod(n or 1 for n in spec.shape) for spec in specs)
    open_ended = any(None in spec.shape for spec in specs)
    return max(OPEN_ENDED_BYTES, 2 * known) if open_ended else known


class SentBytes:
    """Corrects the payload bytes that a peer counts as sent by what really left.

    A message to a reachable peer counts in its own round, as in a simulation, and is subtracted
    later if it could not be delivered. One to an unreachable peer counts when it is delivered. One
    to a peer that has finished counts in any case: nothing was lost.
    """

    def __init__(self, finished: Container[int] = ()) -> None:
        self.finished = finished  # peers that have run all rounds
        self.difference = 0  # bytes to be added to the next row

    def delivered(self, message: "Outgoing") -> None:
        self.difference += 0 if message.counted else message.size

    def lost(self, message: "Outgoing") -> None:
        if message.counted and message.header.recipient not in self.finished:
            self.difference -= message.size

    def settle(self, sent: int) -> int:
        """The bytes of a row that counted `sent`; what would make it negative is left for later."""
        total = sent + self.difference
        self.difference = min(total, 0)
        return max(total, 0)


class Outgoing(NamedTuple):
    """A message in an outbox."""

    header: Header
    payload: bytes | memoryview = b""
    size: int = 0  # bytes of its tensors
    counted: bool = True  # whether these count as sent already


class Outbox:
    """Sends messages to one recipient, one after the other.

    Drops messages of more than `ahead` rounds ago: the recipient is too slow or unreachable.
    """

    def __init__(
        self,
        transport: Transport,
        timeout: float,
        ahead: int,
        counters: Counter[str],
        sent_bytes: SentBytes | None = None,
    ) -> None:
        self.transport, self.timeout, self.ahead = transport, timeout, ahead
        self.counters = counters
        self.sent_bytes = sent_bytes or SentBytes()
        self._waiting: deque[Outgoing] = deque()
        self._current: Outgoing | None = None
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._logged_reasons: set[str] = set()
        self._task = asyncio.create_task(self._work())

    def put(
        self,
        header: Header,
        payload: bytes | memoryview = b"",
        size: int = 0,
        *,
        counted: bool = True,
    ) -> None:
        while self._waiting and self._waiting[0].header.round < header.round - self.ahead:
            self._give_up(self._waiting.popleft())
        self._waiting.append(Outgoing(header, payload, size, counted))
        self._idle.clear()
        self._news.set()

    def has_room_for_done(self) -> bool:
        """Whether few "done" messages wait here; so no peer can make others queue up answers."""
        return sum(message.header.kind == DONE for message in self._waiting) < MAX_DONE

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._idle.set()
                self._news.clear()
                await self._news.wait()
            self._current = message = self._waiting.popleft()
            header = message.header
            is_done = header.kind == DONE  # may be lost: the recipient has perhaps left already
            try:
                if not is_done or self.transport.reachable(header.recipient):
                    timeout = QUERY_TIMEOUT if is_done else self.timeout
                    await self.transport.send(header, message.payload, timeout)
                    self.sent_bytes.delivered(message)
            except Unreachable:
                self._give_up(message)
            except Rejected as rejection:
                self.counters[f"refused {rejection.reason}"] += 1
                self._log_rejection(header.recipient, rejection)
            self._current = None

    def _give_up(self, message: Outgoing) -> None:
        if message.header.kind != DONE:
            self.counters["undelivered"] += 1
            self.sent_bytes.lost(message)

    def _log_rejection(self, recipient: int, rejection: Rejected) -> None:
        """Log each reason once, except those that also occur between honest peers."""
        if rejection.reason not in {*HONEST_REASONS, *self._logged_reasons}:
            self._logged_reasons.add(rejection.reason)
            log.warning("node %d rejected a message: %s", recipient, rejection)

    async def flush(self, seconds: float) -> None:
        """Wait until everything is sent, for at most `seconds`."""
        await wait_for(self._idle, seconds)

    def forget(self) -> None:
        """No longer count the messages that are still here as sent."""
        for message in (*self._waiting, *filter(None, [self._current])):
            self.sent_bytes.lost(message)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
