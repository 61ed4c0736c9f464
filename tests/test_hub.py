"""The hub pattern and its algorithms, by numbers: which nodes send and train, what is merged."""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import TINY, peerage
from torch import Tensor

import peerage as pg
from peerage import HWA, DecAvg, DecHW, Experiment, FedAvg, FedCurv, FedProx, LocalSGD, Node
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError, Interrupted, PeerageWarning
from peerage.hub import HubAlgorithm
from peerage.requests import Envelope, Inbox, Message
from peerage.testing import NODES, blobs, simulate, toy
from peerage.vectors import Layout
from peerage.work.curvature import scope_of
from peerage.work.losses import CurvaturePenalty

# A hidden layer of two numbers and an output layer of three.
LAYOUT = Layout.of(
    [
        ("hidden.weight", torch.zeros(1, 2)),
        ("head.weight", torch.zeros(1, 2)),
        ("head.bias", torch.zeros(1)),
    ]
)
OUTPUT = slice(2, 5)

Vector = list[float]
vectors = st.lists(st.floats(-3, 3, width=32), min_size=5, max_size=5)
curvatures = st.lists(st.floats(0, 4, width=32), min_size=3, max_size=3)


def hub(**values: Any) -> Node[Any]:
    settings: dict[str, Any] = {
        "id": 3,
        "num_nodes": 4,
        "num_examples": 0,
        "label_proportions": torch.ones(1),
        "architecture": "net",
        "layout": LAYOUT,
        "params": torch.zeros(5),
        "buffers": torch.zeros(0),
        "seed": 0,
        "hub": 3,
    }
    return Node(**(settings | values))


def answers(examples: Sequence[int], **payloads: Sequence[Vector]) -> Inbox:
    """One message of every client with the named vectors."""
    messages = [
        Message(
            Envelope(client, examples[client], 1, "net"),
            {
                "b": torch.zeros(0),
                **{name: torch.tensor(v[client]) for name, v in payloads.items()},
            },
        )
        for client in range(len(examples))
    ]
    return Inbox(tuple(messages), owner=3)


def merged(algorithm: HubAlgorithm[Any], examples: Sequence[int], **payloads: Any) -> Vector:
    node = hub()
    node.state = algorithm.init(node)
    algorithm.merge(node, answers(examples, **payloads))
    return node.params.tolist()


# What the hub makes of the answers


def test_fedavg_weights_clients_by_their_examples():
    x = [[0.0] * 5, [4.0] * 5, [8.0] * 5]
    assert merged(FedAvg(), [1, 1, 2], x=x) == [5.0] * 5


def test_hwa_weights_the_output_layer_by_curvature_and_the_rest_by_examples():
    x = [[0.0, 0.0, 0.0, 0.0, 0.0], [4.0, 8.0, 10.0, 20.0, 30.0]]
    # Norms 5 and 2, so the weights of client 1 are 0 / 1, (1 * 2/2) / (4/5 + 1), all of nothing.
    h = [[3.0, 4.0, 0.0], [0.0, 2.0, 0.0]]
    expected = [3.0, 6.0, 0.0, 20 / 1.8, 0.75 * 30]
    assert merged(HWA(), [1, 3], x=x, h=h) == pytest.approx(expected)


def test_scopes_reach_further_into_the_model():
    assert scope_of(LAYOUT, "output") == scope_of(LAYOUT, "head") == OUTPUT
    assert scope_of(LAYOUT, "last-hidden") == scope_of(LAYOUT, "all") == slice(0, 5)
    assert scope_of(LAYOUT, "hidden") == slice(0, 2)
    three = Layout.of([(f"{name}.weight", torch.zeros(2)) for name in "abc"])
    assert scope_of(three, "last-hidden") == scope_of(three, "b+c") == slice(2, 6)
    with pytest.raises(InputError, match=r"scope 'a\+c' leaves out a layer in between; .*a, b, c"):
        scope_of(three, "a+c")
    with pytest.raises(InputError, match="scope 'a\\+d' names no layer of the model; "):
        scope_of(three, "a+d")


