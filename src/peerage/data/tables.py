"""Tables of numbers in CSV files, with the names of their columns."""

import csv
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path

import numpy as np

from peerage.data.tensors import Dataset, in_memory
from peerage.errors import DataError, check_at_least, did_you_mean

SEPARATORS = (",", ";", "\t")
MAX_LABEL = 100_000  # a higher number is not the number of a class


@dataclass(frozen=True)
class Csv:
    """A CSV file: a header, one row per example, numbers in all columns, and a column of labels.

    Labels are whole numbers from 0, or names. Columns are separated by commas, semicolons or tabs,
    and numbers have a decimal point. Numbers are not scaled. A fifth of the examples is held out.
    """

    path: str
    label: str  # name of the column with the labels
    classes: int | None = None  # if there are more than the highest label suggests

    def __post_init__(self) -> None:
        check_at_least("classes", self.classes, 2)

    def load(self, cache: Path) -> Dataset:
        path = Path(self.path).expanduser()
        header, rows = _read_rows(path)
        if self.label not in header:
            hint = did_you_mean(self.label, header)
            raise DataError(f"{path} has no column {self.label!r} for label; {hint}")
        place = header.index(self.label)
        texts = {number: row.pop(place).strip() for number, row in rows.items()}
        features = tuple(name for name in header if name != self.label)
        empty = next((number for number, text in texts.items() if not text), None)
        if empty is not None:
            raise DataError(_at(path, empty, self.label, "no label; add it, or remove the row"))
        x = np.array([_numbers(path, number, row, features) for number, row in rows.items()])
        y, names = _labels(list(texts.values()))
        if max(y) > MAX_LABEL:
            raise DataError(
                f"{path} has the label {max(y)} in column {self.label!r}; number the classes from "
                "0, or choose another column"
            )
        return in_memory(x, y, classes=names or self.classes, name=path.stem, features=features)


def _labels(texts: list[str]) -> tuple[list[int], tuple[str, ...]]:
    """Class numbers, and the names of the classes unless all labels are whole numbers from 0."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        numbers = [-1.0]
    if all(number >= 0 and number.is_integer() for number in numbers):
        return [int(number) for number in numbers], ()
    names = tuple(sorted(set(texts)))
    number_of = {name: number for number, name in enumerate(names)}
    return [number_of[text] for text in texts], names


def _read_rows(path: Path) -> tuple[list[str], dict[int, list[str]]]:
    """The header and the other rows by number, all of the same length; empty ones are left out."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a CSV file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; save it as CSV in UTF-8") from None
    first = text.partition("\n")[0]
    separator = max(SEPARATORS, key=first.count)
    try:
        lines = csv.reader(StringIO(text, newline=""), delimiter=separator)
        table = {number: row for number, row in enumerate(lines, start=1) if row}
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a CSV file: {error}") from None
    if len(table) < 2:
        raise DataError(f"{path} has no examples; write a header and one row per example")
    header = [name.strip() for name in table.pop(min(table))]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {twice!r}; each needs its own name")
    if len(header) < 2:
        raise DataError(f"{path} has a single column, {header[0]!r}; add columns of numbers")
    for number, row in table.items():
        if len(row) != len(header):
            raise DataError(
                f"{path} row {number} has {len(row)} cells and the header has {len(header)}; "
                "write one cell per column"
            )
    return header, table


def _numbers(path: Path, number: int, row: list[str], features: tuple[str, ...]) -> list[float]:
    """The cells of a row as finite numbers; the header is row 1."""
    found = []
    for name, cell in zip(features, row, strict=True):
        try:
            value = float(cell)
        except ValueError:
            fault = f"{cell!r} is not a number; write one, such as 3.5" if cell.strip() else ""
            fault = fault or "no value; fill it in, or remove the row"
            raise DataError(_at(path, number, name, fault)) from None
        if not isfinite(value):
            raise DataError(_at(path, number, name, f"{cell!r} is not finite; replace it"))
        found.append(value)
    return found


def _at(path: Path, row: int, column: str, fault: str) -> str:
    return f"{path} row {row}, column {column!r}: {fault}"
