"""Several models that train together, against a plain loop with the optimisers of torch."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage import (
    ACE,
    WSM,
    CurvaturePenalty,
    MutualBatch,
    MutualKL,
    Proximal,
    VirtualTeacher,
    WeightedSoftLabels,
)
from peerage.errors import InputError, PeerageError
from peerage.vectors import FlatModel, Weights
from peerage.work import together
from peerage.work.context import Examples, LocalContext
from peerage.work.losses import ModelLoss
from peerage.work.together import TrainedTogether, TrainTogether
from peerage.work.training import LocalSGD, Train

EXAMPLES = 21
PROPORTIONS = torch.tensor([0.5, 0.0, 0.5])
SGD = LocalSGD(epochs=2, batch_size=8, lr=0.1, momentum=0.9, weight_decay=0.01)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def convolutional(*extra: nn.Module, bias: bool = True) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, bias=bias), *extra, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    )


class Recurrent(nn.Module):
    """Its layer keeps references to its parameters, in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.flatten(2).transpose(1, 2).reshape(len(x), 4, 8))[0][:, -1])


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 3)),
    "cnn": convolutional,
    # Batch statistics remove a bias: its gradient is rounding, which AdamW would blow up.
    "norm": lambda: convolutional(nn.BatchNorm2d(4), bias=False),
    "dropout": lambda: convolutional(nn.Dropout(0.5)),
    "lstm": Recurrent,
}


def local(**changes: object) -> LocalContext:
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 2, 4, 4, generator=generator)
    y = 2 * torch.randint(2, (40,), generator=generator)
    known = LocalContext(
        node=1,
        round=0,
        seed=7,
        data=Examples(x, y),
        indices=torch.arange(10, 10 + EXAMPLES),
        architecture="cnn",
        models={name: FlatModel(build()) for name, build in MODULES.items()},
        persistent_tensors={},
        label_proportions=PROPORTIONS,
    )
    return replace(known, **changes)


def weights(name: str, seed: int) -> Weights:
    torch.manual_seed(seed)
    model = FlatModel(MODULES[name]())
    return Weights(model.params, model.buffers, name)


def several(*names: str) -> dict[int, Weights]:
    """Models with the keys 3, 4, ..., in this order."""
    return {key: weights(name, key) for key, name in enumerate(names, 3)}


def module_of(model: Weights) -> nn.Module:
    flat = FlatModel(MODULES[model.architecture]())
    flat.load(model.params, model.buffers)
    return flat.module


def vector(module: nn.Module) -> Tensor:
    return FlatModel(module).params


def equal(one: TrainedTogether, other: TrainedTogether) -> bool:
    same = {
        key: torch.equal(model.params, other.models[key].params)
        and torch.equal(model.buffers, other.models[key].buffers)
        for key, model in one.models.items()
    }
    return all(same.values()) and one.stats == other.stats and one.diverged == other.diverged


# Against the obvious loop


def optimiser(module: nn.Module, work: LocalSGD) -> torch.optim.Optimizer:
    shared = {"lr": work.lr, "weight_decay": work.weight_decay}
    if work.optimizer == "adamw":
        return torch.optim.AdamW(module.parameters(), **shared)
    momentum = {"momentum": work.momentum, "nesterov": work.nesterov}
    return torch.optim.SGD(module.parameters(), **momentum, **shared)


def supervision(z: Tensor, y: Tensor) -> Tensor:
    """WSM, term by term."""
    return (-z[range(len(y)), y] + (PROPORTIONS * z.exp()).sum(1).log()).mean()


