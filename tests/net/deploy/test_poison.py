"""A member with a valid certificate sends harmful messages to real processes, over connections."""

import json

import pytest
from support import poisoners
from support.machines import Machines
from support.processes import TIMEOUT

import peerage as pg
from peerage.net.peer.network import Timeouts

pytestmark = pytest.mark.slow  # every peer is a process

TIMEOUTS = Timeouts(start=300, message=120, idle=10)
SETTINGS = {"nodes": 4, "topology": "complete", "partition": "iid", "model": "logistic"}
HUGE = {"x": 3e38}


def run_attacked(home, plans, algorithm=poisoners.ALGORITHM, rounds=10, **limits):
    """Run four processes, of which node 3 follows the plans; returns what the others left."""
    experiment = pg.Experiment(algorithm=algorithm, rounds=rounds, **SETTINGS)
    with Machines(home, experiment, TIMEOUTS) as network:
        file = home / "network.toml"
        lines = "".join(f"{key} = {value}\n" for key, value in limits.items())
        file.write_text(lines + file.read_text())
        with poisoners.poisoning(plans):
            for me in range(4):
                network.start(me)
        codes = network.wait(TIMEOUT)
        logs = [network.log(me) for me in range(3)]
        assert codes[:3] == [0, 0, 0], "\n".join(logs)
        summaries = [json.loads((f / "summary.json").read_text()) for f in network.folders[:3]]
        return logs, summaries, [network.rows(me) for me in range(3)]


def test_one_huge_message_ends_nobody_and_only_its_sender_is_banned(tmp_path):
    """Node 3 poisons, and would poison again; it cannot get another peer banned."""
    plans = {"3": {"2": HUGE, "5": HUGE}}
    logs, summaries, rows = run_attacked(tmp_path, plans)
    for log, summary, own in zip(logs, summaries, rows, strict=True):
        assert (summary["state"], summary["skipped"]) == ("finished", 1)
        assert summary["missed"] == "3"
        assert log.count("ignoring node-3 from now on: its message alone made a round fail") == 1
        assert log.count("from now on") == 1
        assert [row["heard"] for row in own[-3:]] == [[2, 2]] * 3
        assert own[-1]["accuracy"] > 0.8


def test_curvature_and_numbers_of_examples_buy_no_weight(tmp_path):
    plans = {"3": {"2": {"h": 1e30, "x": 7.0}, "4": {"examples": 10**9, "x": 7.0}}}
    logs, summaries, rows = run_attacked(
        tmp_path, plans, poisoners.CURVED, rounds=6, max_examples=2000
    )
    for log, summary, own in zip(logs, summaries, rows, strict=True):
        assert summary["missed"] == ""
        assert "rejected a message of node-3 (bound): tensor 'h' of node 3 has norm" in log
        assert [row["heard"] for row in own if row["round"] in (3, 5)] == [[2, 3]] * 2
        assert own[-1]["accuracy"] > 0.8
        # A sender may miss the reason and try again, so a rejection can count twice, and later.
        rejected = {row["round"] for row in own if "bound" in row.get("troubles", {})}
        assert {3, 5} <= rejected <= {3, 4, 5, 6}
