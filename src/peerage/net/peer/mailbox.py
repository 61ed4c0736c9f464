"""What has arrived at one peer, until its node asks for it.

On every link the rules of the simulator's post office hold: the k-th time that a node receives from
a sender in a round, it gets the k-th message that the sender sent to it, or nothing if that one is
not there when time is up. One event loop uses a mailbox; it has no locks.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from peerage.engine.router import Packet
from peerage.engine.shard import PRE_ROUND
from peerage.errors import PeerageError
from peerage.net.wire.header import DONE, Header, Rejected

POLL_INTERVAL = 0.05  # seconds between two looks at who is gone
OVERHEAD = 1 << 10  # bytes that a message takes up besides its payload

Worth = Callable[[list[int]], list[int]]  # those senders of which a message may still come


@dataclass
class SenderQueue:
    """What one sender has sent in one round."""

    arrived: dict[int, tuple[Packet | None, int]] = field(default_factory=dict)  # with their bytes
    asked: int = 0  # how many times the node has received from it
    missed: set[int] = field(default_factory=set)  # places that were empty when it did
    sent: int | None = None  # how many there are, once the sender is done

    def pending(self) -> bool:
        """Whether the next one may still come.

        On a link, messages arrive in order. What is not here when the sender is done got lost.
        """
        return self.asked not in self.arrived and self.sent is None

    def missing(self) -> bool:
        """Whether the next one is not here, although the sender sent it or may still send it."""
        return self.asked not in self.arrived and (self.sent is None or self.asked < self.sent)

    def take(self) -> tuple[Packet | None, int]:
        sequence, self.asked = self.asked, self.asked + 1
        if sequence not in self.arrived:
            self.missed.add(sequence)
        return self.arrived.pop(sequence, (None, 0))


class Mailbox:
    """Keeps messages of this round and of `ahead` more, as others may be faster.

    Together they have about `max_bytes`, and those of one sender `share`; the last may need more
    when it is unpacked. What the node is waiting for right now comes on top, and so does one
    message of this round: otherwise a full mailbox could never be emptied.
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
        self.bytes = 0  # of what is kept
        # reason -> messages; here only of those that were taken, and came to nothing
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._links: dict[int, dict[int, SenderQueue]] = {}  # round -> sender -> link
        self._latest: dict[int, int] = {}  # sender -> the last round that it sent something of
        self._awaited: frozenset[int] = frozenset()
        self._news = asyncio.Event()

    def begin_round(self, round: int) -> None:
        """Begin a round; what is left of earlier ones is late."""
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
        """Raise `Rejected` if the message is of no use, or of none yet (`RETRYABLE_REASONS`)."""
        self._latest[header.sender] = header.round
        self._news.set()
        if self._idle_word(header):
            return
        h, link = header, self._link(header)
        of = f"message {h.sequence} of node {h.sender} in round {h.round}"
        if h.round < self.round:
            raise Rejected("late", f"{of} came in round {self.round}")
        if h.round > self.round + self.ahead:
            raise Rejected("early", f"{of} is too far ahead of round {self.round}")
        if h.kind == DONE:
            if link.sent not in (None, h.sequence):
                raise Rejected("replayed", f"node {h.sender} was done with round {h.round}")
            return
        if h.sequence in link.missed:
            raise Rejected("late", f"{of} came when nobody waited for it any more")
        if h.sequence in link.arrived or h.sequence < link.asked:
            raise Rejected("replayed", f"{of} was already here")
        if link.sent is not None and h.sequence >= link.sent:
            raise Rejected("malformed", f"{of} came, which said that it sent {link.sent}")
        size = h.size + OVERHEAD
        full = self.bytes + size > self.max_bytes or self._of(h.sender) + size > self.share
        if full and not self._needed(h, link):
            raise Rejected("full", f"{of} has to wait: {self.bytes} bytes are here already")

    def put(self, header: Header, packet: Packet | None) -> None:
        """Keep a message that was checked; no parcel: the sender is done, or its place is empty."""
        self.check(header)
        if self._idle_word(header):
            return
        link = self._links.setdefault(header.round, {}).setdefault(header.sender, SenderQueue())
        if header.kind == DONE:
            link.sent = header.sequence
        else:
            cost = OVERHEAD + (0 if packet is None else max(header.size, packet.bytes))
            link.arrived[header.sequence] = packet, cost
            self.bytes += cost
        self._news.set()

    def skip(self, sender: int) -> None:
        """Do not wait for the sender's next message of this round: it will not come."""
        link = self._links.setdefault(self.round, {}).setdefault(sender, SenderQueue())
        self.bytes -= link.take()[1]

    async def collect(
        self, round: int, senders: Sequence[int], deadline: float, worth: Worth
    ) -> dict[int, Packet]:
        """The next message of each sender, in their order, without those that do not come.

        Waits as `wait` does. The answer is empty if the mailbox enters another round meanwhile.
        """
        await self.wait(round, senders, deadline, worth)
        return self.take(senders) if round == self.round else {}

    def take(self, senders: Iterable[int]) -> dict[int, Packet]:
        """The next message of each sender in this round, in their order, if it is here."""
        return self._taken(self._wanted(senders))

    def pending(self, senders: Iterable[int]) -> list[int]:
        """Those of the senders whose next message of this round may still come."""
        return [sender for sender, link in self._wanted(senders).items() if link.pending()]

    def missing(self, senders: Iterable[int]) -> list[int]:
        """Those of the senders whose next message of this round got lost, or may still come."""
        return [sender for sender, link in self._wanted(senders).items() if link.missing()]

    async def wait(self, round: int, senders: Sequence[int], deadline: float, worth: Worth) -> None:
        """Wait until each sender has sent its next message, or is not to be waited for.

        That is so if it is done with the round, is in a later one, is not `worth` waiting for, or
        the loop's time is `deadline`; and if the mailbox enters another round meanwhile.
        """
        if round != self.round:
            raise PeerageError(f"the mailbox is in round {self.round}, not in {round}")
        wanted = self._wanted(senders)
        self._awaited = frozenset(wanted)
        try:
            while round == self.round and worth(
                [s for s, link in wanted.items() if link.pending() and not self._passed(s)]
            ):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left, POLL_INTERVAL)):
                        await self._news.wait()
        finally:
            self._awaited = frozenset()

    def _wanted(self, senders: Iterable[int]) -> dict[int, SenderQueue]:
        links = self._links.setdefault(self.round, {})
        return {sender: links.setdefault(sender, SenderQueue()) for sender in sorted(senders)}

    def _passed(self, sender: int) -> bool:
        """Whether the sender is in a later round: on a link, messages arrive in order."""
        return self._latest.get(sender, PRE_ROUND) > self.round

    def _taken(self, wanted: dict[int, SenderQueue]) -> dict[int, Packet]:
        packets = {}
        for sender, link in wanted.items():
            packet, cost = link.take()
            self.bytes -= cost
            if packet is not None:
                packets[sender] = packet
        return packets

    def _idle_word(self, h: Header) -> bool:
        """Whether a sender says that it is done with a round in which nobody waits for it.

        That is no fault: where nodes do not wait for each other, some are rounds ahead.
        """
        return h.kind == DONE and not self.round <= h.round <= self.round + self.ahead

    def _of(self, sender: int) -> int:
        """Bytes that are kept of one sender."""
        links = [links[sender] for links in self._links.values() if sender in links]
        return sum(cost for link in links for _, cost in link.arrived.values())

    def _link(self, h: Header) -> SenderQueue:
        return self._links.get(h.round, {}).get(h.sender) or SenderQueue()

    def _needed(self, h: Header, link: SenderQueue) -> bool:
        """Whether there must be room, because the node cannot go on without the message."""
        if h.round != self.round:
            return False
        awaited = h.sender in self._awaited and h.sequence == link.asked
        return awaited or not any(link.arrived for link in self._links.get(h.round, {}).values())
