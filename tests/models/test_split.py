"""`pg.Split`: users name the head of any model, and it stays what it is in runs and files."""

from typing import Any

import pytest
import torch
from support.networking import network_of, run_peers
from torch import Tensor, nn

import peerage as pg
from peerage.engine.prepare import prepare
from peerage.errors import InputError, Interrupted
from peerage.experiment.identity import run_key
from peerage.net.peer.network import Network
from peerage.requests import TensorSpec
from peerage.testing import simulate, toy


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU())
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(self.body(x)))
        return logits


class SendsHeads(pg.DecAvg):
    """Averages heads with their statistics; cores stay with their nodes."""

    async def round(self, node: pg.Node[Any]) -> None:
        await node.train(self.local)
        head, statistics = node.layout.part("head"), node.buffer_layout.part("head")
        inbox = await node.exchange(x=node.params[head], b=node.buffers[statistics])
        weights = inbox.data_weights()
        params, buffers = node.params.clone(), node.buffers.clone()
        params[head], buffers[statistics] = inbox.mean("x", weights), inbox.mean("b", weights)
        node.params, node.buffers = params, buffers

    def message_schema(self, dimensions: Any) -> dict[str, Any]:
        head = dimensions.layout.part_size("head")
        statistics = dimensions.buffer_layout.part_size("head")
        return {"x": TensorSpec((head,)), "b": TensorSpec((statistics,))}


def experiment(model: Any, **changes: Any) -> pg.Experiment:
    work = pg.LocalSGD(epochs=1, batch_size=4, lr=0.1)
    return toy(SendsHeads(work), model=model, **changes)


MODELS = {
    "module": pg.Split(Net(), head=("norm", "out")),
    "function": pg.Split(Net, head=["norm", "out"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_runs_resumes_and_comes_back(name, engine, tmp_path):
    wanted = experiment(MODELS[name], engine=engine)
    world = prepare(wanted)
    assert world.layouts["Net"].head == ("norm", "out")
    assert world.layouts["Net"].part_size("head") == 12 + 21
    assert world.buffer_layouts["Net"].part_size("head") == 12
    result = pg.run(wanted)
    heads = [result.parameters[node][world.layouts["Net"].part("head")] for node in range(5)]
    assert not torch.equal(heads[0], heads[2])  # the ring has mixed them, not made them equal
    module = result.module(0)
    assert isinstance(module, Net)
    assert torch.equal(module.out.bias, heads[0][-3:])
    with pytest.raises(Interrupted):
        pg.run(wanted, tmp_path / "run", checkpoint_every=1, watch=stop_after_the_first_round)
    assert pg.resume(tmp_path / "run", experiment=wanted).digest == result.digest


@pytest.mark.parametrize("name", MODELS)
def test_peers_with_a_split_model_end_with_the_bits_of_the_simulator(name):
    wanted = experiment(MODELS[name])
    peers = run_peers(wanted)
    for peer, params in zip(peers, simulate(wanted).end, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
        assert dict(peer.counters) == {}


@pytest.mark.parametrize("given", ["mlp:hidden=8x5", {"name": "mlp", "hidden": "8x5"}])
def test_the_head_of_a_named_model_is_kept_in_a_file(given):
    wanted = pg.Experiment(model=pg.Split(given, head=("hidden2", "head")))
    again = pg.Experiment.from_toml(wanted.to_toml())
    assert again.to_toml() == wanted.to_toml()
    assert again.model == wanted.model
    world = prepare(toy(pg.DecAvg(), model=again.model))
    assert world.layouts["mlp"].head == ("hidden2", "head")
    plain = pg.Experiment(model=given)
    assert pg.Experiment(model=pg.Split(given)) == plain  # with the default head
    assert "head" not in plain.to_toml()
    assert run_key(wanted) != run_key(plain)


def test_the_files_of_a_network_hold_the_head(tmp_path):
    model = pg.Split("mlp:hidden=8x5", head=("hidden2", "head"))
    network = network_of(pg.Experiment(model=model, nodes=2, topology="ring"))
    (tmp_path / "experiment.toml").write_text(network.experiment.to_toml())
    (tmp_path / "network.toml").write_text(network.to_toml("experiment.toml"))
    loaded = Network.load(tmp_path / "network.toml")
    assert loaded.experiment.model == network.experiment.model
    assert loaded.shared_settings == network.shared_settings
    plain = network_of(pg.Experiment(model="mlp:hidden=8x5", nodes=2, topology="ring"))
    assert plain.shared_settings != network.shared_settings  # such peers reject each other


def stop_after_the_first_round(row: dict[str, Any]) -> None:
    if row["scope"] == "network" and row["round"] == 1:
        raise KeyboardInterrupt


def test_a_run_with_the_head_of_a_named_model_resumes_from_its_folder(engine, tmp_path):
    wanted = pg.Experiment(
        model=pg.Split("mlp:hidden=8x5", head=("hidden2", "head")),
        algorithm="decavg",
        nodes=3,
        topology="ring",
        rounds=2,
        local={"epochs": 1, "only": "head"},
        engine=engine,
    )
    whole = pg.run(wanted)
    with pytest.raises(Interrupted):
        pg.run(wanted, tmp_path / "run", checkpoint_every=1, watch=stop_after_the_first_round)
    assert pg.resume(tmp_path / "run").digest == whole.digest


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: pg.Split(Net(), head="uot"), "no module 'uot', which should be its head; did you"),
        (lambda: pg.Split(Net, head=3), r"head must be names of modules, got 3; write head="),
        (lambda: pg.Split(3, head="out"), "model cannot be 3; give a name such as"),
        (lambda: pg.Split("mlp", head="outs"), "has no module 'outs', which should be its head"),
    ],
)
def test_bad_splits_are_one_line(build, found):
    with pytest.raises(InputError, match=found):
        prepare(toy(pg.DecAvg(), model=build()))


def test_peers_and_folders_know_the_head_of_an_object():
    one, other = (pg.Experiment(model=pg.Split(Net, head=head)) for head in ("out", "norm"))
    assert one.table()["model"] == {"name": "python-object", "value": "Net", "head": ["out"]}
    assert one.table() != other.table()
    with pytest.raises(InputError, match="is a Python object"):
        pg.Experiment.from_toml(one.to_toml())
