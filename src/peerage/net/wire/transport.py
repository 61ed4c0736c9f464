"""The interface between a peer and its transport, and an in-memory transport for tests."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from peerage.errors import PeerageError
from peerage.net.wire.header import RETRYABLE_REASONS, Buffer, Header, Rejected, header_bytes

CHUNK = 1 << 20  # bytes of a payload that are sent at a time
RETRY_DELAY = 0.01  # seconds between two attempts of the in-memory transport
QUERY_TIMEOUT = 2.0  # seconds to wait for an answer
ANSWER_LIMIT = 1 << 16  # largest question or answer, in bytes


class Unreachable(PeerageError):
    """A message could not be delivered in time."""


class Receiver(Protocol):
    """What a transport calls for incoming messages; all methods may raise `Rejected`."""

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        """The validated header, and how many bytes of its payload have already arrived.

        `identity` is the authenticated node at the other end.
        """

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        """Take the next bytes of a payload."""

    async def complete(self, header: Header) -> None:
        """Take the message, of which all bytes have arrived."""

    async def answer(self, question: bytes, identity: int) -> bytes: ...


class Transport(Protocol):
    """Carries messages to other peers, and passes incoming ones to a receiver."""

    counters: Counter[str]  # including bytes_sent and bytes_received, with headers
    refused: Counter[str]  # calls that were refused before they reached the receiver, by reason

    async def start(self, receiver: Receiver) -> None: ...

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        """Return when the recipient has accepted the message.

        Raises `Unreachable` after `deadline` seconds, and `Rejected` if the recipient rejects it.
        """

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes: ...

    def reachable(self, peer: int) -> bool:
        """Whether the peer was alive recently."""

    async def stop(self) -> None: ...


class MemoryNetwork:
    """A network in memory: the receivers that are present, and the links that are cut."""

    def __init__(self) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.cut: set[tuple[int, int]] = set()  # (sender, recipient)

    def find(self, sender: int, recipient: int) -> Receiver | None:
        return None if (sender, recipient) in self.cut else self.receivers.get(recipient)


class MemoryTransport:
    """One peer's end of a network in memory; makes the same calls as the real transport."""

    def __init__(self, network: MemoryNetwork, me: int) -> None:
        self.network, self.me = network, me
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def start(self, receiver: Receiver) -> None:
        self.network.receivers[self.me] = receiver

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        async with _until(deadline, header.recipient):
            while True:
                receiver = self.network.find(self.me, header.recipient)
                if receiver is not None:
                    try:
                        return await self._deliver(receiver, header, payload)
                    except Rejected as rejection:
                        if rejection.reason not in RETRYABLE_REASONS:
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
                receiver = self.network.find(self.me, peer)
                if receiver is not None:
                    return await receiver.answer(question, self.me)
                await asyncio.sleep(RETRY_DELAY)

    def reachable(self, peer: int) -> bool:
        return self.network.find(self.me, peer) is not None

    async def stop(self) -> None:
        self.network.receivers.pop(self.me, None)


@asynccontextmanager
async def _until(seconds: float, peer: int) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unreachable(f"node {peer} could not be reached within {seconds:g} s") from None
