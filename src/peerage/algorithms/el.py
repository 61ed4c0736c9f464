"""EL: epidemic learning, in which nodes meet others in every round (a baseline of P3).

de Vos, Farhadkhani, Guerraoui, Kermarrec, Pires, Sharma, 2023. arXiv:2310.01972. P3's EL is
EL-Oracle with `--topology dynamic-regular:k=4`, and all models are averaged at the end.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from peerage.aggregation import uniform_weights
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.algorithms.averaging import all_others, average, mean_with
from peerage.errors import InputError, check_at_least
from peerage.work.training import LocalSGD

SENDS = 4  # recipients of EL-Local, by default


@dataclass(frozen=True)
class EL(Algorithm[None]):
    """Average with the neighbours of a graph that changes, or with those that chose this node.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.EL(mode="local", sends=3))
    >>> experiment == pg.Experiment(algorithm="el:mode=local,sends=3")
    True
    """

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"

    local: LocalSGD = LocalSGD()
    # The graph of the round, or recipients that every node draws privately among all nodes.
    mode: Literal["oracle", "local"] = "oracle"
    # Recipients of a node in mode local, at most all others; 4 by default.
    sends: int | None = None
    final_mean: bool = True  # replace all models by their mean after the last round

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sends is not None and self.mode == "oracle":
            raise InputError(
                f"sends={self.sends} belongs to mode=local; in mode oracle the topology determines "
                "recipients, so remove it or use --topology dynamic-regular:k=..."
            )
        check_at_least("sends", self.sends, 1)

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=1.0, shared_mean=self.mode == "oracle")

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)
        if self.mode == "oracle":
            await average(node, "uniform")
        else:
            await self.average_with_senders(node)

    async def average_with_senders(self, node: Node[None]) -> None:
        """Send to a few others; average with the models that arrive, perhaps none."""
        others = all_others(node)
        order = torch.randperm(len(others), generator=node.rng)[: self.sends or SENDS]
        model = {"x": node.params, "b": node.buffers}
        inbox = await node.swap({others[i]: model for i in order.tolist()})
        inbox = inbox.alike(node.architecture)
        own, *weights = uniform_weights(1 + len(inbox)).tolist()
        mean_with(node, inbox, own, weights)

    @property
    def has_final(self) -> bool:
        return self.final_mean

    def may_meet(self, a: int, b: int) -> bool:
        return self.has_final or self.mode == "local"

    async def final(self, node: Node[None]) -> None:
        await average(node, "uniform", to=all_others(node))
