"""Faults: what is drawn, what arrives, what is counted, and which nodes are present."""

from itertools import permutations
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from support.command_line import peerage

from peerage.algorithms.decavg import DecAvg
from peerage.engine.prepare import prepare
from peerage.engine.router import MessageRouter, Packet, ShardOutput
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.graphs.faults import Faults, LinkFaults, NoLinkFaults
from peerage.requests import Envelope
from peerage.runs.run import Result, resume, run
from peerage.testing import toy


def quick(**changes: Any) -> Result:
    settings: dict[str, Any] = {
        "algorithm": "decavg",
        "nodes": 6,
        "topology": "complete",
        "rounds": 3,
        "local": {"epochs": 1},
        "engine": {"name": "serial"},
    }
    return run(Experiment(**{**settings, **changes}))


def network(result: Result) -> list[dict[str, Any]]:
    return [row for row in result.rows if row["scope"] == "network"]


def test_without_active_nodes_training_is_local() -> None:
    alone = quick(algorithm="local")
    for faults in ({"links": 0.0}, {"nodes": 0.0}, {"links": 0.0, "directed": True}):
        silent = quick(faults=faults)
        assert silent.digest == alone.digest
        assert [row["bytes"] for row in network(silent)] == [0, 0, 0, 0]


def test_lost_messages_were_sent_and_are_counted() -> None:
    whole, lost = quick(), quick(faults={"loss": 1.0})
    assert lost.digest == quick(algorithm="local").digest
    assert network(lost)[-1]["bytes_total"] == network(whole)[-1]["bytes_total"] > 0


def test_everything_open_changes_nothing() -> None:
    assert quick(faults={"links": 1.0, "loss": 0.0}).digest == quick().digest


def share(faults: Faults, of: str, rounds: int = 60, nodes: int = 12) -> float:
    count = found = 0
    for round in range(rounds):
        link_faults = LinkFaults(faults, 3, round)
        for i in range(nodes):
            for j in range(nodes):
                if i != j:
                    count += 1
                    found += (
                        link_faults.link_up(i, j)
                        if of == "open"
                        else link_faults.message_lost(i, j, 0)
                    )
    return found / count


def test_shares_are_the_probabilities() -> None:
    # 60 x 66 draws for links: the standard error is 0.008.
    assert share(Faults(links=0.3), "open") == pytest.approx(0.3, abs=0.03)
    # A pair talks if both ends are active.
    assert share(Faults(nodes=0.5), "open") == pytest.approx(0.25, abs=0.05)
    assert share(Faults(loss=0.2), "lost") == pytest.approx(0.2, abs=0.03)
    assert share(Faults(links=0.5, nodes=0.5), "open") == pytest.approx(0.125, abs=0.05)


def test_directions_agree_unless_they_are_drawn_apart() -> None:
    pairs = [(i, j) for i in range(20) for j in range(i)]
    both, apart = (
        LinkFaults(Faults(links=0.5), 0, 4),
        LinkFaults(Faults(links=0.5, directed=True), 0, 4),
    )
    assert all(both.link_up(i, j) == both.link_up(j, i) for i, j in pairs)
    differing = sum(apart.link_up(i, j) != apart.link_up(j, i) for i, j in pairs)
    assert 60 < differing < 130  # of 190, half on average


def test_links_change_from_round_to_round_and_with_the_seed() -> None:
    faults = Faults(links=0.5)
    drawn = {
        tuple(LinkFaults(faults, seed, round).link_up(0, j) for j in range(1, 30))
        for seed in (0, 1)
        for round in (0, 1)
    }
    assert len(drawn) == 4


def test_without_faults_every_message_arrives() -> None:
    for link_faults in (
        LinkFaults(Faults(), 3, 2),
        NoLinkFaults(),
        prepare(toy(DecAvg())).link_faults(2),
    ):
        for i, j in permutations(range(5), 2):
            assert link_faults.link_up(i, j)
            assert not any(link_faults.message_lost(i, j, number) for number in range(3))


def test_the_office_leaves_an_empty_place_for_what_is_lost() -> None:
    office = MessageRouter(LinkFaults(Faults(loss=1.0), 0, 0))
    packet = Packet(Envelope(1, 1, 1, "m"), (0,), {}, 10)
    office.accept(ShardOutput([packet], waiting={0: (1,), 1: (0,)}))
    assert office.deliver() == {0: []}  # it goes on although node 1 still waits
    assert office.bytes == 10


