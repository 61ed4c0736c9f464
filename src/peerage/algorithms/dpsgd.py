"""D-PSGD: train, then average over a static graph (a baseline of P3).

Lian, Zhang, Zhang, Hsieh, Zhang, Liu, 2017. arXiv:1705.09056. It is DecAvg with weights that do not
depend on the data, and with the mean of all models at the end of a run, as in P3.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from peerage.algorithm import Node
from peerage.algorithms.averaging import all_others, average
from peerage.algorithms.decavg import DecAvg


@dataclass(frozen=True)
class DPSGD(DecAvg):
    """Average with the neighbours by weights of the graph; at the end, average all models.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DPSGD(weights="uniform"))
    >>> experiment == pg.Experiment(algorithm="dpsgd:weights=uniform")
    True
    """

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"

    # Equal, or doubly stochastic (undirected graphs only); the same on a regular graph.
    weights: Literal["uniform", "metropolis"] = "uniform"
    final_mean: bool = True  # replace all models by their mean after the last round

    @property
    def has_final(self) -> bool:
        return self.final_mean

    async def final(self, node: Node[None]) -> None:
        await average(node, "uniform", to=all_others(node))
