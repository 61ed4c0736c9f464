"""A peer with private data, which no other peer has."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from peerage.data import Dataset
from peerage.data.clusters import Clusters
from peerage.data.shifts import Labels, NoShift
from peerage.data.tensors import class_numbers
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError, did_you_mean
from peerage.experiment import Experiment

Ints = NDArray[np.int64]
Classes = int | tuple[str, ...]  # number or names of the classes in the whole network


@dataclass(frozen=True)
class AllToNode:
    """The partition of a peer with private data: all examples belong to its node."""

    me: int

    def split(self, labels: Ints, nodes: int, classes: int, rng: np.random.Generator) -> list[Ints]:
        empty = np.empty(0, dtype=np.int64)
        return [np.arange(len(labels)) if node == self.me else empty for node in range(nodes)]


def prepare_own(
    experiment: Experiment,
    me: int,
    data: Dataset,
    classes: Classes | None = None,
    test: Dataset | None = None,
    *,
    shift: bool = False,
) -> World:
    """The world of one node with this data, evaluated on the test set of `test` if given.

    `classes` are those of the whole network; `World.classes` has their names. If the experiment
    names no model, all peers use the default model of the experiment's data set. With `shift`, the
    data and the test set get the shift of the node's cluster.
    """
    if shift and experiment.clusters is None:
        raise InputError("--shift requires clusters, which the experiment does not have; remove it")
    if shift and test is not None and test.scaling != data.scaling:
        raise InputError(
            f"--shift requires --data and --test that are normalised alike, but {test.name} and "
            f"{data.name} are not; remove --test, or shift the examples in your files"
        )
    data = with_classes(data, classes)
    if test is not None:
        data = with_test_set(data, with_classes(test, classes))
    changes = {
        "partition": AllToNode(me),
        "clusters": _own_clusters(experiment.clusters, shift),
    }
    return prepare(experiment.model_copy(update=changes), data, share=True)


def _own_clusters(clusters: Clusters | None, shift: bool) -> Clusters | None:
    """The clusters without their shift, or with one for which all examples belong to the node."""
    if clusters is None:
        return None
    if not shift:
        return replace(clusters, shift=NoShift())
    own = clusters.shift
    return replace(clusters, shift=replace(own, fraction=True) if isinstance(own, Labels) else own)


def parse_classes(text: str) -> Classes:
    """Parse a number of classes, or their names in the order of their labels.

    >>> parse_classes("10"), parse_classes("cat, dog")
    (10, ('cat', 'dog'))
    """
    try:
        count = int(text)
    except ValueError:
        names = tuple(name.strip() for name in text.split(","))
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate or "" in names:
            fault = f"names {duplicate!r} twice" if duplicate else "has an empty name"
            raise InputError(f"--classes {text!r} {fault}; write --classes cat,dog,horse") from None
        return names
    if count < 1:
        raise InputError(f"--classes must be at least 1, or names like cat,dog,horse, got {count}")
    return count


def with_classes(data: Dataset, classes: Classes | None) -> Dataset:
    """The data set with the classes of the whole network, of which it may lack some."""
    if classes is None:
        return data
    if isinstance(classes, int):
        data = _with_class_count(data, classes)
    else:
        data = _with_class_names(data, classes)
    return replace(data, inferred_classes=False)


def with_test_set(data: Dataset, test: Dataset) -> Dataset:
    """The data set with the test set of another, which must have the same shape and classes."""
    if test.shape != data.shape:
        raise InputError(
            f"--test {test.name} has examples of shape {test.shape} and {data.name} has examples "
            f"of shape {data.shape}; give both the same shape"
        )
    if len(test.classes) != len(data.classes):
        raise InputError(
            f"--test {test.name} has {len(test.classes)} classes and {data.name} has "
            f"{len(data.classes)}; name all classes of the whole network with --classes"
        )
    pairs = zip(data.classes, test.classes, strict=True)
    unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if unequal and not _is_numbered(data) and not _is_numbered(test):
        raise InputError(
            f"--test {test.name} has a class {unequal[1]!r} where {data.name} has {unequal[0]!r}; "
            "name all classes of the whole network, as in --classes cat,dog,horse"
        )
    return replace(data, test_x=test.test_x, test_y=test.test_y)


def _with_class_count(data: Dataset, count: int) -> Dataset:
    known = len(data.classes)
    if count < known:
        raise InputError(
            f"{data.name} has {known} classes, but --classes is {count}; "
            "give the number of classes in the whole network"
        )
    if _is_numbered(data):
        return replace(data, classes=class_numbers(count))
    if count > known:
        raise InputError(
            f"--classes {count} does not name the classes that {data.name} lacks besides "
            f"{', '.join(data.classes)}; name all of them, as in --classes cat,dog,horse"
        )
    return data


def _with_class_names(data: Dataset, names: tuple[str, ...]) -> Dataset:
    """The data set with these class names; numbered classes take the names in order."""
    if _is_numbered(data) and not set(data.classes) & set(names):
        if len(names) < len(data.classes):
            raise InputError(
                f"{data.name} has {len(data.classes)} classes, but --classes names {len(names)}; "
                "name all classes of the whole network"
            )
        return replace(data, classes=names)
    for name in data.classes:
        if name not in names:
            hint = did_you_mean(name, names)
            raise InputError(f"{data.name} has a class {name!r} that --classes lacks; {hint}")
    label = torch.tensor([names.index(name) for name in data.classes])
    return replace(data, train_y=label[data.train_y], test_y=label[data.test_y], classes=names)


def _is_numbered(data: Dataset) -> bool:
    """Whether the class names are only numbers, which say nothing about other data sets."""
    return data.classes == class_numbers(len(data.classes))
