"""A peer without a quorum pauses, reports it, and counts no round."""

import asyncio
import json
import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.machines import Machines
from support.networking import BROKEN, PeerHarness, run_harness, run_peers

import peerage as pg
from peerage import DecAvg, FedAvg, Local
from peerage.errors import InputError, PeerageError, WorkerDied
from peerage.net.deploy.process import PeerProcess, PeerProgress
from peerage.net.deploy.up import LocalNetwork
from peerage.net.peer.network import Timeouts
from peerage.net.peer.peer import Peer
from peerage.net.peer.recorder import PAUSED
from peerage.testing import toy

THREE = {"nodes": 3, "partition": "iid", "topology": "complete"}
WAITING = "needed: round"
SOON = Timeouts(start=1.0, message=300.0, idle=1.0)  # for peers that start without the others


async def waiting(peer: Peer) -> None:
    while not peer.state.startswith("waiting for node-"):
        await asyncio.sleep(0.01)


async def searches(count: int = 5) -> None:
    """Let a peer search for others some times."""
    await asyncio.sleep(count * 0.2)


@contextmanager
def nothing_computed(harness: PeerHarness) -> Iterator[None]:
    """Pause all peers: they use one thread, which is busy meanwhile."""
    end = threading.Event()
    harness.executor.submit(end.wait)
    try:
        yield
    finally:
        end.set()


def cut_off(harness: PeerHarness, *peers: int) -> None:
    all_nodes = range(len(harness.network.members))
    harness.memory.cut = {
        (a, b) for a in all_nodes for b in all_nodes if (a in peers) != (b in peers)
    }


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.message for record in caplog.records if text in record.message]


@pytest.mark.parametrize("algorithm", [DecAvg(), Local()])
@pytest.mark.slow
def test_a_peer_that_has_lost_all_others_pauses_and_goes_on_with_them(algorithm, tmp_path, caplog):
    """Even if it would need none of their messages."""
    found = {}

    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 5)
        cut_off(harness, 0)
        await waiting(harness.peers[0])
        found["before"] = harness.peers[0].finished
        await harness.until(1, 12)  # the others are two, and go on
        with nothing_computed(harness):  # or they might be at the end before the first is back
            await searches()
            found["paused"] = harness.peers[0].finished
            found["state"] = harness.peers[0].responder.status(1, "").state
            found["file"] = json.loads((tmp_path / "0" / PAUSED).read_text())
            found["alive"] = harness.peers[0].alive
            harness.memory.cut = set()

    caplog.set_level(logging.INFO, "peerage.peer")
    peers = run_harness(toy(algorithm, rounds=60, **THREE), tmp_path, act)
    assert found["paused"] == found["before"] < 12
    assert found["state"] == "waiting for node-1, node-2"
    assert found["file"] == {"state": found["state"]}
    assert found["alive"] == 0
    assert not (tmp_path / "0" / PAUSED).exists()
    assert [peer.finished for peer in peers] == [60] * 3
    if isinstance(
        algorithm, DecAvg
    ):  # it skipped what it had missed, and its messages arrived again
        assert len(peers[0].rows) < 61
        assert not [row for row in peers[0].rows[1:] if row["heard"][0] == 0][1:]
        assert peers[1].rows[-1]["heard"] == [2, 2]
    [line] = lines(caplog, WAITING)
    assert line.endswith(
        " waits for "
        + ", ".join(f"node-{n} ({peers[0].network.members[n].address})" for n in (1, 2))
    )
    assert line.startswith("in contact with 1 of 3 peers, 2 needed: round ")
    assert len(lines(caplog, "enough peers are in contact again, continuing with round")) == 1


def test_a_message_that_waits_for_all_others_is_not_given_up(tmp_path):
    """Contact is lost in the middle of a round: with the others back, nothing of it is missing."""

    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 5)
        harness.memory.cut = {(a, b) for a in range(3) for b in range(3) if a != b}
        for peer in harness.peers.values():
            await waiting(peer)
        harness.memory.cut = set()

    experiment = toy(DecAvg(), rounds=12, **THREE)
    calm = Timeouts(start=100.0, message=100.0, idle=30.0)
    peers = run_harness(experiment, tmp_path, act, timeouts=calm)
    result = pg.run(experiment)
    for peer, wanted in zip(peers, result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)


