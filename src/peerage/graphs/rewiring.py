"""Degree-preserving rewiring to a given degree assortativity (P4 Fig. 8c).

The degree assortativity rho is Pearson's correlation of the degrees at the two ends of an edge.
With M edges, S = sum over edges of k_u k_v, s_2 = sum of k^2 and s_3 = sum of k^3 over nodes:

    rho = (4 M S - s_2^2) / (2 M s_3 - s_2^2)

Degrees are kept, so only S changes. Newman, 2002, Phys. Rev. Lett. 89, 208701.
"""

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from peerage.errors import InputError
from peerage.graphs.graph import Graph, StaticGraph, degrees, is_connected
from peerage.randomness import numpy_stream

STOP_DISTANCE = 1e-9  # from the target
MAX_DISTANCE = 1e-4  # from the target; more is an error, unless S + 1 changes rho by more
FIRST_SHARPNESS = 1.0
SHARPNESS_FACTOR = 1.7  # applied after every M accepted swaps
MAX_REJECTED = 200_000  # proposals since a swap away from the target was accepted
BLOCK = 65_536  # proposals whose random numbers are drawn together


class Degrees(NamedTuple):
    """Quantities in the formula of rho that no swap changes."""

    k: NDArray[np.int64]
    edges: int
    shift: int  # s_2^2
    scale: int  # 2 M s_3 - s_2^2

    def rho(self, total: float) -> float:
        return (4 * self.edges * total - self.shift) / self.scale

    @property
    def step(self) -> float:
        """The change of rho per unit of S."""
        return 4 * self.edges / self.scale

    def total(self, rho: float) -> float:
        """The sum S over edges that gives this assortativity."""
        return (rho * self.scale + self.shift) / (4 * self.edges)


def assortativity(graph: Graph) -> float:
    """The correlation of degrees over the edges of round 0, in [-1, 1]."""
    return _degrees(graph).rho(_total(graph))


def rewire(
    graph: Graph, target: float, seed: int, *, connected: bool = False, attempts: int = 10
) -> StaticGraph:
    """A graph with the same degrees whose assortativity is the target.

    Two random edges (r, s), (u, v) become (r, v), (u, s) with probability min(1, exp(-b delta)),
    where delta is the change of |rho - target|. b is 1 at first and grows by a factor of 1.7 after
    every M accepted swaps. The search stops within 10^-9 of the target, or as near as the integer S
    allows. It also stops when swaps away from the target are no longer accepted, which is an error
    at 10^-4 or more from the target.

    With `connected`, the rewiring is repeated until the result is connected; attempt a draws from
    the stream (seed, "rewiring", a).
    """
    fixed = _degrees(graph)
    if not (isfinite(target) and -1 <= target <= 1):
        raise InputError(f"assortativity must lie in [-1, 1], got {target}")
    for attempt in range(attempts):
        ends = _anneal(graph, fixed, target, numpy_stream(seed, "rewiring", attempt))
        result = StaticGraph.from_edges(graph.nodes, ends, graph.attempt)
        _check_reached(assortativity(result), target, fixed.step)
        if not connected or is_connected(result):
            return result
    raise InputError(
        f"no graph of assortativity {target} was connected in {attempts} attempts; "
        "choose a target nearer to 0, a graph with more edges, or connected=False"
    )


def with_assortativity(graph: Graph, target: float | None, seed: int) -> Graph:
    """The graph, rewired if there is a target; a connected graph stays connected."""
    if target is None:
        return graph
    return rewire(graph, target, seed, connected=is_connected(graph))


def _degrees(graph: Graph) -> Degrees:
    if graph.directed or graph.weighted or graph.dynamic:
        raise InputError(
            "assortativity requires a static undirected graph without weights; "
            "choose one such as er:p=0.2"
        )
    k = degrees(graph)
    edges, s2, s3 = int(k.sum()) // 2, int((k**2).sum()), int((k**3).sum())
    scale = 2 * edges * s3 - s2**2
    if scale == 0:
        raise InputError(
            "all nodes with edges have the same degree, so assortativity is undefined; "
            "choose a graph with unequal degrees, such as er or ba"
        )
    return Degrees(k, edges, s2**2, scale)


def _total(graph: Graph) -> int:
    k = degrees(graph)
    return int(k @ (graph.links(0) @ k)) // 2


def _anneal(
    graph: Graph, fixed: Degrees, target: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    k, near = fixed.k.tolist(), [set(others) for others in graph.neighbours(0)]
    one, other = graph.edge_array().T.tolist()
    total, goal = _total(graph), fixed.total(target)
    tolerance = max(0.5, STOP_DISTANCE / fixed.step)
    sharpness, accepted, rejected = FIRST_SHARPNESS * fixed.step, 0, 0
    for i, j, reverse, threshold in _proposals(fixed.edges, rng):
        if abs(total - goal) <= tolerance or rejected >= MAX_REJECTED:
            break
        rejected += 1
        r, s = one[i], other[i]
        u, v = (other[j], one[j]) if reverse else (one[j], other[j])
        change = (k[r] - k[u]) * (k[v] - k[s])
        worse = abs(total + change - goal) - abs(total - goal)
        if sharpness * worse > threshold or r == v or s == u or v in near[r] or s in near[u]:
            continue
        for a, b in ((r, s), (u, v)):
            near[a].remove(b)
            near[b].remove(a)
        for a, b in ((r, v), (u, s)):
            near[a].add(b)
            near[b].add(a)
        one[i], other[i], one[j], other[j] = r, v, u, s
        total += change
        accepted += 1
        if worse > 0:
            rejected = 0
        if accepted % fixed.edges == 0:
            sharpness *= SHARPNESS_FACTOR
    return np.stack([one, other], axis=1)


def _proposals(edges: int, rng: np.random.Generator) -> Iterator[tuple[int, int, bool, float]]:
    """Two edges, whether the second is reversed, and the largest b delta to accept.

    u < exp(-b delta) with u uniform is b delta < x with x exponential.
    """
    while True:
        yield from zip(
            rng.integers(edges, size=BLOCK).tolist(),
            rng.integers(edges, size=BLOCK).tolist(),
            (rng.random(BLOCK) < 0.5).tolist(),
            rng.standard_exponential(BLOCK).tolist(),
            strict=True,
        )


def _check_reached(rho: float, target: float, step: float) -> None:
    if abs(rho - target) >= max(MAX_DISTANCE, step):
        side = "below" if target > rho else "above"
        raise InputError(
            f"these degrees do not allow an assortativity of {target}, the nearest found is "
            f"{rho:.6f}; choose that or a value {side} it"
        )
