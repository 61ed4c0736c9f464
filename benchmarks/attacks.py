"""The rate of rounds of honest peers under attack, relative to the rate without.

Run `make attacks`, or `python benchmarks/attacks.py [--seconds N] [--out FILE]`. Three honest peers
run rounds. The fourth member is the attacker, and outsiders use another address of this machine.
Attacks and pauses alternate in one run. The result of an attack is its rate divided by the mean of
the pauses before and after it. The attackers take processor time from the same machine.
"""

import argparse
import asyncio
import json
import random
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "net" / "peer"))

import grpc
import test_fire
import torch
from support.machines import Machines
from support.outsiders import OUTSIDER, allow_open_files, idle

from peerage import Experiment
from peerage.engine.router import Packet
from peerage.files import write_bytes
from peerage.net.peer.network import Network, Timeouts
from peerage.net.wire.header import header_bytes
from peerage.net.wire.payload import encode
from peerage.net.wire.server import SERVICE
from peerage.records.environment import environment
from peerage.requests import Envelope

HONEST = (0, 1, 2)
BOUND = 0.5
IDLE = 1300  # connections per peer
PER_SECOND = 100  # new connections per peer, of floods
RESULTS = Path("docs/results/net/attacks.json")


# The attackers, each in a process of its own


async def idle_connections(certs: str, ports: list[int]) -> None:
    """Idle connections; those that are closed are opened again."""
    allow_open_files()
    held: dict[int, list[socket.socket]] = {port: [] for port in ports}
    while True:
        for port, mine in held.items():
            mine += await asyncio.to_thread(idle, port, min(IDLE - len(mine), PER_SECOND))
            for one in mine:
                one.setblocking(False)
            held[port] = [one for one in mine if _open(one)]
        await asyncio.sleep(1.0)


def _open(one: socket.socket) -> bool:
    try:
        if one.recv(1) == b"":
            one.close()
            return False
    except BlockingIOError:
        return True
    except OSError:
        one.close()
        return False
    return True


async def _flood(ports: list[int], one: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """`PER_SECOND` connections per peer, whether the ones before have ended or not."""
    tasks: set[asyncio.Task[None]] = set()
    while True:
        for port in ports:
            task = asyncio.create_task(one(port))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(1 / PER_SECOND)


async def handshakes(certs: str, ports: list[int]) -> None:
    """Handshakes without a certificate."""
    context = ssl.create_default_context(cafile=str(Path(certs) / "authority.pem"))
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def one(port: int) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                reader, _ = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=context, local_addr=(OUTSIDER, 0)
                )
                await reader.read()

    await _flood(ports, one)


async def garbage(certs: str, ports: list[int]) -> None:
    """Random bytes instead of a handshake."""
    junk = random.Random(0).randbytes(10_000)

    async def one(port: int) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(10):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, local_addr=(OUTSIDER, 0)
                )
                writer.write(junk)
                await reader.read()

    await _flood(ports, one)


async def calls(certs: str, ports: list[int]) -> None:
    """Questions of a member, 20 at a time, to one peer."""
    settings = test_fire.AttackSettings(ports[test_fire.VICTIM], certs, 0, "", "")
    async with test_fire.channel_of(settings) as channel:
        ask = channel.unary_unary(f"/{SERVICE}/Ask")

        async def gun() -> None:
            while True:
                with suppress(grpc.aio.AioRpcError):
                    await ask(b'{"ask": "status"}', timeout=10)

        await asyncio.gather(*(gun() for _ in range(20)))


async def messages(certs: str, ports: list[int]) -> None:
    """Oversized and mutated messages of a member, to one peer."""
    packet = Packet(Envelope(3, 10, 3, "logistic", 0), (1,), {"x": torch.zeros(650)}, 0)
    header, data = encode(packet, run="test", round=0, recipient=1, sequence=1)
    port = ports[test_fire.VICTIM]
    raw = header_bytes(header).decode()
    settings = test_fire.AttackSettings(port, certs, 10_000, raw, bytes(data).hex())
    async with test_fire.channel_of(settings) as channel:
        attacker = test_fire.Attacker(settings, channel)
        while True:
            await attacker.fire(400)


ATTACKS = {
    "idle connections": idle_connections,
    "handshake flood": handshakes,
    "garbage bytes": garbage,
    "calls of a member": calls,
    "messages of a member": messages,
}


# The measurement


def rate(network: Machines, seconds: float) -> float:
    """Rounds per second of the honest peers, the mean of all."""
    before, start = [network.round(me) for me in HONEST], time.monotonic()
    time.sleep(seconds)
    done = [network.round(me) - first for me, first in zip(HONEST, before, strict=True)]
    assert all(process.poll() is None for process in network.processes.values()), "a peer ended"
    return statistics.mean(done) / (time.monotonic() - start)


def attacked_rate(network: Machines, name: str, ports: list[int], seconds: float) -> float:
    arguments = [name, str(network.home / "certs"), *map(str, ports)]
    attacker = subprocess.Popen([sys.executable, __file__, "--attack", *arguments])
    try:
        time.sleep(seconds / 2)  # it loads its modules, and opens connections
        return rate(network, seconds)
    finally:
        attacker.kill()
        attacker.wait()


def measure(seconds: float) -> dict[str, Any]:
    experiment = Experiment(
        nodes=4, topology="complete", partition="iid", model="logistic", rounds=1_000_000
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Machines(Path(folder), experiment, Timeouts(start=5, message=60, idle=5)) as network,
    ):
        members = Network.load(Path(folder) / "network.toml").members
        ports = [int(member.address.rpartition(":")[2]) for member in members][: len(HONEST)]
        for me in HONEST:
            network.start(me)
        network.until(lambda: all(network.round(me) >= 3 for me in HONEST))
        pauses, rates = [rate(network, seconds)], {}
        for name in ATTACKS:
            rates[name] = attacked_rate(network, name, ports, seconds)
            pauses.append(rate(network, seconds))
            print(f"{name}: {rates[name]:.2f}, then {pauses[-1]:.2f} rounds/s", file=sys.stderr)
        logs = [network.log(me) for me in HONEST]
    return {
        name: {
            "ratio": round(value / statistics.mean(pauses[place : place + 2]), 3),
            "rounds_per_second": round(value, 3),
            "without": [round(one, 3) for one in pauses[place : place + 2]],
        }
        for place, (name, value) in enumerate(rates.items())
    } | {"tracebacks": sum(log.count("Traceback") for log in logs)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--attack", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        name, certs, *ports = given.attack
        asyncio.run(ATTACKS[name](certs, [int(port) for port in ports]))
    else:
        found = {"bound": BOUND, "attacks": measure(given.seconds), "environment": environment()}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(given.out, (json.dumps(found, indent=1) + "\n").encode())
        print(json.dumps(found["attacks"], indent=1))
