"""The settings of local training, and the only training loop of the project."""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from peerage import specs
from peerage.errors import InputError
from peerage.requests import Compute
from peerage.vectors import REST, FlatModel, Layout
from peerage.work.context import Batches, LocalContext
from peerage.work.evaluation import score
from peerage.work.gradients import (
    Differentiate,
    Gradients,
    analytic_gradients,
    autograd_gradients,
    first_layer,
)
from peerage.work.losses import (
    Correction,
    CrossEntropy,
    Loss,
    ModelLoss,
    ProportionLoss,
    with_proportions,
)


@dataclass(frozen=True)
class LocalSGD:
    """How a node trains in a round: `epochs` over its data, or `steps` mini-batches.

    >>> import peerage as pg
    >>> local = pg.LocalSGD(epochs=2, lr=0.01, momentum=0.9)
    >>> pg.DecAvg(local=local) == pg.Experiment(algorithm="decavg", local=local).algorithm
    True
    """

    epochs: int | None = None  # passes over the local data; 5 by default, unless there are steps
    steps: int | None = None  # batches from an endless shuffled stream
    batch_size: int = 16
    lr: float = 0.05
    momentum: float = 0.0  # of SGD; AdamW has fixed decays of 0.9 and 0.999
    weight_decay: float = 0.0
    nesterov: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    keep_optimizer: bool = False  # keep momentum between rounds
    # If the loss on the node's held-out examples rises in an epoch, either do nothing or undo all
    # training of the round, as the authors' code of P0 does.
    early_stop: Literal["none", "rollback"] = "none"
    loss_clamp: float | None = None  # a batch with a larger loss gives no gradient; 10 in P4's code
    loss: Loss | ModelLoss | ProportionLoss = CrossEntropy()
    correct: Correction | None = None
    # A last batch of a single example is kept, merged into the batch before, or dropped. By
    # default, models with batch statistics (BatchNorm) merge it, or drop it if the node has no
    # other examples; all other models keep it.
    batch_of_one: Literal["keep", "merge", "drop"] | None = None
    # Train one part of the model. The other is a fixed function: it does not move or decay, and
    # its layers are in evaluation mode (no dropout, running statistics stay). See `pg.Split`.
    only: Literal["head", "core"] | None = None

    def __post_init__(self) -> None:
        specs.check_choices(self)
        if self.epochs is not None and self.steps is not None:
            raise InputError(
                f"epochs={self.epochs} and steps={self.steps} exclude each other; give one of them"
            )
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 5)
        for name in ("epochs", "steps", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} must be a number of at least 0, got {value}")
        if not 0 <= self.momentum < 1:
            raise InputError(f"momentum must lie in [0, 1), got {self.momentum}")
        if self.early_stop == "rollback" and self.steps is not None:
            raise InputError(
                f"early_stop=rollback evaluates after every epoch, got steps={self.steps}; "
                "give epochs instead"
            )
        if self.loss_clamp is not None and not 0 < self.loss_clamp < float("inf"):
            raise InputError(f"loss_clamp must be a number above 0, got {self.loss_clamp}")
        if self.nesterov and self.momentum == 0:
            raise InputError("nesterov needs a momentum above 0, got momentum=0.0")
        if self.optimizer == "adamw" and (self.momentum or self.nesterov):
            raise InputError(
                f"momentum={self.momentum} and nesterov={self.nesterov} belong to sgd; "
                "leave them out with optimizer adamw"
            )
        if self.only and self.keep_optimizer and self.optimizer == "adamw":
            raise InputError(
                f"keep_optimizer with adamw counts the steps of the whole model, got "
                f"only={self.only}; leave out keep_optimizer, or use optimizer sgd"
            )

    def check_layout(self, layout: Layout) -> None:
        """Raise an InputError if the model has no such part."""
        if self.only is not None:
            layout.check_parts(f"only={self.only}")

    def batches(self, local: LocalContext) -> Batches:
        if self.steps is not None:
            yield from local.steps(self.steps, self.batch_size)
        for _ in range(self.epochs or 0):
            yield from self.epoch(local)

    def epoch(self, local: LocalContext) -> Batches:
        return local.epoch(self.batch_size, self.resolve_batch_of_one(local))

    def resolve_batch_of_one(
        self, local: LocalContext, architectures: Iterable[str] = ()
    ) -> Literal["keep", "merge", "drop"]:
        """Whether this node keeps, merges or drops a last batch of one example.

        It depends on the models that are trained, which by default is the node's own.
        """
        if self.batch_of_one is not None:
            return self.batch_of_one
        names = tuple(architectures) or (local.architecture,)
        models = [local.models[name] for name in names if name in local.models]
        if not any(model.batch_statistics(self.only) for model in models):
            return "keep"
        return "merge" if len(local.indices) > 1 else "drop"

    def batches_per_pass(self, local: LocalContext) -> int:
        """The number of batches in one pass over the node's examples."""
        whole, left = divmod(len(local.indices), self.batch_size)
        if self.steps is None and left == 1:
            batch_of_one = self.resolve_batch_of_one(local)
            left = batch_of_one == "keep" or (batch_of_one == "merge" and whole == 0)
        return whole + (left > 0)

    def last_pass(self, local: LocalContext) -> range:
        """The numbers of the batches in the last pass over the examples."""
        one_pass = self.batches_per_pass(local)
        total = self.steps if self.steps is not None else (self.epochs or 0) * one_pass
        return range(max(0, total - one_pass), total)


