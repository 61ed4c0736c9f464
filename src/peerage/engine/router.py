"""Message routing in simulations: which nodes can continue, and with which messages.

The router moves packets, which refer to payloads, and never reads a payload. A receiving node
continues once each of its senders has sent a message or has finished the round. This depends on the
algorithm alone, not on how nodes are distributed over workers. A lost packet is queued as None.
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
    """One message in transit: its envelope and a reference to its payload."""

    envelope: Envelope
    to: tuple[int, ...]
    payload: Mapping[str, Any]  # name -> reference that the engine's store resolves to a tensor
    bytes: int  # of the payload, for one recipient


@dataclass
class ShardOutput:
    """What a shard did until each of its nodes waited or had finished."""

    packets: list[Packet] = field(default_factory=list)
    waiting: dict[int, tuple[int, ...]] = field(default_factory=dict)  # node -> senders
    finished: list[int] = field(default_factory=list)
    # Node -> models that it trains together and other shards could; 0 if they cannot.
    together: dict[int, int] = field(default_factory=dict)
    diverged: list[int] = field(default_factory=list)  # in training
    broken: list[int] = field(default_factory=list)  # before training, in the previous round
    spoilt: dict[int, str] = field(default_factory=dict)  # sender -> tensor that is not finite


def check_finite(round: int, outputs: Iterable[ShardOutput]) -> None:
    """Raise `Diverged` if numbers became NaN or infinite in training, or were sent as such."""
    outputs = list(outputs)
    check_combined(round - 1, (node for output in outputs for node in output.broken))
    diverged = sorted(node for output in outputs for node in output.diverged)
    if diverged:
        raise Diverged(
            f"the loss or the parameters of {_nodes(diverged)} became NaN or infinite in round "
            f"{round + 1}; lower --lr (or the gain) and run again"
        )
    spoilt = {node: name for output in outputs for node, name in output.spoilt.items()}
    if spoilt:
        name = spoilt[min(spoilt)]
        raise Diverged(
            f"{_nodes(sorted(spoilt))} sent NaN or infinite numbers in round {round + 1}, in "
            f"tensor {name!r}; check how the algorithm computes it"
        )


def check_combined(round: int, broken: Iterable[int]) -> None:
    """Raise `Diverged` if nodes ended a round with NaN or infinite parameters."""
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
    """Routes the messages of one round; `absent` nodes take no part in it."""

    def __init__(self, link_faults: LinkFaults, absent: Iterable[int] = ()) -> None:
        # (recipient, sender) -> packets in order; None is one that a fault has removed
        self.queues: defaultdict[tuple[int, int], deque[Packet | None]] = defaultdict(deque)
        self.waiting: dict[int, tuple[int, ...]] = {}
        self.finished: set[int] = set(absent)
        self.link_faults = link_faults
        self.sent_counts: Counter[tuple[int, int]] = Counter()
        self.bytes = 0

    def accept(self, output: ShardOutput) -> None:
        for packet in output.packets:
            sender = packet.sender
            for recipient in packet.to:
                self.queues[recipient, sender].append(self._carry(packet, sender, recipient))
        self.waiting |= output.waiting
        self.finished.update(output.finished)

    def _carry(self, packet: Packet, sender: int, recipient: int) -> Packet | None:
        """The packet, or None if it is lost; its bytes count unless the link is down."""
        if not self.link_faults.link_up(sender, recipient):
            return None
        self.bytes += packet.bytes
        if not self.link_faults.faults.loss:  # only losses depend on the number
            return packet
        number = self.sent_counts[recipient, sender]
        self.sent_counts[recipient, sender] += 1
        return None if self.link_faults.message_lost(sender, recipient, number) else packet

    def deliver(self) -> dict[int, list[Packet]]:
        """The packets of every node that can continue; empty when the round is over."""
        ready = {
            node: senders for node, senders in self.waiting.items() if self._ready(node, senders)
        }
        if self.waiting and not ready:
            stuck = ", ".join(map(str, sorted(self.waiting)[:10]))
            raise PeerageError(
                f"nodes {stuck} wait for messages that no node will send; "
                "check that the algorithm's sends and receives match"
            )
        deliveries = {}
        for node, senders in ready.items():
            del self.waiting[node]
            queues = [self.queues.get((node, sender)) for sender in sorted(senders)]
            arrived = [queue.popleft() for queue in queues if queue]
            deliveries[node] = [packet for packet in arrived if packet is not None]
        return deliveries

    def _ready(self, node: int, senders: tuple[int, ...]) -> bool:
        return all(self.queues.get((node, s)) or s in self.finished for s in senders)
