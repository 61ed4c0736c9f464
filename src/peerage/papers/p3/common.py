"""Rows, titles and curves that P3's tables and figures share."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import fmean, pstdev
from typing import Any

from matplotlib.figure import Figure

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Bars, Line, Plot
from peerage.papers.datasets import TITLES
from peerage.papers.p3 import printed
from peerage.papers.p3.notes import settings_of, sizes_of
from peerage.papers.p3.settings import ROTATED, Setting
from peerage.papers.papertable import Cell, Row
from peerage.papers.study import Results, Training
from peerage.report.fairness import (
    Fairness,
    FairnessOverSeeds,
    fair_accuracy_curve,
    fairness_over_rounds,
    fairness_over_seeds,
)
from peerage.report.series import Curve, Series

Key = tuple[str, str, str]  # data set, sizes as printed, and how clusters differ
Titles = Callable[[Results, Setting], tuple[str, ...]]


def cases(results: Results) -> list[Key]:
    """Data sets with their clusters, in the order of the jobs."""
    return list(dict.fromkeys(place[:3] for place in settings_of(results)))


def places_of(results: Results, case: Key) -> dict[Setting, Series]:
    dataset, clusters, shift = case
    return results.places(dataset=dataset, clusters=clusters, shift=shift)


def fairness_of(series: Series | None) -> FairnessOverSeeds | None:
    return None if series is None else fairness_over_seeds(series.records)


def case_title(results: Results, case: Key) -> str:
    """The sizes of clusters; with the data set and the shift where a study has several."""
    dataset, clusters, shift = case
    several = len(results.values("dataset")) > 1
    words = [TITLES[dataset]] if several else []
    words += [shift] if len(results.values("shift")) > 1 else []
    return " ".join([*words, sizes_of(results, clusters)])


def by_clusters(results: Results, place: Setting) -> tuple[str, ...]:
    return case_title(results, place[:3]), place.method


def by_setting(results: Results, place: Setting) -> tuple[str, ...]:
    return (place.setting,)


def paper_line(place: Setting) -> printed.Line | None:
    if place.shift != ROTATED or place.setting:
        return None
    return paper_lines().get((place.dataset, place.clusters, place.method))


@cache
def paper_lines() -> Mapping[printed.Coordinates, printed.Line]:
    return printed.lines()


def table_rows(
    results: Results,
    titles: Titles,
    cells: Callable[[Setting, FairnessOverSeeds | None], Sequence[Cell]],
) -> dict[str, Any]:
    """One row per series of the study, also where there are no runs yet."""
    rows: list[Row] = []
    for place in settings_of(results):
        found = fairness_of(results.series.get(place))
        rows.append((titles(results, place), tuple(cells(place, found))))
    names = {1: ("setting",), 2: ("clusters", "method")}[len(rows[0][0])]
    return {"row_titles": names, "rows": tuple(rows)}


def cluster_names(results: Results, case: Key) -> list[str]:
    """The size of each cluster and what its images are like."""
    for job in results.jobs:
        if isinstance(job, Training) and job.place in settings_of(results, case):
            clusters = job.experiment.clusters
            assert clusters is not None
            words = [clusters.describe(c) for c in range(len(clusters.sizes))]
            shifts = [text.partition(" (")[2].removesuffix(")") for text in words]
            counts = [f"{n} node{'s' * (n > 1)}" for n in clusters.sizes]
            return [f"{n}, {text}" for n, text in zip(counts, shifts, strict=True)]
    return []


def short_name(name: str) -> str:
    """The name of a cluster without its size."""
    return name.partition(", ")[2]


def cluster_line(label: str, series: Series, cluster: int) -> Line:
    return line_of(label, series, curve_of(series, lambda e: e.accuracies[cluster]))


def line_of(label: str, series: Series, curve: Curve) -> Line:
    spread = curve.stds if series.seeds > 1 else ()
    return Line(label, curve.rounds, curve.means, spread)


def curve_of(series: Series, value: Callable[[Fairness], float | None]) -> Curve:
    """Means and deviations over seeds; the value of the last round is that after the final step."""
    found = [
        {e.round: known for e in fairness_over_rounds(record) if (known := value(e)) is not None}
        for record in series.records
    ]
    rounds = sorted(set.intersection(*map(set, found))) if found else []
    columns = [[values[round] for values in found] for round in rounds]
    return Curve(rounds, [fmean(column) for column in columns], [pstdev(c) for c in columns])


def clusters_in_json(results: Results) -> dict[str, Any]:
    """The curves of the clusters and of fair accuracy, for the JSON file."""
    found = {}
    for place, series in results.places().items():
        rounds, means, _ = fair_accuracy_curve(series.records)
        clusters = range(place.clusters.count(":") + 1)
        found[place.title] = {
            "rounds": rounds,
            "clusters": [short(cluster_line("", series, c).y) for c in clusters],
            "fair_accuracy": short(means),
        }
    return found


def short(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


def cluster_plots(results: Results) -> Figure:
    """One line of panels per case, one panel per cluster; a line of a panel is a method."""
    panels, counts = [], set[int]()
    for case in cases(results):
        places = places_of(results, case)
        if not places:
            continue
        names = cluster_names(results, case)
        counts.add(len(names))
        for cluster, name in enumerate(names):
            lines = tuple(
                cluster_line(place.setting or place.method, series, cluster)
                for place, series in places.items()
            )
            title = f"{case_title(results, case)}: {name}"
            panels.append(Plot(title, lines, ylabel=ACCURACY))
    return charts.plots(panels, columns=min(counts, default=1))


def bar_panels(results: Results, values: Mapping[Setting, float], ylabel: str) -> list[Bars]:
    """One panel per case with a bar per method; heights are rounded to what they are labelled."""
    panels = []
    for case in cases(results):
        known = {p.method: values[p] for p in places_of(results, case) if p in values}
        if known:
            heights = {"": [float(f"{value:.3g}") for value in known.values()]}
            title = case_title(results, case)
            panels.append(Bars(title, tuple(known), heights, ylabel=ylabel))
    return panels
