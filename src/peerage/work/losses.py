"""Training losses and gradient corrections, which are options of `LocalSGD`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage import specs
from peerage.errors import InputError


class Loss(Protocol):
    """The mean loss of a batch."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor: ...


class ModelLoss:
    """A loss that needs more than logits and labels: the module, other tensors, random numbers."""

    def prepare(
        self, module: nn.Module, tensors: Mapping[str, Tensor], rng: torch.Generator
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss as a function of examples and labels, for the training of one round."""
        raise NotImplementedError


class ProportionLoss:
    """A loss that depends on the label proportions [classes] of the data set in use."""

    def __call__(self, logits: Tensor, labels: Tensor, proportions: Tensor) -> Tensor:
        raise NotImplementedError


def with_proportions(loss: Loss | ProportionLoss, proportions: Tensor | None = None) -> Loss:
    """The loss as a function of logits and labels alone."""
    if not isinstance(loss, ProportionLoss):
        return loss
    if proportions is None:
        raise InputError(
            f"{loss!r} needs the label proportions of the data; use it in the training of a node"
        )
    return lambda logits, labels: loss(logits, labels, proportions)


@dataclass(frozen=True)
class CrossEntropy:
    """The mean negative log-probability of the labels.

    >>> import peerage as pg
    >>> float(pg.CrossEntropy()(torch.zeros(1, 4), torch.tensor([2])).exp().round(decimals=4))
    4.0
    """

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)


@dataclass(frozen=True)
class VirtualTeacher:
    """The divergence from soft labels that stand for a teacher, without a second model.

    (1 - share) CE + share KL(q || softmax z), where q is `confidence` for the labelled class and
    spreads the rest equally over the others. Its gradient is that of label smoothing. A random
    teacher draws its confidence for each example between `confidence` and 1.

    Valerio, Boldrini, Passarella, Kertesz, Karsai, Iniguez, 2023. arXiv:2312.04504.

    >>> import peerage as pg
    >>> text = "virtual-teacher:share=0.5"
    >>> pg.LocalSGD(loss=pg.VirtualTeacher(share=0.5)) == pg.Experiment(local={"loss": text}).local
    True
    """

    confidence: float = 0.99
    share: float = 1.0  # of the teacher in the loss; the rest is cross-entropy
    teacher: Literal["fixed", "random"] = "fixed"

    def __post_init__(self) -> None:
        if not 0 < self.confidence <= 1:
            raise InputError(f"confidence must lie in (0, 1], got {self.confidence}")
        if not 0 <= self.share <= 1:
            raise InputError(f"share must lie in [0, 1], got {self.share}")
        specs.check_choices(self)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        b = torch.full((len(labels), 1), self.confidence)
        if self.teacher == "random":  # from torch's global generator, which is seeded for the node
            b = b + (1 - b) * torch.rand(len(labels), 1)
        q = ((1 - b) / max(logits.shape[1] - 1, 1)).expand_as(logits)  # [B, C]
        q = q.scatter(1, labels.unsqueeze(1), b)
        divergence = F.kl_div(F.log_softmax(logits, 1), q, reduction="batchmean")
        if self.share == 1:
            return divergence
        return (1 - self.share) * F.cross_entropy(logits, labels) + self.share * divergence


ABSENT = -1e9  # the logarithm of the proportion of a class that the data lacks


@dataclass(frozen=True)
class ACE(ProportionLoss):
    """Cross-entropy over the classes of the node's data; the logits of others do not change.

    -z_y + log sum_{c: b_c > 0} exp z_c, where b are the label proportions. The original takes the
    classes of each batch. Caccia et al., 2022. arXiv:2104.05025.

    >>> import peerage as pg
    >>> pg.LocalSGD(loss=pg.ACE()) == pg.Experiment(local={"loss": "ace"}).local
    True
    """

    def __call__(self, logits: Tensor, labels: Tensor, proportions: Tensor) -> Tensor:
        return F.cross_entropy(logits.masked_fill(proportions == 0, ABSENT), labels)


@dataclass(frozen=True)
class WSM(ProportionLoss):
    """Cross-entropy with a softmax weighted by the label proportions of the node's data.

    -z_y + log sum_c b_c exp z_c, where b are the label proportions. With uniform proportions it is
    the cross-entropy minus log C. Legate, Caccia, Belilovsky, 2023. arXiv:2304.05260.

    >>> import peerage as pg
    >>> pg.LocalSGD(loss=pg.WSM()) == pg.Experiment(local={"loss": "wsm"}).local
    True
    """

    def __call__(self, logits: Tensor, labels: Tensor, proportions: Tensor) -> Tensor:
        log_b = proportions.log().clamp(min=ABSENT)
        own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)  # [B]
        return (torch.logsumexp(logits + log_b, 1) - own).mean()


def distillation(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """[B] T^2 KL(softmax(teacher / T) || softmax(logits / T)) of each example.

    The factor keeps the size of the gradient when T grows. Hinton, Vinyals, Dean, 2015.
    arXiv:1503.02531.
    """
    log_p = F.log_softmax(logits / temperature, 1)
    log_q = F.log_softmax(teacher / temperature, 1)
    return temperature**2 * F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(1)


def supervised_contrastive(
    f: Tensor, labels: Tensor, a: Tensor, anchor_labels: Tensor, temperature: float
) -> Tensor:
    """A loss that pulls features f [B, k] towards the anchors a [A, k] of their own class.

    The mean over i of -1 / |P(i)| sum_{j in P(i)} log(exp(f_i.a_j / t) / sum_k exp(f_i.a_k / t)),
    all vectors of unit length, where P(i) are the anchors with the label of i. Examples without
    such anchors are left out. Khosla et al., 2020. arXiv:2004.11362.
    """
    log_p = F.log_softmax(F.normalize(f) @ F.normalize(a).T / temperature, 1)  # [B, A]
    positive = labels.unsqueeze(1) == anchor_labels  # [B, A]
    count = positive.sum(1)
    each = -(log_p * positive).sum(1) / count.clamp(min=1)  # [B]
    return each.sum() / (count > 0).sum().clamp(min=1)


def with_features(module: nn.Module, head: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, C] and the inputs of the head [B, k]."""
    features: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
    try:
        logits: Tensor = module(x)
    finally:
        handle.remove()
    return logits, features[-1].flatten(1)


class Correction(Protocol):
    """A new gradient [d] from gradient g, parameters x and the parameters x0 before training.

    g is the gradient of the mean loss of a batch. With SGD it includes weight_decay * x. With
    AdamW, a second call in every step corrects g + weight_decay * x, and the difference is the
    decay. So an entry that a correction sets to zero is not decayed either. Only momentum from
    earlier rounds can still move it.
    """

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor, *_: Any, **tensors: Any) -> Tensor: ...


