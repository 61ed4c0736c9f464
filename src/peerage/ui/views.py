"""What the pages show of a run, as JSON values, thinned out to what a screen can show."""

import base64
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from peerage.errors import PeerageError
from peerage.files import read_json, read_toml
from peerage.records.metrics import BY_KEY, METRICS, Metric, own_metric
from peerage.records.phases import OTHER, in_order
from peerage.records.rows import Row, value_at
from peerage.report.head_choice import HEAD
from peerage.report.series import thinned
from peerage.ui.listing import Entry
from peerage.ui.metrics import GROUP, MetricsFile
from peerage.ui.peers import PeersMetrics, peer_states, tail

POINTS = 400  # of a curve
FRAMES = 120  # rounds of a replay
FRAME_VALUES = 240_000  # of all frames, so that many nodes have fewer frames
FEWEST_FRAMES = 20
EDGES = 6000  # links that are drawn
STEPS = 250  # of a quantised value from 0 to 1
MISSING = 255


@dataclass
class OpenRun:
    """A run that somebody looks at."""

    folder: Path
    file: MetricsFile | PeersMetrics = field(init=False)
    peers: PeersMetrics | None = field(init=False)  # of a network on this machine

    def __post_init__(self) -> None:
        path = self.folder / "metrics.jsonl"
        self.peers = PeersMetrics(self.folder) if (self.folder / "peers").is_dir() else None
        # The metrics of a network are written at its end.
        self.file = MetricsFile(path) if self.peers is None or path.exists() else self.peers

    def refresh(self) -> None:
        self.file.refresh()
        if self.peers is not None and self.peers is not self.file:
            self.peers.refresh()

    def summary(self) -> dict[str, Any]:
        return _table(self.folder / "summary.json")

    def setup(self) -> dict[str, Any]:
        return _table(self.folder / "setup.json")

    def experiment(self) -> dict[str, Any]:
        return _table(self.folder / "experiment.toml")


class OpenRuns:
    """The runs that were looked at last; the others are forgotten."""

    def __init__(self, most: int = 32) -> None:
        self._runs: dict[Path, OpenRun] = {}
        self._most = most
        self._lock = Lock()

    def get(self, folder: Path) -> OpenRun:
        with self._lock:
            run = self._runs.pop(folder, None)
            collected = (folder / "metrics.jsonl").exists()
            if run is None or (collected and isinstance(run.file, PeersMetrics)):
                run = OpenRun(folder)
            self._runs[folder] = run
            while len(self._runs) > self._most:
                del self._runs[next(iter(self._runs))]
        run.refresh()
        return run


def overview(run: OpenRun, entry: Entry) -> dict[str, Any]:
    """Status, curves, times and traffic: all that changes while a run goes on."""
    summary, rows = run.summary(), run.file.network
    status, message = entry.status, str(entry.facts.get("message") or "")
    if run.file.damage:
        status, message = "damaged", run.file.damage
    evaluated = run.file.evaluated()
    last = rows[evaluated[-1]] if evaluated else {}
    return {
        "path": entry.path,
        "name": entry.path.rpartition("/")[2],
        "kind": entry.kind,
        "status": status,
        "message": message,
        "started": entry.started,
        "label": summary.get("label") or summary.get("algorithm") or "",
        "dataset": summary.get("dataset") or "",
        "nodes": summary.get("nodes"),
        "rounds": run.file.rounds,
        "planned": summary.get("rounds_planned"),
        "accuracy": last.get("accuracy"),
        "accuracy_std": last.get("accuracy_std"),
        "best": max((rows[i]["accuracy"] for i in evaluated), default=None),
        "bytes": rows[-1].get("bytes_total") if rows else None,
        "seconds": seconds(rows),
        "curves": curves(rows),
        "groups": group_curves(run),
        "phases": phases(rows),
        "traffic": traffic(rows),
        "frame": frame(run, evaluated[-1]) if evaluated else None,
        "version": run.file.version,
    }


