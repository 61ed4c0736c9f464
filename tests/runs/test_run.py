"""Runs: what they return, what they write down, and how they end."""

import hashlib
import json
import math
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import peerage as pg
from peerage.data.datasets import Digits
from peerage.errors import CheckpointError, Diverged, InputError, Interrupted
from peerage.models import MODELS
from peerage.records.environment import environment
from peerage.records.rows import RunRecord, read_metrics
from peerage.runs import run as running
from peerage.runs.run import check_empty, locked, new_run_folder
from peerage.runs.verify import OF_ENGINE, first_difference
from peerage.work.training import LocalSGD

PHASES = {"train", "curvature", "combine", "exchange", "evaluate", "wait", "total"}


def tiny(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "model": "logistic",
        "nodes": 4,
        "topology": "ring",
        "partition": "iid",
        "rounds": 3,
        "local": {"epochs": 1, "batch_size": 90},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**settings | changes)


def network(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["scope"] == "network"]


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in OF_ENGINE} for row in rows]


def stop_after(last: int) -> Any:
    def watch(row: dict[str, Any]) -> None:
        if row["round"] == last:
            raise KeyboardInterrupt

    return watch


# What a run returns


class Normalised(nn.Module):
    """A network with running statistics and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.flatten(1)))


def test_a_trained_module_has_its_running_statistics() -> None:
    result = pg.run(tiny(model=Normalised, rounds=2, evaluation={"at": "end"}))
    module, digits = result.module(2), Digits().load(Path())
    with torch.no_grad():
        right = (module(digits.test_x).argmax(1) == digits.test_y).double().mean()
    row = next(r for r in result.rows if r.get("node") == 2 and r["round"] == 2)
    assert row["accuracy"] == pytest.approx(float(right))
    assert float(module.norm.running_mean.abs().sum()) > 0
    assert not torch.equal(result.buffers[2][:64], torch.zeros(64))


def test_the_returned_models_are_those_that_were_evaluated(engine: dict[str, Any]) -> None:
    # Convolutions, whose weights lie in another order inside the flat vector.
    result = pg.run(tiny(model="digits-cnn", evaluation={"at": "end"}, engine=engine))
    data = Digits().load(Path())
    last = [row for row in result.rows if row["scope"] == "node" and row["round"] == 3]
    for row in last:
        module = MODELS["digits-cnn"]().build(data.shape, 10)
        module.load_state_dict(result.state_dict(row["node"]))
        with torch.no_grad():
            logits = module.eval()(data.test_x)
        # An example on the edge between two classes may fall to either, by rounding.
        accuracy = (logits.argmax(1) == data.test_y).double().mean().item()
        assert accuracy == pytest.approx(row["accuracy"], abs=1.5 / len(data.test_y))
        assert nn.functional.cross_entropy(logits, data.test_y).item() == pytest.approx(row["loss"])
    assert result.accuracy == pytest.approx(np.mean([row["accuracy"] for row in last]))


def test_the_digest_is_over_row_major_parameters_in_the_order_of_names() -> None:
    result = pg.run(tiny(model="digits-cnn", rounds=1))
    module = MODELS["digits-cnn"]().build((1, 8, 8), 10)
    sha = hashlib.sha256()
    for node in range(4):
        state = result.state_dict(node)
        for name, parameter in module.named_parameters():
            assert state[name].shape == parameter.shape
            array = np.ascontiguousarray(state[name].numpy(), dtype="<f4")
            sha.update(array.tobytes(order="C"))
    assert result.digest == sha.hexdigest()
    # The vectors themselves hold the same numbers, kernels with the channels last.
    kernel = result.state_dict(0)["conv1.weight"]
    first = result.parameters[0][: kernel.numel()]
    assert torch.equal(first, kernel.permute(0, 2, 3, 1).reshape(-1))


def test_the_frame_has_a_row_per_round_or_per_node() -> None:
    result = pg.run(tiny())
    frame = result.frame()
    assert list(frame["round"]) == [0, 1, 2, 3]
    assert list(frame["accuracy"]) == [row["accuracy"] for row in network(result.rows)]
    assert "seconds.total" in frame
    nodes = result.frame("node")
    assert nodes.groupby("round")["accuracy"].mean().tolist() == pytest.approx(
        frame["accuracy"].tolist()
    )


def test_the_frame_says_that_it_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="needs pandas; pip install pandas"):
        pg.run(tiny(rounds=1)).frame()


def test_nodes_may_have_different_models() -> None:
    result = pg.run(tiny(model=["logistic", "mlp:hidden=8"]))
    sizes = [len(result.parameters[node]) for node in range(4)]
    assert sizes == [650, 64 * 8 + 8 + 80 + 10, 650, 610]
    assert result.state_dict(1)["hidden1.weight"].shape == (8, 64)


def test_the_watch_sees_every_round() -> None:
    seen: list[dict[str, Any]] = []
    result = pg.run(tiny(evaluation={"every": 2}), watch=seen.append)
    assert seen == network(result.rows)


# What a run writes down


def test_rows_of_a_round_are_complete() -> None:
    result = pg.run(tiny())
    assert [row["round"] for row in network(result.rows)] == [0, 1, 2, 3]
    sent = 0
    for row in network(result.rows):
        nodes = [n for n in result.rows if n["scope"] == "node" and n["round"] == row["round"]]
        assert [n["node"] for n in nodes] == [0, 1, 2, 3]
        for key in ("accuracy", "loss"):
            values = np.array([n[key] for n in nodes])
            assert row[key] == pytest.approx(values.mean(), rel=1e-12)
            assert row[f"{key}_std"] == pytest.approx(values.std(), rel=1e-12)
            assert (row[f"{key}_min"], row[f"{key}_max"]) == (values.min(), values.max())
        # 650 parameters and as many curvatures, as float32, to two neighbours each.
        assert row["bytes"] == (0 if row["round"] == 0 else 4 * 2 * 2 * 650 * 4)
        sent += row["bytes"]
        assert row["bytes_total"] == sent
        assert row["seconds"].keys() >= PHASES
        phases = [value for key, value in row["seconds"].items() if key != "total"]
        assert 0 < sum(phases) <= row["seconds"]["total"]
        assert row["consensus"] > 0
        if row["round"]:
            losses = [n["train_loss"] for n in nodes]
            assert row["train_loss"] == pytest.approx(np.mean(losses), rel=1e-12)
        else:
            assert "train_loss" not in row
    assert result.summary["bytes_sent"] == sent


def test_large_networks_have_rows_of_some_nodes_until_the_last_round(tmp_path: Path) -> None:
    settings = {"nodes": 7, "rounds": 3, "topology": "ring", "engine": {"name": "serial"}}
    thinned = pg.Experiment(**settings, evaluation={"node_rows": 3})
    found = pg.run(thinned, tmp_path / "run")
    recorded: dict[int, list[int]] = {}
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        if row["scope"] == "node":
            recorded.setdefault(row["round"], []).append(row["node"])
    assert recorded == {0: [0, 2, 4], 1: [0, 2, 4], 2: [0, 2, 4], 3: list(range(7))}
    whole = pg.run(pg.Experiment(**settings))
    assert found.digest == whole.digest

    def network(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        chosen = (row for row in rows if row["scope"] == "network")
        return [{key: v for key, v in row.items() if key != "seconds"} for row in chosen]

    assert network(found.rows) == network(whole.rows)  # means are over all nodes
    assert pg.Experiment.from_toml(thinned.to_toml()) == thinned
    assert "node_rows" not in pg.Experiment(**settings).to_toml()
    with pytest.raises(InputError, match="node_rows must be at least 1, got 0"):
        pg.Evaluation(node_rows=0)


def test_the_consensus_distance_is_that_of_the_models() -> None:
    result = pg.run(tiny(evaluation={"at": "end"}))
    x = torch.stack(list(result.parameters)).double()
    distance = (x - x.mean(0)).square().sum(1).mean().sqrt().item()
    assert network(result.rows)[-1]["consensus"] == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize(
    ("rounds", "every", "evaluated"), [(7, 3, [0, 3, 6, 7]), (6, 3, [0, 3, 6]), (2, 9, [0, 2])]
)
def test_the_first_and_the_last_round_are_always_evaluated(
    rounds: int, every: int, evaluated: list[int]
) -> None:
    result = pg.run(tiny(rounds=rounds, evaluation={"every": every}))
    rows = network(result.rows)
    assert [row["round"] for row in rows] == list(range(rounds + 1))
    assert [row["round"] for row in rows if "accuracy" in row] == evaluated
    assert sorted({r["round"] for r in result.rows if r["scope"] == "node"}) == evaluated
    # How often models are evaluated changes nothing about them.
    assert result.digest == pg.run(tiny(rounds=rounds)).digest


def test_the_best_round_is_remembered() -> None:
    result = pg.run(tiny())
    best = max(network(result.rows), key=lambda row: float(row["accuracy"]))
    assert result.summary["best_accuracy"] == best["accuracy"]
    assert result.summary["best_round"] == best["round"]


def test_a_run_folder_holds_everything(tmp_path: Path) -> None:
    experiment = tiny(model=())
    result = pg.run(experiment, tmp_path / "run")
    assert result.folder == tmp_path / "run"
    record = RunRecord.load(tmp_path / "run")
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == result.rows
    assert record.summary == result.summary
    assert record.experiment["model"] == {"name": "digits-mlp"}  # nothing is left open
    assert pg.Experiment.from_toml((tmp_path / "run" / "experiment.toml").read_text()) == (
        result.experiment
    )
    assert record.setup["edges"] == [[0, 1], [0, 3], [1, 2], [2, 3]]
    assert sum(map(sum, record.setup["allocation"])) == sum(record.setup["examples"]) == 1437
    assert record.setup["parameters"] == [6570] * 4
    assert record.setup["test_examples"] == 360


@pytest.mark.slow
def test_the_environment_is_recorded(tmp_path: Path) -> None:
    pg.run(tiny(rounds=1), tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert stored == environment()
    assert stored["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert stored["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stored["cores"] >= 1
    assert stored["git"] is None or len(bytes.fromhex(stored["git"])) == 20


@pytest.mark.slow
def test_a_copy_inside_another_checkout_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    copy = tmp_path / "site-packages" / "environment.py"
    copy.parent.mkdir()
    copy.write_text("")
    monkeypatch.setattr(sys.modules["peerage.records.environment"], "__file__", str(copy))
    assert environment()["git"] is None


def test_a_run_without_a_folder_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = pg.run(tiny())
    assert result.folder is None
    assert result.summary["run"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_changes_nothing_about_the_result(tmp_path: Path) -> None:
    alone, kept = pg.run(tiny()), pg.run(tiny(), tmp_path / "run", checkpoint_every=1)
    assert alone.digest == kept.digest
    assert without_time(alone.rows) == without_time(kept.rows)


def test_every_run_of_a_seed_is_the_same_and_seeds_differ() -> None:
    digests = [pg.run(tiny(rounds=1, seed=seed)).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]


# Notes of an algorithm


@dataclass(frozen=True)
class Notes(pg.Algorithm[None]):
    """Notes numbers that are known beforehand, one of which is none, and one by odd nodes only."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: pg.Node[None]) -> None:
        node.note(place=10 * node.round + node.id, nothing=math.nan)
        await node.train(self.local)
        inbox = await node.exchange(x=node.params)
        node.params = torch.stack(inbox["x"]).mean(0)
        if node.id % 2:
            node.note(odd=1.0)


