"""Asks all peers of a network for their status."""

import asyncio
from collections.abc import AsyncIterator
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


@dataclass(frozen=True)
class PeerStatus:
    """The report of a peer, or why there is none."""

    name: str
    address: str
    report: Report | None
    error: str | None = None

    @property
    def facts(self) -> dict[str, Any]:
        answer = {"error": self.error} if self.report is None else asdict(self.report)
        return {"name": self.name, "address": self.address, **answer}


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
            {number: member.address for number, member in members},
            member=False,
        )
        try:
            yield
        finally:
            await self._transport.stop()

    async def ask(self, seconds: float = DEADLINE) -> list[PeerStatus]:
        """The status of all peers, asked in parallel."""
        asked = (self._ask(number, seconds) for number in range(len(self._members)))
        return list(await asyncio.gather(*asked))

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
