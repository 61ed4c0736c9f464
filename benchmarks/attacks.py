"""The rate of rounds of honest peers under attack, relative to the rate without.

Run `make attacks`, or `python benchmarks/attacks.py [--seconds N] [--repeats N] [--out FILE]`.
Three honest peers run rounds. The fourth member is the attacker, and outsiders use another address
of this machine. Phases with and without the attack alternate. Each attacked phase is divided by the
mean of the phases before and after it, and the result is the median of these ratios. The attackers
take processor time from the same machine.

At the end, two more networks run at the same time, one of which has no acceptor in front of gRPC.
"""

import argparse
import asyncio
import json
import os
import random
import runpy
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "net" / "peer"))

import grpc
import psutil
import test_fire
import torch
from support.fuzzed import last_round
from support.machines import Machines
from support.outsiders import OUTSIDER, allow_open_files, idle

from peerage import Experiment
from peerage.engine.router import Packet
from peerage.files import write_bytes
from peerage.net.deploy.forked import CONTEXT
from peerage.net.peer import network
from peerage.net.peer.network import Timeouts
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.header import header_bytes
from peerage.net.wire.payload import encode
from peerage.net.wire.server import SERVICE, server_options
from peerage.records.environment import environment
from peerage.requests import Envelope

HONEST = (0, 1, 2)
BOUND = 0.5
IDLE = 1300  # connections per peer
PER_SECOND = 100  # new connections per peer, of floods
RESULTS = Path("docs/results/net/attacks.json")
EXPERIMENT = Experiment(
    nodes=4, topology="complete", partition="iid", model="logistic", rounds=1_000_000
)
TIMEOUTS = Timeouts(start=5, message=60, idle=5)


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


async def _never() -> None:
    await asyncio.Event().wait()


def silent(certs: str, ports: list[int]) -> None:
    """A member that runs, answers and waits like all others, and sends no models."""
    home = Path(certs).parent

    async def send(*_: Any) -> None:
        await _never()

    GrpcTransport.send = send  # type: ignore[method-assign]
    _peerage(home, "node-3")


