"""Partitions: how the training examples are split over the nodes.

A partition is a frozen dataclass whose `split` returns one sorted array of example indices for each
node; except with `sample`, the arrays are disjoint. All randomness comes from the generator `rng`.

A partition may also have `split_groups(groups, nodes, rng)`, which replaces `split` if the data set
gives the group (for instance, the writer) of every example.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from peerage.errors import InputError, check_at_least

Ints = NDArray[np.int64]
Labels = NDArray[np.integer[Any]]
Rng = np.random.Generator

TRIES = 2000  # draws before a random partition gives up


class Partition(Protocol):
    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]: ...


@dataclass(frozen=True)
class Iid:
    """A random split of all examples into parts whose sizes differ by at most one."""

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        _check(labels, nodes, classes)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), nodes)]


@dataclass(frozen=True)
class BalancedIid:
    """Every node gets the same number of examples of every class, floor(items / classes) (P4)."""

    items: int | None = None  # examples per node; None: as many as the smallest class allows

    def __post_init__(self) -> None:
        check_at_least("items", self.items, 1)

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        _check(labels, nodes, classes)
        counts = np.bincount(labels, minlength=classes)
        most = int(counts.min()) // nodes
        quota = most if self.items is None else self.items // classes
        if quota == 0 and self.items is not None:
            raise InputError(f"items must be at least one per class, {classes}, got {self.items}")
        if quota > most or quota == 0:
            raise InputError(
                f"class {counts.argmin()} has {counts.min()} samples, too few for {max(quota, 1)} "
                f"on each of {nodes} nodes; lower items or the number of nodes"
            )
        return _split_by_counts(labels, np.full((classes, nodes), quota, dtype=np.int64), rng)


@dataclass(frozen=True)
class Dirichlet:
    """Each class is split by proportions p ~ Dir(alpha, ..., alpha) over the nodes.

    With `cap_at_mean`, a node that already holds N/n samples or more gets none of the following
    classes. The draw is repeated until the smallest node holds `min_size` samples. The defaults are
    those of P2; P0 uses cap_at_mean and min_size=10.
    """

    alpha: float = 0.2  # small: few classes per node; large: like iid
    cap_at_mean: bool = False
    min_size: int = 1

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise InputError(f"alpha must be a positive number, got {self.alpha}")
        check_at_least("min_size", self.min_size, 1)

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        _check(labels, nodes, classes)
        if nodes * self.min_size > len(labels):
            raise InputError(
                f"{nodes} nodes with min_size={self.min_size} need {nodes * self.min_size} samples "
                f"but there are {len(labels)}; lower min_size or the number of nodes"
            )
        counts = np.bincount(labels, minlength=classes)
        for _ in range(TRIES):
            sizes = self._sizes(counts, nodes, rng)
            if sizes.sum(0).min() >= self.min_size:
                return _split_by_counts(labels, sizes, rng)
        remedy = "raise alpha or lower min_size" if self.min_size > 1 else "raise alpha"
        raise InputError(
            f"alpha={self.alpha} left one of {nodes} nodes with fewer than {self.min_size} of "
            f"{len(labels)} samples in {TRIES} draws; {remedy}"
        )

    def _sizes(self, counts: Ints, nodes: int, rng: Rng) -> Ints:
        """Numbers of samples in one draw, [classes, nodes]."""
        mean = counts.sum() / nodes
        sizes = np.zeros((len(counts), nodes), dtype=np.int64)
        held = np.zeros(nodes, dtype=np.int64)
        for label, count in enumerate(counts):
            p = rng.dirichlet(np.full(nodes, self.alpha))
            if self.cap_at_mean:
                p[held >= mean] = 0.0
            if not p.sum() > 0:  # only full nodes have a share: give the class to one node
                p = np.zeros(nodes)
                p[rng.choice(np.flatnonzero((held < mean) | (not self.cap_at_mean)))] = 1.0
            share = p.cumsum()
            edges = (share / share[-1] * count).astype(np.int64)  # the last one is exactly count
            sizes[label] = np.diff(edges, prepend=0)
            held += sizes[label]
        return sizes


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into equal data shards, and give each node `per_node` of them (P2).

    The shards of a node have different classes. A shard that spans several classes may be combined
    with any other. This fails only if a class has more than 1/per_node of all samples.
    """

    per_node: int = 2

    def __post_init__(self) -> None:
        check_at_least("per_node", self.per_node, 1)

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        _check(labels, nodes, classes)
        if nodes * self.per_node > len(labels):
            raise InputError(
                f"{nodes} nodes with per_node={self.per_node} need {nodes * self.per_node} shards "
                f"but there are {len(labels)} samples; lower per_node or the number of nodes"
            )
        shuffled = rng.permutation(len(labels))
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        number = nodes * self.per_node
        # Larger and smaller shards alternate, so that no class gets only small ones.
        shards = np.split(ordered, [len(labels) * cut // number for cut in range(1, number)])
        ends = labels[[[shard[0], shard[-1]] for shard in shards]]  # first and last label of each
        kinds = np.where(ends[:, 0] == ends[:, 1], ends[:, 0], classes + np.arange(number))
        assigned = self._assign_shards(kinds.astype(np.int64), nodes, rng)
        return [np.sort(np.concatenate([shards[i] for i in row])) for row in assigned]

    def _assign_shards(self, kind: Ints, nodes: int, rng: Rng) -> Ints:
        """The shards of every node, [nodes, per_node], without two of one kind on a node."""
        count = np.bincount(kind)
        if count.max() > nodes:
            raise InputError(
                f"class {count.argmax()} fills {count.max()} of {len(kind)} shards, more than the "
                f"{nodes} nodes; lower per_node"
            )
        shards = np.empty((nodes, self.per_node), dtype=np.int64)
        for _ in range(100):  # a plain draw nearly always succeeds on up to about 30 nodes
            shards = rng.permutation(len(kind)).reshape(nodes, self.per_node)
            if all(len(set(row)) == self.per_node for row in kind[shards].tolist()):
                return shards
        return _separate_kinds(shards, kind, rng)


def _separate_kinds(shards: Ints, kind: Ints, rng: Rng) -> Ints:
    """Swap shards between nodes until no node holds two of one kind.

    If a node holds a kind twice, another node lacks it, as no kind has more shards than there are
    nodes. The other node gives a shard of a kind that it holds twice, or that the first node lacks.
    Either way the number of repetitions falls, so this ends.
    """
    for row in shards:
        while len(set(kind[row])) < len(row):
            kinds, first, count = np.unique(kind[row], return_index=True, return_counts=True)
            repeated = kinds[count.argmax()]
            candidates = shards[(kind[shards] != repeated).all(axis=1)]
            other = candidates[rng.integers(len(candidates))]
            other_kinds = kind[other]
            spare = (other_kinds[:, None] == other_kinds).sum(1) > 1
            give = rng.choice(other[spare | ~np.isin(other_kinds, kinds)])
            take = row[first[count.argmax()]]
            take_mask, give_mask = shards == take, shards == give
            shards[take_mask], shards[give_mask] = give, take
    return shards


@dataclass(frozen=True)
class Zipf:
    """Every class is split by one heavy-tailed vector, rolled by the class number (P4).

    z_u ~ Zipf(a) for each node, drawn again until sum(z) is at most the size of the smallest class.
    Node u gets floor(z_v / sum(z) * size) samples of class c, v = (u - c) mod n. The rest is
    dropped. The condition on the sum gives every node at least one sample of each class.
    """

    a: float = 1.8

    def __post_init__(self) -> None:
        if not (self.a > 1 and math.isfinite(self.a)):
            raise InputError(f"a must be a number above 1, got {self.a}")

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        _check(labels, nodes, classes)
        counts = np.bincount(labels, minlength=classes)
        smallest = int(counts[counts > 0].min())
        if smallest < nodes:
            raise InputError(
                f"the smallest class has {smallest} samples, fewer than one for each of {nodes} "
                "nodes; lower the number of nodes or use another partition"
            )
        for _ in range(TRIES):
            # Clipped, so that the sum cannot overflow; it is too large anyway.
            z = np.minimum(rng.zipf(self.a, nodes), smallest)
            if z.sum() <= smallest:
                return _split_by_counts(labels, zipf_quota(z, counts), rng)
        raise InputError(
            f"a={self.a} never gave {nodes} numbers with a sum of at most {smallest}, the size of "
            f"the smallest class, in {TRIES} draws; raise a or lower the number of nodes"
        )


def zipf_quota(z: Ints, counts: Ints) -> Ints:
    """Samples of each class for every node, [classes, nodes], in whole-number arithmetic."""
    return np.stack([np.roll(z, label) * count // z.sum() for label, count in enumerate(counts)])


@dataclass(frozen=True)
class ByGroup:
    """Every node gets one group of the data set, such as a writer of femnist (P2).

    If there are more groups than nodes, a random subset is used. Nodes keep the order of groups.
    """

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        raise InputError(
            "by-group requires a group for every example, but this data set has no groups; "
            "use femnist, an npz file with an array groups, or another partition"
        )

    def split_groups(self, groups: Labels, nodes: int, rng: Rng) -> list[Ints]:
        names = np.unique(groups)
        if not 1 <= nodes <= len(names):
            raise InputError(
                f"by-group needs one group for each of {nodes} nodes, but the data set has "
                f"{len(names)}; use 1 to {len(names)} nodes"
            )
        chosen = np.sort(rng.choice(names, nodes, replace=False))
        order = np.argsort(groups, kind="stable")  # sorted within a group, too
        first, end = (np.searchsorted(groups[order], chosen, side) for side in ("left", "right"))
        return [order[a:b] for a, b in zip(first, end, strict=True)]


@dataclass(frozen=True)
class Sample:
    """Every node draws its examples from all of them, with replacement.

    Nodes share examples, so there may be any number of nodes, whatever the size of the data set. An
    example that a node drew twice may be in its training part and in its held-out part.
    """

    size: int = 100  # examples per node

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1)

    def split(self, labels: Labels, nodes: int, classes: int, rng: Rng) -> list[Ints]:
        _check(labels, 1, classes)
        check_at_least("nodes", nodes, 1)
        return list(np.sort(rng.integers(len(labels), size=(nodes, self.size)), axis=1))


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "balanced-iid": BalancedIid,
    "by-group": ByGroup,
    "dirichlet": Dirichlet,
    "sample": Sample,
    "shards": Shards,
    "zipf": Zipf,
}


def hold_out(indices: Ints, labels: Labels, fraction: float, rng: Rng) -> tuple[Ints, Ints]:
    """Split a node's samples into (training, validation), stratified by class.

    The validation part has fraction * len(indices) samples, rounded; at least one is left to train
    on.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the validation fraction must lie in [0, 1), got {fraction}")
    count = max(0, min(math.floor(fraction * len(indices) + 0.5), len(indices) - 1))
    chosen = stratified(labels[indices], count, rng)
    return np.sort(np.delete(indices, chosen)), np.sort(indices[chosen])


def stratified(labels: Labels, count: int, rng: Rng) -> Ints:
    """Sorted indices of `count` samples, with every class in proportion.

    Quotas are rounded down; the rest goes to the largest fractions, equal ones in random order.
    """
    if count == 0:
        return np.empty(0, dtype=np.int64)
    kinds, sizes = np.unique(labels, return_counts=True)
    quota, rest = np.divmod(sizes * count, len(labels))
    order = rng.permutation(len(kinds))
    order = order[np.argsort(-rest[order], kind="stable")]
    quota[order[: count - quota.sum()]] += 1
    drawn = [
        rng.permutation(np.flatnonzero(labels == kind))[:share]
        for kind, share in zip(kinds, quota, strict=True)
    ]
    return np.sort(np.concatenate(drawn))


def label_counts(labels: Labels, parts: list[Ints], classes: int) -> Ints:
    """Numbers of samples of each class at every node, [nodes, classes]."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _split_by_counts(labels: Labels, sizes: Ints, rng: Rng) -> list[Ints]:
    """Split every shuffled class into `sizes`, [classes, nodes]; drops the rest."""
    parts: list[list[Ints]] = [[] for _ in range(sizes.shape[1])]
    for label, row in enumerate(sizes):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for part, indices in zip(parts, np.split(shuffled, row.cumsum()), strict=False):
            part.append(indices)
    return [np.sort(np.concatenate(part)) for part in parts]


def _check(labels: Labels, nodes: int, classes: int) -> None:
    check_at_least("nodes", nodes, 1)
    if nodes > len(labels):
        raise InputError(
            f"{nodes} nodes cannot share {len(labels)} samples; use at most {len(labels)} nodes"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise InputError(
            f"labels must lie in 0 to {classes - 1}, got {labels.min()} to {labels.max()}"
        )
