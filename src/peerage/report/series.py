"""One method over its seeds: the numbers in the tables and figures of a paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from peerage.records.phases import in_order
from peerage.records.rows import RunRecord
from peerage.report.tables import labels, phase_means, seconds_per_round, settings_but

BYTES_PER_SCALAR = 4  # float32
Key = str | tuple[str, ...]  # of a row; a tuple is a path into nested tables


class Estimate(NamedTuple):
    """Mean and population standard deviation over seeds; a single seed has no deviation."""

    mean: float | None
    std: float | None

    def times(self, factor: float) -> "Estimate":
        """The estimate in another unit."""
        return Estimate(*(None if part is None else factor * part for part in self))


class Curve(NamedTuple):
    """Means and deviations over the rounds that all seeds have; a single seed has deviation 0."""

    rounds: list[int]
    means: list[float]
    stds: list[float]


class Rounds(NamedTuple):
    """The rounds until a target was reached; mean and deviation only if every seed reached it."""

    mean: float | None
    std: float | None
    reached: int
    seeds: int


@dataclass(frozen=True)
class Series:
    """The runs of one method, which differ only in their seed; there may be none."""

    label: str
    algorithm: str
    records: tuple[RunRecord, ...]

    @property
    def seeds(self) -> int:
        return len(self.records)

    def rounds(self, key: Key = "accuracy") -> list[int]:
        """The rounds in which every seed has a value."""
        rounds = [set(values) for values in self._values(key)]
        return sorted(set.intersection(*rounds)) if rounds else []

    def curve(self, key: Key) -> Curve:
        rounds = self.rounds(key)
        values = self._values(key)
        columns = [[values_of_seed[r] for values_of_seed in values] for r in rounds]
        return Curve(rounds, [fmean(column) for column in columns], [pstdev(c) for c in columns])

    def final(self, key: Key = "accuracy") -> Estimate:
        """The value in the last round that was evaluated for every seed."""
        return self._over_rounds(lambda rounds: rounds[-1:], key)

    def at(self, round: int, key: Key = "accuracy") -> list[float]:
        """Each seed's value in a round, for significance tests; empty unless all have one."""
        values = self._values(key)
        return [value[round] for value in values] if round in self.rounds(key) else []

    def last_10(self) -> Estimate:
        """The mean accuracy over the evaluations in the last ten rounds.

        Round 0, the initial models, counts only if there is no other.
        """
        return self._over_rounds(
            lambda rounds: [r for r in rounds if r > max(rounds[-1] - 10, 0)] or rounds[-1:]
        )

    def best(self) -> Estimate:
        """The highest accuracy of each seed in any round."""
        peaks = [record.best() for record in self.records]
        return estimate([None if peak is None else peak[1] for peak in peaks])

    def rounds_to(self, target: float) -> Rounds:
        """The first evaluated round whose mean accuracy over the nodes reaches the target."""
        return _rounds([record.rounds_to(target) for record in self.records])

    def lowest(self, key: Key = "loss") -> Estimate:
        """The lowest value of each seed in any round."""
        return estimate([min(values.values(), default=None) for values in self._values(key)])

    def rounds_below(self, level: float, key: Key = "loss") -> Rounds:
        """When the value first falls to a level, interpolated linearly between evaluations."""
        return _rounds([crossing(values, level) for values in self._values(key)])

    def batches(self) -> float:
        """Mean number of mini-batches per node and round, to convert rounds to training time."""
        return fmean(batches_per_round(record) for record in self.records)

    def bytes_per_node(self) -> Estimate:
        """Bytes sent per node in the whole run, averaged over the nodes."""
        return estimate([_sent(record, _nodes(record)) for record in self.records])

    def scalars(self) -> Estimate:
        """Numbers that a node sent to one neighbour in the whole run, on a static graph."""
        return estimate(
            [_sent(record, 2 * BYTES_PER_SCALAR * _edges(record)) for record in self.records]
        )

    def seconds_per_round(self) -> Estimate:
        return estimate([seconds_per_round(record) for record in self.records])

    def phases(self) -> dict[str, float]:
        """Mean seconds per round of each phase that took any time, in the order of a round."""
        tables = [phase_means(record) for record in self.records]
        found = in_order(phase for table in tables for phase in table)
        means = {phase: fmean(t.get(phase, 0.0) for t in tables) for phase in found}
        return {phase: mean for phase, mean in means.items() if mean > 0}

    def _values(self, key: Key) -> list[dict[int, float]]:
        return [curve_of(record, key) for record in self.records]

    def _over_rounds(
        self, choose: Callable[[list[int]], list[int]], key: Key = "accuracy"
    ) -> Estimate:
        selected = choose(rounds) if (rounds := self.rounds(key)) else []
        values = self._values(key)
        return estimate([fmean(v[r] for r in selected) if selected else None for v in values])


