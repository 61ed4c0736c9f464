"""Several models that one node trains, spread over all shards of a team.

A node that awaits `train_together` pauses its coroutine. Each shard then trains some of the pupils
on the node's data. After every batch, the shards exchange logits through shared memory. All models
get the numbers that they would get in one process.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from peerage.engine.router import ShardOutput
from peerage.engine.store import Store
from peerage.vectors import Weights
from peerage.work.context import LocalContext
from peerage.work.together import Cohort, TrainedTogether, TrainTogether, advance
from peerage.work.training import Logits, Trained, TrainStats

# key -> references to its logits of even and odd batches, and the shape of those of an example
Slots = dict[int, tuple[Any, Any, tuple[int, ...]]]


@dataclass(frozen=True)
class SharedWeights:
    """References to the tensors of a model."""

    params: Any
    buffers: Any
    architecture: str
    size: int  # number of parameters

    @classmethod
    def of(cls, model: Weights, store: Store) -> "SharedWeights":
        places = store.put(model.params), store.put(model.buffers)
        return cls(*places, model.architecture, model.params.numel())

    def open(self, store: Store) -> Weights:
        return Weights(store.open(self.params), store.open(self.buffers), self.architecture)


@dataclass(frozen=True)
class SharedRequest:
    """A request of one node, and its position in the streams, as another shard needs it."""

    node: int
    round: int
    orders: int
    position: int | None  # in the stream of batches
    settings: bytes  # the work and the loss, pickled
    pupils: Mapping[int, SharedWeights]
    teachers: Mapping[int, SharedWeights]

    @classmethod
    def of(
        cls, request: TrainTogether, settings: bytes, local: LocalContext, store: Store
    ) -> "SharedRequest":
        position = local.persistent_tensors.get("position")
        return cls(
            local.node,
            local.round,
            local.orders,
            None if position is None else int(position),
            settings,
            {key: SharedWeights.of(model, store) for key, model in request.pupils.items()},
            {key: SharedWeights.of(model, store) for key, model in request.teachers.items()},
        )

    def open(self, store: Store) -> TrainTogether:
        work, loss = pickle.loads(self.settings)
        pupils = {key: model.open(store) for key, model in self.pupils.items()}
        teachers = {key: model.open(store) for key, model in self.teachers.items()}
        return TrainTogether(work, pupils, loss, teachers)


def pickled(request: TrainTogether) -> bytes | None:
    """The work and the loss of a request; None if one of them cannot be pickled."""
    try:
        return pickle.dumps((request.work, request.loss))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None  # for example, a class that was defined inside a function


@dataclass(frozen=True)
class SharedResult:
    """A trained pupil, as references; without them if it is not finite."""

    params: Any
    buffers: Any
    stats: TrainStats
    finite: bool

    @classmethod
    def of(cls, trained: Trained, store: Store) -> "SharedResult":
        if not trained.finite:
            return cls(None, None, trained.stats, finite=False)
        places = store.put(trained.params), store.put(trained.buffers)
        return cls(*places, trained.stats, finite=True)

    def open(self, pupil: Weights, store: Store) -> Trained:
        if not self.finite:
            return Trained(pupil.params, pupil.buffers, self.stats, finite=False)
        return Trained(store.open(self.params), store.open(self.buffers), self.stats)


class CohortPart:
    """The models that one shard trains; logits of all shards are in shared memory.

    Each model has two slots, for batches in turn: while one shard writes the logits of a batch,
    another may still read those of the batch before.
    """

    def __init__(
        self, request: TrainTogether, keys: Collection[int], local: LocalContext, store: Store
    ) -> None:
        self.store, self.cohort = store, Cohort(request, local, keys)
        self.loop = self.cohort.training()
        self.slots: Slots = {}
        # The slots of all models, and the shapes of their logits.
        self.opened: Mapping[int, tuple[Tensor, Tensor, tuple[int, ...]]] = {}

    def begin(self) -> Slots | None:
        """Predict for the first batch; returns the slots, or None if there are no batches."""
        logits = next(self.loop, None)
        if logits is None:
            return None
        work, examples = self.cohort.work, len(self.cohort.local.indices)
        # A last batch of one example may be merged into the one before.
        rows = work.batch_size if work.steps else min(work.batch_size, examples) + 1
        for key, z in logits.items():
            shape = tuple(z.shape[1:])
            even, odd = (self.store.put(self.store.empty(rows * prod(shape))) for _ in range(2))
            self.slots[key] = even, odd, shape
        self._write(logits)
        return self.slots

    def step(self, slots: Slots | None) -> bool:
        """Update the pupils, and predict for the next batch; returns whether there is one.

        The first step gets the slots of all models.
        """
        if slots is not None:
            open = self.store.open
            self.opened = {key: (open(a), open(b), shape) for key, (a, b, shape) in slots.items()}
        parity, rows = self.cohort.number % 2, self.cohort.rows
        logits = {
            key: pair[parity][: rows * prod(shape)].view(rows, *shape)
            for key, (*pair, shape) in self.opened.items()
            if key not in self.cohort.diverged
        }
        found = advance(self.loop, logits)
        if found is None:
            return False
        self._write(found)
        return True

    def _write(self, logits: Logits) -> None:
        parity = self.cohort.number % 2
        for key, z in logits.items():
            self.store.open(self.slots[key][parity])[: z.numel()].view(z.shape).copy_(z)

    def finish(self) -> tuple[dict[int, SharedResult], set[int]]:
        """The trained pupils of this shard, and the models that were left out."""
        with self.cohort:  # gives back the modules
            results = self.cohort.results()
            shared = {key: SharedResult.of(trained, self.store) for key, trained in results.items()}
            return shared, self.cohort.diverged


class SharedTraining:
    """A shard's share in the training of several models, and what its own nodes asked for."""

    def __init__(self, store: Store, context: Callable[[SharedRequest], LocalContext]) -> None:
        self.store, self.context = store, context  # of a node of another shard
        self.pending: dict[int, tuple[TrainTogether, LocalContext, bytes | None]] = {}
        self.part: CohortPart | None = None

    def ask(self, request: TrainTogether, local: LocalContext) -> int:
        """Keep a request; returns its number of models, or 0 if other shards cannot help."""
        settings = pickled(request)
        self.pending[local.node] = request, local, settings
        return len(request.pupils) + len(request.teachers) if settings else 0

    def share(self, node: int) -> SharedRequest | None:
        """The request of a node of this shard; None from all other shards."""
        if node not in self.pending:
            return None
        request, local, settings = self.pending[node]
        assert settings is not None
        return SharedRequest.of(request, settings, local, self.store)

    def begin(self, shared: SharedRequest, keys: Collection[int]) -> Slots | None:
        # The streams of the node itself advance in its own shard.
        local = (
            self.pending[shared.node][1] if shared.node in self.pending else self.context(shared)
        )
        self.part = CohortPart(shared.open(self.store), keys, local, self.store)
        return self.part.begin()

    def step(self, slots: Slots | None) -> bool:
        assert self.part is not None
        return self.part.step(slots)

    def finish(self) -> tuple[dict[int, SharedResult], set[int]]:
        assert self.part is not None
        part, self.part = self.part, None
        return part.finish()

    def answer(
        self, node: int, found: tuple[Mapping[int, SharedResult], Collection[int]] | None
    ) -> tuple[TrainTogether, TrainedTogether]:
        """A request of a node and its answer; without results, this shard trains all models."""
        request, local, _ = self.pending.pop(node)
        if found is None:
            return request, request.run(local)
        results, diverged = found
        opened = {key: r.open(request.pupils[key], self.store) for key, r in results.items()}
        return request, request.combine(opened, diverged)


