"""The figures of a report: which ones runs have data for, in which part of the page, and captions.

A figure is drawn when it is asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from matplotlib.figure import Figure

from peerage.records.metrics import METRICS, SCORES, Metric, own_metric
from peerage.records.rows import RunRecord
from peerage.report import fairness_figures, figures, groups, peer_figures, seeds
from peerage.report.alpha_figure import accuracy_over_alpha, has_alpha
from peerage.report.fairness import fairness_over_rounds
from peerage.report.series import by_method
from peerage.report.tables import labels

# The parts of a page with figures, in its order: what readers look for first comes first.
LEARNING, NETWORK, NODES, CLUSTERS, COMMUNICATION, TIME, PEERS = PARTS = (
    "Learning",
    "Graph and data",
    "Nodes",
    "Clusters and fairness",
    "Communication",
    "Time",
    "Peers",
)
OVER_SEEDS = " The line is the mean over the seeds, and the band one standard deviation over them."


@dataclass(frozen=True)
class Curves:
    """A figure of several runs, which is shown if any of them has data for it."""

    title: str
    known: Callable[[RunRecord], bool]
    draw: Callable[[Sequence[RunRecord]], Figure]
    caption: str
    part: str = LEARNING


@dataclass(frozen=True)
class Picture:
    """A figure with its place in a page."""

    title: str
    caption: str
    part: str
    draw: Callable[[], Figure]
    wide: bool = False


def _curves(metric: Metric) -> Curves:
    def known(record: RunRecord) -> bool:
        values = record.curve(metric.key)[1]
        return any(value > 0 for value in values) if metric.scale == "log" else bool(values)

    where = f"the {metric.name} on the test set, as the mean over the nodes"
    return Curves(
        metric.title or metric.name.capitalize(),
        known,
        partial(figures.curves, key=metric.key),
        metric.caption or f"{metric.better} is better; {where}.".capitalize(),
    )


def _group_curves(by: str) -> Curves:
    return Curves(
        groups.KINDS[by],
        lambda record: bool(record.group_curves("accuracy", by)),
        partial(figures.group_curves, by=by),
        f"Accuracy of each {by}, as the mean over its nodes; each node is evaluated on its own "
        "test set.",
        CLUSTERS,
    )


def _sent(record: RunRecord) -> bool:
    return any(row["bytes_total"] > 0 for row in record.network)


CURVES: tuple[Curves, ...] = (
    *(_curves(metric) for metric in METRICS if metric.source in ("test", "network")),
    *map(_group_curves, groups.KINDS),
    Curves(
        "Fair accuracy",
        lambda record: bool(fairness_over_rounds(record)),
        fairness_figures.fair_accuracy_curves,
        "Two thirds of the mean accuracy of the clusters, plus one third of 1 minus the gap "
        "between the best and the worst of them; higher is better.",
        CLUSTERS,
    ),
    Curves(
        "Accuracy and alpha",
        has_alpha,
        accuracy_over_alpha,
        "Alpha is how much models learn from the predictions of others instead of from labels. "
        "Peak models follow where it is largest.",
    ),
    Curves(
        "Accuracy over rounds",
        _sent,
        partial(figures.curves, key="accuracy"),
        "Mean accuracy over the rounds, for comparison with the bytes that they take.",
        COMMUNICATION,
    ),
    Curves(
        "Accuracy over bytes",
        _sent,
        figures.bytes_and_accuracy,
        "Mean accuracy over the bytes sent per node; further left is cheaper.",
        COMMUNICATION,
    ),
    Curves(
        "Accuracy of the nodes",
        lambda record: bool(record.nodes),
        figures.node_accuracies,
        "Every dot is a node. The vertical bar is the median, and the line through it spans the "
        "middle half of the nodes. A narrow group means that all nodes have similar accuracy.",
        NODES,
    ),
    Curves(
        "Time",
        lambda record: record.rounds > 0,
        figures.phase_seconds,
        "Mean wall time per round by phase; in the phase 'wait', workers are idle until the others "
        "are ready.",
        TIME,
    ),
)


def pictures(records: Sequence[RunRecord]) -> list[Picture]:
    """The figures for which the runs have data; runs that differ in their seed share a curve."""
    found = by_method(records)
    runs = [seeds.averaged(method) for method in found]
    several = any(method.seeds > 1 for method in found)
    named = dict.fromkeys(key for record in records for key in record.own_metrics)
    own = [_curves(own_metric(key)) for key in named]
    shown = [
        *(_with_seeds(curves) if several else curves for curves in CURVES[: len(SCORES)]),
        *own,
        *CURVES[len(SCORES) :],
    ]
    result = [
        Picture(curves.title, curves.caption, curves.part, partial(curves.draw, runs))
        for curves in shown
        if any(map(curves.known, runs))
    ]
    if seeds.comparable(records):
        result.insert(1, _difference(found[0].label, records, several))
    result += [
        Picture(
            f"Accuracy of {name}",
            f"The models named {name}; the other figures are about the first model of a node.",
            LEARNING,
            partial(figures.curves, runs, f"models.{name}.accuracy"),
        )
        for name in dict.fromkeys(name for record in records for name in record.model_names)
    ]
    result += [
        Picture(name, caption, CLUSTERS, partial(_given, figure), wide)
        for name, caption, figure, wide in fairness_figures.shown(records)
    ]
    for name, record in zip(labels(records), records, strict=True):
        result += _peer_pictures(record, f": {name}" if len(records) > 1 else "")
    first = [replace(m.records[0], summary=run.summary) for m, run in zip(found, runs, strict=True)]
    return [*result, *_network_pictures(first, records)]


def _given(figure: Figure) -> Figure:
    return figure


def _with_seeds(curves: Curves) -> Curves:
    """The figure of a metric, whose band is over the seeds, not over the nodes."""
    start, line, _ = curves.caption.partition(" The line is")
    return replace(curves, caption=start + OVER_SEEDS) if line else curves


def _difference(reference: str, records: Sequence[RunRecord], several: bool) -> Picture:
    caption = (
        f"Accuracy minus that of {reference} with the same seed, in percentage points, which shows "
        "differences between curves that lie on each other."
    )
    if several:
        caption += " The band is the 95 % confidence interval of the mean over the seeds."
    draw = partial(seeds.accuracy_differences, records)
    return Picture("Difference of accuracy", caption, LEARNING, draw)


def _network_pictures(first: Sequence[RunRecord], records: Sequence[RunRecord]) -> list[Picture]:
    """The graph, and the data of each node; of several seeds, those of the first."""
    whose = "" if len(first) == len(records) else " This is the first seed; others have their own."
    result = [
        Picture(
            "Graph",
            _graph_caption(first) + whose,
            NETWORK,
            partial(figures.graph, first),
            wide=len(first) > 1,
        )
    ]
    for names, record in _allocations(first):
        name = "Data of each node" + (f": {names}" if names else "")
        draw = partial(figures.allocation, record)
        caption = _allocation_caption(record) + whose
        result.append(Picture(name, caption, NETWORK, draw, wide=True))
    return result


def _peer_pictures(record: RunRecord, ending: str) -> list[Picture]:
    """The figures about single peers, if the run was between real ones."""
    return [
        Picture(title + ending, caption, PEERS, partial(draw, record), wide)
        for title, known, draw, caption, wide in peer_figures.SHOWN
        if known(record)
    ]


def _allocations(records: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    """One run for each different data split, with the names of the runs that share it."""
    splits: dict[str, tuple[list[str], RunRecord]] = {}
    for name, record in zip(labels(records), records, strict=True):
        if "allocation" not in record.setup:  # of private data
            continue
        names, _ = splits.setdefault(str(record.setup["allocation"]), ([], record))
        names.append(name)
    shown = list(splits.values())[: figures.PANELS]
    return [(join(names) if len(splits) > 1 else "", record) for names, record in shown]


def _allocation_caption(record: RunRecord) -> str:
    if figures.is_crowded(record):
        return (
            "Darker is more. A column is a node, a row is a class; nodes are sorted by their "
            "largest class."
        )
    return "The area of a bubble is the number of training examples of that class at that node."


def _graph_caption(records: Sequence[RunRecord]) -> str:
    text = (
        "Links between nodes in the first round. Brighter nodes reached a higher accuracy, and "
        "larger ones have more examples."
    )
    if max(len(record.setup["edges"]) for record in records) > figures.EDGES:
        text += f" Only about {figures.EDGES} of the links are drawn."
    if len(records) > figures.PANELS:
        text += f" The first {figures.PANELS} runs are shown."
    return text


def join(names: Sequence[str]) -> str:
    """Names as part of a sentence.

    >>> join(["DecAvg", "DecHW", "CFA"])
    'DecAvg, DecHW and CFA'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