@dataclass(frozen=True)
class Proximal:
    """Adds the gradient of (mu / 2) |x - x0|^2, a pull towards the model before training.

    >>> import peerage as pg
    >>> pg.LocalSGD(correct=pg.Proximal(mu=0.1)).correct.mu
    0.1
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        if self.mu < 0:
            raise InputError(f"mu must be at least 0, got {self.mu}")

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor) -> Tensor:
        return (x - x0).mul_(self.mu).add_(g)  # one new vector instead of three


@dataclass(frozen=True)
class CurvaturePenalty:
    """Adds the gradient of strength * sum_p (a_p x_p^2 - 2 b_p x_p), a pull towards other models.

    With a = sum_j F_j and b = sum_j F_j x_j, the penalty is the sum over other nodes j of
    strength * (x - x_j)^T diag(F_j) (x - x_j), up to a constant.

    >>> import peerage as pg
    >>> pg.LocalSGD(correct=pg.CurvaturePenalty(strength=0.1)).correct.strength
    0.1
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.strength < float("inf"):
            raise InputError(f"strength must be a number of at least 0, got {self.strength}")

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor, *, a: Tensor, b: Tensor) -> Tensor:
        return torch.addcmul(g, a, x, value=2 * self.strength).sub_(b, alpha=2 * self.strength)


LOSSES = {
    "cross-entropy": CrossEntropy,
    "virtual-teacher": VirtualTeacher,
    "ace": ACE,
    "wsm": WSM,
}
CORRECTIONS = {"proximal": Proximal}
