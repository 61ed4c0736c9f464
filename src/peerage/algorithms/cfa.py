"""CFA: a move by the fraction epsilon towards the mean of the neighbours.

Savazzi, Nicoli, Rampa, 2020. arXiv:1912.13163. P0 uses epsilon = 1.
"""

from dataclasses import dataclass

from peerage.aggregation import weighted_mean
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.errors import InputError
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class CFA(Algorithm[None]):
    """Move towards the neighbours' data-weighted mean; epsilon 1 replaces the model by it.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.CFA(epsilon=0.5))
    >>> experiment == pg.Experiment(algorithm="cfa:epsilon=0.5")
    True
    """

    local: LocalSGD = LocalSGD()
    epsilon: float = 1.0  # -1 stands for 1 / degree

    def __post_init__(self) -> None:
        if self.epsilon != -1 and not 0 < self.epsilon <= 1:
            raise InputError(f"epsilon must lie in (0, 1] or be -1, got {self.epsilon}")

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=1.0)

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params, b=node.buffers)
        others = inbox.alike(node.architecture).others()
        if not len(others):
            return
        a = others.data_weights()
        e = 1 / len(node.neighbours) if self.epsilon == -1 else self.epsilon
        x, mean = node.params, weighted_mean(others["x"], a)
        node.params = weighted_mean([x, mean], [1 - e, e])  # x + e sum_j a_j (x_j - x)
        node.buffers = weighted_mean([node.buffers, weighted_mean(others["b"], a)], [1 - e, e])
