"""Building large graphs, compared with igraph: Erdos-Renyi, Barabasi-Albert, regular; degree 8.

    python benchmarks/graphs.py [--nodes N] [--repeats N]

Our time includes the adjacency matrix and the search for components; igraph's is that of its
generator alone, with its own fast random numbers. Measurements alternate, and the result is the
median ratio of consecutive ones.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from time import perf_counter

os.environ.setdefault("OMP_NUM_THREADS", "1")

import igraph

from peerage.graphs.graph import is_connected
from peerage.graphs.topology import BarabasiAlbert, ErdosRenyi, Regular, Topology
from peerage.records.environment import environment

NODES = 1_000_000
DEGREE = 8
BOUND = 5.0  # largest ratio of our time to igraph's

KINDS: dict[str, tuple[Topology, Callable[[int], igraph.Graph]]] = {
    "er": (
        ErdosRenyi(degree=DEGREE, connected=False),
        lambda nodes: igraph.Graph.Erdos_Renyi(nodes, m=nodes * DEGREE // 2),
    ),
    "ba": (
        BarabasiAlbert(m=DEGREE // 2),
        lambda nodes: igraph.Graph.Barabasi(nodes, DEGREE // 2),
    ),
    "regular": (Regular(k=DEGREE), lambda nodes: igraph.Graph.K_Regular(nodes, DEGREE)),
}


def measure(repeats: int = 3, nodes: int = NODES) -> dict[str, float]:
    """`ratio` is the largest of the three ratios of our seconds to igraph's."""
    igraph.set_random_number_generator(None)
    results: dict[str, float] = {}
    for name, (topology, theirs) in KINDS.items():
        pairs = [
            (_seconds(theirs, nodes), _seconds(ours, topology, nodes, seed))
            for seed in range(repeats)
        ]
        results[name] = statistics.median(b / a for a, b in pairs)
        results[f"{name}_igraph_seconds"] = statistics.median(a for a, _ in pairs)
        results[f"{name}_seconds"] = statistics.median(b for _, b in pairs)
    return {"ratio": max(results[name] for name in KINDS), "nodes": nodes, **results}


def ours(topology: Topology, nodes: int, seed: int) -> bool:
    return is_connected(topology.build(nodes, seed))


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    start = perf_counter()
    work(*arguments)
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of measurements")
    arguments = parser.parse_args()
    values = measure(arguments.repeats, arguments.nodes)
    rounded = {key: round(value, 4) for key, value in values.items()}
    holds = values["ratio"] <= BOUND
    print(json.dumps({"bound": BOUND, "holds": holds, **rounded, "environment": environment()}))


if __name__ == "__main__":
    main()