def test_notes_are_in_the_rows_of_rounds_that_are_evaluated(tmp_path: Path) -> None:
    experiment = tiny(algorithm=Notes(), rounds=5, evaluation={"every": 2})
    result = pg.run(experiment, tmp_path / "run")
    record = RunRecord.load(tmp_path / "run")
    # Row r is about the r-th round, which the algorithm calls r - 1.
    assert record.notes("place") == {
        node: ([2, 4, 5], [10.0 + node, 30.0 + node, 40.0 + node]) for node in range(4)
    }
    assert record.notes("odd") == {node: ([2, 4, 5], [1.0] * 3) for node in (1, 3)}
    assert record.notes("nothing") == record.notes("unknown") == {}
    nodes = [row for row in result.rows if row["scope"] == "node"]
    assert {row["round"] for row in nodes if "notes" in row} == {2, 4, 5}  # not before the first
    assert nodes[-1]["notes"] == {"place": 43.0, "nothing": None, "odd": 1.0}
    assert read_metrics(tmp_path / "run" / "metrics.jsonl") == result.rows


@pytest.mark.slow
def test_notes_are_the_same_in_every_engine_after_a_crash_and_once_more(tmp_path: Path) -> None:
    folder, crash = tmp_path / "run", stop_after(2)
    for algorithm in (Notes(), pg.DecHW(trace=5)):
        experiment = tiny(algorithm=algorithm)
        through = pg.run(experiment)
        pooled = tiny(algorithm=algorithm, engine={"name": "pool", "workers": 2})
        with pytest.raises(Interrupted):
            pg.run(pooled, folder, checkpoint_every=1, watch=crash)
        pg.resume(folder, experiment=experiment)
        assert without_time(read_metrics(folder / "metrics.jsonl")) == without_time(through.rows)
        assert pg.verify(folder, experiment=experiment).same
        shutil.rmtree(folder)


