"""The engine `ray` compared with the pool, and the parts of its cost.

    python benchmarks/cluster.py [--write docs/results/cluster.json]

prints the cost of a call for several numbers of workers, and the rate of buffers between workers,
from which docs/cluster.md estimates large clusters.
"""

import argparse
import contextlib
import json
import os
import pickle
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import jobs
import numpy as np
import psutil
from ratios import alternate

from peerage import LocalSGD
from peerage.engine.packed import TensorRef
from peerage.engine.ray import RayTeam
from peerage.engine.ray_cluster import MAX_WORKERS, connected, load_ray, open_cluster
from peerage.engine.router import MessageRouter, Packet, ShardOutput
from peerage.engine.world import World
from peerage.files import write_bytes
from peerage.graphs.faults import Faults, LinkFaults
from peerage.records.environment import environment
from peerage.requests import Envelope

CALL_BOUND = 10.0  # milliseconds
MEMORY_BOUND = 500.0  # megabytes
LOGISTIC = jobs.Job(
    "logistic, 16 nodes, 1 step of 8", "logistic", (1, 8, 8), 16, 32, LocalSGD(steps=1), rounds=10
)
CALLS = 3  # of all workers in a round with one exchange: begin, resume, finish
SHARDS, SHARD = 16, 500  # for the cost of the driver: shards, and nodes of each
WORKERS = (2, 4, 8)  # of the cost model; processes share the cores of this machine


@contextlib.contextmanager
def rounds(job: jobs.Job, workers: int, algorithm: Any = None) -> Iterator[jobs.Rounds]:
    """Rounds with Ray on this machine."""
    with ExitStack() as stack:

        def team(world: World, count: int) -> RayTeam:
            return RayTeam(world, stack.enter_context(open_cluster(world, count, None)))

        made = jobs.Rounds(job, job.dataset(), workers, algorithm, team)
        stack.callback(made.close)
        yield made


def against_pool(
    job: jobs.Job, repeats: int, workers: int, algorithm: Any = None
) -> dict[str, float]:
    """The rate of training examples with Ray / with the pool; their workers wait in turn."""
    with rounds(job, workers, algorithm) as ray:
        pool = jobs.Rounds(job, job.dataset(), workers, algorithm)
        try:
            return alternate(pool.rate, ray.rate, repeats)
        finally:
            pool.close()


def call_overhead(repeats: int, workers: int) -> dict[str, float]:
    with rounds(LOGISTIC, workers) as ray:
        pool = jobs.Rounds(LOGISTIC, LOGISTIC.dataset(), workers)
        try:
            pairs = [(_milliseconds(pool), _milliseconds(ray)) for _ in range(repeats)]
        finally:
            pool.close()
    added = [b - a for a, b in pairs]
    return {
        "ratio": statistics.median(added),
        "spread": max(added) - min(added),
        "base": statistics.median(a for a, _ in pairs),
        "measured": statistics.median(b for _, b in pairs),
    }


def _milliseconds(made: jobs.Rounds) -> float:
    """Per call of all workers."""
    return 1000 * made.job.work / made.rate() / CALLS


def worker_memory(workers: int) -> dict[str, float]:
    """The largest private memory of a worker after some rounds."""
    with rounds(jobs.P0, workers) as ray:
        ray.rate()
        family = psutil.Process().children(recursive=True)
        sizes = [one.memory_full_info().uss for one in family if "ShardActor" in one.name()]
    megabytes = max(sizes) / 1e6
    return {"ratio": megabytes, "megabytes": megabytes}


def cost_model() -> dict[str, Any]:
    """The milliseconds of a call by number of workers, and the bytes per second of buffers."""
    calls = {}
    for workers in WORKERS:
        with rounds(LOGISTIC, workers) as ray:
            calls[workers] = min(_milliseconds(ray) for _ in range(5))
        print(f"{workers} workers: {calls[workers]:.1f} ms per call", file=sys.stderr, flush=True)
    with rounds(jobs.P0, 2) as ray:
        team = ray.engine.team
        ray.rate()
        team.traffic()
        ray.rate()
        moved = team.traffic()["shard_bytes"]
    return {
        "milliseconds": calls,
        "shard_bytes": moved,
        "buffer_rate": buffer_rate(),
        "driver_microseconds": driver_microseconds(),
        "reference_microseconds": reference_microseconds(),
    }


def reference_microseconds() -> float:
    """Time per reference of an exchange of many workers without payload.

    Two processes answer the calls of all workers, so this is the cost of Ray itself.
    """
    ray = load_ray(local=True)
    with connected(ray, None, 2, 1 << 28):

        @ray.remote(num_cpus=1)
        class Echo:
            def step(self, *received: Any) -> Any:
                return (None,) * MAX_WORKERS

        actors = [Echo.remote() for _ in range(2)]
        received: list[list[Any]] = [[] for _ in range(MAX_WORKERS)]
        times = []
        for _ in range(6):
            start = perf_counter()
            calls = [
                actors[i % 2].step.options(num_returns=MAX_WORKERS).remote(*received[i])
                for i in range(MAX_WORKERS)
            ]
            received = [[call[i] for call in calls] for i in range(MAX_WORKERS)]
            ray.get([call[0] for call in calls])
            times.append(perf_counter() - start)
    return 1e6 * min(times[1:]) / MAX_WORKERS**2  # the first step receives nothing


def driver_microseconds() -> float:
    """Processor time of the driver for one message: to read, route and write its description."""
    times = []
    for _ in range(5):
        outputs = [
            ShardOutput(
                [
                    Packet(Envelope(node, 1, 1, "cnn"), near(node), {"x": TensorRef(0, node)}, 9)
                    for node in range(shard * SHARD, (shard + 1) * SHARD)
                ],
                {node: near(node) for node in range(shard * SHARD, (shard + 1) * SHARD)},
            )
            for shard in range(SHARDS)
        ]
        arrived = [pickle.dumps(output) for output in outputs]
        start = process_time()
        router = MessageRouter(LinkFaults(Faults(), 0, 0))
        for answer in arrived:
            router.accept(pickle.loads(answer))
        found = router.deliver()
        for shard in range(SHARDS):
            part = {node: found[node] for node in range(shard * SHARD, (shard + 1) * SHARD)}
            pickle.dumps(part)
        times.append(process_time() - start)
    return 1e6 * min(times) / (SHARD * SHARDS * len(near(0)))


def near(node: int) -> tuple[int, ...]:
    """The neighbours of a node in a ring of all shards, two on each side."""
    count = SHARD * SHARDS
    return tuple((node + step) % count for step in (-2, -1, 1, 2))


def buffer_rate() -> float:
    """Bytes per second of one buffer of 100 MB: packed, stored, copied out."""
    ray = load_ray(local=True)
    with connected(ray, None, 2, 1 << 30):

        @ray.remote(num_cpus=1)
        def make() -> Any:
            return np.ones(100_000_000, dtype=np.uint8)

        @ray.remote(num_cpus=1)
        def take(buffer: Any) -> int:
            return int(buffer.copy()[-1])

        times = []
        for _ in range(5):
            start = perf_counter()
            ray.get(take.remote(make.remote()))
            times.append(perf_counter() - start)
    return 1e8 / min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="store the results there")
    arguments = parser.parse_args()
    results = {**cost_model(), "environment": environment()}
    if arguments.write:
        write_bytes(arguments.write, (json.dumps(results, indent=1) + "\n").encode())
    print(json.dumps(results))


if __name__ == "__main__":
    main()