@pytest.mark.parametrize("algorithm", [DecAvg(), FedAvg()])
@pytest.mark.slow
def test_a_lone_peer_of_a_stopped_network_waits_until_others_start(algorithm, tmp_path, caplog):
    found = {}

    async def act(harness: PeerHarness) -> None:
        all_nodes = list(harness.peers)
        await harness.until(0, 5)
        for me in all_nodes:
            await harness.kill(me)
        saved = harness.peers[0].finished
        caplog.clear()
        harness.start(0)
        await waiting(harness.peers[0])
        await searches()
        assert harness.peers[0].finished <= saved  # what was not saved is run again
        assert not harness.tasks[0].done()
        found["lines"] = lines(caplog, "waits for node-")
        for me in all_nodes[1:]:
            harness.start(me)

    settings = {"nodes": 3, "partition": "iid"} if algorithm.with_hub else THREE
    peers = run_harness(toy(algorithm, rounds=30, **settings), tmp_path, act, timeouts=SOON)
    assert [peer.finished for peer in peers] == [30] * len(peers)
    assert len(found["lines"]) == 1
    assert [row["heard"][0] for row in peers[0].rows if row["round"] == 30] == [
        1 if algorithm.with_hub else 2
    ]


@pytest.mark.slow
def test_a_peer_that_never_reached_the_others_does_not_begin(tmp_path, caplog):
    async def act(harness: PeerHarness) -> None:
        for me in (1, 2):
            await harness.kill(me)
        await waiting(harness.peers[0])
        await searches()
        assert harness.peers[0].finished == 0
        for me in (1, 2):
            harness.start(me)

    quick = Timeouts(start=0.3, message=5.0, idle=1.0)
    peers = run_harness(toy(DecAvg(), rounds=10, **THREE), tmp_path, act, timeouts=quick)
    assert [peer.rows[-1]["round"] for peer in peers] == [10] * 3
    assert len(lines(caplog, "waits for node-1")) == 1


# Who may go on alone


def test_a_network_of_one_node():
    [peer] = run_peers(toy(DecAvg(), nodes=1, partition="iid", topology="complete", rounds=3))
    assert peer.finished == 3


def test_rounds_in_which_only_one_peer_is_scheduled():
    """Node 0 is alone in rounds 1 and 2, and again in the last two."""
    experiment = toy(DecAvg(), rounds=8, faults={"join": "1@3, 2@3", "leave": "1@7, 2@7"}, **THREE)
    peers = run_peers(experiment)
    result = pg.run(experiment)
    for peer, wanted in zip(peers, result.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
    assert [row["heard"][1] for row in peers[0].rows] == [0, 0, 0, 2, 2, 2, 2, 0, 0]


@pytest.mark.slow
def test_a_peer_that_joins_later_waits_for_the_running_peers(tmp_path):
    async def act(harness: PeerHarness) -> None:
        await harness.until(0, 2)
        for me in (0, 1):
            await harness.kill(me)
        await waiting(harness.peers[2])
        reached = harness.peers[2].round
        await searches()
        assert harness.peers[2].round == reached < 40
        for me in (0, 1):
            harness.start(me)

    experiment = toy(DecAvg(), rounds=50, faults={"join": "2@40"}, **THREE)
    peers = run_harness(experiment, tmp_path, act, timeouts=SOON)
    assert [peer.finished for peer in peers] == [50] * 3


def test_finished_peers_say_so_and_the_last_one_finishes_without_them(tmp_path, monkeypatch):
    """Peers without messages do not wait for each other."""
    real = Peer._run_round

    async def run_slowly(self: Peer, round: int) -> None:
        if self.me == 2:
            while round >= 3 and not self.tracker.finished >= {0, 1}:
                await asyncio.sleep(0.01)
        await real(self, round)

    async def act(harness: PeerHarness) -> None:
        pass

    monkeypatch.setattr(Peer, "_run_round", run_slowly)
    peers = run_harness(toy(Local(), rounds=10, **THREE), tmp_path, act)
    assert [peer.finished for peer in peers] == [10] * 3
    assert peers[2].tracker.finished == {0, 1}


@pytest.mark.slow
def test_a_peer_that_missed_the_end_waits_until_another_reports_it(tmp_path):
    """A finished peer that is started again says that it has finished, and leaves."""

    async def act(harness: PeerHarness) -> None:
        await harness.until(2, 5)
        await harness.kill(2)
        await asyncio.wait([harness.tasks[0], harness.tasks[1]])
        harness.start(2)
        await waiting(harness.peers[2])
        await searches()
        assert not harness.tasks[2].done()
        harness.start(1)

    peers = run_harness(toy(DecAvg(), rounds=20, **THREE), tmp_path, act, timeouts=SOON)
    assert [peer.finished for peer in peers] == [20] * 3
    assert peers[2].tracker.finished == {1}
    assert len(read_rounds(tmp_path / "2")) == 21


def read_rounds(folder: Path) -> list[int]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["round"] for row in rows]


