"""A quorum of real processes: one that is frozen and returns, and one that lies about its round.

tests/net/peer/test_alone.py starts one process of a stopped network.
"""

import json
import signal

import pytest
from support import liars
from support.command_line import error_line, peerage
from support.machines import Machines
from support.processes import TIMEOUT

import peerage as pg
from peerage.net.peer.network import Network, Timeouts

pytestmark = pytest.mark.slow  # every peer is a process

TIMEOUTS = Timeouts(start=300, message=60, idle=2)
SETTINGS = {"topology": "complete", "partition": "iid", "model": "logistic"}


def test_a_frozen_peer_returns_to_the_round_of_the_others(tmp_path):
    """For the others, a stopped process is a link that is cut."""
    experiment = pg.Experiment(nodes=4, rounds=120, **SETTINGS)
    with Machines(tmp_path, experiment, TIMEOUTS) as network:
        for me in range(4):
            network.start(me)
        network.until(lambda: min(map(network.round, range(4))) >= 5)
        network.processes[3].send_signal(signal.SIGSTOP)
        reached = network.round(3)
        network.until(lambda: min(map(network.round, range(3))) >= reached + 20)
        network.processes[3].send_signal(signal.SIGCONT)
        assert network.wait(TIMEOUT) == [0] * 4
        assert [network.round(me) for me in range(4)] == [120] * 4
        summaries = [json.loads((f / "summary.json").read_text()) for f in network.folders]
        assert [summary["state"] for summary in summaries] == ["finished"] * 4
        assert [summary["missed"] for summary in summaries[:3]] == [""] * 3  # they went on
        assert summaries[3]["skipped"] >= 10
        assert summaries[3]["missed"]
        assert "fell behind: skipping from round" in network.log(3)
        assert network.log(0).count("node-3 is unreachable, continuing round") == 1
        assert network.rows(0)[-1]["heard"] == [3, 3]  # it is one of them again


def test_two_of_five_peers_are_killed_for_good(tmp_path):
    experiment = pg.Experiment(nodes=5, rounds=40, **SETTINGS)
    with Machines(tmp_path, experiment, TIMEOUTS) as network:
        for me in range(5):
            network.start(me)
        network.until(lambda: min(map(network.round, range(5))) >= 5)
        for me in (1, 4):
            network.processes[me].kill()
            network.processes[me].wait(TIMEOUT)
        survivors = (0, 2, 3)
        assert [network.processes[me].wait(TIMEOUT) for me in survivors] == [0] * 3
        rows = [network.rows(me) for me in survivors]
        logs = [network.log(me) for me in survivors]
    assert all([row["round"] for row in own] == list(range(41)) for own in rows)
    for log in logs:
        for name in ("node-1", "node-4"):  # each is named once, not in every round
            assert log.count(f"{name} is unreachable, continuing round") == 1
    mean = sum(own[-1]["accuracy"] for own in rows) / 3
    assert mean == pytest.approx(pg.run(experiment).accuracy, abs=0.01)


@pytest.mark.parametrize("nodes", [3, 2])
def test_a_liar_cannot_end_a_run(nodes, tmp_path):
    """Of three peers, the honest run all rounds; of two, the one that was fooled says so."""
    experiment = pg.Experiment(algorithm=liars.ALGORITHM, nodes=nodes, rounds=40, **SETTINGS)
    with Machines(tmp_path, experiment, TIMEOUTS) as network:
        with liars.lying(39):
            network.start(nodes - 1)
        for me in range(nodes - 1):
            network.start(me)
        codes = [network.processes[me].wait(TIMEOUT) for me in range(nodes - 1)]
        summaries = [json.loads((f / "summary.json").read_text()) for f in network.folders[:-1]]
        last = network.log(0).splitlines()[-1]
    if nodes == 3:
        assert codes == [0, 0]
        assert [(s["state"], s["missed"], s["skipped"]) for s in summaries] == [
            ("finished", "", 0)
        ] * 2
    else:
        assert codes == [1]
        [summary] = summaries
        assert summary["state"] == "skipped rounds"
        assert summary["skipped"] > 20
        assert last.startswith(f"error: skipped {summary['skipped']} of 40 rounds to catch up")


def test_the_quorum_of_an_exported_network(tmp_path):
    hosts, out = tmp_path / "hosts.txt", tmp_path / "deploy"
    hosts.write_text("10.0.0.1\n")
    line = f"export --nodes 3 --topology ring --model logistic --hosts {hosts} --out {out} --quorum"
    assert "quorum must be majority or 1 to 3, the number of peers, got 4" in error_line(
        peerage(f"{line} 4")
    )
    assert not out.exists()
    assert peerage(f"{line} 2").code == 0
    assert Network.load(out / "node-0" / "network.toml").quorum == 2
    file = out / "node-1" / "network.toml"
    assert "quorum = 2\n" in file.read_text()
    file.write_text(file.read_text().replace("quorum = 2\n", ""))  # as in earlier versions
    assert Network.load(file).quorum == "majority"
