"""IFCA by numbers: what a client chooses and returns, and what the hub makes of it."""

from typing import Any

import pytest
import torch
from support.networking import run_peers
from torch import Tensor

import peerage as pg
from peerage import IFCA, FedAvg, Layout, LocalSGD, Message, Node, TrainStats, Weights
from peerage.algorithm import Dimensions
from peerage.algorithms.ifca import Models
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.requests import Envelope, Inbox, Send
from peerage.testing import NODES, simulate, toy
from peerage.work.candidates import Losses
from peerage.work.training import Train, Trained

WORK = LocalSGD(steps=3, batch_size=4, lr=0.1)
# A core of one number and a head of one number, with one statistic each.
LAYOUT = Layout.of([("core.w", torch.empty(1)), ("head.w", torch.empty(1))], ("head",))
STATISTICS = Layout.of([("core.m", torch.empty(1)), ("head.m", torch.empty(1))], ("head",))
HUB = 3


def drawn(stream: str, architecture: str, private: bool) -> Weights:
    """Initial values that tell their stream: -1 for model 0, and so on."""
    number = -1.0 - int(stream.split()[1])
    assert not private
    return Weights(torch.tensor([number, number]), torch.tensor([number, number]), architecture)


def make_node(algorithm: IFCA, id: int = HUB, round: int = 0) -> Node[Models]:
    node: Node[Models] = Node(
        id=id, num_nodes=4, num_examples=5, label_proportions=torch.ones(1), architecture="toy",
        layout=LAYOUT, params=torch.zeros(2), buffers=torch.zeros(2), seed=0,
        layouts={"toy": LAYOUT}, buffer_layouts={"toy": STATISTICS}, draw_initial=drawn, hub=HUB,
    )  # fmt: skip
    node.begin_round(round, ((3,), (3,), (3,), (0, 1, 2)))
    node.state = algorithm.init(node)
    return node


def answers(*replies: tuple[int, float, float], examples: tuple[int, ...] = (1, 1, 2)) -> Inbox:
    """Replies of clients 0, 1, ...: the index, the core and the head; statistics are ten times."""
    return Inbox(
        tuple(
            Message(
                Envelope(client, examples[client], 1, "toy"),
                {
                    "x": torch.tensor([core, head]),
                    "b": 10 * torch.tensor([core, head]),
                    "index": torch.tensor([index]),
                },
            )
            for client, (index, core, head) in enumerate(replies)
        ),
        owner=HUB,
    )


# The hub


def test_the_hub_starts_with_k_different_models_and_clients_have_none():
    algorithm = IFCA(k=3)
    assert make_node(algorithm).state.models.tolist() == [[-1, -1], [-2, -2], [-3, -3]]
    assert make_node(algorithm, id=0).state.models.numel() == 0
    shared = make_node(IFCA(k=3, shared_core=True)).state
    assert (shared.core.tolist(), shared.models.tolist()) == ([-1], [[-1], [-2], [-3]])


def test_the_hub_averages_the_answers_of_each_index():
    algorithm = IFCA(k=3)
    node = make_node(algorithm)
    algorithm.merge(node, answers((0, 2.0, 4.0), (2, 7.0, 7.0), (0, 4.0, 8.0)))
    assert node.state.models.tolist() == [[3, 6], [-2, -2], [7, 7]]  # nobody chose model 1
    assert node.state.models_b.tolist() == [[30, 60], [-2, -2], [70, 70]]
    assert node.state.unchosen.tolist() == [0, 1, 0]
    assert (node.params.tolist(), node.buffers.tolist()) == ([3, 6], [30, 60])


def test_answers_may_be_weighted_by_examples():
    algorithm = IFCA(weights="data")
    node = make_node(algorithm)
    algorithm.merge(node, answers((0, 1.0, 4.0), (1, 7.0, 7.0), (0, 4.0, 10.0)))
    assert node.state.models.flatten().tolist() == pytest.approx([3, 8, 7, 7])


def test_an_index_that_does_not_exist_changes_no_model():
    algorithm = IFCA(k=2)
    node = make_node(algorithm)
    algorithm.merge(node, answers((7, 1.0, 1.0), (-1, 1.0, 1.0)))
    assert node.state.models.tolist() == [[-1, -1], [-2, -2]]


def test_a_shared_core_is_the_mean_of_all_answers():
    algorithm = IFCA(k=2, shared_core=True)
    node = make_node(algorithm)
    algorithm.merge(node, answers((0, 3.0, 4.0), (1, 6.0, 7.0), (0, 9.0, 8.0)))
    assert node.state.core.tolist() == [6]
    assert node.state.core_b.tolist() == [60]
    assert node.state.models.tolist() == [[6], [7]]
    assert node.params.tolist() == [6, 6]