def curves(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The curves of all metrics that the network has, each with its band over the nodes."""
    found = []
    for key in metric_keys(rows):
        metric = metric_of(key)
        known = [row for row in rows if _is_number(value_at(row, key))]
        if not known or (metric.scale == "log" and not any(value_at(r, key) > 0 for r in known)):
            continue
        chosen = [known[place] for place in thinned(range(len(known)), POINTS)]
        model = f" of {key.split('.')[1]}" if "." in key else ""
        found.append(
            {
                "key": key,
                "title": (metric.title or metric.label).capitalize() + model,
                "scale": metric.scale,
                "x": [row["round"] for row in chosen],
                "y": [value_at(row, key) for row in chosen],
                **_band(chosen, key),
            }
        )
    return found


def metric_of(key: str) -> Metric:
    """The metric of a key; `models.NAME.accuracy` is the accuracy of a named model."""
    name = key.rpartition(".")[2]
    return BY_KEY.get(name) or own_metric(name)


def metric_keys(rows: Sequence[Row]) -> list[str]:
    """The metrics of rows: those of the package, a user's own, and those of named models."""
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "accuracy" in row), {})
    known = {m.key + ending for m in METRICS for ending in ("", "_std", "_min", "_max")}
    fixed = {"round", "nodes", "bytes", "bytes_total", "final"}
    own = [
        key
        for key, value in last.items()
        if _is_number(value) and key not in known | fixed and f"{key}_std" in last
    ]
    models = [f"models.{name}.accuracy" for name in last.get("models", {})]
    keys = [metric.key for metric in METRICS if any(metric.key in row for row in rows)]
    return [*keys, *own, *models]


def _band(rows: Sequence[Row], key: str) -> dict[str, list[float]]:
    """One standard deviation to either side, limited to the least and the most of the nodes."""
    if any(not _is_number(row.get(f"{key}_std")) for row in rows):
        return {}
    ends = [(row[key], row[f"{key}_std"], row[f"{key}_min"], row[f"{key}_max"]) for row in rows]
    return {
        "low": [max(mean - std, least) for mean, std, least, _ in ends],
        "high": [min(mean + std, most) for mean, std, _, most in ends],
    }


def group_curves(run: OpenRun) -> dict[str, dict[str, Any]]:
    """The accuracy of each cluster and of each architecture over the rounds."""
    if "clusters" not in run.setup() and not architectures(run):
        return {}
    found: dict[str, dict[str, Any]] = {}
    for place in thinned(run.file.evaluated(), FRAMES):
        for row in run.file.rows_of(place, GROUP):
            if _is_number(row.get("accuracy")):
                curve = found.setdefault(str(row.get("by")), {}).setdefault(
                    str(row.get("group")), {"x": [], "y": []}
                )
                curve["x"].append(row["round"])
                curve["y"].append(row["accuracy"])
    names = run.setup().get("clusters", {}).get("names", [])
    if "cluster" in found and len(names) == len(found["cluster"]):
        found["cluster"] = dict(zip(names, found["cluster"].values(), strict=True))
    return found


def seconds(rows: Sequence[Row]) -> float:
    return sum(float((row.get("seconds") or {}).get("total") or 0.0) for row in rows)


def phases(rows: Sequence[Row]) -> dict[str, float]:
    """Mean seconds per round of each phase that took any time."""
    times = [row.get("seconds") or {} for row in rows if row["round"] > 0]
    means = {
        phase: sum(float(table.get(phase) or 0.0) for table in times) / len(times)
        for phase in in_order(phase for table in times for phase in table)
    }
    total = means.pop("total", 0.0)
    means[OTHER] = max(total - sum(means.values()), 0.0)
    return {phase: mean for phase, mean in means.items() if mean > 1e-6}


