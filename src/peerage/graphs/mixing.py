"""How averaging spreads over a graph: mixing matrices, gain, spectrum, mixing time.

Every quantity is that of the graph of round 0. A self-loop belongs to every node, as a node always
averages its own model too; its weight o_i is 1 unless the graph says otherwise. k_i is the degree
without it, in a directed graph the number of those whom node i hears. What cannot be known is "not
a number", which becomes null in JSON.
"""

import math
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
    is_connected,
    is_strongly_connected,
    require_connected,
    self_weights,
    strong_labels,
)
from peerage.randomness import numpy_stream

Weights = Literal["graph", "uniform", "data", "metropolis"]
Vector = NDArray[np.float64]

DENSE_NODES = 1000  # up to here all eigenvalues at once are quicker than one by iteration
EXACT_NODES = 2000  # up to here all eigenvectors fit easily, and so do all distances
MATRIX_NODES = 5000  # beyond, nothing of size [n, n] is made
ROUNDING = 1e-12  # a distance that equals its threshold must not miss it by rounding
NO_GAP = 1e-13  # what is nearer to 1 than this drowns in rounding: own weights beyond all others
LISTED_COMPONENTS = 1000  # whose gains a report names one by one


def mixing_matrix(
    graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None
) -> sparse.csr_array:
    """The row-stochastic A of one averaging step: x_i becomes sum_j A_ij x_j.

    graph:      A_ij = w_ij / (o_i + sum_j w_ij), A_ii = o_i / ..., with the weights of the graph
    uniform:    A_ij = 1 / (k_i + 1) on the closed neighbourhood; the same if all weights are 1
    data:       A_ij = d_j / sum of d over the closed neighbourhood; uniform if that sum is 0
    metropolis: A_ij = 1 / (1 + max(k_i, k_j)), A_ii the rest; symmetric, so doubly stochastic
    """
    _check_weights(graph, weights)
    if weights == "metropolis":
        return _metropolis(graph)
    a = _closed(graph, weights)
    if weights == "data":
        d = _checked_examples(graph, examples)
        a = a @ sparse.diags_array(d) + sparse.diags_array(1.0 * (a @ d == 0)) @ a
        a.eliminate_zeros()
    return (sparse.diags_array(1 / a.sum(axis=1)) @ a).tocsr()


def stationary(
    graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None
) -> Vector:
    """The share v_i of node i's model in the consensus, v = v A; it sums to 1 in every component.

    graph: v_i ~ o_i + sum_j w_ij; uniform: v_i ~ k_i + 1; metropolis: v_i ~ 1; data: v_i ~ d_i s_i
    with s_i the sum of d over the closed neighbourhood. The last holds if the nodes with data are
    connected among themselves; otherwise the consensus depends on the start, and v is the limit of
    the mean over all nodes. Directed graphs have no closed form: v comes from A itself.
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
        mass = _closed(graph, weights).sum(axis=1)
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


def gains(graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None) -> Vector:
    """The initialisation gain 1 / ||v||_2 of every node, v being that of its component (P4).

    Without weights and directions: sum(k + 1) / sqrt(sum((k + 1)^2)), at most sqrt(n), which
    regular graphs reach.
    """
    labels = component_labels(graph)
    squares = np.bincount(labels, stationary(graph, weights, examples) ** 2)
    each: Vector = 1 / np.sqrt(squares[labels])
    return each


def gain(graph: Graph, weights: Weights = "graph", examples: ArrayLike | None = None) -> float:
    """The one gain of a connected graph."""
    require_connected(graph, "has one gain per component; ask for gains")
    return float(gains(graph, weights, examples)[0])


def degree_gain(degrees: ArrayLike, nodes: float) -> float:
    """The gain of a graph with so many nodes, from the degrees of a sample of them.

    sqrt(n) mean(k + 1) / sqrt(mean((k + 1)^2)); exact if the sample is all of a connected graph.
    """
    closed = np.asarray(degrees, dtype=np.float64) + 1
    if not closed.size:
        raise InputError("the gain needs the degree of at least one node, got none")
    return float(math.sqrt(nodes) * closed.mean() / math.sqrt((closed**2).mean()))


def mean_excess_degree(graph: Graph) -> float:
    """The mean excess degree <k^2> / <k> - 1: how many further links lie behind a link.

    Near 1 and below a random graph falls into small pieces (P4 Section 5); 0 without any link.
    """
    k = degrees(graph).astype(np.float64)
    return float((k**2).sum() / k.sum() - 1) if k.any() else 0.0


def second_eigenvalue(graph: Graph) -> float:
    """The eigenvalue of the mixing matrix of the graph that is second in absolute value.

    That value itself if the graph is directed, as eigenvalues may be complex then. Beyond 5000
    nodes, where eigenvalues crowd, to within n 10^-8 and a tenth of the gap to 1, or not a number
    if that takes too long.
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
            # Often a long thin graph, whose eigenvalues crowd at 1: all of them at once then.
    if graph.directed:
        return float(np.sort(np.abs(np.linalg.eigvals(mixing_matrix(graph).toarray())))[-2])
    return _largest(np.linalg.eigvalsh(_symmetric(graph).toarray())[:-1])