def test_a_finished_peer_that_restarts_is_not_in_contact(tmp_path):
    """Its folder may have been lost: it is a peer like any other then."""
    experiment = toy(DecAvg(), rounds=2, **THREE)
    [peer, *_] = run_peers(experiment)
    others = peer.tracker
    others.finished.clear()
    for one in (1, 2):
        asyncio.run(peer.answer(b'{"ask": "finished", "incarnation": "one"}', one))
        # Although they are unreachable.
        assert others.view(0).in_contact() == list(range(1, one + 1))
        assert others.view(0).may_run()
    for one in (1, 2):
        others.note_incarnation(one, "another incarnation")
    assert others.view(0).in_contact() == []
    assert others.view(0).needed_contacts() == [1, 2]


def test_a_peer_of_another_experiment_is_no_contact(tmp_path):
    experiment = toy(DecAvg(), rounds=1, **THREE)
    [peer, *_] = run_peers(experiment)
    peer.tracker.finished = {1, 2}
    peer.tracker.mismatched_peers[1] = "the learning rate"
    assert peer.tracker.view(0).in_contact() == [2]
    peer.tracker.finished.clear()
    assert peer.tracker.view(0).needed_contacts() == [2]


# Real processes


@pytest.mark.slow
def test_a_process_that_missed_the_end_of_all_others_ends_too(tmp_path):
    """It was down when they finished and left, so no peer can tell it."""
    experiment = pg.Experiment(**THREE, model="logistic", rounds=30, local={"epochs": 1})
    timeouts = Timeouts(start=30, message=30, idle=2, alone=3)
    with Machines(tmp_path, experiment, timeouts) as network:
        for me in range(3):
            network.start(me)
        network.until(lambda: network.round(2) >= 3, BROKEN)
        killed = network.processes.pop(2)
        killed.kill()
        killed.wait(BROKEN)
        assert network.wait(BROKEN) == [0, 0]
        network.processes.clear()
        file = tmp_path / "network.toml"
        file.write_text(file.read_text().replace("start = 30", "start = 2"))
        network.start(2)
        assert network.wait(BROKEN) == [1]
        reached = network.round(2)
        unrun = f"did not run rounds {reached + 1}-30; start it again to continue"
        assert unrun in network.log(2)
        assert "no other peer could be reached for 3 s; they may have finished" in network.log(2)
        assert reached < 30
        assert not (network.folders[2] / "summary.json").exists()
        assert not (network.folders[2] / PAUSED).exists()
        network.processes.clear()
        for me in (2, 0):  # a finished peer that returns tells it
            network.start(me)
        assert network.wait(BROKEN) == [0, 0]
        assert network.round(2) == 30


STAYING = Timeouts(start=BROKEN, message=30, idle=2, stay=BROKEN)


@pytest.mark.slow
def test_processes_that_have_finished_stay_for_one_that_restarts(tmp_path):
    """It was down when they finished. They stay for a while, and it runs the rest of its rounds."""
    experiment = pg.Experiment(**THREE, model="logistic", rounds=30, local={"epochs": 1})
    with Machines(tmp_path, experiment, STAYING) as network:
        for me in range(3):
            network.start(me)
        network.until(lambda: network.round(2) >= 3, BROKEN)
        killed = network.processes.pop(2)
        killed.kill()
        killed.wait(BROKEN)
        network.until(lambda: all("staying up to" in network.log(me) for me in (0, 1)), BROKEN)
        assert network.round(2) < 30
        network.start(2)
        assert network.wait(BROKEN) == [0, 0, 0]
        assert network.round(2) == 30
        assert "Traceback" not in "".join(map(network.log, range(3)))


@pytest.mark.slow
def test_a_process_that_stays_for_another_has_finished_when_it_is_stopped(tmp_path):
    experiment = pg.Experiment(**THREE, model="logistic", rounds=30, local={"epochs": 1})
    with Machines(tmp_path, experiment, STAYING) as network:
        for me in range(3):
            network.start(me)
        network.until(lambda: network.round(2) >= 3, BROKEN)
        killed = network.processes.pop(2)
        killed.kill()
        killed.wait(BROKEN)
        network.until(lambda: all("staying up to" in network.log(me) for me in (0, 1)), BROKEN)
        for process in network.processes.values():
            process.terminate()
        assert network.wait(BROKEN) == [0, 0]
        assert all((network.folders[me] / "summary.json").exists() for me in (0, 1))


def test_a_peer_may_wait_for_ever(tmp_path):
    assert Timeouts(alone=math.inf).alone == math.inf
    for settings in ({"alone": 0.0}, {"alone": math.nan}, {"idle": math.inf}):
        with pytest.raises(InputError, match="must be a number of seconds above 0"):
            Timeouts(**settings)


