"""An algorithm whose rounds take a while without any work."""

import time
from dataclasses import dataclass

from peerage import DecAvg
from peerage.algorithm import Node

ALGORITHM = f"{__file__}:Paced"


@dataclass(frozen=True)
class Paced(DecAvg):
    """As DecAvg, with a pause in each round."""

    pause: float = 1.0  # seconds

    async def round(self, node: Node[None]) -> None:
        time.sleep(self.pause)
        await super().round(node)
