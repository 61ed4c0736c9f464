"""The studies of P0: which runs each takes, and how they are shown."""

from collections.abc import Callable, Sequence
from functools import partial

from peerage.papers.calibrate import parameters
from peerage.papers.p0 import printed
from peerage.papers.p0.output import (
    Targets,
    absolute,
    curves,
    final_accuracy,
    last_accuracy,
    of_best,
    of_own,
    rounds_table,
    scalars_table,
    show_curvature,
    show_half,
    show_norms,
    show_stopped,
    show_trace,
    tabulated,
)
from peerage.papers.p0.settings import (
    CIFAR,
    FASHION,
    FIVE,
    KINDS,
    MNIST,
    SIZES,
    Setting,
    experiment,
    grid,
    method,
)
from peerage.papers.study import Job, Plan, Results, Study, StudyOutput, Training, with_options

FIRST = "DecHW is first nearly everywhere"  # Tables II, V and VI
ON_TOP = "DecHW is on top from the start"  # Fig. 3, 8 and 9


def trace_jobs(plan: Plan) -> list[Job]:
    """DecHW with an eye on one entry: the bias of the first class in the last layer."""
    jobs: list[Job] = []
    plain = experiment(plan, CIFAR, 0.2, "dechw", seed=0)
    for name in ("DecHW", "DecHW, raw accumulation"):
        algorithm, _ = method(name, SIZES[plan.scale])
        traced = experiment(
            plan, CIFAR, 0.2, with_options(algorithm, trace=parameters(plain) - 10), seed=0
        )
        jobs.append(Training(Setting(CIFAR, 0.2, name), traced))
    return jobs


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


def _study(
    id: str,
    title: str,
    claim: str,
    show: Callable[[Results], StudyOutput],
    methods: Sequence[str] = FIVE,
    datasets: Sequence[str] = printed.DATASETS,
    alphas: Sequence[float] | None = None,
) -> Study:
    return Study(
        id, title, claim, partial(grid, methods=methods, datasets=datasets, alphas=alphas), show
    )


def _targets(title: str, numbers: str, targets: Targets) -> Callable[[Results], StudyOutput]:
    """How Tables II, V and VI are shown."""
    return partial(tabulated, partial(rounds_table, title, numbers, targets))


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
        ON_TOP,
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
        ON_TOP,
        curves,
        FIVE,
        (MNIST,),
    ),
    _study(
        "p0-fig9",
        "Fig. 9: accuracy and loss, Fashion-MNIST",
        ON_TOP,
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
        FIRST,
        _targets(
            "Table II: rounds to shares of the best accuracy of any method",
            printed.OF_BEST,
            of_best,
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
        FIRST,
        _targets("Table V: rounds to absolute accuracies", printed.TO_ABSOLUTE, absolute),
    ),
    _study(
        "p0-tab6",
        "Table VI: rounds to shares of the own best accuracy",
        FIRST,
        _targets(
            "Table VI: rounds to shares of the method's own best accuracy", printed.OF_OWN, of_own
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
