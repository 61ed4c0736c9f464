"""Plans of networks: numbers by hand on a star and a ring, and warnings where they belong."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from peerage.algorithm import Algorithm, Cost, Dimensions
from peerage.algorithms import ALGORITHMS
from peerage.algorithms.decavg import DecAvg
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.graphs.graph import Graph, StaticGraph
from peerage.graphs.mixing import describe
from peerage.graphs.topology import Complete, DynamicRegular, ErdosRenyi, Regular, Ring, Star
from peerage.models.mlp import MLP
from peerage.runs.plan import NetworkPlan, Range, page, plan, typical_cost
from peerage.runs.run import Result, run

ONE_WAY = StaticGraph.from_edges(4, [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3), (1, 3)], directed=True)
CIRCLE = StaticGraph.from_edges(3, [(0, 1), (1, 2), (2, 0), (0, 2)], directed=True)
DIMENSIONS = Dimensions.of(MLP().build((1, 8, 8), 10), 3, 10, (1, 8, 8))
PIECES = StaticGraph.from_edges(6, [(0, 1), (1, 2), (0, 2), (3, 4)])


def planned(graph: Graph, **changes: Any) -> NetworkPlan:
    options: dict[str, Any] = {
        "model": "toy",
        "parameters": 1000,
        "layers": 3,
        "algorithm": "dechw",
        "payload": 2.0,
        "rounds": 7,
    }
    return plan("some-graph", graph, **(options | changes))


def test_a_star_by_hand() -> None:
    found = planned(Star().build(11, 0))
    assert (found.nodes, found.edges, found.components) == (11, 10, 1)
    assert found.degree == (1, pytest.approx(20 / 11), 10)
    assert found.excess_degree == pytest.approx((100 + 10) / 20 - 1)
    # Closed degrees: 11 once and 2 ten times.
    assert found.gain == pytest.approx([31 / math.sqrt(161)] * 3)
    assert found.gain_sqrt == pytest.approx(math.sqrt(11))
    # A message is two numbers of 4 bytes per parameter, and crosses 20 directed links.
    assert found.sent == (8_000, pytest.approx(160_000 / 11), 80_000)
    assert found.sent_per_round == pytest.approx(160_000)
    assert found.sent_total == pytest.approx(1_120_000)
    # Model, gradients and momentum, then the messages of all neighbours.
    assert found.memory == (20_000, pytest.approx(12_000 + 160_000 / 11), 92_000)
    assert found.largest_component == 1
    assert found.strongly_connected
    assert not found.directed


def test_a_ring_by_hand() -> None:
    found = planned(Ring().build(10, 0), payload=1.0, optimizer_floats=2)
    second = (1 + 2 * math.cos(math.pi / 5)) / 3
    assert found.spectral_gap == pytest.approx(1 - second)
    assert found.stabilisation == math.ceil(math.log(1000) / -math.log(second)) == 51
    assert found.mixing_time == describe(Ring().build(10, 0)).mixing_time
    assert found.mixing_time_exact
    assert found.gain == pytest.approx([math.sqrt(10)] * 3)
    assert found.sent == (8_000, 8_000, 8_000)
    assert found.memory == Range(16_000 + 8_000, 16_000 + 8_000, 16_000 + 8_000)
    assert planned(Complete().build(9, 0)).stabilisation == 1


def test_links_in_one_direction_are_sent_by_one_side_only() -> None:
    found = planned(CIRCLE)
    assert (found.edges, found.directed, found.strongly_connected) == (4, True, True)
    assert found.degree == (1, pytest.approx(4 / 3), 2)  # node 2 receives from two others
    assert found.sent == (8_000, pytest.approx(8_000 * 4 / 3), 16_000)  # node 0 sends to two
    assert found.gain is not None


def test_pieces_have_gains_of_their_own() -> None:
    found = planned(PIECES)
    assert found.components == 3
    assert found.largest_component == 0.5
    assert found.gain is not None
    assert (found.gain.least, found.gain.most) == (1, pytest.approx(math.sqrt(3)))
    assert (found.mixing_time, found.stabilisation) == (None, None)
    assert "1 to 1.732, by component" in page(found)
    assert "no: 3 components, the largest with 50.0 % of the nodes" in page(found)


def warned(found: NetworkPlan) -> set[str]:
    """Which warnings there are, by a word of each."""
    words = {
        "components": "components, the largest",
        "strongly": "not strongly connected",
        "excess": "mean excess degree",
        "hub": "times the mean",
        "bytes": "sends",
        "mixing": "mixing takes",
    }
    texts = found.warnings
    names = {name for name, part in words.items() if any(part in text for text in texts)}
    assert len(texts) == len(names)
    return names


@pytest.mark.parametrize(
    ("graph", "rounds", "expected"),
    [
        (Regular(k=4).build(20, 0), 100, set()),
        (PIECES, 100, {"components", "excess"}),
        (StaticGraph.from_edges(2, []), 100, {"components"}),
        (Ring().build(10, 0), 100, {"excess"}),
        (Regular(k=3).build(20, 0), 100, set()),  # exactly 2
        (Complete().build(3, 0), 100, set()),  # cannot be denser
        (Ring().build(1, 0), 100, set()),
        (Star().build(20, 0), 100, set()),  # 19 is exactly ten times the mean of 1.9
        (Star().build(21, 0), 100, {"hub"}),
        (Ring().build(100, 0), 100, {"excess", "mixing"}),
        (ONE_WAY, 100, {"strongly", "excess"}),
    ],
)
def test_warnings_appear_exactly_when_they_should(
    graph: Graph, rounds: int, expected: set[str]
) -> None:
    assert warned(planned(graph, rounds=rounds)) == expected


def test_mixing_is_too_slow_from_one_round_on() -> None:
    graph = Regular(k=4).build(60, 0)
    takes = int(describe(graph).mixing_time)
    assert warned(planned(graph, rounds=takes)) == set()
    assert warned(planned(graph, rounds=takes - 1)) == {"mixing"}


@pytest.mark.slow
def test_a_bound_on_mixing_warns_only_if_mixing_is_certainly_slower() -> None:
    graph = Ring().build(2400, 0)
    found = planned(graph, rounds=100)
    assert not found.mixing_time_exact
    assert warned(found) == {"excess", "mixing"}
    assert found.spectral_gap is not None
    certain = (1 / found.spectral_gap - 1) * math.log(2)
    assert found.mixing_time is not None
    assert certain < found.mixing_time
    assert warned(planned(graph, rounds=math.ceil(certain))) == {"excess"}
    assert "at most" in page(found)


def test_a_gigabyte_in_a_round_is_too_much() -> None:
    pair = Complete().build(2, 0)
    assert warned(planned(pair, parameters=250_000_000, payload=1.0)) == set()
    assert warned(planned(pair, parameters=250_000_001, payload=1.0)) == {"bytes"}


def test_the_page_fits_a_terminal_and_names_the_numbers() -> None:
    for graph in (Star().build(30, 0), PIECES, ONE_WAY, CIRCLE, DynamicRegular().build(8, 0)):
        assert max(map(len, page(planned(graph)).splitlines())) <= 80
    text = page(planned(ErdosRenyi(p=0.3).build(1, 0)))
    assert "1, as no node has a neighbour to average with" in text
    text = page(planned(Ring().build(16, 0), rounds=1000, parameters=454_922))
    assert "gain             4 (1 / |v|; sqrt(n) = 4)\n" in text
    assert "layers of them to about 0.016" in text.replace("\n", " ").replace("  ", "")
    assert "toy: 454,922 parameters, 1.82 MB" in text
    assert "dechw: sends 2 numbers per parameter and link" in text
    assert "sent per node    7.28 MB per round" in text
    assert "116 MB per round, 116 GB in 1,000 rounds" in text
    assert page(planned(Regular(k=4).build(20, 0), rounds=99)).endswith("warnings         none")
    assert "numbers are those of round 0" in page(planned(DynamicRegular().build(8, 0)))
    assert "sends no parameters" in page(planned(PIECES, payload=0.0))


def test_plans_fit_into_json() -> None:
    for graph in (Star().build(11, 0), ONE_WAY, PIECES):
        found = planned(graph)
        table = json.loads(json.dumps(found.as_dict(), allow_nan=False))
        assert table["sent"]["most"] == found.sent.most
        assert table["warnings"] == list(found.warnings)
        assert table["sent_total"] == found.sent_total
        assert (table["gain"] is None) == (graph is ONE_WAY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 0}, "parameters must be at least 1, got 0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"payload": -1.0}, "payload must be a number of at least 0, got -1.0"),
        ({"payload": math.nan}, "payload must be a number of at least 0, got nan"),
        ({"optimizer_floats": -1}, "optimizer_floats must be at least 0, got -1"),
    ],
)
def test_impossible_values_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        planned(PIECES, **changes)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("local", 0), ("decavg", 1), ("dechw", 2), ("dechw:theta=1", 1), ("cfa", 1), ("desa", 0)],
)
def test_payloads_are_what_the_algorithms_send(algorithm: str, expected: float) -> None:
    cost = typical_cost(algorithm, DIMENSIONS)
    assert cost is not None
    assert cost.vectors == expected


def test_unknown_algorithms_have_no_payload() -> None:
    with pytest.raises(InputError, match="did you mean 'dechw'"):
        typical_cost("dechv", DIMENSIONS)


def test_algorithms_with_a_hub_are_not_planned_on_graphs() -> None:
    with pytest.raises(InputError, match="choose an algorithm without a hub"):
        typical_cost("fedavg", DIMENSIONS)


def tiny_run(algorithm: str, model: str) -> Result:
    with_hub = ALGORITHMS[algorithm.partition(":")[0]].with_hub
    return run(
        Experiment(
            algorithm=algorithm,
            dataset="digits",
            model=model,
            nodes=3,
            topology="star:centre=last" if with_hub else "complete",
            partition="iid",
            rounds=2,
            local={"steps": 1},
            evaluation={"every": 2, "samples": 1},
            engine={"name": "serial"},
        )
    )


@pytest.mark.parametrize(
    "algorithm",
    [name for name in ALGORITHMS if name not in ("desa", "fednl", "dac")]
    + ["desa:iterations=1", "dechw:theta=1", "dechw:scope=output", "hwa:scope=all", "dac:peers=2"]
    + ["facade:core_weights=curvature"],
)
def test_stated_payloads_are_what_runs_send(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of models of two sizes show what grows with the model; logits do not."""
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    sent, stated = [], []
    for hidden in ("4", "8"):
        result = tiny_run(algorithm, f"mlp:hidden={hidden}")
        dimensions = Dimensions.of(MLP(hidden).build((1, 8, 8), 10), 3, 10, (1, 8, 8))
        chosen = result.experiment.algorithm
        cost = chosen.cost(1, dimensions, 100.0)
        # A client of a hub receives a model, with FedCurv as much as it sends, with IFCA k models.
        more = {"fedcurv": cost.vectors, "ifca": getattr(chosen, "k", 1)}
        received = more.get(algorithm, 1) if chosen.with_hub else cost.vectors
        stated.append(3 * (cost.vectors + received) * dimensions.layout.size)
        rounds = [row for row in result.rows if not row.get("final")]  # costs are those of a round
        sent.append(rounds[-1]["bytes"] / 4)
    assert sent[1] - sent[0] == pytest.approx(stated[1] - stated[0])


class Silent(DecAvg):
    """An algorithm that says nothing about its cost."""

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost | None:
        return Algorithm.cost(self, round, dimensions, examples)


def test_what_an_algorithm_does_not_state_is_unknown_and_not_zero(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Silent().cost(0, DIMENSIONS, 100.0) is None
    found = planned(Star().build(11, 0), payload=None)
    assert (found.sent, found.memory, found.sent_per_round, found.sent_total) == (None,) * 4
    text = page(found)
    assert "dechw: unknown payload; its method `cost`" in text
    for name in ("sent per node", "sent in total", "memory per node"):
        assert f"\n{name:17}unknown" in text
    table = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert table["payload"] is table["sent"] is table["memory"] is table["sent_total"] is None
