"""Everything a simulation is made of, resolved and checked, before any process is started."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from peerage.algorithm import Algorithm, Dimensions, Node
from peerage.experiment.experiment import Experiment
from peerage.graphs.faults import Faults, LinkFaults, NoLinkFaults
from peerage.graphs.graph import Graph, Neighbours
from peerage.graphs.mixing import describe
from peerage.graphs.topology import DynamicGraph
from peerage.models.start import Architecture
from peerage.privacy import Noise, PrivacyFilter
from peerage.vectors import Layout
from peerage.work.context import Examples


@runtime_checkable
class PreRound(Protocol):
    """A protocol between nodes by which each learns the gain of its initial weights (P4)."""

    async def estimate(self, node: Node[Any]) -> float: ...


@dataclass(frozen=True)
class World:
    """An experiment, and all that was loaded, split, built and checked for it.

    All workers share it: they inherit it by forking and never change it.
    """

    experiment: Experiment  # with nothing left open
    graph: Graph
    train: Examples
    test: Examples
    parts: Sequence[Tensor]  # node -> indices of its training examples
    validation: Sequence[Tensor]  # node -> indices of its held-out examples, often none
    label_counts: Tensor  # [n, classes] of the training examples
    classes: Sequence[str]  # their names
    architectures: Mapping[str, Architecture]
    assignment: Sequence[str]  # node -> name of its architecture
    gains: Sequence[float]  # node -> factor on the initial weights
    cache: Path | None = None  # where local work may keep what is dear to compute
    noise_seed: int | None = field(default=None, repr=False)  # seed of the noise of a real peer

    @property
    def algorithm(self) -> Algorithm[Any]:
        return self.experiment.algorithm

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def rounds(self) -> int:
        return self.experiment.rounds

    @property
    def faults(self) -> Faults:
        return self.experiment.faults

    @property
    def noise(self) -> Noise:
        return self.experiment.noise

    @property
    def pre_round(self) -> PreRound | None:
        """How nodes estimate the gain before the first round, if they do."""
        gain = self.experiment.init.gain
        return gain if isinstance(gain, PreRound) else None

    @property
    def nodes(self) -> int:
        """All of them, also a hub."""
        return len(self.parts)

    @property
    def hub(self) -> int | None:
        """The node without data that all others talk to, if the algorithm has one: the last."""
        return self.nodes - 1 if self.algorithm.with_hub else None

    @property
    def num_data_nodes(self) -> int:
        """How many nodes have data."""
        return self.nodes if self.hub is None else self.nodes - 1

    def model_owner(self, node: int) -> int:
        """Who keeps the model of a node between rounds: itself, or the hub for its clients."""
        return node if self.hub is None else self.hub

    def neighbours(self, round: int) -> Neighbours:
        """Whom every node hears in this round, if no message gets lost."""
        return self._members(self.graph.neighbours, round)

    def out_neighbours(self, round: int) -> Neighbours:
        """Who hears every node: the same, unless the graph is directed."""
        return self._members(self.graph.out_neighbours, round)

    def _members(self, graph: Callable[[int], Neighbours], round: int) -> Neighbours:
        """The graph among those who are there; one that changes anyway is drawn for them alone."""
        if isinstance(self.graph, DynamicGraph) and (self.faults.join or self.faults.leave):
            return self.graph.among(tuple(self.present(round)), round)
        return self.faults.membership(graph(round), round)

    def edge_weights(self, node: int, round: int) -> dict[int, float]:
        """The weights that a node gives those whom it hears and itself, in a weighted graph."""
        if not self.graph.weighted:
            return {}
        links = self.graph.links(round)
        row = slice(links.indptr[node], links.indptr[node + 1])
        heard = zip(links.indices[row].tolist(), links.data[row].tolist(), strict=True)
        own = 1.0 if self.graph.self_loops is None else float(self.graph.self_loops[node])
        return {**dict(heard), node: own}

    def present(self, round: int) -> list[int]:
        """The nodes that take part in this round; before the first, those that begin."""
        return [node for node in range(self.nodes) if self.faults.present(node, max(round, 0))]

    def link_faults(self, round: int) -> LinkFaults:
        """What happens to the messages of this round."""
        faulty = self.faults != Faults()
        return LinkFaults(self.faults, self.seed, round) if faulty else NoLinkFaults()

    def privacy_filter(self, node: int, persistent_tensors: dict[str, Tensor]) -> PrivacyFilter:
        """What becomes of a node's messages; a hub's data are those that others have released."""
        noise = Noise() if node == self.hub else self.noise
        return PrivacyFilter(noise, self.algorithm.nonnegative, persistent_tensors, self.noise_seed)

    def architecture(self, node: int) -> Architecture:
        return self.architectures[self.assignment[node]]

    def layout(self, node: int) -> Layout:
        return self.architecture(node).layout

    def dimensions(self, kind: Architecture) -> Dimensions:
        """What the shapes of messages of this architecture depend on."""
        buffers = kind.buffer_layout.size
        return Dimensions(kind.layout, buffers, self.nodes, len(self.classes), self.test.example)

    def expected_cost(self, node: int) -> int:
        """The expected cost of a node's round, in examples."""
        steps = getattr(getattr(self.algorithm, "local", None), "steps", None)
        return len(self.parts[node]) if steps is None else 1

    @cached_property
    def setup(self) -> dict[str, Any]:
        """What reports show of the data, the graph and the models."""
        counts = self.label_counts[: self.num_data_nodes]  # of those who have data, without a hub
        constants = constants_of(self.architectures)
        return {
            "allocation": counts.tolist(),
            "classes": list(self.classes),
            "example": describe_example(self.test.example, self.test.x.dtype),
            "examples": counts.sum(1).tolist(),
            "edges": [list(edge) for edge in self.graph.edges()],
            "topology": describe(self.graph).as_dict(),
            "parameters": [self.layout(node).size for node in range(self.nodes)],
            "test_examples": len(self.test),
            **({"constants": constants} if constants else {}),
        }

    def restrict_to_node(self, node: int, noise_seed: int | None = None) -> "World":
        """The same world with the training data of one node only; `noise_seed` seeds its noise."""
        own, held = self.parts[node], self.validation[node]
        place = torch.arange(len(own) + len(held))
        parts, validation = ([own[:0]] * self.nodes for _ in range(2))
        parts[node], validation[node] = place[: len(own)], place[len(own) :]
        train = self.train.subset(torch.cat([own, held]))
        return replace(self, train=train, parts=parts, validation=validation, noise_seed=noise_seed)


def constants_of(architectures: Mapping[str, Architecture]) -> dict[str, str]:
    """The hash of the frozen parameters of every architecture that has any."""
    hashes = {name: kind.constants_hash for name, kind in architectures.items()}
    return {name: known for name, known in hashes.items() if known is not None}


def describe_example(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """What a model takes: with it, models can be built again without the data."""
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
