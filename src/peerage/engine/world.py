"""Everything a simulation is made of, resolved and checked, before any process is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from peerage.algorithm import Algorithm, Node
from peerage.graphs.faults import Faults, Way
from peerage.graphs.graph import Graph, Neighbours
from peerage.graphs.topology import DynamicGraph
from peerage.models.start import Architecture
from peerage.privacy import Noise, Veil
from peerage.vectors import Layout
from peerage.work.context import Examples


class Prelude(Protocol):
    """A protocol between nodes by which each learns the gain of its initial weights (P4)."""

    async def estimate(self, node: Node[Any]) -> float: ...


@dataclass(frozen=True)
class World:
    """Shared by all workers, who inherit it by forking and never change it."""

    algorithm: Algorithm[Any]
    seed: int
    rounds: int
    graph: Graph
    train: Examples
    test: Examples
    parts: Sequence[Tensor]  # node -> indices of its training examples
    validation: Sequence[Tensor]  # node -> indices of its held-out examples, often none
    label_counts: Tensor  # [n, classes] of the training examples
    architectures: Mapping[str, Architecture]
    assignment: Sequence[str]  # node -> name of its architecture
    shared_start: bool
    gains: Sequence[float]  # node -> factor on the initial weights
    evaluate_at: str  # "exchange": at the first message after training; "end": of the round
    faults: Faults = Faults()
    noise: Noise = Noise()
    prelude: Prelude | None = None  # what nodes find out about the network before the first round
    spread: bool = False  # whether to record how models spread and move, layer by layer (P4)
    cache: Path | None = None  # where local work may keep what is dear to compute
    secret: int | None = field(default=None, repr=False)  # seed of the noise of a real peer

    @property
    def nodes(self) -> int:
        """All of them, also a hub."""
        return len(self.parts)

    @property
    def hub(self) -> int | None:
        """The node without data that all others talk to, if the algorithm has one: the last."""
        return self.nodes - 1 if self.algorithm.with_hub else None

    @property
    def peers(self) -> int:
        """How many nodes have data."""
        return self.nodes if self.hub is None else self.nodes - 1

    def keeper(self, node: int) -> int:
        """Who keeps the model of a node between rounds: itself, or the hub for its clients."""
        return node if self.hub is None else self.hub

    def neighbours(self, round: int) -> Neighbours:
        """Whom every node hears in this round, if no message gets lost."""
        return self._members(self.graph.neighbours, round)

    def listeners(self, round: int) -> Neighbours:
        """Who hears every node: the same, unless the graph is directed."""
        return self._members(self.graph.listeners, round)

    def _members(self, graph: Callable[[int], Neighbours], round: int) -> Neighbours:
        """The graph among those who are there; one that changes anyway is drawn for them alone."""
        if isinstance(self.graph, DynamicGraph) and (self.faults.join or self.faults.leave):
            return self.graph.among(tuple(self.present(round)), round)
        return self.faults.membership(graph(round), round)

    def trust(self, node: int, round: int) -> dict[int, float]:
        """The weights that a node gives those whom it hears and itself, in a weighted graph."""
        if not self.graph.weighted:
            return {}
        links = self.graph.links(round)
        row = slice(links.indptr[node], links.indptr[node + 1])
        heard = zip(links.indices[row].tolist(), links.data[row].tolist(), strict=True)
        own = 1.0 if self.graph.own is None else float(self.graph.own[node])
        return {**dict(heard), node: own}

    def present(self, round: int) -> list[int]:
        """The nodes that take part in this round; before the first, those that begin."""
        return [node for node in range(self.nodes) if self.faults.present(node, max(round, 0))]

    def way(self, round: int) -> Way | None:
        """What happens to the messages of this round; None if nothing can."""
        return None if self.faults == Faults() else Way(self.faults, self.seed, round)

    def veil(self, node: int, memory: dict[str, Tensor]) -> Veil | None:
        """What becomes of a node's messages; a hub's data are those that others have released."""
        if not self.noise.active or node == self.hub:
            return None
        return Veil(self.noise, self.algorithm.nonnegative, memory, self.secret)

    def architecture(self, node: int) -> Architecture:
        return self.architectures[self.assignment[node]]

    def layout(self, node: int) -> Layout:
        return self.architecture(node).layout

    def work(self, node: int) -> int:
        """The expected cost of a node's round, in examples."""
        steps = getattr(getattr(self.algorithm, "local", None), "steps", None)
        return len(self.parts[node]) if steps is None else 1