@settings(deadline=None)
@given(vectors, st.lists(curvatures, min_size=3, max_size=3))
def test_identical_clients_are_a_fixed_point_for_any_curvature(x, h):
    found = merged(HWA(), [1, 5, 2], x=[x] * 3, h=h)
    assert found == pytest.approx(x, rel=1e-5, abs=1e-5)


@settings(deadline=None)
@given(st.lists(vectors, min_size=3, max_size=3), curvatures)
def test_equal_curvature_gives_the_uniform_mean_and_not_that_by_examples(x, h):
    found = merged(HWA(), [1, 5, 2], x=x, h=[h] * 3)
    by_examples = np.average(x, axis=0, weights=[1, 5, 2])
    uniform = np.mean(x, axis=0)
    says_something = np.array(h) > 1e-5 * max(h)
    expected = np.concatenate(
        [by_examples[:2], np.where(says_something, uniform[2:], by_examples[2:])]
    )
    undecided = (np.array(h) > 0) & ~says_something  # so small that the threshold may count
    keep = np.concatenate([[True, True], ~undecided])
    np.testing.assert_allclose(np.array(found)[keep], expected[keep], rtol=1e-4, atol=1e-5)


def test_the_literal_equation_is_no_average():
    same = [[1.0] * 5] * 3
    h = [[3.0, 4.0, 0.0]] * 3
    found = merged(HWA(normalise="literal"), [1, 1, 1], x=same, h=h)
    assert found == pytest.approx([1.0, 1.0, 3 * 0.6, 3 * 0.8, 0.0])


def test_the_literal_equation_gives_a_warning():
    experiment = toy(HWA(normalise="literal"))
    with pytest.warns(PeerageWarning, match=r"Eq\. 5 of P2 as printed"):
        prepare(experiment)
    assert not list(HWA().caveats())


def test_fedcurv_sums_the_curvatures_of_its_clients():
    node = hub()
    algorithm = FedCurv()
    node.state = algorithm.init(node)
    x, f, fx = ([[value] * 5 for value in pair] for pair in ([1.0, 4.0], [0.5, 2.0], [0.5, 8.0]))
    inbox = answers([3, 1], x=x, f=f, fx=fx)
    algorithm.merge(node, inbox)
    assert node.params.tolist() == [1.75] * 5
    assert node.state.f.tolist() == [2.5] * 5
    assert node.state.fx.tolist() == [8.5] * 5
    assert node.state.who.tolist() == [0, 1]


@settings(deadline=None)
@given(st.lists(vectors, min_size=4, max_size=4), st.lists(vectors, min_size=3, max_size=3))
def test_the_expansion_of_fedcurv_is_the_direct_penalty(xs, fs):
    x = torch.tensor(xs[-1], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor(v, dtype=torch.float64) for v in xs[:-1]]
    f = [torch.tensor(v, dtype=torch.float64).abs() for v in fs]
    penalty = sum(
        0.3 * ((x - x_j).square() * f_j).sum() for x_j, f_j in zip(others, f, strict=True)
    )
    [direct] = torch.autograd.grad(penalty, x)
    a = torch.stack(f).sum(0)
    b = torch.stack([f_j * x_j for x_j, f_j in zip(others, f, strict=True)]).sum(0)
    g = torch.full((5,), 2.0, dtype=torch.float64)
    found = CurvaturePenalty(0.3)(g, x.detach(), x.detach(), a=a, b=b)
    torch.testing.assert_close(found, direct + 2.0)
    assert g.tolist() == [2.0] * 5


# Whole rounds

ONE_STEP = LocalSGD(epochs=1, batch_size=100, lr=0.1)  # every client's data is one batch


def pooled_step(experiment: Experiment, x: Tensor) -> Tensor:
    """The model after one step of gradient descent on all data."""
    world = prepare(experiment)
    model = world.architecture(0).build_flat()
    model.load(x)
    model.module.train()
    everything = torch.cat(list(world.parts))
    inputs, labels = world.train.take(everything)
    loss = torch.nn.functional.cross_entropy(model.module(inputs), labels)
    gradients = torch.autograd.grad(loss, model.tensors)
    return x - 0.1 * torch.cat([g.reshape(-1) for g in gradients])


