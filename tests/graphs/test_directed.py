"""Training on directed and weighted graphs: receivers of messages, weights and gains."""

from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.command_line import peerage

from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.graphs.mixing import mixing_matrix
from peerage.runs.run import Result, run


def still(graph: nx.Graph, **changes: Any) -> Result:
    """A run that averages and never learns."""
    settings: dict[str, Any] = {
        "algorithm": "decavg:weights=graph",
        "nodes": len(graph),
        "topology": graph,
        "partition": "iid",
        "rounds": 3,
        "local": {"epochs": 1, "lr": 0.0},
        "engine": {"name": "serial"},
    }
    return run(Experiment(**{**settings, **changes}))


def stacked(result: Result) -> NDArray[np.float64]:
    return torch.stack(list(result.parameters)).double().numpy()


def averaged(graph: nx.Graph) -> NDArray[np.float64]:
    """A^3 X0 with the mixing matrix of the graph."""
    experiment = Experiment(nodes=len(graph), topology=graph)
    matrix = mixing_matrix(prepare(experiment).graph).toarray()
    start = stacked(still(graph, algorithm="local"))
    return np.linalg.matrix_power(matrix, 3) @ start


def one_way() -> nx.DiGraph:
    return nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)])


def weighted() -> nx.Graph:
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.5), (1, 2, 2.0), (2, 3, 1.0), (0, 3, 4.0)])
    return graph


@pytest.mark.parametrize("graph", [one_way(), weighted(), nx.path_graph(4)])
def test_averaging_is_the_mixing_matrix(graph: nx.Graph, engine: dict[str, Any]) -> None:
    found = stacked(still(graph, engine=engine))
    np.testing.assert_allclose(found, averaged(graph), rtol=1e-4, atol=1e-6)


def test_messages_go_one_way() -> None:
    result = still(one_way())
    model = result.parameters[0].numel() * 4
    sent = [row["bytes"] for row in result.rows if row["scope"] == "network"]
    assert sent == [0, 5 * model, 5 * model, 5 * model]


@pytest.mark.parametrize("algorithm", ["decavg", "dechw", "cfa", "decdiff", "decdiff-vt"])
def test_every_algorithm_runs_on_a_directed_graph(algorithm: str) -> None:
    result = still(one_way(), algorithm=algorithm, local={"epochs": 1})
    assert result.summary["status"] == "finished"


@pytest.mark.parametrize("weights", ["data", "uniform", "graph"])
def test_weights_that_need_no_direction(weights: str) -> None:
    assert still(one_way(), algorithm=f"decavg:weights={weights}").summary["status"] == "finished"


def test_metropolis_weights_are_rejected_on_a_directed_graph(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="weights=metropolis requires an undirected graph, but"):
        still(one_way(), algorithm="decavg:weights=metropolis")
    edges = tmp_path / "edges.txt"
    edges.write_text("0 1\n1 2\n2 0\n")
    ended = peerage(
        "run --nodes 3 --rounds 1 --epochs 1 --algorithm decavg:weights=metropolis",
        "--topology",
        f"edge-list:path={edges},directed=true",
        "--out",
        tmp_path / "run",
    )
    assert (ended.code, "use weights=uniform, data or graph" in ended.err) == (2, True)
    assert not (tmp_path / "run").exists()
    assert still(weighted(), algorithm="decavg:weights=metropolis").summary["rounds"] == 3


@pytest.mark.slow
def test_the_gain_keeps_the_size_of_weights() -> None:
    """After many rounds of averaging, weights have the deviation that one model began with."""
    graph = nx.gnp_random_graph(12, 0.4, seed=3, directed=True)
    assert nx.is_strongly_connected(graph)
    start = still(graph, init={"scheme": "he"}, algorithm="local")
    ended = still(graph, init={"scheme": "he", "gain": "graph"}, rounds=25)
    before = np.mean([start.state_dict(i)["hidden1.weight"].std().item() for i in range(12)])
    after = np.mean([ended.state_dict(i)["hidden1.weight"].std().item() for i in range(12)])
    assert after == pytest.approx(before, rel=0.05)  # 4096 weights: a few percent


@pytest.mark.parametrize(
    ("lines", "options", "error"),
    [
        ("0 1\n1 2\n", "directed=true", "strongly connected"),
        ("0 1 0.5\n1 2 -1\n", "weighted=true", "line 2"),
    ],
)
def test_bad_graphs_are_rejected(tmp_path: Path, lines: str, options: str, error: str) -> None:
    (tmp_path / "edges.txt").write_text(lines)
    spec = f"edge-list:path={tmp_path / 'edges.txt'},{options}"
    ended = peerage("run --nodes 3 --rounds 1 --gain graph --topology", spec)
    assert ended.code == 2
    assert error in ended.err
    assert ended.err.count("\n") == 1
