"""The experiments of P0 (DecHW): settings at three scales, methods, and every table and figure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from peerage.experiment import Experiment
from peerage.report import studies
from peerage.report.papertable import Cell, PaperTable
from peerage.report.series import Series
from peerage.reproduce import p0_printed as printed
from peerage.reproduce.study import Job, Plan, Results, Scale, Shown, Study

MNIST, FASHION, CIFAR = printed.DATASETS
TITLES = {MNIST: "MNIST", FASHION: "Fashion-MNIST", CIFAR: "CIFAR-10"}
FIVE = ("DecHetero", "CFA", "DecDiff", "DecDiff(VT)", "DecHW")
KINDS = ("batch", "sample", "full", "online")  # of curvature
NORM = "norm of the curvature"
NOT_PRINTED = ""  # where the paper has no numbers
HALF = 0.469  # half of DecHW's accuracy on MNIST with Dir 0.2, which the paper counts rounds to

# Rates and momenta of section V-A; DESA keeps those of its own paper.
RATES = {
    MNIST: {"lr": 0.001, "momentum": 0.5},
    FASHION: {"lr": 0.001, "momentum": 0.9},
    CIFAR: {"lr": 0.01, "momentum": 0.9},
}
DESA_RATES = {"lr": 0.01, "momentum": 0.0, "batch_size": 32}


@dataclass(frozen=True)
class Size:
    """What a scale makes of the experiments."""

    seeds: int
    alphas: tuple[float, ...]
    nodes: int
    topology: str
    hubs: str  # the graph of the authors' scripts
    rounds: Mapping[str, int]  # by data set
    train: Mapping[str, int | None]  # training examples; None for all
    epochs: Mapping[str, int]
    batch: Mapping[str, int]
    every: Mapping[str, int]  # rounds between evaluations
    samples: int | None  # test examples; None for all
    theta: int  # rounds with curvature in DecHW*
    half: tuple[int, float]  # rounds at most, accuracy to reach
    anchors: str  # options of DESA


SIZES: dict[Scale, Size] = {
    # Ten nodes that take as many steps in a round as in the paper, 50, on a fraction of its data.
    # With 100 examples per node, nobody learns anything on CIFAR-10; so a node has 500 there and
    # sees them once in a round.
    "small": Size(
        seeds=1,
        alphas=(0.2,),
        nodes=10,
        topology="er:p=0.5",
        hubs="ba:m=3",
        rounds={MNIST: 60, FASHION: 40, CIFAR: 60},
        train={MNIST: 2000, FASHION: 1000, CIFAR: 5000},
        epochs={MNIST: 5, FASHION: 5, CIFAR: 1},
        batch={MNIST: 20, FASHION: 10, CIFAR: 10},
        every={MNIST: 1, FASHION: 2, CIFAR: 5},
        samples=1000,
        theta=30,
        half=(60, HALF),
        anchors="ipc=10,iterations=50",
    ),
    "paper": Size(
        seeds=5,
        alphas=(1.0, 0.5, 0.2),
        nodes=50,
        topology="er:p=0.2",
        hubs="ba:m=5",
        rounds=dict.fromkeys(RATES, 1000),
        train=dict.fromkeys(RATES),
        epochs=dict.fromkeys(RATES, 5),
        batch=dict.fromkeys(RATES, 100),
        every=dict.fromkeys(RATES, 1),
        samples=None,
        theta=30,
        half=(250, HALF),
        anchors="ipc=50,iterations=1000",
    ),
    # `digits` stands in for every data set: nothing to fetch, and runs that tables share.
    "smoke": Size(
        seeds=1,
        alphas=(0.2,),
        nodes=6,
        topology="er:p=0.6",
        hubs="ba:m=2",
        rounds=dict.fromkeys(RATES, 4),
        train={},
        epochs=dict.fromkeys(RATES, 1),
        batch=dict.fromkeys(RATES, 16),
        every=dict.fromkeys(RATES, 1),
        samples=None,
        theta=2,
        half=(4, 0.2),
        anchors="ipc=2,iterations=2",
    ),
}


def experiment(
    plan: Plan, dataset: str, alpha: float, algorithm: str, seed: int, **changes: Any
) -> Experiment:
    """The setting of section V-A at a scale; `changes` replace what a method needs otherwise."""
    size = SIZES[plan.scale]
    work = {"epochs": size.epochs[dataset], "batch_size": size.batch[dataset]}
    local: dict[str, Any] = {**work, **RATES[dataset]}
    evaluation: dict[str, Any] = {"every": size.every[dataset], "samples": size.samples}
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "nodes": size.nodes,
        "topology": size.topology,
        "partition": f"dirichlet:alpha={alpha},cap_at_mean=true,min_size=10",
        "rounds": size.rounds[dataset],
        "seed": seed,
    }
    if plan.scale == "smoke":
        settings |= {"dataset": "digits", "model": "digits-mlp", "engine": {"name": "serial"}}
        local = {**work, "lr": 0.05}
    else:
        count = size.train[dataset]
        settings["dataset"] = dataset if count is None else f"{dataset}:train={count}"
        settings["model"] = model_of(dataset, plan)
    if algorithm.startswith("desa"):
        local |= DESA_RATES
    if plan.fidelity == "code":
        settings |= {"algorithm": as_in_code(algorithm), "topology": size.hubs}
        local["early_stop"] = "rollback"
        evaluation["validation"] = 0.2
    return Experiment(**settings | {"local": local, "evaluation": evaluation} | changes)


def model_of(dataset: str, plan: Plan) -> str:
    name = {MNIST: "mnist-cnn", FASHION: "fashion-cnn", CIFAR: "cifar-cnn"}[dataset]
    in_code = {MNIST: "dropout=true", FASHION: "relu=first"}
    return f"{name}:{in_code[dataset]}" if plan.fidelity == "code" and dataset in in_code else name


def as_in_code(algorithm: str) -> str:
    """The options that the authors' scripts run with."""
    extra = {
        "decavg": "weights=uniform",
        "decdiff": "weights=uniform",
        "decdiff-vt": "weights=uniform",
        "dechw": "weights=uniform,accumulate=ema,normalise=none,include_self=false",
    }
    name, _, options = algorithm.partition(":")
    chosen = dict(item.split("=") for item in extra.get(name, "").split(",") if item)
    chosen |= dict(item.split("=") for item in options.split(",") if item)
    return f"{name}:{','.join(f'{k}={v}' for k, v in chosen.items())}" if chosen else name