@dataclass(frozen=True)
class TrainStats:
    """Results of local training, beside the model.

    >>> import peerage as pg
    >>> pg.TrainStats(loss=0.7, examples=96, steps=6).steps
    6
    """

    loss: float  # mean over the training examples, before each step
    examples: int  # number of training examples, counting repetitions
    squares: Tensor | None = None  # [d] sum of g * g over the last pass, if requested
    steps: int = 0  # number of optimiser steps


@dataclass(frozen=True)
class Trained:
    params: Tensor  # [d]
    buffers: Tensor  # [b]
    stats: TrainStats
    finite: bool = True  # whether all values are finite


@dataclass(frozen=True)
class Train(Compute[Trained]):
    """Train from these parameters; returns new tensors and leaves its inputs unchanged."""

    phase: ClassVar[str] = "train"

    work: LocalSGD
    params: Tensor
    buffers: Tensor
    tensors: Mapping[str, Tensor]  # arguments of the loss or the correction
    squares: bool = False  # whether to sum squared gradients in the last pass

    def run(self, local: LocalContext) -> Trained:
        if self.work.batches_per_pass(local) == 0:
            zeros = torch.zeros_like(self.params) if self.squares else None
            return Trained(self.params, self.buffers, TrainStats(0.0, 0, zeros))
        work = self.work
        if isinstance(work.loss, ProportionLoss):
            work = replace(work, loss=with_proportions(work.loss, local.label_proportions))
        model = local.model(self.params, self.buffers)
        self.work.check_layout(model.layout)
        optimiser_state = (
            copy_optimiser_state(local.persistent_tensors) if work.keep_optimizer else None
        )
        local.seed_dropout()
        guard = Rollback(model, work, local) if work.early_stop == "rollback" else None
        stats = train(
            model,
            work,
            guard.batches() if guard else work.batches(local),
            optimiser_state,
            self.tensors,
            gather=work.last_pass(local) if self.squares else None,
            rng=local.stream("lesson") if isinstance(work.loss, ModelLoss) else None,
        )
        if guard and guard.worse:
            return Trained(self.params, self.buffers, stats)
        local.persistent_tensors.update(optimiser_state or {})  # not after a rollback
        finite = bool(torch.isfinite(model.params.sum() + stats.loss))  # while it is in the cache
        params = local.allocate(model.params.numel()).copy_(model.params)
        return Trained(params, model.buffers.clone(), stats, finite)


