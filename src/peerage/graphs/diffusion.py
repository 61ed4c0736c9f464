"""A numerical model of the first rounds of decentralised learning (P4 section 4.2).

Every node holds d numbers. A round averages over the closed neighbourhood and adds noise that
stands for training: X <- A X + N(0, noise^2) with X [n, d] and A the mixing matrix.
sigma_ap, the mean over nodes of the deviation over parameters, falls from `init` towards init ||v||
with v the stationary vector of A. sigma_an, the mean over parameters of the deviation over nodes,
falls to the order of the noise; from then on, training has an effect.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from peerage.errors import InputError, check_at_least, check_choice
from peerage.graphs.graph import Graph, component_labels, first_not_strong
from peerage.graphs.mixing import gains, mixing_matrix
from peerage.randomness import numpy_stream

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Start = Literal["normal", "uniform"]
Watch = Callable[[int, float, float], None]  # round, sigma_ap, sigma_an
# Rows of the mixing matrix: which, and [rows, n] in compressed sparse rows, single precision.
Block = tuple[slice, torch.Tensor]

BLOCK_NUMBERS = 1 << 17  # numbers of X per block: 512 kB, which fit in the cache
BLOCK_ROWS = 4096  # longer sums in single precision would cost accuracy
EXACT_NODES = 1000  # up to here, the exact limit of sigma_an takes seconds
MAX_NOISE = 1e12  # in units of `init`; squares of larger numbers overflow single precision
STABLE_FACTOR = 1.1  # sigma_an is stable below this multiple of its plateau (P4 section 4.5)


@dataclass(frozen=True, eq=False)
class Diffusion:
    """The simulated curves of the model on a graph, and the limits that theory predicts."""

    graph: Graph = field(repr=False)
    parameters: int
    init: float
    noise: float
    start: Start
    seed: int
    sigma_ap: Double = field(repr=False)  # [rounds + 1]
    sigma_an: Double = field(repr=False)  # [rounds + 1]

    @property
    def rounds(self) -> int:
        return len(self.sigma_an) - 1

    @property
    def plateau(self) -> float:
        """The mean of sigma_an over the last fifth of the rounds."""
        return float(self.sigma_an[-max(self.rounds // 5, 1) :].mean())

    @property
    def stabilisation(self) -> int | None:
        """The first round with sigma_an at most 1.1 times its plateau; None if still falling.

        It is still falling if, at the slope of ln sigma_an over the last fifth of the rounds (at
        least three), as many rounds again would lower it by another tenth, and the slope exceeds
        three times its standard error.
        """
        last_values = self.sigma_an[-max(self.rounds // 5, 3) :]
        if last_values.all():  # where it is 0, all nodes agree
            if self.rounds < 3:
                return None
            slope, error = _line(np.arange(len(last_values), dtype=np.float64), np.log(last_values))
            if -slope * self.rounds > math.log(STABLE_FACTOR) and -slope > 3 * error:
                return None
        plateau = self.plateau if last_values.all() else 0.0
        return int(np.argmax(self.sigma_an <= STABLE_FACTOR * plateau))

    @property
    def limit_ap(self) -> float | None:
        """Predicted final sigma_ap for many parameters: init ||v|| (P4), plus the noise.

        Mean over nodes of sqrt((init^2 + rounds noise^2) ||v||^2 + the variance around consensus),
        with v of the node's component. None if a component is not strongly connected. With d
        parameters, sigma_ap deviates from this by a share of about 1 / sqrt(2 d).
        """
        if self._unit_variance is None:
            return None
        return float(np.sqrt(self._consensus + self._unit_variance.variance * self.noise**2).mean())

    @property
    def limit_an(self) -> float | None:
        """Predicted final sigma_an: the root of the variance around consensus.

        Differences between the components of a graph are added. None where `limit_ap` is.
        """
        if self._unit_variance is None:
            return None
        labels = component_labels(self.graph)
        share = np.bincount(labels)[labels] / self.graph.nodes
        between = float((self._consensus * (1 - share)).mean())
        return math.sqrt(between + self._unit_variance.variance * self.noise**2)

    @property
    def limit_an_exact(self) -> bool:
        """Whether `limit_an` is exact; if not, it is too low, by a few percent or more on rings."""
        return self._unit_variance is not None and self._unit_variance.exact

    def as_dict(self) -> dict[str, Any]:
        """The result as a dictionary for JSON."""
        settings = ("parameters", "rounds", "init", "noise", "start", "seed")
        results = ("limit_ap", "limit_an", "limit_an_exact", "plateau", "stabilisation")
        return {
            "nodes": self.graph.nodes,
            **{name: getattr(self, name) for name in settings},
            "sigma_ap": self.sigma_ap.tolist(),
            "sigma_an": self.sigma_an.tolist(),
            **{name: getattr(self, name) for name in results},
        }

    @cached_property
    def _unit_variance(self) -> "ConsensusVariance | None":
        return variance_around_consensus(self.graph)

    @cached_property
    def _consensus(self) -> Double:
        """[n]: the variance of the consensus in every node's component, with noise."""
        variance: Double = (self.init**2 + self.rounds * self.noise**2) / gains(self.graph) ** 2
        return variance


