"""The records of a run: written by runs, and the only input of reports.

A run is a folder with `experiment.toml`, `setup.json`, `metrics.jsonl`, `summary.json` and
`environment.json`. `round` in `metrics.jsonl` counts finished rounds, so 0 is the initial models.
All files except the metrics are written under a temporary name and renamed, so that readers never
see a partial file.

A row of the network (`scope` is "network") has `round`, `nodes`, `bytes` (sent in this round by all
nodes), `bytes_total` (since the start) and `seconds` (by phase, means over the workers; `total` is
the wall time). With the engine `ray` it has `shard_bytes` (sent between shards in this round) and
`store_bytes` (the most that the object stores of all machines held). If the round was evaluated, it
has metrics (`records/metrics.py`), and may have `layers` (tensor -> sigma `ap` and `an`, P4) and
`moved` (by training, by all else, in total, and a cosine). The row of a node (`scope` is "node")
has `round`, `node`, metrics, and `notes` of the algorithm. If an algorithm evaluates several
models, the metrics of a row are those of the first, and `models` holds those of the others by name.
A number that is not finite is null.

If there are clusters or several architectures, an evaluated round has a row for each (`scope` is
"group"): `by` ("cluster" or "architecture"), `group` (its number or name), `nodes` that were
evaluated, metrics as in the row of the network, and `confusion`: for each label, the numbers of
test examples by predicted label, summed over the nodes. The model of a node that serves all
clusters counts once in each; `nodes` is then the size of the cluster.

Rows with `final` were evaluated once more at the very end: after the step that follows the last
round, or because a watcher ended the run in a round without evaluation. They have the number of the
last round and come after its rows. The value of a round in a curve is then that of its final row;
the best value, and the first round that reaches a target, consider both.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peerage.errors import CheckpointError
from peerage.files import disk_errors, dumps, read_bytes, read_json, read_toml, write_bytes

Row = dict[str, Any]
OWNER = "peer.json"  # in the folder of a real peer: its run and node


class MetricWriter:
    """Appends rows; each is passed to the operating system before `append` returns."""

    def __init__(self, path: Path, remedy: str = "") -> None:
        self.path, self._remedy = Path(path), remedy
        with disk_errors(self.path, remedy):
            if self.path.is_file():
                _drop_partial_line(self.path)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def append(self, row: Mapping[str, object]) -> None:
        line = memoryview(dumps(row).encode() + b"\n")
        with disk_errors(self.path, self._remedy):
            while line:  # an unbuffered write may be partial
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """All rows; an incomplete last line, left by a crash, is ignored."""
    return [row for row, _ in _rows(path)]


def truncate_after(path: Path, round: int, final: bool = False) -> None:
    """Remove all rows after a round, so that a resumed run can write them again.

    With `final`, the final rows of that round stay.
    """
    kept = (line for row, line in _rows(path) if is_until(row, round, final))
    write_bytes(path, b"".join(kept))


def is_until(row: Row, round: int, final: bool) -> bool:
    """Whether a row was written at this point of a run, or before it."""
    return bool(row["round"] <= round and (final or not row.get("final")))


def value_at(row: Mapping[str, Any], key: str) -> Any:
    """The value of a key; dots lead into nested tables, as in `models.regular.accuracy`."""
    value: Any = row
    for name in (key,) if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def replace_last_row(path: Path, row: Mapping[str, object], remedy: str = "") -> None:
    """Replace the last row."""
    with disk_errors(path, remedy):
        lines = [line for _, line in _rows(path)]
    write_bytes(path, b"".join(lines[:-1]) + dumps(row).encode() + b"\n", remedy)


@dataclass(frozen=True, eq=False)
class RunRecord:
    """The records of a run, finished or not."""

    folder: Path
    experiment: dict[str, Any]
    setup: dict[str, Any]
    summary: dict[str, Any]
    environment: dict[str, Any]
    network: tuple[Row, ...]
    nodes: tuple[Row, ...]
    groups: tuple[Row, ...] = ()
    peers: tuple[Row, ...] = ()  # of real peers whose folders were joined: all that they recorded
    saved: bool = True  # False: a run without a folder, whose name is `folder`

    @classmethod
    def of_rows(
        cls, folder: Path, rows: Sequence[Row], *, saved: bool = True, **tables: dict[str, Any]
    ) -> Self:
        """A record of these rows; `tables` are the experiment, setup, summary and environment."""
        network, nodes, groups = (
            tuple(row for row in rows if row["scope"] == scope)
            for scope in ("network", "node", "group")
        )
        given: dict[str, Any] = {**tables, "network": network, "nodes": nodes, "groups": groups}
        return cls(folder=folder, saved=saved, **given)

    @classmethod
    def load(cls, folder: Path) -> Self:
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no run folder {str(folder)!r}; give a folder that `peerage run` made"
            )
        return cls.of_rows(
            folder,
            read_metrics(folder / "metrics.jsonl"),
            experiment=read_toml(folder / "experiment.toml"),
            setup=read_json(folder / "setup.json"),
            summary=read_json(folder / "summary.json"),
            environment=read_json(folder / "environment.json"),
        )

    @property
    def label(self) -> str:
        return str(self.summary.get("label") or self.algorithm)

    @property
    def algorithm(self) -> str:
        table = self.experiment.get("algorithm", {})
        return str(self.summary.get("algorithm") or table.get("name") or self.folder.name)

    @property
    def status(self) -> str:
        return str(self.summary.get("status", "running"))

    @property
    def rounds(self) -> int:
        """Finished rounds according to the metrics, as the summary of a killed run is outdated."""
        return max((row["round"] for row in self.network), default=0)

    @property
    def unrepeatable(self) -> str:
        """Why a simulation cannot repeat this run of real peers; empty if it can."""
        if self.experiment.get("noise", {}).get("sigma", 0):
            return "its peers drew noise from secret keys"
        wire = self.summary.get("wire", "fp32")
        if wire != "fp32":
            return f"its messages were rounded to {wire}, unlike those of a simulation"
        return ""

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """Rounds and values of the network rows with a finite value for this key.

        A round has one value, the last. A key with dots leads into a nested table.
        """
        known = dict(self._points(key))
        return list(known), list(known.values())

    def best(self, key: str = "accuracy") -> tuple[int, float] | None:
        """The round and the value of the row with the highest value; None without any."""
        return max(self._points(key), key=lambda point: point[1], default=None)

    def _points(self, key: str) -> list[tuple[int, float]]:
        """The round and the value of every row that has one."""
        pairs = [(row["round"], value_at(row, key)) for row in self.network]
        return [(round, float(value)) for round, value in pairs if value is not None]

    def node_values(self, key: str, round: int) -> dict[int, float]:
        """The value of each node in a round, by node; nodes without a finite value are left out."""
        rows = [row for row in self.nodes if row["round"] == round]
        known = {row["node"]: value_at(row, key) for row in rows}  # the last row of each node
        return {node: float(value) for node, value in known.items() if value is not None}

    @property
    def own_metrics(self) -> list[str]:
        """The names of the user's own metrics."""
        named = self.experiment.get("evaluation", {}).get("metrics", [])
        return [str(text).rpartition(":")[2] for text in named]

    @property
    def model_names(self) -> list[str]:
        """The names of the evaluated models besides the headline."""
        tables = [row.get("models", {}) for row in self.network]
        return list(dict.fromkeys(name for table in tables for name in table))

    def group_curves(
        self, key: str, by: str = "cluster"
    ) -> dict[int | str, tuple[list[int], list[float]]]:
        """Rounds and values of a metric for every group of this kind, in the order of groups."""
        found: dict[int | str, dict[int, float]] = {}  # of a round, the last value
        for row in self.groups:
            if row["by"] == by and row.get(key) is not None:
                found.setdefault(row["group"], {})[row["round"]] = float(row[key])
        return {group: (list(values), list(values.values())) for group, values in found.items()}

    def notes(self, name: str) -> dict[int, tuple[list[int], list[float]]]:
        """Rounds and values of the notes with this name, by node."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for row in self.nodes:
            value = row.get("notes", {}).get(name)
            if value is not None:
                rounds, values = found.setdefault(row["node"], ([], []))
                if row["round"] in rounds[-1:]:  # the final row replaces that of the last round
                    del rounds[-1], values[-1]
                rounds.append(row["round"])
                values.append(float(value))
        return found

    def rounds_to(self, target: float) -> int | None:
        """The first evaluated round whose mean accuracy over the nodes reaches the target."""
        return next((round for round, value in self._points("accuracy") if value >= target), None)


def is_peer_folder(folder: Path) -> bool:
    """Whether a real peer, not a run, made this folder."""
    return (folder / OWNER).is_file()


def read_status(folder: Path) -> str | None:
    """The status of a run in its summary; None without one, as after an early kill."""
    path = folder / "summary.json"
    return str(read_json(path).get("status", "running")) if path.exists() else None


def _rows(path: Path) -> Iterator[tuple[Row, bytes]]:
    """Each row with its line."""
    lines = read_bytes(path).splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            yield row, line if line.endswith(b"\n") else line + b"\n"
        elif number < len(lines):
            raise CheckpointError(
                f"{path} line {number} is not a row of metrics; "
                "delete that line, or run the experiment again"
            )


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "scope" in row and "round" in row else None


def _drop_partial_line(path: Path) -> None:
    """Remove an incomplete last line, left by a crash, or end a complete one."""
    content = path.read_bytes()
    start = content.rstrip(b"\n").rfind(b"\n") + 1
    last = content[start:]
    if last and _parse(last) is None:
        os.truncate(path, start)
    elif last and not last.endswith(b"\n"):
        with open(path, "ab") as file:
            file.write(b"\n")
