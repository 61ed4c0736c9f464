"""How much memory a simulation on one machine needs, and how many nodes fit."""

import os
from dataclasses import dataclass
from pathlib import Path

from peerage.algorithm import Cost
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.report.tables import size
from peerage.runs.node_memory import FLOAT

BASE = 0.5e9  # bytes of Python, PyTorch and two workers, without data
PER_NODE = 30e3  # bytes of a node's objects, besides vectors; both were measured
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


@dataclass(frozen=True)
class SimulationMemory:
    """The approximate bytes that each node adds to a simulation, and those of the data set.

    Messages lie in memory that workers share. It is freed before the models are collected at the
    end, which takes a model of each node once more.
    """

    model: float
    kept: float  # model and state
    message: float
    data: float = 0.0

    @classmethod
    def of(cls, model: float, cost: Cost | None, data: float = 0.0) -> "SimulationMemory":
        """For a model of so many bytes; an unknown cost counts as one model in a message."""
        cost = cost or Cost(vectors=1.0)
        return cls(model, model * (1 + cost.state), model * cost.vectors, data)

    @property
    def per_node(self) -> float:
        return self.kept + max(self.message, self.model) + PER_NODE

    def total(self, nodes: int) -> float:
        return BASE + self.data + nodes * self.per_node

    def most_nodes(self, memory: float) -> int:
        """The largest number of nodes that fit; 0 if none does."""
        return max(int((memory - BASE - self.data) // self.per_node), 0)

    def check(self, nodes: int, memory: float) -> None:
        """Raise an error if nodes need more than `memory` bytes."""
        needed = self.total(nodes)
        if needed > memory:
            most = self.most_nodes(memory)
            fewer = f"use at most {most} nodes or a smaller model"
            raise InputError(
                f"a simulation with --nodes {nodes} needs about {size(needed)} of memory, but this "
                f"machine has {size(memory)}; {fewer if most else 'use another machine'}"
            )


def check_world(world: World) -> None:
    """Raise an error before a simulation starts for which this machine has too little memory.

    Not for algorithms with a hub or an aggregator: few of their nodes send in a round.
    """
    sizes = [world.layout(node).size for node in range(world.nodes)]
    kind = world.architecture(0)
    cost = world.algorithm.cost(1, world.dimensions(kind), examples=0.0)
    if world.hub is None and (cost is None or cost.held_models is None):
        data = world.train.x.untyped_storage().nbytes()
        needed = SimulationMemory.of(FLOAT * sum(sizes) / len(sizes), cost, data)
        needed.check(world.nodes, machine_bytes())


def machine_bytes() -> int:
    """The memory of this machine, or of the container that the process runs in."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical
