"""What is on its way: messages to others, and those of others of which a part is here."""

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from math import prod
from typing import Any
from zlib import crc32

import torch

from peerage.algorithm import Dimensions
from peerage.net.network import LARGEST, ROOM, Network
from peerage.net.transport import Transport, Unreachable
from peerage.net.wire import DONE, Expected, Form, Header, Rejected
from peerage.sim.world import World

ASKING = 2.0  # seconds that something short may take
BACKLOG = 8  # messages that may wait for one recipient

log = logging.getLogger("peerage.peer")


def expected_of(network: Network, me: int, world: World) -> Expected:
    """What this peer accepts: the tensors that the algorithm declares, for every architecture."""
    tensors: dict[str, dict[str, Form]] = {}
    largest = 0
    for name, kind in world.architectures.items():
        dimensions = Dimensions(
            kind.layout,
            kind.buffer_layout.size,
            world.nodes,
            world.label_counts.shape[1],
            world.test.example,
        )
        declared = world.algorithm.speaks(dimensions)
        tensors[name] = {key: Form((form.shape,), form.dtype) for key, form in declared.items()}
        sizes = [prod(n or 1 for n in form.shape) for form in declared.values()]
        largest = max(largest, 8 * sum(sizes), ROOM * 4 * kind.layout.size)
        if world.prelude is not None:
            shapes = getattr(world.prelude, "shapes", {})
            tensors[name] |= {key: Form((shape,)) for key, shape in shapes.items()}
    members = frozenset(range(world.nodes))
    return Expected(network.run, me, members, tensors, max(LARGEST, largest))


class Incoming:
    """A payload of which some bytes are here; its checksum grows with it."""

    def __init__(self, header: Header) -> None:
        self.header, self.here = header, 0
        buffer: Any = torch.empty(header.size, dtype=torch.uint8).numpy()  # of exactly this size
        self.data = memoryview(buffer)
        self.checksum = 0

    def add(self, data: bytes) -> None:
        self.data[self.here : self.here + len(data)] = data
        self.checksum = crc32(data, self.checksum)
        self.here += len(data)


class Outbox:
    """Sends messages to one recipient, one after the other."""

    def __init__(self, transport: Transport, patience: float, counters: Counter[str]) -> None:
        self.transport, self.patience, self.counters = transport, patience, counters
        self.waiting: asyncio.Queue[tuple[Header, bytes | memoryview]] = asyncio.Queue()
        self.task = asyncio.create_task(self._work())

    def put(self, header: Header, payload: bytes | memoryview = b"") -> None:
        while self.waiting.qsize() >= BACKLOG:  # the recipient is slow, or gone: oldest first
            self.waiting.get_nowait()
            self.waiting.task_done()
            self.counters["undelivered"] += 1
        self.waiting.put_nowait((header, payload))

    async def _work(self) -> None:
        while True:
            header, payload = await self.waiting.get()
            word = header.kind == DONE  # to somebody who may have left already: no harm if lost
            try:
                if not word or self.transport.reachable(header.recipient):
                    patience = ASKING if word else self.patience
                    await self.transport.send(header, payload, patience)
            except Unreachable:
                if not word:
                    self.counters["undelivered"] += 1
            except Rejected as refusal:
                self.counters[f"refused {refusal.reason}"] += 1
                log.debug("node %d refused a message: %s", header.recipient, refusal)
            finally:
                self.waiting.task_done()

    async def flush(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.waiting.join()

    async def close(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
