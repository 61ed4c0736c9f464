"""What the pages show of a run, as JSON values, thinned out to what a screen can show."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerage.records.metrics import BY_KEY, METRICS, Metric, own_metric
from peerage.records.phases import OTHER, in_order
from peerage.records.rows import Row, value_at
from peerage.report.series import thinned
from peerage.ui.drawing import FRAMES, architectures, frame
from peerage.ui.listing import Entry
from peerage.ui.metrics import GROUP
from peerage.ui.opened import OpenRun
from peerage.ui.peers import AHEAD, tail

POINTS = 400  # of a curve


def overview(run: OpenRun, entry: Entry) -> dict[str, Any]:
    """Status, curves, times and traffic: all that changes while a run goes on."""
    summary, rows = run.summary(), run.file.network
    status, message = entry.status, str(entry.facts.get("message") or "")
    if run.file.damage:
        status, message = "damaged", run.file.damage
    evaluated = run.file.evaluated()
    newest = _newest(rows, evaluated)
    last = {} if newest is None else rows[newest]
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
        "frame": None if newest is None else frame(run, newest),
        "version": run.file.version,
    }


def _newest(rows: Sequence[Row], evaluated: Sequence[int]) -> int | None:
    """The place of the last round that most nodes have ended; slow peers are some rounds behind."""
    last = evaluated[-AHEAD:]
    return max(last, key=lambda place: (rows[place].get("nodes") or 0, place), default=None)


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
    for peer in run.peers.states() if run.peers is not None else ():
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
