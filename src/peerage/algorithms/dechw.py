"""DecHW: curvature-weighted averaging of the neighbourhood (P0).

Ahmad, Boldrini, Valerio, Passarella, Conti, 2026. arXiv:2601.19938.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.aggregation import capped, check_share, curvature_weighted, unit, weighted_mean
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.errors import InputError
from peerage.requests import Inbox, TensorSpec
from peerage.vectors import Layout
from peerage.work.curvature import PASSES, check_kind, scope_of
from peerage.work.training import LocalSGD

ONLINE = "online"


@dataclass(frozen=True)
class Memory:
    """The state of a node."""

    h: Tensor  # [d] accumulated curvature of the layers in the scope
    frozen: dict[str, Tensor]  # sender -> its last curvature, for after_stop="frozen"


@dataclass(frozen=True)
class DecHW(Algorithm[Memory]):
    """Average the neighbourhood with weights in proportion to each parameter's curvature so far.

    A node's first curvature counts in full, later ones are multiplied by `beta`. The first is the
    one that finds an empty accumulator, in round 0 or in the round in which the node joins.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DecHW(theta=30))
    >>> experiment == pg.Experiment(algorithm="dechw:theta=30")
    True
    """

    nonnegative: ClassVar[frozenset[str]] = frozenset({"h"})

    local: LocalSGD = LocalSGD()
    beta: float = 1.0  # factor of each curvature after the first (Eq. 5)
    theta: int | None = None  # send curvature in the first theta rounds only (DecHW*)
    after_stop: Literal["average", "frozen"] = "average"  # then plain averaging or the last weights
    accumulate: Literal["sum", "ema", "none"] = "sum"  # Eq. 5; the released code; Fig. 6
    normalise: Literal["unit", "none"] = "unit"  # one norm over the whole model (Eq. 4), or raw
    curvature: str = "batch"  # batch, sample, full; online: summed in the last pass of training
    scope: str = "all"  # layers with curvature: all, output, last-hidden, or names joined by +
    include_self: bool = True  # whether the average includes the node's own model
    weights: Literal["data", "uniform"] = "data"  # of models where there is no curvature
    # Largest share of one sender in the average of a parameter, against members that lie about
    # curvature; by default there is no limit.
    max_share: float | None = None
    trace: int | None = None  # record this entry of h and its weight in the average (Fig. 7)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.beta < float("inf"):
            raise InputError(f"beta must be a number above 0, got {self.beta}")
        if self.accumulate == "ema" and self.beta > 1:
            raise InputError(f"beta must be at most 1 with accumulate=ema, got {self.beta}")
        if self.theta is not None and self.theta < 1:
            raise InputError(f"theta must be at least 1 round, got {self.theta}")
        if self.trace is not None and self.trace < 0:
            raise InputError(f"trace must be the number of a parameter, got {self.trace}")
        check_share(self.max_share)
        check_kind(self.curvature, ONLINE)

    def check_layout(self, layout: Layout) -> None:
        part = scope_of(layout, self.scope)
        if self.trace is not None and not part.start <= self.trace < part.stop:
            raise InputError(
                f"trace={self.trace} is not a parameter in scope={self.scope}, "
                f"which has {part.start} to {part.stop - 1}"
            )

    def init(self, node: Node[Memory]) -> Memory:
        part = scope_of(node.layout, self.scope)
        return Memory(torch.zeros(part.stop - part.start), {})

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        part = scope_of(dimensions.layout, self.scope)
        h = TensorSpec((part.stop - part.start,), low=0.0)
        if self.normalise == "unit":  # a sum of vectors of norm 1, or a mean of them
            h = replace(h, norm=1.0, growth=self.beta if self.accumulate == "sum" else 0.0)
        return {**super().message_schema(dimensions), "h": h}

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        part = scope_of(dimensions.layout, self.scope)
        share = (part.stop - part.start) / dimensions.layout.size
        if not self.sends_curvature(round):
            return Cost(vectors=1.0, state=share)
        passes = 0.0 if self.curvature == ONLINE else PASSES[self.curvature]
        return Cost(vectors=1.0 + share, passes=passes, state=share)

    async def round(self, node: Node[Memory]) -> None:
        if not self.sends_curvature(node.round):
            await node.train(self.local)
            inbox = await node.exchange(x=node.params, b=node.buffers)
        else:
            h = await self.learn(node)
            node.state = Memory(self.add(node, h), node.state.frozen)
            inbox = await node.exchange(x=node.params, b=node.buffers, h=node.state.h)
            if self.after_stop == "frozen" and node.round + 1 == self.theta:
                known = {str(m.sender): m.payload["h"] for m in inbox.messages}
                node.state = Memory(node.state.h, known)
        self.combine(node, inbox.alike(node.architecture))

    def sends_curvature(self, round: int) -> bool:
        """Whether nodes send curvature in this round."""
        return self.theta is None or round < self.theta

    async def learn(self, node: Node[Memory]) -> Tensor:
        """Train and return the curvature [d] of the layers in the scope."""
        part = scope_of(node.layout, self.scope)
        stats = await node.train(self.local, squares=self.curvature == ONLINE)
        if stats.squares is not None:
            h = stats.squares[part]
        else:
            h = await node.curvature(self.curvature, self.local.batch_size, part)
        node.note(curvature=float(torch.linalg.vector_norm(h)))  # Fig. 2
        return h

    def add(self, node: Node[Memory], h: Tensor) -> Tensor:
        """The accumulator [d] after one more curvature (Eq. 4, 5)."""
        if self.normalise == "unit":
            h = unit(h)
        if self.accumulate == "none":
            return h
        keep = 1.0 if self.accumulate == "sum" else 1.0 - self.beta
        return accumulated(node.state.h, h, keep, self.beta)

    def combine(self, node: Node[Memory], inbox: Inbox) -> None:
        """Average the neighbourhood (Eq. 6-8)."""
        if not self.include_self and len(inbox) > 1:
            inbox = inbox.others()
        tau = inbox.weights(self.weights)
        node.buffers = weighted_mean(inbox["b"], tau)
        part = scope_of(node.layout, self.scope)
        if self.sends_curvature(node.round):
            self.note_trace(node, inbox, tau, part)
            h = capped(inbox["h"], self.max_share)
            node.params = curvature_weighted(inbox["x"], h, otherwise=tau, part=part)
        elif self.after_stop == "frozen":
            # A sender without a message in the last curvature round gets no weight.
            no_curvature = torch.zeros_like(node.state.h)
            known = [node.state.frozen.get(str(sender), no_curvature) for sender in inbox.senders]
            h = capped(known, self.max_share)
            node.params = curvature_weighted(inbox["x"], h, otherwise=tau, part=part)
        else:
            node.params = weighted_mean(inbox["x"], tau)

    def note_trace(self, node: Node[Memory], inbox: Inbox, tau: Tensor, part: slice) -> None:
        if self.trace is None:
            return
        number = self.trace - part.start
        entry = slice(number, number + 1)
        is_self = [torch.tensor([float(sender == node.id)]) for sender in inbox.senders]
        h = capped([each[entry] for each in inbox["h"]], self.max_share)
        weight = curvature_weighted(is_self, h, otherwise=tau)
        node.note(entry=float(node.state.h[number]), weight=float(weight))


def accumulated(total: Tensor, h: Tensor, keep: float = 1.0, beta: float = 1.0) -> Tensor:
    """keep * total + beta * h (Eq. 5), or h itself if the total is all zero."""
    # No entry is negative, and `any` takes much longer.
    if float(total.max()) == 0:
        return h
    return keep * total + beta * h
