"""The gRPC transport, over real sockets of this machine and with real certificates."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from support.networking import BROKEN, CALM_LIMITS, run_skipping, skip

from peerage.errors import InputError
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire import grpc as sending_side
from peerage.net.wire import server as server_module
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.header import Header, MessagePolicy, Rejected, header_bytes, parse_header
from peerage.net.wire.limits import Limits
from peerage.net.wire.server import REASON, SERVICE
from peerage.net.wire.transport import ANSWER_LIMIT, CHUNK, Unreachable
from peerage.requests import Envelope

pytestmark = pytest.mark.slow  # real connections

NAMES = {"node-0": 0, "node-1": 1, "node-2": 2}
LATE = 1000.0  # seconds until the deadline of what never succeeds; more than BROKEN
NOWHERE = "127.0.0.1:9"
MEGABYTE = 1 << 20
Code = grpc.StatusCode


class Store:
    """A receiver that keeps what arrives, and parts of what does not arrive as a whole."""

    def __init__(self, me: int = 1) -> None:
        members = frozenset(NAMES.values())
        self.expected = MessagePolicy("run", me, members, {"model": {}}, 64 * MEGABYTE)
        self.parts: dict[Header, bytearray] = {}
        self.whole: dict[Header, bytes] = {}
        self.offsets: list[int] = []  # at which streams began
        self.full = 0  # how many times there is no room yet
        self.rejection: Rejected | None = None  # of whatever is complete
        self.on_chunk: Callable[[int], None] = lambda offset: None

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        header = parse_header(raw, self.expected, identity)
        if header in self.whole:
            raise Rejected("replayed", "it was already here")
        if self.full:
            self.full -= 1
            raise Rejected("full", "there is no room yet")
        self.offsets.append(len(self.parts.setdefault(header, bytearray())))
        return header, self.offsets[-1]

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        self.on_chunk(offset)
        assert offset == len(self.parts[header])
        self.parts[header] += data

    async def complete(self, header: Header) -> None:
        if self.rejection is not None:
            raise self.rejection
        self.whole[header] = bytes(self.parts.pop(header))

    async def answer(self, question: bytes, identity: int) -> bytes:
        if question == b"much":
            return bytes(ANSWER_LIMIT + 1)
        if question == b"break":
            raise RuntimeError("a mistake of ours")
        return b"%d asked %s" % (identity, question)


@dataclass
class Proxy:
    """A proxy between two peers that cuts or delays what flows through it to the second."""

    port: int = 0
    cut_after: int | None = None  # bytes of one connection
    cuts: int = 0  # that are still to be made
    silent: bool = False

    @contextlib.asynccontextmanager
    async def before(self, port: int) -> AsyncIterator["Proxy"]:
        tasks: set[asyncio.Task[None]] = set()

        async def connected(reader: Any, writer: Any) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with contextlib.suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
                back = asyncio.create_task(self._pump(far_reader, writer, False))
                try:
                    await self._pump(reader, far_writer, True)
                finally:
                    back.cancel()
                    far_writer.transport.abort()
                    writer.transport.abort()
                    await asyncio.gather(back, return_exceptions=True)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, reader: Any, writer: Any, outwards: bool) -> None:
        count = 0
        while data := await reader.read(1 << 16):
            while self.silent:
                await asyncio.sleep(0.01)
            count += len(data)
            if outwards and self.cuts and self.cut_after is not None and count > self.cut_after:
                self.cuts -= 1
                return
            writer.write(data)
            await writer.drain()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority.create(tmp_path_factory.mktemp("certs"), "test")
    for name in (*NAMES, "stranger"):
        made.issue(name)
    return made


def identity(authority: Authority, node: int) -> Identity:
    return Identity.load(authority.folder, f"node-{node}")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_skipping(test())


@contextlib.asynccontextmanager
async def served(
    authority: Authority, store: Store, limits: Limits = CALM_LIMITS, port: int = 0
) -> AsyncIterator[GrpcTransport]:
    """Node 1, which listens."""
    server = GrpcTransport(
        identity(authority, 1), NAMES, {}, bind=f"127.0.0.1:{port}", limits=limits
    )
    await server.start(store)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def dialling(
    authority: Authority, port: int, limits: Limits = CALM_LIMITS
) -> AsyncIterator[GrpcTransport]:
    """Node 0, which knows where node 1 listens."""
    addresses = {1: f"127.0.0.1:{port}"}
    client = GrpcTransport(
        identity(authority, 0), NAMES, addresses, bind="127.0.0.1:0", limits=limits
    )
    try:
        yield client
    finally:
        await client.stop()


def message(size: int, sequence: int = 0, sender: int = 0) -> tuple[Header, bytes]:
    payload = random.Random(size).randbytes(size)
    header = Header(
        run="run",
        round=3,
        envelope=Envelope(sender, 10, 2, "model"),
        recipient=1,
        sequence=sequence,
        kind="data",
        wire="fp32",
        packed=False,
        size=size,
        checksum=crc32(payload),
    )
    return header, payload


def stating(header: Header, **changes: Any) -> Header:
    """The same header with another envelope."""
    return replace(header, envelope=replace(header.envelope, **changes))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + BROKEN
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


async def until_the_deadline(
    client: GrpcTransport, call: Coroutine[Any, Any, Any], after: Callable[[], bool] | None = None
) -> None:
    """Let a call fail once, or until `after`; then let its deadline of `LATE` seconds pass."""
    task, before = asyncio.create_task(call), client.counters["retries"]
    await until(after or (lambda: client.counters["retries"] > before))
    assert not task.done()
    skip(LATE)
    await task


# Delivery


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 20 * MEGABYTE + 17])
def test_a_message_arrives_bit_by_bit(authority: Authority, size: int) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(size)
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            await client.send(header, memoryview(payload), BROKEN)
            assert store.whole == {header: payload}
            total = len(header_bytes(header)) + size
            assert client.counters["bytes_sent"] == server.counters["bytes_received"] == total
            assert client.counters["retries"] == 0
            assert not server.refused

    run(test)


def test_many_messages_at_once(authority: Authority) -> None:
    async def test() -> None:
        store = Store()
        messages = [message(1000 * sequence, sequence) for sequence in range(40)]
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            await asyncio.gather(*(client.send(*one, BROKEN) for one in messages))
        assert store.whole == dict(messages)

    run(test)


def test_questions_and_answers(authority: Authority) -> None:
    async def test() -> None:
        async with served(authority, Store()) as server, dialling(authority, server.port) as client:
            assert await client.ask(1, b"why", BROKEN) == b"0 asked why"
            longest = bytes(ANSWER_LIMIT - 8)
            assert await client.ask(1, longest, BROKEN) == b"0 asked " + longest
            for question in (bytes(ANSWER_LIMIT + 1), b"much"):
                with pytest.raises(Rejected) as caught:
                    await client.ask(1, question, BROKEN)
                assert caught.value.reason == "oversized"

    run(test)


def test_a_mistake_in_a_receiver_stays_there(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with served(authority, Store()) as server, dialling(authority, server.port) as client:
            with pytest.raises(Unreachable, match="internal: internal error; see the log"):
                await until_the_deadline(
                    client,
                    client.ask(1, b"break", LATE),
                    after=lambda: server.refused["failed"] > 1,
                )
            assert await client.ask(1, b"on", BROKEN) == b"0 asked on"

    run(test)
    assert "RuntimeError: a mistake of ours" in caplog.text
    assert len(caplog.records) == 1  # the first one is described, the others are counted


@pytest.mark.parametrize("size", [10, 3 * CHUNK])
def test_reasons_of_rejections_reach_the_sender(authority: Authority, size: int) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(size)
        store.rejection = Rejected("nonfinite", "tensor 'x' has \ud800 values" + "!" * 10_000)
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            for wrong, reason in (
                (header, "nonfinite"),
                (replace(header, run="other"), "run"),
                (stating(header, sender=2), "sender"),
                (replace(header, size=65 * MEGABYTE), "oversized"),
                (stating(header, architecture="other"), "architecture"),
            ):
                with pytest.raises(Rejected) as caught:
                    await client.send(wrong, payload, BROKEN)
                assert caught.value.reason == reason
                assert len(str(caught.value)) <= 500
            reasons = ("nonfinite", "run", "sender", "oversized", "architecture")
            assert set(server.refused) == set(reasons)
            # If the rejection interrupted a write, it takes one more call to learn the reason.
            assert server.refused.total() == len(reasons) + client.counters["retries"]
            assert all(1 <= server.refused[reason] <= 2 for reason in reasons)
            assert client.reachable(1)

    run(test)


def test_a_full_receiver_is_asked_again(authority: Authority) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(5)
        store.full = 3
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            await client.send(header, payload, BROKEN)
            assert store.whole == {header: payload}
            assert client.counters["full"] <= client.counters["retries"] == 3
            assert server.refused == {"full": 3}

            store.full = 10**6
            sending = client.send(replace(header, sequence=1), payload, LATE)
            with pytest.raises(Unreachable, match="no room yet"):
                await until_the_deadline(client, sending)
            assert client.reachable(1)

    run(test)


# Broken transfers


def test_a_broken_transfer_goes_on_where_it_was(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        server_module, "BREAK_DELAY", LATE
    )  # that a stream is broken is known from its call

    async def test() -> None:
        size, cuts = 20 * MEGABYTE, 3
        store, (header, payload) = Store(), message(size)
        async with served(authority, store) as server:
            proxy = Proxy(cut_after=5 * MEGABYTE, cuts=cuts)
            async with proxy.before(server.port), dialling(authority, proxy.port) as client:
                await client.send(header, payload, BROKEN)
                assert store.whole == {header: payload}
                assert proxy.cuts == 0
                assert client.counters["retries"] >= cuts
                began = sorted(set(store.offsets))
                assert len(began) == cuts + 1  # every connection has brought something further
                # What was under way at a cut is sent twice; the rest is not.
                assert server.counters["bytes_received"] < size + (cuts + 1) * MEGABYTE
                assert "truncated" not in server.refused

    run(test)


def test_a_stream_that_failed_at_the_other_end_goes_on(authority: Authority) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(4 * CHUNK)
        async with served(authority, store) as server, dialling(authority, server.port) as client:

            def fail_once(offset: int) -> None:
                if offset == 2 * CHUNK:
                    store.on_chunk = lambda offset: None
                    raise OSError("no room on the disk for a moment")

            store.on_chunk = fail_once
            await client.send(header, payload, BROKEN)
            assert store.whole == {header: payload}
            assert store.offsets == [0, 2 * CHUNK, 2 * CHUNK]  # the second when it was asked for
            assert client.counters["retries"] == 1

    run(test)


def test_a_lost_answer_is_not_a_failure(authority: Authority) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(1000)
        original = store.complete

        async def complete(header: Header) -> None:
            await original(header)
            raise OSError("the answer gets lost")

        store.complete = complete  # type: ignore[method-assign]
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            await client.send(header, payload, BROKEN)
            assert store.whole == {header: payload}
            assert client.counters["retries"] == 1
            # A caller that sends it again learns this.
            with pytest.raises(Rejected, match="already here"):
                await client.send(header, payload, BROKEN)

    run(test)


def test_a_newer_stream_takes_over(authority: Authority) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(3 * CHUNK)
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            held = asyncio.Event()

            async def halting() -> AsyncIterator[bytes]:
                yield header_bytes(header)
                yield payload[:CHUNK]
                await held.wait()
                yield payload[CHUNK : 2 * CHUNK]
                await asyncio.sleep(BROKEN)

            async with stub(authority, "node-0", server.port) as deliver:
                old = asyncio.ensure_future(outcome(deliver(halting(), timeout=BROKEN)))
                await until(lambda: len(store.parts.get(header, b"")) == CHUNK)
                store.on_chunk = lambda offset: held.set()  # when the new stream has begun
                await client.send(header, payload, BROKEN)
                assert store.whole == {header: payload}
                assert await old in (Code.ABORTED, Code.CANCELLED)

    run(test)


# Time


def test_a_server_that_comes_later_is_found(authority: Authority) -> None:
    async def test() -> None:
        port, store, (header, payload) = free_port(), Store(), message(100)
        async with dialling(authority, port) as client:
            sending = asyncio.create_task(client.send(header, payload, BROKEN))
            await until(lambda: not client.reachable(1))
            async with served(authority, store, port=port):
                await sending
                assert store.whole == {header: payload}
                assert client.reachable(1)
                assert client.counters["retries"] >= 1

    run(test)


def recorded_pauses(client: GrpcTransport) -> list[float]:
    """The seconds that a client means to wait between attempts, from now on."""
    real, pauses = client._pause, list[float]()

    async def pause(link: Any, seconds: float) -> None:
        pauses.append(seconds)
        await real(link, seconds)

    client._pause = pause  # type: ignore[method-assign]
    return pauses


def test_no_peer_is_reachable_until_the_deadline(authority: Authority) -> None:
    async def test() -> None:
        async with dialling(authority, free_port()) as client:
            pauses = recorded_pauses(client)
            now = asyncio.get_running_loop().time
            start = now()
            with pytest.raises(
                Unreachable, match=r"peer 1 at 127\.0\.0\.1:\d+ could not .* 0\.7 s"
            ):
                await client.send(*message(100), 0.7)
            assert now() - start > 0.7 - sending_side.LAST_ATTEMPT
            assert 0 < sum(pauses) < 0.7  # however long the attempts took
            with pytest.raises(Unreachable):
                await client.ask(1, b"why", 0)

    run(test)


def test_peers_go_and_come_back(authority: Authority) -> None:
    async def test() -> None:
        port, store = free_port(), Store()
        async with dialling(authority, port) as client:
            async with served(authority, store, port=port):
                await client.ask(1, b"why", BROKEN)
                skip(1.1 * CALM_LIMITS.idle_timeout)
                await until(lambda: client.reachable(1))  # silent for long, but connected
            # The connection shows it: a timeout would be far longer than the test.
            await until(lambda: not client.reachable(1))
            async with served(authority, store, port=port):
                await until(lambda: client.reachable(1))

    run(test)


@contextlib.contextmanager
def long_pauses() -> Iterator[None]:
    """Pauses longer than any test begin inside; those that begin later are as always."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending_side, "INITIAL_BACKOFF", 10 * BROKEN)
        patch.setattr(sending_side, "MAX_BACKOFF", 10 * BROKEN)
        yield


