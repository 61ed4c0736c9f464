"""What others send to one peer, from the first byte of a header until it lies in the mailbox."""

import asyncio
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any
from zlib import crc32

import torch

from peerage.engine.router import Packet
from peerage.net.peer.mailbox import Mailbox
from peerage.net.wire.header import DONE, Header, MessagePolicy, Rejected, parse_header
from peerage.net.wire.payload import decode

PARTIAL = 1 << 28  # bytes of messages that are on their way in, unless a single one has more
IDLE = 5.0  # seconds after which a transfer that nobody goes on with has to make room


class PartialMessage:
    """A payload of which some bytes are here; its checksum grows with it."""

    def __init__(self, header: Header) -> None:
        self.header, self.here = header, 0
        buffer: Any = torch.empty(header.size, dtype=torch.uint8).numpy()  # of exactly this size
        self.data = memoryview(buffer)
        self.checksum = 0
        self.touched = monotonic()

    def add(self, data: bytes) -> None:
        self.data[self.here : self.here + len(data)] = data
        self.checksum = crc32(data, self.checksum)
        self.here += len(data)
        self.touched = monotonic()


class MessageAssembler:
    """Takes messages in bounded memory: from every sender one at a time, as they are sent so."""

    def __init__(
        self,
        expected: MessagePolicy,
        mailbox: Mailbox,
        counters: Counter[str],
        hear: Callable[[int, int], None],
    ) -> None:
        self.expected, self.mailbox, self.counters = expected, mailbox, counters
        self.hear = hear  # told who speaks, and of which round
        self.blocked_peers: dict[int, str] = {}  # sender -> why nothing of it is taken any more
        self._incoming: dict[int, PartialMessage] = {}  # by sender
        self._room = max(PARTIAL, 2 * expected.max_bytes)
        self._reading = asyncio.Lock()  # what is unpacked takes memory as well

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        try:
            if identity in self.blocked_peers:
                raise Rejected(
                    "sender", f"node {identity} is not heard: {self.blocked_peers[identity]}"
                )
            header = parse_header(raw, self.expected, identity)
            self.hear(identity, header.round)
            self.mailbox.check(header)
            return header, 0 if header.kind == DONE else self._known(header).here
        except Rejected as refusal:
            self.counters[refusal.reason] += 1
            raise

    def _known(self, header: Header) -> PartialMessage:
        known = self._incoming.get(header.sender)
        if known is None or known.header != header:
            self._incoming.pop(header.sender, None)
            self._make_room(header.size)
            known = self._incoming[header.sender] = PartialMessage(header)
        return known

    def _make_room(self, size: int) -> None:
        """Transfers that nobody went on with go first; those that move are not disturbed."""
        held = sum(incoming.header.size for incoming in self._incoming.values())
        idle = monotonic() - IDLE
        for sender, incoming in list(self._incoming.items()):
            if held + size <= self._room:
                return
            if incoming.touched < idle:
                held -= incoming.header.size
                del self._incoming[sender]
        if held + size > self._room:
            raise Rejected("full", f"{held} bytes are on their way in already")

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        known = self._incoming.get(header.sender)
        if known is None or known.header != header:
            raise self._refuse("full", "what was here of the message had to make room for others")
        if offset != known.here:
            raise self._refuse("truncated", f"bytes from {offset} on do not continue what is here")
        if offset + len(data) > header.size:
            raise self._refuse(
                "oversized", f"more bytes than the {header.size} that were announced"
            )
        known.add(data)

    async def complete(self, header: Header) -> None:
        try:
            self.mailbox.put(header, await self._parcel(header))
        except Rejected as refusal:
            self.counters[refusal.reason] += 1
            raise

    async def _parcel(self, header: Header) -> Packet | None:
        if header.kind == DONE:
            return None
        known = self._incoming.get(header.sender)
        if known is None or known.header != header:
            raise Rejected("full", "what was here of the message had to make room for others")
        del self._incoming[header.sender]
        if known.here < header.size:
            raise Rejected("truncated", f"{known.here} bytes came instead of {header.size}")
        async with self._reading:  # beside the event loop, which a large message would hold up
            return await asyncio.to_thread(
                decode, header, known.data, self.expected, known.checksum
            )

    def _refuse(self, reason: str, text: str) -> Rejected:
        self.counters[reason] += 1
        return Rejected(reason, text)
