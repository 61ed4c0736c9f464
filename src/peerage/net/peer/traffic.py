"""What a peer accepts, and the queues of its outgoing messages."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from math import prod

from peerage.engine.world import World
from peerage.net.peer.network import Network
from peerage.net.wire.header import DONE, HONEST_REASONS, Header, MessagePolicy, Rejected
from peerage.net.wire.payload import LAYOUT_LIMIT
from peerage.net.wire.transport import QUERY_TIMEOUT, Transport, Unreachable, wait_for
from peerage.requests import TensorSpec

OPEN_ENDED_BYTES = 1 << 26  # bytes; least limit for a message with tensors of any length
MAX_DONE = 8  # "done" messages that may wait in an outbox before announcements are left unanswered

log = logging.getLogger("peerage.peer")


def message_policy(network: Network, me: int, world: World) -> MessagePolicy:
    """The messages that this peer accepts: those that the algorithm declares, per architecture."""
    before: Mapping[str, TensorSpec] = getattr(world.pre_round, "tensors", {})
    tensors = {
        name: {**world.algorithm.message_schema(world.dimensions(kind)), **before}
        for name, kind in world.architectures.items()
    }
    largest = max(map(size_of, tensors.values()))
    return MessagePolicy(
        network.run,
        me,
        frozenset(range(world.nodes)),
        tensors,
        largest + LAYOUT_LIMIT,
        world.steps,
        network.pack,
    )


def size_of(tensors: Mapping[str, TensorSpec]) -> int:
    """The most bytes that these tensors can have together."""
    specs = tensors.values()
    known = sum(spec.dtype.itemsize * prod(n or 1 for n in spec.shape) for spec in specs)
    open_ended = any(None in spec.shape for spec in specs)
    return max(OPEN_ENDED_BYTES, 2 * known) if open_ended else known


class Outbox:
    """Sends messages to one recipient, one after the other.

    Drops messages of more than `ahead` rounds ago: the recipient is too slow or unreachable.
    """

    def __init__(
        self, transport: Transport, timeout: float, ahead: int, counters: Counter[str]
    ) -> None:
        self.transport, self.timeout, self.ahead = transport, timeout, ahead
        self.counters = counters
        self._waiting: deque[tuple[Header, bytes | memoryview]] = deque()
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._logged_reasons: set[str] = set()
        self._task = asyncio.create_task(self._work())

    def put(self, header: Header, payload: bytes | memoryview = b"") -> None:
        while self._waiting and self._waiting[0][0].round < header.round - self.ahead:
            old, _ = self._waiting.popleft()
            if old.kind != DONE:
                self.counters["undelivered"] += 1
        self._waiting.append((header, payload))
        self._idle.clear()
        self._news.set()

    def has_room_for_done(self) -> bool:
        """Whether few "done" messages wait here; so no peer can make others queue up answers."""
        return sum(header.kind == DONE for header, _ in self._waiting) < MAX_DONE

    async def _work(self) -> None:
        while True:
            while not self._waiting:
                self._idle.set()
                self._news.clear()
                await self._news.wait()
            header, payload = self._waiting.popleft()
            is_done = header.kind == DONE  # may be lost: the recipient has perhaps left already
            try:
                if not is_done or self.transport.reachable(header.recipient):
                    timeout = QUERY_TIMEOUT if is_done else self.timeout
                    await self.transport.send(header, payload, timeout)
            except Unreachable:
                if not is_done:
                    self.counters["undelivered"] += 1
            except Rejected as rejection:
                self.counters[f"refused {rejection.reason}"] += 1
                self._log_rejection(header.recipient, rejection)

    def _log_rejection(self, recipient: int, rejection: Rejected) -> None:
        """Log each reason once, except those that also occur between honest peers."""
        if rejection.reason not in {*HONEST_REASONS, *self._logged_reasons}:
            self._logged_reasons.add(rejection.reason)
            log.warning("node %d rejected a message: %s", recipient, rejection)

    async def flush(self, seconds: float) -> None:
        """Wait until everything is sent, for at most `seconds`."""
        await wait_for(self._idle, seconds)

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
