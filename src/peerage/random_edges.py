"""Random edges as arrays [m, 2], drawn with numpy in whole rows or in one go."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from peerage.errors import InputError


def independent_edges(
    nodes: int, rng: np.random.Generator, chance: Callable[[int], float | NDArray[np.float64]]
) -> NDArray[np.int64]:
    """Every pair on its own; `chance(i)` is that of i with i + 1, i + 2, ..., or one for all."""
    high = [
        node + 1 + np.flatnonzero(rng.random(nodes - node - 1) < chance(node))
        for node in range(nodes)
    ]
    low = np.repeat(np.arange(nodes), [len(row) for row in high])
    return np.stack([low, np.concatenate(high)], axis=1)


def paired_stubs(stubs: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """A stub is half an edge, written as the id of its node; loops and repeated edges may occur."""
    return rng.permutation(stubs).reshape(-1, 2)


def regular_edges(nodes: int, k: int, rng: np.random.Generator) -> NDArray[np.int64]:
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


def _try_regular(nodes: int, k: int, rng: np.random.Generator) -> NDArray[np.int64] | None:
    """Edges as low * nodes + high, or None if none of the last pairs was a new edge."""
    codes = np.empty(0, dtype=np.int64)
    stubs = np.repeat(np.arange(nodes), k)
    while len(stubs):
        pairs = np.sort(paired_stubs(stubs, rng), axis=1)
        found, first = np.unique(pairs[:, 0] * nodes + pairs[:, 1], return_index=True)
        new = (pairs[first, 0] != pairs[first, 1]) & ~np.isin(found, codes)
        if not new.any():
            return None
        codes = np.concatenate([codes, found[new]])
        stubs = np.delete(pairs, first[new], axis=0).ravel()
    return codes
