"""Tunnels: a peer that opens no port is called over a connection that it has opened itself.

The peer that dials out opens one stream `Tunnel` to every peer that it can reach, and keeps it
open. The other end sends its calls through it, as frames (see `frames`). Both ends authenticate
each other as for any call, and the calls run through the same methods (`PeerServicer`), so that
the same limits hold.

`TunnelChannel` is the calling end. It has the methods of a gRPC channel that a `Link` uses.
`CallAnswerer` is the end of the peer that dials out, whose tunnels `dialler` keeps open.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from peerage.net.wire.frames import (
    FROM_DIALLER,
    MAX_NUMBER,
    TO_DIALLER,
    Frame,
    Kind,
    call_frame,
    failure_frame,
    parse_call,
    parse_failure,
    rpc_error,
)
from peerage.net.wire.header import Rejected
from peerage.net.wire.limits import Limits
from peerage.net.wire.server import AHEAD, OFFSET, REASON
from peerage.net.wire.transport import ANSWER_LIMIT

PINGS = 5  # per idle timeout
LAST_WRITE = 1.0  # seconds for a write to end when the tunnel closes
FROM_DIALLER_LIMIT = 2 * ANSWER_LIMIT  # bytes of a frame from the peer that dials out

Code = grpc.StatusCode
Method = Callable[[Any, Any], Awaitable[Any]]  # of `PeerServicer`
State = grpc.ChannelConnectivity


class _Stream:
    """The frames of one end: reads with a time limit, and writes one frame after the other."""

    def __init__(self, call: Any, limits: Limits) -> None:
        self._call, self._limits = call, limits
        self._outgoing: asyncio.Queue[Frame] = asyncio.Queue(AHEAD)
        self._turn = asyncio.Lock()

    async def put(self, frame: Frame) -> None:
        """Queue a frame when there is room; frames are written in the order of these calls."""
        async with self._turn:
            await self._outgoing.put(frame)

    async def flush(self) -> None:
        await self._outgoing.join()

    async def read(self, allowed: tuple[Kind, ...]) -> Frame | None:
        """The next frame; None at the end of the stream."""
        raw = await self._call.read()
        return None if raw is grpc.aio.EOF else Frame.parse(bytes(raw), allowed)

    async def write_all(self, ping: float | None = None) -> None:
        """Write the outgoing frames for ever; if there is none for `ping` seconds, a PING.

        Raises `TimeoutError` if the other end does not read them.
        """
        while True:
            frame, waited = Frame(Kind.PING), True
            with suppress(TimeoutError):
                async with asyncio.timeout(ping):
                    frame, waited = await self._outgoing.get(), False
            await self._write(frame.encode())
            if not waited:
                self._outgoing.task_done()

    async def _write(self, raw: bytes) -> None:
        writing = asyncio.ensure_future(self._call.write(raw))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            async with asyncio.timeout(self._limits.grace + len(raw) / self._limits.min_rate):
                await asyncio.shield(writing)
        except asyncio.CancelledError:
            # gRPC cannot end a stream while a write is under way.
            await asyncio.wait([writing], timeout=LAST_WRITE)
            raise


async def _first(*work: Any) -> None:
    """Run these until the first one ends, and raise its error, if any."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


# The end that calls


