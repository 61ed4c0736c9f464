"""DESA by numbers: its losses by hand, which messages are sent, synthesis, and the cache."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from peerage import DESA, Experiment, Local, Node, Proximal, Result, run
from peerage.algorithms.desa import AnchoredLoss
from peerage.data.datasets import Digits
from peerage.engine.prepare import prepare, work_cache
from peerage.errors import InputError
from peerage.randomness import torch_stream
from peerage.requests import Message, Receive, Send
from peerage.testing import CLASSES, NODES, blobs, simulate, toy, unequal_parts
from peerage.vectors import FlatModel, Layout, head_layer
from peerage.work import synthesis
from peerage.work.context import Examples, LocalContext
from peerage.work.losses import distillation, supervised_contrastive, with_features
from peerage.work.synthesis import Logits, Synthesis, Synthesise, synthesise
from peerage.work.training import LocalSGD, Train, Trained, TrainStats

SMALL = DESA(ipc=2, iterations=2)
PATH = ((1,), (0, 2), (1,))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A folder of its own for every test."""
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


# The losses

# Of two classes, a teacher with (T ln 3, 0) is sure by 3 to 1, and equal logits by 1 to 1.
KL = 0.75 * log(1.5) + 0.25 * log(0.5)


def test_distillation_by_hand():
    logits, teacher = torch.zeros(2, 2), torch.tensor([[2 * log(3), 0.0], [5.0, 5.0]])
    found = distillation(logits, teacher, temperature=2.0)
    torch.testing.assert_close(found, torch.tensor([4 * KL, 0.0]))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.floats(0.5, 30))
def test_distillation_of_equals_is_nothing_and_else_is_more(seed, temperature):
    rng = torch.Generator().manual_seed(seed)
    z, other = torch.randn(2, 4, 3, generator=rng)
    assert (distillation(z, z + 2, temperature).abs() < 1e-3).all()  # softmax ignores a shift
    assert (distillation(z, other, temperature) > -1e-3).all()


