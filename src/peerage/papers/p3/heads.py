"""Tables and figures of P3 about heads: how many, which nodes choose them, and their losses."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from matplotlib.ticker import MaxNLocator

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Line, Plot
from peerage.papers.p3 import printed_figures
from peerage.papers.p3.common import (
    by_clusters,
    cases,
    cluster_names,
    clusters_in_json,
    short,
    short_name,
)
from peerage.papers.p3.notes import PAIRS, notes_of, settings_of
from peerage.papers.p3.output import FAIR, OF_MEANS, fairness_table
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Results, StudyOutput, count_text
from peerage.records.rows import RunRecord
from peerage.report import fairness_figures
from peerage.report.fairness import fairness_over_rounds, highest_fair_accuracy
from peerage.report.head_choice import Settlement, head_losses, histograms, settlement
from peerage.report.series import Estimate, Series, estimate

NEVER = Settlement(None, None)
TERMS = (
    "Settled: each cluster has one head, and no two clusters share one. Separated: no two clusters "
    "share a head. Rounds are the first from which on this holds to the end."
)


# Fig. 8: the number of heads


def show_head_counts(results: Results) -> StudyOutput:
    """The highest accuracy of each cluster by the number of heads, and whether clusters settled."""
    names = cluster_names(results, cases(results)[0])
    highest = {
        place: peaks(results.series.get(place), len(names)) for place in settings_of(results)
    }
    rows: list[Row] = []
    for place, values in highest.items():
        cells = [Cell(*value) for value in values]
        if place in printed_figures.ONE_HEAD:
            cells[-2] = Cell(*values[-2], printed_figures.ONE_HEAD[place])
        rows.append(((place.setting,), tuple(cells)))
    accuracy = PaperTable(
        title="Fig. 8: highest accuracy of each cluster, and highest fair accuracy",
        row_titles=("heads",),
        columns=tuple((name,) for name in (*names, FAIR)),
        rows=tuple(rows),
        unit="percent",
        best="max",
        notes=notes_of(results, "Each seed's highest value in any test, then the mean over seeds."),
    )
    labels = [*map(short_name, names), FAIR]
    lines = [heads_line(label, highest, n, label == FAIR) for n, label in enumerate(labels)]
    panel = Plot("", tuple(lines), "number of heads", ACCURACY)
    figure = charts.plots([panel])
    figure.axes[0].set_xticks(sorted({int(x) for line in lines for x in line.x}))
    return StudyOutput((accuracy, use_table(results)), figure, pictures=clusters_in_json(results))


def peaks(series: Series | None, clusters: int) -> list[Estimate]:
    """The highest accuracy of each cluster, and the highest fair accuracy, over seeds."""
    if series is None:
        return [Estimate(None, None)] * (clusters + 1)
    runs = [fairness_over_rounds(record) for record in series.records]
    found = []
    for cluster in range(clusters):
        known = [[v for e in run if (v := e.accuracies[cluster]) is not None] for run in runs]
        found.append(estimate([max(values, default=None) for values in known]))
    fair = [highest_fair_accuracy(run) for run in runs]
    return [*found, estimate([None if peak is None else peak[1] for peak in fair])]


def heads_line(label: str, values: dict[Any, list[Estimate]], column: int, dashed: bool) -> Line:
    known = {
        int(place.setting.removeprefix("k = ")): found[column]
        for place, found in values.items()
        if found[column].mean is not None
    }
    spread = [one.std or 0.0 for one in known.values()]
    means = [one.mean or 0.0 for one in known.values()]
    return Line(label, list(known), means, spread if any(spread) else (), dashed)


def use_table(results: Results) -> PaperTable:
    """In how many runs clusters settled or were separated, and how many heads nodes chose."""
    rows = []
    for place in settings_of(results):
        records = results.series[place].records if place in results.series else ()
        found = [settlement(record) or NEVER for record in records]
        settled = sum(one.settled is not None for one in found)
        separated = sum(one.separated is not None for one in found)
        used = estimate([used_heads(record) for record in records])
        counts = [float(settled), float(separated)] if records else [None, None]
        rows.append(((place.setting,), (*map(Cell, counts), Cell(*used))))
    return PaperTable(
        title="Fig. 8: runs that settled or were separated, and heads that nodes chose in the end",
        row_titles=("heads",),
        columns=(("settled",), ("separated",), ("heads in use",)),
        rows=tuple(rows),
        unit="count",
        notes=(TERMS,),
        digits=1,
    )


def used_heads(record: RunRecord) -> int | None:
    """How many heads nodes chose in the last round with a choice."""
    last = next(reversed(histograms(record).values()), None)
    return None if last is None else sum(any(counts) for counts in zip(*last, strict=True))


# Fig. 9 and p3-settlement: which nodes choose which head


def show_choices(results: Results) -> StudyOutput:
    """Fig. 9: when the minority and all clusters agree on a head; a picture of the first seed."""
    records = records_of(results)
    papers = (printed_figures.MINORITY_AGREES, printed_figures.ALL_AGREE, None, None)
    columns = ("the minority agrees", "every cluster agrees", "settled", "separated")
    table = seed_table(
        "Fig. 9: rounds after which nodes of a cluster choose the same head to the end",
        columns,
        {seed_of(record): choice_rounds(record) for record in records},
        papers,
        notes_of(results, TERMS, "The figure shows the first seed."),
    )
    return StudyOutput((table,), choice_figure(records), pictures=choices_in_json(records))


def show_settlement(results: Results) -> StudyOutput:
    """When each seed settled, means over all seeds, and how many settled by each round."""
    records = records_of(results)
    found = {seed_of(record): settlement(record) or NEVER for record in records}
    rounds = seed_table(
        "First rounds from which on clusters are settled, or separated, to the end",
        ("settled", "separated"),
        {seed: [one.settled, one.separated] for seed, one in found.items()},
        (None, None),
        notes_of(results, TERMS),
    )
    means = fairness_table(results, "The last models of all seeds", by_clusters, (PAIRS, OF_MEANS))
    last = max((record.rounds for record in records), default=0)
    lines = (
        so_far("settled", [one.settled for one in found.values()], last),
        so_far("separated", [one.separated for one in found.values()], last, dashed=True),
    )
    panel = Plot("", lines if records else (), ylabel=f"seeds, of {len(records)}", floor=0.0)
    figure = charts.plots([panel] if records else [])
    for axes in figure.axes:
        axes.set_ylim(0, len(records) + 0.3)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    shared = sharing_table(records, cluster_names(results, cases(results)[0]))
    return StudyOutput((rounds, shared, means), figure, pictures=choices_in_json(records))


def sharing_table(records: Sequence[RunRecord], names: Sequence[str]) -> PaperTable:
    """In how many runs two clusters had the same head in the end, for each pair of clusters."""
    heads = [favourite_heads(record) for record in records]
    rows: list[Row] = []
    for a, b in combinations(range(len(names)), 2):
        shared = [found[a] == found[b] for found in heads if found]
        rows.append(((names[a], names[b]), (Cell(float(sum(shared)) if shared else None),)))
    return PaperTable(
        title="Runs in which most nodes of two clusters chose the same head in the end",
        row_titles=("cluster", "other cluster"),
        columns=((f"runs, of {len(records)}",),),
        rows=tuple(rows),
        unit="count",
        digits=0,
    )


def favourite_heads(record: RunRecord) -> list[int]:
    """The head that most nodes of each cluster chose in the last round; empty without a choice."""
    last: Sequence[Sequence[int]] = next(reversed(histograms(record).values()), [])
    return [max(range(len(counts)), key=counts.__getitem__) for counts in last]


def records_of(results: Results) -> list[RunRecord]:
    """The runs of a study with one series; none before the first is finished."""
    return [record for series in results.of() for record in series.records]


def seed_of(record: RunRecord) -> int:
    return int(record.experiment["seed"])


def choice_rounds(record: RunRecord) -> list[int | None]:
    """When the smallest cluster agrees, when all do, and when they are settled and separated."""
    found = agreements(record)
    known = [round for round in found if round is not None]
    every = max(known) if known and len(known) == len(found) else None
    ending = settlement(record) or NEVER
    return [found[-1] if found else None, every, ending.settled, ending.separated]


def agreements(record: RunRecord) -> list[int | None]:
    """For each cluster, the first round from which on its nodes choose one head to the end."""
    choices = histograms(record)
    found: list[int | None] = []
    for cluster in range(len(next(iter(choices.values()), []))):
        first = None
        for round, counts in reversed(choices.items()):
            if sum(count > 0 for count in counts[cluster]) != 1:
                break
            first = round
        found.append(first)
    return found


def seed_table(
    title: str,
    columns: Sequence[str],
    seeds: dict[int, list[int | None]],
    papers: Sequence[float | None],
    notes: tuple[str, ...],
) -> PaperTable:
    """One row per seed, and their mean, which exists only if every seed has a value."""
    rows: list[Row] = [
        ((f"seed {seed}",), tuple(Cell(value) for value in values))
        for seed, values in seeds.items()
    ]
    means = [estimate([values[n] for values in seeds.values()]) for n in range(len(columns))]
    cells = [Cell(*mean, paper) for mean, paper in zip(means, papers, strict=True)]
    rows.append((("all seeds",), tuple(cells)))
    return PaperTable(
        title=title,
        row_titles=("run",),
        columns=tuple((name,) for name in columns),
        rows=tuple(rows),
        unit="rounds",
        notes=notes,
    )


def so_far(label: str, rounds: Sequence[int | None], last: int, dashed: bool = False) -> Line:
    """How many of the runs have reached something by each round."""
    x = list(range(last + 1))
    y = [float(sum(r is not None and r <= now for r in rounds)) for now in x]
    return Line(label, x, y, dashed=dashed)


def choice_figure(records: Sequence[RunRecord]) -> Any:
    return fairness_figures.head_choice(records[0]) if records else charts.plots([])


def choices_in_json(records: Sequence[RunRecord]) -> dict[str, Any]:
    """How many nodes of each cluster chose each head, by seed: the rounds in which this changed."""
    found = {}
    for record in records:
        choices, before = {}, None
        for round, counts in histograms(record).items():
            if counts != before:
                choices[round] = before = counts
        found[f"seed {seed_of(record)}"] = {
            "rounds": list(choices),
            "nodes": list(choices.values()),
        }
    return found


# Fig. 16: losses of the heads


def show_head_losses(results: Results) -> StudyOutput:
    """The first seed that settled and the first that did not, as far as there are any."""
    endings = {record: settlement(record) or NEVER for record in records_of(results)}
    settled = [record for record, one in endings.items() if one.settled is not None]
    others = [record for record, one in endings.items() if one.settled is None]
    shown = {"settled": settled[:1], "not settled": others[:1]}
    missing = [
        f"There is no run that {verb} ({count_text('seed', {len(endings)})})."
        for verb, found in (("settled", settled), ("did not settle", others))
        if endings and not found
    ]
    names = cluster_names(results, cases(results)[0])
    rows: list[Row] = []
    panels: list[Plot] = []
    numbers: dict[str, Any] = {}
    for title, [record] in ((title, found) for title, found in shown.items() if found):
        ending = endings[record]
        values = (ending.settled, ending.separated, used_heads(record))
        rows.append(((f"{title}: seed {seed_of(record)}",), tuple(map(Cell, values))))
        losses = head_losses(record)
        panels += [loss_plot(f"{title}: {names[c]}", curves) for c, curves in losses.items()]
        numbers[title] = losses_in_json(losses)
    table = PaperTable(
        title="Fig. 16: the runs that the figure shows",
        row_titles=("run",),
        columns=(("settled in round",), ("separated in round",), ("heads in use in the end",)),
        rows=tuple(rows) or ((("none",), (Cell(None),) * 3),),
        unit="count",
        notes=notes_of(results, TERMS, *missing),
    )
    figure = charts.plots(panels, columns=max(len(names), 1))
    return StudyOutput((table,), figure, pictures=numbers)


def loss_plot(title: str, curves: dict[int, tuple[list[int], list[float]]]) -> Plot:
    lines = tuple(Line(f"head {head}", x, y) for head, (x, y) in curves.items())
    return Plot(title, lines, ylabel="training loss")


def losses_in_json(
    losses: dict[int, dict[int, tuple[list[int], list[float]]]],
) -> dict[str, Any]:
    return {
        f"cluster {cluster}": {
            f"head {head}": {"rounds": rounds, "losses": short(values)}
            for head, (rounds, values) in curves.items()
        }
        for cluster, curves in losses.items()
    }
