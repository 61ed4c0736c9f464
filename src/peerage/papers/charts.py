"""Figures of studies: curves over seeds, single nodes, phases, and our numbers beside a paper's."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from peerage.papers.papertable import PaperTable
from peerage.papers.study import count_text
from peerage.records.metrics import BY_KEY
from peerage.records.rows import RunRecord
from peerage.report import figures
from peerage.report.figures import PERCENT, SIZE, STYLE, CurveStyle, literal, needs_log_scale
from peerage.report.series import Key, Series

ACCURACY = BY_KEY["accuracy"].label
ROUND = "round"
MAX_NODES = 10  # lines of single nodes per panel
MARKS = 7  # markers per curve
LONG = 200  # points; longer curves are noisy and get a thinner line
BAND = 0.18  # opacity
TARGET: Any = {"color": "#999999", "linewidth": 1.0, "linestyle": (0, (4, 3))}
LEVEL: Any = {"color": "#444444", "linewidth": 1.1, "linestyle": (0, (1, 1.5))}
ABOVE: Any = {"bbox_to_anchor": (0, 1), "ncols": 4, "fontsize": 8, "handlelength": 1.3}
BELOW: Any = {
    "bbox_to_anchor": (0.5, -0.07), "ncols": 4, "fontsize": 9, "columnspacing": 1.0,
    "handletextpad": 0.1,
}  # fmt: skip
STRIPE = "#F5F5F5"
# Ticks of a logarithmic axis in every decade, by the largest ratio of the values.
TICKS = {8: (1.0, 1.5, 2.0, 3.0, 5.0, 7.0), 100: (1.0, 2.0, 5.0), math.inf: (1.0,)}


@dataclass(frozen=True)
class Panel:
    """One setting with all its methods; `targets` are accuracies marked by horizontal lines."""

    title: str
    series: tuple[Series, ...]
    targets: tuple[float, ...] = ()


@dataclass(frozen=True)
class NodePanel:
    """The notes of an algorithm under one name; if `log` is None, the values set the scale."""

    title: str
    record: RunRecord
    note: str
    ylabel: str
    log: bool | None = None


@dataclass(frozen=True)
class Line:
    """Points with deviations; equal labels have the same colour, dashes mark a second kind."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[float] = ()  # empty: no band
    dashed: bool = False


def line_of(
    label: str,
    series: Series,
    key: Key,
    *,
    first: int = 0,
    stretch: float = 1.0,
    unit: float = 1.0,
    dashed: bool = False,
) -> Line:
    """A series from round `first` on, with a band if there are several seeds.

    `stretch` is the length of a round on the horizontal axis; values are divided by `unit`.
    """
    points = [point for point in zip(*series.curve(key), strict=True) if point[0] >= first]
    return Line(
        label,
        [stretch * round for round, _, _ in points],
        [mean / unit for _, mean, _ in points],
        [std / unit for _, _, std in points] if series.seeds > 1 else (),
        dashed,
    )


@dataclass(frozen=True)
class Plot:
    """Lines on their axes; `levels` are horizontal: the label of a line or "", and a value."""

    title: str
    lines: tuple[Line, ...]
    xlabel: str = ROUND
    ylabel: str = "test loss"
    log: str = ""  # x, y or xy: the axes that are logarithmic
    levels: tuple[tuple[str, float], ...] = ()
    floor: float | None = None  # start of the vertical axis; None: set by the values
    percent: bool = False  # whether fractions are shown in percent; accuracies always are

    def visible(self, line: Line) -> Line:
        """The line, without round 0 if the horizontal axis is logarithmic."""
        kept = [x > 0 or "x" not in self.log for x in line.x]
        x, y, spread = (list(compress(part, kept)) for part in (line.x, line.y, line.spread))
        return replace(line, x=x, y=y, spread=spread)


