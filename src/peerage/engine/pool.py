"""A team of worker processes, one per core, that exchange payloads through shared memory.

Workers are forked, so they inherit data, models and classes defined anywhere without pickling.
The shared memory is anonymous: no name can be left behind, and the kernel frees it with the last
process. Only calls and packets, which refer to payloads, go through pipes.
"""

import contextlib
import ctypes
import heapq
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from peerage.engine.shard import Shard
from peerage.engine.world import World
from peerage.errors import InputError, PeerageError
from peerage.workers import ENDED, Workers

ALIGNMENT = 64  # bytes: a cache line, as in torch's allocator
MAP_NORESERVE = 0x4000  # the mmap module has no name for it before Python 3.13
LEAST_ARENA = 1 << 26  # bytes; smaller arenas are useless
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
WITHIN_ROUND = ("resume", "together", "resume_together")  # calls for which workers wait


@dataclass(frozen=True)
class SharedTensorRef:
    """The location of a tensor in shared memory."""

    worker: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """Shared memory that one worker writes and all read; pages are allocated when touched."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self.memory = mmap.mmap(-1, size, flags=flags)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.start = self.bytes.data_ptr()
        self.end = self.start + size

    def view(self, place: SharedTensorRef) -> Tensor:
        size = prod(place.shape) * place.dtype.itemsize
        flat = self.bytes[place.offset : place.offset + size]
        return flat.view(place.dtype).view(place.shape)

    def free(self) -> None:
        """Return all pages to the system; their content is lost."""
        self.memory.madvise(mmap.MADV_REMOVE)


def reserve(count: int) -> list[Arena]:
    """Arenas as large as the machine's memory, or as the system allows."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    while True:
        try:
            return [Arena(size) for _ in range(count)]
        except OSError:  # strict overcommit, or a limit on address space
            size //= 2
            if size < LEAST_ARENA:
                raise PeerageError(
                    f"cannot reserve {count} x {2 * size} bytes of shared memory; raise the limit "
                    "on address space (ulimit -v), or use --engine serial"
                ) from None


class SharedStore:
    """The store of a worker: writes payloads one after the other into the worker's arena."""

    def __init__(self, arenas: Sequence[Arena], worker: int) -> None:
        self.arenas, self.worker, self.used = arenas, worker, 0
        self.shards = len(arenas)

    def empty(self, size: int) -> Tensor:
        """An empty vector [size] in shared memory, which can be sent without a copy."""
        return self.open(self._place((size,), torch.float32))

    def put(self, tensor: Tensor) -> SharedTensorRef:
        offset = tensor.data_ptr() - self.arenas[self.worker].start
        if 0 <= offset < self.used and tensor.is_contiguous():
            return SharedTensorRef(self.worker, offset, tuple(tensor.shape), tensor.dtype)
        place = self._place(tuple(tensor.shape), tensor.dtype)
        self.open(place).copy_(tensor)
        return place

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> SharedTensorRef:
        place = SharedTensorRef(self.worker, self.used, shape, dtype)
        end = self.used + prod(shape) * dtype.itemsize
        capacity = len(self.arenas[self.worker].bytes)
        if end > capacity:
            raise PeerageError(
                f"the messages of one round need more than {capacity} bytes of shared memory in "
                "one worker; use a smaller model or fewer nodes"
            )
        self.used = -(-end // ALIGNMENT) * ALIGNMENT
        return place

    def open(self, place: SharedTensorRef) -> Tensor:
        # `data` has its own version counter; a view shares that of the whole arena.
        return self.arenas[place.worker].view(place).data

    def to_private(self, tensor: Tensor) -> Tensor:
        """A tensor that stays valid after `clear`: a copy if it lies in shared memory."""
        address = tensor.data_ptr()
        in_arena = any(arena.start <= address < arena.end for arena in self.arenas)
        return tensor.clone() if in_arena and tensor.numel() else tensor

    def clear(self) -> None:
        self.used = 0

    def free(self) -> None:
        self.clear()
        self.arenas[self.worker].free()


class PoolTeam:
    """Worker processes with one shard each; nodes are distributed by their expected cost."""

    def __init__(self, world: World, workers: int) -> None:
        if not hasattr(os, "fork") or sys.platform == "darwin":
            raise InputError("engine 'pool' needs Linux; use --engine serial on this system")
        self.shard_nodes = balance_nodes(
            [world.expected_cost(node) for node in range(world.nodes)], workers
        )
        self.arenas = reserve(len(self.shard_nodes))
        arguments = [
            (world, nodes, SharedStore(self.arenas, worker))
            for worker, nodes in enumerate(self.shard_nodes)
        ]
        self.workers = Workers(_work, arguments)
        try:
            self._gather()  # every worker reports when it has built its nodes
        except BaseException:
            self.close()
            raise

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for worker, values in enumerate(arguments):
            self.workers.send(worker, (method, values))
        return self._gather()

    def open(self, place: SharedTensorRef) -> Tensor:
        return self.arenas[place.worker].view(place)

    def traffic(self) -> dict[str, int]:
        return {}  # memory is shared

    def close(self) -> None:
        """End all workers, even busy ones, and wait until they have exited."""
        self.workers.close()
        self.arenas = []

    def _gather(self) -> list[Any]:
        """One answer of each worker, in the order of the workers."""
        answers: dict[int, Any] = {}
        workers = range(len(self.shard_nodes))
        for worker, answer in self.workers.receive(workers):
            if answer is ENDED:
                raise self.workers.died(worker)
            answers[worker] = answer
            if len(answers) == len(workers):
                break
        return [answers[worker] for worker in workers]


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory: models are often reallocated, and new pages are slow."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(M_TRIM_THRESHOLD, 256 << 20)


def balance_nodes(costs: Sequence[int], workers: int) -> list[list[int]]:
    """The nodes of each worker; the most expensive first, each to the least loaded worker.

    >>> balance_nodes([5, 4, 3, 3, 3], 2)
    [[0, 3], [1, 2, 4]]
    """
    workers = min(workers, len(costs))
    heap = [(0, worker) for worker in range(workers)]
    shards: list[list[int]] = [[] for _ in range(workers)]
    for node in sorted(range(len(costs)), key=lambda node: (-costs[node], node)):
        load, worker = heapq.heappop(heap)
        shards[worker].append(node)
        heapq.heappush(heap, (load + costs[node], worker))
    return [sorted(nodes) for nodes in shards]


def _work(pipe: Connection, world: World, nodes: Sequence[int], store: SharedStore) -> None:
    """Execute calls until the pipe closes."""
    keep_freed_memory()
    shard = Shard(world, nodes, store)
    pipe.send((True, None))
    while True:
        start = perf_counter()
        method, arguments = pipe.recv()
        waited = perf_counter() - start
        answer = getattr(shard, method)(*arguments)
        if method in WITHIN_ROUND:
            shard.seconds["wait"] += waited
        pipe.send((True, answer))
