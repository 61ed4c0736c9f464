"""Messages between peers over gRPC and mutual TLS: the sending side.

Both ends authenticate each other. A server (`server`, which also has the methods) checks the
certificate of every call before it reads from it. A client accepts only the certificate that was
issued for the peer that it calls.
"""

import asyncio
import errno
import itertools
import logging
import random
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2

from peerage.errors import InputError
from peerage.net.trust import identity as identities
from peerage.net.trust.expiry import ExpiryWarnings
from peerage.net.trust.identity import CertificateRejected, Identity, server_name
from peerage.net.wire.address import Address
from peerage.net.wire.credentials import Credentials, describe, fetch_certificate
from peerage.net.wire.header import REASONS, Buffer, Header, Rejected, header_bytes
from peerage.net.wire.link import (
    INITIAL_BACKOFF,
    MAX_BACKOFF,
    PROBE_INTERVAL,
    Delivery,
    Link,
    client_options,
)
from peerage.net.wire.notices import Notices
from peerage.net.wire.server import (
    OBSERVER,
    REASON,
    SERVICE,
    Authenticator,
    Limits,
    PeerServicer,
    server_options,
    short,
)
from peerage.net.wire.transport import (
    ANSWER_LIMIT,
    CallerRefused,
    Receiver,
    Unreachable,
    wait_for,
)

BUSY_BACKOFF = 0.5  # the longest if the peer answers that it is busy
MIN_BACKOFF = 0.05  # the shortest, even if the peer disconnects again and again
LAST_ATTEMPT = 0.02  # seconds before a deadline in which no attempt starts
TOO_SHORT = "the time was too short for an attempt"
POLL_INTERVAL = 0.25  # seconds between two checks of a connection
RENEWAL_INTERVAL = 1.0  # seconds between two checks of the own certificate
RETIREMENT = 60.0  # seconds for calls that began with the previous certificate
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
log = logging.getLogger(__name__)


