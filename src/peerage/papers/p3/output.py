"""Tables and figures of P3: accuracy of clusters, fairness, and traffic."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Boxes, Plot
from peerage.papers.datasets import TITLES
from peerage.papers.p3 import printed_figures
from peerage.papers.p3.common import (
    Key,
    Titles,
    bar_panels,
    by_clusters,
    by_setting,
    case_title,
    cases,
    cluster_line,
    cluster_names,
    cluster_plots,
    clusters_in_json,
    fairness_of,
    line_of,
    paper_line,
    places_of,
    short_name,
    table_rows,
)
from peerage.papers.p3.notes import PAIRS, notes_of
from peerage.papers.p3.settings import BY_LABEL, FACADE, Setting
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import Results, StudyOutput
from peerage.report.fairness import (
    FairnessOverSeeds,
    bytes_to,
    common_target,
    fair_accuracy_curve,
    fairness_over_rounds,
)
from peerage.report.series import Estimate, Series, estimate

MAJORITY, MINORITY, ALL = "majority", "minority", "all nodes"
PARITY, ODDS, FAIR = "demographic parity", "equalised odds", "fair accuracy"
GIGA = 1e9
UNKNOWN = Estimate(None, None)
ABSENT = "No label is in the test sets of both clusters."
OF_MEANS = (
    "Fair accuracy is that of the clusters' mean accuracies over seeds, as in the paper, so it has "
    "no deviation."
)


# Tables II to IV, and studies of our own with the same columns


def show_table(number: str, results: Results) -> StudyOutput:
    """Tables II to IV, and beside them what the paper does not print."""
    return show_fairness(results, f"Table {number}: the last models", by_clusters)


def show_balanced(results: Results) -> StudyOutput:
    late = "The paper's numbers beside ours are after 1200 rounds."
    return show_fairness(results, "The last models", by_clusters, late, curves=True)


def show_kinds(results: Results) -> StudyOutput:
    return show_fairness(results, "The last models", by_clusters, curves=True)


def show_variants(results: Results) -> StudyOutput:
    """Variants of one method; a colour of the figure is a variant."""
    return show_fairness(results, "The last models", by_setting, curves=True)


def show_fairness(
    results: Results, title: str, titles: Titles, *notes: str, curves: bool = False
) -> StudyOutput:
    """Both tables; a figure of our numbers beside the paper's, or of the clusters' curves."""
    tables = (
        fairness_table(
            results, title, titles, notes_of(results, OF_MEANS, *pairs(results), *notes)
        ),
        more_table(results, titles),
    )
    numbers = clusters_in_json(results)
    figure = cluster_plots(results) if curves else charts.against_paper(accuracies_only(tables[0]))
    return StudyOutput(tables, figure, pictures=numbers)


def fairness_table(
    results: Results, title: str, titles: Titles, notes: tuple[str, ...]
) -> PaperTable:
    """Accuracies, gaps and fair accuracy of the last models."""
    return PaperTable(
        title=title,
        **table_rows(results, titles, last_cells),
        columns=tuple((name,) for name in (MAJORITY, MINORITY, ALL, PARITY, ODDS, FAIR)),
        unit="percent",
        best="max",
        lowest=(PARITY, ODDS),
        notes=notes,
    )


def last_cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
    line = paper_line(place)
    theirs: Sequence[Any] = line[:5] if line else [(None, None)] * 5
    ours = [UNKNOWN] * 5
    if found is not None:
        clusters = found.accuracies
        ours = [clusters[0], clusters[-1], found.accuracy, found.parity, found.odds]
    cells = [Cell(*mine, *paper) for mine, paper in zip(ours, theirs, strict=True)]
    cells[3:] = [replace(cell, unit="gap") for cell in cells[3:]]
    if found is not None and found.odds.mean is None and place.shift == BY_LABEL:
        cells[4] = replace(cells[4], note=ABSENT)
    fair = None if found is None else found.fair_accuracy_of_means
    return [*cells, Cell(fair, paper=line.fair_accuracy if line else None)]


def more_table(results: Results, titles: Titles) -> PaperTable:
    """What the paper does not print: means over seeds, the highest values, and single nodes."""

    def cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
        if found is None:
            return [Cell(None)] * 5
        values = (found.fair_accuracy, found.highest, found.worst_node, found.worst_tenth)
        return [*(Cell(*value) for value in values), Cell(*found.jain, unit="index")]

    names = ("fair accuracy", "highest fair accuracy", "worst node", "worst 10 %", "Jain's index")
    return PaperTable(
        title="Not printed in the paper: means over seeds, and single nodes",
        **table_rows(results, titles, cells),
        columns=tuple((name,) for name in names),
        unit="percent",
        best="max",
        notes=(
            "Fair accuracy here is the mean of the seeds' own. The worst 10 % of the nodes are "
            "rounded up to whole nodes. Jain's index is 1 if all nodes have the same accuracy.",
        ),
    )


def pairs(results: Results) -> tuple[str, ...]:
    return (PAIRS,) if any(c.count(":") > 1 for c in results.values("clusters")) else ()


def accuracies_only(table: PaperTable) -> PaperTable:
    """The table for a figure, whose axis of accuracies cannot show gaps."""
    kept = [n for n, column in enumerate(table.columns) if column[0] not in (PARITY, ODDS)]
    return replace(
        table,
        columns=tuple(table.columns[n] for n in kept),
        rows=tuple((titles, tuple(cells[n] for n in kept)) for titles, cells in table.rows),
    )


# Curves of clusters


def show_averaging(results: Results) -> StudyOutput:
    """Fig. 1: the majority and the minority with plain averaging."""

    def cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
        line = paper_line(place)
        theirs = (line.majority, line.minority) if line else ((None, None), (None, None))
        gap = line.majority[0] - line.minority[0] if line else None
        if found is None:
            return [*(Cell(None, None, *paper) for paper in theirs), Cell(None, paper=gap)]
        ours = found.accuracies
        gaps = gap_estimate(results.series[place])
        pair = zip((ours[0], ours[-1]), theirs, strict=True)
        return [*(Cell(*mine, *paper) for mine, paper in pair), Cell(*gaps, gap)]

    table = PaperTable(
        title="Fig. 1: the last models",
        **table_rows(results, by_clusters, cells),
        columns=((MAJORITY,), (MINORITY,), ("gap in points",)),
        unit="percent",
        notes=notes_of(
            results,
            "The caption names EL, the text D-PSGD. The paper's numbers are those of Table II, and "
            "D-PSGD has the learning rate of EL.",
        ),
    )
    panels = []
    for place, series in results.places().items():
        lines = [cluster_line(name, series, c) for c, name in ((0, MAJORITY), (-1, MINORITY))]
        panels.append(Plot(place.method, tuple(lines), ylabel=ACCURACY))
    return StudyOutput((table,), charts.plots(panels), pictures=clusters_in_json(results))


def gap_estimate(series: Series) -> Estimate:
    """The gap between best and worst cluster in the last evaluation of each seed."""
    ends = [fairness_over_rounds(record)[-1:] for record in series.records]
    return estimate([end[0].gap if end else None for end in ends])


def show_clusters(number: int, results: Results) -> StudyOutput:
    """Fig. 3, 4, 13, 17 and 20: one panel per cluster, and the last values."""
    counts = [case[1].count(":") + 1 for case in cases(results)]
    names = [MAJORITY, MINORITY] if max(counts) == 2 else None

    def cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
        line = paper_line(place)
        theirs: list[Any] = [(None, None)] * max(counts)
        if line:
            theirs = [line.majority, line.minority]
        elif place in printed_figures.MINORITY:
            theirs[-1] = (printed_figures.MINORITY[place], None)
        ours = found.accuracies if found else [UNKNOWN] * max(counts)
        return [Cell(*mine, *paper) for mine, paper in zip(ours, theirs, strict=True)]

    names = names or [short_name(name) for name in cluster_names(results, cases(results)[0])]
    table = PaperTable(
        title=f"Fig. {number}: accuracy of each cluster in the last round",
        **table_rows(results, by_clusters, cells),
        columns=tuple((name,) for name in names),
        unit="percent",
        best="max",
        notes=notes_of(results),
    )
    return StudyOutput((table,), cluster_plots(results), pictures=clusters_in_json(results))


# Fair accuracy


def show_fair_accuracy(number: int, results: Results) -> StudyOutput:
    """Fig. 10 to 12: fair accuracy during training."""

    def cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
        line = paper_line(place)
        fair = found.fair_accuracy_of_means if found else None
        return [Cell(fair, paper=line.fair_accuracy if line else None)]

    table = PaperTable(
        title=f"Fig. {number}: fair accuracy in the last round",
        **table_rows(results, by_clusters, cells),
        columns=((FAIR,),),
        unit="percent",
        best="max",
        notes=notes_of(results, OF_MEANS),
    )
    panels = []
    for case in cases(results):
        lines = tuple(
            line_of(place.method, series, fair_accuracy_curve(series.records))
            for place, series in places_of(results, case).items()
        )
        if lines:
            panels.append(Plot(case_title(results, case), lines, ylabel=FAIR, percent=True))
    return StudyOutput((table,), charts.plots(panels), pictures=clusters_in_json(results))


def show_highest(number: int, results: Results) -> StudyOutput:
    """Fig. 5, 14, 18 and 19: the highest fair accuracy during training."""
    by_place: dict[Setting, float] = {}

    def cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
        paper = printed_figures.HIGHEST.get(place)
        if found is None or found.highest_of_means is None:
            return [Cell(None, paper=paper), Cell(None, unit="count"), Cell(None)]
        round, by_place[place] = found.highest_of_means
        last = Cell(found.fair_accuracy_of_means)
        return [Cell(by_place[place], paper=paper), Cell(round, unit="count"), last]

    table = PaperTable(
        title=f"Fig. {number}: highest fair accuracy during training",
        **table_rows(results, by_clusters, cells),
        columns=(("highest",), ("in round",), ("last",)),
        unit="percent",
        notes=notes_of(results, OF_MEANS),
    )
    panels = bar_panels(results, {p: 100 * v for p, v in by_place.items()}, f"{FAIR}, %")
    return StudyOutput((table,), charts.plots(panels), pictures=clusters_in_json(results))


# Traffic


def show_traffic(results: Results) -> StudyOutput:
    """Fig. 7: gigabytes until an accuracy is reached, and how much less FACADE needs."""
    targets = {name: target_of(results, name) for name in results.values("dataset")}
    sent: dict[Setting, float] = {}
    for place, series in results.places().items():
        target = targets[place.dataset]
        found = None if target is None else bytes_to(series.records, target)
        if found is not None:
            sent[place] = found / GIGA
    aims = [f"{100 * t:.1f} % ({TITLES[name]})" for name, t in targets.items() if t is not None]
    until = f"the mean accuracy of all nodes is {' and '.join(aims)}" if aims else "a target"
    volume = PaperTable(
        title=f"Fig. 7: gigabytes that all nodes send until {until}",
        **table_rows(results, by_clusters, lambda place, _: [Cell(sent.get(place))]),
        columns=(("GB",),),
        unit="number",
        best="min",
        notes=notes_of(results, *target_notes(results, targets)),
        digits=3,
    )
    panels = bar_panels(results, sent, "GB")
    return StudyOutput((volume, saved_table(results, sent)), charts.plots(panels))


def target_of(results: Results, dataset: str) -> float | None:
    """The printed target if all methods reach it; otherwise the lowest last accuracy of any."""
    runs = [series.records for series in results.of(dataset=dataset)]
    aim = printed_figures.TARGETS[dataset]
    if results.plan.scale == "paper" and all(bytes_to(found, aim) is not None for found in runs):
        return aim if runs else None
    return common_target(runs)


def target_notes(results: Results, targets: Mapping[str, float | None]) -> list[str]:
    others = [
        f"{100 * printed_figures.TARGETS[name]:.0f} % for {TITLES[name]}"
        for name, target in targets.items()
        if target not in (None, printed_figures.TARGETS[name])
    ]
    if not others:
        return []
    return [
        f"The paper's target is {' and '.join(others)}; ours is the lowest last accuracy of any "
        "method, which all of them reach."
    ]


def saved_table(results: Results, sent: Mapping[Setting, float]) -> PaperTable:
    """How much less FACADE sends than each other method."""
    others = [method for method in results.values("method") if method != FACADE]
    rows = []
    for case in cases(results):
        ours = sent.get(Setting(*case, "", FACADE))
        cells = []
        for method in others:
            theirs = sent.get(Setting(*case, "", method))
            share = None if ours is None or not theirs else 1 - ours / theirs
            cells.append(Cell(share, paper=printed_figures.SAVED.get(case[:2], {}).get(method)))
        rows.append(((case_title(results, case),), tuple(cells)))
    return PaperTable(
        title="Fig. 7: how much less FACADE sends than the others",
        row_titles=("clusters",),
        columns=tuple((f"than {method}",) for method in others),
        rows=tuple(rows),
        unit="share",
        notes=("A negative number means more. At 30:2 on CIFAR-10 the paper has about as much.",),
    )


# Gaps


def show_gaps(number: int, results: Results) -> StudyOutput:
    """Fig. 6 and 15: demographic parity and equalised odds of the last models, over seeds."""

    def cells(place: Setting, found: FairnessOverSeeds | None) -> list[Cell]:
        line = paper_line(place)
        theirs: Sequence[Any] = (line.parity, line.odds) if line else [(None, None)] * 2
        ours = (found.parity, found.odds) if found else (UNKNOWN, UNKNOWN)
        return [Cell(*mine, *paper) for mine, paper in zip(ours, theirs, strict=True)]

    table = PaperTable(
        title=f"Fig. {number}: gaps between the clusters, last models",
        **table_rows(results, by_clusters, cells),
        columns=((PARITY,), (ODDS,)),
        unit="gap",
        best="min",
        notes=notes_of(
            results,
            "Both are means over the classes, as in the authors' code; equalised odds adds the "
            "gaps of true and of false positives.",
        ),
    )
    columns = min(len(cases(results)), 3)
    return StudyOutput((table,), charts.plots(box_panels(results), columns=columns))


def box_panels(results: Results) -> list[Boxes]:
    """Demographic parity of every case, then equalised odds, with one box per method.

    The panels of a measure and a data set have the same height.
    """
    panels = []
    for measure in (PARITY, ODDS):
        values = {case: gaps_of(results, case, measure) for case in cases(results)}
        for case, by_method in values.items():
            if by_method:
                alike = [values[other] for other in values if other[0] == case[0]]
                gaps = [gap for one in alike for found in one.values() for gap in found]
                top = 1.08 * max(gaps, default=0.0) or 1.0
                title = case_title(results, case)
                panels.append(Boxes(title, by_method, ylabel=measure, top=top))
    return panels


def gaps_of(results: Results, case: Key, measure: str) -> dict[str, list[float]]:
    """The gaps of the seeds by method."""
    values = {}
    for place, series in places_of(results, case).items():
        found = fairness_of(series)
        if found is not None:
            of_seeds = found.parity_by_seed if measure == PARITY else found.odds_by_seed
            values[place.method] = [value for value in of_seeds if value is not None]
    return values
