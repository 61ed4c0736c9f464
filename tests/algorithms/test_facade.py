"""FACADE by numbers, its limits, and the clusters that it finds."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from support.networking import OverSockets, run_peers
from torch import Tensor, nn

import peerage as pg
from peerage import EL, DecAvg, Facade, Layout, LocalSGD, Message, Node, TrainStats
from peerage.algorithm import Dimensions
from peerage.algorithms.facade import ALL, Heads
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.papers.datasets import CIFAR
from peerage.papers.p3 import settings as p3
from peerage.papers.study import Plan
from peerage.requests import Envelope, Receive, Send
from peerage.state import pack, unpack
from peerage.testing import NODES, Stopped, mirrored, stop_in_round_three, toy
from peerage.vectors import FlatModel
from peerage.work.candidates import Losses
from peerage.work.evaluation import score
from peerage.work.training import Train, Trained

WORK = LocalSGD(steps=3, batch_size=4, lr=0.1)
NORM = pg.Split(
    lambda: nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    ),
    head=("3", "4", "5"),
)  # fmt: skip


# By hand: a core of one number, heads of one number with one statistic each


LAYOUT = Layout.of([("core.w", torch.empty(1)), ("head.w", torch.empty(1))], ("head",))
STATISTICS = Layout.of([("core.m", torch.empty(1)), ("head.m", torch.empty(1))], ("head",))


def make_node(heads: list[float], round: int = 5, id: int = 0) -> Node[Heads]:
    """Node 0 of three, with core 1 and these heads; the statistic of a head is ten times it."""
    node: Node[Heads] = Node(
        id=id, num_nodes=3, num_examples=5, label_proportions=torch.ones(1), architecture="toy",
        layout=LAYOUT, params=torch.tensor([1.0, 99.0]), buffers=torch.tensor([10.0, 990.0]),
        seed=0, layouts={"toy": LAYOUT}, buffer_layouts={"toy": STATISTICS},
    )  # fmt: skip
    node.begin_round(round, ((1, 2), (0,), (0,)))
    column = torch.tensor(heads).unsqueeze(1)
    node.state = Heads(column, 10 * column, 0)
    return node


def message(sender: int, core: float, head: float, index: int, kind: str = "toy") -> Message:
    numbers = {"core": core, "head": head, "core_b": 10 * core, "head_b": 10 * head}
    payload = {name: torch.tensor([value]) for name, value in numbers.items()}
    return Message(Envelope(sender, 5, 1, kind), {**payload, "index": torch.tensor([index])})


def drive(
    node: Node[Heads],
    algorithm: Facade,
    losses: list[list[float]],
    trained: float,
    inboxes: list[list[Message]],
    final: bool = False,
) -> list[Any]:
    """Run a round with scripted answers; training moves the core to 4. Returns all requests."""
    coroutine = algorithm.final(node) if final else algorithm.round(node)
    requests: list[Any] = []
    answer: Any = None
    scripted, received = iter(losses), iter(inboxes)
    while True:
        try:
            request = coroutine.send(answer)
        except StopIteration:
            return requests
        requests.append(request)
        match request:
            case Losses():
                answer = torch.tensor(next(scripted))
            case Train():
                params, buffers = torch.tensor([4.0, trained]), torch.tensor([40.0, 10 * trained])
                answer = Trained(params, buffers, TrainStats(1.0, 5))
            case Send():
                answer = None
            case Receive():
                answer = tuple(next(received))


def of_kind(requests: list[Any], kind: type) -> list[Any]:
    return [request for request in requests if isinstance(request, kind)]


def test_cores_and_heads_of_the_same_index_are_averaged():
    node = make_node([2.0, 3.0, 5.0])
    others = [message(1, 1.0, 6.0, 2), message(2, 1.0, 20.0, 1)]
    requests = drive(node, Facade(k=3), [[0.9, 0.1, 0.5], [0.7, 0.8, 0.2]], 8.0, [others])
    [train], [sent] = of_kind(requests, Train), of_kind(requests, Send)
    assert train.params.tolist() == [1.0, 3.0]  # the best head over the core
    assert train.buffers.tolist() == [10.0, 30.0]
    payload = {name: x.tolist() for name, x in sent.message.payload.items()}
    wanted = {"core": [4.0], "head": [8.0], "core_b": [40.0], "head_b": [80.0], "index": [1]}
    assert payload == wanted
    # Head 0 has no other: it stays. Head 1 is (8 + 20) / 2, head 2 is (5 + 6) / 2.
    assert node.state.heads.flatten().tolist() == [2.0, 14.0, 5.5]
    assert node.state.buffers.flatten().tolist() == [20.0, 140.0, 55.0]
    assert node.state.selected == 1
    losses = {"head_loss_0": 0.9, "head_loss_1": 0.1, "head_loss_2": 0.5}
    assert node.notes == pytest.approx({"head": 1.0, **losses})
    # The core is (4 + 1 + 1) / 3; the choice after aggregation is head 2.
    assert node.params.tolist() == [2.0, 5.5]
    assert node.buffers.tolist() == pytest.approx([20.0, 55.0])
    streams = [request.stream for request in of_kind(requests, Losses)]
    assert len(set(streams)) == 2


def test_own_heads_may_count_only_if_they_were_chosen():
    node = make_node([2.0, 3.0, 5.0])
    algorithm = Facade(k=3, own_head="if_selected", eval_head="last")
    others = [message(1, 1.0, 6.0, 2), message(2, 1.0, 20.0, 1)]
    requests = drive(node, algorithm, [[0.9, 0.1, 0.5]], 8.0, [others])
    assert node.state.heads.flatten().tolist() == [2.0, 14.0, 6.0]
    assert node.params.tolist() == [2.0, 14.0]  # the head of this round's choice
    assert len(of_kind(requests, Losses)) == 1


def test_three_heads_of_one_index_have_equal_weights():
    node = make_node([2.0, 3.0])
    others = [message(1, 1.0, 1.0, 1), message(2, 1.0, 5.0, 1)]
    drive(node, Facade(k=2, eval_head="last"), [[0.1, 0.9]], 8.0, [others])
    assert node.state.heads.flatten().tolist() == [8.0, 3.0]  # (3 + 1 + 5) / 3


def test_other_architectures_and_unknown_indices_do_not_count():
    node = make_node([2.0, 3.0])
    others = [message(1, 100.0, 100.0, 0, "other"), message(2, 2.0, 100.0, 7)]
    drive(node, Facade(k=2, eval_head="last"), [[0.1, 0.9]], 8.0, [others])
    assert node.state.heads.flatten().tolist() == [8.0, 3.0]
    assert node.params.tolist() == [3.0, 8.0]


@pytest.mark.parametrize(
    ("options", "local", "examples"),
    [
        ({}, LocalSGD(steps=3, batch_size=4), 12),
        ({"choice_batches": 2}, LocalSGD(steps=3, batch_size=4), 8),
        ({"choice_batches": 2}, LocalSGD(epochs=3, batch_size=4), 8),
        ({}, LocalSGD(epochs=3, batch_size=4), None),
    ],
)
def test_heads_are_tried_on_as_many_examples_as_are_asked_for(options, local, examples):
    node = make_node([2.0, 3.0])
    requests = drive(node, Facade(local, **options), [[0.1, 0.9]] * 2, 8.0, [[]])
    assert [request.examples for request in of_kind(requests, Losses)] == [examples] * 2
    assert {request.part for request in of_kind(requests, Losses)} == {"head"}


def test_ties_are_broken_at_random_on_every_node():
    algorithm = Facade(k=3, eval_head="last")
    chosen = []
    for id in range(40):
        node = replace(make_node([2.0, 2.0, 2.0]), id=id, num_nodes=40)
        node.begin_round(5, ((),) * 40)
        drive(node, algorithm, [[0.5, 0.7, 0.5]], 8.0, [[]])
        chosen.append(node.state.selected)
    assert 10 < chosen.count(0) < 30
    assert set(chosen) == {0, 2}


def test_a_loss_that_is_not_a_number_is_never_the_lowest():
    node = make_node([2.0, 3.0])
    drive(node, Facade(eval_head="last"), [[float("nan"), 9.0]], 8.0, [[]])
    assert node.state.selected == 1
    drive(node, Facade(eval_head="last"), [[float("nan")] * 2], 8.0, [[]])


def test_heads_are_tied_during_warm_up():
    node = make_node([2.0, 2.0], round=1)
    before = node.rng.get_state()
    others = [message(1, 1.0, 1.0, ALL), message(2, 1.0, 6.0, ALL)]
    requests = drive(node, Facade(warmup=2), [], 8.0, [others])
    assert node.state.heads.flatten().tolist() == [5.0, 5.0]
    assert node.params.tolist() == [2.0, 5.0]
    assert torch.equal(node.rng.get_state(), before)
    assert (node.notes, of_kind(requests, Losses)) == ({}, [])


def test_at_the_end_heads_are_averaged_over_the_nodes_that_chose_them():
    node = make_node([2.0, 3.0, 5.0])
    node.state = replace(node.state, selected=1)
    others = [message(1, 4.0, 6.0, 2), message(2, 4.0, 20.0, 1)]
    stored = [
        Message(
            Envelope(sender, 5, 1, "toy"),
            {"heads": torch.tensor(column), "heads_b": 10 * torch.tensor(column)},
        )
        for sender, column in ((1, [[3.0], [0.0], [0.0]]), (2, [[7.0], [0.0], [0.0]]))
    ]
    drive(node, Facade(k=3), [[0.1, 0.2, 0.3]], 0.0, [others, stored], final=True)
    # Head 0, which nobody chose, is (2 + 3 + 7) / 3; head 1 is (3 + 20) / 2; head 2 is 6.
    assert node.state.heads.flatten().tolist() == [4.0, 11.5, 6.0]
    assert node.state.buffers.flatten().tolist() == pytest.approx([40.0, 115.0, 60.0])
    assert node.params.tolist() == [3.0, 4.0]


def test_at_the_end_one_exchange_is_enough_if_each_head_was_chosen():
    node = make_node([2.0, 3.0])
    others = [message(1, 4.0, 6.0, 1), message(2, 4.0, 20.0, 1)]
    requests = drive(node, Facade(eval_head="last"), [], 0.0, [others], final=True)
    assert node.state.heads.flatten().tolist() == [2.0, 13.0]
    assert [set(sent.to) for sent in of_kind(requests, Send)] == [{1, 2}]


def test_without_an_all_reduce_the_last_step_only_chooses_a_head():
    """A run may end after a round without evaluation, in which no head was put over the core."""
    node = make_node([2.0, 3.0, 5.0])
    algorithm = Facade(k=3, all_reduce=False)
    [request] = drive(node, algorithm, [[0.9, 0.8, 0.1]], 0.0, [], final=True)
    assert isinstance(request, Losses)
    assert (node.params.tolist(), node.buffers.tolist()) == ([1.0, 5.0], [10.0, 50.0])
    node = make_node([2.0, 3.0, 5.0])
    assert drive(node, replace(algorithm, eval_head="last"), [], 0.0, [], final=True) == []
    assert node.params.tolist() == [1.0, 2.0]


# Evaluation and the choice of heads


def test_heads_are_chosen_for_evaluation_only_where_it_is_due():
    node = make_node([2.0, 3.0])
    node.evaluation_due = False
    requests = drive(node, Facade(), [[0.1, 0.9]], 8.0, [[]])
    assert [request.stream for request in of_kind(requests, Losses)] == ["heads"]
    assert node.state.heads.flatten().tolist() == [8.0, 3.0]


@pytest.mark.parametrize("all_reduce", [True, False])
def test_how_often_models_are_evaluated_changes_neither_models_nor_messages(all_reduce):
    algorithm = Facade(WORK, k=3, warmup=1, choice_batches=1, all_reduce=all_reduce)
    often, seldom = (
        pg.run(toy(algorithm, rounds=6, evaluation={"every": every, "at": "end"}))
        for every in (1, 3)
    )
    assert often.digest == seldom.digest
    sent = [
        [row["bytes"] for row in result.rows if row["scope"] == "network"]
        for result in (often, seldom)
    ]
    assert sent[0] == sent[1]
    assert len(sent[0]) == 1 + 6 + 1
    chosen = [heads_by_round(result) for result in (often, seldom)]
    assert set(chosen[1]) == {3, 6}
    assert chosen[1] == {round: chosen[0][round] for round in (3, 6)}


@pytest.mark.parametrize("all_reduce", [True, False])
def test_a_run_that_ends_where_nothing_was_evaluated_shows_a_head(all_reduce):
    algorithm = Facade(WORK, k=3, all_reduce=all_reduce)
    stopped = pg.run(
        toy(algorithm, rounds=9, evaluation={"every": 5, "at": "end"}),
        watch=lambda row: pg.STOP if row["round"] == 3 else None,
    )
    whole = pg.run(toy(algorithm, rounds=3))
    assert stopped.digest == whole.digest
    assert stopped.accuracy == whole.accuracy


def heads_by_round(result: pg.Result) -> dict[int, list[float]]:
    """The recorded choices of all nodes in each evaluated round."""
    found: dict[int, list[float]] = {}
    for row in result.rows:
        if row["scope"] == "node" and "head" in row.get("notes", {}):
            found.setdefault(row["round"], []).append(row["notes"]["head"])
    return found


def test_each_head_may_be_tried_on_its_own_draw():
    node = make_node([2.0, 3.0, 5.0])
    algorithm = Facade(WORK, k=3, choice_samples="different", eval_head="last")
    requests = drive(node, algorithm, [[0.9], [0.1], [0.5]], 8.0, [[]])
    tried = of_kind(requests, Losses)
    assert [[x.params.tolist() for x in one.candidates] for one in tried] == [
        [[2.0]],
        [[3.0]],
        [[5.0]],
    ]
    assert [one.examples for one in tried] == [12] * 3
    assert {one.stream for one in tried} == {"heads"}  # each call draws others from it
    assert node.state.selected == 1
    assert not list(algorithm.caveats())
    [caveat] = Facade(choice_samples="different").caveats()
    assert "tries all heads on all examples of a node" in caveat


def test_the_choice_at_a_test_may_be_that_of_the_next_round():
    """As in the released code, with more batches than another choice has."""
    algorithm = Facade(WORK, k=3, test_choice_batches=10)
    node = make_node([2.0, 3.0, 5.0])
    requests = drive(node, algorithm, [[0.9, 0.1, 0.5], [0.7, 0.8, 0.2]], 8.0, [[]])
    assert [one.examples for one in of_kind(requests, Losses)] == [12, 40]
    assert (node.state.selected, node.state.next) == (1, 2)
    node.begin_round(6, ((1, 2), (0,), (0,)))
    node.evaluation_due = False
    requests = drive(node, algorithm, [], 8.0, [[]])
    assert of_kind(requests, Train)[0].params.tolist() == [4.0, 5.0]
    assert (node.state.selected, node.state.next) == (2, None)
    assert node.notes == {"head": 2.0}  # its losses belong to the test
    node.begin_round(7, ((1, 2), (0,), (0,)))
    requests = drive(node, algorithm, [[0.1, 0.2, 0.3]], 8.0, [[]])
    assert [one.examples for one in of_kind(requests, Losses)] == [12]


def test_a_state_that_was_saved_before_these_options_can_be_resumed():
    state, tensors = make_node([2.0, 3.0]).state, {}
    tree = pack(state, tensors, "0")
    for name in ("next", "curvature"):
        del tree["fields"][name]
    old = replace(unpack(tree, tensors, state), selected=1)
    assert (old.selected, old.next, old.curvature) == (1, None, None)
    assert torch.equal(old.heads, state.heads)


def test_studies_with_the_fidelity_of_the_code_choose_as_it_does():
    chosen = {}
    for fidelity in ("paper", "code"):
        plan = Plan("smoke", fidelity=fidelity)
        found = p3.experiment(plan, CIFAR, "16:16", p3.FACADE, seed=0)
        chosen[fidelity] = replace(found.algorithm, local=LocalSGD())
    assert chosen["paper"] == Facade(k=2, warmup=1)
    code: dict[str, Any] = {"choice_samples": "different", "eval_head": "test"}
    assert chosen["code"] == Facade(k=2, warmup=1, test_choice_batches=100, **code)


def test_the_first_choice_is_one_at_a_test_because_initial_models_are_evaluated():
    node = make_node([2.0, 3.0], round=0)
    requests = drive(node, Facade(WORK, test_choice_batches=10), [[0.1, 0.9]] * 2, 8.0, [[]])
    assert [one.examples for one in of_kind(requests, Losses)] == [40, 40]


@pytest.mark.own_engine  # looks into the shard
def test_scores_may_be_those_of_the_head_with_the_lowest_test_loss():
    algorithm = Facade(WORK, k=3, eval_head="test")
    world = prepare(toy(algorithm, model=NORM))
    team, flat = SerialTeam(world), FlatModel(NORM.model())
    with Lockstep(world, team) as engine:
        engine.round(0, evaluate=False)
        report = engine.round(1, evaluate=True)
        for found in report.nodes:
            node = team.shard.members[found.node].node
            accuracies = {}
            for model in (*algorithm.test_candidates(node), node.weights):
                flat.load(model.params, model.buffers)
                one = score(flat, world.test)
                accuracies[one.loss] = one.accuracy
            assert len(accuracies) == 3  # the model of the node has one of the heads
            assert found.metrics["loss"] == min(accuracies)
            assert found.metrics["accuracy"] == accuracies[min(accuracies)]


def test_a_head_that_was_just_trained_is_a_candidate():
    """For evaluation after training, before the exchange."""
    node = make_node([2.0, 3.0, 5.0])
    algorithm = Facade(k=3, eval_head="test")
    coroutine = algorithm.round(node)
    coroutine.send(None)
    coroutine.send(torch.tensor([0.9, 0.1, 0.5]))
    trained = Trained(torch.tensor([4.0, 8.0]), torch.tensor([40.0, 80.0]), TrainStats(1.0, 5))
    assert isinstance(coroutine.send(trained), Send)
    models = [model.params.tolist() for model in algorithm.test_candidates(node)]
    assert models == [[4.0, 2.0], [4.0, 8.0], [4.0, 5.0]]
    coroutine.close()


def test_the_model_of_a_node_never_depends_on_test_data():
    settings: dict[str, Any] = {"rounds": 4, "evaluation": {"every": 1, "at": "end"}}
    train, test = (
        pg.run(toy(Facade(WORK, k=3, warmup=1, eval_head=choice), **settings))
        for choice in ("train", "test")
    )
    assert train.digest == test.digest
    losses = [
        [row["loss"] for row in result.rows if row["scope"] == "node"] for result in (train, test)
    ]
    assert all(best <= shown for shown, best in zip(*losses, strict=True))
    assert losses[0] != losses[1]


def test_tied_heads_and_a_single_head_are_evaluated_once():
    node = make_node([2.0, 2.0])
    assert len(Facade(eval_head="test").test_candidates(node)) == 2
    assert Facade().test_candidates(node) == ()
    node.state = replace(node.state, selected=ALL)
    assert Facade(eval_head="test").test_candidates(node) == ()
    assert Facade(k=1, eval_head="test").test_candidates(make_node([2.0])) == ()


class Count(nn.Identity):
    """Counts the examples that pass in evaluation mode, by name."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.seen[self.name] += len(x)
        return x


