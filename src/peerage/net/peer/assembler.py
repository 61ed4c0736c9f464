"""Reassembles incoming messages from chunks, and puts them into the mailbox."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from zlib import crc32

import torch

from peerage.engine.router import Packet
from peerage.net.peer.mailbox import Mailbox
from peerage.net.wire.header import DONE, Header, MessagePolicy, Rejected, parse_header
from peerage.net.wire.payload import decode

PARTIAL_BYTES = 1 << 28  # bytes of partial messages; more if two of the largest need it
IDLE_TIMEOUT = 5.0  # seconds without a chunk, after which a transfer may be dropped


class PartialMessage:
    """A payload of which some bytes have arrived, and their checksum."""

    def __init__(self, header: Header) -> None:
        self.header, self.here = header, 0
        self.data = torch.empty(header.size, dtype=torch.uint8).numpy().data  # of exactly this size
        self.checksum = 0
        self.touched = monotonic()

    def add(self, data: bytes) -> None:
        self.data[self.here : self.here + len(data)] = data
        self.checksum = crc32(data, self.checksum)
        self.here += len(data)
        self.touched = monotonic()


class MessageAssembler:
    """Assembles messages in bounded memory, one at a time from every sender."""

    def __init__(
        self,
        expected: MessagePolicy,
        mailbox: Mailbox,
        counters: Counter[str],
        on_header: Callable[[Header], None],
    ) -> None:
        self.mailbox, self.counters = mailbox, counters
        self.expect(expected)
        self.on_header = on_header  # called with every valid header
        self.blocked_peers: dict[int, str] = {}  # sender -> why its messages are rejected
        self._incoming: dict[int, PartialMessage] = {}  # by sender
        self._room = max(PARTIAL_BYTES, 2 * expected.max_bytes)
        self._reading = asyncio.Lock()  # one at a time, as unpacking takes memory as well

    def expect(self, policy: MessagePolicy, first: int | None = None) -> None:
        """Accept messages of this policy; with `first`, only from that round on.

        A revision of the network file may bring more members, and so larger tensors. Some peers
        send them when this one is still in an earlier round.
        """
        self._newest, self._first = policy, first
        if first is None:
            self._present = policy

    def _policy(self, round: int) -> MessagePolicy:
        return self._present if self._first is None or round < self._first else self._newest

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        with self._counted():
            if identity in self.blocked_peers:
                raise Rejected(
                    "sender", f"node {identity} is blocked: {self.blocked_peers[identity]}"
                )
            header = parse_header(raw, self._newest, identity)
            self.on_header(header)
            self.mailbox.check(header)
            return header, 0 if header.kind == DONE else self._partial_message(header).here

    def _partial_message(self, header: Header) -> PartialMessage:
        known = self._incoming.get(header.sender)
        if known is None or known.header != header:
            self._incoming.pop(header.sender, None)
            self._make_room(header.size)
            known = self._incoming[header.sender] = PartialMessage(header)
        return known

    def _make_room(self, size: int) -> None:
        """Drop idle transfers until `size` bytes fit; active ones are never dropped."""
        held = sum(incoming.header.size for incoming in self._incoming.values())
        idle = monotonic() - IDLE_TIMEOUT
        for sender, incoming in list(self._incoming.items()):
            if held + size <= self._room:
                return
            if incoming.touched < idle:
                held -= incoming.header.size
                del self._incoming[sender]
        if held + size > self._room:
            raise Rejected("full", f"{held} bytes of other messages are arriving")

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        with self._counted():
            known = self._known(header)
            if offset != known.here:
                raise Rejected("truncated", f"expected the chunk at {known.here}, got {offset}")
            if offset + len(data) > header.size:
                raise Rejected("oversized", f"more bytes than the {header.size} of the header")
            known.add(data)

    async def complete(self, header: Header) -> None:
        with self._counted():
            self.mailbox.put(header, await self._decode_packet(header))

    async def _decode_packet(self, header: Header) -> Packet | None:
        if header.kind == DONE:
            return None
        known = self._known(header)
        del self._incoming[header.sender]
        if known.here < header.size:
            raise Rejected("truncated", f"expected {header.size} bytes, got {known.here}")
        async with self._reading:  # in a thread, as a large message would block the event loop
            return await asyncio.to_thread(
                decode, header, known.data, self._policy(header.round), known.checksum
            )

    def _known(self, header: Header) -> PartialMessage:
        known = self._incoming.get(header.sender)
        if known is None or known.header != header:
            raise Rejected("full", "the partial message was dropped to make room for others")
        return known

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except Rejected as rejection:
            self.counters[rejection.reason] += 1
            raise