async def pausing(
    client: GrpcTransport, peer: int, seconds: float = 10 * BROKEN
) -> asyncio.Task[None]:
    """A message to a peer that is unreachable, after the first attempt."""
    await until(lambda: not client.reachable(peer))
    before, (header, payload) = client.counters["retries"], message(100)
    with long_pauses():
        task = asyncio.create_task(client.send(replace(header, recipient=peer), payload, seconds))
        await until(lambda: client.counters["retries"] > before)
    return task


@pytest.mark.parametrize("known", [False, True])
def test_waiting_calls_wake_when_a_peer_is_back(authority: Authority, known: bool) -> None:
    async def test() -> None:
        port, store = free_port(), Store()
        async with dialling(authority, port) as client:
            if known:
                async with served(authority, Store(), port=port):
                    await client.ask(1, b"why", BROKEN)
            sending = await pausing(client, 1)
            async with served(authority, store, port=port):
                await sending
            assert len(store.whole) == 1

    run(test)


def test_waiting_calls_wake_when_a_peer_is_alive(authority: Authority) -> None:
    async def test() -> None:
        async with served(authority, Store()) as server, dialling(authority, server.port) as client:
            server._connections.places[0] = ("127.0.0.1", free_port())  # where it cannot be dialled
            sending, retries = await pausing(server, 0), server.counters["retries"]
            await client.ask(1, b"why", BROKEN)
            await until(lambda: server.counters["retries"] > retries)
            sending.cancel()

    run(test)


