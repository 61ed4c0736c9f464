"""Means of models, or of their cores, that several algorithms share."""

from collections.abc import Iterable
from typing import Any

from peerage.aggregation import weighted_mean
from peerage.algorithm import Node
from peerage.requests import Inbox


async def average(node: Node[Any], weights: str, to: Iterable[int] | None = None) -> None:
    """Replace the node's model by the mean over its neighbourhood, or over itself and `to`."""
    inbox = await node.exchange(to=to, x=node.params, b=node.buffers)
    inbox = inbox.alike(node.architecture)
    w = inbox.weights(weights)
    node.params, node.buffers = inbox.mean("x", w), inbox.mean("b", w)


async def average_cores(node: Node[Any], weights: str, to: Iterable[int] | None = None) -> None:
    """Like `average`, but only the cores and their running statistics are sent and change."""
    core, statistics = node.layout.part("core"), node.buffer_layout.part("core")
    payload = {"core": node.params[core], "core_b": node.buffers[statistics]}
    inbox = (await node.exchange(to=to, **payload)).alike(node.architecture)
    w = inbox.weights(weights)
    params, buffers = node.params.clone(), node.buffers.clone()
    params[core], buffers[statistics] = inbox.mean("core", w), inbox.mean("core_b", w)
    node.params, node.buffers = params, buffers


def mean_with(node: Node[Any], inbox: Inbox, own: float, weights: Iterable[float]) -> None:
    """Replace the node's model by a mean of it, with weight `own`, and the models of an inbox."""
    w = [own, *weights]
    node.params = weighted_mean([node.params, *inbox["x"]], w)
    node.buffers = weighted_mean([node.buffers, *inbox["b"]], w)


def all_others(node: Node[Any]) -> list[int]:
    """All nodes but this one, whatever the graph."""
    return [other for other in range(node.num_nodes) if other != node.id]
