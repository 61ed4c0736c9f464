"""Mutual learning between the neighbours of a graph, without an aggregator; in no paper.

It is DFML in which every node aggregates: in every round, each node trains the models of all its
neighbours together with its own, with the same alpha and the same peak models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from peerage.aggregation import data_weights, weighted_mean
from peerage.algorithm import Cost, Dimensions, Node
from peerage.algorithms.mutual_learning import MutualLearning, Peak
from peerage.algorithms.rotating_hub import model_in, send_model
from peerage.errors import InputError
from peerage.requests import Inbox
from peerage.vectors import Weights


@dataclass(frozen=True)
class DFMLNeighbours(MutualLearning):
    """Train the models of all neighbours together with its own, and average what comes back.

    With `keep=mean`, a node returns the models of its neighbours. It then averages the versions of
    its own model, weighted by the examples that each was trained on. They have one architecture
    and one start, so their mean is a sensible model, and it has seen the labels of all neighbours.
    With `keep=own`, the neighbours' models are teachers that do not change. Nothing is returned,
    which halves the messages, but a model is only ever trained on the data of its own node.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DFMLNeighbours(cycle="full"))
    >>> experiment == pg.Experiment(algorithm="dfml-neighbours:cycle=full")
    True
    """

    keep: Literal["mean", "own"] = field(default="mean", kw_only=True)

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        if directed and self.keep == "mean":
            raise InputError(
                "keep=mean returns models to their senders, so links must work in both "
                "directions; use an undirected graph, or keep=own"
            )

    def max_messages(self, round: int | None, nodes: int) -> int:
        return nodes if self.keep == "mean" else 1  # its own model, and one to every neighbour

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        # On a complete graph; with fewer neighbours, fewer models train or predict.
        others, passes = dimensions.nodes - 1, float(self.epochs_mutual)
        if self.keep == "mean":
            return Cost(vectors=2.0, passes=passes * (1 + others), state=1.0, together=True)
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
        """Return trained models to their nodes, and receive this node's from the neighbours.

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
