"""The model of one peer for others who missed rounds and have none of their own any more."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peerage.engine.router import Packet
from peerage.net.peer.assembler import PartialMessage
from peerage.net.wire.header import Header, MessagePolicy, Rejected, header_bytes, parse_header
from peerage.net.wire.payload import decode, encode
from peerage.net.wire.transport import ANSWER_LIMIT, QUERY_TIMEOUT, Transport, Unreachable

OFFERED = 2  # models that are held for those who are in the middle of fetching them


class ModelServer:
    """What a peer has to offer: the model after its last round, written down when asked for."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._newest: tuple[Packet, int] | None = None
        self._written: dict[int, tuple[Header, memoryview]] = {}  # by checksum

    def keep(self, packet: Packet, round: int) -> None:
        self._newest = packet, round

    def answer(self, asked: Mapping[str, Any], identity: int) -> bytes | None:
        """None if it is no question about a model, or there is none."""
        if asked.get("ask") == "model" and self._newest is not None:
            return header_bytes(replace(self._current(), recipient=identity))
        written = self._written.get(asked["of"]) if type(asked.get("of")) is int else None
        offset = asked.get("offset")
        if asked.get("ask") == "piece" and written and type(offset) is int and offset >= 0:
            return bytes(written[1][offset : offset + ANSWER_LIMIT])
        return None

    def _current(self) -> Header:
        assert self._newest is not None
        packet, round = self._newest
        known = next((h for h, _ in self._written.values() if h.round == round), None)
        if known is not None:
            return known
        header, payload = encode(packet, run=self.run, round=round, recipient=0, sequence=0)
        while len(self._written) >= OFFERED:
            del self._written[next(iter(self._written))]
        self._written[header.checksum] = header, payload
        return header


async def download_model(
    transport: Transport, peer: int, expected: MessagePolicy, seconds: float
) -> Packet:
    """The model that a peer had after its last round, piece by piece."""

    async def ask(**question: Any) -> bytes:
        return await transport.ask(peer, json.dumps(question).encode(), QUERY_TIMEOUT)

    try:
        async with asyncio.timeout(seconds):
            header = parse_header(await ask(ask="model"), expected, peer)
            incoming = PartialMessage(header)
            while incoming.here < header.size:
                piece = await ask(ask="piece", of=header.checksum, offset=incoming.here)
                if len(piece) != min(ANSWER_LIMIT, header.size - incoming.here):
                    raise Rejected("truncated", f"a piece of {len(piece)} bytes")
                incoming.add(piece)
    except TimeoutError:
        raise Unreachable(f"it took longer than {seconds:g} s") from None
    packet = decode(header, incoming.data, expected, incoming.checksum)
    if not {"x", "b"} <= packet.payload.keys():
        raise Rejected("name", "the model has no parameters")
    return packet
