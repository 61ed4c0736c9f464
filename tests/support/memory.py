"""A network in memory, for tests of peers."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from peerage.net.wire.header import RETRYABLE_REASONS, Buffer, Header, Rejected, header_bytes
from peerage.net.wire.transport import CHUNK, Receiver, Unreachable

RETRY_DELAY = 0.01  # seconds between two attempts


class MemoryNetwork:
    """A network in memory: the receivers that are present, and the links that are cut."""

    def __init__(self) -> None:
        self.receivers: dict[int, Receiver] = {}
        self.cut: set[tuple[int, int]] = set()  # (sender, recipient)
        self.revoked: frozenset[int] = frozenset()  # as the revocation lists of all peers say

    def find(self, sender: int, recipient: int) -> Receiver | None:
        revoked = self.revoked & {sender, recipient}
        return None if revoked or (sender, recipient) in self.cut else self.receivers.get(recipient)


class MemoryTransport:
    """One peer's end of a network in memory; makes the same calls as the real transport."""

    expires = None

    def __init__(self, network: MemoryNetwork, me: int) -> None:
        self.network, self.me = network, me
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    async def start(self, receiver: Receiver) -> None:
        self.network.receivers[self.me] = receiver

    def add_members(self, names: Mapping[str, int], addresses: Mapping[int, str]) -> None:
        """Nothing to do: a network in memory has no list of members."""

    def revoked(self) -> frozenset[int]:
        return self.network.revoked

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        async with _until(deadline, header.recipient):
            while True:
                receiver = self.network.find(self.me, header.recipient)
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
                receiver = self.network.find(self.me, peer)
                if receiver is not None:
                    return await receiver.answer(question, self.me)
                await asyncio.sleep(RETRY_DELAY)

    async def ask_status(self, peer: int, deadline: float, about: str = "") -> bytes:
        receiver = self.network.find(self.me, peer)
        if receiver is None:
            raise Unreachable(f"node {peer} could not be reached")
        return await (receiver.report_of(about) if about else receiver.report())

    def reachable(self, peer: int) -> bool:
        return self.network.find(self.me, peer) is not None

    def failure(self, peer: int, since: float) -> str | None:
        return None if self.reachable(peer) else "the cable is cut"

    def release(self, peer: int) -> None:
        """Nothing to do: a network in memory has no connections."""

    async def stop(self) -> None:
        self.network.receivers.pop(self.me, None)


@asynccontextmanager
async def _until(seconds: float, peer: int) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Unreachable(f"node {peer} could not be reached within {seconds:g} s") from None
