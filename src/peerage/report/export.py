"""Write runs to one file; the suffix of its name selects the format."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peerage.errors import InputError
from peerage.files import compact_json, write_bytes
from peerage.records.rows import RunRecord
from peerage.report import fairness_tables, figures, groups
from peerage.report.html import Show, write_report
from peerage.report.latex import latex
from peerage.report.pdf import write_pdf
from peerage.report.pictures import Picture
from peerage.report.tables import comma_separated, compare, markdown

REMEDY = "write the report again"


ENDINGS = ".html, .pdf, .md, .csv, .tex, .parquet, .json, .png or .svg"


def export(records: Sequence[RunRecord], out: Path, show: "Show[Picture] | None" = None) -> None:
    """Write .html or .pdf (full report), .md, .csv, .tex or .parquet (table), .json (curves), or
    .png or .svg (accuracy).
    """
    kind = out.suffix.lower()
    if kind == ".html":
        write_report(records, out, show)
    elif kind == ".pdf":
        write_pdf(records, out, show)
    elif kind in (".png", ".svg"):
        figures.save(figures.curves(records, "accuracy"), out)
    elif kind == ".parquet":
        write_bytes(out, _parquet(records), REMEDY)
    elif kind in TEXTS:
        write_bytes(out, TEXTS[kind](records).encode(), REMEDY)
    else:
        raise InputError(
            f"cannot write a report to {out.name!r}; use a name that ends in {ENDINGS}"
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
    return comma_separated(_numbers(records))


def _numbers(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """One row of numbers per run."""
    further = fairness_tables.numbers(records)
    return [row | more for row, more in zip(compare(records), further, strict=True)]


def _parquet(records: Sequence[RunRecord]) -> bytes:
    """The table of runs for programs that read Parquet, with the types of its columns."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InputError('a .parquet file needs pyarrow; pip install "peerage[frame]"') from None
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(_numbers(records)), content)
    return content.getvalue()


TEXTS = {
    ".md": _markdown,
    ".csv": _csv,
    ".tex": latex,
    ".json": curves,
}
