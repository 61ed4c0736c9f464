"""Local: every node trains alone; the baseline that any exchange must beat."""

from dataclasses import dataclass
from typing import ClassVar

from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class Local(Algorithm[None]):
    """Train on local data without communication.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.Local())
    >>> experiment == pg.Experiment(algorithm="local")
    True
    """

    personal: ClassVar[bool] = True
    local: LocalSGD = LocalSGD()

    def max_messages(self, round: int | None, nodes: int) -> int:
        return 0

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=0.0)

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