def method(name: str, size: Size) -> tuple[str, dict[str, Any]]:
    """(algorithm, changes of the experiment) behind a name that the paper uses."""
    plain = {
        "DecHetero": "decavg",
        "CFA": "cfa",
        "DecDiff": "decdiff",
        "DecDiff(VT)": "decdiff-vt",
        "DecHW": "dechw",
        "DecHW*": f"dechw:theta={size.theta}",
        "DecHW* (frozen)": f"dechw:theta={size.theta},after_stop=frozen",
        "DecHW, no accumulation": "dechw:accumulate=none",
        "DecHW, raw accumulation": "dechw:normalise=none",
        "DESA": f"desa:{size.anchors}",
        **{f"DecHW, {kind}": f"dechw:curvature={kind}" for kind in KINDS},
    }
    if name == "DecHomo":
        return "decavg", {"init": {"start": "shared"}}
    return plain[name], {}


def grid(
    plan: Plan,
    methods: Iterable[str],
    datasets: Iterable[str],
    alphas: Iterable[float] | None = None,
    seeds: int | None = None,
    **changes: Any,
) -> list[Job]:
    """A job for every data set, alpha, method and seed."""
    size = SIZES[plan.scale]
    jobs = []
    for dataset in datasets:
        for alpha in alphas or size.alphas:
            for name in methods:
                algorithm, own = method(name, size)
                for seed in range(seeds or plan.seeds or size.seeds):
                    made = experiment(plan, dataset, alpha, algorithm, seed, **own | changes)
                    jobs.append(Job((dataset, alpha, name), made))
    return jobs