def test_a_stopped_transport_wakes_its_waiting_calls(authority: Authority) -> None:
    async def test() -> None:
        async with dialling(authority, free_port()) as client:
            sending = await pausing(client, 1)
            await client.stop()
            with pytest.raises(Unreachable, match="this peer has stopped"):
                await sending

    run(test)


def test_a_peer_that_comes_and_goes_all_the_time_is_not_called_all_the_time(
    authority: Authority,
) -> None:
    async def test() -> None:
        async with dialling(authority, free_port()) as client:
            sending, now = await pausing(client, 1), asyncio.get_running_loop().time
            before, start, attempts = client.counters["retries"], now(), 0
            while attempts < 10:
                client._connections.links[1].mark_alive()
                await asyncio.sleep(0.001)
                attempts = client.counters["retries"] - before
            # The pause before the first of them had begun earlier.
            assert attempts - 1 <= (now() - start) / sending_side.MIN_BACKOFF
            sending.cancel()

    run(test)


def test_a_silent_peer_is_given_up(authority: Authority) -> None:
    async def test() -> None:
        async with served(authority, Store()) as server:
            proxy, quick = Proxy(), replace(CALM_LIMITS, idle_timeout=2.0)
            async with proxy.before(server.port), dialling(authority, proxy.port, quick) as client:
                await client.ask(1, b"why", BROKEN)
                await until(lambda: client.reachable(1))
                proxy.silent = True
                await until(lambda: not client.reachable(1))
                proxy.silent = False
                await until(lambda: client.reachable(1))

    run(test)