@pytest.mark.parametrize("algorithm", [FedAvg(ONE_STEP), FedProx(ONE_STEP, mu=5.0)])
def test_one_step_at_every_client_is_one_step_on_all_data(algorithm):
    """The pull of FedProx is zero where a round begins."""
    experiment = toy(algorithm, model="logistic", rounds=1)
    ended = simulate(experiment)
    expected = pooled_step(experiment, ended.start[-1])
    torch.testing.assert_close(ended.end[-1], expected)


def test_fedprox_stays_closer_to_the_hub():
    work = LocalSGD(epochs=5, batch_size=4, lr=0.1)
    free, held = (simulate(toy(FedProx(work, mu=mu), rounds=1)) for mu in (0.0, 2.0))
    plain = simulate(toy(FedAvg(work), rounds=1))
    moved = [torch.dist(run.end[-1], run.start[-1]) for run in (free, held)]
    torch.testing.assert_close(free.end[-1], plain.end[-1])
    assert moved[1] < 0.8 * moved[0]


def test_fedcurv_is_fedavg_in_the_first_round_and_holds_back_later():
    work = LocalSGD(epochs=3, batch_size=4, lr=0.1)
    first = [simulate(toy(algorithm(work), rounds=1)).end[-1] for algorithm in (FedAvg, FedCurv)]
    torch.testing.assert_close(first[0], first[1])
    weak = simulate(toy(FedCurv(work, strength=0.0), rounds=3)).end[-1]
    torch.testing.assert_close(weak, simulate(toy(FedAvg(work), rounds=3)).end[-1])
    strong = simulate(toy(FedCurv(work, strength=1.0), rounds=3)).end[-1]
    assert torch.dist(strong, weak) > 1e-3


def test_a_client_whose_answer_was_lost_is_not_taken_out_of_the_sums():
    algorithm, node = FedCurv(), hub(id=1)
    node.state = replace(algorithm.init(node), f=torch.ones(5), fx=torch.ones(5))
    hub_message = {
        "f": torch.full((5,), 3.0),
        "fx": torch.full((5,), 4.0),
        "who": torch.tensor([0, 1]),
    }
    assert [v.tolist()[0] for v in algorithm.others(node, hub_message)] == [2.0, 3.0]
    hub_message["who"] = torch.tensor([0, 2])
    assert [v.tolist()[0] for v in algorithm.others(node, hub_message)] == [3.0, 4.0]


@pytest.mark.parametrize(("round", "known"), [(6, True), (5, False), (7, False), (None, True)])
def test_a_client_subtracts_only_what_is_in_the_sums(round, known):
    algorithm, node = FedCurv(), hub(id=1, round=7)
    node.state = replace(algorithm.init(node), f=torch.ones(5), fx=torch.ones(5), round=round)
    hub_message = {
        "f": torch.full((5,), 3.0),
        "fx": torch.full((5,), 4.0),
        "who": torch.tensor([0, 1]),
    }
    found = algorithm.others(node, hub_message)
    assert (found is not None) == known
    node.state = algorithm.init(node)  # a client that was restarted, or rested
    assert algorithm.others(node, hub_message) is None


class RecordingFedCurv(FedCurv):
    """Records what the hub received, and the sums of the others that each client used."""

    received: ClassVar[dict[int, dict[int, tuple[Tensor, Tensor]]]]
    penalties: ClassVar[list[tuple[int, int, tuple[Tensor, Tensor] | None]]]

    def merge(self, node: Node[Any], inbox: Inbox) -> None:
        self.received[node.round] = {
            m.sender: (m.payload["f"].clone(), m.payload["fx"].clone()) for m in inbox.messages
        }
        super().merge(node, inbox)

    def others(self, node: Node[Any], hub_message: Any) -> tuple[Tensor, Tensor] | None:
        found = super().others(node, hub_message)
        self.penalties.append((node.round, node.id, found))
        return found


