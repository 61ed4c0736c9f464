"""Which connections stay, by the rules alone: no socket, and a clock that the tests set."""

from itertools import count

import pytest

from peerage.net.trust.identity import Holder
from peerage.net.wire.admission import Admission, Connection, address_class, address_key
from peerage.net.wire.limits import Limits

LIMITS = Limits(
    max_connections=3,
    max_pending=6,
    max_pending_per_address=4,
    pending_per_member=0,
    new_per_second=5.0,
    new_per_second_per_address=2.0,
)
MEMBER = Holder("node-1", False)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Table:
    """An admission, its clock, and the connections that it closed, by the order they came in."""

    def __init__(self, limits: Limits = LIMITS, files: float = 1e6) -> None:
        self.clock, self.closed, self._number = Clock(), [], count()
        self.admission = Admission(limits, self.clock, files)

    def connect(self, address: str = "192.0.2.1") -> Connection:
        number = next(self._number)
        connection = Connection(address, lambda: self.closed.append(number))
        self.admission.add(connection)
        return connection

    def member(self, address: str = "192.0.2.9", holder: Holder = MEMBER) -> Connection:
        connection = self.connect(address)
        self.clock.now += 1
        self.admission.authenticate(connection, holder, holder.name)
        return connection


def test_an_address_with_too_many_loses_its_oldest() -> None:
    table = Table()
    for _ in range(6):
        table.connect()
    table.connect("192.0.2.2")
    assert table.closed == [0, 1]
    assert table.admission.refused == {("address", "private"): 2}


def test_the_address_with_most_makes_room_for_others() -> None:
    table = Table()
    table.connect("192.0.2.7")  # the oldest of all
    for _ in range(4):
        table.connect("192.0.2.1")
    for last in range(2, 5):
        table.connect(f"192.0.2.{last}")
    assert table.closed == [1, 2]
    assert table.admission.refused == {("full", "private"): 2}


def test_a_connection_from_the_address_of_a_member_goes_last() -> None:
    table = Table()
    table.member("192.0.2.9")
    for _ in range(3):  # it connects again, after a break
        table.connect("192.0.2.9")
    for last in range(10, 20):
        table.connect(f"192.0.2.{last}")
    assert len(table.closed) == 7
    assert not {1, 2, 3} & set(table.closed)


def test_pending_connections_take_a_share_of_the_open_files() -> None:
    table = Table(Limits(), files=80)
    for last in range(12):
        table.connect(f"192.0.2.{last}")
    assert table.closed == [0, 1]  # 80 / 8 are left


def test_each_member_adds_room_for_the_start() -> None:
    table = Table(Limits(max_pending=1, max_pending_per_address=1, pending_per_member=4))
    table.admission.members = 3
    for _ in range(13):
        table.connect()
    assert table.closed == []
    table.connect()
    assert table.closed == [0]


def test_a_member_with_too_many_loses_the_one_idle_for_longest(caplog) -> None:
    table = Table()
    first, second, third = (table.member() for _ in range(3))
    table.admission.call_began(first)
    table.clock.now += 1
    table.admission.call_began(second)
    table.admission.call_ended(second)
    table.member()
    assert table.closed == [2]
    assert third not in table.admission.authenticated[MEMBER]
    for _ in range(4):  # one has a running call, which lasts
        table.member()
    assert first in table.admission.authenticated[MEMBER]
    assert table.admission.closed == {"node-1": 5}
    assert [r.message for r in caplog.records] == [
        "node-1 holds more than 3 connections; closed the one idle for longest"
    ]
    table.member(holder=Holder("node-2", False))
    assert len(table.closed) == 5  # shares are separate


def test_only_pending_connections_expire() -> None:
    table = Table()
    late, good = table.connect(), table.member()
    table.admission.expire(late)
    table.admission.expire(good)
    table.admission.expire(late)
    assert table.closed == [0]
    assert table.admission.refused == {("late", "private"): 1}


def test_a_revoked_member_is_pending_again() -> None:
    table = Table()
    connection = table.member()
    table.admission.suspect(connection)
    assert MEMBER not in table.admission.authenticated
    table.admission.expire(connection)
    assert table.closed == [0]


def test_new_connections_have_a_rate_per_address_and_in_all() -> None:
    table = Table()
    allows = table.admission.allows
    assert [allows("192.0.2.1") for _ in range(6)] == [True] * 4 + [False] * 2  # a burst
    assert [allows(f"192.0.2.{n}") for n in range(2, 6)] == [True] * 2 + [False] * 2
    table.member("192.0.2.9")  # a second later
    assert [allows("192.0.2.1") for _ in range(4)] == [True] * 2 + [False] * 2
    assert [allows(f"192.0.2.{n}") for n in range(2, 6)] == [True] * 3 + [False]
    assert allows("192.0.2.9")  # members do not share the rate of all
    assert table.admission.refused == {("rate", "private"): 7}


def test_refusals_are_logged_once_a_minute_with_their_number(caplog) -> None:
    table = Table()
    for second in range(130):
        table.clock.now = second
        table.admission.refuse("192.0.2.1", "handshake")
        table.admission.refuse("127.0.0.1", "files")
    lines = [r.message for r in caplog.records if "handshake" in r.message]
    assert lines == [
        "refused a connection, the last from 192.0.2.1: the handshake failed",
        "refused 60 connections, the last from 192.0.2.1: the handshake failed",
        "refused 60 connections, the last from 192.0.2.1: the handshake failed",
    ]
    assert len(caplog.records) == 6
    assert table.admission.refused["files", "loopback"] == 130


def test_memory_is_bounded_however_many_addresses_there_are() -> None:
    table = Table()
    for number in range(10_000):
        address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        table.admission.allows(address)
        table.connect(address)
    sizes = [len(one) for one in vars(table.admission).values() if hasattr(one, "__len__")]
    assert max(sizes) <= 4096
    assert len(table.admission.refused) <= 6


@pytest.mark.parametrize(
    ("host", "key", "kind"),
    [
        ("::1", "::/64", "loopback"),
        ("fe80::1%eth0", "fe80::/64", "private"),
        ("2a00:1450:4001::1", "2a00:1450:4001::/64", "public"),
        ("8.8.8.8", "8.8.8.8", "public"),
        ("::ffff:127.0.0.2", "127.0.0.2", "loopback"),
    ],
)
def test_addresses(host: str, key: str, kind: str) -> None:
    assert (address_key(host), address_class(key)) == (key, kind)
