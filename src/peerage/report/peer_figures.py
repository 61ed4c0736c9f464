"""Figures about single real peers: their accuracy, and whom they heard, over the rounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from peerage.records.metrics import BY_KEY
from peerage.records.rows import Row, RunRecord, value_at
from peerage.report import peers
from peerage.report.figures import (
    COLOURS,
    GREEN,
    MARKERS,
    ORANGE,
    WIDE,
    label_ends,
    literal,
    name_rows,
    new_figure,
    percent_axis,
    plot_curve,
    round_axis,
    styled_runs,
)

FEW = 10  # curves that can be distinguished
STRIPS = 40  # rows of the figure of rounds
CELLS = 400  # columns of it; with more rounds, a column is several of them
# What a peer did in a round, from the best to the worst, with colours.
ALL_HEARD, SOME_MISSING, NOT_RUN = range(3)
KINDS = (
    ("ran, and heard all", GREEN),
    ("ran, without some messages", ORANGE),
    ("not run or not known", "#D5D5D5"),
)


def accuracy_of_peers(record: RunRecord) -> Figure:
    """The accuracy of each peer over the rounds, and the mean over them."""
    [run] = styled_runs([record])
    with new_figure(WIDE) as (figure, axes):
        curves = []
        for place, (node, points) in enumerate(sorted(_accuracies(record).items())):
            name = literal(peers.name_of(record, node))
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            style = replace(run, place=place, label=name, colour=colour, marker=marker, dash="-")
            curves.append((style, points))
        mean = replace(run, place=len(curves), label="mean", colour="#222222", dash="--")
        curves.append((mean, list(zip(*record.curve("accuracy"), strict=True))))
        for curve, points in curves:
            plot_curve(axes, curve, points)
        round_axis(axes)
        percent_axis(axes)
        axes.set_ylabel(BY_KEY["accuracy"].label)
        label_ends(axes, [(curve, *points[-1]) for curve, points in curves if points])
    return figure


def _accuracies(record: RunRecord) -> dict[int, list[tuple[int, float]]]:
    """Round and accuracy of each node; of a round, the last value."""
    found: dict[int, dict[int, float]] = {}
    for row in record.nodes:
        value = value_at(row, "accuracy")
        if value is not None:
            found.setdefault(row["node"], {})[row["round"]] = float(value)
    return {node: list(values.items()) for node, values in found.items()}


def rounds_of_peers(record: RunRecord) -> Figure:
    """For each peer and round, whether it ran the round and heard all from whom it expected."""
    table = worst_of(round_table(record), CELLS)
    count, last = len(table), max(row["round"] for row in record.peers)
    with new_figure(WIDE, 1.2 + 0.32 * count) as (figure, axes):
        axes.imshow(
            table,
            cmap=ListedColormap([colour for _, colour in KINDS]),
            vmin=0,
            vmax=len(KINDS) - 1,
            aspect="auto",
            interpolation="nearest",
            extent=(0.5, last + 0.5, -count + 0.5, 0.5),
        )
        name_rows(axes, [literal(peers.name_of(record, node)) for node in range(count)])
        axes.hlines(np.arange(1, count) - count + 0.5, 0.5, last + 0.5, color="white", linewidth=4)
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        handles = [Patch(facecolor=colour, label=text) for text, colour in KINDS]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(KINDS))
    return figure


def round_table(record: RunRecord) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """[peers, rounds] with the kind of each round of each peer."""
    last = max(row["round"] for row in record.peers)
    table = np.full((len(record.summary["peers"]), last), NOT_RUN)
    for row in record.peers:
        if row["round"] > 0:
            table[row["node"], row["round"] - 1] = SOME_MISSING if _misses(row) else ALL_HEARD
    return table


def worst_of(
    table: np.ndarray[tuple[int, int], np.dtype[np.int64]], cells: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """The table with at most so many columns, each with the worst of those that it stands for."""
    if table.shape[1] <= cells:
        return table
    parts: Sequence[np.ndarray] = np.array_split(table, cells, axis=1)
    return np.stack([part.max(axis=1) for part in parts], axis=1)


def _misses(row: Row) -> bool:
    heard, expected = row.get("heard", (0, 0))
    return bool(row.get("missing")) or heard < expected


Shown = tuple[str, Callable[[RunRecord], bool], Callable[[RunRecord], Figure], str, bool]
SHOWN: tuple[Shown, ...] = (
    (
        "Accuracy of each peer",
        lambda record: peers.is_network_run(record) and 1 <= len(_accuracies(record)) <= FEW,
        accuracy_of_peers,
        "Each peer on its own test set, and the mean over the peers that evaluated in the round.",
        True,
    ),
    (
        "Rounds of each peer",
        lambda record: (
            any(row["round"] > 0 for row in record.peers) and len(record.summary["peers"]) <= STRIPS
        ),
        rounds_of_peers,
        "Grey rounds were skipped, missed while the peer was down, or its folder is missing.",
        True,
    ),
)
