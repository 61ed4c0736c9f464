"""What may come, and what is on its way to others."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from math import prod

from peerage.engine.world import World
from peerage.net.peer.network import Network
from peerage.net.wire.header import DONE, Header, MessagePolicy, Rejected
from peerage.net.wire.payload import LAYOUT_LIMIT
from peerage.net.wire.transport import QUERY_TIMEOUT, Transport, Unreachable
from peerage.requests import TensorSpec

LARGEST = 1 << 26  # bytes of a message with tensors of any length, if its model is small
WORDS = 8  # that may wait in an outbox before announcements are left unanswered
SLOW = ("late", "early", "replayed", "full")  # why a message comes to nothing between honest peers

log = logging.getLogger("peerage.peer")


def message_policy(network: Network, me: int, world: World) -> MessagePolicy:
    """What this peer accepts: the tensors that the algorithm declares, for every architecture."""
    before: Mapping[str, TensorSpec] = getattr(world.pre_round, "tensors", {})
    tensors = {
        name: {**world.algorithm.message_schema(world.dimensions(kind)), **before}
        for name, kind in world.architectures.items()
    }
    largest = max(map(size_of, tensors.values()))
    members = frozenset(range(world.nodes))
    return MessagePolicy(
        network.run,
        me,
        members,
        tensors,
        largest + LAYOUT_LIMIT,
        world.rounds,
        network.pack,
    )


def size_of(tensors: Mapping[str, TensorSpec]) -> int:
    """The most bytes that tensors like these can have together."""
    specs = tensors.values()
    known = sum(spec.dtype.itemsize * prod(n or 1 for n in spec.shape) for spec in specs)
    open_ended = any(None in spec.shape for spec in specs)
    return max(LARGEST, 2 * known) if open_ended else known


class Outbox:
    """Sends messages to one recipient, one after the other.

    Those of more than `ahead` rounds ago have waited in vain: the recipient is slow, or gone.
    """

    def __init__(
        self, transport: Transport, timeout: float, ahead: int, counters: Counter[str]
    ) -> None:
        self.transport, self.timeout, self.ahead = transport, timeout, ahead
        self.counters = counters
        self._waiting: deque[tuple[Header, bytes | memoryview]] = deque()
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._complained: set[str] = set()
        self._task = asyncio.create_task(self._work())

    def put(self, header: Header, payload: bytes | memoryview = b"") -> None:
        while self._waiting and self._waiting[0][0].round < header.round - self.ahead:
            old, _ = self._waiting.popleft()
            if old.kind != DONE:
                self.counters["undelivered"] += 1
        self._waiting.append((header, payload))
        self._idle.clear()
        self._news.set()

    def has_room_for_words(self) -> bool:
        """Whether few words wait here: a peer cannot make others queue up answers for it."""
        return sum(header.kind == DONE for header, _ in self._waiting) < WORDS

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._idle.set()
                self._news.clear()
                await self._news.wait()
            header, payload = self._waiting.popleft()
            word = header.kind == DONE  # to somebody who may have left already: no harm if lost
            try:
                if not word or self.transport.reachable(header.recipient):
                    timeout = QUERY_TIMEOUT if word else self.timeout
                    await self.transport.send(header, payload, timeout)
            except Unreachable:
                if not word:
                    self.counters["undelivered"] += 1
            except Rejected as refusal:
                self.counters[f"refused {refusal.reason}"] += 1
                self._complain(header.recipient, refusal)

    def _complain(self, recipient: int, refusal: Rejected) -> None:
        """Once for every reason; that messages are late needs no words."""
        if refusal.reason not in {*SLOW, *self._complained}:
            self._complained.add(refusal.reason)
            log.warning("node %d refused a message: %s", recipient, refusal)

    async def flush(self, seconds: float) -> None:
        """Wait until everything is sent, so many seconds at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
