"""Figures of P1, and studies of our own, over messages and over computation."""

from typing import Any

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Plot
from peerage.papers.p1.common import (
    GIGA,
    MILLION,
    THOUSAND,
    case_title,
    cases,
    computation_panels,
    final_table,
    job_at,
    label_of,
    lines_of,
    over_seeds,
    per_round,
    places_of,
    round_panels,
    traffic_line,
)
from peerage.papers.p1.notes import UNNAMED, notes_of, settings_of
from peerage.papers.p1.printed import Case
from peerage.papers.p1.settings import DFML, Setting
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Results, StudyOutput

COST_NOTE = (
    "A unit of computation is one example that passes forward and backward through one model, "
    "whatever its size; a pass that is only forward counts as a third, and tests do not count."
)


# Fig. 14: communication


def show_distillation(results: Results) -> StudyOutput:
    """Fig. 14: the models that are sent until an accuracy is reached."""
    columns, rows = cases(results), list[Row]()
    names = results.values("setting")
    targets = {case: common_level(results, case) for case in columns}
    sent: dict[tuple[str, Case], float | None] = {}
    for name in names:
        cells = []
        for case in columns:
            place = Setting(*case, name, DFML)
            series, aim = results.series.get(place), targets[case]
            found = None if series is None or aim is None else series.rounds_to(aim).mean
            sent[name, case] = None if found is None else found * models_per_round(results, place)
            cells.append(Cell(sent[name, case]))
        rows.append(((name,), tuple(cells)))
    both = [[sent[name, case] for name in names] for case in columns]
    shares = tuple(Cell(b / a, unit="number") if a and b else Cell(None) for a, b in both)
    rows.append((("without / with",), shares))
    aims = [f"{100 * t:.1f} % ({c.split})" for c, t in targets.items() if t is not None]
    until = f"the accuracy is {' and '.join(aims)}" if aims else "a target"
    table = PaperTable(
        title=f"Fig. 14: models sent until {until}",
        row_titles=("mutual learning",),
        columns=tuple((case.split,) for case in columns),
        rows=tuple(rows),
        unit="count",
        notes=notes_of(
            results,
            "The target is the lowest last accuracy, which both reach. Without distillation, alpha "
            "is 0. The paper has about ten times the cost without distillation.",
            UNNAMED,
        ),
    )
    panels = [
        Plot(
            case_title(results, case),
            lines_of(results, case, stretch=lambda p: models_per_round(results, p)),
            xlabel="models sent",
            ylabel=ACCURACY,
            log="x",
        )
        for case in columns
        if places_of(results, case)
    ]
    return StudyOutput((table,), charts.plots(panels))


def common_level(results: Results, case: Case) -> float | None:
    """The lowest last accuracy of any run, which every run reaches."""
    lasts = [
        value
        for series in places_of(results, case).values()
        for last in series.rounds()[-1:]
        for value in series.at(last)
    ]
    return min(lasts, default=None)


def models_per_round(results: Results, place: Setting) -> float:
    """Models that are sent in a round: to the aggregator and back."""
    experiment = job_at(results, place).experiment
    algorithm: Any = experiment.algorithm
    return float(2 * algorithm.num_senders(experiment.nodes))


# Fig. 22, and studies of our own: computation


def show_epochs(results: Results) -> StudyOutput:
    """Fig. 22: epochs of mutual learning, over rounds and over computation."""
    table = final_table(
        results,
        "Fig. 22: accuracy of the last models",
        notes_of(results, COST_NOTE, UNNAMED),
    )
    left, right = round_panels(results), computation_panels(results)
    panels = [panel for pair in zip(left, right, strict=True) for panel in pair]
    return StudyOutput((table, cost_table(results)), charts.plots(panels, columns=2))


def cost_table(results: Results, notes: tuple[str, ...] = ()) -> PaperTable:
    """What a run costs: examples in a round and in all, and gigabytes."""
    rows: list[Row] = []
    for place in settings_of(results):
        series = results.series.get(place)
        if series is None:
            rows.append(((place.split, label_of(results, place)), (Cell(None),) * 4))
            continue
        rounds = job_at(results, place).experiment.rounds
        each = per_round(results, place)
        gigabytes = over_seeds(series, lambda record: record.network[-1]["bytes_total"] / GIGA)
        cells = (
            Cell(*series.final(), unit="percent"),
            Cell(each / THOUSAND),
            Cell(rounds * each / MILLION),
            Cell(*gigabytes),
        )
        rows.append(((place.split, label_of(results, place)), cells))
    return PaperTable(
        title="Accuracy, computation and traffic of whole runs",
        row_titles=("split", "method"),
        columns=(
            ("accuracy",),
            ("thousand examples per round",),
            ("million examples in all",),
            ("GB sent",),
        ),
        rows=tuple(rows),
        unit="number",
        notes=notes or ("Examples are counted as the unit of computation above.",),
    )


def show_work(results: Results) -> StudyOutput:
    """Not in the paper: accuracy over computation instead of rounds."""
    table = cost_table(
        results,
        notes_of(
            results,
            COST_NOTE,
            "Dec. FedAvg with more epochs computes as much in a round as DFML with its local epoch "
            "and those of mutual learning.",
        ),
    )
    return StudyOutput((table,), charts.plots(computation_panels(results)))


def show_neighbours(results: Results) -> StudyOutput:
    """Not in the paper: over rounds, over computation and over bytes."""
    table = cost_table(results, notes_of(results, COST_NOTE))
    panels = [*round_panels(results), *computation_panels(results)]
    for case in cases(results):
        lines = tuple(
            traffic_line(label_of(results, place), series)
            for place, series in places_of(results, case).items()
        )
        if lines:
            panels.append(Plot(case_title(results, case), lines, xlabel="GB sent", ylabel=ACCURACY))
    return StudyOutput((table,), charts.plots(panels))
