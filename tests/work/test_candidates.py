"""Losses of candidates: equal to the obvious, with features computed once, from own streams."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage.errors import InputError, PeerageError
from peerage.requests import Envelope, Inbox, Message
from peerage.testing import blobs
from peerage.vectors import FlatModel, Weights
from peerage.work.candidates import Losses, Tail, read_candidates
from peerage.work.context import Examples, LocalContext
from peerage.work.training import LocalSGD, Train

EXAMPLES = 23
EMPTY = torch.empty(0)


class Counting(nn.Module):
    """Counts the examples that pass."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x


class Functional(nn.Module):
    """Between its two head layers is a function, which no module knows of."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(Counting(), nn.Linear(4, 6), nn.Tanh())
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.first(self.core(x))))
        return logits


class Scaled(Functional):
    """Something happens after the head."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(nn.Module):
    """Its head is also part of the way to the features."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(Counting(), nn.Linear(4, 3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.head(self.core(x))))
        return logits


class Named(nn.Module):
    """Calls its head by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Sequential(Counting(), nn.Linear(4, 3))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(input=self.core(x))
        return logits


def core() -> list[nn.Module]:
    return [Counting(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU(inplace=True), nn.Dropout()]


# name -> network, head, whether the core runs once
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], bool]] = {
    "last layer": (lambda: nn.Sequential(*core(), nn.Linear(6, 3)), (), True),
    "one module": (
        lambda: nn.Sequential(*core(), nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))),
        ("5",),
        True,
    ),
    "in a row": (
        lambda: nn.Sequential(*core(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        ("5", "7"),
        True,
    ),
    "nested": (
        lambda: nn.Sequential(
            *core(), nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Linear(6, 5)), nn.Linear(5, 3)
        ),
        ("5.2", "6"),
        True,
    ),
    "with statistics": (
        lambda: nn.Sequential(*core(), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        ("5", "7"),
        True,
    ),
    "the whole model": (lambda: nn.Sequential(Counting(), nn.Linear(4, 3)), ("",), False),
    "in place": (
        lambda: nn.Sequential(*core(), nn.Sequential(nn.SiLU(inplace=True), nn.Linear(6, 3))),
        ("5",),
        False,
    ),
    "not adjacent": (
        lambda: nn.Sequential(Counting(), nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)),
        ("1", "3"),
        False,
    ),
    "function between": (Functional, ("first", "last"), False),
    "function after": (Scaled, ("last",), False),
    "called twice": (Twice, ("head",), False),
    "by keyword": (Named, ("head",), False),
}


def local_data(**models: FlatModel) -> LocalContext:
    data = blobs()
    return LocalContext(
        node=1,
        round=0,
        seed=7,
        data=Examples(data.train_x, data.train_y),
        indices=torch.arange(10, 10 + EXAMPLES),
        architecture="net",
        models=models,
        persistent_tensors={},
    )


def built(name: str) -> tuple[LocalContext, Weights]:
    """The node's data, and its model, whose statistics are not the initial ones."""
    torch.manual_seed(2)
    build, head, _ = NETWORKS[name]
    model = FlatModel(build(), head)
    model.module.train()
    model.module(2 + torch.randn(30, 4))
    local = local_data(net=model)
    model.module.eval()
    return local, Weights(model.params.clone(), model.buffers.clone(), "net")


def heads_of(local: LocalContext, count: int = 3, part: str = "head") -> list[Weights]:
    torch.manual_seed(5)
    model = local.models["net"]
    sizes = model.layout.part_size(part), model.buffer_layout.part_size(part)
    return [Weights(torch.randn(sizes[0]), 0.5 + torch.rand(sizes[1]), "net") for _ in range(count)]


def composed(local: LocalContext, own: Weights, head: Weights, part: str = "head") -> Weights:
    model = local.models["net"]
    params, buffers = own.params.clone(), own.buffers.clone()
    params[model.layout.part(part)] = head.params
    buffers[model.buffer_layout.part(part)] = head.buffers
    return Weights(params, buffers, "net")


