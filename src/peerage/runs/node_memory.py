"""How much memory a node needs in a round, from the sizes of models alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from peerage.errors import check_at_least

FLOAT = 4  # bytes of a number in single precision
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class NodeMemory:
    """The bytes of every node; data are not counted.

    A node has its model, gradients, `optimizer_floats` numbers per parameter (1 with momentum, 2
    with Adam), the activations of a batch, and what its neighbours send: `message` bytes each. An
    aggregator has instead the models of at most `held` neighbours, of which the largest count. If
    it trains them together with its own (`together`), it has all of them twice, as they came and in
    training, with optimiser and activations, but the gradients of only one.
    """

    parameters: Floats  # of each node's model
    activations: Floats  # bytes of one batch in each node's model
    message: Floats  # bytes that each node sends to a neighbour
    optimizer_floats: int = 1
    held: int | None = None
    together: bool = False

    def of_nodes(self, links: Any) -> Floats:
        """`links` is the adjacency matrix; row i has the neighbours of node i."""
        if self.held is None and not self.together:  # also for a million nodes
            return self._alone() + received(links, self.message)
        ends = zip(links.indptr[:-1], links.indptr[1:], strict=True)
        neighbours = [links.indices[start:end] for start, end in ends]
        return np.array([self._of_aggregator(node, near) for node, near in enumerate(neighbours)])

    def _alone(self) -> Floats:
        return FLOAT * self.parameters * (2 + self.optimizer_floats) + self.activations

    def _of_aggregator(self, node: int, neighbours: NDArray[np.int64]) -> float:
        largest = np.argsort(-self.parameters[neighbours], kind="stable")
        others = neighbours[largest[: self.held]]
        model = FLOAT * self.parameters
        if not self.together or not len(others):
            return float(self._alone()[node] + model[others].sum())
        every = [node, *others]
        each = model * (2 + self.optimizer_floats) + self.activations
        return float(each[every].sum() + model[every].max())


def received(links: Any, message: Floats) -> Floats:
    """The bytes that each node gets from its neighbours, of which each sends one message."""
    receivers = np.repeat(np.arange(len(message)), np.diff(links.indptr))
    sums: Floats = np.bincount(
        receivers, weights=message[links.indices], minlength=len(message)
    ).astype(np.float64)
    return sums


def activation_bytes(module: nn.Module, shape: Sequence[int], batch: int) -> int | None:
    """The bytes that a forward pass of a batch keeps for the backward pass, with the batch itself.

    The module is on device meta, so nothing is computed; parameters do not count. None if it cannot
    run there, because what it does depends on values.
    """
    check_at_least("batch_size", batch, 1)
    own = {id_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if id_of(tensor) not in own:
            sizes[id_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.device("meta"), torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        try:
            output = module.train()(torch.empty(batch, *shape))
        except (NotImplementedError, RuntimeError):
            return None
    total = sum(sizes.values())
    del output  # not earlier: it keeps all tensors, so that no two have the same id
    return total


def id_of(tensor: Tensor) -> int:
    """The same for tensors that share memory."""
    return int(tensor.untyped_storage()._cdata)
