"""A figure of the diffusion model: the two deviations, their limits, and the stable round."""

from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from peerage.graphs.diffusion import Diffusion, Double
from peerage.report.figures import BLUE, RED, SIZE, STYLE, CurveStyle, space_labels

BLACK = "#222222"
LABEL_HEIGHT = 0.13  # of two lines, as a share of the axes


class Part(NamedTuple):
    """One of the two deviations."""

    name: str
    values: Double
    limit: float | None
    exact: bool  # otherwise the limit is a lower bound
    style: CurveStyle
    dashes: tuple[int, ...]  # of the limit, so that both differ in grey


def deviation_curves(result: Diffusion) -> Figure:
    """sigma_ap and sigma_an over the rounds, dashed limits, and a mark where sigma_an is stable."""
    parts = [
        Part(r"over parameters $\sigma_{ap}$", result.sigma_ap, result.limit_ap, True,
             CurveStyle(RED, "s", "-"), (6, 3)),
        Part(r"over nodes $\sigma_{an}$", result.sigma_an, result.limit_an,
             result.limit_an_exact, CurveStyle(BLUE, "o", "-"), (6, 2, 1, 2)),
    ]  # fmt: skip
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        axes.set_yscale("log")
        for part in parts:
            _draw(axes, part)
        if result.stabilisation:  # no mark in round 0
            _mark_stable_round(axes, result, result.stabilisation)
        axes.set_xlim(-0.02 * result.rounds, 1.02 * result.rounds)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("round")
        axes.set_ylabel("standard deviation")
        axes.set_title(_title(result), loc="left")
        _label_curves(axes, parts)
    return figure


def _draw(axes: Axes, part: Part) -> None:
    x = np.arange(len(part.values))
    positive = np.where(part.values > 0, part.values, np.nan)  # a logarithmic axis has no zero
    axes.plot(x, positive, markevery=max(len(x) // 8, 1), **part.style.line)
    if part.limit:
        axes.axhline(
            part.limit,
            color=part.style.colour,
            linestyle=(0, part.dashes),
            linewidth=1.3,
            zorder=1,
        )


def _mark_stable_round(axes: Axes, result: Diffusion, round: int) -> None:
    """Draw a dotted line, the round number, and a diamond on the curve."""
    late = round > 0.7 * result.rounds
    axes.axvline(round, color=BLACK, linestyle=":", linewidth=1.2, zorder=1)
    axes.annotate(
        f"stable from\nround {round}",
        (round, 0.98),
        xycoords=("data", "axes fraction"),
        xytext=(-5 if late else 5, 0),
        textcoords="offset points",
        ha="right" if late else "left",
        va="top",
        fontsize=9,
        color=BLACK,
    )
    if result.sigma_an[round] > 0:
        axes.plot(round, result.sigma_an[round], marker="D", markersize=7, color=BLACK, zorder=4)


def _label_curves(axes: Axes, parts: list[Part]) -> None:
    """Write the name and the predicted limit beside the end of each curve."""
    axes.autoscale_view()  # the transformation does not update the lazy axis limits
    to_axes = axes.transScale + axes.transLimits
    ends = [float(part.values[-1]) for part in parts]
    heights = [float(to_axes.transform((0, end))[1]) if end > 0 else 0.0 for end in ends]
    for part, end, height in zip(parts, ends, space_labels(heights, LABEL_HEIGHT), strict=True):
        zero = "" if end > 0 else ": 0"
        above = "" if part.exact else "above "
        limit = f"\npredicted {above}{_short(part.limit)}" if part.limit else ""
        axes.annotate(
            part.name + zero + limit,
            (1.02, height),
            xycoords="axes fraction",
            va="center",
            color=part.style.colour,
            annotation_clip=False,
        )


def _title(result: Diffusion) -> str:
    nodes = f"{result.graph.nodes:,} node" + ("" if result.graph.nodes == 1 else "s")
    return f"{nodes}, {result.parameters} parameters, noise {_short(result.noise)}"


def _short(number: float) -> str:
    return f"{number:.2g}".replace("e-0", "e-")
