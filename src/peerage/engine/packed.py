"""Payloads of shards without common memory: packed into one buffer per other shard.

After each step a shard packs the tensors that nodes of another shard receive, each of them once,
whatever the number of recipients there. A reference names the shard and a number, so tensors are
found by their sender, and never depend on the order of arrival.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.engine.pool import ALIGNMENT, WITHIN_ROUND, keep_freed_memory
from peerage.engine.router import ShardOutput
from peerage.engine.shard import Shard, ShardReport
from peerage.engine.world import World


@dataclass(frozen=True)
class TensorRef:
    """A tensor that a shard has sent in this round."""

    shard: int
    number: int


class Entry(NamedTuple):
    """The location of a tensor in a buffer."""

    ref: TensorRef
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class PackedBuffer(NamedTuple):
    """Tensors one after the other, and where each of them is."""

    entries: list[Entry]
    data: NDArray[np.uint8]

    def tensors(self) -> dict[TensorRef, Tensor]:
        """The tensors, in memory of their own: that of the buffer may be read-only."""
        memory = torch.from_numpy(self.data.copy())
        return {
            ref: memory[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for ref, offset, shape, dtype in self.entries
        }


class PackedStore:
    """The store of a shard that exchanges packed buffers with the others."""

    shards = 1  # that share memory: models that a node trains together stay in its shard

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self._own: list[Tensor] = []
        self._known: dict[int, TensorRef] = {}  # by the id of an own tensor, which is kept alive
        self._received: dict[TensorRef, Tensor] = {}

    def empty(self, size: int) -> Tensor:
        """An empty vector [size] that may be sent."""
        return torch.empty(size)

    def put(self, tensor: Tensor) -> TensorRef:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = TensorRef(self.shard, len(self._own))
            self._own.append(tensor)
        return self._known[id(tensor)]

    def open(self, place: TensorRef) -> Tensor:
        return self._own[place.number] if place.shard == self.shard else self._received[place]

    def to_private(self, tensor: Tensor) -> Tensor:
        """A tensor that stays valid after `clear`, without the rest of its buffer."""
        size = tensor.numel() * tensor.element_size()
        return tensor.clone() if tensor.untyped_storage().nbytes() > size else tensor

    def clear(self) -> None:
        self._own, self._known, self._received = [], {}, {}

    def free(self) -> None:
        self.clear()

    def pack(self, refs: Iterable[TensorRef]) -> PackedBuffer | None:
        """A buffer with these tensors of this shard; None without any."""
        entries, end = [], 0
        for ref in dict.fromkeys(refs):
            tensor = self._own[ref.number]
            entries.append(Entry(ref, end, tuple(tensor.shape), tensor.dtype))
            size = tensor.numel() * tensor.element_size()
            end += -(-size // ALIGNMENT) * ALIGNMENT
        if not entries:
            return None
        buffer = PackedBuffer(entries, np.empty(end, dtype=np.uint8))
        memory = torch.from_numpy(buffer.data)
        for ref, offset, shape, dtype in entries:
            room = memory[offset : offset + prod(shape) * dtype.itemsize]
            room.view(dtype).view(shape).copy_(self._own[ref.number])
        return buffer

    def receive(self, buffer: PackedBuffer) -> None:
        self._received |= buffer.tensors()


def refs_for_shards(answer: Any, owner: Mapping[int, int], me: int) -> dict[int, list[TensorRef]]:
    """The tensors in the answer of shard `me` that nodes of other shards receive, by shard."""
    found: dict[int, list[TensorRef]] = {}
    if isinstance(answer, ShardOutput):
        for packet in answer.packets:
            for shard in {owner[node] for node in packet.to} - {me}:
                found.setdefault(shard, []).extend(packet.payload.values())
    return found


def refs_for_driver(method: str, answer: Any) -> list[TensorRef]:
    """The tensors in an answer that the engine itself opens."""
    if method == "model":
        return list(answer[0])
    return [place for _, place in answer.spread] if isinstance(answer, ShardReport) else []


class Answer(NamedTuple):
    """What a shard returns from a call."""

    value: Any
    for_driver: PackedBuffer | None  # the tensors that the engine itself opens
    for_shards: dict[int, PackedBuffer]


class PackedShard:
    """A shard in a process of its own, which a transport connects with the others."""

    def __init__(self, world: World, nodes: Sequence[int], owner: Mapping[int, int]) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self.owner, self.number = owner, owner[nodes[0]]
        self.store = PackedStore(self.number)
        self.shard = Shard(world, nodes, self.store)
        self._idle_since = perf_counter()

    def run(self, method: str, arguments: tuple[Any, ...]) -> Answer:
        if method in WITHIN_ROUND:
            self.shard.seconds["wait"] += perf_counter() - self._idle_since
        value = getattr(self.shard, method)(*arguments)
        wanted = refs_for_shards(value, self.owner, self.number)
        buffers = {shard: self.store.pack(refs) for shard, refs in wanted.items()}
        for_driver = self.store.pack(refs_for_driver(method, value))
        self._idle_since = perf_counter()
        return Answer(value, for_driver, {i: buffer for i, buffer in buffers.items() if buffer})

    def receive(self, buffers: Iterable[PackedBuffer]) -> None:
        for buffer in buffers:
            self.store.receive(buffer)

    def save(self) -> tuple[dict[str, Any], bytes]:
        """The JSON part of the state, and the content of the file with its tensors."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "part.safetensors"
            return self.shard.save(str(file)), file.read_bytes()

    def restore(self, files: Mapping[str, bytes], arguments: tuple[Any, ...]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            self.shard.restore(folder, *arguments)
