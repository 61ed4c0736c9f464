"""How the results of P0 are shown: its tables beside the printed numbers, and its figures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from peerage.papers import charts
from peerage.papers.p0 import printed
from peerage.papers.p0.settings import CIFAR, MNIST, SIZES, Setting
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import TITLES, Results, StudyOutput
from peerage.report.series import Estimate, Series

NORM = "norm of the curvature"
NOT_PRINTED = ""  # where the paper has no numbers

# Tables


def final_accuracy(results: Results, title: str = "") -> PaperTable:
    paper = printed.accuracies(printed.FINAL, printed.DATASETS)
    columns = [(d, a) for d in results.values("dataset") for a in results.values("alpha")]
    return PaperTable(
        title=title or "Accuracy over the last 10 rounds, beside Table I",
        row_titles=("method",),
        columns=tuple((TITLES[d], f"Dir {a:g}") for d, a in columns),
        rows=results.by_method(
            lambda m: [
                _accuracy(results, Setting(d, a, m), paper, Series.last_10) for d, a in columns
            ]
        ),
        unit="percent",
        best="max",
        notes=_notes(results),
    )


def last_accuracy(results: Results) -> PaperTable:
    """Table III: DESA beside plain averaging and DecHW."""
    paper, alphas = printed.accuracies(printed.WITH_DESA, (CIFAR,)), results.values("alpha")
    return PaperTable(
        title="Table III: accuracy in the last round, CIFAR-10",
        row_titles=("method",),
        columns=tuple((f"Dir {alpha:g}",) for alpha in alphas),
        rows=results.by_method(
            lambda m: [
                _accuracy(results, Setting(CIFAR, a, m), paper, Series.final) for a in alphas
            ]
        ),
        unit="percent",
        best="max",
        notes=_notes(results),
    )


Targets = Callable[[Results, str, float, str], Sequence[float | None]]


def of_best(results: Results, dataset: str, alpha: float, name: str) -> list[float | None]:
    """Shares of the best final accuracy of any method."""
    found = [series.last_10().mean for series in results.of(dataset=dataset, alpha=alpha)]
    best = max((value for value in found if value is not None), default=None)
    return [None if best is None else share * best for share in printed.SHARES]


def of_own(results: Results, dataset: str, alpha: float, name: str) -> list[float | None]:
    """Shares of the method's own final accuracy."""
    series = results.series.get(Setting(dataset, alpha, name))
    best = series.last_10().mean if series else None
    return [None if best is None else share * best for share in printed.SHARES]


def absolute(results: Results, dataset: str, alpha: float, name: str) -> list[float | None]:
    return list(printed.ABSOLUTE[dataset])


def rounds_table(title: str, text: str, targets: Targets, results: Results) -> PaperTable:
    """Tables II, V and VI: rounds to four targets on each data set."""
    paper = printed.rounds(text)

    def cells(alpha: float, name: str) -> Iterable[Cell]:
        for dataset in results.values("dataset"):
            place = Setting(dataset, alpha, name)
            series = results.series.get(place)
            theirs = paper.get(place, (None,) * 4)
            aims = targets(results, dataset, alpha, name)
            yield from (
                _rounds(series, aim, known) for aim, known in zip(aims, theirs, strict=True)
            )

    shown = [
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
        title, ("", "method"), tuple(shown), tuple(rows), "rounds", "min", _notes(results)
    )


def half_table(results: Results) -> PaperTable:
    """Rounds to half of the best accuracy on MNIST, at the paper's scale if that is asked for."""
    target = SIZES[results.plan.scale].half[1]
    paper = printed.rounds(printed.OF_BEST)

    def cells(name: str) -> Iterable[Cell]:
        place = Setting(MNIST, 0.2, name)
        yield _rounds(results.series.get(place), target, paper[place][0])

    return PaperTable(
        title="Rounds to half of the best accuracy, MNIST, Dir 0.2",
        row_titles=("method",),
        columns=((f"to {100 * target:g} %",),),
        rows=results.by_method(cells),
        unit="rounds",
        best="min",
        notes=_notes(results),
    )


def scalars_table(results: Results) -> PaperTable:
    """What a node sends over one link: T m, 2 T m and T m + theta m in the paper."""
    theta, alpha = SIZES[results.plan.scale].theta, results.values("alpha")[-1]
    datasets = results.values("dataset")
    return PaperTable(
        title="Numbers that a node sends to one neighbour in the whole run",
        row_titles=("method",),
        columns=tuple((TITLES[dataset],) for dataset in datasets),
        rows=results.by_method(
            lambda m: [
                _scalars(results.series.get(Setting(d, alpha, m)), m, theta) for d in datasets
            ]
        ),
        unit="count",
        best=None,
        notes=(
            f"The paper's column is its formula for our rounds and model: T m, 2 T m, and "
            f"T m + {theta} m for DecHW*.",
        ),
    )


