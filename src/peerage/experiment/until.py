"""Stop conditions: end a run early, once a metric has reached a value."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from peerage.errors import InputError, did_you_mean
from peerage.records.metrics import METRICS, Metric
from peerage.records.rows import value_at

# Metrics that need no comparison, as it is known whether higher is better.
STOP_METRICS = {key: metric for metric in METRICS for key in metric.targets}
FORM = re.compile(r"([^<>=]*)(>=|<=|=)(.*)")


@dataclass(frozen=True)
class StopCondition:
    """Ends a run once a metric of the network has reached a value: `accuracy=0.469`.

    A metric is a number in the rows of the network, or a note of the algorithm, of which it is the
    mean over the nodes. Dots lead into nested tables, `models.regular.accuracy`, and to groups of
    nodes, `cluster.1.accuracy`.
    """

    metric: str
    value: float
    comparison: str | None = None  # >= or <=; None for the better direction of a known metric

    def __post_init__(self) -> None:
        metric = metric_of(self.metric)
        if self.comparison is None and metric is None:
            raise InputError(
                f"until {self.metric}={self.value!r} has an unknown metric; write "
                f"{self.metric}>={self.value!r} or {self.metric}<={self.value!r} if the run "
                f"records it; {did_you_mean(self.metric, STOP_METRICS)}"
            )
        if metric is not None and metric.scale == "fraction" and not 0 < self.value <= 1:
            raise InputError(f"until {self} cannot be reached; {metric.name} lies between 0 and 1")

    def reached(self, row: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Whether the row of the network, or another row of its round, has reached the value."""
        value = self.value_in(row, others)
        if value is None:
            return False
        return bool(value >= self.value if self.direction == ">=" else value <= self.value)

    def check_recorded(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raise an InputError if no row so far has recorded the metric."""
        known = {name for row in rows for name in row.get("notes", {})}
        for row in rows:
            if row.get("scope") != "node":
                known |= {key for key in _named(row) if not key.startswith("notes.")}
        if self.metric not in known and self.metric not in STOP_METRICS:
            raise InputError(
                f"until {self} names a metric that no round up to {rows[-1]['round']} has "
                f"recorded; {did_you_mean(self.metric, known)}"
            )

    @property
    def direction(self) -> str:
        """`>=` or `<=`."""
        metric = metric_of(self.metric)
        higher = metric is not None and metric.better == "higher"
        return self.comparison or (">=" if higher else "<=")

    def value_in(self, row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> float | None:
        """The value in the row of the network or in the others of its round; None without one."""
        value = value_at(row, self.metric)
        if value is not None:
            return float(value)
        for other in others:
            if other.get("scope") == "group" and self.metric.startswith(_prefix(other)):
                value = value_at(other, self.metric.removeprefix(_prefix(other)))
                return None if value is None else float(value)
        notes = [other.get("notes", {}) for other in others]
        noted = [note[self.metric] for note in notes if note.get(self.metric) is not None]
        return fmean(noted) if noted else None

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison or '='}{self.value!r}"


def metric_of(key: str) -> Metric | None:
    """The known metric of a key, also of a named model or a group; None if it is not known."""
    nested = key.startswith(("models.", "cluster.", "architecture."))
    return STOP_METRICS.get(key.rpartition(".")[2] if nested else key)


def _prefix(row: Mapping[str, Any]) -> str:
    """What the names of a group's metrics begin with, such as `cluster.1.`."""
    return f"{row['by']}.{row['group']}."


def _named(row: Mapping[str, Any]) -> list[str]:
    """The names of all numbers in a row of the network or of a group."""
    return numbers_in(row, _prefix(row) if row.get("scope") == "group" else "")


def numbers_in(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The keys of all numbers in a row and its nested tables.

    >>> numbers_in({"loss": 0.5, "models": {"regular": {"accuracy": 0.9}}})
    ['loss', 'models.regular.accuracy']
    """
    found = []
    for key, value in row.items():
        if isinstance(value, Mapping):
            found += numbers_in(value, f"{prefix}{key}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append(prefix + key)
    return found


def read_until(value: Any) -> StopCondition | None:
    if value is None or isinstance(value, StopCondition):
        return value
    found = FORM.fullmatch(str(value).replace(" ", ""))
    metric, comparison, number = found.groups() if found else (str(value), "=", "")
    if not metric or (comparison == "=" and metric_of(metric) is None):
        raise InputError(
            f"until {value!r} does not start with a known metric; "
            f"{did_you_mean(metric, STOP_METRICS)}, as in accuracy=0.9; for another number of the "
            "records, write a comparison such as alpha>=0.9"
        )
    try:
        target = float(number)
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise InputError(f"until {value!r} has no number for {metric}; write {metric}=0.9")
    # The short form if it says the same, so that equal experiments are equal.
    usual = metric_of(metric) and StopCondition(metric, target)
    if usual and comparison in ("=", usual.direction):
        return usual
    return StopCondition(metric, target, comparison)
