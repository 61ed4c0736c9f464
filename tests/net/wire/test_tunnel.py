"""Peers that dial out: calls over tunnels, through real sockets and with real certificates."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any
from zlib import crc32

import grpc
import pytest
from support.networking import BROKEN, CALM_LIMITS, run_skipping, skip

from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire.frames import (
    FROM_DIALLER,
    START,
    TO_DIALLER,
    Frame,
    Kind,
    call_frame,
    failure_frame,
    parse_call,
    parse_failure,
)
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.header import Header, MessagePolicy, Rejected, parse_header
from peerage.net.wire.limits import Limits
from peerage.net.wire.server import ROOM, SERVICE
from peerage.net.wire.transport import ANSWER_LIMIT, CHUNK, CallerRefused, Unreachable
from peerage.net.wire.tunnel import CallAnswerer, Tunnel, _Stream
from peerage.requests import Envelope

NAMES = {"node-0": 0, "node-1": 1, "node-2": 2}
CALLER, DIALLER = 0, 1  # the peer that listens, and the peer that dials out
Code = grpc.StatusCode


class Store:
    """A receiver that keeps what arrives."""

    def __init__(self, me: int) -> None:
        members = frozenset(NAMES.values())
        self.expected = MessagePolicy("run", me, members, {"model": {}}, 1 << 26)
        self.parts: dict[Header, bytearray] = {}
        self.whole: dict[Header, bytes] = {}
        self.offsets: list[int] = []  # at which streams began
        self.on_chunk: Callable[[int], None] = lambda offset: None
        self.waiting = asyncio.Event()
        self.cancelled = 0

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        header = parse_header(raw, self.expected, identity)
        if header in self.whole:
            raise Rejected("replayed", "it was already here")
        self.offsets.append(len(self.parts.setdefault(header, bytearray())))
        return header, self.offsets[-1]

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        self.on_chunk(offset)
        self.parts[header] += data

    async def complete(self, header: Header) -> None:
        self.whole[header] = bytes(self.parts.pop(header))

    async def answer(self, question: bytes, identity: int) -> bytes:
        if question == b"much":
            return bytes(ANSWER_LIMIT + 1)
        if question == b"wait":
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return b"%d asked %s" % (identity, question)

    async def report(self) -> bytes:
        return b"{}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority.create(tmp_path_factory.mktemp("certs"), "test")
    for name in NAMES:
        made.issue(name)
    return made


def identity(authority: Authority, node: int) -> Identity:
    return Identity.load(authority.folder, f"node-{node}")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_skipping(test())


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BROKEN
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


def message(size: int, sequence: int = 0, sender: int = CALLER) -> tuple[Header, bytes]:
    payload = random.Random(size).randbytes(size)
    envelope = Envelope(sender, 10, 2, "model")
    header = Header("run", 3, envelope, DIALLER, sequence, size=size, checksum=crc32(payload))
    return header, payload


@contextlib.asynccontextmanager
async def listening(
    authority: Authority, limits: Any = CALM_LIMITS, port: int = 0, **changes: Any
) -> AsyncIterator[GrpcTransport]:
    """The peer that can be reached."""
    options = {"bind": f"127.0.0.1:{port}", "limits": limits, "dialling": {DIALLER}} | changes
    transport = GrpcTransport(identity(authority, CALLER), NAMES, {}, **options)
    await transport.start(Store(CALLER))
    try:
        yield transport
    finally:
        await transport.stop()


@contextlib.asynccontextmanager
async def dialling(
    authority: Authority, port: int, store: Store, limits: Any = CALM_LIMITS
) -> AsyncIterator[GrpcTransport]:
    """The peer that dials out, without a server."""
    addresses = {CALLER: f"127.0.0.1:{port}"}
    transport = GrpcTransport(
        identity(authority, DIALLER), NAMES, addresses, limits=limits, dialling={DIALLER}
    )
    await transport.start(store)
    try:
        yield transport
    finally:
        await transport.stop()


@contextlib.asynccontextmanager
async def connected(
    authority: Authority, limits: Any = CALM_LIMITS
) -> AsyncIterator[tuple[GrpcTransport, GrpcTransport, Store]]:
    store = Store(DIALLER)
    async with (
        listening(authority, limits) as caller,
        dialling(authority, caller.port, store, limits) as dialler,
    ):
        yield caller, dialler, store


# Calls


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, CHUNK, 6 * CHUNK + 17])
def test_messages_and_questions_reach_a_peer_that_has_no_port(
    authority: Authority, size: int
) -> None:
    async def test() -> None:
        header, payload = message(size)
        async with connected(authority) as (caller, dialler, store):
            await caller.send(header, memoryview(payload), BROKEN)
            assert store.whole == {header: payload}
            assert caller.counters["bytes_sent"] == dialler.counters["bytes_received"]
            assert await caller.ask(DIALLER, b"why", BROKEN) == b"0 asked why"
            assert await dialler.ask(CALLER, b"how", BROKEN) == b"1 asked how"
            assert dialler.port == 0
            await until(lambda: caller.reachable(DIALLER) and dialler.reachable(CALLER))
            assert not caller.refused
            assert not dialler.refused

    run(test)


@pytest.mark.slow
def test_many_messages_at_once(authority: Authority) -> None:
    async def test() -> None:
        messages = [message(1000 * sequence, sequence) for sequence in range(40)]
        async with connected(authority) as (caller, _, store):
            await asyncio.gather(*(caller.send(*one, BROKEN) for one in messages))
        assert store.whole == dict(messages)

    run(test)


@pytest.mark.slow
def test_reasons_of_rejections_reach_the_sender(authority: Authority) -> None:
    async def test() -> None:
        header, payload = message(5 * CHUNK)
        async with connected(authority) as (caller, dialler, _):
            wrong = {
                "run": replace(header, run="other"),
                "sender": replace(header, envelope=replace(header.envelope, sender=2)),
                "oversized": replace(header, size=1 << 27),
            }
            for reason, header in wrong.items():
                with pytest.raises(Rejected) as caught:
                    await caller.send(header, payload, BROKEN)
                assert caught.value.reason == reason
            for question in (bytes(ANSWER_LIMIT + 1), b"much"):
                with pytest.raises(Rejected, match="bytes"):
                    await caller.ask(DIALLER, question, BROKEN)
            assert dialler.refused == {"run": 1, "sender": 1, "oversized": 3}
            assert await caller.ask(DIALLER, b"on", BROKEN) == b"0 asked on"

    run(test)


@pytest.mark.slow
def test_a_broken_transfer_is_resumed_over_the_next_tunnel(authority: Authority) -> None:
    async def test() -> None:
        header, payload = message(8 * CHUNK)
        async with connected(authority) as (caller, _, store):
            tunnel, closing = caller._connections.tunnels[DIALLER], []

            def cut(offset: int) -> None:
                if offset == 3 * CHUNK:
                    store.on_chunk = lambda offset: None
                    closing.append(asyncio.create_task(tunnel.close()))

            store.on_chunk = cut
            await caller.send(header, payload, BROKEN)
            assert store.whole == {header: payload}
            assert store.offsets[0] == 0
            assert store.offsets[-1] == 0 or store.offsets[-1] > 3 * CHUNK
            assert caller.counters["retries"] >= 1

    run(test)


@pytest.mark.slow
def test_without_a_tunnel_the_caller_waits_and_says_for_whom(authority: Authority) -> None:
    async def test() -> None:
        async with listening(authority) as caller:
            asking = asyncio.create_task(caller.ask(DIALLER, b"why", 1000.0))
            await until(lambda: caller.counters["retries"] > 0)
            skip(1000.0)
            with pytest.raises(Unreachable, match="waiting for node-1 to connect"):
                await asking
            assert not caller.reachable(DIALLER)
            asking = asyncio.create_task(caller.ask(DIALLER, b"why", BROKEN))
            async with dialling(authority, caller.port, Store(DIALLER)):
                assert await asking == b"0 asked why"
            await until(lambda: caller._connections.tunnels[DIALLER]._tunnel is None)

    run(test)


@pytest.mark.slow
def test_the_dialling_peer_finds_a_restarted_one(authority: Authority) -> None:
    async def test() -> None:
        store = Store(DIALLER)
        async with contextlib.AsyncExitStack() as stack:
            async with listening(authority) as first:
                port = first.port
                await stack.enter_async_context(dialling(authority, port, store))
                assert await first.ask(DIALLER, b"one", BROKEN) == b"0 asked one"
            async with listening(authority, port=port) as second:
                assert await second.ask(DIALLER, b"two", BROKEN) == b"0 asked two"

    run(test)


@pytest.mark.slow
def test_a_call_that_is_given_up_ends_at_the_other_side(authority: Authority) -> None:
    async def test() -> None:
        async with connected(authority) as (caller, _, store):
            asking = asyncio.create_task(caller.ask(DIALLER, b"wait", BROKEN))
            await store.waiting.wait()
            asking.cancel()
            await until(lambda: store.cancelled == 1)
            assert await caller.ask(DIALLER, b"on", BROKEN) == b"0 asked on"

    run(test)


@pytest.mark.slow
def test_concurrent_calls_are_limited(authority: Authority) -> None:
    async def test() -> None:
        limits = replace(CALM_LIMITS, max_calls=2)
        async with connected(authority, limits) as (caller, dialler, store):
            waiting = [asyncio.create_task(caller.ask(DIALLER, b"wait", BROKEN)) for _ in range(2)]
            await store.waiting.wait()
            third = asyncio.create_task(caller.ask(DIALLER, b"third", BROKEN))
            await until(lambda: len(caller._connections.tunnels[DIALLER]._tunnel._answers) == 2)
            for task in waiting:
                task.cancel()
            assert await third == b"0 asked third"
            assert not dialler.refused

    run(test)


# Certificates


@pytest.mark.slow
def test_a_revoked_caller_is_refused_through_an_open_tunnel(tmp_path: Any) -> None:
    async def test() -> None:
        authority = Authority.create(tmp_path / "certs", "test")
        for name in NAMES:
            authority.issue(name)
        async with connected(authority) as (caller, dialler, _):
            assert await caller.ask(DIALLER, b"one", BROKEN) == b"0 asked one"
            authority.revoke("node-0")
            with pytest.raises(CallerRefused, match="revoked"):
                await caller.ask(DIALLER, b"two", BROKEN)
            assert dialler.refused["revoked"] == 1

    run(test)


@pytest.mark.slow
def test_a_revoked_dialler_is_called_no_more(tmp_path: Any) -> None:
    async def test() -> None:
        authority = Authority.create(tmp_path / "certs", "test")
        for name in NAMES:
            authority.issue(name)
        async with connected(authority) as (caller, _, store):
            assert await caller.ask(DIALLER, b"one", BROKEN) == b"0 asked one"
            authority.revoke("node-1")
            before = caller.counters["retries"]
            asking = asyncio.create_task(caller.ask(DIALLER, b"wait", 1000.0))
            await until(lambda: caller.counters["retries"] > before + 2)
            skip(1000.0)
            with pytest.raises(Unreachable, match="waiting for node-1 to connect"):
                await asking
            assert not store.waiting.is_set()
            assert caller.refused["revoked"] >= 1

    run(test)


@pytest.mark.slow
def test_a_peer_that_is_not_marked_gets_no_tunnel(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with (
            listening(authority, dialling=set()) as caller,
            dialling(authority, caller.port, Store(DIALLER)) as dialler,
        ):
            await until(lambda: "refuses the tunnel" in caplog.text)
            assert caller.refused["sender"] >= 1
            assert await dialler.ask(CALLER, b"still", BROKEN) == b"1 asked still"

    run(test)
    assert "node-1 does not dial out in the network file" in caplog.text


# Hostile ends


@contextlib.asynccontextmanager
async def raw_tunnel(authority: Authority, port: int) -> AsyncIterator[Any]:
    """A stream of the peer that dials out, without any of its code."""
    who = identity(authority, DIALLER)
    credentials = grpc.ssl_channel_credentials(
        who.authority.read_bytes(), who.key.read_bytes(), who.certificate.read_bytes()
    )
    options = [
        ("grpc.ssl_target_name_override", server_name("node-0")),
        ("grpc.enable_http_proxy", 0),
    ]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        yield channel.stream_stream(f"/{SERVICE}/Tunnel")()


async def code_of(call: Any) -> Any:
    """The status with which the other end closes a stream."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "malformed"),
        (b"garbage that is not a frame", "malformed"),
        (Frame(Kind.DATA, 1).encode(), "malformed"),
        (Frame(Kind.RESULT, 7, b"to no call").encode(), "malformed"),
        (Frame(Kind.RESULT, 1, bytes(3 * ANSWER_LIMIT)).encode(), "oversized"),
        (Frame(Kind.FAILURE, 1, b"OK - fine").encode(), "malformed"),
        (Frame(Kind.FAILURE, 1, b"NO_SUCH_CODE - x").encode(), "malformed"),
        (Frame(Kind.FAILURE, 1, b"\xff\xfe").encode(), "malformed"),
    ],
)
def test_a_dialler_that_sends_garbage_loses_its_tunnel(
    authority: Authority, raw: bytes, reason: str
) -> None:
    async def test() -> None:
        async with listening(authority) as caller, raw_tunnel(authority, caller.port) as call:
            asking = asyncio.create_task(caller.ask(DIALLER, b"why", BROKEN))
            assert (await call.read())[START.size :] == b"Ask "
            await call.write(raw)
            assert await code_of(call) is Code.FAILED_PRECONDITION
            assert caller.refused == {reason: 1}
            async with dialling(authority, caller.port, Store(DIALLER)):
                assert await asking == b"0 asked why"

    run(test)


