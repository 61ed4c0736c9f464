"""Losses of several models that learn from each other, for `node.train_together`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peerage import specs
from peerage.errors import InputError
from peerage.work.losses import Loss, ProportionLoss, with_proportions


@dataclass(frozen=True)
class MutualBatch:
    """What the loss of one model may know about a batch, beside the model's own logits.

    All logits are from before any update of the batch.

    >>> import peerage as pg
    >>> logits = {0: torch.zeros(1, 2), 1: torch.zeros(1, 2)}
    >>> batch = pg.MutualBatch(logits, torch.tensor([1]), {0: 10, 1: 20}, None, pg.CrossEntropy())
    >>> batch.keys, batch.p.shape
    ((0, 1), torch.Size([2, 1, 2]))
    """

    logits: Mapping[int, Tensor]  # [B, C] of every model, by key in ascending order; no gradients
    labels: Tensor  # [B]
    sizes: Mapping[int, int]  # number of trained parameters, by key
    proportions: Tensor | None  # [C] label proportions of the node's training data
    loss: Loss  # that of `LocalSGD`

    @property
    def keys(self) -> tuple[int, ...]:
        return tuple(self.logits)

    @cached_property
    def log_p(self) -> Tensor:
        """[k, B, C] log-probabilities, in the order of the keys."""
        return torch.log_softmax(torch.stack(list(self.logits.values())), 2)

    @cached_property
    def p(self) -> Tensor:
        """[k, B, C] probabilities, in the order of the keys."""
        return self.log_p.exp()

    @cached_property
    def entropy(self) -> Tensor:
        """[k, B] of the probabilities."""
        return -(self.p * self.log_p).sum(2)


class MutualLoss(Protocol):
    """The loss of one of several models on a batch.

    >>> import peerage as pg
    >>> def supervised(own: int, logits: torch.Tensor, batch: pg.MutualBatch) -> torch.Tensor:
    ...     return batch.loss(logits, batch.labels)
    >>> loss: pg.MutualLoss = supervised
    """

    def __call__(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        """The loss of the model with key `own`; only its `logits` [B, C] have gradients."""


@dataclass(frozen=True)
class MutualKL:
    """Supervision by the labels, and the divergence from all other models.

    gamma sup(z_n) + alpha sum_{q != n} w_q KL(p_q || p_n), the mean over the batch. The weights w
    sum to 1. DFML has gamma = 1 - alpha and weights by size; Def-KT gamma = alpha = 1; FML 1/2 and
    1/2. A model without others has no divergence.

    Zhang, Xiang, Hospedales, Lu, 2018. arXiv:1706.00384.

    >>> import peerage as pg
    >>> logits = {0: torch.zeros(1, 2), 1: torch.zeros(1, 2)}
    >>> batch = pg.MutualBatch(logits, torch.tensor([1]), {0: 10, 1: 20}, None, pg.CrossEntropy())
    >>> loss = pg.MutualKL()(0, logits[0], batch)  # log 2, as the models agree
    >>> round(float(loss), 4)
    0.6931
    """

    gamma: float = 1.0  # weight of the supervision
    alpha: float = 1.0  # weight of the divergence
    weights: Literal["size", "uniform"] = "size"  # of the other models; size: trained parameters
    supervision: Loss | ProportionLoss | None = None  # by default, the loss of `LocalSGD`
    # The sum multiplies loss and gradients by the size of the batch.
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        specs.check_choices(self)
        for name in ("gamma", "alpha"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be a number from 0 up, got {getattr(self, name)}")

    def __call__(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        supervision = (
            batch.loss
            if self.supervision is None
            else with_proportions(self.supervision, batch.proportions)
        )
        loss = self.gamma * supervision(logits, batch.labels)
        if self.alpha and len(batch.logits) > 1:
            loss = loss + self.alpha * self.divergence(own, logits, batch)
        return loss if self.reduction == "mean" else loss * len(batch.labels)

    def divergence(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        """sum_q w_q KL(p_q || p_n) = -sum_q w_q H(p_q) - (sum_q w_q p_q) . log p_n, the mean."""
        w = teacher_weights(own, batch, self.weights).to(logits.dtype)  # [k]
        target = (w[:, None, None] * batch.p).sum(0)  # [B, C]
        entropy = (w[:, None] * batch.entropy).sum(0)  # [B]
        cross = -(target * F.log_softmax(logits, 1)).sum(1)  # [B]
        return (cross - entropy).mean()


@dataclass(frozen=True)
class WeightedSoftLabels:
    """Supervision, and cross-entropy with the other models, weighted for each example (WSL).

    sup(z_n) + strength sum_{q != n} w_q mean_x f_q(x) H(p_q(x), p_n(x)), with
    f_q = 1 - exp(-CE_n / CE_q): an example counts less if the student knows it better than the
    teacher. Zhou et al., 2021. arXiv:2102.00650. It has one teacher at temperature 2; here there
    are several, weighted by w, at temperature 1.

    >>> import peerage as pg
    >>> pg.WeightedSoftLabels(strength=0.5).strength
    0.5
    """

    strength: float = 2.5  # that of the original
    weights: Literal["size", "uniform"] = "size"  # of the other models; size: trained parameters

    def __post_init__(self) -> None:
        specs.check_choices(self)
        if not 0 <= self.strength < float("inf"):
            raise InputError(f"strength must be a number from 0 up, got {self.strength}")

    def __call__(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        loss = batch.loss(logits, batch.labels)
        if len(batch.logits) < 2:
            return loss
        position = batch.keys.index(own)
        w = teacher_weights(own, batch, self.weights).to(logits.dtype)  # [k]
        examples = torch.arange(len(batch.labels))
        ce = -batch.log_p[:, examples, batch.labels]  # [k, B]
        f = 1 - torch.exp(-ce[position] / (ce + 1e-7))  # [k, B]
        target = ((w[:, None] * f)[:, :, None] * batch.p).sum(0)  # [B, C]
        soft = -(target * F.log_softmax(logits, 1)).sum(1)  # [B]
        return loss + self.strength * soft.mean()


def teacher_weights(own: int, batch: MutualBatch, kind: str) -> Tensor:
    """[k] weights of all models as teachers of one, which sum to 1; that of the model itself is 0.

    They are proportional to the `size` of the models, or `uniform`.
    """
    sizes = [(batch.sizes[q] if kind == "size" else 1) if q != own else 0 for q in batch.keys]
    return torch.tensor(sizes, dtype=torch.float64).div(sum(sizes))
