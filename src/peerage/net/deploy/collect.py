"""Builds the run folder of a network from the folders of its peers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, TypeVar

from safetensors import safe_open
from torch import Tensor

from peerage.engine.lockstep import RoundReport
from peerage.engine.shard import NodeReport
from peerage.engine.world import World
from peerage.experiment.identity import own_code
from peerage.files import write_json
from peerage.net.deploy.process import PeerProcess
from peerage.net.peer.account import released_messages
from peerage.privacy import privacy_report
from peerage.records import checkpoint
from peerage.records.environment import code_record, environment
from peerage.records.metrics import with_own
from peerage.records.rows import MetricWriter, Row
from peerage.runs.facts import RunFacts
from peerage.runs.summary import (
    digest,
    group_rows,
    missed_rounds,
    network_row,
    node_rows,
    summary_of,
    tests_of,
    totals,
)
from peerage.vectors import Layout

REMEDY = "run `peerage up` again"  # after the disk was full
Place = tuple[int, bool]  # a round, and whether its rows are those of the step after the last
P = TypeVar("P", int, Place)


@dataclass(frozen=True)
class RecordCollector:
    """Writes the metrics, setup and summary of a network, up to its latest rounds."""

    home: Path
    world: World
    wire: str  # the format of float32 tensors in messages
    started: float  # in seconds of perf_counter

    def write(self, peers: Sequence[PeerProcess], status: str, message: str = "") -> dict[str, Any]:
        """Write all records and return the summary; only finished runs have a digest."""
        world, noise, facts = self.world, self.world.noise, RunFacts.of(self.world)
        by_peer = [peer.rows for peer in peers]
        rows = [row for peer_rows in by_peer for row in peer_rows]
        shared = self._metrics(facts, rows, status)
        write_json(self.home / "setup.json", world.setup, REMEDY)
        versions = environment() | code_record(own_code(world.experiment))
        write_json(self.home / "environment.json", versions, REMEDY)
        models, layouts = final_models(peers, world) if status == "finished" else ([], [])
        privacy = None
        if peers and noise.active:
            sent = [released_messages(peer.folder) for peer in peers if peer.number != world.hub]
            privacy = privacy_report(noise, sent, secret=True)
        summary = summary_of(
            facts,
            shared,
            run=self.home.name,
            status=status,
            seconds=perf_counter() - self.started,
            digest=digest(models, layouts) if models else None,
            message=message,
            privacy=privacy,
        )
        sums = totals(rows)
        summary |= {key: sums[key] for key in ("bytes_sent", "wire_bytes", "counters")}
        summaries = [self._peer_summary(*pair) for pair in zip(peers, by_peer, strict=True)]
        summary |= {"wire": self.wire, "peers": summaries}
        write_json(self.home / "summary.json", summary, REMEDY)
        return summary

    def _metrics(self, facts: RunFacts, rows: Sequence[Row], status: str) -> list[Row]:
        """Write the rows of all peers, round by round; return those of groups and network."""
        path = self.home / "metrics.jsonl"
        path.unlink(missing_ok=True)
        joined = list(joined_rows(facts, rows, all_rounds=status == "finished"))
        with MetricWriter(path, REMEDY) as writer:
            for row in joined:
                writer.append(row)
        return [row for row in joined if row["scope"] != "node"]

    def _peer_summary(self, peer: PeerProcess, rows: Sequence[Row]) -> dict[str, Any]:
        """Totals over all restarts of a peer; a restarted peer does not know its earlier counts."""
        seen, present = peer.seen, self.world.is_present
        scheduled = [r + 1 for r in range(self.world.rounds) if present(peer.number, r)]
        missed = missed_rounds(rows, scheduled)
        return {
            "name": seen.name,
            "state": seen.state,
            "starts": peer.starts,
            **({"missed": missed} if missed else {}),
            **totals(rows),
        }


def joined_rows(facts: RunFacts, rows: Iterable[Row], all_rounds: bool) -> Iterator[Row]:
    """The rows of nodes, groups and network as a simulation has them, from the rows of peers.

    Without `all_rounds`, the last ones that some peers had not finished yet are left out.
    """
    by_round: dict[Place, list[Row]] = {}
    for row in rows:
        by_round.setdefault((row["round"], bool(row.get("final"))), []).append(row)
    total = 0
    for place in sorted(by_round) if all_rounds else complete_rounds(by_round):
        report, (round, final) = report_of(by_round[place], facts.own_metrics), place
        total += report.bytes
        known = [n.node for n in report.nodes if facts.is_present(n.node, round)]
        peers, hub = len(facts.data_nodes.intersection(known)), facts.hub_outside_means
        for row in (
            *node_rows(facts, round, report, final),
            *group_rows(facts, round, report, final),
            network_row(round, report, total, peers, without=hub, final=final),
        ):
            yield row | _spent(row, by_round[place])


def _spent(row: Row, rows: Sequence[Row]) -> Row:
    """The epsilon of a node, or the largest of all nodes; none without differential privacy."""
    found = {r["node"]: r["epsilon"] for r in rows if "epsilon" in r}
    if row["scope"] == "node":
        return {"epsilon": found[row["node"]]} if row["node"] in found else {}
    if row["scope"] != "network" or not found:
        return {}
    unbounded = any(value is None for value in found.values())
    return {"epsilon": None if unbounded else max(found.values())}


def complete_rounds(by_round: Mapping[P, Sequence[Row]]) -> list[P]:
    """The rounds without the last ones that some peers had not finished yet.

    >>> complete_rounds({0: [{}, {}, {}], 1: [{}, {}], 2: [{}, {}], 3: [{}]})
    [0, 1, 2]
    """
    rounds = sorted(by_round)
    while len(rounds) > 1 and len(by_round[rounds[-1]]) < len(by_round[rounds[-2]]):
        rounds.pop()
    return rounds


def report_of(rows: Iterable[Row], own: Iterable[str] = ()) -> RoundReport:
    """The report of one round, as an engine returns it, from the rows of all peers.

    `own` are the names of the user's own metrics.
    """
    metrics = with_own(own)
    rows = sorted(rows, key=lambda row: int(row["node"]))
    nodes = [
        NodeReport(
            row["node"],
            {m.key: _number(row[m.key]) for m in metrics if m.key in row},
            {name: _number(value) for name, value in row.get("notes", {}).items()},
            tests=tests_of(row),
            models={
                name: {key: _number(value) for key, value in scores.items()}
                for name, scores in row.get("models", {}).items()
            },
        )
        for row in rows
    ]
    sent = sum(int(row["bytes"]) for row in rows)
    return RoundReport(nodes, sent, {}, _seconds([row["seconds"] for row in rows]))


def _seconds(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean seconds of every phase over the peers, and the longest total."""
    phases = dict.fromkeys(phase for row in rows for phase in row)
    means = {phase: fmean(row.get(phase, 0.0) for row in rows) for phase in phases}
    return means | {"total": max(row["total"] for row in rows)}


def _number(value: float | None) -> float:
    """A number from a file, in which non-finite values are null."""
    return math.nan if value is None else value


def final_models(peers: Sequence[PeerProcess], world: World) -> tuple[list[Tensor], list[Layout]]:
    """The model of every node that stores one, from its last checkpoint, and its layout."""
    models, layouts = [], []
    for peer in peers:
        if world.model_owner(peer.number) != peer.number:
            continue
        saved = checkpoint.load(peer.folder)
        if saved is None:
            continue
        with safe_open(saved.folder / saved.parts[str(peer.number)], framework="pt") as file:
            models.append(file.get_tensor(f"{peer.number}.params"))
        layouts.append(world.layout(peer.number))
    return models, layouts
