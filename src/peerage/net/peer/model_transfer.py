"""Offers the model of one peer to others that missed rounds."""

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

MAX_ENCODED = 2  # models kept in memory while other peers download them


class ModelServer:
    """Serves the model after the last round; it is encoded when another peer asks for it."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._newest: tuple[Packet, int] | None = None
        self._encoded: dict[int, tuple[Header, memoryview]] = {}  # by checksum

    def keep(self, packet: Packet, round: int) -> None:
        self._newest = packet, round

    def answer(self, asked: Mapping[str, Any], identity: int) -> bytes | None:
        """The answer; None if the question is not about a model, or there is no model."""
        if asked.get("ask") == "model" and self._newest is not None:
            return header_bytes(replace(self._current(), recipient=identity))
        encoded = self._encoded.get(asked["of"]) if type(asked.get("of")) is int else None
        offset = asked.get("offset")
        if asked.get("ask") == "piece" and encoded and type(offset) is int and offset >= 0:
            return bytes(encoded[1][offset : offset + ANSWER_LIMIT])
        return None

    def _current(self) -> Header:
        assert self._newest is not None
        packet, round = self._newest
        known = next((h for h, _ in self._encoded.values() if h.round == round), None)
        if known is not None:
            return known
        header, payload = encode(packet, run=self.run, round=round, recipient=0, sequence=0)
        while len(self._encoded) >= MAX_ENCODED:
            del self._encoded[next(iter(self._encoded))]
        self._encoded[header.checksum] = header, payload
        return header


async def download_model(
    transport: Transport, peer: int, expected: MessagePolicy, seconds: float
) -> Packet:
    """Download the model that a peer had after its last round."""

    async def ask(**question: Any) -> bytes:
        return await transport.ask(peer, json.dumps(question).encode(), QUERY_TIMEOUT)

    try:
        async with asyncio.timeout(seconds):
            header = parse_header(await ask(ask="model"), expected, peer)
            incoming = PartialMessage(header)
            while incoming.here < header.size:
                piece = await ask(ask="piece", of=header.checksum, offset=incoming.here)
                if len(piece) != min(ANSWER_LIMIT, header.size - incoming.here):
                    raise Rejected("truncated", f"unexpected piece of {len(piece)} bytes")
                incoming.add(piece)
    except TimeoutError:
        raise Unreachable(f"the download took longer than {seconds:g} s") from None
    packet = decode(header, incoming.data, expected, incoming.checksum)
    if not {"x", "b"} <= packet.payload.keys():
        raise Rejected("name", "the model has no parameters")
    return packet
