"""Diagonal curvature of the local loss, which tells how much it depends on each parameter.

The three kinds sum squared gradients, the diagonal of J^T J, over different units (P0):

- `batch`: the sum over mini-batches of the squared gradient of the batch's mean loss;
- `sample`: the sum over examples of the squared gradient of the example's loss (the diagonal of the
  empirical Fisher matrix);
- `full`: the squared gradient of the mean loss over all examples, which vanishes at an optimum.

All are computed in evaluation mode, so dropout is off and running statistics do not change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peerage.errors import InputError, PeerageError, check_choice, did_you_mean
from peerage.requests import Compute
from peerage.vectors import FlatModel, Layout
from peerage.work.context import Batches, LocalContext
from peerage.work.gradients import (
    Differentiate,
    analytic_gradients,
    autograd_gradients,
    first_layer,
)
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


def _gradients(model: FlatModel, tensors: Sequence[Tensor]) -> Differentiate:
    """A function for the gradients of a batch's mean loss with respect to these parameters."""
    loss, first = CrossEntropy(), first_layer(model.tensors, tensors)
    analytic = None if first is None else analytic_gradients(model.module, loss, first=first)
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

    `output` is the last layer, `last-hidden` the last two and `all` the whole model. Otherwise the
    scope is the names of consecutive layers, joined by +.
    """
    layers = layout.layers
    known = {"output": layers[-1:], "last-hidden": layers[-2:], "all": layers}
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
class BatchStream:
    """The next batch of a named endless stream; without `advance`, it stays the next one."""

    size: int
    name: str
    advance: bool = True

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError(f"batch_size must be at least 1, got {self.size}")


@dataclass(frozen=True)
class Gradient(Compute[Tensor]):
    """[d] gradient of the mean loss, on all local examples or on one batch, in evaluation mode."""

    phase: ClassVar[str] = "curvature"

    params: Tensor
    buffers: Tensor
    architecture: str | None = None  # by default, the node's
    batch: BatchStream | None = None

    def run(self, local: LocalContext) -> Tensor:
        if self.architecture is not None:
            self.check(local, self.architecture)
        model = local.model(self.params, self.buffers, self.architecture)
        model.module.eval()
        if self.batch is None:
            return full_gradient(model, local.data.chunks(local.indices, LARGE_BATCH))
        g = torch.zeros_like(model.params)
        if len(local.indices):
            size, name, advance = self.batch.size, self.batch.name, self.batch.advance
            differentiate = _gradients(model, model.tensors)
            for x, y in local.steps(1, size, name, advance):
                torch._foreach_copy_(model.like_tensors(g), differentiate(x, y)[1])
        return g

    def check(self, local: LocalContext, architecture: str) -> None:
        """Raise an error if the model does not fit its architecture."""
        model = local.models.get(architecture)
        shapes = None if model is None else (model.params.shape, model.buffers.shape)
        if shapes != (self.params.shape, self.buffers.shape):
            known = {name: len(one.params) for name, one in local.models.items()}
            raise PeerageError(
                f"node {local.node} cannot compute a gradient at {self.params.numel()} parameters "
                f"and {self.buffers.numel()} running statistics of architecture {architecture!r}; "
                f"give at= a model of one of {known} parameters"
            )
