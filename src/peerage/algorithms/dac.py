"""DAC: nodes fetch models of those whose models fit their own data (a baseline of P3).

Listo Zec, Ekblom, Willbo, Mogren, Girdzijauskas, 2022. arXiv:2206.08839. The similarity of node j
to node i is 1 / (loss of j's model on i's data). In each round, node i draws peers with
probabilities softmax(T_t s_ij), with T_t = 2a / (1 + exp(-b t)) - a + 1 in round t, and averages
its model with theirs. As in P3, it trains first. The graph plays no role.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isfinite
from typing import ClassVar, Literal

import torch
from torch import Tensor

from peerage.aggregation import data_weights, uniform_weights
from peerage.algorithm import Algorithm, Cost, Dimensions, Node
from peerage.algorithms.averaging import all_others, average, mean_with
from peerage.errors import InputError, check_at_least
from peerage.requests import Inbox, TensorSpec
from peerage.work.training import LocalSGD

MIN_LOSS = 1e-6  # of a fetched model, because the similarity is 1 / loss


@dataclass(frozen=True)
class Similarities:
    """How well the models of all nodes fit one node's data."""

    value: Tensor  # [n], 0 if unknown
    seen: Tensor  # [n] whether the node evaluated this model itself; other values are estimates


@dataclass(frozen=True)
class DAC(Algorithm[Similarities]):
    """Average with the models of peers that are drawn by how well their models fit the data.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(algorithm=pg.DAC(peers=3))
    >>> experiment == pg.Experiment(algorithm="dac:peers=3")
    True
    """

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"
    nonnegative: ClassVar[frozenset[str]] = frozenset({"s"})

    local: LocalSGD = LocalSGD()
    peers: int = 4  # models that a node fetches in a round
    a: float = 30.0  # the temperature T_t rises from 1 to a + 1
    b: float = 0.2  # how fast
    two_hop: bool = True  # estimate unseen similarities by those of fetched peers; P3 does not
    weights: Literal["uniform", "data"] = "uniform"  # of its own and the fetched models
    # Local examples on which fetched models are evaluated; all by default. P3: steps x batch size.
    examples: int | None = None
    final_mean: bool = False  # replace all models by their mean after the last round

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("peers", "examples"):
            check_at_least(name, getattr(self, name), 1)
        for name in ("a", "b"):
            number = getattr(self, name)
            if not 0 <= number < float("inf"):
                raise InputError(f"{name} must be a number of at least 0, got {number}")

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        others = nodes - 1
        if self.peers > others:
            fewer = f"peers={others} or fewer, or " if others else ""
            raise InputError(
                f"peers={self.peers} is more than the {others} other nodes that a node can fetch "
                f"models of; use {fewer}--nodes {self.peers + 1} or more"
            )

    def init(self, node: Node[Similarities]) -> Similarities:
        nodes = torch.arange(node.num_nodes)
        return Similarities(torch.zeros(node.num_nodes), nodes == node.id)  # never estimates itself

    def extend_state(self, known: Similarities, fresh: Similarities) -> Similarities:
        more = slice(len(known.value), None)
        return Similarities(
            torch.cat([known.value, fresh.value[more]]), torch.cat([known.seen, fresh.seen[more]])
        )

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        s = TensorSpec((dimensions.nodes,), low=0.0, high=1 / MIN_LOSS)
        schema = {**super().message_schema(dimensions), "ask": TensorSpec((1,), torch.bool)}
        return schema | ({"s": s} if self.two_hop else {})

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost:
        share = dimensions.nodes / dimensions.layout.size
        evaluated = 1.0 if self.examples is None else min(1.0, self.examples / max(examples, 1.0))
        vectors = 1.0 + share if self.two_hop else 1.0
        return Cost(vectors=vectors, forward=self.peers * evaluated, state=share)

    async def round(self, node: Node[Similarities]) -> None:
        await node.train(self.local)
        ask = {"ask": torch.ones(1, dtype=torch.bool)}
        asked = await node.swap(dict.fromkeys(self.choose(node), ask))
        reply = {"x": node.params, "b": node.buffers}
        if self.two_hop:  # what the node knows itself; estimates of estimates would go around
            reply["s"] = torch.where(node.state.seen, node.state.value, 0.0)
        inbox = await node.swap(dict.fromkeys(asked.senders, reply))
        fetched = inbox.alike(node.architecture)
        if not fetched:
            return
        if node.num_examples:
            losses = await node.losses(fetched, self.examples)
            node.state = self.learn(node.state, fetched, losses.tolist())
        counts = [node.num_examples, *(message.examples for message in fetched.messages)]
        w = uniform_weights(len(counts)) if self.weights == "uniform" else data_weights(counts)
        own, *weights = w.tolist()
        mean_with(node, fetched, own, weights)

    def temperature(self, round: int) -> float:
        return 2 * self.a / (1 + exp(-self.b * round)) - self.a + 1

    def choose(self, node: Node[Similarities]) -> list[int]:
        """Peers drawn without replacement by the softmax of their similarities."""
        others = all_others(node)
        scores = self.temperature(node.round) * node.state.value[others].double()
        chosen = draw(torch.softmax(scores, 0), self.peers, node.rng)
        return [others[position] for position in chosen]

    def learn(self, known: Similarities, fetched: Inbox, losses: list[float]) -> Similarities:
        """Similarities after evaluating fetched models, with estimates for unseen nodes."""
        value, seen = known.value.clone(), known.seen.clone()
        for sender, loss in zip(fetched.senders, losses, strict=True):
            if isfinite(loss):
                value[sender], seen[sender] = 1 / max(loss, MIN_LOSS), True
            else:  # a model that diverged is like an unknown one
                value[sender], seen[sender] = 0.0, False
        if self.two_hop:
            fit = value.tolist()
            # The peer with the largest similarity comes last, so its values remain.
            for message in sorted(fetched.messages, key=lambda message: fit[message.sender]):
                s = message.payload["s"]
                value = torch.where(~seen & (s > 0) & s.isfinite(), s, value)
        return Similarities(value, seen)

    @property
    def has_final(self) -> bool:
        return self.final_mean

    def may_meet(self, a: int, b: int) -> bool:
        return True

    async def final(self, node: Node[Similarities]) -> None:
        await average(node, "uniform", to=all_others(node))


def draw(p: Tensor, k: int, rng: torch.Generator) -> list[int]:
    """k positions, or all if there are fewer, drawn without replacement with probabilities p [n].

    If fewer than k probabilities are above zero, the others are drawn uniformly from the rest.
    """
    possible = p.nonzero().flatten()
    if len(possible) > k:
        return torch.multinomial(p, k, generator=rng).tolist()
    rest = (p == 0).nonzero().flatten()
    order = torch.randperm(len(rest), generator=rng)[: k - len(possible)]
    return [*possible.tolist(), *rest[order].tolist()]
