"""The receiving side of the gRPC transport: authenticates callers and reads their messages.

The service `peerage.Peer` has six methods that carry plain bytes:

    Deliver   a header, then its payload in chunks -> nothing
    Offset    a header -> the bytes of its payload that have arrived, to resume a broken transfer
    Ask       a question -> an answer, both small
    Status    nothing, or the name of a peer that dials out -> a report about this peer, or about
              that one; the only method for observers
    Tunnel    frames <-> frames: calls to a peer that dials out; see `tunnel`
    Hello     nothing -> nothing: shows whose connection it is, as idle ones of nobody are closed

The standard health service answers at the same port. The certificate of every call is checked
before anything is read from it, and refused calls are counted. A caller that floods a peer must not
flood its log: a refusal is logged once per peer and reason, and each kind of internal error at most
once a minute.
"""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2

from peerage.net.trust.identity import CertificateRejected, Holder, Identity, serial_of
from peerage.net.wire.acceptor import Acceptor
from peerage.net.wire.header import (
    HEADER_LIMIT,
    HONEST_REASONS,
    RETRYABLE_REASONS,
    Rejected,
    escaped,
)
from peerage.net.wire.limits import Limits
from peerage.net.wire.notices import LOG_INTERVAL, Notices
from peerage.net.wire.rates import TokenBucket
from peerage.net.wire.transport import ANSWER_LIMIT, CHUNK, Receiver

SERVICE = "peerage.Peer"
REASON, OFFSET = "peerage-reason", "peerage-offset"  # keys of metadata
ROOM = 1024  # bytes by which a gRPC message may exceed a chunk
AHEAD = 4  # chunks of a stream that gRPC may buffer before they are read
NAME_LIMIT = 63  # bytes of the name of a peer
DETAILS = 500  # characters of an error message that are sent
BREAK_DELAY = 0.1  # seconds to find out whether a stream ended or its connection broke
CALL_BURST = 2.0  # seconds of calls that a caller may make at once
OTHER = "other"  # stands for all callers that are no members, wherever callers are counted
OBSERVER = -1  # stands for the node of an observer

Code = grpc.StatusCode
log = logging.getLogger(__name__)


class Authenticator:
    """Maps a valid certificate to a member of the network; logs which ones it refuses."""

    def __init__(self, identity: Identity, names: Mapping[str, int]) -> None:
        self._trust = identity.trust()
        self._names = dict(names)
        self._serials: dict[str, set[int]] = {}  # of the valid certificates that members have shown
        self._list_problem: str | None = None  # as it was logged
        self._notices = Notices(log)

    def add(self, name: str, node: int) -> None:
        """Accept one more member."""
        self._names[name] = node

    def identify(self, pem: bytes, *, quiet: bool = False) -> int:
        """The node that holds this certificate; raises `CertificateRejected` if there is none."""
        return self._names[self._verify(pem, observers=False, quiet=quiet).name]

    def identify_caller(self, pem: bytes) -> Holder:
        """The member or the observer that holds this certificate; raises errors as `identify`."""
        return self._verify(pem, observers=True, quiet=False)

    def node(self, holder: Holder) -> int:
        return self._names[holder.name]

    def revoked(self) -> frozenset[int]:
        """The members whose certificates are all revoked.

        Of a member that has not shown a valid one yet, the list itself says whether it has another.
        """
        found = self._trust.revocations()
        self._log_list_problem()
        return frozenset(
            node
            for name, node in self._names.items()
            if (
                self._serials[name] <= found.serials
                if name in self._serials
                else name in found.names
            )
        )

    def _verify(self, pem: bytes, *, observers: bool, quiet: bool) -> Holder:
        try:
            trust = self._trust
            holder = trust.verify_holder(pem) if observers else Holder(trust.verify(pem), False)
            if not holder.observer and holder.name not in self._names:
                raise NotAMember(holder.name)
        except CertificateRejected as error:
            who = self.label(error.name)
            known = "a caller that is not a member" if who == OTHER else who
            if not quiet:
                self._notices.warn(who, error.reason, f"refusing {known}: {short(error)}")
            raise
        finally:
            self._log_list_problem()
        if not holder.observer:
            self._serials.setdefault(holder.name, set()).add(serial_of(pem))
            self._notices.settle(holder.name)
        return holder

    def label(self, name: str) -> str:
        """The name of a member, or `OTHER`: there may be any number of other names."""
        return name if name in self._names else OTHER

    def _log_list_problem(self) -> None:
        """Log when the revocation list becomes unreadable, and when it can be read again."""
        before, self._list_problem = self._list_problem, self._trust.list_problem
        if self._list_problem is not None and before is None:
            log.error(
                "using the last revocation list until it can be read again: %s", self._list_problem
            )
        elif self._list_problem is None and before is not None:
            log.warning("the revocation list can be read again")