@pytest.mark.slow
def test_a_newer_tunnel_replaces_the_older_one(authority: Authority) -> None:
    async def test() -> None:
        async with listening(authority) as caller, raw_tunnel(authority, caller.port) as old:
            await until(lambda: caller._connections.tunnels[DIALLER]._tunnel is not None)
            async with raw_tunnel(authority, caller.port) as new:
                assert await code_of(old) is Code.OK  # it has ended
                asking = asyncio.create_task(caller.ask(DIALLER, b"why", BROKEN))
                assert (await new.read())[START.size :] == b"Ask "
                await new.write(Frame(Kind.PING).encode())
                await new.write(Frame(Kind.RESULT, 1, b"because").encode())
                assert await asking == b"because"

    run(test)


@pytest.mark.slow
def test_a_silent_dialler_loses_its_tunnel(authority: Authority) -> None:
    async def test() -> None:
        async with listening(authority) as caller, raw_tunnel(authority, caller.port) as call:
            await until(lambda: caller._connections.tunnels[DIALLER]._tunnel is not None)
            skip(CALM_LIMITS.idle_timeout)
            assert await code_of(call) is Code.ABORTED
            assert caller.refused == {"slow": 1}

    run(test)


@pytest.mark.slow
def test_the_dialler_of_a_caller_that_sends_garbage_stays_alive(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        opened = []

        async def garbage(_: Any, call: Any) -> None:
            opened.append(call)
            await call.write(b"garbage that is not a frame")
            await call.read()

        who = identity(authority, CALLER)
        server = grpc.aio.server()
        method = grpc.stream_stream_rpc_method_handler(garbage)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Tunnel": method}),)
        )
        pair = [(who.key.read_bytes(), who.certificate.read_bytes())]
        credentials = grpc.ssl_server_credentials(pair, who.authority.read_bytes(), True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        try:
            async with dialling(authority, port, Store(DIALLER)):
                await until(lambda: len(opened) > 2)
        finally:
            await server.stop(None)

    run(test)
    assert [record.message for record in caplog.records] == [
        "closed the tunnel to node-0 (malformed): unexpected kind 103 of a frame"
    ]


class Pipe:
    """A stream in memory: what a test puts in is read, and what is written can be taken."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.written: asyncio.Queue[bytes] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.incoming.get()

    async def write(self, raw: bytes) -> None:
        await self.written.put(raw)


@contextlib.asynccontextmanager
async def answering(**methods: Callable[[Any, Any], Awaitable[bytes]]) -> AsyncIterator[Any]:
    """A peer that dials out, and its end of the tunnel as a task."""
    pipe = Pipe()
    answerer = CallAnswerer(pipe, b"certificate", methods, CALM_LIMITS)
    task = asyncio.create_task(answerer.run())
    try:
        yield pipe, task, answerer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _read_all(_: Any, call: Any) -> bytes:
    parts = []
    while (part := await call.read()) is not grpc.aio.EOF:
        parts.append(part)
    assert await call.read() is grpc.aio.EOF
    return b"".join(parts)


async def _refuse(_: Any, call: Any) -> bytes:
    await call.abort(Code.OUT_OF_RANGE, "not that", (("peerage-reason", "offset"),))
    return b""


async def _hang(_: Any, call: Any) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x00"],
        [b"garbage that is not a frame"],
        [Frame(Kind.RESULT, 1, b"I am no caller").encode()],
        [Frame(Kind.DATA, 9, b"to no call").encode()],
        [Frame(Kind.CANCEL, 9).encode()],
        [Frame(Kind.CALL, 0, b"Ask ").encode()],
        [call_frame(3, "Ask", "").encode(), call_frame(3, "Ask", "").encode()],
        [call_frame(3, "Ask", "").encode(), call_frame(2, "Ask", "").encode()],
        [Frame(Kind.CALL, 1, b"Ask").encode()],
        [Frame(Kind.CALL, 1, b"\xff \xff").encode()],
        [Frame(Kind.CALL, 1, b"Ask " + bytes(100)).encode()],
    ],
)
def test_a_caller_that_sends_garbage_loses_the_tunnel(frames: list[bytes]) -> None:
    async def test() -> None:
        async with answering(Ask=_hang) as (pipe, task, _):
            for frame in frames:
                pipe.incoming.put_nowait(frame)
            with pytest.raises(Rejected):
                await task

    run(test)


def test_calls_are_answered_in_any_order() -> None:
    async def test() -> None:
        async with answering(Deliver=_read_all, Ask=_refuse, Offset=_hang) as (pipe, task, _):
            for frame in (
                call_frame(1, "Deliver", "12"),
                call_frame(2, "Ask", ""),
                call_frame(3, "Nothing", ""),
                call_frame(4, "Offset", ""),
                Frame(Kind.DATA, 1, b"ab"),
                Frame(Kind.CANCEL, 4),
                Frame(Kind.DATA, 2, b"of a call that has ended"),
                Frame(Kind.DATA, 1, b"cd"),
                Frame(Kind.END, 1),
            ):
                pipe.incoming.put_nowait(frame.encode())
            found = [Frame.parse(await pipe.written.get(), FROM_DIALLER) for _ in range(3)]
            assert sorted(found, key=lambda frame: frame.number) == [
                Frame(Kind.RESULT, 1, b"abcd"),
                Frame(Kind.FAILURE, 2, b"OUT_OF_RANGE offset not that"),
                Frame(Kind.FAILURE, 3, b"UNIMPLEMENTED - this peer has no such method"),
            ]
            assert not task.done()

    run(test)


def test_what_a_caller_can_make_a_peer_keep_is_limited() -> None:
    """A caller that never ends its calls, or sends more than is read, is not read from."""

    async def test() -> None:
        async with answering(Ask=_hang, Deliver=_hang) as (pipe, task, answerer):
            for number in range(1, 1000):
                pipe.incoming.put_nowait(call_frame(number, "Ask", "").encode())
            await until(lambda: len(answerer._tasks) == 2 * CALM_LIMITS.max_calls)
            await asyncio.sleep(0)
            left = pipe.incoming.qsize()
            assert left == 999 - 2 * CALM_LIMITS.max_calls - 1  # one was read and waits
        async with answering(Deliver=_hang) as (pipe, task, answerer):
            pipe.incoming.put_nowait(call_frame(1, "Deliver", "").encode())
            for _ in range(100):
                pipe.incoming.put_nowait(Frame(Kind.DATA, 1, b"x").encode())
            await until(lambda: pipe.incoming.qsize() < 96)
            await asyncio.sleep(0)
            assert pipe.incoming.qsize() > 90
            assert not task.done()

    run(test)


def test_a_peer_that_dials_out_says_that_it_is_alive() -> None:
    async def test() -> None:
        async with answering(Ask=_hang) as (pipe, _, _answerer):
            for _ in range(2):
                while pipe.written.empty():
                    skip(CALM_LIMITS.idle_timeout / 4)
                    await asyncio.sleep(0.01)
                assert pipe.written.get_nowait() == Frame(Kind.PING).encode()

    run(test)


def test_running_calls_are_answered_before_a_tunnel_is_closed() -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow(_: Any, call: Any) -> bytes:
            await go.wait()
            return b"done"

        async with answering(Ask=slow) as (pipe, _, answerer):
            pipe.incoming.put_nowait(call_frame(1, "Ask", "").encode())
            await until(lambda: len(answerer._tasks) == 1)
            finishing = asyncio.create_task(answerer.finish())
            await asyncio.sleep(0)
            pipe.incoming.put_nowait(call_frame(2, "Ask", "").encode())
            go.set()
            await finishing
            assert pipe.written.get_nowait() == Frame(Kind.RESULT, 1, b"done").encode()
            assert pipe.written.empty()

    run(test)


def test_a_dialler_that_does_not_read_loses_its_tunnel() -> None:
    async def test() -> None:
        pipe = Pipe()
        pipe.write = lambda raw: asyncio.Event().wait()  # type: ignore[assignment,return-value]
        tunnel = Tunnel(pipe, b"certificate", CALM_LIMITS)
        running = asyncio.create_task(tunnel.run())
        calling = asyncio.create_task(tunnel.call("Deliver", [bytes(9)] * 50, "0"))
        await asyncio.sleep(0.05)
        skip(CALM_LIMITS.grace + 60)
        with pytest.raises(TimeoutError):
            await running
        with pytest.raises(grpc.aio.AioRpcError, match="the tunnel has closed"):
            await calling

    run(test)


# Frames


def test_frames_are_read_as_they_were_written() -> None:
    for frame in (Frame(Kind.DATA, 5, bytes(CHUNK)), Frame(Kind.END, (1 << 32) - 1)):
        raw = frame.encode()
        assert Frame.parse(raw, TO_DIALLER) == frame
        assert len(raw) <= CHUNK + ROOM
    assert parse_call(call_frame(1, "Deliver", "1048576").body) == ("Deliver", "1048576")
    error = parse_failure(failure_frame(1, Code.ABORTED, "full", "no\nroom \x1b").body)
    assert error.code() is Code.ABORTED
    assert dict(error.trailing_metadata()) == {"peerage-reason": "full"}
    assert error.details() == "no\\nroom \\x1b"


def test_a_tunnel_that_closes_waits_for_a_write_that_is_under_way() -> None:
    """Otherwise gRPC can send no status, and logs a traceback."""

    class Call:
        begun, readable, written = asyncio.Event(), asyncio.Event(), False

        async def write(self, _: bytes) -> None:
            self.begun.set()
            await self.readable.wait()
            self.written = True

    async def closing() -> bool:
        call = Call()
        stream = _Stream(call, Limits())
        await stream.put(Frame(Kind.PING))
        writing = asyncio.create_task(stream.write_all())
        await call.begun.wait()
        writing.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        waits = not writing.done()
        call.readable.set()
        await asyncio.wait([writing])
        return waits and call.written

    assert asyncio.run(closing())