def by_method(records: Sequence[RunRecord]) -> list[Series]:
    """The runs with those that differ only in their seed together, in the order of the first."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(settings_but(record, "seed"), []).append(record)
    groups = [runs for same in found.values() for runs in _by_seed(same)]
    names = labels([runs[0] for runs in groups])
    return [
        Series(name, runs[0].algorithm, tuple(runs))
        for name, runs in zip(names, groups, strict=True)
    ]


def _by_seed(runs: list[RunRecord]) -> list[list[RunRecord]]:
    """One method, or one per run if a seed occurs twice: then the folder tells runs apart."""
    repeated = len({seed_of(run) for run in runs}) < len(runs)
    return [[run] for run in runs] if repeated else [runs]


def seed_of(record: RunRecord) -> int:
    return int(record.experiment.get("seed", 0))


def thinned(places: Sequence[int], most: int) -> list[int]:
    """At most so many of some places, evenly spaced, with the first and the last.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(places) <= most:
        return list(places)
    step = (len(places) - 1) / (most - 1)
    return [places[round(number * step)] for number in range(most)]


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and deviation; unknown if any value is."""
    known = [float(value) for value in values if value is not None]
    if not known or len(known) < len(values):
        return Estimate(None, None)
    return Estimate(fmean(known), pstdev(known) if len(known) > 1 else None)


def _rounds(first: Sequence[float | None]) -> Rounds:
    return Rounds(*estimate(first), len(first) - first.count(None), len(first))


def curve_of(record: RunRecord, key: Key) -> dict[int, float]:
    """{round: value} for the rounds with a finite value."""
    if isinstance(key, str):
        return dict(zip(*record.curve(key), strict=True))
    found = {row["round"]: _nested(row, key) for row in record.network}
    return {round: float(value) for round, value in found.items() if value is not None}


def crossing(curve: Mapping[int, float], level: float) -> float | None:
    """The round in which a curve first falls to a level, interpolated linearly.

    >>> crossing({0: 2.0, 10: 1.0, 20: 0.5}, 1.5)
    5.0
    """
    points = sorted(curve.items())
    if points and points[0][1] <= level:
        return float(points[0][0])
    for (before, high), (after, low) in pairwise(points):
        if low <= level:
            return before + (after - before) * (high - level) / (high - low)
    return None


def batches_per_round(record: RunRecord) -> float:
    """Mini-batches of local training per round, averaged over the nodes."""
    work = record.experiment["local"]
    if work.get("steps") is not None:
        return float(work["steps"])
    per_epoch = fmean(ceil(count / work["batch_size"]) for count in record.setup["examples"])
    return float(work["epochs"] * per_epoch)


def _nested(table: Any, key: Sequence[str]) -> Any:
    for name in key:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table


def _sent(record: RunRecord, share: int) -> float | None:
    return record.network[-1]["bytes_total"] / share if record.network and share else None


def _nodes(record: RunRecord) -> int:
    return record.network[-1]["nodes"] if record.network else 0


def _edges(record: RunRecord) -> int:
    return len(record.setup.get("edges", ()))
