"""Metrics: the one definition of every number that measures a round.

Rows, summaries, tables, figures, targets (`until`) and the collected rows of real peers follow from
`METRICS`. A new metric of a model is an entry of `SCORES` here and a field of `Score` in
`work/evaluation.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

VALIDATION = "validation_"  # before the key of a score on held-out examples
# Over the nodes, by what the key ends with: the mean has the key of the metric itself.
STATISTICS: Mapping[str, Callable[[Any], Any]] = {
    "": np.mean,
    "_std": np.std,
    "_min": np.min,
    "_max": np.max,
}


@dataclass(frozen=True)
class Metric:
    """A number that every node has in a round, or the network as a whole; the rest is for reports.

    `summary` and `column` count for scores on the test set only.
    """

    key: str  # in rows and summaries
    name: str
    better: Literal["higher", "lower"]
    source: Literal["test", "validation", "training", "network"] = "test"  # on what it is measured
    scale: Literal["fraction", "number", "log"] = "number"  # fractions are shown in percent
    summary: tuple[str, ...] = ("",)  # statistics of the last evaluated round in a summary
    column: bool = True  # whether the table of runs has a column for it
    title: str = ""  # of its curves, if not its name
    caption: str = ""  # how to read them

    @property
    def label(self) -> str:
        """For the axis of a figure."""
        return self.name if self.source == "network" else f"{self.source} {self.name}"

    @property
    def endings(self) -> tuple[str, ...]:
        """Which statistics a row of the network has."""
        return tuple(STATISTICS) if self.source == "test" else ("",)

    @property
    def targets(self) -> list[str]:
        """Keys that can end a run: the mean and, if higher is better, the lowest of all nodes."""
        lowest = [f"{self.key}_min"] if self.better == "higher" and "_min" in self.endings else []
        return [self.key, *lowest]

    def statistics(self, values: Sequence[float]) -> dict[str, float]:
        """What a row of the network holds about the values of its nodes."""
        x = np.array(values)
        return {self.key + ending: float(STATISTICS[ending](x)) for ending in self.endings}


# Of a model on the test set. `Score` has a field for each.
SCORES = (
    Metric(
        "accuracy",
        "accuracy",
        "higher",
        scale="fraction",
        summary=("", "_std"),
        column=False,  # the table has several that are about accuracy
        caption="Higher is better, and so is earlier; the line is the mean over the nodes, and the "
        "band is one standard deviation over the nodes to either side.",
    ),
    Metric("loss", "loss", "lower", column=False),
)
# In the order of a row.
METRICS = (
    *SCORES,
    Metric("train_loss", "loss", "lower", source="training"),
    Metric(
        "consensus",
        "consensus distance",
        "lower",
        source="network",
        scale="log",
        title="Agreement",
        caption="How far the models of the nodes are apart (logarithmic); a falling curve means "
        "that they agree more and more.",
    ),
    *(Metric(VALIDATION + m.key, m.name, m.better, "validation", m.scale) for m in SCORES),
)
BY_KEY = {metric.key: metric for metric in METRICS}