class Rollback:
    """Yields epochs for as long as the loss on the held-out examples does not rise."""

    def __init__(self, model: FlatModel, work: LocalSGD, local: LocalContext) -> None:
        self.model, self.work, self.local = model, work, local
        self.worse = False

    def batches(self) -> Batches:
        """Batches of all epochs; the model is evaluated when the loop asks for the next epoch."""
        before = self.validation_loss()
        for _ in range(self.work.epochs or 0):
            yield from self.work.epoch(self.local)
            after = self.validation_loss()
            self.worse = after > before
            if self.worse:
                return
            before = after

    def validation_loss(self) -> float:
        if self.local.held_out is None:
            return 0.0  # without held-out examples, training continues
        loss = score(self.model, self.local.held_out).loss
        self.model.begin_training(self.work.only)
        return loss


Logits = Mapping[int, Tensor]  # of several models on one batch, by the key of the model


class Learners(Protocol):
    """The models that one training loop trains: one alone, or several."""

    def predict(self, x: Tensor) -> Logits | None:
        """The logits that the losses of other models see; None if there are no others."""

    def gradients(
        self, x: Tensor, y: Tensor, logits: Logits | None
    ) -> Iterable[tuple["Learner", Tensor, Gradients]]:
        """Every model with its loss and gradients, given the logits of all models."""


def training(learners: Learners, batches: Batches) -> Generator[Logits, Logits, None]:
    """The training loop: for every batch, all models predict, then each is updated once.

    It yields the logits of these models and is sent those of all models. The two differ only if
    several processes train the models. For one model alone, it yields nothing.
    """
    for x, y in batches:
        try:
            found = learners.predict(x)
            logits = found if found is None else (yield found)
            for learner, loss, gradients in learners.gradients(x, y, logits):
                learner.update(loss, gradients, len(y))
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise InputError(
                "the model has batch statistics and cannot train on a batch of one example; "
                "use --batch-size 2 or more, and --batch-of-one merge or drop"
            ) from None


class Learner:
    """One model in training: its parameters, its optimiser and the sums of its statistics."""

    def __init__(
        self,
        model: FlatModel,
        work: LocalSGD,
        persistent_tensors: dict[str, Tensor] | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        gather: range | None = None,
    ) -> None:
        """Squared gradients are summed over the batches whose numbers are in `gather`."""
        self.model, self.work, self.gather = model, work, gather
        self.squares = None if gather is None else torch.zeros_like(model.params)
        self.square_parts = (
            [] if self.squares is None else model.like_tensors(self.squares, work.only)
        )
        kind: type[SGD] | type[AdamW] = AdamW if work.optimizer == "adamw" else SGD
        self.optimiser = kind(model, work, persistent_tensors)
        self.corrected = (
            Corrected(model, work, work.correct, tensors or {}) if work.correct else None
        )
        # Not the parameters themselves: several models may use one module in turn, and autograd
        # would take an update of one for a change of them all.
        self.parameters = model.like_tensors(model.params, work.only)
        self.strides = [tensor.stride() for tensor in self.parameters]
        self.versions = [parameter._version for parameter in model.frozen]
        self.total, self.examples, self.number = torch.zeros(()), 0, 0

    def update(self, loss: Tensor, gradients: Gradients, examples: int) -> None:
        """One step of the optimiser, for a batch of so many examples."""
        if [gradient.stride() for gradient in gradients] != self.strides:
            # The fused kernels assume that all tensors have the same memory layout.
            pairs = zip(self.parameters, gradients, strict=True)
            gradients = tuple(torch.empty_like(p).copy_(g) for p, g in pairs)
        if self.gather is not None and self.number in self.gather:
            torch._foreach_addcmul_(self.square_parts, gradients, gradients)
        optimiser = self.optimiser
        if self.corrected is None:
            # Directly from autograd to the fused kernel, without a copy into one vector.
            decay = self.work.weight_decay
            optimiser.step(self.parameters, list(gradients), optimiser.parts, decay)
        elif self.work.only is None:
            g = self.corrected(gradients)
            optimiser.step([self.model.params], [g], optimiser.whole, weight_decay=0.0)
        else:
            g_parts = self.model.like_tensors(self.corrected(gradients), self.work.only)
            optimiser.step(self.parameters, g_parts, optimiser.parts, weight_decay=0.0)
        self.total += loss * examples
        self.examples += examples
        self.number += 1

    def stats(self) -> TrainStats:
        if [parameter._version for parameter in self.model.frozen] != self.versions:
            raise InputError(
                "the model changes a frozen parameter when it trains, which must be equal on all "
                "nodes; register it as a buffer"
            )
        loss = float(self.total) / max(self.examples, 1)
        return TrainStats(loss, self.examples, self.squares, self.number)


