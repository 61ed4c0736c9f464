"""The tables of P1: accuracies beside the printed ones, rounds that are saved, sizes of models."""

from dataclasses import replace

from peerage.papers import charts
from peerage.papers.datasets import TITLES
from peerage.papers.p1 import printed
from peerage.papers.p1.common import case_of, cases, final, heading
from peerage.papers.p1.notes import SAME, jobs_of, notes_of, settings_of
from peerage.papers.p1.printed import Case
from peerage.papers.p1.settings import DFML, FEDAVG, FEDROLEX, HETEROFL, Setting
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Results, StudyOutput
from peerage.records.rows import RunRecord
from peerage.report.series import curve_of, estimate

STEP = 10  # all numbers of Table 8 are multiples of it
SUSPECT = (
    "The paper's rows of DFML in Tables 11 and 12 are nearly the same for different architectures; "
    "one of them is probably a copying error."
)


def show_accuracies(number: int, results: Results, *notes: str) -> StudyOutput:
    """Tables 3 to 7, 9, 11 and 12: the mean over clients in the last round.

    Data sets that are not run have the paper's numbers alone.
    """
    paper = printed.lines(number)
    columns = list(dict.fromkeys([*printed.cases(number), *cases(results)]))
    by_setting = number == 9
    places = {
        (case_of(place), place.setting if by_setting else place.method): place
        for place in settings_of(results)
    }
    rows: list[Row] = []
    for title, line in paper.items():
        method = HETEROFL if title == FEDROLEX else title
        cells = [
            Cell(*final(results, places.get((case, method))), *line.get(case, (None, None)))
            for case in columns
        ]
        rows.append(((title,), tuple(cells)))
    if FEDROLEX in paper:
        notes = (SAME, *notes)
    if number in (11, 12):
        notes = (SUSPECT, *notes)
    table = PaperTable(
        title=f"Table {number}: accuracy of the last models{instead(results, number)}",
        row_titles=("supervision and alpha" if by_setting else "method",),
        columns=tuple(heading(columns, case) for case in columns),
        rows=tuple(rows),
        unit="percent",
        best="max",
        notes=notes_of(results, *notes),
    )
    return StudyOutput((table,), charts.against_paper(run_only(table)))


def run_only(table: PaperTable) -> PaperTable:
    """The table for a figure, without columns that have only the paper's numbers."""
    kept = [
        n
        for n in range(len(table.columns))
        if any(cells[n].ours is not None for _, cells in table.rows)
    ]
    if not kept:
        return table
    return replace(
        table,
        columns=tuple(table.columns[n] for n in kept),
        rows=tuple((titles, tuple(cells[n] for n in kept)) for titles, cells in table.rows),
    )


def instead(results: Results, number: int) -> str:
    """A remark in a title if the data sets of the paper are not those that were run."""
    theirs = {case.dataset: None for case in printed.cases(number)}
    other = [name for name in results.values("dataset") if name not in theirs]
    if not other or results.plan.scale == "smoke":
        return ""
    names = " and ".join(TITLES[name] for name in other)
    return f", on {names} instead of {', '.join(TITLES[name] for name in theirs)}"


def show_rounds_needed(results: Results) -> StudyOutput:
    """Table 8: the rounds that DFML needs for the accuracy of Dec. FedAvg in a later round."""
    columns = printed.cases(6)
    step = 1 if results.plan.scale == "smoke" else STEP
    targets = list(printed.ROUNDS_NEEDED)
    if results.plan.scale == "smoke":
        targets = [max(job.experiment.rounds for job in jobs_of(results))]
    rows: list[Row] = []
    for target in targets:
        theirs = printed.ROUNDS_NEEDED.get(target, (None,) * len(columns))
        cells = [
            Cell(*rounds_needed(results, case, target, step), paper)
            for case, paper in zip(columns, theirs, strict=True)
        ]
        rows.append(((f"Dec. FedAvg in round {target}",), tuple(cells)))
    table = PaperTable(
        title="Table 8: rounds until DFML is as accurate as Dec. FedAvg in a later round",
        row_titles=("accuracy of",),
        columns=tuple(heading(columns, case) for case in columns),
        rows=tuple(rows),
        unit="rounds",
        notes=notes_of(
            results,
            f"Only rounds that are multiples of {step} count. Both methods send the same number of "
            "models per round.",
        ),
    )
    return StudyOutput((table,), charts.against_paper(run_only(table)))


def rounds_needed(
    results: Results, case: Case, target: int, step: int
) -> tuple[float | None, float | None]:
    """The mean and deviation over seeds; unknown unless every seed has both runs."""
    pair = [results.series.get(Setting(*case, "", method)) for method in (DFML, FEDAVG)]
    if pair[0] is None or pair[1] is None:
        return None, None
    by_seed: list[dict[int, RunRecord]] = [
        {record.experiment["seed"]: record for record in series.records}
        for series in pair
        if series
    ]
    return estimate(
        [
            first_round(by_seed[0][seed], aim, step)
            if (aim := curve_of(by_seed[1][seed], "accuracy").get(target)) is not None
            else None
            for seed in by_seed[0]
            if seed in by_seed[1]
        ]
    )


def first_round(record: RunRecord, aim: float, step: int) -> int | None:
    """The first round, of the multiples of `step` from there on, with at least this accuracy."""
    curve = curve_of(record, "accuracy")
    return next((r for r in sorted(curve) if r and r % step == 0 and curve[r] >= aim), None)


def show_sizes(results: Results) -> StudyOutput:
    """Table 10: the architectures, and how many parameters each has."""
    rows: list[Row] = []
    for place, series in results.places().items():
        setup = series.records[0].setup
        for n, member in enumerate(setup["members"]):
            counts = [setup["parameters"][data][n] for data in setup["parameters"]]
            rows.append(((place.models, widths(member)), tuple(Cell(count) for count in counts)))
    table = PaperTable(
        title="Table 10: trainable parameters",
        row_titles=("mode", "architecture"),
        columns=(("10 classes",), ("100 classes",)),
        rows=tuple(rows),
        unit="count",
        notes=(
            "The paper prints the architectures alone. Guessed: norm layers with a weight and a "
            "bias per channel, and the details of ViTs.",
        ),
    )
    return StudyOutput((table,), charts.against_paper(table))


def widths(member: str) -> str:
    """The widths of a model, or its variant, from its text."""
    value = member.partition("=")[2]
    return value.upper() if not value[0].isdigit() else f"[{value.replace('+', ', ')}]"
