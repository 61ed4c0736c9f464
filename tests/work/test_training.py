"""The training loop against torch's own optimisers, and the order in which examples come."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage import DecAvg, DecHW, Experiment, Proximal, run
from peerage import Local as LocalOnly
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.testing import NODES, simulate, toy, unequal_parts
from peerage.vectors import FlatModel, Layout, float_buffers
from peerage.work import training as training_module
from peerage.work.context import Examples, LocalContext
from peerage.work.curvature import Curvature
from peerage.work.evaluation import Score
from peerage.work.losses import CrossEntropy, ModelLoss
from peerage.work.training import LocalSGD, Train, Trained

EXAMPLES = 23  # no multiple of any batch size here


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),  # its gradient would be mere rounding
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(27, 3),
    )


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in a run; for batches this small, several threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def examples() -> Examples:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 2, 4, 4, generator=generator)
    return Examples(x, torch.randint(3, (40,), generator=generator))


def local_data(
    module: nn.Module,
    *,
    node: int = 1,
    round: int = 0,
    persistent_tensors: dict[str, Tensor] | None = None,
) -> LocalContext:
    return LocalContext(
        node=node,
        round=round,
        seed=7,
        data=examples(),
        indices=torch.arange(10, 10 + EXAMPLES),
        architecture="net",
        models={"net": FlatModel(module)},
        persistent_tensors={} if persistent_tensors is None else persistent_tensors,
    )


def train(
    work: LocalSGD, local: LocalContext, *, squares: bool = False, **given: Tensor
) -> Trained:
    """Train from the values that the flat model holds."""
    model = local.models["net"]
    return Train(work, model.params.clone(), model.buffers.clone(), given, squares).run(local)


def canonical(module: nn.Module, vector: Tensor) -> Tensor:
    return Layout.of(module.named_parameters()).canonical(vector)


# Against torch's optimisers


def torch_trained(
    module: nn.Module, work: LocalSGD, batches: Iterator[tuple[Tensor, Tensor]]
) -> float:
    """The obvious loop with the optimiser of torch; the mean loss."""
    module.train()
    shared = {"lr": work.lr, "weight_decay": work.weight_decay}
    optimiser: torch.optim.Optimizer
    if work.optimizer == "adamw":
        optimiser = torch.optim.AdamW(module.parameters(), **shared)
    else:
        optimiser = torch.optim.SGD(
            module.parameters(), momentum=work.momentum, nesterov=work.nesterov, **shared
        )
    total, count = 0.0, 0
    for x, y in batches:
        optimiser.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        optimiser.step()
        total, count = total + float(loss.detach()) * len(y), count + len(y)
    return total / count


WORKS = {
    "sgd": LocalSGD(epochs=2, batch_size=5, lr=0.1),
    "momentum": LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.9),
    "nesterov": LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.9, nesterov=True),
    "weight decay": LocalSGD(epochs=2, batch_size=5, lr=0.1, momentum=0.5, weight_decay=0.1),
    "adamw": LocalSGD(epochs=2, batch_size=5, lr=0.01, optimizer="adamw"),
    "adamw decay": LocalSGD(steps=9, batch_size=5, lr=0.01, optimizer="adamw", weight_decay=0.3),
    "steps": LocalSGD(steps=9, batch_size=5, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", WORKS)
def test_the_loop_does_what_the_optimisers_of_torch_do(name):
    work = WORKS[name]
    expected = network()
    loss = torch_trained(expected, work, work.batches(local_data(network())))
    trained = train(work, local_data(network()))
    steps = 10 if work.epochs else 9
    assert trained.stats.examples == (2 * EXAMPLES if work.epochs else 45)
    assert trained.stats.loss == pytest.approx(loss, rel=1e-5)
    found = canonical(expected, trained.params)
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    start = nn.utils.parameters_to_vector(network().parameters()).detach()
    assert (wanted - start).norm() > 0.01 * steps  # it did move
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    buffers = torch.cat([buffer for _, buffer in float_buffers(expected)])
    torch.testing.assert_close(trained.buffers, buffers, rtol=1e-4, atol=1e-5)


class Transposed(nn.Module):
    """A convolution that keeps its kernel with the inputs first, as its gradient does not."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(2, 3, 3, 3) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel.transpose(0, 1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "depthwise": lambda: nn.Conv2d(2, 2, 3, groups=2),
    "one by one": lambda: nn.Conv2d(2, 3, 1),
    "one output": lambda: nn.Conv2d(2, 1, 3),
    "whole image": lambda: nn.Conv2d(2, 3, 4),
    "deconvolution": lambda: nn.ConvTranspose2d(2, 3, 2),
    "transposed": Transposed,
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_may_lie_in_memory_in_another_order_than_parameters(name, optimizer):
    def build() -> nn.Module:
        torch.manual_seed(6)
        layer = LAYERS[name]()
        outputs = layer(torch.zeros(1, 2, 4, 4)).numel()
        return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(outputs, 3))

    work = LocalSGD(epochs=2, batch_size=5, lr=0.02, optimizer=optimizer)
    expected = build()
    torch_trained(expected, work, work.batches(local_data(build())))
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    trained = train(work, local_data(build()))
    torch.testing.assert_close(canonical(expected, trained.params), wanted, rtol=1e-4, atol=1e-5)


