"""Tables of P0 with the printed numbers beside ours, and its figures."""

from collections.abc import Callable, Iterable, Sequence

from peerage.papers import charts
from peerage.papers.datasets import CIFAR, MNIST, TITLES
from peerage.papers.p0 import printed
from peerage.papers.p0.settings import SIZES, Setting
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import Results, StudyOutput
from peerage.report.series import Estimate, Series

Columns = dict[tuple[str, ...], tuple[str, float]]  # titles -> data set, alpha

# Tables


def final_accuracy(
    results: Results, title: str = "Accuracy over the last 10 rounds, beside Table I"
) -> PaperTable:
    columns: Columns = {
        (TITLES[d], f"Dir {a:g}"): (d, a)
        for d in results.values("dataset")
        for a in results.values("alpha")
    }
    return _accuracy_table(results, title, columns, Series.last_10)


def last_accuracy(results: Results) -> PaperTable:
    """Table III: DESA beside plain averaging and DecHW."""
    title = "Table III: accuracy in the last round, CIFAR-10"
    columns: Columns = {(f"Dir {alpha:g}",): (CIFAR, alpha) for alpha in results.values("alpha")}
    return _accuracy_table(results, title, columns, Series.final)


def _accuracy_table(
    results: Results, title: str, columns: Columns, value: Callable[[Series], Estimate]
) -> PaperTable:
    paper = printed.accuracies()

    def cells(method: str) -> Iterable[Cell]:
        for place in (Setting(*column, method) for column in columns.values()):
            yield results.cell(place, value, *paper.get(place, (None, None)))

    notes = _notes(results)
    return results.method_table(title, columns, cells, "percent", best="max", notes=notes)


Targets = Callable[[Results, Setting], Sequence[float | None]]  # four accuracies to reach


def of_best(results: Results, place: Setting) -> list[float | None]:
    """Shares of the best final accuracy of any method."""
    return _shares(results.of(dataset=place.dataset, alpha=place.alpha))


def of_own(results: Results, place: Setting) -> list[float | None]:
    """Shares of the method's own final accuracy."""
    return _shares(results.of(**place._asdict()))


def _shares(series: Sequence[Series]) -> list[float | None]:
    accuracies = [each.last_10().mean for each in series]
    best = max((value for value in accuracies if value is not None), default=None)
    return [None if best is None else share * best for share in printed.SHARES]


def absolute(results: Results, place: Setting) -> Sequence[float | None]:
    return printed.ABSOLUTE[place.dataset]


def rounds_table(title: str, text: str, targets: Targets, results: Results) -> PaperTable:
    """Tables II, V and VI: rounds to four targets on each data set."""
    paper = printed.rounds(text)

    def cells(alpha: float, name: str) -> Iterable[Cell]:
        for dataset in results.values("dataset"):
            place = Setting(dataset, alpha, name)
            printed_rounds = paper.get(place, (None,) * 4)
            for aim, known in zip(targets(results, place), printed_rounds, strict=True):
                yield _rounds(results.series.get(place), aim, known)

    columns = [
        (TITLES[d], f"{100 * share:g} %")
        for d in results.values("dataset")
        for share in (printed.ABSOLUTE[d] if targets is absolute else printed.SHARES)
    ]
    rows = [
        ((f"Dir {alpha:g}", name), tuple(cells(alpha, name)))
        for alpha in results.values("alpha")
        for name in results.values("method")
    ]
    return PaperTable(
        title, ("", "method"), tuple(columns), tuple(rows), "rounds", "min", _notes(results)
    )


def half_table(results: Results) -> PaperTable:
    """Rounds to half of the best accuracy on MNIST."""
    target = SIZES[results.plan.scale].half[1]
    paper = printed.rounds(printed.OF_BEST)

    def cells(name: str) -> Iterable[Cell]:
        place = Setting(MNIST, 0.2, name)
        yield _rounds(results.series.get(place), target, paper[place][0])

    title, notes = "Rounds to half of the best accuracy, MNIST, Dir 0.2", _notes(results)
    columns = [(f"to {100 * target:g} %",)]
    return results.method_table(title, columns, cells, "rounds", best="min", notes=notes)


def scalars_table(results: Results) -> PaperTable:
    """Numbers that a node sends over one link: T m, 2 T m and T m + theta m in the paper."""
    theta, alpha = SIZES[results.plan.scale].theta, results.values("alpha")[-1]
    datasets = results.values("dataset")

    def cells(name: str) -> Iterable[Cell]:
        for dataset in datasets:
            yield _scalars(results.series.get(Setting(dataset, alpha, name)), name, theta)

    note = (
        f"The paper's column is its formula for our rounds and model: T m, 2 T m, and "
        f"T m + {theta} m for DecHW*."
    )
    title = "Numbers that a node sends to one neighbour in the whole run"
    columns = [(TITLES[dataset],) for dataset in datasets]
    return results.method_table(title, columns, cells, "count", notes=(note,))


