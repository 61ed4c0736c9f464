"""Models that train together at one node, spread over the workers of a pool."""

import os
from dataclasses import dataclass

import pytest
from support.mutual import BAD, EVERY, SETTINGS, RotatingMutual
from torch import Tensor

from peerage import MutualBatch, run
from peerage.engine import pool
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.pool import PoolTeam
from peerage.engine.prepare import prepare
from peerage.engine.together import SharedRequest, SharedWeights, deal
from peerage.errors import WorkerDied
from peerage.testing import NODES, toy

pytestmark = pytest.mark.own_engine


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", EVERY)
def test_a_pool_has_the_bits_of_serial(name, workers, monkeypatch):
    calls: list[str] = []
    call = PoolTeam.call

    def recorded(team: PoolTeam, method: str, arguments):
        calls.append(method if method != "together" else arguments[0][0])
        return call(team, method, arguments)

    monkeypatch.setattr(pool.PoolTeam, "call", recorded)
    serial = run(toy(EVERY[name], **SETTINGS))
    spread = run(toy(EVERY[name], engine={"name": "pool", "workers": workers}, **SETTINGS))
    assert spread.digest == serial.digest
    rows = [[{**row, "seconds": 0} for row in result.rows] for result in (serial, spread)]
    assert rows[0] == rows[1]
    # Two hubs are trained side by side, unless all their models are in one worker.
    assert "resume_together" in calls
    assert ("step" in calls) == (not EVERY[name].private_loss) or name == "two hubs"


def test_the_record_has_the_loss_of_the_own_model_and_names_who_failed(caplog):
    result = run(toy(RotatingMutual(bad=True), **SETTINGS, evaluation={"at": "end", "every": 1}))
    last = [row for row in result.rows if row["round"] == 1 and row["scope"] == "node"]
    hubs = [row for row in last if row.get("notes")]
    assert [row["notes"] for row in hubs] == [{"diverged": 1.0}]
    assert len(last) == NODES
    assert all(row["train_loss"] > 0 for row in last)
    assert f"the model of sender {BAD} became NaN or infinite" in caplog.text


def test_the_recorded_loss_is_that_of_both_trainings():
    """One node alone at its hub: a round has two epochs, of which both are recorded."""
    world = prepare(toy(RotatingMutual(), **SETTINGS | {"rounds": 1}))
    with Lockstep(world, SerialTeam(world)) as engine:
        engine.round(0, evaluate=True)
        examples = {id: runtime.train_examples for id, runtime in engine.team.shard.members.items()}
    twice = [id for id, count in examples.items() if count == 2 * len(world.parts[id])]
    once = [id for id, count in examples.items() if count == len(world.parts[id])]
    assert (len(twice), len(once)) == (1, NODES - 1)


@dataclass(frozen=True)
class Deadly:
    """A loss that ends the process of a worker."""

    parent: int

    def __call__(self, own: int, logits: Tensor, batch: MutualBatch) -> Tensor:
        if os.getpid() != self.parent:
            os._exit(7)
        return logits.sum()


@dataclass(frozen=True)
class Dying(RotatingMutual):
    async def round(self, node) -> None:
        both = {0: node.weights, 1: node.weights}
        if node.id == 0:
            await node.train_together(self.local, both, Deadly(PARENT))


PARENT = os.getpid()


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run():
    with pytest.raises(WorkerDied, match=r"ended \(7\)"):
        run(toy(Dying(), engine={"name": "pool", "workers": 2}, **SETTINGS))


def test_models_are_dealt_evenly_by_architecture():
    sizes = {"large": 1000, "small": 10}
    names = ["large", "small", "small", "large", "small", "small", "large", "large"]
    models = {key: SharedWeights(None, None, name, sizes[name]) for key, name in enumerate(names)}
    request = SharedRequest(0, 0, 0, None, b"", models, {8: models[0], 9: models[0]})
    for part in deal(request, 2):
        found = [models[key].architecture for key in part if key < 8]
        assert sorted(found) == ["large", "large", "small", "small"]
        assert len(part) == 5  # with a teacher
    assert sorted(key for part in deal(request, 3) for key in part) == list(range(10))
