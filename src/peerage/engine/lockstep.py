"""The engine: runs rounds in lockstep over a team of shards, in one process or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor

from peerage.engine.router import MessageRouter, ShardOutput, check_combined, check_finite
from peerage.engine.shard import InProcessStore, NodeReport, Shard, ShardReport
from peerage.engine.together import answer_together
from peerage.engine.world import World
from peerage.isolation import exclusive_torch
from peerage.records.checkpoint import Checkpoint
from peerage.records.phases import no_time
from peerage.requests import PRE_ROUND
from peerage.vectors import Weights
from peerage.work.evaluation import Deviations, consensus_distance


class Team(Protocol):
    """Shards that execute calls, in parallel if they can."""

    @property
    def shard_nodes(self) -> Sequence[Sequence[int]]:
        """Which nodes each shard holds."""

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Each shard's result of `method(*arguments[shard])`."""

    def open(self, place: Any) -> Tensor: ...

    def traffic(self) -> dict[str, int]:
        """What was moved between shards since the last call, by key of a row of the network."""

    def close(self) -> None: ...


class SerialTeam:
    """One shard with all nodes, in this process; the reference for other teams."""

    def __init__(self, world: World) -> None:
        self.shard_nodes = [range(world.nodes)]
        self.shard = Shard(world, range(world.nodes), InProcessStore())

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(self.shard, method)(*arguments[0])]

    def open(self, place: Tensor) -> Tensor:
        return place

    def traffic(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """Do nothing: there are no other processes."""


@dataclass(frozen=True)
class RoundReport:
    """The result of a round: values of every node, in order, and of the network."""

    nodes: list[NodeReport]
    bytes: int
    metrics: Mapping[str, float]  # of the network as a whole, by key
    seconds: dict[str, float]
    traffic: Mapping[str, int] = field(default_factory=dict)  # between shards


class Model(NamedTuple):
    """The tensors of a node, and its evaluated models, which may have the same tensors."""

    params: Tensor  # [d] `node.params`
    buffers: Tensor  # [b] `node.buffers`
    evaluated: dict[str, Weights]  # `Algorithm.evaluated(node)` by name, the headline first


class Lockstep:
    """Runs the coroutines of all nodes, one exchange after the other."""

    def __init__(self, world: World, team: Team) -> None:
        self.world, self.team = world, team
        self.owner = {node: i for i, nodes in enumerate(team.shard_nodes) for node in nodes}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.team.close()

    def round(self, round: int, evaluate: bool) -> RoundReport:
        start = perf_counter()
        sent = self._run_exchanges(round, self._all("begin", round, evaluate))
        reports = self._all("finish")
        check_combined(round, (node for report in reports for node in report.broken))
        return self._merge(reports, sent, perf_counter() - start)

    def pre_round(self) -> int:
        """Run the exchanges before the first round; returns the bytes sent."""
        if self.world.pre_round is None:
            return 0
        return self._run_exchanges(PRE_ROUND, self._all("pre_round"))

    def final(self, rounds: int) -> RoundReport:
        """Run the step after `rounds` rounds, which are all, and evaluate the models again."""
        start = perf_counter()
        sent = self._run_exchanges(rounds, self._all("final", rounds), final=True)
        reports = self._all("finish")
        check_combined(rounds - 1, (node for report in reports for node in report.broken))
        return self._merge(reports, sent, perf_counter() - start)

    def _run_exchanges(self, round: int, outputs: list[ShardOutput], final: bool = False) -> int:
        """Deliver messages until every node has finished; returns the bytes sent."""
        absent = set(range(self.world.nodes)).difference(self.world.present(round - final))
        router = MessageRouter(self.world.link_faults(round, final), absent)
        while True:
            check_finite(round, outputs)
            for output in outputs:
                router.accept(output)
            if any(output.together for output in outputs):
                shards = len(self.team.shard_nodes)
                outputs = answer_together(self.team.call, self.owner, shards, outputs)
                continue
            deliveries = router.deliver()
            if not deliveries:
                return router.bytes
            per_shard: list[dict[int, Any]] = [{} for _ in self.team.shard_nodes]
            for node, packets in deliveries.items():
                per_shard[self.owner[node]][node] = packets
            outputs = self.team.call("resume", [(packets,) for packets in per_shard])

    def evaluate_models(self, sent: int = 0, round: int = PRE_ROUND) -> RoundReport:
        """Evaluate the models after a round; `sent` bytes are reported with the result."""
        start = perf_counter()
        reports = self._all("evaluate_models", round)
        check_combined(round, (node for report in reports for node in report.broken))
        return self._merge(reports, sent, perf_counter() - start)

    def deviations(self, round: int) -> dict[str, dict[str, float]]:
        """Deviations over parameters and over the present nodes, tensor by tensor (P4)."""
        found = Deviations()
        with exclusive_torch():
            present = self.world.present(round)
            owners = dict.fromkeys(self.world.model_owner(node) for node in present)
            for node in (owner for owner in owners if owner != self.world.hub_outside_means):
                architecture = self.world.architecture(node)
                found.add(architecture.name, architecture.layout.views(self.parameters(node)))
            return found.layers()

    def free_messages(self) -> None:
        """Free the memory of all messages after the last round."""
        self._all("free_messages")

    def released(self) -> list[int]:
        """The number of noisy messages that each node with data has released."""
        counts = {node: count for part in self._all("released") for node, count in part.items()}
        return [counts[node] for node in sorted(counts)]

    def model(self, node: int) -> Model:
        """Copies of the model tensors of a node that keeps a model."""
        shard = self.owner[node]
        arguments = [(node if i == shard else None,) for i in range(len(self.team.shard_nodes))]
        places, models = self.team.call("model", arguments)[shard]
        tensors = [self.team.open(place).clone() for place in places]
        evaluated = {
            name: Weights(tensors[params], tensors[buffers], architecture)
            for name, (params, buffers, architecture) in models.items()
        }
        return Model(tensors[0], tensors[1], evaluated)

    def parameters(self, node: int) -> Tensor:
        """A copy of a node's parameters, [d]."""
        return self.model(node).params

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Write each shard's part; returns (trees, file of each node) for the manifest."""
        names = [f"part-{i}.safetensors" for i in range(len(self.team.shard_nodes))]
        answers = self.team.call("save", [(str(folder / name),) for name in names])
        trees = {node: tree for answer in answers for node, tree in answer.items()}
        return trees, {node: names[self.owner[int(node)]] for node in trees}

    def restore(self, saved: Checkpoint) -> None:
        arguments = (saved.trees, saved.parts, saved.round, saved.final)
        self._all("restore", str(saved.folder), *arguments)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return self.team.call(method, [arguments] * len(self.team.shard_nodes))

    @exclusive_torch()
    def _merge(self, reports: list[ShardReport], sent: int, wall: float) -> RoundReport:
        nodes = sorted((n for r in reports for n in r.nodes), key=lambda report: report.node)
        phases = sorted({phase for r in reports for phase in r.seconds} | no_time().keys())
        seconds = {p: sum(r.seconds.get(p, 0.0) for r in reports) / len(reports) for p in phases}
        sums = [(name, self.team.open(place)) for r in reports for name, place in r.spread]
        squares: dict[str, dict[int, float]] = {}
        for report in reports:
            for name, values in report.squares.items():
                squares.setdefault(name, {}).update(values)
        several = sums and not self.world.models_at_hub
        metrics = {"consensus": consensus_distance(sums, squares)} if several else {}
        times = {**seconds, "total": wall}
        return RoundReport(nodes, sent, metrics, times, self.team.traffic())