def test_dechw_notes_what_figures_need(tmp_path: Path) -> None:
    pg.run(tiny(algorithm=pg.DecHW(trace=5)), tmp_path / "run")
    record = RunRecord.load(tmp_path / "run")
    for name in ("curvature", "entry", "weight"):
        assert sorted(record.notes(name)) == [0, 1, 2, 3]
        assert all(rounds == [1, 2, 3] for rounds, _ in record.notes(name).values())
    weights = [value for _, values in record.notes("weight").values() for value in values]
    assert all(0 <= value <= 1 for value in weights)
    assert all(value > 0 for _, values in record.notes("curvature").values() for value in values)


# Ending at a target

LONG: dict[str, Any] = {
    "rounds": 12,
    "algorithm": "decavg",
    "local": {"epochs": 1, "batch_size": 90, "lr": 0.1},
}


@pytest.fixture(scope="module")
def long() -> list[dict[str, Any]]:
    """The network rows of a run that nothing ends early."""
    return network(pg.run(tiny(**LONG)).rows)


def middle(rows: list[dict[str, Any]], metric: str, round: int) -> float:
    """A value that the metric has not reached before this round, and passes in it."""
    return float(rows[round - 1][metric] + rows[round][metric]) / 2


@pytest.mark.parametrize("metric", ["accuracy", "accuracy_min", "loss", "train_loss", "consensus"])
def test_a_run_ends_at_the_first_round_that_reaches_its_target(
    tmp_path: Path, long: list[dict[str, Any]], metric: str
) -> None:
    target = middle(long, metric, 3)
    sign = 1 if metric.startswith("accuracy") else -1
    passed = [sign * (row[metric] - target) >= 0 for row in long if row["round"]]
    assert passed.index(True) == 2  # round 3, and the metric does move that way
    result = pg.run(tiny(**LONG, until=f"{metric}={target}"), tmp_path / "run")
    assert without_time(network(result.rows)) == without_time(long[:4])
    assert result.digest == pg.run(tiny(**LONG | {"rounds": 3})).digest
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.rounds, record.summary["rounds_planned"]) == ("finished", 3, 12)
    assert record.summary["digest"] == result.digest
    assert record.summary["accuracy"] == long[3]["accuracy"]
    assert checkpoints(tmp_path / "run")[-1] == "round-000003"
    assert pg.verify(tmp_path / "run").same
    with pytest.raises(CheckpointError, match="is finished; there is nothing to resume"):
        pg.resume(tmp_path / "run")


