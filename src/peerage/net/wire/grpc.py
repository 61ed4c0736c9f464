"""Messages between peers over gRPC and mutual TLS; who speaks is known before anything is read.

Both ends check each other: a server looks at the certificate of every call before it reads from it
(desk.py, which has the methods too), and a client believes only the certificate that was issued for
the peer that it means. Here is the sending side.
"""

import asyncio
import contextlib
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
    DEFAULT_LIMITS,
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
from peerage.net.wire.transport import ANSWER_LIMIT, CHUNK, Receiver, Unreachable

__all__ = ["GrpcTransport", "Limits"]

INITIAL_BACKOFF, MAX_BACKOFF = 0.1, 5.0  # seconds between attempts,
SOON = 0.5  # at most so many if the peer is there and asks to come again later,
MIN_BACKOFF = 0.05  # and at least so many even if the peer comes and goes all the time
LAST_ATTEMPT = 0.02  # seconds before a deadline in which no attempt begins
TOO_SHORT = "the time was too short for an attempt"
POLL_INTERVAL, PROBE = (
    0.25,
    1.0,
)  # seconds between looks at a connection, and attempts to get one back
SHUTDOWN_TIMEOUT = 0.5  # seconds that calls have to end when the transport stops

Result = TypeVar("Result")
Code = grpc.StatusCode
# What only a peer says; other codes may come from gRPC on this side.
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
    """Carries messages between peers at these addresses (`host:port`) that hold certificates.

    `names` says which node each identity is. The own address is where it listens, unless `bind`
    names another one; port 0 stands for any, and `port` tells which after the start.
    """

    def __init__(
        self,
        identity: Identity,
        names: Mapping[str, int],
        addresses: Mapping[int, str],
        *,
        bind: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        if identity.name not in names:
            raise InputError(
                f"the identity {identity.name!r} is not a member of the network; "
                f"members: {', '.join(sorted(names))}"
            )
        me = names[identity.name]
        if bind is None and me not in addresses:
            raise InputError(f"there is no address of {identity.name!r}; say where it listens")
        self.counters: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # calls that were refused here, by reason
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
        desk = PeerServicer(
            receiver,
            self._authenticator,
            self._limits,
            self.counters,
            self.refused,
            self._mark_alive,
        )
        _check_free(self._bind)
        options = [*common_options(self._limits), *server_options(self._limits)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers(desk.services(self._health))
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
            # The answer to an earlier attempt got lost: it was taken then.
            if not (error.reason == "replayed" and delivery.maybe_taken):
                raise

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes:
        link = self._link(peer)

        async def attempt(seconds: float) -> bytes:
            self.counters["bytes_sent"] += len(question)
            answer: bytes = await link.ask(question, timeout=seconds)
            self.counters["bytes_received"] += len(answer)
            if len(answer) > ANSWER_LIMIT:
                raise Rejected("oversized", f"peer {peer} answers with {len(answer)} bytes")
            return answer

        return await self._call_with_retries(link, attempt, deadline)

    def reachable(self, peer: int) -> bool:
        """Whether there is any hope to hear from a peer soon: from now on it is watched."""
        if peer not in self._places or self._stopped.is_set():
            return False
        link = self._link(peer)
        silence = asyncio.get_running_loop().time() - self._last_seen[peer]
        return not link.lost and silence < self._limits.idle_timeout

    async def stop(self) -> None:
        """Send and take nothing more; what is under way has a moment to end."""
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
        """Try until it works, it is refused for good, or so many seconds have passed."""
        now = asyncio.get_running_loop().time
        end = now() + deadline
        trouble = TOO_SHORT
        for wait in self._backoff(link):
            try:
                async with asyncio.timeout_at(end):
                    await self._verify_identity(link)
                if not self._stopped.is_set():
                    result = await attempt(end - now())
                    self._mark_alive(link.peer)
                    return result
            except grpc.aio.AioRpcError as error:
                judged = self._classify_error(link, error)
                # If the deadline ended the last attempt, an earlier one knows more.
                if error.code() is not Code.DEADLINE_EXCEEDED or trouble == TOO_SHORT:
                    trouble = judged
            except (OSError, InputError) as error:
                trouble = str(error) or trouble
            except asyncio.CancelledError:
                if _cancelled() or not self._stopped.is_set():
                    raise
            left = end - now()
            if left < LAST_ATTEMPT or self._stopped.is_set():
                break
            self.counters["retries"] += 1
            await self._pause(link, min(wait, left / 2))
        raise self._unreachable(link.peer, f"within {deadline:g} s: {trouble}")

    async def _pause(self, link: "_Link", seconds: float) -> None:
        """Wait, but no longer once a peer that was away is back, or this one stops."""
        back, least = link.back, min(seconds, MIN_BACKOFF)
        await _happens(self._stopped, least)
        await _happens(back, seconds - least)

    def _unreachable(self, peer: int, how: str) -> Unreachable:
        if self._stopped.is_set():
            how = "any more: this peer has stopped"
        address = self._places[peer]
        return Unreachable(f"peer {peer} at {address} could not be reached {how}")

    def _backoff(self, link: "_Link") -> Iterator[float]:
        """Growing, random pauses, short again when bytes got through or the peer came back."""
        good, doublings = (link.progress, link.returns), itertools.count()
        while True:
            if good != (link.progress, link.returns):
                good, doublings = (link.progress, link.returns), itertools.count()
            most = SOON if link.busy else MAX_BACKOFF
            longest = min(INITIAL_BACKOFF * 2 ** min(next(doublings), 10), most)
            yield longest * self._jitter.uniform(0.5, 1)

    def _classify_error(self, link: "_Link", error: grpc.aio.AioRpcError) -> str:
        """What went wrong, if another attempt may help; raises `Rejected` if none can."""
        code, details = error.code(), short(error.details() or "")
        reason = dict(error.trailing_metadata() or ()).get(REASON)
        if code is Code.UNAVAILABLE:
            link.peer_certificate = None  # whoever answers next must be looked at again
        elif code in ANSWERS:
            self._mark_alive(link.peer)
        if code is Code.FAILED_PRECONDITION and reason in REASONS:
            raise Rejected(reason, details)
        if code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
            raise Rejected("sender", f"peer {link.peer} does not believe this one: {details}")
        if code is Code.UNIMPLEMENTED:
            raise Rejected("schema", f"peer {link.peer} runs another version: {details}")
        link.busy = code is Code.RESOURCE_EXHAUSTED
        if link.busy:
            self.counters["full"] += 1
        return f"{code.name.lower()}: {details}"

    async def _verify_identity(self, link: "_Link") -> None:
        """Make sure that the peer at the other end is the one that is meant, and still trusted.

        gRPC checks the name and the authority of whoever it connects to, but knows no revocation
        list and does not show the certificate. So whenever there is no connection yet, the peer
        must show it in a handshake of its own; whoever is revoked meanwhile is noticed too.
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
                raise TimeoutError("it does not answer") from None
            except (OSError, InputError):
                link.peer_certificate, link.lost, link.away = None, True, True
                raise
            if link.peer_certificate is None:
                link.peer_certificate = peer_certificate
                self._mark_alive(link.peer)

    async def _watch(self) -> None:
        """Notice when peers go, and when they come back."""
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
            log.debug("peer %d: %s", link.peer, error)
            await asyncio.sleep(PROBE)

    def _mark_alive(self, peer: int) -> None:
        self._last_seen[peer] = asyncio.get_running_loop().time()
        if peer in self._links:
            self._links[peer].heard()

    def _link(self, peer: int) -> "_Link":
        if peer not in self._places or peer not in self._names:
            raise InputError(f"no address or no identity of peer {peer} is in the network file")
        if self._stopped.is_set():
            raise self._unreachable(peer, "")
        if peer not in self._links:
            name = server_name(self._names[peer])
            channel = grpc.aio.secure_channel(
                f"dns:///{self._places[peer]}",
                self._credentials.client(),
                options=[
                    ("grpc.ssl_target_name_override", name),
                    *common_options(self._limits),
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
    """The way to one peer."""

    peer: int
    place: Address
    name: str  # that the peer's certificate must hold
    channel: Any
    probe: asyncio.Task[None] | None = None  # the newest attempt to find out who is there
    peer_certificate: bytes | None = None  # the certificate, while it is known who is there
    ready: bool = False  # when last looked at
    lost: bool = False
    busy: bool = False  # whether it asked to come again later
    away: bool = False  # whether it was last looked for in vain
    returns: int = 0  # after it had been away
    back: asyncio.Event = field(default_factory=asyncio.Event)  # at the next return
    progress: int = 0  # bytes of broken transfers that have got through
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.deliver = self.channel.stream_unary(f"/{SERVICE}/Deliver")
        self.offset = self.channel.unary_unary(f"/{SERVICE}/Offset")
        self.ask = self.channel.unary_unary(f"/{SERVICE}/Ask")

    def heard(self) -> None:
        """There is a sign of life; whoever waits for one need not wait any longer."""
        self.lost = False
        if self.away:
            self.away = False
            self.returns += 1
            self.back.set()
            self.back = asyncio.Event()

    def up(self) -> bool:
        """Whether there is a connection, which gRPC keeps testing; makes one where it may."""
        if self.peer_certificate is None:
            return False
        state = self.channel.get_state(try_to_connect=True)
        before, self.ready = self.ready, state is grpc.ChannelConnectivity.READY
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or (before and not self.ready):
            self.peer_certificate = None  # whoever answers next must be looked at again
        return self.ready


class _Delivery:
    """One message on its way, which goes on where an earlier attempt was broken off."""

    def __init__(self, link: _Link, raw: bytes, payload: Buffer, counters: Counter[str]) -> None:
        self.maybe_taken = False  # before this attempt
        self._link, self._raw, self._payload, self._counters = link, raw, payload, counters
        self._offset = 0
        self._again = False
        self._whole = False  # whether some attempt has sent everything

    async def attempt(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        self.maybe_taken = self._whole
        if self._again:
            await self._resume(seconds)
        self._again = True
        seconds = end - asyncio.get_running_loop().time()
        offset = ((OFFSET, str(self._offset)),)
        await self._link.deliver(self._messages(), timeout=seconds, metadata=offset)

    async def _resume(self, seconds: float) -> None:
        self._counters["bytes_sent"] += len(self._raw)
        answer = await self._link.offset(self._raw, timeout=seconds)
        here = int.from_bytes(answer[:8], "big")
        if here > len(self._payload):
            raise Rejected("malformed", f"peer {self._link.peer} has {here} bytes of a smaller one")
        self._link.progress += max(here - self._offset, 0)
        self._offset = here

    def _messages(self) -> Iterator[bytes]:
        yield self._counted(self._raw)
        for begin in range(self._offset, len(self._payload), CHUNK):
            yield self._counted(bytes(self._payload[begin : begin + CHUNK]))
        self._whole = True

    def _counted(self, message: bytes) -> bytes:
        self._counters["bytes_sent"] += len(message)
        return message


class _Credentials:
    """An identity as gRPC and as Python's own TLS want to have it."""

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
    """Pings notice a dead peer even while nothing is being sent; lost connections come back."""
    milliseconds = round(1000 * limits.idle_timeout)
    return [
        ("grpc.keepalive_time_ms", milliseconds // 2),
        ("grpc.keepalive_timeout_ms", milliseconds // 2),
        ("grpc.http2.ping_timeout_ms", milliseconds // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.initial_reconnect_backoff_ms", round(1000 * INITIAL_BACKOFF)),
        ("grpc.min_reconnect_backoff_ms", round(1000 * limits.grace)),
        ("grpc.max_reconnect_backoff_ms", round(1000 * PROBE)),
        ("grpc.enable_retries", 0),  # done here, with an offset
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


async def _fetch_certificate(place: Address, name: str, context: ssl.SSLContext) -> bytes:
    """The certificate that is shown at a place by whoever has the name and accepts our own.

    With TLS 1.3 the server says whether it does only after the handshake: if so, it speaks first.
    """
    reader, writer = await asyncio.open_connection(*place, ssl=context, server_hostname=name)
    try:
        if not await reader.read(1):
            raise ConnectionResetError("it does not accept the certificate of this peer")
        peer_certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(peer_certificate).encode("ascii")


def _check_free(place: Address) -> None:
    """gRPC does not say why it cannot listen somewhere; the system does."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        socket.create_server(place, family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {place.port} of {place.host} is taken; stop what listens there, or choose "
                "another port"
            ) from None
        raise InputError(
            f"cannot listen on {place}: {error.strerror}; "
            "choose an address of this machine, and a port above 1023"
        ) from None


async def _happens(event: asyncio.Event, seconds: float) -> None:
    """Wait for it, for so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _cancelled() -> bool:
    """Whether somebody cancels the task that runs, rather than the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