def spectral_gap(graph: Graph) -> float:
    """1 - |lambda_2| of the mixing matrix: 0 if disconnected, 1 if complete."""
    return 1 - abs(second_eigenvalue(graph))


class MixingTime(NamedTuple):
    rounds: float  # infinite if the graph is not connected, not a number if nobody knows
    exact: bool  # otherwise an upper bound from the spectral gap


def mixing_time(graph: Graph, epsilon: float = 0.25) -> MixingTime:
    """Rounds of averaging until every model is nearly the consensus.

    min{t : max_i ||A^t(i, .) - v||_1 / 2 <= epsilon}; above 2000 nodes the upper bound
    ln(1 / (epsilon min v)) / (1 - |lambda_2|), which directed graphs do not have.
    """
    if not 0 < epsilon < 1:
        raise InputError(f"epsilon must lie strictly between 0 and 1, got {epsilon}")
    if is_connected(graph):
        _require_strongly_connected(graph)
    return _speed(graph, epsilon)[1]


@dataclass(frozen=True)
class GraphReport:
    """What is worth knowing about a graph before training; of a dynamic one, about its round 0."""

    nodes: int
    edges: int
    dynamic: bool
    directed: bool
    weighted: bool
    connected: bool  # directions aside
    strongly_connected: bool  # everyone hears of everyone
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
    gain: float | None  # of a connected graph; not a number if not strongly connected
    component_gains: tuple[float, ...]  # in the order of `components`
    diameter: int | None  # of a strongly connected graph with at most 2000 nodes

    def as_dict(self) -> dict[str, Any]:
        """The same for JSON: text keys, lists, null for the unknown and the infinite.

        Of many components only the first 1000 gains are listed.
        """
        table = asdict(self)
        table["degree_histogram"] = {str(k): count for k, count in self.degree_histogram.items()}
        table["component_gains"] = list(map(_finite, self.component_gains[:LISTED_COMPONENTS]))
        return {key: _finite(value) for key, value in table.items()}


def describe(graph: Graph) -> GraphReport:
    k = degrees(graph)
    histogram = np.unique(k, return_counts=True)
    count = int(component_labels(graph).max()) + 1
    each = _component_gains(graph)
    connected, strong = count == 1, is_strongly_connected(graph)
    gap, mixing = _speed(graph, epsilon=0.25)
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
        gain=float(each[0]) if connected else None,
        component_gains=tuple(each.tolist()),
        diameter=diameter(graph) if strong and graph.nodes <= EXACT_NODES else None,
    )


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _component_gains(graph: Graph) -> Vector:
    """One per component; not a number for all if one of them is not strongly connected."""
    first = np.unique(component_labels(graph), return_index=True)[1]
    if _one_way(graph) is not None:
        return np.full(len(first), math.nan)
    return gains(graph)[first]