def traffic(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The bytes sent in all since the start."""
    chosen = [rows[place] for place in thinned(range(len(rows)), POINTS)]
    known = [(row["round"], row["bytes_total"]) for row in chosen if "bytes_total" in row]
    return {"x": [round for round, _ in known], "y": [sent for _, sent in known]}


def frame(run: OpenRun, place: int) -> dict[str, Any]:
    """The accuracy and the head of every node in one round, as bytes in base 64."""
    count = node_count(run)
    accuracy = run.file.node_values(place, "accuracy")
    heads = run.file.node_values(place, f"notes.{HEAD}")
    round = int(run.file.network[place]["round"])
    return {
        "round": round,
        "accuracy": _packed(accuracy, count, STEPS),
        **({"head": _packed(heads, count, 1)} if heads else {}),
        "cut": _cut_links(run, round),
    }


def frames(run: OpenRun) -> list[dict[str, Any]]:
    """The frames of a replay; of many rounds, some."""
    count = max(node_count(run), 1)
    most = max(min(FRAMES, FRAME_VALUES // count), FEWEST_FRAMES)
    return [frame(run, place) for place in thinned(run.file.evaluated(), most)]


def _cut_links(run: OpenRun, round: int) -> list[list[int]]:
    """The links on which a real peer waited for a message in vain."""
    rows = run.peers.rows_in(round) if run.peers is not None else ()
    return [[int(row["node"]), int(other)] for row in rows for other in row.get("missing", [])]


def architectures(run: OpenRun) -> list[str]:
    """The architectures that nodes take in turn; empty if all nodes have the same."""
    models = run.experiment().get("model")
    if not isinstance(models, list):
        return []
    tables = [model if isinstance(model, dict) else {"name": model} for model in models]
    names = [":".join(str(value) for value in table.values()) for table in tables]
    return names if len(set(names)) > 1 else []


def node_count(run: OpenRun) -> int:
    setup = run.setup()
    return len(setup.get("parameters") or setup.get("examples") or ())


def _packed(values: Mapping[int, float], count: int, steps: int) -> str:
    """One byte per node: the value times `steps`, or MISSING."""
    packed = bytearray([MISSING]) * count
    for node, value in values.items():
        if 0 <= node < count and math.isfinite(value):
            packed[node] = min(max(round(value * steps), 0), MISSING - 1)
    return base64.b64encode(packed).decode()


def graph(run: OpenRun) -> dict[str, Any]:
    """The drawing of the network: places, links, data, clusters and architectures of the nodes."""
    setup, count = run.setup(), node_count(run)
    edges = [(int(u), int(v)) for u, v in setup.get("edges", ()) if u < count and v < count]
    clusters = setup.get("clusters", {})
    kinds = architectures(run)
    assigned = [kinds[node % len(kinds)] for node in range(count)] if kinds else []
    distinct = list(dict.fromkeys(kinds))
    step = math.ceil(len(edges) / EDGES) or 1
    return {
        "count": count,
        "places": layout(count, tuple(edges)),
        "edges": edges[::step],
        "links": len(edges),
        "examples": setup.get("examples", []),
        "cluster": clusters.get("nodes", []),
        "clusters": clusters.get("names", []),
        "architecture": [distinct.index(name) for name in assigned],
        "architectures": distinct,
        "allocation": setup.get("allocation", []) if count <= 2000 else [],
        "classes": [str(name) for name in setup.get("classes", ())],
        "names": [str(peer.get("name")) for peer in run.summary().get("peers", ())],
    }


@lru_cache(maxsize=16)
def layout(count: int, edges: tuple[tuple[int, int], ...]) -> list[list[float]]:
    """The places of the nodes from 0 to 1, as in the figures of reports."""
    from peerage.report.figures import positions

    if not count:
        return []
    found = positions(count, edges)
    x = [float(found[node][0]) for node in range(count)]
    y = [float(found[node][1]) for node in range(count)]
    return [[round(a, 4), round(b, 4)] for a, b in zip(_unit(x), _unit(y), strict=True)]


def _unit(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.5 for value in values]


def node(run: OpenRun, number: int) -> dict[str, Any]:
    """One node: its curves, data, neighbours and messages."""
    setup, places = run.setup(), thinned(run.file.evaluated(), POINTS)
    rows = list(run.file.node_rows(number, places))
    edges = setup.get("edges", ())
    directed = bool(setup.get("topology", {}).get("directed"))
    into = sorted({u for u, v in edges if v == number} | {v for u, v in edges if u == number})
    clusters = setup.get("clusters", {})
    cluster = _at(clusters.get("nodes"), number)
    keys = [
        k for k in ("accuracy", "loss", "train_loss") if any(_is_number(r.get(k)) for r in rows)
    ]
    notes = sorted({name for row in rows for name in row.get("notes", {})})[:12]
    return {
        "node": number,
        "examples": _at(setup.get("examples"), number) or 0,
        "parameters": _at(setup.get("parameters"), number),
        "architecture": kinds[number % len(kinds)] if (kinds := architectures(run)) else None,
        "cluster": None if cluster is None else clusters["names"][cluster],
        "labels": _at(setup.get("allocation"), number) or [],
        "classes": [str(name) for name in setup.get("classes", ())],
        "neighbours": into,
        "directed": directed,
        "messages": messages(run, number),
        "curves": [_node_curve(rows, key, key) for key in keys],
        "notes": [_node_curve(rows, f"notes.{name}", name) for name in notes],
    }


def _node_curve(rows: Sequence[Row], key: str, name: str) -> dict[str, Any]:
    known = [row for row in rows if _is_number(value_at(row, key))]
    metric = BY_KEY.get(name)
    return {
        "title": (metric.label if metric else name).capitalize(),
        "scale": metric.scale if metric else "number",
        "x": [row["round"] for row in known],
        "y": [value_at(row, key) for row in known],
    }


def messages(run: OpenRun, number: int) -> dict[str, Any]:
    """What is recorded of the messages of a node: totals of a real peer, else the mean of all."""
    for peer in peer_states(run.folder):
        if peer.get("node") == number:
            return {"name": peer["name"], "sent": peer.get("bytes"), "missing": peer.get("missing")}
    total = run.file.network[-1].get("bytes_total") if run.file.network else None
    count = len(run.setup().get("examples") or ())
    return {"mean": total / count if total is not None and count else None}


def log_tail(run: OpenRun, started: Path) -> dict[str, list[str]]:
    """The last lines of the logs: that of a run started here, or those of real peers."""
    logs = {"": tail(started)}
    if (run.folder / "peers").is_dir():
        logs |= {
            one.parent.name: tail(one, 8) for one in sorted(run.folder.glob("peers/*/log.txt"))
        }
    return {name: lines for name, lines in logs.items() if lines}


def commands(folder: Path, entry: Entry) -> list[str]:
    """The commands that repeat, continue and verify a run."""
    file, run = shlex.quote(str(folder / "experiment.toml")), shlex.quote(str(folder))
    if entry.kind == "network":
        return [f"peerage up {file}"]
    if entry.status in ("interrupted", "failed"):
        return [f"peerage resume {run}", f"peerage run {file}"]
    verify = [f"peerage verify {run}"] if entry.status == "finished" else []
    return [f"peerage run {file}", *verify]


def _at(values: Any, place: int) -> Any:
    return values[place] if isinstance(values, list) and place < len(values) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _table(path: Path) -> dict[str, Any]:
    """A JSON or TOML file of a run; empty if it is missing or damaged, which the status says."""
    try:
        about = path.stat()
    except OSError:
        return {}
    return _read(path, about.st_mtime_ns, about.st_ino)


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, inode: int) -> dict[str, Any]:
    try:
        return read_toml(path) if path.suffix == ".toml" else read_json(path)
    except PeerageError:
        return {}
