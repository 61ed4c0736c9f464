"""The connection of a run to Ray: everything that can be refused is refused here.

A run opens its cluster before it creates its folder, so a wrong address, a missing package, other
versions on a machine, or a store that is too small leave nothing behind.
"""

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import site
import socket
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from peerage.data import DATASETS
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.work.context import Examples

PACKAGE = Path(__file__).parents[1]
MAX_WORKERS = 64  # with W workers, a step has W * W references
CONNECT_TIMEOUT = 10.0  # seconds until a cluster must have answered
MACHINE_TIMEOUT = 300.0  # seconds until every machine must have started a process of Ray
LOCAL_STORE_BYTES = 1 << 29  # smallest object store of a local Ray
CHECKED: set[str] = set()  # ids of machines whose versions were compared for an earlier run

log = logging.getLogger("peerage.engine")

Data = tuple[Any, Any, bool]  # x and y as arrays, and whether they are images


@dataclass(frozen=True)
class RayCluster:
    """A connection to Ray whose machines were checked, with the world in its object store."""

    ray: Any
    workers: int | None  # as requested
    world: Any  # reference to the pickled world without its data sets
    data: Sequence[Any]  # references to the data sets, which are copied once to each machine
    stored_bytes: int  # of both

    def num_workers(self) -> int:
        """The number of workers for a run that may have fewer nodes; one per core by default."""
        cores = int(self.ray.cluster_resources().get("CPU", 1))
        return self.workers or max(1, min(cores, MAX_WORKERS))


@contextlib.contextmanager
def open_cluster(world: World, workers: int | None, address: str | None) -> Iterator[RayCluster]:
    """Connect to a cluster, or start Ray here, and check what a run needs of it."""
    if workers is not None and workers > MAX_WORKERS:
        raise InputError(
            f"engine 'ray' has at most {MAX_WORKERS} workers, got {workers}; use --workers "
            f"{MAX_WORKERS} or fewer"
        )
    ray = load_ray(local=address is None)
    packed = packed_world(ray.cloudpickle, world)
    data = [_arrays(examples) for examples in (world.train, *world.tests)]
    needed = len(packed) + sum(x.nbytes + y.nbytes for x, y, _ in data)
    with connected(ray, address, workers, 2 * needed):
        check_machines(ray, needed)
        references = [ray.put(one) for one in data]
        yield RayCluster(ray, workers, ray.put(packed), references, needed)


def load_ray(local: bool) -> Any:
    """Import Ray; for a `local` cluster with a token, without which others could run code here.

    Ray reads these variables when it is imported, so they stay set in this process.
    """
    if local and "ray" not in sys.modules:
        os.environ["RAY_AUTH_MODE"] = os.environ.get("RAY_AUTH_MODE") or "token"
        os.environ["RAY_AUTH_TOKEN"] = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
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


@contextlib.contextmanager
def connected(
    ray: Any, address: str | None, workers: int | None, store_bytes: int
) -> Iterator[None]:
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
            raise connection_error(ray, address, error) from None
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
            object_store_memory=max(LOCAL_STORE_BYTES, store_bytes),
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


def connection_error(ray: Any, address: str, error: Exception) -> InputError:
    """Why Ray could not connect, with the remedy."""
    if isinstance(error, ray.exceptions.AuthenticationError):
        return InputError(
            f"the Ray cluster at {address!r} rejects the token of this process; set "
            "RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN as on its machines"
        )
    if "Version mismatch" in str(error):
        text = " ".join(str(error).split()).removeprefix("Version mismatch: ")
        return InputError(
            f"the Ray cluster at {address!r} has other versions than this machine: {text}; "
            "install the same versions on all machines"
        )
    return no_cluster(address, error)


def no_cluster(address: str, error: Exception) -> InputError:
    return InputError(
        f"no Ray cluster answers at {address!r}: {first_line(error)}; start one with "
        "`ray start --head`, or leave out --address"
    )


