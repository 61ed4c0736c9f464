"""Random edges as arrays [m, 2], drawn with vectorised numpy."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from peerage.errors import InputError

Ids = NDArray[np.int64]
Rng = np.random.Generator

# Up to here, one number is drawn per pair of nodes, which keeps the graphs of published seeds.
# Beyond, the cost is proportional to the edges, and the same seed gives a different graph.
PAIRWISE_NODES = 5000
ATTACH_BATCH = 1000  # nodes that a Barabasi-Albert graph grows by at a time


def independent_edges(
    nodes: int, rng: Rng, chance: Callable[[int], float | NDArray[np.float64]]
) -> Ids:
    """Join i to i + 1, i + 2, ... independently, with the probabilities (or one) `chance(i)`."""
    high = [
        node + 1 + np.flatnonzero(rng.random(nodes - node - 1) < chance(node))
        for node in range(nodes)
    ]
    low = np.repeat(np.arange(nodes), [len(row) for row in high])
    return np.stack([low, np.concatenate(high)], axis=1)


def block_edges(starts: Ids, p_in: float, p_out: float, rng: Rng) -> Ids:
    """Join pairs independently, with p_in within a group of consecutive ids and p_out across.

    `starts` [groups + 1]: the first id of every group, and the number of nodes.
    """
    first, end, sizes = starts[:-1], starts[1:], np.diff(starts)
    group, index = _grouped_successes(sizes * (sizes - 1) // 2, p_in, rng)
    inside = first[group][:, None] + _triangle(index)
    later = starts[-1] - end  # nodes in all groups that follow
    group, index = _grouped_successes(sizes * later, p_out, rng)
    low, high = np.divmod(index, later[group])
    across = np.stack([first[group] + low, end[group] + high], axis=1)
    return np.concatenate([inside, across])


def product_edges(x: NDArray[np.float64], rng: Rng) -> Ids:
    """Join i and j with probability min(1, x_i x_j / sum x), independently for each pair.

    Nodes whose x lie within a factor of 2 form a class. Pairs between two classes are drawn with
    their largest probability, then thinned to the exact one. Miller, Hagberg, 2011, do so node by
    node.
    """
    order = np.argsort(-x)
    w, total = x[order], x.sum()
    classes = np.floor(np.log2(w[0] / w)).astype(np.int64)
    starts = np.flatnonzero(np.diff(classes, prepend=-1, append=classes[-1] + 1))
    drawn = []
    for a in range(len(starts) - 1):
        for b in range(a, len(starts) - 1):
            upper = min(1.0, w[starts[a]] * w[starts[b]] / total)
            pairs = _class_pairs(starts, a, b, upper, rng)
            exact = np.minimum(1.0, w[pairs[:, 0]] * w[pairs[:, 1]] / total)
            drawn.append(pairs[rng.random(len(pairs)) * upper < exact])
    edges: Ids = order[np.concatenate(drawn)]
    return edges


def attached_edges(nodes: int, m: int, rng: Rng) -> Ids:
    """Barabasi-Albert: node 0 is joined to 1..m, then each new node to m different others.

    Each is a random end of a random edge so far, so its probability grows with its degree;
    repeated ones are drawn again.
    """
    ends = np.zeros((nodes - m, 2, m), dtype=np.int64)  # row r: targets of node m + r, itself
    ends[0, 1] = np.arange(1, m + 1)
    ends[1:, 1] = np.arange(m + 1, nodes)[:, None]
    so_far = ends.reshape(-1)
    for start in range(1, nodes - m, ATTACH_BATCH):
        rows = np.arange(start, min(start + ATTACH_BATCH, nodes - m))
        draws = rng.integers(2 * m * rows[:, None], size=(len(rows), m))
        ends[rows, 0] = targets = so_far[draws]
        within = (draws >= 2 * m * start).any(axis=1)  # an end drawn in this batch
        twice = (np.diff(np.sort(targets, axis=1), axis=1) == 0).any(axis=1)
        for row in np.flatnonzero(within | twice).tolist():
            values = set(so_far[draws[row]].tolist())
            while len(values) < m:
                values.add(int(so_far[rng.integers(2 * m * (start + row))]))
            ends[start + row, 0] = sorted(values)
    return np.stack([ends[:, 0].ravel(), ends[:, 1].ravel()], axis=1)


def small_world_edges(nodes: int, k: int, p: float, rng: Rng) -> Ids:
    """Watts-Strogatz: a ring of the k nearest; with probability p, an edge gets a new far end.

    An end that would make a self-loop or a repeated edge is drawn again. All edges move at once, so
    k must be well below the number of nodes.
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
    """Pair half-edges, given by node id, at random; self-loops and repeated edges may occur."""
    return rng.permutation(stubs).reshape(-1, 2)


