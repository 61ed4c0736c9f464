"""The connection to one peer, and the delivery of one message over it."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from peerage.net.wire.address import Address
from peerage.net.wire.header import Buffer, Rejected
from peerage.net.wire.limits import Limits
from peerage.net.wire.server import OFFSET, SERVICE, common_options
from peerage.net.wire.transport import CHUNK

INITIAL_BACKOFF, MAX_BACKOFF = 0.1, 5.0  # seconds between attempts
PROBE_INTERVAL = 1.0  # seconds between attempts to restore a connection


@dataclass
class Link:
    """The connection to one peer."""

    peer: int
    place: Address | None  # None if the peer dials out
    name: str  # that the peer's certificate must hold
    channel: Any
    probe: asyncio.Task[None] | None = None  # the latest attempt to verify the peer
    peer_certificate: bytes | None = None  # verified; None without a connection
    ready: bool = False  # whether the channel was ready at the last check
    introduced: bool = True  # whether the other end knows whose connection this is, or will
    lost: bool = False  # whether the last verification failed
    busy: bool = False  # whether the peer asked to retry later
    away: bool = False  # whether the last attempt to reach it failed
    returns: int = 0  # how often it was reachable again after being away
    back: asyncio.Event = field(default_factory=asyncio.Event)  # set at the next return
    progress: int = 0  # bytes of broken transfers that have arrived
    failure: str | None = None  # why the last verification failed
    failure_began: float = 0.0  # when it began, in the time of the event loop
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._bind()

    def replace_channel(self, channel: Any) -> Any:
        """Use another channel for the next calls; return the old one."""
        old, self.channel, self.ready = self.channel, channel, False
        self._bind()
        return old

    def _bind(self) -> None:
        self.deliver = self.channel.stream_unary(f"/{SERVICE}/Deliver")
        self.offset = self.channel.unary_unary(f"/{SERVICE}/Offset")
        self.ask = self.channel.unary_unary(f"/{SERVICE}/Ask")
        self.status = self.channel.unary_unary(f"/{SERVICE}/Status")
        self.hello = self.channel.unary_unary(f"/{SERVICE}/Hello")

    def mark_alive(self) -> None:
        """Note that the peer is alive, and wake the calls that wait for it."""
        self.lost = False
        if self.away:
            self.away = False
            self.returns += 1
            self.back.set()
            self.back = asyncio.Event()

    def up(self) -> bool:
        """Whether there is a connection; starts one if the peer is verified."""
        if self.peer_certificate is None:
            return False
        state = self.channel.get_state(try_to_connect=True)
        before, self.ready = self.ready, state is grpc.ChannelConnectivity.READY
        if self.ready and not before:
            self.introduced = self.place is None  # a tunnel is known already
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE or (before and not self.ready):
            self.peer_certificate = None  # verify again after a reconnect
        return self.ready


class Delivery:
    """The delivery of one message; resumes where an earlier attempt broke off."""

    def __init__(self, link: Link, raw: bytes, payload: Buffer, counters: Counter[str]) -> None:
        self.maybe_accepted = False  # in an earlier attempt
        self._link, self._raw, self._payload, self._counters = link, raw, payload, counters
        self._offset = 0
        self._started = False
        self._sent_all = False  # whether some attempt has sent everything

    async def attempt(self, seconds: float) -> None:
        end = asyncio.get_running_loop().time() + seconds
        self.maybe_accepted = self._sent_all
        if self._started:
            await self._resume(seconds)
        self._started = True
        seconds = end - asyncio.get_running_loop().time()
        offset = ((OFFSET, str(self._offset)),)
        await self._link.deliver(self._messages(), timeout=seconds, metadata=offset)

    async def _resume(self, seconds: float) -> None:
        self._counters["bytes_sent"] += len(self._raw)
        answer = await self._link.offset(self._raw, timeout=seconds)
        offset, size = int.from_bytes(answer[:8], "big"), len(self._payload)
        if offset > size:
            raise Rejected("malformed", f"peer {self._link.peer} claims {offset} of {size} bytes")
        self._link.progress += max(offset - self._offset, 0)
        self._offset = offset

    def _messages(self) -> Iterator[bytes]:
        yield self._counted(self._raw)
        for begin in range(self._offset, len(self._payload), CHUNK):
            yield self._counted(bytes(self._payload[begin : begin + CHUNK]))
        self._sent_all = True

    def _counted(self, message: bytes) -> bytes:
        self._counters["bytes_sent"] += len(message)
        return message


def client_options(limits: Limits) -> list[tuple[str, int]]:
    """The gRPC options of a client: keepalive pings without calls, and fast reconnects."""
    milliseconds = round(1000 * limits.idle_timeout)
    return [
        *common_options(limits),
        ("grpc.keepalive_time_ms", milliseconds // 2),
        ("grpc.keepalive_timeout_ms", milliseconds // 2),
        ("grpc.http2.ping_timeout_ms", milliseconds // 2),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.initial_reconnect_backoff_ms", round(1000 * INITIAL_BACKOFF)),
        ("grpc.min_reconnect_backoff_ms", round(1000 * limits.grace)),
        ("grpc.max_reconnect_backoff_ms", round(1000 * PROBE_INTERVAL)),
        ("grpc.enable_retries", 0),  # `_call_with_retries` retries, and resumes
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
