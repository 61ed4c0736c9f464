"""The metrics of a run, read as they grow.

A run of 1000 nodes and 1000 rounds has a million rows in 100 MB. Only the rows of the network are
parsed at once; those of nodes and groups are found by their place in the file when a view needs
them. The row of the network comes last in a round and marks the others as complete.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from peerage.records.rows import Row, value_at

NETWORK = b'{"scope": "network"'
GROUP = b'{"scope": "group"'
NODE = b'{"scope": "node"'
TAIL = 1 << 16  # bytes at the end of a file in which its last row is looked for


class MetricsFile:
    """The rows of one run; `refresh` reads what was appended since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0  # changes whenever the rows do
        self.generation = 0  # changes whenever rows that were read before do
        self._lock = Lock()
        self._reset()

    def _reset(self) -> None:
        self.network: list[Row] = []  # the last row of each round
        self._spans: list[tuple[int, int]] = []  # the place of the other rows of that round
        self.damage = ""
        self._position, self._inode = 0, 0

    def refresh(self) -> int:
        """Read new rows; returns the version."""
        with self._lock:
            try:
                with open(self.path, "rb") as file:
                    about = os.fstat(file.fileno())
                    if about.st_ino != self._inode or about.st_size < self._position:
                        self._reset()  # a resumed run writes its last rounds again
                        self._inode = about.st_ino
                        self.version += 1
                        self.generation += 1
                    if about.st_size > self._position:
                        file.seek(self._position)
                        self._add(file.read())
            except FileNotFoundError:
                pass  # the run has just begun
            except OSError as error:
                self.damage = f"cannot read {self.path.name}: {error.strerror}"
            return self.version

    def _add(self, data: bytes) -> None:
        start = 0
        while True:
            first = data.startswith(NETWORK, start)
            place = start if first else data.find(b"\n" + NETWORK, start) + 1
            end = data.find(b"\n", place)
            if (not first and place == 0) or end < 0:
                break
            row = _parse(data[place:end])
            span = (self._position + start, self._position + place)
            start = end + 1
            if row is None:
                self.damage = f"a row of {self.path.name} cannot be read"
                continue
            if self.network and self.network[-1]["round"] == row["round"]:
                self.network[-1], self._spans[-1] = row, span  # the final row replaces another
                self.generation += 1
            else:
                self.network.append(row)
                self._spans.append(span)
            self.version += 1
        self._position += start
        # What follows is a round that goes on.
        if not self.network and b"\n" in data and not data.startswith((NODE, GROUP)):
            self.damage = self.damage or f"{self.path.name} holds no rows of metrics"

    @property
    def rounds(self) -> int:
        return int(self.network[-1]["round"]) if self.network else 0

    def evaluated(self) -> list[int]:
        """The places in `network` of the rounds in which models were evaluated."""
        return [i for i, row in enumerate(self.network) if row.get("accuracy") is not None]

    def rows_of(self, place: int, prefix: bytes) -> Iterator[Row]:
        """The rows of nodes or groups of the round at a place in `network`."""
        lines = [line for line in self._bytes(place).split(b"\n") if line.startswith(prefix)]
        try:
            # Many lines are parsed much faster at once than one by one.
            rows = [_checked(row) for row in json.loads(b"[%s]" % b",".join(lines))]
        except ValueError:
            rows = [_parse(line) for line in lines]
        for row in rows:
            if row is None:
                self.damage = f"a row of {self.path.name} cannot be read"
            else:
                yield row

    def node_values(self, place: int, *keys: str) -> list[dict[int, float]]:
        """For each key, the value of each node in a round; nodes without one are left out."""
        return values_by_node(self.rows_of(place, NODE), keys)

    def node_rows(self, node: int, places: Sequence[int]) -> Iterator[Row]:
        """The rows of one node in some rounds, without parsing those of the others."""
        mark = b'"node": %d,' % node
        for place in places:
            data = self._bytes(place)
            at = data.find(mark)
            if at < 0:
                continue
            end = data.find(b"\n", at)
            row = _parse(data[data.rfind(b"\n", 0, at) + 1 : end if end >= 0 else None])
            if row is not None and row.get("node") == node:
                yield row

    def _bytes(self, place: int) -> bytes:
        start, end = self._spans[place]
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                return file.read(end - start)
        except OSError:
            return b""


def last_row(path: Path, prefix: bytes = NETWORK) -> Row:
    """The last complete row at the end of a file, of the network or a node; empty if none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL, 0))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return {}
    parsed = (_parse(line) for line in reversed(lines) if line.startswith(prefix))
    return next((row for row in parsed if row is not None), {})


def values_by_node(rows: Iterable[Row], keys: Sequence[str]) -> list[dict[int, float]]:
    found: list[dict[int, float]] = [{} for _ in keys]
    for row in rows:
        node = row.get("node")
        if isinstance(node, int):
            for table, key in zip(found, keys, strict=True):
                value = value_at(row, key)
                if isinstance(value, int | float):
                    table[node] = float(value)
    return found


def _parse(line: bytes) -> Row | None:
    try:
        return _checked(json.loads(line))
    except ValueError:
        return None


def _checked(row: Any) -> Row | None:
    return row if isinstance(row, dict) and isinstance(row.get("round"), int) else None
