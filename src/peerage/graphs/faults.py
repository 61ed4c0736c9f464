"""Simulated faults: links that are down, silent nodes, lost messages, absent nodes.

Every draw has its own stream (seed, purpose, round, nodes), so that all engines, and all peers of a
real network, see the same faults without communicating.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from peerage.errors import InputError
from peerage.graphs.graph import Neighbours
from peerage.randomness import stream_seed


@dataclass(frozen=True)
class Faults:
    """Fault settings; rounds are counted from 1, as in the records.

    A message over a link that is down is not sent. A lost message was sent and is counted.
    """

    links: float = 1.0  # probability that a link is up in a round (P4)
    nodes: float = 1.0  # probability that a node communicates in a round; it trains anyway
    # Draw the two directions of a link independently, as the code of P4 does.
    directed: bool = False
    loss: float = 0.0  # probability that a message is lost
    join: str = ""  # "7@10, 8@10": node 7 takes part from round 10 on
    leave: str = ""  # "3@20": round 20 is the first without node 3

    def __post_init__(self) -> None:
        for name in ("links", "nodes", "loss"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is a probability and must lie in [0, 1], got {getattr(self, name)}"
                )
        if self.directed and self.links == 1:
            raise InputError("directed requires links below 1; set links as well")
        for node, first in self.joined.items():
            if self.left.get(node, first + 1) <= first:
                raise InputError(
                    f"node {node} leaves in round {self.left[node]}, before it joins in {first}; "
                    "let it leave later"
                )

    @cached_property
    def joined(self) -> dict[int, int]:
        """First round of every node that joins late."""
        return parse_schedule("join", self.join)

    @cached_property
    def left(self) -> dict[int, int]:
        """First round without the node, for every node that leaves."""
        return parse_schedule("leave", self.leave)

    def check(self, nodes: int, hub: int | None = None) -> None:
        """Raise an error if a schedule names the hub, or a node that does not exist."""
        for node in (*self.joined, *self.left):
            if node == hub:
                raise InputError(
                    f"join or leave names node {node}, the hub, without which no node can work; "
                    "remove it"
                )
            if node >= nodes:
                raise InputError(
                    f"join or leave names the unknown node {node}; the ids are 0 to {nodes - 1}"
                )

    def present(self, node: int, round: int) -> bool:
        """Whether the node takes part in a round; here and below, the first round is 0."""
        return self.joined.get(node, 0) <= round + 1 < self.left.get(node, round + 2)

    def membership(self, near: Neighbours, round: int) -> Neighbours:
        """The neighbours of every node, restricted to the nodes that take part."""
        if not self.join and not self.leave:
            return near
        present = [self.present(node, round) for node in range(len(near))]
        return tuple(
            tuple(j for j in others if present[j]) if present[i] else ()
            for i, others in enumerate(near)
        )


@dataclass(frozen=True)
class LinkFaults:
    """The link faults of one round; the first round is 0."""

    faults: Faults
    seed: int
    round: int
    final: bool = False  # the step after the last round, with the same nodes

    def link_up(self, sender: int, recipient: int) -> bool:
        """Whether messages can pass from one node to the other.

        Before the first round, always; after the last, between all nodes that took part in it.
        """
        faults, ends = self.faults, (sender, recipient)
        if self.round < 0:
            return True
        if not all(faults.present(node, self.round - self.final) for node in ends):
            return False
        if self.final:
            return True
        if faults.nodes < 1:
            draws = [self._uniform("node activity", node) for node in ends]
            if max(draws) >= faults.nodes:
                return False
        pair = ends if faults.directed else sorted(ends)
        return faults.links == 1 or self._uniform("link activity", *pair) < faults.links

    def message_lost(self, sender: int, recipient: int, number: int) -> bool:
        """Whether the message with this sequence number is lost."""
        loss = self.faults.loss
        return loss > 0 and self._uniform("loss", sender, recipient, number) < loss

    def _uniform(self, purpose: str, *index: int) -> float:
        """A uniform random number in [0, 1)."""
        return stream_seed(self.seed, purpose, self.round, *index) / 2.0**63


class NoLinkFaults(LinkFaults):
    """Links that are always up and lose nothing; a router asks this for every message."""

    def __init__(self) -> None:
        super().__init__(Faults(), seed=0, round=0)

    def link_up(self, sender: int, recipient: int) -> bool:
        return True


def parse_schedule(name: str, text: str) -> dict[int, int]:
    """Parse `7@10, 8@12` into {node: round}.

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