def obvious(
    work: LocalSGD,
    pupils: Mapping[int, Weights],
    teachers: Mapping[int, Weights],
    loss: MutualKL,
    data: LocalContext,
) -> tuple[dict[int, nn.Module], dict[int, float]]:
    modules = {key: module_of(model).train() for key, model in pupils.items()}
    fixed = {key: module_of(model).eval() for key, model in teachers.items()}
    sizes = {k: sum(p.numel() for p in m.parameters()) for k, m in {**modules, **fixed}.items()}
    optimisers = {key: optimiser(module, work) for key, module in modules.items()}
    totals = dict.fromkeys(modules, 0.0)
    for x, y in work.batches(data):
        z = {key: module(x) for key, module in {**modules, **fixed}.items()}
        losses = {}
        for n in modules:
            divergence = torch.zeros(())
            for q in z:
                if q != n:
                    all_but_n = sum(size for u, size in sizes.items() if u != n)
                    share = sizes[q] / all_but_n if loss.weights == "size" else 1 / (len(z) - 1)
                    p = z[q].detach().softmax(1)
                    kl = (p * (p.log() - z[n].log_softmax(1))).sum(1).mean()
                    divergence = divergence + share * kl
            losses[n] = loss.gamma * supervision(z[n], y) + loss.alpha * divergence
        for n in modules:
            optimisers[n].zero_grad()
            losses[n].backward()
            totals[n] += float(losses[n].detach()) * len(y)
        for one in optimisers.values():
            one.step()
    return modules, totals


WORKS = {
    "sgd": SGD,
    "nesterov": replace(SGD, nesterov=True),
    "adamw": LocalSGD(steps=5, batch_size=8, lr=0.01, weight_decay=0.1, optimizer="adamw"),
}
LOSSES = {
    "dfml": MutualKL(gamma=0.3, alpha=0.7, supervision=WSM()),
    "def-kt": MutualKL(weights="uniform", supervision=WSM()),
}


@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("loss", LOSSES)
def test_mutual_learning_is_that_of_a_plain_loop(work, loss):
    pupils, teachers = several("mlp", "cnn", "norm", "cnn", "lstm"), {9: weights("norm", 9)}
    modules, totals = obvious(WORKS[work], pupils, teachers, LOSSES[loss], local())
    found = TrainTogether(WORKS[work], pupils, LOSSES[loss], teachers).run(local())
    assert found.diverged == ()
    for key, module in modules.items():
        torch.testing.assert_close(found.models[key].params, vector(module), rtol=1e-5, atol=1e-5)
        stats = found.stats[key]
        assert stats.examples == (42 if WORKS[work].epochs else 40)
        assert stats.loss == pytest.approx(totals[key] / stats.examples, rel=1e-5)
        assert not torch.equal(found.models[key].params, pupils[key].params)
    buffers = FlatModel(modules[5]).buffers
    torch.testing.assert_close(found.models[5].buffers, buffers, rtol=1e-5, atol=1e-6)


def test_running_statistics_take_every_batch_once():
    """They start at 0 with momentum 0.1; one batch moves them by a tenth of its mean."""
    [(key, pupil)] = several("norm").items()
    work = LocalSGD(steps=1, batch_size=8, lr=0.1)
    found = TrainTogether(work, {key: pupil}, MutualKL()).run(local())
    [(x, _)] = work.batches(local())
    mean = module_of(pupil)[0](x).mean((0, 2, 3))
    layout = local().models["norm"].buffer_layout
    moved = layout.view(found.models[key].buffers, "1.running_mean")
    torch.testing.assert_close(moved, 0.1 * mean.detach())


def test_a_pupil_alone_learns_what_it_learns_in_train():
    pupil = weights("cnn", 3)
    work = replace(SGD, correct=Proximal(0.5), loss_clamp=1.1)
    alone = Train(work, pupil.params, pupil.buffers, {}).run(local())
    found = TrainTogether(work, {3: pupil}, MutualKL(gamma=1.0)).run(local())
    torch.testing.assert_close(found.models[3].params, alone.params)
    assert found.stats[3].examples == alone.stats.examples
    assert found.stats[3].loss == pytest.approx(alone.stats.loss)
    free = TrainTogether(SGD, {3: pupil}, MutualKL()).run(local())
    assert not torch.allclose(free.models[3].params, alone.params)  # clamp and pull do something


def test_the_module_of_the_node_is_given_back():
    context = local()
    model = context.models["cnn"]
    before = model.params.clone()
    TrainTogether(SGD, several("cnn", "norm"), MutualKL()).run(context)
    assert torch.equal(model.params, before)
    assert torch.equal(FlatModel(copy.deepcopy(model.module)).params, before)
    with pytest.raises(ZeroDivisionError):
        TrainTogether(SGD, several("cnn"), lambda *_: 1 / 0).run(context)
    assert torch.equal(FlatModel(copy.deepcopy(model.module)).params, before)