# Tables


def final_accuracy(results: Results, title: str = "") -> PaperTable:
    paper = printed.accuracies(printed.FINAL, printed.DATASETS)
    columns = [(d, a) for d in results.datasets for a in results.alphas]
    return PaperTable(
        title=title or "Accuracy over the last 10 rounds, beside Table I",
        row_titles=("method",),
        columns=tuple((TITLES[d], f"Dir {a:g}") for d, a in columns),
        rows=tuple(
            ((m,), tuple(_accuracy(results, (d, a, m), paper) for d, a in columns))
            for m in results.methods
        ),
        unit="percent",
        best="max",
        notes=_notes(results),
    )


def last_accuracy(results: Results) -> PaperTable:
    """Table III: DESA beside plain averaging and DecHW."""
    paper = printed.accuracies(printed.WITH_DESA, (CIFAR,))

    def cell(place: tuple[str, float, str]) -> Cell:
        ours = results.series[place].final() if place in results.series else (None, None)
        return Cell(*ours, *paper.get(place, (None, None)))

    rows = [((m,), tuple(cell((CIFAR, a, m)) for a in results.alphas)) for m in results.methods]
    return PaperTable(
        title="Table III: accuracy in the last round, CIFAR-10",
        row_titles=("method",),
        columns=tuple((f"Dir {alpha:g}",) for alpha in results.alphas),
        rows=tuple(rows),
        unit="percent",
        best="max",
        notes=_notes(results),
    )


Targets = Callable[[Results, str, float, str], Sequence[float | None]]


def of_best(results: Results, dataset: str, alpha: float, name: str) -> list[float | None]:
    """Shares of the best final accuracy of any method."""
    found = [series.last_10().mean for series in results.of(dataset, alpha)]
    best = max((value for value in found if value is not None), default=None)
    return [None if best is None else share * best for share in printed.SHARES]


def of_own(results: Results, dataset: str, alpha: float, name: str) -> list[float | None]:
    """Shares of the method's own final accuracy."""
    series = results.series.get((dataset, alpha, name))
    best = series.last_10().mean if series else None
    return [None if best is None else share * best for share in printed.SHARES]


def absolute(results: Results, dataset: str, alpha: float, name: str) -> list[float | None]:
    return list(printed.ABSOLUTE[dataset])


def rounds_table(title: str, text: str, targets: Targets, results: Results) -> PaperTable:
    """Tables II, V and VI: rounds to four targets on each data set."""
    paper = printed.rounds(text)

    def cells(alpha: float, name: str) -> Iterable[Cell]:
        for dataset in results.datasets:
            place = (dataset, alpha, name)
            series = results.series.get(place)
            theirs = paper.get(place, (None,) * 4)
            aims = targets(results, dataset, alpha, name)
            yield from (
                _rounds(series, aim, known) for aim, known in zip(aims, theirs, strict=True)
            )

    shown = [
        (TITLES[d], f"{100 * share:g} %")
        for d in results.datasets
        for share in (printed.ABSOLUTE[d] if targets is absolute else printed.SHARES)
    ]
    rows = [
        ((f"Dir {alpha:g}", name), tuple(cells(alpha, name)))
        for alpha in results.alphas
        for name in results.methods
    ]
    return PaperTable(
        title, ("", "method"), tuple(shown), tuple(rows), "rounds", "min", _notes(results)
    )


def half_table(results: Results) -> PaperTable:
    """Rounds to half of the best accuracy on MNIST, at the paper's scale if that is asked for."""
    target = SIZES[results.plan.scale].half[1]
    paper = printed.rounds(printed.OF_BEST)
    rows = []
    for name in results.methods:
        place = (MNIST, 0.2, name)
        theirs = paper[place][0]
        rows.append(((name,), (_rounds(results.series.get(place), target, theirs),)))
    return PaperTable(
        title="Rounds to half of the best accuracy, MNIST, Dir 0.2",
        row_titles=("method",),
        columns=((f"to {100 * target:g} %",),),
        rows=tuple(rows),
        unit="rounds",
        best="min",
        notes=_notes(results),
    )


