"""The status of a network, for members and observers: over real connections and processes."""

import asyncio
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from support.command_line import error_line, peerage
from support.machines import Machines
from support.networking import BROKEN, CALM_LIMITS

import peerage as pg
from peerage.cli.status import table_of
from peerage.net.deploy.status import PeerStatus
from peerage.net.peer.network import Network, Timeouts
from peerage.net.peer.report import MAX_TEXT, Report
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import CertificateRejected, Identity
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.header import Header, Rejected
from peerage.net.wire.limits import Limits
from peerage.net.wire.transport import CallerRefused
from peerage.requests import Envelope

NAMES = {"node-0": 0, "node-1": 1}
REPORT = Report(
    round=3,
    rounds=9,
    state="running",
    accuracy=0.5,
    epsilon=2.5,
    heard=("node-1",),
    missing=("node-2",),
    not_reached_by=("node-3",),
    peerage="0.1.0",
    torch="2.3",
    schema=3,
    expires="2030-01-02T00:00:00+00:00",
    revision=4,
)


# Reports


def shown(*peers: PeerStatus) -> str:
    """A table as text, with single spaces."""
    file = io.StringIO()
    Console(width=300, file=file).print(table_of(peers))
    return " ".join(file.getvalue().split())


def test_a_report_survives_encoding():
    assert Report.parse(REPORT.encode()) == REPORT
    older = json.loads(REPORT.encode())
    del older["revision"]  # of a version that did not report it
    assert Report.parse(json.dumps(older).encode()) == replace(REPORT, revision=1)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"{" * 100_000,
        json.dumps({**json.loads(REPORT.encode()), "round": "x"}).encode(),
        json.dumps({**json.loads(REPORT.encode()), "heard": 3}).encode(),
    ],
    ids=lambda raw: raw[:20].decode(),
)
def test_odd_answers_are_no_report(raw):
    assert Report.parse(raw) is None


def test_the_text_of_a_peer_cannot_change_the_terminal():
    table = {
        **json.loads(REPORT.encode()),
        "state": "\x1b[2J" + 10_000 * "x",
        "missing": ["[red]a"],
    }
    found = Report.parse(json.dumps(table).encode())
    assert found is not None
    assert found.state.startswith("?[2Jxxx")
    assert len(found.state) == MAX_TEXT
    assert "did not hear [red]a" in shown(PeerStatus("node-0", "10.0.0.3:7400", found))


def test_a_table_names_peers_that_do_not_answer():
    gone = PeerStatus("node-1", "10.0.0.3:7400", None, "connection refused")
    text = shown(PeerStatus("node-0", "10.0.0.2:7400", REPORT), gone)
    for part in ("running 3 of 9 50.0 % 2.5 1 of 2 4", "node-0 did not hear node-2"):
        assert part in text
    assert "node-0 cannot be reached by node-3" in text
    assert "that of node-0, on 2030-01-02" in text
    assert "node-1 unreachable" in text
    assert "node-1 at 10.0.0.3:7400: connection refused" in text


def test_a_status_that_another_peer_passed_on_says_so():
    report = replace(REPORT, epsilon=None, missing=(), not_reached_by=())
    far = PeerStatus("node-1", "", report, by_way_of="node-0", age=2.4)
    text = shown(PeerStatus("node-0", "10.0.0.2:7400", report), far)
    assert "node-1 dials out; its status is from node-0, 2 s old" in text
    assert "epsilon" not in text
    assert text.count("all: peerage 0.1.0, torch 2.3, wire 3") == 1
    assert (far.facts["by_way_of"], far.facts["age"]) == ("node-0", 2.4)


def test_a_table_fits_into_80_columns():
    """Also with large numbers, noise and a long state, which takes several lines."""
    waiting = "waiting for " + ", ".join(f"node-{i}" for i in range(5)) + " and 7 more"
    long = replace(REPORT, round=19_999, rounds=20_000, state=waiting, epsilon=0.0123, revision=12)
    file = io.StringIO()
    Console(width=80, file=file).print(table_of([PeerStatus("node-10", "a:1", long)]))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = re.compile(r"node-10 .* 19999 of 20000 +50\.0 % +0\.0123 +1 of 2 +12$")
    assert any(map(row.match, lines))


# What observers may do


