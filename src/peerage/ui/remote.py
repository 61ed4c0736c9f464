"""Asks the peers of a network on several machines for their status, as an observer."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from peerage.net.deploy.status import NetworkStatus

FRESH = 2.0  # seconds for which an answer is used again, however many pages are open


@dataclass
class RemoteNetwork:
    """Asks all peers what they do, as `peerage status` does; it changes nothing."""

    file: Path
    identity: str
    certificates: Path
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked: float = -FRESH
    _answer: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._status = NetworkStatus(self.file, self.identity, self.certificates)

    async def ask(self) -> list[dict[str, Any]]:
        async with self._lock:
            if monotonic() - self._asked > FRESH:
                async with self._status.connected():
                    self._answer = [one.facts for one in await self._status.ask()]
                self._asked = monotonic()
            return self._answer
