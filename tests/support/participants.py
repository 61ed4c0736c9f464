"""Rounds of mutual learning with scripted answers, on a node with a model of two parameters."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import peerage as pg
from peerage import LocalSGD, Message, Weights
from peerage.algorithms.rotating_hub import Participants
from peerage.requests import Envelope, Receive, Send
from peerage.vectors import Layout
from peerage.work.together import TrainedTogether, TrainTogether
from peerage.work.training import Train, Trained, TrainStats

COMPLETE = tuple(tuple(j for j in range(5) if j != i) for i in range(5))
NOTHING = torch.empty(0)


def vector(*values: float) -> Tensor:
    return torch.tensor([float(value) for value in values])


def weights(*values: float, architecture: str = "net") -> Weights:
    return Weights(vector(*values), NOTHING, architecture)


def make_node(id: int = 0, graph: Any = COMPLETE, round: int = 0, graph_of: Any = None) -> Any:
    """A node with a model of two parameters, in a network of these neighbours."""
    sizes = {"net": 2, "big": 3}
    layouts = {name: Layout.of([("w", torch.zeros(size))]) for name, size in sizes.items()}
    node: pg.Node[Any] = pg.Node(
        id=id,
        num_nodes=len(graph),
        num_examples=10,
        label_proportions=torch.ones(1),
        architecture="net",
        layout=layouts["net"],
        params=vector(1, 1),
        buffers=NOTHING,
        seed=0,
        layouts=layouts,
        buffer_layouts=dict.fromkeys(layouts, Layout(())),
        graph_of=graph_of,
        rounds=100,
    )
    node.begin_round(round, graph)
    return node


def message(sender: int, model: Weights, examples: int = 10) -> Message:
    payload = {"x": model.params, "b": model.buffers}
    return Message(Envelope(sender, examples, 4, model.architecture), payload)


class Played:
    """One round of a node, in which training adds 1 and training together adds 10."""

    def __init__(self, algorithm: Any, node: Any, *inboxes: list[Message], diverged: Any = ()):
        self.trained: list[LocalSGD] = []
        self.together: list[TrainTogether] = []
        self.sent: dict[int, Message] = {}
        self.received: list[tuple[int, ...]] = []
        if node.state is None:
            node.state = algorithm.init(node)
        left, coroutine, answer = list(inboxes), algorithm.round(node), None
        while True:
            try:
                request = coroutine.send(answer)
            except StopIteration:
                assert not left
                return
            answer = None
            if isinstance(request, Train):
                self.trained.append(request.work)
                answer = Trained(request.params + 1, request.buffers, TrainStats(0.0, 1))
            elif isinstance(request, TrainTogether):
                self.together.append(request)
                models = {
                    key: model if key in diverged else replace(model, params=model.params + 10)
                    for key, model in request.pupils.items()
                }
                answer = TrainedTogether(models, {}, tuple(diverged))
            elif isinstance(request, Send):
                self.sent |= {to: request.message for to in request.to if request.message.payload}
            elif isinstance(request, Receive):
                self.received.append(request.senders)
                answer = tuple(left.pop(0) if left else ())


def roles(algorithm: Any, round: int = 0) -> tuple[int, tuple[int, ...], int]:
    """The aggregator of a round, its senders, and a node that does not take part."""
    hub, senders = algorithm.participants(make_node(round=round))
    return hub, senders, next(n for n in range(5) if n not in (hub, *senders))


def participants(algorithm: Any, graph: Any, rounds: int) -> list[Participants]:
    """Those of every round; all nodes must agree."""

    def graph_of(round: int) -> Any:
        return graph

    found = []
    for round in range(rounds):
        nodes = [make_node(id, graph, round, graph_of) for id in range(len(graph))]
        every = {algorithm.participants(node) for node in nodes}
        assert len(every) == 1
        found.append(every.pop())
    return found
