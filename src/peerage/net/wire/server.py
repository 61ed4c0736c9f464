"""The receiving side of the gRPC transport: who may speak, and what is taken from whom.

The service `peerage.Peer` has three methods that carry plain bytes:

    Deliver   a header, then its payload in chunks -> nothing
    Offset    a header -> how many bytes of its payload are already here, to go on after a break
    Ask       a question -> an answer, both small

The usual health service answers at the same port. The certificate of every call is looked at before
anything is read from it, and whatever is refused is counted. Who floods a peer with calls must not
flood its log as well: there, each kind of trouble has a line now and then.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from peerage.errors import InputError
from peerage.net.trust.identity import CertificateRejected, Identity
from peerage.net.wire.header import HEADER_LIMIT, RETRYABLE_REASONS, Rejected
from peerage.net.wire.transport import ANSWER_LIMIT, CHUNK, Receiver

__all__ = [
    "DEFAULT_LIMITS",
    "OFFSET",
    "REASON",
    "SERVICE",
    "Authenticator",
    "Limits",
    "NotAMember",
    "PeerServicer",
    "common_options",
    "server_options",
    "short",
]

SERVICE = "peerage.Peer"
REASON, OFFSET = "peerage-reason", "peerage-offset"  # keys of metadata
ROOM = 1024  # bytes that a message of gRPC may be larger than a chunk
AHEAD = 4  # chunks of a stream that may wait here before they are read
DETAILS = 500  # characters of an explanation that travel
BROKEN = 0.1  # seconds until it is certain that a stream was ended, not broken
LOG_INTERVAL = 60.0  # seconds between two lines of the log about the same mistake

Handler = Callable[[int, Any], Awaitable[Any]]  # of an identity and a call
Code = grpc.StatusCode
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What is expected of other peers, who may be slow, gone or hostile."""

    idle_timeout: float = 10.0  # seconds of silence after which a peer counts as gone
    min_rate: int = 1 << 16  # bytes per second at which a stream must move at least,
    grace: float = 5.0  # and seconds that it may take for each chunk beyond that
    max_calls: int = 8  # calls of one peer that are under way here at once


DEFAULT_LIMITS = Limits()


class Authenticator:
    """Who may speak: members of the network, with certificates that are still good."""

    def __init__(self, identity: Identity, names: Mapping[str, int]) -> None:
        self._trust = identity.trust()
        self._names = dict(names)
        self._blind = False

    def identify(self, pem: bytes) -> int:
        """The node that holds this certificate; raises `CertificateRejected` if there is none.

        An unreadable revocation list is an InputError for everybody.
        """
        try:
            name = self._trust.verify(pem)
        except CertificateRejected:
            self._see()
            raise
        except InputError as error:
            if not self._blind:
                log.error("nobody is believed until it can be read: %s", error)
            self._blind = True
            raise
        self._see()
        if name not in self._names:
            raise NotAMember("membership", f"{name!r} is not a member of this network")
        return self._names[name]

    def _see(self) -> None:
        if self._blind:
            log.warning("the revocation list can be read again")
        self._blind = False


class NotAMember(CertificateRejected):
    """Somebody whom the authority knows, but not the network."""


class PeerServicer:
    """Takes what arrives, from members only, and never waits for anybody for long."""

    def __init__(
        self,
        receiver: Receiver,
        gate: Authenticator,
        limits: Limits,
        counters: Counter[str],
        refused: Counter[str],
        hear: Callable[[int], None],
    ) -> None:
        self._receiver, self._authenticator, self._limits = receiver, gate, limits
        self._counters, self._refused, self._mark_alive = counters, refused, hear
        self._busy: Counter[int] = Counter()  # identity -> calls under way
        self._streams: dict[tuple[int, bytes], object] = {}  # the newest one of each message
        self._told: dict[type[Exception], float] = {}  # when the log last had a line about it

    def services(self, servicer: Any) -> tuple[Any, ...]:
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
            _Else(stream(self._guarded(self._unknown))),
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
            except Exception as error:
                self._refused["failed"] += 1
                self._tell(identity, error)
                await call.abort(Code.INTERNAL, "it failed here; the log of this peer says why")
            finally:
                self._busy[identity] -= 1

        return guarded

    async def _admit(self, call: Any) -> int:
        """Who calls; everybody else is turned away before anything of theirs is read."""
        peer_certificate = [*call.auth_context().get("x509_pem_cert", ()), b""][0]
        try:
            identity = self._authenticator.identify(peer_certificate)
        except CertificateRejected as error:
            self._refused[error.reason] += 1
            stranger = isinstance(error, NotAMember)
            code = Code.PERMISSION_DENIED if stranger else Code.UNAUTHENTICATED
            await call.abort(code, short(error))
        except InputError:  # nobody can be trusted; the gate has said why
            self._refused["unreadable list"] += 1
            await call.abort(Code.UNAVAILABLE, "the revocation list of this peer is unreadable")
        self._mark_alive(identity)
        if self._busy[identity] >= self._limits.max_calls:
            await self._refuse(call, Rejected("full", f"{self._busy[identity]} calls at once"))
        return identity

    def _tell(self, identity: int, error: Exception) -> None:
        """Describe a mistake of ours, but not each time that somebody finds it."""
        now, last = monotonic(), self._told.get(type(error))
        if last is None or now - last > LOG_INTERVAL:
            self._told[type(error)] = now
            log.error("a call of peer %d failed", identity, exc_info=error)

    async def _refuse(self, call: Any, error: Rejected) -> None:
        self._refused[error.reason] += 1
        later = error.reason in RETRYABLE_REASONS
        code = Code.RESOURCE_EXHAUSTED if later else Code.FAILED_PRECONDITION
        await call.abort(code, short(error), ((REASON, error.reason),))

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
                    self._refused["newer stream"] += 1
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

    async def _unknown(self, _: int, call: Any) -> None:
        self._refused["unknown method"] += 1
        await call.abort(Code.UNIMPLEMENTED, "this peer has no such method")

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
            self._refused["offset"] += 1
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
        seconds = self._limits.grace + most / self._limits.min_rate
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


class _Else(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers whatever has no handler of its own."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def service(self, _: Any) -> Any:
        return self._handler


def common_options(limits: Limits) -> list[tuple[str, int]]:
    """What both ends agree on: small messages, and little that waits before it is read."""
    return [
        ("grpc.max_receive_message_length", CHUNK + ROOM),
        ("grpc.max_send_message_length", CHUNK + ROOM),
        ("grpc.max_concurrent_streams", limits.max_calls),
        ("grpc.http2.lookahead_bytes", AHEAD * CHUNK),
        ("grpc.http2.bdp_probe", 0),  # which would let more wait
    ]


def server_options(limits: Limits) -> list[tuple[str, int]]:
    """Two servers never share a port, strangers must hurry, and pings offend nobody."""
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.grace)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),  # forgets clients that vanished without a word
    ]


def short(text: object) -> str:
    """An explanation in a form that travels, and that is safe for a line of a log."""
    return str(text).encode("unicode_escape").decode("ascii")[:DETAILS]