# Order, dropout, inputs


@pytest.mark.parametrize("names", [("cnn", "mlp", "norm"), ("dropout", "dropout", "cnn")], ids=str)
def test_the_order_of_pupils_does_not_matter(names):
    pupils = several(*names)
    reverse = dict(reversed(pupils.items()))
    one = TrainTogether(SGD, pupils, MutualKL()).run(local())
    assert equal(one, TrainTogether(SGD, reverse, MutualKL()).run(local()))


def test_dropout_depends_on_the_sender_and_on_nobody_else():
    pupil = weights("dropout", 3)

    def trained(key: int, **others: Weights) -> Tensor:
        pupils = {key: pupil, **{int(name[1:]): model for name, model in others.items()}}
        alone = MutualKL(alpha=0.0)
        return TrainTogether(SGD, pupils, alone).run(local()).models[key].params

    assert torch.equal(trained(3), trained(3, k1=weights("dropout", 1), k8=weights("cnn", 8)))
    assert not torch.equal(trained(3), trained(4))


def test_a_loss_may_draw_random_numbers():
    loss = MutualKL(supervision=VirtualTeacher(0.6, teacher="random"))
    pupils = several("cnn", "mlp")
    one = TrainTogether(SGD, pupils, loss).run(local())
    other = TrainTogether(SGD, dict(reversed(pupils.items())), loss).run(local())
    assert equal(one, other)


def test_inputs_and_teachers_do_not_change():
    pupils, teachers = several("cnn", "norm"), {7: weights("norm", 7), 8: weights("dropout", 8)}
    copies = {key: copy.deepcopy(model) for key, model in {**pupils, **teachers}.items()}
    found = TrainTogether(SGD, pupils, MutualKL(), teachers).run(local())
    for key, model in {**pupils, **teachers}.items():
        assert torch.equal(model.params, copies[key].params)
        assert torch.equal(model.buffers, copies[key].buffers)
    assert found.models.keys() == found.stats.keys() == pupils.keys()


# What a loss sees


