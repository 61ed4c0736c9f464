"""The rows that real peers on this machine have written so far, in the form of a run's metrics."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from peerage.errors import PeerageError
from peerage.files import read_json
from peerage.records.rows import OWNER, Row, value_at
from peerage.ui.metrics import NODE, TAIL


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

    def refresh(self) -> int:
        for owner in sorted(self.folder.glob(f"*/{OWNER}")):
            if owner.parent not in self._peers:
                try:
                    self._peers[owner.parent] = PeerFile(owner.parent)
                except (PeerageError, KeyError, TypeError, ValueError):
                    continue  # half-written; it is read the next time
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

    def node_values(self, place: int, key: str) -> dict[int, float]:
        pairs = [(row["node"], value_at(row, key)) for row in self.rows_of(place, NODE)]
        return {int(node): float(value) for node, value in pairs if value is not None}

    def node_rows(self, node: int, places: Sequence[int]) -> Iterator[Row]:
        for peer in self._peers.values():
            if peer.node == node:
                rounds = [self.network[place]["round"] for place in places]
                yield from (peer.rows[round] for round in rounds if round in peer.rows)


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


def peer_states(folder: Path) -> list[dict[str, Any]]:
    """What each peer of a network on this machine last recorded."""
    found: list[dict[str, Any]] = []
    for owner in sorted((folder / "peers").glob(f"*/{OWNER}")):
        here = owner.parent
        try:
            peer = PeerFile(here)
            peer.refresh()
            ended = read_json(here / "summary.json") if (here / "summary.json").exists() else {}
        except (PeerageError, KeyError, TypeError, ValueError):
            found.append({"name": here.name, "state": "damaged"})
            continue
        last = peer.rows[max(peer.rows)] if peer.rows else {}
        found.append(
            {
                "name": here.name,
                "node": peer.node,
                "state": str(ended.get("state", "not ended")),
                "round": max(peer.rows, default=0),
                "accuracy": last.get("accuracy"),
                "bytes": sum(row.get("bytes") or 0 for row in peer.rows.values()),
                "missing": last.get("missing", []),
            }
        )
    return sorted(found, key=lambda one: one.get("node", 0))


def tail(path: Path, lines: int = 40) -> list[str]:
    """The last lines of a text file; empty if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - TAIL, 0))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
