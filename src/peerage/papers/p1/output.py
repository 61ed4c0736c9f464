"""Figures of P1 with training, and studies of our own."""

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Bars, Line, Plot, line_of
from peerage.papers.datasets import TITLES
from peerage.papers.p1 import printed
from peerage.papers.p1.common import (
    REGULAR,
    alpha_curve,
    case_of,
    case_title,
    cases,
    curve_plots,
    final,
    final_table,
    mean_curve,
    places_of,
)
from peerage.papers.p1.notes import NO_DATA, SAME, UNNAMED, notes_of, settings_of
from peerage.papers.p1.printed import Accuracy
from peerage.papers.p1.settings import DFML, FEDAVG, FML, HETEROFL, Setting
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Results, StudyOutput
from peerage.records.rows import RunRecord
from peerage.report.series import Curve, Series, curve_of, estimate

LOCAL = "validation_accuracy"
MEME = "models.meme.accuracy"
KINDS = {DFML: False, FEDAVG: True}  # whether their lines are dashed
PEAK_MODELS, REGULAR_MODELS, ALPHA = "peak models", "regular models", "alpha"


# Curves over the rounds


def show_curves(
    number: int, results: Results, *, note: str = UNNAMED, tables: Sequence[int] = ()
) -> StudyOutput:
    """A panel for each split, and the last values; `tables` are those that print them."""
    table = final_table(
        results,
        f"Fig. {number}: accuracy of the last models",
        notes_of(results, *([note] if note else []), *same(results)),
        paper=lambda place: printed_in(tables, place),
    )
    return StudyOutput((table,), curve_plots(results))


def show_local(results: Results) -> StudyOutput:
    """Fig. 18: the accuracy on held-out examples of the clients themselves."""
    note = "The local accuracy of a client is that on the fifth of its own data that is held out."
    table = final_table(
        results, "Fig. 18: local accuracy of the last models", notes_of(results, note), key=LOCAL
    )
    figure = curve_plots(results, LOCAL)
    return StudyOutput((table,), figure, curves=(LOCAL, "accuracy"))


def show_senders(results: Results) -> StudyOutput:
    """Fig. 19: a colour for each share of senders; lines of Dec. FedAvg are dashed."""
    table = final_table(results, "Fig. 19: accuracy of the last models", notes_of(results, UNNAMED))
    panels = []
    for case in cases(results):
        lines = tuple(
            line_of(place.setting, series, "accuracy", dashed=place.method == FEDAVG)
            for place, series in places_of(results, case).items()
        )
        if lines:
            panels.append(Plot(case_title(results, case), lines, ylabel=ACCURACY))
    return StudyOutput((table,), charts.plots(panels, columns=2, kinds=KINDS))


def printed_in(tables: Sequence[int], place: Setting) -> Accuracy | None:
    """The number of the first of these tables that has this case."""
    for number in tables:
        found = printed.lines(number).get(place.method, {}).get(case_of(place))
        if found is not None and not place.setting:
            return found
    return None


def same(results: Results) -> tuple[str, ...]:
    return (SAME,) if HETEROFL in results.values("method") else ()


# Fig. 1 and 4


def show_heterogeneity(number: int, results: Results) -> StudyOutput:
    """Fig. 1 and 4: bars of all methods for each kind of models and split."""
    name = TITLES[results.values("dataset")[0]]
    table = final_table(
        results,
        f"Fig. {number}: accuracy of the last models on {name}",
        notes_of(
            results,
            "H0 are equal models, the median of those of H1. The paper's numbers are those of "
            "Tables 3 and 4 for the same data set; the figure has CIFAR-100.",
            *same(results),
        ),
        paper=lambda place: printed_in((3, 4), place),
    )
    figure = charts.plots(heterogeneity_panels(results), columns=4)
    return StudyOutput((table,), figure)


def heterogeneity_panels(results: Results) -> list[Bars]:
    """A panel for each case with a bar for each method; a single method has one panel."""
    ylabel = f"{ACCURACY}, %"
    if len(results.values("method")) == 1:
        found = {
            f"{place.models}, {place.split}": 100 * mean
            for place, series in results.places().items()
            if (mean := series.final().mean) is not None
        }
        return [Bars("", tuple(found), rounded(found.values()), ylabel=ylabel)] if found else []
    panels = []
    for case in cases(results):
        heights = {
            place.method: 100 * mean
            for place, series in places_of(results, case).items()
            if (mean := series.final().mean) is not None
        }
        if heights:
            bars = rounded(heights.values())
            panels.append(Bars(f"{case.models}, {case.split}", tuple(heights), bars, ylabel=ylabel))
    return panels


