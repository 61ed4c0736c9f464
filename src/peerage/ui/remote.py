"""Asks the peers of a network on several machines for their status, as an observer."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_low
from time import monotonic
from typing import Any

from peerage.net.deploy.status import NetworkStatus
from peerage.report.series import thinned
from peerage.ui.drawing import layout

FRESH = 2.0  # seconds for which an answer is used again, however many pages are open
POINTS = 400  # of a curve
Peer = Mapping[str, Any]


@dataclass
class RemoteNetwork:
    """Asks all peers what they do, as `peerage status` does; it changes nothing."""

    file: Path
    identity: str
    certificates: Path
    curve: "Curve" = field(default_factory=lambda: Curve())
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _asked: float = -FRESH
    _answer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._status = NetworkStatus(self.file, self.identity, self.certificates)

    async def ask(self) -> dict[str, Any]:
        """The status of all peers, the drawing of their network, and the curve since the start."""
        async with self._lock:
            if monotonic() - self._asked > FRESH:
                async with self._status.connected():
                    peers = [one.facts for one in await self._status.ask()]
                self.curve.add(peers)
                self._answer = {
                    "peers": peers,
                    "drawing": drawing(peers),
                    "curve": self.curve.points(),
                }
                self._asked = monotonic()
            return self._answer


class Curve:
    """The accuracy that peers reported whenever they were asked."""

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float, float]] = {}  # round -> mean, least, most

    def add(self, peers: Sequence[Peer]) -> None:
        known = [
            (int(peer["round"]), float(peer["accuracy"]))
            for peer in peers
            if peer.get("accuracy") is not None and math.isfinite(peer["accuracy"])
        ]
        if known:
            values = [accuracy for _, accuracy in known]
            round = median_low(round for round, _ in known)
            self._points[round] = (fmean(values), min(values), max(values))
        if len(self._points) > 2 * POINTS:
            kept = thinned(sorted(self._points), POINTS)
            self._points = {round: self._points[round] for round in kept}

    def points(self) -> dict[str, list[float]]:
        rounds = sorted(self._points)
        means, lows, highs = ([self._points[r][part] for r in rounds] for part in range(3))
        return {"x": [float(r) for r in rounds], "y": means, "low": lows, "high": highs}


def drawing(peers: Sequence[Peer]) -> dict[str, Any]:
    """Places and links of the peers; a peer names those that it hears, or waits for in vain."""
    numbers = {str(peer["name"]): number for number, peer in enumerate(peers)}
    links: set[tuple[int, int]] = set()
    cut: set[tuple[int, int]] = set()
    for number, peer in enumerate(peers):
        for key, found in (("heard", links), ("missing", cut)):
            others = (numbers[name] for name in peer.get(key, ()) if name in numbers)
            found.update((min(number, other), max(number, other)) for other in others)
    edges = sorted(links | cut)
    return {
        "count": len(peers),
        "places": layout(len(peers), tuple(edges)),
        "edges": edges,
        "links": len(edges),
        "cut": sorted(cut),
        "gone": [number for number, peer in enumerate(peers) if peer.get("error")],
        "examples": [],
        "names": list(numbers),
    }
