"""The schema of tabular data: the features and classes that all peers must have."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

import torch

from peerage import specs
from peerage.data.classes import with_classes
from peerage.data.tensors import Dataset
from peerage.errors import DataError, InputError, did_you_mean

WHERE = "data_schema"


@dataclass(frozen=True)
class Feature:
    """One column: its name, its unit, and the range in which its values are expected."""

    name: str
    unit: str | None = None
    range: tuple[float, float] | None = None  # both ends belong to it

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError('a feature has no name; write name = "age"')
        low, high = self.range or (0.0, 1.0)
        if not (isfinite(low) and isfinite(high) and low < high):
            raise InputError(f"range of {self.name} must be two growing numbers, got {self.range}")

    @property
    def expected(self) -> str:
        """The range in words, as in `0 to 120 years`."""
        ends = " to ".join(f"{end:g}" for end in self.range or ())
        return f"{ends} {self.unit or ''}".strip()


@dataclass(frozen=True)
class Schema:
    """The classes and the features, in their order; either may be left out."""

    classes: tuple[str, ...] = ()
    feature: tuple[Feature, ...] = ()

    def __post_init__(self) -> None:
        if not self.classes and not self.feature:
            raise InputError("names neither classes nor features; add some, or remove the section")
        for what, names in (("class", self.classes), ("feature", self.names)):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise InputError(f"names the {what} {twice!r} twice; each needs its own name")
        if len(self.classes) == 1:
            raise InputError(f"names the single class {self.classes[0]!r}; name at least two")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the features."""
        return tuple(feature.name for feature in self.feature)

    def table(self) -> dict[str, Any]:
        """Plain values from which `read_schema` makes an equal schema."""
        return {
            **({"classes": list(self.classes)} if self.classes else {}),
            **({"feature": list(map(specs.plain, self.feature))} if self.feature else {}),
        }

    def conform(self, data: Dataset) -> Dataset:
        """The data set with the classes of the schema; raises DataError if it does not fit."""
        self._check_columns(data)
        for column, feature in enumerate(self.feature):
            outside = _outside(data, column, feature)
            if 2 * int(outside.sum()) > len(outside):
                mean = float(_column(data, column).mean())
                raise DataError(
                    f"{data.name}: {feature.name}: mean {mean:.4g} here, expected "
                    f"{feature.expected}; convert this column, or correct the range in {WHERE}"
                )
        return with_classes(data, self.classes, WHERE) if self.classes else data

    def caveats(self, data: Dataset) -> list[str]:
        """Warnings about features with some values outside their range."""
        found = []
        for column, feature in enumerate(self.feature):
            outside = _outside(data, column, feature)
            if outside.any():
                low, high = (float(end) for end in _column(data, column).aminmax())
                found.append(
                    f"{data.name}: {feature.name}: {int(outside.sum())} of {len(outside)} values "
                    f"are outside {feature.expected} ({low:.4g} to {high:.4g} here); check them"
                )
        return found

    def _check_columns(self, data: Dataset) -> None:
        """Check the number of columns, and their names and order if the data has names."""
        if not self.feature:
            return
        listed = f"{WHERE} has {', '.join(self.names)}"
        if len(data.shape) != 1:
            raise DataError(f"{data.name} has examples of shape {data.shape}, but {listed}")
        for name in data.features:
            if name not in self.names:
                hint = did_you_mean(name, self.names)
                raise DataError(f"{data.name} has a column {name!r} that {WHERE} lacks; {hint}")
        if missing := [name for name in self.names if data.features and name not in data.features]:
            raise DataError(f"{data.name} has no column {missing[0]!r}; {listed}")
        if data.shape[0] != len(self.feature):
            raise DataError(
                f"{data.name} has {data.shape[0]} columns, but {WHERE} has {len(self.feature)}: "
                f"{', '.join(self.names)}"
            )
        pairs = zip(data.features, self.names, strict=False)
        for number, (found, expected) in enumerate(pairs, start=1):
            if found != expected:
                raise DataError(
                    f"{data.name}: feature {number} is {found!r}, but {WHERE} expects "
                    f"{expected!r}; order the columns as {', '.join(self.names)}"
                )


def read_schema(value: Any) -> Schema | None:
    """A schema from an object, or from a table with classes and a list of features."""
    if value is None or isinstance(value, Schema):
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            f"{WHERE} must be a table, got {value!r}; write [{WHERE}] and classes = [...]"
        )
    known = [field.name for field in fields(Schema)]
    for key in value:
        if key not in known:
            raise InputError(f"{WHERE} has no key {key!r}; {did_you_mean(key, known)}")
    entries = value.get("feature", [])
    if not isinstance(entries, list | tuple):
        raise InputError(f"{WHERE}: feature must be a list; write [[{WHERE}.feature]]")
    features = []
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, Mapping):
            raise InputError(f'{WHERE}: feature {number} must be a table with name = "age"')
        features.append(specs.construct(Feature, entry, f"{WHERE}: feature {number}"))
    classes = specs.convert(value.get("classes", ()), tuple[str, ...], f"{WHERE}: classes")
    try:
        return Schema(classes, tuple(features))
    except InputError as error:
        raise InputError(f"{WHERE} {error}") from None


def _column(data: Dataset, column: int) -> torch.Tensor:
    return torch.cat([data.train_x[:, column], data.test_x[:, column]])


def _outside(data: Dataset, column: int, feature: Feature) -> torch.Tensor:
    """Which values of a column are outside the range of its feature."""
    values = _column(data, column)
    if feature.range is None:
        return torch.zeros_like(values, dtype=torch.bool)
    low, high = feature.range
    return values.ne(values.clamp(low, high))  # in float32: 0.1 is in a range that ends at 0.1