@pytest.mark.parametrize("metric", ["accuracy", "train_loss"])
def test_a_run_ends_at_a_round_that_was_evaluated(long: list[dict[str, Any]], metric: str) -> None:
    """The training loss is known in every round, but the models are evaluated in every fifth."""
    until = f"{metric}={middle(long, metric, 3)}"
    result = pg.run(tiny(**LONG, until=until, evaluation={"every": 5}))
    assert [row["round"] for row in network(result.rows)] == [0, 1, 2, 3, 4, 5]
    assert result.summary["accuracy"] == long[5]["accuracy"]


@pytest.mark.parametrize("until", ["accuracy=1", "loss=-1", "consensus=0"])
def test_a_target_that_is_never_reached_costs_nothing(
    long: list[dict[str, Any]], until: str
) -> None:
    result = pg.run(tiny(**LONG, until=until))
    assert without_time(network(result.rows)) == without_time(long)


def test_a_target_that_the_start_has_reached_takes_one_round() -> None:
    shared = tiny(**LONG, until="consensus=1000", init={"start": "shared"})
    result = pg.run(shared)
    assert network(result.rows)[0]["consensus"] == 0
    assert [row["round"] for row in network(result.rows)] == [0, 1]


@pytest.mark.parametrize("metric", ["validation_accuracy", "validation_loss"])
def test_a_run_may_end_at_a_validation_target(metric: str) -> None:
    held_out = {"validation": 0.2}
    through = network(pg.run(tiny(**LONG, evaluation=held_out)).rows)
    until = f"{metric}={middle(through, metric, 2)}"
    result = pg.run(tiny(**LONG, until=until, evaluation=held_out))
    assert without_time(network(result.rows)) == without_time(through[:3])


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_run_with_a_target_that_crashed_ends_where_it_would_have(
    tmp_path: Path, long: list[dict[str, Any]], last: int
) -> None:
    experiment = tiny(**LONG, until=f"accuracy={middle(long, 'accuracy', 3)}")
    with pytest.raises(Interrupted):
        pg.run(experiment, tmp_path / "run", checkpoint_every=1, watch=stop_after(last))
    resumed = pg.resume(tmp_path / "run")
    through = pg.run(experiment)
    assert resumed.digest == through.digest
    assert without_time(resumed.rows) == without_time(through.rows)
    assert resumed.summary["rounds"] == 3


