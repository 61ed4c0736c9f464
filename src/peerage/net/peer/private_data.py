"""A peer with private data, which no other peer has."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from peerage.data import Dataset
from peerage.data.classes import Classes, is_numbered, with_classes
from peerage.data.clusters import Clusters
from peerage.data.schema import Schema
from peerage.data.shifts import Labels, NoShift
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.experiment import Experiment

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AllToNode:
    """The partition of a peer with private data: all examples belong to its node."""

    me: int | None  # among the nodes with data; None for the hub, which uses the test set alone

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
    """The world of one node with this data, evaluated on `test` if given (see `with_test_set`).

    `classes` are those of the whole network, by default those of the experiment's schema, if any;
    `World.classes` has their names. If the experiment names no model, all peers use the default
    model of the experiment's data set. With `shift`, the data and the test set get the shift of the
    node's cluster.
    """
    if shift and experiment.clusters is None:
        raise InputError("--shift requires clusters, which the experiment does not have; remove it")
    if shift and test is not None and test.scaling != data.scaling:
        raise InputError(
            f"--shift requires --data and --test that are normalised alike, but {test.name} and "
            f"{data.name} are not; remove --test, or shift the examples in your files"
        )
    classes = classes_of_network(experiment.data_schema, classes)
    where = "--classes" if experiment.data_schema is None else "data_schema"
    data = with_classes(data, classes, where)
    if test is not None:
        data = with_test_set(data, with_classes(test, classes, where))
    changes = {
        "partition": AllToNode(_place(experiment.hub, me)),
        "clusters": _own_clusters(experiment.clusters, shift),
    }
    return prepare(experiment.model_copy(update=changes), data, share=True)


def _place(hub: int | None, me: int) -> int | None:
    """The place of a node among those with data.

    >>> [_place(2, me) for me in range(5)]
    [0, 1, None, 2, 3]
    """
    return None if me == hub else me - (hub is not None and me > hub)


def _own_clusters(clusters: Clusters | None, shift: bool) -> Clusters | None:
    """The clusters without their shift, or with one for which all examples belong to the node."""
    if clusters is None:
        return None
    if not shift:
        return replace(clusters, shift=NoShift())
    own = clusters.shift
    return replace(clusters, shift=replace(own, fraction=True) if isinstance(own, Labels) else own)


def classes_of_network(schema: Schema | None, classes: Classes | None) -> Classes | None:
    """The classes that a peer was given, or those of the schema; both must be the same."""
    known = schema.classes if schema is not None else ()
    if not known or classes in (known, len(known)):
        return known or classes
    if classes is not None:
        raise InputError(
            f"--classes differs from the classes of data_schema, {', '.join(known)}; remove it"
        )
    return known


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


def with_test_set(data: Dataset, test: Dataset) -> Dataset:
    """The data set with the test set of another, which must have the same shape and classes.

    If the other one has no test set of its own, all its examples are the test set. Examples of
    `data` that were held out for lack of a test set are for training again.
    """
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
    if data.features and test.features and data.features != test.features:
        raise InputError(
            f"--test {test.name} has the columns {', '.join(test.features)} and {data.name} has "
            f"{', '.join(data.features)}; give both the same columns in the same order"
        )
    pairs = zip(data.classes, test.classes, strict=True)
    unequal = next((pair for pair in pairs if pair[0] != pair[1]), None)
    if unequal and not is_numbered(data) and not is_numbered(test):
        raise InputError(
            f"--test {test.name} has a class {unequal[1]!r} where {data.name} has {unequal[0]!r}; "
            "name all classes of the whole network, as in --classes cat,dog,horse"
        )
    x, y = data.undivided() or (data.train_x, data.train_y)
    test_x, test_y = test.undivided() or (test.test_x, test.test_y)
    whole = replace(data, train_x=x, train_y=y, groups=None, held_out=None)
    return replace(whole, test_x=test_x, test_y=test_y, features=data.features or test.features)


def as_test_set(data: Dataset) -> Dataset:
    """The data set as a hub uses it, which does not train: all of it, if it has no test set."""
    whole = data.undivided()
    return data if whole is None else replace(data, test_x=whole[0], test_y=whole[1], held_out=None)


def unused_examples(data: Dataset, test: Dataset | None) -> list[str]:
    """The examples of both data sets that are for neither training nor testing, in words."""
    if test is None:
        return []
    replaced = f"the {len(data.test_y)} test examples of {data.name} are replaced by --test"
    return [*([replaced] if data.held_out is None else []), *unused_training(test)]


def unused_training(test: Dataset) -> list[str]:
    """The training examples of a data set of which only the test set is used, in words."""
    unused = f"the {len(test.train_y)} training examples of {test.name} are not used"
    return [unused] if test.held_out is None else []


def describe_examples(world: World, me: int) -> str:
    """How many examples a peer has for which purpose."""
    held_out = len(world.validation[me])
    validation = f"validating on {held_out}, " if held_out else ""
    tested = sum(map(len, world.tests_of(me).values()))
    if me == world.hub and not world.tested:
        return "the hub has no test set and does not evaluate the model; to do so, add --test"
    testing = f"testing on {tested}" if world.is_evaluated(me) else "the hub keeps the model"
    return f"training on {len(world.parts[me])} examples, {validation}{testing}"
