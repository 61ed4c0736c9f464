"""DFML: models of different architectures learn from each other at a changing client (P1).

Khalil, Estiri, Beitollahi, Asadi, Hemati, Li, Zhang, Chen, 2024. arXiv:2402.01863. In every round,
some senders train and send their models to an aggregator, which trains all of them together with
its own on its own data and returns them. No server and no common data are needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from peerage.algorithm import Cost, Dimensions, Node
from peerage.algorithms.mutual_learning import MutualLearning, Peak
from peerage.algorithms.rotating_hub import RotatingHub, model_in, per_link
from peerage.requests import Inbox
from peerage.vectors import Weights


@dataclass(frozen=True)
class DFML(MutualLearning, RotatingHub[Peak]):
    """A random client trains its own model and those of senders together and returns them.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DFML(senders=4.0))
    >>> experiment == pg.Experiment(algorithm="dfml:senders=4")
    True
    """

    # Whether all models learn from each other, or only that of the aggregator learns.
    teacher: Literal["mutual", "vanilla"] = field(default="mutual", kw_only=True)

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        senders, passes = self.num_senders(dimensions.nodes), float(self.epochs_mutual)
        if self.teacher == "mutual":  # one participant trains the models of all
            vectors = per_link(2 * senders, dimensions.nodes)
            return Cost(vectors, passes, state=1.0, held_models=senders, together=True)
        own = passes / (senders + 1)  # one participant trains its own model
        vectors, forward = per_link(senders, dimensions.nodes), passes - own
        return Cost(vectors, own, forward=forward, state=1.0, held_models=senders)

    def peak_values(self, nodes: int) -> int:
        """N / (2 |S|), rounded up: with half of the nodes as senders 1, with a tenth 5 (P1)."""
        return self.peaks or max(1, ceil(nodes / (2 * max(self.num_senders(nodes), 1))))

    async def round(self, node: Node[Peak]) -> None:
        self.note_alpha(node)
        await super().round(node)

    async def train(self, node: Node[Peak]) -> None:
        await node.train(self.local)
        if self.teacher == "vanilla":  # senders get nothing back
            self.update(node, node.weights)

    async def aggregate(self, node: Node[Peak], inbox: Inbox) -> Mapping[int, Weights]:
        others = {message.sender: model_in(message) for message in inbox.messages}
        own, loss = {node.id: node.weights}, self.loss(self.alpha(node))
        if self.teacher == "mutual":
            trained = await node.train_together(self.work(), own | others, loss)
        else:
            trained = await node.train_together(self.work(), own, loss, others)
        finite = {key: m for key, m in trained.models.items() if key not in trained.diverged}
        if node.id in finite:
            self.update(node, finite.pop(node.id))
        return finite

    def adopt(self, node: Node[Peak], model: Weights) -> None:
        self.update(node, model)