# Machines


@cache  # files may change after they were loaded
def versions() -> dict[str, str]:
    """What must be equal on all machines."""
    return dict(_reporter()())


def _reporter() -> Any:
    """A function that is sent by value, as a machine may not have the package."""

    def report() -> dict[str, str]:
        import hashlib
        import platform
        from importlib.metadata import PackageNotFoundError, version
        from importlib.util import find_spec
        from pathlib import Path

        found = {"Python": platform.python_version()}
        for name in ("torch", "numpy", "peerage"):
            try:
                found[name] = version(name)
            except PackageNotFoundError:
                found[name] = "none"
        spec = find_spec("peerage")
        if spec is not None and spec.origin:  # other commits have the same version
            files = sorted(Path(spec.origin).parent.rglob("*.py"))
            content = hashlib.sha256(b"".join(file.read_bytes() for file in files))
            found["peerage"] += f" (sources {content.hexdigest()[:8]})"
        return found

    return report


def check_machines(ray: Any, needed: int) -> None:
    """Raise InputError if a machine has other versions, or a store that is too small."""
    machines = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    for node in machines.values():
        check_store(node, needed)
    machines = {id: node for id, node in machines.items() if id not in CHECKED}
    if not machines:
        return
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    report = ray.remote(num_cpus=0, max_retries=0)(_reporter())
    asked = {
        report.options(scheduling_strategy=place(id, soft=False)).remote(): id for id in machines
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=MACHINE_TIMEOUT)
    if late:
        name = machines[asked[late[0]]]["NodeManagerHostname"]
        raise InputError(
            f"machine {name} of the Ray cluster started no process in {MACHINE_TIMEOUT:.0f} s; "
            "remove it with `ray stop`, or look into its logs"
        )
    for reference in done:
        try:
            found = ray.get(reference)
        except ray.exceptions.RayError:
            continue  # the machine has just died; an actor on it would say so
        check_versions(machines[asked[reference]]["NodeManagerHostname"], found)
        CHECKED.add(asked[reference])


def check_versions(machine: str, found: Mapping[str, str]) -> None:
    """Raise InputError if a machine has other versions than this one."""
    for name, version in versions().items():
        if found[name] != version:
            raise InputError(
                f"machine {machine} has {name} {found[name]}, this one has {version}; install the "
                "same version on all machines"
            )


def check_store(node: Mapping[str, Any], needed: int) -> None:
    """Raise InputError if the data sets do not fit into the object store of a machine."""
    resources = node["Resources"]
    size = int(resources.get("object_store_memory", 0))
    if resources.get("CPU") and size < needed:
        raise InputError(
            f"machine {node['NodeManagerHostname']} has {size / 1e6:.0f} MB of object store, and "
            f"the data sets need {needed / 1e6:.0f} MB; start Ray there with "
            f"--object-store-memory {2 * needed}"
        )


# What is sent


def packed_world(cloudpickle: Any, world: World) -> bytes:
    """The world without its data sets; what is defined outside packages is included by value."""
    nothing = Examples(torch.empty(0, 1), torch.empty(0, dtype=torch.long))
    # A data set in memory is also part of the experiment; shards do not use it.
    experiment = world.experiment.model_copy(update={"dataset": DATASETS["digits"]()})
    tests = [nothing] * len(world.tests)
    empty = replace(world, experiment=experiment, train=nothing, tests=tests)
    own = _modules_outside_packages()
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(empty))
    except Exception as error:
        raise InputError(
            f"engine 'ray' cannot send the experiment to its workers: {first_line(error)}; use "
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


def examples_of(data: Data) -> Examples:
    """Examples that share the memory of the machine's object store, which is never written."""
    x, y, images = data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only, and is only read
        made = Examples.__new__(Examples)
        made.images, made.x, made.y = images, torch.from_numpy(x), torch.from_numpy(y)
    return made


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
