"""Algorithms by numbers: a few nodes, scripted training and curvature, results by hand."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import aggregation as reference
from torch import Tensor, nn

import peerage as pg
from peerage import CFA, Algorithm, DecAvg, DecDiff, DecDiffVT, DecHW, Local, Node
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.errors import InputError, Interrupted
from peerage.requests import Envelope, Inbox, Message, Receive, Send
from peerage.testing import NODES, blobs, simulate, toy, unequal_parts
from peerage.vectors import Layout
from peerage.work.curvature import Curvature
from peerage.work.losses import CrossEntropy, VirtualTeacher
from peerage.work.training import LocalSGD, Train, Trained, TrainStats

PAIR = ((1,), (0,))
PATH = ((1,), (0, 2), (1,))

Values = Sequence[Sequence[float]]  # node -> vector


@dataclass
class ScriptedNetwork:
    """Nodes whose training and curvature are scripted, and the messages between them."""

    algorithm: Algorithm[Any]
    graph: tuple[tuple[int, ...], ...]
    examples: Sequence[int]
    buffers: Values
    shapes: Sequence[int] | None = None  # sizes of the model's tensors; one tensor by default
    nodes: list[Node[Any]] = field(default_factory=list)
    sent_requests: list[Send] = field(default_factory=list)  # in the last round
    trained: list[Train] = field(default_factory=list)  # in the last round
    curvature_requests: int = 0  # in all rounds
    round: int = -1

    def run_round(self, x: Values, h: Values, mute: Sequence[int] = ()) -> list[list[float]]:
        """One round: parameters after training, curvatures, and nodes whose messages are lost."""
        self.round += 1
        self.sent_requests, self.trained = [], []
        if not self.nodes:
            self.nodes = [self.node(i, len(x[i])) for i in range(len(x))]
        messages: dict[tuple[int, int], Message] = {}
        waiting = []
        for node in self.nodes:
            node.begin_round(self.round, self.graph)
            if self.round == 0:
                node.state = self.algorithm.init(node)
            coroutine = self.algorithm.round(node)
            request = step(coroutine, None)
            while request is not None and not isinstance(request, Receive):
                request = step(coroutine, self.answer(node, request, x, h, messages))
            waiting.append((node, coroutine, request))
        for node, coroutine, request in waiting:
            if request is not None:
                received = [messages[node.id, s] for s in request.senders if s not in mute]
                assert step(coroutine, tuple(received)) is None
        return [node.params.tolist() for node in self.nodes]

    def answer(
        self,
        node: Node[Any],
        request: Any,
        x: Values,
        h: Values,
        messages: dict[tuple[int, int], Message],
    ) -> Any:
        if isinstance(request, Train):
            self.trained.append(request)
            squares = torch.tensor(h[node.id]) if request.squares else None
            stats = TrainStats(0.0, 1, squares)
            return Trained(torch.tensor(x[node.id]), request.buffers, stats)
        if isinstance(request, Curvature):
            self.curvature_requests += 1
            return torch.tensor(h[node.id])
        assert isinstance(request, Send)
        self.sent_requests.append(request)
        for peer in request.to:
            messages[peer, node.id] = request.message
        return None

    def node(self, id: int, size: int) -> Node[Any]:
        tensors = [torch.zeros(part) for part in self.shapes or [size]]
        return Node(
            id=id,
            num_nodes=len(self.graph),
            num_examples=self.examples[id],
            label_proportions=torch.ones(1),
            architecture="net",
            layout=Layout.of([(f"w{i}", tensor) for i, tensor in enumerate(tensors)]),
            params=torch.zeros(size),
            buffers=torch.tensor(self.buffers[id]),
            seed=0,
        )


def step(coroutine: Coroutine[Any, Any, None], answer: Any) -> Any:
    try:
        return coroutine.send(answer)
    except StopIteration:
        return None


# DecAvg


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("data", [3.0, 7.2, 8.0]),  # 120/40, 720/100, 720/90
        ("uniform", [2.0, 14 / 3, 7.0]),
        ("metropolis", [4 / 3, 14 / 3, 8.0]),  # a third over each edge
    ],
)
def test_decavg_on_a_path(weights, expected):
    network = ScriptedNetwork(DecAvg(weights=weights), PATH, [10, 30, 60], [[0.0], [4.0], [10.0]])
    found = network.run_round(x=[[0.0], [4.0], [10.0]], h=[])
    assert [value for [value] in found] == pytest.approx(expected)
    # Running statistics are averaged with the same weights.
    assert [float(node.buffers) for node in network.nodes] == pytest.approx(expected)
    assert [set(sent.message.payload) for sent in network.sent_requests] == [{"x", "b"}] * 3


def test_decavg_over_what_arrived():
    network = ScriptedNetwork(DecAvg(), PATH, [10, 30, 60], [[0.0]] * 3)
    found = network.run_round(x=[[0.0], [4.0], [10.0]], h=[], mute=[2])
    assert [value for [value] in found] == pytest.approx([3.0, 3.0, 8.0])


def test_local_sends_nothing():
    network = ScriptedNetwork(Local(), PATH, [10, 30, 60], [[0.0]] * 3)
    assert network.run_round(x=[[0.0], [4.0], [10.0]], h=[]) == [[0], [4], [10]]
    assert network.sent_requests == []


def test_decavg_rejects_unknown_weights():
    known = "data, uniform, metropolis, graph"
    with pytest.raises(InputError, match=f"weights must be one of {known}; got 'degree'$"):
        DecAvg(weights="degree")
    with pytest.raises(
        InputError, match=r"order must .* got 'combine', did you mean 'combine-first'"
    ):
        DecAvg(order="combine")


def test_decavg_may_combine_before_it_trains():
    node = ScriptedNetwork(DecAvg(), ((1,), (0,)), [1, 1], [[0.0]] * 2).node(0, 1)
    node.begin_round(0, ((1,), (0,)))
    node.params = torch.tensor([2.0])
    coroutine = DecAvg(order="combine-first").round(node)
    assert step(coroutine, None).message.payload["x"].tolist() == [2.0]
    assert isinstance(step(coroutine, None), Receive)
    other = {"x": torch.tensor([6.0]), "b": torch.tensor([0.0])}
    request = step(coroutine, (Message(Envelope(1, 1, 1, "net"), other),))
    assert isinstance(request, Train)
    assert request.params.tolist() == [4.0]
    trained = Trained(torch.tensor([7.0]), request.buffers, TrainStats(0.0, 1, None))
    assert step(coroutine, trained) is None
    assert node.params.tolist() == [7.0]


def test_weights_of_the_graph():
    messages = tuple(Message(Envelope(sender, 1, 1, "m"), {}) for sender in (0, 1, 2))
    assert Inbox(messages, 1, {0: 1.0, 1: 2.0, 2: 5.0}).weights("graph").tolist() == [
        0.125,
        0.25,
        0.625,
    ]
    assert Inbox(messages, 1).weights("graph").tolist() == pytest.approx([1 / 3] * 3)


def test_metropolis_weights_of_an_inbox():
    ring = tuple(Message(Envelope(sender, 1, 2, "m"), {}) for sender in range(5))
    assert Inbox(ring[:3], 1).weights("metropolis").tolist() == pytest.approx([1 / 3] * 3)
    assert Inbox(ring, 1).weights("metropolis").tolist() == pytest.approx([1 / 5] * 5)
    with pytest.raises(InputError, match="require node 1's own message in its inbox; use nod"):
        Inbox(ring, 1).others().weights("metropolis")


def test_means_of_the_same_vectors_are_computed_once():
    x = [torch.tensor([0.0, 2.0]), torch.tensor([4.0, 6.0])]
    messages = tuple(Message(Envelope(sender, 1, 1, "m", 0), {"x": x[sender]}) for sender in (0, 1))
    shared: dict[Any, Any] = {}
    first, second = (Inbox(messages, owner, {}, shared) for owner in (0, 1))
    half = torch.tensor([0.5, 0.5])
    assert first.mean("x", half).tolist() == [2.0, 4.0]
    before = shared["x"]
    again = second.mean("x", half)
    assert shared["x"] is before  # nothing new was computed,
    assert again.tolist() == [2.0, 4.0]
    assert again.data_ptr() != before[1].data_ptr()  # and the answer is a copy
    before[1][0] = 7.0  # the node that got it first may change it: the next one must not see that
    assert second.mean("x", half).tolist() == [2.0, 4.0]
    assert second.mean("x", torch.tensor([0.25, 0.75])).tolist() == [3.0, 5.0]
    later = tuple(Message(Envelope(s, 1, 1, "m", 1), {"x": 10 * x[s]}) for s in (0, 1))
    assert Inbox(later, 0, {}, shared).mean("x", half).tolist() == [20.0, 40.0]
    analytic_gradients = tuple(Message(Envelope(s, 1, 1, "m"), {"x": 7 * x[s]}) for s in (0, 1))
    assert Inbox(analytic_gradients, 0, {}, shared).mean("x", half).tolist() == [14.0, 28.0]


# CFA: node 1 of the path receives from node 0 (10 examples) and node 2 (60 examples)

ALONE = ((), (), ())
SPREAD = [[0.0], [4.0], [10.0]]


def path_of_three(
    algorithm: Algorithm[Any], graph: tuple[tuple[int, ...], ...] = PATH
) -> ScriptedNetwork:
    return ScriptedNetwork(algorithm, graph, [10, 30, 60], SPREAD)


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [
        (1.0, [4.0, 60 / 7, 4.0]),  # the neighbours' mean alone: (10 * 0 + 60 * 10) / 70
        (0.5, [2.0, (4 + 60 / 7) / 2, 7.0]),
        (0.25, [1.0, 3 + 15 / 7, 8.5]),
        (-1.0, [4.0, (4 + 60 / 7) / 2, 4.0]),  # the nodes have 1, 2 and 1 neighbours
    ],
)
def test_cfa_on_a_path(epsilon, expected):
    network = path_of_three(CFA(epsilon=epsilon))
    found = network.run_round(x=SPREAD, h=[])
    assert [value for [value] in found] == pytest.approx(expected)
    # The buffers are as far apart as the models here, and go the same way.
    assert [float(node.buffers) for node in network.nodes] == pytest.approx(expected)
    assert [set(sent.message.payload) for sent in network.sent_requests] == [{"x", "b"}] * 3


@pytest.mark.parametrize("algorithm", [CFA(), CFA(epsilon=-1.0), DecDiff()], ids=str)
def test_without_neighbours_or_messages_a_node_keeps_its_model(algorithm):
    alone = path_of_three(algorithm, ALONE)
    assert alone.run_round(x=SPREAD, h=[]) == SPREAD
    deaf = path_of_three(algorithm)
    assert deaf.run_round(x=SPREAD, h=[], mute=[0, 1, 2]) == SPREAD
    for network in (alone, deaf):
        assert [node.buffers.tolist() for node in network.nodes] == SPREAD


def test_cfa_over_what_arrived():
    network = path_of_three(CFA(epsilon=-1.0))
    found = network.run_round(x=SPREAD, h=[], mute=[2])
    # Node 1 receives from node 0 only, and still counts two neighbours.
    assert [value for [value] in found] == pytest.approx([4.0, 2.0, 4.0])


@pytest.mark.parametrize("epsilon", [0.0, 1.01, -0.5, -2.0, float("nan"), float("inf")])
def test_cfa_rejects_a_step_that_is_none(epsilon):
    with pytest.raises(InputError) as caught:
        CFA(epsilon=epsilon)
    assert str(caught.value) == f"epsilon must lie in (0, 1] or be -1, got {epsilon}"


# DecDiff: a model of two tensors, of sizes 2 and 1

TENSORS = [[0.0, 0.0, 0.0], [3.0, 4.0, 12.0]]  # they differ by 5 and by 12, together by 13


@pytest.mark.parametrize(
    ("algorithm", "moved"),
    [
        (DecDiff(), [3 / 6, 4 / 6, 12 / 13]),
        (DecDiff(s=5.0), [3 / 10, 4 / 10, 12 / 17]),
        (DecDiff(granularity="model"), [3 / 14, 4 / 14, 12 / 14]),
        (DecDiff(granularity="model", s=0.5), [3 / 13.5, 4 / 13.5, 12 / 13.5]),
    ],
    ids=str,
)
def test_decdiff_divides_by_the_norm_of_a_tensor_or_of_the_model(algorithm, moved):
    network = ScriptedNetwork(algorithm, PAIR, [1, 3], [[0.0], [8.0]], shapes=[2, 1])
    up, down = network.run_round(x=TENSORS, h=[])
    assert up == pytest.approx(moved)
    assert down == pytest.approx([a - b for a, b in zip(TENSORS[1], moved, strict=True)])
    # Running statistics stay each node's own, and are not sent.
    assert [float(node.buffers) for node in network.nodes] == [0.0, 8.0]
    assert [set(sent.message.payload) for sent in network.sent_requests] == [{"x"}] * 2


@pytest.mark.parametrize(
    ("weights", "mean"),
    [("data", 60 / 7), ("uniform", 5.0)],  # of nodes 0 and 2, without node 1 itself
)
def test_decdiff_weighs_the_neighbours(weights, mean):
    network = path_of_three(DecDiff(weights=weights))
    [first], [second], [third] = network.run_round(x=SPREAD, h=[])
    delta = mean - 4
    assert second == pytest.approx(4 + delta / (delta + 1))
    assert (first, third) == pytest.approx((4 / 5, 10 - 6 / 7))  # one neighbour, whatever weights


entries = st.just(0.0) | st.floats(1e-3, 1e3) | st.floats(-1e3, -1e-3)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(entries, min_size=5, max_size=5),
    st.sampled_from([[5], [2, 3], [1, 1, 3]]),
    st.sampled_from(["tensor", "model"]),
    st.floats(1, 10),
)
def test_a_step_of_decdiff_is_shorter_than_the_distance_and_than_one(values, sizes, granularity, s):
    delta = torch.tensor(values)
    step_taken = DecDiff(granularity=granularity, s=s).step(delta, sizes)
    blocks = sizes if granularity == "tensor" else [5]
    for way, gone in zip(delta.split(blocks), step_taken.split(blocks), strict=True):
        long, short = float(way.double().norm()), float(gone.double().norm())
        assert short < 1
        assert short < long or long == 0
        assert short == pytest.approx(long / (long + s), rel=1e-4)
        # In the direction of the difference: parallel vectors have the product of their lengths.
        assert float(way.double() @ gone.double()) == pytest.approx(long * short, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "metropolis"}, "weights must be one of data, uniform; got 'metropolis'"),
        ({"granularity": "layer"}, "granularity must be one of tensor, model; got 'layer'"),
        ({"s": 0.0}, "s must be a number above 0, got 0.0"),
        ({"s": float("nan")}, "s must be a number above 0, got nan"),
        ({"s": float("inf")}, "s must be a number above 0, got inf"),
    ],
)
@pytest.mark.parametrize("cls", [DecDiff, DecDiffVT])
def test_decdiff_rejects_bad_options(cls, options, message):
    with pytest.raises(InputError) as caught:
        cls(**options)
    assert str(caught.value) == message


def test_decdiff_vt_trains_with_its_teacher_and_combines_as_decdiff():
    work = LocalSGD(epochs=2, batch_size=9, lr=0.3)
    taught, plain = path_of_three(DecDiffVT(work, confidence=0.9)), path_of_three(DecDiff(work))
    assert taught.run_round(x=SPREAD, h=[]) == plain.run_round(x=SPREAD, h=[])
    with_teacher = LocalSGD(epochs=2, batch_size=9, lr=0.3, loss=VirtualTeacher(0.9))
    assert [order.work for order in taught.trained] == [with_teacher] * 3
    assert [order.work for order in plain.trained] == [work] * 3
    assert taught.algorithm.local.loss == CrossEntropy()  # what the experiment says stays


def test_decdiff_vt_rejects_another_loss_and_a_bad_confidence():
    with pytest.raises(InputError, match=r"has its own loss, got VirtualTeacher\(.* decdiff w"):
        DecDiffVT(LocalSGD(loss=VirtualTeacher(0.5)))
    with pytest.raises(InputError, match=r"confidence must lie in \(0, 1\], got 1\.5"):
        DecDiffVT(confidence=1.5)


# DecHW: two nodes with 1 and 3 examples, so that the weights by data are 1/4 and 3/4

FIRST = {"x": [[1.0, 1.0], [5.0, 5.0]], "h": [[3.0, 4.0], [0.0, 5.0]]}  # units (.6, .8), (0, 1)
SECOND = {"x": [[0.0, 0.0], [10.0, 10.0]], "h": [[0.0, 2.0], [6.0, 8.0]]}  # units (0, 1), (.6, .8)


def pair(algorithm: DecHW) -> ScriptedNetwork:
    return ScriptedNetwork(algorithm, PAIR, [1, 3], [[0.0], [8.0]])


@pytest.mark.slow
def test_dechw_in_the_first_round():
    network = pair(DecHW(beta=0.3))  # beta does not count in the first round
    # Only node 0 knows of the first entry; the second is (.8 * 1 + 1 * 5) / 1.8.
    assert network.run_round(**FIRST) == [pytest.approx([1.0, 5.8 / 1.8])] * 2
    torch.testing.assert_close(network.nodes[0].state.h, torch.tensor([0.6, 0.8]))
    assert [set(sent.message.payload) for sent in network.sent_requests] == [{"x", "b", "h"}] * 2
    # Running statistics follow the data, never the curvature.
    assert [float(node.buffers) for node in network.nodes] == [6.0, 6.0]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        # Accumulated: (.6, 1.8) on both nodes.
        (DecHW(), [5.0, 5.0]),
        # (.6, 1.3) and (.3, 1.4).
        (DecHW(beta=0.5), [10 * 0.3 / 0.9, 10 * 1.4 / 2.7]),
        # 3/4 (.6, .8) + 1/4 (0, 1) = (.45, .85) and 3/4 (0, 1) + 1/4 (.6, .8) = (.15, .95).
        (DecHW(accumulate="ema", beta=0.25), [10 * 0.15 / 0.6, 10 * 0.95 / 1.8]),
        # The second round alone, whatever beta is: (0, 1) and (.6, .8).
        (DecHW(accumulate="none", beta=0.5), [10.0, 10 * 0.8 / 1.8]),
        # Raw: (3, 4) + (0, 2) and (0, 5) + (6, 8).
        (DecHW(normalise="none"), [10 * 6 / 9, 10 * 13 / 19]),
        # Plain averaging by data after the first round.
        (DecHW(theta=1), [7.5, 7.5]),
        # The curvature of the first round for ever: (.6, .8) and (0, 1).
        (DecHW(theta=1, after_stop="frozen"), [0.0, 10 / 1.8]),
        # Not stopped yet.
        (DecHW(theta=2), [5.0, 5.0]),
        (DecHW(theta=2, after_stop="frozen"), [5.0, 5.0]),
    ],
    ids=str,
)
def test_dechw_in_the_second_round(algorithm, expected):
    network = pair(algorithm)
    network.run_round(**FIRST)
    assert network.run_round(**SECOND) == [pytest.approx(expected)] * 2
    stopped = algorithm.theta == 1
    assert all(("h" in sent.message.payload) == (not stopped) for sent in network.sent_requests)


@pytest.mark.parametrize(
    ("after_stop", "expected"), [("average", [7.5, 7.5]), ("frozen", [5.0, 5.0])]
)
def test_dechw_after_theta_rounds(after_stop, expected):
    network = pair(DecHW(theta=2, after_stop=after_stop))
    network.run_round(**FIRST)
    network.run_round(**SECOND)
    # The accumulated curvature of both nodes is (.6, 1.8) when it stops.
    for _ in range(2):
        assert network.run_round(SECOND["x"], h=[]) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("accumulate", ["sum", "ema"])
def test_dechw_takes_the_first_curvature_of_a_node_in_full_whenever_it_comes(accumulate):
    algorithm = DecHW(beta=0.25, accumulate=accumulate)
    node = pair(algorithm).node(0, 2)
    node.state = algorithm.init(node)
    keep = 1.0 if accumulate == "sum" else 0.75
    for round, h, expected in (
        (4, [0.0, 0.0], [0.0, 0.0]),  # which says nothing
        (5, [3.0, 4.0], [0.6, 0.8]),
        (6, [2.0, 0.0], [keep * 0.6 + 0.25, keep * 0.8]),
    ):
        node.begin_round(round, PAIR)
        node.state = replace(node.state, h=algorithm.add(node, torch.tensor(h)))
        assert node.state.h.tolist() == pytest.approx(expected)


def test_a_node_of_dechw_that_joins_late_begins_with_its_whole_curvature(tmp_path):
    algorithm = DecHW(LocalSGD(epochs=1, batch_size=4), beta=0.5)
    experiment = toy(algorithm, rounds=4, faults={"join": "2@3"})
    world = prepare(experiment)
    norms = []
    with Lockstep(world, SerialTeam(world)) as engine:
        for round in range(3):
            engine.round(round, evaluate=False)
            members = engine.team.shard.members
            norms.append([float(members[node].node.state.h.norm()) for node in (1, 2)])
    assert norms[0] == pytest.approx([1.0, 0.0], abs=1e-5)
    assert 1.0 < norms[1][0] <= 1.5
    assert norms[2][1] == pytest.approx(1.0, abs=1e-5)

    def stop(row: Any) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        pg.run(experiment, tmp_path / "run", checkpoint_every=1, watch=stop)
    resumed = pg.resume(tmp_path / "run", experiment=experiment)
    assert resumed.digest == pg.run(experiment).digest


def test_dechw_without_curvature_averages_by_data():
    network = pair(DecHW())
    assert network.run_round(FIRST["x"], [[0.0, 0.0], [0.0, 0.0]]) == [[4.0, 4.0]] * 2
    assert not network.nodes[0].state.h.any()


def test_dechw_without_the_nodes_own_model():
    network = pair(DecHW(include_self=False))
    # Node 1 does not know of the first entry, so node 0 takes it by data, of which all is node 1's.
    assert network.run_round(**FIRST) == [[5.0, 5.0], [1.0, 1.0]]
    assert [float(node.buffers) for node in network.nodes] == [8.0, 0.0]
    alone = ScriptedNetwork(DecHW(include_self=False), ((), ()), [1, 3], [[0.0], [8.0]])
    assert alone.run_round(**FIRST) == [pytest.approx([1.0, 1.0]), pytest.approx([5.0, 5.0])]


def test_dechw_gives_no_frozen_weight_to_a_node_without_messages():
    network = pair(DecHW(theta=1, after_stop="frozen"))
    network.run_round(**FIRST, mute=[1])
    [received, knows_both] = network.run_round(SECOND["x"], h=[])
    assert received == pytest.approx([0.0, 0.0])  # node 0 trusts itself only
    assert knows_both == pytest.approx([0.0, 10 / 1.8])


def test_dechw_asks_for_the_curvature_of_its_options():
    algorithm = DecHW(LocalSGD(batch_size=7), curvature="sample")
    node = pair(algorithm).node(0, 2)
    node.begin_round(0, PAIR)
    node.state = algorithm.init(node)
    coroutine = algorithm.round(node)
    train = step(coroutine, None)
    assert train.work == algorithm.local
    trained = Trained(torch.ones(2), train.buffers, TrainStats(0.0, 1))
    request = step(coroutine, trained)
    coroutine.close()
    assert (request.kind, request.batch_size) == ("sample", 7)
    assert torch.equal(request.params, torch.ones(2))  # after local training


def test_online_curvature_comes_with_training_and_is_not_asked_for():
    network, asked = pair(DecHW(curvature="online")), pair(DecHW())
    for values in (FIRST, SECOND):
        assert network.run_round(**values) == asked.run_round(**values)
        assert [order.squares for order in network.trained] == [True] * 2
        assert [order.squares for order in asked.trained] == [False] * 2
    assert (network.curvature_requests, asked.curvature_requests) == (0, 4)
    stopped = pair(DecHW(curvature="online", theta=1))
    stopped.run_round(**FIRST)
    stopped.run_round(SECOND["x"], h=[])
    assert [order.squares for order in stopped.trained] == [False] * 2  # no use for them any more


curvatures = st.lists(
    st.lists(st.just(0.0) | st.floats(1e-3, 1e3), min_size=3, max_size=3), min_size=3, max_size=3
)


@settings(deadline=None, max_examples=40)
@given(curvatures, curvatures, st.sampled_from([1e-3, 0.3, 7.0, 1e3]), st.booleans())
@pytest.mark.parametrize("normalise", ["none", "unit"])
def test_the_scale_of_all_curvatures_together_does_not_matter(normalise, first, second, c, own):
    algorithm = DecHW(normalise=normalise, include_self=own)
    x = [[1.0, 2.0, 3.0], [-4.0, 0.0, 9.0], [5.0, 5.0, -5.0]]
    ends = []
    for factor in (1.0, c):
        network = path_of_three(algorithm)
        for h in (first, second):
            end = network.run_round(x, [[factor * value for value in row] for row in h])
        ends.append(torch.tensor(end))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-4, atol=1e-4)


def test_dechw_with_uniform_weights_where_curvature_does_not_decide():
    nothing = [[0.0, 0.0], [0.0, 0.0]]
    silent = pair(DecHW(weights="uniform"))
    assert silent.run_round(FIRST["x"], nothing) == [[3.0, 3.0]] * 2  # by data it would be 4
    assert [float(node.buffers) for node in silent.nodes] == [4.0, 4.0]  # by data 6
    stopped = pair(DecHW(weights="uniform", theta=1))
    # Where there is curvature, it decides as ever.
    assert stopped.run_round(**FIRST) == [pytest.approx([1.0, 5.8 / 1.8])] * 2
    assert stopped.run_round(SECOND["x"], h=[]) == [[5.0, 5.0]] * 2  # by data it would be 7.5


def test_dechw_notes_the_norm_of_each_curvature():
    network = pair(DecHW(theta=2))
    network.run_round(**FIRST)
    assert [node.notes for node in network.nodes] == [{"curvature": 5.0}] * 2
    network.run_round(**SECOND)
    assert [node.notes for node in network.nodes] == [{"curvature": 2.0}, {"curvature": 10.0}]
    network.run_round(SECOND["x"], h=[])
    assert [node.notes for node in network.nodes] == [{}, {}]  # none was computed


@pytest.mark.parametrize(
    ("options", "entries", "weights"),
    [
        # Accumulated second entries: .8 and 1, then 1.8 and 1.8.
        ({}, [(0.8, 1.0), (1.8, 1.8)], [(0.8 / 1.8, 1 / 1.8), (0.5, 0.5)]),
        ({"normalise": "none"}, [(4, 5), (6, 13)], [(4 / 9, 5 / 9), (6 / 19, 13 / 19)]),
        # The own model is not part of the own average.
        ({"include_self": False}, [(0.8, 1.0), (1.8, 1.8)], [(0, 0), (0, 0)]),
    ],
    ids=str,
)
def test_dechw_traces_an_entry_and_its_weight(options, entries, weights):
    network = pair(DecHW(trace=1, **options))
    for values, entry, weight in zip((FIRST, SECOND), entries, weights, strict=True):
        network.run_round(**values)
        found = [node.notes for node in network.nodes]
        assert [notes["entry"] for notes in found] == pytest.approx(entry)
        assert [notes["weight"] for notes in found] == pytest.approx(weight)
        assert all(set(notes) == {"curvature", "entry", "weight"} for notes in found)


def test_the_traced_weight_is_that_by_data_where_there_is_no_curvature():
    network = pair(DecHW(trace=0))
    network.run_round(FIRST["x"], [[0.0, 1.0], [0.0, 1.0]])
    assert [node.notes["weight"] for node in network.nodes] == [0.25, 0.75]
    alone = ScriptedNetwork(DecHW(trace=1, include_self=False), ((), ()), [1, 3], [[0.0], [8.0]])
    alone.run_round(**FIRST)
    assert [node.notes["weight"] for node in alone.nodes] == [1.0, 1.0]


def test_a_trace_beyond_the_model_is_rejected_before_any_training():
    node = pair(DecHW()).node(0, 2)
    DecHW(trace=1).check_layout(node.layout)
    with pytest.raises(InputError) as caught:
        DecHW(trace=2).check_layout(node.layout)
    assert str(caught.value) == "trace=2 is not a parameter in scope=all, which has 0 to 1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be a number above 0, got 0.0"),
        ({"beta": float("nan")}, "beta must be a number above 0, got nan"),
        ({"accumulate": "ema", "beta": 1.5}, "beta must be at most 1 with accumulate=ema, got 1.5"),
        ({"theta": 0}, "theta must be at least 1 round, got 0"),
        ({"after_stop": "stop"}, "after_stop must be one of average, frozen; got 'stop'"),
        (
            {"accumulate": "mean"},
            "accumulate must be one of sum, ema, none; got 'mean', did you mean 'ema'?",
        ),
        ({"normalise": "max"}, "normalise must be one of unit, none; got 'max'"),
        ({"weights": "metropolis"}, "weights must be one of data, uniform; got 'metropolis'"),
        ({"trace": -1}, "trace must be the number of a parameter, got -1"),
        (
            {"curvature": "batches"},
            "curvature must be one of batch, sample, full, online; got 'batches', "
            "did you mean 'batch'?",
        ),
    ],
)
def test_dechw_rejects_bad_options(options, message):
    with pytest.raises(InputError) as caught:
        DecHW(**options)
    assert str(caught.value) == message


# With a real model: everything once more, slowly


def test_dechw_with_a_real_model_against_a_slow_simulation():
    path = nx.path_graph(NODES)
    work = LocalSGD(epochs=1, batch_size=3, lr=0.0)
    algorithm = DecHW(work, beta=0.5)
    ended = simulate(toy(algorithm, topology=path, model="logistic"))
    data = blobs()
    x = [start.tolist() for start in ended.start]
    h = [[0.0] * 15 for _ in x]
    for round in range(3):
        new = [reference.unit(squares(x[i], data, unequal_parts()[i], 3)) for i in range(NODES)]
        for i in range(NODES):
            beta = 0.5 if round else 1.0
            h[i] = [old + beta * value for old, value in zip(h[i], new[i], strict=True)]
        before = x
        x = []
        for i in range(NODES):
            group = [i, *path[i]]
            total = sum(len(unequal_parts()[j]) for j in group)
            tau = [len(unequal_parts()[j]) / total for j in group]
            x.append(
                reference.curvature_weighted([before[j] for j in group], [h[j] for j in group], tau)
            )
    for end, expected in zip(ended.end, x, strict=True):
        torch.testing.assert_close(end, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def squares(params: list[float], data: Any, part: Sequence[int], size: int) -> list[float]:
    """The sum over batches of the squared gradient of a linear model [3 x 4 + 3]."""
    model = nn.Linear(4, 3)
    nn.utils.vector_to_parameters(torch.tensor(params), model.parameters())
    total = torch.zeros(15)
    for start in range(0, len(part), size):
        batch = list(part[start : start + size])
        loss = F.cross_entropy(model(data.train_x[batch]), data.train_y[batch])
        gradients: tuple[Tensor, ...] = torch.autograd.grad(loss, list(model.parameters()))
        total += torch.cat([g.flatten() for g in gradients]).square()
    return total.tolist()
