"""Training losses and corrections of the gradient: small values that a work order holds."""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from peerage.errors import InputError


class Loss(Protocol):
    """The mean over a batch of a loss of each example."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class CrossEntropy:
    """The mean negative log-probability of the labels."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


class Correction(Protocol):
    """A new gradient [d] from the batch gradient, the parameters and those at the round's start."""

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor, **given: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Proximal:
    """The gradient of (mu / 2) |x - x0|^2: a pull towards where the round began."""

    mu: float = 0.01

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise InputError(f"mu must be at least 0, got {self.mu}")

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor) -> Tensor:
        return g + self.mu * (x - x0)


LOSSES = {"cross-entropy": CrossEntropy}
CORRECTIONS = {"proximal": Proximal}
