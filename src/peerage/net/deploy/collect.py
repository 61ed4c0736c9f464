"""The run folder of a whole network, as the reports know it, from the folders of its peers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import Tensor

from peerage.engine.lockstep import RoundReport
from peerage.engine.shard import NodeReport
from peerage.engine.world import World
from peerage.experiment.outside import algorithm_record
from peerage.files import read_json, write_json
from peerage.privacy import privacy_report
from peerage.records import checkpoint
from peerage.records.environment import environment
from peerage.records.metrics import METRICS
from peerage.records.rows import MetricWriter, Row
from peerage.runs.summary import digest, network_row, node_rows, summary_of, totals
from peerage.vectors import Layout

if TYPE_CHECKING:
    from peerage.net.deploy.up import PeerProcess

REMEDY = "run `peerage up` again"  # after the disk was full


@dataclass(frozen=True)
class RecordCollector:
    """Writes metrics, setup and summary of a network, as far as its peers have come."""

    home: Path
    world: World
    wire: str  # how numbers travelled
    started: float  # on the clock of perf_counter

    def write(
        self, peers: "Sequence[PeerProcess]", status: str, message: str = ""
    ) -> dict[str, Any]:
        """The summary, which is also in the folder; a digest is for runs that finished."""
        world, noise = self.world, self.world.noise
        by_peer = [peer.rows for peer in peers]
        rows = [row for own in by_peer for row in own]
        network = self._metrics(rows, status)
        write_json(self.home / "setup.json", world.setup, REMEDY)
        where = environment() | algorithm_record(world.experiment.algorithm)
        write_json(self.home / "environment.json", where, REMEDY)
        kept, layouts = final_models(peers, world) if status == "finished" else ([], [])
        privacy = None
        if peers and noise.active:
            sent = [released(peer) for peer in peers[: world.num_data_nodes]]
            privacy = privacy_report(noise, sent, secret=True)
        summary = summary_of(
            world,
            network,
            run=self.home.name,
            status=status,
            seconds=perf_counter() - self.started,
            digest=digest(kept, layouts) if kept else None,
            message=message,
            privacy=privacy,
        )
        sums = totals(rows)
        summary |= {key: sums[key] for key in ("bytes_sent", "wire_bytes", "counters")}
        accounts = [_account_of(peer, own) for peer, own in zip(peers, by_peer, strict=True)]
        summary |= {"wire": self.wire, "peers": accounts}
        write_json(self.home / "summary.json", summary, REMEDY)
        return summary

    def _metrics(self, rows: Sequence[Row], status: str) -> list[Row]:
        """Write what all peers recorded, round by round; the rows of the network."""
        by_round: dict[int, list[Row]] = {}
        for row in rows:
            by_round.setdefault(row["round"], []).append(row)
        total, network = 0, []
        path = self.home / "metrics.jsonl"
        path.unlink(missing_ok=True)
        with MetricWriter(path, REMEDY) as writer:
            for round in sorted(by_round) if status == "finished" else whole(by_round):
                report = report_of(by_round[round])
                total += report.bytes
                present = set(self.world.present(round - 1))
                known = [n for n in report.nodes if n.node in present]
                peers = sum(n.node < self.world.num_data_nodes for n in known)
                network.append(network_row(round, report, total, peers))
                for row in (*node_rows(round, report), network[-1]):
                    writer.append(row)
        return network


def _account_of(peer: "PeerProcess", rows: Sequence[Row]) -> dict[str, Any]:
    seen = peer.seen
    return {"name": seen.name, "state": seen.state, "starts": peer.starts, **totals(rows)}


def whole(by_round: Mapping[int, Sequence[Row]]) -> list[int]:
    """The rounds without the last ones, if some peers were still on their way there.

    >>> whole({0: [{}, {}, {}], 1: [{}, {}], 2: [{}, {}], 3: [{}]})
    [0, 1, 2]
    """
    rounds = sorted(by_round)
    while len(rounds) > 1 and len(by_round[rounds[-1]]) < len(by_round[rounds[-2]]):
        rounds.pop()
    return rounds


def report_of(rows: Iterable[Row]) -> RoundReport:
    """One round of all peers, from their rows, as an engine would report it."""
    rows = sorted(rows, key=lambda row: int(row["node"]))
    nodes = [
        NodeReport(
            row["node"],
            {m.key: _number(row[m.key]) for m in METRICS if m.key in row},
            {name: _number(value) for name, value in row.get("notes", {}).items()},
        )
        for row in rows
    ]
    sent = sum(int(row["bytes"]) for row in rows)
    return RoundReport(nodes, sent, {}, _seconds([row["seconds"] for row in rows]))


def _seconds(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every phase the mean over the peers, and in total the longest."""
    phases = dict.fromkeys(phase for row in rows for phase in row)
    means = {phase: fmean(row.get(phase, 0.0) for row in rows) for phase in phases}
    return means | {"total": max(row["total"] for row in rows)}


def _number(value: float | None) -> float:
    """What is not finite is null in a file."""
    return math.nan if value is None else value


def final_models(peers: "Sequence[PeerProcess]", world: World) -> tuple[list[Tensor], list[Layout]]:
    """Of every node that keeps one, from its last checkpoint."""
    kept, layouts = [], []
    for peer in peers:
        if world.model_owner(peer.number) != peer.number:
            continue
        saved = checkpoint.load(peer.folder)
        if saved is None:
            continue
        with safe_open(saved.folder / saved.parts[str(peer.number)], framework="pt") as file:
            kept.append(file.get_tensor(f"{peer.number}.params"))
        layouts.append(world.layout(peer.number))
    return kept, layouts


def released(peer: "PeerProcess") -> int:
    """How many messages under noise a peer has sent, whatever became of it."""
    file = peer.folder / "released.json"
    return int(read_json(file)["messages"]) if file.exists() else 0
