"""A team of Ray actors with one shard each, on one machine or on many.

Ray places the actors and notices when one dies; rounds, routing and bits are those of the other
engines. After every step each actor returns its answer, and one buffer for each other actor, which
Ray moves between machines. The driver passes references and reads no payload.

Files stay with the driver: actors need no common file system.
"""

import contextlib
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from peerage.engine.packed import PackedBuffer, PackedShard, TensorRef
from peerage.engine.pool import balance_nodes
from peerage.engine.ray_cluster import (
    Data,
    RayCluster,
    check_versions,
    examples_of,
    first_line,
    versions,
)
from peerage.engine.world import World
from peerage.errors import InputError, PeerageError, WorkerDied

POLL_INTERVAL = 10.0  # seconds between looks at the resources of the cluster
INLINE_BYTES = 100 * 1024  # Ray keeps smaller objects outside its object store
# Steps after which nodes of other shards receive messages.
EXCHANGES = ("begin", "resume", "resume_together", "pre_round", "final")

log = logging.getLogger("peerage.engine")


class ShardActor:
    """Runs one shard in a process of Ray."""

    def place(self) -> tuple[str, str, dict[str, str]]:
        """The id of the machine in the cluster, its name, and its versions."""
        import platform

        import ray

        return ray.get_runtime_context().get_node_id(), platform.node(), versions()

    def build(
        self, world: bytes, nodes: Sequence[int], owner: Mapping[int, int], *data: Data
    ) -> None:
        """Build the shard, after the versions were compared: they may pickle differently."""
        built: World = pickle.loads(world)
        train, *tests = map(examples_of, data)
        self.shard = PackedShard(replace(built, train=train, tests=tests), nodes, owner)

    def run(self, method: str, arguments: tuple[Any, ...], *received: PackedBuffer | None) -> Any:
        """The answer, the tensors that the driver opens, the sizes of buffers; then the buffers."""
        self.shard.receive(filter(None, received))
        answer, for_driver, buffers = self.shard.run(method, arguments)
        sizes = {shard: buffer.data.nbytes for shard, buffer in buffers.items()}
        first = answer, for_driver, sizes
        if method not in EXCHANGES:
            return first
        shards = range(max(self.shard.owner.values()) + 1)
        return first, *(buffers.get(shard) for shard in shards)

    def save(self) -> tuple[dict[str, Any], bytes]:
        return self.shard.save()

    def restore(self, files: Mapping[str, bytes], arguments: tuple[Any, ...]) -> None:
        self.shard.restore(files, arguments)


class RayTeam:
    """Actors with one shard each; nodes are distributed by their expected cost."""

    def __init__(self, world: World, cluster: RayCluster) -> None:
        self.ray, self.cluster = cluster.ray, cluster
        costs = [world.expected_cost(node) for node in range(world.nodes)]
        self.shard_nodes = balance_nodes(costs, cluster.num_workers())
        self._tensors: dict[TensorRef, Tensor] = {}  # of the last answers
        self._received: list[list[Any]] = [[] for _ in self.shard_nodes]
        self._stack = contextlib.ExitStack()
        try:
            self._actors = start_actors(self.ray, len(self.shard_nodes), self._stack)
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        places = self._gather([actor.place.remote() for actor in self._actors])
        for _, name, found in places:  # again: the machine may have joined after the first look
            check_versions(name, found)
        driver = self.ray.get_runtime_context().get_node_id()
        self._traffic = Traffic(
            [id for id, _, _ in places], driver, stored_bytes=self.cluster.stored_bytes
        )
        owner = {node: i for i, nodes in enumerate(self.shard_nodes) for node in nodes}
        world, data = self.cluster.world, self.cluster.data
        self._gather(
            [
                actor.build.remote(world, nodes, owner, *data)
                for actor, nodes in zip(self._actors, self.shard_nodes, strict=True)
            ]
        )

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method == "save":
            return self._save([Path(path) for (path,) in arguments])
        if method == "restore":
            return self._restore(arguments[0])
        count = len(self._actors)
        returned = count + 1 if method in EXCHANGES else 1
        calls = [
            actor.run.options(num_returns=returned).remote(method, values, *received)
            for actor, values, received in zip(self._actors, arguments, self._received, strict=True)
        ]
        firsts = [call[0] if returned > 1 else call for call in calls]
        if returned > 1:
            self._received = [
                [c[1 + i] for j, c in enumerate(calls) if j != i] for i in range(count)
            ]
        else:
            self._received = [[] for _ in range(count)]
        answers = self._gather(firsts)
        opened = [0 if buffer is None else buffer.data.nbytes for _, buffer, _ in answers]
        self._traffic.add([sizes for _, _, sizes in answers], opened)
        self._tensors = {}
        for _, buffer, _ in answers:
            self._tensors |= buffer.tensors() if buffer is not None else {}
        return [answer for answer, _, _ in answers]

    def open(self, place: TensorRef) -> Tensor:
        return self._tensors[place]

    def traffic(self) -> dict[str, int]:
        return self._traffic.take()

    def close(self) -> None:
        """End all actors; the connection to Ray is that of the run."""
        self._stack.close()

    def _save(self, paths: Sequence[Path]) -> list[Any]:
        saved = self._gather([actor.save.remote() for actor in self._actors])
        for path, (_, content) in zip(paths, saved, strict=True):
            path.write_bytes(content)
        return [tree for tree, _ in saved]

    def _restore(self, arguments: tuple[Any, ...]) -> list[Any]:
        folder, trees, parts, *rest = arguments
        files = self.ray.put(
            {name: (Path(folder) / name).read_bytes() for name in set(parts.values())}
        )
        values = (trees, parts, *rest)
        return self._gather([actor.restore.remote(files, values) for actor in self._actors])

    def _gather(self, calls: Sequence[Any]) -> list[Any]:
        """The results of all calls, in order; the first failure ends the wait."""
        errors = self.ray.exceptions
        try:
            left, found = list(calls), {}
            while left:
                [done], left = self.ray.wait(left, num_returns=1)
                found[done] = self.ray.get(done)  # raises the error of a call
            return [found[call] for call in calls]
        except errors.RayTaskError as error:
            raise _original(error) from None
        except (errors.ObjectStoreFullError, errors.OutOfDiskError) as error:
            raise InputError(
                f"the object store of Ray is full: {first_line(error)}; start Ray with a larger "
                "--object-store-memory, or use more machines"
            ) from None
        except errors.RayActorError as error:
            raise WorkerDied(f"a worker of Ray died: {first_line(error)}") from None
        except errors.RayError as error:
            raise WorkerDied(f"Ray failed: {first_line(error)}") from None