def counted() -> nn.Module:
    return nn.Sequential(Count("core"), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3), Count("head"))


@pytest.mark.own_engine  # counts in this process
@pytest.mark.parametrize(
    ("options", "core", "head"),
    [
        ({}, 1, 3),
        ({"choice_samples": "different"}, 3, 3),
        ({"choice_batches": 1}, 1 / 3, 1),
        ({"k": 1}, 0, 0),
        ({"warmup": 1}, 0, 0),
    ],
    ids=str,
)
def test_a_choice_sees_as_many_examples_as_it_should(options, core, head):
    """The core runs once for all heads, on steps times batch size examples and not on fewer."""
    algorithm = Facade(WORK, **{"k": 3} | options)
    world = prepare(toy(algorithm, model=counted, partition="iid", nodes=4, topology="complete"))
    assert {len(part) for part in world.parts} == {15}  # enough for 3 batches of 4
    with Lockstep(world, SerialTeam(world)) as engine:
        Count.seen.clear()
        engine.round(0, evaluate=False)
    assert Count.seen["core"] == 4 * 12 * core
    assert Count.seen["head"] == 4 * 12 * head


# Cores with weights of curvature

WIDE = Layout.of([("core.w", torch.empty(3)), ("head.w", torch.empty(1))], ("head",))