def test_the_office_does_not_wait_for_the_absent() -> None:
    office = MessageRouter(LinkFaults(Faults(leave="1@1"), 0, 0), absent=[1])
    office.accept(ShardOutput([Packet(Envelope(0, 1, 1, "m"), (1,), {}, 10)], waiting={0: (1,)}))
    assert office.deliver() == {0: []}
    assert office.bytes == 0


def test_nodes_come_and_go(engine: dict[str, Any]) -> None:
    settings = {"engine": engine, "rounds": 4}
    result = quick(faults={"join": "5@3", "leave": "0@3, 1@4"}, **settings)
    assert [row["nodes"] for row in network(result)] == [5, 5, 5, 5, 4]
    evaluated = [
        sorted(row["node"] for row in result.rows if row["scope"] == "node" and row["round"] == r)
        for r in range(5)
    ]
    assert evaluated == [[0, 1, 2, 3, 4]] * 3 + [[1, 2, 3, 4, 5], [2, 3, 4, 5]]
    model = network(quick())[-1]["bytes"] // 30  # six nodes send to five
    assert [row["bytes"] // model for row in network(result)] == [0, 20, 20, 20, 12]


def test_a_node_that_left_keeps_its_model_and_one_that_joins_gets_the_initial_one() -> None:
    left = quick(faults={"leave": "0@2"}, rounds=3)
    first = quick(rounds=1)
    assert torch.equal(left.parameters[0], first.parameters[0])
    late = quick(faults={"join": "5@3"}, rounds=2)
    start = quick(local={"epochs": 1, "lr": 0.0}, algorithm="local")
    assert torch.equal(late.parameters[5], start.parameters[5])


@pytest.mark.slow
def test_engines_agree_under_all_faults() -> None:
    faults = {"links": 0.6, "nodes": 0.9, "directed": True, "loss": 0.2, "join": "4@2"}
    for algorithm in ("decavg:weights=metropolis", "dechw", "cfa", "decdiff"):
        serial, pool = (
            quick(algorithm=algorithm, faults=faults, engine={"name": name})
            for name in ("serial", "pool")
        )
        assert serial.digest == pool.digest


def test_a_disturbed_run_can_be_resumed(tmp_path: Path) -> None:
    experiment = Experiment(
        algorithm="decavg",
        nodes=5,
        topology="ring",
        rounds=6,
        local={"epochs": 1},
        faults={"links": 0.5, "loss": 0.1, "leave": "2@5"},
        engine={"name": "serial"},
    )
    whole = run(experiment)

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="interrupted"):
        run(experiment, tmp_path / "run", checkpoint_every=1, watch=stop)
    assert resume(tmp_path / "run").digest == whole.digest


def test_faults_survive_a_file() -> None:
    experiment = Experiment(nodes=9, faults={"links": 0.5, "directed": True, "join": "7@10 8@11"})
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    assert "faults" not in Experiment().table()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--link-activity", "1.5"], "links is a probability and must lie in [0, 1], got 1.5"),
        (["--node-activity", "-0.1"], "nodes is a probability and must lie in [0, 1], got -0.1"),
        (["--message-loss", "2"], "loss is a probability and must lie in [0, 1], got 2.0"),
        (["--directed-activity"], "directed requires links below 1; set links as well"),
        (["--join", "7"], "join '7' is not of the form NODE@ROUND, such as 7@10"),
        (["--leave", "3@0"], "leave '3@0' is not of the form NODE@ROUND"),
        (["--leave", "50@3"], "join or leave names the unknown node 50; the ids are 0 to 49"),
        (["--leave", "3@3,3@4"], "leave names node 3 twice"),
        (["--join", "3@5", "--leave", "3@4"], "node 3 leaves in round 4, before it joins in 5"),
        (
            ["--centralised", "--message-loss", "0.1"],
            "pooled means a single node; remove the faults",
        ),
    ],
)
def test_bad_faults_are_rejected(flags: list[str], error: str) -> None:
    ended = peerage("run", *flags)
    assert ended.code == 2
    assert error in ended.err
    assert ended.err.count("\n") == 1


def test_bad_table_is_rejected() -> None:
    with pytest.raises(InputError, match="faults has no option 'lonks'"):
        Experiment(faults={"lonks": 0.5})
    with pytest.raises(InputError, match="faults must be a table"):
        Experiment(faults=0.5)


def test_a_node_without_messages_trains_on() -> None:
    """P4: an inactive node is isolated in that round, and trains nevertheless."""
    result = quick(faults={"nodes": 0.0}, rounds=2, topology=nx.path_graph(6))
    losses = [row["train_loss"] for row in network(result)[1:]]
    assert losses[1] < losses[0]
