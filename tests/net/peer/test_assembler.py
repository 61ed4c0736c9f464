"""Messages in chunks: how they are assembled, in bounded memory, and what is rejected."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerage.engine.router import Packet
from peerage.net.peer import assembler
from peerage.net.peer.assembler import IDLE_TIMEOUT, MessageAssembler
from peerage.net.peer.mailbox import Mailbox
from peerage.net.wire.header import Header, MessagePolicy, Rejected, done, header_bytes
from peerage.net.wire.payload import encode
from peerage.requests import Envelope, TensorSpec

ME = 0
NUMBERS = torch.linspace(-1, 1, 100)


def message(sender: int, round: int = 0, sequence: int = 0) -> tuple[Header, bytes]:
    packet = Packet(Envelope(sender, 10, 2, "net", sequence), (ME,), {"x": NUMBERS + sender}, 400)
    header, payload = encode(packet, run="demo", round=round, recipient=ME, sequence=sequence)
    return header, bytes(payload)


SIZE = message(1)[0].size
EXPECTED = MessagePolicy(
    "demo", ME, frozenset(range(8)), {"net": {"x": TensorSpec((100,))}}, max_bytes=SIZE
)


class Receiver:
    """A message assembler in round 0, and the headers that it reports."""

    def __init__(self, expected: MessagePolicy = EXPECTED) -> None:
        self.counters: Counter[str] = Counter()
        self.mailbox = Mailbox(counters=self.counters)
        self.mailbox.begin_round(0)
        self.headers: list[tuple[int, int]] = []
        self.assembler = MessageAssembler(expected, self.mailbox, self.counters, self.on_header)

    def on_header(self, header: Header) -> None:
        self.headers.append((header.sender, header.round))

    def accept(self, header: Header) -> int:
        """How many bytes of the message are here."""
        known, here = self.assembler.accept(header_bytes(header), header.sender)
        assert known == header
        return here

    def complete(self, header: Header) -> None:
        asyncio.run(self.assembler.complete(header))

    def rejection(self, act: Callable[..., Any], *arguments: Any) -> str:
        """The reason, which is counted once."""
        before = Counter(self.counters)
        with pytest.raises(Rejected) as caught:
            act(*arguments)
        assert self.counters - before == {caught.value.reason: 1}
        return caught.value.reason

    @property
    def held(self) -> int:
        """Bytes of messages that are on their way in."""
        return sum(incoming.header.size for incoming in self.assembler._incoming.values())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in a list of one."""
    now = [1000.0]
    monkeypatch.setattr(assembler, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    """With room for two messages."""
    monkeypatch.setattr(assembler, "PARTIAL_BYTES", 0)
    return Receiver()


# Put together


@given(st.lists(st.integers(1, SIZE - 1), max_size=6, unique=True))
def test_a_message_in_any_pieces_arrives_whole(cuts):
    receiver, (header, payload) = Receiver(), message(1)
    assert receiver.accept(header) == 0
    edges = [0, *sorted(cuts), SIZE]
    for begin, end in pairwise(edges):
        receiver.assembler.chunk(header, begin, payload[begin:end])
    receiver.complete(header)
    [packet] = receiver.mailbox.take([1]).values()
    assert torch.equal(packet.payload["x"], NUMBERS + 1)
    assert receiver.held == 0
    assert not receiver.counters


def test_an_interrupted_transfer_goes_on_where_it_was(receiver):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload[:100])
    assert receiver.accept(header) == 100
    receiver.assembler.chunk(header, 100, payload[100:])
    receiver.complete(header)
    assert receiver.mailbox.take([1]).keys() == {1}


def test_senders_do_not_disturb_each_other(receiver):
    messages = [message(1), message(2)]
    for header, _ in messages:
        receiver.accept(header)
    for begin in range(0, SIZE, 50):
        for header, payload in messages:
            receiver.assembler.chunk(header, begin, payload[begin : begin + 50])
    for header, _ in messages:
        receiver.complete(header)
    found = receiver.mailbox.take([1, 2])
    assert [float(found[sender].payload["x"][0]) for sender in (1, 2)] == [0.0, 1.0]


def test_the_header_that_a_sender_is_done_takes_no_memory(receiver):
    done_header = done(run="demo", round=0, sender=1, recipient=ME, sent=0)
    assert receiver.accept(done_header) == 0
    assert receiver.held == 0
    receiver.complete(done_header)
    assert receiver.mailbox.pending([1]) == []


# Pieces that do not fit


@pytest.mark.parametrize("offset", [0, 99, 101, SIZE, -1])
def test_pieces_come_in_order(receiver, offset):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload[:100])
    assert receiver.rejection(receiver.assembler.chunk, header, offset, payload[:1]) == "truncated"
    assert receiver.accept(header) == 100  # what was here still is


def test_more_bytes_than_announced_are_rejected(receiver):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload[:-1])
    assert receiver.rejection(receiver.assembler.chunk, header, SIZE - 1, b"ab") == "oversized"
    assert receiver.accept(header) == SIZE - 1
    receiver.assembler.chunk(header, SIZE - 1, payload[-1:])
    receiver.complete(header)
    assert receiver.mailbox.take([1]).keys() == {1}


def test_a_message_that_ends_too_early_is_dropped(receiver):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload[:-1])
    assert receiver.rejection(receiver.complete, header) == "truncated"
    assert receiver.held == 0
    assert receiver.accept(header) == 0  # it can be sent again, from the beginning


