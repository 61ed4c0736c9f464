"""Clusters between real peers: the simulator's bits, and rows of groups from the peers' files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters import experiment
from support.command_line import peerage
from support.networking import run_peers

import peerage as pg
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.net.deploy.collect import report_of
from peerage.net.peer.private_data import prepare_own
from peerage.records.rows import read_metrics
from peerage.runs.facts import RunFacts
from peerage.runs.summary import group_rows
from peerage.runs.verify import first_difference


def groups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["scope"] == "group"]


def collected(made: pg.Experiment, peers: list[Any]) -> list[dict[str, Any]]:
    """The rows of groups that are made from the files of all peers."""
    world, found = prepare(made), []
    for round in range(made.rounds + 1):
        rows = [json.loads(json.dumps(peer.rows[round])) for peer in peers]
        found += group_rows(RunFacts.of(world), round, report_of(rows))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clusters": "2/2:labels:keep=0-4+5-9"},
        {"clusters": {"sizes": [2, 2], "shift": "rotate:angles=0+30", "shuffle": True}},
        {"algorithm": "fedavg", "topology": "star:centre=last"},
        {"clusters": None, "model": ["logistic", "mlp:hidden=8"]},
    ],
    ids=str,
)
def test_real_peers_end_with_the_bits_and_groups_of_the_simulator(changes: dict[str, Any]) -> None:
    made = experiment(**changes)
    result = pg.run(made)
    peers = run_peers(made, worlds=lambda me: prepare(made).restrict_to_node(me))
    for peer in peers:
        params = peer.shard.members[peer.me].node.params
        if params.numel():
            assert torch.equal(params, result.parameters[peer.me])
    rows = collected(made, peers)
    assert rows
    assert first_difference(rows, groups(result.rows)) == ""


def test_private_data_keep_their_form_unless_asked() -> None:
    mine = pg.in_memory(
        torch.rand(30, 1, 8, 8), torch.arange(30) % 10, torch.rand(9, 1, 8, 8), torch.arange(9)
    )
    made = experiment(clusters="2/2:rotate")
    kept = prepare_own(made, 3, mine)
    turned = prepare_own(made, 3, mine, shift=True)
    for world, turns in ((kept, 0), (turned, 2)):
        assert world.cluster_of(3) == 1
        for found, given in ((world.data_of(3), mine.train_x), (world.test_of(3), mine.test_x)):
            assert torch.equal(found.x.permute(0, 3, 1, 2), given.rot90(turns, (2, 3)))
    for fraction in ("true", "false"):
        labels = experiment(clusters=f"2/2:labels:keep=0-4+5-9,fraction={fraction}")
        assert sorted(set(prepare_own(labels, 3, mine).data_of(3).y.tolist())) == list(range(10))
        some = prepare_own(labels, 3, mine, shift=True)
        assert set(some.data_of(3).y.tolist()) == {5, 6, 7, 8, 9}
        assert set(some.test_of(3).y.tolist()) == {5, 6, 7, 8}
    with pytest.raises(InputError, match="--shift requires clusters"):
        prepare_own(experiment(clusters=None), 3, mine, shift=True)


@pytest.mark.slow
def test_a_network_of_processes_records_the_groups(tmp_path: Path) -> None:
    line = (
        "--nodes 3 --clusters 2/1:rotate --topology ring --partition iid --model logistic "
        "--epochs 1 --rounds 2"
    )
    done = peerage(f"up {line} --start-timeout 600 --message-timeout 300 --out", tmp_path / "up")
    assert done.code == 0, done.err
    assert "cluster 1 (180°)" in done.out
    simulated = pg.run(pg.Experiment.from_toml((tmp_path / "up" / "experiment.toml").read_text()))
    rows = read_metrics(tmp_path / "up" / "metrics.jsonl")
    assert groups(rows) == groups(simulated.rows)
    assert pg.RunRecord.load(tmp_path / "up").summary["digest"] == simulated.digest
    assert pg.verify(tmp_path / "up").same
