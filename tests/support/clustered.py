"""Records of runs with clusters, made in memory without running anything."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peerage.records.rows import Row, RunRecord

Place = tuple[int, bool]
EVEN = [[3, 1], [1, 3]]  # confusion counts of two classes
SKEWED = [[4, 0], [2, 2]]


def clustered(
    clusters: Sequence[int | None],
    accuracies: Mapping[Place, Sequence[float | None]],
    *,
    confusions: Sequence[Any] = (EVEN, SKEWED),
    notes: Mapping[int, Sequence[Mapping[str, float] | None]] | None = None,
    experiment: Mapping[str, Any] | None = None,
    name: str = "facade",
) -> RunRecord:
    """A run: the cluster of every node (None: a hub), and their accuracies in each evaluation.

    An accuracy of NaN is recorded as null, and None means that the node is absent. `notes` are by
    round and node. All nodes together send 1000 bytes per round.
    """
    count = max(cluster for cluster in clusters if cluster is not None) + 1
    rows: list[Row] = []
    for (round, final), values in accuracies.items():
        place: Row = {"round": round, **({"final": True} if final else {})}
        noted = (notes or {}).get(round, [None] * len(clusters))
        known = {n: _recorded(value) for n, value in enumerate(values) if value is not None}
        for node, value in known.items():
            row = {"scope": "node", **place, "node": node, "accuracy": value, "loss": 1.0}
            extra = noted[node]
            rows.append(row | ({} if final or extra is None else {"notes": dict(extra)}))
        for cluster in range(count):
            members = [value for n, value in known.items() if clusters[n] == cluster]
            if members:
                row = {"scope": "group", **place, "by": "cluster", "group": cluster}
                row |= {"nodes": len(members), "accuracy": _mean(members), "loss": 1.0}
                rows.append(row | {"confusion": confusions[cluster]})
        mean = _mean([value for n, value in known.items() if clusters[n] is not None])
        row = {"scope": "network", **place, "nodes": len(known), "accuracy": mean}
        rows.append(row | {"bytes_total": 1000 * (round + final), "seconds": {"total": 1.0}})
    sizes = [list(clusters).count(cluster) for cluster in range(count)]
    names = [f"cluster {cluster}" for cluster in range(count)]
    return RunRecord(
        folder=Path(name),
        experiment={"algorithm": {"name": name}, **(experiment or {})},
        setup={"clusters": {"names": names, "sizes": sizes, "nodes": list(clusters)}},
        summary={"label": name.upper(), "algorithm": name, "status": "finished"},
        environment={},
        network=tuple(row for row in rows if row["scope"] == "network"),
        nodes=tuple(row for row in rows if row["scope"] == "node"),
        groups=tuple(row for row in rows if row["scope"] == "group"),
    )


def heads(chosen: Sequence[int | None], k: int = 2) -> list[Mapping[str, float] | None]:
    """The notes of nodes that chose these heads: the chosen one has loss 0.5, others 1."""
    return [
        None
        if head is None
        else {"head": head, **{f"head_loss_{j}": 1.0 - 0.5 * (j == head) for j in range(k)}}
        for head in chosen
    ]


def _recorded(value: float) -> float | None:
    return value if value == value else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
