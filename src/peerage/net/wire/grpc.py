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
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2

from peerage.errors import InputError
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire.address import Address
from peerage.net.wire.header import REASONS, Buffer, Header, Rejected, header_bytes
from peerage.net.wire.server import (
    OFFSET,
    REASON,
    SERVICE,
    Authenticator,
    Limits,
    PeerServicer,
    common_options,
    server_options,
    short,
)
from peerage.net.wire.transport import ANSWER_LIMIT, CHUNK, Receiver, Unreachable, wait_for

INITIAL_BACKOFF, MAX_BACKOFF = 0.1, 5.0  # seconds between attempts
BUSY_BACKOFF = 0.5  # the longest if the peer answers that it is busy
MIN_BACKOFF = 0.05  # the shortest, even if the peer disconnects again and again
LAST_ATTEMPT = 0.02  # seconds before a deadline in which no attempt starts
TOO_SHORT = "the time was too short for an attempt"
POLL_INTERVAL = 0.25  # seconds between two checks of a connection
PROBE_INTERVAL = 1.0  # seconds between attempts to restore a connection
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
    another one. Port 0 stands for any free port, and `port` has its number after the start.
    """

    def __init__(
        self,
        identity: Identity,
        names: Mapping[str, int],
        addresses: Mapping[int, str],
        *,
        bind: str | None = None,
        limits: Limits = Limits(),
    ) -> None:
        if identity.name not in names:
            raise InputError(
                f"the identity {identity.name!r} is not a member of the network; "
                f"members: {', '.join(sorted(names))}"
            )
        me = names[identity.name]
        if bind is None and me not in addresses:
            raise InputError(f"{identity.name!r} has no address; give one, or bind")
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # calls that this peer refused, by reason
        self.port = 0
        self._places = {
            peer: Address.parse(address, lowest=0) for peer, address in addresses.items()
        }
        self._bind = self._places[me] if bind is None else Address.parse(bind, lowest=0)
        self._names = {node: name for name, node in names.items()}
        self._limits = limits
        self._credentials = _Credentials(identity)
        self._authenticator = Authenticator(identity, names)
        self._last_seen: dict[int, float] = {}
        self._links: dict[int, _Link] = {}
        self._watching: asyncio.Task[None] | None = None
        self._jitter = random.Random(me)
        self._server: Any = None
        self._health = health.aio.HealthServicer()
        self._stopped = asyncio.Event()

    async def start(self, receiver: Receiver) -> None:
        servicer = PeerServicer(
            receiver,
            self._authenticator,
            self._limits,
            self.counters,
            self.refused,
            self._mark_alive,
        )
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

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        link = self._link(header.recipient)
        delivery = _Delivery(link, header_bytes(header), payload, self.counters)
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

    def reachable(self, peer: int) -> bool:
        """Whether the peer was alive recently; from now on its connection is monitored."""
        if peer not in self._places or self._stopped.is_set():
            return False
        link = self._link(peer)
        silence = asyncio.get_running_loop().time() - self._last_seen[peer]
        return not link.lost and silence < self._limits.idle_timeout

    async def stop(self) -> None:
        """Stop sending and receiving; running calls get `SHUTDOWN_TIMEOUT` to end."""
        self._stopped.set()
        for link in self._links.values():
            link.back.set()
        tasks = [self._watching, *(link.probe for link in self._links.values())]
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
        self, link: "_Link", attempt: Callable[[float], Awaitable[Result]], deadline: float
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

    async def _pause(self, link: "_Link", seconds: float) -> None:
        """Wait until the time is over, the peer is reachable again, or this one stops."""
        back, least = link.back, min(seconds, MIN_BACKOFF)
        await wait_for(self._stopped, least)
        await wait_for(back, seconds - least)

    def _unreachable(self, peer: int, how: str) -> Unreachable:
        if self._stopped.is_set():
            how = "any more: this peer has stopped"
        address = self._places[peer]
        return Unreachable(f"peer {peer} at {address} could not be reached {how}")

    def _backoff(self, link: "_Link") -> Iterator[float]:
        """Exponential backoff with jitter; restarts when bytes got through or the peer returned."""
        good, doublings = (link.progress, link.returns), itertools.count()
        while True:
            if good != (link.progress, link.returns):
                good, doublings = (link.progress, link.returns), itertools.count()
            most = BUSY_BACKOFF if link.busy else MAX_BACKOFF
            longest = min(INITIAL_BACKOFF * 2 ** min(next(doublings), 10), most)
            yield longest * self._jitter.uniform(0.5, 1)

    def _classify_error(self, link: "_Link", error: grpc.aio.AioRpcError) -> str:
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
            raise Rejected(
                "sender", f"peer {link.peer} rejected the certificate of this peer: {details}"
            )
        if code is Code.UNIMPLEMENTED:
            raise Rejected("schema", f"peer {link.peer} runs another version: {details}")
        link.busy = code is Code.RESOURCE_EXHAUSTED
        if link.busy:
            self.counters["full"] += 1
        return f"{code.name.lower()}: {details}"

    async def _verify_identity(self, link: "_Link") -> None:
        """Verify that the other end is the intended peer and has not been revoked.

        gRPC checks the name and the authority of a server, but supports no revocation list and does
        not expose the certificate. So a separate handshake fetches the certificate before each new
        connection. It is checked again before every call, in case it was revoked meanwhile.
        """
        async with link.lock:
            try:
                peer_certificate = link.peer_certificate
                if peer_certificate is None:
                    async with asyncio.timeout(self._limits.grace):
                        peer_certificate = await _fetch_certificate(
                            link.place, link.name, self._credentials.context
                        )
                self._authenticator.identify(peer_certificate)
            except TimeoutError:
                link.away = True
                raise TimeoutError("the peer does not answer") from None
            except (OSError, InputError):
                link.peer_certificate, link.lost, link.away = None, True, True
                raise
            if link.peer_certificate is None:
                link.peer_certificate = peer_certificate
                self._mark_alive(link.peer)

    async def _watch(self) -> None:
        """Monitor the connections, and probe peers that have none."""
        while True:
            for link in self._links.values():
                if link.up():
                    self._mark_alive(link.peer)
                elif link.peer_certificate is None and (link.probe is None or link.probe.done()):
                    link.probe = asyncio.create_task(self._probe(link))
            await asyncio.sleep(POLL_INTERVAL)

    async def _probe(self, link: "_Link") -> None:
        try:
            await self._verify_identity(link)
        except (OSError, InputError) as error:
            log.debug("peer %d is unreachable: %s", link.peer, error)
            await asyncio.sleep(PROBE_INTERVAL)

    def _mark_alive(self, peer: int) -> None:
        self._last_seen[peer] = asyncio.get_running_loop().time()
        if peer in self._links:
            self._links[peer].mark_alive()

    def _link(self, peer: int) -> "_Link":
        if peer not in self._places or peer not in self._names:
            raise InputError(f"the network file has no address or no identity of peer {peer}")
        if self._stopped.is_set():
            raise self._unreachable(peer, "")
        if peer not in self._links:
            name = server_name(self._names[peer])
            channel = grpc.aio.secure_channel(
                f"dns:///{self._places[peer]}",
                self._credentials.client(),
                options=[
                    ("grpc.ssl_target_name_override", name),
                    *_client_options(self._limits),
                ],
            )
            self._links[peer] = _Link(peer, self._places[peer], name, channel)
            self._last_seen.setdefault(peer, asyncio.get_running_loop().time())
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
        return self._links[peer]


@dataclass
class _Link:
    """The connection to one peer."""

    peer: int
    place: Address
    name: str  # that the peer's certificate must hold
    channel: Any
    probe: asyncio.Task[None] | None = None  # the latest attempt to verify the peer
    peer_certificate: bytes | None = None  # verified; None without a connection
    ready: bool = False  # whether the channel was ready at the last check
    lost: bool = False  # whether the last verification failed
    busy: bool = False  # whether the peer asked to retry later
    away: bool = False  # whether the last attempt to reach it failed
    returns: int = 0  # how often it was reachable again after being away
    back: asyncio.Event = field(default_factory=asyncio.Event)  # set at the next return
    progress: int = 0  # bytes of broken transfers that have arrived
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.deliver = self.channel.stream_unary(f"/{SERVICE}/Deliver")
        self.offset = self.channel.unary_unary(f"/{SERVICE}/Offset")
        self.ask = self.channel.unary_unary(f"/{SERVICE}/Ask")

    def mark_alive(self) -> None:
        """Note that the peer is alive, and wake the calls that wait for it."""
        self.lost = False
        if self.away:
            self.away = False
            self.returns += 1
            self.back.set()
            self.back = asyncio.Event()

    def up(self) -> bool:
        """Whether there is a connection; starts one if the peer is verified."""
        if self.peer_certificate is None:
            return False
        state = self.channel.get_state(try_to_connect=True)
        before, self.ready = self.ready, state is grpc.ChannelConnectivity.READY
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or (before and not self.ready):
            self.peer_certificate = None  # verify again after a reconnect
        return self.ready


class _Delivery:
    """The delivery of one message; resumes where an earlier attempt broke off."""

    def __init__(self, link: _Link, raw: bytes, payload: Buffer, counters: Counter[str]) -> None:
        self.maybe_accepted = False  # in an earlier attempt
        self._link, self._raw, self._payload, self._counters = link, raw, payload, counters
        self._offset = 0
        self._started = False
        self._sent_all = False  # whether some attempt has sent everything

    async def attempt(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        self.maybe_accepted = self._sent_all
        if self._started:
            await self._resume(seconds)
        self._started = True
        seconds = end - asyncio.get_running_loop().time()
        offset = ((OFFSET, str(self._offset)),)
        await self._link.deliver(self._messages(), timeout=seconds, metadata=offset)

    async def _resume(self, seconds: float) -> None:
        self._counters["bytes_sent"] += len(self._raw)
        answer = await self._link.offset(self._raw, timeout=seconds)
        offset, size = int.from_bytes(answer[:8], "big"), len(self._payload)
        if offset > size:
            raise Rejected("malformed", f"peer {self._link.peer} claims {offset} of {size} bytes")
        self._link.progress += max(offset - self._offset, 0)
        self._offset = offset

    def _messages(self) -> Iterator[bytes]:
        yield self._counted(self._raw)
        for begin in range(self._offset, len(self._payload), CHUNK):
            yield self._counted(bytes(self._payload[begin : begin + CHUNK]))
        self._sent_all = True

    def _counted(self, message: bytes) -> bytes:
        self._counters["bytes_sent"] += len(message)
        return message


class _Credentials:
    """The credentials of an identity for gRPC and for Python's `ssl`."""

    def __init__(self, identity: Identity) -> None:
        self._authority = identity.authority.read_bytes()
        self._pair = identity.key.read_bytes(), identity.certificate.read_bytes()
        self.context = ssl.create_default_context(cafile=identity.authority)
        self.context.load_cert_chain(identity.certificate, identity.key)
        self.context.set_alpn_protocols(["h2"])

    def server(self) -> Any:
        return grpc.ssl_server_credentials([self._pair], self._authority, require_client_auth=True)

    def client(self) -> Any:
        return grpc.ssl_channel_credentials(self._authority, *self._pair)


