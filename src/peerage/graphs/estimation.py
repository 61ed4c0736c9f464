"""The gain of the initial weights, found out by the nodes themselves (P4, section 4.4).

Nobody knows the whole network. The nodes gossip before the first round, until each of them has an
estimate of how many there are and a sample of their degrees.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from peerage.errors import InputError
from peerage.graphs.graph import Graph
from peerage.graphs.mixing import degree_gain
from peerage.requests import TensorSpec

if TYPE_CHECKING:
    from peerage.algorithm import Node


@dataclass(frozen=True)
class EstimatedGain:
    """What nodes estimate by gossip before the first round, without knowing the graph.

    Their number by extrema propagation: everyone draws `numbers` exponential variables, the minima
    over the network spread by gossip, and n is about (numbers - 1) / their sum, with a relative
    error of 1 / sqrt(numbers - 2). A node stops once nothing was new for `quiet` exchanges.

    Their degrees by random walks: each node sends out `walks` walkers that carry its degree for
    `steps` steps of Metropolis and Hastings, whose chain is symmetric; so those that a node holds
    in the end come from anywhere with equal chance, and nothing has to find its way back.
    """

    numbers: int = 100
    quiet: int = 5
    walks: int = 30
    steps: int = 20

    def __post_init__(self) -> None:
        if self.numbers < 3:
            raise InputError(f"numbers must be at least 3, got {self.numbers}")
        for name in ("quiet", "walks", "steps"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")

    def factors(self, graph: Graph) -> np.ndarray:
        """None yet: the weights are scaled when the nodes have finished their gossip."""
        if graph.directed:
            raise InputError(
                "gain 'estimated' needs connections in both directions, and the graph is directed; "
                "use --gain graph"
            )
        return np.ones(graph.nodes)

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """All tensors that its messages hold."""
        return {"minima": TensorSpec((self.numbers,)), "walkers": TensorSpec((None,))}

    async def estimate(self, node: "Node[Any]") -> float:
        """One node's part of the gossip; it uses no public knowledge but its own neighbours."""
        if not node.neighbours:
            return 1.0
        minima = torch.empty(self.numbers).exponential_(generator=node.rng)
        own = torch.tensor([float(len(node.neighbours))])
        walkers = own.repeat(self.walks)
        heard: dict[int, int] = {}  # neighbour -> its degree
        exchanges, still = 0, 0
        while still < self.quiet or exchanges <= self.steps:
            walking = 0 < exchanges <= self.steps
            leaving = self._step(walkers, heard, node) if walking else {}
            for peer in node.neighbours:
                await node.send(peer, minima=minima, walkers=leaving.get(peer, own[:0]))
            if walking:
                walkers = leaving[node.id]
            inbox = await node.receive()
            heard |= {message.sender: message.degree for message in inbox.messages}
            walkers = torch.cat([walkers, *inbox["walkers"]])
            least = torch.stack([minima, *inbox["minima"]]).amin(0)
            still = still + 1 if torch.equal(least, minima) else 0
            minima = least
            exchanges += 1
        nodes = (self.numbers - 1) / float(minima.double().sum())
        gain = degree_gain((walkers if len(walkers) else own).numpy(), nodes)
        node.note(estimated_nodes=nodes, estimated_gain=gain)
        return gain

    def _step(self, walkers: Tensor, heard: dict[int, int], node: "Node[Any]") -> dict[int, Tensor]:
        """Where the walkers go: a random neighbour each, or nowhere, as Metropolis and Hastings
        accept a neighbour of higher degree with the ratio of the degrees only.
        """
        peers = torch.tensor(node.neighbours)
        degrees = torch.tensor([float(heard.get(peer, 0)) for peer in node.neighbours])
        chosen = torch.randint(len(peers), (len(walkers),), generator=node.rng)
        accept = torch.rand(len(walkers), generator=node.rng) * degrees[chosen] < len(peers)
        accept &= degrees[chosen] > 0  # nobody walks to a neighbour that was never heard
        goal = torch.where(accept, peers[chosen], torch.tensor(node.id))
        return {peer: walkers[goal == peer] for peer in (node.id, *node.neighbours)}
