"""Tables of P2 with tests of significance, its curves and heat maps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from peerage.papers import charts
from peerage.papers.charts import ACCURACY, Bars, HeatMap, Line, Plot, heat_maps, line_of
from peerage.papers.datasets import CIFAR, FEMNIST, MNIST, TITLES
from peerage.papers.difference import difference
from peerage.papers.p2 import printed
from peerage.papers.p2.settings import BYTES, ONE_STEP, SIZES, Setting, scalars_up
from peerage.papers.papertable import P_VALUE, Cell, PaperTable, Row
from peerage.papers.study import SMOKE_NOTE, Results, StudyOutput, Training
from peerage.records.metrics import BY_KEY
from peerage.report.series import Series
from peerage.report.statistics import anova, deviation, mean

ALL_KEYS = ("accuracy", "loss", "train_loss")
MEGA = 1e6
ANOVA = (
    "p-value: one-way analysis of variance over the methods above it; it takes two seeds or more."
)
LINEAR_NOTE = (
    "One step of gradient descent with all data of a client and a rate of 0.1, a guess. FedProx is "
    "FedAvg then: its pull is zero where the step begins. The batch being all data, the curvature "
    "of HWA is one squared gradient; HWA (examples), which the paper does not have, adds up those "
    "of single examples."
)
NOISE_NOTE = (
    "Noise on every number that a client sends; which levels the paper has is a guess. Without "
    "clipping it protects nothing: this is about robustness, not about privacy."
)
LAYERS = {"head": "output layer"}  # the others are called hidden1, hidden2, ...
NOTHING = (None, None)  # the paper has no number
Columns = Mapping[str, tuple[str, str]]  # titles -> data set, setting


# Numbers


def ends(series: Series | None) -> list[float]:
    """Each seed's accuracy in the last round that all seeds have."""
    rounds = series.rounds() if series else []
    return series.at(rounds[-1]) if series and rounds else []


def only_of(results: Results, method: str) -> Series | None:
    """The series of a method that has only one."""
    return next(iter(results.of(method=method)), None)


def cell_of(values: Sequence[float], paper: tuple[float | None, float | None] = NOTHING) -> Cell:
    return Cell(mean(values), deviation(values), *paper)


# Tables


def accuracy_table(results: Results, title: str, columns: Columns) -> PaperTable:
    """Accuracy of the hub's model in the last round, with one group of rows per number of epochs.

    A group has a row of p-values if ours or the paper's are known. Only significant bests are
    marked.
    """
    paper = printed.accuracies()
    rows: list[Row] = []
    tested = False
    for epochs in results.values("epochs"):
        found: dict[Setting, list[float]] = {}
        for method in results.values("method"):
            places = [Setting(*column, epochs, method) for column in columns.values()]
            found |= {place: ends(results.series.get(place)) for place in places}
            cells = tuple(cell_of(found[place], paper.get(place, NOTHING)) for place in places)
            rows.append(((epochs, method), cells))
        test = tuple(
            p_value(found, Setting(*column, epochs, printed.TEST)) for column in columns.values()
        )
        if any((cell.ours, cell.paper) != (None, None) for cell in test):
            rows.append(((epochs, printed.TEST), test))
            tested = True
    return PaperTable(
        title=title,
        row_titles=("", "method"),
        columns=tuple((title,) for title in columns),
        rows=tuple(rows),
        unit="percent",
        best="max" if tested else None,
        notes=(*((ANOVA,) if tested else ()), *notes_of(results)),
    )


def p_value(found: dict[Setting, list[float]], place: Setting) -> Cell:
    """The p-value over all methods of a column; ours is empty if a method is missing."""
    groups = [values for other, values in found.items() if other[:3] == place[:3]]
    return Cell(anova(groups), paper=printed.tests().get(place), unit=P_VALUE)


