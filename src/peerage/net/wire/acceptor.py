"""Accepts connections for the gRPC server of a peer, and bounds them.

gRPC has one limit for all connections of a server, behind which outsiders can lock out members, and
does not report failed handshakes. So this acceptor listens on the port of the peer, and passes the
bytes of each connection on to gRPC, which does TLS. It reads nothing of them. gRPC listens on a
Unix socket that has no name, so that nobody can get past the acceptor. Each connection to it has a
name of its own, which `context.peer()` gives: so the first authenticated call tells whose
connection it is. `admission` has the rules.
"""

import asyncio
import errno
import os
import resource
import socket
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from peerage.errors import InputError
from peerage.files import socket_folder
from peerage.net.trust.identity import Holder
from peerage.net.wire.address import Address
from peerage.net.wire.admission import FILES, FULL, HANDSHAKE, Admission, Connection, address_key
from peerage.net.wire.limits import Limits
from peerage.net.wire.splice import Pipes, Splice

BACKLOG = 512  # connections that the kernel holds until they are accepted
SHORTAGE_DELAY = 0.1  # seconds to wait when no more files can be opened
SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: closing sends a reset, and leaves nothing behind


class Acceptor:
    """Listens on an address, and connects accepted connections with a gRPC server."""

    def __init__(self, admission: Admission, limits: Limits) -> None:
        self.port = 0
        self._admission, self._limits = admission, limits
        self._connections: dict[str, Connection] = {}  # by the name that gRPC knows
        self._listeners: list[socket.socket] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes = Pipes()
        self._server = -1  # descriptor of the Unix socket on which gRPC listens

    def listen(self, place: Address, add_port: Callable[[str], Any]) -> None:
        """Take the address; `add_port` lets gRPC listen on a Unix socket. Raises InputError."""
        self._listeners = _listeners(place)
        self.port = self._listeners[0].getsockname()[1]
        try:
            # Without the name nobody else can connect, and a killed peer leaves no file behind.
            with tempfile.TemporaryDirectory(prefix="peerage-", dir=socket_folder()) as folder:
                path = Path(folder) / "grpc"
                add_port(f"unix:{path}")
                self._server = os.open(path, os.O_PATH)
        except BaseException:
            self.stop_listening()
            raise

    def start(self) -> None:
        """Accept connections; gRPC must have started."""
        for listener in self._listeners:
            self._tasks.append(asyncio.create_task(self._accept(listener)))

    def stop_listening(self) -> None:
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def stop(self) -> None:
        """Close all connections."""
        self.stop_listening()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections.values()):
            self._admission.remove(connection)
            connection.close()
        self._pipes.close()
        if self._server >= 0:
            os.close(self._server)
            self._server = -1

    # What the server tells about calls; those through a tunnel have no connection here.

    def authenticated(self, call: Any, holder: Holder, name: str) -> None:
        """Note who makes a call; `name` stands for the holder in counters and logs."""
        if (connection := self._connections.get(call.peer())) is not None:
            self._admission.authenticate(connection, holder, name)

    def rejected(self, call: Any) -> None:
        """Note that the caller has no valid certificate, or none any more."""
        if (connection := self._connections.get(call.peer())) is not None:
            self._admission.suspect(connection)
            self._limit_time(connection)

    @contextmanager
    def counted(self, call: Any) -> Iterator[None]:
        """Count a running call, as its connection is not idle."""
        connection = self._connections.get(call.peer())
        if connection is None:
            yield
            return
        self._admission.call_began(connection)
        try:
            yield
        finally:
            self._admission.call_ended(connection)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, (host, *_) = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in SHORTAGES:
                    self._admission.make_room(FILES)
                    await asyncio.sleep(SHORTAGE_DELAY)
                continue  # else the client has gone already
            address = address_key(host)
            if self._admission.allows(address):
                self._begin(client, address)
            else:
                _reset(client)

    def _begin(self, client: socket.socket, address: str) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            server = self._connect()
        except OSError as error:
            _reset(client)
            busy = isinstance(error, BlockingIOError)  # gRPC has not accepted the ones before
            self._admission.refuse(address, FULL if busy else FILES)
            self._admission.make_room(FULL if busy else FILES)
            return
        name = f"unix-abstract:{server.getsockname()[1:].decode()}"
        splice = Splice(client, server, self._pipes, partial(self._ended, name))
        connection = Connection(address, splice.close)
        self._connections[name] = connection
        splice.start()
        self._limit_time(connection)
        self._admission.add(connection)

    def _connect(self) -> socket.socket:
        """A connection to gRPC, with a name that no other one has; the kernel chooses it."""
        server = socket.socket(socket.AF_UNIX)
        try:
            server.setblocking(False)
            server.bind("")
            server.connect(f"/proc/self/fd/{self._server}")
        except OSError:
            server.close()
            raise
        return server

    def _limit_time(self, connection: Connection) -> None:
        timeout = self._limits.pending_timeout
        asyncio.get_running_loop().call_later(timeout, self._admission.expire, connection)

    def _ended(self, name: str, by_server: bool) -> None:
        """Forget a connection; gRPC closes it first if the handshake fails."""
        connection = self._connections.pop(name)
        pending = connection.holder is None
        if self._admission.remove(connection) and pending and by_server:
            self._admission.refuse(connection.address, HANDSHAKE)


def open_files_limit() -> float:
    """How many files this process may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return inf if limit == resource.RLIM_INFINITY else limit


def _reset(client: socket.socket) -> None:
    with suppress(OSError):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def _listeners(place: Address) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host, on the same port."""
    found: list[socket.socket] = []
    failure: OSError | None = None
    with _listening_errors(place):
        infos = socket.getaddrinfo(*place, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, where in dict.fromkeys((info[0], info[4][0]) for info in infos):
            port = found[0].getsockname()[1] if found else place.port
            try:
                listener = socket.create_server(
                    (str(where), port),
                    family=family,
                    backlog=BACKLOG,
                    dualstack_ipv6=where == "::" and socket.has_dualstack_ipv6(),
                )
            except OSError as error:
                failure = error
                if error.errno == errno.EADDRINUSE:
                    break
                continue  # of a name with several addresses, one is enough
            listener.setblocking(False)
            found.append(listener)
        if failure is not None and (not found or failure.errno == errno.EADDRINUSE):
            for listener in found:
                listener.close()
            raise failure
    return found


@contextmanager
def _listening_errors(place: Address) -> Iterator[None]:
    try:
        yield
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
