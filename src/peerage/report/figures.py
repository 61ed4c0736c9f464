"""Figures of runs: one common style, and a fixed colour and marker per algorithm."""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, cast
from zlib import crc32

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from peerage.errors import InputError
from peerage.files import write_bytes
from peerage.records.metrics import BY_KEY, own_metric
from peerage.records.phases import OTHER, in_order
from peerage.records.rows import RunRecord, value_at
from peerage.report.groups import group_name
from peerage.report.layout import large_layout
from peerage.report.palette import with_palette
from peerage.report.tables import duration, labels, percent, phase_means, size

# The colours of Okabe and Ito, without yellow and with grey instead of black.
BLUE, RED, GREEN, PINK, ORANGE, SKY, GREY = COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
CURVE_STYLES = {
    "dechw": (BLUE, "o"), "decavg": (RED, "s"), "cfa": (GREEN, "^"), "decdiff": (PINK, "D"),
    "decdiff-vt": (ORANGE, "v"), "desa": (GREY, "X"),
    "dfml": (BLUE, "D"), "fedavg": (GREY, "o"), "fedprox": (GREEN, "v"), "def-kt": (PINK, "s"),
    "heterofl": (ORANGE, "^"), "fedrolex": (SKY, "P"), "fml": (RED, "X"),
    "hwa": (BLUE, "^"), "fedcurv": (PINK, "P"), "fednl": (ORANGE, "X"),
    "facade": (BLUE, "s"), "el": (RED, "^"), "dpsgd": (SKY, "o"), "deprl": (GREEN, "D"),
    "dac": (PINK, "v"), "ifca": (GREY, "P"),
}  # fmt: skip
BAR_STYLES = {  # colour and hatch by phase
    "train": (BLUE, ""), "curvature": (ORANGE, "//"), "losses": (ORANGE, "oo"),
    "synthesis": (RED, "++"), "compute": (GREY, "//"), "combine": (GREEN, "\\\\"),
    "exchange": (PINK, "xx"), "evaluate": (SKY, ".."), "wait": ("#BBBBBB", "--"),
    OTHER: ("#EEEEEE", ""),
}  # fmt: skip
CUSTOM_PHASE = (GREY, "**")  # custom local work
MEAN = ", mean over nodes"
STYLE: Any = {
    "figure.facecolor": "white",
    "figure.dpi": 100,
    "font.family": "DejaVu Sans",  # ships with matplotlib, so text looks the same everywhere
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#222222",
    "text.color": "#222222",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelcolor": "#222222",
    "ytick.labelcolor": "#222222",
    "legend.frameon": False,
    "hatch.color": "white",
    "hatch.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "svg.hashsalt": "peerage",
    "pdf.fonttype": 42,  # publishers reject Type 3 fonts
}
# Sizes of captions and footnotes in LaTeX, in a typeface like Times.
PAPER_STYLE: Any = {
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "axes.linewidth": 0.6,
    "grid.linewidth": 0.5,
    "hatch.linewidth": 0.5,
}
_PAPER: ContextVar[float | None] = ContextVar("width of figures in inches", default=None)
LEAST = 1.3  # inches of height
BESIDE_BAR: Any = {"xytext": (4, 0), "textcoords": "offset points"}  # of a number after its bar
NARROW = 5.0  # inches; narrower figures have a legend above, as labels beside curves take much room
# The formats of figures, and the entries of their metadata that would differ between two files.
FORMATS = {
    ".png": ("Software",),
    ".svg": ("Date", "Creator", "Format", "Type"),
    ".pdf": ("CreationDate", "Creator", "Producer"),
}
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")
MANY = 100  # nodes; with more, single nodes cannot be distinguished in a figure
EDGES = 4000  # edges drawn at most
LARGE = 500  # nodes; a layout by the forces of all pairs takes seconds with more
PANELS = 6  # at most
SIZE = (5.6, 3.7)  # inches; small, so that the text stays legible on a phone
WIDE = 11.4


@dataclass(frozen=True)
class CurveStyle:
    """Colour, marker and dash of a curve, distinguishable in grey too."""

    colour: str
    marker: str
    dash: str

    @property
    def line(self) -> dict[str, Any]:
        hollow = "white" if self.dash != "-" else self.colour
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dash,
            "markerfacecolor": hollow,
            "markeredgecolor": self.colour,
        }