class Straight:
    """A correction that changes nothing, and so takes the other way through the loop."""

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor) -> Tensor:
        return g.clone()


@pytest.mark.parametrize("name", WORKS)
def test_the_loop_with_a_correction_takes_the_same_steps(name):
    plain = train(WORKS[name], local_data(network()))
    corrected = train(replace(WORKS[name], correct=Straight()), local_data(network()))
    torch.testing.assert_close(corrected.params, plain.params, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["momentum", "nesterov", "adamw"])
def test_keep_optimizer_carries_moments_over(name):
    work = replace(WORKS[name], epochs=1, keep_optimizer=True)
    first = local_data(network())
    rounds = [
        first,
        replace(first, round=1, orders=0),
    ]  # with the same persistent tensors and flat model
    model = first.models["net"]
    params, buffers = model.params.clone(), model.buffers.clone()
    for local in rounds:
        trained = Train(work, params, buffers, {}).run(local)
        params, buffers = trained.params, trained.buffers
    batches = (b for round in range(2) for b in local_data(network(), round=round).epoch(5))
    expected = network()
    torch_trained(expected, work, batches)
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    torch.testing.assert_close(canonical(expected, params), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_otherwise_the_optimiser_is_fresh_in_every_round(name):
    persistent_tensors: dict[str, Tensor] = {}
    first = train(WORKS[name], local_data(network(), persistent_tensors=persistent_tensors))
    again = train(WORKS[name], local_data(network(), persistent_tensors=persistent_tensors))
    assert persistent_tensors == {}
    assert torch.equal(again.params, first.params)


KEPT = {
    "momentum": replace(WORKS["momentum"], epochs=1, keep_optimizer=True),
    "adamw": replace(WORKS["adamw"], epochs=1, keep_optimizer=True),
    "steps": replace(WORKS["steps"], steps=3, keep_optimizer=True),
}


@pytest.mark.parametrize("name", KEPT)
def test_training_leaves_what_was_remembered_before_as_it_is(name):
    """So that a round can be undone: earlier persistent tensors keep their earlier values."""
    persistent_tensors: dict[str, Tensor] = {}
    train(KEPT[name], local_data(network(), persistent_tensors=persistent_tensors))
    before = dict(persistent_tensors)
    values = {key: tensor.clone() for key, tensor in before.items()}
    assert values
    first = train(KEPT[name], local_data(network(), round=1, persistent_tensors=persistent_tensors))
    for key, tensor in before.items():
        assert torch.equal(tensor, values[key])
        assert not torch.equal(persistent_tensors[key], values[key])
    persistent_tensors.clear()
    persistent_tensors.update(before)
    again = train(KEPT[name], local_data(network(), round=1, persistent_tensors=persistent_tensors))
    assert torch.equal(again.params, first.params)


@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_a_round_that_is_taken_back_takes_back_what_the_optimiser_remembers(name, monkeypatch):
    scripted(monkeypatch, 1.0, 2.0)  # the only epoch of the second training makes it worse
    persistent_tensors: dict[str, Tensor] = {}
    train(KEPT[name], local_data(network(), persistent_tensors=persistent_tensors))
    values = {key: tensor.clone() for key, tensor in persistent_tensors.items()}
    worse = replace(KEPT[name], early_stop="rollback")
    local = held_out(local_data(network(), round=1, persistent_tensors=persistent_tensors))
    start = local.models["net"].params.clone()
    assert torch.equal(train(worse, local).params, start)
    assert persistent_tensors.keys() == values.keys()
    assert all(torch.equal(persistent_tensors[key], values[key]) for key in values)


# Corrections


def linear_gradient(x: Tensor, local: LocalContext) -> Tensor:
    """Of the mean loss of a linear model [3 x 32 + 3] over the node's own examples."""
    images, labels = local.data.take(local.indices)
    x = x.clone().requires_grad_()
    logits = images.flatten(1) @ x[:96].view(3, 32).T + x[96:]
    return torch.autograd.grad(F.cross_entropy(logits, labels), x)[0]


def linear() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 3))


def test_proximal_pulls_towards_the_start_of_the_round():
    local = local_data(linear())
    x0 = local.models["net"].params.clone()
    work = LocalSGD(epochs=3, batch_size=EXAMPLES, lr=0.5, correct=Proximal(mu=0.2))
    x = x0
    for _ in range(3):
        x = x - 0.5 * (linear_gradient(x, local) + 0.2 * (x - x0))
    torch.testing.assert_close(train(work, local).params, x, rtol=1e-5, atol=1e-6)


def test_a_strong_proximal_term_keeps_the_model_in_place():
    moved = []
    for mu in (0.0, 1.0, 9.0):
        local = local_data(linear())
        start = local.models["net"].params.clone()
        work = LocalSGD(epochs=30, batch_size=EXAMPLES, lr=0.1, correct=Proximal(mu=mu))
        moved.append(float((train(work, local).params - start).norm()))
    assert all(weaker > 1.5 * stronger for weaker, stronger in pairwise(moved))


