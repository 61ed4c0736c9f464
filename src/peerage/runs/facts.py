"""What the rows and the summary of a run say about its network."""

from dataclasses import dataclass
from functools import cached_property

from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import DATASETS
from peerage.engine.groups import grouped_by
from peerage.engine.world import World
from peerage.experiment.experiment import display_name
from peerage.graphs.faults import Faults
from peerage.runs.labels import label


@dataclass(frozen=True)
class RunFacts:
    """Facts of a world from which rows are made; real peers write them to their folders."""

    algorithm: str
    label: str
    dataset: str
    nodes: int  # with data, so without a hub
    rounds: int  # planned
    own_metrics: tuple[str, ...]  # names of the user's own metrics
    hub_outside_means: int | None  # the hub, if means leave it out
    cluster_sizes: tuple[int, ...]  # empty without clusters
    clusters: tuple[int | None, ...]  # node -> its cluster, or None if it serves all
    architectures: tuple[str, ...]  # that are reported separately; empty if there is only one
    assignment: tuple[str, ...]  # node -> name of its architecture
    join: str  # when nodes join and leave, as in `Faults`
    leave: str
    hub: int | None = None  # unknown in folders of an earlier version, where it is the last node
    node_rows: int | None = None  # nodes with rows before the last round; None: all

    @classmethod
    def of(cls, world: World) -> "RunFacts":
        experiment, grouped = world.experiment, grouped_by(world)
        clusters = experiment.clusters
        return cls(
            algorithm=display_name(experiment.algorithm, ALGORITHMS),
            label=label(experiment),
            dataset=display_name(experiment.dataset, DATASETS),
            nodes=len(world.data_nodes),
            rounds=experiment.rounds,
            own_metrics=tuple(world.own_metrics),
            hub_outside_means=world.hub_outside_means,
            cluster_sizes=() if clusters is None else tuple(clusters.sizes),
            clusters=tuple(world.clusters),
            architectures=tuple(world.architectures) if "architecture" in grouped else (),
            assignment=tuple(world.assignment),
            join=world.faults.join,
            leave=world.faults.leave,
            hub=world.hub,
            node_rows=experiment.evaluation.node_rows,
        )

    @cached_property
    def data_nodes(self) -> frozenset[int]:
        """The numbers of the nodes with data."""
        return frozenset(range(self.nodes + (self.hub is not None))) - {self.hub}

    def recorded_nodes(self, *, last: bool) -> frozenset[int]:
        """The nodes with rows of their own: all in the last round, before it at most `node_rows`.

        Their numbers are spread evenly, and the same in all rounds.
        """
        nodes = len(self.assignment)
        count = nodes if last or self.node_rows is None else min(nodes, self.node_rows)
        return frozenset(index * nodes // count for index in range(count))

    @cached_property
    def _schedule(self) -> Faults:
        return Faults(join=self.join, leave=self.leave)

    def is_present(self, node: int, round: int) -> bool:
        """Whether a node takes part in a round, counted from 1; 0 is before the first."""
        return self._schedule.present(node, max(round - 1, 0))
