"""One method over its seeds: the numbers that the tables and figures of a paper are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

from peerage.records import RunRecord
from peerage.report.tables import phase_means, seconds_per_round

BYTES_PER_SCALAR = 4  # float32


class Estimate(NamedTuple):
    """Mean and population standard deviation over seeds; one seed alone has no deviation."""

    mean: float | None
    std: float | None


class Curve(NamedTuple):
    """Over the rounds that all seeds have; one seed alone deviates by nothing."""

    rounds: list[int]
    means: list[float]
    stds: list[float]


class Rounds(NamedTuple):
    """When a target was reached: mean and deviation only if every seed got there."""

    mean: float | None
    std: float | None
    reached: int
    seeds: int


@dataclass(frozen=True)
class Series:
    """The runs of one method that differ in their seed alone; without runs, nothing is known."""

    label: str
    algorithm: str
    records: tuple[RunRecord, ...]

    @property
    def seeds(self) -> int:
        return len(self.records)

    def rounds(self, key: str = "accuracy") -> list[int]:
        """The rounds in which every seed has a value: a run that ended early ends them."""
        found = [set(record.curve(key)[0]) for record in self.records]
        return sorted(set.intersection(*found)) if found else []

    def curve(self, key: str) -> Curve:
        rounds = self.rounds(key)
        values = self._values(key)
        columns = [[of_seed[r] for of_seed in values] for r in rounds]
        return Curve(rounds, [fmean(column) for column in columns], [pstdev(c) for c in columns])

    def final(self) -> Estimate:
        """Accuracy in the last round that was evaluated with every seed."""
        return self._over_rounds(lambda rounds: rounds[-1:])

    def last_10(self) -> Estimate:
        """Each seed's mean accuracy over what was evaluated of the last ten rounds.

        Round 0, the initial models, counts only if there is no other.
        """
        return self._over_rounds(
            lambda rounds: [r for r in rounds if r > max(rounds[-1] - 10, 0)] or rounds[-1:]
        )

    def best(self) -> Estimate:
        """Each seed's highest accuracy in any round of its own."""
        peaks = [max(values.values(), default=None) for values in self._values("accuracy")]
        return estimate(peaks)

    def rounds_to(self, target: float) -> Rounds:
        """The first evaluated round whose mean accuracy over the nodes reaches the target."""
        first = [record.rounds_to(target) for record in self.records]
        reached = len(first) - first.count(None)
        return Rounds(*estimate(first), reached, len(first))

    def bytes_per_node(self) -> Estimate:
        """What a node sent in the whole run, in the mean over the nodes."""
        return estimate([_sent(record, _nodes(record)) for record in self.records])

    def scalars(self) -> Estimate:
        """Numbers that a node sent to one neighbour in the whole run, on a graph that stays."""
        return estimate(
            [_sent(record, 2 * BYTES_PER_SCALAR * _edges(record)) for record in self.records]
        )

    def seconds_per_round(self) -> Estimate:
        return estimate([seconds_per_round(record) for record in self.records])

    def phases(self) -> dict[str, float]:
        """Mean seconds per round of each phase that took any time, in the order of a round."""
        tables = [phase_means(record) for record in self.records]
        means = {phase: fmean(t[phase] for t in tables) for phase in (tables[0] if tables else ())}
        return {phase: mean for phase, mean in means.items() if mean > 0}

    def _values(self, key: str) -> list[dict[int, float]]:
        return [dict(zip(*record.curve(key), strict=True)) for record in self.records]

    def _over_rounds(self, choose: Callable[[list[int]], list[int]]) -> Estimate:
        chosen = choose(rounds) if (rounds := self.rounds()) else []
        values = self._values("accuracy")
        return estimate([fmean(v[r] for r in chosen) if chosen else None for v in values])


def estimate(values: Sequence[float | None]) -> Estimate:
    """Nothing is known about all unless it is known about each."""
    known = [float(value) for value in values if value is not None]
    if not known or len(known) < len(values):
        return Estimate(None, None)
    return Estimate(fmean(known), pstdev(known) if len(known) > 1 else None)


def _sent(record: RunRecord, share: int) -> float | None:
    return record.network[-1]["bytes_total"] / share if record.network and share else None


def _nodes(record: RunRecord) -> int:
    return record.network[-1]["nodes"] if record.network else 0


def _edges(record: RunRecord) -> int:
    return len(record.setup.get("edges", ()))
