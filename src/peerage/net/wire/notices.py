"""Log lines about other peers: once per peer and reason, so that no peer can fill the log."""

import logging
from math import inf
from time import monotonic

LOG_INTERVAL = 60.0  # seconds between two log lines about the same kind of error
MAX_REASONS = 16  # about one peer; some reasons are texts that the peer chose


class Notices:
    """Logs a problem with a peer when it begins, and again only after it was settled."""

    def __init__(self, logger: logging.Logger) -> None:
        self._log = logger
        self._open: set[tuple[str, str]] = set()  # peer and reason
        self._logged: dict[tuple[str, str], float] = {}  # peer and reason -> when it was logged

    def warn(self, peer: str, reason: str, text: str) -> None:
        key = peer, reason
        if key in self._open:
            return
        known = sum(other == peer for other, _ in self._logged)
        if key not in self._logged and known >= MAX_REASONS:
            return
        self._open.add(key)
        now = monotonic()
        if now - self._logged.get(key, -inf) >= LOG_INTERVAL:
            self._logged[key] = now
            self._log.warning("%s", text)

    def settle(self, peer: str) -> None:
        """Note that there is no problem with this peer now."""
        self._open = {key for key in self._open if key[0] != peer}