def test_a_peer_that_calls_is_reachable(authority: Authority) -> None:
    async def test() -> None:
        async with served(authority, Store()) as server, dialling(authority, server.port) as client:
            # Node 1 cannot reach node 0, but gets calls from it.
            server._connections.places[0] = ("127.0.0.1", free_port())
            await until(lambda: not server.reachable(0))
            await client.ask(1, b"why", BROKEN)
            assert server.reachable(0)
            assert not server.reachable(2)  # has no address

    run(test)


# Hostile streams


@contextlib.asynccontextmanager
async def stub(
    authority: Authority, name: str, port: int, method: str = "Deliver"
) -> AsyncIterator[Any]:
    """A method of node 1, for a caller with a certificate that ignores the protocol."""
    mine = Identity.within(authority.folder, name)
    files = [path.read_bytes() for path in (mine.authority, mine.key, mine.certificate)]
    async with raw_stub(grpc.ssl_channel_credentials(*files), port, method) as call:
        yield call


@contextlib.asynccontextmanager
async def raw_stub(credentials: Any, port: int, method: str = "Deliver") -> AsyncIterator[Any]:
    options = [("grpc.ssl_target_name_override", server_name("node-1")), ("grpc.enable_retries", 0)]
    address = f"127.0.0.1:{port}"
    channel = (
        grpc.aio.secure_channel(address, credentials, options)
        if credentials is not None
        else grpc.aio.insecure_channel(address)
    )
    try:
        yield channel.stream_unary(f"/{SERVICE}/{method}")
    finally:
        await channel.close()


async def outcome(call: Any) -> Any:
    """The code with which a call ends.

    INTERNAL may stand for any rejection: if a call is rejected while gRPC is writing, its client
    reports the write that failed.
    """
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return Code.CANCELLED
    return Code.OK


def hostile(
    authority: Authority,
    messages: Callable[[Header, bytes], Iterable[bytes] | AsyncIterator[bytes]],
    size: int = 3 * CHUNK,
    hasty: str | None = None,
) -> tuple[Any, dict[str, int], Store]:
    """What becomes of these messages, which reasons were counted, and what was kept.

    `hasty` says from when on the server waits for no more than a moment: the "call" or a "chunk".
    """
    found: list[Any] = []
    store, (header, payload) = Store(), message(size)

    async def test() -> None:
        limits = replace(CALM_LIMITS, min_rate=1 << 22)
        hasten = partial(object.__setattr__, limits, "grace", 0.1)
        async with (
            served(authority, store, limits) as server,
            stub(authority, "node-0", server.port) as deliver,
            dialling(authority, server.port) as client,
        ):
            if hasty == "call":
                hasten()
            elif hasty == "chunk":
                store.on_chunk = lambda offset: hasten()
            found.append(await outcome(deliver(messages(header, payload), timeout=BROKEN)))
            found.append(dict(server.refused))
            object.__setattr__(limits, "grace", CALM_LIMITS.grace)
            assert await client.ask(1, b"alive", BROKEN) == b"0 asked alive"

    run(test)
    assert not store.whole
    return found[0], found[1], store


def test_a_slow_drip_is_cut(authority: Authority) -> None:
    async def drip(header: Header, payload: bytes) -> AsyncIterator[bytes]:
        yield header_bytes(header)
        yield payload[:CHUNK]
        await asyncio.sleep(BROKEN)
        yield payload[CHUNK:]

    code, refused, store = hostile(authority, drip, hasty="chunk")
    assert (code, refused) == (Code.ABORTED, {"slow": 1})
    assert [len(part) for part in store.parts.values()] == [CHUNK]  # kept: it may go on


