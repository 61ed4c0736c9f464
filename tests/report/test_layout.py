"""Places of the nodes of large graphs: near where they are linked, apart where they are not."""

import networkx as nx
import numpy as np
import pytest

from peerage.report.figures import LARGE, positions
from peerage.report.layout import _kernel, _mesh_forces, large_layout

GRAPHS = {
    "random": nx.gnm_random_graph(1500, 3000, seed=0),  # with nodes that have no links
    "ring": nx.cycle_graph(1000),
    "grid": nx.convert_node_labels_to_integers(nx.grid_2d_graph(30, 30)),
    "star": nx.star_graph(999),
    "two parts": nx.disjoint_union(nx.cycle_graph(400), nx.path_graph(300)),
    "no links": nx.empty_graph(600),
    "complete": nx.complete_graph(120),
    "two nodes": nx.path_graph(2),
    "one node": nx.empty_graph(1),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_places_are_finite_distinct_and_repeatable(name: str) -> None:
    graph = GRAPHS[name]
    places = large_layout(len(graph), list(graph.edges))
    assert places.shape == (len(graph), 2)
    assert np.isfinite(places).all()
    assert np.abs(places).max() <= 1.26
    assert len(np.unique(places.round(6), axis=0)) == len(graph)
    assert (places == large_layout(len(graph), list(graph.edges))).all()


@pytest.mark.parametrize("name", ["ring", "grid", "star", "two parts"])
def test_linked_nodes_are_nearer_than_others(name: str) -> None:
    graph = GRAPHS[name]
    places = large_layout(len(graph), list(graph.edges))
    ends = np.array(graph.edges)
    linked = np.linalg.norm(places[ends[:, 0]] - places[ends[:, 1]], axis=1).mean()
    pairs = np.random.default_rng(1).integers(len(graph), size=(2000, 2))
    others = np.linalg.norm(places[pairs[:, 0]] - places[pairs[:, 1]], axis=1).mean()
    assert linked < (0.8 if name == "star" else 0.2) * others


def test_forces_on_the_mesh_are_near_the_sum_over_all_pairs() -> None:
    places = np.random.default_rng(0).uniform(-1, 1, size=(400, 2))
    between = places[:, None] - places[None]  # [n, n, 2]
    square = np.maximum((between**2).sum(-1, keepdims=True), 1e-12)
    wanted = (between / square).sum(1)
    found = _mesh_forces(places, _kernel())
    apart = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    assert np.median(apart) < 0.1  # neighbours in the same cell are what it leaves out


def test_figures_use_it_for_many_nodes() -> None:
    count = LARGE + 1
    edges = list(nx.cycle_graph(count).edges)
    found = positions(count, edges)
    assert [tuple(found[node]) for node in range(count)] == [
        tuple(place) for place in large_layout(count, edges)
    ]
