"""How models mix on a graph: mixing matrices, gain, spectrum, mixing time.

All quantities are those of the graph of round 0. Every node has a self-loop, because it averages
its own model too; its weight o_i is 1 unless the graph sets it. k_i is the number of neighbours of
node i, without the self-loop. Unknown values are NaN, which becomes null in JSON.
"""

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse import csgraph
from scipy.sparse.linalg import ArpackError, LinearOperator, eigs, eigsh

from peerage.errors import InputError, check_choice
from peerage.graphs.graph import (
    Graph,
    adjacency_matrix,
    component_labels,
    degrees,
    diameter,
    first_not_strong,
    is_connected,
    is_strongly_connected,
    require_connected,
    self_weights,
)
from peerage.randomness import numpy_stream

Weights = Literal["graph", "uniform", "data", "metropolis"]
Vector = NDArray[np.float64]

DENSE_NODES = 1000  # up to here, all eigenvalues at once take less time than one by iteration
EXACT_NODES = 2000  # up to here, all eigenvectors and distances fit in memory
MATRIX_NODES = 5000  # beyond, no dense matrix [n, n] is made
ROUNDING = 1e-12  # tolerance of the comparison of a distance with its threshold
NO_GAP = 1e-13  # spectral gaps below this are lost in rounding, for example with huge self-loops
LISTED_COMPONENTS = 1000  # number of components whose gains a report lists


def mixing_matrix(
    graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None
) -> sparse.csr_array:
    """The row-stochastic A of one average: x_i becomes sum_j A_ij x_j.

    graph:      A_ij = w_ij / (o_i + sum_j w_ij), A_ii = o_i / ..., with the weights of the graph
    uniform:    A_ij = 1 / (k_i + 1) on the closed neighbourhood; the same if all weights are 1
    data:       A_ij = d_j / sum of d over the closed neighbourhood; uniform if that sum is 0
    metropolis: A_ij = 1 / (1 + max(k_i, k_j)), A_ii the rest; symmetric, so doubly stochastic
    """
    _check_weights(graph, weights)
    if weights == "metropolis":
        return _metropolis(graph)
    a = _with_self_loops(graph, weights)
    if weights == "data":
        d = _checked_examples(graph, examples)
        a = a @ sparse.diags_array(d) + sparse.diags_array(1.0 * (a @ d == 0)) @ a
        a.eliminate_zeros()
    return (sparse.diags_array(1 / a.sum(axis=1)) @ a).tocsr()


def stationary(
    graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None
) -> Vector:
    """The share v_i of node i's model in the consensus, v = v A, with sum 1 in every component.

    graph: v_i ~ o_i + sum_j w_ij; uniform: v_i ~ k_i + 1; metropolis: v_i ~ 1; data: v_i ~ d_i s_i
    with s_i the sum of d over the closed neighbourhood. The last holds if the nodes with data are
    connected among themselves. Otherwise the consensus depends on the start, and v is the limit of
    the mean over all nodes. For directed graphs, v is computed from A.
    """
    _check_weights(graph, weights)
    mass: Vector
    if graph.directed:
        _require_strongly_connected(graph)
        mass = _left_eigenvector(graph, weights, examples)
    elif weights == "metropolis":
        mass = np.ones(graph.nodes)
    elif weights == "data":
        mass = _data_mass(graph, _checked_examples(graph, examples))
    else:
        mass = _with_self_loops(graph, weights).sum(axis=1)
    labels = component_labels(graph)
    shares: Vector = mass / np.bincount(labels, mass)[labels]
    return shares


def power_iteration(
    matrix: sparse.csr_array, tolerance: float = 1e-14, rounds: int = 1_000_000
) -> Vector:
    """The left eigenvector v = v A of a row-stochastic matrix, with sum 1.

    Iterates (v + v A) / 2, which has the same limit and does not oscillate.
    """
    v: Vector = np.full(matrix.shape[0], 1 / matrix.shape[0])
    for _ in range(rounds):
        previous, v = v, (v + v @ matrix) / 2
        if np.abs(v - previous).sum() <= tolerance:
            return v
    raise InputError(f"power iteration did not converge in {rounds} rounds; allow more rounds")


