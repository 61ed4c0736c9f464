"""The studies of P1, and how they are shown."""

from collections.abc import Callable
from functools import partial
from typing import Any

from peerage.papers.datasets import CALTECH, CARS, CIFAR, PETS
from peerage.papers.p1 import costs, jobs, output, pictures, tables
from peerage.papers.p1.notes import NO_DATA
from peerage.papers.p1.settings import (
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
    SERVER,
    SINGLE,
    TEN,
    TWO_GROUPS,
)
from peerage.papers.study import Job, Plan, Results, Study, StudyOutput

SMALLER = "CIFAR-10 at smaller scales"
H1 = (H1_CNN, H1_RESNET, H1_VIT)
THREE = (FEDAVG, HETEROFL, DFML)


def _table(number: int, title: str, claim: str, wanted: Callable[[Plan], list[Job]]) -> Study:
    return Study(
        f"p1-tab{number}",
        f"Table {number}: {title}",
        claim,
        wanted,
        partial(tables.show_accuracies, number),
    )


def _figure(
    number: int,
    title: str,
    claim: str,
    wanted: Callable[[Plan], list[Job]],
    show: Callable[[Results], StudyOutput] | None = None,
    **options: Any,
) -> Study:
    shown = show or partial(output.show_curves, number, **options)
    return Study(f"p1-fig{number}", f"Fig. {number}: {title}", claim, wanted, shown)