class NotAMember(CertificateRejected):
    """A valid certificate whose holder is not a member of the network."""

    def __init__(self, name: str) -> None:
        text = f"{name!r} is not a member of this network; give all peers the same network file"
        super().__init__("membership", text, name)


@dataclass(frozen=True)
class Caller:
    """A call, and the member or observer that makes it."""

    call: Any
    holder: Holder
    node: int  # `OBSERVER` for observers
    name: str  # for counters and logs: of the member, or `OTHER`

    async def abort(self, code: Any, text: str, *more: Any) -> None:
        await self.call.abort(code, text, *more)


Handler = Callable[[Caller], Awaitable[Any]]
OpenTunnel = Callable[[int, Any, bytes], Awaitable[None]]  # node, stream and certificate


class PeerServicer:
    """The methods of the service: serves members only, with a time limit for every read."""

    def __init__(
        self,
        receiver: Receiver,
        authenticator: Authenticator,
        limits: Limits,
        counters: Counter[str],
        refused: Counter[tuple[str, str]],  # by the name of the caller and the reason
        mark_alive: Callable[[int], None],
        open_tunnel: OpenTunnel,
        acceptor: Acceptor,
    ) -> None:
        self._receiver, self._authenticator, self._limits = receiver, authenticator, limits
        self._acceptor = acceptor
        self._open_tunnel = open_tunnel
        self._counters, self._refused, self._mark_alive = counters, refused, mark_alive
        self._busy: Counter[Holder] = Counter()  # concurrent calls
        self._rates: defaultdict[Holder, TokenBucket] = defaultdict(TokenBucket)
        self._streams: dict[tuple[int, bytes], object] = {}  # the newest stream of each message
        self._logged: dict[type[Exception], float] = {}  # kind of error -> when it was last logged
        self._notices = Notices(log)
        self.methods = {  # those that can also be called through a tunnel
            "Deliver": self._guarded(self._deliver),
            "Offset": self._guarded(self._offset),
            "Ask": self._guarded(self._ask),
            "Status": self._guarded(self._status, observers=True),
        }

    def services(self, servicer: Any) -> tuple[Any, ...]:
        """The gRPC handlers; all methods are served as streams, even those with one request.

        The bytes on the wire are the same, but nothing is read before the caller is authenticated.
        """
        stream, watch = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        peer = {name: stream(method) for name, method in self.methods.items()}
        peer["Tunnel"] = watch(self._guarded(self._tunnel, counted=False))
        peer["Hello"] = stream(self._guarded(self._hello, observers=True, counted=False))
        options = {"response_serializer": health_pb2.HealthCheckResponse.SerializeToString}
        health_methods = {
            "Check": stream(self._guarded(self._about_health(servicer.Check)), **options),
            "Watch": watch(self._guarded(self._about_health(servicer.Watch)), **options),
        }
        return (
            grpc.method_handlers_generic_handler(SERVICE, peer),
            grpc.method_handlers_generic_handler(health.SERVICE_NAME, health_methods),
            _Fallback(stream(self._guarded(self._unknown))),
        )

    def _guarded(
        self, handler: Handler, *, observers: bool = False, counted: bool = True
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        """A method for members; with `observers`, one that only asks, for observers as well.

        A tunnel is not `counted` among the concurrent calls of a member, as it never ends.
        """

        async def guarded(_: Any, call: Any) -> Any:
            try:
                return await self._serve(call, handler, observers, counted)
            except grpc.aio.InternalError as error:
                # gRPC can send no status while a write is under way, such as one that the caller
                # does not read; then only the end of the connection ends the stream.
                raise asyncio.CancelledError from error

        return guarded

    async def _serve(self, call: Any, handler: Handler, observers: bool, counted: bool) -> Any:
        caller = await self._admit(call, observers)
        self._busy[caller.holder] += counted
        try:
            with self._acceptor.counted(call):
                return await handler(caller)
        except (grpc.aio.AbortError, grpc.aio.InternalError):
            raise
        except Rejected as error:
            await self._reject(caller, error)
        except Exception as error:
            self._refused[caller.name, "failed"] += 1
            self._log_failure(caller.name, error)
            await call.abort(Code.INTERNAL, "internal error; see the log of this peer")
        finally:
            self._busy[caller.holder] -= counted

    async def _admit(self, call: Any, observers: bool) -> Caller:
        """The authenticated caller; aborts the call of anyone else before it is read."""
        peer_certificate = [*call.auth_context().get("x509_pem_cert", ()), b""][0]
        try:
            holder = self._authenticator.identify_caller(peer_certificate)
        except CertificateRejected as error:
            self._refused[self._authenticator.label(error.name), error.reason] += 1
            self._acceptor.rejected(call)
            authenticated = isinstance(error, NotAMember)
            code = Code.PERMISSION_DENIED if authenticated else Code.UNAUTHENTICATED
            await call.abort(code, short(error))
        caller = self._caller(call, holder)
        self._acceptor.authenticated(call, holder, caller.name)
        if holder.observer and not observers:
            self._refused[OTHER, "observer"] += 1
            text = f"{holder.name!r} is an observer, which may only ask for the status"
            self._notices.warn(OTHER, "observer", f"refused a call: {text}")
            await call.abort(Code.PERMISSION_DENIED, text)
        if not observers:  # a status may be asked for in the name of a peer that is down
            self._mark_alive(caller.node)
        # Also before a rejection: a caller that tries again at once would take all the time.
        rate = self._limits.calls_per_second
        if (wait := self._rates[holder].wait(rate, CALL_BURST * rate, monotonic())) > 0:
            await asyncio.sleep(wait)
        if self._busy[holder] >= self._limits.max_calls:
            await self._reject(
                caller, Rejected("full", f"{self._busy[holder]} calls are already running")
            )
        return caller

    def _caller(self, call: Any, holder: Holder) -> Caller:
        if holder.observer:
            return Caller(call, holder, OBSERVER, OTHER)
        return Caller(call, holder, self._authenticator.node(holder), holder.name)

    def _log_failure(self, name: str, error: Exception) -> None:
        """Log an internal error, at most once per `LOG_INTERVAL` for each kind."""
        now, last = monotonic(), self._logged.get(type(error))
        if last is None or now - last > LOG_INTERVAL:
            self._logged[type(error)] = now
            log.error("internal error in a call of %s", name, exc_info=error)

    async def _reject(self, caller: Caller, error: Rejected) -> None:
        self._refused[caller.name, error.reason] += 1
        if error.reason not in HONEST_REASONS:
            text = f"rejected a message of {caller.name} ({error.reason}): {short(error)}"
            self._notices.warn(caller.name, error.reason, text)
        retryable = error.reason in RETRYABLE_REASONS
        code = Code.RESOURCE_EXHAUSTED if retryable else Code.FAILED_PRECONDITION
        await caller.abort(code, short(error), ((REASON, error.reason),))

    async def _deliver(self, caller: Caller) -> bytes:
        raw = await self._read(caller, HEADER_LIMIT)
        # A sender may reconnect before its broken stream has ended here.
        key, stream = (caller.node, raw), object()
        self._streams[key] = stream
        try:
            header, offset = self._receiver.accept(raw, caller.node)
            await self._check_offset(caller, offset)
            while offset < header.size:
                data = await self._chunk(caller, header.size - offset)
                if self._streams.get(key) is not stream:
                    self._refused[caller.name, "newer stream"] += 1
                    await caller.abort(Code.ABORTED, "a newer stream carries the same message")
                self._receiver.chunk(header, offset, data)
                offset += len(data)
            if await self._next(caller, 0) is not None:
                raise Rejected("oversized", f"more bytes than the {header.size} of the header")
            await self._receiver.complete(header)
        finally:
            if self._streams.get(key) is stream:
                del self._streams[key]
        return b""

    async def _offset(self, caller: Caller) -> bytes:
        _, offset = self._receiver.accept(await self._read(caller, HEADER_LIMIT), caller.node)
        return offset.to_bytes(8, "big")

    async def _ask(self, caller: Caller) -> bytes:
        question = await self._read(caller, ANSWER_LIMIT)
        answer = await self._receiver.answer(question, caller.node)
        if len(answer) > ANSWER_LIMIT:
            raise Rejected("oversized", f"the answer has {len(answer)} of {ANSWER_LIMIT} bytes")
        self._counters["bytes_sent"] += len(answer)
        return answer

    async def _status(self, caller: Caller) -> bytes:
        name = (await self._read(caller, NAME_LIMIT)).decode("ascii", "replace")
        receiver = self._receiver
        answer = await (receiver.report_of(name) if name else receiver.report())
        self._counters["bytes_sent"] += len(answer)
        return answer

    async def _hello(self, caller: Caller) -> bytes:
        await self._read(caller, 0)
        return b""

    async def _tunnel(self, caller: Caller) -> None:
        certificate = caller.call.auth_context()["x509_pem_cert"][0]
        try:
            await self._open_tunnel(caller.node, caller.call, certificate)
        except TimeoutError:
            self._refused[caller.name, "slow"] += 1
            await caller.abort(Code.ABORTED, "nothing came through the tunnel, or was read from it")

    async def _unknown(self, caller: Caller) -> None:
        self._refused[caller.name, "unknown method"] += 1
        await caller.abort(Code.UNIMPLEMENTED, "this peer has no such method")

    def _about_health(self, method: Callable[[Any, Any], Awaitable[Any]]) -> Handler:
        async def handler(caller: Caller) -> Any:
            raw = await self._read(caller, ROOM)
            try:
                request = health_pb2.HealthCheckRequest.FromString(raw)
            except DecodeError:
                raise Rejected("malformed", "not a health check request") from None
            return await method(request, caller.call)

        return handler

    async def _check_offset(self, caller: Caller, offset: int) -> None:
        stated = dict(caller.call.invocation_metadata() or ()).get(OFFSET, "0")
        if stated != str(offset):
            self._refused[caller.name, "offset"] += 1
            await caller.abort(Code.OUT_OF_RANGE, f"{offset} bytes of the payload have arrived")

    async def _chunk(self, caller: Caller, left: int) -> bytes:
        """Read a chunk; all but the last must be full, so that callers cannot send tiny ones."""
        size = min(CHUNK, left)
        data = await self._read(caller, size)
        if len(data) != size:
            raise Rejected("malformed", f"expected a chunk of {size} bytes, got {len(data)}")
        return data

    async def _read(self, caller: Caller, most: int) -> bytes:
        data = await self._next(caller, most)
        if data is None:
            # A broken connection also ends the stream; the call is then cancelled during the sleep.
            await asyncio.sleep(BREAK_DELAY)
            raise Rejected("truncated", "the stream ended before all bytes had arrived")
        if len(data) > most:
            raise Rejected("oversized", f"expected at most {most} bytes, got {len(data)}")
        return data

    async def _next(self, caller: Caller, most: int) -> bytes | None:
        """The next message of the stream, read with a time limit; None at its end."""
        seconds = self._limits.grace + most / self._limits.min_rate
        try:
            async with asyncio.timeout(seconds):
                data = await caller.call.read()
        except TimeoutError:
            self._refused[caller.name, "slow"] += 1
            await caller.abort(Code.ABORTED, f"no data arrived within {seconds:g} s")
        if data is grpc.aio.EOF:
            return None
        self._counters["bytes_received"] += len(data)
        return bytes(data)


class _Fallback(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers all methods that have no handler."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def service(self, _: Any) -> Any:
        return self._handler


def common_options(limits: Limits) -> list[tuple[str, int]]:
    """The gRPC options of both ends: small messages, and little buffering before they are read."""
    return [
        ("grpc.max_receive_message_length", CHUNK + ROOM),
        ("grpc.max_send_message_length", CHUNK + ROOM),
        ("grpc.max_concurrent_streams", limits.max_calls),
        ("grpc.http2.lookahead_bytes", AHEAD * CHUNK),
        ("grpc.http2.bdp_probe", 0),  # it would enlarge the buffers
    ]


def server_options(limits: Limits) -> list[tuple[str, int]]:
    """The gRPC options of a server: handshake time limit, any number of pings."""
    return [
        *common_options(limits),
        ("grpc.server_handshake_timeout_ms", round(1000 * limits.grace)),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),  # drops clients that vanished without closing
    ]


def short(text: object) -> str:
    """A text as short ASCII, safe for gRPC metadata and for a log line."""
    return escaped(text).encode("ascii", "backslashreplace").decode()[:DETAILS]