@dataclass(frozen=True)
class Shifted:
    """A control variate: a vector that the algorithm gives."""

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor, *, shift: Tensor) -> Tensor:
        return g + shift


def test_a_correction_sees_what_the_algorithm_gives():
    local = local_data(linear())
    x0 = local.models["net"].params.clone()
    shift = torch.arange(99.0) / 100
    work = LocalSGD(epochs=1, batch_size=EXAMPLES, lr=0.5, correct=Shifted())
    expected = x0 - 0.5 * (linear_gradient(x0, local) + shift)
    torch.testing.assert_close(train(work, local, shift=shift).params, expected)


@dataclass(frozen=True)
class Masked:
    """Keeps the first entries where they are; in place, as g is a vector of the training's own."""

    entries: int = 40

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor) -> Tensor:
        g[: self.entries] = 0
        return g


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "adamw"])
def test_what_a_correction_sets_to_zero_stays_also_under_weight_decay(name, decay):
    local = local_data(linear())
    start = local.models["net"].params.clone()
    work = replace(WORKS[name], weight_decay=decay)
    found = train(replace(work, correct=Masked()), local).params
    assert torch.equal(found[:40], start[:40])
    # The other entries train, and decay.
    free = train(replace(work, correct=Masked(0)), local_data(linear())).params
    plain = train(work, local_data(linear())).params
    torch.testing.assert_close(free, plain, rtol=1e-4, atol=1e-6)
    assert (found[40:] != start[40:]).all()


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_weight_decay_beside_a_correction_in_numbers(optimizer):
    """One step on all examples, of half of whose gradient the rest is set to zero."""

    @dataclass(frozen=True)
    class Halved:
        def __call__(self, g: Tensor, x: Tensor, x0: Tensor) -> Tensor:
            return torch.cat([0.5 * g[:50], 0 * g[50:]])

    local = local_data(linear())
    x0 = local.models["net"].params.clone()
    work = LocalSGD(epochs=1, batch_size=EXAMPLES, lr=0.1, weight_decay=0.3, optimizer=optimizer)
    g = linear_gradient(x0, local)
    expected = x0.clone()
    if optimizer == "sgd":
        expected[:50] -= 0.1 * 0.5 * (g + 0.3 * x0)[:50]
    else:  # the first step of Adam goes by the sign of the gradient
        expected[:50] -= 0.1 * (0.5 * 0.3 * x0 + g / (g.abs() + 2e-8))[:50]
    found = train(replace(work, correct=Halved()), local).params
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[50:], x0[50:])


def test_proximal_rejects_a_push():
    with pytest.raises(InputError, match=r"mu must be at least 0, got -0\.1"):
        Proximal(mu=-0.1)


# Squared gradients of the last pass


def torch_squares(module: nn.Module, work: LocalSGD, local: LocalContext, last: int) -> Tensor:
    """Of the last batches, by the obvious loop; in the order of torch."""
    module.train()
    optimiser = torch.optim.SGD(
        module.parameters(), lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay
    )
    squares = []
    for x, y in work.batches(local):
        optimiser.zero_grad()
        F.cross_entropy(module(x), y).backward()
        squares.append(
            torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]) ** 2
        )
        optimiser.step()
    return torch.stack(squares[-last:]).sum(0)


@pytest.mark.parametrize(
    ("work", "last"),
    [
        (replace(WORKS["sgd"], epochs=1), 5),  # 23 examples in batches of 5
        (WORKS["sgd"], 5),
        (WORKS["momentum"], 5),
        (WORKS["weight decay"], 5),  # the decay is no part of the gradient
        (WORKS["steps"], 5),
        (replace(WORKS["steps"], steps=3), 3),  # less than one pass
        (replace(WORKS["sgd"], batch_size=100), 1),
    ],
)
def test_squares_are_those_of_the_last_pass(work, last):
    expected = network()
    wanted = torch_squares(expected, work, local_data(network()), last)
    trained = train(work, local_data(network()), squares=True)
    assert trained.stats.squares is not None
    found = canonical(expected, trained.stats.squares)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-7)
    # Gathering them changes nothing about the training, and they are gathered on demand only.
    plain = train(work, local_data(network()))
    assert torch.equal(trained.params, plain.params)
    assert plain.stats.squares is None


@pytest.mark.parametrize("size", [5, EXAMPLES])
def test_squares_of_a_model_that_stands_still_are_its_batch_curvature(size):
    local = local_data(linear())
    local.epoch = lambda size, *_: local.data.chunks(local.indices, size)  # type: ignore[method-assign]
    work = LocalSGD(epochs=3, batch_size=size, lr=0.0)
    squares = train(work, local, squares=True).stats.squares
    model = local.models["net"]
    h = Curvature(model.params.clone(), model.buffers, "batch", size).run(local)
    torch.testing.assert_close(squares, h)


