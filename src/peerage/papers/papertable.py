"""A table of a paper with our numbers beside it, as Markdown, CSV, JSON and terminal text."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from peerage.errors import InputError
from peerage.report.statistics import LEVEL, significant
from peerage.report.tables import pipe_table, table_width

NUMBERS = ("ours", "spread", "paper", "paper_spread", "difference")
HEADINGS = {1: ("column",), 2: ("group", "column")}  # of the header levels, in CSV
P_VALUE: Final = "p-value"
Unit = Literal["percent", "rounds", "count", "loss", "number", "gap", "index", "share", "p-value"]
UNITS: dict[Unit, tuple[int, str]] = {  # decimal places and meaning
    "percent": (2, "Accuracy in percent"),
    "rounds": (0, "Communication rounds"),
    "count": (0, "Counts"),
    "loss": (3, "Test loss (cross-entropy)"),
    "number": (3, "Numbers"),
    "index": (4, "Indices between 0 and 1"),
    "share": (1, "Shares in percent"),
    "gap": (4, "Gaps between clusters as fractions"),
    P_VALUE: (4, "p-values"),
}


@dataclass(frozen=True)
class Cell:
    """Our mean and deviation over seeds, and those of the paper; None means no value."""

    ours: float | None
    spread: float | None = None
    paper: float | None = None
    paper_spread: float | None = None
    note: str = ""
    unit: Unit | None = None  # if not that of the table

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.paper is None or self.unit == P_VALUE:
            return None
        return self.ours - self.paper


Row = tuple[tuple[str, ...], tuple[Cell, ...]]  # titles, and one cell per column


@dataclass(frozen=True)
class PaperTable:
    """Rows of titles and cells below columns of one or two header levels, outermost first.

    Accuracies (unit `percent`) and shares are stored as fractions and shown in percent. In a group
    with a row of p-values, the best value is marked only if the p of its column is significant.
    """

    title: str
    row_titles: tuple[str, ...]  # e.g. ("Dir", "Method"); the first of two makes groups
    columns: tuple[tuple[str, ...], ...]  # one entry per column, e.g. ("MNIST", "50 %")
    rows: tuple[Row, ...]
    unit: Unit
    best: Literal["max", "min"] | None = None
    lowest: tuple[str, ...] = ()  # columns in which the lowest number is the best, if any is marked
    notes: tuple[str, ...] = ()
    spread: str = "standard deviation over seeds"  # the meaning of a plus-minus
    digits: int | None = None  # decimal places; None: those of the unit

    def __post_init__(self) -> None:
        levels = {len(column) for column in self.columns}
        if len(levels) != 1 or not levels <= set(HEADINGS):
            raise InputError(
                f"columns of table {self.title!r} must all have one header level or all have two, "
                f"got {self.columns}"
            )
        for titles, cells in self.rows:
            if len(titles) != len(self.row_titles) or len(cells) != len(self.columns):
                raise InputError(
                    f"row {titles} of table {self.title!r} has {len(cells)} cells; give "
                    f"{len(self.row_titles)} titles and {len(self.columns)} cells"
                )

    def markdown(self, level: int = 2) -> str:
        """A heading of this level, a legend, and one table per outer column."""
        parts = [f"{'#' * level} {self.title}\n", f"{self.legend('**Bold**')}\n"]
        for name, places in self.parts():
            lines = [[*self.row_titles, *(self.columns[p][-1] for p in places)]]
            for number, (titles, _) in enumerate(self.rows):
                marked = [f"**{text}**" if bold else text for text, bold in self._ours(number)]
                beside = self._beside(number)
                texts = [_joined(marked[p], beside[p]) for p in places]
                # The star of a name such as DecHW* is no emphasis.
                names = [title.replace("*", "\\*") for title in self._shown(number, titles)]
                lines.append([*names, *texts])
            heading = f"{'#' * (level + 1)} {name}\n\n" if name else ""
            parts.append(heading + pipe_table(lines, left=len(self.row_titles)))
        remarks = "".join(f"- {text}\n" for text in self.remarks())
        return "\n".join([*parts, remarks] if remarks else parts)

    def csv(self) -> str:
        """One line per cell; a missing value is an empty field."""
        heads = HEADINGS[len(self.columns[0])]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*self.row_titles, *heads, *NUMBERS, "note"])
        for titles, column, cell in self._cells():
            numbers = [getattr(cell, key) for key in NUMBERS]
            writer.writerow([*titles, *column, *numbers, cell.note])
        return text.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """For JSON: a list of cells, each with its row and column."""
        cells = [
            {"row": dict(zip(self.row_titles, titles, strict=True)), "column": list(column)}
            | {key: getattr(cell, key) for key in NUMBERS}
            | {"note": cell.note}
            for titles, column, cell in self._cells()
        ]
        head = {"title": self.title, "unit": self.unit, "best": self.best}
        return {**head, "notes": list(self.notes), "cells": cells}

    def rich(self, width: int = 80) -> Group:
        """For a terminal: the widest layout that fits."""
        for tables in self._layouts():
            if max(map(table_width, tables)) <= width:
                break
        head = [Text(self.title, style="bold"), Text(self.legend(), style="dim")]
        remarks = [Text(f"- {text}", style="dim") for text in self.remarks()]
        return Group(*head, *tables, *remarks)

    def parts(self) -> list[tuple[str, list[int]]]:
        """Adjacent columns with the same outer header: its name and their numbers."""
        return _adjacent(self.columns)

    def groups(self) -> list[tuple[str, list[int]]]:
        """Adjacent rows with the same first of two titles: its name and their numbers."""
        return _adjacent([titles for titles, _ in self.rows])

    def legend(self, bold: str = "Bold") -> str:
        """One line that explains the cells."""
        cells = [cell for _, _, cell in self._cells()]
        ours = "ours"
        if any(cell.spread is not None for cell in cells):
            ours += f" ± {self.spread}"
        if any(cell.paper is not None for cell in cells):
            ours += " (paper, difference)"
        others = dict.fromkeys(cell.unit for cell in cells if cell.unit not in (None, P_VALUE))
        units = [UNITS[unit][1] for unit in (self.unit, *others) if unit is not None]
        text = "; ".join([units[0], *(unit[0].lower() + unit[1:] for unit in units[1:])])
        text += f". Each cell: {ours}."
        if self.best is not None and any(len(numbers) > 1 for _, numbers in self.groups()):
            where = "column" if len(self.row_titles) == 1 else "column and group"
            tested = any(cell.unit == P_VALUE for cell in cells)
            text += f" {bold}: best of ours per {where}{f', if p < {LEVEL:g}' if tested else ''}."
        if any(cell.ours is None and cell.unit != P_VALUE for cell in cells):
            text += " -: not reached or not run."
        return text

    def remarks(self) -> list[str]:
        """Numbered notes of the cells, then the notes of the table."""
        return [*(f"[{n}] {text}" for text, n in self._footnotes().items()), *self.notes]

    def number(self, value: float | None, *, sign: bool = False, unit: Unit | None = None) -> str:
        """A value as text; a missing one is a dash."""
        if value is None:
            return "-"
        if (unit or self.unit) == P_VALUE:
            return f"{value:.3g}"  # its order of magnitude matters
        shown = self._rounded(value, unit)
        return f"{shown:{'+' if sign else ''},.{self._digits(unit)}f}".replace(",", " ")

    def is_best(self, row: int, place: int) -> bool:
        """Whether our number, as rounded for display, is the best of its column and group."""
        members = next(numbers for _, numbers in self.groups() if row in numbers)
        cells = [self.rows[number][1][place] for number in members]
        tests = [cell for cell in cells if cell.unit == P_VALUE]
        values = [cell.ours for cell in cells if cell.unit != P_VALUE]
        cell = self.rows[row][1][place]
        known = [self._rounded(value, cell.unit) for value in values if value is not None]
        if self.best is None or cell.ours is None or cell.unit == P_VALUE or len(values) < 2:
            return False
        if not all(significant(test.ours) for test in tests):
            return False
        lowest = self.best == "min" or self.columns[place][-1] in self.lowest
        return self._rounded(cell.ours, cell.unit) == (min(known) if lowest else max(known))

    def _digits(self, unit: Unit | None) -> int:
        """Decimal places; `unit` is that of a cell, if it has its own."""
        if unit not in (None, self.unit):
            return UNITS[unit or self.unit][0]
        return UNITS[self.unit][0] if self.digits is None else self.digits

    def _rounded(self, value: float, unit: Unit | None) -> float:
        percent = 100 if (unit or self.unit) in ("percent", "share") else 1
        return round(percent * value, self._digits(unit)) + 0.0  # never -0

    def _cells(self) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], Cell]]:
        for titles, cells in self.rows:
            for column, cell in zip(self.columns, cells, strict=True):
                yield titles, column, cell

    def _footnotes(self) -> dict[str, int]:
        texts = dict.fromkeys(cell.note for _, _, cell in self._cells() if cell.note)
        return {text: number for number, text in enumerate(texts, start=1)}

    def _ours(self, row: int) -> list[tuple[str, bool]]:
        """Our number in each cell of a row, and whether it is the best."""
        texts = []
        for place, cell in enumerate(self.rows[row][1]):
            text = self.number(cell.ours, unit=cell.unit)
            if cell.ours is not None and cell.spread is not None:
                text += f" ± {self.number(cell.spread, unit=cell.unit)}"
            texts.append((text, self.is_best(row, place)))
        return texts

    def _beside(self, row: int) -> list[str]:
        """The text after our number in each cell: the paper's, the difference, a note's number."""
        notes, texts = self._footnotes(), []
        for place, cell in enumerate(self.rows[row][1]):
            compared = any(cells[place].paper is not None for _, cells in self.rows)
            parts = [self.number(cell.paper, unit=cell.unit)]
            if cell.difference is not None:
                parts.append(self.number(cell.difference, sign=True, unit=cell.unit))
            known = compared and (cell.ours, cell.paper) != (None, None)
            text = f"({', '.join(parts)})" if known else ""
            texts.append(_joined(text, f"[{notes[cell.note]}]" if cell.note else ""))
        return texts

    def _shown(self, number: int, titles: tuple[str, ...]) -> tuple[str, ...]:
        """The row titles; only the first row of a group shows its name."""
        first = any(numbers[0] == number for _, numbers in self.groups())
        return titles if first or len(titles) == 1 else ("", *titles[1:])

    def _layouts(self) -> Iterator[list[Table]]:
        everything = list(range(len(self.columns)))
        for folded in (False, True):
            yield [self._table("", everything, folded=folded)]
            if len(self.parts()) > 1:
                yield [self._table(name, part, folded=folded) for name, part in self.parts()]
        for size in range(max(len(part) for _, part in self.parts()) - 1, 0, -1):
            yield [
                self._table(name, part[start : start + size], folded=True)
                for name, part in self.parts()
                for start in range(0, len(part), size)
            ]

    def _table(self, name: str, places: Sequence[int], *, folded: bool) -> Table:
        """A terminal table; folded cells have our number above the paper's, at half the width."""
        table = Table(title=name or None, title_justify="left", title_style="bold")
        for title in self.row_titles:
            table.add_column(Text(title), no_wrap=True)
        for place in places:
            levels = self.columns[place][-1:] if name else self.columns[place]
            table.add_column(Text("\n".join(levels)), justify="right", no_wrap=True)
        ends = {numbers[-1] for _, numbers in self.groups()}
        for number, (titles, _) in enumerate(self.rows):
            ours, beside = self._ours(number), self._beside(number)
            texts = [_styled(*ours[p], beside[p], "\n" if folded else " ") for p in places]
            shown = map(Text, self._shown(number, titles))
            table.add_row(*shown, *texts, end_section=number in ends)
        return table


def _adjacent(titles: Sequence[tuple[str, ...]]) -> list[tuple[str, list[int]]]:
    """Places of adjacent titles with the same first of two levels; one level has no name."""
    names = [levels[0] if len(levels) > 1 else "" for levels in titles]
    by_name = groupby(range(len(names)), key=names.__getitem__)
    return [(name, list(places)) for name, places in by_name]


def _joined(*texts: str) -> str:
    return " ".join(text for text in texts if text)


def _styled(ours: str, bold: bool, beside: str, gap: str) -> Text:
    text = Text(ours, style="bold" if bold else "")
    return text.append(f"{gap}{beside}", style="not bold dim") if beside else text
