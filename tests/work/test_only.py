"""Training one part of a model: the other part is a fixed function, whatever the options are."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networking import run_peers
from torch import Tensor, nn

import peerage as pg
from peerage import LocalSGD, Proximal
from peerage.cli.flags import read_changes
from peerage.errors import InputError
from peerage.models.mlp import MLP
from peerage.testing import NODES, blobs, simulate, toy
from peerage.vectors import FlatModel
from peerage.work import training as training_module
from peerage.work.context import Examples, LocalContext
from peerage.work.evaluation import Score
from peerage.work.training import Train, Trained


class OnlyForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError("a backward pass through the frozen part")


class Guarded(nn.Module):
    """Cannot be differentiated; counts passes in training mode, and those that record a graph."""

    trained = recorded = 0

    def forward(self, x: Tensor) -> Tensor:
        self.trained += self.training
        self.recorded += x.requires_grad
        return OnlyForward.apply(x)


def network(*, guarded: bool = False) -> nn.Module:
    torch.manual_seed(3)
    # A bias before BatchNorm would have a gradient of mere rounding.
    core = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5)]
    first = nn.Linear(6, 5, bias=False)
    head = nn.Sequential(first, nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 3))
    return nn.Sequential(*core, Guarded() if guarded else nn.Identity(), head)


HEAD = ("5",)


def perceptron() -> nn.Module:
    torch.manual_seed(3)
    return MLP(hidden="6x5").build((4,), 3)


def local_data(module: nn.Module, head: tuple[str, ...] = (), **changes: Any) -> LocalContext:
    data = blobs()
    return LocalContext(
        node=0,
        round=0,
        seed=7,
        data=Examples(data.train_x, data.train_y),
        indices=torch.arange(22),
        architecture="net",
        models={"net": FlatModel(module, head)},
        persistent_tensors=changes.pop("persistent_tensors", {}),
        **changes,
    )


def train(work: LocalSGD, local: LocalContext, **options: Any) -> Trained:
    model = local.models["net"]
    return Train(work, model.params.clone(), model.buffers.clone(), {}, **options).run(local)


@dataclass(frozen=True)
class Pushes:
    """A correction that would move everything, and leaves traces in the vector that it gets."""

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor) -> Tensor:
        pushed = g + 1.0
        g.fill_(5.0)
        return pushed


WORKS = {
    "sgd": LocalSGD(epochs=2, batch_size=5, lr=0.1),
    "decay": LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": LocalSGD(steps=9, batch_size=5, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": LocalSGD(epochs=2, batch_size=5, lr=0.01, optimizer="adamw", weight_decay=0.3),
    "clamp": LocalSGD(epochs=2, batch_size=5, lr=0.1, loss_clamp=1.5),
    "proximal": LocalSGD(epochs=2, batch_size=5, lr=0.1, correct=Proximal(0.5), weight_decay=0.1),
    "proximal adamw": LocalSGD(
        epochs=2, batch_size=5, lr=0.01, optimizer="adamw", correct=Proximal(0.5), weight_decay=0.3
    ),
    "pushes": LocalSGD(epochs=2, batch_size=5, lr=0.1, correct=Pushes(), weight_decay=0.1),
    "pushes adamw": LocalSGD(
        epochs=2, batch_size=5, lr=0.01, optimizer="adamw", correct=Pushes(), weight_decay=0.3
    ),
    "kept": LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.9, keep_optimizer=True),
}


@pytest.mark.parametrize("only", ["head", "core"])
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("build", [network, perceptron])
def test_the_rest_stays_as_it_was_bit_by_bit(build, name, only):
    head = HEAD if build is network else ("hidden2", "head")
    local = local_data(build(), head)
    model = local.models["net"]
    rest = "core" if only == "head" else "head"
    start, statistics = model.params.clone(), model.buffers.clone()
    trained = train(replace(WORKS[name], only=only), local, squares=True)
    part, other = model.layout.part(only), model.layout.part(rest)
    assert torch.equal(trained.params[other], start[other])
    assert (trained.params[part] != start[part]).float().mean() > 0.5
    assert trained.stats.squares is not None
    assert not trained.stats.squares[other].any()
    assert trained.stats.squares[part].any()
    assert trained.stats.steps == (9 if WORKS[name].steps else 10)
    part, other = model.buffer_layout.part(only), model.buffer_layout.part(rest)
    assert torch.equal(trained.buffers[other], statistics[other])
    assert build is perceptron or (trained.buffers[part] != statistics[part]).all()


def test_the_steps_of_training_are_counted():
    assert train(LocalSGD(epochs=3, batch_size=5), local_data(network())).stats.steps == 15
    assert train(LocalSGD(steps=7, batch_size=5), local_data(network())).stats.steps == 7
    nothing = replace(local_data(network()), indices=torch.arange(0))
    assert train(LocalSGD(epochs=3), nothing).stats.steps == 0


# Against training on features


@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("build", [network, perceptron])
def test_training_the_head_is_training_on_features(build, name):
    """Of the core in evaluation mode: with its running statistics, and without dropout."""
    work, cut = replace(WORKS[name], only="head"), 5 if build is network else 3
    names = HEAD if build is network else ("hidden2", "head")
    local = local_data(build(), names)
    core, head = build()[:cut].eval(), build()[cut:]
    with torch.no_grad():
        features = core(local.data.x)
    alone = replace(
        local_data(build()),
        data=Examples(features, local.data.y),
        models={"net": FlatModel(head)},
    )
    found, wanted = train(work, local), train(replace(work, only=None), alone)
    model = local.models["net"]
    torch.testing.assert_close(found.params[model.layout.part("head")], wanted.params)
    torch.testing.assert_close(found.buffers[model.buffer_layout.part("head")], wanted.buffers)
    assert found.stats.loss == pytest.approx(wanted.stats.loss, rel=1e-5)


def test_training_the_core_is_what_torch_does_with_a_frozen_head():
    work = LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.9, weight_decay=0.1, only="core")
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    torch.manual_seed(3)
    same = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    optimiser = torch.optim.SGD(expected[:3].parameters(), 0.1, 0.9, weight_decay=0.1)
    expected.train()
    for x, y in work.batches(local_data(nn.Linear(4, 3))):
        optimiser.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        optimiser.step()
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    found = train(work, local_data(same))
    torch.testing.assert_close(found.params, wanted)


def test_no_backward_pass_runs_through_the_frozen_core():
    local = local_data(network(guarded=True), HEAD)
    train(LocalSGD(epochs=1, batch_size=5, only="head"), local)
    guard = local.models["net"].module[4]
    assert (guard.trained, guard.recorded) == (0, 0)  # as under torch.no_grad
    assert all(tensor.requires_grad for tensor in local.models["net"].tensors)  # afterwards
    with pytest.raises(AssertionError, match="backward pass through the frozen part"):
        train(LocalSGD(epochs=1, batch_size=5, only="core"), local)
    assert all(tensor.requires_grad for tensor in local.models["net"].tensors)


def test_a_head_that_is_not_at_the_end_trains_through_a_fixed_core():
    """The gradient passes the core on its way to the first layer."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))

    work = LocalSGD(epochs=2, batch_size=5, lr=0.1, weight_decay=0.1, only="head")
    expected = build()
    optimiser = torch.optim.SGD(
        [*expected[0].parameters(), *expected[3].parameters()], 0.1, weight_decay=0.1
    )
    for x, y in work.batches(local_data(build())):
        optimiser.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        optimiser.step()
    found = train(work, local_data(build(), ("0", "3")))
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    torch.testing.assert_close(found.params, wanted)


