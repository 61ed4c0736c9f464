"""The studies of P0: the runs of each, and how they are shown."""

from collections.abc import Callable, Sequence
from functools import partial

from peerage.papers.calibrate import parameters
from peerage.papers.datasets import CIFAR, FASHION, IMAGES, MNIST, TITLES
from peerage.papers.p0 import output, printed
from peerage.papers.p0.settings import CURVATURES, FIVE, SIZES, Setting, experiment, grid, method
from peerage.papers.study import Job, Plan, Results, Study, StudyOutput, Training, with_options


def trace_jobs(plan: Plan) -> list[Job]:
    """DecHW that records one entry: the bias of the first class in the last layer."""
    jobs: list[Job] = []
    entry = parameters(experiment(plan, CIFAR, 0.2, "dechw", seed=0)) - 10
    for name in ("DecHW", "DecHW, raw accumulation"):
        algorithm, _ = method(name, SIZES[plan.scale])
        traced = experiment(plan, CIFAR, 0.2, with_options(algorithm, trace=entry), seed=0)
        jobs.append(Training(Setting(CIFAR, 0.2, name), traced))
    return jobs


def half_jobs(plan: Plan) -> list[Job]:
    """All methods until half of the best accuracy; one seed, as a run takes many rounds."""
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


def variant_jobs(plan: Plan, methods: Sequence[str]) -> list[Job]:
    """Fig. 4 and 6 are about CIFAR-10; at smaller scales they show MNIST as well."""
    return grid(plan, methods, (CIFAR,) if plan.scale == "paper" else (MNIST, CIFAR))


def _study(
    id: str,
    title: str,
    claim: str,
    show: Callable[[Results], StudyOutput],
    methods: Sequence[str] = FIVE,
    datasets: Sequence[str] = IMAGES,
    alphas: Sequence[float] | None = None,
) -> Study:
    jobs = partial(grid, methods=methods, datasets=datasets, alphas=alphas)
    return Study(id, title, claim, jobs, show)


def _curves(number: int, dataset: str) -> Study:
    """Fig. 3, 8 and 9."""
    title = f"Fig. {number}: accuracy and loss, {TITLES[dataset]}"
    claim = "DecHW is on top from the start"
    return _study(f"p0-fig{number}", title, claim, output.curves, datasets=(dataset,))


def _rounds(
    number: int, title: str, numbers: str, targets: output.Targets, table: str = ""
) -> Study:
    """Tables II, V and VI; `table` is the title of the table if it differs."""
    show = partial(output.rounds_table, table or title, numbers, targets)
    claim = "DecHW is first nearly everywhere"
    return _study(f"p0-tab{number}", title, claim, partial(output.tabulated, show))


STUDIES = [
    _study(
        "p0-fig1",
        "Fig. 1: shared and independent starts, CIFAR-10",
        "a shared start converges well, independent ones need many more rounds",
        output.curves,
        ("DecHomo", "DecHetero", "DecHW"),
        (CIFAR,),
    ),
    _study(
        "p0-fig2",
        "Fig. 2: norm of the curvature of some nodes, MNIST",
        "it falls towards zero within tens of rounds",
        output.show_norms,
        ("DecHW",),
        (MNIST,),
        (0.2,),
    ),
    _curves(3, CIFAR),
    Study(
        "p0-fig4",
        "Fig. 4: DecHW and DecHW*, CIFAR-10",
        "curvature of the first 30 rounds is nearly as good as all of it",
        partial(variant_jobs, methods=("DecHetero", "DecHW", "DecHW*", "DecHW* (frozen)")),
        output.show_stopped,
    ),
    Study(
        "p0-fig6",
        "Fig. 6: without accumulation, CIFAR-10",
        "a good start, then instability",
        partial(variant_jobs, methods=("DecHW", "DecHW, no accumulation")),
        output.curves,
    ),
    Study(
        "p0-fig7",
        "Fig. 7: one accumulated entry and its weights",
        "the entry saturates, its weights are stable",
        trace_jobs,
        output.show_trace,
    ),
    _curves(8, MNIST),
    _curves(9, FASHION),
    _study(
        "p0-tab1",
        "Table I: final accuracy",
        "DecHW is best everywhere",
        partial(output.tabulated, partial(output.final_accuracy, title="Table I: final accuracy")),
    ),
    _rounds(
        2,
        "Table II: rounds to shares of the best accuracy",
        printed.OF_BEST,
        output.of_best,
        "Table II: rounds to shares of the best accuracy of any method",
    ),
    _study(
        "p0-tab3",
        "Table III: DESA on a fixed graph, CIFAR-10",
        "DESA stays far behind plain averaging",
        partial(output.tabulated, output.last_accuracy),
        ("DESA", "DecHetero", "DecHW"),
        (CIFAR,),
    ),
    _rounds(5, "Table V: rounds to absolute accuracies", printed.TO_ABSOLUTE, output.absolute),
    _rounds(
        6,
        "Table VI: rounds to shares of the own best accuracy",
        printed.OF_OWN,
        output.of_own,
        "Table VI: rounds to shares of the method's own best accuracy",
    ),
    _study(
        "p0-cost",
        "Section V-B2: numbers sent",
        "T m for averaging, 2 T m for DecHW, T m + theta m for DecHW*",
        partial(output.tabulated, output.scalars_table),
        ("DecHetero", "DecHW", "DecHW*"),
        (CIFAR,),
        (0.2,),
    ),
    Study(
        "p0-half",
        "Not in the paper: rounds to half of the best accuracy, MNIST",
        "table II's first column for Dir 0.2, every run ended as soon as it is there",
        half_jobs,
        output.show_half,
    ),
    _study(
        "p0-curvature",
        "Not in the paper: which curvature, MNIST",
        "batch gradients, single examples, the full gradient, or gathered while training",
        output.show_curvature,
        tuple(CURVATURES),
        (MNIST,),
        (0.2,),
    ),
]
