"""The post office: who may go on, with which messages, and what was sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.engine.router import Parcel, PostOffice, Step
from peerage.errors import PeerageError
from peerage.graphs.faults import NoLinkFaults
from peerage.requests import Envelope


def parcel(sender: int, *to: int, bytes: int = 8, label: str = "") -> Parcel:
    return Parcel(Envelope(sender, 1, 1, "net"), to, {"label": label}, bytes)


def labels(deliveries: dict[int, list[Parcel]]) -> dict[int, list[tuple[int, str]]]:
    return {
        node: [(p.sender, p.payload["label"]) for p in parcels]
        for node, parcels in deliveries.items()
    }


def test_a_node_goes_on_when_all_its_senders_have_posted():
    office = PostOffice(NoLinkFaults())
    office.accept(Step([parcel(1, 0, label="a")], waiting={0: (1, 2), 1: (0,), 2: (0,)}))
    with pytest.raises(PeerageError, match="nodes 0, 1, 2 wait for messages that nobody will send"):
        office.deliver()
    office.accept(Step([parcel(2, 0, label="b")]))
    assert labels(office.deliver()) == {0: [(1, "a"), (2, "b")]}
    office.accept(Step([parcel(0, 1, 2, label="c")], finished=[0]))
    assert labels(office.deliver()) == {1: [(0, "c")], 2: [(0, "c")]}
    office.accept(Step(finished=[1, 2]))
    assert office.deliver() == {}


def test_a_finished_sender_is_left_out():
    office = PostOffice(NoLinkFaults())
    office.accept(Step([parcel(2, 0, label="b")], waiting={0: (1, 2)}, finished=[1, 2]))
    assert labels(office.deliver()) == {0: [(2, "b")]}


def test_what_a_sender_posted_before_it_finished_still_counts():
    office = PostOffice(NoLinkFaults())
    office.accept(Step([parcel(1, 0, label="a")], waiting={0: (1,)}, finished=[1]))
    assert labels(office.deliver()) == {0: [(1, "a")]}
    office.accept(Step(waiting={0: (1,)}))
    assert labels(office.deliver()) == {0: []}


def test_messages_of_a_pair_come_in_order_and_others_wait():
    office = PostOffice(NoLinkFaults())
    first, second, third = (parcel(1, 0, label=label) for label in "abc")
    office.accept(Step([first, second, third, parcel(2, 0, label="x")], waiting={0: (1,)}))
    assert labels(office.deliver()) == {0: [(1, "a")]}
    office.accept(Step(waiting={0: (2, 1)}))
    assert labels(office.deliver()) == {0: [(1, "b"), (2, "x")]}  # ordered by sender
    office.accept(Step(waiting={0: (1,)}))
    assert labels(office.deliver()) == {0: [(1, "c")]}


def test_waiting_for_nobody_is_answered_at_once():
    office = PostOffice(NoLinkFaults())
    office.accept(Step(waiting={0: ()}))
    assert office.deliver() == {0: []}


def test_bytes_count_once_for_every_recipient():
    office = PostOffice(NoLinkFaults())
    office.accept(Step([parcel(0, 1, 2, 3, bytes=10), parcel(1, bytes=99), parcel(1, 0, bytes=4)]))
    assert office.bytes == 34


def test_a_deadlock_names_some_of_the_nodes():
    office = PostOffice(NoLinkFaults())
    office.accept(Step(waiting={node: ((node + 1) % 20,) for node in range(20)}))
    with pytest.raises(PeerageError, match="nodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 wait"):
        office.deliver()


@given(st.integers(2, 6), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_order_of_shards_does_not_matter(nodes, exchanges, random):
    """Everyone sends to everyone, several times; steps may come from shards in any order."""
    everyone = range(nodes)

    def play(cuts: list[list[int]]) -> list[dict[int, list[tuple[int, str]]]]:
        office, history = PostOffice(NoLinkFaults()), []
        for number in range(exchanges):
            for shard in cuts:
                step = Step()
                for node in shard:
                    others = [peer for peer in everyone if peer != node]
                    step.parcels.append(parcel(node, *others, label=str(number)))
                    step.waiting[node] = tuple(others)
                office.accept(step)
            history.append(dict(sorted(labels(office.deliver()).items())))
        return history

    order = list(everyone)
    random.shuffle(order)
    cut = random.randint(0, nodes)
    plain = play([list(everyone)])
    assert play([order[:cut], order[cut:]]) == plain
    assert plain[-1][0] == [(sender, str(exchanges - 1)) for sender in range(1, nodes)]
