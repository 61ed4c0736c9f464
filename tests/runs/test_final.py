"""The step after the last round, and watchers: rows, checkpoints, resuming, models out."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import error_line, peerage
from support.evaluating import Clustered, Peaks, Personal, same

import peerage as pg
from peerage.errors import InputError
from peerage.records import checkpoint
from peerage.records.rows import read_metrics
from peerage.runs.saved import open_run
from peerage.runs.verify import OF_ENGINE, verify
from peerage.runs.watch import Models
from peerage.testing import NODES, toy

POOL = {"name": "pool", "workers": 2}


def times_apart(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in OF_ENGINE} for row in rows]


def network(result: pg.Result) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["scope"] == "network"]


class Killed(BaseException):
    """The end of a process, of which a run records nothing."""


def killed_while_saving(monkeypatch: pytest.MonkeyPatch, *, final: bool, before: bool) -> None:
    """End the process before or after the checkpoint of the last round or of the final step."""
    real = checkpoint.save

    def save(engine: Any, run: Path, round: int, *others: Any, **marks: Any) -> None:
        due = round == 3 and bool(marks.get("final")) == final
        if due and before:
            raise Killed
        real(engine, run, round, *others, **marks)
        if due:
            raise Killed

    monkeypatch.setattr(checkpoint, "save", save)


def test_the_final_step_comes_once_after_the_last_round():
    result = pg.run(toy(Peaks(), rounds=3))
    rows = network(result)
    assert [(row["round"], row.get("final")) for row in rows] == [
        *((round, None) for round in range(4)),
        (3, True),
    ]
    assert result.rows[-1] is rows[-1]
    assert [row.get("node") for row in result.rows[-NODES - 1 :]] == [*range(NODES), None]
    assert all(row["final"] for row in result.rows[-NODES - 1 :])
    size = 4 * result.parameters[0].numel()
    assert rows[-1]["bytes"] == NODES * (NODES - 1) * size
    assert rows[-1]["bytes_total"] == sum(row["bytes"] for row in rows)
    assert result.summary["bytes_sent"] == rows[-1]["bytes_total"]
    assert result.summary["rounds"] == 3
    assert result.accuracy == rows[-1]["accuracy"]
    assert len({tuple(params.tolist()) for params in result.parameters}) == 1


def test_an_algorithm_without_it_writes_what_it_always_wrote():
    rows = pg.run(toy(pg.DecAvg(), rounds=2)).rows
    assert not any("final" in row or "models" in row for row in rows)


@pytest.mark.parametrize("how", ["until", "watch"])
def test_it_also_comes_when_the_run_ends_early(how, tmp_path):
    changes = {"until": "alpha>=0.2"} if how == "until" else {}
    watch = (lambda row: pg.STOP if row["round"] == 2 else None) if how == "watch" else None
    result = pg.run(toy(Peaks(), rounds=5, **changes), tmp_path / "run", watch=watch)
    whole = pg.run(toy(Peaks(), rounds=2))
    assert result.summary["status"] == "finished"
    assert [(row["round"], row.get("final")) for row in network(result)][-2:] == [
        (2, None),
        (2, True),
    ]
    assert result.digest == whole.digest
    record = pg.RunRecord.load(tmp_path / "run")
    assert record.rounds == 2
    with pytest.raises(pg.PeerageError, match="is finished; there is nothing to resume"):
        pg.resume(tmp_path / "run", experiment=result.experiment)
    assert verify(tmp_path / "run", experiment=result.experiment).difference == ""


@pytest.mark.parametrize("final", [False, True], ids=["last round", "final step"])
@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("engine", [{"name": "serial"}, POOL], ids=["serial", "pool"])
def test_a_run_that_was_killed_around_it_does_it_once(final, before, engine, tmp_path, monkeypatch):
    experiment = toy(Peaks(), rounds=3, engine=engine)
    whole = pg.run(experiment)
    with monkeypatch.context() as patched:
        killed_while_saving(patched, final=final, before=before)
        with pytest.raises(Killed):
            pg.run(experiment, tmp_path / "run", checkpoint_every=1)
    resumed = pg.resume(tmp_path / "run", experiment=experiment)
    assert resumed.digest == whole.digest
    assert times_apart(resumed.rows) == times_apart(whole.rows)
    assert times_apart(read_metrics(tmp_path / "run" / "metrics.jsonl")) == times_apart(whole.rows)
    for one, other in zip(resumed.models, whole.models, strict=True):
        assert all(same(one[name], other[name]) for name in one)


def test_a_run_that_a_watcher_ended_and_that_was_killed_then_ends_there(tmp_path, monkeypatch):
    experiment = toy(Peaks(), rounds=5)
    with monkeypatch.context() as patched:
        killed_while_saving(patched, final=True, before=True)
        with pytest.raises(Killed):
            pg.run(
                experiment,
                tmp_path / "run",
                watch=lambda row: pg.STOP if row["round"] == 3 else None,
            )
    resumed = pg.resume(tmp_path / "run", experiment=experiment)
    assert resumed.summary["rounds"] == 3
    assert resumed.digest == pg.run(toy(Peaks(), rounds=3)).digest


@dataclass(frozen=True)
class Loud(Peaks):
    """Says where its final step is."""

    async def final(self, node: pg.Node[Any]) -> None:
        await super().final(node)
        node.note(round=node.round, neighbours=len(node.neighbours))


def test_it_has_the_nodes_and_the_graph_of_the_last_round():
    result = pg.run(toy(Loud(), rounds=3, faults={"leave": "0@3", "links": 0.0 + 1e-9}))
    last = [row for row in result.rows if row.get("final") and row["scope"] == "node"]
    assert [row["node"] for row in last] == [1, 2, 3, 4]
    assert [row["notes"] for row in last] == [
        {"round": 3.0, "neighbours": float(count)} for count in (1, 2, 2, 1)
    ]
    size = 4 * result.parameters[0].numel()
    assert network(result)[-1]["bytes"] == 4 * 3 * size  # links are up, and none to node 0
    assert network(result)[-2]["bytes"] == 0


# Records


def test_tables_and_curves_know_both_rows(tmp_path):
    result = pg.run(toy(Peaks(), rounds=3), tmp_path / "run")
    record = pg.RunRecord.load(tmp_path / "run")
    *_, before, after = network(result)
    rounds, losses = record.curve("loss")
    assert rounds == [0, 1, 2, 3]
    assert losses[-1] == after["loss"]
    regular = record.curve("models.regular.loss")
    assert regular == (
        rounds,
        [row["models"]["regular"]["loss"] for row in [*network(result)[:3], after]],
    )
    assert record.node_values("loss", 3) == {
        row["node"]: row["loss"] for row in result.rows[-NODES - 1 : -1]
    }
    assert record.notes("alpha")[0][0] == [1, 2, 3]
    best = max(network(result), key=lambda row: row["accuracy"])
    assert record.best() == (best["round"], best["accuracy"])
    assert record.rounds_to(best["accuracy"]) == best["round"]
    assert before["round"] == after["round"] == 3


@pytest.mark.slow
def test_reports_show_all_models(tmp_path):
    pg.run(toy(Peaks(), rounds=2), tmp_path / "peaks")
    pg.run(toy(Personal(), rounds=2), tmp_path / "hub")
    shown = peerage("report", tmp_path / "peaks", tmp_path / "hub")
    assert "accuracy of regular" in " ".join(shown.out.split())
    page = (tmp_path / "peaks" / "report.html").read_text()
    assert page.count("Accuracy of regular") >= 1
    assert "keep their own models; accuracy is the mean over these" in page
    out = peerage("report", tmp_path / "peaks", "--out", tmp_path / "table.csv")
    assert out.code == 0
    header, line = (tmp_path / "table.csv").read_text().splitlines()
    table = dict(zip(header.split(","), line.split(","), strict=False))
    summary = pg.RunRecord.load(tmp_path / "peaks").summary
    assert float(table["models.regular.accuracy"]) == summary["models"]["regular"]["accuracy"]


# Models out


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "peak", "regular"])
def test_models_leave_by_their_names(name, tmp_path):
    experiment = toy(Peaks(), rounds=3)
    result = pg.run(experiment, tmp_path / "run")
    wanted = result.state_dict(1, name)
    record = pg.RunRecord.load(tmp_path / "run")
    saved = record.state_dict(1, name, experiment=experiment)
    chosen = open_run(tmp_path / "run", experiment=experiment).choose("mean", name)
    for key, tensor in wanted.items():
        assert torch.equal(saved[key], tensor)
    models = [result.models[node][name or "peak"].params for node in range(NODES)]
    torch.testing.assert_close(chosen.params, torch.stack(models).mean(0))
    best = open_run(tmp_path / "run", experiment=experiment).choose("best", name)
    table = [row for row in result.rows if row.get("final") and row["scope"] == "node"]
    values = [r["accuracy"] if name != "regular" else r["models"][name]["accuracy"] for r in table]
    assert best.facts["accuracy"] == max(values)


def test_names_that_no_model_has_are_refused(tmp_path):
    result = pg.run(toy(Peaks(), rounds=1), tmp_path / "run")
    message = "node 1 has no model named 'regulr'; did you mean 'regular'? known: peak, regular"
    with pytest.raises(InputError) as caught:
        result.module(1, "regulr")
    assert str(caught.value) == message
    plain = pg.run(toy(pg.DecAvg(), rounds=1))
    with pytest.raises(InputError, match="node 0 has no model named 'x'; its only model has no na"):
        plain.module(0, "x")


def test_the_command_line_writes_a_model_by_its_name(tmp_path):
    source = Path(__file__).parents[1] / "support" / "evaluating.py"
    line = f"run --algorithm {source}:Peaks --nodes 3 --rounds 2 --model logistic --engine serial"
    done = peerage(f"{line} --topology ring --json --out", tmp_path / "run")
    assert done.code == 0, done.err
    assert "regular" in json.loads(done.lines[-1])["models"]
    written = peerage(
        f"model {tmp_path / 'run'} --node 1 --model-name regular --out", tmp_path / "m.safetensors"
    )
    assert written.code == 0, written.err
    assert "logistic (regular) of node 1 after round 2 of 2" in written.out
    wanted = pg.RunRecord.load(tmp_path / "run").state_dict(1, "regular")
    found = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    wrong = peerage(f"model {tmp_path / 'run'} --node 1 --model-name x --out", tmp_path / "x.pt")
    assert "node 1 has no model named 'x'" in error_line(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [Personal(), Clustered()], ids=lambda one: type(one).__name__)
def test_models_of_clients_leave_and_are_resumed(algorithm, tmp_path):
    experiment = toy(algorithm, rounds=4)
    whole = pg.run(experiment)

    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(pg.PeerageError):
        pg.run(experiment, tmp_path / "run", checkpoint_every=1, watch=interrupt)
    resumed = pg.resume(tmp_path / "run", experiment=experiment, engine=POOL)
    assert resumed.digest == whole.digest
    assert times_apart(resumed.rows) == times_apart(whole.rows)
    opened = open_run(tmp_path / "run", experiment=experiment)
    for node in range(NODES + 1):
        assert torch.equal(opened.model(node).params, whole.parameters[node])
    torch.testing.assert_close(
        opened.mean().params, torch.stack(list(whole.parameters[:NODES])).mean(0)
    )


# Watchers


def test_a_watcher_may_end_a_run_where_nothing_was_evaluated(tmp_path):
    experiment = toy(pg.DecAvg(), rounds=9, evaluation={"every": 5, "at": "end"})
    result = pg.run(
        experiment, tmp_path / "run", watch=lambda row: pg.STOP if row["round"] == 3 else None
    )
    *_, third, last = network(result)
    assert "accuracy" not in third
    assert (last["round"], last["final"], last["bytes"]) == (3, True, 0)
    whole = pg.run(toy(pg.DecAvg(), rounds=3))
    assert result.digest == whole.digest
    assert result.accuracy == whole.accuracy
    assert verify(tmp_path / "run", experiment=experiment).same


def test_a_watcher_that_returns_anything_else_changes_nothing():
    seen: list[int] = []

    def watch(row: dict[str, Any]) -> bool:
        seen.append(row["round"])
        return True

    assert pg.run(toy(pg.DecAvg(), rounds=2), watch=watch).summary["rounds"] == 2
    assert seen == [0, 1, 2]


def test_a_run_has_at_least_one_round():
    assert pg.run(toy(pg.DecAvg(), rounds=3), watch=lambda row: pg.STOP).summary["rounds"] == 1


@pytest.mark.parametrize("engine", [{"name": "serial"}, POOL], ids=["serial", "pool"])
def test_a_watcher_sees_models_if_it_asks(engine):
    whole = pg.run(toy(Peaks(), rounds=3))
    seen: dict[Any, Any] = {}

    def look(row: dict[str, Any], models: Models) -> Any:
        place = row["round"], bool(row.get("final"))
        seen[place] = models.weights(1, "regular")
        seen["gone"] = models
        if place == (1, False):
            module = models(1)
            assert not module.training
            assert [x.shape for x in module.parameters()] == [
                x.shape for x in whole.module(1).parameters()
            ]
        return None

    result = pg.run(toy(Peaks(), rounds=3, engine=engine), watch=pg.Watcher(look))
    assert result.digest == whole.digest  # looking changes nothing
    assert same(seen[3, True], whole.models[1]["regular"])
    assert not same(seen[3, False], seen[3, True])
    with pytest.raises(InputError, match="the models of a round are gone; use them while the watc"):
        seen["gone"](1)


def test_a_watcher_asks_for_a_node_that_is_not_there():
    watcher = pg.Watcher(lambda row, models: models(99))
    with pytest.raises(InputError, match="the run has no node 99; its nodes are 0 to 4"):
        pg.run(toy(pg.DecAvg(), rounds=1), watch=watcher)