# Momentum between rounds


def test_each_part_keeps_its_own_momentum():
    """Parts in turn, with one optimiser of torch for each of them."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    work = LocalSGD(steps=3, batch_size=5, lr=0.1, momentum=0.9, keep_optimizer=True)
    expected = build()
    optimisers = {
        "head": torch.optim.SGD(expected[2].parameters(), 0.1, 0.9),
        "core": torch.optim.SGD(expected[0].parameters(), 0.1, 0.9),
    }
    local, other = local_data(build()), local_data(build())
    params, buffers = local.models["net"].params.clone(), local.models["net"].buffers.clone()
    for only in ("head", "core", "core", "head", None):
        for x, y in other.steps(3, 5):
            expected.zero_grad()
            F.cross_entropy(expected(x), y).backward()
            for part, optimiser in optimisers.items():
                if only in (part, None):
                    optimiser.step()
        trained = Train(replace(work, only=only), params, buffers, {}).run(local)
        params, buffers = trained.params, trained.buffers
        wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
        torch.testing.assert_close(params, wanted)


# Modes


def test_a_rollback_leaves_the_frozen_part_in_evaluation_mode(monkeypatch):
    monkeypatch.setattr(training_module, "score", lambda model, _: (model.module.eval(), LOSS)[1])
    data = blobs()
    held_out = Examples(data.test_x, data.test_y)
    local = local_data(network(guarded=True), HEAD, held_out=held_out)
    work = LocalSGD(epochs=2, batch_size=5, early_stop="rollback", only="head")
    assert train(work, local).stats.steps == 10
    module = local.models["net"].module
    assert module[4].trained == 0
    assert (module[5].training, module[1].training) == (True, False)


LOSS = Score(accuracy=0.5, loss=1.0)


def test_batches_of_one_matter_only_to_statistics_that_are_trained():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    local = replace(local_data(module), indices=torch.arange(21))
    assert train(LocalSGD(epochs=1, batch_size=5), local).stats.steps == 4  # merged
    assert train(LocalSGD(epochs=1, batch_size=5, only="head"), local).stats.steps == 5
    assert train(LocalSGD(epochs=1, batch_size=5, only="core"), local).stats.steps == 4


# Settings


def test_the_whole_model_as_head_is_refused():
    found = "only=head requires a model with a core and a head, but its head is the whole model; "
    with pytest.raises(InputError, match=found):
        train(LocalSGD(epochs=1, only="head"), local_data(nn.Linear(4, 3)))
    experiment = toy(pg.DecAvg(), model="logistic", local={"only": "core"})
    with pytest.raises(InputError, match=r"only=core requires .* its head 'head' is the whole"):
        pg.run(experiment)


def test_what_only_cannot_do_is_one_line():
    with pytest.raises(InputError, match="only must be one of head, core; got 'heads', did you"):
        LocalSGD(only="heads")
    with pytest.raises(
        InputError, match=r"keep_optimizer with adamw counts .* got only=head; leave"
    ):
        LocalSGD(only="head", optimizer="adamw", keep_optimizer=True)


def test_files_and_flags_know_only():
    plain, changed = pg.Experiment(algorithm="decavg"), {"local": {"only": "head"}}
    assert "only" not in plain.to_toml()
    assert read_changes({"only": "head"}) == changed
    experiment = pg.Experiment.from_toml(plain.to_toml(), **changed)
    assert experiment.work.only == experiment.algorithm.local.only == "head"
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment


# Runs


@pytest.mark.parametrize("only", ["head", "core"])
def test_runs_train_one_part_with_the_same_bits_in_every_engine(only, engine):
    work = LocalSGD(epochs=1, batch_size=4, momentum=0.9, weight_decay=0.1, only=only)
    model = pg.Split(network, head=HEAD)
    experiment = toy(pg.Local(work), model=model, engine=engine, rounds=2)
    result, wanted = pg.run(experiment), simulate(experiment)
    layout = result.architectures[0].layout
    rest = layout.part("core" if only == "head" else "head")
    for node in range(NODES):
        assert torch.equal(result.parameters[node], wanted.end[node])
        assert torch.equal(result.parameters[node][rest], wanted.start[node][rest])
        assert not torch.equal(result.parameters[node], wanted.start[node])


def test_peers_train_one_part_with_the_bits_of_the_simulator():
    work = LocalSGD(epochs=1, batch_size=4, only="head")
    experiment = toy(pg.DecAvg(work), model=pg.Split(network, head=HEAD), rounds=2)
    for peer, wanted in zip(run_peers(experiment), simulate(experiment).end, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