def seconds_table(results: Results) -> PaperTable:
    """Milliseconds of a round, which no paper reports."""

    def cells(name: str) -> Iterable[Cell]:
        series = results.series.get(Setting(MNIST, 0.2, name))
        yield Cell(*series.seconds_per_round().times(1000)) if series else Cell(None)

    return PaperTable(
        title="Milliseconds per round",
        row_titles=("method",),
        columns=(("wall time",),),
        rows=results.by_method(cells),
        unit="count",
        best="min",
        notes=("Measured by the runs themselves, on a machine that may have had other work.",),
    )


def _accuracy(
    results: Results,
    place: Setting,
    paper: Mapping[tuple[str, float, str], tuple[float, float]],
    value: Callable[[Series], Estimate],
) -> Cell:
    ours = value(results.series[place]) if place in results.series else (None, None)
    return Cell(*ours, *paper.get(place, (None, None)))


def _rounds(series: Series | None, target: float | None, paper: int | None) -> Cell:
    if series is None or target is None:
        return Cell(None, paper=paper)
    found = series.rounds_to(target)
    some = 0 < found.reached < found.seeds
    note = f"{found.reached} of {found.seeds} seeds" if some else ""
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
        f"{TITLES[d]}: {size.train[d]} training examples, "
        f"{size.epochs[d]} epoch{'s' * (size.epochs[d] != 1)} a round, {size.rounds[d]} rounds"
        for d in results.values("dataset")
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


def panels(results: Results) -> list[charts.Panel]:
    return [
        charts.Panel(
            f"{TITLES[dataset]}, Dir {alpha:g}", tuple(results.of(dataset=dataset, alpha=alpha))
        )
        for dataset in results.values("dataset")
        for alpha in results.values("alpha")
        if results.of(dataset=dataset, alpha=alpha)
    ]


def curves(results: Results) -> StudyOutput:
    """Learning curves, with the final accuracies as their table."""
    return StudyOutput((final_accuracy(results),), charts.curves(panels(results)))


def tabulated(table: Callable[[Results], PaperTable], results: Results) -> StudyOutput:
    """A table, with a picture of its numbers beside the paper's."""
    made = table(results)
    return StudyOutput((made,), charts.against_paper(made))


def show_half(results: Results) -> StudyOutput:
    target = SIZES[results.plan.scale].half[1]
    marked = [replace(panel, targets=(target,)) for panel in panels(results)]
    figure = charts.curves(marked, keys=("accuracy",))
    return StudyOutput((half_table(results),), figure)


def show_stopped(results: Results) -> StudyOutput:
    """Fig. 4, with what DecHW* saves."""
    tables = (final_accuracy(results), scalars_table(results))
    return StudyOutput(tables, charts.curves(panels(results)))


def show_norms(results: Results) -> StudyOutput:
    """Fig. 2: the norm of the curvature of ten nodes."""
    dataset, alpha = results.values("dataset")[0], results.values("alpha")[0]
    found = [
        charts.NodePanel(f"{TITLES[dataset]}, Dir {alpha:g}", series.records[0], "curvature", NORM)
        for series in results.of(dataset=dataset, alpha=alpha)
    ]
    return StudyOutput((final_accuracy(results),), charts.node_lines(found))


def show_trace(results: Results) -> StudyOutput:
    """Fig. 7: one accumulated entry and its weight, with increments of unit norm and raw ones."""
    dataset, alpha = results.values("dataset")[0], results.values("alpha")[0]
    found = [
        charts.NodePanel(series.label, series.records[0], note, title, log)
        for note, title, log in (("entry", "accumulated entry", None), ("weight", "weight", False))
        for series in results.of(dataset=dataset, alpha=alpha)
    ]
    return StudyOutput((final_accuracy(results),), charts.node_lines(found))


def show_curvature(results: Results) -> StudyOutput:
    tables = (
        rounds_table(
            "Rounds to shares of the best accuracy, by kind of curvature",
            NOT_PRINTED,
            of_best,
            results,
        ),
        seconds_table(results),
    )
    panel = panels(results)[0]
    return StudyOutput(tables, charts.curves_and_phases(panel, panel.series))
