"""Comparison of runs: rows of numbers, and the same as text, Markdown or CSV."""

import csv
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from peerage.records.metrics import SCORES, Metric, own_metric
from peerage.records.phases import OTHER, PHASES, in_order
from peerage.records.rows import Row, RunRecord, value_at

SHARES = (50, 75, 90)  # percent of the best accuracy of any run (P0, table II)
COLUMNS = [metric for metric in SCORES if metric.column]
OWN = "own."  # prefix of the keys of users' own metrics, which only some runs may have


def compare(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One row of numbers per run; accuracies are fractions, and unknown values are None.

    `target_x` is x % of the best accuracy of any of the runs; `rounds_to_x` is the first evaluated
    round whose mean accuracy over the nodes reaches it, and `bytes_to_x` are the bytes that a node
    has sent until then, as the mean over the nodes.
    """
    best = max((peak[1] for record in records if (peak := record.best())), default=0.0)
    names = labels(records)
    models = list(dict.fromkeys(name for record in records for name in record.model_names))
    own = list(dict.fromkeys(name for record in records for name in record.own_metrics))
    return [
        _row(record, label, best) | _models(record, models) | _own(record, own)
        for record, label in zip(records, names, strict=True)
    ]


def cells(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Column titles, and one list of texts per run."""
    targets = [f"rounds to accuracy {percent(rows[0][f'target_{x}'])}" for x in SHARES if rows]
    titles = ["run", "algorithm", "rounds", "accuracy ± std", "nodes min..max", "last 10 rounds"]
    own = [own_metric(key.removeprefix(OWN)) for key in _own_keys(rows)]
    titles += ["best (round)", *[metric.label for metric in (*COLUMNS, *own)], *targets]
    titles += ["sent per node", "sent in total", "time per round"]
    models = _model_keys(rows)
    titles[4:4] = [f"accuracy of {key.split('.')[1]}" for key in models]
    texts = [_texts(row) for row in rows]
    for row, line in zip(rows, texts, strict=True):
        line[4:4] = [percent(row[key]) for key in models]
    return titles, texts


def rich_table(rows: Sequence[Mapping[str, Any]], width: int = 80) -> Group:
    """The comparison for a terminal: runs as rows if they fit, otherwise as columns.

    If the columns do not fit either, they are split into several tables.
    """
    return Group(*fitting_tables(*cells(rows), width))


def fitting_tables(
    titles: Sequence[str], texts: Sequence[Sequence[str]], width: int
) -> list[Table]:
    """One table with a line per run, or tables with a column per run, as many as fit the width."""
    table = text_table(titles, texts)
    if table_width(table) <= width:
        return [table]
    per_table = len(texts)
    while per_table > 1 and max(map(table_width, _transposed(titles, texts, per_table))) > width:
        per_table -= 1
    return _transposed(titles, texts, per_table)


def tables_of_columns(
    titles: Sequence[str], lines: Sequence[Sequence[str]], width: int, left: Sequence[int] = (0,)
) -> list[Table]:
    """One table, or several with some of the columns, each with the first one, that fit the width.

    A line is a node or a group, of which there may be too many to be columns.
    """
    found: list[list[int]] = []
    for place in range(1, len(titles)):
        wider = [*found[-1], place] if found else [0, place]
        if found and table_width(_with_columns(titles, lines, wider, left)) <= width:
            found[-1] = wider
        else:
            found.append([0, place])
    return [_with_columns(titles, lines, places, left) for places in found]


def _with_columns(
    titles: Sequence[str],
    lines: Sequence[Sequence[str]],
    places: Sequence[int],
    left: Sequence[int],
) -> Table:
    chosen = [[line[place] for place in places] for line in (titles, *lines)]
    return text_table(chosen[0], chosen[1:], [n for n, place in enumerate(places) if place in left])


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    titles, texts = cells(rows)
    return pipe_table([titles, *texts], left=2)


def pipe_table(lines: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table; the first line is the header, the first `left` columns are left-aligned."""
    rule = ["---"] * left + ["--:"] * (len(lines[0]) - left)
    texts = [[text.replace("|", "\\|") for text in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in [texts[0], rule, *texts[1:]])


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers as CSV; an unknown value is an empty field."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def labels(records: Sequence[RunRecord]) -> list[str]:
    """A unique name for each run: its label, with differing settings or the folder if needed."""
    names = [record.label for record in records]
    for label, count in Counter(names).items():
        if count > 1:
            same = [index for index, record in enumerate(records) if record.label == label]
            for index, name in zip(same, _distinct([records[i] for i in same]), strict=True):
                names[index] = f"{label} ({name})"
    return names


def settings(record: RunRecord) -> dict[str, str]:
    """The experiment as a flat table, such as {"partition.alpha": "0.2"}."""
    return _flat(record.experiment)


def setting_text(value: Any) -> str:
    """A setting in one line: `er: p=0.2` for a table with a name and options.

    >>> setting_text({"name": "er", "p": 0.2}), setting_text([{"name": "mlp"}, {"name": "vit"}])
    ('er: p=0.2', 'mlp; vit')
    """
    if isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            return "; ".join(map(setting_text, value))
        return "+".join(map(str, value))
    if not isinstance(value, Mapping):
        return str(value)
    options = ", ".join(
        f"{key}={setting_text(option)}" for key, option in value.items() if key != "name"
    )
    return ": ".join(filter(None, [str(value.get("name", "")), options]))


def settings_but(record: RunRecord, *keys: str) -> str:
    """The settings that may change the result, without some, as text to group runs by."""
    table = settings(record).items()
    return str(
        sorted(item for item in table if item[0] not in keys and not item[0].startswith("engine."))
    )


def differing(tables: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys whose values differ between tables, in order of first appearance."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if len({table.get(key) for table in tables}) > 1]


def percent(fraction: float | None, digits: int = 1) -> str:
    return "-" if fraction is None else f"{100 * fraction:.{digits}f} %"


def value_text(metric: Metric, value: float | None) -> str:
    return percent(value) if metric.scale == "fraction" else number(value)


def number(value: float | None) -> str:
    """A number as text: thin spaces between thousands, three digits for fractions."""
    if value is None:
        return "-"
    if float(value).is_integer():
        return f"{int(value):,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return f"{value:.3g}"


def size(count: float | None) -> str:
    """Bytes in decimal units with three digits: 12345678 -> '12.3 MB'."""
    if count is None:
        return "-"
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        # From 999.5 on, rounding would give four digits, so the next unit is used.
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{value:.0f} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{_three_digits(1000 * seconds)} ms"
    return f"{_three_digits(seconds)} s"


def seconds_per_round(record: RunRecord) -> float | None:
    """Mean seconds per round, without round 0, which is an evaluation only."""
    totals = [row.get("seconds", {}).get("total") for row in record.network if _is_round(row)]
    known = [total for total in totals if total is not None]
    return sum(known) / len(known) if known else None


def phase_means(record: RunRecord) -> dict[str, float]:
    """Mean seconds per round of each phase; the remaining wall time is `other`."""
    rows = [row.get("seconds", {}) for row in record.network if _is_round(row)]
    found = in_order([*PHASES, *(phase for row in rows for phase in row)])
    count = max(len(rows), 1)
    means = {phase: sum(row.get(phase) or 0.0 for row in rows) / count for phase in found}
    total = means.pop("total", 0.0)
    return means | {OTHER: max(total - sum(means.values()), 0.0)}


def _is_round(row: Row) -> bool:
    """Whether the row is of a round, not of the initial models or of the step after the last."""
    return row["round"] > 0 and not row.get("final")


def table_width(table: Table) -> int:
    console = Console(width=10_000)
    return Measurement.get(console, console.options, table).maximum


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def _row(record: RunRecord, label: str, best_of_all: float) -> dict[str, Any]:
    rounds, values = record.curve("accuracy")
    last = _last_evaluated(record)
    peak = record.best()
    ending = [value for r, value in zip(rounds, values, strict=True) if r > rounds[-1] - 10]
    count = record.summary.get("nodes") or record.experiment.get("nodes")
    sent = record.network[-1]["bytes_total"] if record.network else None
    row = {
        "run": record.folder.name,
        "label": label,
        "algorithm": record.algorithm,
        "status": record.status,
        "nodes": count,
        "rounds": record.rounds,
        "rounds_planned": record.summary.get("rounds_planned"),
        "until": None if record.summary.get("stopped") else record.experiment.get("until"),
        "evaluated_round": rounds[-1] if rounds else None,
        "accuracy": values[-1] if values else None,
        "accuracy_std": last.get("accuracy_std"),
        "accuracy_min": last.get("accuracy_min"),
        "accuracy_max": last.get("accuracy_max"),
        "accuracy_last_10": sum(ending) / len(ending) if rounds and rounds[-1] >= 10 else None,
        "best_accuracy": None if peak is None else peak[1],
        "best_round": None if peak is None else peak[0],
        **{metric.key: last.get(metric.key) for metric in COLUMNS},
    }
    for share in SHARES:
        target = share / 100 * best_of_all
        row[f"target_{share}"] = target
        reached = record.rounds_to(target) if best_of_all > 0 else None
        row[f"rounds_to_{share}"] = reached
        row[f"bytes_to_{share}"] = None if reached is None else bytes_until(record, reached)
    row["bytes_per_node"] = sent / count if sent is not None and count else None
    row["bytes_total"] = sent
    row["wire_bytes"] = record.summary.get("wire_bytes")  # of real peers, with all headers
    row["seconds_per_round"] = seconds_per_round(record)
    return row


def bytes_until(record: RunRecord, round: int) -> float | None:
    """Bytes sent until the end of a round, as the mean over the nodes."""
    sent = [row["bytes_total"] for row in record.network if row["round"] <= round]
    nodes = record.summary.get("nodes") or record.experiment.get("nodes")
    return sent[-1] / nodes if sent and nodes else None


def _last_evaluated(record: RunRecord) -> Row:
    """The last row of the network with metrics; empty if there is none."""
    rows = (row for row in reversed(record.network) if row.get("accuracy") is not None)
    return next(rows, {})


def _models(record: RunRecord, names: Sequence[str]) -> dict[str, float | None]:
    """The last accuracies of the models with these names, which only some runs may have."""
    last = _last_evaluated(record)
    keys = [f"models.{name}.accuracy" for name in names]
    return {key: value_at(last, key) for key in keys}


def _own(record: RunRecord, names: Sequence[str]) -> dict[str, float | None]:
    """The last values of users' own metrics of these names."""
    last = _last_evaluated(record)
    return {OWN + name: last.get(name) if name in record.own_metrics else None for name in names}


def _own_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in (rows[0] if rows else ()) if key.startswith(OWN)]


def _model_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [key for key in (rows[0] if rows else ()) if key.startswith("models.")]


def _texts(row: Mapping[str, Any]) -> list[str]:
    done, planned = str(row["rounds"]), row["rounds_planned"]
    if planned not in (None, row["rounds"]):
        ended = " (target reached)" if row["until"] else f" of {planned} (stopped)"
        done += ended if row["status"] == "finished" else f" of {planned}"
    spread, wire = [row["accuracy_min"], row["accuracy_max"]], row.get("wire_bytes")
    return [
        row["label"],
        row["algorithm"],
        done if row["status"] == "finished" else f"{done}, {row['status']}",
        _with_spread(row["accuracy"], row["accuracy_std"]),
        "-" if None in spread else f"{100 * spread[0]:.1f}..{100 * spread[1]:.1f} %",
        percent(row["accuracy_last_10"]),
        "-"
        if row["best_round"] is None
        else f"{percent(row['best_accuracy'])} ({row['best_round']})",
        *[value_text(metric, row[metric.key]) for metric in COLUMNS],
        *[number(row[key]) for key in _own_keys([row])],
        *["-" if row[f"rounds_to_{x}"] is None else str(row[f"rounds_to_{x}"]) for x in SHARES],
        size(row["bytes_per_node"]),
        size(row["bytes_total"]) + ("" if wire is None else f" ({size(wire)} on the wire)"),
        duration(row["seconds_per_round"]),
    ]


def _with_spread(mean: float | None, deviation: float | None) -> str:
    if mean is None or deviation is None:
        return percent(mean)
    return f"{100 * mean:.1f} ± {100 * deviation:.1f} %"


def text_table(
    titles: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> Table:
    """A table for a terminal; the columns `left` are left-aligned."""
    table = Table(header_style="bold")
    for number, title in enumerate(titles):
        justify: Literal["left", "right"] = "left" if number in left else "right"
        # In a narrow terminal a long word continues on the next line, instead of being cut.
        table.add_column(Text(title), justify=justify, overflow="fold")
    for line in lines:
        table.add_row(*map(Text, line))  # as Text: a label may hold square brackets
    return table


def _transposed(
    titles: Sequence[str], texts: Sequence[Sequence[str]], per_table: int
) -> list[Table]:
    tables = []
    for start in range(0, len(texts), per_table):
        lines = list(zip(titles, *texts[start : start + per_table], strict=True))
        tables.append(text_table([text.replace(" (", "\n(") for text in lines[0]], lines[1:]))
    return tables


def _distinct(records: Sequence[RunRecord]) -> list[str]:
    tables = [settings(record) for record in records]
    # The engine does not change the result, so it does not name a run.
    keys = [key for key in differing(tables) if not key.startswith("engine.")]
    names = [", ".join(f"{_short(key)}={table.get(key, '-')}" for key in keys) for table in tables]
    if len(set(names)) < len(names) or max(map(len, names)) > 30:
        names = [record.folder.name for record in records]
    if len(set(names)) < len(names):
        names = [str(record.folder) for record in records]
    return names


def _short(key: str) -> str:
    return key.removesuffix(".name").rpartition(".")[2]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            found[prefix + key] = text
    return found
