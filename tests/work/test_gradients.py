"""Gradients by hand: those of autograd within rounding, for perceptrons only."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from peerage.models import MODELS
from peerage.vectors import FlatModel
from peerage.work import curvature, training
from peerage.work.gradients import analytic_gradients, autograd_gradients, linear_layers
from peerage.work.losses import CrossEntropy, Proximal, VirtualTeacher
from peerage.work.training import LocalSGD, train

PERCEPTRONS = {
    "logistic": MODELS["logistic"](),
    "mlp": MODELS["mlp"](hidden="7"),
    "digits-mlp": MODELS["digits-mlp"](),
    "hwa-mlp": MODELS["hwa-mlp"](),
    "gain-mlp": MODELS["gain-mlp"](),
}


def build(name: str, shape: tuple[int, ...] = (1, 8, 8)) -> nn.Module:
    torch.manual_seed(1)
    return PERCEPTRONS[name].build(shape, 10)


def batches(
    count: int = 6, size: int = 17, shape: tuple[int, ...] = (1, 8, 8)
) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(2)
    sizes = [size] * (count - 1) + [1]  # the last batch of an epoch is often short
    return [
        (torch.randn(n, *shape, generator=rng), torch.randint(10, (n,), generator=rng))
        for n in sizes
    ]


# Two kernels may add in another order, so numbers agree within rounding, never in all bits.
ROUNDING = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-6},
    torch.float64: {"rtol": 1e-11, "atol": 1e-14},
}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, **ROUNDING[expected.dtype])


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("clamp", [None, 10.0, 2.2])
@pytest.mark.parametrize("name", PERCEPTRONS)
def test_loss_and_gradients_are_those_of_autograd(name, clamp, dtype):
    module = build(name).to(dtype)
    tensors = list(module.parameters())
    loss = CrossEntropy()
    hand = analytic_gradients(module, loss, clamp)
    auto = autograd_gradients(lambda x, y: loss(module(x), y), tensors, clamp)
    above = 0
    for x, y in batches():
        (l1, g1), (l2, g2) = hand(x.to(dtype), y), auto(x.to(dtype), y)
        assert_close(l1, l2)
        assert not l1.requires_grad
        assert [g.stride() for g in g1] == [t.stride() for t in tensors]
        for a, b in zip(g1, g2, strict=True):
            assert_close(a, b)
        above += clamp is not None and float(l1) > clamp
    assert above > 0 if clamp == 2.2 else above == 0


@pytest.mark.parametrize("first", [0, 1, 2])
def test_gradients_of_the_last_layers_only(first):
    module = build("hwa-mlp")
    x, y = batches()[0]
    _, whole = analytic_gradients(module, CrossEntropy())(x, y)
    _, some = analytic_gradients(module, CrossEntropy(), first=first)(x, y)
    assert len(some) == 6 - 2 * first
    assert all(torch.equal(a, b) for a, b in zip(some, whole[2 * first :], strict=True))


def test_gradients_in_a_given_output_tensor():
    model = FlatModel(build("hwa-mlp"))
    vector = torch.full_like(model.params, torch.nan)
    out = model.like_tensors(vector)
    for x, y in batches():
        _, new = analytic_gradients(model.module, CrossEntropy())(x, y)
        _, there = analytic_gradients(model.module, CrossEntropy(), out=out)(x, y)
        assert all(a is b for a, b in zip(there, out, strict=True))
        assert_close(vector, torch.cat([gradient.flatten() for gradient in new]))


@pytest.mark.parametrize("kind", ["batch", "full"])
@pytest.mark.parametrize("scope", ["output", "last-hidden", "all", "hidden1", "hidden1+hidden2"])
def test_curvature_is_that_of_autograd(kind, scope, monkeypatch):
    found = []
    for quick in (True, False):
        if not quick:
            monkeypatch.setattr(curvature, "analytic_gradients", lambda *_, **__: None)
        model = FlatModel(build("hwa-mlp"))
        part = curvature.scope_of(model.layout, scope)
        found.append(curvature.KINDS[kind](model, iter(batches()), part))
    assert_close(*found)
    assert found[0].count_nonzero() > 0


ORDERS = {
    "sgd": LocalSGD(epochs=1, lr=0.1),
    "momentum": LocalSGD(epochs=1, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": LocalSGD(epochs=1, lr=0.01, optimizer="adamw"),
    "proximal": LocalSGD(epochs=1, lr=0.1, correct=Proximal(0.5)),
    "clamp": LocalSGD(epochs=1, lr=0.1, momentum=0.5, loss_clamp=2.3),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(1, 8, 8), (12,)])
def test_training_ends_as_with_autograd(order, shape, monkeypatch):
    ended = []
    for quick in (True, False):
        if not quick:
            monkeypatch.setattr(training, "analytic_gradients", lambda *_, **__: None)
        model = FlatModel(build("mlp", shape))
        stats = train(model, ORDERS[order], iter(batches(shape=shape)), gather=range(2, 5))
        ended.append((model.params, stats.squares, torch.tensor(stats.loss)))
    for hand, auto in zip(*ended, strict=True):
        assert_close(hand, auto)


def test_images_with_their_channels_last():
    module = build("mlp", (3, 6, 6))
    x = torch.randn(5, 6, 6, 3).permute(0, 3, 1, 2)
    y = torch.arange(5)
    _, g1 = analytic_gradients(module, CrossEntropy())(x, y)
    g2 = torch.autograd.grad(CrossEntropy()(module(x), y), list(module.parameters()))
    for a, b in zip(g1, g2, strict=True):
        assert_close(a, b)


def test_a_loss_that_is_no_number_stays_one():
    module = build("mlp")
    x, y = batches()[0]
    loss, _ = analytic_gradients(module, CrossEntropy(), 10.0)(x * float("nan"), y)
    assert torch.isnan(loss)


class Strange(nn.Linear):
    """Computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hooked() -> nn.Module:
    module = build("mlp")
    module[1].register_forward_hook(lambda *_: None)
    return module


def frozen() -> nn.Module:
    module = build("mlp")
    module[1].weight.requires_grad_(False)
    return module


def tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer)


OTHERS = {
    "a convolution": nn.Sequential(nn.Flatten(), nn.Conv1d(1, 1, 3)),
    "no flattening": nn.Sequential(nn.Linear(4, 3)),
    "another flattening": nn.Sequential(nn.Flatten(2), nn.Linear(4, 3)),
    "one layer": nn.Linear(4, 3),
    "an output after ReLU": nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU()),
    "two layers in a row": nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 3)),
    "another activation": nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)),
    "no bias": nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)),
    "a subclass": nn.Sequential(nn.Flatten(), Strange(4, 3)),
    "dropout": nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout(), nn.Linear(3, 3)),
    "a hook": hooked(),
    "a frozen layer": frozen(),
    "a layer used twice": tied(),
    "nothing": nn.Sequential(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_is_left_to_autograd(name):
    assert linear_layers(OTHERS[name]) == []
    assert analytic_gradients(OTHERS[name], CrossEntropy(), None) is None


def test_other_losses_are_left_to_autograd():
    assert analytic_gradients(build("mlp"), VirtualTeacher(), None) is None
    work = replace(ORDERS["sgd"], loss=VirtualTeacher())
    assert train(FlatModel(build("mlp")), work, iter(batches())).loss > 0
