"""The status of peers that dial out, as another peer passes it on."""

import asyncio
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from peerage import Experiment
from peerage.net.peer.network import Member, Network
from peerage.net.peer.relay import FRESH, StatusRelay
from peerage.net.peer.report import Report
from peerage.net.wire.header import Rejected
from peerage.net.wire.transport import Unreachable

REPORT = Report(3, 9, "running", 0.5, None, ("node-0",), (), (), "0.1.0", "2.3", 3, None, 2)


class Tunnels:
    """A transport that counts questions, and answers while it is connected."""

    def __init__(self) -> None:
        self.asked, self.connected = 0, False

    async def ask_status(self, peer: int, deadline: float, about: str = "") -> bytes:
        self.asked += 1
        if not self.connected:
            raise Unreachable("no tunnel")
        return REPORT.encode()


def relay(tunnels: Tunnels) -> StatusRelay:
    experiment = Experiment(nodes=3, topology="complete", model="logistic")
    members = (Member("node-0", "h:1"), Member("node-1", "h:2"), Member("node-2", dials_out=True))
    network = Network("test", experiment, members)
    return StatusRelay(SimpleNamespace(network=network, me=0, transport=tunnels))  # type: ignore[arg-type]


def test_the_last_report_is_kept_with_its_age_and_not_asked_for_too_often(monkeypatch):
    async def act() -> list[dict[str, Any]]:
        loop, start = asyncio.get_running_loop(), 100.0
        tunnels = Tunnels()
        passing = relay(tunnels)
        found = []

        async def ask_at(seconds: float) -> None:
            monkeypatch.setattr(loop, "time", lambda: start + seconds)
            found.append(json.loads(await passing.report_of("node-2")))

        await ask_at(0)
        assert tunnels.asked == 1
        tunnels.connected = True
        await ask_at(FRESH / 2)  # so soon it is not asked again
        assert tunnels.asked == 1
        await ask_at(FRESH)
        await ask_at(FRESH)
        assert tunnels.asked == 2
        tunnels.connected = False
        await ask_at(FRESH + 7)
        assert tunnels.asked == 3
        return found

    none, still_none, first, second, old = asyncio.run(act())
    assert none == still_none == {"error": "node-2 has not connected, or does not answer"}
    assert Report.parse(json.dumps(first).encode()) == REPORT
    assert first == second == json.loads(json.dumps({**asdict(REPORT), "age": 0.0}))
    assert old["age"] == 7.0


@pytest.mark.parametrize("name", ["node-1", "node-9", "x" * 63])
def test_only_peers_that_dial_out_are_passed_on(name):
    with pytest.raises(Rejected, match="is not a peer that dials this one"):
        asyncio.run(relay(Tunnels()).report_of(name))