class GrpcTransport:
    """Carries messages to the peers at these addresses (`host:port`).

    `names` maps each identity to its node. The peer listens on its own address unless `bind` names
    another one. Port 0 stands for any free port, and `port` has its number after the start. Without
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
    ) -> None:
        if member and identity.name not in names:
            raise InputError(
                f"the identity {identity.name!r} is not a member of the network; "
                f"members: {', '.join(sorted(names))}"
            )
        me = names.get(identity.name, OBSERVER)
        if member and bind is None and me not in addresses:
            raise InputError(f"{identity.name!r} has no address; give one, or bind")
        self.counters: Counter[str] = Counter()
        # Calls that this peer refused, by the name of the caller and the reason.
        self.refused_by_peer: Counter[tuple[str, str]] = Counter()
        self.port = 0
        self._places = {
            peer: Address.parse(address, lowest=0) for peer, address in addresses.items()
        }
        self._bind = self._places.get(me) if bind is None else Address.parse(bind, lowest=0)
        self._names = {node: name for name, node in names.items()}
        self._limits = limits
        self._credentials = Credentials(identity, observer=not member)
        self._serial = self._credentials.serial  # of the certificate that the channels use
        self._expiry = ExpiryWarnings(identity.name)
        self._notices = Notices(log)
        self._authenticator = Authenticator(identity, names)
        self._last_seen: dict[int, float] = {}
        self._links: dict[int, Link] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()  # of channels with an old certificate
        self._jitter = random.Random(me)
        self._server: Any = None
        self._health = health.aio.HealthServicer()
        self._stopped = asyncio.Event()

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
        return self._credentials.expires

    async def start(self, receiver: Receiver) -> None:
        servicer = PeerServicer(
            receiver,
            self._authenticator,
            self._limits,
            self.counters,
            self.refused_by_peer,
            self._mark_alive,
        )
        assert self._bind is not None
        _check_free(self._bind)
        server = grpc.aio.server(options=server_options(self._limits))
        server.add_generic_rpc_handlers(servicer.services(self._health))
        try:
            self.port = server.add_secure_port(str(self._bind), self._credentials.server())
        except RuntimeError as error:
            raise InputError(f"cannot listen on {self._bind}: {error}") from None
        await server.start()
        self._server = server
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._start_watching()

    def add_members(self, names: Mapping[str, int], addresses: Mapping[int, str]) -> None:
        for name, node in names.items():
            if node not in self._names:
                self._names[node] = name
                self._places[node] = Address.parse(addresses[node], lowest=0)
                self._authenticator.add(name, node)

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        link = self._link(header.recipient)
        delivery = Delivery(link, header_bytes(header), payload, self.counters)
        try:
            await self._call_with_retries(link, delivery.attempt, deadline)
        except Rejected as error:
            # An earlier attempt was accepted, and its answer was lost.
            if not (error.reason == "replayed" and delivery.maybe_accepted):
                raise

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        link = self._link(peer)

        async def attempt(seconds: float) -> bytes:
            self.counters["bytes_sent"] += len(question)
            answer: bytes = await link.ask(question, timeout=seconds)
            self.counters["bytes_received"] += len(answer)
            if len(answer) > ANSWER_LIMIT:
                raise Rejected("oversized", f"peer {peer} answered with {len(answer)} bytes")
            return answer

        return await self._call_with_retries(link, attempt, deadline)

    async def ask_status(self, peer: int, deadline: float) -> bytes:
        """The report of a peer about itself, which observers may ask for as well."""
        link = self._link(peer)

        async def attempt(seconds: float) -> bytes:
            answer: bytes = await link.status(b"", timeout=seconds)
            return answer

        return await self._call_with_retries(link, attempt, deadline)

    def reachable(self, peer: int) -> bool:
        """Whether the peer was alive recently; from now on its connection is monitored."""
        if peer not in self._places or self._stopped.is_set():
            return False
        link = self._link(peer)
        silence = asyncio.get_running_loop().time() - self._last_seen[peer]
        return not link.lost and silence < self._limits.idle_timeout

    def failure(self, peer: int, since: float) -> str | None:
        """Why the last attempt to reach a peer failed, if it began after `since`."""
        if peer not in self._places or self._stopped.is_set():
            return None
        link = self._link(peer)
        return link.failure if link.failure_began >= since else None

    async def stop(self) -> None:
        """Stop sending and receiving; running calls get `SHUTDOWN_TIMEOUT` to end."""
        self._stopped.set()
        for link in self._links.values():
            link.back.set()
        tasks = [self._watching, *(link.probe for link in self._links.values()), *self._closing]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(SHUTDOWN_TIMEOUT)
        for link in self._links.values():
            await link.channel.close()

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
                    await self._verify_identity(link)
                if not self._stopped.is_set():
                    result = await attempt(end - now())
                    self._mark_alive(link.peer)
                    return result
            except grpc.aio.AioRpcError as error:
                description = self._classify_error(link, error)
                # If the deadline ended the last attempt, an earlier error says more.
                if error.code() is not Code.DEADLINE_EXCEEDED or failure == TOO_SHORT:
                    failure = description
            except (OSError, InputError) as error:
                failure = str(error) or failure
            except asyncio.CancelledError:
                if _cancelled() or not self._stopped.is_set():
                    raise
            left = end - now()
            if left < LAST_ATTEMPT or self._stopped.is_set():
                break
            self.counters["retries"] += 1
            await self._pause(link, min(wait, left / 2))
        raise self._unreachable(link.peer, f"within {deadline:g} s: {failure}")

    async def _pause(self, link: Link, seconds: float) -> None:
        """Wait until the time is over, the peer is reachable again, or this one stops."""
        back, least = link.back, min(seconds, MIN_BACKOFF)
        await wait_for(self._stopped, least)
        await wait_for(back, seconds - least)

    def _unreachable(self, peer: int, how: str) -> Unreachable:
        if self._stopped.is_set():
            how = "any more: this peer has stopped"
        address = self._places[peer]
        return Unreachable(f"peer {peer} at {address} could not be reached {how}")

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
            self._mark_alive(link.peer)
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

    async def _verify_identity(self, link: Link) -> None:
        """Verify that the other end is the intended peer and has not been revoked.

        gRPC checks the name and the authority of a server, but supports no revocation list and does
        not expose the certificate. So a separate handshake fetches the certificate before each new
        connection. It is checked again before every call. If it was revoked meanwhile, the peer may
        have a new one, which requires a new connection.
        """
        async with link.lock:
            began = asyncio.get_running_loop().time()
            try:
                if self._still_valid(link):
                    return
                async with asyncio.timeout(self._limits.grace):
                    peer_certificate = await fetch_certificate(
                        link.place, link.name, self._credentials.context
                    )
                self._authenticator.identify(peer_certificate)
            except TimeoutError:
                link.away = True
                link.failure, link.failure_began = "the peer does not answer", began
                raise TimeoutError(link.failure) from None
            except (OSError, InputError) as error:
                link.peer_certificate, link.lost, link.away = None, True, True
                link.failure, link.failure_began = describe(error), began
                if isinstance(error, ssl.SSLError):
                    name = self._names[link.peer]
                    text = f"cannot connect to {name} at {link.place}: {link.failure}"
                    self._notices.warn(name, link.failure, text)
                raise
            link.failure, link.peer_certificate = None, peer_certificate
            self._notices.settle(self._names[link.peer])
            self._mark_alive(link.peer)

    def _still_valid(self, link: Link) -> bool:
        """Whether the verified certificate of a peer is still valid; if not, disconnects."""
        if link.peer_certificate is None:
            return False
        try:
            self._authenticator.identify(link.peer_certificate, quiet=True)
        except CertificateRejected:
            link.peer_certificate = None
            self._replace_channel(link)
            return False
        return True

    async def _watch(self) -> None:
        """Monitor the connections and the own certificate, and probe peers without connection."""
        now = asyncio.get_running_loop().time
        renewal = now()
        while True:
            if now() >= renewal:
                renewal = now() + RENEWAL_INTERVAL
                self._renew()
            for link in self._links.values():
                if link.up():
                    self._mark_alive(link.peer)
                elif link.peer_certificate is None and (link.probe is None or link.probe.done()):
                    link.probe = asyncio.create_task(self._probe(link))
            await asyncio.sleep(POLL_INTERVAL)

    async def _probe(self, link: Link) -> None:
        try:
            await self._verify_identity(link)
        except (OSError, InputError) as error:
            log.debug("peer %d is unreachable: %s", link.peer, error)
            await asyncio.sleep(PROBE_INTERVAL)

    def _mark_alive(self, peer: int) -> None:
        self._last_seen[peer] = asyncio.get_running_loop().time()
        if peer in self._links:
            self._links[peer].mark_alive()

    def _link(self, peer: int) -> Link:
        if peer not in self._places or peer not in self._names:
            raise InputError(f"the network file has no address or no identity of peer {peer}")
        if self._stopped.is_set():
            raise self._unreachable(peer, "")
        if peer not in self._links:
            channel, place = self._channel(peer), self._places[peer]
            self._links[peer] = Link(peer, place, server_name(self._names[peer]), channel)
            self._last_seen.setdefault(peer, asyncio.get_running_loop().time())
            self._start_watching()
        return self._links[peer]

    def _channel(self, peer: int) -> Any:
        return grpc.aio.secure_channel(
            f"dns:///{self._places[peer]}",
            self._credentials.client(),
            options=[
                ("grpc.ssl_target_name_override", server_name(self._names[peer])),
                *client_options(self._limits),
            ],
        )

    def _start_watching(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _renew(self) -> None:
        """Use a replaced certificate for new connections, and warn before it expires."""
        self._credentials.renew()  # or a handshake of the server has done so

        self._expiry.check(self._credentials.expires, identities.now())
        if self._credentials.serial == self._serial:
            return
        self._serial = self._credentials.serial
        for link in self._links.values():
            self._replace_channel(link)

    def _replace_channel(self, link: Link) -> None:
        """Connect again for the next calls; the running ones get `RETIREMENT` to end."""
        old = link.replace_channel(self._channel(link.peer))
        closing = asyncio.create_task(old.close(RETIREMENT))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _check_free(place: Address) -> None:
    """Raise InputError if the address is not free; the error of gRPC would not say why."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        socket.create_server(place, family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {place.port} of {place.host} is in use; stop the process that listens "
                "there, or choose another port"
            ) from None
        raise InputError(
            f"cannot listen on {place}: {error.strerror}; "
            "choose an address of this machine and a port above 1023"
        ) from None


def _cancelled() -> bool:
    """Whether the current task was cancelled, rather than the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
