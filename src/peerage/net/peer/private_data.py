"""A peer with data of its own, of which nobody else has a copy."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from peerage.data import Dataset
from peerage.data.tensors import class_numbers
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError, did_you_mean
from peerage.experiment import Experiment

Ints = NDArray[np.int64]
Classes = int | tuple[str, ...]  # how many there are in the whole network, or their names


@dataclass(frozen=True)
class AllToNode:
    """The partition of a peer that knows its own examples only: all of them are its own."""

    me: int

    def split(
        self, labels: NDArray[np.int64], nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        empty = np.empty(0, dtype=np.int64)
        return [np.arange(len(labels)) if node == self.me else empty for node in range(nodes)]


def prepare_own(
    experiment: Experiment,
    me: int,
    data: Dataset,
    classes: Classes | None = None,
    test: Dataset | None = None,
) -> World:
    """What a run needs, for one node with this data, judged on the test set of `test` if given.

    `classes` are those of the whole network; `World.classes` has their names. A model
    that the experiment leaves open is the one for the experiment's data set, as on all peers.
    """
    data = with_classes(data, classes)
    if test is not None:
        data = with_test_set(data, with_classes(test, classes))
    return prepare(experiment.model_copy(update={"partition": AllToNode(me)}), data, share=True)


def parse_classes(text: str) -> Classes:
    """A number of classes, or their names in the order of their labels.

    >>> parse_classes("10"), parse_classes("cat, dog")
    (10, ('cat', 'dog'))
    """
    try:
        count = int(text)
    except ValueError:
        names = tuple(name.strip() for name in text.split(","))
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice or "" in names:
            wrong = f"names {twice!r} twice" if twice else "has an empty name"
            raise InputError(f"--classes {text!r} {wrong}; write --classes cat,dog,horse") from None
        return names
    if count < 1:
        raise InputError(f"--classes must be at least 1, or names as in cat,dog,horse, got {count}")
    return count


def with_classes(data: Dataset, classes: Classes | None) -> Dataset:
    """The data with the classes of the whole network, of which it may lack some."""
    if classes is None:
        return data
    whole = _counted(data, classes) if isinstance(classes, int) else _named(data, classes)
    return replace(whole, inferred_classes=False)


def with_test_set(data: Dataset, test: Dataset) -> Dataset:
    """The data with the test set of another, which must be of the same kind."""
    if test.shape != data.shape:
        raise InputError(
            f"--test {test.name} has examples of shape {test.shape} and {data.name} has examples "
            f"of shape {data.shape}; give both the same shape"
        )
    if len(test.classes) != len(data.classes):
        raise InputError(
            f"--test {test.name} has {len(test.classes)} classes and {data.name} has "
            f"{len(data.classes)}; say with --classes which there are in the whole network"
        )
    pairs = zip(data.classes, test.classes, strict=True)
    other = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if other and not _is_numbered(data) and not _is_numbered(test):
        raise InputError(
            f"--test {test.name} calls a class {other[1]!r} that {data.name} calls {other[0]!r}; "
            "name all classes of the whole network, as in --classes cat,dog,horse"
        )
    return replace(data, test_x=test.test_x, test_y=test.test_y)


def _counted(data: Dataset, count: int) -> Dataset:
    known = len(data.classes)
    if count < known:
        raise InputError(
            f"{data.name} has labels of {known} classes, and --classes says {count}; "
            "give the number of classes in the whole network"
        )
    if _is_numbered(data):
        return replace(data, classes=class_numbers(count))
    if count > known:
        raise InputError(
            f"--classes {count} does not say which classes {data.name} lacks beside "
            f"{', '.join(data.classes)}; name all of them, as in --classes cat,dog,horse"
        )
    return data


def _named(data: Dataset, names: tuple[str, ...]) -> Dataset:
    """Labels in the order of the names; classes that have numbers only take the names in order."""
    if _is_numbered(data) and not set(data.classes) & set(names):
        if len(names) < len(data.classes):
            raise InputError(
                f"{data.name} has labels of {len(data.classes)} classes, and --classes names "
                f"{len(names)}; name all classes of the whole network"
            )
        return replace(data, classes=names)
    for name in data.classes:
        if name not in names:
            hint = did_you_mean(name, names)
            raise InputError(f"{data.name} has a class {name!r} that --classes lacks; {hint}")
    label = torch.tensor([names.index(name) for name in data.classes])
    return replace(data, train_y=label[data.train_y], test_y=label[data.test_y], classes=names)


def _is_numbered(data: Dataset) -> bool:
    """Whether its classes have numbers for names, which say nothing about other data."""
    return data.classes == class_numbers(len(data.classes))