def _speed(graph: Graph, epsilon: float) -> tuple[float, MixingTime]:
    """Spectral gap and mixing time from one look at the spectrum."""
    if not is_connected(graph):
        return 0.0, MixingTime(math.inf, True)
    if graph.directed:
        return spectral_gap(graph), _directed_mixing_time(graph, epsilon)
    if graph.nodes > EXACT_NODES:
        second = second_eigenvalue(graph)
        return 1 - abs(second), MixingTime(_mixing_bound(graph, second, epsilon), False)
    modes = _modes(graph)
    gap = 1 - abs(_largest(modes[0]))
    if gap < NO_GAP:
        return math.nan, MixingTime(math.nan, False)
    return gap, MixingTime(_exact_mixing_time(graph, modes, epsilon), True)


def _closed(graph: Graph, weights: Weights) -> sparse.csr_array:
    """Links and self-loops, with the weights of the graph or all 1."""
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


def _one_way(graph: Graph) -> int | None:
    """The first node in a component that is not strongly connected, if there is one."""
    labels, strong = component_labels(graph), strong_labels(graph)
    if labels.max() == strong.max():
        return None
    parts = np.bincount(labels[np.unique(strong, return_index=True)[1]])
    return int(np.flatnonzero(parts[labels] > 1)[0])


def _require_strongly_connected(graph: Graph) -> None:
    node = _one_way(graph)
    if node is not None:
        raise InputError(
            f"the component of node {node} is not strongly connected, so that not everyone has a "
            "share in the consensus; add links, or make the graph undirected"
        )


def _left_eigenvector(graph: Graph, weights: Weights, examples: ArrayLike | None) -> Vector:
    """v = v A up to one factor per component.

    With y_i = v_i / (o_i + sum_j w_ij), y_j sum_i w_ji = sum_i y_i w_ij: own weights drop out.
    """
    if graph.nodes > EXACT_NODES or weights == "data":
        return power_iteration(mixing_matrix(graph, weights, examples))
    w = (graph.links(0) if weights == "graph" else adjacency_matrix(graph)).toarray()
    out = np.diag(w.sum(axis=1)) - w.T
    # With the first node of every component at 1 the equations have one solution.
    first = np.unique(component_labels(graph), return_index=True)[1]
    rest = np.delete(np.arange(graph.nodes), first)
    y = np.ones(graph.nodes)
    y[rest] = np.linalg.solve(out[np.ix_(rest, rest)], -out[np.ix_(rest, first)].sum(axis=1))
    mass: Vector = y * _closed(graph, weights).sum(axis=1)
    return mass


def _check_weights(graph: Graph, weights: str) -> None:
    check_choice("weights", weights, get_args(Weights))
    if weights == "metropolis" and graph.directed:
        raise InputError(
            "metropolis weights need an undirected graph; use graph or uniform weights"
        )


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
    return np.where(with_data[labels], mass, degrees(graph) + 1.0)


def _symmetric(graph: Graph) -> sparse.csr_array:
    """D^(1/2) A D^(-1/2) with D_ii = o_i + sum_j w_ij: the eigenvalues of A, but symmetric."""
    closed = _closed(graph, "graph")
    scale = sparse.diags_array(1 / np.sqrt(closed.sum(axis=1)))
    return scale @ closed @ scale


def _largest(eigenvalues: Vector) -> float:
    """The one of largest absolute value, with its sign; 0 if there is none."""
    return float(eigenvalues[np.abs(eigenvalues).argmax()]) if len(eigenvalues) else 0.0


