"""Keeps the tunnels of a peer that dials out open."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import grpc

from peerage.errors import InputError
from peerage.net.wire.header import Rejected
from peerage.net.wire.limits import Limits
from peerage.net.wire.link import INITIAL_BACKOFF, PROBE_INTERVAL, Link
from peerage.net.wire.notices import Notices
from peerage.net.wire.server import SERVICE, short
from peerage.net.wire.transport import was_cancelled
from peerage.net.wire.tunnel import CallAnswerer, Method

# Answers after which another attempt helps only if someone changes a file.
REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED)

log = logging.getLogger(__name__)


class Dialler:
    """One tunnel to each of these peers, opened again whenever it breaks.

    `verify` checks the certificate of a peer and leaves it in its link; `connect` opens a channel.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        methods: Mapping[str, Method],
        limits: Limits,
        verify: Callable[[Link], Awaitable[None]],
        connect: Callable[[int], Any],
    ) -> None:
        self._names, self._methods, self._limits = names, methods, limits
        self._verify, self._connect = verify, connect
        self._notices = Notices(log)
        self._open: dict[int, CallAnswerer] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, links: Iterable[Link]) -> None:
        """Open a tunnel to the peers of these links, too, and keep it open."""
        self._tasks += [asyncio.create_task(self._keep_open(link)) for link in links]

    async def stop(self, seconds: float) -> None:
        """Close all tunnels; running calls get so many seconds to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(answerer.finish() for answerer in self._open.values()))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_open(self, link: Link) -> None:
        wait = INITIAL_BACKOFF
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await self._verify(link)
                assert link.peer_certificate is not None
                await self._answer_calls(link.peer, link.peer_certificate)
            except grpc.aio.AioRpcError as error:
                self._note(link.peer, error)
            except Rejected as error:
                name = self._names[link.peer]
                text = f"closed the tunnel to {name} ({error.reason}): {short(error)}"
                self._notices.warn(name, error.reason, text)
            except (OSError, InputError) as error:  # a TimeoutError is an OSError
                log.debug("no tunnel to peer %d: %s", link.peer, error)
            except asyncio.CancelledError:
                if was_cancelled():  # rather than the call that it waits for
                    raise
            except Exception as error:  # the next tunnel must be opened whatever ended this one
                name = self._names[link.peer]
                self._notices.warn(name, repr(error), f"the tunnel to {name} failed: {error!r}")
            lasted = asyncio.get_running_loop().time() - began
            wait = INITIAL_BACKOFF if lasted > PROBE_INTERVAL else min(2 * wait, PROBE_INTERVAL)
            await asyncio.sleep(wait)

    async def _answer_calls(self, peer: int, certificate: bytes) -> None:
        channel = self._connect(peer)
        try:
            call = channel.stream_stream(f"/{SERVICE}/Tunnel")()
            answerer = CallAnswerer(call, certificate, self._methods, self._limits)
            self._open[peer] = answerer
            await answerer.run()
        finally:
            self._open.pop(peer, None)
            await channel.close()

    def _note(self, peer: int, error: grpc.aio.AioRpcError) -> None:
        """Log why a peer refuses the tunnel; a broken connection is no news."""
        details = short(error.details() or "")
        log.debug("the tunnel to peer %d broke: %s", peer, details)
        if error.code() in REFUSALS:
            name = self._names[peer]
            text = (
                f"{name} cannot call this peer, which dials out: it refuses the tunnel: {details}"
            )
            self._notices.warn(name, details, text)
