"""Messages between peers over gRPC and mutual TLS: the sending side.

Both ends authenticate each other. A server (`server`, which also has the methods) checks the
certificate of every call before it reads from it. A client accepts only the certificate that was
issued for the peer that it calls.
"""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from datetime import datetime
from time import monotonic
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2

from peerage.errors import InputError
from peerage.net.trust.identity import Identity
from peerage.net.wire.acceptor import Acceptor, open_files_limit
from peerage.net.wire.address import Address
from peerage.net.wire.admission import Admission
from peerage.net.wire.connections import Connections
from peerage.net.wire.dialler import Dialler
from peerage.net.wire.header import REASONS, Buffer, Header, Rejected, header_bytes
from peerage.net.wire.limits import Limits
from peerage.net.wire.link import INITIAL_BACKOFF, MAX_BACKOFF, Delivery, Link
from peerage.net.wire.server import (
    OBSERVER,
    REASON,
    SERVICE,
    PeerServicer,
    server_options,
    short,
)
from peerage.net.wire.transport import (
    ANSWER_LIMIT,
    CallerRefused,
    Receiver,
    wait_for,
    was_cancelled,
)

BUSY_BACKOFF = 0.5  # the longest if the peer answers that it is busy
MIN_BACKOFF = 0.05  # the shortest, even if the peer disconnects again and again
LAST_ATTEMPT = 0.02  # seconds before a deadline in which no attempt starts
TOO_SHORT = "the time was too short for an attempt"
SHUTDOWN_TIMEOUT = 0.5  # seconds for calls to end when the transport stops

Result = TypeVar("Result")
Code = grpc.StatusCode
# Codes that only the other peer sends; other codes may come from gRPC on this side.
ANSWERS = (
    Code.ABORTED,
    Code.FAILED_PRECONDITION,
    Code.OUT_OF_RANGE,
    Code.PERMISSION_DENIED,
    Code.RESOURCE_EXHAUSTED,
    Code.UNAUTHENTICATED,
)


