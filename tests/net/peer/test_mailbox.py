"""The mailbox: which messages it returns, which are late or repeated, and how many it keeps."""

import asyncio
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


def deliver(mailbox: Mailbox, sender: int, sequence: int, round: int = 0, size: int = 0) -> None:
    mailbox.put(header(sender, sequence, round, size), packet(sender, f"{round}.{sequence}", size))


def finish(mailbox: Mailbox, sender: int, sent: int, round: int = 0) -> None:
    mailbox.put(done(run="demo", round=round, sender=sender, recipient=ME, sent=sent), None)


def opened() -> Mailbox:
    mailbox = Mailbox()
    mailbox.begin_round(0)
    return mailbox


def now() -> float:
    return asyncio.get_running_loop().time()


async def collect(
    mailbox: Mailbox, *senders: int, round: int = 0, wait: float = LONG, worth: Any = list
) -> dict[int, str]:
    await mailbox.wait(round, senders, now() + wait, worth)
    packets = mailbox.take(senders) if round == mailbox.round else {}
    return {sender: p.payload["label"] for sender, p in packets.items()}


def reason(call: Any, *arguments: Any) -> str:
    with pytest.raises(Rejected) as caught:
        call(*arguments)
    return caught.value.reason


# Which messages are returned


def test_the_next_message_of_each_sender_in_their_order():
    async def steps() -> None:
        mailbox = opened()
        for sender, sequence in ((3, 1), (1, 0), (3, 0), (2, 0)):
            deliver(mailbox, sender, sequence)
        got = await collect(mailbox, 3, 1)
        assert list(got.items()) == [(1, "0.0"), (3, "0.0")]
        assert await collect(mailbox, 3) == {3: "0.1"}
        assert await collect(mailbox, 2) == {2: "0.0"}
        assert await collect(mailbox) == {}
        assert mailbox.bytes == 0

    run_skipping(steps())


def test_it_waits_for_what_comes_later():
    async def steps() -> None:
        mailbox = opened()
        task = asyncio.create_task(collect(mailbox, 1, 2))
        for sender in (1, 2):
            await asyncio.sleep(0.01)
            assert not task.done()
            deliver(mailbox, sender, 0)
        assert await task == {1: "0.0", 2: "0.0"}

    run_skipping(steps())


def test_senders_that_are_done_are_not_waited_for():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0)
        finish(mailbox, 1, 1)
        finish(mailbox, 2, 0)
        assert await collect(mailbox, 1, 2) == {1: "0.0"}
        assert await collect(mailbox, 1, 2) == {}

    run_skipping(steps())


def test_what_is_not_here_when_the_sender_is_done_is_not_waited_for():
    """An outbox sends in order: if the done header is here, the rest was lost."""

    async def steps() -> None:
        mailbox = opened()
        task = asyncio.create_task(collect(mailbox, 1))
        await asyncio.sleep(0.01)
        assert not task.done()
        deliver(mailbox, 1, 1)
        await asyncio.sleep(0.01)
        assert not task.done()  # a message may be sent again
        finish(mailbox, 1, 3)
        assert await task == {}
        assert reason(deliver, mailbox, 1, 0) == "late"
        assert await collect(mailbox, 1) == {1: "0.1"}
        assert (mailbox.pending([1]), mailbox.missing([1])) == ([], [1])  # the third one
        assert await collect(mailbox, 1) == {}
        assert (mailbox.pending([1]), mailbox.missing([1])) == ([], [])  # there is no fourth

    run_skipping(steps())


def test_after_the_deadline_a_place_stays_empty():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 2, 0)
        deliver(mailbox, 1, 1)
        task = asyncio.create_task(collect(mailbox, 1, 2))
        await asyncio.sleep(0.01)
        skip(0.5 * LONG)
        await asyncio.sleep(0.01)
        assert not task.done()
        skip(0.5 * LONG)
        assert await task == {2: "0.0"}
        assert reason(deliver, mailbox, 1, 0) == "late"
        assert await collect(mailbox, 1) == {1: "0.1"}
        assert reason(deliver, mailbox, 1, 0) == "late"

    run_skipping(steps())


def test_what_is_here_is_taken_even_if_time_is_up():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0)
        assert await collect(mailbox, 1, 2, wait=-1) == {1: "0.0"}

    run_skipping(steps())


def test_messages_of_senders_that_left_are_used_but_not_waited_for():
    async def steps() -> None:
        mailbox, away = opened(), {2, 3}
        deliver(mailbox, 3, 0)
        task = asyncio.create_task(
            collect(mailbox, 1, 2, 3, worth=lambda senders: set(senders) - away)
        )
        await asyncio.sleep(0.01)
        assert not task.done()
        away.add(1)  # the mailbox is not informed
        assert await task == {3: "0.0"}

    run_skipping(steps())


