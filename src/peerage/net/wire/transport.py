"""The interface between a peer and its transport."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Protocol

from peerage.errors import PeerageError
from peerage.net.wire.header import Buffer, Header, Rejected

CHUNK = 1 << 20  # bytes of a payload that are sent at a time
QUERY_TIMEOUT = 2.0  # seconds to wait for an answer
ANSWER_LIMIT = 1 << 16  # largest question or answer, in bytes


class Unreachable(PeerageError):
    """A message could not be delivered in time."""


class CallerRefused(Rejected):
    """The other peer does not accept the certificate of this one, so it accepts no call."""

    def __init__(self, peer: int, details: str) -> None:
        super().__init__("sender", f"peer {peer} rejected the certificate of this peer: {details}")
        self.details = details


class Receiver(Protocol):
    """What a transport calls for incoming messages; all methods may raise `Rejected`."""

    def accept(self, raw: bytes, identity: int) -> tuple[Header, int]:
        """The validated header, and how many bytes of its payload have already arrived.

        `identity` is the authenticated node at the other end.
        """

    def chunk(self, header: Header, offset: int, data: bytes) -> None:
        """Take the next bytes of a payload."""

    async def complete(self, header: Header) -> None:
        """Take the message, of which all bytes have arrived."""

    async def answer(self, question: bytes, identity: int) -> bytes: ...

    async def report(self) -> bytes:
        """What members and observers may know about this peer."""

    async def report_of(self, name: str) -> bytes:
        """The same about a peer that dials out and has a tunnel to this one."""


class Transport(Protocol):
    """Carries messages to other peers, and passes incoming ones to a receiver."""

    counters: Counter[str]  # including bytes_sent and bytes_received, with headers

    @property
    def refused(self) -> Counter[str]:
        """Calls that were refused before they reached the receiver, by reason."""

    @property
    def expires(self) -> datetime | None:
        """When the certificate of this peer expires; None without a certificate."""

    async def start(self, receiver: Receiver) -> None: ...

    def add_members(self, names: Mapping[str, int], addresses: Mapping[int, str]) -> None:
        """Serve and reach these members too; those that are known stay as they are."""

    def revoked(self) -> frozenset[int]:
        """The members whose certificates are on the revocation list."""

    async def send(self, header: Header, payload: Buffer, deadline: float) -> None:
        """Return when the recipient has accepted the message.

        Raises `Unreachable` after `deadline` seconds, and `Rejected` if the recipient rejects it.
        """

    async def ask(self, peer: int, question: bytes, deadline: float) -> bytes: ...

    async def ask_status(self, peer: int, deadline: float, about: str = "") -> bytes:
        """The report of a peer; with `about`, its report of that peer, which dials out."""

    def reachable(self, peer: int) -> bool:
        """Whether the peer was alive recently."""

    def failure(self, peer: int, since: float) -> str | None:
        """Why the last attempt to reach a peer failed, if it began after `since`.

        The time is that of the event loop. A peer that calls this one may still be unreachable.
        """

    def release(self, peer: int) -> None:
        """Close the connection to a peer for now; the next call opens another."""

    async def stop(self) -> None: ...


async def wait_for(event: asyncio.Event, seconds: float) -> None:
    """Wait for the event, for at most `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def was_cancelled() -> bool:
    """Whether the current task was cancelled, rather than the call that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
