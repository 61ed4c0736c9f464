"""The drawing of a network: places and links of the nodes, and a frame for every round."""

import base64
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from peerage import specs
from peerage.errors import PeerageError
from peerage.graphs.faults import Faults, LinkFaults
from peerage.report.head_choice import HEAD
from peerage.report.series import thinned
from peerage.ui.metrics import MetricsFile
from peerage.ui.opened import OpenRun

FRAMES = 120  # rounds of a replay
FRAME_VALUES = 240_000  # of all frames, so that many nodes have fewer frames
FEWEST_FRAMES = 20
KEPT_FRAMES = 300  # of an open run
EDGES = 6000  # links that are drawn
STEPS = 250  # of a quantised value from 0 to 1
MISSING = 255


def frame(run: OpenRun, place: int) -> dict[str, Any]:
    """One round: the accuracy and the head of every node, as bytes in base 64, and its faults."""
    if not isinstance(run.file, MetricsFile):  # rounds of peers that go on may get more rows
        return _frame(run, place)
    key = (run.file.generation, place)
    found = run.frames.pop(key, None) or _frame(run, place)
    run.frames[key] = found
    while len(run.frames) > KEPT_FRAMES:
        run.frames.pop(next(iter(run.frames)), None)
    return found


def _frame(run: OpenRun, place: int) -> dict[str, Any]:
    count = node_count(run)
    accuracy, heads = run.file.node_values(place, "accuracy", f"notes.{HEAD}")
    round = int(run.file.network[place]["round"])
    return {
        "round": round,
        "accuracy": _packed(accuracy, count, STEPS),
        **({"head": _packed(heads, count, 1)} if heads else {}),
        "cut": [*_missed_links(run, round), *_faulty_links(run, round)],
        "gone": _gone(run, round),
    }


def frames(run: OpenRun) -> list[dict[str, Any]]:
    """The frames of a replay; of many rounds, some."""
    count = max(node_count(run), 1)
    most = max(min(FRAMES, FRAME_VALUES // count), FEWEST_FRAMES)
    found: list[dict[str, Any]] = []
    for place in thinned(run.file.evaluated(), most):
        # The step after the last round changes models and chooses no heads.
        before = {"head": found[-1]["head"]} if found and "head" in found[-1] else {}
        found.append(before | frame(run, place))
    return found


def _missed_links(run: OpenRun, round: int) -> list[list[int]]:
    """The links on which a real peer waited for a message in vain."""
    rows = run.peers.rows_in(round) if run.peers is not None else ()
    return [[int(row["node"]), int(other)] for row in rows for other in row.get("missing", [])]


def _faulty_links(run: OpenRun, round: int) -> list[list[int]]:
    """The drawn links that a simulated fault cut; every draw can be repeated from the seed."""
    faults = _faults(run)
    if faults is None:
        return []
    links = LinkFaults(faults, int(run.experiment().get("seed") or 0), round - 1)
    return [[u, v] for u, v in _drawn(_edges(run)) if not _is_up(links, u, v)]


def _is_up(links: LinkFaults, u: int, v: int) -> bool:
    return links.link_up(u, v) and (not links.faults.directed or links.link_up(v, u))


def _gone(run: OpenRun, round: int) -> list[int]:
    """The nodes that do not take part: they left or join later, or their process ended."""
    faults = _faults(run)
    scheduled = {*faults.joined, *faults.left} if faults is not None else set()
    found = {node for node in scheduled if faults and not faults.present(node, round - 1)}
    if run.peers is not None:
        ended = run.summary().get("status") not in (None, "running")
        found.update(run.peers.gone(round, ended))
    return sorted(found)


def _faults(run: OpenRun) -> Faults | None:
    """The simulated faults of a run; None if it has none, or if they cannot be read."""
    table = run.experiment().get("faults")
    if not isinstance(table, dict):
        return None
    try:
        found: Faults = specs.construct(Faults, table, "faults")
    except PeerageError:
        return None
    return found if found != Faults() else None


def _edges(run: OpenRun) -> list[tuple[int, int]]:
    count = node_count(run)
    return [(int(u), int(v)) for u, v in run.setup().get("edges", ()) if u < count and v < count]


def _drawn(edges: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    return edges[:: math.ceil(len(edges) / EDGES) or 1]


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
    edges = _edges(run)
    clusters = setup.get("clusters", {})
    kinds = architectures(run)
    assigned = [kinds[node % len(kinds)] for node in range(count)] if kinds else []
    distinct = list(dict.fromkeys(kinds))
    names = run.peers.names() if run.peers is not None else {}
    return {
        "count": count,
        "places": layout(count, tuple(edges)),
        "edges": _drawn(edges),
        "links": len(edges),
        "examples": setup.get("examples", []),
        "cluster": clusters.get("nodes", []),
        "clusters": clusters.get("names", []),
        "architecture": [distinct.index(name) for name in assigned],
        "architectures": distinct,
        "allocation": setup.get("allocation", []) if count <= 2000 else [],
        "classes": [str(name) for name in setup.get("classes", ())],
        "names": [names.get(node, "") for node in range(count)] if names else [],
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