def test_a_stream_without_a_header_is_cut(authority: Authority) -> None:
    async def silent(header: Header, payload: bytes) -> AsyncIterator[bytes]:
        await asyncio.sleep(BROKEN)
        yield b""

    code, refused, _ = hostile(authority, silent, hasty="call")
    assert (code, refused) == (Code.ABORTED, {"slow": 1})


def test_an_open_end_is_cut(authority: Authority) -> None:
    async def open_end(header: Header, payload: bytes) -> AsyncIterator[bytes]:
        yield header_bytes(header)
        yield payload
        await asyncio.sleep(BROKEN)

    code, refused, _ = hostile(authority, open_end, size=100, hasty="chunk")
    assert (code, refused) == (Code.ABORTED, {"slow": 1})


def test_a_never_ending_stream_is_cut(authority: Authority) -> None:
    sent = 0

    def endless(header: Header, payload: bytes) -> Iterable[bytes]:
        nonlocal sent
        yield header_bytes(header)
        while True:
            sent += CHUNK
            yield bytes(CHUNK)

    code, refused, _ = hostile(authority, endless)
    assert code in (Code.FAILED_PRECONDITION, Code.INTERNAL)
    assert refused == {"oversized": 1}
    assert sent < 30 * MEGABYTE  # three chunks, and what fits into buffers


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (lambda h, p: [], "truncated"),
        (lambda h, p: [b""], "malformed"),
        (lambda h, p: [b"{}"], "schema"),
        (lambda h, p: [header_bytes(h) + b" " * 4096], "oversized"),
        (lambda h, p: [bytes(CHUNK)], "oversized"),
        (lambda h, p: [header_bytes(h)], "truncated"),
        (lambda h, p: [header_bytes(h), p[:CHUNK]], "truncated"),
        (lambda h, p: [header_bytes(h), p[:CHUNK], b""], "malformed"),
        (lambda h, p: [header_bytes(h), *(p[i : i + 1] for i in range(9))], "malformed"),
        (lambda h, p: [header_bytes(h), p[:CHUNK] + b"x"], "oversized"),
        (lambda h, p: [header_bytes(replace(h, size=0)), b""], "oversized"),
        (lambda h, p: [header_bytes(h), *(p[i : i + CHUNK] for i in range(0, len(p), CHUNK)), b"x"],
         "oversized"),
    ],
)  # fmt: skip
def test_streams_of_the_wrong_form(
    authority: Authority, messages: Callable[[Header, bytes], Iterable[bytes]], reason: str
) -> None:
    code, refused, _ = hostile(authority, messages)
    assert code in (Code.FAILED_PRECONDITION, Code.INTERNAL)
    assert refused == {reason: 1}


def test_unknown_methods_are_counted(authority: Authority) -> None:
    async def test() -> None:
        async with (
            served(authority, Store()) as server,
            stub(authority, "node-0", server.port, "Shout") as shout,
            stub(authority, "stranger", server.port, "Shout") as stranger,
        ):
            assert await outcome(shout(iter([b"x"]), timeout=BROKEN)) == Code.UNIMPLEMENTED
            assert await outcome(stranger(iter([b"x"]), timeout=BROKEN)) == Code.PERMISSION_DENIED
            assert server.refused == {"unknown method": 1, "membership": 1}

    run(test)


def test_wrong_offsets_are_counted(authority: Authority) -> None:
    async def test() -> None:
        header, payload = message(100)
        async with (
            served(authority, Store()) as server,
            stub(authority, "node-0", server.port) as deliver,
        ):
            for stated in ("1", "-0", "", "x" * 999):
                metadata = (("peerage-offset", stated),)
                call = deliver(
                    iter([header_bytes(header), payload]), timeout=BROKEN, metadata=metadata
                )
                assert await outcome(call) in (Code.OUT_OF_RANGE, Code.INTERNAL)
            assert server.refused == {"offset": 4}

    run(test)


def test_messages_beyond_the_limit_never_reach_us(authority: Authority) -> None:
    code, refused, store = hostile(authority, lambda h, p: [bytes(3 * CHUNK)])
    assert code in (Code.RESOURCE_EXHAUSTED, Code.CANCELLED, Code.INTERNAL)
    assert not store.offsets
    assert "oversized" not in refused  # gRPC has not shown it to us