def test_a_model_that_nobody_chooses_is_drawn_anew():
    algorithm = IFCA(k=2, restart=2)
    node = make_node(algorithm)
    everybody = answers((0, 1.0, 1.0), (0, 1.0, 1.0))
    algorithm.merge(node, everybody)
    assert (node.state.models[1].tolist(), node.state.unchosen.tolist()) == ([-2, -2], [0, 1])
    asked: list[str] = []

    def anew(stream: str, architecture: str, private: bool) -> Weights:
        asked.append(stream)
        return Weights(torch.tensor([8.0, 9.0]), torch.tensor([6.0, 7.0]), architecture)

    node.draw_initial = anew
    node.begin_round(1, node.graph)
    algorithm.merge(node, everybody)
    assert asked == ["model 1 in round 2"]
    assert (node.state.models[1].tolist(), node.state.unchosen.tolist()) == ([8, 9], [0, 0])
    assert node.state.models_b[1].tolist() == [6, 7]
    assert node.state.models[0].tolist() == [1, 1]


# A client


def hub_message(algorithm: IFCA) -> Message:
    return Message(Envelope(HUB, 0, 3, "toy"), algorithm.broadcast(make_node(algorithm)))


@pytest.mark.parametrize("shared_core", [False, True])
def test_a_client_trains_the_best_model_returns_it_and_keeps_it_as_it_was(shared_core):
    algorithm = IFCA(k=3, examples=7, shared_core=shared_core)
    node = make_node(algorithm, id=1)
    coroutine = algorithm.round(node)
    coroutine.send(None)  # receives
    tried = coroutine.send((hub_message(algorithm),))
    assert isinstance(tried, Losses)
    assert tried.examples == 7
    core = [-1, -1, -1] if shared_core else [-1, -2, -3]
    models = [[c, h] for c, h in zip(core, [-1, -2, -3], strict=True)]
    assert [model.params.tolist() for model in tried.candidates] == models
    training = coroutine.send(torch.tensor([0.9, 0.1, float("nan")]))
    assert isinstance(training, Train)
    assert training.params.tolist() == training.buffers.tolist() == models[1]
    trained = Trained(torch.tensor([4.0, 8.0]), torch.tensor([5.0, 6.0]), TrainStats(1.0, 5))
    sent = coroutine.send(trained)
    assert isinstance(sent, Send)
    payload = {name: x.tolist() for name, x in sent.message.payload.items()}
    assert payload == {"x": [4.0, 8.0], "b": [5.0, 6.0], "index": [1]}
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert node.params.tolist() == models[1]
    inf = float("inf")
    losses = {"head_loss_0": 0.9, "head_loss_1": 0.1, "head_loss_2": inf}
    assert node.notes == pytest.approx({"head": 1.0, **losses})


def test_a_client_without_a_message_keeps_its_model():
    algorithm = IFCA()
    node = make_node(algorithm, id=1)
    for step in (algorithm.round, algorithm.final):
        coroutine = step(node)
        coroutine.send(None)
        with pytest.raises(StopIteration):
            coroutine.send(())
        assert node.params.tolist() == [0, 0]


def test_ties_are_broken_at_random():
    algorithm, chosen = IFCA(k=2), []
    for id in range(40):
        node = make_node(algorithm, id=0)
        node.id = id
        node.begin_round(0, ((3,),) * 40)
        coroutine = algorithm.answer(node, hub_message(algorithm).payload)
        coroutine.send(None)
        coroutine.send(torch.tensor([0.5, 0.5]))
        chosen.append(node.params[0].item())
        coroutine.close()
    assert 10 < chosen.count(-1.0) < 30
    assert set(chosen) == {-1.0, -2.0}


