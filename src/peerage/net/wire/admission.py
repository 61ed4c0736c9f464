"""Which connections a peer keeps: bounds for outsiders and members, and room for members.

A connection is pending until its first call has been authenticated. Pending ones are bounded in
number, in time and in rate, by address and in all. If there are too many, the oldest one goes, from
the address that has most of them, and from addresses of members last. So outsiders push out each
other, and idle connections cannot keep anyone out. A member that holds too many connections loses
the one that was idle longest.
"""

import ipaddress
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from peerage.net.trust.identity import Holder
from peerage.net.wire.limits import Limits
from peerage.net.wire.notices import LOG_INTERVAL, Notices
from peerage.net.wire.rates import TokenBucket

MAX_ADDRESSES = 4096  # that are remembered, of members and of others

# Why a connection was refused or closed, as counters and log lines say it.
RATE, ADDRESS, FULL, LATE, HANDSHAKE, FILES = (
    "rate",
    "address",
    "full",
    "late",
    "handshake",
    "files",
)
TEXTS = {
    RATE: "too many new connections per second",
    ADDRESS: "too many connections from its address have not authenticated",
    FULL: "too many connections have not authenticated",
    LATE: "it did not authenticate in time",
    HANDSHAKE: "the handshake failed",
    FILES: "too many open files",
}
SHARE = "connections"  # why a connection of a member was closed

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Connection:
    """A connection from another machine."""

    address: str  # as `address_key` gives it
    close: Callable[[], None]  # called by `Admission`, once at most
    holder: Holder | None = None  # of the certificate; None while the connection is pending
    calls: int = 0  # that run now
    used: float = 0.0  # when a call began or ended last


@dataclass
class _LogLine:
    """The last line about one reason, and the refusals since then."""

    when: float = -inf
    since: int = 0


class Admission:
    """Decides which connections stay. `now` is a clock, and `files` the limit of open files."""

    def __init__(self, limits: Limits, now: Callable[[], float], files: float = inf) -> None:
        self.refused: Counter[tuple[str, str]] = Counter()  # by reason and kind of address
        self.closed: Counter[str] = Counter()  # of members that had too many, by name
        self.members = 0
        self.pending: dict[Connection, None] = {}  # the oldest first
        self.authenticated: dict[Holder, list[Connection]] = {}
        self._limits, self._now, self._files = limits, now, files
        self._waiting: Counter[str] = Counter()  # pending connections by address
        self._all = TokenBucket()
        self._buckets: OrderedDict[str, TokenBucket] = (
            OrderedDict()
        )  # by address, the last used last
        self._known: OrderedDict[str, None] = OrderedDict()  # addresses of members
        self._lines: dict[str, _LogLine] = {}  # by reason
        self._notices = Notices(log)

    @property
    def max_pending(self) -> int:
        extra = self._limits.pending_per_member * self.members
        return int(min(self._limits.max_pending + extra, self._limits.pending_files * self._files))

    @property
    def max_pending_per_address(self) -> int:
        extra = self._limits.pending_per_member * self.members
        return min(self._limits.max_pending_per_address + extra, self.max_pending)

    def allows(self, address: str) -> bool:
        """Whether this address may connect now; if not, the refusal is counted."""
        now, limits = self._now(), self._limits
        bucket = self._buckets.setdefault(address, TokenBucket())
        self._buckets.move_to_end(address)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        rate, burst = limits.new_per_second_per_address, self.max_pending_per_address
        good = bucket.take(rate, burst, now)
        if good and address not in self._known:
            good = self._all.take(limits.new_per_second, self.max_pending, now)
        if not good:
            self.refuse(address, RATE)
        return good

    def add(self, connection: Connection) -> None:
        """Keep a new connection; it may cost an older one its place."""
        self._wait(connection)
        if self._waiting[connection.address] > self.max_pending_per_address:
            self._evict(connection.address, ADDRESS)
        elif len(self.pending) > self.max_pending:
            self.make_room(FULL)

    def make_room(self, reason: str) -> None:
        """Close the pending connection that is missed least, if there is any."""
        outsiders = [address for address in self._waiting if address not in self._known]
        candidates = outsiders or list(self._waiting)
        if candidates:
            self._evict(max(candidates, key=self._waiting.__getitem__), reason)

    def authenticate(self, connection: Connection, holder: Holder, name: str) -> None:
        """Note whose connection it is; `name` stands for the holder in counters and logs."""
        if connection.holder == holder:
            return
        self.remove(connection)
        connection.holder, connection.used = holder, self._now()
        self._known[connection.address] = None
        self._known.move_to_end(connection.address)
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)
        own = self.authenticated.setdefault(holder, [])
        own.append(connection)
        most = self._limits.max_connections
        if len(own) > most:
            oldest = min(own[:-1], key=lambda one: (one.calls > 0, one.used))
            self.closed[name] += 1
            text = f"{name} holds more than {most} connections; closed the one idle for longest"
            self._notices.warn(name, SHARE, text)
            self._close(oldest)

    def suspect(self, connection: Connection) -> None:
        """Note that the certificate is not valid any more: the connection is pending again."""
        if connection.holder is not None:
            self.remove(connection)
            connection.holder = None
            self._wait(connection)

    def call_began(self, connection: Connection) -> None:
        connection.calls, connection.used = connection.calls + 1, self._now()

    def call_ended(self, connection: Connection) -> None:
        connection.calls, connection.used = connection.calls - 1, self._now()

    def expire(self, connection: Connection) -> None:
        """Close a connection if it is still pending, as its time is over."""
        if connection in self.pending:
            self._close(connection)
            self.refuse(connection.address, LATE)

    def remove(self, connection: Connection) -> bool:
        """Forget a connection that has closed; return whether it was known."""
        if connection.holder is None:
            if connection not in self.pending:
                return False
            del self.pending[connection]
            self._waiting[connection.address] -= 1
            self._waiting += Counter()  # drops zeros
            return True
        own = self.authenticated.get(connection.holder, [])
        if connection not in own:
            return False
        own.remove(connection)
        if not own:
            del self.authenticated[connection.holder]
        return True

    def refuse(self, address: str, reason: str) -> None:
        """Count a refused connection; log it at most once a minute for each reason."""
        self.refused[reason, address_class(address)] += 1
        line = self._lines.setdefault(reason, _LogLine())
        line.since += 1
        now = self._now()
        if now - line.when >= LOG_INTERVAL:
            count = "a connection" if line.since == 1 else f"{line.since} connections"
            log.warning("refused %s, the last from %s: %s", count, address, TEXTS[reason])
            line.when, line.since = now, 0

    def _wait(self, connection: Connection) -> None:
        self.pending[connection] = None
        self._waiting[connection.address] += 1

    def _evict(self, address: str, reason: str) -> None:
        oldest = next(one for one in self.pending if one.address == address)
        self._close(oldest)
        self.refuse(address, reason)

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.close()


def address_key(host: str) -> str:
    """The address by which connections are counted: of IPv6, the network that one site has.

    >>> address_key("192.0.2.7"), address_key("::ffff:192.0.2.7"), address_key("2001:db8::7%eth0")
    ('192.0.2.7', '192.0.2.7', '2001:db8::/64')
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def address_class(key: str) -> str:
    """The kind of an address, for counters: there may be any number of addresses.

    >>> address_class("127.0.0.1"), address_class("10.0.0.3"), address_class("2a00::/64")
    ('loopback', 'private', 'public')
    """
    network = ipaddress.ip_network(key)
    if network.is_loopback or key == LOOPBACK_V6:
        return "loopback"
    return "private" if network.is_private else "public"


LOOPBACK_V6 = address_key("::1")