def test_a_run_that_was_killed_after_its_last_checkpoint_does_not_go_on(
    tmp_path: Path, long: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any) -> str:
        raise SystemExit

    experiment = tiny(**LONG, until=f"accuracy={middle(long, 'accuracy', 3)}")
    with monkeypatch.context() as patch:
        patch.setattr(running, "digest", killed)
        with pytest.raises(SystemExit):
            pg.run(experiment, tmp_path / "run")
    assert RunRecord.load(tmp_path / "run").status == "running"
    assert checkpoints(tmp_path / "run")[-1] == "round-000003"
    resumed = pg.resume(tmp_path / "run")
    assert resumed.summary["rounds"] == 3
    assert resumed.digest == pg.run(experiment).digest


# Checkpoints


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    seen: dict[int, list[str]] = {}

    def watch(row: dict[str, Any]) -> None:
        if row["round"] > 1:
            seen[row["round"]] = checkpoints(tmp_path / "run")

    pg.run(tiny(rounds=4), tmp_path / "run", checkpoint_every=1, watch=watch)
    assert seen[2] == ["round-000001"]
    assert seen[3] == ["round-000001", "round-000002"]
    assert seen[4] == ["round-000002", "round-000003"]
    assert checkpoints(tmp_path / "run") == ["round-000003", "round-000004"]


