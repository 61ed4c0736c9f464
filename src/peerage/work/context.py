"""The data and model of one node, as compute requests use them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.randomness import numpy_stream, stream_seed, torch_stream
from peerage.vectors import FlatModel

Batches = Iterator[tuple[Tensor, Tensor]]  # examples, labels

GATHERED = 1 << 18  # numbers gathered at once: 1 MB, which stays in the cache


class Examples:
    """A data set that returns batches by index, images in channels-last order."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.images = x.dim() == 4
        # Gathering rows of a row-major tensor is twice as fast as of a channels-last one.
        self.x = x.permute(0, 2, 3, 1).contiguous() if self.images else x.contiguous()
        self.y = y

    @classmethod
    def joined(cls, parts: Sequence["Examples"]) -> "Examples":
        """The examples of several sets, one after the other."""
        x = torch.cat([part.x for part in parts])
        y = torch.cat([part.y for part in parts])
        return cls(x.permute(0, 3, 1, 2) if parts[0].images else x, y)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def example(self) -> tuple[int, ...]:
        """The shape of one example, as a model gets it."""
        stored = tuple(self.x.shape[1:])
        return (stored[-1], *stored[:-1]) if self.images else stored

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        x = self.x.index_select(0, indices)
        return (x.permute(0, 3, 1, 2) if self.images else x), self.y.index_select(0, indices)

    def chunks(self, indices: Tensor, size: int, batch_of_one: str = "keep") -> Batches:
        """Batches in the order of the indices; several small batches are gathered at once.

        A last batch of a single example is kept, dropped, or merged into the batch before.
        """
        whole, left = divmod(len(indices), size)
        is_single = left == 1 and (
            batch_of_one == "drop" or (batch_of_one == "merge" and whole > 0)
        )
        if is_single:
            last = indices[-size - 1 :]
            indices = indices[:-1] if batch_of_one == "drop" else indices[: -size - 1]
        rows = max(1, GATHERED // (size * max(1, self.x.shape[1:].numel()))) * size
        for start in range(0, len(indices), rows):  # torch.split would yield an empty batch
            x, y = self.take(indices[start : start + rows])
            yield from zip(torch.split(x, size), torch.split(y, size), strict=True)
        if is_single and batch_of_one == "merge":
            yield self.take(last)

    def in_order(self, size: int) -> Batches:
        """Batches of all examples in their order, without copying."""
        for x, y in zip(torch.split(self.x, size), torch.split(self.y, size), strict=True):
            yield (x.permute(0, 3, 1, 2) if self.images else x), y

    def subset(self, indices: Tensor) -> "Examples":
        x, y = self.take(indices)
        return Examples(x, y)


@dataclass
class LocalContext:
    """Everything that a compute request of one node may use in one round."""

    node: int
    round: int
    seed: int
    data: Examples
    indices: Tensor  # [d_i] the node's own examples
    architecture: str
    models: Mapping[str, FlatModel]  # one per architecture
    # Kept between rounds: optimiser state, position in the stream of batches.
    persistent_tensors: dict[str, Tensor]
    held_out: Examples | None = None  # the node's own validation examples
    allocate: Callable[[int], Tensor] = torch.empty  # memory for a result [d]
    cache: Path | None = None  # folder for expensive results that can be reused
    orders: int = field(default=0)  # number of shuffles so far in this round
    # Number of samples so far in this round, by stream: they do not change the order of batches.
    samples: Counter[str] = field(default_factory=Counter)
    label_proportions: Tensor | None = None  # [classes], of the node's training examples

    def model(self, params: Tensor, buffers: Tensor, architecture: str | None = None) -> FlatModel:
        """The model of an architecture, by default the node's, loaded with these values."""
        model = self.models[architecture or self.architecture]
        model.load(params, buffers)
        return model

    def seed_dropout(self) -> None:
        """Seed torch's global generator for this node; dropout layers draw from it."""
        self.seed_torch("dropout", self.orders)

    def seed_torch(self, purpose: str, *index: int) -> None:
        """Seed torch's global generator for a purpose of this node in this round."""
        torch.default_generator.manual_seed(
            stream_seed(self.seed, purpose, self.node, self.round, *index)
        )

    def stream(self, purpose: str) -> torch.Generator:
        """A random stream of this node for a purpose in this round."""
        return torch_stream(self.seed, purpose, self.node, self.round, self.orders)

    def epoch(self, size: int, batch_of_one: str = "keep") -> Batches:
        """One pass over the local examples in a new order; see `LocalSGD.batch_of_one`."""
        rng = numpy_stream(self.seed, "batches", self.node, self.round, self.orders)
        self.orders += 1
        order = torch.from_numpy(rng.permutation(len(self.indices)))
        return self.data.chunks(self.indices[order], size, batch_of_one)

    def steps(
        self, count: int, size: int, stream: str | None = None, advance: bool = True
    ) -> Batches:
        """The next `count` batches of an endless shuffled stream that continues across rounds.

        All have the same size; a batch may span two passes. A named `stream` has its own order and
        position; None is the stream of training. Without `advance`, the position stays.
        """
        key = "position" if stream is None else f"position {stream}"
        start = int(self.persistent_tensors[key]) if key in self.persistent_tensors else 0
        stop = start + count * size
        if advance:
            self.persistent_tensors[key] = torch.tensor(stop)
        total = len(self.indices)
        passes = range(start // total, (stop - 1) // total + 1)
        order = np.concatenate([self._pass(number, stream) for number in passes])
        first = passes.start * total
        chosen = torch.from_numpy(order[start - first : stop - first])
        return self.data.chunks(self.indices.index_select(0, chosen), size)

    def _pass(self, number: int, stream: str | None) -> NDArray[np.int64]:
        purpose = "stream" if stream is None else f"stream {stream}"
        return numpy_stream(self.seed, purpose, self.node, number).permutation(len(self.indices))

    def sample(self, count: int | None, size: int, stream: str = "losses") -> Batches:
        """Batches of up to `count` local examples, drawn without replacement; None means all.

        Each call draws other examples from the named stream.
        """
        indices = self.indices
        if count is not None and count < len(indices):
            number = self.samples[stream]
            self.samples[stream] += 1
            rng = numpy_stream(self.seed, f"sample {stream}", self.node, self.round, number)
            indices = indices[torch.from_numpy(rng.permutation(len(indices))[:count])]
        return self.data.chunks(indices, size)
