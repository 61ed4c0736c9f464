"""A running peer under attack: mutated messages from members with a valid certificate."""

import asyncio
import os
import random
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from support.hostile import mutations
from support.networking import BROKEN, QUICK, InMemory, network_of, one_thread

from peerage import DecHW
from peerage.engine.prepare import prepare
from peerage.engine.router import Packet
from peerage.net.peer.network import Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.wire.header import REASONS, RETRYABLE_REASONS, Rejected, header_bytes
from peerage.net.wire.payload import encode
from peerage.net.wire.transport import CHUNK, Receiver
from peerage.requests import Envelope
from peerage.testing import toy

BUDGET = int(os.environ.get("PEERAGE_FUZZ", "5000"))  # messages; 100 000 take some minutes
GROWTH = 50 << 20  # bytes of memory


async def deliver(receiver: Receiver, raw: bytes, payload: bytes, identity: int) -> str:
    """As a transport does; the reason of a rejection, or nothing."""
    try:
        header, offset = receiver.accept(raw, identity)
        while offset < min(len(payload), header.size + 1):
            receiver.chunk(header, offset, payload[offset : offset + CHUNK])
            offset += CHUNK
        await receiver.complete(header)
    except Rejected as refusal:
        return refusal.reason
    return ""


def valid(peer: Peer, sender: int, round: int, sequence: int) -> tuple[bytes, bytes]:
    node = peer.shard.members[peer.me].node
    curvature = node.params.abs() / node.params.norm()  # DecHW bounds its norm by 1
    payload = {"x": node.params, "b": node.buffers, "h": curvature}
    packet = Packet(Envelope(sender, 10, 2, node.architecture, 0), (peer.me,), payload, 0)
    header, data = encode(packet, run="test", round=round, recipient=peer.me, sequence=sequence)
    return header_bytes(header), bytes(data)


@pytest.mark.slow
def test_an_attacked_peer_keeps_running():
    """Node 1 waits for node 0, which sends only mutations; node 2 is honest."""
    experiment = toy(DecHW(), nodes=3, partition="iid", rounds=2)
    timeouts = Timeouts(start=0.2, message=10 * BROKEN, idle=1.0)

    async def together() -> tuple[Peer, dict[str, int], int, int]:
        transports, network = InMemory(), network_of(experiment, timeouts=timeouts)
        with ThreadPoolExecutor(1) as executor:
            peer = Peer(network, 1, prepare(experiment), transports(network, 1), executor=executor)
            for other in (0, 2):  # somebody is there, and says nothing by himself
                transports.memory.receivers[other] = peer
            task = asyncio.create_task(peer.run())
            while peer.state != "running":
                await asyncio.sleep(0.01)
            rng = random.Random(7)
            raw, payload = valid(peer, 0, 0, 0)
            found: dict[str, int] = {}
            kinds = mutations(rng, raw, payload)
            process = psutil.Process()
            before, accepted = 0, 0
            for count in range(BUDGET):
                if count == BUDGET // 5:
                    before = process.memory_info().rss
                mutated = next(kinds)
                reason = await deliver(peer, mutated.header, mutated.payload, 0)
                found[reason] = found.get(reason, 0) + 1
                if not reason:  # its place is taken: the next ones are for another
                    accepted += 1
                    kinds = mutations(rng, *valid(peer, 0, 0, accepted))
                if count % 50 == 0:
                    await asyncio.sleep(0)
            grown = process.memory_info().rss - before
            for round in range(2):  # and now what it was waiting for
                for sender in (0, 2):
                    message = valid(peer, sender, round, 0)
                    while (
                        await deliver(peer, *message, sender) in RETRYABLE_REASONS
                    ):  # as senders do
                        await asyncio.sleep(0.01)
            async with asyncio.timeout(BROKEN):
                await task
        return peer, found, grown, accepted

    with one_thread():
        peer, found, grown, accepted = asyncio.run(together())
    assert peer.rows[-1]["round"] == 2
    assert torch.isfinite(peer.shard.members[1].node.params).all()
    assert set(found) - {""} <= set(REASONS)
    assert len(set(found) - {""}) >= 8
    refused = sum(count for reason, count in found.items() if reason)
    assert sum(peer.counters[reason] for reason in REASONS) >= refused
    assert accepted <= BUDGET // 10  # a mutation may change nothing that counts
    assert grown < GROWTH


@pytest.mark.parametrize(
    "question", [b"", b"[]", b"null", b"{", b'{"ask": 3}', b'"' * 9999, b"\xff"]
)
def test_odd_questions_are_rejected(question):
    experiment = toy(DecHW(), nodes=3, partition="iid", rounds=1)

    async def ask() -> Peer:
        network = network_of(experiment, timeouts=QUICK)
        peer = Peer(network, 1, prepare(experiment), InMemory()(network, 1))
        with pytest.raises(Rejected) as caught:
            await peer.answer(question, 0)
        assert caught.value.reason == "malformed"
        return peer

    assert asyncio.run(ask()).counters["malformed"] == 1