def test_squares_are_taken_before_the_correction():
    work = LocalSGD(epochs=2, batch_size=5, lr=0.0)
    plain = train(work, local_data(linear()), squares=True)
    shifted = replace(work, correct=Shifted())
    corrected = train(shifted, local_data(linear()), squares=True, shift=torch.full((99,), 9.0))
    assert plain.stats.squares is not None
    assert plain.stats.squares.sum() > 0
    torch.testing.assert_close(corrected.stats.squares, plain.stats.squares)


def test_squares_of_a_node_without_examples_are_zero():
    local = replace(local_data(linear()), indices=torch.empty(0, dtype=torch.int64))
    squares = train(LocalSGD(epochs=2), local, squares=True).stats.squares
    assert squares is not None
    assert squares.tolist() == [0.0] * 99
    assert train(LocalSGD(epochs=2), local).stats.squares is None


# The clamp on the loss


@dataclass(frozen=True)
class Offset:
    """Cross-entropy and a constant: the loss is moved without moving its gradient."""

    by: float = 0.0

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels) + self.by


@pytest.mark.parametrize("correct", [None, Proximal(mu=0.5)])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
def test_batches_above_the_clamp_give_no_gradient(name, correct):
    local = local_data(network())
    start = local.models["net"].params.clone()
    work = replace(WORKS[name], loss_clamp=10.0)
    far = train(replace(work, loss=Offset(20.0), correct=correct), local, squares=True)
    assert torch.equal(far.params, start)
    assert far.stats.squares is not None
    assert not far.stats.squares.any()
    # The record has the loss as it was, of a model that stood still.
    still = train(replace(work, lr=0.0, loss_clamp=None), local_data(network())).stats
    assert far.stats.loss == pytest.approx(20 + still.loss, rel=1e-5)
    assert far.stats.examples == 2 * EXAMPLES


@pytest.mark.parametrize("name", WORKS)
def test_batches_below_the_clamp_are_trained_on_as_ever(name):
    plain = train(WORKS[name], local_data(network()))
    clamped = train(replace(WORKS[name], loss_clamp=10.0), local_data(network()))
    assert plain.stats.loss < 10
    assert torch.equal(clamped.params, plain.params)
    assert torch.equal(clamped.buffers, plain.buffers)
    assert clamped.stats == plain.stats


def test_the_clamp_applies_to_every_batch_by_itself():
    """Against the obvious loop, with a clamp in the midst of the losses."""
    work = LocalSGD(epochs=1, batch_size=5, lr=0.1)
    expected, losses, clamp = linear(), [], 1.2
    for x, y in work.batches(local_data(linear())):
        loss = F.cross_entropy(expected(x), y)
        losses.append(float(loss.detach()))
        if losses[-1] <= clamp:
            gradients = torch.autograd.grad(loss, list(expected.parameters()))
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter.data -= 0.1 * gradient
    assert min(losses) < clamp < max(losses)
    trained = train(replace(work, loss_clamp=clamp), local_data(linear()))
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    torch.testing.assert_close(trained.params, wanted, rtol=1e-5, atol=1e-6)
    weighted = sum(loss * size for loss, size in zip(losses, [5, 5, 5, 5, 3], strict=True))
    assert trained.stats.loss == pytest.approx(weighted / EXAMPLES, rel=1e-5)


def test_momentum_and_weight_decay_go_on_above_the_clamp():
    work = LocalSGD(epochs=1, batch_size=EXAMPLES, lr=0.1, weight_decay=0.5, loss_clamp=10.0)
    local = local_data(linear())
    start = local.models["net"].params.clone()
    trained = train(replace(work, loss=Offset(20.0)), local)
    torch.testing.assert_close(trained.params, 0.95 * start)


def test_a_model_loss_is_clamped_too():
    @dataclass(frozen=True)
    class Far(ModelLoss):
        def prepare(
            self, module: nn.Module, given: Mapping[str, Tensor], rng: torch.Generator
        ) -> Callable[[Tensor, Tensor], Tensor]:
            return lambda x, y: 30 + F.cross_entropy(module(x), y)

    local = local_data(linear())
    start = local.models["net"].params.clone()
    for clamp, stays in ((10.0, True), (None, False), (99.0, False)):
        work = LocalSGD(epochs=1, batch_size=5, lr=0.1, loss=Far(), loss_clamp=clamp)
        trained = train(work, local_data(linear()))
        assert torch.equal(trained.params, start) == stays
        assert trained.stats.loss > 30


def test_a_run_keeps_its_clamp_in_its_file():
    experiment = Experiment(local={"loss_clamp": 10.0})
    again = Experiment.from_toml(experiment.to_toml())
    assert again.local == LocalSGD(loss_clamp=10.0)
    assert "loss_clamp" not in Experiment().to_toml()


# Rollback


def noisy_network() -> nn.Module:
    """With dropout and running statistics: another mode than that of training shows."""
    return nn.Sequential(*network()[:5], nn.Dropout(0.5), *network()[5:])  # type: ignore[index]


def held_out(local: LocalContext, *, shift: int = 0) -> LocalContext:
    """A node that is evaluated on its own examples, with their own labels or wrong ones."""
    x, y = local.data.take(local.indices)
    return replace(local, held_out=Examples(x, (y + shift) % 3))


