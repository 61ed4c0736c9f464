"""Algorithms of the tests about what is evaluated, and when."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from peerage import Algorithm, HubAlgorithm, LocalSGD, Node, Weights
from peerage.requests import Inbox

WORK = LocalSGD(epochs=1, lr=0.05)


@dataclass(frozen=True)
class Peaks(Algorithm[Weights]):
    """Averages, and evaluates the model of the last even round as well; all-reduce at the end."""

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"

    local: LocalSGD = WORK

    def init(self, node: Node[Weights]) -> Weights:
        return node.weights

    async def round(self, node: Node[Weights]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params, b=node.buffers)
        node.params = inbox.mean("x", inbox.uniform_weights())
        node.buffers = inbox.mean("b", inbox.uniform_weights())
        node.note(alpha=(node.round + 1) / 10)
        if node.round % 2:
            node.state = node.weights

    async def final(self, node: Node[Weights]) -> None:
        others = [other for other in range(node.num_nodes) if other != node.id]
        inbox = await node.exchange(to=others, x=node.params, b=node.buffers)
        node.params = inbox.mean("x", inbox.uniform_weights())
        node.buffers = inbox.mean("b", inbox.uniform_weights())

    def evaluated(self, node: Node[Weights]) -> Mapping[str, Weights | Tensor]:
        return {"peak": node.state, "regular": node.weights}


@dataclass(frozen=True)
class Personal(HubAlgorithm[None]):
    """Every client keeps its model and begins halfway to the hub's, which is a mean."""

    models_at: ClassVar[Literal["hub", "clients", "both"]] = "both"

    local: LocalSGD = WORK

    async def answer(self, node: Node[None], hub_message: Mapping[str, Tensor]) -> dict[str, Any]:
        node.params = (node.params + hub_message["x"]) / 2
        await node.train(self.local)
        return {"x": node.params, "b": node.buffers}

    def merge(self, node: Node[None], inbox: Inbox) -> None:
        node.params = inbox.mean("x", inbox.uniform_weights())


@dataclass(frozen=True)
class Clustered(Personal):
    """As `Personal`, without rows of the hub."""

    models_at: ClassVar[Literal["hub", "clients", "both"]] = "clients"


def same(one: Weights, other: Weights) -> bool:
    """Whether two models have the same bits."""
    pairs = [(one.params, other.params), (one.buffers, other.buffers)]
    return one.architecture == other.architecture and all(torch.equal(a, b) for a, b in pairs)