class Alone:
    """One model that learns from the data alone."""

    def __init__(self, learner: Learner, differentiate: Differentiate) -> None:
        self.learner, self.differentiate = learner, differentiate

    def predict(self, x: Tensor) -> None:
        return None

    def gradients(
        self, x: Tensor, y: Tensor, logits: Logits | None
    ) -> tuple[tuple[Learner, Tensor, Gradients]]:
        return ((self.learner, *self.differentiate(x, y)),)


def train(
    model: FlatModel,
    work: LocalSGD,
    batches: Batches,
    persistent_tensors: dict[str, Tensor] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    gather: range | None = None,
    rng: torch.Generator | None = None,
) -> TrainStats:
    """Train the model in place; `persistent_tensors` holds the state of the optimiser.

    Squared gradients are summed over the batches whose numbers are in `gather`. A `ModelLoss` gets
    the `tensors` and draws from `rng`; with any other loss, the correction gets them.
    """
    tensors = tensors or {}
    model.begin_training(work.only)
    for_correction = {} if isinstance(work.loss, ModelLoss) else tensors
    learner = Learner(model, work, persistent_tensors, for_correction, gather)
    chosen = model.of_part(model.tensors, work.only)
    frozen = model.of_part(model.tensors, REST[work.only]) if work.only else []
    out = learner.corrected.views if learner.corrected else None
    first = first_layer(model.tensors, chosen)
    analytic = (
        None
        if first is None
        else analytic_gradients(model.module, work.loss, work.loss_clamp, first, out)
    )
    differentiate = analytic or autograd_gradients(
        batch_loss(work.loss, model.module, tensors, rng), chosen, work.loss_clamp, frozen
    )
    for _ in training(Alone(learner, differentiate), batches):
        pass  # one model alone yields nothing
    return learner.stats()


