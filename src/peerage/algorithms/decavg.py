"""DecAvg: plain averaging of the neighbourhood (P0 Eq. 3; D-PSGD with local epochs).

With a shared start it is P0's DecHomo, with independent starts its DecHetero.
"""

from dataclasses import dataclass
from typing import Literal

from peerage.aggregation import weighted_mean
from peerage.algorithm import Algorithm, Node
from peerage.errors import InputError
from peerage.training import LocalSGD


@dataclass(frozen=True)
class DecAvg(Algorithm[None]):
    """Replace the own model by the weighted mean of the closed neighbourhood."""

    local: LocalSGD = LocalSGD()
    weights: Literal["data", "uniform", "metropolis"] = "data"  # metropolis: doubly stochastic

    def __post_init__(self) -> None:
        if self.weights not in ("data", "uniform", "metropolis"):
            raise InputError(f"weights must be data, uniform or metropolis, got {self.weights!r}")

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        inbox = await node.exchange(x=node.params, b=node.buffers)
        inbox = inbox.alike(node.architecture)
        w = inbox.weights(self.weights)
        node.params = weighted_mean(inbox["x"], w)
        node.buffers = weighted_mean(inbox["b"], w)