@dataclass
class Seen:
    """Keeps what it was given, and learns from the labels."""

    def __post_init__(self) -> None:
        self.batches: list[tuple[int, Tensor, MutualBatch]] = []

    def __call__(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        self.batches.append((own, logits.detach(), batch))
        return batch.loss(logits, batch.labels)


def test_a_loss_sees_logits_from_before_any_update():
    seen, pupils, teachers = Seen(), several("cnn", "mlp"), {9: weights("norm", 9)}
    work = LocalSGD(steps=2, batch_size=8, loss=ACE())
    TrainTogether(work, pupils, seen, teachers).run(local())
    assert [own for own, _, _ in seen.batches] == [3, 4, 3, 4]
    [(x, y), _] = work.batches(local())
    for own, logits, batch in seen.batches[:2]:
        assert batch.keys == (3, 4, 9)
        assert torch.equal(batch.labels, y)
        for key, model in pupils.items():
            torch.testing.assert_close(batch.logits[key], module_of(model)(x).detach())
            assert not batch.logits[key].requires_grad
        torch.testing.assert_close(batch.logits[9], module_of(teachers[9]).eval()(x).detach())
        assert torch.equal(logits, batch.logits[own])
        assert batch.sizes == {3: 127, 4: 219, 9: 131}
        assert batch.proportions is PROPORTIONS
        masked = F.cross_entropy(logits[:, [0, 2]], y // 2)
        torch.testing.assert_close(batch.loss(logits, y), masked)


def test_weights_of_the_divergence_by_hand():
    z = {1: torch.tensor([[2.0, 1.0]]).log(), 2: torch.tensor([[1.0, 1.0]]).log()}
    z[3] = torch.tensor([[1.0, 3.0]]).log()
    batch = MutualBatch(z, torch.tensor([0]), {1: 100, 2: 30, 3: 10}, None, F.cross_entropy)

    def kl(p: list[float], q: list[float]) -> float:
        return float((torch.tensor(p) * (torch.tensor(p) / torch.tensor(q)).log()).sum())

    own = [2 / 3, 1 / 3]
    parts = kl([0.5, 0.5], own), kl([0.25, 0.75], own)
    size, uniform = MutualKL(0.0, 2.0), MutualKL(0.0, 2.0, weights="uniform")
    assert float(size(1, z[1], batch)) == pytest.approx(2 * (30 * parts[0] + 10 * parts[1]) / 40)
    assert float(uniform(1, z[1], batch)) == pytest.approx(parts[0] + parts[1])
    both = MutualKL(0.5, 2.0)(1, z[1], batch)
    assert float(both - size(1, z[1], batch)) == pytest.approx(0.5 * -torch.tensor(2 / 3).log())


def test_weighted_soft_labels_by_hand():
    # Both examples have the label 0. Model 1 learns from models 2 and 3.
    p = {1: [[0.5, 0.5], [0.8, 0.2]], 2: [[0.25, 0.75], [0.5, 0.5]], 3: [[0.9, 0.1], [0.4, 0.6]]}
    z = {key: torch.tensor(rows).log() for key, rows in p.items()}
    batch = MutualBatch(z, torch.tensor([0, 0]), {1: 7, 2: 30, 3: 10}, None, F.cross_entropy)
    soft = 0.0
    for q, w in ((2, 0.75), (3, 0.25)):
        for own, other in zip(p[1], p[q], strict=True):
            f = 1 - exp(-log(own[0]) / log(other[0]))  # CE of the student / CE of the teacher
            cross = -(other[0] * log(own[0]) + other[1] * log(own[1]))
            soft += w * f * cross / 2
    supervised = -(log(0.5) + log(0.8)) / 2
    found = float(WeightedSoftLabels(strength=2.0)(1, z[1], batch))
    assert found == pytest.approx(supervised + 2 * soft, rel=1e-5)
    uniform = WeightedSoftLabels(strength=2.0, weights="uniform")
    assert float(uniform(1, z[1], batch)) != pytest.approx(found, rel=1e-3)
    alone = MutualBatch({1: z[1]}, torch.tensor([0, 0]), {1: 7}, None, F.cross_entropy)
    assert float(uniform(1, z[1], alone)) == pytest.approx(supervised)
    with pytest.raises(InputError, match="strength must be a number from 0 up, got -1"):
        WeightedSoftLabels(strength=-1.0)


def test_a_sum_over_the_batch_is_a_multiple_of_the_mean():
    z = {key: torch.randn(4, 3) for key in (1, 2)}
    y = torch.tensor([0, 1, 2, 0])
    batch = MutualBatch(z, y, {1: 5, 2: 5}, None, F.cross_entropy)
    mean, total = MutualKL(0.2, 0.8), MutualKL(0.2, 0.8, reduction="sum")
    torch.testing.assert_close(total(1, z[1], batch), 4 * mean(1, z[1], batch))


# Models that are not finite


@pytest.mark.parametrize("teacher", [False, True])
def test_a_model_that_is_not_finite_is_left_out(teacher):
    """The others go on as if it had not been there."""
    good = several("cnn", "norm")
    bad = weights("mlp", 1)
    bad.params[0] = float("nan")
    both = ({**good}, {1: bad}) if teacher else ({**good, 1: bad}, {})
    found = TrainTogether(SGD, both[0], MutualKL(), both[1]).run(local())
    alone = TrainTogether(SGD, good, MutualKL()).run(local())
    assert found.diverged == (1,)
    for key in good:
        assert torch.equal(found.models[key].params, alone.models[key].params)
        assert found.stats[key] == alone.stats[key]
    if not teacher:
        assert found.models[1] is bad
        assert found.stats[1].examples == 0


class Exploding(Seen):
    """Its gradients are too large for the model with key 5."""

    def __call__(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        return super().__call__(own, logits, batch) * (1e38 if own == 5 else 1.0)


def test_a_pupil_that_explodes_is_left_out_from_then_on():
    seen, pupils = Exploding(), several("cnn", "mlp", "mlp")
    work = LocalSGD(steps=3, batch_size=8, lr=100.0)
    found = TrainTogether(work, pupils, seen).run(local())
    assert found.diverged == (5,)
    assert found.models[5] is pupils[5]
    assert [batch.keys for _, _, batch in seen.batches] == [(3, 4, 5)] * 3 + [(3, 4)] * 4
    assert found.stats[3].examples == 24


def test_a_pupil_that_explodes_in_the_last_batch_is_named():
    bad = weights("cnn", 3)
    work = LocalSGD(steps=1, batch_size=8, lr=3e38, weight_decay=3e38)
    found = TrainTogether(work, {3: bad}, MutualKL()).run(local())
    assert found.diverged == (3,)
    assert found.models[3] is bad


# Edges, memory and bad input


def test_without_examples_nothing_changes():
    context = local(indices=torch.arange(0))
    pupils = several("cnn", "norm")
    found = TrainTogether(SGD, pupils, MutualKL()).run(context)
    assert all(torch.equal(found.models[key].params, m.params) for key, m in pupils.items())
    assert {stats.examples for stats in found.stats.values()} == {0}
    assert found.diverged == ()


def test_a_last_batch_of_one_example_is_merged_if_any_pupil_has_batch_statistics():
    work = LocalSGD(epochs=1, batch_size=10)  # 21 examples
    seen = Seen()
    TrainTogether(work, several("cnn", "norm"), seen).run(local())
    assert [len(y.labels) for own, _, y in seen.batches if own == 3] == [10, 11]
    seen = Seen()
    TrainTogether(work, several("cnn", "mlp"), seen).run(local())
    assert [len(y.labels) for own, _, y in seen.batches if own == 3] == [10, 10, 1]


def test_models_are_held_once(monkeypatch):
    """Beyond the inputs, 26 pupils hold their parameters and momentum, and nothing more."""
    held: list[int] = []
    finish = together.Cohort.results

    def results(cohort: together.Cohort) -> dict:
        for pupil in cohort.pupils:
            vectors = [pupil.model.params, pupil.model.buffers, *pupil.model.scratch.values()]
            addresses = {tensor.untyped_storage().data_ptr(): tensor for tensor in vectors}
            views = [*pupil.learner.parameters, *pupil.model.views]
            assert {v.untyped_storage().data_ptr() for v in views} <= addresses.keys()
            held.append(sum(t.untyped_storage().nbytes() for t in addresses.values()))
            assert pupil.logits is None  # nor a graph
            assert all(parameter.grad is None for parameter in pupil.model.tensors)
        assert len({id(pupil.model.module) for pupil in cohort.pupils}) == 1
        return finish(cohort)

    monkeypatch.setattr(together.Cohort, "results", results)
    pupils = several(*["cnn"] * 26)
    TrainTogether(SGD, pupils, MutualKL()).run(local())
    assert held == [2 * 127 * 4] * 26


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep_optimizer": True}, "leave out keep_optimizer"),
        ({"early_stop": "rollback"}, "got early_stop='rollback'; leave it out"),
        ({"only": "head"}, "got only='head'; leave it out"),
        ({"correct": CurvaturePenalty()}, "no tensors for the correction CurvaturePenalty"),
        ({"loss": ModelLoss()}, "takes a loss of logits and labels"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_work_for_one_model_only_is_refused(changes, message):
    with pytest.raises(InputError, match=message):
        TrainTogether(replace(SGD, **changes), several("cnn"), MutualKL())


def test_models_that_do_not_fit_are_refused():
    pupil = weights("cnn", 3)
    with pytest.raises(InputError, match="no pupils"):
        TrainTogether(SGD, {}, MutualKL())
    with pytest.raises(InputError, match="model 3 is both a pupil and a teacher"):
        TrainTogether(SGD, {3: pupil}, MutualKL(), {3: pupil})
    with pytest.raises(PeerageError, match=r"cannot train model 3: no node has .* 'vgg'"):
        TrainTogether(SGD, {3: replace(pupil, architecture="vgg")}, MutualKL()).run(local())
    with pytest.raises(PeerageError, match=r"its params have shape \(2,\)"):
        TrainTogether(SGD, {3: replace(pupil, params=torch.ones(2))}, MutualKL()).run(local())
    with pytest.raises(InputError, match="alpha must be a number from 0 up, got -1"):
        MutualKL(alpha=-1)
    with pytest.raises(InputError, match="weights must be one of size, uniform; got 'sizes'"):
        MutualKL(weights="sizes")
