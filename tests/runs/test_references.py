"""Centralised data, isolated nodes, evaluated rounds, and how models spread and move."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.command_line import peerage

from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.experiment.experiment import Evaluation, Experiment, reference
from peerage.records.rows import RunRecord
from peerage.runs.run import run


def settings(**changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "algorithm": "decavg",
        "nodes": 4,
        "topology": "ring",
        "partition": "dirichlet:alpha=0.5",
        "rounds": 2,
        "local": {"steps": 3},
        "engine": {"name": "serial"},
    }
    return Experiment(**{**base, **changes})


# Evaluated rounds


def test_rounds_grow_by_the_factor_and_never_stand_still() -> None:
    """P4: the next round number is the last one times 1.1, rounded up."""
    chosen = sorted(Evaluation(growth=1.1).evaluated_rounds(40))
    assert chosen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 21, 24, 27, 30, 33, 37, 40]
    assert sorted(Evaluation(growth=2).evaluated_rounds(9)) == [1, 2, 4, 8, 9]
    assert Evaluation(growth=3).evaluated_rounds(1) == {1}


@pytest.mark.parametrize(("every", "expected"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_every_so_many_rounds_and_the_last(every: int, expected: list[int]) -> None:
    assert sorted(Evaluation(every=every).evaluated_rounds(5)) == expected


def test_a_run_is_evaluated_in_these_rounds() -> None:
    result = run(settings(rounds=5, evaluation={"growth": 2}))
    evaluated = [row["round"] for row in result.rows if "accuracy_min" in row]
    assert evaluated == [0, 1, 2, 4, 5]


@pytest.mark.slow
def test_a_flag_replaces_the_other_kind_in_a_file(tmp_path: Path) -> None:
    quick = "--rounds 4 --nodes 3 --topology ring --epochs 1 --partition iid"
    for line, flags in (("every = 2", "--eval-growth 3"), ("growth = 3.0", "--eval-every 2")):
        (tmp_path / "mine.toml").write_text(f"[evaluation]\n{line}\n")
        out = tmp_path / flags.split()[0]
        assert peerage(f"run {tmp_path / 'mine.toml'} {quick} {flags} --out", out).code == 0
        evaluated = [row["round"] for row in RunRecord.load(out).network if "accuracy" in row]
        assert evaluated == ([0, 1, 3, 4] if "growth" in flags else [0, 2, 4])


def test_growth_is_checked() -> None:
    with pytest.raises(InputError, match=r"growth must be above 1, such as 1.1, got 1.0"):
        Evaluation(growth=1)
    with pytest.raises(InputError, match=r"every=5 and growth=1.1 exclude each other"):
        Evaluation(every=5, growth=1.1)


# References on the same data


def test_the_centralised_node_holds_the_data_of_all() -> None:
    spread, pooled = prepare(settings()), prepare(settings(pooled=True))
    assert pooled.nodes == 1
    assert sorted(pooled.parts[0].tolist()) == sorted(torch.cat(list(spread.parts)).tolist())
    assert pooled.graph.edges() == ()


def test_references_do_the_same_work_without_messages() -> None:
    experiment = settings(init={"gain": "graph"}, faults={"loss": 0.5})
    centralised = run(reference("centralised", experiment))
    isolated = run(reference("isolated", experiment))
    assert (centralised.summary["nodes"], isolated.summary["nodes"]) == (1, 4)
    assert centralised.summary["bytes_sent"] == isolated.summary["bytes_sent"] == 0
    assert centralised.summary["label"] == "Local (centralised)"
    assert isolated.digest == run(settings(algorithm="local")).digest
    with pytest.raises(InputError, match="unknown reference 'central'; did you mean 'centralised'"):
        reference("central", experiment)


@pytest.mark.slow
def test_compare_runs_them_as_well(tmp_path: Path) -> None:
    ended = peerage(
        "compare --nodes 4 --topology ring --rounds 1 --epochs 1 --algorithms decavg --json",
        "--references",
        "centralised,isolated",
        "--out",
        tmp_path / "both",
    )
    assert ended.code == 0
    labels = [
        RunRecord.load(folder).summary["label"]
        for folder in sorted((tmp_path / "both").iterdir())
        if folder.is_dir()
    ]
    assert labels == ["DecAvg", "Local (centralised)", "Local"]


def test_new_settings_survive_a_file() -> None:
    experiment = settings(
        pooled=True, evaluation={"growth": 1.1, "spread": True}, init={"bias": "scaled"}
    )
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    experiment = settings(topology="er:p=0.9", assortativity=-0.2)
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    assert not {"pooled", "assortativity", "faults"} & set(Experiment().table())


# How models spread and move


def test_layers_of_a_run_against_its_parameters(engine: dict[str, Any]) -> None:
    result = run(settings(evaluation={"spread": True}, engine=engine))
    rows = [row for row in result.rows if row["scope"] == "network"]
    assert all("layers" in row for row in rows)
    weight = np.stack([result.state_dict(node)["hidden1.weight"].numpy() for node in range(4)])
    found = rows[-1]["layers"]["hidden1.weight"]
    flat = weight.reshape(4, -1).astype(np.float64)
    assert found["ap"] == pytest.approx(flat.std(axis=1).mean(), rel=1e-9)
    assert found["an"] == pytest.approx(flat.std(axis=0).mean(), rel=1e-9)


def test_movements_of_a_run() -> None:
    still = run(settings(local={"steps": 3, "lr": 0.0}, evaluation={"spread": True}))
    moved = [row["moved"] for row in still.rows if row["scope"] == "network" and row["round"]]
    assert all(m["train"] == 0 and m["combine"] == m["total"] > 0 for m in moved)
    alone = run(settings(algorithm="local", evaluation={"spread": True}))
    moved = [row["moved"] for row in alone.rows if row["scope"] == "network" and row["round"]]
    assert all(m["combine"] == 0 and m["train"] == m["total"] > 0 for m in moved)
    both = run(settings(evaluation={"spread": True}))
    for row in both.rows:
        if row["scope"] == "network" and row["round"]:
            m = row["moved"]
            assert abs(m["train"] - m["combine"]) <= m["total"] <= m["train"] + m["combine"]
            assert -1 <= m["cosine"] <= 1


def test_nothing_is_recorded_that_was_not_asked_for() -> None:
    assert not any("layers" in row or "moved" in row for row in run(settings()).rows)