@pytest.mark.slow
def test_one_process_of_a_stopped_network_runs_no_round_alone(tmp_path):
    settings = {"nodes": 4, "topology": "ring", "partition": "iid", "model": "logistic"}
    experiment = pg.Experiment(**settings, rounds=40, local={"epochs": 1})
    with Machines(tmp_path, experiment, Timeouts(start=6, message=30, idle=2)) as network:
        for me in range(4):
            network.start(me)
        network.until(lambda: min(map(network.round, range(4))) >= 5, BROKEN)
        for process in network.processes.values():
            process.terminate()
        assert network.wait(BROKEN) == [130] * 4
        network.processes.clear()
        reached = network.round(0)
        assert reached < 40
        for start in (1, 2):  # it can be stopped while it waits, and started again
            network.start(0)
            network.until(lambda start=start: network.log(0).count(WAITING) == start, BROKEN)
            time.sleep(2)  # ten searches at the others, or hundreds of rounds
            assert network.processes[0].poll() is None
            assert network.round(0) <= reached
            assert not (network.folders[0] / "summary.json").exists()
            assert json.loads((network.folders[0] / PAUSED).read_text()) == {
                "state": "waiting for node-1, node-2, node-3"
            }
            if start == 1:
                network.processes[0].terminate()
                assert network.wait(BROKEN) == [130]
        assert network.log(0).count(WAITING) == 2
        for me in (1, 2, 3):
            network.start(me)
        assert network.wait(BROKEN) == [0] * 4
        assert [network.round(me) for me in range(4)] == [40] * 4
        # At most the round in which the others were stopped, and those before all four were back.
        alone = [row["round"] for row in network.rows(0)[1:] if row["heard"][0] == 0]
        assert len(alone) <= 2
        assert "Traceback" not in network.log(0)


# A network on this machine


class Process:
    """A process as `up` sees it: still running, or ended with a code."""

    def __init__(self, code: int | None = None) -> None:
        self.returncode = code

    def poll(self) -> int | None:
        return self.returncode


def watched_by(
    up: LocalNetwork, home: Path, pauses: list[str | None], codes: list[int | None]
) -> None:
    up.watched = []
    for number, (pause, code) in enumerate(zip(pauses, codes, strict=True)):
        folder = home / str(number)
        folder.mkdir(parents=True)
        if pause is not None:
            (folder / PAUSED).write_text(json.dumps({"state": pause}))
        up.watched.append(
            PeerProcess(number, PeerProgress(f"node-{number}", round=3), folder, Process(code))
        )
    for peer in up.watched:
        peer.read, peer.file = 1, 7  # it has written rows in this start
        peer.look()


ALONE = "waiting for node-1, node-2"


def test_up_shows_waiting_peers_and_ends_without_the_last(tmp_path):
    up = LocalNetwork(pg.Experiment(nodes=3, rounds=50), tmp_path)
    watched_by(up, tmp_path / "a", [ALONE, None, None], [None, None, 0])
    assert [peer.seen.state for peer in up.watched] == [ALONE, "running", "finished"]
    up._check_progress()
    watched_by(up, tmp_path / "b", [ALONE, ALONE, None], [None, None, 0])
    up._check_progress()  # they will find each other
    watched_by(up, tmp_path / "c", [ALONE, None, None], [None, -9, 0])
    with pytest.raises(WorkerDied, match="node-1 was killed by signal 9"):
        up._check_progress()
    up.watched[1].killed = True  # as planned
    text = "node-0 is waiting for node-1, node-2 in round 4, and too many others have ended"
    with pytest.raises(PeerageError, match=text):
        up._check_progress()


def test_up_ends_if_the_peers_that_are_left_are_too_few(tmp_path):
    for quorum, codes, stuck in (
        ("majority", [None, None, -9, -9], True),
        (2, [None, None, -9, -9], False),
        ("majority", [None, None, 0, -9], False),  # a finished peer is a contact
    ):
        up = LocalNetwork(pg.Experiment(nodes=4, rounds=50), tmp_path, quorum=quorum)
        watched_by(up, tmp_path / f"{quorum} {codes}", [ALONE, ALONE, None, None], codes)
        for peer in up.watched:
            peer.killed = peer.process.returncode == -9
            peer.look()
        if stuck:
            with pytest.raises(PeerageError, match="or lower --quorum"):
                up._check_progress()
        else:
            up._check_progress()


def test_up_restarts_a_peer_early_if_all_others_wait_for_it(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        LocalNetwork, "_start", lambda up, peer, secret: started.append(peer.number)
    )
    up = LocalNetwork(pg.Experiment(nodes=3, rounds=50), tmp_path)
    for name, pauses, due in (("a", [None, ALONE, None], []), ("b", [ALONE, ALONE, None], [2])):
        watched_by(up, tmp_path / name, pauses, [None, None, -9])
        assert up._kill_and_restart({}, {2: 40}, tmp_path) == bool(due)
        assert started == due
