"""Attacks on the port of a peer by outsiders, and by a member that only opens connections.

Tests and benchmarks/attacks.py run them from processes and threads of their own.
"""

import asyncio
import resource
import socket
import ssl
from contextlib import suppress
from typing import Any

from peerage.net.trust.identity import Identity, server_name

OUTSIDER = "127.0.0.2"  # an address of this machine that no peer has
HELLO = bytes.fromhex("16030100f8010000f40303")  # how the first message of a TLS client begins
SECONDS = 60.0  # for one connection


def allow_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def idle(port: int, count: int, source: str = OUTSIDER) -> list[socket.socket]:
    """Connections that send nothing; the caller closes them."""
    made = []
    for _ in range(count):
        with suppress(OSError):  # the peer may refuse it
            one = socket.create_connection(("127.0.0.1", port), SECONDS, source_address=(source, 0))
            made.append(one)
    return made


def drip(port: int, count: int) -> list[socket.socket]:
    """Handshakes that began, and of which no more bytes come."""
    made = idle(port, count)
    for one in made:
        with suppress(OSError):
            one.send(HELLO)
    return made


def member_context(identity: Identity) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=identity.authority)
    context.load_cert_chain(identity.certificate, identity.key)
    context.set_alpn_protocols(["h2"])
    return context


async def handshakes(
    port: int, count: int, context: ssl.SSLContext, name: str, at_once: int = 20
) -> list[Any]:
    """Connections after a handshake, which then make no call; the caller closes them."""
    made: list[Any] = []
    slots = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with slots:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(SECONDS):
                    _, writer = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=context, server_hostname=server_name(name)
                    )
                    made.append(writer)

    await asyncio.gather(*(one() for _ in range(count)))
    return made