def test_cores_may_be_averaged_by_the_curvature_of_training():
    algorithm = Facade(k=1, core_weights="curvature")
    node: Node[Heads] = Node(
        id=0, num_nodes=2, num_examples=5, label_proportions=torch.ones(1), architecture="toy",
        layout=WIDE, params=torch.zeros(4), buffers=torch.zeros(2), seed=0,
        layouts={"toy": WIDE}, buffer_layouts={"toy": STATISTICS},
    )  # fmt: skip
    node.begin_round(0, ((1,), (0,)))
    node.state = algorithm.init(node)
    payload = {
        "core": torch.tensor([1.0, 2.0, 2.0]),
        "core_h": torch.tensor([0.6, 0.0, 0.0]),
        "core_b": torch.tensor([2.0]),
        "head": torch.tensor([6.0]),
        "head_b": torch.tensor([6.0]),
        "index": torch.tensor([0]),
    }
    # The norm over the core is 5; the head, whose curvature is 100, does not count.
    squares = torch.tensor([3.0, 4.0, 0.0, 100.0])
    trained = Trained(torch.full((4,), 4.0), torch.full((2,), 4.0), TrainStats(1.0, 5, squares))
    for accumulated in ([0.6, 0.8, 0.0], [1.2, 1.6, 0.0]):
        coroutine = algorithm.round(node)
        assert coroutine.send(None).squares
        sent = coroutine.send(trained).message.payload
        assert sent["core_h"].tolist() == pytest.approx(accumulated)
        coroutine.send(None)
        with pytest.raises(StopIteration):
            coroutine.send((Message(Envelope(1, 5, 1, "toy"), payload),))
        h = accumulated[0]
        # By hand: (h 4 + 0.6 1) / (h + 0.6); all of its own; without curvature, half and half.
        core = [(4 * h + 0.6) / (h + 0.6), 4.0, 3.0]
        assert node.params.tolist() == pytest.approx([*core, 5.0])
        assert node.buffers.tolist() == [3.0, 5.0]  # statistics have equal weights


