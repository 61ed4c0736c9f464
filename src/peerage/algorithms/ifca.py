"""IFCA: a hub with k models, of which each client trains the one that fits its data best.

Ghosh, Chung, Yin, Ramchandran, 2020. arXiv:2006.04088. P3 names it as the client-server counterpart
of FACADE, which it is with `shared_core`. Its authors' runs on CIFAR-10 have 200 clients, 600
rounds, and options `ifca:clients=20 --epochs 5 --batch-size 50 --lr 0.25`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.algorithm import Cost, Dimensions, Node
from peerage.algorithms.choosing import lowest, note_choice
from peerage.errors import InputError, check_at_least
from peerage.hub import HubAlgorithm, Payload
from peerage.requests import Inbox, TensorSpec
from peerage.vectors import Entries, Layout, Weights
from peerage.work.training import LocalSGD


@dataclass(frozen=True)
class Models:
    """The k models of the hub; a client has none between rounds, so k = 0."""

    core: Tensor  # [c] parameters that all models share, if there are any
    core_b: Tensor  # [cb] their running statistics
    models: Tensor  # [k, d - c] all other parameters
    models_b: Tensor  # [k, b - cb]
    unchosen: Tensor  # [k] rounds since a client chose each model


@dataclass(frozen=True)
class IFCA(HubAlgorithm[Models]):
    """Clients train the best of the hub's k models; the hub averages those of the same index.

    The models start different from each other. One that no client chose stays as it is. With
    `shared_core`, the models differ in their heads only, and the core is averaged over all answers.

    The model of a client, which is evaluated and exported, is the one that it chose last, as the
    hub sent it: before local training, and from an earlier round if the client was not selected
    since. After the last round, the hub sends its models to all clients, which choose once more.
    The hub's own model is the first of the k.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.IFCA(k=2))
    >>> experiment == pg.Experiment(algorithm="ifca:k=2")
    True
    """

    personal: ClassVar[bool] = True  # a model fits the cluster of its client
    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"
    models_at: ClassVar[Literal["hub", "clients", "both"]] = "clients"

    local: LocalSGD = LocalSGD()
    k: int = 2  # models, at least as many as there are clusters
    examples: int | None = None  # local examples that models are tried on; all by default
    weights: Literal["uniform", "data"] = "uniform"  # of the answers with the same index
    shared_core: bool = False  # whether cores are averaged over all answers: centralised FACADE
    # Draw a model anew when no client chose it in so many rounds with answers; never by default.
    restart: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("k", self.k, 1, " model")
        check_at_least("examples", self.examples, 1)
        check_at_least("restart", self.restart, 1, " round")
        if self.restart is not None and self.k == 1:
            raise InputError(
                f"restart={self.restart} has no effect with k=1, where all clients choose the same "
                "model; leave it out, or use a larger k"
            )

    def check_layout(self, layout: Layout) -> None:
        if self.shared_core:
            layout.check_parts("ifca:shared_core=true")

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        if len(architectures) > 1:
            raise InputError(
                f"ifca requires equal architectures, got {len(architectures)}; use one --model for "
                "all nodes"
            )

    def check_start(self, start: str) -> None:
        if start == "file" and self.k > 1:
            raise InputError(
                f"ifca draws {self.k} different models to start with, so it cannot start from a "
                "file; remove --init, or use k=1"
            )

    def parts(self, layout: Layout) -> tuple[Entries, Entries]:
        """The entries of a vector that all models share, and those that each has for itself."""
        if self.shared_core:
            return layout.part("core"), layout.part("head")
        return slice(0, 0), slice(0, layout.size)

    def init(self, node: Node[Models]) -> Models:
        if node.id != node.hub:
            none, never = torch.empty(0), torch.empty(0, dtype=torch.int64)
            return Models(none, none, none.view(0, 0), none.view(0, 0), never)
        shared, own = self.parts(node.layout)
        shared_b, own_b = self.parts(node.buffer_layout)
        starts = [node.weights]
        if self.k > 1:
            starts = [node.initial(f"model {j}") for j in range(self.k)]
        return Models(
            starts[0].params[shared],
            starts[0].buffers[shared_b],
            torch.stack([start.params[own] for start in starts]),
            torch.stack([start.buffers[own_b] for start in starts]),
            torch.zeros(self.k, dtype=torch.int64),
        )

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        layout, statistics = dimensions.layout, dimensions.buffer_layout
        sizes = [layout.part_size("core"), statistics.part_size("core")]
        c, cb = sizes if self.shared_core else (0, 0)
        return {
            **super().message_schema(dimensions),
            "index": TensorSpec((1,), torch.int64, low=0, high=self.k - 1),
            "core": TensorSpec((c,)),
            "core_b": TensorSpec((cb,)),
            "models": TensorSpec((self.k, layout.size - c)),
            "models_b": TensorSpec((self.k, statistics.size - cb)),
        }

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        if self.k == 1:
            return Cost(vectors=1.0)
        tried = 1.0 if self.examples is None else min(1.0, self.examples / max(examples, 1.0))
        return Cost(vectors=1.0, forward=self.k * tried)

    def broadcast(self, node: Node[Models]) -> Payload:
        mine = node.state
        return {
            "core": mine.core,
            "core_b": mine.core_b,
            "models": mine.models,
            "models_b": mine.models_b,
        }

    async def answer(self, node: Node[Models], hub_message: Mapping[str, Tensor]) -> Payload:
        index, losses = await self.choose(node, hub_message)
        note_choice(node, index, losses)
        chosen = node.weights
        await node.train(self.local)
        reply = {"x": node.params, "b": node.buffers, "index": torch.tensor([index])}
        node.params, node.buffers = chosen.params, chosen.buffers
        return reply

    async def choose(
        self, node: Node[Models], hub_message: Mapping[str, Tensor]
    ) -> tuple[int, list[float]]:
        """Make the best of the hub's models that of the client; returns its index and all losses.

        Ties are broken at random. A single model is not tried, so it has no loss.
        """
        models = [self.model(node, hub_message, j) for j in range(self.k)]
        tried = torch.zeros(1) if self.k == 1 else await node.losses(models, self.examples)
        index, losses = lowest(tried, node.rng)
        node.params, node.buffers = models[index].params, models[index].buffers
        return index, losses if self.k > 1 else []

    def model(self, node: Node[Models], hub_message: Mapping[str, Tensor], j: int) -> Weights:
        """Model j of the hub."""
        params, buffers = torch.empty(node.layout.size), torch.empty(node.buffer_layout.size)
        shared, own = self.parts(node.layout)
        params[shared], params[own] = hub_message["core"], hub_message["models"][j]
        shared_b, own_b = self.parts(node.buffer_layout)
        buffers[shared_b], buffers[own_b] = hub_message["core_b"], hub_message["models_b"][j]
        return Weights(params, buffers, node.architecture)

    def merge(self, node: Node[Models], inbox: Inbox) -> None:
        old = node.state
        shared, own = self.parts(node.layout)
        shared_b, own_b = self.parts(node.buffer_layout)
        models, models_b, unchosen = old.models.clone(), old.models_b.clone(), old.unchosen + 1
        for j in range(self.k):
            answers = tuple(m for m in inbox.messages if int(m.payload["index"]) == j)
            if answers:
                group = replace(inbox, messages=answers)
                w = group.weights(self.weights)
                models[j], models_b[j] = group.mean("x", w)[own], group.mean("b", w)[own_b]
                unchosen[j] = 0
            elif self.restart is not None and unchosen[j] >= self.restart:
                fresh = node.initial(f"model {j} in round {node.round + 1}")
                models[j], models_b[j] = fresh.params[own], fresh.buffers[own_b]
                unchosen[j] = 0
        w = inbox.weights(self.weights)
        core, core_b = inbox.mean("x", w)[shared], inbox.mean("b", w)[shared_b]
        node.state = Models(core, core_b, models, models_b, unchosen)
        first = self.model(node, self.broadcast(node), 0)
        node.params, node.buffers = first.params, first.buffers

    def max_messages(self, round: int | None, nodes: int) -> int:
        return 0 if round is None else 1  # in the final step, only the hub sends

    async def final(self, node: Node[Models]) -> None:
        """The hub sends its models to all clients, and each takes the one that fits its data."""
        if node.id == node.hub:
            await node.send(node.neighbours, **self.broadcast(node))
            return
        for message in (await node.receive()).messages:
            await self.choose(node, message.payload)
