"""Rows of groups: each cluster on its own test set, with confusion counts, in every engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.clusters import experiment

import peerage as pg
from peerage.engine.groups import grouped_by
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.runs.run import Result
from peerage.runs.verify import OF_ENGINE


def groups(result: Any, **wanted: Any) -> list[dict[str, Any]]:
    rows = getattr(result, "rows", result)
    return [
        row
        for row in rows
        if row["scope"] == "group" and all(row[key] == value for key, value in wanted.items())
    ]


def predictions(result: Result, node: int, test: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = test.x.permute(0, 3, 1, 2)
    with torch.no_grad():
        return result.module(node)(x).argmax(1), test.y


def test_a_group_is_its_nodes_each_on_its_own_test_set() -> None:
    made = experiment()
    result, world = pg.run(made), prepare(made)
    for cluster, nodes in ((0, [0, 1, 2]), (1, [3])):
        [row] = groups(result, round=2, group=cluster)
        counts = np.zeros((10, 10), dtype=int)
        accuracies = []
        for node in nodes:
            guessed, truth = predictions(result, node, world.test_of(node))
            accuracies.append(float((guessed == truth).double().mean()))
            for label, guess in zip(truth.tolist(), guessed.tolist(), strict=True):
                counts[label, guess] += 1
        assert row["confusion"] == counts.tolist()
        assert (row["by"], row["nodes"]) == ("cluster", len(nodes))
        assert row["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-12)
        assert (row["accuracy_min"], row["accuracy_max"]) == (min(accuracies), max(accuracies))
        mine = [r for r in result.rows if r["scope"] == "node" and r["round"] == 2]
        assert [r["accuracy"] for r in mine if r["node"] in nodes] == accuracies
        assert row["loss"] == pytest.approx(np.mean([mine[node]["loss"] for node in nodes]))
    assert len(groups(result)) == 3 * 2  # rounds 0, 1 and 2
    assert result.rows[-1]["scope"] == "network"
    frame = result.frame("group")
    assert frame[frame["group"] == 1]["accuracy"].tolist() == [
        row["accuracy"] for row in groups(result, group=1)
    ]
    final = result.summary["groups"]
    assert [row["accuracy"] for row in final] == [row["accuracy"] for row in groups(result)[-2:]]
    assert not any("confusion" in row for row in final)


def test_nothing_changes_without_groups() -> None:
    plain = pg.run(experiment(clusters=None))
    assert groups(plain) == []
    assert "groups" not in plain.summary
    # A shift that does nothing changes no bit, and adds rows only.
    same = pg.run(experiment(clusters="3/1:none"))
    assert same.digest == plain.digest
    kept = [row for row in same.rows if row["scope"] != "group"]
    for a, b in zip(plain.rows, kept, strict=True):
        assert {k: v for k, v in a.items() if k not in OF_ENGINE} == {
            k: v for k, v in b.items() if k not in OF_ENGINE
        }


def test_rounds_without_evaluation_have_no_groups() -> None:
    result = pg.run(experiment(rounds=4, evaluation={"every": 2}))
    assert sorted({row["round"] for row in groups(result)}) == [0, 2, 4]


@pytest.mark.slow
def test_groups_are_the_same_with_two_workers() -> None:
    for changes in ({}, {"model": ["logistic", "mlp:hidden=8"]}, {"algorithm": "fedavg"}):
        if "algorithm" in changes:
            changes = changes | {"topology": "star:centre=last"}
        one, two = (
            pg.run(experiment(**changes, engine=engine))
            for engine in ({"name": "serial"}, {"name": "pool", "workers": 2})
        )
        assert groups(one) == groups(two)
        assert one.digest == two.digest


def test_architectures_are_groups_as_well() -> None:
    result = pg.run(experiment(clusters=None, model=["logistic", "mlp:hidden=8"]))
    rows = groups(result, round=2)
    assert [(row["by"], row["group"], row["nodes"]) for row in rows] == [
        ("architecture", "logistic-0", 2),
        ("architecture", "mlp-1", 2),
    ]
    assert [np.sum(row["confusion"]) for row in rows] == [2 * 360] * 2
    both = groups(pg.run(experiment(model=["logistic", "mlp:hidden=8"])), round=2)
    assert [row["by"] for row in both] == ["cluster"] * 2 + ["architecture"] * 2
    total = [sum(np.array(row["confusion"]) for row in half) for half in (both[:2], both[2:])]
    assert np.array_equal(*total)


def test_an_absent_cluster_has_no_row() -> None:
    result = pg.run(experiment(faults={"join": "3@2"}))
    assert [row["group"] for row in groups(result, round=1)] == [0]
    assert [row["group"] for row in groups(result, round=2)] == [0, 1]


# A model for all clusters


@pytest.mark.parametrize(
    "changes", [{"algorithm": "fedavg", "topology": "star:centre=last"}, {"pooled": True}], ids=str
)
def test_a_model_for_all_clusters_is_evaluated_on_every_test_set(changes: dict[str, Any]) -> None:
    made = experiment(**changes)
    result, world = pg.run(made), prepare(made)
    node = world.nodes - 1
    assert world.cluster_of(node) is None
    assert len(world.test_of(node)) == 720
    found = []
    for cluster in (0, 1):
        [row] = groups(result, round=2, group=cluster)
        guessed, truth = predictions(result, node, world.tests[cluster])
        found.append(float((guessed == truth).double().mean()))
        assert row["accuracy"] == found[-1]
        assert row["nodes"] == (3, 1)[cluster]
        assert np.sum(row["confusion"]) == 360
    network = [row for row in result.rows if row["scope"] == "network"][-1]
    assert network["accuracy"] == pytest.approx((3 * found[0] + found[1]) / 4)


def test_the_pooled_node_has_every_example_in_the_form_of_its_owner() -> None:
    apart, pooled = prepare(experiment()), prepare(experiment(pooled=True))
    assert torch.equal(pooled.train.x, apart.train.x)
    assert torch.equal(pooled.parts[0], torch.cat(list(apart.parts)))


# Records


def test_a_resumed_run_has_the_rows_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    made = experiment(rounds=3)
    with pytest.raises(pg.PeerageError):
        pg.run(made, tmp_path / "run", checkpoint_every=1, watch=interrupt)
    resumed, through = pg.resume(tmp_path / "run"), pg.run(made)
    assert groups(resumed) == groups(through)
    record = pg.RunRecord.load(tmp_path / "run")
    assert list(record.groups) == groups(through)
    assert record.group_curves("accuracy")[1][0] == [0, 1, 2, 3]
    assert pg.verify(tmp_path / "run").same
    # A file without rows of groups, as older versions wrote with several models, is verified too.
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["scope"] != "group"))
    assert pg.verify(tmp_path / "run").same
    changed = [line.replace('"confusion": [[', '"confusion": [[1') for line in lines]
    file.write_text("".join(changed))
    assert pg.verify(tmp_path / "run").difference.startswith("cluster 0, round 0: confusion was")


def test_a_run_with_a_function_as_its_shift_is_resumed_with_it(tmp_path: Path) -> None:
    def darker(x: torch.Tensor, cluster: int) -> torch.Tensor:
        return x / (1 + cluster)

    made = experiment(clusters=pg.Clusters((3, 1), darker))
    result = pg.run(made, tmp_path / "run")
    with pytest.raises(InputError, match=r"shift is a Python object .*darker"):
        pg.verify(tmp_path / "run")
    assert pg.verify(tmp_path / "run", experiment=made).same
    record = pg.RunRecord.load(tmp_path / "run")
    for name, tensor in record.state_dict(3).items():
        assert torch.equal(tensor, result.state_dict(3)[name])


def test_nodes_may_be_in_no_group() -> None:
    assert grouped_by(prepare(experiment(clusters=None))) == ()