def scripted(monkeypatch: pytest.MonkeyPatch, *losses: float) -> list[float]:
    """Validation losses before training and after every epoch; what is left of them."""
    left = list(losses)

    def score(model: FlatModel, examples: Examples) -> Score:
        model.module.eval()
        return Score(0.0, left.pop(0))

    monkeypatch.setattr(training_module, "score", score)
    return left


CAREFUL = LocalSGD(epochs=4, batch_size=5, lr=0.1, momentum=0.9, early_stop="rollback")
PLAIN = replace(CAREFUL, early_stop="none")


def test_a_validation_loss_that_does_not_rise_changes_nothing(monkeypatch):
    left = scripted(monkeypatch, 4.0, 3.0, 3.0, 2.0, 1.0)  # the same again is no rise
    kept = train(CAREFUL, held_out(local_data(noisy_network())))
    plain = train(PLAIN, local_data(noisy_network()))
    assert left == []
    assert torch.equal(kept.params, plain.params)
    assert torch.equal(kept.buffers, plain.buffers)
    assert kept.stats == plain.stats
    assert kept.stats.examples == 4 * EXAMPLES


@pytest.mark.parametrize(
    ("losses", "epochs"),
    [([1.0, 1.1], 1), ([4.0, 3.0, 3.5], 2), ([4.0, 3.0, 2.0, 1.0, 1.5], 4)],
)
def test_a_round_in_which_the_validation_loss_rises_is_taken_back(monkeypatch, losses, epochs):
    left = scripted(monkeypatch, *losses)
    local = held_out(local_data(noisy_network()))
    model = local.models["net"]
    params, buffers = model.params.clone(), model.buffers.clone()
    trained = train(CAREFUL, local)
    assert left == []  # it was not judged again
    assert torch.equal(trained.params, params)
    assert torch.equal(trained.buffers, buffers)
    assert trained.finite
    # The work was done all the same, up to the epoch that was one too many.
    done = train(replace(PLAIN, epochs=epochs), local_data(noisy_network())).stats
    assert trained.stats == done
    assert done.examples == epochs * EXAMPLES


@pytest.mark.parametrize(("shift", "taken_back"), [(0, False), (1, True)])
def test_rollback_against_the_obvious_loop(shift, taken_back):
    """Learning the labels makes the loss under other labels rise."""

    def validation_loss() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(expected(x), y))

    work = LocalSGD(epochs=3, batch_size=EXAMPLES, lr=0.01, early_stop="rollback")
    local = held_out(local_data(linear()), shift=shift)
    assert local.held_out is not None
    x, y = local.held_out.take(torch.arange(EXAMPLES))
    expected = linear()
    losses = [validation_loss()]
    for epoch in range(3):
        batches = list(local_data(linear()).epoch(EXAMPLES))
        torch_trained(expected, replace(work, epochs=1), iter(batches))
        losses.append(validation_loss())
        assert (losses[epoch + 1] > losses[epoch]) == taken_back
    before = linear() if taken_back else expected
    wanted = nn.utils.parameters_to_vector(before.parameters()).detach()
    trained = train(work, local)
    torch.testing.assert_close(trained.params, wanted, rtol=1e-5, atol=1e-6)
    assert trained.stats.examples == (1 if taken_back else 3) * EXAMPLES


def test_a_node_that_holds_nothing_out_trains_as_ever():
    careful, plain = (train(work, local_data(noisy_network())) for work in (CAREFUL, PLAIN))
    assert torch.equal(careful.params, plain.params)
    assert torch.equal(careful.buffers, plain.buffers)
    assert careful.stats == plain.stats


def test_nodes_of_a_run_are_evaluated_on_what_they_hold_out():
    """Steps of this length make any loss rise, so all training of all rounds is taken back."""
    work = LocalSGD(epochs=2, lr=1000.0, early_stop="rollback")
    ended = simulate(toy(LocalOnly(work), evaluation={"validation": 0.25}))
    for start, end in zip(ended.start, ended.end, strict=True):
        assert torch.equal(start, end)
    loose = replace(work, early_stop="none")
    ended = simulate(toy(LocalOnly(loose), evaluation={"validation": 0.25}))
    assert not any(map(torch.equal, ended.start, ended.end))


@pytest.mark.slow
def test_engines_agree_about_rollback_and_online_curvature():
    work = LocalSGD(epochs=2, lr=0.5, batch_size=2, early_stop="rollback")
    digests = [
        run(
            toy(DecHW(work, curvature="online"), evaluation={"validation": 0.25}, engine=engine)
        ).digest
        for engine in ({"name": "serial"}, {"name": "pool", "workers": 2})
    ]
    assert digests[0] == digests[1]


def test_rollback_without_held_out_examples_is_rejected():
    with pytest.raises(InputError) as caught:
        Experiment(local={"early_stop": "rollback"})
    message = "early_stop=rollback needs held-out examples; add --validation 0.2"
    assert str(caught.value) == message
    kept = Experiment(local={"early_stop": "rollback"}, evaluation={"validation": 0.1})
    assert kept.algorithm.local == LocalSGD(early_stop="rollback")


