"""How the training examples are spread over the nodes.

A partition is a frozen dataclass whose `split` returns one sorted array of example numbers for each
node; the arrays are disjoint. All randomness comes from the generator that is handed over.

A partition may also have `split_groups(groups, nodes, rng)`, which takes the place of `split` where
the data says which group (a writer, for instance) every example belongs to.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from peerage.errors import InputError

Ints = NDArray[np.int64]
Labels = NDArray[np.integer[Any]]

TRIES = 2000  # draws before a random partition is declared hopeless


class Partition(Protocol):
    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]: ...


@dataclass(frozen=True)
class Iid:
    """Shuffle and cut: sizes differ by at most one, everything is used."""

    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        _check(labels, nodes, classes)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), nodes)]


@dataclass(frozen=True)
class BalancedIid:
    """Every node gets the same number of examples of every class, floor(items / classes) (P4)."""

    items: int | None = None  # examples per node; as many as the smallest class allows if left out

    def __post_init__(self) -> None:
        if self.items is not None and self.items < 1:
            raise InputError(f"items must be at least 1, got {self.items}")

    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        _check(labels, nodes, classes)
        counts = np.bincount(labels, minlength=classes)
        most = int(counts.min()) // nodes
        each = most if self.items is None else self.items // classes
        if each == 0 and self.items is not None:
            raise InputError(
                f"items={self.items} is less than one of each of {classes} classes; raise items"
            )
        if each > most or each == 0:
            raise InputError(
                f"class {counts.argmin()} has {counts.min()} samples, too few for {max(each, 1)} "
                f"on each of {nodes} nodes; lower items or the number of nodes"
            )
        return _split_by_counts(labels, np.full((classes, nodes), each, dtype=np.int64), rng)


@dataclass(frozen=True)
class Dirichlet:
    """Each class is cut at the cumulated proportions p ~ Dir(alpha, ..., alpha) over the nodes.

    With `cap_at_mean` a node that already holds N/n samples or more gets nothing of the classes
    that follow. Everything is drawn again until the smallest node holds `min_size` samples. The
    defaults are the plain form (P2); P0 caps and asks for 10, as the recipes of P0 do.
    """

    alpha: float = 0.2  # small: few classes per node; large: like iid
    cap_at_mean: bool = False
    min_size: int = 1

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise InputError(f"alpha must be a positive number, got {self.alpha}")
        if self.min_size < 1:
            raise InputError(f"min_size must be at least 1, got {self.min_size}")

    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
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

    def _sizes(self, counts: Ints, nodes: int, rng: np.random.Generator) -> Ints:
        """How many samples of each class every node gets in one draw, [classes, nodes]."""
        mean = counts.sum() / nodes
        sizes = np.zeros((len(counts), nodes), dtype=np.int64)
        held = np.zeros(nodes, dtype=np.int64)
        for label, count in enumerate(counts):
            p = rng.dirichlet(np.full(nodes, self.alpha))
            if self.cap_at_mean:
                p[held >= mean] = 0.0
            if not p.sum() > 0:  # a tiny alpha gave all to full nodes: as it would, one takes all
                p = np.zeros(nodes)
                p[rng.choice(np.flatnonzero((held < mean) | (not self.cap_at_mean)))] = 1.0
            share = p.cumsum()
            edges = (share / share[-1] * count).astype(np.int64)  # the last one is exactly count
            sizes[label] = np.diff(edges, prepend=0)
            held += sizes[label]
        return sizes


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into equal shards and deal `per_node` of them, each of another class (P2).

    Shards are cut by position. One that straddles classes brings a second class by itself, so it
    may join any other; only a class of more than 1/per_node of all samples can make it impossible.
    """

    per_node: int = 2

    def __post_init__(self) -> None:
        if self.per_node < 1:
            raise InputError(f"per_node must be at least 1, got {self.per_node}")

    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        _check(labels, nodes, classes)
        if nodes * self.per_node > len(labels):
            raise InputError(
                f"{nodes} nodes with per_node={self.per_node} need {nodes * self.per_node} shards "
                f"but there are {len(labels)} samples; lower per_node or the number of nodes"
            )
        shuffled = rng.permutation(len(labels))
        ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
        number = nodes * self.per_node
        # Larger and smaller shards alternate, so that no class is cut into the small ones only.
        shards = np.split(ordered, [len(labels) * cut // number for cut in range(1, number)])
        ends = labels[[[shard[0], shard[-1]] for shard in shards]]  # first and last label of each
        kinds = np.where(ends[:, 0] == ends[:, 1], ends[:, 0], classes + np.arange(number))
        hands = self._assign_shards(kinds.astype(np.int64), nodes, rng)
        return [np.sort(np.concatenate([shards[shard] for shard in hand])) for hand in hands]

    def _assign_shards(self, kind: Ints, nodes: int, rng: np.random.Generator) -> Ints:
        """The shards of every node, [nodes, per_node], without two of one kind in a hand."""
        count = np.bincount(kind)
        if count.max() > nodes:
            raise InputError(
                f"class {count.argmax()} fills {count.max()} of {len(kind)} shards, so that two of "
                f"them must meet on one of {nodes} nodes; lower per_node"
            )
        hands = np.empty((nodes, self.per_node), dtype=np.int64)
        for _ in range(100):  # a plain draw nearly always succeeds on up to about 30 nodes
            hands = rng.permutation(len(kind)).reshape(nodes, self.per_node)
            if all(len(set(hand)) == self.per_node for hand in kind[hands].tolist()):
                return hands
        return _separated(hands, kind, rng)


def _separated(hands: Ints, kind: Ints, rng: np.random.Generator) -> Ints:
    """Exchange shards between hands until none holds two of one kind.

    A kind that a hand holds twice is missing in another, since it has no more shards than there
    are hands. That one gives a shard that it holds twice itself, or one of a kind that is new to
    the first hand; either way the number of repetitions falls, so this ends.
    """
    for hand in hands:
        while len(set(kind[hand])) < len(hand):
            own, first, count = np.unique(kind[hand], return_index=True, return_counts=True)
            repeated = own[count.argmax()]
            lacking = hands[(kind[hands] != repeated).all(axis=1)]
            chosen = lacking[rng.integers(len(lacking))]
            theirs = kind[chosen]
            spare = (theirs[:, None] == theirs).sum(1) > 1
            give = rng.choice(chosen[spare | ~np.isin(theirs, own)])
            take = hand[first[count.argmax()]]
            here, there = hands == take, hands == give
            hands[here], hands[there] = give, take
    return hands


@dataclass(frozen=True)
class Zipf:
    """Every class is shared out by one heavy-tailed vector, rolled by the number of the class (P4).

    z_u ~ Zipf(a) for each node, drawn again until sum(z) is at most the size of the smallest class;
    node u gets floor(z_v / sum(z) * size) samples of class c, v = (u - c) mod n. The rest is
    dropped. By the condition on the sum every node gets at least one sample of each class.
    """

    a: float = 1.8

    def __post_init__(self) -> None:
        if not (self.a > 1 and math.isfinite(self.a)):
            raise InputError(f"a must be a number above 1, got {self.a}")

    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        _check(labels, nodes, classes)
        counts = np.bincount(labels, minlength=classes)
        smallest = int(counts[counts > 0].min())
        if smallest < nodes:
            raise InputError(
                f"the smallest class has {smallest} samples, fewer than one for each of {nodes} "
                "nodes; lower the number of nodes or take another partition"
            )
        for _ in range(TRIES):
            # Clipped, so that the sum of huge draws cannot overflow; it is too large anyway.
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
    """Every node gets one natural group of the data, such as a writer of femnist (P2).

    Of more groups than nodes, some are drawn and the others are left out. Nodes keep the order of
    the groups.
    """

    def split(
        self, labels: Labels, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[Ints]:
        raise InputError(
            "by-group needs data that tells the group of every example, and this data does not; "
            "take femnist, an npz with an array groups, or another partition"
        )

    def split_groups(self, groups: Labels, nodes: int, rng: np.random.Generator) -> list[Ints]:
        names = np.unique(groups)
        if not 1 <= nodes <= len(names):
            raise InputError(
                f"by-group gives each of {nodes} nodes a group of its own, and the data has "
                f"{len(names)}; use 1 to {len(names)} nodes"
            )
        chosen = np.sort(rng.choice(names, nodes, replace=False))
        order = np.argsort(groups, kind="stable")  # sorted within a group, too
        first, end = (np.searchsorted(groups[order], chosen, side) for side in ("left", "right"))
        return [order[a:b] for a, b in zip(first, end, strict=True)]


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "balanced-iid": BalancedIid,
    "by-group": ByGroup,
    "dirichlet": Dirichlet,
    "shards": Shards,
    "zipf": Zipf,
}


def hold_out(
    indices: Ints, labels: Labels, fraction: float, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """A node's samples as (training, validation), with the classes in proportion in both.

    The validation part has fraction * len(indices) samples, rounded, but one is always left to
    train on.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"the validation fraction must lie in [0, 1), got {fraction}")
    count = max(0, min(math.floor(fraction * len(indices) + 0.5), len(indices) - 1))
    chosen = stratified(labels[indices], count, rng)
    return np.sort(np.delete(indices, chosen)), np.sort(indices[chosen])


def stratified(labels: Labels, count: int, rng: np.random.Generator) -> Ints:
    """Sorted positions of `count` samples that represent every class in proportion.

    Whole shares first; what is left goes to the largest fractions, equal ones in random order.
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
    """How many samples of each class every node holds, [nodes, classes]."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def _split_by_counts(labels: Labels, sizes: Ints, rng: np.random.Generator) -> list[Ints]:
    """Cut every shuffled class into the given sizes, [classes, nodes]; what is left is dropped."""
    hands: list[list[Ints]] = [[] for _ in range(sizes.shape[1])]
    for label, row in enumerate(sizes):
        shuffled = rng.permutation(np.flatnonzero(labels == label))
        for hand, part in zip(hands, np.split(shuffled, row.cumsum()), strict=False):
            hand.append(part)
    return [np.sort(np.concatenate(hand)) for hand in hands]


def _check(labels: Labels, nodes: int, classes: int) -> None:
    if nodes < 1:
        raise InputError(f"there must be at least 1 node, got {nodes}")
    if nodes > len(labels):
        raise InputError(
            f"{nodes} nodes cannot share {len(labels)} samples; use at most {len(labels)} nodes"
        )
    if labels.min() < 0 or labels.max() >= classes:
        raise InputError(
            f"labels must lie in 0 to {classes - 1}, got {labels.min()} to {labels.max()}"
        )
