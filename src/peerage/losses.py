"""Training losses and corrections of the gradient: small values that a work order holds."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
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


@dataclass(frozen=True)
class VirtualTeacher:
    """The divergence from a teacher who is only nearly sure: soft labels without a second model.

    (1 - share) CE + share KL(q || softmax z), where q is the confidence in the labelled class and
    an equal part of the rest in every other. Its gradient is that of label smoothing. A random
    teacher draws its confidence in every example anew, between the given one and 1.

    Valerio, Boldrini, Passarella, Kertesz, Karsai, Iniguez, 2023. arXiv:2312.04504.
    """

    confidence: float = 0.99
    share: float = 1.0  # of the teacher in the loss; the rest is cross-entropy
    teacher: Literal["fixed", "random"] = "fixed"

    def __post_init__(self) -> None:
        if not 0 < self.confidence <= 1:
            raise InputError(f"confidence must lie in (0, 1], got {self.confidence}")
        if not 0 <= self.share <= 1:
            raise InputError(f"share must lie in [0, 1], got {self.share}")
        if self.teacher not in ("fixed", "random"):
            raise InputError(f"teacher must be fixed or random, got {self.teacher!r}")

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        b = torch.full((len(labels), 1), self.confidence)
        if self.teacher == "random":  # from torch's own generator, which is the node's in training
            b = b + (1 - b) * torch.rand(len(labels), 1)
        q = ((1 - b) / max(logits.shape[1] - 1, 1)).expand_as(logits)  # [B, C]
        q = q.scatter(1, labels.unsqueeze(1), b)
        divergence = F.kl_div(F.log_softmax(logits, 1), q, reduction="batchmean")
        if self.share == 1:
            return divergence
        return (1 - self.share) * F.cross_entropy(logits, labels) + self.share * divergence


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


LOSSES = {"cross-entropy": CrossEntropy, "virtual-teacher": VirtualTeacher}
CORRECTIONS = {"proximal": Proximal}
