"""What goes wrong in a network: closed connections, silent nodes, lost messages, absent nodes.

Every draw has a name of its own (seed, what, round, who), so that all engines, and all peers of a
real network, see the same faults without asking each other.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from peerage.errors import InputError
from peerage.graphs.graph import Neighbours
from peerage.randomness import stream_seed


@dataclass(frozen=True)
class Faults:
    """Rounds are counted as in the records: the first is 1.

    A message over a closed connection is never sent; one that is lost was sent, and is counted.
    """

    links: float = 1.0  # chance that a connection is open in a round (P4)
    nodes: float = 1.0  # chance that a node is in touch with others in a round; it trains anyway
    directed: bool = False  # every direction of a connection on its own, as the code of P4 draws it
    loss: float = 0.0  # chance that a message is lost on its way
    join: str = ""  # "7@10, 8@10": node 7 is there from round 10 on
    leave: str = ""  # "3@20": round 20 is the first without node 3

    def __post_init__(self) -> None:
        for name in ("links", "nodes", "loss"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is a probability and must lie in [0, 1], got {getattr(self, name)}"
                )
        if self.directed and self.links == 1:
            raise InputError("directed says how links are drawn; give links below 1 as well")
        for node, first in self.joined.items():
            if self.left.get(node, first + 1) <= first:
                raise InputError(
                    f"node {node} leaves in round {self.left[node]}, before it joins in {first}; "
                    "let it leave later"
                )

    @cached_property
    def joined(self) -> dict[int, int]:
        """node -> its first round"""
        return parse_schedule("join", self.join)

    @cached_property
    def left(self) -> dict[int, int]:
        """node -> the first round without it"""
        return parse_schedule("leave", self.leave)

    def check(self, nodes: int) -> None:
        """Refuse what names a node that does not exist."""
        for node in (*self.joined, *self.left):
            if node >= nodes:
                raise InputError(
                    f"node {node} cannot join or leave; the nodes are 0 to {nodes - 1}"
                )

    def present(self, node: int, round: int) -> bool:
        """Whether the node takes part in a round at all; here and below the first round is 0."""
        return self.joined.get(node, 0) <= round + 1 < self.left.get(node, round + 2)

    def membership(self, near: Neighbours, round: int) -> Neighbours:
        """The graph among those who are there."""
        if not self.join and not self.leave:
            return near
        there = [self.present(node, round) for node in range(len(near))]
        return tuple(
            tuple(j for j in others if there[j]) if there[i] else ()
            for i, others in enumerate(near)
        )


@dataclass(frozen=True)
class LinkFaults:
    """What happens to messages in one round, of which the first is 0."""

    faults: Faults
    seed: int
    round: int

    def link_up(self, sender: int, recipient: int) -> bool:
        """Whether anything can pass from one node to the other in this round.

        Before the first round, while nodes still learn about the network, everything can.
        """
        faults, ends = self.faults, (sender, recipient)
        if self.round < 0:
            return True
        if not all(faults.present(node, self.round) for node in ends):
            return False
        if faults.nodes < 1:
            draws = [self._chance("node activity", node) for node in ends]
            if max(draws) >= faults.nodes:
                return False
        pair = ends if faults.directed else sorted(ends)
        return faults.links == 1 or self._chance("link activity", *pair) < faults.links

    def message_lost(self, sender: int, recipient: int, number: int) -> bool:
        """Whether the message with this number between the two is lost."""
        loss = self.faults.loss
        return loss > 0 and self._chance("loss", sender, recipient, number) < loss

    def _chance(self, purpose: str, *index: int) -> float:
        """A number drawn evenly from [0, 1)."""
        return stream_seed(self.seed, purpose, self.round, *index) / 2.0**63


class NoLinkFaults(LinkFaults):
    """Links that are always up and lose nothing, as fast as can be."""

    def __init__(self) -> None:
        super().__init__(Faults(), seed=0, round=0)

    def link_up(self, sender: int, recipient: int) -> bool:
        return True

    def message_lost(self, sender: int, recipient: int, number: int) -> bool:
        return False


def parse_schedule(name: str, text: str) -> dict[int, int]:
    """Nodes and rounds from `7@10, 8@12`.

    >>> parse_schedule("join", "7@10, 8@12")
    {7: 10, 8: 12}
    """
    found: dict[int, int] = {}
    for word in re.split(r"[,\s]+", text.strip()):
        if not word:
            continue
        match = re.fullmatch(r"(\d{1,9})@(\d{1,9})", word)
        if not match or int(match[2]) < 1:
            raise InputError(f"{name} {word!r} is not of the form NODE@ROUND, such as 7@10")
        if int(match[1]) in found:
            raise InputError(f"{name} names node {match[1]} twice; give one round for it")
        found[int(match[1])] = int(match[2])
    return found
