"""Tables of numbers in CSV files, with the names of their columns."""

import csv
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np

from peerage.data.tensors import Dataset, in_memory
from peerage.errors import DataError, check_at_least, did_you_mean

SEPARATORS = (",", ";", "\t")


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
        texts = [row.pop(place).strip() for row in rows]
        features = tuple(name for name in header if name != self.label)
        for number, text in enumerate(texts, start=2):
            if not text:
                raise DataError(
                    _at(path, number, self.label, "no label; add it, or remove the row")
                )
        x = np.array([_numbers(path, i, row, features) for i, row in enumerate(rows, start=2)])
        classes: int | tuple[str, ...] | None = self.classes
        if all(text.isdecimal() for text in texts):
            y = [int(text) for text in texts]
        else:
            classes = tuple(sorted(set(texts)))
            y = [classes.index(text) for text in texts]
        return in_memory(x, y, classes=classes, name=path.stem, features=features)


def _read_rows(path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the other rows, all of the same length."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a CSV file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; save it as CSV in UTF-8") from None
    first = text.partition("\n")[0]
    separator = max(SEPARATORS, key=first.count)
    try:
        table = [row for row in csv.reader(text.splitlines(), delimiter=separator) if row]
    except csv.Error as error:
        raise DataError(f"{path} cannot be read as a CSV file: {error}") from None
    if len(table) < 2:
        raise DataError(f"{path} has no examples; write a header and one row per example")
    header, *rows = table
    header = [name.strip() for name in header]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns {twice!r}; each needs its own name")
    if len(header) < 2:
        raise DataError(f"{path} has a single column, {header[0]!r}; add columns of numbers")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise DataError(
                f"{path} row {number} has {len(row)} cells and the header has {len(header)}; "
                "write one cell per column"
            )
    return header, rows


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
