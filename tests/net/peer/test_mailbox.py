"""The mailbox: who gets what, what is late or comes twice, and how much is kept."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networking import BROKEN, run_skipping, skip

from peerage.engine.router import MessageRouter, Packet, ShardOutput
from peerage.errors import PeerageError
from peerage.graphs.faults import NoLinkFaults
from peerage.net.peer.mailbox import OVERHEAD, Mailbox
from peerage.net.wire.header import Header, Rejected, done
from peerage.requests import Envelope

ME = 0
LONG = 10 * BROKEN  # seconds that a test cannot wait: a deadline which no right program waits for


def header(sender: int, sequence: int, round: int = 0, size: int = 0) -> Header:
    return Header(
        run="demo",
        round=round,
        envelope=Envelope(sender, 1, 1, "net", sequence),
        recipient=ME,
        sequence=sequence,
        kind="data",
        wire="fp32",
        packed=False,
        size=size,
        checksum=0,
    )


def packet(sender: int, label: str, bytes: int = 0) -> Packet:
    return Packet(Envelope(sender, 1, 1, "net"), (ME,), {"label": label}, bytes)


def post(box: Mailbox, sender: int, sequence: int, round: int = 0, size: int = 0) -> None:
    box.put(header(sender, sequence, round, size), packet(sender, f"{round}.{sequence}", size))


def finish(box: Mailbox, sender: int, sent: int, round: int = 0) -> None:
    box.put(done(run="demo", round=round, sender=sender, recipient=ME, sent=sent), None)


def opened() -> Mailbox:
    box = Mailbox()
    box.begin_round(0)
    return box


def now() -> float:
    return asyncio.get_running_loop().time()


async def collect(
    box: Mailbox, *senders: int, round: int = 0, wait: float = LONG, worth: Any = list
) -> dict[int, str]:
    await box.wait(round, senders, now() + wait, worth)
    packets = box.take(senders) if round == box.round else {}
    return {sender: p.payload["label"] for sender, p in packets.items()}


def play(scene: Coroutine[Any, Any, None]) -> None:
    run_skipping(scene)


def reason(call: Any, *arguments: Any) -> str:
    with pytest.raises(Rejected) as caught:
        call(*arguments)
    return caught.value.reason


# Who gets what


def test_the_next_message_of_each_sender_in_their_order():
    async def scene() -> None:
        box = opened()
        for sender, sequence in ((3, 1), (1, 0), (3, 0), (2, 0)):
            post(box, sender, sequence)
        got = await collect(box, 3, 1)
        assert list(got.items()) == [(1, "0.0"), (3, "0.0")]
        assert await collect(box, 3) == {3: "0.1"}
        assert await collect(box, 2) == {2: "0.0"}
        assert await collect(box) == {}
        assert box.bytes == 0

    play(scene())


def test_it_waits_for_what_comes_later():
    async def scene() -> None:
        box = opened()
        task = asyncio.create_task(collect(box, 1, 2))
        for sender in (1, 2):
            await asyncio.sleep(0.01)
            assert not task.done()
            post(box, sender, 0)
        assert await task == {1: "0.0", 2: "0.0"}

    play(scene())


def test_those_who_are_done_are_not_waited_for():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0)
        finish(box, 1, 1)
        finish(box, 2, 0)
        assert await collect(box, 1, 2) == {1: "0.0"}
        assert await collect(box, 1, 2) == {}

    play(scene())


def test_what_is_not_here_when_the_sender_is_done_is_not_waited_for():
    """An outbox sends one message after the other: if the last word is here, the rest got lost."""

    async def scene() -> None:
        box = opened()
        task = asyncio.create_task(collect(box, 1))
        await asyncio.sleep(0.01)
        assert not task.done()
        post(box, 1, 1)
        await asyncio.sleep(0.01)
        assert not task.done()  # a message may be sent again
        finish(box, 1, 3)
        assert await task == {}
        assert reason(post, box, 1, 0) == "late"
        assert await collect(box, 1) == {1: "0.1"}
        assert (box.pending([1]), box.missing([1])) == ([], [1])  # the third one
        assert await collect(box, 1) == {}
        assert (box.pending([1]), box.missing([1])) == ([], [])  # there is no fourth

    play(scene())


def test_after_the_deadline_a_place_stays_empty():
    async def scene() -> None:
        box = opened()
        post(box, 2, 0)
        post(box, 1, 1)
        task = asyncio.create_task(collect(box, 1, 2))
        await asyncio.sleep(0.01)
        skip(0.5 * LONG)
        await asyncio.sleep(0.01)
        assert not task.done()
        skip(0.5 * LONG)
        assert await task == {2: "0.0"}
        assert reason(post, box, 1, 0) == "late"
        assert await collect(box, 1) == {1: "0.1"}
        assert reason(post, box, 1, 0) == "late"

    play(scene())


def test_what_is_here_is_taken_even_if_time_is_up():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0)
        assert await collect(box, 1, 2, wait=-1) == {1: "0.0"}

    play(scene())


def test_those_who_are_gone_are_not_waited_for_but_heard():
    async def scene() -> None:
        box, away = opened(), {2, 3}
        post(box, 3, 0)
        task = asyncio.create_task(collect(box, 1, 2, 3, worth=lambda senders: set(senders) - away))
        await asyncio.sleep(0.01)
        assert not task.done()
        away.add(1)  # nobody tells the mailbox
        assert await task == {3: "0.0"}

    play(scene())


def test_a_place_may_be_empty():
    async def scene() -> None:
        box = opened()
        box.put(header(1, 0), None)
        post(box, 1, 1)
        assert await collect(box, 1) == {}
        assert await collect(box, 1) == {1: "0.1"}

    play(scene())


def test_a_cancelled_wait_takes_nothing():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0)
        task = asyncio.create_task(collect(box, 1, 2))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        post(box, 2, 0)
        assert await collect(box, 1, 2) == {1: "0.0", 2: "0.0"}

    play(scene())


def test_a_skipped_message_is_not_waited_for():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0, size=10)
        for sender in (1, 2):
            box.take([sender])
        assert box.bytes == 0
        assert reason(post, box, 2, 0) == "late"
        for sender in (1, 2):
            post(box, sender, 1)
        assert await collect(box, 1, 2) == {1: "0.1", 2: "0.1"}

    play(scene())


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_with_nothing_lost_it_is_the_post_office(data):
    """Random exchanges of three senders with node 0: same parcels for every receive."""
    senders = (1, 2, 3)
    sent = {sender: data.draw(st.integers(0, 3)) for sender in senders}
    asked = data.draw(st.lists(st.sets(st.sampled_from(senders), min_size=1), max_size=5))
    arrivals = [(sender, sequence) for sender in senders for sequence in range(sent[sender])]
    order = data.draw(st.permutations(arrivals))

    office = MessageRouter(NoLinkFaults())
    office.accept(ShardOutput([packet(s, f"0.{p}") for s, p in arrivals], finished=list(senders)))
    expected = []
    for wanted in asked:
        office.accept(ShardOutput(waiting={ME: tuple(wanted)}))
        expected.append({p.sender: p.payload["label"] for p in office.deliver()[ME]})

    async def scene() -> None:
        box = opened()
        for sender, sequence in order:
            post(box, sender, sequence)
        for sender in senders:
            finish(box, sender, sent[sender])
        assert [await collect(box, *wanted) for wanted in asked] == expected

    play(scene())


@given(st.sets(st.integers(0, 5)), st.permutations(range(6)), st.integers(0, 6))
@settings(deadline=None, max_examples=60)
def test_the_kth_receive_gets_the_kth_message_or_nothing(lost, order, early):
    """Some are lost, and of the others `early` come in time; the rest come after all receives."""

    async def scene() -> None:
        box = opened()
        arriving = [sequence for sequence in order if sequence not in lost]
        for sequence in arriving[:early]:
            post(box, 1, sequence)
        here = set(arriving[:early])
        for sequence in range(6):
            expected = {1: f"0.{sequence}"} if sequence in here else {}
            assert await collect(box, 1, wait=0) == expected
        for sequence in arriving[early:]:
            assert reason(post, box, 1, sequence) == "late"
        for sequence in here:
            assert reason(post, box, 1, sequence) == "replayed"

    play(scene())


# What is refused


def test_rounds_that_are_over_or_too_far_away():
    box = Mailbox(ahead=2)
    box.begin_round(5)
    assert reason(box.check, header(1, 0, round=4)) == "late"
    assert reason(box.check, header(1, 0, round=8)) == "early"
    for round in (5, 6, 7):
        post(box, 1, 0, round)


def test_to_be_done_with_another_round_is_no_fault_and_means_nothing():
    async def scene() -> None:
        box = Mailbox(ahead=2)
        box.begin_round(5)
        finish(box, 1, 0, round=4)
        finish(box, 1, 0, round=8)
        assert not box.counters
        box.begin_round(8)
        post(box, 1, 0, round=8)
        assert await collect(box, 1, round=8) == {1: "8.0"}

    play(scene())


def test_before_the_first_round_comes_the_prelude():
    async def scene() -> None:
        box = Mailbox()
        post(box, 1, 0, round=-1)
        assert await collect(box, 1, round=-1) == {1: "-1.0"}

    play(scene())


def test_nothing_counts_twice():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0)
        assert reason(box.check, header(1, 0)) == "replayed"
        assert reason(post, box, 1, 0) == "replayed"
        await collect(box, 1)
        assert reason(post, box, 1, 0) == "replayed"
        finish(box, 1, 1)
        assert reason(finish, box, 1, 2) == "replayed"

    play(scene())


def test_nothing_comes_after_the_end():
    box = opened()
    finish(box, 1, 1)
    assert reason(post, box, 1, 1) == "malformed"
    post(box, 1, 0)
    post(box, 1, 0, round=1)


def test_a_new_round_drops_what_nobody_took():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0, size=100)
        post(box, 2, 0, size=100)
        post(box, 1, 0, round=1, size=50)
        finish(box, 2, 1)
        assert await collect(box, 1) == {1: "0.0"}
        box.begin_round(1)
        assert box.counters == {"late": 1}
        assert box.bytes == 50 + OVERHEAD
        box.begin_round(1)
        assert await collect(box, 1, round=1) == {1: "1.0"}

    play(scene())


def test_rounds_only_go_up_and_only_this_one_is_collected():
    async def scene() -> None:
        box = opened()
        box.begin_round(3)
        with pytest.raises(PeerageError, match="round 2 cannot follow round 3"):
            box.begin_round(2)
        with pytest.raises(PeerageError, match="the mailbox is in round 3, not in 4"):
            await collect(box, 1, round=4)

    play(scene())


def test_entering_another_round_ends_a_wait():
    async def scene() -> None:
        box = opened()
        post(box, 1, 0, size=10)
        task = asyncio.create_task(collect(box, 1, 2))
        await asyncio.sleep(0.01)
        box.begin_round(1)
        assert await task == {}
        assert box.bytes == 0

    play(scene())


# How much is kept


def test_one_sender_cannot_fill_the_mailbox():
    async def scene() -> None:
        box = Mailbox(share=2 * (1000 + OVERHEAD))
        box.begin_round(0)
        post(box, 1, 0, size=1000)
        post(box, 1, 0, round=1, size=1000)
        assert reason(box.check, header(1, 1, size=1000)) == "full"
        post(box, 2, 0, size=1000)
        assert await collect(box, 1) == {1: "0.0"}
        post(box, 1, 1, size=1000)

    play(scene())


def test_a_full_mailbox_keeps_the_sender_waiting():
    async def scene() -> None:
        box = Mailbox(max_bytes=3 * (1000 + OVERHEAD))
        box.begin_round(0)
        for sequence in range(3):
            post(box, 1, sequence, size=1000)
        assert reason(box.check, header(1, 3, size=1000)) == "full"
        assert reason(post, box, 2, 0, 1, 0) == "full"
        assert await collect(box, 1) == {1: "0.0"}
        post(box, 1, 3, size=1000)
        assert box.bytes == 3 * (1000 + OVERHEAD)
        finish(box, 1, 4)  # takes no room

    play(scene())


def test_messages_without_a_payload_are_not_free():
    box = Mailbox(max_bytes=10 * OVERHEAD)
    box.begin_round(0)
    for sequence in range(10):
        post(box, 1, sequence)
    assert reason(post, box, 1, 10) == "full"


def test_what_counts_is_the_size_in_memory():
    box = opened()
    box.put(header(1, 0, size=100), packet(1, "", bytes=200))
    assert box.bytes == 200 + OVERHEAD


def test_one_message_of_this_round_always_fits():
    async def scene() -> None:
        box = Mailbox(max_bytes=5000)
        box.begin_round(0)
        post(box, 1, 0, round=1, size=3500)
        assert reason(box.check, header(2, 0, round=2, size=3500)) == "full"
        post(box, 2, 0, size=10**6)
        assert reason(box.check, header(3, 0, size=10)) == "full"
        assert await collect(box, 2) == {2: "0.0"}
        post(box, 3, 0, size=10**6)

    play(scene())


def test_what_the_node_waits_for_always_fits():
    """Or a member could stop the others by filling the mailbox with messages of the future."""

    async def scene() -> None:
        box = Mailbox(max_bytes=5000)
        box.begin_round(0)
        post(box, 9, 0, round=1, size=3900)
        task = asyncio.create_task(collect(box, 1, 2, 3))
        await asyncio.sleep(0)
        for sender in (1, 2):
            post(box, sender, 0, size=10_000)
        assert reason(post, box, 2, 1) == "full"  # not the next
        assert reason(post, box, 4, 0) == "full"  # nobody waits for it
        post(box, 3, 0, size=10_000)
        assert await task == {1: "0.0", 2: "0.0", 3: "0.0"}
        assert reason(post, box, 9, 0, 2, 500) == "full"
        assert box.bytes == 3900 + OVERHEAD

    play(scene())
