"""The connections of one peer to all others, over gRPC and mutual TLS.

A connection is verified before it is used, monitored while it is used, and restored after it broke.
Peers that dial out have no address: they are called over the tunnels that they open.
"""

import asyncio
import logging
import ssl
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import grpc

from peerage.errors import InputError
from peerage.net.trust import identity as identities
from peerage.net.trust.expiry import ExpiryWarnings
from peerage.net.trust.identity import CertificateRejected, Identity, server_name
from peerage.net.wire.address import Address
from peerage.net.wire.credentials import Credentials, describe, fetch_certificate
from peerage.net.wire.header import Rejected
from peerage.net.wire.limits import Limits
from peerage.net.wire.link import PROBE_INTERVAL, Link, client_options
from peerage.net.wire.notices import Notices
from peerage.net.wire.server import Authenticator
from peerage.net.wire.transport import Unreachable
from peerage.net.wire.tunnel import TunnelChannel

POLL_INTERVAL = 0.25  # seconds between two checks of a connection
RENEWAL_INTERVAL = 1.0  # seconds between two checks of the own certificate
RETIREMENT = 60.0  # seconds for calls that began with the previous certificate

log = logging.getLogger(__name__)


class Connections:
    """One link to each other peer, by its node, and what this peer needs to verify it."""

    def __init__(
        self,
        identity: Identity,
        names: Mapping[str, int],
        addresses: Mapping[int, str],
        limits: Limits,
        *,
        me: int,
        member: bool,
        dialling: Collection[int],
    ) -> None:
        self.names = {node: name for name, node in names.items()}
        self.places = {
            peer: Address.parse(address, lowest=0) for peer, address in addresses.items()
        }
        # The peers that open tunnels to this one; two peers that dial out cannot reach each other.
        self.tunnels: dict[int, TunnelChannel] = {}
        self._dials_out, self._limits = me in dialling, limits
        for peer in dialling:
            self._expect_tunnel(peer)
        self.credentials = Credentials(identity, observer=not member)
        self.authenticator = Authenticator(identity, names)
        self.links: dict[int, Link] = {}
        self.last_seen: dict[int, float] = {}  # when a peer showed that it is alive
        self.stopped = asyncio.Event()
        self._version = self.credentials.version  # of the files that the channels use
        self._expiry = ExpiryWarnings(identity.name)
        self._notices = Notices(log)
        self._watching: asyncio.Task[None] | None = None
        self._brief: set[asyncio.Task[None]] = set()  # greetings, and old channels that close

    @property
    def expires(self) -> datetime:
        """When the certificate of this peer expires."""
        return self.credentials.expires

    def add_members(self, names: Mapping[str, int], addresses: Mapping[int, str]) -> list[int]:
        """Accept new members, and return them; those without an address dial out."""
        new = {node: name for name, node in names.items() if node not in self.names}
        for node, name in new.items():
            self.names[node] = name
            if node in addresses:
                self.places[node] = Address.parse(addresses[node], lowest=0)
            else:
                self._expect_tunnel(node)
            self.authenticator.add(name, node)
        return list(new)

    def _expect_tunnel(self, peer: int) -> None:
        """Call a peer that dials out over its tunnel, unless this one dials out as well."""
        if not self._dials_out:
            self.tunnels[peer] = TunnelChannel(self.names[peer], self._limits)

    async def stop_watching(self) -> None:
        """Start no more connections, and wake the calls that wait for a peer."""
        self.stopped.set()
        for link in self.links.values():
            link.back.set()
        tasks = [self._watching, *(link.probe for link in self.links.values()), *self._brief]
        running = [task for task in tasks if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def close(self) -> None:
        for link in self.links.values():
            await link.channel.close()

    def unreachable(self, peer: int, how: str) -> Unreachable:
        if self.stopped.is_set():
            how = "any more: this peer has stopped"
        address = f" at {self.places[peer]}" if peer in self.places else ""
        return Unreachable(f"peer {peer}{address} could not be reached {how}")

    def reachable(self, peer: int) -> bool:
        """Whether the peer was alive recently; from now on its connection is monitored."""
        if not self.knows(peer) or self.stopped.is_set():
            return False
        link = self.link(peer)
        silence = asyncio.get_running_loop().time() - self.last_seen[peer]
        return not link.lost and silence < self._limits.idle_timeout

    def failure(self, peer: int, since: float) -> str | None:
        """Why the last attempt to reach a peer failed, if it began after `since`."""
        if not self.knows(peer) or self.stopped.is_set():
            return None
        link = self.link(peer)
        if peer in self.tunnels:  # it asks a moment before its tunnel is open
            since += self._limits.grace
        return link.failure if link.failure_began >= since else None

    def release(self, peer: int) -> None:
        """Close the connection to a peer, unless it is a tunnel; the next call opens another."""
        if peer in self.links and peer in self.places and not self.stopped.is_set():
            link = self.links.pop(peer)
            if link.probe is not None:
                link.probe.cancel()
            self._replace_channel(link)  # calls that still run can end

    def knows(self, peer: int) -> bool:
        return peer in self.places or peer in self.tunnels

    async def verify(self, link: Link) -> None:
        """Verify that the other end is the intended peer and has not been revoked.

        gRPC checks the name and the authority of a server, but supports no revocation list and does
        not expose the certificate. So a separate handshake fetches the certificate before each new
        connection. It is checked again before every call. If it was revoked meanwhile, the peer may
        have a new one, which requires a new connection.
        """
        async with link.lock:
            began = asyncio.get_running_loop().time()
            try:
                if self._still_valid(link):
                    return
                if link.place is None:
                    peer_certificate = self.tunnels[link.peer].certificate()
                else:
                    async with asyncio.timeout(self._limits.grace):
                        peer_certificate = await fetch_certificate(
                            link.place, link.name, self.credentials.context
                        )
                self.authenticator.identify(peer_certificate)
            except TimeoutError:
                link.away = True
                link.failure, link.failure_began = "the peer does not answer", began
                raise TimeoutError(link.failure) from None
            except (OSError, InputError) as error:
                link.peer_certificate, link.lost, link.away = None, True, True
                link.failure, link.failure_began = describe(error), began
                if isinstance(error, ssl.SSLError):
                    name = self.names[link.peer]
                    text = f"cannot connect to {name} at {link.place}: {link.failure}"
                    self._notices.warn(name, link.failure, text)
                raise
            link.failure, link.peer_certificate = None, peer_certificate
            self._notices.settle(self.names[link.peer])
            self.mark_alive(link.peer)

    def _still_valid(self, link: Link) -> bool:
        """Whether the verified certificate of a peer is still valid; if not, disconnects."""
        if link.peer_certificate is None:
            return False
        try:
            self.authenticator.identify(link.peer_certificate, quiet=True)
        except CertificateRejected:
            link.peer_certificate = None
            self._replace_channel(link)
            return False
        return True

    async def _monitor(self) -> None:
        """Monitor the connections and the own certificate, and probe peers without connection."""
        now = asyncio.get_running_loop().time
        renewal = now()
        while True:
            if now() >= renewal:
                renewal = now() + RENEWAL_INTERVAL
                self._renew()
            for link in self.links.values():
                if link.up():
                    self.mark_alive(link.peer)
                    if not link.introduced:
                        self._introduce(link)
                elif link.peer_certificate is None and (link.probe is None or link.probe.done()):
                    link.probe = asyncio.create_task(self._probe(link))
            await asyncio.sleep(POLL_INTERVAL)

    async def _probe(self, link: Link) -> None:
        try:
            await self.verify(link)
        except (OSError, InputError) as error:
            log.debug("peer %d is unreachable: %s", link.peer, error)
            await asyncio.sleep(PROBE_INTERVAL)

    def _introduce(self, link: Link) -> None:
        """Tell the other end whose connection this is: it closes those that make no call."""
        link.introduced = True

        async def greet() -> None:
            with suppress(grpc.aio.AioRpcError):  # the connection broke, or a call will tell more
                await link.hello(b"", timeout=self._limits.grace)

        self._keep(asyncio.create_task(greet()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._brief.add(task)
        task.add_done_callback(self._brief.discard)

    def mark_alive(self, peer: int) -> None:
        self.last_seen[peer] = asyncio.get_running_loop().time()
        if peer in self.links:
            self.links[peer].mark_alive()

    def link(self, peer: int) -> Link:
        if not self.knows(peer) or peer not in self.names:
            raise InputError(f"the network file has no address or no identity of peer {peer}")
        if self.stopped.is_set():
            raise self.unreachable(peer, "")
        if peer not in self.links:
            channel, place = self.channel(peer), self.places.get(peer)
            self.links[peer] = Link(peer, place, server_name(self.names[peer]), channel)
            self.last_seen.setdefault(peer, asyncio.get_running_loop().time())
            self.watch()
        return self.links[peer]

    async def open_tunnel(self, peer: int, call: Any, certificate: bytes) -> None:
        """Call the peer through this stream, which it has opened, until the stream ends."""
        if peer not in self.tunnels:
            raise Rejected(
                "sender",
                f"{self.names[peer]} does not dial out in the network file of this peer; give all "
                "peers the same network file",
            )

        def opened() -> None:
            if peer in self.links:
                self.links[peer].peer_certificate = None  # verify again after a reconnect
            self.mark_alive(peer)

        await self.tunnels[peer].carry(call, certificate, opened)

    def channel(self, peer: int) -> Any:
        if peer in self.tunnels:
            return self.tunnels[peer]
        return grpc.aio.secure_channel(
            f"dns:///{self.places[peer]}",
            self.credentials.client(),
            options=[
                ("grpc.ssl_target_name_override", server_name(self.names[peer])),
                *client_options(self._limits),
            ],
        )

    def watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._monitor())

    def _renew(self) -> None:
        """Use a replaced certificate for new connections, and warn before it expires."""
        self.credentials.renew()  # or a handshake of the server has done so

        self._expiry.check(self.credentials.expires, identities.now())
        if self.credentials.version == self._version:
            return
        self._version = self.credentials.version
        for link in self.links.values():
            self._replace_channel(link)

    def _replace_channel(self, link: Link) -> None:
        """Connect again for the next calls; the running ones get `RETIREMENT` to end."""
        old = link.replace_channel(self.channel(link.peer))
        self._keep(asyncio.create_task(old.close(RETIREMENT)))
