"""Random edges as arrays [m, 2], drawn with numpy in whole rows or in one go."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from peerage.errors import InputError

Ids = NDArray[np.int64]
Rng = np.random.Generator

# Up to here every pair of nodes is looked at, which gives published seeds their graphs; beyond,
# the cost is that of the edges, and so the same seed gives another graph of the same kind.
PAIRWISE_NODES = 5000
ATTACHED_TOGETHER = 1000  # new nodes of a Barabasi-Albert graph; few of them meet one another


def independent_edges(
    nodes: int, rng: Rng, chance: Callable[[int], float | NDArray[np.float64]]
) -> Ids:
    """Every pair on its own; `chance(i)` is that of i with i + 1, i + 2, ..., or one for all."""
    high = [
        node + 1 + np.flatnonzero(rng.random(nodes - node - 1) < chance(node))
        for node in range(nodes)
    ]
    low = np.repeat(np.arange(nodes), [len(row) for row in high])
    return np.stack([low, np.concatenate(high)], axis=1)


def block_edges(starts: Ids, p_in: float, p_out: float, rng: Rng) -> Ids:
    """Every pair on its own, with p_in inside a group of consecutive ids and p_out across.

    `starts` [groups + 1]: the first id of every group, and the number of nodes.
    """
    first, end, sizes = starts[:-1], starts[1:], np.diff(starts)
    group, place = _placed(sizes * (sizes - 1) // 2, p_in, rng)
    inside = first[group][:, None] + _triangle(place)
    later = starts[-1] - end  # nodes in all groups that follow
    group, place = _placed(sizes * later, p_out, rng)
    low, high = np.divmod(place, later[group])
    across = np.stack([first[group] + low, end[group] + high], axis=1)
    return np.concatenate([inside, across])


def product_edges(x: NDArray[np.float64], rng: Rng) -> Ids:
    """i and j are joined with probability min(1, x_i x_j / sum x), each pair on its own.

    Nodes whose x lie within a factor of 2 form a class. Pairs of two classes are drawn with the
    largest probability among them, and each is kept in proportion to its own. Miller, Hagberg,
    2011, do so node by node.
    """
    order = np.argsort(-x)
    w, total = x[order], x.sum()
    classes = np.floor(np.log2(w[0] / w)).astype(np.int64)
    starts = np.flatnonzero(np.diff(classes, prepend=-1, append=classes[-1] + 1))
    drawn = []
    for a in range(len(starts) - 1):
        for b in range(a, len(starts) - 1):
            most = min(1.0, w[starts[a]] * w[starts[b]] / total)
            pairs = _class_pairs(starts, a, b, most, rng)
            exact = np.minimum(1.0, w[pairs[:, 0]] * w[pairs[:, 1]] / total)
            drawn.append(pairs[rng.random(len(pairs)) * most < exact])
    edges: Ids = order[np.concatenate(drawn)]
    return edges


def attached_edges(nodes: int, m: int, rng: Rng) -> Ids:
    """Barabasi-Albert: node 0 joined to 1..m, then each new node to m others at a time.

    Whom it joins is the end of a random edge so far, so the chance grows with the degree; one that
    was met already is drawn again.
    """
    ends = np.zeros((nodes - m, 2, m), dtype=np.int64)  # whom node m + row meets, and itself
    ends[0, 1] = np.arange(1, m + 1)
    ends[1:, 1] = np.arange(m + 1, nodes)[:, None]
    so_far = ends.reshape(-1)
    for start in range(1, nodes - m, ATTACHED_TOGETHER):
        rows = np.arange(start, min(start + ATTACHED_TOGETHER, nodes - m))
        draws = rng.integers(2 * m * rows[:, None], size=(len(rows), m))
        ends[rows, 0] = met = so_far[draws]
        within = (draws >= 2 * m * start).any(axis=1)  # an end that these rows settle themselves
        twice = (np.diff(np.sort(met, axis=1), axis=1) == 0).any(axis=1)
        for row in np.flatnonzero(within | twice).tolist():
            known = set(so_far[draws[row]].tolist())
            while len(known) < m:
                known.add(int(so_far[rng.integers(2 * m * (start + row))]))
            ends[start + row, 0] = sorted(known)
    return np.stack([ends[:, 0].ravel(), ends[:, 1].ravel()], axis=1)


def small_world_edges(nodes: int, k: int, p: float, rng: Rng) -> Ids:
    """Watts-Strogatz: a ring of the k nearest, and with probability p an edge gets a new far end.

    A new end that would make a loop or an edge again is drawn again. As edges move all together
    and not one by one, k must be well below the number of nodes.
    """
    near = np.tile(np.arange(nodes), k // 2)
    far = (near + np.repeat(np.arange(1, k // 2 + 1), nodes)) % nodes
    moved = rng.random(len(near)) < p
    taken = [np.sort(_codes(near[~moved], far[~moved], nodes))]
    left = near[moved]
    while len(left):
        other = rng.integers(nodes, size=len(left))
        codes = _codes(left, other, nodes)
        new = _first_new(codes, taken) & (left != other)
        taken.append(np.sort(codes[new]))
        left = left[~new]
    return np.stack(np.divmod(np.concatenate(taken), nodes), axis=1)


def paired_stubs(stubs: Ids, rng: Rng) -> Ids:
    """A stub is half an edge, written as the id of its node; loops and repeated edges may occur."""
    return rng.permutation(stubs).reshape(-1, 2)


def regular_edges(nodes: int, k: int, rng: Rng) -> Ids:
    """Random pairing of stubs; pairs that would be a loop or an edge again are paired anew.

    Steger, Wormald, 1999. Close to uniform over all k-regular graphs if k is small. Of a dense
    graph the missing edges are drawn, which are a regular graph too.
    """
    if k >= nodes:
        raise InputError(f"k must be smaller than the {nodes} nodes, got {k}")
    if nodes * k % 2:
        raise InputError(f"no {k}-regular graph has {nodes} nodes; make k or nodes even")
    missing = 2 * k > nodes - 1
    codes = None
    while codes is None:
        codes = _try_regular(nodes, nodes - 1 - k if missing else k, rng)
    if missing:
        low, high = np.triu_indices(nodes, k=1)
        codes = np.setdiff1d(low * nodes + high, codes)
    return np.stack(np.divmod(codes, nodes), axis=1)


def _try_regular(nodes: int, k: int, rng: Rng) -> Ids | None:
    """Edges as low * nodes + high, or None if none of the last pairs was a new edge."""
    taken = [np.empty(0, dtype=np.int64)]
    stubs = np.repeat(np.arange(nodes), k)
    while len(stubs):
        one, other = paired_stubs(stubs, rng).T
        codes = _codes(one, other, nodes)
        new = _first_new(codes, taken) & (one != other)
        if not new.any():
            return None
        taken.append(np.sort(codes[new]))
        stubs = np.stack(np.divmod(codes[~new], nodes), axis=1).ravel()
    return np.concatenate(taken)


def _codes(one: Ids, other: Ids, nodes: int) -> Ids:
    """An edge as one number: low * nodes + high."""
    return np.minimum(one, other) * nodes + np.maximum(one, other)


def _first_new(codes: Ids, taken: list[Ids]) -> NDArray[np.bool_]:
    """Which codes stand for the first time, neither in `taken`, sorted arrays, nor earlier here."""
    new = np.ones(len(codes), dtype=np.bool_)
    for known in taken:
        new &= ~_contains(known, codes)
    # Repeated codes are few, and finding them so is quicker than numpy.unique for all.
    ordered = np.sort(codes)
    repeated = np.flatnonzero(_contains(np.unique(ordered[1:][np.diff(ordered) == 0]), codes))
    again = np.ones(len(repeated), dtype=np.bool_)
    again[np.unique(codes[repeated], return_index=True)[1]] = False
    new[repeated[again]] = False
    return new


def _contains(known: Ids, codes: Ids) -> NDArray[np.bool_]:
    if not len(known):
        return np.zeros(len(codes), dtype=np.bool_)
    at = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.asarray(known[at] == codes)


def _class_pairs(starts: Ids, a: int, b: int, p: float, rng: Rng) -> Ids:
    """Pairs between the classes a <= b of consecutive places, each with probability p."""
    first, second = int(starts[a + 1] - starts[a]), int(starts[b + 1] - starts[b])
    if a == b:
        pairs = _triangle(successes(first * (first - 1) // 2, p, rng))
    else:
        pairs = np.stack(np.divmod(successes(first * second, p, rng), second), axis=1)
    return pairs + starts[[a, b]]


def _placed(counts: Ids, p: float, rng: Rng) -> tuple[Ids, Ids]:
    """Successes among groups of `counts` trials: the group of each, and its place in there."""
    bounds = np.cumsum(counts)
    found = successes(int(bounds[-1]), p, rng)
    group = np.searchsorted(bounds, found, side="right")
    return group, found - (bounds - counts)[group]


def successes(trials: int, p: float, rng: Rng) -> Ids:
    """Which of the trials 0, 1, ... succeed, each with probability p, at the cost of those only.

    The gaps between successes are geometric. Batagelj, Brandes, 2005.
    """
    if trials == 0 or p == 0:
        return np.empty(0, dtype=np.int64)
    found, last = [], -1
    while last < trials:
        expected = (trials - last) * p
        gaps = rng.geometric(p, size=int(expected + 4 * expected**0.5) + 10)
        found.append(last + np.cumsum(np.minimum(gaps, trials + 1)))  # no sum can overflow
        last = int(found[-1][-1])
    places = np.concatenate(found)
    return places[: np.searchsorted(places, trials)]


def _triangle(place: Ids) -> Ids:
    """The pair low < high that stands at a place of (0, 1), (0, 2), (1, 2), (0, 3), ..."""
    high = ((1 + np.sqrt(8 * place + 1)) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > place  # the root was rounded up
    return np.stack([place - high * (high - 1) // 2, high], axis=1)
