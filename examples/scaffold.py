"""SCAFFOLD: clients correct their gradients by how they differ from those of all clients.

The hub keeps the mean c of the clients' control variates c_i; a client trains with g - c_i + c.
Run `python examples/scaffold.py`.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, 2020. arXiv:1910.06378.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import peerage as pg
from peerage.algorithm import Dimensions
from peerage.hub import Payload
from peerage.requests import TensorSpec


@dataclass(frozen=True)
class Shifted:
    """A correction of the gradient that adds the same vector in every step."""

    def __call__(self, g: Tensor, x: Tensor, x0: Tensor, *, shift: Tensor) -> Tensor:
        return g + shift


@dataclass(frozen=True)
class Scaffold(pg.HubAlgorithm[Tensor]):
    """The state is c [d] at the hub and c_i [d] at a client; without momentum, as published."""

    local: pg.LocalSGD = pg.LocalSGD(lr=0.05)

    def init(self, node: pg.Node[Tensor]) -> Tensor:
        return torch.zeros(node.layout.size)

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        vector = TensorSpec((dimensions.layout.size,))
        return {**super().message_schema(dimensions), "c": vector}

    def broadcast(self, node: pg.Node[Tensor]) -> Payload:
        return {**super().broadcast(node), "c": node.state}

    async def answer(self, node: pg.Node[Tensor], hub_message: Mapping[str, Tensor]) -> Payload:
        x, c, own = node.params, hub_message["c"], node.state
        work = replace(self.local, correct=Shifted())
        stats = await node.train(work, shift=c - own)
        if stats.steps == 0:  # a client without examples
            return {"x": x, "b": node.buffers, "c": torch.zeros_like(c)}
        node.state = own - c + (x - node.params) / (stats.steps * self.local.lr)
        return {"x": node.params, "b": node.buffers, "c": node.state - own}

    def merge(self, node: pg.Node[Tensor], inbox: pg.Inbox) -> None:
        w = inbox.uniform_weights()
        node.params, node.buffers = inbox.mean("x", w), inbox.mean("b", w)
        node.state = node.state + inbox.stack("c").sum(0) / (node.num_nodes - 1)


def main() -> None:
    for algorithm in (pg.FedAvg(), Scaffold()):
        result = pg.run(
            pg.Experiment(
                algorithm=algorithm,
                dataset="digits",
                nodes=10,
                partition="dirichlet:alpha=0.1",
                rounds=20,
                local=pg.LocalSGD(epochs=5, lr=0.05),
                evaluation=pg.Evaluation(every=20),
            )
        )
        print(f"{result.summary['label']:24} {result.accuracy:.1%} accuracy of the hub's model")


if __name__ == "__main__":
    main()