def test_one_peer_cannot_have_all_streams(authority: Authority) -> None:
    async def idle(sequence: int) -> AsyncIterator[bytes]:
        yield header_bytes(message(10, sequence)[0])
        await asyncio.sleep(BROKEN)

    async def test() -> None:
        store, limits = Store(), replace(CALM_LIMITS, max_calls=2)
        async with (
            served(authority, store, limits) as server,
            stub(authority, "node-0", server.port) as first,
            stub(authority, "node-0", server.port) as second,
        ):
            calls = [first(idle(sequence), timeout=BROKEN) for sequence in range(2)]
            held = [asyncio.ensure_future(outcome(call)) for call in calls]
            await until(lambda: len(store.offsets) == 2)
            code = await outcome(second(iter([b""]), timeout=BROKEN))
            assert code in (Code.RESOURCE_EXHAUSTED, Code.INTERNAL)
            assert server.refused == {"full": 1}
            async with stub(authority, "node-2", server.port, "Ask") as other:
                assert await other(iter([b"why"]), timeout=BROKEN) == b"2 asked why"
            for call in held:
                call.cancel()
            await asyncio.gather(*held)

    run(test)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b"\xff" * CHUNK, "malformed"), (b"\xff" * 8, "malformed"), (b"", None)],
)
def test_a_hostile_server_does_no_harm(
    authority: Authority, answer: bytes, reason: str | None
) -> None:
    """Node 1 fails every delivery, and then gives wrong offsets."""

    async def deliver(requests: Any, call: Any) -> None:
        await call.abort(Code.ABORTED, "\x1b[2J\n" + "!" * 2000, ((REASON, "nonsense"),))

    async def tell(request: bytes, call: Any) -> bytes:
        return answer

    async def test() -> None:
        mine = identity(authority, 1)
        trusted, *pair = (p.read_bytes() for p in (mine.authority, mine.key, mine.certificate))
        methods = {
            "Deliver": grpc.stream_unary_rpc_method_handler(deliver),
            "Offset": grpc.unary_unary_rpc_method_handler(tell),
            "Ask": grpc.unary_unary_rpc_method_handler(tell),
        }
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        credentials = grpc.ssl_server_credentials([tuple(pair)], trusted, require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", credentials)
        await server.start()
        async with dialling(authority, port) as client:
            sending = client.send(*message(100), LATE)
            with pytest.raises((Rejected, Unreachable)) as caught:
                await (sending if reason else until_the_deadline(client, sending))
            assert getattr(caught.value, "reason", None) == reason
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 600
            if len(answer) > ANSWER_LIMIT:
                with pytest.raises(Rejected, match=f"answered with {CHUNK} bytes"):
                    await client.ask(1, b"why", BROKEN)
        await server.stop(None)

    run(test)


# Wrong identities


def rejected_call(
    authority: Authority, credentials: Any, header: Header, payload: bytes
) -> tuple[Any, dict[str, int], Store]:
    store, found = Store(), []

    async def test() -> None:
        async with (
            served(authority, store) as server,
            raw_stub(credentials, server.port) as deliver,
        ):
            found.append(
                await outcome(deliver(iter([header_bytes(header), payload]), timeout=BROKEN))
            )
            found.append(dict(server.refused))
            assert server.counters["bytes_received"] == 0 or found[1] == {"sender": 1}

    run(test)
    assert not store.parts
    assert not store.whole
    return found[0], found[1], store


def files(one: Identity, trusted: Path | None = None) -> Any:
    paths = (trusted or one.authority, one.key, one.certificate)
    return grpc.ssl_channel_credentials(*(path.read_bytes() for path in paths))


def test_plaintext_and_no_certificate(authority: Authority) -> None:
    trusted = (authority.folder / "authority.pem").read_bytes()
    for credentials in (None, grpc.ssl_channel_credentials(trusted)):
        code, refused, store = rejected_call(authority, credentials, *message(10))
        assert (code, refused, store.offsets) == (Code.UNAVAILABLE, {}, [])


def test_certificates_of_others(authority: Authority, tmp_path: Path) -> None:
    trusted = authority.folder / "authority.pem"
    other = Authority.create(tmp_path / "other", "test").issue("node-0")
    old = datetime.now(UTC) - timedelta(days=10)
    expired = authority.issue("node-0", not_before=old, days=5, into=tmp_path / "expired")
    early = authority.issue("node-0", not_before=old + timedelta(20), into=tmp_path / "early")
    for wrong in (other, expired, early):
        code, refused, store = rejected_call(authority, files(wrong, trusted), *message(10))
        assert (code, refused, store.offsets) == (Code.UNAVAILABLE, {}, [])


def test_self_signed(authority: Authority, tmp_path: Path) -> None:
    # An authority that calls itself by the name of a node has signed its own certificate.
    made = Authority.create(tmp_path / "self", "node-0")
    paths = [authority.folder / "authority.pem", made.folder / "authority.key",
             made.folder / "authority.pem"]  # fmt: skip
    credentials = grpc.ssl_channel_credentials(*(path.read_bytes() for path in paths))
    code, refused, store = rejected_call(authority, credentials, *message(10))
    assert (code, refused, store.offsets) == (Code.UNAVAILABLE, {}, [])


def test_non_members_and_impostors(authority: Authority) -> None:
    stranger = Identity.load(authority.folder, "stranger")
    code, refused, store = rejected_call(authority, files(stranger), *message(10))
    assert code in (Code.PERMISSION_DENIED, Code.INTERNAL)
    assert (refused, store.offsets) == ({"membership": 1}, [])
    code, refused, store = rejected_call(
        authority, files(identity(authority, 0)), *message(10, sender=2)
    )
    assert code in (Code.FAILED_PRECONDITION, Code.INTERNAL)
    assert (refused, store.offsets) == ({"sender": 1}, [])


def test_a_revocation_counts_at_once_at_both_ends(tmp_path: Path) -> None:
    async def test() -> None:
        authority = Authority.create(tmp_path / "certs", "test")
        for name in NAMES:
            authority.issue(name)
        store, (header, payload) = Store(), message(10)
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            await client.send(header, payload, BROKEN)
            authority.revoke("node-0")
            with pytest.raises(
                Rejected, match=r"rejected the certificate of this peer: .* revoked on"
            ) as caught:
                await client.send(replace(header, sequence=1), payload, BROKEN)
            assert caught.value.reason == "sender"
            assert set(server.refused) == {"revoked"}

            refused = server.refused["revoked"]
            authority.revoke("node-1")
            sending = client.send(replace(header, sequence=2), payload, LATE)
            with pytest.raises(Unreachable, match="'node-1' was revoked on"):
                await until_the_deadline(client, sending)
            assert not client.reachable(1)
            await asyncio.sleep(0.5)
            assert not client.reachable(1)
            assert server.refused == {"revoked": refused}  # it was not even called
        assert list(store.whole) == [header]

    run(test)


def test_an_unreadable_revocation_list_leaves_the_last_one_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        authority = Authority.create(tmp_path / "certs", "test")
        mine = authority.issue("node-0", into=tmp_path / "node-0")
        for name in ("node-1", "node-2"):
            authority.issue(name)
        store = Store()
        async with served(authority, store) as server:
            client = GrpcTransport(
                mine, NAMES, {1: f"127.0.0.1:{server.port}"}, bind=NOWHERE, limits=CALM_LIMITS
            )
            for sequence in range(0, 4, 2):
                (authority.folder / "revoked.pem").rename(tmp_path / "away.pem")
                await client.send(*message(10, sequence), BROKEN)
                (tmp_path / "away.pem").rename(authority.folder / "revoked.pem")
                await client.send(*message(10, sequence + 1), BROKEN)
            authority.revoke("node-0")  # the new list is read, and the client's copy is not it
            with pytest.raises(Rejected, match="was revoked"):
                await client.send(*message(10, 4), BROKEN)
            await client.stop()
        assert len(store.whole) == 4

    run(test)
    # Once each time that it was gone, not for every call.
    said = [record.getMessage() for record in caplog.records]
    assert said.pop().startswith("refusing node-0: the certificate of 'node-0' was revoked on")
    assert len(said) == 4
    start = f"using the last revocation list until it can be read again: there is no {tmp_path}"
    assert all(text.startswith(start) for text in said[::2])
    assert said[1::2] == ["the revocation list can be read again"] * 2


def test_a_rejection_is_logged_once_per_peer_and_reason(
    authority: Authority, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Non-members and impostors are counted, and must not be able to fill the log."""

    async def test() -> None:
        async with (
            served(authority, Store()) as server,
            stub(authority, "stranger", server.port) as stranger,
            stub(authority, "node-0", server.port) as impostor,
        ):
            for _ in range(20):
                for deliver in (stranger, impostor):
                    header = header_bytes(message(0, sender=2)[0])
                    assert await outcome(deliver(iter([header]), timeout=BROKEN)) != Code.OK
            assert server.refused == {"membership": 20, "sender": 20}
            assert server.refused_by_peer == {("other", "membership"): 20, ("node-0", "sender"): 20}

    run(test)
    assert [record.getMessage() for record in caplog.records] == [
        "refusing a caller that is not a member: 'stranger' is not a member of this network; "
        "give all peers the same network file",
        "rejected a message of node-0 (sender): node 0 sent a message in the name of 2",
    ]
    assert capfd.readouterr() == ("", "")


def test_a_server_with_another_identity_is_given_nothing(authority: Authority) -> None:
    async def test() -> None:
        store = Store(me=1)
        impostor = GrpcTransport(identity(authority, 2), NAMES, {}, bind="127.0.0.1:0")
        await impostor.start(store)
        async with dialling(authority, impostor.port) as client:
            with pytest.raises(Unreachable, match="node-1"):
                await until_the_deadline(client, client.send(*message(10), LATE))
            assert not client.reachable(1)
        await impostor.stop()
        assert not store.offsets
        assert impostor.counters["bytes_received"] == 0

    run(test)


def test_an_expired_server_is_given_nothing(authority: Authority, tmp_path: Path) -> None:
    async def test() -> None:
        old = datetime.now(UTC) - timedelta(days=10)
        expired = authority.issue("node-1", not_before=old, days=5, into=tmp_path / "expired")
        store = Store()
        server = GrpcTransport(expired, NAMES, {}, bind="127.0.0.1:0")
        await server.start(store)
        async with dialling(authority, server.port) as client:
            with pytest.raises(Unreachable, match="certificate has expired"):
                await until_the_deadline(client, client.send(*message(10), LATE))
        await server.stop()
        assert not store.offsets

    run(test)


def test_a_rejected_caller_learns_the_reason(authority: Authority, tmp_path: Path) -> None:
    async def test() -> None:
        old = datetime.now(UTC) - timedelta(days=10)
        expired = authority.issue("node-0", not_before=old, days=5, into=tmp_path / "expired")
        async with served(authority, Store()) as server:
            addresses = {1: f"127.0.0.1:{server.port}"}
            client = GrpcTransport(expired, NAMES, addresses, bind=NOWHERE, limits=CALM_LIMITS)
            with pytest.raises(Unreachable, match=r"(?i)certificate"):
                await until_the_deadline(client, client.send(*message(10), LATE))
            assert not client.reachable(1)
            await client.stop()

    run(test)


def test_only_members_can_start(authority: Authority) -> None:
    with pytest.raises(InputError, match=r"'stranger' is not a member .*: node-0, node-1, node-2"):
        GrpcTransport(Identity.load(authority.folder, "stranger"), NAMES, {}, bind=NOWHERE)


# Beginning and end


def test_health(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_side, "SHUTDOWN_TIMEOUT", BROKEN)  # calls end by themselves here

    async def test() -> None:
        mine = identity(authority, 0)
        async with served(authority, Store()) as server:
            options = [("grpc.ssl_target_name_override", server_name("node-1"))]
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{server.port}", files(mine), options
            ) as channel:
                form = {
                    "request_serializer": health_pb2.HealthCheckRequest.SerializeToString,
                    "response_deserializer": health_pb2.HealthCheckResponse.FromString,
                }
                check = channel.unary_unary("/grpc.health.v1.Health/Check", **form)
                watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **form)
                question = health_pb2.HealthCheckRequest(service=SERVICE)
                assert (await check(question, timeout=BROKEN)).status == 1  # serving
                odd = health_pb2.HealthCheckRequest(service="other")
                assert await outcome(check(odd, timeout=BROKEN)) == Code.NOT_FOUND
                watching = watch(question, timeout=BROKEN)
                assert (await watching.read()).status == 1
                stopping = asyncio.create_task(server.stop())
                assert (await watching.read()).status == 2  # not serving any more
                watching.cancel()
                await stopping

    run(test)


def test_questions_about_health_are_checked_as_all_others(authority: Authority) -> None:
    async def test() -> None:
        async with served(authority, Store()) as server:
            for name, question, code in (
                ("stranger", b"", Code.PERMISSION_DENIED),
                ("node-0", b"\xff\xff", Code.FAILED_PRECONDITION),
                ("node-0", bytes(5000), Code.FAILED_PRECONDITION),
            ):
                options = [("grpc.ssl_target_name_override", server_name("node-1"))]
                mine = Identity.load(authority.folder, name)
                async with grpc.aio.secure_channel(
                    f"127.0.0.1:{server.port}", files(mine), options
                ) as channel:
                    check = channel.unary_unary("/grpc.health.v1.Health/Check")
                    assert await outcome(check(question, timeout=BROKEN)) == code

    run(test)


def test_a_port_that_is_taken(authority: Authority) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is in use; stop the"):
                async with served(authority, Store(), port=port):
                    pass
        # Two peers must not share one port either.
        async with served(authority, Store()) as server:
            with pytest.raises(InputError, match=f"port {server.port} of 127.0.0.1 is in use"):
                async with served(authority, Store(), port=server.port):
                    pass

    run(test)


@pytest.mark.parametrize(
    ("bind", "text"),
    [
        ("192.0.2.1:0", "choose an address of this machine"),
        (None, "'node-1' has no address"),
        ("localhost", "'localhost' is not HOST:PORT"),
        (":7400", "':7400' is not HOST:PORT"),
        ("localhost:70000", "'localhost:70000' is not HOST:PORT"),
        ("localhost:http", "'localhost:http' is not HOST:PORT"),
        ("[::1:7400", "is not HOST:PORT"),
        ("::1:7400", "is not HOST:PORT"),
        ("local..host:7400", "'local..host:7400' is not HOST:PORT"),
    ],
)
def test_addresses_that_cannot_be(authority: Authority, bind: str | None, text: str) -> None:
    async def test() -> None:
        with pytest.raises(InputError, match=text):
            await GrpcTransport(identity(authority, 1), NAMES, {}, bind=bind).start(Store())

    run(test)


def test_peers_that_are_not_in_the_file(authority: Authority) -> None:
    async def test() -> None:
        async with dialling(authority, 9) as client:
            with pytest.raises(InputError, match="peer 2"):
                await client.ask(2, b"why", 1)

    run(test)


def test_nothing_is_left_behind(authority: Authority) -> None:
    async def test() -> None:
        def connections() -> list[Any]:
            return psutil.Process().net_connections("tcp")

        before, store, tasks = len(connections()), Store(), asyncio.all_tasks()
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            await client.start(Store(me=0))
            assert client.reachable(1)
            await client.send(*message(CHUNK), BROKEN)
            assert len(connections()) > before
            endless = asyncio.create_task(client.ask(1, b"break", LATE))
            await until(lambda: server.refused["failed"] > 0)
            await client.stop()
            with pytest.raises(Unreachable, match="this peer has stopped"):
                await endless
            with pytest.raises(Unreachable, match="this peer has stopped"):
                await client.send(*message(10, sequence=1), BROKEN)
            assert not client.reachable(1)
            await client.stop()  # again: nothing happens
            await server.stop()
            assert asyncio.all_tasks() == tasks
            await until(lambda: len(connections()) <= before)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", server.port))

    run(test)


def test_stopping_breaks_off_what_is_under_way(authority: Authority) -> None:
    async def test() -> None:
        store, (header, payload) = Store(), message(100)
        waiting = asyncio.Event()

        async def complete(header: Header) -> None:
            waiting.set()
            await asyncio.sleep(LATE)

        store.complete = complete  # type: ignore[method-assign]
        async with served(authority, store) as server, dialling(authority, server.port) as client:
            sending = asyncio.create_task(client.send(header, payload, LATE))
            await waiting.wait()
            await client.stop()
            with pytest.raises(Unreachable, match="this peer has stopped"):
                await sending

    run(test)


def test_a_cancelled_send_is_cancelled(authority: Authority) -> None:
    async def test() -> None:
        async with dialling(authority, free_port()) as client:
            sending = asyncio.create_task(client.send(*message(100), LATE))
            await until(lambda: client.counters["retries"] > 0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending

    run(test)
