"""A peer with data of its own, of which nobody else has a copy."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from peerage.data import Dataset
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.prepare import Prepared, prepare

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Mine:
    """The partition of a peer that knows its own examples only: all of them are its own."""

    me: int

    def split(
        self, labels: NDArray[np.int64], nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        empty = np.empty(0, dtype=np.int64)
        return [np.arange(len(labels)) if node == self.me else empty for node in range(nodes)]


def prepare_own(
    experiment: Experiment, me: int, data: Dataset, classes: int | None = None
) -> Prepared:
    """What a run needs, for one node with this data; `classes` there are in the whole network."""
    if classes is not None:
        if classes < len(data.classes):
            raise InputError(
                f"{data.name} has labels of {len(data.classes)} classes, and --classes says "
                f"{classes}; give the number of classes in the whole network"
            )
        more = tuple(str(number) for number in range(len(data.classes), classes))
        data = replace(data, classes=(*data.classes, *more))
    alone = experiment.model_copy(update={"partition": Mine(me), "dataset": data})
    return prepare(alone, data)