STUDIES = [
    _table(
        3,
        "equal CNNs, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy, above all on non-IID data",
        partial(jobs.grid, methods=(FEDAVG, FEDPROX, DEFKT, DFML), models=(H0_CNN,)),
    ),
    _table(
        4,
        "CNNs, ResNets and ViTs of five widths, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy, then partial training, then Dec. FedAvg",
        partial(jobs.grid, methods=THREE, models=H1),
    ),
    _table(
        5,
        f"ResNets of five widths, Caltech101, Oxford Pets and Stanford Cars ({SMALLER})",
        "DFML has the highest accuracy, by up to 35 points on Stanford Cars",
        partial(jobs.grid, methods=THREE, models=(H1_RESNET,), datasets=(CALTECH, PETS, CARS)),
    ),
    _table(
        6,
        "CNNs of different depths, 10, 50 and 100 clients, CIFAR-10 and CIFAR-100",
        "with 50 clients on CIFAR-100 DFML is 17.20 points ahead of Dec. FedAvg on IID data and "
        "19.95 on non-IID data",
        jobs.size_jobs,
    ),
    _table(
        7,
        f"EfficientNets, Caltech101, Oxford Pets and Stanford Cars ({SMALLER})",
        "DFML has the highest accuracy, by up to 64 points on Stanford Cars",
        partial(
            jobs.grid,
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
        jobs.size_jobs,
        tables.show_rounds_needed,
    ),
    _table(
        9,
        f"supervision and cyclic alpha, CIFAR-100 ({SMALLER})",
        "WSM helps on non-IID data, and cyclic alpha helps with both losses",
        jobs.signal_jobs,
    ),
    Study(
        "p1-tab10",
        "Table 10: the architectures and their sizes",
        "mode H0 has one architecture, H1 five widths of one, H2 five different ones",
        jobs.architecture_jobs,
        tables.show_sizes,
    ),
    _table(
        11,
        "ResNets of five widths on the graph of two groups, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy also on this graph",
        partial(jobs.grid, methods=THREE, models=(H1_RESNET,), topology=TWO_GROUPS),
    ),
    _table(
        12,
        "CNNs of different depths on the graph of two groups, CIFAR-10 and CIFAR-100",
        "DFML has the highest accuracy also on this graph",
        partial(
            jobs.grid, methods=(FEDAVG, DFML), models=(H2_CNN,), topology=TWO_GROUPS, kind=SINGLE
        ),
    ),
    _figure(
        1,
        f"Dec. FedAvg with equal and with different models, CIFAR-100 ({SMALLER})",
        "the accuracy falls with different models and with non-IID data",
        partial(jobs.heterogeneity_jobs, methods=(FEDAVG,)),
        partial(output.show_heterogeneity, 1),
    ),
    _figure(
        4,
        f"three methods with equal and with different models, CIFAR-100 ({SMALLER})",
        "DFML loses less than Dec. FedAvg and Dec. HeteroFL",
        partial(jobs.heterogeneity_jobs, methods=THREE),
        partial(output.show_heterogeneity, 4),
    ),
    _figure(
        5,
        "accuracy of each architecture",
        "larger architectures are more accurate, and each is more accurate with DFML than with "
        "Dec. FedAvg",
        partial(jobs.grid, methods=(FEDAVG, DFML), models=(H2_CNN,), datasets=(CIFAR,), kind=FULL),
        output.show_architectures,
    ),
    _figure(
        6,
        "ten architectures at once",
        "DFML is far ahead of Dec. FedAvg",
        partial(jobs.grid, methods=(FEDAVG, DFML), models=(TEN,), datasets=(CIFAR,)),
        None,
        note=NO_DATA,
    ),
    _figure(
        7,
        "regular models with full and half cycles",
        "the accuracy is highest at the largest alpha and lowest at 0",
        jobs.cycle_jobs,
        output.show_cycles,
    ),
    _figure(
        8,
        "regular and peak models",
        "peak models keep the accuracy of the maxima",
        jobs.peak_jobs,
        output.show_peaks,
    ),
    _figure(
        9,
        "fixed and cyclic alpha",
        "cyclic alpha is best, and a fixed alpha of 1 is worst",
        jobs.alpha_grid_jobs,
    ),
    _figure(
        10,
        "how the data are split, CIFAR-10 and CIFAR-100",
        "on non-IID data, clients have few classes and different numbers of examples",
        jobs.allocation_jobs,
        pictures.show_allocation,
    ),
    _figure(
        11,
        "alpha in the course of the rounds",
        "alpha goes from 0 to 1 in cycles, of which each is longer than the one before",
        jobs.alpha_jobs,
        pictures.show_alpha,
    ),
    _figure(
        12,
        "with and without a server, equal models",
        "FedAvg is slower without a server, and DFML comes close to FedAvg with one",
        partial(jobs.grid, methods=(FEDAVG, DFML, SERVER), models=(H0_CNN,), datasets=(CIFAR,)),
        None,
        note=NO_DATA,
        tables=(3,),
    ),
    _figure(
        13,
        "fixed and random aggregator",
        "a fixed aggregator is much worse",
        partial(jobs.variants, named=jobs.AGGREGATORS),
    ),
    _figure(
        14,
        "with and without distillation",
        "without distillation, about ten times as many models must be sent",
        partial(jobs.variants, named=jobs.WITH, kind=SINGLE),
        costs.show_distillation,
    ),
    _figure(
        15,
        "curves of equal CNNs, CIFAR-10 and CIFAR-100",
        "DFML learns faster than Dec. FedAvg and Def-KT",
        partial(jobs.grid, methods=(FEDAVG, DEFKT, DFML), models=(H0_CNN,)),
        None,
        note="",
        tables=(3,),
    ),
    _figure(
        16,
        "curves of CNNs, ResNets and ViTs of five widths, CIFAR-10 and CIFAR-100",
        "DFML learns faster than partial training and Dec. FedAvg",
        partial(jobs.grid, methods=THREE, models=H1),
        None,
        note="",
        tables=(4,),
    ),
    _figure(
        17,
        "curves of CNNs of different depths, CIFAR-10 and CIFAR-100",
        "DFML learns faster than Dec. FedAvg for all numbers of clients",
        jobs.size_jobs,
        None,
        note="",
        tables=(6,),
    ),
    _figure(
        18,
        "local accuracy, CNNs of different depths, CIFAR-10 and CIFAR-100",
        "DFML is mostly above Dec. FedAvg, but slightly below with ten clients on CIFAR-10 and "
        "non-IID data",
        jobs.size_jobs,
        output.show_local,
    ),
    _figure(
        19,
        "fewer senders",
        "DFML learns with fewer senders too, more slowly",
        jobs.sender_jobs,
        output.show_senders,
    ),
    _figure(
        20,
        "weighted and vanilla mean of divergences",
        "weights by size give faster learning and a higher accuracy",
        partial(jobs.variants, named=jobs.WEIGHTS),
    ),
    _figure(
        21,
        "mutual and vanilla knowledge transfer",
        "mutual learning is much better",
        partial(jobs.variants, named=jobs.TEACHERS),
    ),
    _figure(
        22,
        "epochs of mutual learning",
        "more epochs need fewer rounds; beyond 10 there is little gain, and computation grows",
        jobs.epoch_jobs,
        costs.show_epochs,
    ),
    _figure(
        23,
        "the graph of two groups",
        "two complete graphs are joined by one link",
        jobs.graph_jobs,
        pictures.show_graph,
    ),
    _figure(
        24,
        "DFML and Dec. FML",
        "memes of Dec. FML learn faster than DFML, but the clients' own models are worse than with "
        "Dec. FedAvg",
        partial(
            jobs.grid,
            methods=(FEDAVG, DFML, FML),
            models=(H2_CNN,),
            datasets=(CIFAR,),
            kind=SINGLE,
        ),
        output.show_memes,
    ),
    _figure(
        25,
        "three supervision losses",
        "WSM has the highest accuracy, then ACE, then cross-entropy",
        partial(jobs.variants, named=jobs.SIGNAL_VARIANTS),
    ),
    _figure(
        26,
        "adaptive methods",
        "WSL and ANL-KD are hardly better than a fixed alpha of 0.5; cyclic alpha is",
        partial(jobs.variants, named=jobs.ADAPTIVE, kind=SINGLE),
    ),
    _figure(
        27,
        "what alpha weights",
        "weighting the supervision alone is as good as opposite weights, and both are better than "
        "a common weight; weighting the distillation alone is no better than a fixed alpha",
        jobs.schedule_jobs,
    ),
    _figure(
        28,
        "periods that stay and that grow",
        "growing periods give faster learning and a higher accuracy",
        jobs.period_jobs,
    ),
    Study(
        "p1-work",
        "Not in the paper: accuracy over computation, CIFAR-10 non-IID, ten clients",
        "is DFML ahead because it learns more from its data, or because it computes more",
        jobs.work_jobs,
        costs.show_work,
    ),
    Study(
        "p1-peaks",
        "Not in the paper: levels of peak and regular models at maxima and minima of alpha",
        "how much do regular models lose at minima, and how steady are peak models",
        jobs.peak_jobs,
        output.show_levels,
    ),
    Study(
        "p1-neighbours",
        "Not in the paper: mutual learning between neighbours of a sparse graph",
        "is an aggregator needed, and what does learning between neighbours cost",
        jobs.neighbour_jobs,
        costs.show_neighbours,
    ),
]