class Tunnel:
    """One open tunnel, at the end that makes calls."""

    def __init__(self, call: Any, certificate: bytes, limits: Limits) -> None:
        self.certificate = certificate  # of the peer at the other end
        self._stream, self._limits = _Stream(call, limits), limits
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._begun: set[int] = set()  # running calls of which a frame was queued
        self._numbers = itertools.count(1)
        self._last = 0  # the newest number
        self._slots = asyncio.Semaphore(limits.max_calls)
        self._cancelled: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Carry frames until the tunnel is closed or broken, or nothing comes for too long."""
        try:
            await _first(self._read(), self._stream.write_all(), self._closed.wait())
        finally:
            self.close()
            for task in self._cancelled:
                task.cancel()

    def close(self) -> None:
        self._closed.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(rpc_error(Code.UNAVAILABLE, "the tunnel has closed"))

    async def call(self, method: str, messages: Iterable[bytes], offset: str) -> bytes:
        async with self._slots:
            if self._closed.is_set():
                raise rpc_error(Code.UNAVAILABLE, "the tunnel has closed")
            number = self._last = next(self._numbers)
            if number > MAX_NUMBER:
                self.close()
                raise rpc_error(Code.UNAVAILABLE, "the tunnel has no numbers left")
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._answers[number] = answer
            try:
                await self._put(call_frame(number, method, offset), answer)
                for message in messages:
                    if not await self._put(Frame(Kind.DATA, number, message), answer):
                        break  # it was answered early, such as by a rejection
                else:
                    await self._put(Frame(Kind.END, number), answer)
                return await answer
            finally:
                del self._answers[number]
                if not answer.done() or answer.cancelled():
                    self._cancel(number)
                else:
                    answer.exception()  # else asyncio logs it if the caller has gone
                self._begun.discard(number)

    async def _put(self, frame: Frame, answer: asyncio.Future[bytes]) -> bool:
        """Queue a frame when there is room; return False if the call ended before."""
        putting = asyncio.ensure_future(self._queue(frame))
        ends: list[asyncio.Future[Any]] = [putting, answer]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return putting.done()
        finally:
            putting.cancel()

    async def _queue(self, frame: Frame) -> None:
        await self._stream.put(frame)
        self._begun.add(frame.number)

    def _cancel(self, number: int) -> None:
        """Tell the other end, if the call has begun, that nobody waits for the answer any more."""
        if self._closed.is_set() or number not in self._begun:
            return
        task = asyncio.ensure_future(self._stream.put(Frame(Kind.CANCEL, number)))
        self._cancelled.add(task)
        task.add_done_callback(self._cancelled.discard)

    async def _read(self) -> None:
        while True:
            async with asyncio.timeout(self._limits.idle_timeout):
                frame = await self._stream.read(FROM_DIALLER)
            if frame is None:
                return
            if frame.kind is Kind.PING:
                continue
            if len(frame.body) > FROM_DIALLER_LIMIT:
                raise Rejected("oversized", f"an answer of {len(frame.body)} bytes")
            if not 0 < frame.number <= self._last:
                raise Rejected("malformed", f"an answer to call {frame.number}, which is unknown")
            error = parse_failure(frame.body) if frame.kind is Kind.FAILURE else None
            answer = self._answers.get(frame.number)
            if answer is None or answer.done():
                continue  # of a call that was cancelled
            if error is None:
                answer.set_result(frame.body)
            else:
                answer.set_exception(error)


class TunnelChannel:
    """The way to a peer that dials out: its newest tunnel, if there is one."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._reason, self._limits = f"waiting for {name} to connect", limits
        self._tunnel: Tunnel | None = None

    def certificate(self) -> bytes:
        """The certificate with which the tunnel was opened; raises ConnectionError without one."""
        if self._tunnel is None:
            raise ConnectionError(self._reason)
        return self._tunnel.certificate

    async def carry(self, call: Any, certificate: bytes, opened: Callable[[], None]) -> None:
        """Use this stream until it ends; the tunnel that was open before is closed."""
        tunnel = Tunnel(call, certificate, self._limits)
        if self._tunnel is not None:
            self._tunnel.close()
        self._tunnel = tunnel
        opened()
        try:
            await tunnel.run()
        finally:
            if self._tunnel is tunnel:
                self._tunnel = None

    # As a gRPC channel

    def stream_unary(self, path: str) -> Callable[..., Awaitable[bytes]]:
        async def call(
            messages: Iterable[bytes],
            *,
            timeout: float,  # as in gRPC
            metadata: Iterable[tuple[str, str]] = (),
        ) -> bytes:
            if self._tunnel is None:
                raise rpc_error(Code.UNAVAILABLE, self._reason)
            offset = dict(metadata).get(OFFSET, "")
            try:
                async with asyncio.timeout(timeout):
                    return await self._tunnel.call(path.rpartition("/")[2], messages, offset)
            except TimeoutError:
                raise rpc_error(Code.DEADLINE_EXCEEDED, "Deadline Exceeded") from None

        return call

    def unary_unary(self, path: str) -> Callable[..., Awaitable[bytes]]:
        stream = self.stream_unary(path)

        async def call(message: bytes, *, timeout: float) -> bytes:
            return await stream([message], timeout=timeout)

        return call

    def get_state(self, *, try_to_connect: bool) -> Any:
        return State.IDLE if self._tunnel is None else State.READY

    async def close(self, grace: float | None = None) -> None:
        if self._tunnel is not None:
            self._tunnel.close()