def without_tests(table: PaperTable) -> PaperTable:
    """The table for a figure, whose axis of accuracies cannot show p-values."""
    rows = tuple(row for row in table.rows if row[0][-1] != printed.TEST)
    return replace(table, rows=rows)


def notes_of(results: Results) -> tuple[str, ...]:
    """Notes on what the scale changes and on the number of seeds."""
    linear = (LINEAR_NOTE,) if ONE_STEP in results.values("epochs") else ()
    return results.notes(smaller(results), *linear, seeds=f" The paper has {printed.SEEDS}.")


def smaller(results: Results) -> list[str]:
    """Notes on what is smaller at scale small than in the paper."""
    size, datasets = SIZES["small"], results.values("dataset")
    if datasets == [FEMNIST]:
        writers, rounds = size.devices.nodes, size.devices.rounds
        return [f"Scale small: {writers} writers and {rounds} rounds; the paper has 3550 and 1000."]
    linear = ONE_STEP in results.values("epochs")
    sizes = "; ".join(
        f"{TITLES[name]}: {size.work[name].train} training examples, "
        f"{size.linear if linear else size.work[name].rounds} rounds"
        for name in datasets
    )
    rate = "" if linear else f"; learning rate {size.learning['lr']:g} for all"
    usual = "" if linear else " and rates of 0.001, or 0.01 for FedProx"
    notes = [
        f"Scale small. {sizes}{rate}. The paper has all examples, 50 rounds{usual}, so only the "
        "order of the methods can be compared."
    ]
    if datasets == [CIFAR]:
        notes.append("Ten epochs on CIFAR-10 are left to scale paper.")
    return notes


def show_table(number: int, results: Results) -> StudyOutput:
    """Tables 1 to 3."""
    [dataset] = results.values("dataset")
    columns = {split: (dataset, split) for split in printed.SPLITS}
    title = f"Table {number}: accuracy on {TITLES[dataset]}, mean ± deviation over seeds"
    table = accuracy_table(results, title, columns)
    return StudyOutput((table,), charts.against_paper(without_tests(table)))


# Curves


def plot_of(results: Results, title: str, key: str, **wanted: Any) -> Plot:
    """Curves from round 1; round 0 is equal for all and so low that the rest looks flat.

    The method `HWA (examples)`, a variant of another in the figure, is dashed.
    """
    lines = tuple(
        line_of(place.method, series, key, first=1, dashed=place.method.endswith(")"))
        for place, series in results.places(**wanted).items()
    )
    return Plot(title, lines, ylabel=BY_KEY[key].label)


def show_curves(number: int, keys: tuple[str, ...], results: Results) -> StudyOutput:
    """Fig. 3 to 7: the rows of a data set have accuracy and losses over the rounds."""
    [setting] = results.values("setting")
    columns = {TITLES[name]: (name, setting) for name in results.values("dataset")}
    table = accuracy_table(results, f"Fig. {number}: accuracy in the last round", columns)
    return StudyOutput((table,), draw_curves(keys, results), curves=keys)


def draw_curves(keys: tuple[str, ...], results: Results) -> Figure:
    """The figure of `show_curves`; below each row, the differences to the first method."""
    panels: list[Plot] = []
    for name in results.values("dataset"):
        row = [plot_of(results, TITLES[name], key, dataset=name) for key in keys]
        if row[0].lines:
            panels += row
        if len(row[0].lines) > 1:
            panels += [difference(panel) for panel in row]
    return charts.plots(panels, columns=len(keys))


def show_devices(results: Results) -> StudyOutput:
    """Table 4 and Fig. 9."""
    ours, paper = SIZES[results.plan.scale].devices.marks, printed.femnist()
    marks = list(zip(ours, printed.MARKS, strict=True))

    def cells(method: str) -> Iterable[Cell]:
        series = only_of(results, method)
        for round, mark in marks:
            yield cell_of(series.at(round) if series else [], (paper[method, mark], None))

    same = ours == printed.MARKS
    columns = [(f"{mark}" if same else f"{round} (paper: {mark})",) for round, mark in marks]
    title = "Table 4: accuracy on FEMNIST after so many rounds"
    table = results.method_table(title, columns, cells, "percent", notes=notes_of(results))
    panels = [plot_of(results, TITLES[FEMNIST], key) for key in ALL_KEYS]
    return StudyOutput((table,), charts.plots(panels), curves=ALL_KEYS)


