"""Networks of peers in one process, for tests: over memory, or over real connections."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from support.memory import MemoryNetwork, MemoryTransport
from torch import Tensor

from peerage import Experiment
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.net.deploy.up import free_ports
from peerage.net.peer.account import PrivacyAccount
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.trust.certs import Authority
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.limits import Limits
from peerage.net.wire.transport import Transport

QUICK = Timeouts(start=300.0, message=300.0, idle=1.0)  # for peers that leave and return
CALM = Timeouts(start=600.0, message=300.0, idle=30.0)  # for peers that stay
LONG = 3600.0  # seconds, of a loop whose time a test moves
BROKEN = 300.0  # seconds; only a broken program takes longer
# For connections between peers that stay, however slow their machine is.
CALM_LIMITS = Limits(idle_timeout=3600.0, min_rate=1 << 16, grace=120.0)
Result = TypeVar("Result")


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test moves forward, so that no test has to be quick or wait."""

    skipped = 0.0  # seconds

    def time(self) -> float:
        return super().time() + self.skipped


def skip(seconds: float) -> None:
    """Let time pass: every wait of the running `SkippingLoop` that would end by then ends now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skipped += seconds


class StandingLoop(SkippingLoop):
    """An event loop whose time only a test moves, so that it can count seconds."""

    def time(self) -> float:
        return self.skipped


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ended(work: Awaitable[Any], within: float = LONG) -> float:
    """Let time pass until the work is done; after how many seconds it was."""
    task, now = asyncio.ensure_future(work), asyncio.get_running_loop().time
    start = now()
    while not task.done():
        assert now() < start + within
        await settle()
        skip(0.05)
    await task
    return now() - start


def run_skipping(main: Coroutine[Any, Any, Result]) -> Result:
    """Run in a `SkippingLoop`; fails after `BROKEN` seconds of real time."""

    async def limited() -> Result:
        task, end = asyncio.create_task(main), time.monotonic() + BROKEN
        while not task.done():
            assert time.monotonic() < end, f"not done after {BROKEN:g} s"
            await asyncio.wait([task], timeout=1.0)
        return task.result()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(limited())


def network_of(experiment: Experiment, ports: Sequence[int] = (), **changes: Any) -> Network:
    """Without ports, a network in memory, whose addresses are not used."""
    count = experiment.nodes_and_hub
    members = tuple(
        Member(f"node-{number}", f"127.0.0.1:{port}")
        for number, port in enumerate(ports or range(10_000, 10_000 + count))
    )
    settings: dict[str, Any] = {"members": members, "timeouts": QUICK}
    return Network("test", experiment, **(settings | changes))


class InMemory:
    """Makes the transports of a network in memory."""

    def __init__(self) -> None:
        self.memory = MemoryNetwork()

    def __call__(self, network: Network, me: int) -> Transport:
        return MemoryTransport(self.memory, me)


class OverSockets:
    """Makes the transports of a network over loopback, with its own certificate authority."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(folder / "certs", "tests")

    def __call__(self, network: Network, me: int) -> Transport:
        name = network.members[me].name
        identity = self.authority.issue(name)
        names = {member.name: number for number, member in enumerate(network.members)}
        addresses = {number: member.address for number, member in enumerate(network.members)}
        return GrpcTransport(identity, names, addresses, limits=CALM_LIMITS)


def run_peers(
    experiment: Experiment,
    home: Path | None = None,
    transports: Callable[[Network, int], Transport] | None = None,
    worlds: Callable[[int], World] | None = None,
    accounts: Callable[[int], PrivacyAccount | None] = lambda me: None,
    **changes: Any,
) -> list[Peer]:
    """Run all peers to the end in one event loop; one thread computes for all of them."""
    make = transports or InMemory()
    ready = worlds or (lambda me: prepare(experiment))

    async def together() -> list[Peer]:
        ports = free_ports(experiment.nodes_and_hub) if isinstance(make, OverSockets) else ()
        network = network_of(experiment, ports, **({"timeouts": CALM} | changes))
        with ThreadPoolExecutor(1) as executor:
            peers = [
                Peer(
                    network,
                    me,
                    ready(me),
                    make(network, me),
                    home / str(me) if home else None,
                    executor=executor,
                    account=accounts(me),
                )
                for me in range(len(network.members))
            ]
            async with asyncio.timeout(2 * BROKEN):
                await asyncio.gather(*(peer.run() for peer in peers))
        return peers

    with one_thread():
        return asyncio.run(together())


@contextmanager
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class PeerHarness:
    """Peers that can be killed and started again, in one event loop."""

    def __init__(self, experiment: Experiment, home: Path, **changes: Any) -> None:
        self.experiment, self.home = experiment, home
        self.network = network_of(experiment, **changes)
        self.memory, self.executor = MemoryNetwork(), ThreadPoolExecutor(1)
        self.peers: dict[int, Peer] = {}
        self.tasks: dict[int, asyncio.Task[Tensor]] = {}

    def start(self, me: int, **options: Any) -> None:
        transport = MemoryTransport(self.memory, me)
        folder = self.home / str(me)
        world = prepare(self.experiment)
        peer = Peer(self.network, me, world, transport, folder, executor=self.executor, **options)
        self.peers[me], self.tasks[me] = peer, asyncio.create_task(peer.run())

    async def kill(self, me: int) -> None:
        """As kill -9: no other peer is informed."""
        self.memory.receivers.pop(me, None)
        self.tasks[me].cancel()
        await asyncio.gather(self.tasks[me], return_exceptions=True)

    async def until(self, me: int, round: int) -> None:
        async with asyncio.timeout(BROKEN):
            while self.peers[me].round < round:
                await asyncio.sleep(0.005)

    async def finish(self) -> list[Peer]:
        try:
            async with asyncio.timeout(BROKEN):
                await asyncio.wait(self.tasks.values())
            failures = [task.exception() for task in self.tasks.values()]
            for failure in filter(None, failures):
                raise failure
        finally:
            self.executor.shutdown()
        return [self.peers[me] for me in sorted(self.peers)]


def run_harness(
    experiment: Experiment,
    home: Path,
    act: Callable[[PeerHarness], Awaitable[None]],
    **changes: Any,
) -> list[Peer]:
    """Start all peers, let `act` disturb them, and run them to the end."""

    async def together() -> list[Peer]:
        harness = PeerHarness(experiment, home, **changes)
        for me in range(len(harness.network.members)):
            harness.start(me)
        await act(harness)
        return await harness.finish()

    with one_thread():
        return asyncio.run(together())
