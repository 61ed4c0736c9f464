"""Stores messages that have arrived at one peer until its node asks for them.

The rules are those of the simulator's `MessageRouter`. The k-th time that a node receives from a
sender in a round, it gets the k-th message of that sender, or nothing if it has not arrived in
time. A mailbox has no locks and must be used by a single event loop.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peerage.engine.router import Packet
from peerage.errors import PeerageError
from peerage.net.wire.header import DONE, Header, Rejected
from peerage.net.wire.transport import wait_for
from peerage.requests import PRE_ROUND

POLL_INTERVAL = 0.05  # seconds between two checks for unreachable senders
OVERHEAD = 1 << 10  # bytes of memory per message besides its payload

SenderFilter = Callable[[list[int]], list[int]]  # the senders that may still send a message


@dataclass
class SenderQueue:
    """The messages of one sender in one round."""

    # sequence number -> packet and its bytes
    arrived: dict[int, tuple[Packet | None, int]] = field(default_factory=dict)
    asked: int = 0  # how many times the node has received from the sender
    missed: set[int] = field(default_factory=set)  # sequence numbers not here when asked for
    sent: int | None = None  # the number of messages, once the sender is done

    def pending(self) -> bool:
        """Whether the next message may still come.

        On a link, messages arrive in order. A message that is missing when the sender is done was
        lost.
        """
        return self.asked not in self.arrived and self.sent is None

    def missing(self) -> bool:
        """Whether the next message has not arrived, although it was or may still be sent."""
        return self.asked not in self.arrived and (self.sent is None or self.asked < self.sent)

    def take(self) -> tuple[Packet | None, int]:
        sequence, self.asked = self.asked, self.asked + 1
        if sequence not in self.arrived:
            self.missed.add(sequence)
        return self.arrived.pop(sequence, (None, 0))


class Mailbox:
    """Keeps messages of this round and of the next `ahead` rounds, as other peers may be faster.

    It holds about `max_bytes`, and `share` per sender; the last message may exceed this when it is
    unpacked. Two kinds of messages are always accepted, so that a full mailbox can be emptied: the
    one that the node is waiting for, and the first of the current round.
    """

    def __init__(
        self,
        ahead: int = 2,
        max_bytes: int = 1 << 29,
        share: int = 1 << 29,
        counters: Counter[str] | None = None,
    ) -> None:
        self.ahead, self.max_bytes, self.share = ahead, max_bytes, share
        self.round = PRE_ROUND
        self.bytes = 0  # of all stored messages
        # reason -> messages; here only messages that were accepted and never used
        self.counters: Counter[str] = Counter() if counters is None else counters
        # round -> sender -> link
        self._links: dict[int, dict[int, SenderQueue]] = defaultdict(
            lambda: defaultdict(SenderQueue)
        )
        self._latest: dict[int, int] = {}  # sender -> the round of its last message
        self._awaited: frozenset[int] = frozenset()
        self._news = asyncio.Event()

    def begin_round(self, round: int) -> None:
        """Begin a round; unread messages of earlier rounds are dropped and counted as late."""
        if round < self.round:
            raise PeerageError(f"round {round} cannot follow round {self.round}")
        self.round = round
        for earlier in [known for known in self._links if known < round]:
            for link in self._links.pop(earlier).values():
                if link.arrived:
                    self.counters["late"] += len(link.arrived)
                    self.bytes -= sum(cost for _, cost in link.arrived.values())
        self._news.set()

    def check(self, header: Header) -> None:
        """Raise `Rejected` if the message is useless, or comes too early (`RETRYABLE_REASONS`)."""
        self._latest[header.sender] = header.round
        self._news.set()
        if self._is_unneeded_done(header):
            return
        h = header
        message = f"message {h.sequence} of node {h.sender} in round {h.round}"
        if h.round < self.round:
            raise Rejected("late", f"{message} arrived in round {self.round}")
        if h.round > self.round + self.ahead:
            raise Rejected("early", f"{message} is too far ahead of round {self.round}")
        link = self._links[h.round][h.sender]
        if h.kind == DONE:
            if link.sent not in (None, h.sequence):
                raise Rejected("replayed", f"node {h.sender} was already done with round {h.round}")
            return
        if h.sequence in link.missed:
            raise Rejected("late", f"{message} arrived after the node had stopped waiting for it")
        if h.sequence in link.arrived or h.sequence < link.asked:
            raise Rejected("replayed", f"{message} has already arrived")
        if link.sent is not None and h.sequence >= link.sent:
            raise Rejected("malformed", f"{message} exceeds the {link.sent} that it announced")
        size = h.size + OVERHEAD
        full = self.bytes + size > self.max_bytes or self._bytes_of(h.sender) + size > self.share
        if full and not self._must_accept(h, link):
            raise Rejected("full", f"no room for {message}: the mailbox holds {self.bytes} bytes")

    def put(self, header: Header, packet: Packet | None) -> None:
        """Store a message; without a packet, the sender is done or the message is empty."""
        self.check(header)
        if self._is_unneeded_done(header):
            return
        link = self._links[header.round][header.sender]
        if header.kind == DONE:
            link.sent = header.sequence
        else:
            cost = OVERHEAD + (0 if packet is None else max(header.size, packet.bytes))
            link.arrived[header.sequence] = packet, cost
            self.bytes += cost
        self._news.set()

    def take(self, senders: Iterable[int]) -> dict[int, Packet]:
        """Remove and return the next message of each sender in this round, if it has arrived."""
        packets = {}
        for sender, link in self._wanted(senders).items():
            packet, cost = link.take()
            self.bytes -= cost
            if packet is not None:
                packets[sender] = packet
        return packets

    def pending(self, senders: Iterable[int]) -> list[int]:
        """The senders whose next message of this round may still come."""
        return [sender for sender, link in self._wanted(senders).items() if link.pending()]

    def missing(self, senders: Iterable[int]) -> list[int]:
        """The senders whose next message of this round was lost or may still come."""
        return [sender for sender, link in self._wanted(senders).items() if link.missing()]

    async def wait(
        self, round: int, senders: Sequence[int], deadline: float, worth: SenderFilter
    ) -> None:
        """Wait for the next message of each sender until the loop's time is `deadline`.

        Does not wait for a sender that is done with the round, is in a later one, or is not `worth`
        waiting for. Returns early if the mailbox enters another round.
        """
        if round != self.round:
            raise PeerageError(f"the mailbox is in round {self.round}, not in {round}")
        wanted = self._wanted(senders)
        self._awaited = frozenset(wanted)
        try:
            while round == self.round and worth(
                [s for s, link in wanted.items() if link.pending() and not self.has_passed(s)]
            ):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                self._news.clear()
                await wait_for(self._news, min(left, POLL_INTERVAL))
        finally:
            self._awaited = frozenset()

    def _wanted(self, senders: Iterable[int]) -> dict[int, SenderQueue]:
        return {sender: self._links[self.round][sender] for sender in sorted(senders)}

    def has_passed(self, sender: int) -> bool:
        """Whether the sender is in a later round: on a link, messages arrive in order."""
        return self._latest.get(sender, PRE_ROUND) > self.round

    def _is_unneeded_done(self, h: Header) -> bool:
        """Whether a sender is done with a round in which this node does not wait for it.

        This is not an error: where nodes do not wait for each other, some are rounds ahead.
        """
        return h.kind == DONE and not self.round <= h.round <= self.round + self.ahead

    def _bytes_of(self, sender: int) -> int:
        """Bytes of the stored messages of one sender."""
        links = [links[sender] for links in self._links.values() if sender in links]
        return sum(cost for link in links for _, cost in link.arrived.values())

    def _must_accept(self, h: Header, link: SenderQueue) -> bool:
        """Whether a full mailbox must accept the message, so that the node can continue."""
        if h.round != self.round:
            return False
        awaited = h.sender in self._awaited and h.sequence == link.asked
        return awaited or not any(link.arrived for link in self._links[h.round].values())