def batch_loss(
    loss: Loss | ModelLoss | ProportionLoss,
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    rng: torch.Generator | None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss as a function of examples and labels."""
    if isinstance(loss, ModelLoss):
        return loss.prepare(module, tensors, rng or torch.Generator())
    plain = with_proportions(loss)
    return lambda x, y: plain(module(x), y)


class Corrected:
    """Copies the gradients of all parameters into one vector [d] and corrects it.

    Weight decay passes through the correction, so an entry that a correction sets to zero does not
    change. The decay of SGD is part of the gradient. That of AdamW is applied to the parameters,
    as the difference that it makes to the corrected gradient. If only a part is trained, the
    gradient of the rest is zero, and the loop ignores what the correction makes of it.
    """

    def __init__(
        self,
        model: FlatModel,
        work: LocalSGD,
        correct: Correction,
        tensors: Mapping[str, Tensor],
    ) -> None:
        self.model, self.work, self.correct, self.tensors = model, work, correct, tensors
        self.start = model.params.clone()
        self.gradient = torch.empty_like(model.params)
        self.views = model.like_tensors(self.gradient)
        self.parts = model.of_part(self.views, work.only)
        self.frozen = model.of_part(self.views, REST[work.only]) if work.only else []
        self.mask: Tensor | None = None  # [d] 1 where the model is trained
        if work.only:
            self.mask = torch.zeros_like(model.params)
            self.mask[model.layout.part(work.only)] = 1.0

    def __call__(self, gradients: tuple[Tensor, ...]) -> Tensor:
        if gradients[0] is not self.parts[0]:  # analytic gradients are written there directly
            torch._foreach_copy_(self.parts, gradients)
        for view in self.frozen:  # a correction may have changed it in place
            view.zero_()
        g, x, decay = self.gradient, self.model.params, self.work.weight_decay
        if decay == 0:
            return self.corrected(g)
        decayable = x if self.mask is None else x * self.mask
        if self.work.optimizer == "sgd":
            return self.corrected(g.add_(decayable, alpha=decay))
        decayed = self.corrected(torch.add(g, decayable, alpha=decay))
        plain = self.corrected(g)
        change = decayed - plain
        x.sub_(change if self.mask is None else change * self.mask, alpha=self.work.lr)
        return plain

    def corrected(self, g: Tensor) -> Tensor:
        return self.correct(g, self.model.params, self.start, **self.tensors)


# The state of an optimiser: vectors [d], each either whole or as one view per parameter.
OptimiserState = list[list[Tensor]]
NAMES = ("momentum", "first", "second", "count")  # keys in `persistent_tensors`


def copy_optimiser_state(persistent_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the optimiser state that a node keeps between rounds, to be changed in place.

    Persistent tensors themselves never change, so that a round can be undone.
    """
    return {name: persistent_tensors[name].clone() for name in NAMES if name in persistent_tensors}


class SGD:
    """Stochastic gradient descent with momentum; the fused kernel reads every vector once."""

    def __init__(
        self, model: FlatModel, work: LocalSGD, persistent_tensors: dict[str, Tensor] | None
    ) -> None:
        self.work = work
        if work.momentum and work.only and persistent_tensors is not None:
            # The rest of the model may train later, and has no momentum yet.
            persistent_tensors.setdefault("momentum", torch.zeros_like(model.params))
        # In the first step, the kernel overwrites the momentum buffer.
        self.first = persistent_tensors is None or "momentum" not in persistent_tensors
        self.whole: OptimiserState = [[]]
        self.parts: OptimiserState = [[]]
        if work.momentum:
            buffers = model.scratch if persistent_tensors is None else persistent_tensors
            if "momentum" not in buffers:
                buffers["momentum"] = torch.empty_like(model.params)
            momentum = buffers["momentum"]
            self.whole, self.parts = [[momentum]], [model.like_tensors(momentum, work.only)]

    def step(
        self, x: list[Tensor], g: list[Tensor], state: OptimiserState, weight_decay: float
    ) -> None:
        torch._fused_sgd_(
            x,
            g,
            state[0],
            weight_decay=weight_decay,
            momentum=self.work.momentum,
            lr=self.work.lr,
            dampening=0.0,
            nesterov=self.work.nesterov,
            maximize=False,
            is_first_step=self.first,
        )
        self.first = False


class AdamW:
    """AdamW with decays 0.9 and 0.999."""

    def __init__(
        self, model: FlatModel, work: LocalSGD, persistent_tensors: dict[str, Tensor] | None
    ) -> None:
        self.work = work
        persistent_tensors = {} if persistent_tensors is None else persistent_tensors
        moments = [
            persistent_tensors.setdefault(name, torch.zeros_like(model.params))
            for name in ("first", "second")
        ]
        self.count = persistent_tensors.setdefault("count", torch.zeros(()))
        self.whole: OptimiserState = [[moment] for moment in moments]
        self.parts: OptimiserState = [model.like_tensors(moment, work.only) for moment in moments]

    def step(
        self, x: list[Tensor], g: list[Tensor], state: OptimiserState, weight_decay: float
    ) -> None:
        self.count += 1
        first, second = state
        torch._fused_adamw_(
            x,
            g,
            first,
            second,
            [],
            [self.count] * len(x),
            lr=self.work.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
