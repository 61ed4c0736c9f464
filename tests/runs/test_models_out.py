"""Trained models as files and modules: each is the one that was evaluated."""

import json
import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.command_line import TINY, error_line, peerage
from torch import Tensor, nn

import peerage as pg
from peerage.aggregation import weighted_mean
from peerage.data.datasets import Digits
from peerage.errors import InputError
from peerage.files import read_json, write_json
from peerage.models import MODELS
from peerage.records.rows import read_metrics
from peerage.runs import saved
from peerage.runs.model_files import write_model
from peerage.runs.saved import open_run

DIGITS = Digits().load(Path())
FORMATS = ("safetensors", "pt", "onnx")


def tiny(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "decavg",
        "model": "logistic",
        "nodes": 4,
        "topology": "ring",
        "partition": "iid",
        "rounds": 2,
        "local": {"epochs": 1, "batch_size": 90},
        "evaluation": {"at": "end"},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**settings | changes)


def logits_of(module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module.eval()(DIGITS.test_x)


def logits_of_file(path: Path, module: nn.Module) -> Tensor:
    """What the file's model says of the test set; weights are loaded into the plain module."""
    if path.suffix == ".onnx":
        from onnx.reference import ReferenceEvaluator

        [logits] = ReferenceEvaluator(str(path)).run(None, {"x": DIGITS.test_x.numpy()})
        return torch.from_numpy(logits)
    if path.suffix == ".pt":
        module.load_state_dict(torch.load(path, weights_only=True))
    else:
        module.load_state_dict(load_file(path))
    return logits_of(module)


def accuracy(logits: Tensor) -> float:
    return (logits.argmax(1) == DIGITS.test_y).double().mean().item()


def recorded(rows: list[dict[str, Any]], node: int) -> float:
    """The accuracy of a node in its last row."""
    return next(row["accuracy"] for row in reversed(rows) if row.get("node") == node)


@dataclass(frozen=True)
class Total:
    x: Tensor  # [d] the sum of the parameters after every round


@dataclass(frozen=True)
class Averaged(pg.Algorithm[Total]):
    """Metrics evaluate the mean of the parameters over the rounds so far."""

    local: pg.LocalSGD = pg.LocalSGD(epochs=1)

    def init(self, node: pg.Node[Total]) -> Total:
        return Total(torch.zeros_like(node.params))

    async def round(self, node: pg.Node[Total]) -> None:
        await node.train(self.local)
        inbox = (await node.exchange(x=node.params)).alike(node.architecture)
        node.params = weighted_mean(inbox["x"], inbox.data_weights())
        node.state = Total(node.state.x + node.params)

    def evaluated(self, node: pg.Node[Total]) -> Tensor:
        return node.state.x / (node.round + 1)


class Normalised(nn.Module):
    """Running statistics, a counter, a constant of whole numbers, and a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 10)
        self.register_buffer("order", torch.arange(4 * 36).flip(0))

    def forward(self, x: Tensor) -> Tensor:
        features = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(features[:, self.order])


# One headline model


def test_a_result_gives_the_model_that_metrics_evaluated(tmp_path, engine):
    result = pg.run(tiny(algorithm=Averaged(), rounds=3, engine=engine), tmp_path / "run")
    for node in range(4):
        assert not torch.equal(result.evaluated[node], result.parameters[node])
        assert accuracy(logits_of(result.module(node))) == recorded(result.rows, node)
        state, layout = result.state_dict(node), result.architectures[node].layout
        assert torch.equal(layout.flatten(state), result.evaluated[node])
        assert torch.equal(logits_of(result.module(node)), logits_of(module_with(state)))
    # The digest is over the parameters with which the algorithm would continue.
    from peerage.runs.summary import digest

    layouts = [architecture.layout for architecture in result.architectures]
    assert result.digest == digest(result.parameters, layouts)


def module_with(state: dict[str, Tensor]) -> nn.Module:
    module = MODELS["logistic"]().build(DIGITS.shape, 10)
    module.load_state_dict(state)
    return module


def test_most_algorithms_evaluate_the_parameters_themselves():
    result = pg.run(tiny())
    pairs = zip(result.evaluated, result.parameters, strict=True)
    assert all(evaluated is params for evaluated, params in pairs)


def test_a_run_that_has_nothing_left_to_do_returns_the_same_models(tmp_path):
    # Killed between its last checkpoint and its end. Node 1 left after the first round.
    experiment = tiny(algorithm=Averaged(), rounds=3, faults={"leave": "1@2"})
    first = pg.run(experiment, tmp_path / "run")
    write_json(tmp_path / "run" / "summary.json", {**first.summary, "status": "running"})
    again = pg.resume(tmp_path / "run", experiment=experiment)
    assert again.digest == first.digest
    for one, other in zip(first.evaluated, again.evaluated, strict=True):
        assert torch.equal(one, other)


def test_at_exchange_the_last_rows_are_of_models_before_aggregation(tmp_path):
    # Nodes with two classes each, whose models change a lot when they are combined.
    settings = {"partition": "shards", "rounds": 1, "algorithm": "decavg"}
    before = pg.run(tiny(evaluation={"at": "exchange"}, **settings))
    after = pg.run(tiny(evaluation={"at": "end"}, **settings))
    assert before.digest == after.digest
    for node in range(4):
        assert accuracy(logits_of(before.module(node))) == recorded(after.rows, node)
    assert before.accuracy != after.accuracy


# From a folder


def test_a_record_gives_the_models_of_the_result(tmp_path):
    experiment = tiny(algorithm=Averaged(), model=["logistic", "mlp:hidden=8"])
    result = pg.run(experiment, tmp_path / "run")
    record = pg.RunRecord.load(tmp_path / "run")
    for node in range(4):
        wanted, found = result.state_dict(node), record.state_dict(node)
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert accuracy(logits_of(record.module(node))) == recorded(result.rows, node)


def test_an_unfinished_run_gives_its_last_checkpoint(tmp_path):
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(pg.PeerageError):
        pg.run(tiny(rounds=9), tmp_path / "run", checkpoint_every=1, watch=stop)
    wanted = pg.run(tiny(rounds=2))
    out = tmp_path / "model.pt"
    done = peerage(f"model {tmp_path}/run --node 1 --out {out}")
    assert done.out == f"{out}: logistic of node 1 after round 2 of 9, 650 parameters\n"
    assert torch.equal(
        logits_of_file(out, module_with({**wanted.state_dict(0)})), logits_of(wanted.module(1))
    )
    # Row 3 was recorded after the checkpoint, and does not count.
    best = open_run(tmp_path / "run").choose("best")
    rows = [row for row in wanted.rows if row["scope"] == "node" and row["round"] == 2]
    assert best.facts["accuracy"] == max(row["accuracy"] for row in rows)


@pytest.fixture(scope="module")
def convolved(tmp_path_factory: pytest.TempPathFactory) -> pg.Result:
    experiment = tiny(model="digits-cnn", rounds=3, partition="dirichlet:alpha=1")
    return pg.run(experiment, tmp_path_factory.mktemp("convolved") / "run")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_has_the_recorded_accuracy_in_the_plain_module(convolved, tmp_path, format):
    result = convolved
    out = tmp_path / f"model.{format}"
    done = peerage(f"model {result.folder} --node 2 --out {out} --json")
    assert done.code == 0, done.err
    module = MODELS["digits-cnn"]().build(DIGITS.shape, 10)
    logits = logits_of_file(out, module)
    assert accuracy(logits) == recorded(result.rows, 2)
    torch.testing.assert_close(logits, logits_of(result.module(2)), rtol=1e-4, atol=1e-4)
    said = json.loads(done.lines[-1])
    assert said["model"] == str(out)
    assert [said[key] for key in ("format", "node", "round", "architecture", "parameters")] == [
        *(format, 2, 3, "digits-cnn", sum(p.numel() for p in module.parameters()))
    ]
    assert list(tmp_path.iterdir()) == [out]  # nothing was left beside it


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_has_running_statistics_and_constants(tmp_path, format):
    experiment = tiny(model=Normalised, nodes=3)
    result = pg.run(experiment, tmp_path / "run")
    assert not torch.equal(result.buffers[1][:4], torch.zeros(4))
    out = tmp_path / f"model.{format}"
    write_model(open_run(tmp_path / "run", experiment=experiment).choose(1), out)
    logits = logits_of_file(out, Normalised())
    assert accuracy(logits) == recorded(result.rows, 1)
    torch.testing.assert_close(logits, logits_of(result.module(1)), rtol=1e-4, atol=1e-4)


def test_weights_that_two_layers_share_are_in_the_file_under_both_names(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(torch.relu(self.first(x.flatten(1)))))

    experiment = tiny(model=Tied, nodes=2, topology="complete")
    result = pg.run(experiment, tmp_path / "run")
    write_model(
        open_run(tmp_path / "run", experiment=experiment).choose(0), tmp_path / "m.safetensors"
    )
    assert accuracy(logits_of_file(tmp_path / "m.safetensors", Tied())) == recorded(result.rows, 0)


def test_a_file_says_where_its_model_comes_from(tmp_path):
    import hashlib

    import onnx

    pg.run(tiny(), tmp_path / "ring-run")
    for format in ("safetensors", "onnx"):
        done = peerage(f"model {tmp_path}/ring-run --node 3 --out {tmp_path}/model.{format}")
        assert done.code == 0, done.err
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    text = (tmp_path / "ring-run" / "experiment.toml").read_bytes()
    assert metadata == {
        "format": "pt",
        "run": "ring-run",
        "algorithm": "decavg",
        "dataset": "digits",
        "experiment": hashlib.sha256(text).hexdigest(),
        "node": "3",
        "round": "2",
        "rounds_planned": "2",
        "architecture": "logistic",
        "parameters": "650",
    }
    props = onnx.load(tmp_path / "model.onnx").metadata_props
    assert {one.key: one.value for one in props}.items() <= metadata.items()


def test_the_model_of_every_client_is_that_of_the_hub(tmp_path):
    result = pg.run(tiny(algorithm="fedavg", topology="star:centre=last"), tmp_path / "run")
    for which in ("", "--node 0", "--node 4", "--node best", "--node mean"):
        out = tmp_path / "model.pt"
        done = peerage(f"model {tmp_path}/run {which} --out {out} --force")
        assert done.code == 0, done.err
        logits = logits_of_file(out, module_with(result.state_dict(0)))
        assert accuracy(logits) == recorded(result.rows, 4)
        assert torch.equal(logits, logits_of(result.module(1)))


def test_no_data_is_needed_to_get_a_model_out(tmp_path, monkeypatch):
    np.savez(tmp_path / "mine.npz", x=DIGITS.train_x.numpy(), y=DIGITS.train_y.numpy())
    result = pg.run(tiny(dataset=f"npz:path={tmp_path}/mine.npz"), tmp_path / "run")
    (tmp_path / "mine.npz").unlink()
    found = pg.RunRecord.load(tmp_path / "run").state_dict(1)
    assert all(torch.equal(found[name], x) for name, x in result.state_dict(1).items())


def test_data_graph_and_algorithm_may_be_python_objects(tmp_path):
    import networkx as nx

    class Inner(Averaged):  # in a function, where no file can point at it
        pass

    experiment = tiny(algorithm=Inner(), dataset=DIGITS, topology=nx.cycle_graph(4))
    result = pg.run(experiment, tmp_path / "run")
    found = pg.RunRecord.load(tmp_path / "run").state_dict(1)
    assert all(torch.equal(found[name], x) for name, x in result.state_dict(1).items())
    said = error_line(peerage(f"model {tmp_path}/run --node mean --out {tmp_path}/m.pt"))
    assert "is a Python object, so it is unknown whether its models have a mean; choose" in said
    mean = open_run(tmp_path / "run", experiment=experiment).choose("mean")
    assert torch.allclose(mean.params, torch.stack(list(result.evaluated)).mean(0), atol=1e-6)
    with pytest.raises(InputError, match="began with seed = 0, but the given experiment has 1"):
        open_run(tmp_path / "run", experiment=experiment.model_copy(update={"seed": 1}))


def test_folders_of_earlier_versions_give_their_models(tmp_path):
    # They do not say what an example looks like, so the data set is loaded.
    result = pg.run(tiny(), tmp_path / "run")
    forget_example(tmp_path / "run")
    found = pg.RunRecord.load(tmp_path / "run").state_dict(1)
    assert all(torch.equal(found[name], x) for name, x in result.state_dict(1).items())


def forget_example(folder: Path) -> None:
    setup = read_json(folder / "setup.json")
    write_json(folder / "setup.json", {k: v for k, v in setup.items() if k != "example"})


# Best and mean


def test_the_best_model_has_the_highest_last_accuracy(tmp_path):
    settings = {"partition": "dirichlet:alpha=0.3", "algorithm": "local"}
    result = pg.run(tiny(**settings), tmp_path / "run")
    accuracies = [recorded(result.rows, node) for node in range(4)]
    assert len(set(accuracies)) > 1
    best = open_run(tmp_path / "run").choose("best")
    assert best.facts["node"] == accuracies.index(max(accuracies))
    assert best.facts["accuracy"] == max(accuracies) == accuracy(logits_of(best.module()))
    assert best.facts["accuracy_round"] == 2


def test_the_best_model_is_chosen_on_held_out_data_where_there_are_any(tmp_path):
    evaluation = {"at": "end", "validation": 0.3}
    settings = {"partition": "dirichlet:alpha=0.3", "algorithm": "local", "evaluation": evaluation}
    result = pg.run(tiny(**settings), tmp_path / "run")
    last = {row["node"]: row for row in result.rows if row["scope"] == "node"}
    held_out = {node: row["validation_accuracy"] for node, row in last.items()}
    best = open_run(tmp_path / "run").choose("best")
    assert best.facts["node"] == max(held_out, key=lambda node: (held_out[node], -node))
    assert best.facts["validation_accuracy"] == max(held_out.values())
    assert "accuracy" not in best.facts


def test_the_mean_is_over_the_nodes_that_are_there_in_the_end(tmp_path):
    experiment = tiny(model=Normalised, faults={"leave": "1@2"})
    result = pg.run(experiment, tmp_path / "run")
    mean = open_run(tmp_path / "run", experiment=experiment).choose("mean")
    there = [0, 2, 3]
    assert (mean.facts["node"], mean.facts["nodes"]) == ("mean", there)
    for found, each in ((mean.params, result.evaluated), (mean.buffers, result.buffers)):
        wanted = torch.stack([each[node] for node in there]).double().mean(0)
        torch.testing.assert_close(found, wanted.float())
    out = tmp_path / "model.pt"
    write_model(mean, out)
    assert torch.equal(logits_of_file(out, Normalised()), logits_of(mean.module()))


def test_a_mean_is_rejected_where_it_makes_no_sense(tmp_path):
    pg.run(tiny(algorithm="local"), tmp_path / "local")
    said = error_line(peerage(f"model {tmp_path}/local --node mean --out {tmp_path}/m.pt"))
    assert said == (
        "algorithm local gives every node a personal model, and such models have no meaningful "
        "mean; choose --node best or the number of a node"
    )
    pg.run(tiny(model=["logistic", "mlp:hidden=8"]), tmp_path / "mixed")
    said = error_line(peerage(f"model {tmp_path}/mixed --node mean --out {tmp_path}/m.pt"))
    assert said == (
        "models of logistic-0 and mlp-1 have no mean; choose --node best or the number of a node"
    )
    assert not (tmp_path / "m.pt").exists()


# What can go wrong


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("runs") / "run"
    pg.run(tiny(), folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--out m.pt",
            "{run} holds 4 models; choose one with --node 0, --node best or --node mean",
        ),
        ("--node 4 --out m.pt", "{run} has no node 4; its nodes are 0 to 3"),
        ("--node -1 --out m.pt", "{run} has no node -1; its nodes are 0 to 3"),
        (
            "--node first --out m.pt",
            "--node must be the number of a node, best or mean, got 'first'",
        ),
        (
            "--node 0 --out model",
            "model has none of the endings .safetensors, .pt, .pth, .onnx; change --out, or add "
            "--format safetensors, pt or onnx",
        ),
        (
            "--node 0 --out m.pt --format tflite",
            "unknown format 'tflite'; known: onnx, pt, safetensors",
        ),
        ("--node 0 --out .", ". is a folder; give the name of a file to --out"),
        ("--node 0", "Missing option '--out'; see --help"),
        (
            "--node 0 --out nowhere/m.pt",
            "cannot write nowhere/m.pt: No such file or directory; choose a folder that you may "
            "write to",
        ),
    ],
)
def test_errors_are_one_line(run, flags, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if flags.endswith("--out ."):
        flags += " --format pt"
    assert error_line(peerage(f"model {run} {flags}")) == said.format(run=run)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_by_force(run, tmp_path):
    out = tmp_path / "m.pt"
    out.write_text("precious")
    said = error_line(peerage(f"model {run} --node 0 --out {out}"))
    assert said == f"{out} already exists; choose another --out, or add --force"
    assert out.read_text() == "precious"
    assert peerage(f"model {run} --node 0 --out {out} --force").code == 0
    assert len(torch.load(out, weights_only=True)) == 2


def test_the_format_may_differ_from_the_ending(run, tmp_path):
    out = tmp_path / "weights.bin"
    assert peerage(f"model {run} --node 0 --out {out} --format safetensors").code == 0
    assert load_file(out).keys() == pg.RunRecord.load(run).state_dict(0).keys()


def test_a_folder_without_models_is_one_line(tmp_path):
    out = f"--node 0 --out {tmp_path}/m.pt"
    said = error_line(peerage(f"model {tmp_path}/nothing {out}"))
    assert said == (
        f"there is no folder '{tmp_path}/nothing'; give one that `peerage run`, `peerage up` or "
        "`peerage node` made"
    )
    said = error_line(peerage(f"model {tmp_path} {out}"))
    assert said.startswith(f"run folder '{tmp_path}' has no experiment.toml; give a folder")
    pg.run(tiny(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    said = error_line(peerage(f"model {tmp_path}/run {out}"))
    assert said == f"{tmp_path}/run has no checkpoint yet; wait for its first one"


@pytest.mark.own_engine  # one file of all nodes
def test_a_corrupted_checkpoint_gives_no_model(tmp_path):
    pg.run(tiny(), tmp_path / "run")
    [part] = (tmp_path / "run" / "checkpoint" / "round-000002").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    said = error_line(peerage(f"model {tmp_path}/run --node 0 --out {tmp_path}/m.pt"))
    assert f"checkpoint file {part} is corrupted" in said


def test_a_model_that_is_a_python_object_needs_the_experiment(tmp_path):
    pg.run(tiny(model=Normalised, dataset=DIGITS), tmp_path / "run")
    said = error_line(peerage(f"model {tmp_path}/run --node 0 --out {tmp_path}/m.pt"))
    assert said == (
        f"the model of {tmp_path}/run is a Python object, which a file cannot hold; "
        "use peerage.RunRecord.load(folder).state_dict(node, experiment=...)"
    )
    pg.run(tiny(dataset=DIGITS), tmp_path / "old")
    forget_example(tmp_path / "old")
    said = error_line(peerage(f"model {tmp_path}/old --node 0 --out {tmp_path}/m.pt"))
    assert said.startswith(f"{tmp_path}/old is of an older version, and its experiment has Python")


@pytest.mark.own_engine  # one file of all nodes
def test_a_checkpoint_without_the_evaluated_parameters_is_rejected(tmp_path):
    pg.run(tiny(algorithm=Averaged()), tmp_path / "run")
    read = open_run(tmp_path / "run")
    [part] = (tmp_path / "run" / "checkpoint" / "round-000002").glob("*.safetensors")
    kept = {name: x for name, x in load_file(part).items() if not name.endswith("evaluated")}
    assert len(kept) == len(load_file(part)) - 4
    read.choose(0)  # reads the checkpoint, and its hashes
    save_file(kept, part)
    with pytest.raises(InputError, match="did not save the evaluated parameters of algorithm"):
        read.choose(0)


def test_a_missing_onnx_is_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    said = error_line(peerage(f"model {run} --node 0 --out {tmp_path}/m.onnx"))
    assert said == 'format onnx needs onnx; pip install "peerage[onnx]"'


class Fickle(nn.Module):
    """Does something else with other examples, which a trace cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(-x if float(x.sum()) > 0 else x)


class Stubborn(Fickle):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.rfft(x.flatten(1)).real.repeat(1, 2)[:, :64])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Fickle, "Fickle gives other outputs as ONNX than as a module, perhaps because it depends"),
        (Stubborn, "torch cannot export Stubborn to ONNX: "),
    ],
)
def test_a_network_that_onnx_would_get_wrong_is_rejected(tmp_path, model, said):
    experiment = tiny(model=model, nodes=2, topology="complete", rounds=1)
    pg.run(experiment, tmp_path / "run")
    chosen = open_run(tmp_path / "run", experiment=experiment).choose(0)
    with pytest.raises(InputError, match=said) as error:
        write_model(chosen, tmp_path / "m.onnx")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "m.onnx").exists()
    write_model(chosen, tmp_path / "m.pt")


