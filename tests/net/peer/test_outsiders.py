"""Real peers whose ports are attacked with connections: none ends, and rounds go on."""

import asyncio
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.machines import Machines
from support.networking import BROKEN
from support.outsiders import allow_open_files, drip, handshakes, idle, member_context

import peerage as pg
from peerage.net.peer.network import Timeouts
from peerage.net.trust.identity import Identity
from peerage.net.wire.grpc import GrpcTransport

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not installed"),
]

PEERS, ROUNDS = 3, 100_000  # more rounds than there is time for
LIMIT = ["prlimit", "--nofile=1024:1024"]


async def ask_as(network: Machines, name: str, port: int) -> bytes:
    """The status of node 0, for a member that connects anew."""
    names = {f"node-{me}": me for me in range(PEERS)}
    identity = Identity.load(network.home / "certs", name)
    client = GrpcTransport(identity, names, {0: f"127.0.0.1:{port}"}, member=False)
    try:
        return await client.ask_status(0, BROKEN)
    finally:
        await client.stop()


def test_connections_of_outsiders_and_of_a_member_end_no_peer(tmp_path: Path) -> None:
    """1300 idle ones at each peer, slow handshakes, and 600 of one member that make no call."""
    allow_open_files()
    experiment = pg.Experiment(
        nodes=PEERS, topology="complete", partition="iid", model="logistic", rounds=ROUNDS
    )
    timeouts = Timeouts(start=3600, message=60, idle=60)
    with Machines(tmp_path, experiment, timeouts) as network, ExitStack() as stack:
        ports = [
            int(line.partition(":")[2].strip('"\n'))
            for line in (tmp_path / "network.toml").read_text().splitlines()
            if line.startswith("address")
        ]
        for me in range(PEERS):
            network.start(me, within=LIMIT)
        network.until(lambda: all(network.round(me) >= 1 for me in range(PEERS)))
        for port in ports:
            for one in idle(port, 1300) + drip(port, 20):
                stack.enter_context(one)
        mallory = Identity.load(tmp_path / "certs", "node-2")

        async def attack() -> bytes:
            held = await handshakes(ports[0], 600, member_context(mallory), "node-0")
            assert held
            answer = await ask_as(network, "node-1", ports[0])
            for writer in held:
                writer.transport.abort()
            return answer

        assert b'"state": "running"' in asyncio.run(attack())
        rounds = [network.round(me) for me in range(PEERS)]
        network.until(lambda: all(network.round(me) >= rounds[me] + 2 for me in range(PEERS)))
        assert [process.poll() for process in network.processes.values()] == [None] * PEERS
        for me in range(PEERS):
            assert network.received(me) == (PEERS - 1, PEERS - 1)
            assert network.log(me).count("refused") < 10
            for word in ("Traceback", "Too many open files", "disk", "error"):
                assert word not in network.log(me)
