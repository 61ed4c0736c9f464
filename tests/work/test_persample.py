"""Squared per-example gradients against numbers by hand, single backward passes and BackPACK."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networks import SIZES, network
from torch import Tensor, nn
from torch.func import functional_call

from peerage.work import persample
from peerage.work.persample import squares_by_vmap, sum_squared_gradients

# Their norm layers have no closed form, so all their squares are from `torch.func`.
NORMALISED = {"dfml-cnn", "efficientnet", "gn-lenet", "preact-resnet", "resnet8", "vit"}


def one_at_a_time(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The definition: one forward and one backward pass for each example."""
    named = list(module.named_parameters())
    parameters = {n: p.detach().clone().requires_grad_() for n, p in named if p.requires_grad}
    squares = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for b in range(len(x)):
        own_loss = F.cross_entropy(
            functional_call(module, parameters, (x[b : b + 1],)), y[b : b + 1]
        )
        gradient = torch.autograd.grad(own_loss, list(parameters.values()), materialize_grads=True)
        for name, g in zip(parameters, gradient, strict=True):
            squares[name] += g * g
    return squares


def batch(*shape: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, shape[:1], generator=generator)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, square in expected.items():
        torch.testing.assert_close(found[name], square, rtol=1e-9, atol=1e-15, check_stride=False)


def test_numbers_by_hand():
    module = nn.Linear(1, 1)
    module.load_state_dict({"weight": torch.tensor([[2.0]]), "bias": torch.tensor([0.0])})
    x, y = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    # Own losses (2x)^2 have the gradients 4x^2 = 4, 36 and 4x = 4, 12.
    expected = {"weight": torch.tensor([[16.0 + 1296.0]]), "bias": torch.tensor([16.0 + 144.0])}
    for route in (sum_squared_gradients, squares_by_vmap):
        torch.testing.assert_close(route(module, F.mse_loss, x, y), expected)


def test_convolution_by_hand():
    module = nn.Sequential(nn.Conv2d(1, 1, 2), nn.Flatten())
    x = torch.tensor([[[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]])
    # The loss is the mean of two outputs, so each tap has the mean of what it sees as gradient.
    found = sum_squared_gradients(module, lambda z, _: z.mean(), x, torch.zeros(1))
    torch.testing.assert_close(
        found["0.weight"], torch.tensor([[[[1.5, 2.5], [4.5, 5.5]]]]).square()
    )
    torch.testing.assert_close(found["0.bias"], torch.ones(1))


def some_models(*others: str) -> list[Any]:
    """All models but others; a large one takes seconds."""
    large = {name: [pytest.mark.slow] for name in ("efficientnet", "preact-resnet", "vgg16")}
    return [pytest.param(n, marks=large.get(n, [])) for n in sorted(SIZES.keys() - set(others))]


@pytest.mark.slow
@pytest.mark.parametrize("name", some_models())
def test_models_against_one_at_a_time(name):
    module, (x, y) = network(name).double(), batch(2, *SIZES[name][0])
    expected = one_at_a_time(module, x, y)
    assert_equal(sum_squared_gradients(module, F.cross_entropy, x, y), expected)
    last = {"memory_format": torch.channels_last}
    assert_equal(
        sum_squared_gradients(module.to(**last), F.cross_entropy, x.to(**last), y), expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SIZES.keys() - NORMALISED))
def test_linear_and_convolutional_networks_take_the_fast_route(name, monkeypatch):
    monkeypatch.setattr(persample, "squares_by_vmap", None)
    x, y = batch(2, *SIZES[name][0])
    sum_squared_gradients(network(name).double(), F.cross_entropy, x, y)


@pytest.mark.parametrize("name", ["dfml-cnn", "preact-resnet:widths=2+4", "vit:width=8,patch=16"])
def test_networks_with_norm_layers_take_the_general_route(name, monkeypatch):
    calls = []
    monkeypatch.setattr(persample, "squares_by_vmap", lambda *given: calls.append(given) or {})
    x, y = batch(2, 3, 32, 32)
    sum_squared_gradients(network(name, (3, 32, 32)).double(), F.cross_entropy, x, y)
    assert len(calls) == 1


class Twice(nn.Module):
    """One layer used two times: the square of a sum, not a sum of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x.flatten(1)[:, :4])))


class Tokens(nn.Module):
    """A layer that sees [B, T, i] and one that sees [T, B, i]."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.across = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.across(torch.relu(self.within(x[:, 0])).transpose(0, 1)).sum(0)