# What an order leaves alone


def test_the_tensors_of_an_order_stay_as_they_are():
    local = local_data(network())
    params, buffers = local.models["net"].params.clone(), local.models["net"].buffers.clone()
    order = Train(WORKS["momentum"], params, buffers, {})
    before = params.clone(), buffers.clone()
    trained = order.run(local)
    assert torch.equal(params, before[0])
    assert torch.equal(buffers, before[1])
    order.run(local_data(network()))
    local.models["net"].params.zero_()
    assert not torch.equal(trained.params, torch.zeros_like(params))  # a copy, not the flat model


def test_a_node_without_examples_does_not_train():
    local = replace(local_data(network()), indices=torch.empty(0, dtype=torch.int64))
    for work in (WORKS["sgd"], WORKS["steps"]):
        trained = train(work, local)
        assert torch.equal(trained.params, local.models["net"].params)
        assert (trained.stats.loss, trained.stats.examples) == (0.0, 0)


def test_noise_of_dropout_belongs_to_the_node_and_the_round():
    def trained(node: int, round: int, outside: int = 0) -> Tensor:
        torch.manual_seed(11)
        module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 3))
        torch.manual_seed(outside)  # must not matter
        local = local_data(module, node=node, round=round)
        local.epoch = lambda size, *_: local.data.chunks(local.indices, size)  # type: ignore[method-assign]
        return train(LocalSGD(epochs=1, batch_size=8, lr=0.1), local).params

    assert torch.equal(trained(1, 0), trained(1, 0, outside=5))
    assert not torch.equal(trained(1, 0), trained(2, 0))
    assert not torch.equal(trained(1, 0), trained(1, 1))


# The order of examples


def labels_as_numbers(count: int) -> Examples:
    return Examples(torch.zeros(count, 1), torch.arange(count))


def stream(node: int = 0, round: int = 0, seed: int = 0, **changes: Any) -> LocalContext:
    """A node with the examples 100 to 109, whose labels differ."""
    return LocalContext(
        node=node,
        round=round,
        seed=seed,
        data=labels_as_numbers(200),
        indices=torch.arange(100, 110),
        architecture="",
        models={},
        persistent_tensors=changes.get("persistent_tensors", {}),
    )