@dataclass(frozen=True)
class StyledRun(CurveStyle):
    """A run with its label and curve style in every figure of a comparison."""

    place: int
    record: RunRecord
    label: str


def styled_runs(records: Sequence[RunRecord]) -> list[StyledRun]:
    """The runs of a comparison with unique labels; failed runs are marked as failed."""
    styles = curve_styles([record.algorithm for record in records])
    result = []
    for place, (record, label) in enumerate(zip(records, labels(records), strict=True)):
        name = f"{label} ({record.status})" if record.status in ("diverged", "failed") else label
        style = vars(styles[place])
        result.append(StyledRun(**style, place=place, record=record, label=literal(name)))
    return result


def curve_styles(algorithms: Sequence[str]) -> list[CurveStyle]:
    """One style per run; repeated algorithms get other shades, markers and dashes."""
    seen: dict[tuple[str, str], int] = {}
    result = []
    for algorithm in algorithms:
        style = colour, marker = curve_style(algorithm)
        repeat = seen[style] = seen.get(style, -1) + 1
        shade = tint(colour, (0.0, -0.45, 0.4, -0.75)[repeat % 4])
        other = MARKERS[(MARKERS.index(marker) + repeat) % len(MARKERS)]
        result.append(CurveStyle(shade, other, DASHES[repeat % len(DASHES)]))
    return result


def curve_style(algorithm: str) -> tuple[str, str]:
    """Colour and marker of an algorithm: fixed for those of the papers, by hash for others."""
    name = algorithm.lower().replace("_", "-")
    number = crc32(name.encode())
    other = (COLOURS[number % len(COLOURS)], MARKERS[number // len(COLOURS) % len(MARKERS)])
    return CURVE_STYLES.get(name, other)


def curves(records: Sequence[RunRecord], key: str) -> Figure:
    """A metric over the rounds: the mean over the nodes, or the value of the network.

    Fractions have a band of one standard deviation to either side. For other metrics, the axis is
    logarithmic if values differ by more than a factor of 30.
    """
    with new_figure() as (figure, axes):
        draw_curves(axes, records, key)
    return figure


def draw_curves(axes: Axes, records: Sequence[RunRecord], key: str) -> None:
    """Draw what `curves` shows."""
    name = key.rpartition(".")[2]  # of a named model: models.NAME.accuracy
    metric = BY_KEY.get(name) or own_metric(name)
    runs = styled_runs(records)
    points = [list(zip(*run.record.curve(key), strict=True)) for run in runs]
    log = metric.scale == "log"
    if metric.scale == "fraction":
        for run in runs:
            _band(axes, run, key)
    elif log or (metric.better and needs_log_scale([y for curve in points for _, y in curve])):
        # Not for users' own metrics, which may be negative.
        log_axis(axes, [y for curve in points for _, y in curve if y > 0])
    for run, curve in zip(runs, points, strict=True):
        plot_curve(axes, run, [(x, y) for x, y in curve if y > 0 or not log])
    round_axis(axes)
    if max(record.rounds for record in records) == 0:
        axes.set_xticks([0])
    if metric.scale == "fraction":
        percent_axis(axes)
    axes.set_ylabel(metric.label + ("" if metric.source == "network" else MEAN))
    linear = axes.get_yscale() == "linear"
    # Equal models have distance 0, which a logarithmic axis cannot show: label the point before.
    drawn = [[(x, y) for x, y in curve if y > 0 or linear] for curve in points]
    label_ends(axes, [(run, *curve[-1]) for run, curve in zip(runs, drawn, strict=True) if curve])


def group_curves(records: Sequence[RunRecord], by: str = "cluster") -> Figure:
    """The accuracy of every group of nodes over the rounds, as the mean over its nodes.

    In one run, each group has a colour; of several runs, each has a colour and each group a dash.
    """
    with new_figure() as (figure, axes):
        ends = []
        runs = styled_runs([record for record in records if record.group_curves("accuracy", by)])
        short = short_names([run.label for run in runs])
        for run in runs:
            found = run.record.group_curves("accuracy", by).items()
            for place, (group, (rounds, values)) in enumerate(found):
                if len(runs) == 1:
                    name = literal(group_name(run.record, by, group))
                    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
                    look: dict[str, Any] = {"colour": colour, "marker": marker, "place": place}
                    curve = replace(run, **look, dash="-", label=name)
                else:  # the group first, as long labels are cut off
                    name = f"cluster {group}" if by == "cluster" else literal(str(group))
                    dash = DASHES[place % len(DASHES)]
                    curve = replace(run, dash=dash, label=f"{name}: {short[run.place]}")
                plot_curve(axes, curve, list(zip(rounds, values, strict=True)))
                ends.append((curve, float(rounds[-1]), values[-1]))
        round_axis(axes)
        percent_axis(axes)
        axes.set_ylabel(BY_KEY["accuracy"].label + MEAN)
        label_ends(axes, ends)
    return figure


def short_names(labels: Sequence[str]) -> list[str]:
    """The labels without what is in brackets, if this leaves them distinct.

    >>> short_names(["EL (shared start)", "Facade (shared start)"])
    ['EL', 'Facade']
    >>> short_names(["EL (seed=0)", "EL (seed=1)"])
    ['EL (seed=0)', 'EL (seed=1)']
    """
    names = [label.partition(" (")[0] for label in labels]
    return names if len(set(names)) == len(names) else list(labels)


def bytes_and_accuracy(records: Sequence[RunRecord]) -> Figure:
    """Mean accuracy over the bytes sent per node."""
    with new_figure() as (figure, axes):
        ends = []
        for run in styled_runs(records):
            # Of all nodes, also in rounds that some of them miss: sums must not become less.
            nodes = max((row["nodes"] for row in run.record.network), default=0)
            curve = [
                (row["bytes_total"] / max(nodes, 1), row["accuracy"])
                for row in run.record.network
                if row.get("accuracy") is not None
            ]
            plot_curve(axes, run, curve)
            ends += [(run, *curve[-1])] if curve else []
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short_size(value)))
        axes.fmt_xdata = size
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        most = max((x for _, x, _ in ends), default=0.0)
        axes.set_xlim(0, 1.05 * most or 1.0)
        percent_axis(axes)
        axes.set_xlabel("sent per node")
        axes.set_ylabel(BY_KEY["accuracy"].label + MEAN)
        label_ends(axes, ends)
    return figure


