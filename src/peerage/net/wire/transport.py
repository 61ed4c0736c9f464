"""What a peer needs of whatever carries its messages, and a carrier for tests: memory."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from peerage.errors import PeerageError
from peerage.net.wire.header import RETRYABLE_REASONS, Buffer, Header, Rejected, header_bytes

CHUNK = 1 << 20  # bytes of a payload that travel at a time
RETRY_DELAY = 0.01  # seconds until a network in memory is tried again
QUERY_TIMEOUT = 2.0  # seconds that a question may take
ANSWER_LIMIT = 1 << 16  # bytes of a question or an answer


class Unreachable(PeerageError):
    """A message could not be delivered in time."""


class Receiver(Protocol):
    """What a transport calls when something arrives; all may raise `Rejected`."""

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        """The checked header, and how many bytes of its payload are already here.

        `identity` is the node that the connection was authenticated as.
        """

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        """The next bytes of a payload, in order."""

    async def complete(self, header: Header) -> None:
        """All bytes are here."""

    async def answer(self, question: bytes, identity: int) -> bytes: ...


class Transport(Protocol):
    """Carries messages to other peers, and hands what arrives to a receiver."""

    counters: Counter[str]  # bytes_sent and bytes_received among them, with headers
    refused: Counter[str]  # calls that were refused before they came to the receiver, by reason

    async def start(self, receiver: Receiver) -> None: ...

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        """Return when the recipient has taken the message, within so many seconds.

        Raises `Unreachable` if it could not be delivered by then, and `Rejected` if it was refused.
        """

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes: ...

    def reachable(self, peer: int) -> bool:
        """Whether there is any hope to hear from a peer soon."""

    async def stop(self) -> None: ...


class MemoryNetwork:
    """A network in memory: who is there, and which links are cut."""

    def __init__(self) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.cut: set[tuple[int, int]] = set()  # (sender, recipient)

    def find(self, sender: int, recipient: int) -> Receiver | None:
        return None if (sender, recipient) in self.cut else self.receivers.get(recipient)


class MemoryTransport:
    """One peer's end of a network in memory; it does what the real one does, in the same order."""

    def __init__(self, post: MemoryNetwork, me: int) -> None:
        self.post, self.me = post, me
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def start(self, receiver: Receiver) -> None:
        self.post.receivers[self.me] = receiver

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        async with _until(deadline, header.recipient):
            while True:
                receiver = self.post.find(self.me, header.recipient)
                if receiver is not None:
                    try:
                        return await self._deliver(receiver, header, payload)
                    except Rejected as refusal:
                        if refusal.reason not in RETRYABLE_REASONS:
                            raise
                await asyncio.sleep(RETRY_DELAY)

    async def _deliver(self, receiver: Receiver, header: Header, payload: Buffer) -> None:
        raw = header_bytes(header)
        self.counters["bytes_sent"] += len(raw) + len(payload)
        known, offset = receiver.accept(raw, self.me)
        while offset < len(payload):
            await asyncio.sleep(0)
            receiver.chunk(known, offset, bytes(payload[offset : offset + CHUNK]))
            offset += CHUNK
        await receiver.complete(known)

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        async with _until(deadline, peer):
            while True:
                receiver = self.post.find(self.me, peer)
                if receiver is not None:
                    return await receiver.answer(question, self.me)
                await asyncio.sleep(RETRY_DELAY)

    def reachable(self, peer: int) -> bool:
        return self.post.find(self.me, peer) is not None

    async def stop(self) -> None:
        self.post.receivers.pop(self.me, None)


@asynccontextmanager
async def _until(seconds: float, peer: int) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unreachable(f"node {peer} could not be reached within {seconds:g} s") from None
