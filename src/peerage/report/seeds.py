"""Runs that differ only in their seed, taken together: means, and paired differences of methods."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from scipy.special import stdtrit

from peerage.records.metrics import METRICS
from peerage.records.rows import Row, RunRecord
from peerage.report.figures import (
    label_ends,
    literal,
    new_figure,
    plot_curve,
    round_axis,
    styled_runs,
)
from peerage.report.series import Estimate, Series, by_method, estimate, seed_of
from peerage.report.statistics import deviation
from peerage.report.tables import (
    SHARES,
    compare,
    duration,
    number,
    percent,
    size,
)

CONFIDENCE = 0.95
STATISTICS = ("_std", "_min", "_max")


def averaged(method: Series) -> RunRecord:
    """A record with the means over the seeds; its deviations are those over the seeds.

    It has the rounds that all seeds have, and the nodes of all seeds; data and graph are those of
    the first. A method with one seed is that run itself.
    """
    first, *others = method.records
    if not others:
        return first
    by_round = [{row["round"]: row for row in record.network} for record in method.records]
    rounds = [round for round in by_round[0] if all(round in rows for rows in by_round)]
    broken = [record for record in method.records if record.status != "finished"]
    summary = first.summary | ({"status": broken[0].status} if broken else {})
    return replace(
        first,
        summary=summary | {"label": method.label},
        network=tuple(_mean_row([rows[round] for rows in by_round]) for round in rounds),
        nodes=tuple(_all_nodes(method.records)),
        groups=tuple(_mean_groups(method.records)),
    )


def _mean_row(rows: Sequence[Row]) -> Row:
    """The means of all numbers, and for `x_std` and the like, those of `x` over the seeds."""
    result: Row = {}
    for key, value in rows[0].items():
        values = [row.get(key) for row in rows]
        if key in ("round", "nodes", "group"):
            result[key] = value
        elif isinstance(value, Mapping):
            tables = [found if isinstance(found, Mapping) else {} for found in values]
            result[key] = _mean_row([dict(table) for table in tables])
        elif isinstance(value, float | int) and not isinstance(value, bool):
            known = [float(found) for found in values if found is not None]
            result[key] = fmean(known) if len(known) == len(rows) else None
        elif not isinstance(value, list):
            result[key] = value
    for metric in METRICS:
        spread = [row[metric.key] for row in rows if row.get(metric.key) is not None]
        if len(spread) == len(rows) and f"{metric.key}_std" in result:
            over_seeds = (pstdev(spread), min(spread), max(spread))
            result |= {
                metric.key + ending: value
                for ending, value in zip(STATISTICS, over_seeds, strict=True)
            }
    return result


def _all_nodes(records: Sequence[RunRecord]) -> Iterable[Row]:
    """The rows of all nodes; those of later seeds have numbers after those of the first."""
    for place, record in enumerate(records):
        before = place * len(record.setup["parameters"])
        yield from ({**row, "node": row["node"] + before} for row in record.nodes)


def _mean_groups(records: Sequence[RunRecord]) -> Iterable[Row]:
    tables = [{(r["round"], r["by"], r["group"]): r for r in record.groups} for record in records]
    for key in tables[0]:
        if all(key in table for table in tables):
            yield _mean_row([table[key] for table in tables])


class Difference(NamedTuple):
    """The accuracy of a method minus that of another, with the same seeds."""

    method: str
    reference: str
    round: int
    by_seed: Mapping[int, float]
    mean: float
    half_width: float | None  # of the confidence interval; None with a single seed

    @property
    def clear(self) -> bool:
        """Whether the interval excludes 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def interval(values: Sequence[float]) -> float | None:
    """Half the width of the confidence interval of the mean (Student's t); None for one value.

    >>> round(interval([1.0, 2.0, 3.0]), 3)
    2.484
    """
    spread = deviation(values)
    if spread is None:
        return None
    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return quantile * spread / math.sqrt(len(values))


def differences(found: Sequence[Series]) -> list[Difference]:
    """The differences of every method to the first, and of the others if they are few."""
    pairs = [
        (one, other)
        for place, other in enumerate(found)
        for one in found[place + 1 :]
        if place == 0 or len(found) <= 4
    ]
    return [difference for one, other in pairs if (difference := _difference(one, other))]


def _difference(one: Series, other: Series) -> Difference | None:
    """The difference in the last round in which both were evaluated with all common seeds."""
    curves = paired_curves(one, other)
    if not curves:
        return None
    last = max(curves)
    values = curves[last]
    mean, half_width = fmean(values.values()), interval(list(values.values()))
    return Difference(one.label, other.label, last, values, mean, half_width)


def paired_curves(one: Series, other: Series) -> dict[int, dict[int, float]]:
    """round -> seed -> difference of the accuracies, in rounds that all common seeds have."""
    tables = [
        {seed_of(record): dict(zip(*record.curve("accuracy"), strict=True)) for record in m.records}
        for m in (one, other)
    ]
    seeds = [seed for seed in tables[0] if seed in tables[1]]
    if not seeds:
        return {}
    rounds = set.intersection(*(set(table[seed]) for table in tables for seed in seeds))
    return {
        round: {seed: tables[0][seed][round] - tables[1][seed][round] for seed in seeds}
        for round in sorted(rounds)
    }


