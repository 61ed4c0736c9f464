"""The status of peers that dial out, for members and observers: nobody else can ask them.

A peer that they dial passes the question on through their tunnel. It asks each of them at most once
per `FRESH` seconds, however many ask, and keeps the last report.
"""

import asyncio
import json
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING

from peerage.net.peer.report import Report
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import QUERY_TIMEOUT, Unreachable

if TYPE_CHECKING:
    from peerage.net.peer.peer import Peer

FRESH = 1.0  # seconds in which a report is not asked for again


class StatusRelay:
    """The last report of each peer that dials out, and how old it is."""

    def __init__(self, peer: "Peer") -> None:
        self._peer = peer
        self._last: dict[int, tuple[float, Report]] = {}
        self._asked: dict[int, float] = {}  # when the last question was answered or failed
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def report_of(self, name: str) -> bytes:
        """The report of the peer with this name, with its age in seconds; or an error."""
        network = self._peer.network
        number = next((i for i in network.dialling if network.members[i].name == name), None)
        if number is None or not network.can_talk(self._peer.me, number):
            raise Rejected("malformed", f"{name[:63]!r} is not a peer that dials this one")
        now = asyncio.get_running_loop().time
        async with self._locks[number]:
            if now() >= self._asked.get(number, -FRESH) + FRESH:
                await self._ask(number)
                self._asked[number] = now()
        if number not in self._last:
            return json.dumps({"error": f"{name} has not connected, or does not answer"}).encode()
        since, report = self._last[number]
        return json.dumps({**asdict(report), "age": round(now() - since, 1)}).encode()

    async def _ask(self, number: int) -> None:
        try:
            report = Report.parse(await self._peer.transport.ask_status(number, QUERY_TIMEOUT))
        except (Unreachable, Rejected):
            return
        if report is not None:
            self._last[number] = asyncio.get_running_loop().time(), report
