"""Def-KT: pairs of clients learn from each other, and the incoming model stays (a P1 baseline).

Li, Li, Varshney, 2021. arXiv:2012.13063. In every round, the public coin draws pairs of
neighbours. The first of a pair trains its model and sends it. The second trains this model and its
own together on its own data, and replaces its own by the incoming one. All other nodes wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.algorithms.mutual_learning import ONE_EPOCH
from peerage.algorithms.rotating_hub import Graph, model_in, per_link, send_model
from peerage.errors import InputError, check_at_least
from peerage.requests import Inbox
from peerage.work.mutual import MutualKL
from peerage.work.together import check_work
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class DefKT(Algorithm[None]):
    """In pairs, one node sends its model; the other trains it with its own and keeps the former.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DefKT(pairs=2))
    >>> experiment == pg.Experiment(algorithm="def-kt:pairs=2")
    True
    """

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"
    initial_models: ClassVar[Literal["shared", "independent"]] = "shared"

    local: LocalSGD = ONE_EPOCH
    # Pairs of a round; by default as many as possible. A sparse graph may allow fewer.
    pairs: int | None = field(default=None, kw_only=True)
    epochs_mutual: int = field(default=10, kw_only=True)  # passes over the recipient's data
    kl_weight: float = field(default=1.0, kw_only=True)  # of the divergence from the other model

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("pairs", self.pairs, 1)
        check_at_least("epochs_mutual", self.epochs_mutual, 1)
        if not 0 <= self.kl_weight < float("inf"):
            raise InputError(f"kl_weight must be a number of at least 0, got {self.kl_weight}")
        check_work(self.work())

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        if self.pairs is not None and self.pairs > nodes // 2:
            raise InputError(
                f"pairs={self.pairs} need {2 * self.pairs} nodes, got {nodes}; use at most "
                f"{nodes // 2}, or more --nodes"
            )
        if len(set(architectures)) > 1:
            raise InputError(
                "def-kt moves models between nodes, so all must have one architecture, got "
                f"{', '.join(architectures)}; use one --model, or the algorithm dfml"
            )

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        pairs = self.pairs or dimensions.nodes // 2
        # One of two nodes trains two models, and the other trains its own before.
        vectors, passes = per_link(pairs, dimensions.nodes), float(self.epochs_mutual)
        return Cost(vectors, passes, held_models=1, together=True)

    def participation(self, nodes: int) -> float:
        return 2 * (self.pairs or nodes // 2) / nodes

    def work(self) -> LocalSGD:
        """How the two models train together."""
        return replace(self.local, epochs=self.epochs_mutual, steps=None)

    async def round(self, node: Node[None]) -> None:
        pairs = draw_pairs(node.graph, self.pairs, node.coin)
        recipients = dict(pairs)
        senders = {recipient: sender for sender, recipient in pairs}
        if node.id in recipients:
            await node.train(self.local)
            await send_model(node, recipients[node.id], node.weights)
        if node.id in senders:
            await self.learn(node, await node.receive(senders[node.id]))
        elif pairs:
            # Nothing comes, but real peers would otherwise run rounds ahead of the recipients.
            await node.receive(recipients.get(node.id, pairs[0][1]))

    async def learn(self, node: Node[None], inbox: Inbox) -> None:
        """Train the incoming model and the node's own together, and keep the incoming one."""
        for message in inbox.alike(node.architecture).messages:
            models = {node.id: node.weights, message.sender: model_in(message)}
            loss = MutualKL(gamma=1.0, alpha=self.kl_weight)
            trained = await node.train_together(self.work(), models, loss)
            kept = node.id if message.sender in trained.diverged else message.sender
            model = trained.models[kept]
            node.params, node.buffers = model.params, model.buffers


def draw_pairs(graph: Graph, count: int | None, coin: torch.Generator) -> list[tuple[int, int]]:
    """Disjoint pairs (sender, recipient) of neighbours, at most `count`.

    Recipients come in random order, and each draws its sender among its neighbours that are still
    free. On a complete graph, all pairings have the same probability.
    """
    free = {node for node, near in enumerate(graph) if near}
    pairs: list[tuple[int, int]] = []
    for recipient in torch.randperm(len(graph), generator=coin).tolist():
        near = sorted(free.intersection(graph[recipient])) if recipient in free else []
        if near and (count is None or len(pairs) < count):
            sender = near[int(torch.randint(len(near), (1,), generator=coin))]
            pairs.append((sender, recipient))
            free -= {sender, recipient}
    return pairs
