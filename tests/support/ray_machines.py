"""A Ray cluster of two machines that are processes here, which all tests of a worker share."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil
import pytest
from support.processes import until

from peerage.engine import ray as ray_engine
from peerage.engine.ray_cluster import load_ray

MACHINE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 1 << 28,
    "include_dashboard": False,
}
ATTEMPTS = 10


class Machines:
    """Two machines with one core each, and the connection of this process to them."""

    def __init__(self) -> None:
        # Sockets are in this folder, and their paths must be short.
        self.folder = tempfile.mkdtemp(prefix="ray-")
        os.environ["RAY_TMPDIR"] = self.folder
        self.ray = load_ray(local=True)
        from ray.cluster_utils import Cluster

        self.cluster = until_started(
            lambda: Cluster(initialize_head=True, head_node_args=dict(MACHINE))
        )
        self.second = self.add()
        self.ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, **changes: Any) -> Any:
        return until_started(lambda: self.cluster.add_node(**MACHINE | changes))

    def kill(self, machine: Any) -> None:
        """End all processes of a machine at once, as if its power failed."""
        raylets = [psutil.Process(one.process.pid) for one in machine.all_processes["raylet"]]
        family = [child for raylet in raylets for child in raylet.children(recursive=True)]
        self.cluster.remove_node(machine, allow_graceful=False)
        for process in family:  # without a raylet, actors would work on for a while
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family)

    def remove(self, machine: Any) -> None:
        """Kill a machine, and wait until Ray has noticed it."""
        before = self.alive()
        self.kill(machine)
        until(lambda: self.alive() < before, "Ray noticed that the machine was gone")

    def alive(self) -> int:
        return sum(node["Alive"] for node in self.ray.nodes())

    def actors(self) -> list[psutil.Process]:
        """The processes of all actors on these machines."""
        raylets = [
            psutil.Process(one.process.pid)
            for node in self.cluster.list_all_nodes()
            for one in node.all_processes["raylet"]
        ]
        family = [child for raylet in raylets for child in raylet.children(recursive=True)]
        return [one for one in family if one.name().startswith("ray::ShardActor")]

    def close(self) -> None:
        self.ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


def until_started(start: Callable[[], Any]) -> Any:
    """Ray allows a machine 30 seconds to start, which are not enough if this one is busy."""
    for attempt in range(ATTEMPTS):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


@cache
def machines() -> Machines:
    """The cluster of this process; `close_machines` ends it."""
    return Machines()


def close_machines() -> None:
    if machines.cache_info().currsize:
        KEPT.release()
        machines().close()
        machines.cache_clear()


class KeptActors:
    """Actors that serve one run after the other, as starting them takes seconds."""

    def __init__(self) -> None:
        self.start_new = ray_engine.start_actors
        self.actors: list[Any] = []
        self.stack = contextlib.ExitStack()

    def start(self, ray: Any, count: int, stack: contextlib.ExitStack) -> list[Any]:
        if len(self.actors) != count or not self._alive(ray):
            self.release()
            self.actors = self.start_new(ray, count, self.stack)
        return self.actors

    def _alive(self, ray: Any) -> bool:
        try:
            ray.get([actor.place.remote() for actor in self.actors])
        except ray.exceptions.RayError:
            return False
        return True

    def release(self) -> None:
        self.actors = []
        self.stack.close()

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Let all runs use these actors."""
        patch.setattr(ray_engine, "start_actors", self.start)


KEPT = KeptActors()
