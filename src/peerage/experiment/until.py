"""What ends a run before its last round: a metric and the value that it must reach."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peerage.errors import InputError, did_you_mean

UNTIL = {  # what a run may be ended by: 1 for what rises while models learn, -1 for what falls
    "accuracy": 1,
    "accuracy_min": 1,
    "validation_accuracy": 1,
    "loss": -1,
    "validation_loss": -1,
    "train_loss": -1,
    "consensus": -1,
}


@dataclass(frozen=True)
class Until:
    """End a run once the mean over the nodes has got this far: `accuracy=0.469`."""

    metric: str
    value: float

    def __post_init__(self) -> None:
        if "accuracy" in self.metric and not 0 < self.value <= 1:
            raise InputError(f"until {self} is never reached: accuracies lie between 0 and 1")

    def reached(self, row: Mapping[str, Any]) -> bool:
        """Whether the network row of a round has got there; one that was not judged has not."""
        found = row.get(self.metric)
        return found is not None and UNTIL[self.metric] * (float(found) - self.value) >= 0

    def __str__(self) -> str:
        return f"{self.metric}={self.value!r}"


def read_until(value: Any) -> Until | None:
    if value is None or isinstance(value, Until):
        return value
    metric, _, number = str(value).replace(" ", "").partition("=")
    if metric not in UNTIL:
        raise InputError(
            f"until {value!r} does not begin with something that is measured; "
            f"{did_you_mean(metric, UNTIL)}, as in accuracy=0.9"
        )
    try:
        target = float(number)
    except ValueError:
        target = math.nan
    if not math.isfinite(target):
        raise InputError(f"until {value!r} gives {metric} no number; write {metric}=0.9")
    return Until(metric, target)