def difference_lines(found: Sequence[Series]) -> list[list[str]]:
    """Titles and a line per pair of methods, as text; empty without pairs."""
    lines = [
        [
            f"{one.method} - {one.reference}",
            str(len(one.by_seed)),
            points(one.mean),
            "-" if one.half_width is None else bounds(one),
            "-" if one.half_width is None else ("yes" if one.clear else "no"),
            ", ".join(points(value) for value in one.by_seed.values()),
        ]
        for one in differences(found)
    ]
    titles = [
        "difference in accuracy", "seeds", "mean, in points", "95 % confidence interval",
        "excludes 0", "of each seed",
    ]  # fmt: skip
    return [titles, *lines] if lines else []


def points(fraction: float) -> str:
    """A difference of accuracies in percentage points."""
    return f"{100 * fraction:+.1f}"


def bounds(one: Difference) -> str:
    """The confidence interval in percentage points."""
    assert one.half_width is not None
    return f"{points(one.mean - one.half_width)} to {points(one.mean + one.half_width)}"


@dataclass(frozen=True)
class MethodTable:
    """The rows of `compare` of each method."""

    found: Sequence[Series]
    rows: Sequence[Sequence[Mapping[str, Any]]]  # of each method, a row per seed

    @classmethod
    def of(cls, found: Sequence[Series]) -> "MethodTable":
        rows = compare([record for method in found for record in method.records])
        ends = [sum(method.seeds for method in found[: n + 1]) for n in range(len(found))]
        parts = [rows[end - m.seeds : end] for end, m in zip(ends, found, strict=True)]
        return cls(found, parts)

    def lines(self) -> list[list[str]]:
        """Titles and a line per method: means and deviations over the seeds."""
        titles = [
            "method", "seeds", "rounds", "accuracy ± std", "seeds min..max", "last 10 rounds",
            "best", "sent per node", "time per round",
        ]  # fmt: skip
        return [titles, *map(self._line, range(len(self.found)))]

    def _line(self, place: int) -> list[str]:
        method, rows = self.found[place], self.rows[place]
        known = [row["accuracy"] for row in rows if row["accuracy"] is not None]
        span = f"{100 * min(known):.1f}..{100 * max(known):.1f} %" if known else "-"
        rounds = sorted({row["rounds"] for row in rows})
        return [
            method.label,
            str(method.seeds),
            "..".join(map(str, dict.fromkeys((rounds[0], rounds[-1])))),
            fraction_text(self._mean(place, "accuracy")),
            span,
            fraction_text(self._mean(place, "accuracy_last_10")),
            fraction_text(self._mean(place, "best_accuracy")),
            size(self._mean(place, "bytes_per_node").mean),
            duration(self._mean(place, "seconds_per_round").mean),
        ]

    def targets(self) -> list[list[str]]:
        """Titles and a line per method: rounds and bytes until shares of the best accuracy."""
        levels = [self.rows[0][0][f"target_{share}"] for share in SHARES]
        titles = ["method"]
        for level in levels:
            titles += [f"rounds to accuracy {percent(level)}", f"sent to {percent(level)}"]
        return [titles, *map(self._target_line, range(len(self.found)))]

    def _target_line(self, place: int) -> list[str]:
        line, count = [self.found[place].label], self.found[place].seeds
        for share in SHARES:
            rounds = [row[f"rounds_to_{share}"] for row in self.rows[place]]
            reached = [value for value in rounds if value is not None]
            if 0 < len(reached) < count:
                line += [f"{len(reached)} of {count} seeds", "-"]
                continue
            sent = self._mean(place, f"bytes_to_{share}").mean
            line += [_with_std(estimate(rounds)), size(sent)]
        return line

    def _mean(self, place: int, key: str) -> Estimate:
        return estimate([row[key] for row in self.rows[place]])


def fraction_text(found: Estimate) -> str:
    if found.mean is None or found.std is None:
        return percent(found.mean)
    return f"{100 * found.mean:.1f} ± {100 * found.std:.1f} %"


def _with_std(found: Estimate) -> str:
    if found.mean is None:
        return "-"
    mean = number(round(found.mean, 1))
    return mean if found.std is None else f"{mean} ± {number(round(found.std, 1))}"


def accuracy_differences(records: Sequence[RunRecord]) -> Figure:
    """The accuracy of every method minus that of the first, over the rounds.

    Differences are between runs with the same seed. With several seeds, a band is the confidence
    interval of the mean.
    """
    found = by_method(records)
    first, *others = found
    runs = styled_runs([averaged(method) for method in found])
    with new_figure() as (figure, axes):
        axes.axhline(0.0, color="#888888", linewidth=1.0)
        ends = []
        for run, method in zip(runs[1:], others, strict=True):
            curves = paired_curves(method, first)
            curve = [(float(r), 100 * fmean(values.values())) for r, values in curves.items()]
            halves = [interval(list(values.values())) for values in curves.values()]
            if curve and None not in halves:
                low = [y - 100 * (half or 0.0) for (_, y), half in zip(curve, halves, strict=True)]
                high = [y + 100 * (half or 0.0) for (_, y), half in zip(curve, halves, strict=True)]
                axes.fill_between(list(curves), low, high, color=run.colour, alpha=0.15, lw=0)
            plot_curve(axes, run, curve)
            ends += [(run, *curve[-1])] if curve else []
        round_axis(axes)
        axes.fmt_ydata = lambda value: f"{value:+.2f} points"
        axes.set_ylabel(f"accuracy minus {literal(first.label)}, points")
        label_ends(axes, ends)
    return figure


def comparable(records: Sequence[RunRecord]) -> bool:
    """Whether there are several methods on one data set, with common seeds and rounds."""
    found = by_method(records)
    data = {str(record.summary.get("dataset")) for record in records}
    return len(found) > 1 and len(data) == 1 and bool(differences(found))
