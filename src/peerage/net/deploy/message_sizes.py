"""The bytes of the messages of a network, which are known before it starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from peerage.algorithm import Dimensions
from peerage.data.datasets import dataset_info
from peerage.engine.prepare import build_graph, name_architectures
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.graphs.graph import Graph, adjacency_matrix
from peerage.net.wire.header import WIRES, written_bytes
from peerage.report.tables import size
from peerage.requests import TensorSpec


@dataclass(frozen=True)
class MessageSizes:
    """The largest message of every architecture, in the wire formats that the algorithm allows.

    It has all tensors that the algorithm declares, except those of variable length. Headers,
    retries and questions between peers come on top: a few hundred bytes per message.
    """

    wire: str  # the format that is used
    by_wire: Mapping[str, Mapping[str, int]]  # wire -> architecture -> bytes
    per_round: int  # bytes of one message on every link
    links: int  # one-way links in round 1

    @classmethod
    def of_world(cls, world: World, wire: str) -> "MessageSizes":
        kinds = {name: world.dimensions(kind) for name, kind in world.architectures.items()}
        return cls._of(world.experiment, kinds, world.graph, wire)

    @classmethod
    def of_experiment(cls, experiment: Experiment, wire: str) -> "MessageSizes | None":
        """Without loading data; None if only the data say which shape examples have."""
        known = dataset_info(experiment.dataset)
        if known is None or not experiment.model:
            return None
        nodes = experiment.nodes_and_hub
        architectures = name_architectures(experiment, known.shape, known.classes)
        try:
            kinds = {
                name: Dimensions(kind.layout, kind.buffer_layout, nodes, known.classes, known.shape)
                for name, kind in architectures.items()
            }
        except InputError:  # the model is too large for this data set; the peers may have another
            return None
        return cls._of(experiment, kinds, build_graph(experiment, nodes), wire)

    @classmethod
    def _of(
        cls, experiment: Experiment, kinds: Mapping[str, Dimensions], graph: Graph, wire: str
    ) -> "MessageSizes":
        algorithm = experiment.algorithm
        schemas = {name: algorithm.message_schema(sizes) for name, sizes in kinds.items()}
        by_wire = {
            each: {name: message_bytes(schema, each) for name, schema in schemas.items()}
            for each in (WIRES if not algorithm.lossless_messages else WIRES[:1])
        }
        # Nodes take the architectures of the experiment in turn; further ones belong to no node.
        own = list(by_wire[wire].values())[: len(experiment.model)]
        links = adjacency_matrix(graph)  # row i: neighbours of i, which send to it
        senders = np.bincount(links.indices, minlength=graph.nodes)
        per_round = int(np.resize(own, graph.nodes) @ senders)
        return cls(wire, by_wire, per_round, int(links.nnz))

    @property
    def facts(self) -> dict[str, Any]:
        return {"message_bytes": dict(self.by_wire[self.wire]), "round_bytes": self.per_round}

    def __str__(self) -> str:
        used, *others = sorted(self.by_wire, key=lambda wire: wire != self.wire)
        messages = [
            f"a message of {name} takes at most {size(count)} with {used}"
            + "".join(f", {size(self.by_wire[wire][name])} with {wire}" for wire in others)
            for name, count in self.by_wire[used].items()
        ]
        each = f"one message on each of the {self.links} links"
        return "\n".join(
            [*messages, f"{each}, as most algorithms send per round, takes {size(self.per_round)}"]
        )


def message_bytes(tensors: Mapping[str, TensorSpec], wire: str) -> int:
    """The bytes of these tensors in a message, without those of variable length."""
    return sum(
        written_bytes(spec.dtype, prod(n or 0 for n in spec.shape), wire)
        for spec in tensors.values()
        if None not in spec.shape
    )