class Bypassed(nn.Module):
    """A layer whose weight is used without calling it, and one whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(72, 3), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x.flatten(1))
        return F.linear(x.flatten(1), self.used.weight, self.used.bias)


class Discarded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(72, 3), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x.flatten(1))
        return self.used(x.flatten(1))


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(input=x.flatten(1))


def tied() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 72))
    module[3].weight = module[1].weight
    return module


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 5), nn.Tanh(), nn.Linear(5, 3))
    module[1].requires_grad_(False)
    return module


def convolutional(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


ODD_NETWORKS = {
    "in-place": lambda: nn.Sequential(
        nn.Conv2d(2, 3, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(48, 4),
        nn.ReLU(inplace=True),
    ),
    "strided": convolutional(nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(2, 1))),
    "dilated": convolutional(nn.Conv2d(2, 3, 2, dilation=(2, 3), bias=False)),
    "pointwise": convolutional(nn.Conv2d(2, 3, 1), nn.Tanh(), nn.Conv2d(3, 2, 1, stride=2)),
    "same": convolutional(nn.Conv2d(2, 3, 3, padding="same")),
    "circular": convolutional(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
    "grouped": convolutional(nn.Conv2d(2, 4, 3, groups=2)),
    "batch norm": convolutional(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 3, bias=False)),
    "weight norm": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(72, 3))
    ),
    "twice": Twice,
    "tokens": Tokens,
    "bypassed": Bypassed,
    "discarded": Discarded,
    "keyword": Keyword,
    "tied": tied,
    "half frozen": half_frozen,
}


@pytest.mark.parametrize("name", ODD_NETWORKS)
def test_odd_networks_against_one_at_a_time(name):
    torch.manual_seed(0)
    module = ODD_NETWORKS[name]().double().eval()
    x, y = batch(4, 2, 6, 6, classes=3)
    assert_equal(sum_squared_gradients(module, F.cross_entropy, x, y), one_at_a_time(module, x, y))


@pytest.mark.parametrize("name", ["digits-cnn", "gn-lenet"])
def test_chunks_do_not_matter(name, monkeypatch):
    module, (x, y) = network(name).double(), batch(7, *SIZES[name][0])
    whole = sum_squared_gradients(module, F.cross_entropy, x, y)
    monkeypatch.setattr(persample, "_CACHE", 3 * 32 * 144)
    monkeypatch.setattr(persample, "_MEMORY", 3 * 89_834)
    assert_equal(sum_squared_gradients(module, F.cross_entropy, x, y), whole)


@pytest.mark.parametrize("name", ["digits-cnn", "gn-lenet"])
def test_sums_over_examples_add_up(name):
    module, (x, y) = network(name).double(), batch(6, *SIZES[name][0])
    whole = sum_squared_gradients(module, F.cross_entropy, x, y)
    first = sum_squared_gradients(module, F.cross_entropy, x[:2], y[:2])
    rest = sum_squared_gradients(module, F.cross_entropy, x[2:], y[2:])
    assert_equal(whole, {key: first[key] + rest[key] for key in whole})


def into_flat_buffers(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Parameters and gradients as views of two vectors, with the channels of 4-d weights last."""
    size = sum(p.numel() for p in module.parameters())
    values, gradients = torch.empty(size), torch.full((size,), 7.0)
    start = 0
    for p in module.parameters():
        stop = start + p.numel()
        last = p.permute(0, 2, 3, 1).shape if p.dim() == 4 else p.shape
        views = [flat[start:stop].view(last) for flat in (values, gradients)]
        if p.dim() == 4:
            views = [view.permute(0, 3, 1, 2) for view in views]
        views[0].copy_(p.data)
        p.data, p.grad = views
        start = stop
    return values, gradients


@pytest.mark.parametrize("name", ["digits-cnn", "gn-lenet"])
def test_nothing_stays_behind(name):
    module, (x, y) = network(name), batch(3, *SIZES[name][0])
    x = x.float()
    expected = one_at_a_time(module, x, y)
    hook = module.get_submodule("conv1").register_forward_hook(lambda *_: None)
    values, gradients = into_flat_buffers(module)
    before = values.clone()
    kept = [p.grad for p in module.parameters()]
    hooks = {name: list(m._forward_hooks) for name, m in module.named_modules()}
    with torch.no_grad():
        found = sum_squared_gradients(module, F.cross_entropy, x, y)
    assert {name: list(m._forward_hooks) for name, m in module.named_modules()} == hooks
    assert not any(m._backward_hooks or m._forward_pre_hooks for m in module.modules())
    assert list(module.get_submodule("conv1")._forward_hooks) == [hook.id]
    assert all(p.grad is grad for p, grad in zip(module.parameters(), kept, strict=True))
    assert torch.equal(gradients, torch.full_like(gradients, 7.0))
    assert torch.equal(values, before)
    for key, parameter in module.named_parameters():
        assert found[key].shape == parameter.shape
        assert not found[key].requires_grad
        torch.testing.assert_close(found[key], expected[key], rtol=1e-3, atol=1e-6)


def test_hooks_go_when_the_loss_fails():
    def fail(logits: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("no loss")

    module, (x, y) = network("digits-mlp").double(), batch(2, 1, 8, 8)
    with pytest.raises(RuntimeError, match="no loss"):
        sum_squared_gradients(module, fail, x, y)
    assert not any(layer._forward_hooks for layer in module.modules())


# BackPACK hooks the first layer, whose input needs no gradient, and PyTorch remarks on it.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", some_models(*NORMALISED))
def test_models_against_backpack(name):
    backpack = pytest.importorskip("backpack")
    extensions = pytest.importorskip("backpack.extensions")
    module, (x, y) = network(name).double(), batch(2, *SIZES[name][0])
    extended = backpack.extend(network(name).double())
    with backpack.backpack(extensions.SumGradSquared()):
        backpack.extend(nn.CrossEntropyLoss(reduction="sum"))(extended(x), y).backward()
    expected = {key: p.sum_grad_squared for key, p in extended.named_parameters()}
    assert_equal(sum_squared_gradients(module, F.cross_entropy, x, y), expected)