@dataclass(frozen=True)
class Bars:
    """One bar per name, of one part or of stacked parts that a legend names."""

    title: str
    names: tuple[str, ...]
    parts: Mapping[str, Sequence[float]]  # heights, one per bar
    xlabel: str = ""
    ylabel: str = ""


@dataclass(frozen=True)
class Boxes:
    """One box per name: the quartiles of its values, with a dot for each value."""

    title: str
    values: Mapping[str, Sequence[float]]
    xlabel: str = ""
    ylabel: str = ""
    top: float | None = None  # end of the vertical axis, which starts at 0; None: set by the values


@dataclass(frozen=True)
class HeatMap:
    """A matrix, or a smaller picture of it; the axes count rows and columns of the matrix."""

    title: str
    values: Sequence[Sequence[float]]
    xlabel: str
    ylabel: str
    shape: tuple[int, ...] | None = None  # (rows, columns) of the matrix


def curves(panels: Sequence[Panel], keys: Sequence[str] = ("accuracy", "loss")) -> Figure:
    """Means over seeds in bands of one standard deviation: one column per panel, one row per key.

    More than four panels are split into lines of three.
    """
    methods = _methods(panels)
    columns = len(panels) if len(panels) <= 4 else 3
    lines = [panels[start : start + columns] for start in range(0, len(panels), columns or 1)]
    figure, grid = _grid(len(keys) * len(lines), columns, sharey="row")
    with matplotlib.rc_context(STYLE):
        for number, line in enumerate(lines):
            rows = grid[number * len(keys) : (number + 1) * len(keys)]
            _draw_line(rows, line, keys, methods)
        _legend_above(figure, _entries(methods, panels))
    return figure


def node_lines(panels: Sequence[NodePanel]) -> Figure:
    """One line per node and panel; of many nodes, ten that are evenly spaced."""
    all_notes = [panel.record.notes(panel.note) for panel in panels]
    nodes = sorted({node for notes in all_notes for node in notes})
    places = np.linspace(0, len(nodes) - 1, min(len(nodes), MAX_NODES))
    nodes = [nodes[round(place)] for place in places]
    figure, grid = _panel_grid(len(panels), len(panels) if len(panels) < 4 else 2)
    with matplotlib.rc_context(STYLE):
        for axes, panel, notes in zip(grid, panels, all_notes, strict=True):
            curves = {node: notes[node] for node in nodes if node in notes}
            for node, (rounds, values) in curves.items():
                index = nodes.index(node)
                markers = _markers(len(rounds), index, len(nodes))
                axes.plot(rounds, values, markevery=markers, **_node_line(index))
            known = [value for _, values in curves.values() for value in values]
            if needs_log_scale(known) if panel.log is None else panel.log:
                axes.set_yscale("log")
            axes.set(title=literal(panel.title), ylabel=literal(panel.ylabel))
            _round_axis(axes, [rounds for rounds, _ in curves.values()])
        _legend_above(figure, [_entry(f"node {n}", _node_line(k)) for k, n in enumerate(nodes)])
    return figure


def against_paper(table: PaperTable) -> Figure:
    """A table as a figure: our numbers filled, the paper's hollow, and a line between them."""
    heights, ticks = _table_rows(table)
    parts = table.parts()
    figure, grid = _grid(1, len(parts), sharey="row", height=1.5 + 0.34 * len(ticks))
    entries = [
        [_entry(table.columns[place][-1], _column(number)) for number, place in enumerate(part)]
        for _, part in parts
    ]
    alike = len({tuple(str(entry.get_label()) for entry in names) for names in entries}) == 1
    with matplotlib.rc_context(STYLE):
        for axes, (name, part), names in zip(grid[0], parts, entries, strict=True):
            for height in heights[1::2]:
                axes.axhspan(height - 0.5, height + 0.5, color=STRIPE, zorder=0)
            for number, place in enumerate(part):
                offset = 0.6 * ((len(part) - 1) / 2 - number) / len(part)
                _draw_column(axes, table, place, [y + offset for y in heights], _column(number))
            _table_axis(axes, table, part)
            axes.set_title(literal(name))
            if not alike:
                axes.legend(handles=names, loc="upper center", **BELOW)
        _table_ticks(grid[0][0], ticks)
        _legend_above(figure, [*_paper_entries(table), *(entries[0] if alike else [])])
    return figure


