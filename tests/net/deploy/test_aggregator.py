"""An aggregator of DFML that is killed with kill -9 while it has the models of others."""

import pytest
from support import doomed
from support.command_line import peerage
from support.participants import participants

from peerage import DFML
from peerage.net.deploy.process import PeerProcess
from peerage.records.rows import read_metrics


@pytest.mark.slow
def test_an_aggregator_that_is_killed_costs_that_round_only(tmp_path, monkeypatch):
    nodes, rounds, training = 4, 7, tmp_path / "training"
    graph = tuple(tuple(j for j in range(nodes) if j != i) for i in range(nodes))
    turns = participants(DFML(), graph, rounds)
    dead, senders = turns[doomed.ROUND]
    assert any(turn.aggregator != dead for turn in turns[doomed.ROUND + 1 :])
    kept_by, kill = set[int](), PeerProcess.kill
    # It has the models of all senders, and does not return them.
    monkeypatch.setattr(PeerProcess, "kill", lambda peer: training.exists() and kill(peer))
    monkeypatch.setenv(doomed.FILE, str(training))
    done = peerage(
        f"up --nodes {nodes} --topology complete --partition iid --model logistic --epochs 1 "
        f"--rounds {rounds} --algorithm {doomed.ALGORITHM}:epochs_mutual=1,alpha_min=0.5 "
        f"--start-timeout 600 --message-timeout 300 --kill {dead}@{doomed.ROUND + 1} --out",
        tmp_path / "up",
    )
    assert done.code == 0, done.err
    for me in set(range(nodes)) - {dead}:
        rows = read_metrics(tmp_path / "up" / "peers" / f"node-{me}" / "metrics.jsonl")
        heard = {row["round"] - 1: row["heard"] for row in rows if row["round"]}
        assert list(heard) == [*range(rounds)]
        for round in range(doomed.ROUND, rounds):
            hub, others = turns[round]
            if hub == dead:
                assert heard[round] == [0, 1]  # all wait for it
            elif me == hub:
                assert heard[round] == [len(set(others) - {dead}), len(others)]
            else:
                assert heard[round] == ([1, 1] if me in others else [0, 0])
        for row in rows:
            turn, notes = turns[row["round"] - 1], row.get("notes", {})
            if row["round"] and me in turn.senders:
                # Only a model that comes back differs from the one that the node trained.
                kept = notes["model"] == notes["trained"]
                kept_by |= {me} if kept and row["round"] == doomed.ROUND + 1 else set()
                assert kept == (turn.aggregator == dead and row["round"] > doomed.ROUND)
                assert notes["peak"] == (notes["peak_before"] if kept else notes["model"])
    assert kept_by == set(senders)