def test_curvature_is_declared_and_has_its_cost():
    dimensions = Dimensions(LAYOUT, STATISTICS, nodes=3, classes=1, example=(1,))
    assert "core_h" not in Facade().message_schema(dimensions)
    curved = Facade(k=2, core_weights="curvature")
    assert curved.message_schema(dimensions)["core_h"].shape == (1,)
    cost = curved.cost(0, dimensions, examples=80)
    # One half of the model is the core. The curvature adds half a vector, and no pass.
    assert (cost.vectors, cost.state, cost.passes) == (1.5, 1.5, 0.0)
    assert cost.forward == 0.5 + 2 * 0.5
    different = Facade(k=2, choice_samples="different").cost(0, dimensions, examples=80)
    assert (different.vectors, different.state, different.forward) == (1.0, 1.0, 2.0)


# Limits and symmetries


def weights_of(result: pg.Result, node: int) -> list[Tensor]:
    """The parameters and running statistics of a node's model after the run."""
    state = result.module(node).state_dict()
    return [tensor for tensor in state.values() if tensor.is_floating_point()]


def heads_in(result: pg.Result) -> list[float]:
    """The recorded choices, by round and node."""
    rows = [row for row in result.rows if row["scope"] == "node"]
    return [row["notes"]["head"] for row in rows if "head" in row.get("notes", {})]


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "model", ["mlp:hidden=8", dropout, NORM], ids=["mlp", "dropout", "BatchNorm"]
)
@pytest.mark.parametrize("work", [WORK, LocalSGD(epochs=2, lr=0.1)], ids=["steps", "epochs"])
def test_one_head_is_epidemic_learning(model, work):
    """With the final mean. Nothing is drawn for the choice of a single head."""
    settings: dict[str, Any] = {"model": model, "topology": "dynamic-regular:k=2"}
    found, wanted = (pg.run(toy(one, **settings)) for one in (Facade(work, k=1), EL(work)))
    assert found.digest == wanted.digest
    for node in range(NODES):
        pairs = zip(weights_of(found, node), weights_of(wanted, node), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("model", ["mlp:hidden=8", NORM], ids=["mlp", "BatchNorm"])
@pytest.mark.parametrize("options", [{"k": 1}, {"k": 3, "warmup": 4}], ids=["k=1", "tied"])
@pytest.mark.parametrize("start", ["shared", "independent"])
def test_one_head_and_tied_heads_are_plain_averaging(model, options, start):
    settings: dict[str, Any] = {
        "model": model, "topology": "dynamic-regular:k=2", "rounds": 4, "init": {"start": start},
    }  # fmt: skip
    found = pg.run(toy(Facade(WORK, all_reduce=False, **options), **settings))
    wanted = pg.run(toy(DecAvg(WORK, weights="uniform"), **settings))
    assert found.digest == wanted.digest
    for node in range(5):
        pairs = zip(weights_of(found, node), weights_of(wanted, node), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@dataclass(frozen=True)
class Relabelled(Facade):
    """FACADE with its heads in reverse order."""

    def init(self, node: Node[Heads]) -> Heads:
        state = super().init(node)
        return Heads(state.heads.flip(0), state.buffers.flip(0), 0)


@pytest.mark.parametrize("own_head", ["always", "if_selected"])
def test_the_order_of_the_heads_does_not_matter(own_head):
    runs = [
        pg.run(toy(cls(WORK, k=3, own_head=own_head), model=NORM, rounds=4))
        for cls in (Facade, Relabelled)
    ]
    choices = [heads_in(result) for result in runs]
    assert choices[1] == [2 - head for head in choices[0]]
    assert len(set(choices[0])) > 1
    assert runs[0].digest == runs[1].digest


def test_heads_that_were_tied_are_chosen_at_random():
    """The losses of equal heads are equal to the last bit, also if the core runs only once."""
    result = pg.run(toy(Facade(WORK, k=2, warmup=2), rounds=3))
    first = heads_in(result)
    assert len(first) == 5
    assert set(first) == {0.0, 1.0}


def test_the_choice_for_evaluation_does_not_change_training():
    options: dict[str, Any] = {"k": 3, "warmup": 1, "choice_batches": 1, "all_reduce": False}
    fresh, last = (
        pg.run(toy(Facade(WORK, eval_head=choice, **options), rounds=4))
        for choice in ("train", "last")
    )
    assert heads_in(fresh) == heads_in(last)
    core = slice(0, 4 * 8 + 8)  # of mlp:hidden=8
    for one, other in zip(fresh.parameters, last.parameters, strict=True):
        assert torch.equal(one[core], other[core])
    assert fresh.digest != last.digest


@pytest.mark.own_engine  # collects what nodes do in this process
@pytest.mark.parametrize("head_init", ["shared", "own"])
def test_heads_start_equal_on_all_nodes_or_not(head_init):
    seen: list[Heads] = []

    class Spy(Facade):
        def init(self, node: Node[Heads]) -> Heads:
            seen.append(super().init(node))
            return seen[-1]

    pg.run(toy(Spy(WORK, k=2, head_init=head_init), rounds=1))
    first, second = seen[0].heads, seen[1].heads
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first, second) == (head_init == "shared")


@pytest.mark.own_engine  # looks into the shard
def test_with_independent_starts_warm_up_shares_all_layers():
    """Nodes start from different models, and all heads of a node are that of its model."""
    algorithm = Facade(WORK, k=3, warmup=2)
    world = prepare(toy(algorithm, init={"start": "independent"}))
    team = SerialTeam(world)
    nodes = [runtime.node for runtime in team.shard.members.values()]
    with Lockstep(world, team) as engine:
        for round in range(3):
            for node in nodes:
                own = node.params[node.layout.part("head")]
                assert all(torch.equal(head, own) for head in node.state.heads)
            assert not torch.equal(nodes[0].params, nodes[1].params)
            if round < 2:
                engine.round(round, evaluate=True)
        engine.round(2, evaluate=True)
    assert not all(torch.equal(head, nodes[0].state.heads[0]) for head in nodes[0].state.heads)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 0}, "k must be at least 1 head, got 0"),
        ({"choice_batches": 0}, "choice_batches must be at least 1, got 0"),
        ({"test_choice_batches": 0}, "test_choice_batches must be at least 1, got 0"),
        ({"test_choice_batches": 5, "eval_head": "last"}, "has no effect with eval_head=last"),
        ({"warmup": -1}, "warmup must be at least 0 rounds, got -1"),
        ({"own_head": "never"}, "own_head"),
        ({"head_init": "own", "warmup": 2}, "head_init=own has no effect with warmup=2"),
    ],
)
def test_bad_options_are_rejected(options, text):
    with pytest.raises(InputError, match=text):
        Facade(**options)