def regular_edges(nodes: int, k: int, rng: Rng) -> Ids:
    """A random k-regular graph: stubs are paired, and again where the edge would be invalid.

    Steger, Wormald, 1999. Close to uniform over all k-regular graphs if k is small. For a dense
    graph, the complement is drawn, which is regular too.
    """
    if k >= nodes:
        raise InputError(f"k must be smaller than the {nodes} nodes, got {k}")
    if nodes * k % 2:
        raise InputError(f"no {k}-regular graph has {nodes} nodes; make k or nodes even")
    dense = 2 * k > nodes - 1
    codes = None
    while codes is None:
        codes = _try_regular(nodes, nodes - 1 - k if dense else k, rng)
    if dense:
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
    """Which codes occur neither in the sorted arrays `taken` nor earlier in `codes`."""
    new = np.ones(len(codes), dtype=np.bool_)
    for values in taken:
        new &= ~_contains(values, codes)
    # Few codes are repeated; finding them first is faster than numpy.unique over all.
    ordered = np.sort(codes)
    repeated = np.flatnonzero(_contains(np.unique(ordered[1:][np.diff(ordered) == 0]), codes))
    again = np.ones(len(repeated), dtype=np.bool_)
    again[np.unique(codes[repeated], return_index=True)[1]] = False
    new[repeated[again]] = False
    return new


def _contains(values: Ids, codes: Ids) -> NDArray[np.bool_]:
    if not len(values):
        return np.zeros(len(codes), dtype=np.bool_)
    at = np.minimum(np.searchsorted(values, codes), len(values) - 1)
    return np.asarray(values[at] == codes)


def _class_pairs(starts: Ids, a: int, b: int, p: float, rng: Rng) -> Ids:
    """Pairs between the classes a <= b of consecutive indices, each with probability p."""
    first, second = int(starts[a + 1] - starts[a]), int(starts[b + 1] - starts[b])
    if a == b:
        pairs = _triangle(successes(first * (first - 1) // 2, p, rng))
    else:
        pairs = np.stack(np.divmod(successes(first * second, p, rng), second), axis=1)
    return pairs + starts[[a, b]]


def _grouped_successes(counts: Ids, p: float, rng: Rng) -> tuple[Ids, Ids]:
    """Successes among groups of `counts` trials: the group of each, and its index within it."""
    bounds = np.cumsum(counts)
    trials = successes(int(bounds[-1]), p, rng)
    group = np.searchsorted(bounds, trials, side="right")
    return group, trials - (bounds - counts)[group]


def successes(trials: int, p: float, rng: Rng) -> Ids:
    """Which of the trials 0, 1, ... succeed, each with probability p.

    Draws the geometric gaps between successes. Batagelj, Brandes, 2005.
    """
    if trials == 0 or p == 0:
        return np.empty(0, dtype=np.int64)
    batches, last = [], -1
    while last < trials:
        expected = (trials - last) * p
        gaps = rng.geometric(p, size=int(expected + 4 * expected**0.5) + 10)
        batches.append(last + np.cumsum(np.minimum(gaps, trials + 1)))  # no sum can overflow
        last = int(batches[-1][-1])
    indices = np.concatenate(batches)
    return indices[: np.searchsorted(indices, trials)]


def _triangle(index: Ids) -> Ids:
    """The pairs low < high at these indices of (0, 1), (0, 2), (1, 2), (0, 3), ..."""
    high = ((1 + np.sqrt(8 * index + 1)) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > index  # the root was rounded up
    return np.stack([index - high * (high - 1) // 2, high], axis=1)
