"""Tables of the fairness between clusters, and the same numbers for other programs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from peerage.records.rows import RunRecord
from peerage.report.fairness import (
    FairnessOverSeeds,
    bytes_to,
    common_target,
    fairness_over_rounds,
    fairness_over_seeds,
    highest_fair_accuracy,
)
from peerage.report.head_choice import histograms, settlement
from peerage.report.series import Estimate, Series, by_method
from peerage.report.tables import (
    fitting_tables,
    percent,
    pipe_table,
    settings,
    settings_but,
    size,
)

TITLE = "Fairness between clusters"


@dataclass(frozen=True)
class Method(Series):
    """The runs of a method that differ only in their seed, with their fairness."""

    fairness: FairnessOverSeeds


def methods(records: Sequence[RunRecord]) -> list[Method]:
    """The runs with clusters, those that differ only in their seed together."""
    result = []
    for series in by_method([record for record in records if fairness_over_rounds(record)]):
        fairness = fairness_over_seeds(series.records)
        if fairness is not None:
            result.append(Method(series.label, series.algorithm, series.records, fairness))
    return result


def head_sweeps(records: Sequence[RunRecord]) -> list[dict[int, list[RunRecord]]]:
    """Runs of FACADE that differ only in the number of heads and in their seed, by that number."""
    found: dict[str, dict[int, list[RunRecord]]] = {}
    for record in records:
        heads = settings(record).get("algorithm.k")
        if record.algorithm == "facade" and heads is not None and fairness_over_rounds(record):
            sweep = found.setdefault(settings_but(record, "seed", "algorithm.k"), {})
            sweep.setdefault(int(heads), []).append(record)
    return [sweep for sweep in found.values() if len(sweep) > 1]


class Column(NamedTuple):
    title: str
    text: Callable[[Method], str]


def columns(found: Sequence[Method]) -> list[Column]:
    """The columns that these methods need: those about pairs, seeds and heads only if any has."""
    pairs = any(len(method.fairness.accuracies) > 2 for method in found)
    seeds = any(method.seeds > 1 for method in found)
    heads = any(settlement(record) for method in found for record in method.records)
    target = _target(found)
    shown = {
        Column("run", lambda m: m.label): True,
        Column("seeds", lambda m: str(m.seeds)): seeds,
        Column("parity", lambda m: _share(m.fairness.parity)): True,
        Column("mean parity", lambda m: _share(m.fairness.parity_mean)): pairs,
        Column("odds", lambda m: _share(m.fairness.odds)): True,
        Column("mean odds", lambda m: _share(m.fairness.odds_mean)): pairs,
        Column("fair accuracy", lambda m: percent(m.fairness.fair_accuracy_of_means)): True,
        Column("fair, by seed", lambda m: _percents(m.fairness.fair_accuracy)): seeds,
        Column("highest (round)", lambda m: _peak(m.fairness.highest_of_means)): True,
        Column("highest, by seed", lambda m: _percents(m.fairness.highest)): seeds,
        Column("worst node", lambda m: _percents(m.fairness.worst_node)): True,
        Column("worst 10 %", lambda m: _percents(m.fairness.worst_tenth)): True,
        Column("Jain", lambda m: _share(m.fairness.jain)): True,
        Column("separated from round", lambda m: _rounds(m, "separated")): heads,
        Column("settled from round", lambda m: _rounds(m, "settled")): heads,
    }
    result = [column for column, needed in shown.items() if needed]
    if target is not None:
        sent = f"sent until {percent(target)}"
        result.append(Column(sent, lambda m: size(bytes_to(m.records, target))))
    return result


def lines(records: Sequence[RunRecord]) -> list[list[str]]:
    """The titles, and one line per method; empty if no run has clusters."""
    found = methods(records)
    if not found:
        return []
    shown = columns(found)
    return [[c.title for c in shown], *([c.text(method) for c in shown] for method in found)]


def terminal_table(records: Sequence[RunRecord], width: int) -> Group | None:
    """The table for a terminal; None if no run has clusters."""
    if not (found := lines(records)):
        return None
    titles, *texts = found
    return Group(Text(TITLE, style="bold"), *fitting_tables(titles, texts, width))


def markdown(records: Sequence[RunRecord]) -> str:
    """The table as Markdown; empty if no run has clusters."""
    found = lines(records)
    return f"\n{TITLE}:\n\n{pipe_table(found, left=1)}" if found else ""


def numbers(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The fairness of each run in its last evaluation; all empty if no run has clusters."""
    rows = [_numbers(record) for record in records]
    target = _target(methods(records))
    if target is not None:
        for row, record in zip(rows, records, strict=True):
            if row:
                row |= {"common_target": target, "bytes_to_target": bytes_to([record], target)}
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def summaries(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The same with the names of the runs; only of those with clusters."""
    found = zip(records, numbers(records), strict=True)
    return [
        {"run": record.folder.name, **row}
        for record, row in found
        if row and fairness_over_rounds(record)
    ]


def for_json(record: RunRecord) -> dict[str, Any]:
    """The fairness of every evaluation, and the head choice; empty without clusters."""
    found = fairness_over_rounds(record)
    if not found:
        return {}
    peak = highest_fair_accuracy(found)
    result: dict[str, Any] = {
        "fairness": {
            "highest_fair_accuracy": None if peak is None else peak[1],
            "highest_round": None if peak is None else peak[0],
            "evaluations": [asdict(evaluation) for evaluation in found],
        }
    }
    settled = settlement(record)
    if settled is not None:
        counts = histograms(record)
        result["head_choice"] = {
            **asdict(settled),
            "rounds": list(counts),
            "histograms": list(counts.values()),
        }
    return result


def _numbers(record: RunRecord) -> dict[str, Any]:
    found = fairness_over_rounds(record)
    if not found:
        return {}
    last, peak, settled = found[-1], highest_fair_accuracy(found), settlement(record)
    return {
        "parity": last.parity,
        "parity_mean": last.parity_mean,
        "odds": last.odds,
        "odds_mean": last.odds_mean,
        "fair_accuracy": last.fair_accuracy,
        "highest_fair_accuracy": None if peak is None else peak[1],
        "highest_fair_round": None if peak is None else peak[0],
        "worst_node": last.worst_node,
        "worst_tenth": last.worst_tenth,
        "jain": last.jain,
        "separated_round": settled and settled.separated,
        "settled_round": settled and settled.settled,
    }


def _target(found: Sequence[Method]) -> float | None:
    """The accuracy that all methods of a comparison reached; None for a single one."""
    return common_target([method.records for method in found]) if len(found) > 1 else None


def _share(value: Estimate) -> str:
    if value.mean is None:
        return "-"
    return f"{value.mean:.4f}" + ("" if value.std is None else f" ± {value.std:.4f}")


def _percents(value: Estimate) -> str:
    if value.mean is None or value.std is None:
        return percent(value.mean)
    return f"{100 * value.mean:.1f} ± {100 * value.std:.1f} %"


def _peak(peak: tuple[int, float] | None) -> str:
    return "-" if peak is None else f"{percent(peak[1])} ({peak[0]})"


def _rounds(method: Method, which: str) -> str:
    """The round of each seed."""
    found = [settlement(record) for record in method.records]
    if not any(found):
        return "-"
    rounds = [None if one is None else getattr(one, which) for one in found]
    return ", ".join("never" if round is None else str(round) for round in rounds)