def test_a_message_that_was_changed_on_its_way_is_dropped(receiver):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload[:-1] + bytes([payload[-1] ^ 1]))
    assert receiver.rejection(receiver.complete, header) == "checksum"
    assert receiver.held == 0
    assert receiver.mailbox.pending([1]) == [1]


def test_a_payload_larger_than_any_message_is_rejected_before_it_comes(receiver):
    header, _ = message(1)
    assert receiver.rejection(receiver.accept, replace(header, size=SIZE + 1)) == "oversized"
    assert (receiver.held, receiver.headers) == (0, [])


def test_bytes_without_a_header_are_rejected(receiver):
    header, payload = message(1)
    assert receiver.rejection(receiver.assembler.chunk, header, 0, payload) == "full"
    assert receiver.rejection(receiver.complete, header) == "full"


# A transfer that is replaced


def test_another_message_of_the_sender_replaces_the_one_that_was_coming(receiver):
    (old, payload), (new, _) = message(1), message(1, sequence=1)
    receiver.accept(old)
    receiver.assembler.chunk(old, 0, payload[:100])
    assert receiver.accept(new) == 0
    assert receiver.held == SIZE  # of one, not of two
    assert receiver.rejection(receiver.assembler.chunk, old, 100, payload[100:]) == "full"
    assert receiver.rejection(receiver.complete, old) == "full"
    assert receiver.accept(old) == 0  # from the beginning


def test_a_message_that_is_replaced_makes_room_for_the_next(receiver, clock):
    for sender in (1, 2):
        receiver.accept(message(sender)[0])
    assert receiver.accept(message(1, sequence=1)[0]) == 0
    assert receiver.held == 2 * SIZE


# Bounded memory


def test_there_is_room_for_two_messages(receiver, clock):
    for sender in (1, 2):
        receiver.accept(message(sender)[0])
    assert receiver.rejection(receiver.accept, message(3)[0]) == "full"
    assert receiver.held == 2 * SIZE
    assert receiver.accept(message(1)[0]) == 0  # those that are coming are not disturbed


def test_room_is_free_again_when_a_message_is_complete(receiver, clock):
    for sender in (1, 2):
        receiver.accept(message(sender)[0])
    header, payload = message(1)
    receiver.assembler.chunk(header, 0, payload)
    receiver.complete(header)
    assert receiver.accept(message(3)[0]) == 0


def test_a_transfer_that_stands_still_makes_room(receiver, clock):
    for sender in (1, 2):
        receiver.accept(message(sender)[0])
    clock[0] += IDLE_TIMEOUT
    moving, payload = message(2)
    receiver.assembler.chunk(moving, 0, payload[:10])
    assert receiver.rejection(receiver.accept, message(3)[0]) == "full"  # just not yet
    clock[0] += 0.1
    assert receiver.accept(message(3)[0]) == 0
    assert receiver.accept(moving) == 10
    idle, _ = message(1)
    assert receiver.rejection(receiver.assembler.chunk, idle, 0, payload[:1]) == "full"


def test_idle_transfers_stay_while_there_is_room(receiver, clock):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload[:100])
    clock[0] += 100 * IDLE_TIMEOUT
    receiver.accept(message(2)[0])
    assert receiver.accept(header) == 100


steps = st.lists(
    st.tuples(st.integers(1, 7), st.integers(0, 2), st.sampled_from(["accept", "chunk", "wait"])),
    max_size=60,
)


@given(steps)
def test_whatever_senders_do_memory_is_bounded(steps):
    """Seven senders with three messages each, and room for two."""
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembler, "PARTIAL_BYTES", 0)
        patch.setattr(assembler, "monotonic", lambda: now[0])
        receiver = Receiver()
        for sender, sequence, act in steps:
            header, payload = message(sender, sequence=sequence)
            with suppress(Rejected):
                if act == "accept":
                    receiver.accept(header)
                elif act == "chunk":
                    receiver.assembler.chunk(header, 0, payload[:10])
                else:
                    now[0] += 2.0
            assert receiver.counters.keys() <= {"full", "truncated"}
            assert receiver.held <= 2 * SIZE
            assert len(receiver.assembler._incoming) <= 2


# Which headers are reported


def test_messages_of_a_blocked_sender_are_rejected(receiver):
    receiver.assembler.blocked_peers[1] = "its messages made rounds fail here"
    header, _ = message(1)
    with pytest.raises(Rejected, match="node 1 is blocked: its messages made rounds fail here"):
        receiver.accept(header)
    assert receiver.counters == {"sender": 1}
    assert (receiver.headers, receiver.held) == ([], 0)
    assert receiver.accept(message(2)[0]) == 0


def test_a_valid_header_is_reported_even_if_its_message_is_useless(receiver):
    receiver.mailbox.begin_round(5)
    assert receiver.rejection(receiver.accept, message(1, round=4)[0]) == "late"
    assert receiver.rejection(receiver.accept, message(2, round=9)[0]) == "early"
    assert receiver.accept(message(3, round=6)[0]) == 0
    assert receiver.headers == [(1, 4), (2, 9), (3, 6)]
    assert receiver.held == SIZE


def test_a_header_of_another_sender_is_not_reported(receiver):
    raw = header_bytes(message(1)[0])
    assert receiver.rejection(receiver.assembler.accept, raw, 2) == "sender"
    assert receiver.headers == []


def test_a_message_may_be_late_when_it_is_complete(receiver):
    header, payload = message(1)
    receiver.accept(header)
    receiver.assembler.chunk(header, 0, payload)
    receiver.mailbox.begin_round(1)
    assert receiver.rejection(receiver.complete, header) == "late"
    assert (receiver.held, receiver.mailbox.bytes) == (0, 0)