def test_a_model_without_a_core_is_rejected():
    with pytest.raises(InputError, match="facade requires a model with a core and a head"):
        pg.run(toy(Facade(WORK), model="logistic"))


def test_momentum_that_passes_from_head_to_head_is_pointed_out():
    kept = LocalSGD(momentum=0.9, keep_optimizer=True)
    assert len(list(Facade(kept).caveats())) == 1
    assert not list(Facade(kept, k=1).caveats())


# Clusters


def clustered(**changes: Any) -> pg.Experiment:
    """Six nodes with upright digits and two with digits upside down."""
    settings: dict[str, Any] = {
        "algorithm": Facade(LocalSGD(steps=5, batch_size=8, lr=0.1), warmup=3),
        "dataset": "digits",
        "model": "mlp:hidden=32",
        "nodes": 8,
        "clusters": pg.Clusters((6, 2), "rotate"),
        "topology": "dynamic-regular:k=4",
        "partition": "iid",
        "rounds": 25,
        "init": {"start": "shared"},
        "engine": {"name": "serial"},
        "evaluation": {"every": 25},
        "seed": 1,
    }
    return pg.Experiment(**settings | changes)


@pytest.mark.slow
def test_two_clusters_end_with_different_heads():
    result = pg.run(clustered())
    rows = [row for row in result.rows if row["scope"] == "node" and row["round"] == 25]
    heads = heads_in(result)[-8:]
    assert heads == [1.0 - heads[-1]] * 6 + [heads[-1]] * 2
    last = [row["accuracy"] for row in rows if row.get("final")]
    plain = pg.run(clustered(algorithm=DecAvg(LocalSGD(steps=5, batch_size=8, lr=0.1))))
    minority = [row["accuracy"] for row in plain.rows if row["scope"] == "node"][-2:]
    assert min(last[-2:]) > max(minority) + 0.1
    # After the all-reduce, the nodes of a cluster have one model.
    parameters = result.parameters
    assert torch.equal(parameters[0], parameters[5])
    assert torch.equal(parameters[6], parameters[7])
    assert not torch.equal(parameters[0], parameters[6])


