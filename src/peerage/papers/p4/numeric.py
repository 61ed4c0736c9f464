"""The numerical model of P4's section 4.2 on random graphs: Fig. 5 and 8."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from peerage import specs
from peerage.graphs.diffusion import diffuse
from peerage.graphs.graph import Graph
from peerage.graphs.mixing import gains
from peerage.graphs.rewiring import assortativity, with_assortativity
from peerage.graphs.topology import TOPOLOGIES
from peerage.papers import charts
from peerage.papers.charts import Line, Plot, line_of
from peerage.papers.p4 import printed
from peerage.papers.p4.output import FIT, exponent, nodes, notes_of
from peerage.papers.p4.settings import Setting
from peerage.papers.papertable import Cell, PaperTable, Row
from peerage.papers.study import Results, StudyOutput
from peerage.randomness import stream_seed
from peerage.report.series import Estimate, Key, Series, estimate

FIVE = 5 / sqrt(3)  # standard deviation of the authors' start: uniform from -5 to 5
TRAINED, CALCULATED = "training", "numerical model"
REWIRING_COST = 1e5  # multiplications in the time of rewiring an edge
OVER_REALISATIONS = "standard deviation over realisations"
HUBS = "heavy tail"
KINDS = {CALCULATED: False, "||v|| of graphs": True}  # whether their lines are dashed


@dataclass(frozen=True)
class Diffused:
    """Each realisation has its own graph, start and noise; deviations are in units of `init`."""

    topology: str
    nodes: int
    degree: float  # mean degree, for the estimated time
    parameters: int
    rounds: int
    noise: float
    init: float = FIVE
    start: Literal["uniform", "normal"] = "uniform"
    assortativity: float | None = None  # the graph is rewired to it

    name: ClassVar[str] = "diffusion"

    @property
    def products(self) -> float:
        averaging = self.rounds * self.nodes * (self.degree + 1) * self.parameters
        rewiring = REWIRING_COST * self.nodes * self.degree / 2
        return averaging + (0.0 if self.assortativity is None else rewiring)

    def realise(self, seed: int) -> dict[str, Any]:
        graph = self.graph(seed)
        found = diffuse(
            graph,
            parameters=self.parameters,
            rounds=self.rounds,
            init=self.init,
            noise=self.noise,
            start=self.start,
            seed=stream_seed(seed, f"state on {self.topology} {self.assortativity}", self.nodes),
        )
        setup = {"norm": float(1 / gains(graph)[0])}
        if self.assortativity is not None:
            setup["assortativity"] = assortativity(graph)
        curves = {"sigma_ap": found.sigma_ap, "sigma_an": found.sigma_an}
        units = {name: short(values / self.init) for name, values in curves.items()}
        return {"setup": setup, "curves": units}

    def graph(self, seed: int) -> Graph:
        """The graph of a seed; rewired graphs of one seed differ only in their assortativity."""
        # One stream per topology and size, so that their errors are independent.
        graph_seed = stream_seed(seed, f"graph {self.topology}", self.nodes)
        drawn: Graph = specs.parse(self.topology, "topology", TOPOLOGIES).build(
            self.nodes, graph_seed
        )
        return with_assortativity(drawn, self.assortativity, graph_seed)


def short(values: ArrayLike) -> list[float]:
    """Round to six digits, the precision of float32."""
    return [float(f"{value:.6g}") for value in np.asarray(values)]


def families(degree: int) -> dict[str, str]:
    """The graphs of Fig. 8 with this mean degree, by the names of `printed.EXPONENTS`.

    The paper names the configuration model. Its code, which gave the printed exponents, draws
    heavy tails by Chung and Lu's rule; the two differ with gamma = 2.5.
    """
    return {
        "regular": f"regular:k={degree}",
        "Erdos-Renyi": f"er:degree={degree}",
        "Barabasi-Albert": f"ba:m={degree // 2}",
        **{
            f"{HUBS} {gamma:g}": f"heavy-tail:gamma={gamma},degree={degree}"
            for gamma in (2.5, 3.0, 3.5, 4.0, 5.0)
        },
    }


def norm(series: Series) -> Estimate:
    return estimate([record.setup["norm"] for record in series.records])


def end(series: Series) -> Estimate:
    """sigma_ap in the last round, in units of its start."""
    return series.final("sigma_ap")


MEASURES = {"sigma_ap of the model": end, "||v|| of the graphs": norm}


def show_compression(results: Results) -> StudyOutput:
    """Fig. 8(a, b): sigma_ap at the end beside ||v||, over the sizes of the graphs."""
    kinds = {name: results.of(method=name) for name in results.values("method")}
    note = (
        "The paper's column is the fit in its authors' notebook. Heavy tails are drawn by Chung "
        "and Lu's rule, as in their code."
    )
    fits = results.method_table(
        "Exponent a: sigma_ap falls to n^-a of its start",
        [(title,) for title in MEASURES],
        lambda name: [_fitted(name, kinds[name], value) for value in MEASURES.values()],
        "number",
        row_title="graph",
        notes=(note,),
        spread=FIT,
    )
    sizes = results.values("setting")
    values = results.method_table(
        "sigma_ap at the end times sqrt(n), in units of its start",
        [(size,) for size in sizes],
        lambda name: [results.cell(Setting("", size, name), in_roots) for size in sizes],
        "number",
        row_title="graph",
        notes=("On regular graphs it is 1.", *notes_of(results, "compression")),
        spread=OVER_REALISATIONS,
    )
    panels = [
        Plot(title, _lines(kinds, tails), "nodes", "sigma_ap / start", log="xy")
        for title, tails in (("(a)", False), ("(b) heavy tails", True))
    ]
    return StudyOutput((fits, values), charts.plots(panels, columns=2, kinds=KINDS))


def _fitted(name: str, series: list[Series], value: Callable[[Series], Estimate]) -> Cell:
    slope, error = exponent({nodes(s): value(s).mean for s in series})
    return Cell(None if slope is None else -slope, error, printed.EXPONENTS[name])


def in_roots(series: Series, value: Callable[[Series], Estimate] = end) -> Estimate:
    """A value in units of 1 / sqrt(n), which is ||v|| of a regular graph."""
    return value(series).times(sqrt(nodes(series)))


def _lines(kinds: dict[str, list[Series]], tails: bool) -> tuple[Line, ...]:
    lines = []
    for name, series in kinds.items():
        if name.startswith(HUBS) == tails and series:
            x = [float(nodes(s)) for s in series]
            ends = [end(s) for s in series]
            deviations = [value.std or 0.0 for value in ends]
            lines.append(Line(name, x, [value.mean or 0.0 for value in ends], deviations))
            lines.append(Line(name, x, [norm(s).mean or 0.0 for s in series], dashed=True))
    return tuple(lines)


def show_assortativity(results: Results) -> StudyOutput:
    """Fig. 8(c): sigma_ap and ||v|| of rewired graphs over their assortativity."""
    places = results.places()
    values = {"assortativity": [_reached(series) for series in places.values()]}
    for title, value in MEASURES.items():
        values[title] = [in_roots(series, value) for series in places.values()]
    table = PaperTable(
        title="Compression times sqrt(n), after rewiring",
        row_titles=("",),
        columns=tuple((title,) for title in values),
        rows=tuple(
            ((place.setting,), tuple(Cell(*of_place) for of_place in row))
            for place, row in zip(places, zip(*values.values(), strict=True), strict=True)
        ),
        unit="number",
        notes=notes_of(results, "rewired"),
        spread=OVER_REALISATIONS,
    )
    lines = tuple(
        Line(
            "Erdos-Renyi",
            [reached.mean or 0.0 for reached in values["assortativity"]],
            [of_place.mean or 0.0 for of_place in values[title]],
            [of_place.std or 0.0 for of_place in values[title]],
            dashed=value is norm,
        )
        for title, value in MEASURES.items()
    )
    panel = Plot("", lines, "degree assortativity", "sqrt(n) sigma_ap / start", floor=0.0)
    return StudyOutput((table,), charts.plots([panel], kinds=KINDS))


def _reached(series: Series) -> Estimate:
    return estimate([record.setup["assortativity"] for record in series.records])


def show_start(results: Results) -> StudyOutput:
    """Fig. 5: how training and averaging change the models in the first rounds."""
    panels, endings, moves = [], [], []
    for series in results.of(setting=TRAINED):
        layer = ("layers", next(iter(series.records[0].network[0]["layers"])))
        panels += _moved(series)
        panels.append(_spread("(b) first weights", series, (*layer, "an"), (*layer, "ap")))
        endings.append(_ending(TRAINED, series, (*layer, "ap")))
        moves += _moves(series)
    for series in results.of(setting=CALCULATED):
        panels.append(_spread("(c) numerical model", series, "sigma_an", "sigma_ap"))
        endings.append(_ending(CALCULATED, series, "sigma_ap"))
    ends = PaperTable(
        title="sigma_ap in the last round, in units of its start",
        row_titles=("",),
        columns=(("last / first",),),
        rows=tuple(endings),
        unit="number",
        notes=("The paper's number is 1 / sqrt(n).", *notes_of(results, "start")),
    )
    change = PaperTable(
        title="Change of the models in single rounds",
        row_titles=("round",),
        columns=(("averaging / training",), ("cosine between them",)),
        rows=tuple(moves),
        unit="number",
    )
    tables = (ends, change) if moves else (ends,)
    return StudyOutput(tables, charts.plots(panels, columns=2, across="1 / sqrt(n)"))


def _moved(series: Series) -> list[Plot]:
    norms = {"training": "train", "averaging": "combine"}
    lines = [line_of(name, series, ("moved", key)) for name, key in norms.items()]
    # Both are nearly equal to averaging, whose line a solid one would hide.
    lines.append(line_of("both", series, ("moved", "total"), dashed=True))
    cosine = (line_of("cosine", series, ("moved", "cosine")),)
    return [
        Plot("(a) change in a round", tuple(lines), ylabel="mean norm", log="y"),
        Plot("(a) training against averaging", cosine, ylabel="mean cosine"),
    ]


def _spread(title: str, series: Series, an: Key, ap: Key) -> Plot:
    """Deviations over nodes and over parameters, in units of the initial sigma_ap."""
    unit = series.curve(ap).means[0]
    lines = (line_of("sigma_an", series, an, unit=unit), line_of("sigma_ap", series, ap, unit=unit))
    across = (("sigma_ap", 1 / sqrt(nodes(series))),)
    return Plot(title, lines, ylabel="deviation / start", log="y", levels=across)


def _ending(name: str, series: Series, key: Key) -> Row:
    share = series.final(key).times(1 / series.curve(key).means[0])
    return (name,), (Cell(*share, 1 / sqrt(nodes(series))),)


def _moves(series: Series) -> list[Row]:
    """The first round, one in the middle and the last."""
    curves = {name: series.curve(("moved", name)) for name in ("train", "combine", "cosine")}
    rounds = curves["train"].rounds
    rows: list[Row] = []
    for place in dict.fromkeys((0, len(rounds) // 2, len(rounds) - 1) if rounds else ()):
        train, combine, cosine = (curve.means[place] for curve in curves.values())
        ratio = combine / train if train > 0 else None
        rows.append(((str(rounds[place]),), (Cell(ratio), Cell(cosine))))
    return rows