def gains(graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None) -> Vector:
    """The initialisation gain 1 / ||v||_2 of every node, with v of its component (P4).

    Without weights and directions: sum(k + 1) / sqrt(sum((k + 1)^2)), at most sqrt(n) (regular
    graphs).
    """
    labels = component_labels(graph)
    squares = np.bincount(labels, stationary(graph, weights, examples) ** 2)
    per_node: Vector = 1 / np.sqrt(squares[labels])
    return per_node


def gain(graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None) -> float:
    """The gain of a connected graph."""
    require_connected(graph, "has one gain per component; use gains")
    return float(gains(graph, weights, examples)[0])


def degree_gain(degrees: ArrayLike, nodes: float) -> float:
    """The gain of a graph with `nodes` nodes, from the degrees of a sample of them.

    sqrt(n) mean(k + 1) / sqrt(mean((k + 1)^2)); exact if the sample is a whole connected graph.
    """
    closed = np.asarray(degrees, dtype=np.float64) + 1
    if not closed.size:
        raise InputError("the gain needs the degree of at least one node, got none")
    return float(math.sqrt(nodes) * closed.mean() / math.sqrt((closed**2).mean()))


def mean_excess_degree(graph: Graph) -> float:
    """The mean excess degree <k^2> / <k> - 1: the mean number of further links behind a link.

    Near 1 and below, a random graph has only small components (P4 Section 5); 0 without links.
    """
    k = degrees(graph).astype(np.float64)
    return float((k**2).sum() / k.sum() - 1) if k.any() else 0.0


def second_eigenvalue(graph: Graph) -> float:
    """The eigenvalue of the mixing matrix with the second largest absolute value.

    For a directed graph, its absolute value, as eigenvalues may be complex. Beyond 5000 nodes it is
    accurate to n 10^-8 and to a tenth of the gap to 1, or NaN if that takes too long.
    """
    if graph.nodes == 1:
        return 0.0
    if not is_connected(graph):
        return 1.0
    if graph.nodes > DENSE_NODES:
        try:
            return _second_by_iteration(graph)
        except ArpackError:
            if graph.nodes > MATRIX_NODES:
                return math.nan
            # Many eigenvalues lie near 1, as in a long ring: compute all of them at once.
    if graph.directed:
        return float(np.sort(np.abs(np.linalg.eigvals(mixing_matrix(graph).toarray())))[-2])
    return _largest(np.linalg.eigvalsh(_symmetric(graph).toarray())[:-1])


def spectral_gap(graph: Graph) -> float:
    """1 - |lambda_2| of the mixing matrix: 0 if disconnected, 1 if complete."""
    return 1 - abs(second_eigenvalue(graph))


class MixingTime(NamedTuple):
    rounds: float  # infinite if the graph is not connected, NaN if unknown
    exact: bool  # otherwise an upper bound from the spectral gap


def mixing_time(graph: Graph, epsilon: float = 0.25) -> MixingTime:
    """Rounds of averaging until every model is close to the consensus.

    min{t : max_i ||A^t(i, .) - v||_1 / 2 <= epsilon}; above 2000 nodes, the upper bound
    ln(1 / (epsilon min v)) / (1 - |lambda_2|), or NaN for a directed graph.
    """
    if not 0 < epsilon < 1:
        raise InputError(f"epsilon must lie strictly between 0 and 1, got {epsilon}")
    if is_connected(graph):
        _require_strongly_connected(graph)
    return _gap_and_mixing_time(graph, epsilon)[1]