def test_without_a_number_checkpoints_take_a_twentieth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes 10 s and a checkpoint 2 s: the next is due after 40 s, which is 4 rounds."""
    now = [0.0]
    saved: list[int] = []

    def save(engine: Any, folder: Path, round: int, **marks: bool) -> None:
        saved.append(round)
        now[0] += 2.0

    def watch(row: dict[str, Any]) -> None:
        now[0] += 10.0

    monkeypatch.setattr(running, "perf_counter", lambda: now[0])
    monkeypatch.setattr(running.checkpoint, "save", save)
    pg.run(tiny(rounds=11), tmp_path / "run", watch=watch)
    assert saved == [1, 5, 9, 11]


def test_what_a_killed_process_left_behind_is_cleared_away(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        pg.run(tiny(), folder, checkpoint_every=1, watch=stop_after(2))
    (folder / "checkpoint" / ".round-000002.999").mkdir()
    (folder / "checkpoint" / ".round-000002.999" / "part-0.safetensors").write_text("half")
    (folder / ".summary.json.999.tmp").write_text("half")
    pg.resume(folder)
    assert checkpoints(folder) == ["round-000002", "round-000003"]
    assert not list(folder.glob(".*.tmp"))


@dataclass(frozen=True)
class Memory:
    best: float
    name: str
    seen: tuple[int, ...]
    mean: Tensor


@dataclass(frozen=True)
class Remembers(pg.Algorithm[Memory]):
    """Adds everything it remembers to its parameters, so that forgetting anything shows."""

    local: LocalSGD = LocalSGD()

    def init(self, node: pg.Node[Memory]) -> Memory:
        return Memory(math.inf, "", (), torch.zeros(2))

    async def round(self, node: pg.Node[Memory]) -> None:
        await node.train(self.local)
        old = node.state
        assert old.best == math.inf
        assert (old.name, old.seen) == ("ö" * node.round, tuple(range(node.round)))
        node.state = Memory(old.best, old.name + "ö", (*old.seen, node.round), old.mean + 0.1)
        node.params = node.params + 1e-3 * old.mean[0]


def test_a_checkpoint_keeps_every_kind_of_state(tmp_path: Path) -> None:
    experiment = tiny(algorithm=Remembers(), rounds=4)
    through = pg.run(experiment).digest
    with pytest.raises(Interrupted):
        pg.run(experiment, tmp_path / "run", checkpoint_every=1, watch=stop_after(3))
    assert pg.resume(tmp_path / "run", experiment=experiment).digest == through


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local", "engine"),
    [
        # The position in the stream of batches survives, and so does an optimiser that is kept.
        ({"steps": 3, "batch_size": 50}, {"name": "serial"}),
        ({"epochs": 1, "momentum": 0.9, "keep_optimizer": True}, {"name": "pool", "workers": 1}),
        ({"epochs": 1, "optimizer": "adamw", "keep_optimizer": True}, {"workers": 3}),
    ],
)
def test_a_resumed_run_equals_one_that_ran_through(
    tmp_path: Path, local: dict[str, Any], engine: dict[str, Any]
) -> None:
    experiment = tiny(rounds=4, local=local, engine={"name": "pool", "workers": 2})
    through = pg.run(experiment)
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match="interrupted in round 4; the last checkpoint is of ro"):
        pg.run(experiment, folder, checkpoint_every=2, watch=stop_after(3))
    resumed = pg.resume(folder, engine=engine)
    assert resumed.digest == through.digest
    assert without_time(resumed.rows) == without_time(through.rows)
    assert without_time(read_metrics(folder / "metrics.jsonl")) == without_time(through.rows)
    assert resumed.summary["bytes_sent"] == through.summary["bytes_sent"]
    assert resumed.summary["status"] == "finished"


def test_a_run_that_never_saved_starts_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Interrupted, match="there is no checkpoint yet; continue with `peerage re"):
        pg.run(tiny(), folder, checkpoint_every=9, watch=stop_after(2))
    assert pg.resume(folder).digest == pg.run(tiny()).digest


@pytest.mark.parametrize("lost", ["summary.json", "setup.json", "environment.json"])
def test_a_run_killed_right_after_its_start_can_be_resumed(tmp_path: Path, lost: str) -> None:
    """Files are written in this order: experiment, setup, environment, metrics, summary."""
    folder = tmp_path / "run"
    with pytest.raises(Interrupted):
        pg.run(tiny(), folder, watch=stop_after(0))
    order = ["setup.json", "environment.json", "metrics.jsonl", "summary.json"]
    for name in order[order.index(lost) :]:
        (folder / name).unlink()
    assert pg.resume(folder).digest == pg.run(tiny()).digest
    RunRecord.load(folder)


def test_a_finished_run_cannot_be_resumed(tmp_path: Path) -> None:
    pg.run(tiny(rounds=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match="is finished; there is nothing to resume"):
        pg.resume(tmp_path / "run")


def test_an_interruption_without_a_folder_says_that_nothing_was_saved() -> None:
    with pytest.raises(Interrupted, match="in round 2; nothing was saved, as the run has no fold"):
        pg.run(tiny(), watch=stop_after(1))


def test_an_interrupted_run_is_marked(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        pg.run(tiny(), tmp_path / "run", watch=stop_after(2))
    record = RunRecord.load(tmp_path / "run")
    assert (record.status, record.rounds, record.summary["digest"]) == ("interrupted", 2, None)
    assert record.summary["message"].startswith("interrupted in round 3; ")


@pytest.mark.slow
@pytest.mark.own_engine
def test_an_error_of_the_algorithm_is_not_hidden(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Broken(pg.Algorithm[None]):
        local: pg.LocalSGD = pg.LocalSGD()

        async def round(self, node: pg.Node[None]) -> None:
            if node.round == 1 and node.id == 2:
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        pg.run(tiny(algorithm=Broken()), tmp_path / "run")
    assert caught.value.__notes__ == ["at node 2 in round 1"]
    assert RunRecord.load(tmp_path / "run").status == "failed"
    workers = {"name": "pool", "workers": 2}
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError in worker [01]: mine") as caught_too:
        pg.run(tiny(algorithm=Broken(), engine=workers))
    assert "at node 2 in round 1" in caught_too.value.__notes__[0]


# Divergence


@dataclass(frozen=True)
class Explodes(pg.Algorithm[None]):
    """Two nodes diverge in the third round."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: pg.Node[None]) -> None:
        if node.round == 2 and node.id in (1, 3):
            node.params = node.params * math.inf
        await node.train(self.local)


