"""Runs and networks that start from the model in a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.command_line import error_line, peerage
from support.networking import run_peers
from torch import Tensor, nn

import peerage as pg
from peerage.data.datasets import Digits
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.experiment.identity import identity, run_key
from peerage.models import MODELS
from peerage.net.peer.network import Network
from peerage.runs.saved import open_run


def tiny(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "decavg",
        "model": "digits-cnn",
        "nodes": 2,
        "topology": "complete",
        "partition": "iid",
        "rounds": 1,
        "local": {"steps": 2},
        "evaluation": {"at": "end"},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**settings | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file that `peerage model` wrote."""
    home = tmp_path_factory.mktemp("trained")
    pg.run(tiny(seed=5), home / "run")
    done = peerage(f"model {home}/run --node 1 --out {home}/model.safetensors")
    assert done.code == 0, done.err
    return home / "model.safetensors"


def from_file(path: Path, **changes: Any) -> pg.Experiment:
    return tiny(init={"start": f"file:{path}"}, **changes)


def starts(experiment: pg.Experiment) -> list[dict[str, Tensor]]:
    """The initial models of all nodes."""
    world = prepare(experiment)
    kinds = [world.architecture(node) for node in range(world.nodes)]
    return [kind.state_dict(*world.initial(node)) for node, kind in enumerate(kinds)]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# The start


def test_all_nodes_start_from_the_file(trained):
    wanted = load_file(trained)
    assert all(same(model, wanted) for model in starts(from_file(trained)))
    last = open_run(trained.parent / "run").choose(1)
    result = pg.run(from_file(trained))
    before = [row for row in result.rows if row["round"] == 0 and row["scope"] == "node"]
    data = Digits().load(Path())
    right = last.module()(data.test_x).argmax(1) == data.test_y
    accuracy = float(right.double().mean())
    assert [row["accuracy"] for row in before] == [accuracy, accuracy]


@pytest.mark.parametrize("form", ["safetensors", "pt", "pth"])
def test_a_file_may_come_from_another_program(form, tmp_path):
    """Also with another type of numbers, and with weights in another memory format."""
    module = MODELS["digits-cnn"]().build((1, 8, 8), 10).to(memory_format=torch.channels_last)
    state = {name: value.double() for name, value in module.state_dict().items()}
    path = tmp_path / f"mine.{form}"
    if form == "safetensors":
        save_file({name: value.contiguous() for name, value in state.items()}, path)
    else:
        torch.save(state, path)
    assert all(same(model, dict(module.state_dict())) for model in starts(from_file(path)))


def test_statistics_of_the_file_are_used_and_its_counters_are_not(tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))
    module(torch.rand(9, 1, 8, 8))
    save_file(module.state_dict(), tmp_path / "norm.safetensors")
    experiment = from_file(tmp_path / "norm.safetensors", model=module)
    for model in starts(experiment):
        assert torch.equal(model["1.running_mean"], module[1].running_mean)


def test_weights_that_layers_share_may_be_stored_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.second.weight = self.first.weight
            self.head = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.second(torch.relu(self.first(x.flatten(1)))))

    module = Tied()
    state = {name: x for name, x in module.state_dict().items() if name != "second.weight"}
    save_file(state, tmp_path / "tied.safetensors")
    [model, _] = starts(from_file(tmp_path / "tied.safetensors", model=Tied))
    assert torch.equal(model["first.weight"], module.first.weight)