def seconds_table(results: Results) -> PaperTable:
    """Milliseconds per round, which the paper does not report."""

    def cells(name: str) -> Iterable[Cell]:
        place = Setting(MNIST, 0.2, name)
        yield results.cell(place, lambda series: series.seconds_per_round().times(1000))

    title, columns = "Milliseconds per round", [("wall time",)]
    note = "Measured by the runs themselves, on a machine that may have had other work."
    return results.method_table(title, columns, cells, "count", best="min", notes=(note,))


def _rounds(series: Series | None, target: float | None, paper: int | None) -> Cell:
    if series is None or target is None:
        return Cell(None, paper=paper)
    found = series.rounds_to(target)
    partial = 0 < found.reached < found.seeds
    note = f"{found.reached} of {found.seeds} seeds" if partial else ""
    return Cell(found.mean, found.std, paper, note=note)


def _scalars(series: Series | None, name: str, theta: int) -> Cell:
    if series is None:
        return Cell(None)
    record = series.records[0]
    m, t = record.setup["parameters"][0], record.rounds
    formula = {"DecHW": 2 * t * m, "DecHW*": (t + theta) * m, "DecHW* (frozen)": (t + theta) * m}
    return Cell(*series.scalars(), formula.get(name, t * m))


def _notes(results: Results) -> tuple[str, ...]:
    size = SIZES["small"]
    sizes = "; ".join(
        f"{TITLES[name]}: {work.train} training examples, {work.epochs} "
        f"epoch{'s' * (work.epochs != 1)} a round, {work.rounds} rounds"
        for name in results.values("dataset")
        for work in [size.work[name]]
    )
    smaller = (
        f"Scale small, {size.nodes} nodes. {sizes}. The paper has 50 nodes, all examples, 5 "
        "epochs and 1000 rounds, so only the order of the methods can be compared."
    )
    several = any(series.seeds > 1 for series in results.series.values())
    return results.notes(
        [smaller],
        seeds=" ± is the standard deviation over them." if several else "",
        code="As the authors' scripts run: Barabasi-Albert graph, uniform weights, 20 % held out, "
        "training taken back when the validation loss rises.",
    )


# Figures


def panels(results: Results, *targets: float) -> list[charts.Panel]:
    return [
        charts.Panel(f"{TITLES[dataset]}, Dir {alpha:g}", tuple(found), targets)
        for dataset in results.values("dataset")
        for alpha in results.values("alpha")
        if (found := results.of(dataset=dataset, alpha=alpha))
    ]


def curves(results: Results) -> StudyOutput:
    """Learning curves, and a table of final accuracies."""
    return StudyOutput((final_accuracy(results),), charts.curves(panels(results)))


def tabulated(table: Callable[[Results], PaperTable], results: Results) -> StudyOutput:
    """A table, and a figure of its numbers beside the paper's."""
    numbers = table(results)
    return StudyOutput((numbers,), charts.against_paper(numbers))


def show_half(results: Results) -> StudyOutput:
    target = SIZES[results.plan.scale].half[1]
    figure = charts.curves(panels(results, target), keys=("accuracy",))
    return StudyOutput((half_table(results),), figure)


def show_stopped(results: Results) -> StudyOutput:
    """Fig. 4, and a table of the numbers that DecHW* saves."""
    tables = (final_accuracy(results), scalars_table(results))
    return StudyOutput(tables, charts.curves(panels(results)))


def show_norms(results: Results) -> StudyOutput:
    """Fig. 2: the norm of the curvature of ten nodes."""
    found = [
        charts.NodePanel(panel.title, series.records[0], "curvature", "norm of the curvature")
        for panel in panels(results)
        for series in panel.series
    ]
    return StudyOutput((final_accuracy(results),), charts.node_lines(found))


def show_trace(results: Results) -> StudyOutput:
    """Fig. 7: one accumulated entry and its weight, with unit-norm and with raw increments."""
    found = [
        charts.NodePanel(series.label, series.records[0], note, title, log)
        for note, title, log in (("entry", "accumulated entry", None), ("weight", "weight", False))
        for series in results.of()
    ]
    return StudyOutput((final_accuracy(results),), charts.node_lines(found))


def show_curvature(results: Results) -> StudyOutput:
    title = "Rounds to shares of the best accuracy, by kind of curvature"
    rounds = rounds_table(title, printed.NOTHING, of_best, results)
    figure = charts.curves_and_phases(panels(results)[0])
    return StudyOutput((rounds, seconds_table(results)), figure)