# In the process that drives the team

Call = Callable[[str, Sequence[tuple[Any, ...]]], list[Any]]  # `Team.call`


def is_cheaper_spread(models: Mapping[int, int], owner: Mapping[int, int], shards: int) -> bool:
    """Whether to spread models over shards, instead of training each node's in its own shard.

    `models` is the number of models of every node that trains some; 0 if they cannot be spread.

    >>> is_cheaper_spread({3: 10}, {3: 0}, shards=2), is_cheaper_spread({3: 1}, {3: 0}, shards=2)
    (True, False)
    >>> is_cheaper_spread({3: 2, 4: 2}, {3: 0, 4: 1}, shards=2)
    False
    """
    if 0 in models.values():
        return False
    alone: Counter[int] = Counter()
    for node, count in models.items():
        alone[owner[node]] += count
    return sum(-(-count // shards) for count in models.values()) < max(alone.values())


def answer_together(
    call: Call, owner: Mapping[int, int], shards: int, outputs: Sequence[ShardOutput]
) -> list[ShardOutput]:
    """Train the models of all nodes that asked for it, and let these nodes continue."""
    models = {node: count for output in outputs for node, count in output.together.items()}
    answers: list[dict[int, Any]] = [{} for _ in range(shards)]
    spread = is_cheaper_spread(models, owner, shards)
    for node in sorted(models):
        answers[owner[node]][node] = _spread(call, owner, shards, node) if spread else None
    return call("resume_together", [(answer,) for answer in answers])


def _spread(
    call: Call, owner: Mapping[int, int], shards: int, node: int
) -> tuple[dict[int, SharedResult], set[int]]:
    """Train the models of one node on all shards."""
    request: SharedRequest = call("together", [("share", node)] * shards)[owner[node]]
    begun = call("together", [("begin", request, keys) for keys in deal(request, shards)])
    slots: Slots | None = {key: slot for part in begun for key, slot in (part or {}).items()}
    more = begun[0] is not None  # the node has examples
    while more:
        more = call("together", [("step", slots)] * shards)[0]
        slots = None  # all shards know them
    results: dict[int, SharedResult] = {}
    diverged: set[int] = set()
    for part_results, part_diverged in call("together", [("finish",)] * shards):
        results |= part_results
        diverged |= part_diverged
    return results, diverged


def deal(request: SharedRequest, shards: int) -> list[list[int]]:
    """The keys of each shard's models.

    Models are dealt by size, forwards and then backwards, so that shards get about equal numbers of
    every architecture.
    """
    parts: list[list[int]] = [[] for _ in range(shards)]
    turn = [*range(shards), *reversed(range(shards))]
    for models in (request.pupils, request.teachers):
        by_size = sorted((-model.size, model.architecture, key) for key, model in models.items())
        for number, (_, _, key) in enumerate(by_size):
            parts[turn[number % len(turn)]].append(key)
    return parts
