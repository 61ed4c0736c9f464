"""A team of Ray actors with one shard each, on one machine or on many.

Ray places the actors and notices when one dies; rounds, routing and bits are those of the other
engines. After every step each actor returns its answer, and one buffer for each other actor, which
Ray moves between machines. The driver passes references and reads no payload.

Files stay with the driver: actors need no common file system.
"""

import contextlib
import importlib
import logging
import os
import pickle
import platform
import secrets
import shutil
import site
import socket
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from peerage.engine.packed import (
    PackedBuffer,
    PackedStore,
    TensorRef,
    refs_for_driver,
    refs_for_shards,
)
from peerage.engine.pool import balance_nodes, keep_freed_memory
from peerage.engine.shard import Shard
from peerage.engine.world import World
from peerage.errors import InputError, PeerageError, WorkerDied
from peerage.records.environment import package_version
from peerage.work.context import Examples

PACKAGE = Path(__file__).parents[1]
MAX_WORKERS = 64  # with W workers, a step has W * W references
CONNECT_TIMEOUT = 10.0  # seconds until a cluster must have answered
POLL_INTERVAL = 10.0  # seconds between looks at the resources of the cluster
# Steps after which nodes of other shards receive messages.
EXCHANGES = ("begin", "resume", "resume_together", "pre_round", "final")
LOCAL_STORE_BYTES = 1 << 29  # object store of a local Ray; data sets beyond it go to disk

log = logging.getLogger("peerage.engine")

Data = tuple[Any, Any, bool]  # x and y as arrays, and whether they are images


