"""Where to draw the nodes of a large graph, in about linear time.

Distances to a few pivots give the shape of the graph (Brandes, Pich: Eigensolver methods for
progressive multidimensional scaling, 2006). Forces between nodes then spread them out (Fruchterman,
Reingold, 1991); the forces of all nodes on one another are computed on a mesh, as a convolution.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import map_coordinates
from scipy.signal import fftconvolve
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, dijkstra

PIVOTS = 24
MESH = 96  # cells along one side
STEPS = 60
GRAVITY = 0.5  # keeps nodes without links near the others
Places = NDArray[np.float64]  # [n, 2]


def large_layout(count: int, edges: Sequence[Sequence[int]]) -> Places:
    """The places of the nodes from about -1 to 1, the same for equal graphs, [n, 2]."""
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    ends = ends[ends[:, 0] != ends[:, 1]]
    noise = np.random.default_rng(0).normal(size=(count, 2))
    places = _spread(_pivot_places(count, ends) + 0.01 * noise, ends)
    # Forces within a cell of the mesh are not known, so that nodes can lie on one another.
    return _drawn_in(places + 0.2 / np.sqrt(count) * noise)


def _pivot_places(count: int, ends: NDArray[np.int64]) -> Places:
    """The two main directions of the distances to pivots far from each other, [n, 2].

    Components other than the largest are placed around it.
    """
    graph = csr_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(count, count))
    components, labels = connected_components(graph, directed=False)
    inside = labels == np.bincount(labels).argmax()
    angle = 2 * np.pi * labels / components
    places = np.column_stack([np.cos(angle), np.sin(angle)])
    pivot, nearest, columns = int(inside.argmax()), np.full(inside.sum(), np.inf), []
    for _ in range(min(PIVOTS, len(nearest))):
        far = dijkstra(graph, directed=False, indices=pivot, unweighted=True)[inside]
        columns.append(far)
        nearest = np.minimum(nearest, far)
        pivot = int(inside.nonzero()[0][nearest.argmax()])
    squares = np.column_stack(columns) ** 2  # [n, pivots]
    squares -= squares.mean(0, keepdims=True) + squares.mean(1, keepdims=True) - squares.mean()
    _, directions = np.linalg.eigh(squares.T @ squares)
    found = squares @ directions[:, -1:-3:-1]  # one direction only, if there are two nodes
    found = found / np.maximum(2 * found.std(0), 1e-9)
    places[inside] = 0.0
    places[inside, : found.shape[1]] = np.clip(found, -1.0, 1.0)
    return places


def _spread(places: Places, ends: NDArray[np.int64]) -> Places:
    """Move nodes that are linked together and all nodes apart, by less in every step."""
    count = len(places)
    ideal = 2.0 / np.sqrt(count)  # distance of two linked nodes
    kernel = _kernel()
    for step in range(STEPS):
        push = ideal**2 * _mesh_forces(places, kernel)
        between = places[ends[:, 1]] - places[ends[:, 0]]  # [m, 2]
        pull = between * np.linalg.norm(between, axis=1, keepdims=True) / ideal
        force = push - GRAVITY * places
        for axis in range(2):
            force[:, axis] += np.bincount(ends[:, 0], pull[:, axis], count)
            force[:, axis] -= np.bincount(ends[:, 1], pull[:, axis], count)
        size = np.maximum(np.linalg.norm(force, axis=1, keepdims=True), 1e-12)
        heat = 0.1 * (1 - step / STEPS)
        places = places + force / size * np.minimum(size, heat)
        places = places - places.mean(0)
    return _unit(places)


def _drawn_in(places: Places) -> Places:
    """Places with those far outside nearer, so that a few nodes do not make the others small."""
    radius = np.maximum(np.linalg.norm(places, axis=1, keepdims=True), 1e-12)
    return np.where(radius > 1, places / radius * (1 + 0.25 * np.tanh(radius - 1)), places)


def _kernel() -> NDArray[np.float64]:
    """The force x / |x|^2 of a node on the cells around it, in cells, [2, 2 k - 1, 2 k - 1]."""
    offsets = np.arange(1 - MESH, MESH, dtype=np.float64)
    x, y = np.meshgrid(offsets, offsets, indexing="ij")
    square = np.maximum(x**2 + y**2, 1.0)
    return np.stack([x / square, y / square])


def _mesh_forces(places: Places, kernel: NDArray[np.float64]) -> Places:
    """The sum of x / |x|^2 over all other nodes, approximated on a mesh, [n, 2]."""
    low, high = places.min(0), places.max(0)
    cell = max(float((high - low).max()), 1e-9) / (MESH - 3)
    at = (places - low) / cell + 1.0  # in cells
    mass = np.zeros((MESH, MESH))
    base = np.floor(at).astype(np.int64)
    share = at - base
    for dx in (0, 1):
        for dy in (0, 1):
            weight = np.abs(1 - dx - share[:, 0]) * np.abs(1 - dy - share[:, 1])
            np.add.at(mass, (base[:, 0] + dx, base[:, 1] + dy), weight)
    fields: Any = [fftconvolve(mass, part, mode="same") for part in kernel]
    found = [map_coordinates(field, at.T, order=1) for field in fields]
    return np.column_stack(found) / cell


def _unit(places: Places) -> Places:
    """Centred, with most of the nodes between -1 and 1."""
    places = places - places.mean(0)
    scale = np.quantile(np.abs(places), 0.98)
    return np.asarray(places / max(float(scale), 1e-12))
