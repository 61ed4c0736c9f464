"""Curvature, gradients and candidate losses against sums of gradients computed one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage.errors import InputError, PeerageError
from peerage.randomness import numpy_stream
from peerage.vectors import FlatModel, Weights
from peerage.work.candidates import Losses
from peerage.work.context import Examples, LocalContext
from peerage.work.curvature import (
    KINDS,
    LARGE_BATCH,
    BatchStream,
    Curvature,
    Gradient,
    check_kind,
)

EXAMPLES = 17


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
    )


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)
    )


class Transposed(nn.Module):
    """A convolution that keeps its kernel with the inputs first, as its gradient does not."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 3, 3, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel.transpose(0, 1))


def transposed() -> nn.Module:
    return nn.Sequential(Transposed(), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 5), nn.Dropout(0.3), nn.Linear(5, 3))


NETWORKS = {f.__name__: f for f in (convolutional, normalised, grouped, transposed, linear)}


def local_data(module: nn.Module, count: int = EXAMPLES) -> LocalContext:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(30, 2, 4, 4, generator=generator)
    data = Examples(x, torch.randint(3, (30,), generator=generator))
    models = {"net": FlatModel(module)}
    return LocalContext(1, 0, 7, data, torch.arange(6, 6 + count), "net", models, {})


def node(name: str) -> tuple[LocalContext, Tensor, Tensor]:
    """A node's data, parameters and running statistics that are not the initial ones."""
    torch.manual_seed(9)
    local = local_data(NETWORKS[name]())
    model = local.models["net"]
    return local, model.params.clone(), model.buffers + 0.5


def gradient_of(local: LocalContext, examples: Tensor, params: Tensor, buffers: Tensor) -> Tensor:
    """[d] of the mean loss over these examples in evaluation mode, by one backward pass."""
    model = local.model(params, buffers)
    model.module.eval()
    x, y = local.data.take(examples)
    loss = F.cross_entropy(model.module(x), y)
    gradients = torch.autograd.grad(loss, model.tensors)
    return model.layout.flatten(dict(zip(model.layout.views(params), gradients, strict=True)))


def batches_of(indices: Tensor, size: int) -> Iterator[Tensor]:
    return (indices[i : i + size] for i in range(0, len(indices), size))


# The three kinds

