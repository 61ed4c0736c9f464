"""Transfers models outside of rounds.

A peer offers its model to others that missed rounds. A hub that keeps the only model offers it to
its clients at the end, and waits until they have it.
"""

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peerage.engine.router import Packet
from peerage.net.peer.assembler import PartialMessage
from peerage.net.peer.peer_tracker import POLL_INTERVAL, PeerTracker
from peerage.net.peer.progress import State
from peerage.net.peer.recorder import PeerRecorder
from peerage.net.wire.header import Header, MessagePolicy, Rejected, header_bytes, parse_header
from peerage.net.wire.payload import decode, encode
from peerage.net.wire.transport import ANSWER_LIMIT, QUERY_TIMEOUT, Transport, Unreachable
from peerage.vectors import Weights

log = logging.getLogger("peerage.peer")

LEAST_FOR_MEDIAN = 3  # models; of fewer, a median would be that of a liar
MOST_OFFERS = 5  # models that a peer downloads before it continues
# A single model may differ from the own one by so many times the root mean square of the own
# entries, or of entries of 1 if they are smaller.
FARTHEST = 10.0
MAX_ENCODED = 2  # models kept in memory while other peers download them


class ModelServer:
    """Serves the model after the last round; it is encoded when another peer asks for it.

    With `for_clients`, this peer is a hub whose clients need the model at the end.
    """

    def __init__(self, run: str, for_clients: bool = False) -> None:
        self.run, self.for_clients = run, for_clients
        self._newest: tuple[Packet, int] | None = None
        self._encoded: dict[int, tuple[Header, memoryview]] = {}  # by checksum
        self.awaiting: set[int] = set()  # peers that will download the model of the last round

    def keep(self, packet: Packet, round: int) -> None:
        self._newest = packet, round

    def answer(self, asked: Mapping[str, Any], identity: int) -> bytes | None:
        """The answer; None if the question is not about a model, or there is no model."""
        if asked.get("ask") == "final model" and self.for_clients:
            self.awaiting.add(identity)
            return b"{}"
        if asked.get("ask") == "model" and self._newest is not None:
            return header_bytes(replace(self._current(), recipient=identity))
        encoded = self._encoded.get(asked["of"]) if type(asked.get("of")) is int else None
        offset = asked.get("offset")
        if asked.get("ask") == "piece" and encoded and type(offset) is int and offset >= 0:
            if offset + ANSWER_LIMIT >= len(encoded[1]):
                self.awaiting.discard(identity)
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

    async def wait_for_downloads(self, transport: Transport, seconds: float) -> None:
        """Wait until the peers that announced it have downloaded the model, or have left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(map(transport.reachable, self.awaiting)):
                    await asyncio.sleep(POLL_INTERVAL)


class ModelClient:
    """Keeps the model of a client whose hub has the only one."""

    def __init__(self, hub: int, recorder: PeerRecorder, transport: Transport) -> None:
        self.hub, self.recorder, self.transport = hub, recorder, transport

    def receive(self, packet: Packet, rounds: int) -> None:
        """Keep the model in a message, which is that after `rounds` rounds."""
        if self.recorder.models is not None and {"x", "b"} <= packet.payload.keys():
            model = Weights(packet.payload["x"], packet.payload["b"], packet.architecture)
            self.recorder.models.receive(model, rounds)

    async def announce(self) -> None:
        """Tell the hub before the last round that this peer will download its final model."""
        with suppress(Unreachable, Rejected):  # a hub of an earlier version does not wait
            question = json.dumps({"ask": "final model"}).encode()
            await self.transport.ask(self.hub, question, QUERY_TIMEOUT)

    async def fetch(self, tracker: PeerTracker, expected: MessagePolicy, seconds: float) -> None:
        """Download the model of the last round as soon as the hub has it, for the recorder."""
        await self.announce()  # again: a restarted hub has forgotten it
        while self.transport.reachable(self.hub):
            status = (await tracker.ask([self.hub])).get(self.hub)
            if status is not None and status.state == State.FINISHED:
                break
            if status is not None and not status.running:
                break
            await asyncio.sleep(POLL_INTERVAL)
        rounds = tracker.world.rounds
        try:
            packet = await download_model(self.transport, self.hub, expected, seconds)
        except (Unreachable, Rejected) as error:
            log.warning("cannot download the model of the hub after round %d: %s", rounds, error)
            return
        self.receive(packet, rounds)


def choose_model(
    own: Tensor, offers: Mapping[int, Packet]
) -> tuple[tuple[Tensor, Tensor] | None, list[int]]:
    """The parameters and statistics to continue with, and the peers that they come from.

    Of three models or more, this is the median of each entry, which a minority of liars cannot move
    beyond the values of the others. Of fewer, it is the one nearest to the own model, and none if
    that is farther away than `FARTHEST` allows.
    """
    if len(offers) >= LEAST_FOR_MEDIAN:
        x, b = (
            torch.stack([offer.payload[name] for offer in offers.values()]).median(0).values
            for name in ("x", "b")
        )
        return (x, b), sorted(offers)
    distances = {
        other: _root_mean_square(offer.payload["x"] - own) for other, offer in offers.items()
    }
    nearest = min(distances, key=lambda other: distances[other], default=None)
    if nearest is None or not distances[nearest] <= FARTHEST * max(_root_mean_square(own), 1.0):
        return None, []
    payload = offers[nearest].payload
    return (payload["x"], payload["b"]), [nearest]


def _root_mean_square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(max(x.numel(), 1))


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
