"""FedCurv: FedAvg with a penalty on parameters that matter to other clients (P2).

Shoham, Avidor, Keren, Israel, Benditkis, Mor-Yosef, Zeitak, 2019. arXiv:1910.07796.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from peerage.algorithm import Cost, Dimensions, Node
from peerage.errors import InputError
from peerage.hub import HubAlgorithm, Payload
from peerage.requests import Inbox, TensorSpec
from peerage.work.curvature import PASSES, check_kind
from peerage.work.losses import CurvaturePenalty
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class Consolidated:
    """At the hub, sums over the answers of a round; at a client, its part of these sums."""

    f: Tensor  # [d] diagonal of the Fisher information; empty before the first
    fx: Tensor  # [d] f times the parameters
    who: Tensor  # [k] the clients in the sums
    round: int | None = None  # of sending; None in checkpoints of older versions


@dataclass(frozen=True)
class FedCurv(HubAlgorithm[Consolidated]):
    """FedAvg with a training penalty on parameters that matter to other clients.

    The penalty comes from the other clients' answers in the last round. There is none if the hub
    received no answer in it. A client that lost its part of the sums, for example in a restart,
    also trains without it.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.FedCurv(strength=0.5))
    >>> experiment == pg.Experiment(algorithm="fedcurv:strength=0.5")
    True
    """

    nonnegative: ClassVar[frozenset[str]] = frozenset({"f"})

    local: LocalSGD = LocalSGD()
    strength: float = 1.0  # lambda, of the penalty
    curvature: str = "sample"  # sample (the Fisher information), batch or full

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind(self.curvature)
        CurvaturePenalty(self.strength)  # raises an error if the value is invalid
        if self.local.correct is not None:
            raise InputError("fedcurv corrects gradients itself; leave local.correct out")

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        any_size = (None,)  # as sums are empty in the first round
        who = TensorSpec(any_size, torch.int64, low=0, high=dimensions.nodes - 1)
        sums = {"f": TensorSpec(any_size, low=0.0), "fx": TensorSpec(any_size), "who": who}
        return {**super().message_schema(dimensions), **sums}

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        return Cost(vectors=3.0, passes=PASSES[self.curvature], state=2.0)

    def init(self, node: Node[Consolidated]) -> Consolidated:
        return Consolidated(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int64))

    def broadcast(self, node: Node[Consolidated]) -> Payload:
        sums = self.last_round_state(node)
        return {**super().broadcast(node), "f": sums.f, "fx": sums.fx, "who": sums.who}

    def last_round_state(self, node: Node[Consolidated]) -> Consolidated:
        """The state of the last round; an older one is no longer in the sums, so return none."""
        return node.state if node.state.round in (None, node.round - 1) else self.init(node)

    async def answer(self, node: Node[Consolidated], hub_message: Mapping[str, Tensor]) -> Payload:
        others = self.others(node, hub_message)
        if others is None:
            await node.train(self.local)
        else:
            work = replace(self.local, correct=CurvaturePenalty(self.strength))
            await node.train(work, a=others[0], b=others[1])
        f = await node.curvature(self.curvature, self.local.batch_size)
        f = f / max(self.num_terms(node), 1)
        node.state = Consolidated(f, f * node.params, torch.tensor([node.id]), node.round)
        return {"x": node.params, "b": node.buffers, "f": f, "fx": node.state.fx}

    def others(
        self, node: Node[Consolidated], hub_message: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """The sums without this client's part; None if they are empty or the part is lost."""
        if not hub_message["who"].numel():
            return None
        if node.id not in hub_message["who"]:  # its last answer was lost, or it gave none
            return hub_message["f"], hub_message["fx"]
        part = self.last_round_state(node)
        return (hub_message["f"] - part.f, hub_message["fx"] - part.fx) if part.f.numel() else None

    def num_terms(self, node: Node[Consolidated]) -> int:
        """The number of squared gradients in the sum; the Fisher information is their mean."""
        if self.curvature == "sample":
            return node.num_examples
        return -(-node.num_examples // self.local.batch_size) if self.curvature == "batch" else 1

    def merge(self, node: Node[Consolidated], inbox: Inbox) -> None:
        tau = inbox.data_weights()
        node.params, node.buffers = inbox.mean("x", tau), inbox.mean("b", tau)
        f, fx = (inbox.stack(name).sum(0) for name in ("f", "fx"))
        node.state = Consolidated(f, fx, torch.tensor(inbox.senders), node.round)

    def skip_round(self, node: Node[Consolidated]) -> None:
        node.state = self.init(node)  # it is not part of the sums of this round