def seen(batches: Iterator[tuple[Tensor, Tensor]]) -> list[list[int]]:
    return [y.tolist() for _, y in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [example for batch in batches for example in batch]


def test_an_epoch_sees_every_example_once():
    batches = seen(stream().epoch(4))
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert sorted(flat(batches)) == list(range(100, 110))


def test_epochs_of_a_round_have_different_orders():
    local = stream()
    assert len({tuple(flat(seen(local.epoch(4)))) for _ in range(5)}) == 5


def test_the_order_depends_on_seed_node_and_round_only():
    orders = {
        key: flat(seen(stream(**dict(zip(("seed", "node", "round"), key, strict=True))).epoch(3)))
        for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    torch.manual_seed(99)
    assert flat(seen(stream().epoch(5))) == orders[0, 0, 0]  # also whatever the batch size


@pytest.mark.parametrize("size", [3, 4, 10, 25])
def test_the_endless_stream_sees_every_example_once_per_pass_across_rounds(size):
    persistent_tensors: dict[str, Tensor] = {}
    rounds = [
        seen(stream(round=r, persistent_tensors=persistent_tensors).steps(7, size))
        for r in range(5)
    ]
    assert all([len(batch) for batch in batches] == [size] * 7 for batches in rounds)
    order = flat([batch for batches in rounds for batch in batches])
    passes = [order[i : i + 10] for i in range(0, len(order) - 9, 10)]
    assert all(sorted(one) == list(range(100, 110)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes)


def test_the_endless_stream_does_not_depend_on_where_rounds_end():
    persistent_tensors: dict[str, Tensor] = {}
    parts = [
        seen(stream(round=r, persistent_tensors=persistent_tensors).steps(2, 3)) for r in range(6)
    ]
    assert [batch for part in parts for batch in part] == seen(stream().steps(12, 3))


def test_epochs_and_steps_count_differently():
    local = stream()
    epochs, steps = LocalSGD(epochs=2, batch_size=4), LocalSGD(steps=2, batch_size=4)
    assert len(seen(epochs.batches(local))) == 6
    assert len(seen(steps.batches(local))) == 2


# A last batch of one example


@pytest.mark.parametrize(
    ("of_one", "count", "sizes"),
    [
        ("keep", 10, [3, 3, 3, 1]),
        ("merge", 10, [3, 3, 4]),
        ("drop", 10, [3, 3, 3]),
        ("merge", 9, [3, 3, 3]),
        ("merge", 8, [3, 3, 2]),
        ("drop", 8, [3, 3, 2]),
        ("merge", 4, [4]),
        ("merge", 1, [1]),  # there is no batch before
        ("keep", 1, [1]),
        ("drop", 1, []),
        (None, 10, [3, 3, 3, 1]),  # of a model without batch statistics
    ],
)
def test_what_happens_to_a_last_batch_of_one_example(of_one, count, sizes):
    local = replace(stream(), indices=torch.arange(100, 100 + count))
    work = LocalSGD(epochs=2, batch_size=3, batch_of_one=of_one)
    batches = seen(work.batches(local))
    assert [len(batch) for batch in batches] == 2 * sizes
    assert work.last_pass(local) == range(len(sizes), 2 * len(sizes))
    # The order is the same: only where it is cut differs.
    whole = flat(seen(stream().epoch(3))) if count == 10 else sorted(range(100, 100 + sum(sizes)))
    first = flat(batches[: len(sizes)])
    assert (first if count == 10 else sorted(first)) == whole[: sum(sizes)]


@pytest.mark.parametrize("of_one", [None, "keep", "merge", "drop"])
def test_batches_of_one_example_are_whole_where_that_is_the_size(of_one):
    work = LocalSGD(epochs=1, batch_size=1, batch_of_one=of_one)
    assert [len(batch) for batch in seen(work.batches(stream()))] == [1] * 10
    assert work.last_pass(stream()) == range(10)


@pytest.mark.parametrize("of_one", [None, "keep", "merge", "drop"])
def test_the_endless_stream_has_whole_batches_anyway(of_one):
    work = LocalSGD(steps=7, batch_size=3, batch_of_one=of_one)
    assert [len(batch) for batch in seen(work.batches(stream()))] == [3] * 7
    assert work.last_pass(stream()) == range(3, 7)  # the last ten examples are in four batches


def normalised() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(32, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)
    )


@pytest.mark.parametrize("size", [11, 22])  # of 23 examples
def test_models_with_batch_statistics_merge_a_last_batch_of_one(size):
    work = LocalSGD(epochs=2, batch_size=size, lr=0.1)
    batches = list(work.batches(local_data(normalised())))
    assert [len(y) for _, y in batches] == ([11, 12, 11, 12] if size == 11 else [23, 23])
    expected = normalised()
    loss = torch_trained(expected, work, iter(batches))
    trained = train(work, local_data(normalised()))
    assert (trained.stats.loss, trained.stats.examples) == (pytest.approx(loss), 2 * EXAMPLES)
    wanted = nn.utils.parameters_to_vector(expected.parameters()).detach()
    torch.testing.assert_close(canonical(expected, trained.params), wanted, rtol=1e-4, atol=1e-5)
    merged = train(replace(work, batch_of_one="merge"), local_data(normalised()))
    assert torch.equal(merged.params, trained.params)


def test_squares_of_a_last_pass_with_a_merged_batch():
    work = LocalSGD(epochs=2, batch_size=11, lr=0.1)
    expected = normalised()
    wanted = torch_squares(expected, work, local_data(normalised()), last=2)
    squares = train(work, local_data(normalised()), squares=True).stats.squares
    assert squares is not None
    torch.testing.assert_close(canonical(expected, squares), wanted, rtol=1e-3, atol=1e-7)


def test_a_model_with_batch_statistics_does_not_train_on_a_single_example():
    local = replace(local_data(normalised()), indices=torch.tensor([3]))
    start = local.models["net"].params.clone()
    trained = train(LocalSGD(epochs=2), local, squares=True)
    assert torch.equal(trained.params, start)
    assert (trained.stats.loss, trained.stats.examples) == (0.0, 0)
    assert trained.stats.squares is not None
    assert not trained.stats.squares.any()
    # In a stream, the example fills whole batches.
    assert train(LocalSGD(steps=2, batch_size=4), local).stats.examples == 8
    # Another model trains on it.
    other = replace(local_data(linear()), indices=torch.tensor([3]))
    assert train(LocalSGD(epochs=2), other).stats.examples == 2


@pytest.mark.parametrize(
    "work",
    [LocalSGD(batch_size=1), LocalSGD(batch_size=22, batch_of_one="keep")],
    ids=["size", "keep"],
)
def test_batch_statistics_of_one_example_are_one_clear_line(work):
    with pytest.raises(InputError) as caught:
        train(work, local_data(normalised()))
    assert str(caught.value) == (
        "the model has batch statistics and cannot train on a batch of one example; "
        "use --batch-size 2 or more, and --batch-of-one merge or drop"
    )


class StillNorm(nn.Sequential):
    """Keeps its statistics when it trains, as is usual when a pretrained model is fine-tuned."""

    def train(self, mode: bool = True) -> "StillNorm":
        super().train(mode)
        for layer in self:
            if isinstance(layer, nn.BatchNorm1d):
                layer.eval()
        return self


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), True),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.SyncBatchNorm(2)), True),
        (nn.Sequential(nn.Linear(4, 3), nn.GroupNorm(1, 3), nn.LayerNorm(3)), False),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2)), False),
        (StillNorm(nn.Linear(4, 3), nn.BatchNorm1d(3)), False),
    ],
)
def test_which_models_have_batch_statistics(module, found):
    module.eval()
    assert FlatModel(module).batch_statistics() == found


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.slow
def test_nodes_of_a_default_split_train_models_with_batch_statistics(seed):
    """With these seeds, a node has one example more than whole batches."""
    work = LocalSGD(epochs=1)
    settings = {"model": on_digits, "local": work, "rounds": 1, "seed": seed}
    experiment = Experiment(algorithm=DecAvg(work), engine={"name": "serial"}, **settings)
    sizes = [len(part) for part in prepare(experiment).parts]
    assert any(size % 16 == 1 for size in sizes)
    pool = Experiment(algorithm=DecAvg(work), engine={"workers": 2}, **settings)
    assert run(experiment).digest == run(pool).digest


