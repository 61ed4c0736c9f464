"""The hub pattern: one node without data hands a model out, gathers answers and merges them.

The hub is one node more than the network has peers, and comes last. Its peers are its clients: they
talk to nobody else, and between two rounds they keep no model, because every round begins with the
one that the hub sends. So the hub's model is *the* model, and the only one that is judged.
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
    """A round is `broadcast` at the hub, `answer` at the clients, and `merge` at the hub."""

    with_hub: ClassVar[bool] = True

    # How many take part in a round, drawn anew for each; all of them by default.
    clients: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clients is not None and self.clients < 1:
            raise InputError(f"clients must be at least 1, got {self.clients}")

    async def round(self, node: Node[S]) -> None:
        selected = self.selected_clients(node)
        if node.id == node.hub:
            await node.send(selected, **self.broadcast(node))
            inbox = await node.receive(selected)
            if len(inbox):  # else nobody was heard, and the model stays as it is
                self.merge(node, inbox)
        elif node.id not in selected:
            self.skip_round(node)
        else:
            # A client's only neighbour is the hub; its message may have been lost on the way.
            for message in (await node.receive()).messages:
                node.params, node.buffers = message.payload["x"], message.payload["b"]
                await node.send(message.sender, **await self.answer(node, message.payload))

    def selected_clients(self, node: Node[S]) -> tuple[int, ...]:
        """The clients of this round; everybody draws the same ones from the public coin."""
        everyone = node.graph[-1]  # whom the hub hears: the hub comes last
        if self.clients is None:
            return everyone
        order = torch.randperm(len(everyone), generator=node.coin)[: self.clients]
        return tuple(sorted(everyone[i] for i in order.tolist()))

    def broadcast(self, node: Node[S]) -> Payload:
        """What the hub sends to the clients of a round."""
        return {"x": node.params, "b": node.buffers}

    async def answer(self, node: Node[S], hub_message: Mapping[str, Tensor]) -> Payload:
        """What a client makes of it; its model is already the hub's."""
        raise NotImplementedError

    def merge(self, node: Node[S], inbox: Inbox) -> None:
        """What the hub makes of the answers, of which there is at least one."""
        raise NotImplementedError

    def skip_round(self, node: Node[S]) -> None:
        """What a client does in a round without it."""
