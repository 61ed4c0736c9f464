"""What ends a run before its last round: a metric and the value that it must reach."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peerage.errors import InputError, did_you_mean
from peerage.records.metrics import METRICS

STOP_METRICS = {key: metric for metric in METRICS for key in metric.targets}


@dataclass(frozen=True)
class StopCondition:
    """End a run once the mean over the nodes has got this far: `accuracy=0.469`."""

    metric: str
    value: float

    def __post_init__(self) -> None:
        metric = STOP_METRICS[self.metric]
        if metric.scale == "fraction" and not 0 < self.value <= 1:
            raise InputError(f"until {self} is never reached: {metric.name} lies between 0 and 1")

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether the network row of a round has got there; one that was not judged has not."""
        found = row.get(self.metric)
        if found is None:
            return False
        higher = STOP_METRICS[self.metric].better == "higher"
        return bool(found >= self.value if higher else found <= self.value)

    def __str__(self) -> str:
        return f"{self.metric}={self.value!r}"


def read_until(value: Any) -> StopCondition | None:
    if value is None or isinstance(value, StopCondition):
        return value
    metric, _, number = str(value).replace(" ", "").partition("=")
    if metric not in STOP_METRICS:
        raise InputError(
            f"until {value!r} does not begin with something that is measured; "
            f"{did_you_mean(metric, STOP_METRICS)}, as in accuracy=0.9"
        )
    try:
        target = float(number)
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise InputError(f"until {value!r} gives {metric} no number; write {metric}=0.9")
    return StopCondition(metric, target)