@pytest.mark.parametrize("clients", [None, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_penalty_is_always_that_of_the_others_of_the_last_round(clients, seed):
    RecordingFedCurv.received, RecordingFedCurv.penalties = {}, []
    work = LocalSGD(epochs=1, batch_size=8, lr=0.01)
    simulate(
        toy(RecordingFedCurv(work, clients=clients), rounds=12, seed=seed, faults={"loss": 0.5})
    )
    assert RecordingFedCurv.penalties
    for round, client, found in RecordingFedCurv.penalties:
        last = RecordingFedCurv.received.get(round - 1, {})
        others = [parts for sender, parts in last.items() if sender != client]
        if not last:
            assert found is None
            continue
        for sums, number in zip(found, (0, 1), strict=True):
            expected = sum((parts[number] for parts in others), torch.zeros_like(sums))
            torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fedcurv_with_lost_messages_is_the_same_on_every_engine_and_resumed(tmp_path):
    def lossy(**engine: Any) -> Experiment:
        work = LocalSGD(epochs=1, batch_size=8, lr=0.01)
        faults = {"loss": 0.4}
        return toy(FedCurv(work, clients=1), rounds=15, faults=faults, seed=2, engine=engine)

    whole = pg.run(lossy(name="serial"))
    assert pg.run(lossy(name="pool", workers=2)).digest == whole.digest

    def stop(row: Any) -> None:
        if row["round"] == 9:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        pg.run(lossy(name="serial"), tmp_path / "run", checkpoint_every=1, watch=stop)
    assert pg.resume(tmp_path / "run", experiment=lossy(name="serial")).digest == whole.digest


def test_fedcurvs_information_is_a_mean_whatever_its_kind():
    """One example in a batch: then the three kinds of curvature differ by their sums only."""
    work = LocalSGD(epochs=1, batch_size=1, lr=0.0)
    found = {}
    for kind in ("sample", "batch"):
        world = prepare(toy(FedCurv(work, curvature=kind), rounds=1))
        with Lockstep(world, SerialTeam(world)) as engine:
            engine.round(0, evaluate=False)
            found[kind] = engine.team.shard.members[world.hub].node.state.f
    torch.testing.assert_close(found["sample"], found["batch"])
    assert found["sample"].max() > 0


# Who takes part


def test_all_nodes_draw_the_same_clients_and_others_each_round():
    algorithm = FedAvg(clients=2)
    graph = ((4,), (4,), (4,), (4,), (0, 1, 2, 3))
    drawn = []
    for round in range(20):
        seen = []
        for id in range(5):
            node = hub(id=id, num_nodes=5, hub=4)
            node.begin_round(round, graph)
            seen.append(algorithm.selected_clients(node))
        assert len(set(seen)) == 1
        drawn.append(seen[0])
    assert all(len(set(pair)) == 2 for pair in drawn)
    assert set(drawn) == set(itertools.combinations(range(4), 2))


def test_only_chosen_clients_train_and_talk():
    world = prepare(toy(FedAvg(ONE_STEP, clients=2)))
    size = 4 * world.layout(0).size
    with Lockstep(world, SerialTeam(world)) as engine:
        for round in range(3):
            report = engine.round(round, evaluate=True)
            assert report.bytes == 2 * 2 * size
            assert sum("train_loss" in node.metrics for node in report.nodes) == 2
            assert [node.node for node in report.nodes if "accuracy" in node.metrics] == [NODES]


def test_a_client_that_has_left_is_not_chosen():
    experiment = toy(FedAvg(ONE_STEP, clients=4), faults={"leave": "0@1, 2@1"}, rounds=1)
    world = prepare(experiment)
    with Lockstep(world, SerialTeam(world)) as engine:
        report = engine.round(0, evaluate=False)
    assert [n.node for n in report.nodes if "train_loss" in n.metrics] == [1, 3, 4]


def test_a_hub_without_messages_keeps_its_model():
    ended = simulate(toy(FedAvg(), faults={"links": 0.0}))
    assert torch.equal(ended.start[-1], ended.end[-1])
    assert ended.bytes == [0, 0, 0]


@pytest.mark.parametrize("algorithm", [FedAvg(), FedCurv(), HWA()])
def test_lost_messages_are_left_out_of_the_merge(algorithm):
    ended = simulate(toy(algorithm, faults={"loss": 0.4}, rounds=6))
    assert torch.isfinite(ended.end[-1]).all()
    assert not torch.equal(ended.start[-1], ended.end[-1])


# What is counted and kept


@pytest.mark.parametrize(
    ("algorithm", "up", "down"),
    [
        (FedAvg(), 1, 1),
        (FedProx(), 1, 1),
        (HWA(scope="all"), 2, 1),
    ],
)
def test_bytes_of_a_round(algorithm, up, down):
    ended = simulate(toy(algorithm))
    size = 4 * len(ended.start[0])
    assert ended.bytes == [NODES * (up + down) * size] * 3


def test_bytes_of_hwa_grow_with_its_scope():
    world = prepare(toy(HWA()))
    m, out = world.layout(0).size, 8 * 3 + 3
    assert simulate(toy(HWA())).bytes == [NODES * 4 * (2 * m + out)] * 3


def test_bytes_of_fedcurv_have_two_sums_each_way_after_the_first_round():
    ended = simulate(toy(FedCurv()))
    m, ids = 4 * len(ended.start[0]), 8 * NODES
    assert ended.bytes == [NODES * 4 * m] + [NODES * (6 * m + ids)] * 2


def test_the_hub_has_no_data_and_is_one_node_more(tmp_path):
    result = pg.run(toy(FedAvg(), rounds=2), tmp_path / "run")
    record = pg.RunRecord.load(tmp_path / "run")
    assert result.summary["nodes"] == len(record.setup["examples"]) == NODES
    assert len(record.setup["allocation"]) == NODES
    assert len(record.setup["parameters"]) == NODES + 1
    assert {row["node"] for row in result.rows if row["scope"] == "node"} == {NODES}
    assert [row["nodes"] for row in result.rows if row["scope"] == "network"] == [NODES] * 3
    # All nodes have the hub's model.
    assert len(result.parameters) == NODES + 1
    assert all(params is result.parameters[-1] for params in result.parameters)
    assert result.module(0)(blobs().test_x).shape == (30, 3)


def test_clients_and_nodes_without_a_hub_get_the_same_data():
    settings = {"nodes": 10, "seed": 3}
    parts = [
        prepare(Experiment(algorithm=algorithm, **settings)).setup["allocation"]
        for algorithm in (FedAvg(), DecAvg())
    ]
    assert parts[0] == parts[1]


def test_centralised_data_go_to_one_client():
    world = prepare(Experiment(algorithm=FedAvg(), nodes=4, pooled=True))
    assert world.nodes == 2
    assert world.setup["examples"] == [1437]


def test_validation_examples_of_clients_do_not_disturb():
    result = pg.run(toy(FedAvg(), evaluation={"validation": 0.3}, rounds=1))
    assert result.accuracy > 0


@pytest.mark.parametrize("gain", ["graph", "sqrt", "estimated"])
def test_the_hubs_model_can_have_a_gain(gain):
    plain, amplified = (
        prepare(toy(FedAvg(), init={"gain": name}, rounds=1)) for name in ("none", gain)
    )
    models = []
    for world in (plain, amplified):
        with Lockstep(world, SerialTeam(world)) as engine:
            engine.pre_round()
            models.append(engine.parameters(world.hub))
    assert models[1].norm() > models[0].norm()


# Curvature on chosen layers without a hub


def test_dechw_on_the_output_layer_averages_the_rest():
    """From a shared start that does not move, only weights differ: so models are scripted."""
    algorithms = {
        "mean": DecAvg(ONE_STEP),
        "all": DecHW(ONE_STEP),
        "output": DecHW(ONE_STEP, scope="output"),
    }
    ended = {name: simulate(toy(a, rounds=1)) for name, a in algorithms.items()}
    layout = prepare(toy(DecHW())).layout(0)
    part = scope_of(layout, "output")
    outside = slice(0, part.start)
    for node in range(NODES):
        mean, whole, output = (ended[name].end[node] for name in algorithms)
        torch.testing.assert_close(output[outside], mean[outside])
        # The norm that curvature is divided by is that of the scope.
        assert not torch.allclose(output[part], mean[part])
        assert not torch.allclose(whole[outside], mean[outside])
    assert ended["output"].bytes[0] == ended["mean"].bytes[0] + 4 * 2 * NODES * 27


def test_the_whole_model_is_dechws_usual_scope():
    usual, named = (simulate(toy(a)).end for a in (DecHW(), DecHW(scope="hidden1+head")))
    assert all(torch.equal(a, b) for a, b in zip(usual, named, strict=True))


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(["batch", "sample", "full", "online"]))
def test_curvature_of_a_layer_is_that_part_of_the_whole(kind):
    algorithms = [
        DecHW(ONE_STEP, curvature=kind, normalise="none", scope=s) for s in ("all", "output")
    ]
    states = []
    for algorithm in algorithms:
        world = prepare(toy(algorithm, rounds=1))
        with Lockstep(world, SerialTeam(world)) as engine:
            engine.round(0, evaluate=False)
            states.append(engine.team.shard.members[2].node.state.h)
    whole, output = states
    assert len(output) == 27
    torch.testing.assert_close(whole[-27:], output)


# Input that cannot be


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"algorithm": "fedavg", "topology": "ring"},
            "'fedavg' has a hub, so its topology is star:centre=last; ",
        ),
        (
            {"algorithm": "fedavg", "topology": "star:number=11"},
            "number=11 is not one of the 11 nodes of the star",
        ),
        (
            {"algorithm": "fedavg", "topology": "star:number=3", "faults": {"leave": "3@2"}},
            "join or leave names node 3, the hub",
        ),
        (
            {"algorithm": "fedavg", "topology": "star:number=3", "pooled": True},
            "pooled means a single node beside the hub",
        ),
        ({"algorithm": "hwa:clients=11"}, "cannot select 11 clients among 10 nodes"),
        ({"algorithm": "hwa:clients=0"}, "clients must be at least 1, got 0"),
        ({"algorithm": "fedavg", "model": ["mlp", "logistic"]}, "requires equal architectures"),
        (
            {"algorithm": "hwa:curvature=online"},
            "curvature must be one of batch, sample, full; got 'online'",
        ),
        (
            {"algorithm": "hwa:normalise=no"},
            "normalise must be one of parameter, literal; got 'no'",
        ),
        ({"algorithm": "fedprox:mu=-1"}, "mu must be at least 0, got -1.0"),
        ({"algorithm": "fedcurv:strength=-1"}, "strength must be a number of at least 0, got -1.0"),
        (
            {"algorithm": "fedprox", "local": {"correct": "proximal:mu=1"}},
            "fedprox corrects gradients itself; leave local.correct out",
        ),
    ],
)
def test_bad_input_is_reported(settings, error):
    with pytest.raises(InputError, match=error):
        Experiment(nodes=10, **settings)