# Real peers


def test_a_client_of_a_hub_keeps_no_model(tmp_path):
    # The folders that real peers would leave, with what a simulation saved.
    result = pg.run(tiny(algorithm="fedavg", topology="star:centre=last"), tmp_path / "run")
    (tmp_path / "network.toml").write_text('run = "clinics"\nexperiment = "run/experiment.toml"\n')
    for node in (0, 4):
        shutil.copytree(tmp_path / "run", tmp_path / f"node-{node}")
        (tmp_path / f"node-{node}" / "experiment.toml").unlink()
        write_json(tmp_path / f"node-{node}" / "peer.json", {"run": "clinics", "node": node})
    said = error_line(peerage(f"model {tmp_path}/node-0 --out {tmp_path}/m.pt"))
    assert said == (
        f"{tmp_path}/node-0 does not hold the model of the hub, node 4; give the folder of that "
        "peer"
    )
    found = open_run(tmp_path / "node-4").choose(None)
    assert [found.facts[key] for key in ("run", "node", "round")] == ["clinics", 4, 2]
    assert accuracy(logits_of(found.module())) == recorded(result.rows, 4)
    assert open_run(tmp_path).choose(0).facts["node"] == 0


@pytest.mark.slow
def test_networks_and_single_peers_give_their_models(tmp_path, monkeypatch):
    home = tmp_path / "up"
    done = peerage(
        f"up {TINY} --algorithm decavg --rounds 2 --eval-at after-aggregation --out {home}"
    )
    assert done.code == 0, done.err
    simulated = pg.run(tiny())
    monkeypatch.setattr(saved, "load_dataset", None)  # a peer's data may be on no other machine
    record = pg.RunRecord.load(home)
    rows = read_metrics(home / "metrics.jsonl")
    for node in range(4):
        found = record.state_dict(node)
        assert all(torch.equal(found[name], x) for name, x in simulated.state_dict(node).items())
        assert accuracy(logits_of(record.module(node))) == recorded(rows, node)
    mean = open_run(home).choose("mean")
    assert torch.allclose(mean.params, torch.stack(list(simulated.evaluated)).mean(0), atol=1e-6)
    best = open_run(home).choose("best").facts
    assert best["accuracy"] == max(recorded(rows, node) for node in range(4))

    # The folder of one peer: where `up` left it, as `export` lays it out, and somewhere else.
    shutil.copytree(home / "peers" / "node-1", tmp_path / "deploy" / "node-1" / "run")
    for file in ("experiment.toml", "network.toml"):
        shutil.copy(home / file, tmp_path / "deploy" / "node-1")
    shutil.copytree(home / "peers" / "node-1", tmp_path / "a" / "b" / "c" / "alone")
    alone = f"{tmp_path}/a/b/c/alone"
    for place in (
        f"{home}/peers/node-1",
        f"{tmp_path}/deploy/node-1",
        f"{tmp_path}/deploy/node-1/run",
        f"{alone} --network {home}/network.toml",
        alone,
    ):
        out = tmp_path / "model.safetensors"
        done = peerage(f"model {place} --out {out} --force --json")
        assert done.code == 0, done.err
        assert json.loads(done.lines[-1])["node"] == 1
        assert accuracy(logits_of_file(out, module_with(simulated.state_dict(0)))) == recorded(
            rows, 1
        )

    flags = f"--out {tmp_path}/m.pt"
    said = error_line(peerage(f"model {home}/peers/node-1 --node mean {flags}"))
    assert (
        said
        == f"{home}/peers/node-1 holds only the model of node 1, got --node mean; remove --node"
    )
    # Peers of earlier versions have no experiment in their folders.
    setup = read_json(Path(alone) / "setup.json")
    write_json(
        Path(alone) / "setup.json", {k: v for k, v in setup.items() if k in ("classes", "example")}
    )
    found = open_run(alone, network=home / "network.toml").choose(None)
    assert torch.equal(found.params, simulated.evaluated[1])
    said = error_line(peerage(f"model {alone} {flags}"))
    assert said == (
        f"there is no network.toml in {alone} or above it; give the network file of this peer with "
        "--network"
    )
    other = tmp_path / "other.toml"
    run = tomllib.loads((home / "network.toml").read_text())["run"]
    other.write_text((home / "network.toml").read_text().replace(run, "another"))
    said = error_line(peerage(f"model {alone} --network {other} {flags}"))
    assert said == (
        f"{other} is the network file of run another, but {alone} is of another run; give the "
        "right file with --network"
    )
    # A peer that is behind: its model is there, and has no place in a mean.
    shutil.rmtree(home / "peers" / "node-2" / "checkpoint" / "round-000002")
    assert open_run(home).choose(2).facts["round"] == 1
    said = error_line(peerage(f"model {home} --node mean {flags}"))
    assert said == (
        "a mean requires models of one round, but the checkpoint of node 2 is of round 1 and the "
        "newest of round 2; choose --node best or the number of a node"
    )
    shutil.rmtree(home / "peers" / "node-2")
    said = error_line(peerage(f"model {home} --node 2 {flags}"))
    assert said == f"{home} does not hold the model of node 2; give the folder of that peer"