def plots(
    panels: Sequence[Plot | Bars | Boxes],
    *,
    columns: int = 3,
    kinds: Mapping[str, bool] | None = None,
    across: str = "",
) -> Figure:
    """Panels in lines of `columns`.

    The legend names solid lines by the keys of `kinds` that are false, dashed ones by those that
    are true, and levels by `across`.
    """
    line_panels = [panel for panel in panels if isinstance(panel, Plot)]
    labels = list(dict.fromkeys(line.label for panel in line_panels for line in panel.lines))
    styles = {label: _label_style(label, number) for number, label in enumerate(labels)}
    alike = len({(type(p), p.ylabel, "y" in getattr(p, "log", "")) for p in panels}) == 1
    figure, grid = _panel_grid(len(panels), columns, sharey=alike)
    with matplotlib.rc_context(STYLE):
        for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            if isinstance(panel, Bars):
                _draw_bars(axes, panel, styles)
            elif isinstance(panel, Boxes):
                _draw_boxes(axes, panel, styles)
            else:
                _draw_plot(axes, panel, styles)
            axes.set(title=literal(panel.title), xlabel=literal(panel.xlabel))
            if not alike or number % min(columns, len(panels)) == 0:
                axes.set_ylabel(literal(panel.ylabel))
        for axes, panel in zip(grid, panels, strict=True):
            if isinstance(panel, Plot):
                _plot_axes(axes, panel, line_panels if alike else [panel])
        _legend_above(figure, _plot_entries(line_panels, styles, kinds or {}, across))
        _legend_of_parts(figure, [panel for panel in panels if isinstance(panel, Bars)])
    return figure


def heat_maps(
    panels: Sequence[HeatMap], label: str, *, columns: int = 2, height: float = 2.2
) -> Figure:
    """Panels in lines of `columns`, each `height` inches high, with one colour bar for all.

    Zero is in the middle of the colours if there are negative values.
    """
    with matplotlib.rc_context(STYLE):
        columns = min(columns, len(panels))
        tall = 0.4 + height * -(-len(panels) // columns)
        figure, grid = _panel_grid(len(panels), columns, width=0.9 + 3.8 * columns, height=tall)
        most = max(float(np.abs(panel.values).max()) for panel in panels) or 1.0
        negative = any(np.min(panel.values) < 0 for panel in panels)
        colours, least = ("RdBu_r", -most) if negative else ("magma", 0.0)
        for axes, panel in zip(grid, panels, strict=True):
            axes.grid(visible=False)
            rows, width = panel.shape or np.shape(panel.values)
            picture = axes.imshow(
                panel.values,
                cmap=colours,
                vmin=least,
                vmax=most,
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5, width - 0.5, rows - 0.5, -0.5),
            )
            names = {"title": panel.title, "xlabel": panel.xlabel, "ylabel": panel.ylabel}
            axes.set(**{part: literal(text) for part, text in names.items()})
        bar = figure.colorbar(picture, ax=figure.axes, shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(literal(label))
    return figure


def curves_and_phases(panel: Panel) -> Figure:
    """The accuracy over the rounds, and beside it the seconds of each phase of a round."""
    methods = _methods([panel])
    figure, grid = _grid(1, 2, height=SIZE[1] + 0.3)
    left, right = grid[0]
    with matplotlib.rc_context(STYLE):
        _draw_line([[left]], [panel], ["accuracy"], methods)
        _legend_above(figure, _entries(methods, [panel]))
        bars = [(literal(s.label), figures.visible(s.phases())) for s in panel.series]
        right.legend(handles=figures.phase_bars(right, bars), loc="lower left", **ABOVE)
    return figure


def _grid(
    rows: int,
    columns: int,
    *,
    width: float | None = None,
    height: float | None = None,
    **options: Any,
) -> tuple[Figure, Any]:
    """A figure with axes [rows, columns]; without axes, a text says that it is empty."""
    if width is None:
        width = SIZE[0] if columns <= 1 else 0.9 + 3.5 * columns
    tall = max(0.8 + 2.75 * rows, 2.0) if height is None else height
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, tall), layout="constrained")
        if not rows or not columns:
            figure.text(0.5, 0.5, "no run to show yet", ha="center")
            return figure, np.empty((rows, columns), dtype=object)
        return figure, figure.subplots(rows, columns, squeeze=False, **options)


