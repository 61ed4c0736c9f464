"""A figure of a graph: nodes and links, a histogram of degrees, and the main numbers."""

import math
from pathlib import Path
from typing import Any

import matplotlib
import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from peerage.errors import DiskError, InputError
from peerage.graphs.graph import Graph, degrees, is_connected
from peerage.graphs.mixing import GraphReport, describe

FORMATS = (".png", ".svg")
LABELLED_NODES = 60  # more ids than this are not legible
STRESS_NODES = 150  # limit of the layout by distances, whose cost grows as n^3
COLOURS = "viridis"


def plot(graph: Graph, path: str | Path) -> None:
    """Draw the graph of round 0 into a PNG or SVG file; equal graphs give equal files."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise InputError(f"cannot draw into {target.name!r}; use a name ending in .png or .svg")
    if not target.parent.is_dir():
        raise InputError(f"the folder {target.parent} does not exist; create it first")
    figure = draw(graph)
    # Without date and version, equal figures give equal files.
    metadata: Any = {"Date" if target.suffix.lower() == ".svg" else "Software": None}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "peerage"}):
            figure.savefig(target, dpi=150, metadata=metadata)
    except OSError as error:
        raise DiskError(f"cannot write {target}: {error.strerror}") from None


def caption(report: GraphReport) -> str:
    """The main numbers, in two lines."""
    is_bound = not (report.mixing_time_exact or math.isnan(report.mixing_time))
    mixing = "at most " if is_bound else ""
    low, high = (f(report.component_gains, default=math.nan) for f in (min, max))
    if report.connected:
        gain = f"gain {_number(low, '.3f')}"
    else:
        span = f"{_number(low, '.3f')} to {_number(high, '.3f')}"
        gain = f"{report.components} components with gains {span}"
    speed = (
        f"spectral gap {_number(report.spectral_gap, '.4g')}, "
        f"relaxation time {_rounds(report.relaxation_time)}, "
        f"mixing time {mixing}{_rounds(report.mixing_time)}"
    )
    reach = f", diameter {report.diameter}" if report.diameter is not None else ""
    return f"{gain}, {_degree(report)}{reach}\n{speed}"


def _degree(report: GraphReport) -> str:
    low, high = report.degree_min, report.degree_max
    return (
        f"degree {low}"
        if low == high
        else f"mean degree {report.degree_mean:.4g} ({low} to {high})"
    )


def _number(value: float, digits: str) -> str:
    """The value as text; some values of very large and of directed graphs are unknown."""
    return "unknown" if math.isnan(value) else f"{value:{digits}}"


def _rounds(value: float) -> str:
    if math.isinf(value):
        return "infinite"
    return f"{value:,}" if isinstance(value, int) else _number(value, ".4g")


def draw(graph: Graph) -> Figure:
    """A picture of the graph of round 0, its degrees and its main numbers."""
    report = describe(graph)
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    nodes = _draw_graph(left, graph)
    bar = figure.colorbar(nodes, ax=left, label="degree", shrink=0.8)
    bar.locator = MaxNLocator(integer=True, nbins=8, min_n_ticks=1)
    _draw_histogram(right, report)
    prefix = "round 0 of a dynamic graph: " if graph.dynamic else ""
    figure.suptitle(f"{prefix}{_count(report.nodes, 'node')}, {_count(report.edges, 'edge')}")
    figure.supxlabel(caption(report), fontsize=10)
    return figure


def _draw_graph(axes: Axes, graph: Graph) -> PathCollection:
    at = _positions(graph)  # [n, 2]
    k = degrees(graph)
    edges = graph.edges()
    axes.add_collection(
        LineCollection(
            [at[[i, j]] for i, j in edges],
            colors="0.3",
            linewidths=0.8,
            alpha=min(0.8, 8 / math.sqrt(len(edges) + 1)),
            zorder=1,
        )
    )
    # Half a degree beyond the extremes, so that regular graphs have a scale too.
    nodes = axes.scatter(
        at[:, 0],
        at[:, 1],
        c=k,
        s=min(220, max(6, 9000 / graph.nodes)),
        cmap=COLOURS,
        vmin=k.min() - 0.5,
        vmax=k.max() + 0.5,
        edgecolors="white",
        linewidths=0.6,
        zorder=2,
    )
    if graph.nodes <= LABELLED_NODES:
        middle = (k.min() + k.max()) / 2
        for node, (x, y) in enumerate(at):
            colour = "black" if k[node] > middle else "white"
            axes.text(x, y, str(node), color=colour, fontsize=7, ha="center", va="center")
    axes.set_aspect("equal")
    axes.margins(0.06)
    axes.set_axis_off()
    return nodes


def _draw_histogram(axes: Axes, report: GraphReport) -> None:
    k = list(report.degree_histogram)
    axes.bar(k, list(report.degree_histogram.values()), width=0.9, color="#3b6e8f")
    axes.set_xlabel("degree")
    axes.set_ylabel("nodes")
    margin = max(1, 3 - (max(k) - min(k)) / 2)  # a single bar does not fill the axes
    axes.set_xlim(max(min(k) - margin, -0.75), max(k) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)


def _positions(graph: Graph) -> NDArray[np.float64]:
    """Positions [n, 2] of the nodes, which depend only on the graph."""
    drawn = graph.networkx()
    centre = [node for node, others in enumerate(graph.neighbours(0)) if len(others) > 1]
    if len(centre) == 1:  # a star; other layouts place its leaves at uneven distances
        at = nx.shell_layout(drawn, [centre, [node for node in drawn if node not in centre]])
    elif graph.nodes <= STRESS_NODES and is_connected(graph):
        at = nx.kamada_kawai_layout(drawn)
    else:
        at = nx.spring_layout(drawn, k=2 / math.sqrt(graph.nodes), seed=0)
    return np.array([at[node] for node in range(graph.nodes)])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