def node_accuracies(records: Sequence[RunRecord]) -> Figure:
    """Final accuracy of every node as a dot, with bars for quartiles and median."""
    runs = styled_runs(records)
    with new_figure(SIZE[0], 1.2 + max(0.62 * len(runs), 1.4)) as (figure, axes):
        for place, run in enumerate(runs):
            _draw_node_accuracies(axes, run, -place)
        name_rows(axes, [run.label for run in runs])
        axes.xaxis.set_major_formatter(PERCENT)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.set_xlabel("test accuracy of a node, last evaluated round")
    return figure


def phase_seconds(records: Sequence[RunRecord]) -> Figure:
    """Mean wall time per round by phase; the remainder is `other`."""
    with new_figure(SIZE[0], 1.7 + max(0.42 * len(records), 0.9)) as (figure, axes):
        bars = [(run.label, phases(run.record)) for run in styled_runs(records)]
        handles = phase_bars(axes, bars)
        figure.legend(handles=handles, loc="outside upper left", ncols=4, fontsize="smaller")
    return figure


def phase_bars(axes: Axes, bars: Sequence[tuple[str, Mapping[str, float]]]) -> list[Patch]:
    """Draw stacked bars of (label, seconds by phase); returns the legend entries."""
    longest = max((sum(means.values()) for _, means in bars), default=0.0)
    for place, (_, means) in enumerate(bars):
        start = 0.0
        for phase, seconds in means.items():
            axes.barh(-place, seconds, 0.62, start, **_bar_style(phase))
            start += seconds
        axes.annotate(duration(start), (start, -place), **BESIDE_BAR, va="center", color="#222222")
    name_rows(axes, [label for label, _ in bars])
    axes.set_xlim(0, 1.15 * longest or 1.0)
    axes.set_xlabel("seconds per round")
    used = {phase for _, means in bars for phase in means}
    return [Patch(label=phase, **_bar_style(phase)) for phase in in_order(used)]


