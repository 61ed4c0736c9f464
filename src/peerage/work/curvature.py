"""Diagonal curvature of the local loss, which tells how much it depends on each parameter.

The three kinds sum squared gradients, the diagonal of J^T J, over different units (P0):

- `batch`: the sum over mini-batches of the squared gradient of the batch's mean loss;
- `sample`: the sum over examples of the squared gradient of the example's loss (the diagonal of the
  empirical Fisher matrix);
- `full`: the squared gradient of the mean loss over all examples, which vanishes at an optimum.

All are computed in evaluation mode, so dropout is off and running statistics do not change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peerage.errors import InputError, PeerageError, check_choice, did_you_mean
from peerage.requests import Compute
from peerage.vectors import FlatModel, Layout
from peerage.work.context import Batches, LocalContext
from peerage.work.gradients import Differentiate, analytic_gradients, autograd_gradients
from peerage.work.losses import CrossEntropy
from peerage.work.persample import sum_squared_gradients

LARGE_BATCH = 1000  # examples in one forward pass where the batch size does not matter


Part = slice | None  # of a flat vector; None means the whole vector


def batch_curvature(model: FlatModel, batches: Batches, part: Part = None) -> Tensor:
    h = torch.zeros_like(model.params)
    tensors, parts = _restrict(model, h, part)
    differentiate = _gradients(model, tensors)
    for x, y in batches:
        _, g = differentiate(x, y)
        torch._foreach_addcmul_(parts, g, g)
    return h


def sample_curvature(model: FlatModel, batches: Batches, part: Part = None) -> Tensor:
    h = torch.zeros_like(model.params)
    for x, y in batches:
        squares = sum_squared_gradients(model.module, CrossEntropy(), x, y)
        for name, square in squares.items():
            model.layout.view(h, name).add_(square)
    return h


def full_gradient(model: FlatModel, batches: Batches, part: Part = None) -> Tensor:
    """[d] gradient of the mean loss over all batches."""
    total, count = torch.zeros_like(model.params), 0
    tensors, parts = _restrict(model, total, part)
    differentiate = _gradients(model, tensors)
    for x, y in batches:
        torch._foreach_add_(parts, differentiate(x, y)[1], alpha=len(y))
        count += len(y)
    return total / max(count, 1)


def full_curvature(model: FlatModel, batches: Batches, part: Part = None) -> Tensor:
    return full_gradient(model, batches, part).square()


def _restrict(model: FlatModel, vector: Tensor, part: Part) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters in a part, so that autograd can stop early, and views of a vector [d]."""
    start, stop, _ = (part or slice(None)).indices(model.layout.size)
    inside = [start <= slot.start < stop for slot in model.layout.slots]
    pairs = zip(model.tensors, model.like_tensors(vector), strict=True)
    chosen = [pair for pair, keep in zip(pairs, inside, strict=True) if keep]
    return [tensor for tensor, _ in chosen], [view for _, view in chosen]


def _gradients(model: FlatModel, tensors: list[Tensor]) -> Differentiate:
    """A function for the gradients of a batch's mean loss with respect to these parameters."""
    loss, left = CrossEntropy(), len(model.tensors) - len(tensors)
    is_tail = [id(t) for t in tensors] == [id(t) for t in model.tensors[left:]]
    analytic = None
    if is_tail and left % 2 == 0:  # whole layers, as each has a weight and a bias
        analytic = analytic_gradients(model.module, loss, first=left // 2)
    return analytic or autograd_gradients(lambda x, y: loss(model.module(x), y), tensors, None)


KINDS: dict[str, Callable[[FlatModel, Batches, Part], Tensor]] = {
    "batch": batch_curvature,
    "sample": sample_curvature,
    "full": full_curvature,
}
# Their cost in training epochs over the same data, from the study p0-curvature.
PASSES = {"batch": 1.0, "sample": 1.4, "full": 1.0}


def scope_of(layout: Layout, scope: str) -> slice:
    """The part of a flat vector that is weighted by curvature (P2 Fig. 10).

    `output` is the head, `last-hidden` the last two layers and `all` the whole model. Otherwise
    the scope is the names of consecutive layers, joined by +.
    """
    known = {"output": layout.head, "last-hidden": layout.layers[-2:], "all": layout.layers}
    if scope in known:
        return layout.span(*known[scope])
    names = scope.split("+")
    for name in names:
        if name not in layout.layers:
            hint = did_you_mean(name, (*known, *layout.layers))
            raise InputError(f"scope {scope!r} names no layer of the model; {hint}")
    try:
        return layout.span(*names)
    except KeyError:
        raise InputError(
            f"scope {scope!r} leaves out a layer in between; the model has "
            f"{', '.join(layout.layers)}, in this order"
        ) from None


def check_kind(kind: str, *also: str) -> None:
    check_choice("curvature", kind, (*KINDS, *also))


@dataclass(frozen=True)
class Curvature(Compute[Tensor]):
    phase: ClassVar[str] = "curvature"

    params: Tensor
    buffers: Tensor
    kind: str
    batch_size: int
    part: Part = None

    def run(self, local: LocalContext) -> Tensor:
        model = local.model(self.params, self.buffers)
        model.module.eval()
        batches = local.data.chunks(local.indices, self.batch_size)
        h = KINDS[self.kind](model, batches, self.part)
        whole = self.part is None or h[self.part].shape == h.shape
        return h if whole else h[self.part].clone()


@dataclass(frozen=True)
class Gradient(Compute[Tensor]):
    phase: ClassVar[str] = "curvature"

    params: Tensor
    buffers: Tensor

    def run(self, local: LocalContext) -> Tensor:
        model = local.model(self.params, self.buffers)
        model.module.eval()
        return full_gradient(model, local.data.chunks(local.indices, LARGE_BATCH))


@dataclass(frozen=True)
class Losses(Compute[Tensor]):
    """Mean loss of each candidate, [k], on the same local examples."""

    phase: ClassVar[str] = "losses"

    candidates: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    examples: int | None

    def run(self, local: LocalContext) -> Tensor:
        models = list(zip(self.candidates, self.buffers, strict=True))
        for params, buffers in models:
            self.check(local, params, buffers)
        batches = list(local.sample(self.examples, LARGE_BATCH))
        return torch.tensor([self.loss(local.model(*model), batches) for model in models])

    def check(self, local: LocalContext, params: Tensor, buffers: Tensor) -> None:
        model = local.models[local.architecture]
        if params.shape != model.params.shape:
            raise PeerageError(
                f"node {local.node} cannot evaluate a candidate with {params.numel()} parameters: "
                f"its model {local.architecture!r} has {model.params.numel()}; choose candidates "
                "of the same architecture, as in inbox.alike(node.architecture)"
            )
        if buffers.shape != model.buffers.shape:
            raise PeerageError(
                f"node {local.node} cannot evaluate a candidate with {buffers.numel()} running "
                f"statistics: its model {local.architecture!r} has {model.buffers.numel()}; send "
                "b=node.buffers with every model, and give node.losses the inbox, or buffers=..."
            )

    def loss(self, model: FlatModel, batches: list[tuple[Tensor, Tensor]]) -> float:
        model.module.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in batches:
                total += float(CrossEntropy()(model.module(x), y)) * len(y)
                count += len(y)
        return total / max(count, 1)
