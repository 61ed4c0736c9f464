"""DecAvg: plain averaging of the neighbourhood (P0 Eq. 3; D-PSGD with local epochs).

With a shared start it is P0's DecHomo, with independent starts its DecHetero.
"""

from dataclasses import dataclass
from typing import Literal

from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.algorithms.averaging import average
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class DecAvg(Algorithm[None]):
    """Replace a node's model by the weighted mean of its own and its neighbours' models.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecAvg(weights="uniform"))
    >>> experiment == pg.Experiment(algorithm="decavg:weights=uniform")
    True
    """

    local: LocalSGD = LocalSGD()
    # By examples, equal, doubly stochastic (undirected graphs only), or the edge weights.
    weights: Literal["data", "uniform", "metropolis", "graph"] = "data"
    order: Literal["train-first", "combine-first"] = "train-first"  # combine-first in P4's code

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=1.0, shared_mean=True)

    async def round(self, node: Node[None]) -> None:
        if self.order == "train-first":
            await node.train(self.local)
            await average(node, self.weights)
        else:
            await average(node, self.weights)
            await node.train(self.local)
