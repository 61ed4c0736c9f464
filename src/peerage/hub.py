"""The hub pattern: one node without data broadcasts a model, collects answers and merges them.

The hub is an extra node; all other nodes are its clients. It has the highest number, unless clients
joined a network of real peers later. Clients exchange messages only with the hub.

`models_at` says which nodes keep a model between rounds and have it evaluated:

- `hub` (default): every round of a client begins with the hub's model, and the hub keeps and
  evaluates the only model;
- `clients`: every client keeps its own model, which the hub's message does not replace. The
  models of the clients are evaluated, and the metrics of the network are means over them;
- `both`: as `clients`, and the hub's model is evaluated in a row of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from peerage.algorithm import Algorithm, Node
from peerage.errors import InputError
from peerage.requests import Inbox

S = TypeVar("S")
Payload = dict[str, Tensor]


@dataclass(frozen=True)
class HubAlgorithm(Algorithm[S]):
    """A round is `broadcast` at the hub, `answer` at the clients, and `merge` at the hub.

    >>> import peerage as pg
    >>> pg.FedAvg(clients=5).participation(nodes=20), issubclass(pg.FedAvg, pg.HubAlgorithm)
    (0.25, True)
    """

    with_hub: ClassVar[bool] = True

    # Number of clients that each round selects at random; all of them by default.
    clients: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients is not None and self.clients < 1:
            raise InputError(f"clients must be at least 1, got {self.clients}")

    def participation(self, nodes: int) -> float:
        return (self.clients or nodes) / nodes

    async def round(self, node: Node[S]) -> None:
        selected = self.selected_clients(node)
        if node.id == node.hub:
            await node.send(selected, **self.broadcast(node))
            inbox = await node.receive(selected)
            if len(inbox):  # without answers, the model stays as it is
                self.merge(node, inbox)
        elif node.id not in selected:
            self.skip_round(node)
        else:
            # A client's only neighbour is the hub, whose message may have been lost.
            for message in (await node.receive()).messages:
                if self.models_at == "hub":
                    node.params, node.buffers = message.payload["x"], message.payload["b"]
                await node.send(message.sender, **await self.answer(node, message.payload))

    def selected_clients(self, node: Node[S]) -> tuple[int, ...]:
        """The clients of this round; all nodes draw the same ones from the public coin."""
        assert node.hub is not None
        clients = node.graph[node.hub]
        if self.clients is None:
            return clients
        order = torch.randperm(len(clients), generator=node.coin)[: self.clients]
        return tuple(sorted(clients[i] for i in order.tolist()))

    def broadcast(self, node: Node[S]) -> Payload:
        """The payload that the hub sends to the selected clients."""
        return {"x": node.params, "b": node.buffers}

    async def answer(self, node: Node[S], hub_message: Mapping[str, Tensor]) -> Payload:
        """The reply of a client.

        `node.params` is already the hub's model, or the client's own if it keeps one.
        """
        raise NotImplementedError

    def merge(self, node: Node[S], inbox: Inbox) -> None:
        """Update the hub's model from the answers, of which there is at least one."""
        raise NotImplementedError

    def skip_round(self, node: Node[S]) -> None:
        """Called on a client in a round for which it is not selected."""