def test_peers_and_simulation_start_with_the_same_bits(trained):
    experiment = from_file(trained)
    simulated = pg.run(experiment)
    peers = run_peers(experiment)
    for peer, params in zip(peers, simulated.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
    assert simulated.digest != pg.run(tiny(init={"start": "shared"})).digest


# The identity


def test_the_content_is_part_of_the_identity_and_the_path_is_not(trained, tmp_path):
    copy, other = tmp_path / "copy.safetensors", tmp_path / "other.safetensors"
    copy.write_bytes(trained.read_bytes())
    save_file({name: x + 1 for name, x in load_file(trained).items()}, other)
    here, there, changed = (from_file(path) for path in (trained, copy, other))
    assert identity(here) == identity(there) != identity(changed)
    assert run_key(here) == run_key(there) != run_key(changed)
    assert str(trained) not in str(identity(here))
    assert here.init.file == str(trained)


def test_keys_of_other_experiments_do_not_know_the_file():
    assert tiny().table()["init"].keys() == {"start", "scheme", "gain"}
    assert "init" not in run_key(tiny())


def test_an_experiment_with_a_file_survives_a_file(trained, tmp_path, monkeypatch):
    experiment = from_file(trained)
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment
    # A relative path in an experiment file is relative to that file; one in a flag is not.
    (tmp_path / "model.safetensors").write_bytes(trained.read_bytes())
    for text in ('start = "file:model.safetensors"', 'start = "file"\nfile = "model.safetensors"'):
        (tmp_path / "mine.toml").write_text(f"[init]\n{text}\n")
        found = pg.Experiment.from_toml((tmp_path / "mine.toml").read_text(), folder=tmp_path)
        assert found.init == experiment.init.model_copy(
            update={"file": str(tmp_path / "model.safetensors")}
        )
    monkeypatch.chdir(trained.parent)
    assert from_file(Path("model.safetensors")) == experiment


def test_a_run_is_resumed_with_the_same_file_only(trained, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(trained.read_bytes())

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(pg.PeerageError):
        pg.run(from_file(path, rounds=3), tmp_path / "run", checkpoint_every=1, watch=stop)
    path.rename(tmp_path / "moved.safetensors")
    # Models can be got out without the file.
    assert open_run(tmp_path / "run").choose(0).facts["round"] == 1
    with pytest.raises(InputError, match=f"cannot read model file {path}: No such file"):
        pg.resume(tmp_path / "run")
    path.write_bytes(b"other")
    with pytest.raises(InputError, match=r"has the SHA-256 .* but the experiment expects"):
        pg.resume(tmp_path / "run")
    moved = from_file(tmp_path / "moved.safetensors", rounds=3)
    assert pg.resume(tmp_path / "run", experiment=moved).digest == pg.run(moved).digest


def test_export_puts_the_file_into_every_folder(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("10.0.0.10\n10.0.0.11\n")
    done = peerage(
        "export --nodes 2 --topology complete --model digits-cnn --rounds 1 --init",
        f"file:{trained}",
    )
    assert done.code == 0, done.err
    monkeypatch.chdir("/")
    for me in range(2):
        folder = tmp_path / "deploy" / f"node-{me}"
        assert (folder / "init.safetensors").read_bytes() == trained.read_bytes()
        text = (folder / "experiment.toml").read_text()
        assert 'file = "init.safetensors"' in text
        assert str(trained.parent) not in text
        loaded = Network.load(folder / "network.toml").experiment
        assert loaded.init.file == str(folder / "init.safetensors")
        assert identity(loaded)["init"]["sha256"] == loaded.init.sha256


# What does not fit


def changed(trained: Path, folder: Path, **tensors: Tensor | None) -> Path:
    state = {name.replace(".", "_"): (name, x) for name, x in load_file(trained).items()}
    for key, value in tensors.items():
        name = state[key][0] if key in state else key
        state[key] = (name, value)  # type: ignore[assignment]
    path = folder / "changed.safetensors"
    save_file({name: x for name, x in state.values() if x is not None}, path)
    return path


def test_the_first_tensor_that_does_not_fit_is_named(trained, tmp_path):
    names = list(load_file(trained))
    first = next(name for name in starts(from_file(trained))[0] if name in names)
    key = first.replace(".", "_")
    whole = load_file(trained)[first]
    for change, said in (
        ({key: None}, f"tensor '{first}' is missing in the file"),
        ({key: whole[:1].clone()}, f"tensor '{first}' has the shape (1, "),
        ({key: whole.long()}, f"tensor '{first}' has the type torch.int64 in the file and "),
        ({key: whole / 0}, f"tensor '{first}' has NaN or infinite entries in the file"),
        ({"more": whole}, "tensor 'more' is in the file, but not in the model"),
    ):
        path = changed(trained, tmp_path, **change)
        with pytest.raises(InputError) as caught:
            prepare(from_file(path))
        assert f"{path} does not fit model 'digits-cnn': {said}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_that_fits_only_some_nodes(trained):
    with pytest.raises(InputError, match=r"'logistic-1': tensor '.*' has the shape"):
        prepare(from_file(trained, model=["digits-cnn", "logistic"]))


def test_frozen_parameters_must_be_those_of_the_file(tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    module[1].weight.requires_grad = False
    save_file(module.state_dict(), tmp_path / "frozen.safetensors")
    [model, _] = starts(from_file(tmp_path / "frozen.safetensors", model=module))
    assert torch.equal(model["1.weight"], module[1].weight)
    state = module.state_dict()
    save_file({**state, "1.weight": state["1.weight"] + 1}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"tensor '1.weight' has other values than the frozen"):
        prepare(from_file(tmp_path / "other.safetensors", model=module))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--init file:none.safetensors", "cannot read model file "),
        ("--init file", "init: start = file requires the path of a model; write --init file:FILE"),
        ("--init fil", "init: start must be one of shared, independent, file"),
        ("--init file:mine.toml", "mine.toml is no model file ("),
        ("--init file:{trained} --gain graph", "init: the values of a model file are used as"),
        ("--init file:{trained} --algorithm ifca:k=2", "ifca draws 2 different models to start"),
        ("--init shared:{trained}", 'init: file requires start = "file"; set it, or remove file'),
    ],
)
def test_bad_input_is_one_line(flags, said, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text("text")
    line = error_line(
        peerage(f"run --nodes 2 --model digits-cnn --rounds 1 {flags.format(trained=trained)}")
    )
    assert said in line


def test_text_is_no_model(tmp_path):
    torch.save({"a": "text"}, tmp_path / "text.pt")
    with pytest.raises(InputError, match="holds other things than named tensors; save a state"):
        prepare(from_file(tmp_path / "text.pt"))
    (tmp_path / "broken.pt").write_bytes(b"\x80\x04garbage")
    with pytest.raises(InputError, match=r"broken.pt is no model file \("):
        prepare(from_file(tmp_path / "broken.pt"))
