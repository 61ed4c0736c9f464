"""Figures of P1 without training: the split of the data, alpha, and the graph of two groups."""

import numpy as np

from peerage.graphs.graph import StaticGraph
from peerage.papers import charts
from peerage.papers.charts import HeatMap, Line, Plot
from peerage.papers.datasets import TITLES
from peerage.papers.p1.notes import notes_of, settings_of
from peerage.papers.p1.settings import Setting
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Calculation, Results, StudyOutput
from peerage.report.graphs import draw


def show_allocation(results: Results) -> StudyOutput:
    """Fig. 10: how many examples of each class every client has.

    The picture shows shares of a client's examples, as counts of 10 and of 100 clients would need
    colours of their own.
    """
    rows: list[Row] = []
    panels, pictures = [], {}
    for place in settings_of(results):
        title = f"{TITLES[place.dataset]}, N = {clients(results, place)}, {place.split}"
        series = results.series.get(place)
        if series is None:
            rows.append(((title,), (Cell(None),) * 4))
            continue
        counts = np.array(series.records[0].setup["allocation"])  # [clients, classes]
        held = counts.sum(axis=1)
        values = (held.min(), held.max(), (counts > 0).sum(axis=1).mean(), (counts > 0).mean())
        cells = [Cell(float(value)) for value in values]
        cells[2] = Cell(float(values[2]), unit="number")
        cells[3] = Cell(float(values[3]), unit="share")
        rows.append(((title,), tuple(cells)))
        shares = counts / np.maximum(held, 1)[:, None]
        panels.append(HeatMap(title, shares.T.tolist(), "client", "class"))
        pictures[place.title] = counts.tolist()
    table = PaperTable(
        title="Fig. 10: examples of the clients",
        row_titles=("split",),
        columns=(
            ("fewest of a client",),
            ("most of a client",),
            ("classes of a client",),
            ("pairs of client and class in use",),
        ),
        rows=tuple(rows),
        unit="count",
        notes=notes_of(
            results,
            "The paper draws circles, and does not say how it splits classes. Guessed: shares of "
            "every class from a Dirichlet distribution, drawn until each client has 10 examples; "
            "clients with more than the mean get no further classes.",
        ),
    )
    figure = charts.heat_maps(panels, "share of the client's examples", columns=2)
    return StudyOutput((table,), figure, curves=("accuracy",), pictures=pictures)


def clients(results: Results, place: Setting) -> int:
    """The number of clients, which is smaller at scale smoke."""
    job = next(job for job in results.jobs if job.place == place)
    assert isinstance(job, Calculation)
    return int(getattr(job.model, "nodes", place.clients))


def show_alpha(results: Results) -> StudyOutput:
    """Fig. 11: alpha over the rounds."""
    rows: list[Row] = []
    panels = []
    for place, series in results.places().items():
        rounds, values, _ = series.curve("alpha")
        numbers = [round + 1 for round in rounds]  # as users count them
        maxima = [n for n, value in zip(numbers, values, strict=True) if value == max(values)]
        shown = [Cell(float(n)) for n in maxima[:5]]
        rows.append(((place.setting,), (*shown, *[Cell(None)] * (5 - len(shown)))))
        panels.append(Plot(place.setting, (Line("alpha", numbers, values),), ylabel="alpha"))
    table = PaperTable(
        title="Fig. 11: rounds in which alpha is at its maximum",
        row_titles=("cycles",),
        columns=tuple((name,) for name in ("first", "second", "third", "fourth", "fifth")),
        rows=tuple(rows),
        unit="rounds",
        notes=notes_of(
            results,
            "alpha starts at 0 and rises, as the text says; Eq. 4 as printed would fall. The "
            "paper does not say by how much the period grows. Half cycles and 1 are the defaults "
            "here.",
        ),
    )
    return StudyOutput((table,), charts.plots(panels, columns=2), curves=("alpha",))


def show_graph(results: Results) -> StudyOutput:
    """Fig. 23: two groups, each a complete graph, and one link between them."""
    rows: list[Row] = []
    figure = charts.plots([])
    for place, series in results.places().items():
        nodes = clients(results, place)
        edges = np.array(series.records[0].setup["edges"])
        degree = np.bincount(edges.ravel(), minlength=nodes)
        bridges = [tuple(edge) for edge in edges.tolist() if (edge[0] - edge[1]) % 2]
        [(low, high)] = bridges
        values = (nodes, len(edges), len(bridges), low, high, degree.min(), degree.max())
        rows.append(((place.setting,), tuple(Cell(float(value)) for value in values)))
        figure = draw(StaticGraph.from_edges(nodes, edges))
    names = (
        "clients", "links", "links between groups", "their lower end", "their upper end",
        "fewest neighbours", "most neighbours",
    )  # fmt: skip
    table = PaperTable(
        title="Fig. 23: the graph",
        row_titles=("graph",),
        columns=tuple((name,) for name in names),
        rows=tuple(rows),
        unit="count",
        notes=notes_of(
            results,
            "Clients are counted from 0 here and from 1 in the paper. Of an even number of ids, "
            "the lower of the two in the middle counts as the median.",
        ),
    )
    return StudyOutput((table,), figure, curves=("accuracy",))