def scalars_table(results: Results) -> PaperTable:
    """What a node sends over one link: T m, 2 T m and T m + theta m in the paper."""
    theta = SIZES[results.plan.scale].theta
    rows = []
    for name in results.methods:
        cells = []
        for dataset in results.datasets:
            series = results.series.get((dataset, results.alphas[-1], name))
            cells.append(_scalars(series, name, theta))
        rows.append(((name,), tuple(cells)))
    return PaperTable(
        title="Numbers that a node sends to one neighbour in the whole run",
        row_titles=("method",),
        columns=tuple((TITLES[dataset],) for dataset in results.datasets),
        rows=tuple(rows),
        unit="count",
        best=None,
        notes=(
            f"The paper's column is its formula for our rounds and model: T m, 2 T m, and "
            f"T m + {theta} m for DecHW*.",
        ),
    )


def seconds_table(results: Results) -> PaperTable:
    """Milliseconds of a round, which no paper reports."""
    rows = []
    for name in results.methods:
        series = results.series.get((MNIST, 0.2, name))
        mean, std = series.seconds_per_round() if series else (None, None)
        rows.append(((name,), (Cell(_milliseconds(mean), _milliseconds(std)),)))
    return PaperTable(
        title="Milliseconds per round",
        row_titles=("method",),
        columns=(("wall time",),),
        rows=tuple(rows),
        unit="count",
        best="min",
        notes=("Measured by the runs themselves, on a machine that may have had other work.",),
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


def _accuracy(
    results: Results,
    place: tuple[str, float, str],
    paper: Mapping[tuple[str, float, str], tuple[float, float]],
) -> Cell:
    ours = results.series[place].last_10() if place in results.series else (None, None)
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
    plan, size = results.plan, SIZES[results.plan.scale]
    seeds = max((series.seeds for series in results.series.values()), default=0)
    notes = []
    if plan.scale == "smoke":
        notes.append("A trial of the machinery: scikit-learn's digits stand in for every data set.")
    elif plan.scale == "small":
        sizes = "; ".join(
            f"{TITLES[d]}: {size.train[d]} training examples, "
            f"{size.epochs[d]} epoch{'s' * (size.epochs[d] != 1)} a round, {size.rounds[d]} rounds"
            for d in results.datasets
        )
        notes.append(
            f"Scale small, {size.nodes} nodes. {sizes}. The paper has 50 nodes, all examples, 5 "
            "epochs and 1000 rounds, so only the order of the methods can be compared."
        )
    notes.append(f"{seeds} seed{'s' * (seeds != 1)}; ± is the standard deviation over seeds.")
    if plan.fidelity == "code":
        notes.append(
            "As the authors' scripts run: Barabasi-Albert graph, uniform weights, 20 % held out, "
            "training taken back when the validation loss rises."
        )
    return tuple(notes)


# Figures


def panels(results: Results) -> list[studies.Panel]:
    return [
        studies.Panel(f"{TITLES[dataset]}, Dir {alpha:g}", tuple(results.of(dataset, alpha)))
        for dataset in results.datasets
        for alpha in results.alphas
        if results.of(dataset, alpha)
    ]


def curves(results: Results) -> Shown:
    """Learning curves, with the final accuracies as their table."""
    return Shown((final_accuracy(results),), studies.curves(panels(results)))


def tabulated(table: Callable[[Results], PaperTable], results: Results) -> Shown:
    """A table, with a picture of its numbers beside the paper's."""
    made = table(results)
    return Shown((made,), studies.against_paper(made))


def show_half(results: Results) -> Shown:
    target = SIZES[results.plan.scale].half[1]
    marked = [replace(panel, targets=(target,)) for panel in panels(results)]
    figure = studies.curves(marked, keys=("accuracy",))
    return Shown((half_table(results),), figure)


def show_stopped(results: Results) -> Shown:
    """Fig. 4, with what DecHW* saves."""
    tables = (final_accuracy(results), scalars_table(results))
    return Shown(tables, studies.curves(panels(results)))


def show_norms(results: Results) -> Shown:
    """Fig. 2: the norm of the curvature of ten nodes."""
    dataset, alpha = results.datasets[0], results.alphas[0]
    found = [
        studies.NodePanel(f"{TITLES[dataset]}, Dir {alpha:g}", series.records[0], "curvature", NORM)
        for series in results.of(dataset, alpha)
    ]
    return Shown((final_accuracy(results),), studies.node_lines(found))


def show_trace(results: Results) -> Shown:
    """Fig. 7: one accumulated entry and its weight, with increments of unit norm and raw ones."""
    dataset, alpha = results.datasets[0], results.alphas[0]
    found = [
        studies.NodePanel(series.label, series.records[0], note, title, log)
        for note, title, log in (("entry", "accumulated entry", None), ("weight", "weight", False))
        for series in results.of(dataset, alpha)
    ]
    return Shown((final_accuracy(results),), studies.node_lines(found))


def show_curvature(results: Results) -> Shown:
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
    return Shown(tables, studies.curves_and_phases(panel, panel.series))


def trace_jobs(plan: Plan) -> list[Job]:
    """DecHW with an eye on one entry: the bias of the first class in the last layer."""
    jobs = []
    for name, options in (("DecHW", ""), ("DecHW, raw accumulation", "normalise=none,")):
        plain = experiment(plan, CIFAR, 0.2, "dechw", seed=0)
        spec = f"dechw:{options}trace={_parameters(plain) - 10}"
        jobs.append(Job((CIFAR, 0.2, name), experiment(plan, CIFAR, 0.2, spec, seed=0)))
    return jobs


def _parameters(plain: Experiment) -> int:
    """How many parameters the experiment's model has, known without loading its data."""
    shapes = {"Digits": (1, 8, 8), "Cifar10": (3, 32, 32)}
    shape = shapes[type(plain.dataset).__name__]
    module = plain.model[0].build(shape, 10)
    return sum(parameter.numel() for parameter in module.parameters())


def half_jobs(plan: Plan) -> list[Job]:
    """All methods until half of the best accuracy; one seed, as rounds are many."""
    rounds, target = SIZES[plan.scale].half
    evaluation = {"every": 1} if plan.scale == "smoke" else {"every": 1, "samples": 2000}
    return grid(
        plan,
        FIVE,
        [MNIST],
        alphas=[0.2],
        seeds=plan.seeds or 1,
        rounds=rounds,
        until=f"accuracy={target}",
        evaluation=evaluation,
    )


def _grid(
    methods: Sequence[str], datasets: Sequence[str], alphas: Sequence[float] | None, plan: Plan
) -> list[Job]:
    return grid(plan, methods, datasets, alphas)


def _study(
    id: str,
    title: str,
    claim: str,
    show: Callable[[Results], Shown],
    methods: Sequence[str] = FIVE,
    datasets: Sequence[str] = printed.DATASETS,
    alphas: Sequence[float] | None = None,
) -> Study:
    return Study(id, title, claim, partial(_grid, methods, datasets, alphas), show)


def variant_jobs(methods: Sequence[str], plan: Plan) -> list[Job]:
    """Fig. 4 and 6 are about CIFAR-10; where runs are short, MNIST is shown as well."""
    datasets = (CIFAR,) if plan.scale == "paper" else (MNIST, CIFAR)
    return grid(plan, methods, datasets)


STUDIES = [
    _study(
        "p0-fig1",
        "Fig. 1: shared and independent starts, CIFAR-10",
        "a shared start converges well, independent ones need many more rounds",
        curves,
        ("DecHomo", "DecHetero", "DecHW"),
        (CIFAR,),
    ),
    _study(
        "p0-fig2",
        "Fig. 2: norm of the curvature of some nodes, MNIST",
        "it falls towards zero within tens of rounds",
        show_norms,
        ("DecHW",),
        (MNIST,),
        (0.2,),
    ),
    _study(
        "p0-fig3",
        "Fig. 3: accuracy and loss, CIFAR-10",
        "DecHW is on top from the start",
        curves,
        FIVE,
        (CIFAR,),
    ),
    Study(
        "p0-fig4",
        "Fig. 4: DecHW and DecHW*, CIFAR-10",
        "curvature of the first 30 rounds is nearly as good as all of it",
        partial(variant_jobs, ("DecHetero", "DecHW", "DecHW*", "DecHW* (frozen)")),
        show_stopped,
    ),
    Study(
        "p0-fig6",
        "Fig. 6: without accumulation, CIFAR-10",
        "a good start, then instability",
        partial(variant_jobs, ("DecHW", "DecHW, no accumulation")),
        curves,
    ),
    Study(
        "p0-fig7",
        "Fig. 7: one accumulated entry and its weights",
        "the entry saturates, its weights are stable",
        trace_jobs,
        show_trace,
    ),
    _study(
        "p0-fig8",
        "Fig. 8: accuracy and loss, MNIST",
        "DecHW is on top from the start",
        curves,
        FIVE,
        (MNIST,),
    ),
    _study(
        "p0-fig9",
        "Fig. 9: accuracy and loss, Fashion-MNIST",
        "DecHW is on top from the start",
        curves,
        FIVE,
        (FASHION,),
    ),
    _study(
        "p0-tab1",
        "Table I: final accuracy",
        "DecHW is best everywhere",
        partial(tabulated, partial(final_accuracy, title="Table I: final accuracy")),
    ),
    _study(
        "p0-tab2",
        "Table II: rounds to shares of the best accuracy",
        "DecHW is first nearly everywhere",
        partial(
            tabulated,
            partial(
                rounds_table,
                "Table II: rounds to shares of the best accuracy of any method",
                printed.OF_BEST,
                of_best,
            ),
        ),
    ),
    _study(
        "p0-tab3",
        "Table III: DESA on a fixed graph, CIFAR-10",
        "DESA stays far behind plain averaging",
        partial(tabulated, last_accuracy),
        ("DESA", "DecHetero", "DecHW"),
        (CIFAR,),
    ),
    _study(
        "p0-tab5",
        "Table V: rounds to absolute accuracies",
        "DecHW is first nearly everywhere",
        partial(
            tabulated,
            partial(
                rounds_table,
                "Table V: rounds to absolute accuracies",
                printed.TO_ABSOLUTE,
                absolute,
            ),
        ),
    ),
    _study(
        "p0-tab6",
        "Table VI: rounds to shares of the own best accuracy",
        "DecHW is first nearly everywhere",
        partial(
            tabulated,
            partial(
                rounds_table,
                "Table VI: rounds to shares of the method's own best accuracy",
                printed.OF_OWN,
                of_own,
            ),
        ),
    ),
    _study(
        "p0-cost",
        "Section V-B2: numbers sent",
        "T m for averaging, 2 T m for DecHW, T m + theta m for DecHW*",
        partial(tabulated, scalars_table),
        ("DecHetero", "DecHW", "DecHW*"),
        (CIFAR,),
        (0.2,),
    ),
    Study(
        "p0-half",
        "Not in the paper: rounds to half of the best accuracy, MNIST",
        "table II's first column for Dir 0.2, every run ended as soon as it is there",
        half_jobs,
        show_half,
    ),
    _study(
        "p0-curvature",
        "Not in the paper: which curvature, MNIST",
        "batch gradients, single examples, the full gradient, or gathered while training",
        show_curvature,
        tuple(f"DecHW, {kind}" for kind in KINDS),
        (MNIST,),
        (0.2,),
    ),
]