class GrpcTransport:
    """Carries messages to the peers at these addresses (`host:port`).

    `names` maps each identity to its node. The peer listens on its own address unless `bind` names
    another one. Port 0 stands for any free port, and `port` has its number after the start. The
    nodes in `dialling` have no address: they are called over tunnels that they open. Without
    `member`, it only asks for the status of others, and any identity can do that.
    """

    def __init__(
        self,
        identity: Identity,
        names: Mapping[str, int],
        addresses: Mapping[int, str],
        *,
        bind: str | None = None,
        limits: Limits = Limits(),
        member: bool = True,
        dialling: Collection[int] = (),
    ) -> None:
        if member and identity.name not in names:
            raise InputError(
                f"the identity {identity.name!r} is not a member of the network; "
                f"members: {', '.join(sorted(names))}"
            )
        me = names.get(identity.name, OBSERVER)
        if member and bind is None and me not in {*addresses, *dialling}:
            raise InputError(f"{identity.name!r} has no address; give one, or bind")
        self.counters: Counter[str] = Counter()
        # Calls that this peer refused, by the name of the caller and the reason.
        self.refused_by_peer: Counter[tuple[str, str]] = Counter()
        self.port = 0
        self._limits = limits
        self._connections = Connections(
            identity, names, addresses, limits, me=me, member=member, dialling=dialling
        )
        self._bind = (
            self._connections.places.get(me) if bind is None else Address.parse(bind, lowest=0)
        )
        self._dials_out = me in dialling
        self._dialler: Dialler | None = None
        self._jitter = random.Random(me)
        self._server: Any = None
        self.admission = Admission(limits, monotonic, open_files_limit())
        self.admission.members = len(names)
        self._acceptor = Acceptor(self.admission, limits)
        self._health = health.aio.HealthServicer()

    @property
    def refused(self) -> Counter[str]:
        """The calls that this peer refused, by reason."""
        found: Counter[str] = Counter()
        for (_, reason), count in dict(self.refused_by_peer).items():
            found[reason] += count
        return found

    @property
    def expires(self) -> datetime:
        """When the certificate of this peer expires."""
        return self._connections.expires

    async def start(self, receiver: Receiver) -> None:
        connections = self._connections
        servicer = PeerServicer(
            receiver,
            connections.authenticator,
            self._limits,
            self.counters,
            self.refused_by_peer,
            connections.mark_alive,
            connections.open_tunnel,
            self._acceptor,
        )
        if self._bind is not None:
            await self._listen(servicer, self._bind)
        if self._dials_out:
            self._dialler = Dialler(
                connections.names,
                servicer.methods,
                self._limits,
                connections.verify,
                connections.channel,
            )
            self._dialler.open(connections.link(peer) for peer in connections.places)
        connections.watch()

    async def _listen(self, servicer: PeerServicer, place: Address) -> None:
        server = grpc.aio.server(options=server_options(self._limits))
        server.add_generic_rpc_handlers(servicer.services(self._health))
        credentials = self._connections.credentials.server()
        self._acceptor.listen(place, lambda path: server.add_secure_port(path, credentials))
        self.port = self._acceptor.port
        await server.start()
        self._server = server
        self._acceptor.start()
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)

    def add_members(self, names: Mapping[str, int], addresses: Mapping[int, str]) -> None:
        connections = self._connections
        new = connections.add_members(names, addresses)
        self.admission.members = len(connections.names)
        if self._dialler is not None:
            self._dialler.open(connections.link(peer) for peer in new if peer in addresses)

    def revoked(self) -> frozenset[int]:
        return self._connections.authenticator.revoked()

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        link = self._connections.link(header.recipient)
        delivery = Delivery(link, header_bytes(header), payload, self.counters)
        try:
            await self._call_with_retries(link, delivery.attempt, deadline)
        except Rejected as error:
            # An earlier attempt was accepted, and its answer was lost.
            if not (error.reason == "replayed" and delivery.maybe_accepted):
                raise

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        link = self._connections.link(peer)

        async def attempt(seconds: float) -> bytes:
            self.counters["bytes_sent"] += len(question)
            answer: bytes = await link.ask(question, timeout=seconds)
            self.counters["bytes_received"] += len(answer)
            if len(answer) > ANSWER_LIMIT:
                raise Rejected("oversized", f"peer {peer} answered with {len(answer)} bytes")
            return answer

        return await self._call_with_retries(link, attempt, deadline)

    async def ask_status(self, peer: int, deadline: float, about: str = "") -> bytes:
        """The report of a peer, which observers may ask for as well."""
        link = self._connections.link(peer)

        async def attempt(seconds: float) -> bytes:
            answer: bytes = await link.status(about.encode(), timeout=seconds)
            return answer

        return await self._call_with_retries(link, attempt, deadline)

    def reachable(self, peer: int) -> bool:
        return self._connections.reachable(peer)

    def failure(self, peer: int, since: float) -> str | None:
        return self._connections.failure(peer, since)

    def release(self, peer: int) -> None:
        self._connections.release(peer)

    async def stop(self) -> None:
        """Stop sending and receiving; running calls get `SHUTDOWN_TIMEOUT` to end."""
        await self._connections.stop_watching()
        if self._dialler is not None:
            await self._dialler.stop(SHUTDOWN_TIMEOUT)
        for tunnel in self._connections.tunnels.values():
            await tunnel.close()
        await self._health.enter_graceful_shutdown()
        self._acceptor.stop_listening()
        if self._server is not None:
            await self._server.stop(SHUTDOWN_TIMEOUT)
        await self._acceptor.stop()
        await self._connections.close()

    async def _call_with_retries(
        self, link: Link, attempt: Callable[[float], Awaitable[Result]], deadline: float
    ) -> Result:
        """Try until the call succeeds, is rejected for good, or `deadline` seconds have passed."""
        now = asyncio.get_running_loop().time
        end = now() + deadline
        failure = TOO_SHORT
        for wait in self._backoff(link):
            try:
                async with asyncio.timeout_at(end):
                    await self._connections.verify(link)
                if not self._connections.stopped.is_set():
                    result = await attempt(end - now())
                    self._connections.mark_alive(link.peer)
                    return result
            except grpc.aio.AioRpcError as error:
                description = self._classify_error(link, error)
                # If the deadline ended the last attempt, an earlier error says more.
                if error.code() is not Code.DEADLINE_EXCEEDED or failure == TOO_SHORT:
                    failure = description
            except (OSError, InputError) as error:
                failure = str(error) or failure
            except asyncio.CancelledError:
                if was_cancelled() or not self._connections.stopped.is_set():
                    raise
            left = end - now()
            if left < LAST_ATTEMPT or self._connections.stopped.is_set():
                break
            self.counters["retries"] += 1
            await self._pause(link, min(wait, left / 2))
        raise self._connections.unreachable(link.peer, f"within {deadline:g} s: {failure}")

    async def _pause(self, link: Link, seconds: float) -> None:
        """Wait until the time is over, the peer is reachable again, or this one stops."""
        back, least = link.back, min(seconds, MIN_BACKOFF)
        await wait_for(self._connections.stopped, least)
        await wait_for(back, seconds - least)

    def _backoff(self, link: Link) -> Iterator[float]:
        """Exponential backoff with jitter; restarts when bytes got through or the peer returned."""
        good, doublings = (link.progress, link.returns), itertools.count()
        while True:
            if good != (link.progress, link.returns):
                good, doublings = (link.progress, link.returns), itertools.count()
            most = BUSY_BACKOFF if link.busy else MAX_BACKOFF
            longest = min(INITIAL_BACKOFF * 2 ** min(next(doublings), 10), most)
            yield longest * self._jitter.uniform(0.5, 1)

    def _classify_error(self, link: Link, error: grpc.aio.AioRpcError) -> str:
        """Describe an error after which another attempt may help; raises `Rejected` if none can."""
        code, details = error.code(), short(error.details() or "")
        reason = dict(error.trailing_metadata() or ()).get(REASON)
        if code is Code.UNAVAILABLE:
            link.peer_certificate = None  # verify again after a reconnect
        elif code in ANSWERS:
            self._connections.mark_alive(link.peer)
        if code is Code.FAILED_PRECONDITION and reason in REASONS:
            raise Rejected(reason, details)
        if code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
            raise CallerRefused(link.peer, details)
        if code is Code.UNIMPLEMENTED:
            raise Rejected("schema", f"peer {link.peer} runs another version: {details}")
        link.busy = code is Code.RESOURCE_EXHAUSTED
        if link.busy:
            self.counters["full"] += 1
        return f"{code.name.lower()}: {details}"
