"""Clusters of nodes: each has its own kind of examples, and a test set of the same kind."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage import specs
from peerage.data.scaling import Scaling
from peerage.data.shifts import SHIFTS, NoShift
from peerage.data.tensors import Dataset
from peerage.errors import DataError, InputError
from peerage.randomness import numpy_stream

Ints = NDArray[np.int64]
# (indices of examples, number of nodes, their cluster or None for all) -> indices of every node
Divide = Callable[[Ints, int, int | None], list[Ints]]

BLOCK = 5000  # examples that are shifted at a time, to save memory


@dataclass(frozen=True)
class Clusters:
    """Sizes of the clusters of nodes, and the shift of their examples.

    The first `sizes[0]` nodes are cluster 0, the next `sizes[1]` cluster 1, and so on; with
    `shuffle`, the seed of the experiment determines which nodes these are.

    >>> import peerage as pg
    >>> clusters = pg.Clusters(sizes=(30, 2), shift="rotate")
    >>> clusters == pg.Experiment(nodes=32, clusters="30/2:rotate").clusters
    True
    """

    sizes: tuple[int, ...]
    shift: Any = NoShift()  # one of SHIFTS, its text, or a function of examples and cluster
    shuffle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", _read_sizes(self.sizes))
        shift = self.shift
        if isinstance(shift, str):
            shift = specs.parse(shift, "shift", SHIFTS)
        if isinstance(shift, type) or not callable(shift):
            raise InputError(
                f"shift cannot be {shift!r}; give a name such as 'rotate', or a function of "
                "examples and the number of their cluster"
            )
        object.__setattr__(self, "shift", shift)
        if hasattr(shift, "fit"):
            shift.fit(len(self.sizes))  # raises an error if it does not fit the sizes

    @cached_property
    def fitted(self) -> Any:
        """The shift with its options for so many clusters; files hold it as it was given."""
        return self.shift.fit(len(self.sizes)) if hasattr(self.shift, "fit") else self.shift

    @property
    def text(self) -> str:
        """The sizes as text, such as 30/2."""
        return "/".join(map(str, self.sizes))

    def assign(self, seed: int) -> list[int]:
        """The cluster of every node."""
        clusters = np.repeat(np.arange(len(self.sizes)), self.sizes)
        if self.shuffle:
            clusters = numpy_stream(seed, "clusters").permutation(clusters)
        found: list[int] = clusters.tolist()
        return found

    def describe(self, cluster: int) -> str:
        """A name for reports, such as `cluster 1 (180°)`."""
        about = getattr(self.fitted, "describe", None)
        words = about(cluster) if about is not None else ""
        return f"cluster {cluster}" + (f" ({words})" if words else "")

    def kept(self, cluster: int, labels: Tensor, classes: int) -> Tensor:
        """Mask of the examples whose labels a cluster keeps."""
        keep = getattr(self.fitted, "kept_labels", None)
        chosen = None if keep is None else keep(cluster)
        if chosen is None:
            return torch.ones(len(labels), dtype=torch.bool)
        known = torch.zeros(classes, dtype=torch.bool)
        for label in chosen:
            if not 0 <= label < classes:
                raise InputError(
                    f"{self.describe(cluster)} keeps label {label}, but the labels are 0 to "
                    f"{classes - 1}; remove it"
                )
            known[label] = True
        return known[labels]

    @property
    def own_split(self) -> bool:
        """Whether the examples that a cluster keeps are split between its nodes alone."""
        return not getattr(self.fitted, "fraction", True)


def divide(clusters: Clusters, dataset: Dataset, seed: int, split: Divide) -> list[Ints]:
    """The training examples of every node, whose labels its cluster keeps.

    `Labels` describes the two orders of splitting and keeping.
    """
    assigned = np.array(clusters.assign(seed))
    masks = [
        clusters.kept(cluster, dataset.train_y, len(dataset.classes)).numpy()
        for cluster in range(len(clusters.sizes))
    ]
    if not clusters.own_split:
        whole = split(np.arange(len(dataset.train_y)), len(assigned), None)
        parts = [part[masks[assigned[node]][part]] for node, part in enumerate(whole)]
        for node, part in enumerate(parts):
            if len(whole[node]) and not len(part):
                raise _no_examples(clusters, dataset, masks, node, assigned[node])
        return parts
    parts = [np.empty(0, dtype=np.int64)] * len(assigned)
    for cluster, mask in enumerate(masks):
        members = np.flatnonzero(assigned == cluster)
        if not mask.any():
            raise _no_examples(clusters, dataset, masks, int(members[0]), cluster)
        found = split(np.flatnonzero(mask), len(members), cluster)
        for member, part in zip(members.tolist(), found, strict=True):
            parts[member] = part
    return parts


def _no_examples(
    clusters: Clusters, dataset: Dataset, masks: Sequence[Any], node: int, cluster: int
) -> DataError:
    name = clusters.describe(cluster)
    if not masks[cluster].any():
        return DataError(f"{name} has no training examples in {dataset.name}; keep other labels")
    return DataError(
        f"node {node} of {name} has no examples with labels that its cluster keeps; use another "
        "partition, such as iid, or fraction=false"
    )


def shift_training(
    clusters: Clusters, dataset: Dataset, parts: Sequence[Ints], seed: int
) -> tuple[Dataset, list[Ints]]:
    """The data set with every training example shifted as its owner's cluster, and the parts.

    An example of two clusters is copied, and the parts of the second refer to the copy; examples
    keep their place in a part.
    """
    owner = np.full(len(dataset.train_y), -1)
    copies: dict[tuple[int, int], int] = {}  # (example, cluster) -> index of the copy
    moved = []
    for cluster, part in zip(clusters.assign(seed), parts, strict=True):
        free = owner[part] == -1
        owner[part[free]] = cluster
        other = owner[part] != cluster
        if other.any():
            part = part.copy()
            for place in np.flatnonzero(other):
                key = int(part[place]), cluster
                part[place] = copies.setdefault(key, len(owner) + len(copies))
        moved.append(part)
    if copies:
        examples, of = zip(*copies, strict=True)
        dataset = _with_copies(dataset, torch.tensor([*range(len(owner)), *examples]))
        owner = np.append(owner, of)
    x = dataset.train_x
    for cluster in range(len(clusters.sizes)):
        indices = torch.from_numpy(np.flatnonzero(owner == cluster))
        x = shifted(clusters, dataset.scaling, x, indices, cluster, original=dataset.train_x)
    return (dataset if x is dataset.train_x else replace(dataset, train_x=x)), moved


def _with_copies(dataset: Dataset, rows: Tensor) -> Dataset:
    groups = None if dataset.groups is None else dataset.groups[rows]
    x, y = dataset.train_x[rows], dataset.train_y[rows]
    return replace(dataset, train_x=x, train_y=y, groups=groups)


def shift_test(
    clusters: Clusters, dataset: Dataset, x: Tensor, y: Tensor, cluster: int
) -> tuple[Tensor, Tensor]:
    """The test examples of a cluster and their labels; `x` itself if nothing changes."""
    kept = clusters.kept(cluster, y, len(dataset.classes))
    if not kept.any():
        raise DataError(
            f"{clusters.describe(cluster)} has no examples in the test set of {dataset.name}; keep "
            "other labels, or raise --eval-samples"
        )
    if not kept.all():
        x, y = x[kept], y[kept]
    return shifted(clusters, dataset.scaling, x, torch.arange(len(x)), cluster, original=x), y


def shifted(
    clusters: Clusters,
    scaling: Scaling,
    x: Tensor,
    indices: Tensor,
    cluster: int,
    *,
    original: Tensor,
) -> Tensor:
    """Examples with those at the indices shifted; `x` is copied first if it is the original."""
    for block in torch.split(indices, BLOCK):
        if not len(block):
            continue
        before = scaling.undo(x[block])
        version = before._version
        after = clusters.fitted(before, cluster)
        if after is before and before._version == version:  # unchanged, so it is not rounded
            continue
        _check(clusters, before, after)
        x = x.clone() if x is original else x
        x[block] = scaling.apply(after.to(torch.float32))
    return x


def _read_sizes(sizes: Any) -> tuple[int, ...]:
    """Sizes as numbers, or as text such as 30/2."""
    if isinstance(sizes, str):
        sizes = sizes.split("/")
    found = specs.convert(sizes, tuple[int, ...], "clusters: sizes") if sizes else ()
    if not found or min(found) < 1:
        raise InputError(f"clusters must have at least 1 node each, got {sizes!r}; write 30/2")
    return tuple(found)


def _check(clusters: Clusters, before: Tensor, after: Any) -> None:
    name = getattr(clusters.shift, "__name__", type(clusters.shift).__name__)
    shape = tuple(after.shape) if isinstance(after, Tensor) else type(after).__name__
    if shape != tuple(before.shape):
        raise InputError(
            f"shift {name} turned examples of shape {tuple(before.shape)} into {shape}; a shift "
            "must return as many examples of the same shape"
        )
