"""Training of several models on one node's data, each with the logits of all others.

For every batch, all models predict first. Then each pupil is updated once, with a loss that sees
the logits of all models from before any update. So the order of the models does not matter, and
several processes can share the work: they exchange logits, and each updates its own pupils.

All models of one architecture use one module in turn (`FlatModel.activate`). A pupil holds its
parameters, running statistics and optimiser state once. Gradients exist for one pupil at a time.
"""

import inspect
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import ClassVar, Self

import torch
from torch import Tensor

from peerage.errors import InputError, PeerageError
from peerage.requests import Compute
from peerage.vectors import FlatModel, Weights, all_finite
from peerage.work.context import LocalContext
from peerage.work.gradients import Gradients, loss_gradients
from peerage.work.losses import ModelLoss, with_proportions
from peerage.work.mutual import MutualBatch, MutualLoss
from peerage.work.training import Learner, LocalSGD, Logits, Trained, TrainStats, training


@dataclass(frozen=True)
class TrainedTogether:
    """The models after training, and the statistics of each, by key.

    >>> import peerage as pg
    >>> def losses(trained: pg.TrainedTogether) -> dict[int, float]:
    ...     return {key: stats.loss for key, stats in trained.stats.items()}
    """

    models: Mapping[int, Weights]
    stats: Mapping[int, TrainStats]
    # The models that became NaN or infinite. From that batch on, they are left out: they are not
    # trained, and the others do not see them. Pupils among them are returned unchanged, with
    # statistics of no examples.
    diverged: tuple[int, ...] = ()


@dataclass(frozen=True)
class TrainTogether(Compute[TrainedTogether]):
    """Train the pupils; returns new tensors and leaves its inputs unchanged."""

    phase: ClassVar[str] = "train"

    work: LocalSGD
    pupils: Mapping[int, Weights]
    loss: MutualLoss
    teachers: Mapping[int, Weights] = field(default_factory=dict)  # never change

    def __post_init__(self) -> None:
        if not self.pupils:
            raise InputError("train_together got no pupils; give it at least one model")
        both = sorted(self.pupils.keys() & self.teachers.keys())
        if both:
            raise InputError(
                f"model {both[0]} is both a pupil and a teacher in train_together; choose one"
            )
        check_work(self.work)

    def run(self, local: LocalContext) -> TrainedTogether:
        with Cohort(self, local, [*self.pupils, *self.teachers]) as cohort:
            loop = cohort.training()
            logits = next(loop, None)
            while logits is not None:  # no other process trains a part of the models
                logits = advance(loop, logits)
            return self.combine(cohort.results(), cohort.diverged)

    def combine(self, results: Mapping[int, Trained], diverged: Collection[int]) -> TrainedTogether:
        """The answer, from the results of all pupils and the models that were left out."""
        broken = {*diverged, *(key for key, trained in results.items() if not trained.finite)}
        return TrainedTogether(
            {
                key: start
                if key in broken
                else Weights(results[key].params, results[key].buffers, start.architecture)
                for key, start in self.pupils.items()
            },
            {
                key: TrainStats(0.0, 0) if key in broken else results[key].stats
                for key in self.pupils
            },
            tuple(sorted(broken)),
        )


def check_work(work: LocalSGD) -> None:
    """Raise an InputError if several models cannot be trained like this."""
    if work.keep_optimizer:
        raise InputError(
            "train_together starts every model with a new optimiser; leave out keep_optimizer"
        )
    if work.early_stop != "none":
        raise InputError(
            f"train_together runs all its steps, got early_stop={work.early_stop!r}; leave it out"
        )
    if work.only is not None:
        raise InputError(
            f"train_together trains whole models, got only={work.only!r}; leave it out"
        )
    if isinstance(work.loss, ModelLoss):
        raise InputError(
            f"train_together takes a loss of logits and labels from LocalSGD, got {work.loss!r}; "
            "use another, such as CrossEntropy()"
        )
    if work.correct is not None:
        try:
            inspect.signature(work.correct).bind(None, None, None)
        except TypeError:
            raise InputError(
                f"train_together has no tensors for the correction {work.correct!r}; use one that "
                "needs only the gradient and the parameters, such as Proximal()"
            ) from None


@dataclass
class Pupil:
    """One model in training, and its logits of the current batch, with their graph."""

    key: int
    model: FlatModel
    learner: Learner
    logits: Tensor | None = None


