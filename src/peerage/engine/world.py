"""The world: everything that a simulation needs, built and checked before any process starts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from peerage.algorithm import Algorithm, Dimensions, Node
from peerage.data.clusters import Clusters
from peerage.errors import InputError, did_you_mean
from peerage.experiment.experiment import Experiment
from peerage.graphs.faults import Faults, LinkFaults, NoLinkFaults
from peerage.graphs.graph import Graph, Neighbours
from peerage.graphs.mixing import describe
from peerage.graphs.topology import DynamicGraph
from peerage.models.scaled import ChannelGroups, channel_groups
from peerage.models.start import Architecture
from peerage.privacy import Noise, NoiseSource, PrivacyFilter
from peerage.randomness import stream_seed
from peerage.vectors import Layout, Weights
from peerage.work.context import Examples
from peerage.work.evaluation import OwnMetrics


@runtime_checkable
class PreRound(Protocol):
    """An exchange before round 1 in which each node estimates the gain of its weights (P4)."""

    async def estimate(self, node: Node[Any]) -> float: ...


@dataclass(frozen=True)
class World:
    """An experiment, and all that was loaded, split, built and checked for it.

    Workers inherit it by forking and never change it.
    """

    experiment: Experiment  # with a model
    graph: Graph
    train: Examples  # of all nodes, with the shifts of their clusters
    tests: Sequence[Examples]  # of every cluster; a single one without clusters
    parts: Sequence[Tensor]  # node -> indices of its training examples
    validation: Sequence[Tensor]  # node -> indices of its held-out examples, often none
    label_counts: Tensor  # [n, classes] of the training examples
    classes: Sequence[str]  # their names
    architectures: Mapping[str, Architecture]
    assignment: Sequence[str]  # node -> name of its architecture
    gains: Sequence[float]  # node -> factor on the initial weights
    # Node -> its cluster, or None if it serves all (a hub, a pooled node); empty without clusters.
    clusters: Sequence[int | None] = ()
    starts: Mapping[str, Weights] = field(default_factory=dict)  # from a file, by architecture
    cache: Path | None = None  # where local work may store expensive results
    secret_noise: NoiseSource | None = field(default=None, repr=False)  # of a real peer
    tested: bool = True  # False at a real hub that has no test set: it does not evaluate

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
    def own_metrics(self) -> OwnMetrics:
        """The user's own metrics by name."""
        return {metric.name: metric for metric in self.experiment.evaluation.metrics}

    @property
    def pre_round(self) -> PreRound | None:
        """The exchange in which nodes estimate the gain before the first round, if any."""
        gain = self.experiment.init.gain
        return gain if isinstance(gain, PreRound) else None

    @property
    def nodes(self) -> int:
        """The number of all nodes, including a hub."""
        return len(self.parts)

    @property
    def hub(self) -> int | None:
        """The fixed hub, which has no data; None without one."""
        return self.experiment.hub_among(self.nodes)

    @property
    def data_nodes(self) -> list[int]:
        """The nodes with data: all but a hub."""
        return [node for node in range(self.nodes) if node != self.hub]

    @property
    def test(self) -> Examples:
        """The test set, or that of the first cluster."""
        return self.tests[0]

    def cluster_of(self, node: int) -> int | None:
        """The cluster of a node; None without clusters, and for a node that serves all of them."""
        return self.clusters[node] if self.clusters else None

    def data_of(self, node: int) -> Examples:
        """The training examples of a node, as a copy."""
        return self.train.subset(self.parts[node])

    def test_of(self, node: int) -> Examples:
        """The test set of a node; all test sets together for one that serves all clusters."""
        found = list(self.tests_of(node).values())
        return found[0] if len(found) == 1 else Examples.joined(found)

    def tests_of(self, node: int) -> dict[int, Examples]:
        """The test sets on which the model of a node is evaluated, by cluster."""
        cluster = self.cluster_of(node)
        if cluster is None:
            return dict(enumerate(self.tests))
        return {cluster: self.tests[cluster]}

    def model_owner(self, node: int) -> int:
        """The node that keeps a node's model between rounds: itself, or the hub."""
        return self.hub if self.models_at_hub and self.hub is not None else node

    @property
    def models_at_hub(self) -> bool:
        """Whether the hub keeps the only model."""
        return self.hub is not None and self.algorithm.models_at == "hub"

    def is_evaluated(self, node: int) -> bool:
        """Whether the models of this node are evaluated."""
        where = "hub" if node == self.hub else "clients"
        return self.tested and (self.hub is None or self.algorithm.models_at in (where, "both"))

    @property
    def hub_outside_means(self) -> int | None:
        """The hub, if means over the network leave it out because clients keep models."""
        return None if self.models_at_hub else self.hub

    @property
    def steps(self) -> int:
        """The number of rounds, and of the step after the last one if there is one."""
        return self.rounds + self.algorithm.has_final

    def neighbours(self, round: int) -> Neighbours:
        """The nodes from which each node receives in this round."""
        return self._among_present(self.graph.neighbours, self._graph_round(round))

    def out_neighbours(self, round: int) -> Neighbours:
        """The nodes to which each node sends; the neighbours, unless the graph is directed."""
        return self._among_present(self.graph.out_neighbours, self._graph_round(round))

    def _graph_round(self, round: int) -> int:
        """The round itself, or the last one for the step after it."""
        return round - (self.rounds <= round < self.steps)

    def _among_present(self, graph: Callable[[int], Neighbours], round: int) -> Neighbours:
        """The graph among the present nodes; a dynamic graph is drawn for these alone."""
        if isinstance(self.graph, DynamicGraph) and (self.faults.join or self.faults.leave):
            return self.graph.among(tuple(self.present(round)), round)
        return self.faults.membership(graph(round), round)

    def edge_weights(self, node: int, round: int) -> dict[int, float]:
        """The weights of a node's neighbours and of itself; empty if the graph is unweighted."""
        if not self.graph.weighted:
            return {}
        links = self.graph.links(round)
        row = slice(links.indptr[node], links.indptr[node + 1])
        weights = zip(links.indices[row].tolist(), links.data[row].tolist(), strict=True)
        self_loop = 1.0 if self.graph.self_loops is None else float(self.graph.self_loops[node])
        return {**dict(weights), node: self_loop}

    def present(self, round: int) -> list[int]:
        """The nodes that take part in this round; before the first, those of the first."""
        return [node for node in range(self.nodes) if self.is_present(node, round)]

    def is_present(self, node: int, round: int) -> bool:
        """Whether a node takes part in this round."""
        return self.faults.present(node, max(self._graph_round(round), 0))

    def link_faults(self, round: int, final: bool = False) -> LinkFaults:
        """The link faults of this round, or of the step after the last round, number `round`."""
        faulty = self.faults != Faults()
        return LinkFaults(self.faults, self.seed, round, final) if faulty else NoLinkFaults()

    def privacy_filter(self, node: int, persistent_tensors: dict[str, Tensor]) -> PrivacyFilter:
        """The privacy filter of a node."""
        return PrivacyFilter(
            self.noise_of(node), self.algorithm.nonnegative, persistent_tensors, self.secret_noise
        )

    def noise_of(self, node: int) -> Noise:
        """The noise on the messages of a node; a hub needs none, as it has only released data."""
        return Noise() if node == self.hub else self.noise

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The layout of the parameters of every architecture."""
        return {name: kind.layout for name, kind in self.architectures.items()}

    @cached_property
    def buffer_layouts(self) -> dict[str, Layout]:
        """The layout of the running statistics of every architecture."""
        return {name: kind.buffer_layout for name, kind in self.architectures.items()}

    @cached_property
    def channels(self) -> dict[str, ChannelGroups]:
        """The channel groups of the nodes' architectures, if the algorithm needs them."""
        names = sorted(set(self.assignment))
        if not self.algorithm.width_scaled or len(names) == 1:
            return {}
        return {name: channel_groups(self.architectures[name].specimen()) for name in names}

    def initial(self, node: int) -> tuple[Tensor, Tensor]:
        """(params [d], buffers [b]) with which a node starts."""
        architecture = self.architecture(node)
        if architecture.name in self.starts:
            start = self.starts[architecture.name]
            return start.params, start.buffers
        number = None if self.experiment.init.start == "shared" else node
        return architecture.initial(self.seed, number, float(self.gains[node]))

    def draw_initial(self, node: int, stream: str, architecture: str, private: bool) -> Weights:
        """Initial values from a named stream, scaled by the gain of a node; see `Node.initial`."""
        if architecture not in self.architectures:
            hint = did_you_mean(architecture, self.architectures)
            raise InputError(f"unknown architecture {architecture!r}; {hint}")
        if self.pre_round is not None:
            raise InputError(
                "node.initial requires a gain that is known before the first exchange, which gain "
                "'estimated' is not; use --gain graph"
            )
        index = (node,) if private else ()
        seed = stream_seed(self.seed, f"initial {stream}", *index)
        kind, gain = self.architectures[architecture], float(self.gains[node])
        return Weights(*kind.drawn(seed, gain, redrawn=True), architecture)

    def architecture(self, node: int) -> Architecture:
        return self.architectures[self.assignment[node]]

    def layout(self, node: int) -> Layout:
        return self.architecture(node).layout

    def dimensions(self, kind: Architecture) -> Dimensions:
        """The sizes on which the shapes of messages of this architecture depend."""
        return Dimensions(
            kind.layout, kind.buffer_layout, self.nodes, len(self.classes), self.test.example
        )

    def label_proportions(self, node: int) -> Tensor:
        """[classes] of the node's training examples; zeros if it has none."""
        counts = self.label_counts[node]
        return counts / counts.sum().clamp(min=1)

    def expected_cost(self, node: int) -> int:
        """The expected cost of a round, in examples, or 1 if all nodes take as many steps."""
        steps = getattr(getattr(self.algorithm, "local", None), "steps", None)
        return len(self.parts[node]) if steps is None else 1

    @cached_property
    def setup(self) -> dict[str, Any]:
        """Facts about the data, the graph and the models, for reports."""
        counts = self.label_counts[self.data_nodes]
        constants = constants_of(self.architectures)
        clusters = self.experiment.clusters
        clients_keep_models = self.hub is not None and not self.models_at_hub
        return {
            "allocation": counts.tolist(),
            "classes": list(self.classes),
            "example": describe_example(self.test.example, self.test.x.dtype),
            "examples": counts.sum(1).tolist(),
            "edges": [list(edge) for edge in self.graph.edges()],
            "topology": describe(self.graph).as_dict(),
            "parameters": [self.layout(node).size for node in range(self.nodes)],
            "test_examples": len(self.test),
            **({"clusters": self._cluster_facts(clusters)} if clusters is not None else {}),
            **({"models_at": self.algorithm.models_at} if clients_keep_models else {}),
            **({"hub": self.hub} if self.hub not in (None, self.nodes - 1) else {}),
            **({"constants": constants} if constants else {}),
        }

    def _cluster_facts(self, clusters: Clusters) -> dict[str, Any]:
        return {
            "names": [clusters.describe(cluster) for cluster in range(len(clusters.sizes))],
            "sizes": list(clusters.sizes),
            "nodes": [self.cluster_of(node) for node in range(self.nodes)],
            "test_examples": [len(test) for test in self.tests],
        }

    def restrict_to_node(self, node: int, secret_noise: NoiseSource | None = None) -> "World":
        """The same world with the training data of one node only, whose noise may be secret."""
        part, held_out = self.parts[node], self.validation[node]
        indices = torch.arange(len(part) + len(held_out))
        parts, validation = ([part[:0]] * self.nodes for _ in range(2))
        parts[node], validation[node] = indices[: len(part)], indices[len(part) :]
        train = self.train.subset(torch.cat([part, held_out]))
        return replace(
            self, train=train, parts=parts, validation=validation, secret_noise=secret_noise
        )


def constants_of(architectures: Mapping[str, Architecture]) -> dict[str, str]:
    """Hashes of the frozen parameters, by architecture that has any."""
    hashes = {name: kind.constants_hash for name, kind in architectures.items()}
    return {name: known for name, known in hashes.items() if known is not None}


def describe_example(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Shape and type of an example, from which models can be rebuilt without the data."""
    return {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