def _client_options(limits: Limits) -> list[tuple[str, int]]:
    """The gRPC options of a client: keepalive pings without calls, and fast reconnects."""
    milliseconds = round(1000 * limits.idle_timeout)
    return [
        *common_options(limits),
        ("grpc.keepalive_time_ms", milliseconds // 2),
        ("grpc.keepalive_timeout_ms", milliseconds // 2),
        ("grpc.http2.ping_timeout_ms", milliseconds // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.initial_reconnect_backoff_ms", round(1000 * INITIAL_BACKOFF)),
        ("grpc.min_reconnect_backoff_ms", round(1000 * limits.grace)),
        ("grpc.max_reconnect_backoff_ms", round(1000 * PROBE_INTERVAL)),
        ("grpc.enable_retries", 0),  # `_call_with_retries` retries, and resumes
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


async def _fetch_certificate(place: Address, name: str, context: ssl.SSLContext) -> bytes:
    """Fetch the certificate of the server at an address, in a handshake for this name.

    With TLS 1.3, a server rejects a client's certificate only after the handshake. If it accepts
    the certificate, it sends the first byte.
    """
    reader, writer = await asyncio.open_connection(*place, ssl=context, server_hostname=name)
    try:
        if not await reader.read(1):
            raise ConnectionResetError("the peer rejected the certificate of this peer")
        peer_certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(peer_certificate).encode("ascii")


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
