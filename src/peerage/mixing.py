"""How averaging spreads over a graph: mixing matrices, gain, spectrum, mixing time.

Every quantity is that of the graph of round 0. A self-loop of weight 1 belongs to every node, as a
node always averages its own model too; k_i is the degree without it.
"""

import math
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse import csgraph
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh

from peerage.errors import InputError, did_you_mean
from peerage.graph import (
    Graph,
    adjacency_matrix,
    component_labels,
    components,
    degrees,
    diameter,
    is_connected,
    refuse_disconnected,
)
from peerage.randomness import numpy_stream

Weights = Literal["uniform", "data", "metropolis"]
Vector = NDArray[np.float64]

DENSE_NODES = 1000  # up to here all eigenvalues at once are quicker than one by iteration
EXACT_NODES = 2000  # up to here all eigenvectors fit easily, and so do all distances
ROUNDING = 1e-12  # a distance that equals its threshold must not miss it by rounding


def mixing_matrix(
    graph: Graph, weights: Weights = "uniform", examples: ArrayLike | None = None
) -> sparse.csr_array:
    """The row-stochastic A of one averaging step: x_i becomes sum_j A_ij x_j.

    uniform:    A_ij = 1 / (k_i + 1) on the closed neighbourhood
    data:       A_ij = d_j / sum of d over the closed neighbourhood; uniform if that sum is 0
    metropolis: A_ij = 1 / (1 + max(k_i, k_j)), A_ii the rest; symmetric, so doubly stochastic
    """
    _check_weights(weights)
    adjacency = adjacency_matrix(graph)
    if weights == "metropolis":
        k = degrees(graph)
        rows, columns = adjacency.nonzero()
        off = sparse.csr_array(
            (1 / (1 + np.maximum(k[rows], k[columns])), (rows, columns)), adjacency.shape
        )
        return (off + sparse.diags_array(1 - off.sum(axis=1))).tocsr()
    a = adjacency + sparse.eye_array(graph.nodes)
    if weights == "data":
        d = _checked_examples(graph, examples)
        a = a @ sparse.diags_array(d) + sparse.diags_array(1.0 * (a @ d == 0)) @ a
        a.eliminate_zeros()
    return (sparse.diags_array(1 / a.sum(axis=1)) @ a).tocsr()


def stationary(
    graph: Graph, weights: Weights = "uniform", examples: ArrayLike | None = None
) -> Vector:
    """The share v_i of node i's model in the consensus, v = v A; it sums to 1 in every component.

    uniform: v_i ~ k_i + 1; metropolis: v_i ~ 1; data: v_i ~ d_i s_i with s_i the sum of d over the
    closed neighbourhood. The last holds if the nodes with data are connected among themselves;
    otherwise the consensus depends on the start, and v is the limit of the mean over all nodes.
    """
    _check_weights(weights)
    mass: Vector
    if weights == "metropolis":
        mass = np.ones(graph.nodes)
    elif weights == "uniform":
        mass = _closed_degrees(graph)
    else:
        mass = _data_mass(graph, _checked_examples(graph, examples))
    labels = component_labels(graph)
    shares: Vector = mass / np.bincount(labels, mass)[labels]
    return shares


def power_iteration(
    matrix: sparse.csr_array, tolerance: float = 1e-14, rounds: int = 1_000_000
) -> Vector:
    """The left eigenvector v = v A of any row-stochastic matrix, directed ones too; it sums to 1.

    Half of every step stays where it is, which leaves v alone and stills matrices that oscillate.
    """
    v: Vector = np.full(matrix.shape[0], 1 / matrix.shape[0])
    for _ in range(rounds):
        previous, v = v, (v + v @ matrix) / 2
        if np.abs(v - previous).sum() <= tolerance:
            return v
    raise InputError(f"the mixing matrix does not settle within {rounds} rounds; allow more rounds")


def gains(graph: Graph, weights: Weights = "uniform", examples: ArrayLike | None = None) -> Vector:
    """The initialisation gain 1 / ||v||_2 of every node, v being that of its component (P4).

    uniform: sum(k + 1) / sqrt(sum((k + 1)^2)), at most sqrt(n), which regular graphs reach.
    """
    labels = component_labels(graph)
    squares = np.bincount(labels, stationary(graph, weights, examples) ** 2)
    each: Vector = 1 / np.sqrt(squares[labels])
    return each