def load_ray(local: bool) -> Any:
    """Import Ray; for a `local` cluster with a token, without which others could run code here.

    Ray reads these variables when it is imported, so they stay set in this process.
    """
    if local and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    elif local and os.environ.get("RAY_AUTH_MODE") != "token":
        log.warning(
            "Ray was imported before this run, without RAY_AUTH_MODE=token: users of this machine "
            "can connect to it; set the variable before the import"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise InputError(
            "engine 'ray' needs the package ray; install it with: pip install 'peerage[ray]'"
        ) from None


class ShardActor:
    """Runs one shard in a process of Ray."""

    def versions(self) -> dict[str, str]:
        return versions()

    def build(
        self, world: bytes, nodes: Sequence[int], owner: Mapping[int, int], *data: Data
    ) -> None:
        """Build the shard, after the versions were compared: they may pickle differently."""
        torch.set_num_threads(1)
        keep_freed_memory()
        built: World = pickle.loads(world)
        train, *tests = map(_examples, data)
        built = replace(built, train=train, tests=tests)
        self.number = owner[nodes[0]]
        self.store = PackedStore(self.number)
        self.shard = Shard(built, nodes, self.store)
        self.owner = owner

    def run(self, method: str, arguments: tuple[Any, ...], *received: PackedBuffer | None) -> Any:
        """The answer with the tensors that the driver opens, and a buffer for every shard."""
        for buffer in filter(None, received):
            self.store.receive(buffer)
        answer = getattr(self.shard, method)(*arguments)
        first = answer, self.store.pack(refs_for_driver(method, answer))
        if method not in EXCHANGES:
            return first
        wanted = refs_for_shards(answer, self.owner, self.number)
        shards = range(max(self.owner.values()) + 1)
        return first, *(self.store.pack(wanted.get(shard, ())) for shard in shards)

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


class RayTeam:
    """Actors with one shard each; nodes are distributed by their expected cost."""

    def __init__(self, world: World, workers: int | None, address: str | None) -> None:
        if workers is not None and workers > MAX_WORKERS:
            raise InputError(f"engine 'ray' has at most {MAX_WORKERS} workers, got {workers}")
        self.ray = load_ray(local=address is None)
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(connected(self.ray, address, workers))
            wanted = workers or min(int(self.ray.cluster_resources().get("CPU", 1)), MAX_WORKERS)
            costs = [world.expected_cost(node) for node in range(world.nodes)]
            self.shard_nodes = balance_nodes(costs, wanted)
            self._actors: list[Any] = []
            self._tensors: dict[TensorRef, Tensor] = {}  # of the last answers
            self._received: list[list[Any]] = [[] for _ in self.shard_nodes]
            self._start(world)
        except BaseException:
            self.close()
            raise

    def _start(self, world: World) -> None:
        count = len(self.shard_nodes)
        owner = {node: i for i, nodes in enumerate(self.shard_nodes) for node in nodes}
        group = self.ray.util.placement_group([{"CPU": 1}] * count, strategy="SPREAD")
        self._stack.callback(self.ray.util.remove_placement_group, group)
        _wait_for(self.ray, group, count)
        kind = self.ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(ShardActor)
        place = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for i in range(count):
            where = place(group, placement_group_bundle_index=i)
            self._actors.append(kind.options(scheduling_strategy=where).remote())
            self._stack.callback(self.ray.kill, self._actors[-1])
        self._check_versions(self._gather([actor.versions.remote() for actor in self._actors]))
        # Data sets travel once per machine; the rest of the world is small.
        data = [self.ray.put(_arrays(examples)) for examples in (world.train, *world.tests)]
        packed = self.ray.put(packed_world(self.ray.cloudpickle, world))
        self._gather(
            [
                actor.build.remote(packed, nodes, owner, *data)
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
        self._tensors = {}
        for _, buffer in answers:
            self._tensors |= buffer.tensors() if buffer is not None else {}
        return [answer for answer, _ in answers]

    def open(self, place: TensorRef) -> Tensor:
        return self._tensors[place]

    def close(self) -> None:
        """End all actors, and Ray itself if it was started for this run."""
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

    def _check_versions(self, machines: Sequence[Mapping[str, str]]) -> None:
        """Raise InputError if a machine has other versions than this one."""
        for name, version in versions().items():
            for found in machines:
                if name != "machine" and found[name] != version:
                    raise InputError(
                        f"machine {found['machine']} has {name} {found[name]}, this one has "
                        f"{version}; install the same version on all machines"
                    )

    def _gather(self, calls: Sequence[Any]) -> list[Any]:
        """The results of all calls, in order; the first failure ends the wait."""
        try:
            left = list(calls)
            while left:
                done, left = self.ray.wait(left, num_returns=1)
                self.ray.get(done)  # raises the error of a call
            return list(self.ray.get(list(calls)))
        except self.ray.exceptions.RayTaskError as error:
            raise _original(error) from None
        except self.ray.exceptions.RayActorError as error:
            raise WorkerDied(f"a worker of Ray died: {_first_line(error)}") from None
        except self.ray.exceptions.RayError as error:
            raise WorkerDied(f"Ray failed: {_first_line(error)}") from None


def versions() -> dict[str, str]:
    """What must be equal on all machines, and the name of this one."""
    return {
        "machine": platform.node(),
        "Python": platform.python_version(),
        **{name: package_version(name) or "none" for name in ("torch", "numpy", "peerage")},
    }


@contextlib.contextmanager
def connected(ray: Any, address: str | None, workers: int | None) -> Iterator[None]:
    """A connection to a cluster, or a Ray on this machine, which is stopped in the end.

    A connection that the process has already is used, and kept.
    """
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is not None:
        check_port(address)
        try:
            ray.init(address=address, **quiet)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise no_cluster(address, error) from None
        try:
            yield
        finally:
            ray.shutdown()
        return
    folder = tempfile.mkdtemp(prefix="peerage-ray-")
    try:
        ray.init(
            num_cpus=workers or len(os.sched_getaffinity(0)),
            include_dashboard=False,
            object_store_memory=LOCAL_STORE_BYTES,
            _temp_dir=folder,
            **quiet,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def check_port(address: str) -> None:
    """Raise InputError if no program listens at HOST:PORT, for which Ray would wait for minutes."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "://" not in address:
        try:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as error:
            raise no_cluster(address, error) from None


def no_cluster(address: str, error: Exception) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address!r}: {_first_line(error)}; start one with "
        "`ray start --head`, or leave out --address"
    )


def packed_world(cloudpickle: Any, world: World) -> bytes:
    """The world without its data sets; what is defined outside packages is included by value."""
    nothing = Examples(torch.empty(0, 1), torch.empty(0, dtype=torch.long))
    empty = replace(world, train=nothing, tests=[nothing] * len(world.tests))
    own = _modules_outside_packages()
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(empty))
    except Exception as error:
        raise InputError(
            f"engine 'ray' cannot send the experiment to its workers: {_first_line(error)}; use "
            "--engine pool, or define what it names at the top of a module"
        ) from None
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _modules_outside_packages() -> list[ModuleType]:
    """Loaded files of users, which other machines cannot import."""
    installed = [*site.getsitepackages(), *sysconfig.get_paths().values(), str(PACKAGE)]
    folders = tuple(dict.fromkeys(map(os.path.abspath, installed)))
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and module.__name__ != "__main__" and not os.path.abspath(file).startswith(folders):
            found.append(module)
    return found


def _arrays(examples: Examples) -> Data:
    return examples.x.numpy(), examples.y.numpy(), examples.images


def _examples(data: Data) -> Examples:
    """Examples that share the memory of the machine's object store, which is never written."""
    x, y, images = data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only, and is only read
        made = Examples.__new__(Examples)
        made.images, made.x, made.y = images, torch.from_numpy(x), torch.from_numpy(y)
    return made


def _wait_for(ray: Any, group: Any, count: int) -> None:
    """Wait until the cluster has room for the actors, and say so."""
    told = False
    while not group.wait(timeout_seconds=POLL_INTERVAL):
        free = int(ray.available_resources().get("CPU", 0))
        if not told:
            log.warning("waiting for %d free cores in the Ray cluster, which has %d", count, free)
            told = True


def _original(error: Any) -> Exception:
    """The exception that was raised in an actor."""
    cause = error.cause
    if isinstance(cause, PeerageError):
        return cause
    text = RuntimeError(f"{type(cause).__name__} in a worker of Ray: {_first_line(cause)}")
    text.add_note(str(error))
    return text


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
