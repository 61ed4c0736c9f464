"""The diffusion model on a million nodes: the time of a round, and the memory of a run.

    python benchmarks/diffusion.py [--nodes N] [--degree K] [--parameters D] [--repeats N]

A round is the product, the noise and both deviations. It is compared with scipy's bare product of
the same size, in alternation and with one thread. Prints one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from ratios import summary
from scipy import sparse

from peerage.graphs.diffusion import Simulation, diffuse
from peerage.graphs.graph import Graph
from peerage.graphs.mixing import mixing_matrix
from peerage.graphs.topology import Regular
from peerage.records.environment import environment

NODES, DEGREE, PARAMETERS = 1_000_000, 8, 32
ROUNDS = 50
STEP_BOUND = 2.0  # times scipy's product
PEAK_BOUND = 3.0  # gigabytes


def step_ratio(repeats: int) -> dict[str, float]:
    """The claim about time, for benchmarks/run.py."""
    return step(Regular(k=DEGREE).build(NODES, 0), PARAMETERS, repeats)


def peak(repeats: int) -> dict[str, float]:
    """The claim about memory, measured once, as it does not vary."""
    return {"ratio": peak_gigabytes(NODES, DEGREE, PARAMETERS)}


def step(graph: Graph, parameters: int, repeats: int) -> dict[str, float]:
    """The median ratio of a round to the product, and the median seconds of each."""
    torch.set_num_threads(1)
    simulation = Simulation(graph, parameters, noise=1e-3)
    a = mixing_matrix(graph)
    indices, bounds = (part.astype(np.int32) for part in (a.indices, a.indptr))
    bare = sparse.csr_array((a.data.astype(np.float32), indices, bounds), shape=a.shape)
    pairs = []
    for _ in range(repeats):
        start = perf_counter()
        bare @ simulation.x
        middle = perf_counter()
        simulation.step()
        pairs.append((middle - start, perf_counter() - middle))
    return summary(pairs)


def peak_gigabytes(nodes: int, degree: int, parameters: int) -> float:
    """The peak memory of a new process that builds the graph and runs 50 rounds."""
    sizes = ["--nodes", str(nodes), "--degree", str(degree), "--parameters", str(parameters)]
    command = [sys.executable, __file__, "--whole-run", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def whole_run(nodes: int, degree: int, parameters: int) -> float:
    diffuse(Regular(k=degree).build(nodes, 0), parameters=parameters, rounds=ROUNDS)
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--degree", type=int, default=DEGREE)
    parser.add_argument("--parameters", type=int, default=PARAMETERS)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of measurements")
    parser.add_argument("--whole-run", action="store_true", help="print the peak memory of one run")
    arguments = parser.parse_args()
    sizes = (arguments.nodes, arguments.degree, arguments.parameters)
    if arguments.whole_run:
        print(whole_run(*sizes))
        return
    graph = Regular(k=arguments.degree).build(arguments.nodes, 0)
    times = step(graph, arguments.parameters, arguments.repeats)
    values = {**times, "gigabytes": peak_gigabytes(*sizes)}
    holds = values["ratio"] <= STEP_BOUND and values["gigabytes"] <= PEAK_BOUND
    print(json.dumps({**values, "holds": holds, "sizes": sizes, "environment": environment()}))


if __name__ == "__main__":
    main()
