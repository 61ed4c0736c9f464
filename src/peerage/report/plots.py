"""The figures of runs by name, for `result.plot(kind)` and `peerage plot KIND RUN...`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from peerage.errors import InputError, did_you_mean
from peerage.records.metrics import METRICS, Metric, own_metric
from peerage.records.rows import RunRecord
from peerage.report import fairness_figures, figures, seeds
from peerage.report.fairness import fairness_over_rounds
from peerage.report.head_choice import has_head_choices
from peerage.report.series import by_method

COLUMN, PAGE = 3.4, 7.0  # inches: a column and a page of most two-column styles
WIDTHS = {"column": COLUMN, "page": PAGE}
LEAST, MOST = 1.5, 20.0  # inches
DPI = 300  # of PNG, as publishers demand


@dataclass(frozen=True)
class Kind:
    """A figure of runs: what it shows, which runs it needs, and the function that draws it."""

    about: str
    draw: Callable[[Sequence[RunRecord]], Figure]
    known: Callable[[RunRecord], bool] = lambda record: True
    needs: str = ""  # what the runs must have, for an error
    by_method: bool = True  # whether runs that differ only in their seed are one curve


def _metric(metric: Metric) -> Kind:
    where = "" if metric.source == "network" else ", mean over the nodes"
    return Kind(
        f"{metric.label} over the rounds{where}",
        partial(figures.curves, key=metric.key),
        lambda record: bool(record.curve(metric.key)[1]),
        f"rounds with a recorded {metric.key}",
    )


KINDS: dict[str, Kind] = {
    **{metric.key: _metric(metric) for metric in METRICS},
    "difference": Kind(
        "accuracy minus that of the first method, in points",
        seeds.accuracy_differences,
        needs="two runs on one data set, with a common seed and evaluated round",
        by_method=False,
    ),
    "nodes": Kind(
        "accuracy of every node",
        figures.node_accuracies,
        lambda record: bool(record.nodes),
        "an evaluated round; wait for the first one",
    ),
    "traffic": Kind("accuracy over the bytes sent per node", figures.bytes_and_accuracy),
    "time": Kind("seconds per round by phase", figures.phase_seconds),
    "graph": Kind(
        "the graph, with accuracy and data of every node, of the first seed",
        lambda records: figures.graph([one.records[0] for one in by_method(records)]),
        by_method=False,
    ),
    "data": Kind(
        "examples of each class at every node, of the first run",
        lambda records: figures.allocation(records[0]),
        lambda record: "allocation" in record.setup,
        "a run whose data are not private",
    ),
    "clusters": Kind(
        "accuracy of every cluster over the rounds",
        figures.group_curves,
        lambda record: bool(record.group_curves("accuracy")),
        "a run with clusters, such as clusters='30/2:rotate'",
    ),
    "architectures": Kind(
        "accuracy of every architecture over the rounds",
        partial(figures.group_curves, by="architecture"),
        lambda record: bool(record.group_curves("accuracy", "architecture")),
        "a run with several models, such as model='h2-cnn'",
    ),
    "fairness": Kind(
        "fair accuracy of the clusters over the rounds",
        fairness_figures.fair_accuracy_curves,
        lambda record: bool(fairness_over_rounds(record)),
        "a run with clusters, such as clusters='30/2:rotate'",
        by_method=False,
    ),
    "heads": Kind(
        "the head that every node chose over the rounds, of the first run",
        lambda records: fairness_figures.head_choice(records[0]),
        has_head_choices,
        "a run of facade or ifca with clusters",
        by_method=False,
    ),
}


REPLAY = "replay"  # a moving picture, which `report.replay` writes
ABOUT_REPLAY = "the graph with the accuracy of every node, round by round, of the first run (GIF)"


def plot(records: Sequence[RunRecord], kind: str, *, by_run: bool = False) -> Figure:
    """A figure: one of `KINDS`, or a metric of the user's own over the rounds.

    Runs that differ only in their seed are one curve, with a band of one standard deviation over
    the seeds; with `by_run`, every run has a curve.
    """
    own = {name for record in records for name in record.own_metrics}
    if kind not in KINDS and kind not in own:
        raise InputError(f"there is no figure {kind!r} of these runs; {_hint(records, kind)}")
    found = KINDS[kind] if kind in KINDS else _metric(own_metric(kind))
    ready = [record for record in records if found.known(record)]
    if not ready or (kind == "difference" and not seeds.comparable(ready)):
        raise InputError(f"kind {kind!r} needs {found.needs}")
    if found.by_method and not by_run:
        ready = [seeds.averaged(method) for method in by_method(ready)]
    return found.draw(ready)


def paper_plot(
    records: Sequence[RunRecord], kind: str, width: str | float, *, by_run: bool = False
) -> Figure:
    """The same for a paper: `column` or `page` wide, or so many inches, with small fonts."""
    with figures.for_paper(inches(width)):
        return plot(records, kind, by_run=by_run)


def inches(width: str | float) -> float:
    """A width in inches.

    >>> inches("column"), inches("5.5")
    (3.4, 5.5)
    """
    try:
        found = WIDTHS[str(width)] if str(width) in WIDTHS else float(width)
    except ValueError:
        found = 0.0
    if not LEAST <= found <= MOST:
        raise InputError(
            f"width must be column, page or {LEAST:g} to {MOST:g} inches, got {width!r}"
        )
    return found


def entries() -> list[dict[str, str]]:
    """Name and description of every kind, for `peerage list plots`."""
    known = {name: kind.about for name, kind in KINDS.items()} | {REPLAY: ABOUT_REPLAY}
    return [
        {"name": name, "options": "", "about": f"{about[0].upper()}{about[1:]}."}
        for name, about in known.items()
    ]


def _hint(records: Sequence[RunRecord], kind: str) -> str:
    own = [name for record in records for name in record.own_metrics]
    return did_you_mean(kind, [*KINDS, REPLAY, *own])
