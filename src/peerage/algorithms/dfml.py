"""DFML: models of different architectures learn from each other at a changing client (P1).

Khalil, Estiri, Beitollahi, Asadi, Hemati, Li, Zhang, Chen, 2024. arXiv:2402.01863. In every round,
some senders train and send their models to an aggregator, which trains all of them together with
its own on its own data and returns them. No server and no common data are needed.

`dfml-neighbours` is in no paper: every node does this with its neighbours, in every round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from peerage.aggregation import data_weights, weighted_mean
from peerage.algorithm import Cost, Dimensions, Node
from peerage.algorithms.mutual_learning import MutualLearning, Peak
from peerage.algorithms.rotating_hub import RotatingHub, model_in, send_model
from peerage.errors import InputError
from peerage.requests import Inbox
from peerage.vectors import Weights


@dataclass(frozen=True)
class DFML(MutualLearning, RotatingHub[Peak]):
    """A random client trains its own model and those of senders together and returns them."""

    # Whether all models learn from each other, or only that of the aggregator learns.
    teacher: Literal["mutual", "vanilla"] = field(default="mutual", kw_only=True)

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        senders, passes = self.num_senders(dimensions.nodes), float(self.epochs_mutual)
        if self.teacher == "mutual":  # one participant trains the models of all
            return Cost(per_link(2 * senders, dimensions.nodes), passes, state=1.0)
        own = passes / (senders + 1)  # one participant trains its own model
        return Cost(per_link(senders, dimensions.nodes), own, forward=passes - own, state=1.0)

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


@dataclass(frozen=True)
class DFMLNeighbours(MutualLearning):
    """Train the models of all neighbours together with its own, and average what comes back.

    With `keep=mean`, a node returns the models of its neighbours. It then averages the versions of
    its own model, weighted by the examples that each was trained on. They have one architecture
    and one start, so their mean is a sensible model, and it has seen the labels of all neighbours.
    With `keep=own`, the neighbours' models are teachers that do not change. Nothing is returned,
    which halves the messages, but a model is only ever trained on the data of its own node.
    """

    keep: Literal["mean", "own"] = field(default="mean", kw_only=True)

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        if directed and self.keep == "mean":
            raise InputError(
                "keep=mean returns models to their senders, so links must work in both "
                "directions; use an undirected graph, or keep=own"
            )

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        # On a complete graph; with fewer neighbours, fewer models train or predict.
        others, passes = dimensions.nodes - 1, float(self.epochs_mutual)
        if self.keep == "mean":
            return Cost(vectors=2.0, passes=passes * (1 + others), state=1.0)
        return Cost(vectors=1.0, passes=passes, forward=passes * others, state=1.0)

    async def round(self, node: Node[Peak]) -> None:
        self.note_alpha(node)
        await node.train(self.local)
        inbox = await node.exchange(x=node.params, b=node.buffers)
        others = {message.sender: model_in(message) for message in inbox.others().messages}
        own, loss = {node.id: node.weights}, self.loss(self.alpha(node))
        model, returned = node.weights, dict[int, Weights]()
        if others and self.keep == "own":
            model = (await node.train_together(self.work(), own, loss, others)).models[node.id]
        elif others:
            trained = await node.train_together(self.work(), own | others, loss)
            model = trained.models[node.id]
            returned = {key: trained.models[key] for key in others if key not in trained.diverged}
        if self.keep == "mean":
            model = average(node, model, await self.give_back(node, returned))
        self.update(node, model)

    async def give_back(self, node: Node[Peak], models: Mapping[int, Weights]) -> Inbox:
        """Return models to their nodes, and receive the versions of one's own.

        A neighbour whose model did not arrive gets an empty message. Otherwise two nodes that lost
        each other's models would wait for each other.
        """
        await node.send(other for other in node.neighbours if other not in models)
        for sender, model in models.items():
            await send_model(node, sender, model)
        return (await node.receive()).with_payload()


def average(node: Node[Peak], own: Weights, inbox: Inbox) -> Weights:
    """The mean of the versions of a node's model, weighted by the examples they trained on."""
    returned = inbox.alike(own.architecture)
    w = data_weights([node.num_examples, *(message.examples for message in returned.messages)])
    params = weighted_mean([own.params, *returned["x"]], w)
    return Weights(params, weighted_mean([own.buffers, *returned["b"]], w), own.architecture)


def per_link(messages: float, nodes: int) -> float:
    """Models that cross a link of a complete graph in a round, if so many are sent in all."""
    return messages / max(nodes * (nodes - 1), 1)
