"""Figures of fairness between clusters, and of the head choice (P3)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from peerage.records.rows import RunRecord
from peerage.report.fairness import fair_accuracy_curve, fairness_over_rounds, fairness_over_seeds
from peerage.report.fairness_tables import head_sweeps, methods
from peerage.report.figures import (
    BESIDE_BAR,
    COLOURS,
    MARKERS,
    PANELS,
    PERCENT,
    SIZE,
    WIDE,
    CurveStyle,
    blank_figure,
    curve_styles,
    label_ends,
    literal,
    name_rows,
    new_figure,
    percent_axis,
    plot_curve,
    styled_runs,
    tint,
)
from peerage.report.groups import group_name
from peerage.report.head_choice import (
    clusters_of_nodes,
    has_head_choices,
    head_choices,
    head_losses,
    number_of_heads,
    settlement,
)
from peerage.report.series import Estimate, Series
from peerage.report.tables import labels, percent

FAIR = "fair accuracy"
BLACK = "#222222"
NO_CHOICE = "#EEEEEE"
BOXES = (
    "Gaps between clusters after the last evaluation. Runs that differ only in their seed share a "
    "row: a dot per seed, a box from the first to the third quartile with the median, and a line "
    "from the lowest to the highest."
)
CHOICE = (
    "The head that each node trained in each evaluated round. Heads are settled when each cluster "
    "has one head and no two clusters share one."
)
LOSSES = (
    "The loss of every head on the training examples on which nodes choose, as the mean over the "
    "nodes of a cluster; a node chooses the lowest."
)
MARK: Any = {"color": BLACK, "linestyle": (0, (4, 2)), "linewidth": 1.4}  # of a settled round


class Shown(NamedTuple):
    """A figure of a report."""

    title: str
    caption: str
    figure: Figure
    wide: bool


def shown(records: Sequence[RunRecord]) -> list[Shown]:
    """The figures of these runs but curves: fairness of several, and the head choice of each."""
    found = methods(records)
    result = []
    if sum(method.seeds for method in found) > 1:
        bars = "From the accuracies of clusters, which are averaged over the seeds of a method."
        result += [
            Shown("Fair accuracy, final and highest", bars, fair_accuracy_bars(found), False),
            Shown("Demographic parity and equalised odds", BOXES, parity_and_odds(found), True),
        ]
    for sweep in head_sweeps(records):
        caption = "Runs that differ only in the number of heads; bars are deviations over seeds."
        result.append(Shown("Number of heads", caption, head_sweep(sweep), False))
    named = zip(labels(records), records, strict=True)
    for name, record in [pair for pair in named if has_head_choices(pair[1])][:PANELS]:
        run = f": {name}" if len(records) > 1 else ""
        result.append(Shown(f"Head choice{run}", CHOICE, head_choice(record), True))
        if number_of_heads(record) > 1:
            result.append(Shown(f"Losses of heads{run}", LOSSES, head_loss_curves(record), True))
    return result


def fair_accuracy_curves(records: Sequence[RunRecord]) -> Figure:
    """The fair accuracy of every run with clusters over the rounds."""
    with new_figure() as (figure, axes):
        ends = []
        for run in styled_runs([record for record in records if fairness_over_rounds(record)]):
            rounds, values, _ = fair_accuracy_curve([run.record])
            plot_curve(axes, run, list(zip(rounds, values, strict=True)))
            ends += [(run, float(rounds[-1]), values[-1])] if rounds else []
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(_round_ticks(6))
        percent_axis(axes)
        axes.set_ylabel(FAIR)
        label_ends(axes, ends)
    return figure


def fair_accuracy_bars(series: Sequence[Series]) -> Figure:
    """The final and the highest fair accuracy of every method, from the seeds' mean accuracies."""
    with new_figure(SIZE[0], 1.5 + max(0.62 * len(series), 1.0)) as (figure, axes):
        for place, (method, style) in enumerate(_styled(series)):
            found = fairness_over_seeds(method.records)
            if found is None:
                continue
            peak = found.highest_of_means
            _bar(axes, -place + 0.19, found.fair_accuracy_of_means, style.colour)
            _bar(axes, -place - 0.19, peak and peak[1], tint(style.colour, 0.55))
        name_rows(axes, [literal(method.label) for method in series])
        _start_at_zero(axes, room=1.15)  # for the numbers
        axes.xaxis.set_major_formatter(PERCENT)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.set_xlabel(FAIR)
        handles = [
            Patch(color="#555555", label="final"),
            Patch(color=tint("#555555", 0.55), label="highest in any evaluation"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


def parity_and_odds(series: Sequence[Series]) -> Figure:
    """Demographic parity and equalised odds of every method: a dot per seed, and a box of them."""
    with blank_figure(WIDE, 1.1 + max(0.5 * len(series), 1.0)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for place, (method, style) in enumerate(_styled(series)):
            found = fairness_over_seeds(method.records)
            if found is not None:
                _box(left, -place, found.parity_by_seed, style)
                _box(right, -place, found.odds_by_seed, style)
        for axes, name in ((left, "demographic parity"), (right, "equalised odds")):
            name_rows(axes, [literal(method.label) for method in series])
            _start_at_zero(axes, room=1.08)
            axes.set_xlabel(f"{name} (gap; lower is fairer)")
    return figure


def head_choice(record: RunRecord) -> Figure:
    """The head of every node over the rounds; nodes are sorted by cluster."""
    clusters = clusters_of_nodes(record)
    nodes = sorted(clusters, key=lambda node: (clusters[node], node))
    choices = head_choices(record)
    rounds = sorted({row["round"] for row in record.nodes if row["round"] > 0})
    table = np.ma.masked_less(
        [[choices.get(round, {}).get(node, -1) for round in rounds] for node in nodes], 0
    )
    colours = _head_colours(record)
    with new_figure(WIDE, 1.4 + min(max(0.17 * len(nodes), 1.4), 5.0)) as (figure, axes):
        axes.grid(visible=False)
        axes.set_facecolor(NO_CHOICE)
        axes.pcolormesh(
            _edges(rounds),
            np.arange(len(nodes) + 1),
            table,
            cmap=ListedColormap(colours),
            vmin=-0.5,
            vmax=len(colours) - 0.5,
            edgecolors="white",
            linewidth=0.4 if table.size <= 2000 else 0.0,
        )
        _cluster_axis(axes, record, [clusters[node] for node in nodes])
        axes.xaxis.set_major_locator(_round_ticks(10))
        axes.set_xlabel("round")
        handles = _head_handles(colours)
        if table.mask.any():
            handles.append(Patch(color=NO_CHOICE, label="no choice"))
        _mark_settlement(axes, record, rounds)
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def head_loss_curves(record: RunRecord) -> Figure:
    """The training loss of every head over the rounds, one panel per cluster."""
    found = head_losses(record)
    colours = _head_colours(record)
    when = settlement(record)
    settled = None if when is None else when.settled
    start = None if settled is None else _start_of(settled, list(head_choices(record)))
    with blank_figure(WIDE, SIZE[1]) as figure:
        panels = figure.subplots(1, max(len(found), 1), sharey=True, squeeze=False)[0]
        for axes, (cluster, curves) in zip(panels, found.items(), strict=False):
            for head, (x, y) in curves.items():
                style = CurveStyle(colours[head], MARKERS[head % len(MARKERS)], "-")
                axes.plot(x, y, markevery=max(len(x) // 8, 1), **style.line)
            axes.set_title(literal(group_name(record, "cluster", cluster)))
            axes.set_xlabel("round")
            axes.xaxis.set_major_locator(_round_ticks(6))
            if start is not None:
                axes.axvline(start, zorder=1, **MARK)
        panels[0].set_ylabel("training loss, mean over nodes")
        handles: list[Any] = [
            Line2D([], [], label=f"head {j}", **CurveStyle(c, MARKERS[j % len(MARKERS)], "-").line)
            for j, c in enumerate(colours)
        ]
        if start is not None:
            handles.append(Line2D([], [], label="settled", **MARK))
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def head_sweep(runs: Mapping[int, Sequence[RunRecord]]) -> Figure:
    """Final accuracy of each cluster, and the fair accuracy, over the number of heads.

    The runs of each number of heads differ only in their seed.
    """
    found = {k: fairness_over_seeds(runs[k]) for k in sorted(runs)}
    known = {k: one for k, one in found.items() if one is not None}
    first = next(iter(runs.values()))[0]
    with new_figure() as (figure, axes):
        clusters = max((len(one.accuracies) for one in known.values()), default=0)
        for cluster in range(clusters):
            style = CurveStyle(
                COLOURS[cluster % len(COLOURS)], MARKERS[cluster % len(MARKERS)], "-"
            )
            values = {k: one.accuracies[cluster] for k, one in known.items()}
            _points(axes, values, style, group_name(first, "cluster", cluster))
        fair = {
            k: Estimate(one.fair_accuracy_of_means, one.fair_accuracy.std)
            for k, one in known.items()
        }
        _points(axes, fair, CurveStyle(BLACK, "D", "--"), FAIR)
        axes.set_xticks(list(known))
        axes.set_xlabel("number of heads k")
        percent_axis(axes)
        axes.set_ylabel("final accuracy")
        figure.legend(loc="outside upper center", ncols=2)
    return figure


def _styled(series: Sequence[Series]) -> list[tuple[Series, CurveStyle]]:
    styles = curve_styles([method.algorithm for method in series])
    return list(zip(series, styles, strict=True))


def _bar(axes: Axes, place: float, value: float | None, colour: str) -> None:
    if value is not None:
        axes.barh(place, value, 0.34, color=colour)
        look: Any = {**BESIDE_BAR, "va": "center", "fontsize": 9, "color": BLACK}
        axes.annotate(percent(value), (value, place), **look)


def _round_ticks(most: int) -> MaxNLocator:
    return MaxNLocator(most, integer=True, steps=[1, 2, 5, 10])


def _start_at_zero(axes: Axes, room: float) -> None:
    """Horizontal limits from 0 to a multiple of the largest value; to 1 if none is positive."""
    most = axes.dataLim.x1  # infinite without data
    axes.set_xlim(0, room * most if 0 < most < inf else 1.0)


def _box(axes: Axes, place: float, values: Sequence[float | None], style: CurveStyle) -> None:
    """A box from the first to the third quartile with the median, a line from least to most."""
    known = [value for value in values if value is not None]
    dot: Any = {"color": style.colour, "linestyle": "none", "zorder": 4, "clip_on": False}
    if len(known) > 1:
        low, middle, high = np.quantile(known, [0.25, 0.5, 0.75])
        axes.plot([min(known), max(known)], [place, place], color=style.colour, linewidth=1.2)
        axes.barh(
            place, high - low, 0.5, low,
            color=tint(style.colour, 0.6), edgecolor=style.colour, zorder=2,
        )  # fmt: skip
        axes.plot([middle] * 2, [place - 0.25, place + 0.25], color=BLACK, linewidth=1.8, zorder=3)
        axes.plot(known, [place] * len(known), marker=".", markersize=5, **dot)
    else:
        axes.plot(known, [place] * len(known), marker=style.marker, markersize=8, **dot)


def _head_colours(record: RunRecord) -> list[str]:
    """One colour per head; from the eighth on, lighter ones."""
    count = len(COLOURS)
    heads = range(max(number_of_heads(record), 1))
    return [tint(COLOURS[head % count], 0.5 * (head >= count)) for head in heads]


def _head_handles(colours: Sequence[str]) -> list[Patch]:
    return [Patch(color=colour, label=f"head {head}") for head, colour in enumerate(colours)]


def _edges(rounds: Sequence[int]) -> list[float]:
    """The borders of columns around these rounds."""
    if len(rounds) < 2:
        return [round + side for round in rounds[:1] or [0] for side in (-0.5, 0.5)]
    middles = [fmean(pair) for pair in pairwise(rounds)]
    return [1.5 * rounds[0] - 0.5 * rounds[1], *middles, 1.5 * rounds[-1] - 0.5 * rounds[-2]]


def _start_of(round: int, rounds: Sequence[int]) -> float:
    """The left border of a round's column."""
    return _edges(rounds)[list(rounds).index(round)]


def _cluster_axis(axes: Axes, record: RunRecord, clusters: Sequence[int]) -> None:
    """The first node at the top; names of the clusters, and lines between them."""
    axes.set_ylim(len(clusters), 0)
    ticks = {}
    for cluster in dict.fromkeys(clusters):
        places = [place for place, of_node in enumerate(clusters) if of_node == cluster]
        ticks[group_name(record, "cluster", cluster)] = fmean(places) + 0.5
        if places[0]:
            axes.axhline(places[0], color=BLACK, linewidth=1.6)
    axes.set_yticks(list(ticks.values()), [literal(name) for name in ticks])
    axes.tick_params(axis="y", length=0)


def _mark_settlement(axes: Axes, record: RunRecord, rounds: Sequence[int]) -> None:
    found = settlement(record)
    if found is None:
        return
    if found.settled is not None:
        axes.axvline(_start_of(found.settled, rounds), **MARK)
        text = f"settled from round {found.settled} on (dashed line)"
    elif found.separated is not None:
        text = f"never settled; clusters separated from round {found.separated} on"
    else:
        text = "never settled"
    axes.set_title(text, loc="left")


def _points(axes: Axes, values: Mapping[int, Estimate], style: CurveStyle, label: str) -> None:
    known = {k: value for k, value in values.items() if value.mean is not None}
    axes.errorbar(
        list(known),
        [value.mean or 0.0 for value in known.values()],
        yerr=[value.std or 0.0 for value in known.values()],
        label=literal(label),
        capsize=2.5,
        elinewidth=1.2,
        **style.line,
    )