def test_contrast_by_hand():
    f = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])  # only their directions count
    a = torch.tensor([[5.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    # The third has no anchor of its class and adds nothing. Cosines: (1, 0, 0) and (0, 1, 1).
    found = supervised_contrastive(f, torch.tensor([0, 1, 7]), a, torch.tensor([0, 1, 1]), 0.5)
    expected = ((log(exp(2) + 2) - 2) + (log(1 + 2 * exp(2)) - 2)) / 2
    assert float(found) == pytest.approx(expected, rel=1e-5)


def test_contrast_without_any_pair_is_nothing():
    found = supervised_contrastive(
        torch.ones(2, 3), torch.tensor([0, 1]), torch.ones(1, 3), torch.tensor([2]), 0.07
    )
    assert float(found) == 0.0


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6))
def test_contrast_against_the_formula_term_by_term(seed):
    rng = torch.Generator().manual_seed(seed)
    f, a = torch.randn(4, 3, generator=rng), torch.randn(5, 3, generator=rng)
    y, y_a = torch.randint(3, (4,), generator=rng), torch.randint(3, (5,), generator=rng)
    terms = []
    for i in range(4):
        near = [exp(float(f[i] @ a[j] / f[i].norm() / a[j].norm()) / 0.2) for j in range(5)]
        own = [j for j in range(5) if y_a[j] == y[i]]
        if own:
            terms.append(-sum(log(near[j] / sum(near)) for j in own) / len(own))
    expected = sum(terms) / max(len(terms), 1)
    found = supervised_contrastive(f, y, a, y_a, 0.2)
    assert float(found) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def identity() -> nn.Module:
    """Logits, features and examples are the same two numbers."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    module[1].weight.data = torch.eye(2)
    return module


def one_anchor(taught: float) -> dict[str, Tensor]:
    teacher = torch.tensor([[2 * log(3), 0.0]])
    return {
        "anchors": torch.zeros(1, 2),
        "labels": torch.tensor([0]),
        "teacher": teacher,
        "taught": torch.tensor([taught]),
    }


@pytest.mark.parametrize(
    ("options", "taught", "expected"),
    [
        ({}, 1.0, log(2) + 0.1 * log(2) + 0.9 * 4 * KL),
        ({"kl_reduction": "mean"}, 1.0, log(2) + 0.1 * log(2) + 0.9 * 2 * KL),
        ({}, 0.0, log(2) + 0.1 * log(2)),  # no message was about it
        ({"alpha": 0.5}, 1.0, log(2) + 0.5 * log(2) + 0.5 * 4 * KL),
        ({"lambda_own": 3.0, "lambda_kd": 2.0}, 1.0, 3 * log(2) + 0.2 * log(2) + 1.8 * 4 * KL),
        ({"lambda_kd": 0.0}, 1.0, log(2)),
    ],
    ids=str,
)
def test_the_loss_with_one_anchor_by_hand(options, taught, expected):
    # One anchor alone is as near as can be, whatever the features: there is no contrast.
    distillation_targets = AnchoredLoss(DESA(temperature=2.0, **options))
    loss = distillation_targets.prepare(identity(), one_anchor(taught), torch.Generator())
    found = loss(torch.zeros(1, 2), torch.tensor([0])).item()
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_loss_with_contrast_by_hand():
    options = DESA(lambda_kd=0.0, lambda_reg=2.0, contrast_temperature=1.0)
    given = {
        "anchors": torch.tensor([[3.0, 0.0], [0.0, 3.0]]),
        "labels": torch.tensor([0, 1]),
        "teacher": torch.zeros(2, 2),
        "taught": torch.zeros(2),
    }
    module = identity()
    loss = AnchoredLoss(options).prepare(module, given, torch.Generator())
    x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    found = loss(x, y)
    # Both examples have logits (1, 0) for their own and the other class, and so have the cosines.
    near = log(1 + exp(-1))
    assert found.item() == pytest.approx(near + 2 * near, rel=1e-5)
    # No layer with parameters makes these features, so that the contrast has no gradient.
    alone = AnchoredLoss(replace(options, lambda_reg=0.0)).prepare(module, given, torch.Generator())
    gradients = [torch.autograd.grad(loss, module[1].weight)[0] for loss in (found, alone(x, y))]
    torch.testing.assert_close(*gradients)


def test_features_of_anchors_are_detached():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    options = DESA(lambda_own=0.0, lambda_kd=0.0)
    given = {**one_anchor(0.0), "anchors": torch.randn(1, 2), "labels": torch.tensor([1])}
    loss = AnchoredLoss(options).prepare(module, given, torch.Generator())
    # No own example has the class of the anchor, so that only the anchors' own features are left.
    value = loss(torch.randn(1, 2), torch.tensor([0]))
    assert not torch.autograd.grad(value, module[0].weight)[0].any()


def test_an_anchor_batch_is_as_large_as_the_local_batch_and_redrawn():
    seen: list[Tensor] = []
    module = identity()
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    given = {
        "anchors": torch.arange(14.0).view(7, 2),
        "labels": torch.zeros(7, dtype=torch.long),
        "teacher": torch.zeros(7, 2),
        "taught": torch.ones(7),
    }
    loss = AnchoredLoss(DESA()).prepare(module, given, torch_stream(0, "test"))
    for size in (3, 3, 9):
        loss(torch.zeros(size, 2), torch.zeros(size, dtype=torch.long))
    first, second, whole = ({int(x) // 2 for x in batch[:, 0]} for batch in seen[1::2])
    assert len(first) == len(second) == 3  # no anchor twice
    assert first != second
    assert whole == set(range(7))  # there are no more


def test_features_are_what_the_last_linear_layer_sees():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Identity())
    x = torch.randn(5, 3)
    logits, features = with_features(module, head_layer(module), x)
    assert torch.equal(features, module[1](module[0](x)))
    assert torch.equal(logits, module(x))
    assert not module[2]._forward_pre_hooks


def test_a_model_without_features_is_rejected():
    with pytest.raises(InputError, match=r"Sequential has no linear layer.*ends with one"):
        head_layer(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten()))


# Which messages are sent: three nodes on a path, synthesis and models scripted


def run_scripted(
    algorithm: DESA,
    made: Sequence[dict[int, Tensor]],
    rounds: int = 1,
    graph: tuple[tuple[int, ...], ...] = PATH,
    lost: Callable[[int, int, int], bool] = lambda round, sender, to: False,
) -> tuple[list[Node[Any]], list[list[Train]], list[list[Send]]]:
    """The nodes, and for each round their requests for training and what they sent."""
    nodes = [scripted_node(i, len(made)) for i in range(len(made))]
    trained, sent = [], []
    for round in range(rounds):
        orders: list[Train] = []
        sent_now: list[Send] = []
        queues: dict[tuple[int, int], deque[Message]] = {}
        live = []
        for node in nodes:
            node.begin_round(round, graph)
            live.append((node, algorithm.round(node), None))
        while live:
            waiting = []
            for node, coroutine, answer in live:
                request = advance(coroutine, answer)
                while request is not None and not isinstance(request, Receive):
                    reply = None
                    if isinstance(request, Synthesise):
                        reply = made[node.id]
                    elif isinstance(request, Logits):  # returns the sender and the examples
                        reply = request.x[:, :1] + torch.tensor([100.0 * node.id, 0.0])
                    elif isinstance(request, Train):
                        orders.append(request)
                        reply = Trained(request.params, request.buffers, TrainStats(0.0, 1))
                    elif isinstance(request, Send):
                        sent_now.append(request)
                        message = request.message
                        for to in request.to:
                            if not lost(round, node.id, to):
                                queues.setdefault((to, node.id), deque()).append(message)
                    request = advance(coroutine, reply)
                if request is not None:
                    waiting.append((node, coroutine, request))
            live = [
                (node, coroutine, tuple(received(queues, node.id, request)))
                for node, coroutine, request in waiting
            ]
        trained.append(orders)
        sent.append(sent_now)
    return nodes, trained, sent


def received(queues: dict[tuple[int, int], deque[Message]], own: int, request: Receive) -> Any:
    found = [queues.get((own, sender)) for sender in request.senders]
    return [box.popleft() for box in found if box]


def advance(coroutine: Any, answer: Any) -> Any:
    try:
        return coroutine.send(answer)
    except StopIteration:
        return None


def scripted_node(id: int, count: int) -> Node[Any]:
    return Node(
        id=id,
        num_nodes=count,
        num_examples=1,
        label_proportions=torch.ones(3) / 3,
        architecture=f"net-{id}",  # all differ, which must not matter
        layout=Layout.of([("w", torch.zeros(1))]),
        params=torch.zeros(1),
        buffers=torch.zeros(0),
        seed=0,
        state={},
    )


def images(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)  # [ipc, 1]


MADE = [
    {0: images(1, 2), 1: images(10, 20)},
    {0: images(5, 6)},
    {0: images(3, 1), 1: images(30, 40)},
]


def test_anchors_are_means_over_the_nodes_that_hold_the_class():
    nodes, _, _ = run_scripted(SMALL, MADE)
    for node in nodes:  # also of node 0, which is no neighbour of node 2
        assert list(node.state) == ["class0", "class1"]  # nobody holds class 2
        assert node.state["class0"].flatten().tolist() == [3.0, 3.0]
        assert node.state["class1"].flatten().tolist() == [20.0, 30.0]


def test_synthetic_examples_go_to_all_nodes_once_and_logits_to_neighbours():
    _, _, [first, second] = run_scripted(SMALL, MADE, rounds=2)
    synthetic, logits = first[:3], first[3:]
    assert [set(send.to) for send in synthetic] == [{1, 2}, {0, 2}, {0, 1}]
    assert [set(send.message.payload) for send in synthetic] == [
        {"image0", "image1"},
        {"image0"},
        {"image0", "image1"},
    ]
    for sends in (logits, second):
        assert [send.to for send in sends] == list(PATH)
        payloads = [send.message.payload for send in sends]
        shapes = [{name: tuple(z.shape) for name, z in payload.items()} for payload in payloads]
        assert shapes == [{"class0": (2, 2), "class1": (2, 2)}] * 3


def test_the_teacher_is_the_mean_of_the_neighbours_without_oneself():
    _, [orders], _ = run_scripted(SMALL, MADE)
    # Of anchor v, node i says (v + 100 i, v).
    values = torch.tensor([3.0, 3.0, 20.0, 30.0])
    for order, others in zip(orders, [100.0, 100.0, 100.0], strict=True):  # node 1; 0 and 2; node 1
        assert torch.equal(order.tensors["anchors"].flatten(), values)
        assert order.tensors["labels"].tolist() == [0, 0, 1, 1]
        assert torch.equal(order.tensors["teacher"], torch.stack([values + others, values], 1))
        assert order.tensors["taught"].tolist() == [1.0] * 4
        assert order.work == replace(SMALL.local, loss=AnchoredLoss(SMALL))


def test_without_neighbours_there_are_anchors_but_no_teacher():
    _, [orders], sent = run_scripted(SMALL, MADE, graph=((), (2,), (1,)))
    assert orders[0].tensors["taught"].tolist() == [0.0] * 4
    assert orders[1].tensors["taught"].tolist() == [1.0] * 4
    assert [len(send.to) for send in sent[0]] == [2, 2, 2, 0, 1, 1]


def test_lost_messages_leave_nodes_with_fewer_classes_and_no_confusion():
    # Node 1 gets no example of class 1; messages of neighbours about it do not change its anchors.
    nodes, [orders], sent = run_scripted(
        SMALL, MADE, lost=lambda _, sender, to: to == 1 and sender != 1
    )
    assert list(nodes[1].state) == ["class0"]
    assert nodes[1].state["class0"].flatten().tolist() == [5.0, 6.0]
    assert orders[1].tensors["taught"].tolist() == [0.0, 0.0]
    # Node 0 has a teacher for class 0 alone.
    assert orders[0].tensors["taught"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert set(sent[0][4].message.payload) == {"class0"}


def test_without_any_anchor_a_node_trains_on_its_own_data():
    nodes, [orders], sent = run_scripted(SMALL, [{}, {}, {}])
    assert [node.state for node in nodes] == [{}, {}, {}]
    assert [order.work for order in orders] == [SMALL.local] * 3
    assert not any(send.message.payload for send in sent[0])


# With real models


def test_bytes_are_those_of_synthetic_examples_once_and_of_logits_on_anchors():
    ended = simulate(toy(SMALL))
    held = [len({int(blobs().train_y[i]) for i in part}) for part in unequal_parts()]
    links = 2 * NODES  # of the ring
    logits = links * (CLASSES * 2) * CLASSES * 4  # anchors x classes, in float32
    synthetic = sum(held) * (NODES - 1) * 2 * 4 * 4  # two examples of four numbers
    assert ended.bytes == [synthetic + logits, logits, logits]


def test_models_are_evaluated_after_the_training_of_the_round():
    result = run(toy(SMALL, evaluation={"at": "exchange"}, rounds=1))
    at_end = run(toy(SMALL, evaluation={"at": "end"}, rounds=1))
    losses = [row["loss"] for row in result.rows if row["scope"] == "network"]
    assert losses == [row["loss"] for row in at_end.rows if row["scope"] == "network"]
    assert losses[1] < losses[0]


def test_architectures_may_differ():
    result = run(toy(SMALL, model=["mlp:hidden=8", "logistic"], rounds=8))
    losses = [row["loss"] for row in result.rows if row["scope"] == "network"]
    assert losses[-1] < 0.9 * losses[0]


def test_a_correction_of_the_gradient_works_with_the_model_loss():
    work = replace(SMALL.local, correct=Proximal(1e6), lr=1e-7)
    pulled = simulate(toy(replace(SMALL, local=work)))
    free = simulate(toy(replace(SMALL, local=replace(work, correct=None))))
    for start, near, far in zip(pulled.start, pulled.end, free.end, strict=True):
        assert 0 < (near - start).norm() < (far - start).norm()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["digits-cnn", "digits-mlp"])
def test_engines_agree_on_images_bit_for_bit(model, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "file" / "no-cache"))
    settings: dict[str, Any] = {
        "algorithm": SMALL,
        "model": model,
        "nodes": 3,
        "topology": "complete",
        "partition": "dirichlet:alpha=0.3",
        "rounds": 2,
        "local": {"steps": 2},
    }
    engines = [{"name": "serial"}, {"name": "pool", "workers": 1}, {"name": "pool", "workers": 2}]
    digests = {run(Experiment(engine=engine, **settings)).digest for engine in engines}
    assert len(digests) == 1


@pytest.mark.slow
def test_it_learns_classes_that_a_node_has_never_seen():
    # Nodes with one class each: alone, a node knows a third of the answers.
    y = blobs().train_y
    parts = tuple(tuple((y == node % CLASSES).nonzero().flatten().tolist()) for node in range(3))
    settings: dict[str, Any] = {"nodes": 3, "topology": "complete", "rounds": 15}
    settings["partition"] = Assigned(parts)
    work = LocalSGD(batch_size=32, lr=0.2)
    alone = accuracy(run(toy(Local(work), **settings)))
    taught = accuracy(run(toy(DESA(work, ipc=5, iterations=100), **settings)))
    assert alone == pytest.approx(1 / 3)
    assert taught > 0.65


def accuracy(result: Result) -> float:
    """At the end, the mean over the nodes."""
    return float([row["accuracy"] for row in result.rows if row["scope"] == "network"][-1])


class Assigned:
    """The partition that gives every node these examples."""

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self.parts = parts

    def split(self, *_: Any) -> Any:
        return [torch.tensor(part).numpy() for part in self.parts]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ipc": 0}, "ipc must be at least 1, got 0"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"batch": -1}, "batch must be at least 1, got -1"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"lambda_kd": -1.0}, "lambda_kd must be a number of at least 0, got -1.0"),
        ({"temperature": 0.0}, "temperature must be a number above 0, got 0.0"),
        ({"contrast_temperature": float("nan")}, "contrast_temperature must be a number above 0"),
        ({"alpha": 1.5}, "alpha must lie in [0, 1], got 1.5"),
        ({"kl_reduction": "sum"}, "kl_reduction must be one of batchmean, mean; got 'sum'"),
        ({"local": LocalSGD(loss=AnchoredLoss(DESA()))}, "desa takes the loss on the local data"),
    ],
    ids=str,
)
def test_bad_options_are_rejected(options, message):
    with pytest.raises(InputError) as caught:
        DESA(**options)
    assert message in str(caught.value)


# Synthesis


def digits(count: int = 150) -> tuple[Tensor, Tensor]:
    data = Digits().load(Path())
    return data.train_x[:count], data.train_y[:count]


@pytest.mark.parametrize("flat", [False, True])
def test_synthesis_comes_nearer_to_the_data_than_its_start(flat):
    x, y = digits()
    x = x.flatten(1) if flat else x
    made = synthesise(x, y, Synthesis(ipc=2, iterations=60, width=16), torch_stream(0, "test"))
    seen = synthesis.channels_to_end(x)
    start = synthesis.noise(seen, (10, 2, *seen.shape[1:]), torch_stream(0, "test"))
    end = torch.stack([synthesis.channels_to_end(made[c]) for c in range(10)])

    def distance(s: Tensor) -> float:
        total = 0.0
        for judge in range(5):  # networks that it has not seen
            view = synthesis.random_embedding(tuple(x.shape[1:]), 16, torch_stream(judge, "judge"))
            real = synthesis.class_means(view, [seen[y == c] for c in range(10)])
            total += float((synthesis.class_means(view, list(s)) - real).square().sum())
        return total

    assert distance(end) < 0.5 * distance(start)


def test_the_gradient_of_the_distance_by_hand():
    real = [torch.tensor([[1.0, 0.0], [3.0, 0.0]]), torch.tensor([[0.0, 7.0]])]  # means (2, 0) ...
    s = torch.tensor([[[0.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [1.0, 3.0]]])  # ... (0, 1), (1, 2)
    found = synthesis.matching_gradient(lambda x: x, real, s)
    # Every example has its share, a half, of twice the difference of the means.
    expected = torch.tensor([[[-2.0, 1.0]] * 2, [[1.0, -5.0]] * 2])
    assert torch.equal(found, expected)


def test_a_step_is_of_length_one_with_half_of_the_last(monkeypatch):
    monkeypatch.setattr(synthesis, "random_view", lambda *_: lambda x: x)
    x, y = torch.tensor([[8.0], [8.0]]), torch.tensor([0, 0])
    made = [
        float(synthesise(x, y, Synthesis(ipc=4, iterations=k), torch.Generator())[0][0])
        for k in (1, 2, 3)
    ]
    # All numbers are 8, so the noise has no spread, and the start is where the data is.
    assert made == [8.0, 8.0, 8.0]
    monkeypatch.setattr(synthesis, "noise", lambda x, shape, rng: torch.zeros(shape))
    made = [
        float(synthesise(x, y, Synthesis(ipc=4, iterations=k), torch.Generator())[0][0])
        for k in (1, 2, 3)
    ]
    # Gradients are 2/4 (s - 8): 4 at once; then 2 + 4/2 = 4; then 0 + 4/2 = 2.
    assert made == [4.0, 8.0, 10.0]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (2, 4, 6), (1, 3, 3), (5,)])
def test_any_shape_has_an_embedding(shape):
    x = torch.randn(7, *shape, generator=torch_stream(0, "x"))
    y = torch.tensor([4, 4, 1, 1, 1, 4, 9])
    options = Synthesis(ipc=2, iterations=2, width=4, batch=2)
    made = synthesise(x, y, options, torch_stream(0, "test"))
    assert list(made) == [1, 4, 9]  # the classes that there are
    for images in made.values():
        assert images.shape == (2, *shape)
        assert images.is_contiguous()
        assert images.isfinite().all()
    again = synthesise(x, y, options, torch_stream(0, "test"))
    assert all(torch.equal(again[c], made[c]) for c in made)


def test_groups_of_classes_change_nothing(monkeypatch):
    x, y = digits(60)
    options = Synthesis(ipc=2, iterations=3, width=4)
    together = synthesise(x, y, options, torch_stream(0, "test"))
    monkeypatch.setattr(synthesis, "AT_ONCE", 1)
    apart = synthesise(x, y, options, torch_stream(0, "test"))
    for c in together:
        torch.testing.assert_close(apart[c], together[c], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_change_is_a_shift_a_flip_and_a_brightness():
    x = torch.randn(2, 16, 24, 3, generator=torch_stream(0, "x"))
    seen = set()
    for seed in range(200):
        y = synthesis.random_change((3, 16, 24), torch_stream(seed, "change"))(x)
        brightness = float(y.mean() - x.mean())
        assert abs(brightness) <= 0.5
        matches = [
            (down, right, flip)
            for down in range(-2, 3)
            for right in range(-3, 4)
            for flip in (False, True)
            if torch.allclose(moved(x, down, right, flip) + brightness, y, atol=1e-5)
        ]
        assert len(matches) == 1
        seen.add(matches[0])
    assert {down for down, _, _ in seen} == set(range(-2, 3))  # an eighth of 16
    assert {right for _, right, _ in seen} == set(range(-3, 4))  # an eighth of 24
    assert {flip for _, _, flip in seen} == {False, True}


def moved(x: Tensor, down: int, right: int, flip: bool) -> Tensor:
    x = torch.roll(x, (down, right), (1, 2))
    return x.flip(2) if flip else x


def test_augment_is_for_images_and_can_be_left_out(monkeypatch):
    drawn = []
    monkeypatch.setattr(synthesis, "random_change", lambda shape, rng: drawn.append(shape) or abs)
    for shape, augment in (((1, 8, 8), True), ((1, 8, 8), False), ((9,), True)):
        synthesis.random_view(shape, Synthesis(augment=augment), torch.Generator())
    assert drawn == [(1, 8, 8)]


# The request and the cache


def build_flat(cache: Path | None, count: int = 12, node: int = 1, seed: int = 3) -> LocalContext:
    x, y = digits(30)
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    models = {"net": FlatModel(module)}
    return LocalContext(
        node=node,
        round=0,
        seed=seed,
        data=Examples(x, y),
        indices=torch.arange(5, 5 + count),
        architecture="net",
        models=models,
        persistent_tensors={},
        cache=cache,
    )


REQUEST = Synthesise(Synthesis(ipc=2, iterations=2, width=4))


@pytest.fixture
def calls(monkeypatch):
    """How often examples were made."""
    made = []
    real = synthesis.synthesise

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return real(*arguments)

    monkeypatch.setattr(synthesis, "synthesise", counted)
    return made


def same(a: dict[int, Tensor], b: dict[int, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[c], b[c]) for c in a)


def test_a_second_call_finds_what_the_first_made(cache, calls):
    first = REQUEST.run(build_flat(cache))
    second = REQUEST.run(build_flat(cache))
    assert len(calls) == 1
    assert same(first, second)
    assert [path.suffix for path in (cache / "anchors").iterdir()] == [".safetensors"]


def test_no_folder_no_cache(cache, calls):
    first, second = (REQUEST.run(build_flat(None)) for _ in range(2))
    assert len(calls) == 2
    assert same(first, second)
    assert not cache.exists()


@pytest.mark.parametrize(
    "other",
    [
        (REQUEST, {"count": 13}),
        (REQUEST, {"node": 2}),
        (REQUEST, {"seed": 4}),
        (Synthesise(replace(REQUEST.options, iterations=3)), {}),
        (Synthesise(replace(REQUEST.options, augment=False)), {}),
    ],
    ids=str,
)
def test_other_data_options_or_seeds_are_other_files(cache, calls, other):
    request, changes = other
    REQUEST.run(build_flat(cache))
    request.run(build_flat(cache, **changes))
    assert len(calls) == len(list((cache / "anchors").iterdir())) == 2


def test_other_pixels_or_labels_are_other_files(cache, calls):
    for change in ("x", "y"):
        bench = build_flat(cache)
        REQUEST.run(bench)
        getattr(bench.data, change)[7] = 1
        REQUEST.run(bench)
    assert len(calls) == 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(bytes(content))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def without_seal(path: Path) -> None:
    save_file({k: v for k, v in load_file(path).items() if k != synthesis.CHECKSUM}, path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [cut, flip_a_bit, empty, without_seal, folder])
def test_a_damaged_file_is_rebuilt(cache, calls, damage):
    first = REQUEST.run(build_flat(cache))
    [path] = (cache / "anchors").iterdir()
    damage(path)
    assert same(REQUEST.run(build_flat(cache)), first)
    assert len(calls) == 2
    if damage is not folder:  # which no file can replace
        REQUEST.run(build_flat(cache))
        assert len(calls) == 2


@pytest.mark.parametrize("problem", ["not a folder", "full disk"])
def test_a_cache_that_cannot_be_written_ends_no_run(tmp_path, calls, monkeypatch, problem):
    home = tmp_path / "home"
    if problem == "not a folder":
        home.touch()
    else:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
    first, second = (REQUEST.run(build_flat(home)) for _ in range(2))
    assert same(first, second)
    assert len(calls) == 2
    assert home.is_file() or not list((home / "anchors").iterdir())


def test_a_node_without_data_makes_nothing(cache):
    assert REQUEST.run(build_flat(cache, count=0)) == {}


@pytest.mark.own_engine  # counted in this process
def test_a_run_keeps_its_anchors_beside_the_data_sets(cache, calls):
    first, second = (run(toy(SMALL)).digest for _ in range(2))
    assert first == second
    assert len(calls) == NODES
    assert len(list((cache / "anchors").iterdir())) == NODES
    assert prepare(toy(SMALL)).cache == cache


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("peerage.engine.prepare.cache_folder", homeless)
    assert work_cache() is None


def test_logits_are_the_outputs_of_the_model():
    bench = build_flat(None)
    model = bench.models["net"]
    params = torch.randn(model.layout.size, generator=torch_stream(0, "params"))
    x, _ = digits(9)
    found = Logits(params, torch.empty(0), x).run(bench)
    weight = model.layout.view(params, "1.weight")
    torch.testing.assert_close(found, x.flatten(1) @ weight.T + model.layout.view(params, "1.bias"))
    assert not found.requires_grad


def test_an_isolated_node_has_anchors_of_all_nodes():
    ended = simulate(toy(SMALL, topology=nx.empty_graph(NODES)))
    trained = simulate(toy(Local(SMALL.local), topology=nx.empty_graph(NODES)))
    assert not any(map(torch.equal, ended.end, trained.end))
    assert ended.bytes[1:] == [0, 0]
