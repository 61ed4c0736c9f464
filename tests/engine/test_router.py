"""The message router: which nodes may continue, with which messages, and what was sent."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.engine.router import MessageRouter, Packet, ShardOutput
from peerage.errors import PeerageError
from peerage.graphs.faults import NoLinkFaults
from peerage.requests import Envelope


def packet(sender: int, *to: int, bytes: int = 8, label: str = "") -> Packet:
    return Packet(Envelope(sender, 1, 1, "net"), to, {"label": label}, bytes)


def labels(deliveries: dict[int, list[Packet]]) -> dict[int, list[tuple[int, str]]]:
    return {
        node: [(p.sender, p.payload["label"]) for p in packets]
        for node, packets in deliveries.items()
    }


def test_a_node_continues_when_all_its_senders_have_sent():
    office = MessageRouter(NoLinkFaults())
    office.accept(ShardOutput([packet(1, 0, label="a")], waiting={0: (1, 2), 1: (0,), 2: (0,)}))
    with pytest.raises(
        PeerageError, match="nodes 0, 1, 2 wait for messages that no node will send"
    ):
        office.deliver()
    office.accept(ShardOutput([packet(2, 0, label="b")]))
    assert labels(office.deliver()) == {0: [(1, "a"), (2, "b")]}
    office.accept(ShardOutput([packet(0, 1, 2, label="c")], finished=[0]))
    assert labels(office.deliver()) == {1: [(0, "c")], 2: [(0, "c")]}
    office.accept(ShardOutput(finished=[1, 2]))
    assert office.deliver() == {}


def test_a_finished_sender_is_left_out():
    office = MessageRouter(NoLinkFaults())
    office.accept(ShardOutput([packet(2, 0, label="b")], waiting={0: (1, 2)}, finished=[1, 2]))
    assert labels(office.deliver()) == {0: [(2, "b")]}


def test_what_a_sender_sent_before_it_finished_still_counts():
    office = MessageRouter(NoLinkFaults())
    office.accept(ShardOutput([packet(1, 0, label="a")], waiting={0: (1,)}, finished=[1]))
    assert labels(office.deliver()) == {0: [(1, "a")]}
    office.accept(ShardOutput(waiting={0: (1,)}))
    assert labels(office.deliver()) == {0: []}


def test_messages_of_a_pair_come_in_order_and_others_wait():
    office = MessageRouter(NoLinkFaults())
    first, second, third = (packet(1, 0, label=label) for label in "abc")
    office.accept(ShardOutput([first, second, third, packet(2, 0, label="x")], waiting={0: (1,)}))
    assert labels(office.deliver()) == {0: [(1, "a")]}
    office.accept(ShardOutput(waiting={0: (2, 1)}))
    assert labels(office.deliver()) == {0: [(1, "b"), (2, "x")]}  # ordered by sender
    office.accept(ShardOutput(waiting={0: (1,)}))
    assert labels(office.deliver()) == {0: [(1, "c")]}


def test_waiting_for_no_sender_is_answered_at_once():
    office = MessageRouter(NoLinkFaults())
    office.accept(ShardOutput(waiting={0: ()}))
    assert office.deliver() == {0: []}


def test_bytes_count_once_for_every_recipient():
    office = MessageRouter(NoLinkFaults())
    office.accept(
        ShardOutput([packet(0, 1, 2, 3, bytes=10), packet(1, bytes=99), packet(1, 0, bytes=4)])
    )
    assert office.bytes == 34


def test_a_deadlock_names_some_of_the_nodes():
    office = MessageRouter(NoLinkFaults())
    office.accept(ShardOutput(waiting={node: ((node + 1) % 20,) for node in range(20)}))
    with pytest.raises(PeerageError, match="nodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 wait"):
        office.deliver()


@given(st.integers(2, 6), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_the_order_of_shards_does_not_matter(nodes, exchanges, random):
    """Everyone sends to everyone, several times; steps may come from shards in any order."""
    everyone = range(nodes)

    def deliveries(cuts: list[list[int]]) -> list[dict[int, list[tuple[int, str]]]]:
        office, history = MessageRouter(NoLinkFaults()), []
        for number in range(exchanges):
            for shard in cuts:
                step = ShardOutput()
                for node in shard:
                    others = [peer for peer in everyone if peer != node]
                    step.packets.append(packet(node, *others, label=str(number)))
                    step.waiting[node] = tuple(others)
                office.accept(step)
            history.append(dict(sorted(labels(office.deliver()).items())))
        return history

    order = list(everyone)
    random.shuffle(order)
    cut = random.randint(0, nodes)
    plain = deliveries([list(everyone)])
    assert deliveries([order[:cut], order[cut:]]) == plain
    assert plain[-1][0] == [(sender, str(exchanges - 1)) for sender in range(1, nodes)]
