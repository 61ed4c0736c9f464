"""Heat maps of weights and the like, side by side on one scale of colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from peerage.report.figures import STYLE, literal


@dataclass(frozen=True)
class HeatMap:
    """A picture of a matrix, perhaps a smaller one; the axes count rows and columns of the real."""

    title: str
    values: Sequence[Sequence[float]]
    xlabel: str
    ylabel: str
    shape: tuple[int, ...] | None = None  # of the real one: (rows, columns)


def heat_maps(
    panels: Sequence[HeatMap],
    label: str,
    *,
    columns: int = 2,
    height: float = 2.2,
    scale: Literal["around zero", "from zero"] = "from zero",
) -> Figure:
    """Panels in lines of so many columns, each `height` inches high; one colour bar for all."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // max(columns, 1))
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(0.9 + 3.8 * columns, 0.4 + height * lines), layout="constrained")
        grid = figure.subplots(lines, columns, squeeze=False)
        most = max(float(np.abs(panel.values).max()) for panel in panels) or 1.0
        around = scale == "around zero"
        colours, least = ("RdBu_r", -most) if around else ("magma", 0.0)
        for spare in grid.flat[len(panels) :]:
            spare.set_visible(False)
        for axes, panel in zip(grid.flat, panels, strict=False):
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
            axes.set_title(literal(panel.title))
            axes.set_xlabel(literal(panel.xlabel))
            axes.set_ylabel(literal(panel.ylabel))
        bar = figure.colorbar(picture, ax=list(grid.flat), shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(literal(label))
    return figure
