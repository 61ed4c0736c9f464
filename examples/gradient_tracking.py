"""Gradient tracking: each node estimates the mean gradient of all nodes, and descends along it.

x <- W x - lr y and y <- W y + g(new x) - g(old x). So nodes with different data agree on the
minimum of the common loss, where plain averaging stays biased. Run
`python examples/gradient_tracking.py`.

Pu, Nedic, 2018. arXiv:1805.11454.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import peerage as pg
from peerage.algorithm import Dimensions
from peerage.requests import TensorSpec


@dataclass(frozen=True)
class Tracker:
    """y [d] estimates the mean gradient, g [d] is the last gradient of the node's own data."""

    y: Tensor
    g: Tensor


@dataclass(frozen=True)
class GradientTracking(pg.Algorithm[Tracker]):
    """One step per round, with a gradient on a batch of the node's own data."""

    local: pg.LocalSGD = pg.LocalSGD(batch_size=32, lr=0.1)

    def init(self, node: pg.Node[Tracker]) -> Tracker:
        return Tracker(torch.zeros(node.layout.size), torch.zeros(node.layout.size))

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        vector = TensorSpec((dimensions.layout.size,))
        return {"x": vector, "y": vector}

    async def round(self, node: pg.Node[Tracker]) -> None:
        g = await node.gradient(batch_size=self.local.batch_size)
        y = node.state.y + g - node.state.g
        inbox = await node.exchange(x=node.params - self.local.lr * y, y=y)
        w = inbox.metropolis_weights()
        node.params = inbox.mean("x", w)
        node.state = Tracker(inbox.mean("y", w), g)


def main() -> None:
    work = pg.LocalSGD(steps=1, batch_size=32, lr=0.1)
    algorithms: list[pg.Algorithm[None] | pg.Algorithm[Tracker]] = [
        pg.DecAvg(weights="metropolis"),
        GradientTracking(),
    ]
    for algorithm in algorithms:
        result = pg.run(
            pg.Experiment(
                algorithm=algorithm,
                dataset="digits",
                nodes=10,
                topology="ring",
                partition="dirichlet:alpha=0.1",
                rounds=200,
                local=work,
                init=pg.Init(start="shared"),
                evaluation=pg.Evaluation(every=200, at="end"),
            )
        )
        print(f"{result.summary['label']:24} {result.accuracy:.1%} mean accuracy over the nodes")


if __name__ == "__main__":
    main()
