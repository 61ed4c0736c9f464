"""Which models are evaluated, how often, and what is recorded about them."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.evaluating import WORK, Clustered, Peaks, Personal, same
from torch import nn

import peerage as pg
from peerage import Algorithm, Node, Weights
from peerage.engine import shard as shard_module
from peerage.engine.evaluated import ScoreCache
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError, PeerageError
from peerage.runs.verify import OF_ENGINE
from peerage.testing import NODES, toy
from peerage.vectors import FlatModel
from peerage.work.evaluation import score


@dataclass(frozen=True)
class Returns(Algorithm[None]):
    """Trains alone, and evaluates what a function returns."""

    choose: Callable[[Node[None]], Any]
    local: pg.LocalSGD = WORK

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)

    def evaluated(self, node: Node[None]) -> Any:
        return self.choose(node)


def rows(result: pg.Result, scope: str = "node") -> list[dict[str, Any]]:
    found = [row for row in result.rows if row["scope"] == scope]
    return [{key: value for key, value in row.items() if key not in OF_ENGINE} for row in found]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def test_a_vector_weights_and_a_mapping_of_one_are_the_same_model():
    forms = [
        lambda node: node.params,
        lambda node: node.weights,
        lambda node: {"one": node.params},
        lambda node: {"one": node.weights},
    ]
    results = [pg.run(toy(Returns(form), model=normed)) for form in forms]
    for result in results[1:]:
        assert rows(result) == rows(results[0])
        assert rows(result, "network") == rows(results[0], "network")
        assert torch.equal(result.evaluated[2], results[0].evaluated[2])
    assert not any("models" in row for row in results[2].rows)


def test_every_model_is_evaluated_with_its_own_buffers_and_recorded_by_name():
    result = pg.run(toy(Peaks(), model=normed, rounds=3))
    world = prepare(result.experiment)
    flat = FlatModel(normed())
    for node in range(NODES):
        last = [row for row in rows(result) if row["node"] == node][-1]
        for name, model in result.models[node].items():
            flat.load(model.params, model.buffers)
            found = vars(score(flat, world.test))
            kept = last if name == "peak" else last["models"]["regular"]
            assert {key: kept[key] for key in found} == found
        assert not same(*result.models[node].values())
    [network] = rows(result, "network")[-1:]
    values = [row["models"]["regular"]["loss"] for row in rows(result)[-NODES:]]
    assert network["models"]["regular"]["loss"] == pytest.approx(sum(values) / NODES)
    assert network["models"]["regular"]["loss_max"] == max(values)
    assert result.summary["models"] == network["models"]


def test_a_model_may_have_another_architecture_than_its_node():
    def meme(node: Node[None]) -> dict[str, Any]:
        small = node.layouts["mlp-1"]
        return {"own": node.params, "meme": Weights(torch.ones(small.size), node.buffers, "mlp-1")}

    result = pg.run(toy(Returns(meme), model=["mlp:hidden=8", "mlp:hidden=2"]))
    sizes = [[x.numel() for x in result.module(node, "meme").parameters()] for node in (0, 1)]
    assert sizes[0] == sizes[1] == [8, 2, 6, 3]
    assert result.module(0)[-1].in_features == 8
    assert {row["models"]["meme"]["accuracy"] for row in rows(result)} == {1 / 3}


@pytest.mark.parametrize(
    ("choose", "reason"),
    [
        (lambda node: {}, "evaluated returned no model for node 0; return at least one"),
        (lambda node: 3, "evaluated returned int as the model of node 0; return parameters, Wei"),
        (lambda node: {"a.b": node.params}, "a model named 'a.b' for node 0; use letters, digits"),
        (
            lambda node: {"a": Weights(node.params, node.buffers, "mpl")},
            "model 'a' of node 0 has the unknown architecture 'mpl'; did you mean 'mlp'?",
        ),
        (
            lambda node: {"a": node.params, "b": node.params[1:]},
            "model 'b' of node 0 has 66 parameters and 0 running statistics; architecture 'mlp' n",
        ),
    ],
    ids=["nothing", "number", "name", "architecture", "size"],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(choose, reason, request):
    with pytest.raises(PeerageError) as caught:
        pg.run(toy(Returns(choose)))
    text = str(caught.value)
    if request.config.getoption("engine") == "ray":  # the first node of any shard is named
        text = re.sub(r"node \d", "node 0", text)
    assert reason in text
    assert "\n" not in text


# Models that did not change


@pytest.mark.own_engine  # counts calls in this process
def test_only_models_that_changed_are_evaluated_again(monkeypatch):
    calls: Counter[int] = Counter()
    real = shard_module.Shard._score

    def counted(shard: Any, node: int, model: Weights) -> Any:
        calls[node] += 1
        return real(shard, node, model)

    with monkeypatch.context() as patched:
        patched.setattr(shard_module.Shard, "_score", counted)
        few = pg.run(toy(Peaks(), rounds=5))
    # At the start, peak and regular have the same values in different tensors. Then regular
    # changes in five rounds and in the final step, and peak in rounds 2 and 4.
    assert calls == Counter(dict.fromkeys(range(NODES), 2 + 5 + 1 + 2))
    monkeypatch.setattr(ScoreCache, "find", lambda *_: None)
    every = pg.run(toy(Peaks(), rounds=5))
    assert rows(few) == rows(every)
    assert rows(few, "network") == rows(every, "network")


def test_a_model_that_was_changed_in_place_is_not_the_same():
    model = Weights(torch.ones(3), torch.empty(0), "mlp")
    cache = ScoreCache()
    assert cache.find("a", model) is None
    cache.keep("a", model, {"loss": 1.0})
    equal = Weights(model.params, model.buffers, "mlp")
    assert cache.find("a", equal) == {"loss": 1.0}
    assert cache.find("b", equal) is None
    assert cache.find("a", Weights(model.params, model.buffers, "other")) is None
    assert cache.find("a", Weights(model.params.clone(), model.buffers, "mlp")) is None
    assert cache.find("a", Weights(model.params, torch.empty(0), "mlp")) is None
    model.params.add_(1)
    assert cache.find("a", equal) is None


def test_the_cache_keeps_no_model_in_memory():
    model = Weights(torch.ones(3), torch.empty(0), "mlp")
    cache = ScoreCache()
    cache.keep("a", model, {"loss": 1.0})
    [(_, tensors), _] = cache.known["a"]
    del model
    assert [seen() for seen, _ in tensors] == [None, None]


# When


def test_the_algorithm_says_when_and_the_experiment_may_say_otherwise():
    settings = {"evaluation": {}, "rounds": 2}
    as_algorithm = pg.run(toy(Peaks(), **settings))
    after = pg.run(toy(Peaks(), **settings | {"evaluation": {"at": "after-aggregation"}}))
    before = pg.run(toy(Peaks(), **settings | {"evaluation": {"at": "after-training"}}))
    assert as_algorithm.experiment.evaluation.at == after.experiment.evaluation.at == "end"
    assert rows(as_algorithm) == rows(after)
    assert before.experiment.evaluation.at == "exchange"
    losses = [[row["models"]["regular"]["loss"] for row in rows(r)] for r in (after, before)]
    assert losses[0][NODES] != losses[1][NODES]  # in round 1
    assert losses[0][-NODES:] == losses[1][-NODES:]  # after the final step, always at its end
    assert pg.Experiment(algorithm="decavg").evaluation.at == "exchange"


def test_a_time_that_is_unknown_is_refused():
    @dataclass(frozen=True)
    class Late(Peaks):
        evaluated_at = "after-all"

    with pytest.raises(InputError, match="evaluated_at of the algorithm must be one of after-trai"):
        pg.Experiment(algorithm=Late())


# Clients with their own models


def test_a_place_of_models_that_is_unknown_is_refused():
    @dataclass(frozen=True)
    class Nowhere(Personal):
        models_at = "client"

    with pytest.raises(InputError, match="models_at of the algorithm must be one of hub, clients"):
        pg.Experiment(algorithm=Nowhere())


def test_clients_may_have_different_architectures():
    models = ["mlp:hidden=8", "mlp:hidden=2"]
    with pytest.raises(InputError, match="requires equal architectures"):
        toy(pg.FedAvg(), model=models)
    assert len(toy(Personal(), model=models).model) == 2


@pytest.mark.parametrize(
    "algorithm", [Personal(), Clustered(), Personal(clients=2)], ids=lambda one: type(one).__name__
)
def test_clients_keep_their_models_and_the_network_is_their_mean(algorithm):
    result = pg.run(toy(algorithm, rounds=3))
    network = rows(result, "network")[-1]
    last = [row for row in rows(result) if row["round"] == 3]
    assert [row["node"] for row in last][:NODES] == list(range(NODES))
    assert (len(last) == NODES + 1) == (algorithm.models_at == "both")
    mean = sum(row["accuracy"] for row in last[:NODES]) / NODES
    assert network["accuracy"] == pytest.approx(mean)
    assert network["nodes"] == NODES
    models = result.parameters
    assert len({params.sum().item() for params in models[:NODES]}) == NODES
    spread = torch.stack(list(models[:NODES]))
    distance = (spread - spread.mean(0)).norm(dim=1).square().mean().sqrt()
    assert network["consensus"] == pytest.approx(distance.item(), rel=1e-4)


def test_the_hub_is_evaluated_in_its_own_row():
    result = pg.run(toy(Personal(), rounds=2))
    hub = [row for row in rows(result) if row["node"] == NODES][-1]
    flat = FlatModel(result.module(NODES))
    assert hub["accuracy"] == score(flat, prepare(result.experiment).test).accuracy
    one = torch.stack(list(result.parameters[:NODES])).mean(0)
    torch.testing.assert_close(result.parameters[NODES], one)


def test_a_client_that_is_not_selected_keeps_its_model():
    world = prepare(toy(Personal(clients=1)))
    with Lockstep(world, SerialTeam(world)) as engine:
        before = [engine.parameters(node) for node in range(NODES)]
        engine.round(0, evaluate=False)
        after = [engine.parameters(node) for node in range(NODES)]
    kept = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
    assert sorted(kept) == [False] + [True] * (NODES - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [Peaks(), Personal(), Clustered()], ids=lambda one: type(one).__name__
)
def test_every_engine_gives_the_same_models_and_rows(algorithm):
    changes: dict[str, Any] = {"rounds": 3, "evaluation": {"validation": 0.25}}
    if not algorithm.with_hub:
        changes["faults"] = {"loss": 0.2}
    serial = pg.run(toy(algorithm, **changes))
    pool = pg.run(toy(algorithm, **changes, engine={"name": "pool", "workers": 2}))
    assert pool.digest == serial.digest
    assert rows(pool) == rows(serial)
    assert rows(pool, "network") == rows(serial, "network")
    for one, other in zip(serial.models, pool.models, strict=True):
        assert all(same(one[name], other[name]) for name in one)