def diffuse(
    graph: Graph,
    *,
    parameters: int = 32,
    rounds: int = 50,
    init: float = 1.0,
    noise: float = 1e-3,
    start: Start = "normal",
    seed: int = 0,
    watch: Watch | None = None,
) -> Diffusion:
    """Run the model on a graph; `watch` receives the two deviations of every round, with round 0.

    `init` is the standard deviation of the start, whether normal or uniform: the authors' U(-5, 5)
    is init = 5 / sqrt(3).
    """
    _check(graph, parameters, rounds, init, noise, start)
    # The model is linear; in units of `init`, nothing overflows.
    simulation = Simulation(graph, parameters, noise / init, start, seed)
    sigmas = np.empty((rounds + 1, 2))
    for t in range(rounds + 1):
        if t:
            simulation.step()
        sigmas[t] = init * np.array(simulation.sigmas)
        if watch is not None:
            watch(t, *map(float, sigmas[t]))
    return Diffusion(graph, parameters, init, noise, start, seed, *sigmas.T)


class Simulation:
    """The model one round at a time, from a start of deviation 1.

    The state is kept relative to a common centre [d] that follows the mean of the nodes. Averaging
    does not change the centre, so single precision suffices for deviations of any size.
    """

    def __init__(
        self, graph: Graph, parameters: int, noise: float, start: Start = "normal", seed: int = 0
    ) -> None:
        self.noise, self.seed, self.round = noise, seed, 0
        rng = numpy_stream(seed, "diffusion start")
        shape = (graph.nodes, parameters)
        self.x: Single
        if start == "normal":
            self.x = rng.standard_normal(shape, dtype=np.float32)
        else:
            self.x = rng.random(shape, dtype=np.float32)
            self.x -= np.float32(0.5)
            self.x *= np.float32(math.sqrt(12))
        self.sigmas = deviations(self.x)  # sigma_ap and sigma_an of the current round
        mean = self.x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self.x -= mean
        self.centre = mean.astype(np.float64)
        self.drift = np.zeros_like(mean)  # mean of x, which the next round moves to the centre
        self.blocks = _row_blocks(mixing_matrix(graph), parameters)
        self._next = np.empty_like(self.x)

    def step(self) -> None:
        """Run one round, block by block: average, add noise, compute the deviations.

        A (X - 1 m') = A X - 1 m' because the rows of A sum to 1, so the drift is subtracted once.
        """
        self.round += 1
        rng = numpy_stream(self.seed, "diffusion noise", self.round)
        self.centre += self.drift
        sums = _Deviations(self.centre)
        state = torch.from_numpy(self.x)
        for rows, matrix in self.blocks:
            block = self._next[rows]
            _fill_normal(block, self.noise, rng)
            block -= self.drift
            torch.from_numpy(block).addmm_(matrix, state)
            sums.add(block)
        self.x, self._next = self._next, self.x
        self.drift = sums.mean.astype(np.float32)
        self.sigmas = sums.sigmas()


def deviations(x: ArrayLike) -> tuple[float, float]:
    """sigma_ap (over parameters) and sigma_an (over nodes) of a state [n, d] (P4)."""
    state = np.asarray(x)
    centre = state.mean(axis=0, dtype=np.float64)
    sums = _Deviations(centre)
    for rows in _row_slices(*state.shape):
        sums.add((state[rows] - centre).astype(np.float32))
    return sums.sigmas()


