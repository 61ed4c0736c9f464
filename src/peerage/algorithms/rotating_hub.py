"""A hub that moves: in every round, another client aggregates the models of some senders (P1).

No node has a fixed role. The aggregator and the senders of a round follow from the public coin and
the graph of the round, so every node computes them alone, and no message is needed to announce
them. Round 1 belongs to the lowest id. After that, `aggregator` says who is next:

- `uniform`: any client, with equal probabilities;
- `walk`: a neighbour of the last aggregator;
- `fixed`: client 0 in every round.

Senders are drawn without replacement among the neighbours of the aggregator.

Nodes that joined late or left are not in the graph of the round, so they are not drawn. Nor are
nodes without neighbours, unless no node has any. If the last aggregator of a walk has left, the
next one is drawn among all. Failures are not public: if the aggregator crashes or cannot be
reached, the round is lost. Its senders keep the models that they trained, and the next round has
another aggregator. A fixed aggregator that is absent costs every round.

Real peers wait for a message for at most `--message-timeout`, and aggregation may take longer than
local training; set it accordingly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from peerage.algorithm import Algorithm, Node
from peerage.errors import InputError, PeerageError
from peerage.requests import Inbox, Message
from peerage.vectors import Weights

S = TypeVar("S")
Graph = Sequence[tuple[int, ...]]


class Participants(NamedTuple):
    """The nodes that take part in a round."""

    aggregator: int
    senders: tuple[int, ...]


@dataclass(frozen=True)
class RotatingHub(Algorithm[S]):
    """A round is `train` and `shared` at all participants, `aggregate` at the hub, then `adopt`."""

    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-aggregation"
    initial_models: ClassVar[Literal["shared", "independent"]] = "shared"

    aggregator: Literal["uniform", "walk", "fixed"] = field(default="uniform", kw_only=True)
    # Senders of a round: below 1 a share of all nodes, from 1 on their number. Fewer if the
    # aggregator has fewer neighbours.
    senders: float = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.senders < float("inf"):
            raise InputError(f"senders must be a number above 0, got {self.senders}")
        if self.senders >= 1 and self.senders != int(self.senders):
            raise InputError(
                f"senders must be a share below 1 or a whole number, got {self.senders}"
            )
        object.__setattr__(self, "senders", float(self.senders))  # 25 and 25.0 are one experiment

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        if self.senders >= nodes > 1:
            raise InputError(
                f"senders={self.senders:g} are more than the {nodes - 1} nodes besides the "
                f"aggregator; use at most {nodes - 1}, or more --nodes"
            )
        if directed:
            raise InputError(
                "the aggregator returns models to its senders, so links must work in both "
                "directions; use an undirected graph"
            )

    def num_senders(self, nodes: int) -> int:
        """The number of senders of an aggregator with enough neighbours; a half is rounded up."""
        count = int(self.senders * nodes + 0.5) if self.senders < 1 else int(self.senders)
        return min(max(count, 1), nodes - 1)

    def participation(self, nodes: int) -> float:
        return (self.num_senders(nodes) + 1) / nodes

    def max_messages(self, round: int | None, nodes: int) -> int:
        return max(self.num_senders(nodes), 1)  # the aggregator returns a model to every sender

    def may_meet(self, a: int, b: int) -> bool:
        return self.aggregator != "fixed" or 0 in (a, b)  # all nodes wait for the aggregator

    def participants(self, node: Node[S]) -> Participants:
        """The aggregator and the senders of this round, the same on every node."""
        coin = node.coin_at(node.round)
        if self.aggregator == "fixed":
            aggregator = 0
        elif self.aggregator == "uniform":
            aggregator = draw_next(node.graph, node.round, candidates(node.graph), coin)
        else:
            before = walk_to(node, node.round - 1) if node.round else None
            aggregator = step(node.graph, node.round, before, coin)
        near = sorted(node.graph[aggregator])
        order = torch.randperm(len(near), generator=coin)[: self.num_senders(node.num_nodes)]
        return Participants(aggregator, tuple(sorted(near[i] for i in order.tolist())))

    async def round(self, node: Node[S]) -> None:
        hub, senders = self.participants(node)
        if node.id == hub:
            await self.train(node)
            inbox = await node.receive(senders)
            for sender, model in (await self.aggregate(node, inbox)).items():
                await send_model(node, sender, model)
        elif node.id in senders:
            await self.train(node)
            model = self.shared(node)
            await send_model(node, hub, model)
            # The reply may be missing; the node then keeps what it trained.
            for message in (await node.receive(hub)).alike(model.architecture).messages:
                self.adopt(node, model_in(message))
        elif node.graph[hub]:
            # Nothing comes, but real peers would otherwise run rounds ahead of the participants.
            await node.receive(hub)

    async def train(self, node: Node[S]) -> None:
        """Train at a participant, before models are sent."""
        raise NotImplementedError

    def shared(self, node: Node[S]) -> Weights:
        """The model that a sender sends."""
        return node.weights

    async def aggregate(self, node: Node[S], inbox: Inbox) -> Mapping[int, Weights]:
        """Update the aggregator's own model; returns the model for each sender that gets one."""
        raise NotImplementedError

    def adopt(self, node: Node[S], model: Weights) -> None:
        """Take over the model that came back from the aggregator."""
        node.params, node.buffers = model.params, model.buffers


async def send_model(node: Node[Any], to: int, model: Weights) -> None:
    await node.send(to, architecture=model.architecture, x=model.params, b=model.buffers)


def model_in(message: Message) -> Weights:
    """The model in a message."""
    return Weights(message.payload["x"], message.payload["b"], message.architecture)


def per_link(messages: float, nodes: int) -> float:
    """Models that cross a link of a complete graph in a round, if so many are sent in all."""
    return messages / max(nodes * (nodes - 1), 1)


def candidates(graph: Graph) -> list[int]:
    """The nodes that may aggregate: those with neighbours, or all if no node has any."""
    return [node for node, near in enumerate(graph) if near] or [*range(len(graph))]


def draw_next(graph: Graph, round: int, among: Sequence[int], coin: torch.Generator) -> int:
    """The lowest id in the first round, then one of the given nodes."""
    if round == 0:
        return candidates(graph)[0]
    return among[int(torch.randint(len(among), (1,), generator=coin))]


def step(graph: Graph, round: int, before: int | None, coin: torch.Generator) -> int:
    """The aggregator after `before` in a walk, by the graph of this round."""
    near = () if before is None else graph[before]
    return draw_next(graph, round, sorted(near) or candidates(graph), coin)


# The last known position of the walk in each network: a round and its aggregator. It only saves
# time: without it, the walk begins in round 1 again, as on a node that joins late.
_positions: WeakKeyDictionary[Callable[[int], Graph], tuple[int, int | None]]
_positions = WeakKeyDictionary()


def walk_to(node: Node[Any], round: int) -> int:
    """The aggregator of a round in a walk, from the coins and graphs of all rounds until then."""
    if node.graph_of is None:
        raise PeerageError("aggregator=walk requires an engine, which knows the graphs")
    last, position = _positions.get(node.graph_of, (-1, None))
    if last > round:
        last, position = -1, None
    for number in range(last + 1, round + 1):
        position = step(node.graph_at(number), number, position, node.coin_at(number))
    assert position is not None
    _positions[node.graph_of] = round, position
    return position
