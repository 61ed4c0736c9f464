"""What a notebook shows of an experiment or of runs: small HTML without scripts.

Text and lines have the colour of the page (`currentColor`), and nothing has a background, so that
the output fits light and dark themes. Styles are attributes, as notebooks remove `<style>`.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from peerage.records.rows import RunRecord
from peerage.report import tables
from peerage.report.figures import DASHES, StyledRun, curve_style, styled_runs
from peerage.report.html import headline, lead, notes, where
from peerage.report.series import by_method
from peerage.report.terminal import axis_range

WIDTH, HEIGHT = 560, 240  # of the chart, in pixels
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 8, 34  # margins of the chart
PATTERNS = ("none", "7 4", "8 3 2 3", "2 3")  # of SVG, in the order of `DASHES`
QUIET = "opacity: 0.7"
CELL = "padding: 0.2em 0.8em; border-top: 1px solid rgba(128, 128, 128, 0.4); white-space: nowrap"


def experiment_html(title: str, settings: Mapping[str, Any]) -> str:
    """The settings of an experiment as a table."""
    lines = [[key, tables.setting_text(value)] for key, value in settings.items()]
    return f"<div><b>{escape(title)}</b>{_table([], lines)}</div>"


def runs_html(records: Sequence[RunRecord]) -> str:
    """A sentence about the runs, their table, their accuracy over the rounds, and caveats."""
    rows = tables.compare(records)
    titles, texts = tables.cells(rows)
    if len(records) == 1:  # one run is easier to read as a column
        titles, texts = [], [list(pair) for pair in zip(titles, *texts, strict=True)]
    caveats = "".join(
        f'<p style="margin: 0.2em 0; {QUIET}">{escape(note)}</p>' for note in notes(records)
    )
    methods = by_method(records)
    several = any(method.seeds > 1 for method in methods)
    text = lead(methods, records) if several else headline(rows, where(records))
    return (
        f'<div><p style="margin: 0.2em 0">{escape(text)}</p>'
        f"{accuracy_svg(records)}{_table(titles, texts)}{caveats}</div>"
    )


def accuracy_svg(records: Sequence[RunRecord]) -> str:
    """The mean accuracy over the rounds; empty if no round was evaluated."""
    runs = [
        (_stroke(run), name, list(zip(*run.record.curve("accuracy"), strict=True)))
        for run, name in zip(styled_runs(records), tables.labels(records), strict=True)
    ]
    runs = [(stroke, name, curve) for stroke, name, curve in runs if curve]
    if not runs:
        return ""
    values = [value for *_, curve in runs for _, value in curve]
    last = max(place for *_, curve in runs for place, _ in curve)
    low, high, step = axis_range(values, 12)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(round: float, value: float) -> tuple[float, float]:
        x = LEFT + width * round / max(last, 1)
        return x, TOP + height * (high - value) / (high - low)

    parts = []
    for number in range(round((high - low) / step) + 1):
        value = low + number * step
        y = place(0, value)[1]
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="currentColor" stroke-opacity="0.2"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">'
            f"{tables.percent(value, 1 if step < 0.01 else 0)}</text>"
        )
    for tick in sorted({0, last // 2, last}):
        x = place(tick, low)[0]
        anchor = "end" if tick == last and last else "middle"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 18}" text-anchor="{anchor}">{tick}</text>')
    parts.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 3}" text-anchor="middle">round</text>')
    for stroke, name, curve in runs:
        points = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in curve)
        parts.append(
            f'<polyline points="{points}" fill="none" {stroke}><title>{escape(name)}</title>'
            "</polyline>"
        )
    names = [name for _, name, _ in runs]
    legend = " ".join(
        '<span style="white-space: nowrap; margin-right: 1em"><svg width="28" height="8">'
        f'<line x1="0" x2="28" y1="4" y2="4" {stroke}/></svg> {escape(name)}</span>'
        for stroke, name, _ in runs
    )
    label = escape(f"Accuracy over the rounds: {', '.join(names)}", quote=True)
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'style="max-width: 100%; height: auto" fill="currentColor" font-size="12" '
        f'font-family="inherit">{"".join(parts)}</svg><div>{legend}</div>'
    )


def _stroke(run: StyledRun) -> str:
    """The line of a curve. Shades of a colour may be too dark for a page, so only dashes differ."""
    colour, dashes = curve_style(run.record.algorithm)[0], PATTERNS[DASHES.index(run.dash)]
    return f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th style="{CELL}; text-align: left">{escape(text)}</th>' for text in titles)
    body = "".join(
        "<tr>"
        + "".join(f'<td style="{CELL}; text-align: left">{escape(text)}</td>' for text in line)
        + "</tr>"
        for line in lines
    )
    return (
        '<div style="overflow-x: auto"><table style="border-collapse: collapse; margin: 0.4em 0; '
        'color: inherit; font-size: inherit">'
        f"{f'<thead><tr>{head}</tr></thead>' if titles else ''}<tbody>{body}</tbody></table></div>"
    )
