"""Connections of outsiders and members at a real port; both ends are in this process."""

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import pytest
from support.networking import BROKEN, run_skipping, skip

from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity, server_name
from peerage.net.wire import acceptor as acceptor_module
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.limits import Limits
from peerage.net.wire.server import SERVICE

pytestmark = pytest.mark.slow  # real connections

NAMES = {"node-0": 0, "node-1": 1, "node-2": 2}
LIMITS = Limits(
    idle_timeout=3600.0,
    grace=120.0,
    max_connections=3,
    max_pending=10,
    max_pending_per_address=6,
    pending_per_member=0,
    new_per_second=1e6,
    new_per_second_per_address=1e6,
)
OUTSIDER = "127.0.0.2"  # an address of this machine, apart from that of the members


class Answering:
    """A receiver of which only `answer` is called."""

    async def answer(self, question: bytes, identity: int) -> bytes:
        return b"%d asked %s" % (identity, question)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority.create(tmp_path_factory.mktemp("acceptor") / "certs", "tests")
    for name in NAMES:
        made.issue(name)
    return made


@contextlib.asynccontextmanager
async def served(authority: Authority, limits: Limits = LIMITS) -> AsyncIterator[GrpcTransport]:
    """Node 1, which listens."""
    identity = Identity.load(authority.folder, "node-1")
    server = GrpcTransport(identity, NAMES, {}, bind="127.0.0.1:0", limits=limits)
    await server.start(Answering())  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def calling(authority: Authority, name: str, port: int) -> AsyncIterator[Any]:
    """A channel of this member to node 1, over a connection of its own."""
    mine = Identity.within(authority.folder, name)
    files = [path.read_bytes() for path in (mine.authority, mine.key, mine.certificate)]
    options = [
        ("grpc.ssl_target_name_override", server_name("node-1")),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    credentials = grpc.ssl_channel_credentials(*files)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as channel:
        yield channel


async def ask(channel: Any) -> bytes:
    answer: bytes = await channel.unary_unary(f"/{SERVICE}/Ask")(b"why", timeout=BROKEN)
    return answer


def outsiders(stack: contextlib.ExitStack, port: int, count: int) -> list[socket.socket]:
    """Idle connections from an address that no member has."""
    made = []
    for _ in range(count):
        source = (OUTSIDER, 0)
        one = socket.create_connection(("127.0.0.1", port), BROKEN, source_address=source)
        made.append(stack.enter_context(one))
    return made


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BROKEN
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


def run(test: Callable[[contextlib.ExitStack], Coroutine[Any, Any, None]]) -> None:
    with contextlib.ExitStack() as stack:
        run_skipping(test(stack))


def test_idle_connections_push_out_each_other_and_no_member(authority: Authority) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with served(authority) as server, calling(authority, "node-0", server.port) as mine:
            assert await ask(mine) == b"0 asked why"
            outsiders(stack, server.port, 50)
            admission = server.admission
            await until(lambda: admission.refused["address", "loopback"] == 44)
            assert len(admission.pending) == 6
            assert await ask(mine) == b"0 asked why"
            async with calling(authority, "node-2", server.port) as another:
                assert await ask(another) == b"2 asked why"
            assert {holder.name for holder in admission.authenticated} >= {"node-0"}

    run(test)


def test_connections_that_do_not_authenticate_are_closed_in_time(authority: Authority) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with served(authority) as server, calling(authority, "node-0", server.port) as mine:
            await ask(mine)
            idle, drip = outsiders(stack, server.port, 2)
            drip.send(b"\x16\x03\x01")  # the first bytes of a handshake, and then no more
            await until(lambda: len(server.admission.pending) == 2)
            skip(LIMITS.pending_timeout)
            await until(lambda: server.admission.refused["late", "loopback"] == 2)
            for one in (idle, drip):
                with contextlib.suppress(ConnectionResetError):
                    assert one.recv(1) == b""
            assert await ask(mine) == b"0 asked why"

    run(test)


def test_garbage_and_wrong_certificates_are_counted_as_failed_handshakes(
    authority: Authority,
) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with served(authority) as server:
            refused = server.admission.refused
            [one] = outsiders(stack, server.port, 1)
            one.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
            await until(lambda: refused["handshake", "loopback"] == 1)
            trusting = ssl.create_default_context(cafile=str(authority.folder / "authority.pem"))
            with contextlib.suppress(OSError):  # it has no certificate
                name = server_name("node-1")
                reader, _ = await asyncio.open_connection(
                    "127.0.0.1", server.port, ssl=trusting, server_hostname=name
                )
                await reader.read()
            await until(lambda: refused["handshake", "loopback"] == 2)

    run(test)


def test_a_member_has_a_share_of_connections_and_others_keep_theirs(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with (
            served(authority) as server,
            contextlib.AsyncExitStack() as channels,
            calling(authority, "node-2", server.port) as another,
        ):
            await ask(another)
            for _ in range(8):
                enter = calling(authority, "node-0", server.port)
                assert await ask(await channels.enter_async_context(enter)) == b"0 asked why"
            held = {h.name: len(own) for h, own in server.admission.authenticated.items()}
            assert held == {"node-0": 3, "node-2": 1}
            assert server.admission.closed == {"node-0": 5}
            assert await ask(another) == b"2 asked why"

    run(test)
    [line] = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert line == "node-0 holds more than 3 connections; closed the one idle for longest"


def test_an_idle_connection_of_a_member_says_whose_it_is(authority: Authority) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with served(authority) as server:
            identity = Identity.load(authority.folder, "node-0")
            addresses = {1: f"127.0.0.1:{server.port}"}
            member = GrpcTransport(identity, NAMES, addresses, bind="127.0.0.1:0", limits=LIMITS)
            await member.start(Answering())  # type: ignore[arg-type]
            member.reachable(1)  # from now on the connection is kept, without a call
            await until(lambda: bool(server.admission.authenticated))
            skip(LIMITS.pending_timeout)
            await asyncio.sleep(1.0)
            assert [h.name for h in server.admission.authenticated] == ["node-0"]
            assert server.admission.refused == {}
            await member.stop()

    run(test)


def test_too_many_open_files_pass(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with served(authority) as server:
            outsiders(stack, server.port, 1)
            await until(lambda: len(server.admission.pending) == 1)
            failures = [errno.EMFILE, errno.ENFILE]

            def connect(self: Any) -> socket.socket:
                if failures:
                    raise OSError(failures.pop(), "too many open files")
                return before(self)

            before = acceptor_module.Acceptor._connect
            monkeypatch.setattr(acceptor_module.Acceptor, "_connect", connect)
            outsiders(stack, server.port, 2)
            await until(lambda: server.admission.refused["files", "loopback"] == 3)
            assert not server.admission.pending  # the one before made room
            async with calling(authority, "node-0", server.port) as mine:
                assert await ask(mine) == b"0 asked why"

    run(test)


def test_nothing_connects_to_grpc_but_the_acceptor(authority: Authority) -> None:
    async def test(stack: contextlib.ExitStack) -> None:
        async with served(authority):
            with open("/proc/net/unix") as file:
                paths = [line.split()[7] for line in file if len(line.split()) > 7]
            found = {one for one in paths if one.endswith("/grpc") and "peerage-" in one}
            assert found
            for path in found:
                with pytest.raises(FileNotFoundError), socket.socket(socket.AF_UNIX) as one:
                    one.connect(path)

    run(test)
