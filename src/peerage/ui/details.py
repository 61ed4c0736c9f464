"""The parts of a page that need the whole record of a run, or the modules of reports."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from peerage.errors import InputError, PeerageError
from peerage.records.rows import RunRecord

LARGEST = 64 << 20  # bytes of metrics that are read as a whole for tables and figures
TYPES = {
    "report.html": "text/html",
    "table.csv": "text/csv",
    "curves.json": "application/json",
    "table.md": "text/markdown",
}


def load(folder: Path) -> RunRecord:
    """The record of a run, which is kept until the run changes."""
    path = folder / "metrics.jsonl"
    size = path.stat().st_size if path.exists() else 0
    if size > LARGEST:
        raise InputError(
            f"{folder.name} has {size >> 20} MB of metrics, too many for this view; use "
            "`peerage report`"
        )
    summary = folder / "summary.json"
    changed = summary.stat().st_mtime_ns if summary.exists() else 0
    return _load(folder, size, changed)


@lru_cache(maxsize=64)
def _load(folder: Path, size: int, changed: int) -> RunRecord:
    return RunRecord.load(folder)


def details(folder: Path) -> dict[str, Any]:
    """Warnings, settings, facts about data and graph, and the tables of groups and fairness."""
    from peerage.report import fairness_tables, groups, html, peers, tables

    record = load(folder)
    figures = [name for name, (known, _) in figures_of().items() if known(record)]
    return {
        "notes": html.notes([record]),
        "settings": tables.settings(record),
        "facts": html.facts(record),
        "groups": [list(groups.TITLES), *groups.lines(record)] if groups.lines(record) else [],
        "fairness": fairness_tables.lines([record]),
        "peers": peers.table(record),
        "figures": figures,
    }


Draw = tuple[Callable[[RunRecord], bool], Callable[[RunRecord], Any]]


def figures_of() -> dict[str, Draw]:
    """The figures of reports that pages show, by name, each with whether a run has its data."""
    from peerage.report import fairness_figures, figures
    from peerage.report.fairness import fairness_over_rounds
    from peerage.report.head_choice import has_head_choices

    return {
        "allocation": (lambda record: "allocation" in record.setup, figures.allocation),
        "head-choice": (has_head_choices, fairness_figures.head_choice),
        "fair-accuracy": (
            lambda record: bool(fairness_over_rounds(record)),
            lambda record: fairness_figures.fair_accuracy_curves([record]),
        ),
    }


def figure(folder: Path, name: str) -> bytes:
    """A figure of a report as SVG."""
    from peerage.report.figures import render

    known = figures_of()
    if name not in known:
        raise InputError(f"there is no figure {name!r}; it is one of {', '.join(known)}")
    record = load(folder)
    if not known[name][0](record):
        raise InputError(f"{folder.name} has no data for the figure {name}")
    return render(known[name][1](record), "svg")


def download(folders: Sequence[Path], name: str) -> bytes:
    """A report or table about runs as a file; equal to that of `peerage report`."""
    from peerage.report import html
    from peerage.report.export import TEXTS

    records = [load(folder) for folder in folders]
    if name == "report.html":
        return html.page(records).encode()
    return TEXTS[Path(name).suffix](records).encode()


def model(folder: Path, node: str) -> bytes:
    """The model of a node, as `peerage model` writes it."""
    from peerage.runs.model_files import FORMATS
    from peerage.runs.saved import open_run

    chosen: int | str = int(node) if node.isdecimal() else node
    return FORMATS["safetensors"](open_run(folder).choose(chosen))


def comparison(folders: Sequence[Path], key: str) -> dict[str, Any]:
    """Curves of methods with bands over their seeds, and a table of all runs."""
    from peerage.report.figures import curve_styles
    from peerage.report.series import by_method, thinned
    from peerage.report.tables import cells, compare
    from peerage.ui.views import POINTS, metric_keys, metric_of

    records, failures = [], []
    for folder in folders:
        try:
            records.append(load(folder))
        except PeerageError as error:
            failures.append(str(error))
    series = by_method(records)
    styles = curve_styles([one.algorithm for one in series])
    keys = list(dict.fromkeys(k for record in records for k in metric_keys(record.network)))
    metric = metric_of(key)
    curves = []
    for one, style in zip(series, styles, strict=True):
        rounds, means, stds = one.curve(key)
        places = thinned(range(len(rounds)), POINTS)
        curves.append(
            {
                "label": one.label,
                "seeds": one.seeds,
                "colour": style.colour,
                "dash": style.dash,
                "x": [rounds[i] for i in places],
                "y": [means[i] for i in places],
                **(
                    {
                        "low": [means[i] - stds[i] for i in places],
                        "high": [means[i] + stds[i] for i in places],
                    }
                    if one.seeds > 1
                    else {}
                ),
            }
        )
    rows = compare(records)
    titles, lines = cells(rows)
    return {
        "key": key,
        "keys": {k: (metric_of(k).title or metric_of(k).label).capitalize() for k in keys},
        "title": (metric.title or metric.label).capitalize(),
        "scale": metric.scale,
        "curves": curves,
        "titles": titles,
        "lines": lines,
        "failures": failures,
    }
