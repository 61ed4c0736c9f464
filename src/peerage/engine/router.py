"""The post office of the simulator: who may go on, and with which messages.

It moves parcels, which say where a payload lies, and never looks into one. A node that receives
goes on when each of its senders has posted something or can post nothing more in this round. This
depends on the algorithm alone, never on how nodes are spread over workers. A parcel that a fault
takes away leaves an empty place in the box: it has come, and holds nothing.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peerage.errors import Diverged, PeerageError
from peerage.graphs.faults import LinkFaults
from peerage.requests import Envelope, Enveloped


@dataclass(frozen=True)
class Packet(Enveloped):
    """One message on its way: its envelope, and where the payload lies."""

    envelope: Envelope
    to: tuple[int, ...]
    payload: Mapping[str, Any]  # name -> what the store of the engine calls a tensor
    bytes: int  # of the payload, for one recipient


@dataclass
class ShardOutput:
    """What a shard did until every one of its nodes waited or had finished."""

    packets: list[Packet] = field(default_factory=list)
    waiting: dict[int, tuple[int, ...]] = field(default_factory=dict)  # node -> senders
    finished: list[int] = field(default_factory=list)
    diverged: list[int] = field(default_factory=list)  # in training
    broken: list[int] = field(default_factory=list)  # before it, since the last round
    spoilt: dict[int, str] = field(default_factory=dict)  # sender -> a tensor that is not finite


def check_finite(round: int, steps: Iterable[ShardOutput]) -> None:
    """Raise `Diverged` if numbers became NaN or infinite in training, or were sent like that."""
    steps = list(steps)
    check_combined(round - 1, (node for step in steps for node in step.broken))
    diverged = sorted(node for step in steps for node in step.diverged)
    if diverged:
        raise Diverged(
            f"the loss or the parameters of {_nodes(diverged)} became NaN or infinite in round "
            f"{round + 1}; lower --lr (or the gain) and run again"
        )
    spoilt = {node: name for step in steps for node, name in step.spoilt.items()}
    if spoilt:
        name = spoilt[min(spoilt)]
        raise Diverged(
            f"{_nodes(sorted(spoilt))} sent NaN or infinite numbers in round {round + 1}, in "
            f"tensor {name!r}; check how the algorithm computes it"
        )


def check_combined(round: int, broken: Iterable[int]) -> None:
    """Raise `Diverged` if a round left nodes with parameters that are NaN or infinite."""
    nodes = sorted(broken)
    if nodes:
        raise Diverged(
            f"the parameters of {_nodes(nodes)} were NaN or infinite at the end of round "
            f"{round + 1}; check what the algorithm assigns to node.params"
        )


def _nodes(nodes: list[int]) -> str:
    some = ", ".join(map(str, nodes[:10])) + (", ..." if len(nodes) > 10 else "")
    return f"node{'s' * (len(nodes) > 1)} {some}"


class MessageRouter:
    """One round's messages; `absent` nodes take no part in it."""

    def __init__(self, link_faults: LinkFaults, absent: Iterable[int] = ()) -> None:
        # (recipient, sender) -> parcels in order; None is one that a fault has taken away
        self.queues: defaultdict[tuple[int, int], deque[Packet | None]] = defaultdict(deque)
        self.waiting: dict[int, tuple[int, ...]] = {}
        self.finished: set[int] = set(absent)
        self.link_faults = link_faults
        self.sent_counts: Counter[tuple[int, int]] = Counter()
        self.bytes = 0

    def accept(self, step: ShardOutput) -> None:
        for packet in step.packets:
            sender = packet.sender
            for recipient in packet.to:
                self.queues[recipient, sender].append(self._carry(packet, sender, recipient))
        self.waiting |= step.waiting
        self.finished.update(step.finished)

    def _carry(self, packet: Packet, sender: int, recipient: int) -> Packet | None:
        """What arrives of a parcel; it counts if it was sent at all."""
        if not self.link_faults.link_up(sender, recipient):
            return None
        self.bytes += packet.bytes
        if not self.link_faults.faults.loss:  # then nobody asks for numbers
            return packet
        number = self.sent_counts[recipient, sender]
        self.sent_counts[recipient, sender] += 1
        return None if self.link_faults.message_lost(sender, recipient, number) else packet

    def deliver(self) -> dict[int, list[Packet]]:
        """The parcels of every node that can go on; empty when the round is over."""
        ready = {
            node: senders for node, senders in self.waiting.items() if self._ready(node, senders)
        }
        if self.waiting and not ready:
            stuck = ", ".join(map(str, sorted(self.waiting)[:10]))
            raise PeerageError(
                f"nodes {stuck} wait for messages that nobody will send; "
                "check that the algorithm's sends and receives match"
            )
        deliveries = {}
        for node, senders in ready.items():
            del self.waiting[node]
            queues = [self.queues.get((node, sender)) for sender in sorted(senders)]
            arrived = [box.popleft() for box in queues if box]
            deliveries[node] = [packet for packet in arrived if packet is not None]
        return deliveries

    def _ready(self, node: int, senders: tuple[int, ...]) -> bool:
        return all(self.queues.get((node, s)) or s in self.finished for s in senders)
