"""How long a peer waits for the message of another: learned from what it observed."""

from collections import defaultdict
from collections.abc import Collection

LEAST = 1.0  # seconds that a sender gets where no other one is waited for
MEMORY = 8  # rounds whose observations count
MARGIN = 1.25  # times what a sender was observed to need
CREDIT = 2.0  # multiples of the limit that this peer waits in vain for one sender,
REFILL = 0.1  # and seconds that are added to this in each second


class Deadlines:
    """The seconds that each sender gets, at most `limit`.

    A sender that was not heard is in doubt until it is heard again. Meanwhile it gets a little more
    than it was observed to need for its last messages, also if these came too late.

    Members may be silent on purpose, now and then. So each sender has a credit, from which the time
    that this peer waited for it in vain is taken. If less is left than the sender needs, this peer
    does not wait for it, but takes a message that comes while it waits for others, and keeps the
    credit until it suffices. A sender that was never heard begins without credit when it is missed.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._needed: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by sender and round
        self._begun: dict[int, float] = {}  # round -> when the node began to wait, the oldest first
        self._now = 0.0  # when it last began to wait
        self._doubted: set[int] = set()  # senders that were not heard the last time
        self._known: set[int] = set()  # senders that were ever heard
        self._credit: dict[int, tuple[float, float]] = {}  # sender -> seconds, and when that was

    def seconds(self, sender: int) -> float:
        """How long to wait for the next message of this sender."""
        needed = min(MARGIN * max(self._needed[sender].values(), default=0.0), self.limit)
        wanted = needed if sender in self._doubted else self.limit
        credit = self._credit_of(sender)
        granted = min(wanted, credit) if needed <= credit else 0.0
        return min(max(granted, self._least(sender)), self.limit)

    def _least(self, sender: int) -> float:
        """What a sender gets in any case: a peer that can hear no other must not run away."""
        return 0.0 if self._known - self._doubted - {sender} else LEAST

    def _credit_of(self, sender: int) -> float:
        """Seconds that this peer may still wait for this sender in vain."""
        most = CREDIT * self.limit
        left, when = self._credit.get(sender, (most, self._now))
        return min(left + REFILL * (self._now - when), most)

    def begin(self, round: int, now: float) -> None:
        """Note that the node begins to wait for messages of the round."""
        self._begun.pop(round, None)  # to keep their order
        self._now = self._begun[round] = now
        while next(iter(self._begun.values())) < now - self.limit:
            del self._begun[next(iter(self._begun))]

    def arrived(self, sender: int, round: int, now: float) -> None:
        """Note that a message has arrived, in time or late."""
        if round in self._begun:
            self._observe(sender, round, now - self._begun[round])

    def _observe(self, sender: int, round: int, seconds: float) -> None:
        needed = self._needed[sender]
        needed[round] = max(seconds, needed.get(round, 0.0))
        while len(needed) > MEMORY:
            del needed[min(needed)]

    def end(self, round: int, heard: Collection[int], missed: Collection[int], now: float) -> None:
        """Note whose messages came while the node waited, and who was waited for in vain."""
        for sender in heard:
            self._observe(sender, round, 0.0)  # its message may have been there before
        self._known.update(heard)
        self._doubted = (self._doubted - set(heard)).union(missed)
        # Until the last of the others was heard, nobody was waited for in vain.
        needed = max((self._needed[sender].get(round, 0.0) for sender in heard), default=0.0)
        wasted = max(now - self._begun[round] - needed, 0.0)
        for sender in missed:
            trusted = sender in self._known or sender in self._credit
            left = self._credit_of(sender) - wasted if trusted else 0.0
            self._credit[sender] = max(left, 0.0), self._now