def fit_exponent(sizes: ArrayLike, values: ArrayLike) -> tuple[float, float]:
    """The slope of ln(values) over ln(sizes) by least squares, and its standard error."""
    n, y = np.asarray(sizes, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if n.ndim != 1 or n.shape != y.shape or len(np.unique(n)) < 3:
        raise InputError(
            f"an exponent needs values at 3 or more different sizes, got sizes of shape {n.shape} "
            f"and values of shape {y.shape}"
        )
    if not all(np.isfinite(z).all() and (z > 0).all() for z in (n, y)):
        raise InputError("an exponent needs finite sizes and values above 0")
    return _line(np.log(n), np.log(y))


class ConsensusVariance(NamedTuple):
    """Variance of a node around the consensus of its component, for noise of deviation 1."""

    variance: float
    exact: bool  # otherwise a lower bound


def variance_around_consensus(graph: Graph) -> ConsensusVariance | None:
    """sum_t ||C A^t||_F^2 / n with C = 1 - the mean over a component; None if it is infinite.

    Noise of t rounds ago has been averaged t times. For a regular graph this is the sum of
    1 / (n (1 - lambda^2)) over the eigenvalues other than 1. Above 1000 nodes, only the terms
    t = 0 and 1 are summed.
    """
    labels = component_labels(graph)
    count = np.bincount(labels)
    if first_not_strong(graph) is not None:
        return None
    a = mixing_matrix(graph)
    if graph.nodes > EXACT_NODES:
        first = graph.nodes - len(count)
        second = (a.data**2).sum() - (a.sum(axis=0) ** 2 / count[labels]).sum()
        return ConsensusVariance(float(first + second) / graph.nodes, exact=False)
    c = np.eye(graph.nodes) - (labels[:, None] == labels) / count[labels]
    b, p = c @ a.toarray(), c  # C A C = C A, hence C A^t = (C A)^t
    while np.abs(b).max() > 1e-9:  # p sums the terms below 2^k, b = (C A)^(2^k)
        p, b = p + b @ p @ b.T, b @ b
    return ConsensusVariance(float(np.trace(p)) / graph.nodes, exact=True)


class _Deviations:
    """Accumulates both deviations of a state over blocks of rows, relative to a centre [d].

    Within a block, single precision suffices, as differences from the block's means are summed.
    Blocks are combined in double precision (Chan, Golub, LeVeque, 1979).
    """

    def __init__(self, centre: Double) -> None:
        self.centre = centre.astype(np.float32)
        self.count, self.sigma_ap_sum = 0, 0.0
        self.mean, self.squares = np.zeros(len(centre)), np.zeros(len(centre))

    def add(self, block: Single) -> None:
        rows, d = block.shape
        shift = np.einsum("ij->j", block) / np.float32(rows)
        difference = block - shift
        rounding = np.einsum("ij->j", difference) / rows  # rounding error of the mean
        squares = np.einsum("ij,ij->j", difference, difference)
        delta = shift.astype(np.float64) + rounding - self.mean
        self.count += rows
        self.mean += delta * (rows / self.count)
        self.squares += np.maximum(squares - rows * rounding**2, 0)
        self.squares += delta**2 * (rows * (self.count - rows) / self.count)
        np.add(block, self.centre, out=difference)
        difference -= (np.einsum("ij->i", difference) / np.float32(d))[:, None]
        variances = np.einsum("ij,ij->i", difference, difference) / np.float32(d)
        self.sigma_ap_sum += float(np.sqrt(variances).sum(dtype=np.float64))

    def sigmas(self) -> tuple[float, float]:
        return self.sigma_ap_sum / self.count, float(np.sqrt(self.squares / self.count).mean())


def _fill_normal(out: Single, deviation: float, rng: np.random.Generator) -> None:
    """Fill `out` with Gaussian numbers by Box-Muller, in a third of `standard_normal`'s time.

    Each pair of uniform numbers gives the next pair of Gaussian numbers, so the result does not
    depend on how a stream is split into blocks of even size.
    """
    if deviation == 0:
        out[:] = 0
        return
    flat = out.reshape(-1)
    half = len(flat) // 2
    u = rng.random(len(flat) + len(flat) % 2, dtype=np.float32)
    radius = np.sqrt(np.float32(-2) * np.log(1 - u[::2]))  # 1 - u is never 0
    radius *= np.float32(deviation)
    angle = np.float32(2 * math.pi) * u[1::2]
    np.multiply(radius, np.cos(angle), out=flat[::2])
    np.multiply(radius[:half], np.sin(angle[:half]), out=flat[1::2])


def _row_slices(nodes: int, parameters: int) -> Iterator[slice]:
    """Blocks with an even number of rows, except perhaps the last; noise comes in pairs."""
    rows = max(min(BLOCK_NUMBERS // parameters, BLOCK_ROWS) // 2 * 2, 2)
    return (slice(first, min(first + rows, nodes)) for first in range(0, nodes, rows))


def _row_blocks(a: sparse.csr_array, parameters: int) -> list[Block]:
    """The matrix in blocks for torch, whose sparse product takes half of scipy's time."""
    columns, values = a.indices.astype(np.int32), a.data.astype(np.float32)
    blocks = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        for rows in _row_slices(a.shape[0], parameters):
            bounds = a.indptr[rows.start : rows.stop + 1]
            entries = slice(bounds[0], bounds[-1])
            matrix = torch.sparse_csr_tensor(
                torch.from_numpy((bounds - bounds[0]).astype(np.int32)),
                torch.from_numpy(columns[entries]),
                torch.from_numpy(values[entries]),
                size=(len(bounds) - 1, a.shape[1]),
                check_invariants=False,
            )
            blocks.append((rows, matrix))
    return blocks


def _line(x: Double, y: Double) -> tuple[float, float]:
    """Slope and standard error of the least-squares line through three or more points."""
    dx, dy = x - x.mean(), y - y.mean()
    slope = float(dx @ dy / (dx @ dx))
    residual = dy - slope * dx
    return slope, math.sqrt(float(residual @ residual) / (len(dx) - 2) / float(dx @ dx))


def _check(
    graph: Graph, parameters: int, rounds: int, init: float, noise: float, start: str
) -> None:
    if graph.dynamic:
        raise InputError(
            "the diffusion model requires a static graph; choose one such as regular:k=4"
        )
    check_at_least("parameters", parameters, 2)
    check_at_least("rounds", rounds, 1)
    if not 0 < init < math.inf:
        raise InputError(f"init must be a number above 0, got {init}")
    if not 0 <= noise <= MAX_NOISE * init:
        raise InputError(f"noise must lie between 0 and {MAX_NOISE:g} times init, got {noise}")
    check_choice("start", start, get_args(Start))
