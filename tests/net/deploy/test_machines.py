"""Peers as processes on machines that fail."""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.machines import Machines, entering, host, two_rooms

from peerage import Experiment
from peerage.data import cache_folder
from peerage.errors import DataError
from peerage.net.deploy.up import LocalNetwork
from peerage.net.peer.network import Timeouts

pytestmark = pytest.mark.slow  # every peer is a process

CUT = float(os.environ.get("PEERAGE_CUT", "6"))  # seconds that a network is in two halves


@pytest.mark.parametrize("rooms", [((0, 1), (2, 3)), ((0,), (1, 2, 3))])
def test_a_cable_between_two_rooms_is_cut_and_restored(rooms, tmp_path):
    """Both halves continue at their own speeds, and later form one network again.

    A peer that is alone in its room waits, and counts no round.
    """
    experiment = Experiment(nodes=4, topology="complete", partition="iid", rounds=10**6)
    all_nodes = range(4)
    timeouts = Timeouts(start=600, message=300, idle=5)
    hosts = [host(me) for me in all_nodes]
    with (
        two_rooms(*rooms) as cable,
        Machines(tmp_path, experiment, timeouts, hosts, quorum=2) as network,
    ):
        for me in all_nodes:
            network.start(me, entering(cable.machines[me]))
        network.until(lambda: min(map(network.round, all_nodes)) >= 5)
        cable.cut()
        last = max(map(network.round, all_nodes)) + 1  # of which messages can have come through
        time.sleep(CUT)
        for me in (room[0] for room in rooms if len(room) == 1):
            network.until(lambda me=me: "waits for node-1" in network.log(me))
        waiting = {room[0]: network.round(room[0]) for room in rooms if len(room) == 1}
        halves = {me: [len(room) - 1, 3] for room in rooms for me in room if len(room) > 1}
        network.until(lambda: all(often(network, me, halves[me], last, 3) for me in halves))
        assert not any(often(network, me, [3, 3], last, 1) for me in all_nodes)
        assert {me: network.round(me) for me in waiting} == waiting
        cable.restore()
        rounds = [network.round(me) for me in all_nodes]
        network.until(lambda: all(often(network, me, [3, 3], rounds[me], 10) for me in all_nodes))


def often(network: Machines, me: int, received: list[int], since: int, count: int) -> bool:
    """Whether, after a round, a peer received from so many others in so many rounds."""
    rows = [row for row in network.rows(me) if row["round"] > since]
    return sum(row["heard"] == received for row in rows) >= count


def test_a_full_disk_stops_only_the_peer_that_has_it(small_disk, tmp_path):
    settings = {"nodes": 3, "topology": "complete", "partition": "iid", "model": "logistic"}
    experiment = Experiment(**settings, rounds=60, local={"epochs": 1})
    with Machines(tmp_path, experiment, Timeouts(start=600, message=300, idle=5)) as network:
        network.folders[1] = small_disk / "node-1"
        for me in range(3):
            network.start(me)
        network.until(lambda: network.round(1) >= 3)
        fill(small_disk / "filler")
        codes = network.wait()
        assert codes == [0, 2, 0]
        assert [network.round(me) for me in (0, 2)] == [60, 60]
        stopped = network.log(1).splitlines()
        what = f"disk is full while writing {small_disk}/node-1/"
        assert [line for line in stopped if what in line and "still answers others" in line]
        assert stopped[-1].startswith(f"error: {what}")
        assert stopped[-1].endswith("; free space and start the peer again")
        assert "Traceback" not in network.log(1)
        subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
        network.start(1)  # the others have left, and it does not know that they have finished
        network.until(lambda: "waiting for node-0" in network.log(1))
        assert network.round(1) < 60
        network.start(0)  # which says so
        assert network.wait() == [0, 0, 0]
        assert network.round(1) == 60


def fill(file: Path) -> None:
    """Write until the disk takes no more."""
    with open(file, "wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(1024))


def test_eight_peers_miss_no_message(tmp_path):
    """The CNN of P0, a part of MNIST; benchmarks/peers.py has 32 peers, with default deadlines."""
    try:
        experiment = Experiment(
            nodes=8,
            topology="regular:k=4",
            rounds=6,
            dataset="mnist:train=4000",
            model="mnist-cnn",
            partition="dirichlet:alpha=0.2",
            local={"steps": 5, "batch_size": 100},
            evaluation={"every": 6, "samples": 1000},
        )
        experiment.dataset.load(cache_folder())
    except DataError as error:
        pytest.skip(str(error))
    up = LocalNetwork(experiment, tmp_path / "up", timeouts=Timeouts(start=600, message=300))
    summary = up.run()
    for peer in up.watched:
        rows = peer.rows
        assert [row["round"] for row in rows] == list(range(7))
        assert {tuple(row["heard"]) for row in rows[1:]} == {(4, 4)}
        assert not any("troubles" in row for row in rows)
    assert summary["rounds"] == 6