def show_alphas(results: Results) -> StudyOutput:
    """Fig. 8: the labels of each client, and the accuracy of the methods."""
    columns = {setting: (MNIST, setting) for setting in results.values("setting")}
    table = accuracy_table(results, "Fig. 8: accuracy in the last round, MNIST", columns)
    return StudyOutput((table, lead_table(results)), draw_alphas(results))


def draw_alphas(results: Results) -> Figure:
    """The figure of `show_alphas`: labels, accuracies and their differences to the first method."""
    panels: list[Plot | Bars] = []
    for setting in results.values("setting"):
        found = results.of(setting=setting)
        if found:
            accuracy = plot_of(results, setting, "accuracy", setting=setting)
            panels += [labels_of(setting, found[0]), accuracy, difference(accuracy)]
    return charts.plots(panels, columns=3)


def lead_table(results: Results) -> PaperTable:
    """The lead of HWA over the best other method."""
    cells = []
    for setting in results.values("setting"):
        means = {p.method: mean(ends(s)) for p, s in results.places(setting=setting).items()}
        hwa = means.pop("HWA", None)
        others = [value for value in means.values() if value is not None]
        cells.append(Cell(None if hwa is None or not others else hwa - max(others)))
    return PaperTable(
        title="Fig. 8: lead of HWA over the best of the others, in points",
        row_titles=("",),
        columns=tuple((setting,) for setting in results.values("setting")),
        rows=((("HWA",), tuple(cells)),),
        unit="percent",
    )


def labels_of(title: str, series: Series) -> Bars:
    """The labels of each client's examples, for the first seed."""
    setup = series.records[0].setup
    clients = setup["allocation"]
    names = tuple(str(number) for number in range(len(clients)))
    parts = {
        str(label): [counts[place] for counts in clients]
        for place, label in enumerate(setup["classes"])
    }
    return Bars(title, names, parts, "client", "examples of each label")


def show_scopes(results: Results) -> StudyOutput:
    """Fig. 10: accuracy and traffic by the layers that are weighted by curvature."""
    expected = {
        job.place.method: scalars_up(job.experiment)
        for job in results.jobs
        if isinstance(job, Training)
    }

    def sent(method: str) -> Iterable[Cell]:
        up = bytes_up(only_of(results, method))
        yield Cell(None if up is None else up / BYTES, paper=expected[method])
        yield Cell(up, paper=BYTES * expected[method])

    accuracy = results.method_table(
        "Fig. 10: accuracy in the last round, MNIST, non-IID (I)",
        [("HWA",)],
        lambda method: [cell_of(ends(only_of(results, method)))],
        "percent",
        row_title="layers with curvature",
        notes=notes_of(results),
    )
    note = (
        "Ours is counted in the runs. The paper draws bars but prints no numbers: beside ours "
        "stand all parameters and entries of curvature, of 4 bytes each."
    )
    traffic = replace(
        accuracy,
        title="Fig. 10: what a client sends to the hub in a round",
        columns=(("numbers",), ("bytes",)),
        rows=results.by_method(sent),
        unit="count",
        notes=(note,),
    )
    heights = [(cells[1].ours or 0.0) / MEGA for _, cells in traffic.rows]
    names = tuple(results.values("method"))
    panels: list[Plot | Bars] = [
        plot_of(results, "MNIST, non-IID (I)", "accuracy"),
        Bars("sent by a client in a round", names, {"": heights}, ylabel="megabytes"),
    ]
    return StudyOutput((accuracy, traffic), charts.plots(panels, columns=2))


