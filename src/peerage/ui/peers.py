"""The rows that real peers on this machine have written so far, in the form of a run's metrics."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from peerage.errors import PeerageError
from peerage.files import read_json
from peerage.records.rows import OWNER, Row
from peerage.ui.listing import is_locked
from peerage.ui.metrics import NODE, TAIL, values_by_node

AHEAD = 3  # rounds by which peers differ, at most, while all of them take part


class PeerFile:
    """The rows of one peer; `refresh` reads what was appended since the last time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"
        self.name = folder.name
        self.node = int(read_json(folder / OWNER)["node"])
        self.rows: dict[int, Row] = {}  # by round
        self._position = 0

    def refresh(self) -> bool:
        """Whether there are new rows."""
        try:
            if self.path.stat().st_size < self._position:
                self._position, self.rows = 0, {}
            with open(self.path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except OSError:
            return False
        complete = data.rfind(b"\n") + 1
        self._position += complete
        for line in data[:complete].split(b"\n"):
            if line.startswith(NODE):
                try:
                    row = json.loads(line)
                    self.rows[int(row["round"])] = row
                except (ValueError, KeyError, TypeError):
                    continue
        return complete > 0


class PeersMetrics:
    """The metrics of a network on this machine, with the interface of `MetricsFile`.

    A network that goes on has no metrics of its own yet: they are collected at its end.
    """

    damage = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "peers"
        self.version = 0
        self.network: list[Row] = []
        self._peers: dict[Path, PeerFile] = {}
        self._damaged: list[Path] = []

    def refresh(self) -> int:
        self._damaged = []
        for owner in sorted(self.folder.glob(f"*/{OWNER}")):
            if owner.parent not in self._peers:
                try:
                    self._peers[owner.parent] = PeerFile(owner.parent)
                except (PeerageError, KeyError, TypeError, ValueError):
                    self._damaged.append(owner.parent)  # half-written; it is read the next time
        grown = [peer.refresh() for peer in self._peers.values()]
        if any(grown):
            self.version += 1
            rounds = sorted({round for peer in self._peers.values() for round in peer.rows})
            total, self.network = 0, []
            for round in rounds:
                row = _joined(
                    round, [p.rows[round] for p in self._peers.values() if round in p.rows]
                )
                total += row["bytes"]
                self.network.append({**row, "bytes_total": total})
        return self.version

    @property
    def rounds(self) -> int:
        return int(self.network[-1]["round"]) if self.network else 0

    def evaluated(self) -> list[int]:
        return [i for i, row in enumerate(self.network) if row.get("accuracy") is not None]

    def rows_of(self, place: int, prefix: bytes) -> Iterator[Row]:
        if prefix == NODE:
            yield from self.rows_in(self.network[place]["round"])

    def rows_in(self, round: int) -> Iterator[Row]:
        """The rows of all peers in a round."""
        yield from (peer.rows[round] for peer in self._peers.values() if round in peer.rows)

    def node_values(self, place: int, *keys: str) -> list[dict[int, float]]:
        return values_by_node(self.rows_of(place, NODE), keys)

    def gone(self, round: int, ended: bool) -> list[int]:
        """The peers that have no row in a round and none later; a slow peer is not gone yet."""
        last = {peer.node: max(peer.rows, default=-1) for peer in self._peers.values()}
        return sorted(node for node, seen in last.items() if seen + (0 if ended else AHEAD) < round)

    def node_rows(self, node: int, places: Sequence[int]) -> Iterator[Row]:
        for peer in self._peers.values():
            if peer.node == node:
                rounds = [self.network[place]["round"] for place in places]
                yield from (peer.rows[round] for round in rounds if round in peer.rows)

    def states(self) -> list[dict[str, Any]]:
        """What each peer last recorded."""
        found = [
            {
                "name": peer.name,
                "node": peer.node,
                "state": _state(folder),
                "round": max(peer.rows, default=0),
                "accuracy": (last := peer.rows[max(peer.rows)] if peer.rows else {}).get(
                    "accuracy"
                ),
                "bytes": sum(row.get("bytes") or 0 for row in peer.rows.values()),
                "missing": last.get("missing", []),
            }
            for folder, peer in self._peers.items()
        ]
        damaged = [{"name": folder.name, "state": "damaged"} for folder in self._damaged]
        return sorted(found, key=lambda one: int(one["node"])) + damaged

    def names(self) -> dict[int, str]:
        return {peer.node: peer.name for peer in self._peers.values()}


def _joined(round: int, rows: Sequence[Row]) -> Row:
    row: Row = {"scope": "network", "round": round, "nodes": len(rows)}
    row["bytes"] = sum(one.get("bytes") or 0 for one in rows)
    for key in ("accuracy", "loss", "train_loss"):
        values = [float(one[key]) for one in rows if one.get(key) is not None]
        if values:
            row |= {key: fmean(values), f"{key}_std": pstdev(values)}
            row |= {f"{key}_min": min(values), f"{key}_max": max(values)}
    times = [one.get("seconds") or {} for one in rows]
    phases = {phase for table in times for phase in table}
    row["seconds"] = {phase: fmean(table.get(phase, 0.0) for table in times) for phase in phases}
    return row


def _state(folder: Path) -> str:
    """What a peer says about its end; before that, whether its process runs."""
    if (folder / "summary.json").exists():
        try:
            return str(read_json(folder / "summary.json").get("state", "ended"))
        except PeerageError:
            return "damaged"
    return "running" if is_locked(folder) else "not running"


def tail(path: Path, lines: int = 40) -> list[str]:
    """The last lines of a text file; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - TAIL, 0))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
