"""Features of the contract that meet in one run: final step, clusters, named models, swaps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch

import peerage as pg
from peerage import DecAvg, Experiment, FedAvg, Node
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.experiment.until import read_until
from peerage.report.groups import lines
from peerage.runs.saved import open_run
from peerage.testing import NODES, Parts, mirrored, toy, unequal_parts


@dataclass(frozen=True)
class Spoiling(DecAvg):
    """A final step that makes models worse."""

    async def final(self, node: Node[None]) -> None:
        node.params = node.params * 0


def test_groups_after_a_final_step_are_listed_once_with_their_best_value(tmp_path):
    experiment = toy(Spoiling(), clusters=pg.Clusters((3, 2), mirrored))
    result = pg.run(experiment, tmp_path / "run")
    record = pg.RunRecord.load(tmp_path / "run")
    assert [line[0] for line in lines(record)] == ["cluster 0", "cluster 1"]
    for cluster, line in enumerate(lines(record)):
        known = [row for row in record.groups if row["group"] == cluster]
        best = max(row["accuracy"] for row in known)
        assert best > known[-1]["accuracy"]
        assert line[4].startswith(f"{100 * best:.1f} %")
    assert [group["accuracy"] for group in result.summary["groups"]] == [
        row["accuracy"] for row in record.groups[-2:]
    ]
    assert pg.verify(tmp_path / "run", experiment=experiment).same


def test_the_test_set_of_a_cluster_without_training_examples_is_shifted():
    first, *rest = unequal_parts()
    parts = Parts((first + rest[-1], *rest[:-1], ()))
    world = prepare(toy(DecAvg(), partition=parts, clusters=pg.Clusters((4, 1), mirrored)))
    assert not torch.equal(world.tests[0].x, world.tests[1].x)


@dataclass(frozen=True)
class Sometimes(DecAvg):
    """Notes a number in every second round only."""

    async def round(self, node: Node[None]) -> None:
        await super().round(node)
        if node.round % 2 == 0:
            node.note(alpha=node.round / 10)

    def evaluated(self, node: Node[None]) -> Mapping[str, torch.Tensor]:
        return {"whole": node.params, "half": node.params / 2}


def test_a_stop_condition_may_name_a_number_of_some_rounds():
    assert pg.run(toy(Sometimes(), rounds=4, until="alpha>=0.15")).summary["rounds"] == 3


def test_a_stop_condition_may_name_a_metric_of_a_group():
    experiment = toy(DecAvg(), rounds=6, clusters=pg.Clusters((3, 2), mirrored))
    rows = [row for row in pg.run(experiment).rows if row["scope"] == "group" and row["group"] == 1]
    target = rows[3]["accuracy"]
    first = next(row["round"] for row in rows[1:] if row["accuracy"] >= target)
    for until in (f"cluster.1.accuracy={target!r}", f"cluster.1.accuracy>={target!r}"):
        stopped = pg.run(experiment.model_copy(update={"until": read_until(until)}))
        assert stopped.summary["rounds"] == first


@pytest.mark.parametrize(
    "name", ["models.other.accuracy>=0.01", "beta>=1", "cluster.5.accuracy>=0.1"]
)
def test_a_stop_condition_that_nothing_records_is_an_error(name):
    with pytest.raises(InputError, match="that no round up to 1 has recorded"):
        pg.run(toy(Sometimes(), rounds=4, clusters=pg.Clusters((3, 2)), until=name))


class Fresh(Mapping[int, Mapping[str, torch.Tensor]]):
    """Payloads that are made when they are read."""

    def __init__(self, node: Node[None]) -> None:
        self.node = node

    def __getitem__(self, recipient: int) -> Mapping[str, torch.Tensor]:
        return {"x": torch.full_like(self.node.params, recipient)}

    def __iter__(self) -> Iterator[int]:
        return (j for j in range(self.node.num_nodes) if j != self.node.id)

    def __len__(self) -> int:
        return self.node.num_nodes - 1


@dataclass(frozen=True)
class Individual(DecAvg):
    async def round(self, node: Node[None]) -> None:
        inbox = await node.swap(Fresh(node))
        node.note(own=all(bool((x == node.id).all()) for x in inbox["x"]), received=len(inbox))


def test_every_recipient_of_a_swap_gets_its_own_payload():
    rows = pg.run(toy(Individual(), rounds=1)).rows
    notes = [row["notes"] for row in rows if row["scope"] == "node" and row["round"] == 1]
    assert notes == [{"own": 1.0, "received": NODES - 1.0}] * NODES


@dataclass(frozen=True)
class Twice(DecAvg):
    async def round(self, node: Node[None]) -> None:
        following = [(node.id + step) % node.num_nodes for step in (1, 2)]
        await node.swap({j: {"x": node.params, "b": node.buffers} for j in following})


def test_equal_payloads_of_a_swap_are_released_once():
    result = pg.run(toy(Twice(), noise={"sigma": 0.1, "clip": 1.0}))
    assert result.summary["privacy"]["messages"] == [3] * NODES


@dataclass(frozen=True)
class Talking(FedAvg):
    """Clients also swap with each other."""

    async def answer(self, node: Node[None], hub_message: Mapping[str, Any]) -> dict[str, Any]:
        await node.swap({(node.id + 1) % (node.num_nodes - 1): {"x": node.params}})
        return await super().answer(node, hub_message)


def test_clients_swap_without_the_hub():
    assert pg.run(toy(Talking())).digest == pg.run(toy(FedAvg())).digest


@dataclass(frozen=True)
class BothKeep(FedAvg):
    """A hub with one model, and clients with two, of which the first is bad."""

    models_at: ClassVar[Literal["hub", "clients", "both"]] = "both"

    def evaluated(self, node: Node[None]) -> Mapping[str, torch.Tensor]:
        personal = {} if node.id == node.hub else {"personal": node.params * 0}
        return {**personal, "common": node.params}


def test_the_best_model_of_a_name_is_of_a_node_that_has_it(tmp_path):
    experiment = toy(BothKeep())
    pg.run(experiment, tmp_path / "run")
    found = open_run(tmp_path / "run", experiment=experiment)
    assert found.choose("best", "personal").facts["node"] < NODES
    assert found.choose("best").facts["node"] == NODES


@dataclass(frozen=True)
class Looking(DecAvg):
    """Reads acknowledgements when it is evaluated, and the graph in its final step."""

    acknowledge: ClassVar[bool] = True

    async def final(self, node: Node[None]) -> None:
        node.note(same=node.graph_at(node.round) == node.graph)

    def evaluated(self, node: Node[None]) -> torch.Tensor:
        return node.params + len(node.reached)


@pytest.mark.parametrize("stop", [None, 1])
def test_a_final_step_knows_its_graph_and_evaluation_who_was_reached(stop):
    result = pg.run(
        toy(Looking(), topology="dynamic-regular:k=2"),
        watch=lambda row: pg.STOP if row["round"] == stop else None,
    )
    final = [row for row in result.rows if row["scope"] == "node" and row.get("final")]
    assert [row["notes"]["same"] for row in final] == [1.0] * NODES


def test_the_spread_of_a_network_with_a_hub_is_recorded():
    result = pg.run(toy(FedAvg(), evaluation={"at": "end", "spread": True}))
    assert "layers" in result.rows[-1]


def test_other_sizes_of_clusters_keep_a_shift_without_options(tmp_path: Path):
    first = Experiment(nodes=8, clusters={"sizes": [6, 2], "shift": "rotate"})
    table = first.to_toml()
    again = Experiment.from_toml(table, clusters={"sizes": [3, 3, 2]})
    assert again.clusters is not None
    assert again.clusters.describe(1) == "cluster 1 (120°)"
    assert Experiment.from_toml(table).to_toml() == table
