"""Repeats rounds of a peer with some of their messages, to find the message that made one fail.

A repetition begins with the state before a round. Tensors are never changed in place, so references
are enough to keep that state. Nothing is sent and nothing is written.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peerage.engine.router import Packet, ShardOutput, check_combined, check_finite
from peerage.engine.shard import NodeRuntime, Shard
from peerage.errors import Diverged
from peerage.isolation import exclusive_torch
from peerage.privacy import RELEASE_COUNT
from peerage.vectors import all_finite

PROBED = 32  # examples on which the loss of an aggregated model is computed


@dataclass(frozen=True)
class NodeState:
    """What a node keeps between two rounds."""

    params: Tensor
    buffers: Tensor
    state: Any
    persistent_tensors: dict[str, Tensor]

    @classmethod
    def of(cls, shard: Shard, me: int) -> "NodeState":
        member = shard.members[me]
        node = member.node
        return cls(node.params, node.buffers, node.state, dict(member.persistent_tensors))

    def restore(self, shard: Shard, me: int) -> None:
        """Give a node this state; messages that it has released since still count."""
        member = shard.members[me]
        node, tensors = member.node, member.persistent_tensors
        node.params, node.buffers, node.state = self.params, self.buffers, self.state
        released = {key: count for key, count in tensors.items() if key == RELEASE_COUNT}
        tensors.clear()
        tensors.update(self.persistent_tensors | released)


@dataclass
class RoundLog:
    """What is needed to repeat a round: the state before it, and the messages that came in.

    `begin` begins the round again; it is None for a step that only replaced the state.
    """

    round: int
    shard: Shard
    before: NodeState
    begin: Callable[[], ShardOutput] | None
    last: bool = False  # whether nothing is trained after it here, as at a hub
    undone: bool = True  # whether its records go with it
    received: list[list[Packet]] = field(default_factory=list)  # for each exchange

    @property
    def senders(self) -> set[int]:
        return {packet.sender for packets in self.received for packet in packets}


def repeat(rounds: Sequence[RoundLog], me: int, senders: frozenset[int]) -> Exception | None:
    """Repeat rounds with the messages of these senders only; return the error if one fails.

    The last of the rounds was not finished. It is repeated until it waits for a message that it
    had not waited for.
    """
    state, newest = rounds[0].before, rounds[-1].shard.members[me]
    released = newest.persistent_tensors.get(RELEASE_COUNT)
    try:
        for log in rounds:
            state.restore(log.shard, me)
            if log.begin is not None:
                _repeat(log, me, senders, unfinished=log is rounds[-1])
            state = NodeState.of(log.shard, me)
    except Exception as error:
        return error
    finally:  # nothing was released
        newest.persistent_tensors.pop(RELEASE_COUNT, None)
        if released is not None:
            newest.persistent_tensors[RELEASE_COUNT] = released
    return None


def _repeat(log: RoundLog, me: int, senders: frozenset[int], unfinished: bool) -> None:
    assert log.begin is not None
    output, exchanges = log.begin(), iter(log.received)
    check_finite(log.round, [output])
    while me in output.waiting:
        packets = next(exchanges, None)
        if packets is None and unfinished:
            return
        wanted = senders.intersection(output.waiting[me])
        found = [packet for packet in packets or () if packet.sender in wanted]
        output = log.shard.resume({me: found})
        check_finite(log.round, [output])
        check_relayed(log.shard, me, output.packets)
    check_combined(log.round, log.shard.finish().broken)
    check_kept(log.shard, me, log.last and bool(senders))


# Models that are passed on or kept without training them


def check_kept(shard: Shard, me: int, last: bool) -> None:
    """Raise `Diverged` if a node ended its round with a model that nobody could use.

    With `last`, nothing is trained after it here: so its loss is computed.
    """
    node = shard.members[me].node
    if not (all_finite(node.params) and all_finite(node.buffers)):
        check_combined(node.round, [me])
    if last and node.params.numel():
        _check_usable(shard, me, node.architecture, node.params, node.buffers)


def check_relayed(shard: Shard, me: int, packets: Iterable[Packet]) -> None:
    """Raise `Diverged` if a node sends a model that it made of messages and that is not usable.

    The recipients would blame this node, not those whose messages it used.
    """
    for packet in packets:
        model = shard.models.get(packet.architecture)
        x, b = packet.payload.get("x"), packet.payload.get("b")
        if model is None or x is None or x.shape != model.params.shape:
            continue
        if not _is_trained(shard.members[me], x):
            buffers = model.buffers if b is None or b.shape != model.buffers.shape else b
            _check_usable(shard, me, packet.architecture, x, buffers)


def _is_trained(member: NodeRuntime, x: Tensor) -> bool:
    """Whether these parameters come from the node's own training of this round."""
    return member.finite is not None and x is member.finite[0]


@exclusive_torch()
def _check_usable(shard: Shard, me: int, architecture: str, x: Tensor, b: Tensor) -> None:
    if _has_finite_loss(shard, me, architecture, x, b):
        return
    raise Diverged(
        f"the model that node {me} made of the messages of round "
        f"{shard.members[me].node.round + 1} has a loss or a gradient that is NaN or infinite"
    )


def _has_finite_loss(shard: Shard, me: int, architecture: str, x: Tensor, b: Tensor) -> bool:
    """Whether the loss of a model on a few test examples, and its gradient, are finite."""
    world, model = shard.world, shard.models[architecture]
    examples = world.test_of(me)
    inputs, labels = examples.take(torch.arange(min(PROBED, len(examples))))
    if not world.tested:  # a hub without data has examples of zeros, which hide large weights
        inputs = torch.ones_like(inputs)
    model.load(x, b)
    model.module.eval()
    loss = F.cross_entropy(model.module(inputs), labels)
    gradients = torch.autograd.grad(loss, model.tensors, allow_unused=True)
    return math.isfinite(float(loss.detach())) and all(
        all_finite(g) for g in gradients if g is not None
    )
