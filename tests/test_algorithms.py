"""DecAvg and DecHW by numbers: a few nodes, scripted training and curvature, results by hand."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import pytest
import torch
import torch.nn.functional as F
from reference import aggregation as reference
from torch import Tensor, nn

from peerage import Algorithm, DecAvg, DecHW, Local, Node
from peerage.curvature import Curvature
from peerage.errors import InputError
from peerage.requests import Message, Receive, Send
from peerage.testing import NODES, blobs, dealt, simulate, toy
from peerage.training import LocalSGD, Train, Trained, TrainStats
from peerage.vectors import Layout

PAIR = ((1,), (0,))
PATH = ((1,), (0, 2), (1,))

Values = Sequence[Sequence[float]]  # node -> vector


@dataclass
class Stage:
    """Nodes whose training and curvature are scripted, and the messages between them."""

    algorithm: Algorithm[Any]
    graph: tuple[tuple[int, ...], ...]
    examples: Sequence[int]
    buffers: Values
    nodes: list[Node[Any]] = field(default_factory=list)
    posted: list[Send] = field(default_factory=list)  # in the last round
    round: int = -1

    def play(self, x: Values, h: Values, mute: Sequence[int] = ()) -> list[list[float]]:
        """One round: parameters after training, curvatures, and nodes whose messages are lost."""
        self.round += 1
        self.posted = []
        if not self.nodes:
            self.nodes = [self.node(i, len(x[i])) for i in range(len(x))]
        boxes: dict[tuple[int, int], Message] = {}
        waiting = []
        for node in self.nodes:
            node.enter(self.round, self.graph)
            if self.round == 0:
                node.state = self.algorithm.init(node)
            coroutine = self.algorithm.round(node)
            request = step(coroutine, None)
            while request is not None and not isinstance(request, Receive):
                request = step(coroutine, self.answer(node, request, x, h, boxes))
            waiting.append((node, coroutine, request))
        for node, coroutine, request in waiting:
            if request is not None:
                heard = [boxes[node.id, s] for s in request.senders if s not in mute]
                assert step(coroutine, tuple(heard)) is None
        return [node.params.tolist() for node in self.nodes]

    def answer(
        self,
        node: Node[Any],
        request: Any,
        x: Values,
        h: Values,
        boxes: dict[tuple[int, int], Message],
    ) -> Any:
        if isinstance(request, Train):
            return Trained(torch.tensor(x[node.id]), request.buffers, TrainStats(0.0, 1))
        if isinstance(request, Curvature):
            return torch.tensor(h[node.id])
        assert isinstance(request, Send)
        self.posted.append(request)
        for peer in request.to:
            boxes[peer, node.id] = node.message(dict(request.payload))
        return None

    def node(self, id: int, size: int) -> Node[Any]:
        return Node(
            id=id,
            num_nodes=len(self.graph),
            num_examples=self.examples[id],
            label_proportions=torch.ones(1),
            architecture="net",
            layout=Layout.of([("w", torch.zeros(size))]),
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
    stage = Stage(DecAvg(weights=weights), PATH, [10, 30, 60], [[0.0], [4.0], [10.0]])
    found = stage.play(x=[[0.0], [4.0], [10.0]], h=[])
    assert [value for [value] in found] == pytest.approx(expected)
    # Running statistics are averaged with the same weights.
    assert [float(node.buffers) for node in stage.nodes] == pytest.approx(expected)
    assert [set(sent.payload) for sent in stage.posted] == [{"x", "b"}] * 3


def test_decavg_over_what_arrived():
    stage = Stage(DecAvg(), PATH, [10, 30, 60], [[0.0]] * 3)
    found = stage.play(x=[[0.0], [4.0], [10.0]], h=[], mute=[2])
    assert [value for [value] in found] == pytest.approx([3.0, 3.0, 8.0])


def test_local_sends_nothing():
    stage = Stage(Local(), PATH, [10, 30, 60], [[0.0]] * 3)
    assert stage.play(x=[[0.0], [4.0], [10.0]], h=[]) == [[0], [4], [10]]
    assert stage.posted == []


def test_decavg_refuses_unknown_weights():
    with pytest.raises(InputError, match="must be data, uniform or metropolis, got 'degree'"):
        DecAvg(weights="degree")


# DecHW: two nodes with 1 and 3 examples, so that the weights by data are 1/4 and 3/4

FIRST = {"x": [[1.0, 1.0], [5.0, 5.0]], "h": [[3.0, 4.0], [0.0, 5.0]]}  # units (.6, .8), (0, 1)
SECOND = {"x": [[0.0, 0.0], [10.0, 10.0]], "h": [[0.0, 2.0], [6.0, 8.0]]}  # units (0, 1), (.6, .8)


def pair(algorithm: DecHW) -> Stage:
    return Stage(algorithm, PAIR, [1, 3], [[0.0], [8.0]])


def test_dechw_in_the_first_round():
    stage = pair(DecHW(beta=0.3))  # beta does not count in the first round
    # Only node 0 knows of the first entry; the second is (.8 * 1 + 1 * 5) / 1.8.
    assert stage.play(**FIRST) == [pytest.approx([1.0, 5.8 / 1.8])] * 2
    torch.testing.assert_close(stage.nodes[0].state.h, torch.tensor([0.6, 0.8]))
    assert [set(sent.payload) for sent in stage.posted] == [{"x", "b", "h"}] * 2
    # Running statistics follow the data, never the curvature.
    assert [float(node.buffers) for node in stage.nodes] == [6.0, 6.0]


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
    stage = pair(algorithm)
    stage.play(**FIRST)
    assert stage.play(**SECOND) == [pytest.approx(expected)] * 2
    stopped = algorithm.theta == 1
    assert all(("h" in sent.payload) == (not stopped) for sent in stage.posted)


@pytest.mark.parametrize(
    ("after_stop", "expected"), [("average", [7.5, 7.5]), ("frozen", [5.0, 5.0])]
)
def test_dechw_after_theta_rounds(after_stop, expected):
    stage = pair(DecHW(theta=2, after_stop=after_stop))
    stage.play(**FIRST)
    stage.play(**SECOND)
    # The accumulated curvature of both nodes is (.6, 1.8) when it stops.
    for _ in range(2):
        assert stage.play(SECOND["x"], h=[]) == [pytest.approx(expected)] * 2


def test_dechw_without_curvature_averages_by_data():
    stage = pair(DecHW())
    assert stage.play(FIRST["x"], [[0.0, 0.0], [0.0, 0.0]]) == [[4.0, 4.0]] * 2
    assert not stage.nodes[0].state.h.any()


def test_dechw_without_the_own_model():
    stage = pair(DecHW(include_self=False))
    # Node 1 does not know of the first entry, so node 0 takes it by data, of which all is node 1's.
    assert stage.play(**FIRST) == [[5.0, 5.0], [1.0, 1.0]]
    assert [float(node.buffers) for node in stage.nodes] == [8.0, 0.0]
    alone = Stage(DecHW(include_self=False), ((), ()), [1, 3], [[0.0], [8.0]])
    assert alone.play(**FIRST) == [pytest.approx([1.0, 1.0]), pytest.approx([5.0, 5.0])]


def test_dechw_gives_no_frozen_weight_to_a_node_it_never_heard():
    stage = pair(DecHW(theta=1, after_stop="frozen"))
    stage.play(**FIRST, mute=[1])
    [heard, knows_both] = stage.play(SECOND["x"], h=[])
    assert heard == pytest.approx([0.0, 0.0])  # node 0 trusts itself only
    assert knows_both == pytest.approx([0.0, 10 / 1.8])


def test_dechw_asks_for_the_curvature_of_its_options():
    algorithm = DecHW(LocalSGD(batch_size=7), curvature="sample")
    node = pair(algorithm).node(0, 2)
    node.enter(0, PAIR)
    node.state = algorithm.init(node)
    coroutine = algorithm.round(node)
    train = step(coroutine, None)
    assert train.work == algorithm.local
    trained = Trained(torch.ones(2), train.buffers, TrainStats(0.0, 1))
    request = step(coroutine, trained)
    coroutine.close()
    assert (request.kind, request.batch_size) == ("sample", 7)
    assert torch.equal(request.params, torch.ones(2))  # after local training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "beta must be a number above 0, got 0.0"),
        ({"beta": float("nan")}, "beta must be a number above 0, got nan"),
        ({"accumulate": "ema", "beta": 1.5}, "beta must be at most 1 with accumulate=ema, got 1.5"),
        ({"theta": 0}, "theta must be at least 1 round, got 0"),
        ({"after_stop": "stop"}, "after_stop must be average or frozen, got 'stop'"),
        ({"accumulate": "mean"}, "accumulate must be sum or ema or none, got 'mean'"),
        ({"normalise": "max"}, "normalise must be unit or none, got 'max'"),
        (
            {"curvature": "batches"},
            "unknown curvature 'batches'; did you mean 'batch'? known: batch, full, online, sample",
        ),
    ],
)
def test_dechw_refuses_bad_options(options, message):
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
        new = [reference.unit(squares(x[i], data, dealt()[i], 3)) for i in range(NODES)]
        for i in range(NODES):
            beta = 0.5 if round else 1.0
            h[i] = [old + beta * value for old, value in zip(h[i], new[i], strict=True)]
        before = x
        x = []
        for i in range(NODES):
            group = [i, *path[i]]
            total = sum(len(dealt()[j]) for j in group)
            tau = [len(dealt()[j]) / total for j in group]
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
