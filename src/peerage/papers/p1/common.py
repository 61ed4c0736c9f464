"""Cases, labels, curves and tables that P1's tables and figures share."""

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import Any

from matplotlib.figure import Figure

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Line, Plot, line_of
from peerage.papers.datasets import TITLES
from peerage.papers.p1.computation import UNIT, examples_per_round
from peerage.papers.p1.notes import jobs_of, settings_of
from peerage.papers.p1.printed import Accuracy, Case
from peerage.papers.p1.settings import Setting
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Results, Training
from peerage.records.metrics import BY_KEY
from peerage.report.series import Curve, Estimate, Key, Series, estimate

REGULAR = "models.regular.accuracy"
THOUSAND, MILLION = 1e3, 1e6
GIGA = 1e9
COMPUTATION = f"{UNIT}, millions"


def case_of(place: Setting) -> Case:
    return Case(place.dataset, place.models, place.clients, place.split)


def cases(results: Results) -> list[Case]:
    """Data sets, models, numbers of clients and splits, in the order of the jobs."""
    return list(dict.fromkeys(case_of(place) for place in settings_of(results)))


def places_of(results: Results, case: Case) -> dict[Setting, Series]:
    found: dict[Setting, Series] = results.places(**case._asdict())
    return found


def heading(columns: Sequence[Case], case: Case) -> tuple[str, str]:
    """The data set, with models and clients where columns differ in them, and the split."""
    words = [TITLES[case.dataset]]
    if len({column.models for column in columns}) > 1:
        words.append(case.models)
    if len({column.clients for column in columns}) > 1:
        words.append(f"N = {case.clients}")
    return ", ".join(words), case.split


def case_title(results: Results, case: Case) -> str:
    """What differs between the cases of a study: at least the split."""
    known = cases(results)
    outer, split = heading(known, case)
    several = len({other[:3] for other in known}) > 1
    return f"{outer}, {split}" if several else split


def label_of(results: Results, place: Setting) -> str:
    """The method, or the value that the study varies, or both if both differ."""
    if not place.setting:
        return place.method
    several = len({other.method for other in settings_of(results)}) > 1
    return f"{place.method}, {place.setting}" if several else place.setting


def labels(results: Results) -> list[str]:
    return list(dict.fromkeys(label_of(results, place) for place in settings_of(results)))


def final_table(
    results: Results,
    title: str,
    notes: tuple[str, ...],
    *,
    key: Key = "accuracy",
    paper: Callable[[Setting], Accuracy | None] = lambda place: None,
) -> PaperTable:
    """The mean over clients in the last round: a row for each label, and a column for each case."""
    columns, rows = cases(results), list[Row]()
    for label in labels(results):
        places = {
            case_of(place): place
            for place in settings_of(results)
            if label_of(results, place) == label
        }
        cells = []
        for case in columns:
            place = places.get(case)
            beside = paper(place) if place else None
            ours = final(results, place, key)
            cells.append(Cell(*ours, *(beside or (None, None))))
        rows.append(((label,), tuple(cells)))
    varied = all(place.setting for place in settings_of(results))
    several = len({place.method for place in settings_of(results)}) > 1
    return PaperTable(
        title,
        ("variant" if varied and not several else "method",),
        tuple(heading(columns, case) for case in columns),
        tuple(rows),
        "percent",
        best="max",
        notes=notes,
    )


def final(results: Results, place: Setting | None, key: Key = "accuracy") -> Estimate:
    series = None if place is None else results.series.get(place)
    return Estimate(None, None) if series is None else series.final(key)


def lines_of(
    results: Results,
    case: Case,
    key: Key = "accuracy",
    stretch: Callable[[Setting], float] | None = None,
) -> tuple[Line, ...]:
    """The curves of a case; `stretch` is the length of a round on the horizontal axis."""
    return tuple(
        line_of(
            label_of(results, place),
            series,
            key,
            stretch=1.0 if stretch is None else stretch(place),
        )
        for place, series in places_of(results, case).items()
    )


def curve_plots(results: Results, key: str = "accuracy") -> Figure:
    """One panel per case, over the rounds, with both splits side by side."""
    panels = round_panels(results, key)
    return charts.plots(panels, columns=2 if len(panels) <= 6 else 4)


def round_panels(results: Results, key: str = "accuracy") -> list[Plot]:
    ylabel = BY_KEY[key.rpartition(".")[2]].label
    panels = []
    for case in cases(results):
        lines = lines_of(results, case, key)
        if lines:
            title = case_title(results, case)
            panels.append(Plot(title, lines, ylabel=ylabel, percent=True))
    return panels


def per_round(results: Results, place: Setting) -> float:
    """Examples that pass forward and backward in a round, as the mean over seeds."""
    job = job_at(results, place)
    setups = [record.setup for record in results.series[place].records]
    return fmean(examples_per_round(job.experiment, setup) for setup in setups)


def job_at(results: Results, place: Setting) -> Training:
    return next(job for job in jobs_of(results) if job.place == place)


def computation_panels(results: Results) -> list[Plot]:
    """One panel per case, over the examples that passed forward and backward."""
    panels = []
    for case in cases(results):
        lines = lines_of(results, case, stretch=lambda place: per_round(results, place) / MILLION)
        if lines:
            title = case_title(results, case)
            panels.append(Plot(title, lines, xlabel=COMPUTATION, ylabel=ACCURACY))
    return panels


def traffic_line(label: str, series: Series) -> Line:
    """The accuracy over the bytes that all nodes sent until then, in gigabytes."""
    rounds, means, stds = series.curve("accuracy")
    sent = dict(zip(*series.curve("bytes_total")[:2], strict=True))
    known = [r in sent for r in rounds]
    x = [sent[r] / GIGA for r in rounds if r in sent]
    y = [mean for mean, there in zip(means, known, strict=True) if there]
    spread = [std for std, there in zip(stds, known, strict=True) if there]
    return Line(label, x, y, spread if series.seeds > 1 else ())


def alpha_curve(series: Series) -> tuple[list[int], list[float]]:
    """alpha in the tested rounds, which all nodes and seeds have in common."""
    notes = series.records[0].notes("alpha")
    return notes[min(notes)] if notes else ([], [])


def mean_curve(curves: Iterable[tuple[Sequence[int], Sequence[float]]]) -> Curve:
    """Means and deviations over seeds, in the rounds that all seeds have."""
    found = [dict(zip(rounds, values, strict=True)) for rounds, values in curves]
    rounds = sorted(set.intersection(*map(set, found))) if found else []
    columns = [[values[round] for values in found] for round in rounds]
    return Curve(rounds, [fmean(column) for column in columns], [pstdev(c) for c in columns])


def over_seeds(series: Series | None, value: Callable[[Any], float | None]) -> Estimate:
    """The estimate of a value of each record."""
    return estimate([] if series is None else [value(record) for record in series.records])