def test_divergence_names_the_nodes_and_keeps_the_rounds_before(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Diverged, match="of nodes 1, 3 became NaN or infinite in round 3; lower"):
        pg.run(tiny(algorithm=Explodes(), engine=engine), folder, checkpoint_every=1)
    record = RunRecord.load(folder)
    assert (record.status, record.rounds, record.summary["digest"]) == ("diverged", 2, None)
    assert [row["round"] for row in record.network] == [0, 1, 2]
    assert record.summary["accuracy"] == record.network[-1]["accuracy"]
    assert checkpoints(folder) == ["round-000001", "round-000002"]


# Folders


@pytest.fixture
def no_wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another process holds is given up at once."""
    monkeypatch.setattr(running, "ENDING", 0.01)


@pytest.mark.usefixtures("no_wait_for_locks")
def test_a_second_run_in_the_same_folder_is_rejected(tmp_path: Path) -> None:
    def another(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            with pytest.raises(InputError, match="already holds a run"):
                pg.run(tiny(), tmp_path / "run")
            with pytest.raises(CheckpointError, match="another process is working in"):
                pg.resume(tmp_path / "run")

    result = pg.run(tiny(), tmp_path / "run", watch=another)
    assert RunRecord.load(tmp_path / "run").summary["digest"] == result.digest


@pytest.mark.usefixtures("no_wait_for_locks")
def test_a_folder_that_another_run_filled_in_the_meantime_stays_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with new_run_folder(folder):
        (folder / "experiment.toml").write_text("mine")
        with pytest.raises(CheckpointError, match="another process"), new_run_folder(folder):
            pass
    with pytest.raises(InputError, match="already holds a run"), new_run_folder(folder):
        pass
    assert (folder / "experiment.toml").read_text() == "mine"


@pytest.mark.usefixtures("no_wait_for_locks")
def test_a_folder_that_stays_empty_goes_away(tmp_path: Path) -> None:
    def fail() -> None:
        with new_run_folder(tmp_path / "run"):
            (tmp_path / "run" / "setup.json").write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not (tmp_path / "run").exists()
    with new_run_folder(tmp_path / "run"), pytest.raises(CheckpointError), locked(tmp_path / "run"):
        pass
    check_empty(tmp_path / "run")


# Verification


def test_the_first_difference_is_named() -> None:
    old = [
        {"scope": "node", "round": 1, "node": 2, "accuracy": 0.5},
        {"scope": "network", "round": 1, "loss": 1.0, "accuracy": 0.5},
    ]
    assert first_difference(old, old) == ""
    changed = [old[0], {**old[1], "loss": 2.0, "accuracy": 0.6}]
    assert first_difference(old, changed) == "round 1: loss was 1.0, is now 2.0"
    node = [{**old[0], "accuracy": 0.25}, old[1]]
    assert first_difference(old, node) == "node 2, round 1: accuracy was 0.5, is now 0.25"
    assert (
        first_difference(old, [old[0], {**old[1], "new": 1}]) == "round 1: new was None, is now 1"
    )
    assert first_difference(old, old[:1]) == "2 rows were recorded, the new run has 1"


def test_verify_compares_with_what_was_recorded(tmp_path: Path) -> None:
    result = pg.run(tiny(), tmp_path / "run")
    verdict = pg.verify(tmp_path / "run")
    assert verdict == pg.Verdict(True, result.digest, result.digest)
    other = pg.verify(tmp_path / "run", experiment=tiny(seed=1))
    assert not other.same
    assert other.digest == result.digest != other.again
    assert other.difference.startswith("node 0, round 0: accuracy was ")
