"""Identifies peers whose messages make rounds fail although they passed every check."""


class Quarantine:
    """Finds the sender whose messages make rounds fail.

    After a failed round, all its senders are ignored, and one is readmitted after each round that
    succeeds. If a round then fails, the sender readmitted last is banned.
    """

    def __init__(self) -> None:
        self.banned_peers: set[int] = set()
        self._waiting: list[int] = []  # ignored senders, to be readmitted
        self._last: int | None = None  # the sender readmitted before this round

    def admits(self, sender: int) -> bool:
        return sender not in self.banned_peers and sender not in self._waiting

    def failed(self, senders: set[int]) -> None:
        """Note that a round failed with the messages of these senders."""
        if self._last in senders:
            self.banned_peers.add(self._last)
        else:
            self._waiting = sorted(senders)
        self._last = None

    def succeeded(self) -> None:
        self._last = self._waiting.pop(0) if self._waiting else None