def phases(record: RunRecord) -> dict[str, float]:
    """Mean seconds per round of each phase, in the order of a round."""
    return visible(phase_means(record))


def visible(means: Mapping[str, float]) -> dict[str, float]:
    """The phases that take at least half a percent of the time."""
    least = 0.005 * sum(means.values())
    return {phase: mean for phase, mean in means.items() if mean > least}


def allocation(record: RunRecord) -> Figure:
    """Examples per node and class: bubbles, or a heat map for many nodes."""
    table = np.array(record.setup["allocation"], dtype=float)  # [nodes, classes]
    names = [literal(str(name)) for name in record.setup["classes"]]
    classes = len(names)
    with new_figure(WIDE, 1.1 + min(max(0.27 * classes, 2.0), 6.0)) as (figure, axes):
        if is_crowded(record):
            _allocation_heat(figure, axes, table)
        else:
            _allocation_bubbles(figure, axes, table)
        step = math.ceil(classes / 25)
        axes.set_yticks(range(0, classes, step), names[::step])
        axes.set_ylabel("class")
    return figure


def is_crowded(record: RunRecord) -> bool:
    """Whether there are too many nodes or classes for bubbles."""
    return len(record.setup["examples"]) > MANY or len(record.setup["classes"]) > 40


def graph(records: Sequence[RunRecord]) -> Figure:
    """The graph of the first round, one panel per run.

    Nodes are coloured by their last accuracy, and their area grows with their examples.
    """
    runs = styled_runs(records)[:PANELS]
    columns = min(len(runs), 3)
    lines = math.ceil(len(runs) / columns)
    ends = [_last_accuracies(run.record) for run in runs]
    known = [value for end in ends for value in end.values()] or [0.0, 1.0]
    width = SIZE[0] if columns == 1 else WIDE
    with blank_figure(width, lines * (4.4 if columns < 3 else 3.8)) as figure:
        panels = figure.subplots(lines, columns, squeeze=False).ravel()
        places: dict[Any, dict[int, Any]] = {}  # compared runs usually have the same graph
        for axes, run, end in zip(panels, runs, ends, strict=False):
            edges = run.record.setup["edges"]
            count = len(run.record.setup["parameters"])  # with a hub
            key = (count, tuple(map(tuple, edges)))
            if key not in places:
                places[key] = positions(count, edges)
            bounds = (min(known), max(known))
            dots = draw_graph(axes, places[key], edges, end, bounds, examples_of(run.record))
            axes.set_title(run.label)
        for axes in panels:
            axes.set_axis_off()
        bar = figure.colorbar(dots, ax=list(panels), shrink=0.8, format=PERCENT)
        bar.outline.set_visible(False)
        bar.set_label("test accuracy of the node")
    return figure


def check_format(path: Path) -> str:
    """The format of a figure by the suffix of its name."""
    kind = Path(path).suffix.lower()
    if kind not in FORMATS:
        raise InputError(
            f"cannot draw a figure as {str(path)!r}; end its name in .png, .svg or .pdf"
        )
    return kind[1:]


def save(figure: Figure, path: Path, dpi: int = 160) -> None:
    """Write a .png, .svg or .pdf file atomically; equal figures give equal bytes."""
    kind = check_format(path)
    write_bytes(Path(path), render(figure, kind, dpi), "draw the figure again")


def render(figure: Figure, kind: str, dpi: int = 160, **settings: Any) -> bytes:
    """The figure as a file; `settings` are more of matplotlib's, with _ instead of dots."""
    content = io.BytesIO()
    # None removes these entries, so that the file holds no date and no external URL.
    empty = dict.fromkeys(FORMATS[f".{kind}"])
    more = {key.replace("_", "."): value for key, value in settings.items()}
    with matplotlib.rc_context(STYLE | more):
        figure.savefig(
            content,
            format=kind,
            dpi=dpi if kind == "png" else 110,
            metadata=cast(dict[str, str], empty),
        )
    return with_palette(content.getvalue()) if kind == "png" else content.getvalue()


