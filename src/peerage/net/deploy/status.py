"""Asks all peers of a network for their status."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peerage.net.peer.network import Network
from peerage.net.peer.report import Report
from peerage.net.trust.identity import Identity
from peerage.net.trust.signature import check_signature
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import CallerRefused, Unreachable

DEADLINE = 10.0  # seconds for the answer of a peer
RELAYS = 3  # peers that are asked for the status of one that dials out, until one knows it
NOBODY = "it dials out, and no peer that it dials has answered"


@dataclass(frozen=True)
class PeerStatus:
    """The report of a peer, or why there is none."""

    name: str
    address: str
    report: Report | None
    error: str | None = None
    by_way_of: str | None = None  # the peer that passed the report on
    age: float = 0.0  # of the report, in seconds

    @property
    def facts(self) -> dict[str, Any]:
        answer = {"error": self.error} if self.report is None else asdict(self.report)
        passed_on = {"by_way_of": self.by_way_of, "age": self.age} if self.by_way_of else {}
        return {"name": self.name, "address": self.address, **answer, **passed_on}


class NetworkStatus:
    """Asks the peers of a network, with the certificate of a member or of an observer."""

    def __init__(self, network: Path, identity: str, certificates: Path) -> None:
        check_signature(network, certificates)
        self._members = Network.load_members(network)
        self._identity = Identity.load(certificates, identity, observer=True)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        members = list(enumerate(self._members))
        self._transport = GrpcTransport(
            self._identity,
            {member.name: number for number, member in members},
            {number: member.address for number, member in members if not member.dials_out},
            member=False,
        )
        try:
            yield
        finally:
            await self._transport.stop()

    async def ask(self, seconds: float = DEADLINE) -> list[PeerStatus]:
        """The status of all peers, asked in parallel.

        The peers that dial out come last, by way of peers that have answered.
        """
        listening = [i for i, member in enumerate(self._members) if not member.dials_out]
        found = dict(
            zip(
                listening,
                await asyncio.gather(*(self._ask(number, seconds) for number in listening)),
                strict=True,
            )
        )
        there = [number for number in listening if found[number].report is not None]
        dialling = [i for i, member in enumerate(self._members) if member.dials_out]
        asked = (self._ask_others(number, there[:RELAYS], seconds) for number in dialling)
        found |= zip(dialling, await asyncio.gather(*asked), strict=True)
        return [found[number] for number in range(len(self._members))]

    async def _ask_others(self, number: int, others: Sequence[int], seconds: float) -> PeerStatus:
        """The status of a peer that dials out, as the first of these others passes it on."""
        name, error = self._members[number].name, NOBODY
        for other in others:
            via = self._members[other].name
            try:
                raw = await self._transport.ask_status(other, seconds, about=name)
            except (Unreachable, Rejected) as failure:
                error = f"{via} cannot ask it: {failure}"
                continue
            report = Report.parse(raw)
            if report is not None:
                return PeerStatus(name, "", report, by_way_of=via, age=age_in(raw))
            error = f"it has no connection to {via}, or does not answer"
        return PeerStatus(name, "", None, error)

    async def _ask(self, number: int, seconds: float) -> PeerStatus:
        member = self._members[number]
        report, error = None, None
        try:
            report = Report.parse(await self._transport.ask_status(number, seconds))
            if report is None:
                error = "its answer is not a report; it may run another version"
        except CallerRefused as refusal:
            error = f"it rejects {self._identity.name}: {refusal.details}"
        except (Unreachable, Rejected) as failure:
            error = self._transport.failure(number, 0.0) or str(failure)
        return PeerStatus(member.name, member.address, report, error)


def age_in(raw: bytes) -> float:
    """The age of a report that was passed on, in seconds; the answer was parsed before."""
    try:
        return max(0.0, float(json.loads(raw)["age"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return 0.0
