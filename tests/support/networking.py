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
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.trust.certs import Authority
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.server import Limits
from peerage.net.wire.transport import Transport

QUICK = Timeouts(start=300.0, message=300.0, idle=1.0)  # where peers go, and come back
CALM = Timeouts(start=600.0, message=300.0, idle=30.0)  # where all are there, if slow at times
BROKEN = 300.0  # seconds; only a broken program needs them
# Of connections between peers that are all there, however slow their machine is.
CALM_LIMITS = Limits(idle_timeout=3600.0, min_rate=1 << 16, grace=120.0)
Result = TypeVar("Result")


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time a test moves forward, so that no test has to be quick or wait."""

    skipped = 0.0  # seconds

    def time(self) -> float:
        return super().time() + self.skipped


def skip(seconds: float) -> None:
    """Let time pass: every wait of the running `SkippingLoop` that ends by then ends now."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skipped += seconds


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
    """Without ports, a network in memory, where nobody uses its addresses."""
    count = experiment.nodes_and_hub
    members = tuple(
        Member(f"node-{number}", f"127.0.0.1:{port}")
        for number, port in enumerate(ports or range(10_000, 10_000 + count))
    )
    settings: dict[str, Any] = {"timeouts": QUICK}
    return Network("test", experiment, members, **(settings | changes))


class InMemory:
    """Makes the ends of a network in memory."""

    def __init__(self) -> None:
        self.post = MemoryNetwork()

    def __call__(self, network: Network, me: int) -> Transport:
        return MemoryTransport(self.post, me)


class OverSockets:
    """Makes the ends of a network over loopback, with an authority of its own."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority.create(folder / "certs", "tests")

    def __call__(self, network: Network, me: int) -> Transport:
        name = network.members[me].name
        identity = self.authority.issue(name)
        names = {member.name: number for number, member in enumerate(network.members)}
        addresses = {number: member.address for number, member in enumerate(network.members)}
        return GrpcTransport(identity, names, addresses, limits=CALM_LIMITS)


def play(
    experiment: Experiment,
    home: Path | None = None,
    ends: Callable[[Network, int], Transport] | None = None,
    worlds: Callable[[int], World] | None = None,
    **changes: Any,
) -> list[Peer]:
    """All peers to the end, in one event loop; one thread computes for all, and nobody leaves."""
    make = ends or InMemory()
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


class Stage:
    """Peers that can be killed and started again, in one event loop."""

    def __init__(self, experiment: Experiment, home: Path, **changes: Any) -> None:
        self.experiment, self.home = experiment, home
        self.network = network_of(experiment, **changes)
        self.post, self.executor = MemoryNetwork(), ThreadPoolExecutor(1)
        self.peers: dict[int, Peer] = {}
        self.tasks: dict[int, asyncio.Task[Tensor]] = {}

    def start(self, me: int, **options: Any) -> None:
        transport = MemoryTransport(self.post, me)
        folder = self.home / str(me)
        world = prepare(self.experiment)
        peer = Peer(self.network, me, world, transport, folder, executor=self.executor, **options)
        self.peers[me], self.tasks[me] = peer, asyncio.create_task(peer.run())

    async def kill(self, me: int) -> None:
        """As kill -9: nothing is said to anybody."""
        self.post.receivers.pop(me, None)
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


def on_stage(
    experiment: Experiment, home: Path, act: Callable[[Stage], Awaitable[None]], **changes: Any
) -> list[Peer]:
    async def together() -> list[Peer]:
        stage = Stage(experiment, home, **changes)
        for me in range(len(stage.network.members)):
            stage.start(me)
        await act(stage)
        return await stage.finish()

    with one_thread():
        return asyncio.run(together())
