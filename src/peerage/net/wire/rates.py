"""Limits on how often something may happen."""

from math import inf


class TokenBucket:
    """Allows `rate` events per second, and `burst` at once after a pause.

    An event that comes too early is refused (`take`), or is told how long to wait (`wait`).
    """

    def __init__(self) -> None:
        self._tokens, self._filled = inf, 0.0  # full at first

    def take(self, rate: float, burst: float, now: float) -> bool:
        """Whether an event is allowed now; one that is not does not count."""
        self._fill(rate, burst, now)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def wait(self, rate: float, burst: float, now: float) -> float:
        """Seconds that an event must wait; it counts, so the next one waits longer."""
        self._fill(rate, burst, now)
        self._tokens -= 1
        return max(-self._tokens / rate, 0.0)

    def _fill(self, rate: float, burst: float, now: float) -> None:
        self._tokens = min(burst, self._tokens + rate * (now - self._filled))
        self._filled = now