def seen(local: LocalContext) -> int:
    """The examples that have passed the core since the last call."""
    [counter] = [m for m in local.models["net"].module.modules() if isinstance(m, Counting)]
    found, counter.seen = counter.seen, 0
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_heads_have_the_losses_of_whole_models_and_share_features(name):
    local, own = built(name)
    heads = heads_of(local)
    whole = Losses(tuple(composed(local, own, head) for head in heads), batch_size=10).run(local)
    assert len(set(whole.tolist())) == 3
    seen(local)
    found = Losses(tuple(heads), batch_size=10, part="head", own=own).run(local)
    assert torch.equal(found, whole)
    assert seen(local) == (EXAMPLES if NETWORKS[name][2] else 3 * EXAMPLES)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in hooked(local))


def hooked(local: LocalContext) -> list[nn.Module]:
    return list(local.models["net"].module.modules())


def test_a_single_head_is_evaluated_without_hooks(monkeypatch):
    local, own = built("last layer")
    [head] = heads_of(local, 1)
    monkeypatch.setattr(Tail, "run", lambda *_: pytest.fail("hooks for one head"))
    [found] = Losses((head,), part="head", own=own).run(local)
    [wanted] = Losses((composed(local, own, head),)).run(local)
    assert found == wanted


@pytest.mark.parametrize("name", ["in a row", "not adjacent"])
def test_cores_under_one_head(name):
    local, own = built(name)
    cores = heads_of(local, part="core")
    wanted = Losses(tuple(composed(local, own, core, "core") for core in cores)).run(local)
    assert torch.equal(Losses(tuple(cores), part="core", own=own).run(local), wanted)


def test_of_whole_models_the_part_is_taken():
    local, own = built("with statistics")
    heads = heads_of(local)
    whole = tuple(composed(local, own, head) for head in heads)
    wanted = Losses(tuple(heads), part="head", own=own).run(local)
    other = replace(own, params=own.params + 1)  # with another core
    assert torch.equal(Losses(whole, part="head", own=own).run(local), wanted)
    assert not torch.equal(Losses(whole, part="head", own=other).run(local), wanted)


def test_losses_are_means_over_the_drawn_examples():
    local, own = built("last layer")
    x, y = local.data.take(local.indices)
    with torch.no_grad():
        direct = F.cross_entropy(local.models["net"].module(x), y)
    for size in (None, 1, 7, 100):
        [found] = Losses((own,), batch_size=size).run(local)
        assert float(found) == pytest.approx(float(direct), rel=1e-5)


# Candidates


def test_candidates_of_other_architectures():
    torch.manual_seed(0)
    other = FlatModel(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Linear(2, 3)))
    local, own = built("last layer")
    local = replace(local, models={**local.models, "other": other})
    candidate = Weights(other.params.clone(), other.buffers.clone(), "other")
    both = Losses((own, candidate, own)).run(local)
    other.module.eval()
    x, y = local.data.take(local.indices)
    with torch.no_grad():
        wanted = F.cross_entropy(other.module(x), y)
    assert both[0] == both[2] == Losses((own,)).run(local)[0]
    assert float(both[1]) == pytest.approx(float(wanted), rel=1e-6)
    with pytest.raises(PeerageError, match="candidate of architecture 'more'; use one of net, oth"):
        Losses((replace(own, architecture="more"),)).run(local)
    with pytest.raises(
        PeerageError, match=r"candidate of architecture 'other'; use .* part=head on"
    ):
        Losses((candidate,), part="head", own=own).run(local)


def inbox(*models: Weights) -> Inbox:
    messages = [
        Message(Envelope(i, 5, 1, m.architecture), {"x": m.params, "b": m.buffers})
        for i, m in enumerate(models)
    ]
    return Inbox(tuple(messages), owner=0)


