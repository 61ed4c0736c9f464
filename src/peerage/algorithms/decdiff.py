"""DecDiff: a move of bounded length towards the mean of the neighbours (a baseline of P0).

Valerio, Boldrini, Passarella, Kertesz, Karsai, Iniguez, 2023. arXiv:2312.04504.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from peerage.aggregation import weighted_mean
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.errors import InputError
from peerage.work.losses import CrossEntropy, VirtualTeacher
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class DecDiff(Algorithm[None]):
    """Move towards the neighbours' mean by delta / (norm of delta + s): always less than 1.

    A node keeps its own running statistics, because they always fit its parameters; see
    docs/decisions/011-decdiff-keeps-its-statistics.md.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecDiff(s=2.0))
    >>> experiment == pg.Experiment(algorithm="decdiff:s=2.0")
    True
    """

    local: LocalSGD = LocalSGD()
    weights: Literal["data", "uniform"] = "data"  # of the neighbours' models
    granularity: Literal["tensor", "model"] = "tensor"  # what the norm is taken over
    s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.s < float("inf"):
            raise InputError(f"s must be a number above 0, got {self.s}")

    def work(self) -> LocalSGD:
        return self.local

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=1.0)

    async def round(self, node: Node[None]) -> None:
        await node.train(self.work())
        inbox = await node.exchange(x=node.params)
        others = inbox.alike(node.architecture).others()
        if not len(others):
            return
        a = others.weights(self.weights)
        delta = weighted_mean(others["x"], a) - node.params  # [d]
        node.params = node.params + self.step(delta, [slot.size for slot in node.layout.slots])

    def step(self, delta: Tensor, sizes: list[int]) -> Tensor:
        """[d] every tensor (or the whole model) of the difference, divided by its norm + s."""
        parts = torch.split(delta, sizes) if self.granularity == "tensor" else [delta]
        return torch.cat([part / (torch.linalg.vector_norm(part) + self.s) for part in parts])


@dataclass(frozen=True)
class DecDiffVT(DecDiff):
    """DecDiff whose nodes learn from the soft labels of a virtual teacher.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecDiffVT(confidence=0.9))
    >>> experiment == pg.Experiment(algorithm="decdiff-vt:confidence=0.9")
    True
    """

    confidence: float = 0.99  # of the teacher in the right class

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.loss != CrossEntropy():
            raise InputError(
                f"decdiff-vt has its own loss, got {self.local.loss}; "
                "use the algorithm decdiff with that loss"
            )
        VirtualTeacher(self.confidence)  # raises an error if the value is invalid

    def work(self) -> LocalSGD:
        return replace(self.local, loss=VirtualTeacher(self.confidence))