def test_shapes_and_costs_are_declared():
    dimensions = Dimensions(LAYOUT, STATISTICS, nodes=4, classes=1, example=(1,))
    plain, shared = (
        {
            name: spec.shape
            for name, spec in IFCA(k=3, shared_core=s).message_schema(dimensions).items()
        }
        for s in (False, True)
    )
    assert plain == {
        "x": (2,), "b": (2,), "index": (1,), "core": (0,), "core_b": (0,), "models": (3, 2),
        "models_b": (3, 2),
    }  # fmt: skip
    changed = {"core": (1,), "core_b": (1,), "models": (3, 1), "models_b": (3, 1)}
    assert shared == plain | changed
    cost = IFCA(k=3, examples=20).cost(0, dimensions, examples=80)
    assert (cost.vectors, cost.forward, cost.state) == (1.0, 0.75, 0.0)
    assert IFCA(k=1).cost(0, dimensions, examples=80).forward == 0.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 0}, "k must be at least 1 model, got 0"),
        ({"examples": 0}, "examples must be at least 1, got 0"),
        ({"restart": 0}, "restart must be at least 1 round, got 0"),
        ({"restart": 2, "k": 1}, "restart=2 has no effect with k=1"),
        ({"weights": "graph"}, "weights must be one of uniform, data; got 'graph'"),
        ({"clients": 0}, "clients must be at least 1, got 0"),
    ],
)
def test_bad_options_are_rejected(options, text):
    with pytest.raises(InputError, match=text):
        IFCA(**options)


# Networks


def test_one_model_is_federated_averaging():
    found, wanted = (
        simulate(toy(one)).end[-1] for one in (IFCA(WORK, k=1, weights="data"), FedAvg(WORK))
    )
    assert torch.equal(found, wanted)


def models_of_the_hub(team: SerialTeam) -> list[Tensor]:
    return list(team.shard.members[NODES].node.state.models)


@pytest.mark.own_engine  # looks into the shard
def test_after_the_last_round_every_client_has_a_current_model():
    world = prepare(toy(IFCA(WORK, clients=1)))
    team = SerialTeam(world)
    with Lockstep(world, team) as engine:
        before = engine.parameters(0)
        engine.round(0, evaluate=False)
        engine.round(1, evaluate=False)
        clients = [engine.parameters(node) for node in range(NODES)]
        stale = [
            not any(torch.equal(params, model) for model in models_of_the_hub(team))
            for params in clients
        ]
        assert sum(stale) >= NODES - 2  # at most two were selected
        engine.final(2)
        for node in range(NODES):
            params = engine.parameters(node)
            assert any(torch.equal(params, model) for model in models_of_the_hub(team))
        assert not torch.equal(before, engine.parameters(0))


def test_a_network_that_loses_all_messages_trains_nothing():
    lost = pg.run(toy(IFCA(WORK), faults={"loss": 1.0 - 1e-12}))
    start = simulate(toy(IFCA(WORK))).start
    for node in range(NODES + 1):
        assert torch.equal(lost.parameters[node], start[node])


def test_metrics_are_those_of_the_clients():
    result = pg.run(toy(IFCA(WORK), rounds=3))
    last = [row for row in result.rows if row["scope"] == "node" and row.get("final")]
    assert [row["node"] for row in last] == list(range(NODES))
    assert result.accuracy == pytest.approx(sum(row["accuracy"] for row in last) / NODES)
    chosen = [row["notes"]["head"] for row in result.rows if "head" in row.get("notes", {})]
    assert len(chosen) == 3 * NODES
    assert set(chosen) <= {0.0, 1.0}


def clustered(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": IFCA(LocalSGD(steps=5, batch_size=8, lr=0.1)),
        "dataset": "digits",
        "model": "mlp:hidden=32",
        "nodes": 8,
        "clusters": pg.Clusters((6, 2), "rotate"),
        "partition": "iid",
        "rounds": 30,
        "engine": {"name": "serial"},
        "evaluation": {"every": 30},
        "seed": 1,
    }
    return pg.Experiment(**settings | changes)


@pytest.mark.slow
@pytest.mark.parametrize("shared_core", [False, True])
def test_two_clusters_end_with_different_models(shared_core):
    work = LocalSGD(steps=5, batch_size=8, lr=0.1)
    result = pg.run(clustered(algorithm=IFCA(work, shared_core=shared_core)))
    heads = [row["notes"]["head"] for row in result.rows if "head" in row.get("notes", {})][-8:]
    assert heads == [1.0 - heads[-1]] * 6 + [heads[-1]] * 2
    parameters = result.parameters
    assert torch.equal(parameters[0], parameters[5])
    assert torch.equal(parameters[6], parameters[7])
    assert not torch.equal(parameters[0], parameters[6])


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize(
    "algorithm",
    [IFCA(WORK, clients=3, restart=1), IFCA(WORK, k=3, shared_core=True, examples=3)],
    ids=["clients", "shared"],
)
def test_engines_and_peers_give_the_same_bits(algorithm):
    experiment = toy(algorithm, rounds=4)
    serial = pg.run(experiment)
    pool = pg.run(toy(algorithm, rounds=4, engine={"name": "pool", "workers": 2}))
    assert pool.digest == serial.digest
    for peer, wanted in zip(run_peers(experiment), serial.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert dict(peer.counters) == {}