def gain(graph: Graph, weights: Weights = "uniform", examples: ArrayLike | None = None) -> float:
    """The one gain of a connected graph."""
    refuse_disconnected(graph, "has one gain per component; ask for gains")
    return float(gains(graph, weights, examples)[0])


def second_eigenvalue(graph: Graph) -> float:
    """The eigenvalue of the uniform mixing matrix that is second in absolute value."""
    if graph.nodes == 1:
        return 0.0
    if not is_connected(graph):
        return 1.0
    if graph.nodes > DENSE_NODES:
        try:
            return _second_by_iteration(graph)
        except ArpackNoConvergence:
            pass  # a long thin graph, whose eigenvalues crowd at 1: all of them at once then
    return _largest(np.linalg.eigvalsh(_symmetric(graph).toarray())[:-1])


def spectral_gap(graph: Graph) -> float:
    """1 - |lambda_2| of the uniform mixing matrix: 0 if disconnected, 1 if complete."""
    return 1 - abs(second_eigenvalue(graph))


class MixingTime(NamedTuple):
    rounds: float  # infinite if the graph is not connected
    exact: bool  # otherwise an upper bound from the spectral gap


def mixing_time(graph: Graph, epsilon: float = 0.25) -> MixingTime:
    """Rounds of uniform averaging until every model is nearly the consensus.

    min{t : max_i ||A^t(i, .) - v||_1 / 2 <= epsilon}; above 2000 nodes the upper bound
    ln(1 / (epsilon min v)) / (1 - |lambda_2|).
    """
    if not 0 < epsilon < 1:
        raise InputError(f"epsilon must lie strictly between 0 and 1, got {epsilon}")
    return _speed(graph, epsilon)[1]