# The end of the peer that dials out


class _EndOfData:
    """Stands for the end of the data of a call."""


@dataclass
class IncomingCall:
    """A call that came through a tunnel, with the methods of a gRPC call that handlers use."""

    certificate: bytes
    offset: str
    messages: asyncio.Queue[bytes | _EndOfData] = field(
        default_factory=lambda: asyncio.Queue(AHEAD)
    )
    ended: bool = False
    status: tuple[Any, str | None, str] | None = None  # code, reason and details, if aborted

    def auth_context(self) -> Mapping[str, list[bytes]]:
        return {"x509_pem_cert": [self.certificate]}

    def peer(self) -> str:
        return ""  # the tunnel, not the call, has a connection

    def invocation_metadata(self) -> Iterable[tuple[str, str]]:
        return ((OFFSET, self.offset),) if self.offset else ()

    async def read(self) -> Any:
        if self.ended:
            return grpc.aio.EOF
        message = await self.messages.get()
        if isinstance(message, _EndOfData):
            self.ended = True
            return grpc.aio.EOF
        return message

    async def abort(
        self, code: Any, details: str = "", trailing: Iterable[tuple[str, str]] = ()
    ) -> None:
        self.status = code, dict(trailing).get(REASON), details
        raise grpc.aio.AbortError

    def discard(self) -> None:
        """Let the tunnel go on if it waits for room here."""
        while not self.messages.empty():
            self.messages.get_nowait()


class CallAnswerer:
    """Answers the calls that come through one tunnel, by the methods of the service."""

    def __init__(
        self, call: Any, certificate: bytes, methods: Mapping[str, Method], limits: Limits
    ) -> None:
        self._stream, self._limits = _Stream(call, limits), limits
        self._certificate, self._methods = certificate, methods
        self._calls: dict[int, IncomingCall] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last = 0  # the highest number of a call
        # More than a caller has at once, as cancelled calls take a moment to end.
        self._slots = asyncio.Semaphore(2 * limits.max_calls)
        self._stopping = False

    async def run(self) -> None:
        """Answer calls until the tunnel ends or breaks, or a frame is not valid."""
        ping = self._limits.idle_timeout / PINGS
        try:
            await _first(self._read(), self._stream.write_all(ping))
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> None:
        """Begin no call any more, and wait until the running ones are answered."""
        self._stopping = True
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        await self._stream.flush()

    async def _read(self) -> None:
        while (frame := await self._stream.read(TO_DIALLER)) is not None:
            if frame.kind is Kind.CALL:
                await self._begin(frame)
            elif not 0 < frame.number <= self._last:
                raise Rejected("malformed", f"a frame of call {frame.number}, which is unknown")
            elif frame.kind is Kind.CANCEL:
                if (task := self._tasks.get(frame.number)) is not None:
                    task.cancel()
            elif (call := self._calls.get(frame.number)) is not None:  # else it has ended
                await call.messages.put(frame.body if frame.kind is Kind.DATA else _EndOfData())

    async def _begin(self, frame: Frame) -> None:
        if frame.number <= self._last:
            raise Rejected("malformed", f"call {frame.number} after call {self._last}")
        self._last = frame.number
        method, offset = parse_call(frame.body)
        if self._stopping:
            return
        await self._slots.acquire()
        call = self._calls[frame.number] = IncomingCall(self._certificate, offset)
        task = asyncio.create_task(self._answer(frame.number, method, call))
        self._tasks[frame.number] = task
        task.add_done_callback(lambda _: self._end(frame.number, call))

    def _end(self, number: int, call: IncomingCall) -> None:
        del self._tasks[number]
        self._forget(number, call)
        self._slots.release()

    def _forget(self, number: int, call: IncomingCall) -> None:
        self._calls.pop(number, None)
        call.discard()

    async def _answer(self, number: int, name: str, call: IncomingCall) -> None:
        method = self._methods.get(name)
        if method is None:
            answer = failure_frame(number, Code.UNIMPLEMENTED, None, "this peer has no such method")
        else:
            try:
                answer = Frame(Kind.RESULT, number, await method(None, call))
            except grpc.aio.AbortError:
                assert call.status is not None
                answer = failure_frame(number, *call.status)
        self._forget(number, call)
        await self._stream.put(answer)
