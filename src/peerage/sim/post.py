"""The post office of the simulator: who may go on, and with which messages.

It moves parcels, which say where a payload lies, and never looks into one. A node that receives
goes on when each of its senders has posted something or can post nothing more in this round. This
depends on the algorithm alone, never on how nodes are spread over workers.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peerage.errors import PeerageError


@dataclass(frozen=True)
class Parcel:
    """One message on its way: a header, and where the payload lies."""

    sender: int
    to: tuple[int, ...]
    examples: int
    degree: int
    architecture: str
    payload: Mapping[str, Any]  # name -> what the store of the engine calls a tensor
    bytes: int  # of the payload, for one recipient


@dataclass
class Step:
    """What a shard did until every one of its nodes waited or had finished."""

    parcels: list[Parcel] = field(default_factory=list)
    waiting: dict[int, tuple[int, ...]] = field(default_factory=dict)  # node -> senders
    finished: list[int] = field(default_factory=list)
    diverged: list[int] = field(default_factory=list)


class PostOffice:
    """One round's messages."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], deque[Parcel]] = {}  # (recipient, sender) -> in order
        self.waiting: dict[int, tuple[int, ...]] = {}
        self.finished: set[int] = set()
        self.bytes = 0

    def accept(self, step: Step) -> None:
        for parcel in step.parcels:
            for recipient in parcel.to:
                self.boxes.setdefault((recipient, parcel.sender), deque()).append(parcel)
            self.bytes += parcel.bytes * len(parcel.to)
        self.waiting |= step.waiting
        self.finished.update(step.finished)

    def deliver(self) -> dict[int, list[Parcel]]:
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
            boxes = [self.boxes.get((node, sender)) for sender in sorted(senders)]
            deliveries[node] = [box.popleft() for box in boxes if box]
        return deliveries

    def _ready(self, node: int, senders: tuple[int, ...]) -> bool:
        return all(self.boxes.get((node, s)) or s in self.finished for s in senders)
