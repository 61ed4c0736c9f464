"""Write runs to one file; the suffix of its name selects the format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peerage.errors import InputError
from peerage.files import compact_json, write_bytes
from peerage.records.rows import RunRecord
from peerage.report import fairness_tables, figures, groups
from peerage.report.html import write_report
from peerage.report.tables import comma_separated, compare, markdown

REMEDY = "write the report again"


def export(records: Sequence[RunRecord], out: Path) -> None:
    """Write .html (full report), .md or .csv (table), .json (curves), .png or .svg (accuracy)."""
    kind = out.suffix.lower()
    if kind == ".html":
        write_report(records, out)
    elif kind in (".png", ".svg"):
        figures.save(figures.curves(records, "accuracy"), out)
    elif kind in TEXTS:
        write_bytes(out, TEXTS[kind](records).encode(), REMEDY)
    else:
        raise InputError(
            f"cannot write a report to {out.name!r}; "
            "use a name that ends in .html, .md, .csv, .json, .png or .svg"
        )


def curves(records: Sequence[RunRecord]) -> str:
    """JSON with the network metrics of every round, without the rows of single nodes."""
    return compact_json({"runs": [_run(record) for record in records]}) + "\n"


def _run(record: RunRecord) -> dict[str, Any]:
    rows = record.network
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("scope", "seconds"))
    rounds = {key: [row.get(key) for row in rows] for key in keys}
    rounds["seconds"] = [round(row["seconds"]["total"], 3) for row in rows]
    return {
        "label": record.label,
        "summary": record.summary,
        "experiment": record.experiment,
        "environment": record.environment,
        "rounds": rounds,
        **({"groups": list(record.groups)} if record.groups else {}),
        **fairness_tables.for_json(record),
    }


def _markdown(records: Sequence[RunRecord]) -> str:
    runs = markdown(compare(records))
    return runs + groups.markdown(records) + fairness_tables.markdown(records)


def _csv(records: Sequence[RunRecord]) -> str:
    further = fairness_tables.numbers(records)
    rows = zip(compare(records), further, strict=True)
    return comma_separated([row | more for row, more in rows])


TEXTS = {
    ".md": _markdown,
    ".csv": _csv,
    ".json": curves,
}