def rounded(heights: Iterable[float]) -> dict[str, list[float]]:
    """Bars of one part, rounded to what they are labelled."""
    return {"": [float(f"{height:.3g}") for height in heights]}


# Fig. 5


def show_architectures(results: Results) -> StudyOutput:
    """Fig. 5: the accuracy of the clients with each architecture."""
    names = architecture_names(results)
    columns = [(case, method) for case in cases(results) for method in results.values("method")]
    curves = {
        key: group_curves(results.series.get(Setting(*key[0], "", key[1]))) for key in columns
    }
    rows: list[Row] = []
    for group, name in names.items():
        found = [curves[key].get(group) for key in columns]
        cells = tuple(
            Cell(c.means[-1], c.stds[-1] or None) if c and c.means else Cell(None) for c in found
        )
        rows.append(((name,), cells))
    table = PaperTable(
        title="Fig. 5: accuracy of each architecture, last models",
        row_titles=("architecture",),
        columns=tuple((case_title(results, case), method) for case, method in columns),
        rows=tuple(rows),
        unit="percent",
        notes=notes_of(results, NO_DATA),
    )
    panels = []
    for case in cases(results):
        lines = tuple(
            Line(name, c.rounds, c.means, dashed=method == FEDAVG)
            for group, name in names.items()
            for method in results.values("method")
            if (c := curves[case, method].get(group)) is not None
        )
        if lines:
            panels.append(Plot(case_title(results, case), lines, ylabel=ACCURACY))
    return StudyOutput((table,), charts.plots(panels, columns=2, kinds=KINDS))


def group_curves(series: Series | None) -> dict[int | str, Curve]:
    """The curves of the architectures, as means over seeds."""
    if series is None:
        return {}
    found = [record.group_curves("accuracy", by="architecture") for record in series.records]
    return {group: mean_curve(curves[group] for curves in found) for group in found[0]}


def architecture_names(results: Results) -> dict[int | str, str]:
    """The groups of a run by the names of the figure: C0 and so on, with their widths."""
    for series in results.of():
        groups = dict.fromkeys(row["group"] for row in series.records[0].groups)
        tables = series.records[0].experiment["model"]
        models = tables if isinstance(tables, list) else [tables]
        return {
            group: " ".join(filter(None, (f"C{n}", width_text(models[n]))))
            for group in groups
            for n in [int(str(group).rpartition("-")[2])]  # its place among the models
        }
    return {}


def width_text(model: dict[str, Any]) -> str:
    channels = model.get("channels", ())
    return f"[{', '.join(str(width) for width in channels)}]" if channels else ""


# Fig. 7 and 8: alpha below the curves


def show_cycles(results: Results) -> StudyOutput:
    """Fig. 7: regular models with half and with full cycles, and alpha."""
    table = final_table(
        results,
        "Fig. 7: accuracy of the last regular models",
        notes_of(results, "Runs end where alpha is at its maximum.", UNNAMED),
        key=REGULAR,
    )
    names = results.values("setting")
    panels = []
    for name in names:
        found = results.places(setting=name)
        lines = tuple(line_of(place.split, series, REGULAR) for place, series in found.items())
        panels.append(Plot(name, lines, ylabel=ACCURACY))
    for name in names:
        found = results.places(setting=name)
        lines = tuple(Line(place.split, *alpha_curve(series)) for place, series in found.items())
        panels.append(Plot(name, lines, ylabel=ALPHA, floor=0.0))
    return StudyOutput(
        (table,), charts.plots(panels, columns=len(names)), curves=(REGULAR, "accuracy")
    )


def show_peaks(results: Results) -> StudyOutput:
    """Fig. 8: regular and peak models, and alpha."""
    splits = results.values("split")
    table = PaperTable(
        title="Fig. 8: accuracy of the last models",
        row_titles=("models",),
        columns=tuple((split,) for split in splits),
        rows=tuple(
            (
                (name,),
                tuple(
                    Cell(*series.final(key))
                    for split in splits
                    for series in results.of(split=split) or [Series("", "", ())]
                ),
            )
            for name, key in ((REGULAR_MODELS, REGULAR), (PEAK_MODELS, "accuracy"))
        ),
        unit="percent",
        notes=notes_of(results, "Runs end where alpha is at its maximum.", UNNAMED),
    )
    return StudyOutput(
        (table,), charts.plots(peak_panels(results), columns=2), curves=("accuracy", REGULAR)
    )


