"""A report as PDF: pages of A4 with the text, tables and figures of the HTML page.

Matplotlib draws all of it. A figure is drawn into the page where there is room; it stays vectors.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.backend_bases import RendererBase
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from peerage.errors import InputError
from peerage.files import write_bytes
from peerage.records.rows import RunRecord
from peerage.report import fairness_tables, html, seeds, tables
from peerage.report.figures import FORMATS, STYLE
from peerage.report.pictures import PARTS, Picture, pictures
from peerage.report.series import by_method

WIDTH, HEIGHT = 8.27, 11.69  # A4, in inches
MARGIN = 0.75
ROOM = WIDTH - 2 * MARGIN
COLUMNS = 4  # runs or methods beside each other in a table
TEXT, SMALL, HEADING, TITLE = 9.0, 8.0, 12.0, 17.0  # points
LEADING = 1.4  # line height / font size
FLAT = 0.82  # of the height of a figure in the page, so that three fit
GREY = "#666666"


def write_pdf(
    records: Sequence[RunRecord], out: Path, show: "html.Show[Picture] | None" = None
) -> None:
    """Write the report atomically; equal runs give equal bytes."""
    if not records:
        raise InputError("a report needs at least one run; give the folder of a run")
    with matplotlib.rc_context(STYLE):
        document = _Document()
        _front(document, records)
        found = pictures(records)
        found.sort(key=lambda picture: PARTS.index(picture.part))
        part = ""
        for picture in found if show is None else show(found, "figures", len(found)):
            document.picture(picture, picture.part if picture.part != part else "")
            part = picture.part
        _settings(document, records)
        content = document.content()
    write_bytes(Path(out), content, "write the report again")


def _front(document: "_Document", records: Sequence[RunRecord]) -> None:
    """Title, summary, what was run, and the tables of results."""
    rows = tables.compare(records)
    found = by_method(records)
    several = any(method.seeds > 1 for method in found)
    document.text(html.title(records), TITLE, weight="bold")
    where = html.where(records)
    document.text(html.lead(found, records) if several else html.headline(rows, where), 10.5)
    for note in html.notes(records):
        document.text(f"- {note}", SMALL, colour=GREY)
    document.heading("What was run")
    for method in found:
        document.text(html.story(method.records[0], method.seeds), TEXT)
    document.heading("Result")
    methods = seeds.MethodTable.of(found)
    titles, texts = tables.cells(rows)
    document.table(methods.lines() if several else [titles, *texts])
    document.heading("Rounds and bytes to targets")
    document.table(methods.targets())
    if seeds.comparable(records):
        document.heading("Paired differences")
        document.table(seeds.difference_lines(found))
    fairness = fairness_tables.lines(records)
    if fairness:
        document.heading(fairness_tables.TITLE)
        document.table(fairness)


def _settings(document: "_Document", records: Sequence[RunRecord]) -> None:
    """Data, graph and environment of the first run, and how to repeat every run."""
    first = records[0]
    ending = "" if len(records) == 1 else f" of {tables.labels(records)[0]}"
    for name, table in (
        ("Data and graph", html.facts(first)),
        ("Environment", html.environment(first)),
        ("Settings", tables.settings(first)),
    ):
        document.heading(name + ending)
        for key, value in table.items():
            document.text(f"{key}: {value}", SMALL)
    document.heading("Reproduce")
    for label, record in zip(tables.labels(records), records, strict=True):
        digest = record.summary.get("digest") or "none: the run did not finish"
        for line in (label, *html.commands(record), f"digest {digest}"):
            document.text(line, SMALL)


@dataclass
class _Document:
    """Pages that are filled from the top; `y` is the free height above the bottom of the last."""

    pages: list[Figure] = field(default_factory=list)
    y: float = 0.0

    def text(
        self, text: str, size: float, *, weight: str = "normal", colour: str = "#222222"
    ) -> None:
        """A paragraph, wrapped to the width of the page."""
        width = int(ROOM * 72 / (0.56 * size))  # characters, with the mean width of this font
        for line in textwrap.wrap(text, width) or [""]:
            self._line([(0.0, line)], size, weight, colour)
        self.y -= 0.04

    def heading(self, text: str) -> None:
        self._need(1.0)
        self.y -= 0.16
        self._line([(0.0, text)], HEADING, "bold", "#222222")
        self.y -= 0.05

    def table(self, lines: Sequence[Sequence[str]]) -> None:
        """Runs or methods as columns, so many that they fit."""
        titles, *others = lines
        for start in range(0, len(others), COLUMNS):
            columns = [titles, *others[start : start + COLUMNS]]
            for place, cells in enumerate(zip(*columns, strict=True)):
                offsets = [0.0, *(2.4 + 1.15 * n for n in range(len(cells) - 1))]
                parts = list(zip(offsets, map(_short, cells), strict=True))
                self._line(parts, SMALL, "bold" if place == 0 else "normal", "#222222", rule=True)
            self.y -= 0.1

    def picture(self, picture: Picture, part: str) -> None:
        """A figure with its title and caption, on the next page if it does not fit here."""
        figure = picture.draw()
        width, height = figure.get_size_inches()
        height = min(height * (ROOM / width if picture.wide else FLAT), 8.0)
        width = ROOM if picture.wide else min(width, ROOM)
        caption = textwrap.wrap(picture.caption, int(ROOM * 72 / (0.56 * SMALL)))
        text = (len(caption) * SMALL + 1.5 * TEXT) * LEADING / 72
        self._need(height + text + (0.6 if part else 0.1))
        if part:
            self.heading(part)
        self._line([(0.0, picture.title)], TEXT, "bold", "#222222")
        self.y -= height
        self.pages[-1].add_artist(_Drawn(figure, MARGIN, self.y, width, height))
        for line in caption:
            self._line([(0.0, line)], SMALL, "normal", GREY)
        self.y -= 0.15

    def content(self) -> bytes:
        """The file."""
        result = io.BytesIO()
        metadata: Any = dict.fromkeys(FORMATS[".pdf"])
        with PdfPages(result, metadata=metadata) as file:
            for number, page in enumerate(self.pages, start=1):
                page.text(0.5, 0.03, str(number), ha="center", fontsize=SMALL, color=GREY)
                file.savefig(page)
        return result.getvalue()

    def _line(
        self,
        parts: Sequence[tuple[float, str]],
        size: float,
        weight: str,
        colour: str,
        rule: bool = False,
    ) -> None:
        """One line of texts at distances from the left margin, in inches."""
        high = LEADING * size / 72
        self._need(high)
        self.y -= high
        page = self.pages[-1]
        for right, text in parts:
            style: Any = {"fontsize": size, "weight": weight, "color": colour, "parse_math": False}
            page.text((MARGIN + right) / WIDTH, self.y / HEIGHT, text, va="baseline", **style)
        if rule:
            at = (self.y - 0.045) / HEIGHT
            ends = [MARGIN / WIDTH, 1 - MARGIN / WIDTH]
            page.add_artist(Line2D(ends, [at, at], color="#DDDDDD", linewidth=0.5))

    def _need(self, height: float) -> None:
        """Begin a page unless there is so much room on this one."""
        if not self.pages or self.y - height < MARGIN:
            self.pages.append(Figure(figsize=(WIDTH, HEIGHT)))
            self.y = HEIGHT - MARGIN


class _Drawn(Artist):
    """A figure as part of a page."""

    def __init__(self, inner: Figure, left: float, bottom: float, wide: float, high: float) -> None:
        super().__init__()
        inner.set_size_inches(wide, high)
        inner.set_dpi(72)  # the unit of PDF
        # All of a figure is placed relative to this box.
        inner.bbox_inches.set(Bbox.from_bounds(left, bottom, wide, high))
        inner.patch.set_visible(False)
        for artist in inner.findobj():
            artist.set_rasterized(False)  # a bitmap would have the place that it has in its figure
        self.inner = inner

    def draw(self, renderer: RendererBase) -> None:
        self.inner.draw(renderer)


def _short(text: str) -> str:
    """A text that fits a column of a table."""
    return text if len(text) <= 44 else f"{text[:43]}…"
