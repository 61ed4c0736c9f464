"""Curvature of the local loss: which parameters the node's own data has something to say about.

The three kinds are squared gradients, the diagonal of J^T J, at three grains (methods of P0):

- `batch`: the sum over mini-batches of the squared gradient of the batch's mean loss;
- `sample`: the sum over examples of the squared gradient of the example's loss (the diagonal of the
  empirical Fisher matrix);
- `full`: the squared gradient of the mean loss over all examples, which vanishes at an optimum.

All are taken in evaluation mode, so dropout is off and running statistics stand still.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peerage.errors import InputError, did_you_mean
from peerage.local import Batches, Local
from peerage.losses import CrossEntropy
from peerage.persample import sum_squared_gradients
from peerage.requests import Compute
from peerage.vectors import FlatModel

LARGE_BATCH = 1000  # examples in one forward pass where the batch size has no meaning


def batch_curvature(model: FlatModel, batches: Batches) -> Tensor:
    h = torch.zeros_like(model.params)
    parts = model.like_tensors(h)
    for x, y in batches:
        loss = CrossEntropy()(model.module(x), y)
        g = torch.autograd.grad(loss, model.tensors)
        torch._foreach_addcmul_(parts, g, g)
    return h


def sample_curvature(model: FlatModel, batches: Batches) -> Tensor:
    h = torch.zeros_like(model.params)
    for x, y in batches:
        squares = sum_squared_gradients(model.module, CrossEntropy(), x, y)
        for name, square in squares.items():
            model.layout.view(h, name).add_(square)
    return h


def full_gradient(model: FlatModel, batches: Batches) -> Tensor:
    """[d] gradient of the mean loss over all batches."""
    total, count = torch.zeros_like(model.params), 0
    parts = model.like_tensors(total)
    for x, y in batches:
        loss = CrossEntropy()(model.module(x), y)
        torch._foreach_add_(parts, torch.autograd.grad(loss, model.tensors), alpha=len(y))
        count += len(y)
    return total / max(count, 1)


def full_curvature(model: FlatModel, batches: Batches) -> Tensor:
    return full_gradient(model, batches).square()


KINDS: dict[str, Callable[[FlatModel, Batches], Tensor]] = {
    "batch": batch_curvature,
    "sample": sample_curvature,
    "full": full_curvature,
}


def check_kind(kind: str, *also: str) -> None:
    if kind not in (*KINDS, *also):
        raise InputError(f"unknown curvature {kind!r}; {did_you_mean(kind, (*KINDS, *also))}")


@dataclass(frozen=True)
class Curvature(Compute[Tensor]):
    phase: ClassVar[str] = "curvature"

    params: Tensor
    buffers: Tensor
    kind: str
    batch_size: int

    def run(self, local: Local) -> Tensor:
        model = local.model(self.params, self.buffers)
        model.module.eval()
        return KINDS[self.kind](model, local.data.chunks(local.indices, self.batch_size))


@dataclass(frozen=True)
class Gradient(Compute[Tensor]):
    phase: ClassVar[str] = "curvature"

    params: Tensor
    buffers: Tensor

    def run(self, local: Local) -> Tensor:
        model = local.model(self.params, self.buffers)
        model.module.eval()
        return full_gradient(model, local.data.chunks(local.indices, LARGE_BATCH))


@dataclass(frozen=True)
class Losses(Compute[Tensor]):
    """Mean losses of several candidates, all judged on the same examples."""

    phase: ClassVar[str] = "losses"

    candidates: tuple[Tensor, ...]
    buffers: Tensor
    examples: int | None

    def run(self, local: Local) -> Tensor:
        batches = list(local.sample(self.examples, LARGE_BATCH))
        return torch.tensor([self.judge(local, params, batches) for params in self.candidates])

    def judge(self, local: Local, params: Tensor, batches: list[tuple[Tensor, Tensor]]) -> float:
        model = local.model(params, self.buffers)
        model.module.eval()
        total, count = 0.0, 0
        with torch.no_grad():
            for x, y in batches:
                total += float(CrossEntropy()(model.module(x), y)) * len(y)
                count += len(y)
        return total / max(count, 1)
