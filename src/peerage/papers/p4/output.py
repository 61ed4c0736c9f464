"""Tables and figures of P4: losses with and without the gain, and how soon they fall."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp, log
from statistics import fmean
from typing import Any

from peerage.graphs.diffusion import fit_exponent
from peerage.papers import charts
from peerage.papers.charts import Line, Plot
from peerage.papers.p4 import printed
from peerage.papers.p4.settings import CENTRAL, SIZES, WITH, WITHOUT, Setting
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import Results, StudyOutput
from peerage.report.series import Estimate, Series

KINDS = {WITH: False, WITHOUT: True}  # whether their lines are dashed
BEST = "centralised, best"
BATCHES = "mini-batches of a node"
MIN_POINTS = 3  # of a fit
FIT = "standard error of the fit"


def show_plateaus(letter: str, results: Results) -> StudyOutput:
    """Fig. 3: all losses, and the losses without the gain over rounds / n^mu."""
    aim, paper = level(results), printed.PLATEAUS[letter]
    found = {nodes(s): rounds_to(aim, s) for s in results.of(method=WITHOUT)}
    slope, error = exponent({n: rounds.mean for n, rounds in found.items()})
    mu = paper if slope is None else slope
    repetitions = f"The paper ran each {printed.REPETITIONS[letter]} times."
    notes = (*notes_of(results, "scaling", letter), repetitions)
    if letter == "C" and results.plan.scale == "small":
        notes += ("A round of VGG16 takes so long that these runs end on the plateau.",)
    fitted = PaperTable(
        title="Exponent mu: without the gain, the plateau lasts n^mu rounds",
        row_titles=("",),
        columns=(("mu",),),
        rows=((("plateau",), (Cell(slope, error, paper),)),),
        unit="number",
        notes=("The slope of ln(rounds) over ln(n) above, if three networks or more got there.",),
        spread=FIT,
    )
    rescaled = tuple(
        replace(line_of(place, series), x=[r / nodes(series) ** mu for r in series.rounds("loss")])
        for place, series in results.places(method=WITHOUT).items()
    )
    source = "the paper's mu" if slope is None else "fitted"
    panels = [
        loss_plot(results, "test loss"),
        Plot("without gain, rescaled", rescaled, f"round / n^{mu:.2f} ({source})", log="xy"),
    ]
    tables = (time_table(results, aim, notes=notes), fitted)
    return StudyOutput(tables, charts.plots(panels, columns=2, kinds=KINDS))


def show_losses(
    title: str, part: str, results: Results, *, wall_clock: bool = False
) -> StudyOutput:
    """Fig. 4, 7 and 9: the losses, their minima, and the time until they are half-way there."""
    tables = (
        lowest_table(results, f"{title}: lowest test loss", notes_of(results, part)),
        time_table(results, level(results), wall_clock=wall_clock),
    )
    panels = [
        loss_plot(results, panel, panel=panel, wall_clock=wall_clock)
        for panel in results.values("panel")
        if results.of(panel=panel)
    ]
    curve_styles = {(line.label, line.dashed) for panel in panels for line in panel.lines}
    both = any((label, True) in curve_styles for label, dashed in curve_styles if not dashed)
    kinds = KINDS if both else {}  # otherwise the label tells what a dashed line is
    return StudyOutput(tables, charts.plots(panels, columns=2, kinds=kinds, across=BEST))


def show_sharing(results: Results) -> StudyOutput:
    """Fig. 10: losses over wall-clock time, also of a single node, and power laws."""
    laws = {place.setting: power_law(series) for place, series in results.places().items()}
    fitted = PaperTable(
        title="Exponent b: the loss falls as (mini-batches)^-b",
        row_titles=("",),
        columns=(("b",),),
        rows=tuple(((name,), (Cell(*law[:2]),)) for name, law in laws.items()),
        unit="number",
        notes=("Fitted where the loss is below half of that of guessing.",),
        spread=FIT,
    )
    panel = loss_plot(results, "", wall_clock=True)
    last_law = [law[2] for law in laws.values() if law[2] is not None][-1:]
    tables = (
        lowest_table(results, "Fig. 10: lowest test loss", notes_of(results, "sharing")),
        time_table(results, level(results), wall_clock=True, methods=(WITH, CENTRAL)),
        fitted,
    )
    panel = replace(panel, lines=(*panel.lines, *last_law))
    return StudyOutput(tables, charts.plots([panel], across=BEST))


def show_with_curvature(results: Results) -> StudyOutput:
    """Accuracies and curves of DecAvg and DecHW, with and without the gain."""
    graphs = results.values("panel")
    rows = []
    for name in results.values("setting"):
        for method in results.values("method"):
            places = [Setting(graph, name, method) for graph in graphs]
            cells = tuple(results.cell(place, Series.last_10) for place in places)
            rows.append(((name, method), cells))
    table = PaperTable(
        title="Accuracy over the last 10 rounds, MNIST, Dir 0.2",
        row_titles=("", "start"),
        columns=tuple((graph,) for graph in graphs),
        rows=tuple(rows),
        unit="percent",
        best="max",
        notes=("The setting of P0 at this scale.", *results.repetitions),
    )
    panels = []
    for graph in graphs:
        found = results.places(panel=graph).items()
        lines = tuple(line_of(place, series, "accuracy") for place, series in found)
        panels.append(Plot(graph, lines, ylabel=charts.ACCURACY, floor=0.0))
    return StudyOutput((table,), charts.plots(panels, kinds=KINDS))


# Numbers


def nodes(series: Series) -> int:
    return int(series.records[0].experiment["nodes"])


def guessing(series: Series) -> float:
    """The loss of a random guess, on the plateau: all classes are equally likely."""
    return log(len(series.records[0].setup["classes"]))


def level(results: Results) -> float | None:
    """Half-way from a random guess down to the highest of the lowest losses with the gain."""
    ends = [(guessing(s), s.lowest().mean) for s in results.of(method=WITH)]
    known = [(start, end) for start, end in ends if end is not None and end < start]
    return (known[0][0] + max(end for _, end in known)) / 2 if known else None


def rounds_to(aim: float | None, series: Series) -> Estimate:
    return Estimate(None, None) if aim is None else Estimate(*series.rounds_below(aim)[:2])


def exponent(values: dict[int, float | None]) -> tuple[float | None, float | None]:
    """Slope of ln(value) over ln(size) and its standard error, if enough sizes have a value."""
    known = {size: value for size, value in values.items() if value is not None}
    if len(known) < MIN_POINTS:
        return None, None
    return fit_exponent(list(known), list(known.values()))


def power_law(series: Series) -> tuple[float | None, float | None, Line | None]:
    """Exponent b, its standard error, and the line c x^-b through the losses of the low half."""
    rounds, losses, _ = series.curve("loss")
    low = {r * series.batches(): y for r, y in zip(rounds, losses, strict=True)}
    low = {x: y for x, y in low.items() if x > 0 and y < guessing(series) / 2}
    if len(low) < MIN_POINTS:
        return None, None, None
    slope, error = fit_exponent(list(low), list(low.values()))
    intercept = fmean(log(y) - slope * log(x) for x, y in low.items())
    line = [exp(intercept) * x**slope for x in low]
    return -slope, error, Line("power law", list(low), line, dashed=True)


# Tables


def time_table(
    results: Results,
    aim: float | None,
    *,
    wall_clock: bool = False,
    methods: Sequence[str] = (WITH, WITHOUT),
    notes: tuple[str, ...] = (),
) -> PaperTable:
    """Rounds, or mini-batches of a node, until the loss falls to `aim`."""

    def time(series: Series) -> Estimate:
        return rounds_to(aim, series).times(series.batches() if wall_clock else 1.0)

    what = "Mini-batches of a node" if wall_clock else "Rounds"
    event = "" if aim is None else f" falls to {aim:.3f}"
    rule = (
        "This is half-way between guessing, the logarithm of the number of classes, and the "
        "highest of the lowest losses with the gain. Between evaluations the loss is taken to be "
        "a straight line."
    )
    return PaperTable(
        f"{what} until the mean test loss{event}",
        **by_setting(results, time, methods, "mini-batches" if wall_clock else "rounds"),
        unit="count" if wall_clock else "rounds",
        notes=(rule, *notes),
        digits=0 if wall_clock else 1,
    )


def lowest_table(results: Results, title: str, notes: tuple[str, ...]) -> PaperTable:
    methods = (WITH, WITHOUT, CENTRAL)
    cells = by_setting(results, Series.lowest, methods, "test loss")
    return PaperTable(title, **cells, unit="loss", notes=notes)


def by_setting(
    results: Results, value: Callable[[Series], Estimate], methods: Sequence[str], single: str
) -> dict[str, Any]:
    """One row per setting and one column per method, or `single` if no setting has two methods."""
    levels = 2 if len(results.values("panel")) > 1 else 1
    settings: dict[tuple[str, ...], dict[str, Cell]] = {}
    for job in results.jobs:
        assert isinstance(job.place, Setting)
        *titles, method = job.place
        if method in methods:
            cells = settings.setdefault(tuple(titles[-levels:]), {})
            cells[method] = results.cell(job.place, value)
    columns = [method for method in methods if method in results.values("method")]
    if all(len(cells) == 1 for cells in settings.values()):
        columns = [single]
        settings = {
            titles: {single: cell} for titles, cells in settings.items() for cell in cells.values()
        }
    rows = [
        (titles, tuple(cells.get(column, Cell(None)) for column in columns))
        for titles, cells in settings.items()
    ]
    return {
        "row_titles": ("", "setting")[-levels:],
        "columns": tuple((column,) for column in columns),
        "rows": tuple(rows),
    }


def notes_of(results: Results, part: str, letter: str = "") -> tuple[str, ...]:
    """Notes on what the scale changes in a part of `SIZES`, and on the number of seeds."""
    scale = results.plan.scale
    here, there = (getattr(SIZES[name], part) for name in (scale, "paper"))
    if letter:
        here, there = here[letter], there[letter]
    changed = [
        f"{name} {_listed(ours)} (scale paper: {_listed(theirs)})"
        for name, ours, theirs in zip(here._fields, here, there, strict=True)
        if ours != theirs and name != "together"
    ]
    return results.notes(
        [f"Scale {scale}: {'; '.join(changed)}."] if changed else [],
        code="As the authors' code: biases that are not zero, connections that are active in one "
        "direction.",
    )


def _listed(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


# Figures


def line_of(place: Setting, series: Series, key: str = "loss", *, wall_clock: bool = False) -> Line:
    unit = series.batches() if wall_clock else 1.0
    return charts.line_of(place.setting, series, key, stretch=unit, dashed=place.method == WITHOUT)


def loss_plot(results: Results, title: str, *, panel: str = "", wall_clock: bool = False) -> Plot:
    """Loss curves; the best centralised loss is a horizontal line of the same colour."""
    places = results.places(panel=panel)
    trained = {place.setting for place in places if place.method != CENTRAL}
    lines = tuple(
        line_of(place, series, wall_clock=wall_clock)
        for place, series in places.items()
        if place.method != CENTRAL or place.setting not in trained
    )
    central = {p.setting: s.lowest().mean for p, s in places.items() if p.method == CENTRAL}
    levels = {name: value for name, value in central.items() if value is not None}
    if len(set(levels.values())) == 1:  # the same for all, so it has no colour of its own
        levels = {"": next(iter(levels.values()))}
    xlabel = BATCHES if wall_clock else "round"
    return Plot(title, lines, xlabel, log="xy", levels=tuple(levels.items()))