def test_a_place_may_be_empty():
    async def steps() -> None:
        mailbox = opened()
        mailbox.put(header(1, 0), None)
        deliver(mailbox, 1, 1)
        assert await collect(mailbox, 1) == {}
        assert await collect(mailbox, 1) == {1: "0.1"}

    run_skipping(steps())


def test_a_cancelled_wait_takes_nothing():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0)
        task = asyncio.create_task(collect(mailbox, 1, 2))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        deliver(mailbox, 2, 0)
        assert await collect(mailbox, 1, 2) == {1: "0.0", 2: "0.0"}

    run_skipping(steps())


def test_a_skipped_message_is_not_waited_for():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0, size=10)
        for sender in (1, 2):
            mailbox.take([sender])
        assert mailbox.bytes == 0
        assert reason(deliver, mailbox, 2, 0) == "late"
        for sender in (1, 2):
            deliver(mailbox, sender, 1)
        assert await collect(mailbox, 1, 2) == {1: "0.1", 2: "0.1"}

    run_skipping(steps())


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_without_losses_it_delivers_like_the_message_router(data):
    """Random exchanges of three senders with node 0: the same packets for every receive."""
    senders = (1, 2, 3)
    sent = {sender: data.draw(st.integers(0, 3)) for sender in senders}
    asked = data.draw(st.lists(st.sets(st.sampled_from(senders), min_size=1), max_size=5))
    arrivals = [(sender, sequence) for sender in senders for sequence in range(sent[sender])]
    order = data.draw(st.permutations(arrivals))

    router = MessageRouter(NoLinkFaults())
    router.accept(ShardOutput([packet(s, f"0.{p}") for s, p in arrivals], finished=list(senders)))
    expected = []
    for wanted in asked:
        router.accept(ShardOutput(waiting={ME: tuple(wanted)}))
        expected.append({p.sender: p.payload["label"] for p in router.deliver()[ME]})

    async def steps() -> None:
        mailbox = opened()
        for sender, sequence in order:
            deliver(mailbox, sender, sequence)
        for sender in senders:
            finish(mailbox, sender, sent[sender])
        assert [await collect(mailbox, *wanted) for wanted in asked] == expected

    run_skipping(steps())


@given(st.sets(st.integers(0, 5)), st.permutations(range(6)), st.integers(0, 6))
@settings(deadline=None, max_examples=60)
def test_the_kth_receive_gets_the_kth_message_or_nothing(lost, order, early):
    """Some are lost, and of the others `early` come in time; the rest come after all receives."""

    async def steps() -> None:
        mailbox = opened()
        arriving = [sequence for sequence in order if sequence not in lost]
        for sequence in arriving[:early]:
            deliver(mailbox, 1, sequence)
        here = set(arriving[:early])
        for sequence in range(6):
            expected = {1: f"0.{sequence}"} if sequence in here else {}
            assert await collect(mailbox, 1, wait=0) == expected
        for sequence in arriving[early:]:
            assert reason(deliver, mailbox, 1, sequence) == "late"
        for sequence in here:
            assert reason(deliver, mailbox, 1, sequence) == "replayed"

    run_skipping(steps())


# What is rejected


def test_rounds_that_are_over_or_too_far_away():
    mailbox = Mailbox(ahead=2)
    mailbox.begin_round(5)
    assert reason(mailbox.check, header(1, 0, round=4)) == "late"
    assert reason(mailbox.check, header(1, 0, round=8)) == "early"
    for round in (5, 6, 7):
        deliver(mailbox, 1, 0, round)


def test_to_be_done_with_another_round_is_no_fault_and_means_nothing():
    async def steps() -> None:
        mailbox = Mailbox(ahead=2)
        mailbox.begin_round(5)
        finish(mailbox, 1, 0, round=4)
        finish(mailbox, 1, 0, round=8)
        assert not mailbox.counters
        mailbox.begin_round(8)
        deliver(mailbox, 1, 0, round=8)
        assert await collect(mailbox, 1, round=8) == {1: "8.0"}

    run_skipping(steps())


def test_the_pre_round_comes_before_the_first_round():
    async def steps() -> None:
        mailbox = Mailbox()
        deliver(mailbox, 1, 0, round=-1)
        assert await collect(mailbox, 1, round=-1) == {1: "-1.0"}

    run_skipping(steps())


def test_nothing_counts_twice():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0)
        assert reason(mailbox.check, header(1, 0)) == "replayed"
        assert reason(deliver, mailbox, 1, 0) == "replayed"
        await collect(mailbox, 1)
        assert reason(deliver, mailbox, 1, 0) == "replayed"
        finish(mailbox, 1, 1)
        assert reason(finish, mailbox, 1, 2) == "replayed"

    run_skipping(steps())


def test_nothing_comes_after_the_end():
    mailbox = opened()
    finish(mailbox, 1, 1)
    assert reason(deliver, mailbox, 1, 1) == "malformed"
    deliver(mailbox, 1, 0)
    deliver(mailbox, 1, 0, round=1)