def bytes_up(series: Series | None) -> float | None:
    """Bytes that a client sends per round: all traffic without the models from the hub."""
    if series is None or not series.records[0].rounds:  # diverged in the first round
        return None
    record = series.records[0]
    last = record.network[-1]
    models = float(BYTES * record.setup["parameters"][0])
    return float(last["bytes_total"] / (last["nodes"] * last["round"]) - models)


def show_noise(results: Results) -> StudyOutput:
    """Fig. 11: accuracy over the noise on all messages of clients."""
    columns = {setting: (CIFAR, setting) for setting in results.values("setting")}
    table = accuracy_table(results, "Fig. 11: accuracy in the last round, CIFAR-10", columns)
    table = replace(table, notes=(NOISE_NOTE, *table.notes))
    lines = []
    for (_, method), cells in without_tests(table).rows:
        points = zip(SIZES[results.plan.scale].sigmas, cells, strict=True)
        known = [(sigma, cell) for sigma, cell in points if cell.ours is not None]
        means = [cell.ours or 0.0 for _, cell in known]
        spread = [cell.spread or 0.0 for _, cell in known]
        x = [sigma for sigma, _ in known]
        lines.append(Line(method, x, means, spread if any(spread) else ()))
    panel = Plot("CIFAR-10, Dir 0.01", tuple(lines), "standard deviation of the noise", ACCURACY)
    return StudyOutput((table,), charts.plots([panel]))


# Heat maps


def show_last_layers(results: Results) -> StudyOutput:
    """Fig. 1: two clients with all labels, and two clients with two labels each."""
    maps = {place: s.records[0].setup["weights"] for place, s in results.places().items()}
    panels = [
        HeatMap(f"{place.setting}: {place.method}", values, "hidden unit", "output")
        for place, values in maps.items()
    ]
    table = PaperTable(
        title="Test accuracy of single clients, before any merging",
        row_titles=("", "client"),
        columns=(("accuracy",),),
        rows=tuple(
            ((place.setting, place.method), (cell_of(ends(series)),))
            for place, series in results.places().items()
        ),
        unit="percent",
        notes=client_notes(results),
    )
    pictures = {place.title: values for place, values in maps.items()}
    return StudyOutput((table,), heat_maps(panels, "weight"), pictures=pictures)


def client_notes(results: Results) -> tuple[str, ...]:
    """Notes on the training data and epochs of these clients."""
    record = results.of()[0].records[0]
    epochs, lr = record.experiment["epochs"], record.experiment["lr"]
    seen = f"{epochs} epochs with a rate of {lr:g}."
    if results.plan.scale == "smoke":
        return (SMOKE_NOTE, seen)
    data = SIZES[results.plan.scale].work[MNIST].train or "all"
    return (f"Ten clients share {data} training examples; {seen}",)


def show_layer_curvature(results: Results) -> StudyOutput:
    """Fig. 2: the curvature of a client, by layer."""
    [series] = results.of()
    layers = series.records[0].setup["layers"]
    titles = {name: LAYERS.get(name, name.replace("hidden", "hidden layer ")) for name in layers}
    table = PaperTable(
        title="Curvature of the weights, in units of the largest",
        row_titles=("layer",),
        columns=(("mean",), ("share below 0.01",)),
        rows=tuple(
            ((titles[name],), (Cell(found["mean"]), Cell(found["small"])))
            for name, found in layers.items()
        ),
        unit="number",
        notes=(
            "The client with most examples. A dot of a picture is the largest value of a block of "
            "weights.",
            *client_notes(results),
        ),
        digits=5,
    )
    panels = [
        HeatMap(titles[name], found["picture"], "input", "output", tuple(found["shape"]))
        for name, found in layers.items()
    ]
    pictures = {name: found["picture"] for name, found in layers.items()}
    figure = heat_maps(panels, "curvature / largest", columns=3, height=3.0)
    return StudyOutput((table,), figure, pictures=pictures)