@dataclass(frozen=True)
class GraphReport:
    """Properties of a graph that matter for training; of a dynamic graph, those of round 0."""

    nodes: int
    edges: int
    dynamic: bool
    directed: bool
    weighted: bool
    connected: bool  # ignoring directions
    strongly_connected: bool
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
    gain: float | None  # of a connected graph; NaN if not strongly connected
    component_gains: tuple[float, ...]  # in the order of `components`
    diameter: int | None  # of a strongly connected graph with at most 2000 nodes

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON, with null for unknown and infinite values.

        Only the gains of the first 1000 components are listed.
        """
        table = asdict(self)
        table["degree_histogram"] = {str(k): count for k, count in self.degree_histogram.items()}
        table["component_gains"] = list(map(_finite, self.component_gains[:LISTED_COMPONENTS]))
        return {key: _finite(value) for key, value in table.items()}


def describe(graph: Graph) -> GraphReport:
    k = degrees(graph)
    histogram = np.unique(k, return_counts=True)
    count = int(component_labels(graph).max()) + 1
    component_gains = _component_gains(graph)
    connected, strong = count == 1, is_strongly_connected(graph)
    gap, mixing = _gap_and_mixing_time(graph, epsilon=0.25)
    return GraphReport(
        nodes=graph.nodes,
        edges=int(k.sum()) // (1 if graph.directed else 2),
        dynamic=graph.dynamic,
        directed=graph.directed,
        weighted=graph.weighted,
        connected=connected,
        strongly_connected=strong,
        components=count,
        attempt=graph.attempt,
        degree_min=int(k.min()),
        degree_mean=float(k.mean()),
        degree_max=int(k.max()),
        degree_histogram={int(k): int(count) for k, count in zip(*histogram, strict=True)},
        spectral_gap=gap,
        relaxation_time=1 / gap if gap else math.inf,
        mixing_time=mixing.rounds,
        mixing_time_exact=mixing.exact,
        gain=float(component_gains[0]) if connected else None,
        component_gains=tuple(component_gains.tolist()),
        diameter=diameter(graph) if strong and graph.nodes <= EXACT_NODES else None,
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _component_gains(graph: Graph) -> Vector:
    """The gain of every component; all NaN if one of them is not strongly connected."""
    first = np.unique(component_labels(graph), return_index=True)[1]
    if first_not_strong(graph) is not None:
        return np.full(len(first), math.nan)
    return gains(graph)[first]


def _gap_and_mixing_time(graph: Graph, epsilon: float) -> tuple[float, MixingTime]:
    """Spectral gap and mixing time, from one computation of the spectrum."""
    if not is_connected(graph):
        return 0.0, MixingTime(math.inf, True)
    if graph.directed:
        return spectral_gap(graph), _directed_mixing_time(graph, epsilon)
    if graph.nodes > EXACT_NODES:
        second = second_eigenvalue(graph)
        return 1 - abs(second), MixingTime(_mixing_bound(graph, second, epsilon), False)
    values, vectors = np.linalg.eigh(_symmetric(graph).toarray())
    modes = values[:-1], vectors[:, :-1]  # [n - 1] and [n, n - 1], without eigenvalue 1
    gap = 1 - abs(_largest(modes[0]))
    if gap < NO_GAP:
        return math.nan, MixingTime(math.nan, False)
    return gap, MixingTime(_exact_mixing_time(graph, modes, epsilon), True)


def _with_self_loops(graph: Graph, weights: Weights) -> sparse.csr_array:
    """The matrix of links and self-loops, with the weights of the graph or all 1."""
    if weights == "graph":
        return graph.links(0) + sparse.diags_array(self_weights(graph))
    return adjacency_matrix(graph) + sparse.eye_array(graph.nodes)


def _metropolis(graph: Graph) -> sparse.csr_array:
    adjacency, k = adjacency_matrix(graph), degrees(graph)
    rows, columns = adjacency.nonzero()
    off = sparse.csr_array(
        (1 / (1 + np.maximum(k[rows], k[columns])), (rows, columns)), adjacency.shape
    )
    return (off + sparse.diags_array(1 - off.sum(axis=1))).tocsr()


def _require_strongly_connected(graph: Graph) -> None:
    node = first_not_strong(graph)
    if node is not None:
        raise InputError(
            f"the component of node {node} is not strongly connected, so some nodes have no share "
            "in the consensus; add links, or make the graph undirected"
        )


def _left_eigenvector(graph: Graph, weights: Weights, examples: ArrayLike | None) -> Vector:
    """v = v A up to one factor per component.

    With y_i = v_i / (o_i + sum_j w_ij), y_j sum_i w_ji = sum_i y_i w_ij, without self-loops.
    """
    if graph.nodes > EXACT_NODES or weights == "data":
        return power_iteration(mixing_matrix(graph, weights, examples))
    w = (graph.links(0) if weights == "graph" else adjacency_matrix(graph)).toarray()
    out = np.diag(w.sum(axis=1)) - w.T
    # With the first node of every component fixed at 1, the equations have one solution.
    first = np.unique(component_labels(graph), return_index=True)[1]
    rest = np.delete(np.arange(graph.nodes), first)
    y = np.ones(graph.nodes)
    y[rest] = np.linalg.solve(out[np.ix_(rest, rest)], -out[np.ix_(rest, first)].sum(axis=1))
    mass: Vector = y * _with_self_loops(graph, weights).sum(axis=1)
    return mass


def _check_weights(graph: Graph, weights: str) -> None:
    check_choice("weights", weights, get_args(Weights))
    if weights == "metropolis" and graph.directed:
        raise InputError(
            "metropolis weights need an undirected graph; use graph or uniform weights"
        )


def _checked_examples(graph: Graph, examples: ArrayLike | None) -> Vector:
    if examples is None:
        raise InputError("weights 'data' require the number of examples of every node")
    d = np.asarray(examples, dtype=np.float64)
    if d.shape != (graph.nodes,):
        raise InputError(f"expected {graph.nodes} numbers of examples, got shape {d.shape}")
    if not (np.isfinite(d).all() and (d >= 0).all()):
        raise InputError("numbers of examples must be finite and not negative")
    return d


def _data_mass(graph: Graph, d: Vector) -> Vector:
    """The stationary vector with data weights, up to one factor per component."""
    adjacency = adjacency_matrix(graph)
    holders = np.flatnonzero(d)
    parts, _ = csgraph.connected_components(adjacency[holders][:, holders])
    labels = component_labels(graph)
    with_data = np.bincount(labels, d) > 0
    if parts > with_data.sum():
        return power_iteration(mixing_matrix(graph, "data", d))
    mass = d * (d + adjacency @ d)
    # In a component without data, the weights are uniform.
    return np.where(with_data[labels], mass, degrees(graph) + 1.0)


def _symmetric(graph: Graph) -> sparse.csr_array:
    """D^(1/2) A D^(-1/2) with D_ii = o_i + sum_j w_ij: symmetric, with the eigenvalues of A."""
    closed = _with_self_loops(graph, "graph")
    scale = sparse.diags_array(1 / np.sqrt(closed.sum(axis=1)))
    return scale @ closed @ scale


def _largest(eigenvalues: Vector) -> float:
    """The eigenvalue of largest absolute value, with its sign; 0 if there is none."""
    return float(eigenvalues[np.abs(eigenvalues).argmax()]) if len(eigenvalues) else 0.0


def _second_by_iteration(graph: Graph) -> float:
    """The second eigenvalue by ARPACK; beyond 5000 nodes, with limited accuracy and effort."""
    if graph.nodes <= MATRIX_NODES:
        return _second_by_arpack(graph, tolerance=0, restarts=None)
    tolerance = 1e-8 * graph.nodes
    while tolerance > NO_GAP:
        second = _second_by_arpack(graph, tolerance, restarts=10 + 2_000_000 // graph.nodes)
        if 1 - abs(second) > 10 * tolerance:
            return second
        tolerance /= 100
    return math.nan


def _second_by_arpack(graph: Graph, tolerance: float, restarts: int | None) -> float:
    start = numpy_stream(0, "eigenvector").standard_normal(graph.nodes)
    options = {"v0": start, "tol": tolerance, "maxiter": restarts, "return_eigenvectors": False}
    if graph.directed:
        return float(np.abs(eigs(mixing_matrix(graph), k=2, which="LM", **options)).min())
    matrix = _symmetric(graph)
    # Deflation: without the known eigenvector of eigenvalue 1, the second becomes the first.
    top = np.sqrt(stationary(graph))
    rest = LinearOperator(
        matrix.shape, matvec=lambda x: matrix @ x - top * (top @ x), dtype=np.float64
    )
    if _is_zero(rest, start):
        return 0.0
    return float(eigsh(rest, k=1, which="LM", **options)[0])


def _is_zero(operator: LinearOperator, start: Vector) -> bool:
    """Whether the operator maps a random vector to zero, up to rounding.

    In a complete graph, nothing but eigenvalue 1 is left, and ARPACK cannot start. A random vector
    has a component of about 1 / sqrt(n) along every eigenvector, so eigenvalues up to about
    n 10^-16 count as zero.
    """
    rounding = math.sqrt(len(start)) * np.finfo(np.float64).eps
    return bool(np.linalg.norm(operator @ start) <= rounding * np.linalg.norm(start))


def _mixing_bound(graph: Graph, second: float, epsilon: float) -> float:
    if not 1 - abs(second) >= NO_GAP:
        return math.nan
    smallest = stationary(graph).min()
    return math.ceil(math.log(1 / (epsilon * smallest)) / (1 - abs(second)))


def _exact_mixing_time(graph: Graph, modes: tuple[Vector, Vector], epsilon: float) -> int:
    """The mixing time by bisection: the distance never grows and is small at the bound."""
    root = np.sqrt(_with_self_loops(graph, "graph").sum(axis=1))
    bound = int(_mixing_bound(graph, _largest(modes[0]), epsilon))
    near = epsilon + ROUNDING
    return bisect_left(range(bound), True, key=lambda t: _distance(modes, root, t) <= near)


def _distance(modes: tuple[Vector, Vector], root: Vector, rounds: int) -> float:
    """max_i ||A^t(i, .) - v||_1 / 2, where A^t - 1 v = D^(-1/2) Q L^t Q' D^(1/2) over the modes."""
    values, vectors = modes
    powers = values**rounds
    large = np.abs(powers) > 1e-20  # few modes are left after many rounds
    q = vectors[:, large]
    difference = (q * powers[large]) @ q.T * root / root[:, None]
    return float(np.abs(difference).sum(axis=1).max() / 2)


def _directed_mixing_time(graph: Graph, epsilon: float) -> MixingTime:
    """Square A until it is close enough, then bisect; the distance never grows."""
    if graph.nodes > EXACT_NODES or not is_strongly_connected(graph):
        return MixingTime(math.nan, False)
    v = stationary(graph)

    def is_far(power: Vector) -> bool:
        return bool(np.abs(power - v).sum(axis=1).max() / 2 > epsilon + ROUNDING)

    power, rounds = np.eye(graph.nodes), 0
    if not is_far(power):
        return MixingTime(0, True)
    squares = [mixing_matrix(graph).toarray()]  # A, A^2, A^4, ...
    while is_far(squares[-1]):
        if 2.0 ** -len(squares) < NO_GAP:
            return MixingTime(math.nan, False)
        squares.append(squares[-1] @ squares[-1])
    for exponent in reversed(range(len(squares))):
        candidate = power @ squares[exponent]
        if is_far(candidate):
            power, rounds = candidate, rounds + 2**exponent
    return MixingTime(rounds + 1, True)