def _peerage(home: Path, name: str) -> None:
    """What `peerage node` does."""
    os.setsid()  # as all peers: the kernel shares the processor between sessions
    with open(home / f"{name}.log", "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    sys.argv = ["peerage", "node", "--identity", name, "--network", str(home / "network.toml")]
    sys.argv += ["--certs", str(home / "certs"), "--out", str(home / name)]
    runpy.run_module("peerage", run_name="__main__", alter_sys=True)


ATTACKS: dict[str, Callable[[str, list[int]], Any]] = {
    "idle connections": idle_connections,
    "handshake flood": handshakes,
    "garbage bytes": garbage,
    "calls of a member": calls,
    "messages of a member": messages,
    "silent member": silent,
}


def attack(name: str, certs: str, ports: list[int]) -> None:
    """What the process of an attacker runs."""
    if (running := ATTACKS[name](certs, ports)) is not None:
        asyncio.run(running)


# The measurement


class Network:
    """Three honest peers of four."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.machines = stack.enter_context(Machines(folder, EXPERIMENT, TIMEOUTS))
        members = network.Network.load(folder / "network.toml").members
        self.ports = [int(member.address.rpartition(":")[2]) for member in members][: len(HONEST)]

    def start(self) -> "Network":
        for me in HONEST:
            self.machines.start(me)
        return self

    def until_running(self) -> None:
        self.machines.until(lambda: all(last_round(self.machines, me) >= 3 for me in HONEST))

    def rounds(self) -> float:
        """Finished rounds, the mean of all."""
        assert all(one.poll() is None for one in self.machines.processes.values()), "a peer ended"
        return statistics.mean(last_round(self.machines, me) for me in HONEST)

    def rate(self, seconds: float) -> float:
        """Rounds per second."""
        before, start = self.rounds(), time.monotonic()
        time.sleep(seconds)
        return (self.rounds() - before) / (time.monotonic() - start)

    def attacked_rate(self, name: str, seconds: float) -> tuple[float, float]:
        """Rounds per second, and the processor seconds of the attacker per second."""
        certs = str(self.machines.home / "certs")
        attacker = CONTEXT.Process(target=attack, args=(name, certs, self.ports), daemon=True)
        attacker.start()
        try:
            time.sleep(seconds / 2)  # it opens connections
            assert attacker.is_alive(), f"the attack {name} ended"
            before, start = _processor_seconds(attacker.pid), time.monotonic()
            rate = self.rate(seconds)
            used = _processor_seconds(attacker.pid) - before
            return rate, used / (time.monotonic() - start)
        finally:
            attacker.kill()
            attacker.join()


def _processor_seconds(pid: int | None) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def measure(seconds: float, repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        peers = Network(Path(folder), stack).start()
        peers.until_running()
        for name in ATTACKS:
            pauses, attacked, used = [peers.rate(seconds)], [], []
            for _ in range(repeats):
                rate, cores = peers.attacked_rate(name, seconds)
                attacked.append(rate)
                used.append(cores)
                time.sleep(seconds / 2)  # connections of the attack end
                pauses.append(peers.rate(seconds))
            ratios = [
                rate / statistics.mean(pauses[place : place + 2])
                for place, rate in enumerate(attacked)
            ]
            found[name] = {
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(one, 3) for one in ratios],
                "rounds_per_second": [round(one, 2) for one in attacked],
                "without": [round(one, 2) for one in pauses],
                "cores_of_attacker": [round(one, 2) for one in used],
            }
            print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        logs = [peers.machines.log(me) for me in HONEST]
    return {"attacks": found, "tracebacks": sum(log.count("Traceback") for log in logs)}


# The cost of the acceptor


def without_acceptor(home: str, name: str) -> None:
    """A peer whose gRPC server listens on the port itself, as before there was an acceptor."""

    async def listen(self: GrpcTransport, servicer: Any, place: Any) -> None:
        server = grpc.aio.server(options=server_options(self._limits))
        server.add_generic_rpc_handlers(servicer.services(self._health))
        server.add_secure_port(str(place), self._connections.credentials.server())
        await server.start()
        self._server = server

    GrpcTransport._listen = listen  # type: ignore[method-assign]
    _peerage(Path(home), name)


def cost_of_acceptor(seconds: float, repeats: int) -> dict[str, Any]:
    """Two networks run at the same time, so that both have the same share of the machine."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        given = Network(Path(folder) / "with", stack).start()
        plain = Network(Path(folder) / "without", stack)
        home = str(plain.machines.home)
        for me in HONEST:
            arguments = (home, f"node-{me}")
            peer = CONTEXT.Process(target=without_acceptor, args=arguments, daemon=True)
            peer.start()
            stack.callback(peer.join)
            stack.callback(peer.kill)
        given.until_running()
        plain.until_running()
        ratios, rates = [], []
        for _ in range(repeats):
            before, start = (given.rounds(), plain.rounds()), time.monotonic()
            time.sleep(2 * seconds)
            gained = given.rounds() - before[0], plain.rounds() - before[1]
            ratios.append(gained[0] / gained[1])
            rates.append([round(one / (time.monotonic() - start), 2) for one in gained])
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(one, 3) for one in ratios],
        "rounds_per_second_with_and_without": rates,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    found = {
        "bound": BOUND,
        **measure(given.seconds, given.repeats),
        "acceptor": cost_of_acceptor(given.seconds, given.repeats),
        "environment": environment(),
    }
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(given.out, (json.dumps(found, indent=1) + "\n").encode())
    print(json.dumps(found, indent=1))
    if any(one["ratio"] < BOUND for one in found["attacks"].values()):
        raise SystemExit(f"error: an attack left less than {BOUND} of the rate of rounds")