@dataclass(frozen=True)
class GraphReport:
    """What is worth knowing about a graph before training; of a dynamic one, about its round 0."""

    nodes: int
    edges: int
    dynamic: bool
    connected: bool
    components: int
    attempt: int
    degree_min: int
    degree_mean: float
    degree_max: int
    degree_histogram: dict[int, int]  # degree -> number of nodes
    spectral_gap: float
    relaxation_time: float  # 1 / spectral_gap
    mixing_time: float
    mixing_time_exact: bool
    gain: float | None  # of a connected graph
    component_gains: tuple[float, ...]  # in the order of `components`
    diameter: int | None  # of a connected graph with at most 2000 nodes

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON, which has text keys, and neither tuples nor infinity."""
        table = asdict(self)
        table["degree_histogram"] = {str(k): count for k, count in self.degree_histogram.items()}
        table["component_gains"] = list(self.component_gains)
        return {key: None if value == math.inf else value for key, value in table.items()}


def describe(graph: Graph) -> GraphReport:
    k = degrees(graph)
    parts = components(graph)
    each = gains(graph)
    connected = len(parts) == 1
    small = graph.nodes <= EXACT_NODES
    gap, mixing = _speed(graph, epsilon=0.25)
    return GraphReport(
        nodes=graph.nodes,
        edges=int(k.sum()) // 2,
        dynamic=graph.dynamic,
        connected=connected,
        components=len(parts),
        attempt=graph.attempt,
        degree_min=int(k.min()),
        degree_mean=float(k.mean()),
        degree_max=int(k.max()),
        degree_histogram=dict(sorted(Counter(k.tolist()).items())),
        spectral_gap=gap,
        relaxation_time=1 / gap if connected else math.inf,
        mixing_time=mixing.rounds,
        mixing_time_exact=mixing.exact,
        gain=float(each[0]) if connected else None,
        component_gains=tuple(float(each[part[0]]) for part in parts),
        diameter=diameter(graph) if connected and small else None,
    )


def _speed(graph: Graph, epsilon: float) -> tuple[float, MixingTime]:
    """Spectral gap and mixing time from one look at the spectrum."""
    if not is_connected(graph):
        return 0.0, MixingTime(math.inf, True)
    if graph.nodes > EXACT_NODES:
        second = second_eigenvalue(graph)
        return 1 - abs(second), MixingTime(_mixing_bound(graph, second, epsilon), False)
    modes = _modes(graph)
    return 1 - abs(_largest(modes[0])), MixingTime(_exact_mixing_time(graph, modes, epsilon), True)


def _closed_degrees(graph: Graph) -> Vector:
    """k + 1: a node counts itself among its neighbours."""
    return (degrees(graph) + 1).astype(np.float64)


def _check_weights(weights: str) -> None:
    known = ("uniform", "data", "metropolis")
    if weights not in known:
        raise InputError(f"unknown weights {weights!r}; {did_you_mean(weights, known)}")


def _checked_examples(graph: Graph, examples: ArrayLike | None) -> Vector:
    if examples is None:
        raise InputError("weights 'data' need the number of examples of every node")
    d = np.asarray(examples, dtype=np.float64)
    if d.shape != (graph.nodes,):
        raise InputError(f"expected {graph.nodes} numbers of examples, got shape {d.shape}")
    if not (np.isfinite(d).all() and (d >= 0).all()):
        raise InputError("numbers of examples must be finite and not negative")
    return d


def _data_mass(graph: Graph, d: Vector) -> Vector:
    """What `stationary` is proportional to, component by component, with data weights."""
    adjacency = adjacency_matrix(graph)
    holders = np.flatnonzero(d)
    islands, _ = csgraph.connected_components(adjacency[holders][:, holders])
    labels = component_labels(graph)
    with_data = np.bincount(labels, d) > 0
    if islands > with_data.sum():
        return power_iteration(mixing_matrix(graph, "data", d))
    mass = d * (d + adjacency @ d)
    # Where nobody holds data the weights are uniform.
    return np.where(with_data[labels], mass, _closed_degrees(graph))


def _symmetric(graph: Graph) -> sparse.csr_array:
    """D^(1/2) A D^(-1/2) with D = diag(k + 1): the eigenvalues of the uniform A, but symmetric."""
    scale = sparse.diags_array(1 / np.sqrt(_closed_degrees(graph)))
    return scale @ (adjacency_matrix(graph) + sparse.eye_array(graph.nodes)) @ scale


def _largest(eigenvalues: Vector) -> float:
    """The one of largest absolute value, with its sign; 0 if there is none."""
    return float(eigenvalues[np.abs(eigenvalues).argmax()]) if len(eigenvalues) else 0.0


def _second_by_iteration(graph: Graph) -> float:
    matrix = _symmetric(graph)
    # The eigenvector of eigenvalue 1 is known; without it the second becomes the first.
    top = np.sqrt(stationary(graph))
    rest = LinearOperator(
        matrix.shape, matvec=lambda x: matrix @ x - top * (top @ x), dtype=np.float64
    )
    start = numpy_stream(0, "eigenvector").standard_normal(graph.nodes)
    values = eigsh(rest, k=1, which="LM", v0=start, return_eigenvectors=False)
    return float(values[0])


def _modes(graph: Graph) -> tuple[Vector, Vector]:
    """Eigenvalues [n-1] and eigenvectors [n, n-1] of the symmetric matrix, without eigenvalue 1."""
    values, vectors = np.linalg.eigh(_symmetric(graph).toarray())
    return values[:-1], vectors[:, :-1]


def _mixing_bound(graph: Graph, second: float, epsilon: float) -> int:
    smallest = stationary(graph).min()
    return math.ceil(math.log(1 / (epsilon * smallest)) / (1 - abs(second)))


def _exact_mixing_time(graph: Graph, modes: tuple[Vector, Vector], epsilon: float) -> int:
    """Bisection: the distance never grows, and at the spectral bound it is small enough."""
    root = np.sqrt(_closed_degrees(graph))
    too_few, enough = -1, _mixing_bound(graph, _largest(modes[0]), epsilon)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if _distance(modes, root, middle) <= epsilon + ROUNDING:
            enough = middle
        else:
            too_few = middle
    return enough


def _distance(modes: tuple[Vector, Vector], root: Vector, rounds: int) -> float:
    """max_i ||A^t(i, .) - v||_1 / 2, where A^t - 1 v = D^(-1/2) Q L^t Q' D^(1/2) over the modes."""
    values, vectors = modes
    powers = values**rounds
    alive = np.abs(powers) > 1e-20  # after many rounds only a few modes are, and this is quick
    q = vectors[:, alive]
    difference = (q * powers[alive]) @ q.T * root / root[:, None]
    return float(np.abs(difference).sum(axis=1).max() / 2)
