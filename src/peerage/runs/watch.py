"""Watchers: functions that follow a run, may look at its models, and may end it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from torch import nn

from peerage.engine.lockstep import Lockstep
from peerage.errors import InputError, did_you_mean
from peerage.records.rows import Row
from peerage.vectors import Weights

M = TypeVar("M")


class Signal(Enum):
    """What a watcher may return to control the run."""

    STOP = "stop"


STOP = Signal.STOP  # ends the run after this round, as a reached target does


class Models:
    """The models of a run at the end of a round, fetched from the engine when they are asked for.

    `models(node)` is a module in evaluation mode, `models.weights(node)` the same as a value. A
    node of a network with a hub may have the hub's model. Valid only while the watcher is called.
    """

    def __init__(self, engine: Lockstep) -> None:
        self._engine: Lockstep | None = engine

    def __call__(self, node: int, name: str | None = None) -> nn.Module:
        """The evaluated model of a node; by default its first one."""
        model = self.weights(node, name)
        assert self._engine is not None
        architecture = self._engine.world.architectures[model.architecture]
        return architecture.module(model.params, model.buffers)

    def weights(self, node: int, name: str | None = None) -> Weights:
        """The model as a value, in tensors of its own."""
        if self._engine is None:
            raise InputError("the models of a round are gone; use them while the watcher is called")
        world = self._engine.world
        if not 0 <= node < world.nodes:
            raise InputError(f"the run has no node {node}; its nodes are 0 to {world.nodes - 1}")
        return choose(self._engine.model(world.model_owner(node)).evaluated, name, node)

    def close(self) -> None:
        self._engine = None


def choose(models: Mapping[str, M], name: str | None, node: int) -> M:
    """The entry of the model with this name, or of the first one."""
    if name is None:
        return next(iter(models.values()))
    if name not in models:
        known = list(filter(None, models))
        hint = did_you_mean(name, known) if known else "its only model has no name, so give none"
        raise InputError(f"node {node} has no model named {name!r}; {hint}")
    return models[name]


@dataclass(frozen=True)
class Watcher:
    """A watcher that also sees models: `pg.run(experiment, watch=pg.Watcher(look))`.

    `look(row, models)` is called like a plain watcher, with a `Models` as well.

    >>> import peerage as pg
    >>> def stop_early(row, models):
    ...     return pg.STOP if row["round"] == 1 else None
    >>> experiment = pg.Experiment(nodes=3, rounds=9, topology="ring", engine={"name": "serial"})
    >>> pg.run(experiment, watch=pg.Watcher(stop_early)).summary["rounds"]
    1
    """

    look: Callable[[Row, Models], Any]


# Called with the network row of every finished round; the run ends if it returns `STOP`.
Watch = Callable[[Row], Any] | Watcher


def call(watch: Watch, row: Row, engine: Lockstep) -> bool:
    """Call a watcher; returns whether it ends the run."""
    if not isinstance(watch, Watcher):
        return watch(row) is STOP
    models = Models(engine)
    try:
        return watch.look(row, models) is STOP
    finally:
        models.close()
