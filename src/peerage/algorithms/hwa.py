"""HWA: a hub that weights every parameter of the output layer by its curvature (P2).

Ahmad, Luo, Robles-Kelly, 2023. Machine Learning 112, 633-654.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.aggregation import capped, check_share, curvature_weighted, unit, weighted_mean
from peerage.algorithm import Cost, Dimensions, Node
from peerage.errors import InputError
from peerage.hub import HubAlgorithm, Payload
from peerage.requests import Inbox, TensorSpec
from peerage.vectors import Layout
from peerage.work.curvature import PASSES, check_kind, scope_of
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class HWA(HubAlgorithm[None]):
    """Clients train the hub's model; the hub weights parameters of chosen layers by curvature.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.HWA(clients=5))
    >>> experiment == pg.Experiment(algorithm="hwa:clients=5")
    True
    """

    nonnegative: ClassVar[frozenset[str]] = frozenset({"h"})

    local: LocalSGD = LocalSGD()
    scope: str = "output"  # layers with curvature: output, last-hidden, all, or names joined by +
    # Weights that sum to one for each parameter, or those of Eq. 5 as printed, which do not.
    normalise: Literal["parameter", "literal"] = "parameter"
    curvature: str = "batch"  # batch, sample or full
    # Largest share of one client in the mean of a parameter, with normalise=parameter; by default
    # there is no limit.
    max_share: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self.curvature)
        check_share(self.max_share)
        if self.max_share is not None and self.normalise != "parameter":
            raise InputError("max_share requires normalise=parameter, whose weights sum to one")

    def check_layout(self, layout: Layout) -> None:
        scope_of(layout, self.scope)  # raises an error if a layer does not exist

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        part = scope_of(dimensions.layout, self.scope)
        h = TensorSpec((part.stop - part.start,), low=0.0)  # the hub normalises it
        return {**super().message_schema(dimensions), "h": h}

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        part = scope_of(dimensions.layout, self.scope)
        share = (part.stop - part.start) / dimensions.layout.size
        return Cost(vectors=1.0 + share, passes=PASSES[self.curvature])

    def caveats(self) -> Iterator[str]:
        if self.normalise == "literal":
            yield (
                "hwa:normalise=literal follows Eq. 5 of P2 as printed: its weights do not sum "
                "to one, so merging shrinks the output layer; use normalise=parameter to avoid this"
            )

    async def answer(self, node: Node[None], hub_message: Mapping[str, Tensor]) -> Payload:
        await node.train(self.local)
        part = scope_of(node.layout, self.scope)
        h = await node.curvature(self.curvature, self.local.batch_size, part)
        return {"x": node.params, "b": node.buffers, "h": h}

    def merge(self, node: Node[None], inbox: Inbox) -> None:
        tau = inbox.data_weights()
        node.buffers = inbox.mean("b", tau)
        part = scope_of(node.layout, self.scope)
        d = [unit(h) for h in inbox["h"]]  # D_k / |D_k|
        if self.normalise == "parameter":
            h = capped(d, self.max_share)
            node.params = curvature_weighted(inbox["x"], h, otherwise=tau, part=part)
        else:
            x = torch.stack([params[part] for params in inbox["x"]])
            node.params = weighted_mean(inbox["x"], tau)
            node.params[part] = torch.stack(d).mul_(x).sum(0)