def on_digits() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Linear(6, 10))


def test_a_run_keeps_in_its_file_what_happens_to_a_batch_of_one():
    experiment = Experiment(local={"batch_of_one": "drop"})
    assert Experiment.from_toml(experiment.to_toml()).local == LocalSGD(batch_of_one="drop")
    assert "batch_of_one" not in Experiment().to_toml()


def test_a_sample_is_drawn_without_replacement():
    local = stream()
    first, second = (flat(seen(local.sample(6, 4))) for _ in range(2))
    assert len(set(first)) == len(set(second)) == 6
    assert set(first) != set(second) or first != second
    assert flat(seen(local.sample(None, 4))) == list(range(100, 110))
    assert flat(seen(local.sample(50, 4))) == list(range(100, 110))


LABELS: list[tuple[int, ...]] = []


@dataclass(frozen=True)
class Recording(CrossEntropy):
    """A loss that remembers the labels it saw."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        LABELS.append(tuple(labels.tolist()))
        return super().__call__(logits, labels)


@pytest.mark.parametrize("options", [{"epochs": 2}, {"steps": 3}], ids=["epochs", "steps"])
def test_compared_algorithms_see_the_same_batches(options):
    work = LocalSGD(batch_size=3, loss=Recording(), **options)
    orders = []
    for algorithm in (DecAvg(work), DecHW(work), DecHW(work, theta=1, curvature="sample")):
        LABELS.clear()
        run(toy(algorithm, rounds=2))
        orders.append(list(LABELS))
    epochs = 2 * sum(-(-len(part) // 3) for part in unequal_parts())
    assert len(orders[0]) == 2 * (epochs if "epochs" in options else 3 * NODES)
    assert orders[0] == orders[1] == orders[2]


# Images


def test_batches_of_images_are_channels_last():
    images = torch.randn(6, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    data = Examples(images, torch.arange(6))
    x, y = data.take(torch.tensor([4, 1]))
    assert torch.equal(x, images[[4, 1]])
    assert y.tolist() == [4, 1]
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(torch.cat([x for x, _ in data.in_order(4)]), images)
    assert torch.equal(data.subset(torch.tensor([2, 0])).take(torch.tensor([0]))[0], images[[2]])
    assert len(data) == 6


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 2}, "epochs=1 and steps=2 exclude each other; give one of them"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"steps": -3}, "steps must be at least 1, got -3"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"lr": -0.1}, "lr must be a number of at least 0, got -0.1"),
        ({"lr": float("nan")}, "lr must be a number of at least 0, got nan"),
        ({"lr": float("inf")}, "lr must be a number of at least 0, got inf"),
        ({"weight_decay": -1.0}, "weight_decay must be a number of at least 0, got -1.0"),
        ({"momentum": 1.0}, "momentum must lie in [0, 1), got 1.0"),
        ({"momentum": -0.5}, "momentum must lie in [0, 1), got -0.5"),
        ({"loss_clamp": 0.0}, "loss_clamp must be a number above 0, got 0.0"),
        ({"loss_clamp": -1.0}, "loss_clamp must be a number above 0, got -1.0"),
        ({"loss_clamp": float("nan")}, "loss_clamp must be a number above 0, got nan"),
        ({"loss_clamp": float("inf")}, "loss_clamp must be a number above 0, got inf"),
        ({"nesterov": True}, "nesterov needs a momentum above 0, got momentum=0.0"),
        (
            {"batch_of_one": "join"},
            "batch_of_one must be one of keep, merge, drop; got 'join'",
        ),
        ({"early_stop": "stop"}, "early_stop must be one of none, rollback; got 'stop'"),
        (
            {"early_stop": "rollback", "steps": 3},
            "early_stop=rollback evaluates after every epoch, got steps=3; give epochs instead",
        ),
        (
            {"optimizer": "adam"},
            "optimizer must be one of sgd, adamw; got 'adam', did you mean 'adamw'?",
        ),
        (
            {"optimizer": "adamw", "momentum": 0.9},
            "momentum=0.9 and nesterov=False belong to sgd; leave them out with optimizer adamw",
        ),
    ],
)
def test_bad_values_name_themselves_and_the_remedy(options, message):
    with pytest.raises(InputError) as caught:
        LocalSGD(**options)
    assert str(caught.value) == message


def test_five_epochs_unless_steps_are_given():
    assert (LocalSGD().epochs, LocalSGD().steps) == (5, None)
    assert (LocalSGD(steps=3).epochs, LocalSGD(steps=3).steps) == (None, 3)