def peak_panels(results: Results) -> list[Plot]:
    """Regular and peak models in a panel for each split, and alpha below."""
    panels = [
        Plot(
            place.split,
            (
                line_of(REGULAR_MODELS, series, REGULAR),
                line_of(PEAK_MODELS, series, "accuracy"),
            ),
            ylabel=ACCURACY,
        )
        for place, series in results.places().items()
    ]
    alphas = [
        Plot(place.split, (Line(ALPHA, *alpha_curve(series)),), ylabel=ALPHA, floor=0.0)
        for place, series in results.places().items()
    ]
    return [*panels, *alphas]


def show_levels(results: Results) -> StudyOutput:
    """Not in the paper: levels at maxima and minima of alpha, and the spread over rounds."""
    rows: list[Row] = []
    for place in settings_of(results):
        series = results.series.get(place)
        for name, key in ((REGULAR_MODELS, REGULAR), (PEAK_MODELS, "accuracy")):
            of_seeds = [levels(record, key) for record in series.records] if series else []
            found = [estimate(values) for values in zip(*of_seeds, strict=True)]
            cells = [Cell(*value) for value in found] or [Cell(None)] * 4
            rows.append(((place.split, name), tuple(cells)))
    table = PaperTable(
        title="Levels of regular and peak models",
        row_titles=("split", "models"),
        columns=(("at maxima",), ("at minima",), ("gap",), ("spread over rounds",)),
        rows=tuple(rows),
        unit="percent",
        notes=notes_of(
            results,
            "Maxima and minima are rounds with the largest and the smallest alpha, from the first "
            "maximum on. The spread is the standard deviation over all rounds from there on. The "
            "supervision is cross-entropy.",
        ),
    )
    return StudyOutput(
        (table,), charts.plots(peak_panels(results), columns=2), curves=("accuracy", REGULAR)
    )


def levels(record: RunRecord, key: str) -> tuple[float | None, ...]:
    """The means at maxima and at minima of alpha, their gap, and the deviation over rounds."""
    notes = record.notes("alpha")
    alpha = dict(zip(*notes[min(notes)], strict=True)) if notes else {}
    curve = {r: value for r, value in curve_of(record, key).items() if r in alpha}
    most = max(alpha.values(), default=0.0)
    start = min((r for r in curve if alpha[r] == most), default=None)
    if start is None:
        return (None,) * 4
    later = {r: value for r, value in curve.items() if r >= start}
    least = min(alpha.values())
    high = fmean(value for r, value in later.items() if alpha[r] == most)
    low = [value for r, value in later.items() if alpha[r] == least < most]
    trough = fmean(low) if low else None
    gap = None if trough is None else high - trough
    return high, trough, gap, pstdev(later.values())


# Fig. 24


def show_memes(results: Results) -> StudyOutput:
    """Fig. 24: Dec. FML's own models and memes beside DFML."""
    columns, rows = cases(results), list[Row]()
    curves = {method: (method, "accuracy") for method in results.values("method")}
    curves["Dec. FML, memes"] = (FML, MEME)
    for label, (method, key) in curves.items():
        places = [Setting(*case, "", method) for case in columns]
        cells = [Cell(*final(results, place, key)) for place in places]
        rows.append(((label,), tuple(cells)))
    table = PaperTable(
        title="Fig. 24: accuracy of the last models",
        row_titles=("method",),
        columns=tuple((case.split,) for case in columns),
        rows=tuple(rows),
        unit="percent",
        notes=notes_of(
            results,
            "Memes are the CNN [32, 64].",
            NO_DATA,
        ),
    )
    panels = []
    for case in columns:
        found = places_of(results, case)
        lines = tuple(
            line_of(label, found[place], key)
            for label, (method, key) in curves.items()
            if (place := Setting(*case, "", method)) in found
        )
        if lines:
            panels.append(Plot(case_title(results, case), lines, ylabel=ACCURACY))
    return StudyOutput((table,), charts.plots(panels), curves=("accuracy", "loss"))
