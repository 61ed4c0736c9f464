"""Stop conditions: end a run early, once a metric has reached a value."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peerage.errors import InputError, did_you_mean
from peerage.records.metrics import METRICS

STOP_METRICS = {key: metric for metric in METRICS for key in metric.targets}


@dataclass(frozen=True)
class StopCondition:
    """Ends a run once a metric of the network has reached a value: `accuracy=0.469`."""

    metric: str
    value: float

    def __post_init__(self) -> None:
        metric = STOP_METRICS[self.metric]
        if metric.scale == "fraction" and not 0 < self.value <= 1:
            raise InputError(f"until {self} cannot be reached; {metric.name} lies between 0 and 1")

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether a network row has reached the value; False if it was not evaluated."""
        value = row.get(self.metric)
        if value is None:
            return False
        higher = STOP_METRICS[self.metric].better == "higher"
        return bool(value >= self.value if higher else value <= self.value)

    def __str__(self) -> str:
        return f"{self.metric}={self.value!r}"


def read_until(value: Any) -> StopCondition | None:
    if value is None or isinstance(value, StopCondition):
        return value
    metric, _, number = str(value).replace(" ", "").partition("=")
    if metric not in STOP_METRICS:
        raise InputError(
            f"until {value!r} does not start with a known metric; "
            f"{did_you_mean(metric, STOP_METRICS)}, as in accuracy=0.9"
        )
    try:
        target = float(number)
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise InputError(f"until {value!r} has no number for {metric}; write {metric}=0.9")
    return StopCondition(metric, target)