@contextmanager
def new_figure(width: float = SIZE[0], height: float = SIZE[1]) -> Iterator[tuple[Figure, Axes]]:
    with blank_figure(width, height) as figure:
        yield figure, figure.add_subplot()


@contextmanager
def blank_figure(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of this size in inches, or of the width that `for_paper` demands."""
    paper = _PAPER.get()
    style, scale = (STYLE, 1.0) if paper is None else (STYLE | PAPER_STYLE, paper / width)
    with matplotlib.rc_context(style):
        yield Figure(figsize=(width * scale, max(height * scale, LEAST)), layout="constrained")


@contextmanager
def for_paper(width: float) -> Iterator[None]:
    """Draw the figures of this block so wide, in inches, with the font sizes of a paper."""
    token = _PAPER.set(width)
    try:
        yield
    finally:
        _PAPER.reset(token)


def plot_curve(axes: Axes, run: StyledRun, curve: Sequence[tuple[float, float]]) -> None:
    every = max(len(curve) // 8, 1)
    # Markers of different runs are shifted, so that equal curves remain visible.
    markers = (min(run.place % every, len(curve)), every)
    x, y = [x for x, _ in curve], [y for _, y in curve]
    axes.plot(x, y, markevery=markers, label=run.label, **run.line)
    if curve and run.record.status in ("diverged", "failed"):
        axes.plot(*curve[-1], marker="x", color=run.colour, markersize=10, markeredgewidth=2.5)


def _band(axes: Axes, run: StyledRun, key: str) -> None:
    known = [row for row in run.record.network if value_at(row, f"{key}_std") is not None]
    rows = {row["round"]: row for row in known}  # the last row of each round
    mean, std = (
        np.array([value_at(row, key + ending) for row in rows.values()], dtype=float)
        for ending in ("", "_std")
    )
    axes.fill_between([*rows], mean - std, mean + std, color=run.colour, alpha=0.15, linewidth=0)


def label_ends(axes: Axes, ends: Sequence[tuple[StyledRun, float, float]]) -> None:
    """Write the labels to the right of the axes, close to the ends of their curves."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.autoscale_view()  # the transformation does not update the lazy axis limits
    if figure.get_figwidth() < NARROW and len(ends) > 1:
        columns = 2 if max(len(run.label) for run, *_ in ends) < 24 else 1
        figure.legend(*_handles(axes), loc="outside upper left", ncols=columns, handlelength=2.4)
        return
    text_height = 1.25 * matplotlib.rcParams["font.size"] / 72 / (0.78 * figure.get_figheight())
    to_axes = axes.transScale + axes.transLimits
    heights = [float(to_axes.transform((x, y))[1]) for _, x, y in ends]
    right = axes.get_xlim()[1]
    for (run, x, y), height in zip(ends, space_labels(heights, text_height), strict=True):
        axes.annotate(
            run.label if len(run.label) <= 28 else f"{run.label[:27]}…",
            (x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            color=tint(run.colour, -0.25),
            arrowprops={
                "arrowstyle": "-",
                "color": run.colour,
                "linestyle": ":",  # a solid line would look like part of the curve
                "linewidth": 1.0,
                "shrinkA": 1,
                "shrinkB": 3,
            },
        )
    axes.set_xlim(right=right)


def _handles(axes: Axes) -> tuple[list[Any], list[Any]]:
    """Lines and labels for a legend, each label once."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    return list(found.values()), list(found)


def space_labels(heights: Sequence[float], gap: float) -> list[float]:
    """The nearest heights (least squares) that keep their order and a distance of `gap`.

    Heights that are too close form a block around their mean; overlapping blocks are merged.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    blocks: list[list[float]] = []
    for place, index in enumerate(order):
        blocks.append([heights[index] - place * gap])  # the gaps are added again in the end
        while len(blocks) > 1 and fmean(blocks[-1]) < fmean(blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    means = [fmean(block) for block in blocks for _ in block]
    placed = {index: means[place] + place * gap for place, index in enumerate(order)}
    return [placed[index] for index in range(len(heights))]


def percent_axis(axes: Axes) -> None:
    """Format the y axis as percent; it starts at zero, unless all values lie above one half."""
    axes.yaxis.set_major_formatter(PERCENT)
    axes.fmt_ydata = percent
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    low, high = axes.get_ylim()
    low = low if low > 0.5 and high - low > 0.02 else 0.0
    axes.set_ylim(low, min(high + 0.04 * (high - low), 1.02))  # room for the markers


def round_axis(axes: Axes) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.fmt_xdata = lambda value: f"round {value:g}"


def log_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic y axis with plain numbers; with few powers of ten, also at 2 and 5 times."""
    axes.set_yscale("log")
    few = not values or max(values) < 1000 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def plain_number(value: float) -> str:
    """A number for an axis: digits if they are few, otherwise a power of ten.

    >>> plain_number(0.005), plain_number(2000.0), plain_number(2e-7)
    ('0.005', '2000', '$2\\\\times10^{-7}$')
    """
    if value == 0 or 1e-4 < abs(value) < 1e5:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    factor = value / 10**exponent
    power = f"10^{{{exponent}}}"
    return f"${power}$" if round(factor, 6) == 1 else rf"${factor:g}\times{power}$"


def needs_log_scale(values: Sequence[float]) -> bool:
    """Whether positive values differ by more than a factor of 30."""
    positive = [value for value in values if value > 0]
    return bool(positive) and max(positive) > 30 * min(positive)


def _bar_style(phase: str) -> dict[str, Any]:
    colour, hatch = BAR_STYLES.get(phase, CUSTOM_PHASE)
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white"}


def _draw_node_accuracies(axes: Axes, run: StyledRun, place: float) -> None:
    values = np.sort(list(_last_accuracies(run.record).values()))
    if not len(values):
        return
    axes.scatter(
        values,
        place + _swarm(values),
        s=14 if len(values) <= MANY else 5,
        color=run.colour,
        alpha=0.55 if len(values) <= MANY else 0.35,
        linewidths=0,
        rasterized=len(values) > 5 * MANY,
    )
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    axes.plot([low, high], [place, place], color="#222222", linewidth=1.2, zorder=3)
    axes.plot([middle] * 2, [place - 0.22, place + 0.22], color="#222222", linewidth=2.2, zorder=3)


def _swarm(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Vertical offsets of dots, wider where values are dense (`values` is sorted)."""
    span = max(float(values[-1] - values[0]), 1e-9)
    counts = [len(list(group)) for _, group in groupby(np.round(25 * (values - values[0]) / span))]
    widest = max(*counts, 8)
    # Multiples of the golden ratio fill an interval evenly without a visible pattern.
    spots = (np.arange(len(values)) * 0.6180339887) % 1.0 - 0.5
    return np.asarray(0.64 * spots * np.repeat(counts, counts) / widest)


def _allocation_bubbles(figure: Figure, axes: Axes, table: np.ndarray[Any, Any]) -> None:
    nodes, classes = table.shape
    node, label = np.nonzero(table)
    largest = max(float(table.max()), 1.0)
    pitch = 72 * min(10.0 / nodes, (figure.get_figheight() - 1.0) / classes)  # points per cell
    area = (1.6 * min(pitch, 28)) ** 2 / largest
    style: Any = {"color": BLUE, "alpha": 0.6}
    areas = area * table[node, label]
    axes.scatter(node, label, s=areas, edgecolors="white", linewidths=0.5, **style)
    axes.set_xlim(-0.8, nodes - 0.2)
    axes.set_ylim(-0.8, classes - 0.2)
    axes.set_xlabel("node")
    for count in sorted({_round_down(largest * share) for share in (0.1, 0.4, 1.0)}):
        axes.scatter([], [], s=area * count, linewidths=0, label=f"{count:g}", **style)
    axes.legend(
        title="examples",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        labelspacing=1.4,
        borderpad=1.0,
    )


def _allocation_heat(figure: Figure, axes: Axes, table: np.ndarray[Any, Any]) -> None:
    """Draw a heat map, with nodes sorted by their largest class."""
    order = np.lexsort((-table.max(axis=1), table.argmax(axis=1)))
    picture = axes.imshow(
        np.sqrt(table[order].T),
        aspect="auto",
        origin="lower",
        cmap="Blues",
        interpolation="nearest",
    )
    axes.grid(visible=False)
    axes.set_xlabel("nodes, in the order of their largest class")
    root = float(np.sqrt(table.max()))
    counts = sorted({_round_down(table.max() * share) for share in (0.05, 0.25, 0.6, 1.0)})
    bar = figure.colorbar(picture, ax=axes, ticks=[0, *np.sqrt(counts)], pad=0.01)
    bar.ax.set_yticklabels(["0", *[f"{count:g}" for count in counts]])
    bar.set_label("examples")
    picture.set_clim(0, root)


def _round_down(value: float) -> float:
    """Round down to 1, 2 or 5 times a power of ten."""
    if value < 1:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return max(step * unit for step in (1, 2, 5) if step * unit <= value)


def positions(count: int, edges: Sequence[Sequence[int]]) -> dict[int, Any]:
    """Where to draw each node of a graph, the same for equal graphs."""
    if count > LARGE:
        return dict(enumerate(large_layout(count, edges)))
    network = nx.empty_graph(count)
    network.add_edges_from(edges)
    return cast(dict[int, Any], nx.spring_layout(network, seed=0))


def draw_graph(
    axes: Axes,
    place: dict[int, Any],
    edges: Sequence[Sequence[int]],
    values: dict[int, float],
    bounds: tuple[float, float],
    examples: np.ndarray[Any, Any],
) -> Any:
    """Draw a network with its nodes coloured by values; returns the dots, for a scale."""
    many = len(place) > MANY
    axes.add_collection(
        LineCollection(
            [(place[u], place[v]) for u, v in edges[:: math.ceil(len(edges) / EDGES) or 1]],
            colors="#555555",
            linewidths=0.6 if not many else 0.3,
            alpha=0.1 if many else 0.35,
            rasterized=len(edges) > 2000,
        )
    )
    x, y = np.array([place[node] for node in range(len(place))]).T
    missing = [node for node in range(len(place)) if node not in values]
    dot_size = 90 if not many else max(20_000 / len(place), 8) * 0.8
    # A hub, which has no examples, stays visible, and a node with very many hides no others.
    areas = dot_size * np.clip(examples / max(examples.mean(), 1e-9), 0.2, 4.0)
    # Large nodes at the edge of a narrow figure are not cut.
    style: Any = {"edgecolors": "#888888", "rasterized": len(place) > 5 * MANY, "clip_on": False}
    axes.scatter(x[missing], y[missing], s=areas[missing], color="#DDDDDD", linewidths=0.5, **style)
    present = sorted(values)
    axes.margins(0.08)
    return axes.scatter(
        x[present],
        y[present],
        s=areas[present],
        c=[values[node] for node in present],
        cmap="viridis",
        vmin=bounds[0],
        vmax=bounds[1],
        linewidths=0.5 if not many else 0.2,
        zorder=2,
        **style,
    )


def _last_accuracies(record: RunRecord) -> dict[int, float]:
    rounds, _ = record.curve("accuracy")
    return record.node_values("accuracy", rounds[-1]) if rounds else {}


def examples_of(record: RunRecord) -> np.ndarray[Any, Any]:
    """The number of training examples of each node; a hub has none."""
    known = [count or 0 for count in record.setup["examples"]]
    missing = len(record.setup["parameters"]) - len(known)
    return np.array([*known, *[0] * missing], dtype=float)


def literal(text: str) -> str:
    """Escape dollar signs, which would begin a formula."""
    return text.replace("$", r"\$")


def name_rows(axes: Axes, labels: Sequence[str]) -> None:
    """Write labels at heights 0, -1, -2, ...; a long one has two lines."""
    names = [label.replace(" (", "\n(") if len(label) > 14 else label for label in labels]
    axes.set_yticks([-place for place in range(len(names))], names)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.grid(visible=False, axis="y")


def _short_size(value: float) -> str:
    number, unit = size(value).split()
    return f"{float(number):g} {unit}"


def tint(colour: str, amount: float) -> str:
    """Mix a colour with white (positive amount) or black (negative)."""
    red, green, blue = ((1 - abs(amount)) * c + max(amount, 0.0) for c in to_rgb(colour))
    return to_hex((red, green, blue))
