"""The gain of the initial weights, estimated by the nodes themselves (P4, section 4.4).

No node knows the whole graph. The nodes gossip before the first round, until each of them has an
estimate of the number of nodes and a sample of their degrees.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from peerage.errors import InputError, check_at_least
from peerage.graphs.graph import Graph
from peerage.graphs.mixing import degree_gain
from peerage.requests import TensorSpec

if TYPE_CHECKING:
    from peerage.algorithm import Node

Moves = dict[int, Tensor]  # node -> walkers that go there


@dataclass(frozen=True)
class EstimatedGain:
    """The gain that nodes estimate by gossip before the first round, without knowing the graph.

    The number of nodes, by extrema propagation: every node draws `numbers` exponential variables,
    and their minima over all nodes spread by gossip. n is about (numbers - 1) / their sum, with a
    relative error of 1 / sqrt(numbers - 2). A node stops after `quiet` exchanges without a change.

    The degrees, by random walks: every node sends out `walks` walkers that carry its degree for
    `steps` steps of a Metropolis-Hastings chain. The chain is symmetric, so each walker that a node
    holds at the end comes from any node with equal probability.
    """

    numbers: int = 100
    quiet: int = 5
    walks: int = 30
    steps: int = 20

    def __post_init__(self) -> None:
        check_at_least("numbers", self.numbers, 3)
        for name in ("quiet", "walks", "steps"):
            check_at_least(name, getattr(self, name), 1)

    def factors(self, graph: Graph) -> np.ndarray:
        """All 1: the weights are scaled after the gossip."""
        if graph.directed:
            raise InputError("gain 'estimated' requires an undirected graph; use --gain graph")
        return np.ones(graph.nodes)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """The tensors of its messages."""
        walkers = TensorSpec((None,), low=0.0)
        return {"minima": TensorSpec((self.numbers,), low=0.0), "walkers": walkers}

    async def estimate(self, node: "Node[Any]") -> float:
        """Run the gossip of one node, which knows only its neighbours, and return the gain."""
        if not node.neighbours:
            return 1.0
        minima = torch.empty(self.numbers).exponential_(generator=node.rng)
        degree = torch.tensor([float(len(node.neighbours))])
        walkers = degree.repeat(self.walks)
        degree_of: dict[int, int] = {}  # neighbour -> its degree
        exchanges, unchanged = 0, 0
        while unchanged < self.quiet or exchanges <= self.steps:
            walking = 0 < exchanges <= self.steps
            moves = self._move(walkers, degree_of, node) if walking else {}
            for neighbour in node.neighbours:
                await node.send(neighbour, minima=minima, walkers=moves.get(neighbour, degree[:0]))
            if walking:
                walkers = moves[node.id]
            inbox = await node.receive()
            degree_of |= {message.sender: message.degree for message in inbox.messages}
            walkers = torch.cat([walkers, *inbox["walkers"]])
            new_minima = torch.stack([minima, *inbox["minima"]]).amin(0)
            unchanged = unchanged + 1 if torch.equal(new_minima, minima) else 0
            minima = new_minima
            exchanges += 1
        nodes = (self.numbers - 1) / float(minima.double().sum())
        gain = degree_gain((walkers if len(walkers) else degree).numpy(), nodes)
        node.note(estimated_nodes=nodes, estimated_gain=gain)
        return gain

    def _move(self, walkers: Tensor, degree_of: dict[int, int], node: "Node[Any]") -> Moves:
        """Walkers by their next node: each moves to a random neighbour, or stays (key node.id).

        A neighbour of higher degree is accepted with the ratio of the degrees.
        """
        neighbours = torch.tensor(node.neighbours)
        degrees = torch.tensor([float(degree_of.get(id, 0)) for id in node.neighbours])
        chosen = torch.randint(len(neighbours), (len(walkers),), generator=node.rng)
        accept = torch.rand(len(walkers), generator=node.rng) * degrees[chosen] < len(neighbours)
        accept &= degrees[chosen] > 0  # a degree of 0: no message from this neighbour yet
        goal = torch.where(accept, neighbours[chosen], torch.tensor(node.id))
        return {neighbour: walkers[goal == neighbour] for neighbour in (node.id, *node.neighbours)}