def _second_by_iteration(graph: Graph) -> float:
    """Beyond 5000 nodes only so far that the gap to 1 is known, and with a bound on the effort."""
    if graph.nodes <= MATRIX_NODES:
        return _iterated(graph, tolerance=0, restarts=None)
    tolerance = 1e-8 * graph.nodes
    while tolerance > NO_GAP:
        second = _iterated(graph, tolerance, restarts=10 + 2_000_000 // graph.nodes)
        if 1 - abs(second) > 10 * tolerance:
            return second
        tolerance /= 100
    return math.nan


def _iterated(graph: Graph, tolerance: float, restarts: int | None) -> float:
    start = numpy_stream(0, "eigenvector").standard_normal(graph.nodes)
    options = {"v0": start, "tol": tolerance, "maxiter": restarts, "return_eigenvectors": False}
    if graph.directed:
        return float(np.abs(eigs(mixing_matrix(graph), k=2, which="LM", **options)).min())
    matrix = _symmetric(graph)
    # The eigenvector of eigenvalue 1 is known; without it the second becomes the first.
    top = np.sqrt(stationary(graph))
    rest = LinearOperator(
        matrix.shape, matvec=lambda x: matrix @ x - top * (top @ x), dtype=np.float64
    )
    if _is_zero(rest, start):
        return 0.0
    return float(eigsh(rest, k=1, which="LM", **options)[0])


def _is_zero(operator: LinearOperator, start: Vector) -> bool:
    """Whether only rounding is left of a vector: of all others then too, nearly surely.

    Nothing but eigenvalue 1 is there if everybody is linked to everybody, and ARPACK cannot begin.
    A random vector has a share of about 1 / sqrt(n) of every eigenvector, so what is taken for zero
    is an eigenvalue of some n 10^-16.
    """
    rounding = math.sqrt(len(start)) * np.finfo(np.float64).eps
    return bool(np.linalg.norm(operator @ start) <= rounding * np.linalg.norm(start))


def _modes(graph: Graph) -> tuple[Vector, Vector]:
    """Eigenvalues [n-1] and eigenvectors [n, n-1] of the symmetric matrix, without eigenvalue 1."""
    values, vectors = np.linalg.eigh(_symmetric(graph).toarray())
    return values[:-1], vectors[:, :-1]


def _mixing_bound(graph: Graph, second: float, epsilon: float) -> float:
    if not 1 - abs(second) >= NO_GAP:
        return math.nan
    smallest = stationary(graph).min()
    return math.ceil(math.log(1 / (epsilon * smallest)) / (1 - abs(second)))


def _exact_mixing_time(graph: Graph, modes: tuple[Vector, Vector], epsilon: float) -> int:
    """Bisection: the distance never grows, and at the spectral bound it is small enough."""
    root = np.sqrt(_closed(graph, "graph").sum(axis=1))
    too_few, enough = -1, int(_mixing_bound(graph, _largest(modes[0]), epsilon))
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


def _directed_mixing_time(graph: Graph, epsilon: float) -> MixingTime:
    """Squares A until it is near enough, then goes back by halves; the distance never grows."""
    if graph.nodes > EXACT_NODES or not is_strongly_connected(graph):
        return MixingTime(math.nan, False)
    v = stationary(graph)

    def far(power: Vector) -> bool:
        return bool(np.abs(power - v).sum(axis=1).max() / 2 > epsilon + ROUNDING)

    reached, rounds = np.eye(graph.nodes), 0
    if not far(reached):
        return MixingTime(0, True)
    squares = [mixing_matrix(graph).toarray()]  # A, A^2, A^4, ...
    while far(squares[-1]):
        if 2.0 ** -len(squares) < NO_GAP:
            return MixingTime(math.nan, False)
        squares.append(squares[-1] @ squares[-1])
    for exponent in reversed(range(len(squares))):
        further = reached @ squares[exponent]
        if far(further):
            reached, rounds = further, rounds + 2**exponent
    return MixingTime(rounds + 1, True)