class Source:
    """A receiver that only reports; anything else must not reach it."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.release.set()

    async def report(self) -> bytes:
        await self.release.wait()
        return REPORT.encode()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    made = Authority.create(tmp_path_factory.mktemp("certs"), "test")
    for name in NAMES:
        made.issue(name)
    made.issue("watcher", observer=True)
    return made


def asking(authority: Authority, name: str, port: int) -> GrpcTransport:
    identity = Identity.load(authority.folder, name, observer=True)
    addresses = {1: f"127.0.0.1:{port}"}
    return GrpcTransport(identity, NAMES, addresses, limits=CALM_LIMITS, member=False)


def test_an_observer_is_no_peer(authority: Authority) -> None:
    with pytest.raises(CertificateRejected, match="is an observer's, which may only ask") as caught:
        Identity.load(authority.folder, "watcher")
    assert caught.value.reason == "purpose"
    observers = {one.name: one.observer for one in authority.issued()}
    assert observers == {"node-0": False, "node-1": False, "watcher": True}


@pytest.mark.slow  # real connections
def test_an_observer_may_ask_for_the_status_and_nothing_else(authority: Authority, caplog) -> None:
    async def test() -> None:
        source = Source()
        server = GrpcTransport(
            Identity.load(authority.folder, "node-1"),
            NAMES,
            {},
            bind="127.0.0.1:0",
            limits=Limits(3600.0, 1 << 16, 120.0, max_calls=2),
        )
        await server.start(source)  # type: ignore[arg-type]
        watcher = asking(authority, "watcher", server.port)
        second = asking(authority, "watcher", server.port)
        member = asking(authority, "node-0", server.port)
        try:
            for client in (watcher, member):
                assert Report.parse(await client.ask_status(1, 60.0)) == REPORT
            assert (
                0 not in server._connections.last_seen
            )  # asking in the name of node-0 is no sign of life
            header = Header("run", 0, Envelope(0, 1, 1, "model"), recipient=1, sequence=0)
            only = "'watcher' is an observer, which may only ask for the status"
            for _ in range(3):
                for ask in ("status", "model", "finished", "settings"):
                    with pytest.raises(CallerRefused, match=only):
                        await watcher.ask(1, json.dumps({"ask": ask}).encode(), 60.0)
                with pytest.raises(CallerRefused, match=only):
                    await watcher.send(header, b"", 60.0)
            refused = server.refused_by_peer
            assert set(refused) == {("other", "observer")}
            assert refused["other", "observer"] >= 15
            # It gets as many calls at once as a peer, over all its connections.
            source.release.clear()
            clients = (watcher, watcher, second)
            calls = [asyncio.create_task(client.ask_status(1, 600.0)) for client in clients]
            async with asyncio.timeout(BROKEN):
                while not refused["other", "full"]:
                    await asyncio.sleep(0.01)
            source.release.set()
            assert await asyncio.gather(*calls) == [REPORT.encode()] * 3
        finally:
            for transport in (watcher, second, member, server):
                await transport.stop()

    asyncio.run(test())
    assert caplog.messages == [
        "refused a call: 'watcher' is an observer, which may only ask for the status"
    ]


@pytest.mark.slow  # real connections
def test_a_revoked_observer_is_rejected(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "certs", "test")
    for name in NAMES:
        authority.issue(name)
    authority.issue("watcher", observer=True, into=tmp_path / "watcher")

    async def test() -> None:
        node = Identity.load(authority.folder, "node-1")
        server = GrpcTransport(node, NAMES, {}, bind="127.0.0.1:0", limits=CALM_LIMITS)
        await server.start(Source())  # type: ignore[arg-type]
        identity = Identity.load(tmp_path / "watcher", "watcher", observer=True)
        client = GrpcTransport(
            identity, NAMES, {1: f"127.0.0.1:{server.port}"}, limits=CALM_LIMITS, member=False
        )
        try:
            await client.ask_status(1, 60.0)
            authority.revoke("watcher")
            with pytest.raises(Rejected, match="was revoked on"):
                await client.ask_status(1, 60.0)
            assert server.refused_by_peer == {("other", "revoked"): 1}
        finally:
            await client.stop()
            await server.stop()

    asyncio.run(test())


# The command


@pytest.mark.slow  # real processes
def test_the_status_of_running_peers(tmp_path):
    three = pg.Experiment(
        nodes=3, topology="complete", partition="iid", model="logistic", rounds=10**6
    )
    certs = tmp_path / "certs"
    line = f"status {tmp_path}/network.toml --certs {certs}"
    with Machines(tmp_path, three, Timeouts(start=3600, message=30, idle=2)) as network:
        authority = Authority.load(certs)
        authority.issue("watcher", observer=True)
        for me in range(3):
            network.start(me)
        network.until(lambda: network.round(0) >= 2)
        gone = network.processes.pop(2)
        gone.kill()
        gone.wait()
        done = peerage(f"{line} --identity watcher --json")
        assert done.code == 0, done.err
        first, second, third = json.loads(done.lines[-1])["peers"]
        assert first["name"] == "node-0"
        assert 2 <= first["round"] <= network.round(0) + 1
        assert (first["rounds"], first["epsilon"], first["schema"]) == (10**6, None, 3)
        assert 0 < first["accuracy"] <= 1
        [issued] = [one for one in authority.issued() if one.name == "node-0"]
        assert first["expires"] == issued.not_after.isoformat()
        assert {"node-1"} <= {*first["heard"], *first["missing"]} <= {"node-1", "node-2"}
        assert second["state"] == "running"
        address = Network.load(tmp_path / "network.toml").members[2].address
        assert third == {"name": "node-2", "address": address, "error": "connection refused"}
        table = peerage(f"{line} --identity node-2")  # a member, which does not run
        assert table.code == 0
        assert "node-0" in table.out
        assert "connection refused" in " ".join(table.out.split())
        assert "Traceback" not in network.log(0)
    said = error_line(peerage(f"{line} --identity stranger"))
    assert "there is no" in said
