"""What algorithms of mutual learning share: the weight alpha of the distillation, and peak models.

In mutual learning, models train together, each with the loss
(1 - alpha) supervision + alpha divergence from the others. In P1, alpha rises and falls in cycles.
Models know most about all data when alpha is at its maximum. So each node keeps a frozen copy of
its model from there, the peak model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import cos, pi
from typing import ClassVar, Literal

from peerage.algorithm import Algorithm, Node
from peerage.errors import InputError, check_at_least
from peerage.vectors import Weights
from peerage.work.losses import WSM
from peerage.work.mutual import MutualKL, MutualLoss, WeightedSoftLabels
from peerage.work.together import check_work
from peerage.work.training import LocalSGD

ONE_EPOCH = LocalSGD(epochs=1, loss=WSM())  # what a participant of P1 does before it sends


@dataclass(frozen=True)
class CyclicAlpha:
    """alpha in every round: it rises from the minimum to the maximum as half a cosine wave.

    With `half` cycles, each period ends at the maximum, and the next begins at the minimum. With
    `full` cycles, the maximum is in the middle of the period. Every period reaches it exactly.
    """

    minimum: float
    maximum: float
    cycle: str  # half or full
    period: int  # rounds of the first period
    increment: int  # rounds by which each period is longer than the one before

    def at(self, round: int) -> float:
        """alpha in a round; the first is 0.

        >>> alpha = CyclicAlpha(0.0, 1.0, "half", period=3, increment=1)
        >>> [round(alpha.at(t), 2) for t in range(8)]
        [0.0, 0.5, 1.0, 0.0, 0.25, 0.75, 1.0, 0.0]
        """
        return self.in_period(*self.position(round))

    def position(self, round: int) -> tuple[int, int]:
        """The position of a round in its period, from 0, and the length of the period."""
        if self.increment == 0:
            return round % self.period, self.period
        length = self.period
        while round >= length:
            round, length = round - length, length + self.increment
        return round, length

    def top(self, length: int) -> int:
        """The position of the maximum in a period of this length."""
        return length - 1 if self.cycle == "half" else length // 2

    def in_period(self, position: int, length: int) -> float:
        """alpha at a position of a period of this length."""
        top = self.top(length)
        if position == top:  # not by the formula, so that maxima are equal to the last bit
            return self.maximum
        if position < top:
            height = (1 - cos(pi * position / top)) / 2
        else:
            height = (1 + cos(pi * (position - top) / (length - top))) / 2
        return self.minimum + (self.maximum - self.minimum) * height

    def threshold(self, round: int, values: int) -> float:
        """The smallest of the largest `values` of alpha while it rises, in the period of a round.

        >>> alpha = CyclicAlpha(0.0, 1.0, "half", period=4, increment=0)
        >>> round(alpha.threshold(0, values=2), 2)
        0.75
        """
        _, length = self.position(round)
        return self.in_period(max(self.top(length) - values + 1, 0), length)


@dataclass(frozen=True)
class Peak:
    """The state of a node: its peak model, and the largest alpha with which it took part."""

    model: Weights
    alpha: float


@dataclass(frozen=True)
class MutualLearning(Algorithm[Peak]):
    """Options, losses and peak models; a subclass says whose models train together, and where."""

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"
    initial_models: ClassVar[Literal["shared", "independent"]] = "shared"

    local: LocalSGD = ONE_EPOCH
    epochs_mutual: int = field(default=10, kw_only=True)  # passes over the data where models train
    # What weights supervision and distillation: cyclic alpha; wsl: each example by itself, with a
    # fixed sum; anl-kd: alpha falls linearly from 1 to 0 in the course of the run.
    balance: Literal["cyclic", "wsl", "anl-kd"] = field(default="cyclic", kw_only=True)
    alpha_min: float = field(default=0.0, kw_only=True)  # equal to alpha_max: a fixed alpha
    alpha_max: float = field(default=0.9, kw_only=True)
    cycle: Literal["half", "full"] = field(default="half", kw_only=True)
    period: int = field(default=10, kw_only=True)  # rounds of the first cycle
    period_increment: int = field(default=1, kw_only=True)  # rounds that each cycle adds
    # Eq. 10, gamma supervision + delta divergence: both_opposite is gamma = 1 - alpha, delta =
    # alpha; ce_only has delta = 1; kl_only has gamma = 1; common has gamma = delta = alpha.
    schedule: Literal["both_opposite", "ce_only", "kl_only", "common"] = field(
        default="both_opposite", kw_only=True
    )
    kl_weights: Literal["size", "uniform"] = field(default="size", kw_only=True)  # of teachers
    reduction: Literal["mean", "sum"] = field(default="mean", kw_only=True)  # over a batch
    # Peak models follow at so many of the largest values of alpha in a cycle. By default 1, and
    # more if few nodes take part in a round.
    peaks: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs_mutual", "period", "peaks"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("period_increment", self.period_increment, 0, " rounds")
        for name in ("alpha_min", "alpha_max"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.alpha_min > self.alpha_max:
            raise InputError(
                f"alpha_min={self.alpha_min} is above alpha_max={self.alpha_max}; exchange them"
            )
        self._check_ignored()
        check_work(self.work())

    def _check_ignored(self) -> None:
        """Raise an error if an option has no effect, because alpha does not go in cycles."""
        if self.balance == "cyclic":
            return
        cyclic = ["alpha_min", "alpha_max", "cycle", "period", "period_increment", "schedule"]
        cyclic += ["peaks", *(["reduction"] if self.balance == "wsl" else [])]
        defaults = type(self).__dataclass_fields__
        for name in cyclic:
            if getattr(self, name) != defaults[name].default:
                raise InputError(
                    f"{name}={getattr(self, name)} has no effect with balance={self.balance}; "
                    "leave it out"
                )

    def init(self, node: Node[Peak]) -> Peak:
        return Peak(node.weights, 0.0)

    def evaluated(self, node: Node[Peak]) -> Mapping[str, Weights]:
        return {"peak": node.state.model, "regular": node.weights}

    def work(self) -> LocalSGD:
        """How models train together; every model has a new optimiser."""
        return replace(self.local, epochs=self.epochs_mutual, steps=None)

    @property
    def cyclic_alpha(self) -> CyclicAlpha:
        return CyclicAlpha(
            self.alpha_min, self.alpha_max, self.cycle, self.period, self.period_increment
        )

    def alpha(self, node: Node[Peak]) -> float:
        """The weight of the distillation in this round."""
        if self.balance == "anl-kd":
            return 1 - node.round / max(node.rounds, 1)
        return self.cyclic_alpha.at(node.round)

    def loss(self, alpha: float) -> MutualLoss:
        """The loss of models that train together."""
        if self.balance == "wsl":
            return WeightedSoftLabels(weights=self.kl_weights)
        gamma, delta = {
            "both_opposite": (1 - alpha, alpha),
            "ce_only": (1 - alpha, 1.0),
            "kl_only": (1.0, alpha),
            "common": (alpha, alpha),
        }[self.schedule]
        return MutualKL(gamma, delta, weights=self.kl_weights, reduction=self.reduction)

    def note_alpha(self, node: Node[Peak]) -> None:
        """Record alpha, also on nodes that do not take part, so that reports can draw it."""
        if self.balance != "wsl":
            node.note(alpha=self.alpha(node))

    def peak_values(self, nodes: int) -> int:
        """The number of the largest values of alpha in a cycle at which peak models follow."""
        return self.peaks or 1

    def update(self, node: Node[Peak], model: Weights) -> None:
        """Make this the model of the node after mutual learning, and perhaps its peak model."""
        node.params, node.buffers = model.params, model.buffers
        if self.balance != "cyclic":  # no round is better than others
            node.state = Peak(model, 0.0)
            return
        alpha, known = self.alpha(node), node.state.alpha
        near = self.cyclic_alpha.threshold(node.round, self.peak_values(node.num_nodes))
        if alpha >= min(known, near):
            node.state = Peak(model, max(alpha, known))
