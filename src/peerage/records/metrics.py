"""Metrics: one definition of every number that describes a round.

Rows, summaries, tables, figures, targets (`until`) and the collected rows of real peers follow from
`METRICS`. To add a metric of a model, add an entry to `SCORES` here and a field to `Score` in
`work/evaluation.py`. A metric of a user's own has the name of its function as key (`with_own`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

VALIDATION = "validation_"  # prefix of the key of a score on held-out examples
# Statistics over the nodes, by suffix of the key; the mean has none.
STATISTICS: Mapping[str, Callable[[Any], Any]] = {
    "": np.mean,
    "_std": np.std,
    "_min": np.min,
    "_max": np.max,
}


@dataclass(frozen=True)
class Metric:
    """A number of each node in a round, or of the network, and how reports show it.

    `summary` and `column` apply only to scores on the test set.
    """

    key: str  # in rows and summaries
    name: str
    better: Literal["higher", "lower"] | None  # None: not known
    source: Literal["test", "validation", "training", "network"] = "test"  # what is evaluated
    scale: Literal["fraction", "number", "log"] = "number"  # fractions are shown in percent
    summary: tuple[str, ...] = ("",)  # statistics of the last evaluated round in a summary
    column: bool = True  # whether the table of runs has a column for it
    title: str = ""  # of its figure (default: its name)
    caption: str = ""  # of its figure

    @property
    def label(self) -> str:
        """The label of an axis."""
        return self.name if self.source == "network" else f"{self.source} {self.name}"

    @property
    def endings(self) -> tuple[str, ...]:
        """The suffixes of the statistics in a row of the network."""
        return tuple(STATISTICS) if self.source == "test" else ("",)

    @property
    def targets(self) -> list[str]:
        """Keys for `until`: the mean and, if higher is better, the minimum over the nodes."""
        minimum = [f"{self.key}_min"] if self.better == "higher" and "_min" in self.endings else []
        return [self.key, *minimum]

    def statistics(self, values: Sequence[float]) -> dict[str, float]:
        """The statistics of the nodes' values for a row of the network, by key."""
        x = np.array(values)
        return {self.key + ending: float(STATISTICS[ending](x)) for ending in self.endings}


# Metrics of a model on the test set. `Score` has a field for each.
SCORES = (
    Metric(
        "accuracy",
        "accuracy",
        "higher",
        scale="fraction",
        summary=("", "_std"),
        column=False,  # the table has other columns about accuracy
        caption="Higher is better. The line is the mean over the nodes, and the band is one "
        "standard deviation over the nodes to either side.",
    ),
    Metric("loss", "loss", "lower", column=False),
)
# Metrics that are not of a model on the test set.
_OTHERS = (
    Metric("train_loss", "loss", "lower", source="training"),
    Metric(
        "consensus",
        "consensus distance",
        "lower",
        source="network",
        scale="log",
        title="Agreement",
        caption="Distance between the models of the nodes (logarithmic); a falling curve means "
        "that they approach each other.",
    ),
)


def own_metric(name: str) -> Metric:
    """A metric of a user's own; it is not known whether higher is better."""
    caption = f"The metric {name} on the test set, as the mean over the nodes."
    return Metric(name, name, None, title=name, caption=caption)


def with_own(names: Iterable[str] = ()) -> tuple[Metric, ...]:
    """All metrics in their order in a row, with a user's own of these names."""
    scores = (*SCORES, *map(own_metric, names))
    held_out = (Metric(VALIDATION + m.key, m.name, m.better, "validation", m.scale) for m in scores)
    return (*scores, *_OTHERS, *held_out)


METRICS = with_own()
BY_KEY = {metric.key: metric for metric in METRICS}


def metrics_in(keys: Iterable[str]) -> tuple[Metric, ...]:
    """All metrics, including a user's own among these keys of a node's metrics."""
    own = (key for key in keys if key not in BY_KEY and not key.startswith(VALIDATION))
    return with_own(dict.fromkeys(own))


# Keys of rows and summaries, which no metric of a user's own may have.
RESERVED = frozenset({m.key + ending for m in METRICS for ending in STATISTICS}) | {
    "algorithm", "best_accuracy", "best_round", "by", "bytes", "bytes_sent", "bytes_total",
    "cluster", "confusion", "counters", "dataset", "digest", "epsilon", "final", "group", "groups",
    "heard", "joined", "label", "layers", "message", "missing", "models", "moved", "node", "nodes",
    "notes", "out_of_contact", "paused", "peers", "privacy", "round", "rounds", "rounds_planned",
    "run", "scope", "seconds", "senders", "shard_bytes", "skipped", "status", "stopped",
    "store_bytes", "tests", "troubles", "wire", "wire_bytes",
}  # fmt: skip
