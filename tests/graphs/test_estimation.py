"""The gain that nodes estimate by gossip: its error, its messages, and what it does not know."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from support.command_line import peerage

from peerage.algorithm import Node
from peerage.engine.prepare import prepare
from peerage.experiment import Experiment
from peerage.graphs.estimation import EstimatedGain
from peerage.graphs.mixing import gain
from peerage.graphs.topology import FromGraph
from peerage.requests import Message, Receive, Send
from peerage.runs.run import run
from peerage.vectors import Layout


def gossip(protocol: EstimatedGain, graph: nx.Graph, seed: int = 0) -> list[dict[str, float]]:
    """The notes of every node after the protocol, run by a slow and obvious engine."""
    near = [tuple(sorted(graph[node])) for node in range(len(graph))]
    nodes = [
        Node(
            id=i,
            num_nodes=-1,  # unknown to all nodes here
            num_examples=1,
            label_proportions=torch.ones(1),
            architecture="m",
            layout=Layout.of([]),
            params=torch.zeros(0),
            buffers=torch.zeros(0),
            seed=seed,
        )
        for i in range(len(graph))
    ]
    boxes: dict[tuple[int, int], list[Message]] = {}
    running: dict[int, Any] = {}
    waiting: dict[int, tuple[int, ...]] = {}

    def drive(i: int, answer: Any) -> None:
        while True:
            try:
                request = running[i].send(answer)
            except StopIteration:
                del running[i]
                return
            if isinstance(request, Receive):
                waiting[i] = request.senders
                return
            assert isinstance(request, Send)
            for peer in request.to:
                boxes.setdefault((peer, i), []).append(request.message)
            answer = None

    for node in nodes:
        node.begin_round(-1, near)
        running[node.id] = protocol.estimate(node)
        drive(node.id, None)
    while running:
        ready = [
            i
            for i in sorted(waiting)
            if all(boxes.get((i, j)) or j not in running for j in waiting[i])
        ]
        for i in ready:
            got = tuple(boxes[i, j].pop(0) for j in waiting.pop(i) if boxes.get((i, j)))
            drive(i, got)
    return [node.notes for node in nodes]


def test_all_nodes_find_the_same_number_of_nodes() -> None:
    found = {
        round(notes["estimated_nodes"], 6) for notes in gossip(EstimatedGain(), nx.cycle_graph(41))
    }
    assert len(found) == 1  # also on a ring, whose far side is 20 steps away


def test_the_error_of_extrema_propagation_is_as_predicted() -> None:
    """The estimate has mean n and a relative deviation of 1 / sqrt(numbers - 2)."""
    numbers, n, runs = 50, 6, 150
    protocol = EstimatedGain(numbers=numbers, walks=1, steps=1)
    graph = nx.star_graph(n - 1)  # any graph gives the same minima, and a star has few messages
    found = np.array([gossip(protocol, graph, seed)[0]["estimated_nodes"] for seed in range(runs)])
    predicted = 1 / np.sqrt(numbers - 2)
    assert found.mean() / n == pytest.approx(1, abs=4 * predicted / np.sqrt(runs))
    assert (found / n).std() == pytest.approx(predicted, rel=4 / np.sqrt(2 * runs))


def test_walks_sample_degrees_evenly() -> None:
    """On a star of 10 leaves a plain walk is at the hub half of the time, ours one time in 11."""
    protocol = EstimatedGain(walks=200, steps=40)
    graph = nx.star_graph(10)
    exact = gain(FromGraph(graph).build(11, 0))
    found = [
        notes["estimated_gain"] * np.sqrt(11 / notes["estimated_nodes"])
        for notes in gossip(protocol, graph)
    ]
    assert np.mean(found) == pytest.approx(exact, rel=0.05)


def test_gains_on_a_graph_with_hubs_are_near_the_exact_one() -> None:
    graph = nx.barabasi_albert_graph(60, 3, seed=1)
    exact = gain(FromGraph(graph).build(60, 0))
    found = [notes["estimated_gain"] for notes in gossip(EstimatedGain(numbers=400), graph)]
    assert np.mean(found) == pytest.approx(exact, rel=0.15)
    assert np.std(found) / exact < 0.15


def settings(**changes: Any) -> Experiment:
    base: dict[str, Any] = {
        "algorithm": "decavg",
        "nodes": 6,
        "topology": "ring",
        "rounds": 2,
        "local": {"epochs": 1},
        "init": {"scheme": "he", "gain": "estimated:numbers=30,walks=5,steps=4"},
        "engine": {"name": "serial"},
    }
    return Experiment(**{**base, **changes})


@pytest.mark.slow
def test_messages_are_counted_before_the_first_round_on_every_engine() -> None:
    serial, pool = run(settings()), run(settings(engine={"name": "pool", "workers": 2}))
    assert serial.digest == pool.digest
    first = next(row for row in serial.rows if row["scope"] == "network")
    assert first["round"] == 0
    # Six nodes send 30 minima to two neighbours, at least steps + 1 times, and their walkers.
    assert first["bytes"] >= 6 * 2 * 30 * 4 * 5
    assert first["bytes_total"] == first["bytes"]
    assert [row["bytes"] for row in serial.rows if row["scope"] == "network"] == [
        row["bytes"] for row in pool.rows if row["scope"] == "network"
    ]


def test_the_estimate_scales_the_initial_weights() -> None:
    result = run(settings(local={"epochs": 1, "lr": 0.0}, algorithm="local"))
    architecture = prepare(settings()).architecture(0)
    notes = [
        row["notes"]["estimated_gain"]
        for row in result.rows
        if row["scope"] == "node" and row["round"] == 0
    ]
    for node, factor in enumerate(notes):
        expected, _ = architecture.initial(0, node, factor)
        assert torch.equal(result.parameters[node], expected)


def test_lost_messages_do_not_stop_the_gossip() -> None:
    result = run(settings(faults={"loss": 0.3, "links": 0.5}))
    assert result.summary["status"] == "finished"


def test_a_lone_node_has_gain_one() -> None:
    result = run(settings(nodes=1, algorithm="local"))
    assert result.summary["bytes_sent"] == 0


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--gain", "estimated:numbers=2"], "numbers must be at least 3, got 2"),
        (["--gain", "estimated:steps=0"], "steps must be at least 1, got 0"),
        (["--gain", "estimated", "--join", "3@4"], "but some join later; use --gain graph"),
    ],
)
def test_bad_estimates_are_rejected(flags: list[str], error: str) -> None:
    ended = peerage("run", *flags)
    assert ended.code == 2
    assert error in ended.err
