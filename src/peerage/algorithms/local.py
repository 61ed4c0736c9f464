"""Local: every node trains alone; the floor that any exchange must beat."""

from dataclasses import dataclass
from typing import ClassVar

from peerage.algorithm import Algorithm, Node
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class Local(Algorithm[None]):
    """Train on the own data and talk to nobody."""

    personal: ClassVar[bool] = True
    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
