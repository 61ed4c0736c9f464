"""Rows, summary and digest of a run, for simulations and real peers."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from peerage.engine.groups import Tested
from peerage.engine.lockstep import RoundReport
from peerage.engine.shard import NodeReport
from peerage.records.metrics import SCORES, Metric, metrics_in, own_metric
from peerage.records.rows import Row
from peerage.runs.facts import RunFacts
from peerage.vectors import Layout

NOT_IN_SUMMARY = ("scope", "round", "final", "confusion")  # of the row of a group


def summary_of(
    facts: RunFacts,
    rows: Sequence[Row],
    *,
    run: str | None,
    status: str,
    seconds: float,
    digest: str | None,
    message: str = "",
    privacy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of a run so far, from its rows."""
    network = [row for row in rows if row["scope"] == "network"]
    evaluated = [row for row in network if row.get("accuracy") is not None]
    best = max(evaluated, key=lambda row: float(row["accuracy"]), default=None)
    final: Row = evaluated[-1] if evaluated else {}
    shown = (*SCORES, *map(own_metric, facts.own_metrics))
    groups = [
        {key: value for key, value in row.items() if key not in NOT_IN_SUMMARY}
        for row in rows
        if row["scope"] == "group" and _place(row) == _place(final)
    ]
    return {
        "run": run,
        "status": status,
        "algorithm": facts.algorithm,
        "label": facts.label,
        "dataset": facts.dataset,
        "nodes": facts.nodes,
        "rounds": max((row["round"] for row in network), default=0),
        "rounds_planned": facts.rounds,
        **{m.key + end: final.get(m.key + end) for m in shown for end in m.summary},
        "bytes_sent": network[-1]["bytes_total"] if network else 0,
        "seconds": seconds,
        "digest": digest,
        "best_accuracy": best["accuracy"] if best else None,
        "best_round": best["round"] if best else None,
        "message": message,
        **({"models": final["models"]} if "models" in final else {}),
        **({} if privacy is None else {"privacy": privacy}),
        **({"groups": groups} if groups else {}),
        **traffic_of(network),
    }


def traffic_of(network: Sequence[Row]) -> dict[str, int]:
    """The bytes between shards in all rounds, and the most that object stores held."""
    known = [row for row in network if "shard_bytes" in row]
    if not known:
        return {}
    return {
        "shard_bytes": sum(row["shard_bytes"] for row in known),
        "store_bytes": max(row["store_bytes"] for row in known),
    }


def _place(row: Row) -> tuple[int | None, bool]:
    return row.get("round"), bool(row.get("final"))


def network_row(
    round: int,
    report: RoundReport,
    bytes_total: int,
    nodes: int,
    *,
    without: int | None = None,
    final: bool = False,
) -> Row:
    """The row of the network; its means leave out the node `without`, a hub."""
    report = replace(report, nodes=[n for n in report.nodes if n.node != without])
    row: Row = {"scope": "network", "round": round, **_mark(final), "nodes": nodes}
    metrics = _metrics_of(report)
    row |= _values(report, (m for m in metrics if m.source == "training"))
    row |= {"bytes": report.bytes, "bytes_total": bytes_total, **report.traffic}
    row |= _values(report, (m for m in metrics if m.source != "training"))
    moved = [vars(n.moved) for n in report.nodes if n.moved is not None]
    if moved:
        row["moved"] = {key: float(np.mean([one[key] for one in moved])) for key in moved[0]}
    if any(n.models for n in report.nodes):
        row["models"] = _models(report)
    row["seconds"] = report.seconds
    return row


def _mark(final: bool) -> Row:
    return {"final": True} if final else {}


def _models(report: RoundReport) -> dict[str, Row]:
    """Statistics of the other models by name, over the nodes that have such a model."""
    names = dict.fromkeys(name for n in report.nodes for name in n.models)
    return {
        name: _values(
            RoundReport(
                [replace(n, metrics=n.models.get(name, {})) for n in report.nodes], 0, {}, {}
            ),
            _metrics_of(report),
        )
        for name in names
    }


def _metrics_of(report: RoundReport) -> tuple[Metric, ...]:
    """All metrics, including a user's own that the nodes have."""
    return metrics_in(key for n in report.nodes for key in n.metrics)


def _values(report: RoundReport, metrics: Iterable[Metric]) -> Row:
    """Values of the network's metrics, and statistics over the nodes for the others."""
    row: Row = {}
    for metric in metrics:
        values = [n.metrics[metric.key] for n in report.nodes if metric.key in n.metrics]
        if metric.key in report.metrics:
            row[metric.key] = report.metrics[metric.key]
        elif values:
            row |= metric.statistics(values)
    return row