def test_a_new_round_drops_what_was_not_taken():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0, size=100)
        deliver(mailbox, 2, 0, size=100)
        deliver(mailbox, 1, 0, round=1, size=50)
        finish(mailbox, 2, 1)
        assert await collect(mailbox, 1) == {1: "0.0"}
        mailbox.begin_round(1)
        assert mailbox.counters == {"late": 1}
        assert mailbox.bytes == 50 + OVERHEAD
        mailbox.begin_round(1)
        assert await collect(mailbox, 1, round=1) == {1: "1.0"}

    run_skipping(steps())


def test_rounds_only_go_up_and_only_this_one_is_collected():
    async def steps() -> None:
        mailbox = opened()
        mailbox.begin_round(3)
        with pytest.raises(PeerageError, match="round 2 cannot follow round 3"):
            mailbox.begin_round(2)
        with pytest.raises(PeerageError, match="the mailbox is in round 3, not in 4"):
            await collect(mailbox, 1, round=4)

    run_skipping(steps())


def test_entering_another_round_ends_a_wait():
    async def steps() -> None:
        mailbox = opened()
        deliver(mailbox, 1, 0, size=10)
        task = asyncio.create_task(collect(mailbox, 1, 2))
        await asyncio.sleep(0.01)
        mailbox.begin_round(1)
        assert await task == {}
        assert mailbox.bytes == 0

    run_skipping(steps())


# How much is kept


def test_one_sender_cannot_fill_the_mailbox():
    async def steps() -> None:
        mailbox = Mailbox(share=2 * (1000 + OVERHEAD))
        mailbox.begin_round(0)
        deliver(mailbox, 1, 0, size=1000)
        deliver(mailbox, 1, 0, round=1, size=1000)
        assert reason(mailbox.check, header(1, 1, size=1000)) == "full"
        deliver(mailbox, 2, 0, size=1000)
        assert await collect(mailbox, 1) == {1: "0.0"}
        deliver(mailbox, 1, 1, size=1000)

    run_skipping(steps())


def test_a_full_mailbox_keeps_the_sender_waiting():
    async def steps() -> None:
        mailbox = Mailbox(max_bytes=3 * (1000 + OVERHEAD))
        mailbox.begin_round(0)
        for sequence in range(3):
            deliver(mailbox, 1, sequence, size=1000)
        assert reason(mailbox.check, header(1, 3, size=1000)) == "full"
        assert reason(deliver, mailbox, 2, 0, 1, 0) == "full"
        assert await collect(mailbox, 1) == {1: "0.0"}
        deliver(mailbox, 1, 3, size=1000)
        assert mailbox.bytes == 3 * (1000 + OVERHEAD)
        finish(mailbox, 1, 4)  # takes no room

    run_skipping(steps())


def test_messages_without_a_payload_are_not_free():
    mailbox = Mailbox(max_bytes=10 * OVERHEAD)
    mailbox.begin_round(0)
    for sequence in range(10):
        deliver(mailbox, 1, sequence)
    assert reason(deliver, mailbox, 1, 10) == "full"


def test_what_counts_is_the_size_in_memory():
    mailbox = opened()
    mailbox.put(header(1, 0, size=100), packet(1, "", bytes=200))
    assert mailbox.bytes == 200 + OVERHEAD


def test_one_message_of_this_round_always_fits():
    async def steps() -> None:
        mailbox = Mailbox(max_bytes=5000)
        mailbox.begin_round(0)
        deliver(mailbox, 1, 0, round=1, size=3500)
        assert reason(mailbox.check, header(2, 0, round=2, size=3500)) == "full"
        deliver(mailbox, 2, 0, size=10**6)
        assert reason(mailbox.check, header(3, 0, size=10)) == "full"
        assert await collect(mailbox, 2) == {2: "0.0"}
        deliver(mailbox, 3, 0, size=10**6)

    run_skipping(steps())


def test_what_the_node_waits_for_always_fits():
    """Or a member could stop the others by filling the mailbox with messages of the future."""

    async def steps() -> None:
        mailbox = Mailbox(max_bytes=5000)
        mailbox.begin_round(0)
        deliver(mailbox, 9, 0, round=1, size=3900)
        task = asyncio.create_task(collect(mailbox, 1, 2, 3))
        await asyncio.sleep(0)
        for sender in (1, 2):
            deliver(mailbox, sender, 0, size=10_000)
        assert reason(deliver, mailbox, 2, 1) == "full"  # not the next
        assert reason(deliver, mailbox, 4, 0) == "full"  # nobody waits for it
        deliver(mailbox, 3, 0, size=10_000)
        assert await task == {1: "0.0", 2: "0.0", 3: "0.0"}
        assert reason(deliver, mailbox, 9, 0, 2, 500) == "full"
        assert mailbox.bytes == 3900 + OVERHEAD

    run_skipping(steps())
