"""What an algorithm awaits, and what it gets back.

`Compute` is work on the node's own data, `Send` and `Receive` are messages. An engine knows these
three kinds and nothing about any algorithm.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from peerage.aggregation import data_weights, metropolis_weights, uniform_weights

if TYPE_CHECKING:
    from peerage.local import Local

A = TypeVar("A", covariant=True)  # what a request is answered with


class Request(Generic[A]):
    """Something an algorithm awaits; the engine that drives the coroutine answers it."""

    def __await__(self) -> Generator["Request[Any]", Any, A]:
        answer: A = yield self
        return answer


class Compute(Request[A]):
    """Work on the node's own data. A new kind of local work is a new subclass, not a new engine."""

    phase: ClassVar[str] = "compute"  # under which heading the time is recorded

    def run(self, local: "Local") -> A:
        raise NotImplementedError


@dataclass(frozen=True)
class Send(Request[None]):
    """One message, the same for every recipient; messages between two nodes arrive in order."""

    to: tuple[int, ...]
    payload: Mapping[str, Tensor]


@dataclass(frozen=True)
class Message:
    """What one node sent, with what every message says about its sender."""

    sender: int
    examples: int  # how much data the sender holds
    degree: int  # how many neighbours the sender has in this round
    architecture: str  # which model the sender trains
    payload: Mapping[str, Tensor]


@dataclass(frozen=True)
class Receive(Request[tuple[Message, ...]]):
    """The next message of each sender; those that are lost or absent are left out."""

    senders: tuple[int, ...]


@dataclass(frozen=True)
class Inbox:
    """Messages ordered by sender. A short inbox is normal: weights are taken over what arrived."""

    messages: tuple[Message, ...]
    owner: int

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, name: str) -> list[Tensor]:
        """The named tensor of every message, without copying."""
        return [message.payload[name] for message in self.messages]

    def stack(self, name: str) -> Tensor:
        """The named vectors as one new matrix [k, d]."""
        return torch.stack(self[name])

    @property
    def senders(self) -> tuple[int, ...]:
        return tuple(message.sender for message in self.messages)

    def others(self) -> "Inbox":
        """Without the owner's own message."""
        return Inbox(tuple(m for m in self.messages if m.sender != self.owner), self.owner)

    def alike(self, architecture: str) -> "Inbox":
        """Only senders with this architecture: vectors of other models mean something else."""
        return Inbox(tuple(m for m in self.messages if m.architecture == architecture), self.owner)

    def weights(self, kind: str) -> Tensor:
        """[k] `data`, `uniform` or `metropolis` weights, by name."""
        kinds = {
            "data": self.data_weights,
            "uniform": self.uniform_weights,
            "metropolis": self.metropolis_weights,
        }
        return kinds[kind]()

    def data_weights(self) -> Tensor:
        """[k], in proportion to the senders' examples."""
        return data_weights([message.examples for message in self.messages])

    def uniform_weights(self) -> Tensor:
        return uniform_weights(len(self))

    def metropolis_weights(self) -> Tensor:
        """[k], from the degrees that the senders state; the owner's own message takes the rest."""
        own = self.senders.index(self.owner)
        return metropolis_weights([message.degree for message in self.messages], own)
