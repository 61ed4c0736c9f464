"""Figures as parts of a page: SVG that follows light and dark, and values under the pointer.

Matplotlib's colours become variables of the page (`--c-0072b2`), which have another value in the
dark. Text stays text. The points of the curves are stored with their places in the drawing, so that
a script can show their values.
"""

import colorsys
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from peerage.report.figures import COLOURS, render, tint

DARK_PAGE = "#1d2229"  # behind figures, as in template.html
DARK_TEXT = "#e6e9ee"
POINTS = 300  # of a curve that are shown under the pointer
CONTRAST = 3.5
GREY = 0.06  # colours with less saturation are greys: text, axes, grids and backgrounds
COLOUR = re.compile(r"#[0-9a-f]{6}\b")
# The colours of curves and bars; those of a colour scale keep their meaning in the dark.
SHADES = (0.0, -0.45, 0.4, -0.75, 0.5, 0.6)
PALETTE = {
    tint(tint(colour, shade), amount).lower()
    for colour in COLOURS
    for shade in SHADES
    for amount in (0.0, -0.25)
}


@dataclass(frozen=True)
class Drawing:
    """A figure in a page: its SVG, and its curves for the script."""

    svg: Markup
    curves: str  # JSON
    colours: frozenset[str]


def drawing(figure: Figure, name: str) -> Drawing:
    """Render a figure; `name` makes the ids in it unique within the page."""
    text = render(figure, "svg", svg_fonttype="none", svg_hashsalt=name).decode()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    text = re.sub(r' (xmlns(:\w+)?|version)="[^"]*"', "", text)
    head, rest = text.split(">", 1)
    text = re.sub(r' (width|height)="[^"]*"', "", head) + ">" + rest
    text = text.replace("xlink:href", "href").replace("\n", " ")
    text = re.sub(r" {2,}", " ", text)
    found = {colour for colour in COLOUR.findall(text) if changes(colour)}
    text = COLOUR.sub(lambda match: variable(match[0]) if match[0] in found else match[0], text)
    return Drawing(Markup(text), json.dumps(hover(figure)), frozenset(found))


def variable(colour: str) -> str:
    """The variable of the page for a colour.

    >>> variable("#0072B2")
    'var(--c-0072b2)'
    """
    return f"var(--c-{colour.lower()[1:]})"


def variables(colours: Iterable[str]) -> tuple[str, str]:
    """Definitions of these colours' variables for the light, and for the dark."""
    known = sorted({colour.lower() for colour in colours})
    light = " ".join(f"--c-{colour[1:]}: {colour};" for colour in known)
    return light, " ".join(f"--c-{colour[1:]}: {in_the_dark(colour)};" for colour in known)


def changes(colour: str) -> bool:
    """Whether a colour has another value in the dark."""
    return colour in PALETTE or _saturation(colour) < GREY


def in_the_dark(colour: str) -> str:
    """The colour on a dark page: greys are reversed, and dark colours become lighter."""
    if _saturation(colour) < GREY:
        light = (max(to_rgb(colour)) - 0.13) / 0.87  # 0 for text, 1 for the background
        share = min(max(light, 0.0), 1.0)
        parts = zip(to_rgb(DARK_TEXT), to_rgb(DARK_PAGE), strict=True)
        red, green, blue = ((1 - share) * text + share * page for text, page in parts)
        return to_hex((red, green, blue))
    amount = 0.0
    while contrast(tint(colour, amount), DARK_PAGE) < CONTRAST and amount < 0.9:
        amount += 0.1
    return tint(colour, amount)


def contrast(one: str, other: str) -> float:
    """The ratio of the luminances of two colours, from 1 to 21 (WCAG 2).

    >>> round(contrast("#ffffff", "#000000"), 1)
    21.0
    """
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return sum(f * part for f, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def _saturation(colour: str) -> float:
    return colorsys.rgb_to_hsv(*to_rgb(colour))[1]


def hover(figure: Figure) -> list[dict[str, Any]]:
    """Of each axes with curves: its box in the drawing, and the curves with their values.

    A point is x, y in the drawing, and the texts of x and y. The figure must have been drawn.
    """
    found = [_curves(figure, axes) for axes in figure.axes]
    return [axes for axes in found if axes["curves"]]


def _curves(figure: Figure, axes: Axes) -> dict[str, Any]:
    width, height = 72 * figure.get_figwidth(), 72 * figure.get_figheight()
    box = axes.get_position()
    to_axes = axes.transScale + axes.transLimits
    curves = []
    for line in axes.get_lines():
        label, x, y = str(line.get_label()), *line.get_data()
        pairs = list(zip(np.asarray(x, dtype=float), np.asarray(y, dtype=float), strict=True))
        if label.startswith("_") or len(pairs) < 2:
            continue
        step = -(-len(pairs) // POINTS)
        points = []
        for one, other in [*pairs[:-1:step], pairs[-1]]:
            right, up = to_axes.transform((one, other))
            points.append(
                [
                    round(width * (box.x0 + right * box.width), 1),
                    round(height * (1 - box.y0 - up * box.height), 1),
                    axes.format_xdata(one),
                    axes.format_ydata(other),
                ]
            )
        colour = to_hex(line.get_color()).lower()
        shown = variable(colour) if changes(colour) else colour
        curves.append({"name": label.replace(r"\$", "$"), "colour": shown, "points": points})
    sides = (width * box.x0, height * (1 - box.y1), width * box.x1, height * (1 - box.y0))
    return {"box": [round(side, 1) for side in sides], "curves": curves}
