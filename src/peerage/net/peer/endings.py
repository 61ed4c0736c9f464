"""Tells other peers when a round of this peer is over."""

from collections import Counter
from collections.abc import Callable, Iterable

from peerage.net.peer.traffic import Outbox
from peerage.net.wire.header import done
from peerage.requests import PRE_ROUND


class Endings:
    """Tells other peers that this one sends nothing more in a round.

    Its out-neighbours are told without asking. Any other peer announces that it waits, and is told
    as soon as the round is over. One announcement per member is kept, so that members cannot fill
    the memory of this peer.
    """

    def __init__(self, run: str, me: int, outbox: Callable[[int], Outbox], memory: int) -> None:
        self.run, self.me, self.outbox = run, me, outbox
        self.memory = memory  # past rounds for which the message counts are kept
        self._over = PRE_ROUND - 1  # the last round that is over
        self._sent: dict[int, Counter[int]] = {}  # round -> recipient -> messages so far
        self._waiting: dict[int, int] = {}  # peer -> the round in which it waits for this one

    def sent(self, round: int) -> Counter[int]:
        """The number of messages sent to each recipient in the round, for the sender to update."""
        return self._sent.setdefault(round, Counter())

    def is_over(self, round: int) -> bool:
        """Whether this peer sends nothing more in the round."""
        return round <= self._over

    def begin_round(self, round: int) -> None:
        """Mark all earlier rounds as over, whether they were run or skipped."""
        self._over = max(self._over, round - 1)
        for known in [known for known in self._sent if known < self._over - self.memory]:
            del self._sent[known]
        due = {peer: known for peer, known in self._waiting.items() if known <= self._over}
        for peer, known in due.items():
            del self._waiting[peer]
            self._tell(peer, known)

    def finish(self, round: int, out_neighbours: Iterable[int]) -> None:
        """Tell the out-neighbours that this peer sends nothing more in this round."""
        for peer in out_neighbours:
            self._waiting.pop(peer, None)
            self._tell(peer, round)
        self.begin_round(round + 1)

    def announced(self, peer: int, round: int) -> None:
        """Note that a peer waits for this one in a round; it repeats that until it is told."""
        if round > self._over:
            self._waiting[peer] = round
        elif self.outbox(peer).has_room_for_done():
            self._tell(peer, round)

    def _tell(self, peer: int, round: int) -> None:
        sent = self._sent.get(round, Counter[int]())[peer]
        header = done(run=self.run, round=round, sender=self.me, recipient=peer, sent=sent)
        self.outbox(peer).put(header)