GRAINS = {"batch": 5, "sample": 1, "full": EXAMPLES}  # examples under one square


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_curvature_is_a_sum_of_squared_gradients(name, kind):
    local, params, buffers = node(name)
    found = Curvature(params, buffers, kind, batch_size=5).run(local)
    expected = torch.zeros_like(params)
    for part in batches_of(local.indices, GRAINS[kind]):
        expected += gradient_of(local, part, params, buffers).square()
    assert expected.max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def test_the_batch_size_matters_for_batches_only():
    local, params, buffers = node("convolutional")
    found = {
        (kind, size): Curvature(params, buffers, kind, size).run(local)
        for kind in KINDS
        for size in (4, EXAMPLES)
    }
    for kind in ("sample", "full"):
        torch.testing.assert_close(found[kind, 4], found[kind, EXAMPLES], rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(found["batch", EXAMPLES], found["full", 4], rtol=1e-4, atol=1e-8)
    assert not torch.allclose(found["batch", 4], found["batch", EXAMPLES], rtol=0.1)


def test_by_hand():
    # Logits (w1 x, w2 x) with w = 0 give probabilities of a half: the gradient of an example with
    # label 0 is (-x/2, x/2), and its negative for label 1.
    module = nn.Linear(1, 2, bias=False)
    data = Examples(torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([0, 0, 1]))
    local = LocalContext(0, 0, 0, data, torch.arange(3), "net", {"net": FlatModel(module)}, {})
    zero, none = torch.zeros(2), torch.empty(0)
    # Batches of two: the means of -1/2, -2/2 and then 6/2 alone.
    assert Curvature(zero, none, "batch", 2).run(local).tolist() == [0.75**2 + 9] * 2
    assert Curvature(zero, none, "sample", 2).run(local).tolist() == [0.25 + 1 + 9] * 2
    assert Curvature(zero, none, "full", 2).run(local).tolist() == [0.25] * 2
    assert Gradient(zero, none).run(local).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_mode_is_without_noise_and_leaves_statistics(kind):
    for name in ("convolutional", "normalised"):
        local, params, buffers = node(name)
        local.models["net"].module.train()
        order = Curvature(params, buffers, kind, 5)
        before = params.clone(), buffers.clone()
        assert torch.equal(order.run(local), order.run(local))
        assert torch.equal(local.models["net"].buffers, before[1])
        assert torch.equal(params, before[0])
        assert torch.equal(buffers, before[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_without_examples_has_no_curvature(kind):
    local = local_data(linear(), count=0)
    params, buffers = local.models["net"].params.clone(), torch.empty(0)
    assert not Curvature(params, buffers, kind, 5).run(local).any()
    assert not Gradient(params, buffers).run(local).any()
    assert losses([params] * 2, [buffers] * 2).run(local).tolist() == [0.0, 0.0]
    assert not Gradient(params, buffers, batch=BatchStream(3, "s")).run(local).any()


def test_unknown_kinds_are_rejected():
    with pytest.raises(InputError, match=r"curvature must .* got 'samples', did you mean 'sample'"):
        check_kind("samples")


# Gradient and losses


@pytest.mark.parametrize("name", NETWORKS)
def test_gradient_of_the_mean_loss(name, monkeypatch):
    local, params, buffers = node(name)
    expected = gradient_of(local, local.indices, params, buffers)
    torch.testing.assert_close(Gradient(params, buffers).run(local), expected)
    # Several passes add up to the same.
    monkeypatch.setattr("peerage.work.curvature.LARGE_BATCH", 4)
    found = Gradient(params, buffers).run(local)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def examples_of(local: LocalContext, start: int, stop: int, stream: str) -> Tensor:
    """A part of the endless stream of a node's examples."""
    count = len(local.indices)
    order = [
        numpy_stream(local.seed, f"stream {stream}", local.node, number).permutation(count)
        for number in range(stop // count + 1)
    ]
    return local.indices[torch.from_numpy(np.concatenate(order)[start:stop])]


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_on_the_batches_of_a_stream(name):
    local, params, buffers = node(name)
    kept = local.persistent_tensors
    request = Gradient(params, buffers, batch=BatchStream(7, "noise"))
    for number in range(4):  # the third batch spans two passes
        local = replace(local, round=number)  # rounds have the tensors that are kept in common
        before = dict(kept)
        found = request.run(local)
        examples = examples_of(local, 7 * number, 7 * number + 7, "noise")
        torch.testing.assert_close(found, gradient_of(local, examples, params, buffers))
        assert all(kept[key] is not before[key] for key in before)  # a round can be undone
    assert {key: int(value) for key, value in kept.items()} == {"position noise": 28}


def test_one_batch_at_two_points():
    local, params, buffers = node("normalised")
    other, moved = params + 0.1, buffers + 1
    same = BatchStream(5, "s", advance=False)
    first = Gradient(other, moved, "net", same).run(local)
    second = Gradient(params, buffers, batch=replace(same, advance=True)).run(local)
    third = Gradient(params, buffers, batch=same).run(local)
    examples = examples_of(local, 0, 5, "s")
    torch.testing.assert_close(first, gradient_of(local, examples, other, moved))
    torch.testing.assert_close(second, gradient_of(local, examples, params, buffers))
    assert not torch.equal(third, second)


def test_streams_of_batches_do_not_depend_on_each_other():
    local, params, buffers = node("linear")
    untouched = [y.tolist() for _, y in node("linear")[0].steps(4, 5)]
    for stream in ("a", "b", "a"):
        Gradient(params, buffers, batch=BatchStream(4, stream)).run(local)
    assert [y.tolist() for _, y in local.steps(4, 5)] == untouched  # that of training
    found = Gradient(params, buffers, batch=BatchStream(4, "b")).run(local)
    wanted = gradient_of(local, examples_of(local, 4, 8, "b"), params, buffers)
    torch.testing.assert_close(found, wanted)


def test_gradients_at_models_that_do_not_fit_are_refused():
    local, params, buffers = node("normalised")
    for x, b, architecture in (
        (params[1:], buffers, "net"),
        (params, buffers[1:], "net"),
        (params, buffers, "other"),
    ):
        found = rf"node 1 cannot compute a gradient at {len(x)} parameters and {len(b)} running"
        with pytest.raises(PeerageError, match=found):
            Gradient(x, b, architecture).run(local)
    with pytest.raises(InputError, match="batch_size must be at least 1, got 0"):
        BatchStream(0, "s")


def losses(params: Sequence[Tensor], buffers: Sequence[Tensor], *options: Any) -> Losses:
    pairs = zip(params, buffers, strict=True)
    return Losses(tuple(Weights(x, b, "net") for x, b in pairs), *options)


def loss_of(local: LocalContext, examples: Tensor, params: Tensor, buffers: Tensor) -> float:
    model = local.model(params, buffers)
    model.module.eval()
    x, y = local.data.take(examples)
    return float(F.cross_entropy(model.module(x), y).detach())


@pytest.mark.parametrize("size", [LARGE_BATCH, 4])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_candidates(name, size, monkeypatch):
    monkeypatch.setattr("peerage.work.candidates.LARGE_BATCH", size)
    local, params, buffers = node(name)
    candidates = (params, 2 * params, torch.zeros_like(params))
    found = losses(candidates, [buffers] * 3).run(local)
    expected = [loss_of(local, local.indices, x, buffers) for x in candidates]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_candidates_are_evaluated_with_their_own_running_statistics():
    local, params, buffers = node("normalised")
    pairs = [(params, buffers), (params, buffers + 1), (2 * params, 3 * buffers)]
    found = losses(*zip(*pairs, strict=True)).run(local).tolist()
    expected = [loss_of(local, local.indices, *pair) for pair in pairs]
    assert found == pytest.approx(expected, rel=1e-5)
    assert min(abs(a - b) for a, b in pairwise(found)) > 0.01


@pytest.mark.parametrize(
    ("params", "buffers", "message"),
    [
        (0, -8, "with 0 running statistics: its model 'net' has 8; send b=node.buffers"),
        (0, 1, "with 9 running statistics: its model 'net' has 8; send b=node.buffers"),
        (-3, 0, "with 132 parameters: its model 'net' has 135; choose candidates of the same"),
    ],
)
def test_candidates_that_are_not_models_of_the_node_are_rejected(params, buffers, message):
    local, x, b = node("normalised")
    order = losses([x, torch.ones(len(x) + params)], [b, torch.ones(len(b) + buffers)])
    with pytest.raises(PeerageError, match=f"node 1 cannot evaluate a candidate {message}"):
        order.run(local)


def test_losses_on_some_examples_use_the_same_for_all_candidates():
    local, params, buffers = node("linear")
    own = [loss_of(local, local.indices[i : i + 1], params, buffers) for i in range(EXAMPLES)]
    [one, other] = losses([params] * 2, [buffers] * 2, 1).run(local).tolist()
    assert one == other
    assert min(abs(one - loss) for loss in own) < 1e-6
    [pair] = losses([params], [buffers], 2).run(local).tolist()
    means = [(a + b) / 2 for i, a in enumerate(own) for b in own[:i]]
    assert min(abs(pair - mean) for mean in means) < 1e-6
