"""How long a peer waits for the message of another: learned from what it observed."""

from collections import defaultdict

LEAST = 1.0  # seconds that a reachable peer gets, even if it was silent for many rounds,
SHORTEST = 0.05  # unless all others are faster: then so long, or what the slowest of them needs
MEMORY = 8  # rounds whose observations count
MARGIN = 1.25  # times what a sender was observed to need


class Deadlines:
    """The seconds that each sender gets, at most `limit`.

    A sender that missed its deadline gets half as long the next time, and twice as long after it
    was heard in time. It always gets a little more than it was observed to need in the last
    rounds, also if its message came too late, and than the slowest of the others needed.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._allowed: dict[int, float] = {}  # sender -> seconds; all others get the limit
        self._needed: defaultdict[int, dict[int, float]] = defaultdict(dict)  # by sender and round
        self._begun: dict[int, float] = {}  # round -> when the node began to wait

    def seconds(self, sender: int) -> float:
        """How long to wait for the next message of this sender."""
        needed = max(self._needed[sender].values(), default=0.0)
        allowed = max(self._allowed.get(sender, self.limit), MARGIN * needed, self._least(sender))
        return min(allowed, self.limit)

    def _least(self, sender: int) -> float:
        """What a sender gets however often it was silent, so that it costs little time."""
        others = [max(all.values()) for one, all in self._needed.items() if one != sender and all]
        return min(max(MARGIN * max(others), SHORTEST), LEAST) if others else LEAST

    def begin(self, round: int, now: float) -> None:
        """Note that the node begins to wait for messages of the round."""
        self._begun[round] = now
        _trim(self._begun)

    def arrived(self, sender: int, round: int, now: float) -> None:
        """Note that a message has arrived, in time or late."""
        if round in self._begun:
            needed = self._needed[sender]
            needed[round] = max(now - self._begun[round], needed.get(round, 0.0))
            _trim(needed)

    def heard(self, sender: int) -> None:
        """Note that the message of this sender came in time."""
        if sender in self._allowed:
            self._allowed[sender] = min(2 * self._allowed[sender], self.limit)

    def missed(self, sender: int) -> None:
        """Note that this sender had its time and was not heard."""
        self._allowed[sender] = max(self._allowed.get(sender, self.limit) / 2, SHORTEST)


def _trim(by_round: dict[int, float]) -> None:
    while len(by_round) > MEMORY:
        del by_round[min(by_round)]