def _panel_grid(count: int, columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with axes for `count` panels, in lines of at most `columns`."""
    columns = min(columns, count)
    figure, grid = _grid(-(-count // max(columns, 1)), columns, **options)
    for spare in grid.flat[count:]:
        spare.set_visible(False)
    return figure, list(grid.flat[:count])


def _methods(panels: Sequence[Panel]) -> dict[str, CurveStyle]:
    """The style of each label, the same in all panels."""
    algorithms = {s.label: s.algorithm for panel in panels for s in panel.series}
    return dict(zip(algorithms, figures.curve_styles(list(algorithms.values())), strict=True))


def _draw_line(
    rows: Any, panels: Sequence[Panel], keys: Sequence[str], methods: dict[str, CurveStyle]
) -> None:
    """Panels side by side, with one row of axes per key."""
    for row, key in zip(rows, keys, strict=True):
        for axes, panel in zip(row, panels, strict=False):
            _draw_panel(axes, panel, key, methods)
            _round_axis(axes, [series.rounds(key) for series in panel.series])
            if key != keys[-1]:
                axes.set_xlabel("")
                axes.tick_params(axis="x", labelbottom=False)
        _value_axis(row, key, panels)
        for axes in row[len(panels) :]:
            axes.set_axis_off()
    for axes, panel in zip(rows[0], panels, strict=False):
        axes.set_title(literal(panel.title))


def _draw_panel(axes: Axes, panel: Panel, key: str, methods: dict[str, CurveStyle]) -> None:
    for target in panel.targets if key == "accuracy" else ():
        axes.axhline(target, zorder=1, **TARGET)
    for series in panel.series:
        line = line_of(series.label, series, key)
        width = 1.8 if len(line.x) <= LONG else 1.2
        _draw_curve(axes, line, methods, {**methods[line.label].line, "linewidth": width})


def _draw_plot(axes: Axes, panel: Plot, styles: Mapping[str, CurveStyle]) -> None:
    for label, value in panel.levels:
        colour = {"color": styles[label].colour} if label in styles else {}
        axes.axhline(value, zorder=1, **{**LEVEL, **colour})
    for line in panel.lines:
        stroke = _stroke(styles[line.label], dashed=line.dashed)
        stroke["zorder"] = 2.5 if line.dashed else 2
        _draw_curve(axes, panel.visible(line), styles, stroke, positive="y" in panel.log)


def _draw_curve(
    axes: Axes,
    line: Line,
    styles: Mapping[str, CurveStyle],
    stroke: Mapping[str, Any],
    *,
    positive: bool = False,
) -> None:
    """A line in a band of one deviation, which is `positive` on a logarithmic axis."""
    order, y = list(styles), np.asarray(line.y)
    # A curve alone needs no markers to be told apart; of one point, nothing else is visible.
    alone = len(order) == 1 and len(line.x) > 1
    markers = [] if alone else _markers(len(line.x), order.index(line.label), len(order))
    axes.plot(line.x, y, markevery=markers, **stroke)
    if line.spread:
        low = np.maximum(y - line.spread, 0.2 * y if positive else -math.inf)
        colour = styles[line.label].colour
        axes.fill_between(line.x, low, y + line.spread, color=colour, alpha=BAND, linewidth=0)


def _entry(label: str, style: Mapping[str, Any]) -> Artist:
    """A line of the legend."""
    return Line2D([], [], label=literal(label), **style)


def _band_entry(label: str) -> Artist:
    return Patch(color="#888888", alpha=2 * BAND, label=label)


def _draw_bars(axes: Axes, panel: Bars, styles: Mapping[str, CurveStyle]) -> None:
    """A bar of one part has its height above it, and the colour of its algorithm or line."""
    places = range(len(panel.names))
    bottom = np.zeros(len(panel.names))
    for number, heights in enumerate(panel.parts.values()):
        single = [_bar_colour(name, styles) for name in panel.names]
        colour: Any = single if len(panel.parts) == 1 else f"C{number}"
        bars = axes.bar(places, heights, 0.7, bottom, color=colour)
        if len(panel.parts) == 1:
            axes.bar_label(bars, [f"{height:,.4g}".replace(",", " ") for height in heights])
            axes.margins(y=0.1)
        bottom += np.asarray(heights)
    axes.set_xticks(places, [literal(name) for name in panel.names])
    axes.grid(visible=False, axis="x")


def _draw_boxes(axes: Axes, panel: Boxes, styles: Mapping[str, CurveStyle]) -> None:
    """The whiskers reach the least and the largest value."""
    middle: Any = {"color": "#222222", "linewidth": 1.6}
    for place, (name, values) in enumerate(panel.values.items()):
        colour = _bar_colour(name, styles)
        line: Any = {"color": colour, "linewidth": 1.2}
        if len(values) > 1:
            axes.boxplot(
                [values],
                positions=[place],
                widths=0.55,
                whis=(0, 100),
                showfliers=False,  # every value has a dot
                patch_artist=True,
                boxprops={"facecolor": (colour, 2 * BAND), "edgecolor": colour},
                medianprops=middle,
                whiskerprops=line,
                capprops=line,
            )
        axes.plot([place] * len(values), values, color=colour, linestyle="none", marker="o")
    axes.set_xticks(range(len(panel.values)), [literal(name) for name in panel.values])
    axes.set_xlim(-0.6, len(panel.values) - 0.4)
    axes.set_ylim(0, panel.top)
    axes.grid(visible=False, axis="x")


def _bar_colour(name: str, styles: Mapping[str, CurveStyle]) -> str:
    if name in styles:
        return styles[name].colour
    algorithm = _algorithm(name)
    known = algorithm in figures.CURVE_STYLES
    return figures.curve_style(algorithm)[0] if known else figures.GREY


def _legend_of_parts(figure: Figure, panels: Sequence[Bars]) -> None:
    names = list(dict.fromkeys(n for p in panels if len(p.parts) > 1 for n in p.parts))
    if names:
        entries = [Patch(color=f"C{k}", label=literal(n)) for k, n in enumerate(names)]
        style: Any = {"fontsize": 9, "handlelength": 1.0, "columnspacing": 1.2}
        columns = min(len(names), 10)
        figure.legend(handles=entries, loc="outside lower center", ncols=columns, **style)


def _plot_axes(axes: Axes, panel: Plot, sharing: Sequence[Plot]) -> None:
    """`sharing` are the panels with the same vertical axis."""
    if panel.floor is not None:
        axes.set_ylim(bottom=panel.floor)
    if panel.percent or panel.ylabel == ACCURACY:
        axes.yaxis.set_major_formatter(PERCENT)
    if "y" in panel.log:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, [y for p in sharing for line in p.lines for y in p.visible(line).y])
    if "x" in panel.log:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, [x for line in panel.lines for x in line.x])
    elif panel.xlabel == ROUND:
        axes.xaxis.set_major_locator(_round_ticks())


def _round_ticks() -> MaxNLocator:
    return MaxNLocator(6, integer=True, steps=[1, 2, 5, 10])


def _log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Plain numbers as ticks, unless they are very small or differ very much."""
    positive = [value for value in values if value > 0]
    if not positive or min(positive) < 1e-3 or max(positive) > 1e5 * min(positive):
        return
    span = max(positive) / min(positive)
    steps = next(steps for most, steps in TICKS.items() if span <= most)
    axis.set_major_locator(LogLocator(subs=steps, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """A number without an exponent, its thousands apart as in the tables."""
    return f"{value:g}" if value < 10_000 else f"{value:,.0f}".replace(",", " ")


def _stroke(style: CurveStyle, *, dashed: bool = False) -> dict[str, Any]:
    line = replace(style, dash="--" if dashed else "-").line
    return {**line, "markersize": 4.5, "linewidth": 1.5}


def _label_style(label: str, number: int) -> CurveStyle:
    """The style of an algorithm if the label is its name or that of a variant, `HWA (examples)`."""
    name = _algorithm(label.partition(" (")[0])
    known = name in figures.CURVE_STYLES
    return CurveStyle(*(figures.curve_style(name) if known else _colour_and_marker(number)), "-")


def _algorithm(label: str) -> str:
    """The name under which the style of a method is found; P1's baselines are `Dec. FedAvg`."""
    return label.lower().removeprefix("dec. ")


def _plot_entries(
    panels: Sequence[Plot], styles: Mapping[str, CurveStyle], kinds: Mapping[str, bool], across: str
) -> list[Artist]:
    """Labels, kinds, bands and levels; a label of dashed lines only is dashed."""
    lines = [line for panel in panels for line in panel.lines]
    solid = {line.label for line in lines if not line.dashed}
    grey = CurveStyle("#444444", "", "-")
    entries = [
        *(_entry(name, _stroke(styles[name], dashed=name not in solid)) for name in styles),
        *(_entry(word, _stroke(grey, dashed=dashed)) for word, dashed in kinds.items()),
    ]
    if any(line.spread for line in lines):
        entries.append(_band_entry("± std"))
    if any(panel.levels for panel in panels):
        entries.append(_entry(across, LEVEL))
    return entries


def _markers(points: int, index: int, count: int) -> tuple[int, int]:
    """First marker and distance of curve `index`: `count` curves alternate along the rounds.

    Equal curves then do not hide each other completely.
    """
    every = max(points // MARKS, 1)
    return min(every * index // count, max(points - 1, 0)), every


def _value_axis(line: Sequence[Axes], key: str, panels: Sequence[Panel]) -> None:
    """The vertical axis of a key, which all panels of a line share."""
    metric = BY_KEY[key]
    line[0].set_ylabel(metric.label)
    values = [value for p in panels for s in p.series for value in s.curve(key).means]
    if metric.scale == "fraction":
        figures.percent_axis(line[0])
    elif metric.scale == "log" or needs_log_scale(values):
        line[0].set_yscale("log")
        positive = [value for value in values if value > 0]
        # A band may reach zero, which a logarithmic axis cannot show.
        line[0].set_ylim(bottom=0.7 * min(positive, default=1.0))


def _round_axis(axes: Axes, rounds: Sequence[Sequence[int]]) -> None:
    axes.set_xlabel(ROUND)
    axes.xaxis.set_major_locator(_round_ticks())
    if not any(map(any, rounds)):
        axes.set_xticks([0])


def _entries(methods: dict[str, CurveStyle], panels: Sequence[Panel]) -> list[Artist]:
    """Legend entries of the methods, of bands and of targets."""
    entries = [_entry(label, style.line) for label, style in methods.items()]
    seeds = {s.seeds for panel in panels for s in panel.series if s.seeds > 1}
    if seeds:
        entries.append(_band_entry(f"± std of {count_text('seed', seeds)}"))
    if any(panel.targets for panel in panels):
        entries.append(_entry("target", TARGET))
    return entries


def _legend_above(figure: Figure, entries: Sequence[Artist]) -> None:
    """A legend with as few lines as fit the width, all about equally long."""
    longest = max((len(str(entry.get_label())) for entry in entries), default=0)
    per_line = max(int(figure.get_figwidth() / (0.5 + 0.075 * longest)), 2)  # inches
    lines = max(math.ceil(len(entries) / per_line), 1)
    columns = max(math.ceil(len(entries) / lines), 1)
    figure.legend(handles=list(entries), loc="outside upper center", ncols=columns)


def _node_line(index: int) -> dict[str, Any]:
    dash = figures.DASHES[index // len(figures.COLOURS)]
    return {**_column(index), "linestyle": dash, "linewidth": 1.2, "markersize": 4.5}


def _table_rows(table: PaperTable) -> tuple[list[float], list[tuple[float, str, bool]]]:
    """The height of each row, and the names beside the axis; True marks the name of a group."""
    heights: list[float] = []
    ticks: list[tuple[float, str, bool]] = []
    for name, numbers in table.groups():
        if name:
            ticks.append((-float(len(ticks)), name, True))
        for number in numbers:
            heights.append(-float(len(ticks)))
            ticks.append((heights[-1], " ".join(table.rows[number][0][1 if name else 0 :]), False))
    return heights, ticks


def _draw_column(
    axes: Axes, table: PaperTable, place: int, heights: Sequence[float], style: dict[str, Any]
) -> None:
    colour = style["color"]
    for y, (_, cells) in zip(heights, table.rows, strict=True):
        cell = cells[place]
        if cell.ours is not None and cell.paper is not None:
            axes.plot([cell.ours, cell.paper], [y, y], color=colour, linewidth=0.9, alpha=0.7)
        if cell.paper is not None:
            # Larger, so that it stays visible around an equal number of ours.
            hollow = {**style, "markerfacecolor": "white", "markersize": 7.5}
            axes.plot(cell.paper, y, zorder=3, **hollow)
        if cell.ours is not None:
            spread = cell.spread or 0.0
            axes.errorbar(cell.ours, y, xerr=spread, **style, elinewidth=2.2, alpha=0.9, zorder=4)


def _colour_and_marker(number: int) -> tuple[str, str]:
    colours, markers = figures.COLOURS, figures.MARKERS
    return colours[number % len(colours)], markers[number % len(markers)]


def _column(number: int) -> dict[str, Any]:
    colour, marker = _colour_and_marker(number)
    return {"color": colour, "marker": marker, "linestyle": "none"}


def _paper_entries(table: PaperTable) -> list[Artist]:
    if not any(cell.paper is not None for _, cells in table.rows for cell in cells):
        return []
    filled: dict[str, Any] = {"color": "#222222", "marker": "o", "linestyle": "none"}
    hollow = {**filled, "markerfacecolor": "white"}
    return [_entry("filled: ours ± std", filled), _entry("hollow: paper", hollow)]


def _table_axis(axes: Axes, table: PaperTable, part: Sequence[int]) -> None:
    cells = [cells[place] for _, cells in table.rows for place in part]
    values = [v for cell in cells for v in (cell.ours, cell.paper) if v is not None]
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    if table.unit == "percent":
        axes.xaxis.set_major_formatter(PERCENT)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.set_xlabel("test accuracy")
    elif table.unit == "rounds" or needs_log_scale(values):
        if values and min(values) > 0:
            axes.set_xscale("log")
            narrow = max(values) < 50 * min(values)
            steps = (1.0, 2.0, 5.0) if narrow else (1.0,)
            axes.xaxis.set_major_locator(LogLocator(subs=steps))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
        axes.set_xlabel("rounds" if table.unit == "rounds" else "count")


def _table_ticks(axes: Axes, ticks: Sequence[tuple[float, str, bool]]) -> None:
    axes.set_yticks([y for y, _, _ in ticks], [literal(name) for _, name, _ in ticks])
    for label, (_, _, group) in zip(axes.get_yticklabels(), ticks, strict=True):
        label.set_fontweight("bold" if group else "normal")
    axes.set_ylim(-len(ticks) + 0.4, 0.6)
