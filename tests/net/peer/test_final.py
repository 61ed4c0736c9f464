"""Real peers run the step after the last round, and record every evaluated model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluating import Clustered, Peaks, Personal, same
from support.networking import OverSockets, PeerHarness, run_harness, run_peers

import peerage as pg
from peerage.engine.evaluated import models_of
from peerage.engine.prepare import prepare
from peerage.net.deploy.up import LocalNetwork
from peerage.net.peer.network import Timeouts
from peerage.net.peer.peer import Peer
from peerage.records import checkpoint
from peerage.records.rows import read_metrics
from peerage.runs.saved import open_run
from peerage.runs.verify import verify
from peerage.testing import NODES, toy

KEYS = ("round", "final", "node", "accuracy", "loss", "models", "notes")


def check_same(peers: list[Peer], result: pg.Result) -> None:
    """The peers have the models and rows of the simulation."""
    for peer in peers:
        node = peer.shard.members[peer.me].node
        found = models_of(peer.world.algorithm, node)
        wanted = result.models[peer.me]
        assert list(found) == list(wanted)
        assert all(same(found[name], wanted[name]) for name in found)
        rows = [row for row in result.rows if row.get("node") == peer.me]
        mine = [{key: row[key] for key in KEYS if key in row} for row in peer.rows if "loss" in row]
        if rows:
            assert mine == [{key: row[key] for key in KEYS if key in row} for row in rows]
    sent = [row["bytes"] for row in result.rows if row["scope"] == "network"]
    assert [
        sum(rows) for rows in zip(*([r["bytes"] for r in p.rows] for p in peers), strict=True)
    ] == sent


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"faults": {"loss": 0.3}},
        {"faults": {"links": 0.3}},
        {"topology": "dynamic-regular:k=2"},
        {"topology": "complete"},
        {"noise": {"sigma": 0.1, "clip": 1.0}},
        {"evaluation": {"validation": 0.2, "every": 2}},
    ],
    ids=str,
)
def test_the_final_step_of_a_network_is_that_of_the_simulator(changes):
    experiment = toy(Peaks(), **changes)
    peers = run_peers(experiment)
    check_same(peers, pg.run(experiment))
    assert all(peer.rows[-1]["final"] for peer in peers)
    assert [dict(peer.counters) for peer in peers] == [{}] * NODES


@pytest.mark.parametrize("faults", [{"leave": "2@3"}, {"join": "2@3"}, {"leave": "4@2"}], ids=str)
def test_only_nodes_of_the_last_round_take_part(faults):
    experiment = toy(Peaks(), faults=faults)
    result = pg.run(experiment)
    peers = run_peers(experiment)
    for peer in peers:
        found = peer.shard.members[peer.me].node.params
        assert torch.equal(found, result.parameters[peer.me])
    present = {row["node"] for row in result.rows if row.get("final") and row["scope"] == "node"}
    assert {peer.me for peer in peers if peer.rows[-1].get("final")} == present


@pytest.mark.slow
def test_the_same_over_real_connections(tmp_path):
    experiment = toy(Peaks())

    def ready(me: int) -> Any:
        return prepare(experiment).restrict_to_node(me)

    check_same(
        run_peers(experiment, transports=OverSockets(tmp_path), worlds=ready), pg.run(experiment)
    )


@pytest.mark.parametrize("algorithm", [Personal(), Clustered()], ids=lambda one: type(one).__name__)
def test_clients_of_a_real_hub_keep_their_models(algorithm):
    experiment = toy(algorithm)
    check_same(run_peers(experiment), pg.run(experiment))


def test_a_peer_that_was_killed_before_the_final_step_does_it_once(tmp_path):
    experiment = toy(Peaks(), rounds=4)
    result = pg.run(experiment)
    peers = run_peers(experiment, tmp_path)
    for peer in peers:  # as if all had been killed between the last round and the final step
        final = tmp_path / str(peer.me) / "checkpoint" / "round-000004-final"
        assert checkpoint.load(tmp_path / str(peer.me)).final
        for file in final.iterdir():
            file.unlink()
        final.rmdir()
    again = run_peers(experiment, tmp_path)
    for peer in again:
        node = peer.shard.members[peer.me].node
        assert same(node.weights, result.models[peer.me]["regular"])
        assert [(row["round"], row.get("final")) for row in peer.rows] == [(4, True)]
        rows = read_metrics(tmp_path / str(peer.me) / "metrics.jsonl")
        assert [row["round"] for row in rows] == [0, 1, 2, 3, 4, 4]
    once_more = run_peers(experiment, tmp_path)  # nothing is left to do
    for peer in once_more:
        assert peer.rows == []
        assert same(peer.shard.members[peer.me].node.weights, result.models[peer.me]["regular"])


def test_a_peer_that_missed_the_last_round_holds_up_nobody(tmp_path):
    experiment = toy(Peaks(), rounds=6, topology="complete")

    async def kill_one(stage: PeerHarness) -> None:
        await stage.until(1, 2)
        await stage.kill(1)
        del stage.tasks[1], stage.peers[1]

    left = run_harness(experiment, tmp_path, kill_one, timeouts=Timeouts(600.0, 300.0, 0.3))
    assert len(left) == NODES - 1
    for peer in left:
        last = peer.rows[-1]
        assert (last["round"], last["final"], last["heard"]) == (6, True, [NODES - 2, NODES - 1])
    models = [peer.shard.members[peer.me].node.params for peer in left]
    assert all(torch.equal(models[0], other) for other in models)


@pytest.mark.slow
def test_processes_record_and_export_what_a_simulation_does(tmp_path):
    source = Path(__file__).parents[2] / "support" / "evaluating.py"
    experiment = pg.Experiment(
        algorithm=f"{source}:Peaks",
        nodes=3,
        topology="ring",
        rounds=2,
        partition="iid",
        model="logistic",
    )
    timeouts = Timeouts(start=600.0, message=300.0)
    LocalNetwork(experiment, tmp_path / "up", timeouts).run()
    assert verify(tmp_path / "up").difference == ""
    record = pg.RunRecord.load(tmp_path / "up")
    assert record.network[-1]["final"]
    result = pg.run(experiment)
    assert record.summary["models"]["regular"] == pytest.approx(result.summary["models"]["regular"])
    opened = open_run(tmp_path / "up")
    for node in range(3):
        for name in ("peak", "regular"):
            assert torch.equal(opened.model(node, name).params, result.models[node][name].params)