def test_candidates_come_as_messages_vectors_or_weights():
    models = tuple(Weights(torch.rand(3), torch.rand(2), "net") for _ in range(2))
    vectors, buffers = [m.params for m in models], [m.buffers for m in models]
    for found in (
        read_candidates(0, "net", inbox(*models), None),
        read_candidates(0, "net", vectors, buffers),
        read_candidates(0, "net", models, None),
    ):
        assert [m.architecture for m in found] == ["net", "net"]
        assert all(map(torch.equal, [m.params for m in found], vectors))
        assert all(map(torch.equal, [m.buffers for m in found], buffers))
    [alone] = read_candidates(0, "net", [vectors[0]], None)
    assert len(alone.buffers) == 0
    assert read_candidates(0, "net", [], None) == ()


@pytest.mark.parametrize(
    ("candidates", "buffers", "found"),
    [
        ([EMPTY, EMPTY], [EMPTY], "node 4 has 2 candidates but the buffers of 1; pass buffers for"),
        (
            [Weights(EMPTY, EMPTY, "net")],
            [EMPTY],
            "node 4 gave buffers beside candidates that have",
        ),
        (inbox(Weights(EMPTY, EMPTY, "net")), [EMPTY], "node 4 gave buffers beside candidates"),
        (inbox(Weights(EMPTY, EMPTY, "b")), None, "architecture 'b', not 'net'; use inbox.alike"),
    ],
)
def test_odd_candidates_are_one_line(candidates, buffers, found):
    with pytest.raises(PeerageError, match=found):
        read_candidates(4, "net", candidates, buffers)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_odd_numbers_are_one_line(options, found):
    with pytest.raises(InputError, match=found):
        Losses((), **options)


def test_parts_of_other_sizes_are_one_line():
    local, own = built("with statistics")
    [head] = heads_of(local, 1)
    wrong: list[tuple[Any, str]] = [
        (
            replace(head, params=head.params[1:]),
            "32 parameters: the head of its model 'net' has 33",
        ),
        (replace(head, buffers=EMPTY), "0 running statistics: the head of its model 'net' has 12"),
    ]
    for candidate, found in wrong:
        with pytest.raises(PeerageError, match=f"node 1 cannot evaluate a candidate with {found}"):
            Losses((candidate,), part="head", own=own).run(local)
    with pytest.raises(InputError, match="no part 'tail'"):
        Losses((head,), part="tail", own=own).run(local)


# Streams


def drawn(local: LocalContext, **options: Any) -> list[int]:
    """The examples of one call."""
    found: list[int] = []
    rows = {tuple(row.tolist()): i for i, row in enumerate(local.data.x)}
    model = local.models["net"]
    handle = model.module.register_forward_pre_hook(
        lambda _, inputs: found.extend(rows[tuple(row.tolist())] for row in inputs[0])
    )
    own = Weights(model.params.clone(), model.buffers.clone(), "net")
    Losses((own,), **options).run(local)
    handle.remove()
    return found


def test_every_call_draws_other_examples_and_streams_do_not_depend_on_each_other():
    local, _ = built("last layer")
    first, second = (drawn(local, examples=8) for _ in range(2))
    assert len(set(first)) == 8
    assert set(first) <= set(local.indices.tolist())
    assert first != second
    again, _ = built("last layer")
    other = drawn(again, examples=8, stream="choice")
    assert other not in (first, second)
    assert [drawn(again, examples=8) for _ in range(2)] == [first, second]
    later, _ = built("last layer")
    assert drawn(replace(later, round=1), examples=8) != first
    assert drawn(replace(later, node=2), examples=8) != first
    assert drawn(later, examples=EXAMPLES) == drawn(later) == local.indices.tolist()


def test_losses_never_change_the_training_that_follows():
    work = LocalSGD(epochs=1, batch_size=5)
    ends = []
    for judging in (False, True):
        local, own = built("last layer")  # with dropout
        if judging:
            drawn(local, examples=8)
            drawn(local)
            Losses(tuple(heads_of(local)), 8, "other", None, "head", own).run(local)
        ends.append(Train(work, own.params, own.buffers, {}).run(local).params)
    assert torch.equal(*ends)
