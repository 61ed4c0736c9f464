"""Stochastic gradient push: averaging on a directed graph, where no weights are symmetric.

A node divides its mass among its out-neighbours and itself. Each also divides a scalar that began
as one, and the quotient of both sums is an unbiased model. Run `python examples/push_sum.py`.

Assran, Loizou, Ballas, Rabbat, 2019. arXiv:1811.10792.
"""

from dataclasses import dataclass

import networkx as nx
import torch
from torch import Tensor

import peerage as pg
from peerage.algorithm import Dimensions
from peerage.requests import TensorSpec


@dataclass(frozen=True)
class PushSum(pg.Algorithm[Tensor]):
    """`node.params` is the unbiased model z, and `node.state` the scalar w [1]; x = w z."""

    local: pg.LocalSGD = pg.LocalSGD()

    def init(self, node: pg.Node[Tensor]) -> Tensor:
        return torch.ones(1)

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        return {**super().message_schema(dimensions), "w": TensorSpec((1,))}

    async def round(self, node: pg.Node[Tensor]) -> None:
        z, w = node.params, node.state
        await node.train(self.local)
        x = w * z + (node.params - z)
        share = 1 / (len(node.out_neighbours) + 1)
        inbox = await node.exchange(x=share * x, w=share * w, b=node.buffers)
        w = inbox.stack("w").sum(0)
        node.params, node.state = inbox.stack("x").sum(0) / w, w
        node.buffers = inbox.mean("b", inbox.uniform_weights())


def main() -> None:
    graph = nx.DiGraph([(i, (i + step) % 12) for i in range(12) for step in (1, 5)])
    graph.add_edges_from((0, j) for j in range(2, 7))  # node 0 sends to more than it hears from
    algorithms: list[pg.Algorithm[Tensor] | pg.Algorithm[None]] = [
        pg.DecAvg(weights="uniform"),
        PushSum(),
    ]
    for algorithm in algorithms:
        experiment = pg.Experiment(
            algorithm=algorithm,
            dataset="digits",
            nodes=12,
            topology=graph,
            partition="dirichlet:alpha=0.3",
            rounds=15,
            local=pg.LocalSGD(epochs=1, lr=0.05, momentum=0.9),
            init=pg.Init(start="shared"),
            evaluation=pg.Evaluation(every=15, at="end"),
        )
        result = pg.run(experiment)
        print(f"{result.summary['label']:24} {result.accuracy:.1%} mean accuracy over the nodes")


if __name__ == "__main__":
    main()