@pytest.mark.parametrize(
    ("algorithm", "error"),
    [
        ("hwa:scope=body", "scope 'body' names no layer of the model"),
        ("dechw:scope=body", "scope 'body' names no layer of the model"),
        ("hwa:clients=51", "cannot select 51 clients among 50 nodes"),
    ],
)
def test_the_command_line_reports_errors_before_it_writes_anything(algorithm, error, tmp_path):
    done = peerage(f"run --algorithm {algorithm} --out", tmp_path / "run")
    assert done.code == 2
    assert error in done.err
    assert len(done.err.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_compare_gives_a_hub_its_own_graph(tmp_path):
    home = tmp_path / "both"
    done = peerage(f"compare --algorithms decavg,hwa {TINY} --rounds 1 --json --out", home)
    assert done.code == 0, done.err
    records = [pg.RunRecord.load(home / name) for name in ("1-decavg", "2-hwa")]
    assert [record.setup["topology"]["degree_max"] for record in records] == [2, 4]
    assert "with 4 nodes" in (home / "report.html").read_text()


@pytest.mark.slow
def test_a_warning_is_one_line_on_the_command_line(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # not an error, as it is in tests
        done = peerage(
            "run --algorithm hwa:normalise=literal --nodes 3 --rounds 1 --json --out",
            tmp_path / "run",
        )
    assert done.code == 0
    assert done.err.startswith("warning: hwa:normalise=literal follows Eq. 5")
