"""FACADE by numbers, its limits, and the clusters that it finds."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support.networking import run_peers
from torch import Tensor, nn

import peerage as pg
from peerage import DecAvg, Facade, Layout, LocalSGD, Message, Node, TrainStats
from peerage.algorithms.facade import ALL, Heads
from peerage.errors import InputError
from peerage.requests import Envelope, Receive, Send
from peerage.testing import toy
from peerage.work.candidates import Losses
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
    assert node.notes == {"head": 1.0}
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
    assert drive(node, Facade(all_reduce=False), [], 0.0, [], final=True) == []


# Limits and symmetries


def weights_of(result: pg.Result, node: int) -> list[Tensor]:
    """The parameters and running statistics of a node's model after the run."""
    state = result.module(node).state_dict()
    return [tensor for tensor in state.values() if tensor.is_floating_point()]


def heads_in(result: pg.Result) -> list[float]:
    """The recorded choices, by round and node."""
    rows = [row for row in result.rows if row["scope"] == "node"]
    return [row["notes"]["head"] for row in rows if "head" in row.get("notes", {})]


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"k": 0}, "k must be at least 1 head, got 0"),
        ({"choice_batches": 0}, "choice_batches must be at least 1, got 0"),
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


MIXED = {"model": ["mlp:hidden=8", "mlp:hidden=6"], "topology": "complete"}


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize("changes", [{"model": NORM}, MIXED], ids=["BatchNorm", "architectures"])
def test_engines_and_peers_give_the_same_bits(changes):
    algorithm = Facade(WORK, k=3, warmup=1)
    experiment = toy(algorithm, rounds=4, **changes)
    serial = pg.run(experiment)
    pool = pg.run(toy(algorithm, rounds=4, engine={"name": "pool", "workers": 2}, **changes))
    assert pool.digest == serial.digest
    for peer, wanted in zip(run_peers(experiment), serial.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, wanted)
        assert dict(peer.counters) == {}
