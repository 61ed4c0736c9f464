"""Whose messages break the rounds of a node, although they passed every check."""


class Quarantine:
    """After a round that failed, nobody who was heard in it is heard; then one more every round.

    When it fails again, it was the one who came last, who is left out for good.
    """

    def __init__(self) -> None:
        self.banned_peers: set[int] = set()
        self._waiting: list[int] = []  # to be heard again
        self._last: int | None = None  # who was let in again before this round

    def admits(self, sender: int) -> bool:
        return sender not in self.banned_peers and sender not in self._waiting

    def failed(self, heard: set[int]) -> None:
        """A round could not be played with the messages of these."""
        if self._last in heard:
            self.banned_peers.add(self._last)
        else:
            self._waiting = sorted(heard)
        self._last = None

    def succeeded(self) -> None:
        self._last = self._waiting.pop(0) if self._waiting else None