def test_rows_of_clusters_survive_a_resume(tmp_path):
    clusters = pg.Clusters((NODES - 2, 2), shift=mirrored)
    experiment = toy(Facade(WORK, k=2, eval_head="test"), clusters=clusters, rounds=4)
    with pytest.raises(Stopped):
        pg.run(experiment, tmp_path / "run", checkpoint_every=2, watch=stop_in_round_three)
    resumed = pg.resume(tmp_path / "run", experiment=experiment, engine={"name": "serial"})
    rows = [
        [row for row in result.rows if row["scope"] == "group"]
        for result in (resumed, pg.run(experiment))
    ]
    assert rows[0] == rows[1]
    # Two clusters, at the start, in four rounds and after the final step.
    assert len(rows[0]) == 2 * 6
    assert all(sum(map(sum, row["confusion"])) for row in rows[0])


@pytest.mark.slow
@pytest.mark.own_engine
def test_eight_real_peers_in_two_clusters_end_with_the_bits_of_the_simulator(tmp_path):
    experiment = clustered(rounds=5, evaluation={"every": 2})
    wanted = pg.run(experiment)
    peers = run_peers(experiment, transports=OverSockets(tmp_path))
    assert len(peers) == 8
    for peer, params in zip(peers, wanted.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
        assert dict(peer.counters) == {}


MIXED = {"model": ["mlp:hidden=8", "mlp:hidden=6"], "topology": "complete"}
SELDOM = {"evaluation": {"every": 3, "at": "end"}}
PAPER = Facade(WORK, k=3, warmup=1)
CODE = replace(PAPER, choice_samples="different", test_choice_batches=4, eval_head="test")


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        (PAPER, {"model": NORM}),
        (PAPER, MIXED),
        (replace(PAPER, all_reduce=False), SELDOM),
        (CODE, SELDOM),
        (replace(PAPER, core_weights="curvature"), {"model": NORM}),
    ],
    ids=["BatchNorm", "architectures", "seldom", "code", "curvature"],
)
def test_engines_and_peers_give_the_same_bits(algorithm, changes):
    experiment = toy(algorithm, rounds=4, **changes)
    serial = pg.run(experiment)
    pool = pg.run(toy(algorithm, rounds=4, engine={"name": "pool", "workers": 2}, **changes))
    assert pool.digest == serial.digest
    for peer, wanted in zip(run_peers(experiment), serial.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert dict(peer.counters) == {}