class Cohort:
    """Those models of a request that one process trains; `keys` says which."""

    def __init__(self, request: TrainTogether, local: LocalContext, keys: Collection[int]) -> None:
        models = {**request.pupils, **request.teachers}
        architectures = {key: weights.architecture for key, weights in models.items()}
        for key, weights in models.items():
            check_model(key, weights, local)
        self.local, self.loss, self.keys = local, request.loss, set(keys)
        work = request.work
        assert not isinstance(work.loss, ModelLoss)  # `check_work` rejects it
        self.supervision = with_proportions(work.loss, local.label_proportions)
        trained = [architectures[key] for key in request.pupils]
        self.work = replace(work, batch_of_one=work.resolve_batch_of_one(local, trained))
        self.sizes = {key: weights.params.numel() for key, weights in models.items()}
        self.orders = local.orders  # before training; names the random streams
        self.number = -1  # of the current batch
        self.rows = 0  # examples in the current batch
        self.diverged: set[int] = set()  # known so far, of all models
        # The modules are used by several models in turn, and given back in the end.
        self.modules = [local.models[name] for name in dict.fromkeys(architectures.values())]
        for model in self.modules:
            model.module.train()
        self.pupils = [
            self._pupil(key, weights)
            for key, weights in sorted(request.pupils.items())
            if key in self.keys
        ]
        self.teachers = {
            key: self._model(weights, weights.params, weights.buffers)
            for key, weights in sorted(request.teachers.items())
            if key in self.keys
        }

    def _pupil(self, key: int, weights: Weights) -> Pupil:
        params = self.local.allocate(weights.params.numel()).copy_(weights.params)
        model = self._model(weights, params, weights.buffers.clone())
        return Pupil(key, model, Learner(model, self.work))

    def _model(self, weights: Weights, params: Tensor, buffers: Tensor) -> FlatModel:
        model = self.local.models[weights.architecture]
        return model.sibling(params.contiguous(), buffers.contiguous())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for model in self.modules:
            model.activate()

    def training(self) -> Generator[Logits, Logits, None]:
        """The training loop of these models; see `training`."""
        if self.work.batches_per_pass(self.local) == 0:
            return
        yield from training(self, self.work.batches(self.local))

    def predict(self, x: Tensor) -> Logits:
        self.number += 1
        self.rows = len(x)
        found: dict[int, Tensor] = {}
        for pupil in self.pupils:
            pupil.model.activate()
            self._seed("dropout", pupil.key)
            pupil.logits = pupil.model.module(x)
            found[pupil.key] = pupil.logits.detach()
        with torch.no_grad():
            for key, teacher in self.teachers.items():
                teacher.activate()
                teacher.module.eval()
                found[key] = teacher.module(x)
                teacher.module.train()
        return found

    def gradients(
        self, x: Tensor, y: Tensor, logits: Logits | None
    ) -> Iterator[tuple[Learner, Tensor, Gradients]]:
        assert logits is not None
        self._leave_out(key for key, z in logits.items() if not all_finite(z))
        known = {key: logits[key] for key in sorted(logits) if key not in self.diverged}
        batch = MutualBatch(known, y, self.sizes, self.local.label_proportions, self.supervision)
        for pupil in self.pupils:
            own, pupil.logits = pupil.logits, None  # frees the graph after the update
            assert own is not None
            pupil.model.activate()
            self._seed("mutual-loss", pupil.key)
            loss = self.loss(pupil.key, own, batch)
            yield pupil.learner, *loss_gradients(loss, pupil.model.tensors, self.work.loss_clamp)

    def _seed(self, purpose: str, key: int) -> None:
        """Seed torch's global generator; the stream depends on the model and the batch alone."""
        self.local.seed_torch(purpose, self.orders, key, self.number)

    def _leave_out(self, keys: Iterable[int]) -> None:
        """Stop training with these models."""
        found = set(keys)
        if found:
            self.diverged |= found
            self.pupils = [pupil for pupil in self.pupils if pupil.key not in found]
            for key in found & self.teachers.keys():
                del self.teachers[key]

    def results(self) -> dict[int, Trained]:
        """The pupils of this process that were trained to the end, by key."""
        results = {}
        for pupil in self.pupils:
            model, stats = pupil.model, pupil.learner.stats()
            loss = torch.tensor(stats.loss)
            finite = all(map(all_finite, (model.params, model.buffers, loss)))
            results[pupil.key] = Trained(model.params, model.buffers, stats, finite)
        return results


def check_model(key: int, weights: Weights, local: LocalContext) -> None:
    """Raise an error if a model does not fit its architecture."""
    if weights.architecture not in local.models:
        raise PeerageError(
            f"node {local.node} cannot train model {key}: no node has its architecture "
            f"{weights.architecture!r}; use one of {', '.join(local.models)}"
        )
    model = local.models[weights.architecture]
    for name, tensor, layout in (
        ("params", weights.params, model.layout),
        ("buffers", weights.buffers, model.buffer_layout),
    ):
        if tensor.shape != (layout.size,) or tensor.dtype != torch.float32:
            raise PeerageError(
                f"node {local.node} cannot train model {key}: its {name} have shape "
                f"{tuple(tensor.shape)} and type {tensor.dtype}, but {weights.architecture!r} "
                f"needs ({layout.size},) in float32"
            )


def advance(loop: Generator[Logits, Logits, None], logits: Logits) -> Logits | None:
    """Update all pupils, and return the logits of the next batch; None at the end."""
    try:
        return loop.send(logits)
    except StopIteration:
        return None