def node_rows(
    facts: RunFacts, round: int, report: RoundReport, final: bool = False
) -> Iterator[Row]:
    """Rows of the recorded nodes that were evaluated."""
    recorded = facts.recorded_nodes(last=final or round == facts.rounds)
    evaluated = (n for n in report.nodes if "accuracy" in n.metrics)
    return (node_row(round, n, final) for n in evaluated if n.node in recorded)


def node_row(round: int, n: NodeReport, final: bool = False) -> Row:
    row: Row = {"scope": "node", "round": round, **_mark(final), "node": n.node}
    row |= {m.key: n.metrics[m.key] for m in metrics_in(n.metrics) if m.key in n.metrics}
    if n.models:
        row["models"] = {name: dict(scores) for name, scores in n.models.items()}
    if n.notes:
        # As in the file, where a number that is not finite is null.
        row["notes"] = {k: v if math.isfinite(v) else None for k, v in n.notes.items()}
    return row


def group_rows(
    facts: RunFacts, round: int, report: RoundReport, final: bool = False
) -> Iterator[Row]:
    """Rows of the groups with nodes that were evaluated; see `peerage.records.rows`."""
    evaluated = [n for n in report.nodes if n.tests and n.node != facts.hub_outside_means]
    place: Row = {"scope": "group", "round": round, **_mark(final)}
    for cluster, size in enumerate(facts.cluster_sizes):
        found = [n for n in evaluated if cluster in n.tests]
        shared = any(facts.clusters[n.node] is None for n in found)
        yield from _group_row(
            {**place, "by": "cluster", "group": cluster},
            [(n, {cluster: n.tests[cluster]}) for n in found],
            size if shared else len(found),
        )
    for name in facts.architectures:
        found = [n for n in evaluated if facts.assignment[n.node] == name]
        yield from _group_row(
            {**place, "by": "architecture", "group": name},
            [(n, n.tests) for n in found],
            len(found),
        )


def _group_row(
    row: Row, members: Sequence[tuple[NodeReport, Mapping[int, Tested]]], nodes: int
) -> Iterator[Row]:
    """The row of a group, or none without members; each comes with its tests in the group."""
    if not members:
        return
    reports = []
    for n, tests in members:  # a node that serves all clusters has other scores in each
        scores = next(iter(tests.values())).metrics if len(tests) == 1 else {}
        reports.append(replace(n, metrics={**n.metrics, **scores}))
    counts = [np.array(found.confusion) for _, tests in members for found in tests.values()]
    report = RoundReport(reports, 0, {}, {})
    values = _values(report, (m for m in _metrics_of(report) if m.source != "network"))
    yield {**row, "nodes": nodes, **values, "confusion": np.sum(counts, axis=0).tolist()}


def tests_table(n: NodeReport) -> Row:
    """What a real peer records of its tests, from which `tests_of` makes them again."""
    if not n.tests:
        return {}
    return {
        "tests": [
            {"cluster": cluster, **found.metrics, "confusion": found.confusion}
            for cluster, found in n.tests.items()
        ]
    }


def tests_of(row: Row) -> dict[int, Tested]:
    """The tests in the row of a real peer."""
    return {
        test["cluster"]: Tested(
            {
                key: math.nan if value is None else value
                for key, value in test.items()
                if key not in ("cluster", "confusion")
            },
            test["confusion"],
        )
        for test in row.get("tests", [])
    }


def digest(parameters: Sequence[Tensor], layouts: Sequence[Layout]) -> str:
    """SHA-256 over the parameters of all nodes in order, each tensor row-major as float32."""
    sha = hashlib.sha256()
    for params, layout in zip(parameters, layouts, strict=True):
        sha.update(layout.canonical(params).numpy().tobytes())
    return sha.hexdigest()


def missed_rounds(rows: Sequence[Row], scheduled: Iterable[int]) -> str:
    """The scheduled rounds before the last row in which a peer recorded nothing.

    >>> missed_rounds([{"round": 1}, {"round": 5}, {"round": 7}], range(1, 10))
    '2-4, 6'
    """
    known = {row["round"] for row in rows}
    last = max(known, default=0)
    return spans(round for round in set(scheduled) - known if round <= last)


def spans(rounds: Iterable[int]) -> str:
    """Numbers as text, with consecutive ones joined.

    >>> spans([4, 2, 3, 6])
    '2-4, 6'
    """
    found: list[list[int]] = []
    for round in sorted(rounds):
        if found and found[-1][1] == round - 1:
            found[-1][1] = round
        else:
            found.append([round, round])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Totals over all restarts of the peers; a restarted peer does not know its earlier counts."""
    counters: Counter[str] = Counter()
    for row in rows:
        counters.update(row.get("troubles", {}))
    return {
        "rounds": max((row["round"] for row in rows), default=0),
        "bytes_sent": sum(row.get("bytes", 0) for row in rows),
        "wire_bytes": sum(row.get("wire_bytes", 0) for row in rows),
        "counters": dict(counters),
    }
