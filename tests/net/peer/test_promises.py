"""What the network engine promises, with real sockets, real processes and real kills."""

import asyncio
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from support import barriers
from support.networking import BROKEN, one_thread

import peerage as pg
from peerage import DecAvg
from peerage.engine.prepare import prepare
from peerage.net.deploy.up import LocalNetwork, free_ports
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.trust.certs import Authority
from peerage.net.wire.grpc import GrpcTransport
from peerage.net.wire.limits import Limits
from peerage.records import checkpoint
from peerage.records.rows import read_metrics
from peerage.testing import toy

pytestmark = pytest.mark.slow  # real connections and processes

KILLS = int(os.environ.get("PEERAGE_KILLS", "200"))
CUT = float(os.environ.get("PEERAGE_CUT", "6"))  # seconds that a network is in two halves


# 1. Nothing is lost


def test_three_of_eight_peers_are_killed_and_all_finish(tmp_path):
    settings = {"nodes": 8, "topology": "regular:k=4", "partition": "iid", "rounds": 40}
    experiment = pg.Experiment(**settings, algorithm=barriers.ALGORITHM, local={"epochs": 2})
    rng = random.Random(5)
    victims = rng.sample(range(8), 3)
    kill = {node: rng.randint(2, 8) for node in victims}
    restart = {node: kill[node] + rng.randint(1, 3) for node in victims}
    up = LocalNetwork(experiment, tmp_path / "up", kill=kill, restart=restart)
    with barriers.barriers(tmp_path / "starts", kill, barrier=12):
        summary = up.run()
    assert [peer["starts"] for peer in summary["peers"]] == [
        2 if node in victims else 1 for node in range(8)
    ]
    for peer in up.watched:
        rows = read_metrics(peer.folder / "metrics.jsonl")
        assert rows[-1]["round"] == 40
        assert checkpoint.load(peer.folder).round == 40
    calm = pg.run(experiment).accuracy
    assert summary["accuracy"] == pytest.approx(calm, abs=0.02)


class Saver:
    """Something to save: numbers that are all equal to the round."""

    def __init__(self) -> None:
        self.round = 0

    def save(self, folder: Path) -> tuple[dict[str, object], dict[str, str]]:
        np.full(50_000, self.round).tofile(folder / "part")
        return {"0": {"round": self.round}}, {"0": "part"}


def test_no_checkpoint_is_unreadable_after_kills_in_the_middle_of_writing(tmp_path):
    rng = random.Random(3)
    last = 0
    for _ in range(KILLS):
        ready, notify = os.pipe()
        child = os.fork()
        if child == 0:  # writes until it is killed
            with suppress(BaseException):
                saver, saver.round = Saver(), last
                while True:
                    saver.round += 1
                    checkpoint.save(saver, tmp_path, saver.round)
                    if saver.round == last + 1:
                        os.close(notify)
            os._exit(1)
        os.close(notify)
        os.read(ready, 1)  # until its end is closed as well: there is a new checkpoint
        os.close(ready)
        time.sleep(rng.uniform(0.002, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        saved = checkpoint.load(tmp_path)
        if saved is not None:
            assert saved.round >= last
            last = saved.round
            whole = np.fromfile(saved.folder / "part", dtype=np.int64)
            assert (whole == last).all()
            assert len(whole) == 50_000
    assert last >= KILLS


# 3. A partition heals


class Wire:
    """Forwards one peer's connections to another, until it is cut: then nothing comes through."""

    def __init__(self, port: int, target: int) -> None:
        self.port, self.target = port, target
        self.open = asyncio.Event()
        self.open.set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        self.writers += [writer, there[1]]
        for a, b in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._forward(a, b))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _forward(self, a: asyncio.StreamReader, b: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await a.read(1 << 16):
                await self.open.wait()
                b.write(data)
                await b.drain()
        b.close()

    async def stop(self) -> None:
        self.server.close()
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for writer in self.writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


def test_a_partition_heals_and_both_halves_go_on_meanwhile(tmp_path):
    count, half = 4, {0, 1}
    experiment = toy(DecAvg(), nodes=count, topology="complete", partition="iid", rounds=10**6)

    async def together() -> list[Peer]:
        ports = free_ports(count + count * count)
        real, through = ports[:count], np.reshape(ports[count:], (count, count))
        members = tuple(Member(f"node-{i}", f"127.0.0.1:{p}") for i, p in enumerate(real))
        timeouts = Timeouts(start=300, message=300, idle=3)
        network = Network("test", experiment, members, timeouts, quorum=2)
        authority = Authority.create(tmp_path / "certs", "tests")
        wires = {
            (a, b): Wire(int(through[a, b]), real[b])
            for a in range(count)
            for b in range(count)
            if a != b
        }
        names = {member.name: number for number, member in enumerate(members)}
        peers = []
        with ThreadPoolExecutor(1) as executor:
            for wire in wires.values():
                await wire.start()
            for me in range(count):
                addresses = {
                    b: members[b].address if b == me else f"127.0.0.1:{through[me, b]}"
                    for b in range(count)
                }
                identity = authority.issue(members[me].name)
                transport = GrpcTransport(
                    identity, names, addresses, limits=Limits(idle_timeout=3.0)
                )
                peers.append(Peer(network, me, prepare(experiment), transport, executor=executor))
            tasks = [asyncio.create_task(peer.run()) for peer in peers]
            try:
                await reach(peers, 5)
                for (a, b), wire in wires.items():
                    if (a in half) != (b in half):
                        wire.open.clear()
                await asyncio.sleep(CUT)
                during = [peer.finished for peer in peers]
                await reach(peers, max(during) + 3)  # both go on
                await until_received(peers, (1, 3))
                for wire in wires.values():
                    wire.open.set()
                await until_received(peers, (3, 3))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                for wire in wires.values():
                    await wire.stop()
        return peers

    async def until_received(peers: list[Peer], count: tuple[int, int]) -> None:
        async with asyncio.timeout(BROKEN):
            while {tuple(peer.rows[-1]["heard"]) for peer in peers} != {count}:
                await asyncio.sleep(0.05)

    async def reach(peers: list[Peer], round: int) -> None:
        async with asyncio.timeout(BROKEN):
            while min(peer.finished for peer in peers) < round:
                await asyncio.sleep(0.05)

    with one_thread():
        peers = asyncio.run(together())
    assert all(torch.isfinite(p.shard.members[p.me].node.params).all() for p in peers)
    # They were in different rounds when the partition healed, and are in the same now.
    rounds = [peer.round for peer in peers]
    assert max(rounds) - min(rounds) <= 1
