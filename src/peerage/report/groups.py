"""Reports about groups of nodes: clusters with their own data, and architectures."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from peerage.records.rows import Row, RunRecord
from peerage.report.tables import labels, number, percent, pipe_table, tables_of_columns

KINDS = {"cluster": "Clusters", "architecture": "Architectures"}  # what rows are grouped by
TITLES = ("group", "nodes", "accuracy", "min..max", "best (round)", "loss")


def group_name(record: RunRecord, by: str, group: int | str) -> str:
    """The name of a group for people; that of a cluster mentions its shift."""
    names = record.setup.get("clusters", {}).get("names", [])
    if by == "cluster":
        return str(names[int(group)]) if int(group) < len(names) else f"cluster {group}"
    return str(group)


def last_rows(record: RunRecord) -> list[Row]:
    """The last row of each group in the last round in which any of them was evaluated."""
    last = max((row["round"] for row in record.groups), default=None)
    rows = [row for row in record.groups if row["round"] == last]
    return list({(row["by"], row["group"]): row for row in rows}.values())


def lines(record: RunRecord) -> list[list[str]]:
    """One table row per group, as text; empty without groups."""
    return [_line(record, row) for row in last_rows(record)]


def _line(record: RunRecord, row: Row) -> list[str]:
    known = [
        (float(other["accuracy"]), other["round"])
        for other in record.groups
        if (other["by"], other["group"]) == (row["by"], row["group"])
        if other.get("accuracy") is not None
    ]
    best = max(known, key=lambda pair: pair[0], default=None)
    low, high = row.get("accuracy_min"), row.get("accuracy_max")
    return [
        group_name(record, row["by"], row["group"]),
        str(row["nodes"]),
        percent(row.get("accuracy")),
        "-" if low is None or high is None else f"{100 * low:.1f}..{100 * high:.1f} %",
        "-" if best is None else f"{percent(best[0])} ({best[1]})",
        number(row.get("loss")),
    ]


def group_tables(records: Sequence[RunRecord], width: int = 80) -> list[Table]:
    """The tables of groups for a terminal, at least one for each run that has groups."""
    tables = []
    for name, record in zip(labels(records), records, strict=True):
        found = lines(record)
        if not found:
            continue
        parts = tables_of_columns(TITLES, found, width)
        if len(records) > 1:
            parts[0].title, parts[0].title_justify = Text(name), "left"
        tables += parts
    return tables


def markdown(records: Sequence[RunRecord]) -> str:
    """The groups of all runs as a Markdown table; empty without groups."""
    rows = [
        [name, *line]
        for name, record in zip(labels(records), records, strict=True)
        for line in lines(record)
    ]
    return "\n" + pipe_table([["run", *TITLES], *rows], left=2) if rows else ""
