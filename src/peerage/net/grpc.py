"""Messages between peers over gRPC and mutual TLS; who speaks is known before anything is read.

The service `peerage.Peer` has three methods that carry plain bytes:

    Deliver   a header, then its payload in chunks -> nothing
    Offset    a header -> how many bytes of its payload are already here, to go on after a break
    Ask       a question -> an answer, both small

The usual health service answers at the same port. Both ends check each other: a server looks at
the certificate of every call before it reads from it, and a client believes only the certificate
that was issued for the peer that it means.
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
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from peerage.errors import InputError
from peerage.net.identity import Identity, Refused, server_name
from peerage.net.transport import ANSWER_LIMIT, CHUNK, Receiver, Unreachable
from peerage.net.wire import HEADER_LIMIT, REASONS, Buffer, Header, Rejected, header_bytes

__all__ = ["DEFAULT_LIMITS", "SERVICE", "GrpcTransport", "Limits"]

SERVICE = "peerage.Peer"
REASON, OFFSET = "peerage-reason", "peerage-offset"  # keys of metadata
ROOM = 1024  # bytes that a message of gRPC may be larger than a chunk
AHEAD = 4  # chunks of a stream that may wait here before they are read
DETAILS = 500  # characters of an explanation that travel
FIRST_WAIT, LONGEST_WAIT = 0.1, 5.0  # seconds between attempts
LAST_ATTEMPT = 0.02  # seconds before a deadline in which no attempt begins
LOOK, PROBE = 0.25, 1.0  # seconds between looks at a connection, and attempts to get one back
FAREWELL = 0.5  # seconds that calls have to end when the transport stops
BROKEN = 0.1  # seconds until it is certain that a stream was ended, not broken

Result = TypeVar("Result")
Handler = Callable[[int, Any], Awaitable[Any]]  # of an identity and a call
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


@dataclass(frozen=True)
class Limits:
    """What is expected of other peers, who may be slow, gone or hostile."""

    patience: float = 10.0  # seconds of silence after which a peer counts as gone
    pace: int = 1 << 16  # bytes per second at which a stream must move at least,
    grace: float = 5.0  # and seconds that it may take for each chunk beyond that
    streams: int = 8  # calls of one peer that are under way here at once


DEFAULT_LIMITS = Limits()


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
        self._places = {peer: _place(address) for peer, address in addresses.items()}
        self._bind = self._places[me] if bind is None else _place(bind)
        self._names = {node: name for name, node in names.items()}
        self._limits = limits
        self._credentials = _Credentials(identity)
        self._gate = _Gate(identity, names)
        self._heard: dict[int, float] = {}
        self._links: dict[int, _Link] = {}
        self._watching: asyncio.Task[None] | None = None
        self._jitter = random.Random(me)
        self._server: Any = None
        self._health = health.aio.HealthServicer()
        self._stopped = asyncio.Event()

    async def start(self, receiver: Receiver) -> None:
        desk = _Desk(receiver, self._gate, self._limits, self.counters, self.refused, self._hear)
        _check_free(*self._bind)
        host, port = self._bind
        options = [*_options(self._limits), *_server_options(self._limits)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers(desk.services(self._health))
        try:
            self.port = server.add_secure_port(_join(host, port), self._credentials.server())
        except RuntimeError as error:
            raise InputError(f"cannot listen on port {port} of {host}: {error}") from None
        await server.start()
        self._server = server
        await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        link = self._link(header.recipient)
        delivery = _Delivery(link, header_bytes(header), payload, self.counters)
        try:
            await self._insist(link, delivery.attempt, deadline)
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

        return await self._insist(link, attempt, deadline)

    def reachable(self, peer: int) -> bool:
        """Whether there is any hope to hear from a peer soon: from now on it is watched."""
        if peer not in self._places or self._stopped.is_set():
            return False
        link = self._link(peer)
        silence = asyncio.get_running_loop().time() - self._heard[peer]
        return not link.lost and silence < self._limits.patience

    async def stop(self) -> None:
        """Send and take nothing more; what is under way has a moment to end."""
        self._stopped.set()
        tasks = [self._watching, *(link.probe for link in self._links.values())]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(FAREWELL)
        for link in self._links.values():
            await link.channel.close()

    async def _insist(
        self, link: "_Link", attempt: Callable[[float], Awaitable[Result]], deadline: float
    ) -> Result:
        """Try until it works, it is refused for good, or so many seconds have passed."""
        now = asyncio.get_running_loop().time
        end = now() + deadline
        trouble = "the time was too short for an attempt"
        for wait in self._waits(link):
            try:
                async with asyncio.timeout_at(end):
                    await self._certify(link)
                if not self._stopped.is_set():
                    result = await attempt(end - now())
                    self._hear(link.peer)
                    return result
            except grpc.aio.AioRpcError as error:
                trouble = self._judge(link, error)
            except (OSError, InputError) as error:
                trouble = str(error) or trouble
            except asyncio.CancelledError:
                if _cancelled() or not self._stopped.is_set():
                    raise
            left = end - now()
            if left < LAST_ATTEMPT or self._stopped.is_set():
                break
            self.counters["retries"] += 1
            await self._pause(min(wait, left / 2))
        raise self._unreachable(link.peer, f"within {deadline:g} s: {trouble}")

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    def _unreachable(self, peer: int, how: str) -> Unreachable:
        if self._stopped.is_set():
            how = "any more: this peer has stopped"
        address = _join(*self._places[peer])
        return Unreachable(f"peer {peer} at {address} could not be reached {how}")

    def _waits(self, link: "_Link") -> Iterator[float]:
        """Growing, random pauses that begin anew whenever bytes have got through."""
        progress, doublings = link.progress, itertools.count()
        while True:
            if link.progress != progress:
                progress, doublings = link.progress, itertools.count()
            longest = min(FIRST_WAIT * 2 ** min(next(doublings), 10), LONGEST_WAIT)
            yield longest * self._jitter.uniform(0.5, 1)

    def _judge(self, link: "_Link", error: grpc.aio.AioRpcError) -> str:
        """What went wrong, if another attempt may help; raises `Rejected` if none can."""
        code, details = error.code(), _short(error.details() or "")
        reason = dict(error.trailing_metadata() or ()).get(REASON)
        if code is Code.UNAVAILABLE:
            link.shown = None  # whoever answers next must be looked at again
        elif code in ANSWERS:
            self._hear(link.peer)
        if code is Code.FAILED_PRECONDITION and reason in REASONS:
            raise Rejected(reason, details)
        if code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
            raise Rejected("sender", f"peer {link.peer} does not believe this one: {details}")
        if code is Code.UNIMPLEMENTED:
            raise Rejected("schema", f"peer {link.peer} runs another version: {details}")
        if code is Code.RESOURCE_EXHAUSTED:
            self.counters["full"] += 1
        return f"{code.name.lower()}: {details}"

    async def _certify(self, link: "_Link") -> None:
        """Make sure that the peer at the other end is the one that is meant, and still trusted.

        gRPC checks the name and the authority of whoever it connects to, but knows no revocation
        list and does not show the certificate. So whenever there is no connection yet, the peer
        must show it in a handshake of its own; whoever is revoked meanwhile is noticed too.
        """
        async with link.lock:
            try:
                shown = link.shown
                if shown is None:
                    async with asyncio.timeout(self._limits.grace):
                        shown = await _presented(link.place, link.name, self._credentials.context)
                self._gate.identify(shown)
            except TimeoutError:
                raise TimeoutError("it does not answer") from None
            except (OSError, InputError):
                link.shown, link.lost = None, True
                raise
            if link.shown is None:
                link.shown = shown
                self._hear(link.peer)

    async def _watch(self) -> None:
        """Notice when peers go, and when they come back."""
        while True:
            for link in self._links.values():
                if link.up():
                    self._hear(link.peer)
                elif link.shown is None and (link.probe is None or link.probe.done()):
                    link.probe = asyncio.create_task(self._probe(link))
            await asyncio.sleep(LOOK)

    async def _probe(self, link: "_Link") -> None:
        try:
            await self._certify(link)
        except (OSError, InputError) as error:
            log.debug("peer %d: %s", link.peer, error)
            await asyncio.sleep(PROBE)

    def _hear(self, peer: int) -> None:
        self._heard[peer] = asyncio.get_running_loop().time()
        if peer in self._links:
            self._links[peer].lost = False

    def _link(self, peer: int) -> "_Link":
        if peer not in self._places or peer not in self._names:
            raise InputError(f"no address or no identity of peer {peer} is in the network file")
        if self._stopped.is_set():
            raise self._unreachable(peer, "")
        if peer not in self._links:
            name = server_name(self._names[peer])
            channel = grpc.aio.secure_channel(
                f"dns:///{_join(*self._places[peer])}",
                self._credentials.client(),
                options=[
                    ("grpc.ssl_target_name_override", name),
                    *_options(self._limits),
                    *_client_options(self._limits),
                ],
            )
            self._links[peer] = _Link(peer, self._places[peer], name, channel)
            self._heard.setdefault(peer, asyncio.get_running_loop().time())
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())
        return self._links[peer]


@dataclass
class _Link:
    """The way to one peer."""

    peer: int
    place: tuple[str, int]
    name: str  # that the peer's certificate must hold
    channel: Any
    probe: asyncio.Task[None] | None = None  # the newest attempt to find out who is there
    shown: bytes | None = None  # the certificate, while it is known who is there
    ready: bool = False  # when last looked at
    lost: bool = False
    progress: int = 0  # bytes of broken transfers that have got through
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.deliver = self.channel.stream_unary(f"/{SERVICE}/Deliver")
        self.offset = self.channel.unary_unary(f"/{SERVICE}/Offset")
        self.ask = self.channel.unary_unary(f"/{SERVICE}/Ask")

    def up(self) -> bool:
        """Whether there is a connection, which gRPC keeps testing; makes one where it may."""
        if self.shown is None:
            return False
        state = self.channel.get_state(try_to_connect=True)
        before, self.ready = self.ready, state is grpc.ChannelConnectivity.READY
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or (before and not self.ready):
            self.shown = None  # whoever answers next must be looked at again
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


class _Gate:
    """Who may speak: members of the network, with certificates that are still good."""

    def __init__(self, identity: Identity, names: Mapping[str, int]) -> None:
        self._trust = identity.trust()
        self._names = dict(names)

    def identify(self, pem: bytes) -> int:
        """The node that holds this certificate; raises `Refused` if there is none."""
        name = self._trust.verify(pem)
        if name not in self._names:
            raise _Stranger("membership", f"{name!r} is not a member of this network")
        return self._names[name]


class _Stranger(Refused):
    """Somebody whom the authority knows, but not the network."""


class _Desk:
    """Takes what arrives, from members only, and never waits for anybody for long."""

    def __init__(
        self,
        receiver: Receiver,
        gate: _Gate,
        limits: Limits,
        counters: Counter[str],
        refused: Counter[str],
        hear: Callable[[int], None],
    ) -> None:
        self._receiver, self._gate, self._limits = receiver, gate, limits
        self._counters, self._refused, self._hear = counters, refused, hear
        self._busy: Counter[int] = Counter()  # identity -> calls under way
        self._streams: dict[tuple[int, bytes], object] = {}  # the newest one of each message

    def services(self, servicer: Any) -> tuple[Any, Any]:
        """All methods are served as streams, even those with a single question.

        On the wire there is no difference, but so nothing is read before the caller is known.
        """
        stream, watch = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        own = {"Deliver": self._deliver, "Offset": self._offset, "Ask": self._ask}
        peer = {name: stream(self._guarded(handler)) for name, handler in own.items()}
        written = {"response_serializer": health_pb2.HealthCheckResponse.SerializeToString}
        usual = {
            "Check": stream(self._guarded(self._about_health(servicer.Check)), **written),
            "Watch": watch(self._guarded(self._about_health(servicer.Watch)), **written),
        }
        return (
            grpc.method_handlers_generic_handler(SERVICE, peer),
            grpc.method_handlers_generic_handler(health.SERVICE_NAME, usual),
        )

    def _guarded(self, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
        async def guarded(_: Any, call: Any) -> Any:
            identity = await self._admit(call)
            self._busy[identity] += 1
            try:
                return await handler(identity, call)
            except grpc.aio.AbortError:
                raise
            except Rejected as error:
                await self._refuse(call, error)
            except Exception:
                log.exception("a call of peer %d failed", identity)
                await call.abort(Code.INTERNAL, "it failed here; the log of this peer says why")
            finally:
                self._busy[identity] -= 1

        return guarded

    async def _admit(self, call: Any) -> int:
        """Who calls; everybody else is turned away before anything of theirs is read."""
        shown = [*call.auth_context().get("x509_pem_cert", ()), b""][0]
        try:
            identity = self._gate.identify(shown)
        except Refused as error:
            self._refused[error.reason] += 1
            stranger = isinstance(error, _Stranger)
            code = Code.PERMISSION_DENIED if stranger else Code.UNAUTHENTICATED
            await call.abort(code, _short(error))
        except InputError as error:  # the revocation list is unreadable: nobody can be trusted
            log.error("%s", error)
            await call.abort(Code.UNAVAILABLE, "the revocation list of this peer is unreadable")
        self._hear(identity)
        if self._busy[identity] >= self._limits.streams:
            await self._refuse(call, Rejected("full", f"{self._busy[identity]} calls at once"))
        return identity

    async def _refuse(self, call: Any, error: Rejected) -> None:
        self._refused[error.reason] += 1
        full = error.reason == "full"
        code = Code.RESOURCE_EXHAUSTED if full else Code.FAILED_PRECONDITION
        await call.abort(code, _short(error), ((REASON, error.reason),))

    async def _deliver(self, identity: int, call: Any) -> bytes:
        raw = await self._read(call, HEADER_LIMIT)
        # A sender that was cut off may be back before the broken stream has ended here.
        key, stream = (identity, raw), object()
        self._streams[key] = stream
        try:
            header, offset = self._receiver.accept(raw, identity)
            await self._check_offset(call, offset)
            while offset < header.size:
                data = await self._chunk(call, header.size - offset)
                if self._streams.get(key) is not stream:
                    await call.abort(Code.ABORTED, "a newer stream brings the same message")
                self._receiver.chunk(header, offset, data)
                offset += len(data)
            if await self._next(call, 0) is not None:
                raise Rejected("oversized", f"more than the {header.size} bytes of the header came")
            await self._receiver.complete(header)
        finally:
            if self._streams.get(key) is stream:
                del self._streams[key]
        return b""

    async def _offset(self, identity: int, call: Any) -> bytes:
        _, offset = self._receiver.accept(await self._read(call, HEADER_LIMIT), identity)
        return offset.to_bytes(8, "big")

    async def _ask(self, identity: int, call: Any) -> bytes:
        question = await self._read(call, ANSWER_LIMIT)
        answer = await self._receiver.answer(question, identity)
        if len(answer) > ANSWER_LIMIT:
            raise Rejected("oversized", f"the answer has {len(answer)} bytes, which is too much")
        self._counters["bytes_sent"] += len(answer)
        return answer

    def _about_health(self, method: Callable[[Any, Any], Awaitable[Any]]) -> Handler:
        async def handler(_: int, call: Any) -> Any:
            raw = await self._read(call, ROOM)
            try:
                request = health_pb2.HealthCheckRequest.FromString(raw)
            except DecodeError:
                raise Rejected("malformed", "this is no question about health") from None
            return await method(request, call)

        return handler

    async def _check_offset(self, call: Any, offset: int) -> None:
        stated = dict(call.invocation_metadata() or ()).get(OFFSET, "0")
        if stated != str(offset):
            await call.abort(Code.OUT_OF_RANGE, f"{offset} bytes of it are here")

    async def _chunk(self, call: Any, left: int) -> bytes:
        """Every chunk but the last is a full one: so nobody can keep us busy with crumbs."""
        wanted = min(CHUNK, left)
        data = await self._read(call, wanted)
        if len(data) != wanted:
            raise Rejected("malformed", f"a chunk has {len(data)} bytes instead of {wanted}")
        return data

    async def _read(self, call: Any, most: int) -> bytes:
        data = await self._next(call, most)
        if data is None:
            # A connection that breaks also ends the stream; the call is then cancelled here.
            await asyncio.sleep(BROKEN)
            raise Rejected("truncated", "the stream ended before all of its bytes had come")
        if len(data) > most:
            raise Rejected("oversized", f"{len(data)} bytes came instead of at most {most}")
        return data

    async def _next(self, call: Any, most: int) -> bytes | None:
        """The next message, which must not take long; None at the end of the stream."""
        seconds = self._limits.grace + most / self._limits.pace
        try:
            async with asyncio.timeout(seconds):
                data = await call.read()
        except TimeoutError:
            self._refused["slow"] += 1
            await call.abort(Code.ABORTED, f"nothing more came within {seconds:g} s")
        if data is grpc.aio.EOF:
            return None
        self._counters["bytes_received"] += len(data)
        return bytes(data)


def _options(limits: Limits) -> list[tuple[str, int]]:
    """What both ends agree on: small messages, and little that waits before it is read."""
    return [
        ("grpc.max_receive_message_length", CHUNK + ROOM),
        ("grpc.max_send_message_length", CHUNK + ROOM),
        ("grpc.max_concurrent_streams", limits.streams),
        ("grpc.http2.lookahead_bytes", AHEAD * CHUNK),
        ("grpc.http2.bdp_probe", 0),  # which would let more wait
    ]


def _client_options(limits: Limits) -> list[tuple[str, int]]:
    """Pings notice a dead peer even while nothing is being sent; lost connections come back."""
    milliseconds = round(1000 * limits.patience)
    return [
        ("grpc.keepalive_time_ms", milliseconds // 2),
        ("grpc.keepalive_timeout_ms", milliseconds // 2),
        ("grpc.http2.ping_timeout_ms", milliseconds // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.initial_reconnect_backoff_ms", round(1000 * FIRST_WAIT)),
        ("grpc.min_reconnect_backoff_ms", round(1000 * limits.grace)),
        ("grpc.max_reconnect_backoff_ms", round(1000 * PROBE)),
        ("grpc.enable_retries", 0),  # done here, with an offset
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _server_options(limits: Limits) -> list[tuple[str, int]]:
    """Two servers never share a port, strangers must hurry, and pings offend nobody."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.grace)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),  # forgets clients that vanished without a word
    ]


async def _presented(place: tuple[str, int], name: str, context: ssl.SSLContext) -> bytes:
    """The certificate that is shown at a place by whoever has the name and accepts our own.

    With TLS 1.3 the server says whether it does only after the handshake: if so, it speaks first.
    """
    reader, writer = await asyncio.open_connection(*place, ssl=context, server_hostname=name)
    try:
        if not await reader.read(1):
            raise ConnectionResetError("it does not accept the certificate of this peer")
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(shown).encode("ascii")


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"address {address!r} is not HOST:PORT, such as 10.0.0.3:7400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_free(host: str, port: int) -> None:
    """gRPC does not say why it cannot listen somewhere; the system does."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(
                f"port {port} of {host} is taken; stop what listens there, or choose another port"
            ) from None
        raise InputError(
            f"cannot listen on {_join(host, port)}: {error.strerror}; "
            "choose an address of this machine, and a port above 1023"
        ) from None


def _cancelled() -> bool:
    """Whether somebody cancels the task that runs, rather than the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _short(text: object) -> str:
    """An explanation in a form that travels, and that is safe for a line of a log."""
    return str(text).encode("unicode_escape").decode("ascii")[:DETAILS]
