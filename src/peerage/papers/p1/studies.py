"""The studies of P1: the runs of each, and how they are shown."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from peerage.papers.datasets import CALTECH, CARS, CIFAR, CIFAR100, PETS
from peerage.papers.p1 import output, pictures, tables
from peerage.papers.p1.calculations import Allocation, AlphaCycles, Links, ModelSizes
from peerage.papers.p1.notes import NO_DATA
from peerage.papers.p1.printed import SIGNALS
from peerage.papers.p1.settings import (
    ACE,
    AMOUNTS,
    CE,
    CLIENTS,
    DEFKT,
    DFML,
    FEDAVG,
    FEDPROX,
    FML,
    FULL,
    H0_CNN,
    H1_CNN,
    H1_RESNET,
    H1_VIT,
    H2_CNN,
    H2_EFFICIENTNET,
    HETEROFL,
    MIXES,
    NEIGHBOURS,
    SERVER,
    SPLITS,
    TEN,
    TWO_GROUPS,
    WSM,
    Setting,
    data_of,
    runs,
)
from peerage.papers.study import Calculation, Job, Plan, Results, Study, StudyOutput

Variants = Mapping[str, Mapping[str, Any]]  # name -> arguments of `runs`


def fixed(alpha: float) -> dict[str, Any]:
    """Options of DFML with the same alpha in all rounds."""
    return {"alpha_min": alpha, "alpha_max": alpha}


FIXED = fixed(0.5)


def available(plan: Plan, *wanted: str) -> tuple[str, ...]:
    """The data sets of the paper, or CIFAR-10 at the smaller scales.

    The others cannot be downloaded by this program.
    """
    return wanted if plan.scale == "paper" else (CIFAR,)


# The jobs of the tables


def grid(
    plan: Plan,
    *,
    methods: Sequence[str],
    models: Sequence[str],
    datasets: Sequence[str] = (CIFAR, CIFAR100),
    clients: Sequence[int] = (CLIENTS,),
    **changes: Any,
) -> list[Job]:
    """All methods with all models on all data sets that are available, in both splits."""
    return [
        job
        for count in clients
        for name in models
        for dataset in available(plan, *datasets)
        for split in SPLITS
        for method in methods
        for job in runs(
            plan, method, dataset=dataset, models=name, split=split, clients=count, **changes
        )
    ]


def size_jobs(plan: Plan) -> list[Job]:
    """Table 6: 10, 50 and 100 clients; at scale small 10."""
    counts = (10,) if plan.scale == "small" else (10, 50, 100)
    return grid(plan, methods=(FEDAVG, DFML), models=(H2_CNN,), clients=counts, kind=FULL)


def signal_jobs(plan: Plan) -> list[Job]:
    """Table 9: cross-entropy and WSM, each with a fixed and with a cyclic alpha."""
    return [
        job
        for models in (H1_CNN, H1_RESNET, H1_VIT)
        for dataset in available(plan, CIFAR100)
        for split in SPLITS
        for setting in SIGNALS
        for job in runs(
            plan,
            DFML,
            dataset=dataset,
            models=models,
            split=split,
            setting=setting,
            loss=CE if setting.startswith("CE") else WSM,
            options=FIXED if setting.endswith("fixed") else {},
        )
    ]


def architecture_jobs(plan: Plan) -> list[Job]:
    """Table 10, which needs no training."""
    return [
        Calculation(Setting(CIFAR, name, CLIENTS, "", "", "sizes"), ModelSizes(mix), range(1))
        for name, mix in MIXES.items()
        if name != TEN
    ]


# The jobs of the figures


def variants(plan: Plan, named: Variants, splits: Sequence[str] = SPLITS) -> list[Job]:
    """DFML, or another method, with one thing changed at a time."""
    return [
        job
        for split in splits
        for name, changes in named.items()
        for job in runs(plan, split=split, setting=name, **{"method": DFML, **changes})
    ]


def ending(plan: Plan, rounds: int) -> dict[str, Any]:
    """The rounds of runs whose cycles end elsewhere, so that they end at a maximum of alpha."""
    return {"rounds": rounds} if plan.scale == "small" else {}


def every_round(plan: Plan) -> dict[str, Any]:
    """Tests in every round, for curves that rise and fall within a cycle."""
    return {"evaluation": {"every": 1, "samples": 2000}} if plan.scale == "paper" else {}


def heterogeneity_jobs(plan: Plan, methods: Sequence[str]) -> list[Job]:
    """Fig. 1 and 4: equal and different models, in both splits."""
    return grid(plan, methods=methods, models=(H0_CNN, H1_CNN), datasets=(CIFAR100,))


def allocation_jobs(plan: Plan) -> list[Job]:
    """Fig. 10: the splits of the data, in a network of every size."""
    found: list[Job] = []
    for dataset in available(plan, CIFAR, CIFAR100):
        for count in (10, 50, 100) if plan.scale != "smoke" else (10,):
            data = data_of(plan, dataset, H2_CNN, None)
            for split in SPLITS:
                place = Setting(dataset, "", count, split, "", "allocation")
                model = Allocation(data, split, clients_at(plan, count))
                found.append(Calculation(place, model, range(1)))
    return found


def alpha_jobs(plan: Plan) -> list[Job]:
    """Fig. 11: half and full cycles, and three ways in which periods grow."""
    return [
        Calculation(
            Setting(CIFAR, "", CLIENTS, "", f"{cycle} cycles, period + {increment}", "alpha"),
            AlphaCycles(cycle, increment, rounds=100),
            range(1),
        )
        for cycle, increment in (("half", 1), ("full", 1), ("half", 0), ("half", 10))
    ]


def graph_jobs(plan: Plan) -> list[Job]:
    """Fig. 23: the graph of Tables 11 and 12."""
    place = Setting(CIFAR, "", CLIENTS, "", "two groups", "links")
    return [Calculation(place, Links(TWO_GROUPS, clients_at(plan, CLIENTS)), range(1))]


def clients_at(plan: Plan, count: int) -> int:
    """The clients of a figure without training: those of the paper, except at scale smoke."""
    return AMOUNTS["smoke"][FULL].clients or count if plan.scale == "smoke" else count


def cycle_jobs(plan: Plan) -> list[Job]:
    """Fig. 7: half and full cycles, with cross-entropy."""
    often = every_round(plan)
    named: Variants = {
        "full cycles": {"loss": CE, "options": {"cycle": "full"}, **often, **ending(plan, 28)},
        "half cycles": {"loss": CE, **often},
    }
    return variants(plan, named)


def peak_jobs(plan: Plan) -> list[Job]:
    """Fig. 8: regular and peak models, with cross-entropy."""
    return variants(plan, {"half cycles": {"loss": CE, **every_round(plan)}})


def alpha_grid_jobs(plan: Plan) -> list[Job]:
    """Fig. 9: fixed values of alpha beside the cyclic one, with cross-entropy."""
    values = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0) if plan.scale == "paper" else (0.1, 0.5, 0.9, 1.0)
    named: dict[str, dict[str, Any]] = {"cyclic": {"loss": CE}}
    named |= {f"alpha = {a:g}": {"loss": CE, "options": fixed(a)} for a in values}
    return variants(plan, named)


def sender_jobs(plan: Plan) -> list[Job]:
    """Fig. 19: a half, a fifth and a tenth of the clients send."""
    return [
        job
        for split in SPLITS
        for method in (FEDAVG, DFML)
        for share in (0.5, 0.2, 0.1)
        for job in runs(
            plan,
            method,
            split=split,
            setting=f"{100 * share:.0f} % senders",
            options={} if share == 0.5 else {"senders": share},
        )
    ]


def epoch_jobs(plan: Plan) -> list[Job]:
    """Fig. 22: epochs of mutual learning."""
    counts = (1, 2) if plan.scale == "smoke" else (1, 5, 10, 20)
    named: dict[str, dict[str, Any]] = {
        f"K = {count}": {"options": {"epochs_mutual": count}} for count in counts
    }
    return [
        job
        for split in SPLITS
        for job in (
            *variants(plan, named, (split,)),
            *runs(plan, FEDAVG, split=split),
        )
    ]


def schedule_jobs(plan: Plan) -> list[Job]:
    """Fig. 27: which of the two losses alpha weights, from 0 to 1, with cross-entropy."""
    named: dict[str, dict[str, Any]] = {
        name: {"loss": CE, "options": {"alpha_max": 1.0, **options}}
        for name, options in {
            "opposite": {},
            "supervision alone": {"schedule": "ce_only"},
            "distillation alone": {"schedule": "kl_only"},
            "common": {"schedule": "common"},
        }.items()
    }
    return variants(plan, {**named, "fixed": {"loss": CE, "options": FIXED}})


def period_jobs(plan: Plan) -> list[Job]:
    """Fig. 28: periods that stay, and that grow by 1 and by 10 rounds."""
    other = ending(plan, 30)
    named: Variants = {
        "period + 0": {"options": {"period_increment": 0}, **other},
        "period + 1": {},
        "period + 10": {"options": {"period_increment": 10}, **other},
    }
    return variants(plan, named)


# Jobs that are not in the paper


def work_jobs(plan: Plan) -> list[Job]:
    """The same computation in three ways, and plain averaging."""
    mutual = 2 if plan.scale == "smoke" else 10
    epochs: dict[str, Any] = {"local": {"epochs": 1 + mutual}}
    return [
        *runs(plan, DFML, clients=10),
        *runs(plan, DFML, clients=10, setting="alpha = 0", options=fixed(0.0)),
        *runs(plan, FEDAVG, clients=10, setting=f"{1 + mutual} epochs", **epochs),
        *runs(plan, FEDAVG, clients=10),
    ]


def neighbour_jobs(plan: Plan) -> list[Job]:
    """Mutual learning with an aggregator, and between neighbours of a sparse graph."""
    return [
        *runs(plan, DFML, setting="complete graph"),
        *runs(plan, DFML, setting="ring", topology="ring"),
        *runs(plan, NEIGHBOURS, setting="ring", topology="ring"),
        *runs(plan, NEIGHBOURS, setting="4 neighbours", topology="regular:k=4"),
    ]


# Studies

SMALLER = "CIFAR-10 at smaller scales"
H1 = (H1_CNN, H1_RESNET, H1_VIT)
THREE = (FEDAVG, HETEROFL, DFML)
WITH: Variants = {"with distillation": {}, "without distillation": {"options": fixed(0.0)}}
AGGREGATORS: Variants = {
    "random aggregator": {},
    "fixed aggregator": {"options": {"aggregator": "fixed"}},
}
WEIGHTS: Variants = {"weighted": {}, "vanilla": {"options": {"kl_weights": "uniform"}}}
TEACHERS: Variants = {"mutual": {}, "vanilla": {"options": {"teacher": "vanilla"}}}
SIGNAL_VARIANTS: Variants = {"CE": {"loss": CE}, "ACE": {"loss": ACE}, "WSM": {}}
ADAPTIVE: Variants = {
    "cyclic": {"loss": CE},
    "fixed": {"loss": CE, "options": FIXED},
    "WSL": {"loss": CE, "options": {"balance": "wsl"}},
    "ANL-KD": {"loss": CE, "options": {"balance": "anl-kd"}},
}


def _table(number: int, title: str, claim: str, jobs: Callable[[Plan], list[Job]]) -> Study:
    return Study(
        f"p1-tab{number}",
        f"Table {number}: {title}",
        claim,
        jobs,
        partial(tables.show_accuracies, number),
    )


def _figure(
    number: int,
    title: str,
    claim: str,
    jobs: Callable[[Plan], list[Job]],
    show: Callable[[Results], StudyOutput] | None = None,
    **options: Any,
) -> Study:
    shown = show or partial(output.show_curves, number, **options)
    return Study(f"p1-fig{number}", f"Fig. {number}: {title}", claim, jobs, shown)


STUDIES = [
    _table(
        3,
        "equal CNNs, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy, above all on non-IID data",
        partial(grid, methods=(FEDAVG, FEDPROX, DEFKT, DFML), models=(H0_CNN,)),
    ),
    _table(
        4,
        "CNNs, ResNets and ViTs of five widths, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy, then partial training, then Dec. FedAvg",
        partial(grid, methods=THREE, models=H1),
    ),
    _table(
        5,
        f"ResNets of five widths, Caltech101, Oxford Pets and Stanford Cars ({SMALLER})",
        "DFML has the highest accuracy, by up to 35 points on Stanford Cars",
        partial(grid, methods=THREE, models=(H1_RESNET,), datasets=(CALTECH, PETS, CARS)),
    ),
    _table(
        6,
        "CNNs of different depths, 10, 50 and 100 clients, CIFAR-10 and CIFAR-100",
        "with 50 clients on CIFAR-100 DFML is 17.20 points ahead of Dec. FedAvg on IID data and "
        "19.95 on non-IID data",
        size_jobs,
    ),
    _table(
        7,
        f"EfficientNets, Caltech101, Oxford Pets and Stanford Cars ({SMALLER})",
        "DFML has the highest accuracy, by up to 64 points on Stanford Cars",
        partial(
            grid,
            methods=(FEDAVG, DFML),
            models=(H2_EFFICIENTNET,),
            datasets=(CALTECH, PETS, CARS),
            clients=(10,),
        ),
    ),
    Study(
        "p1-tab8",
        "Table 8: rounds until DFML is as accurate as Dec. FedAvg in round 100 and 500",
        "with ten clients DFML needs 10 to 20 rounds, with 100 clients 40 to 190",
        size_jobs,
        tables.show_rounds_needed,
    ),
    _table(
        9,
        f"supervision and cyclic alpha, CIFAR-100 ({SMALLER})",
        "WSM helps on non-IID data, and cyclic alpha helps with both losses",
        signal_jobs,
    ),
    Study(
        "p1-tab10",
        "Table 10: the architectures and their sizes",
        "mode H0 has one architecture, H1 five widths of one, H2 five different ones",
        architecture_jobs,
        tables.show_sizes,
    ),
    _table(
        11,
        "ResNets of five widths on the graph of two groups, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy also on this graph",
        partial(grid, methods=THREE, models=(H1_RESNET,), topology=TWO_GROUPS),
    ),
    _table(
        12,
        "CNNs of different depths on the graph of two groups, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy also on this graph",
        partial(grid, methods=(FEDAVG, DFML), models=(H2_CNN,), topology=TWO_GROUPS),
    ),
    _figure(
        1,
        f"Dec. FedAvg with equal and with different models, CIFAR-100 ({SMALLER})",
        "the accuracy falls with different models and with non-IID data",
        partial(heterogeneity_jobs, methods=(FEDAVG,)),
        partial(output.show_heterogeneity, 1),
    ),
    _figure(
        4,
        f"three methods with equal and with different models, CIFAR-100 ({SMALLER})",
        "DFML loses less than Dec. FedAvg and Dec. HeteroFL",
        partial(heterogeneity_jobs, methods=THREE),
        partial(output.show_heterogeneity, 4),
    ),
    _figure(
        5,
        "accuracy of each architecture",
        "larger architectures are more accurate, and each is more accurate with DFML than with "
        "Dec. FedAvg",
        partial(grid, methods=(FEDAVG, DFML), models=(H2_CNN,), datasets=(CIFAR,)),
        output.show_architectures,
    ),
    _figure(
        6,
        "ten architectures at once",
        "DFML is far ahead of Dec. FedAvg",
        partial(grid, methods=(FEDAVG, DFML), models=(TEN,), datasets=(CIFAR,)),
        None,
        note=NO_DATA,
    ),
    _figure(
        7,
        "regular models with full and half cycles",
        "the accuracy is highest at the largest alpha and lowest at 0",
        cycle_jobs,
        output.show_cycles,
    ),
    _figure(
        8,
        "regular and peak models",
        "peak models keep the accuracy of the maxima",
        peak_jobs,
        output.show_peaks,
    ),
    _figure(
        9,
        "fixed and cyclic alpha",
        "cyclic alpha is best, and a fixed alpha of 1 is worst",
        alpha_grid_jobs,
    ),
    _figure(
        10,
        "how the data are split, CIFAR-10 and CIFAR-100",
        "on non-IID data, clients have few classes and different numbers of examples",
        allocation_jobs,
        pictures.show_allocation,
    ),
    _figure(
        11,
        "alpha in the course of the rounds",
        "alpha goes from 0 to 1 in cycles, of which each is longer than the one before",
        alpha_jobs,
        pictures.show_alpha,
    ),
    _figure(
        12,
        "with and without a server, equal models",
        "FedAvg is slower without a server, and DFML comes close to FedAvg with one",
        partial(grid, methods=(FEDAVG, DFML, SERVER), models=(H0_CNN,), datasets=(CIFAR,)),
        None,
        note=NO_DATA,
        tables=(3,),
    ),
    _figure(
        13,
        "fixed and random aggregator",
        "a fixed aggregator is much worse",
        partial(variants, named=AGGREGATORS),
    ),
    _figure(
        14,
        "with and without distillation",
        "without distillation, about ten times as many models must be sent",
        partial(variants, named=WITH),
        output.show_distillation,
    ),
    _figure(
        15,
        "curves of equal CNNs, CIFAR-10 and CIFAR-100",
        "DFML learns faster than Dec. FedAvg and Def-KT",
        partial(grid, methods=(FEDAVG, DEFKT, DFML), models=(H0_CNN,)),
        None,
        note="",
        tables=(3,),
    ),
    _figure(
        16,
        "curves of CNNs, ResNets and ViTs of five widths, CIFAR-10 and CIFAR-100",
        "DFML learns faster than partial training and Dec. FedAvg",
        partial(grid, methods=THREE, models=H1),
        None,
        note="",
        tables=(4,),
    ),
    _figure(
        17,
        "curves of CNNs of different depths, CIFAR-10 and CIFAR-100",
        "DFML learns faster than Dec. FedAvg for all numbers of clients",
        size_jobs,
        None,
        note="",
        tables=(6,),
    ),
    _figure(
        18,
        "local accuracy, CNNs of different depths, CIFAR-10 and CIFAR-100",
        "DFML is mostly above Dec. FedAvg, but slightly below with ten clients on CIFAR-10 and "
        "non-IID data",
        size_jobs,
        output.show_local,
    ),
    _figure(
        19,
        "fewer senders",
        "DFML learns with fewer senders too, more slowly",
        sender_jobs,
    ),
    _figure(
        20,
        "weighted and vanilla mean of divergences",
        "weights by size give faster learning and a higher accuracy",
        partial(variants, named=WEIGHTS),
    ),
    _figure(
        21,
        "mutual and vanilla knowledge transfer",
        "mutual learning is much better",
        partial(variants, named=TEACHERS),
    ),
    _figure(
        22,
        "epochs of mutual learning",
        "more epochs need fewer rounds; beyond 10 there is little gain, and computation grows",
        epoch_jobs,
        output.show_epochs,
    ),
    _figure(
        23,
        "the graph of two groups",
        "two complete graphs are joined by one link",
        graph_jobs,
        pictures.show_graph,
    ),
    _figure(
        24,
        "DFML and Dec. FML",
        "memes of Dec. FML learn faster than DFML, but the clients' own models are worse than with "
        "Dec. FedAvg",
        partial(grid, methods=(FEDAVG, DFML, FML), models=(H2_CNN,), datasets=(CIFAR,)),
        output.show_memes,
    ),
    _figure(
        25,
        "three supervision losses",
        "WSM has the highest accuracy, then ACE, then cross-entropy",
        partial(variants, named=SIGNAL_VARIANTS),
    ),
    _figure(
        26,
        "adaptive methods",
        "WSL and ANL-KD are hardly better than a fixed alpha of 0.5; cyclic alpha is",
        partial(variants, named=ADAPTIVE),
    ),
    _figure(
        27,
        "what alpha weights",
        "weighting the supervision alone is as good as opposite weights; weighting the "
        "distillation alone is no better than a fixed alpha, and a common weight is worse",
        schedule_jobs,
    ),
    _figure(
        28,
        "periods that stay and that grow",
        "growing periods give faster learning and a higher accuracy",
        period_jobs,
    ),
    Study(
        "p1-work",
        "Not in the paper: accuracy over computation, CIFAR-10 non-IID, ten clients",
        "is DFML ahead because it learns more from its data, or because it computes more",
        work_jobs,
        output.show_work,
    ),
    Study(
        "p1-peaks",
        "Not in the paper: levels of peak and regular models at maxima and minima of alpha",
        "how much do regular models lose at minima, and how steady are peak models",
        peak_jobs,
        output.show_levels,
    ),
    Study(
        "p1-neighbours",
        "Not in the paper: mutual learning between neighbours of a sparse graph",
        "is an aggregator needed, and what does learning between neighbours cost",
        neighbour_jobs,
        output.show_neighbours,
    ),
]