class Traffic:
    """Counts what moves between shards, and what a run keeps in the stores of all machines.

    A buffer is in the store of its sender's machine, and if another machine needs it, in that one's
    as well. Small objects are in no store. Ray frees memory up to a second after its last use.
    """

    def __init__(self, machines: Sequence[str], driver: str, stored_bytes: int) -> None:
        self.machines, self.driver = machines, driver  # of every shard, and of the engine
        self._data = stored_bytes * len({driver, *machines})
        self._between, self._held, self._peak = 0, 0, self._data

    def add(self, sizes: Sequence[Mapping[int, int]], opened: Sequence[int]) -> None:
        """Count the buffers of one step: those of the step before are still there.

        `opened` are the sizes of those that the engine itself opens.
        """
        held = 0
        for sender, buffers in enumerate(sizes):
            for recipient, size in buffers.items():
                self._between += size
                held += self._copies(sender, self.machines[recipient], size)
        held += sum(self._copies(i, self.driver, size) for i, size in enumerate(opened))
        self._peak = max(self._peak, self._data + self._held + held)
        self._held = held

    def _copies(self, sender: int, machine: str, size: int) -> int:
        """The bytes of all copies of a buffer that another machine may need."""
        return size * (1 + (self.machines[sender] != machine)) if size > INLINE_BYTES else 0

    def take(self) -> dict[str, int]:
        """The bytes between shards since the last call, and the most that the stores held."""
        taken = {"shard_bytes": self._between, "store_bytes": self._peak}
        self._between, self._peak = 0, self._data + self._held
        return taken


def start_actors(ray: Any, count: int, stack: contextlib.ExitStack) -> list[Any]:
    """Actors on the machines of the cluster; closing the stack ends them."""
    group = ray.util.placement_group([{"CPU": 1}] * count, strategy="SPREAD")
    stack.callback(ray.util.remove_placement_group, group)
    _wait_for(ray, group, count)
    kind = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(ShardActor)
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    actors = []
    for i in range(count):
        where = place(group, placement_group_bundle_index=i)
        actors.append(kind.options(scheduling_strategy=where).remote())
        stack.callback(ray.kill, actors[-1])
    return actors


def _wait_for(ray: Any, group: Any, count: int) -> None:
    """Wait until the cluster has room for the actors, and say for what."""
    told = -1
    while not group.wait(timeout_seconds=POLL_INTERVAL):
        free = int(ray.available_resources().get("CPU", 0))
        if free != told:
            log.warning(
                "waiting for %d free cores in the Ray cluster, which has %d; interrupt the run to "
                "resume it elsewhere",
                count,
                free,
            )
            told = free


def _original(error: Any) -> Exception:
    """The exception that was raised in an actor."""
    cause = error.cause
    if isinstance(cause, PeerageError):
        return cause
    text = RuntimeError(f"{type(cause).__name__} in a worker of Ray: {first_line(cause)}")
    text.add_note(str(error))
    return text
