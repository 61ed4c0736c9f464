"""The studies of P3: the runs of each, and how they are shown."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from peerage.papers.datasets import CIFAR, FLICKR, IMAGENETTE, MNIST, TITLES
from peerage.papers.p3 import heads, output
from peerage.papers.p3.settings import (
    BY_LABEL,
    CLUSTERS,
    COLOURED,
    COLOURS,
    DAC,
    DEPRL,
    DPSGD,
    EL,
    FACADE,
    FOUR,
    LABELS,
    ONE_RATE,
    ROTATED,
    SIZES,
    THREE,
    runs,
)
from peerage.papers.study import Job, Plan, Scale, Study

EVERY_ROUND: dict[str, Any] = {"every": 1, "samples": 100}  # head choices are recorded with tests
DEPRL_EPOCHS: dict[str, Any] = {"steps": None, "epochs": 1, "batch_size": 100}  # in the code
OWN_START: dict[str, Any] = {"init": {"start": "independent"}}
GAIN: dict[str, Any] = {"init": {"start": "independent", "gain": "sqrt"}}  # exact: nodes are alike
READINGS: dict[str, dict[str, Any]] = {  # of p3-readings
    "base": {},
    "own_head=if_selected": {"options": {"own_head": "if_selected"}},
    "own starts": OWN_START,
    "choice_batches=1": {"options": {"choice_batches": 1}},
    "choice_samples=different": {"options": {"choice_samples": "different"}},
}
CORES: dict[str, dict[str, Any]] = {  # of p3-curvature
    "shared start, equal weights": {},
    "shared start, curvature weights": {"options": {"core_weights": "curvature"}},
    "own starts, no gain": OWN_START,
    "own starts, gain": GAIN,
}


# The jobs of the paper


def grid(
    plan: Plan,
    datasets: Sequence[str] = (CIFAR,),
    methods: Sequence[str] = FOUR,
    sizes: Sequence[str] | None = None,
    shift: str = ROTATED,
) -> list[Job]:
    """All methods on all sizes of clusters of some data sets."""
    return [
        job
        for dataset in datasets
        for clusters in (CLUSTERS[dataset] if sizes is None else sizes)
        for method in methods
        for job in runs(plan, dataset, clusters, method, shift=shift)
    ]


def head_count_jobs(plan: Plan) -> list[Job]:
    """Fig. 8: FACADE with fewer and with more heads than clusters."""
    return [
        job
        for k in SIZES[plan.scale].heads
        for job in runs(plan, CIFAR, THREE, FACADE, setting=f"k = {k}", options={"k": k})
    ]


def choice_jobs(plan: Plan) -> list[Job]:
    """Fig. 9: the first rounds of FACADE with a head for each of three clusters."""
    rounds = SIZES[plan.scale].choices
    return runs(plan, CIFAR, THREE, FACADE, rounds=rounds, evaluation=EVERY_ROUND)


# Jobs that are not in the paper. They have one size, except at scale smoke.


def sized(plan: Plan, scale: Scale) -> Plan:
    """The plan for runs with the settings of a scale, whatever scale was asked for."""
    return plan if plan.scale == "smoke" else replace(plan, scale=scale)


def settlement_jobs(plan: Plan) -> list[Job]:
    """The first rounds of many seeds: how many settle, and when."""
    changes: dict[str, Any] = {"evaluation": EVERY_ROUND}
    if plan.scale != "smoke":
        changes["rounds"] = 100
    seeds = plan.seed_range(2 if plan.scale == "smoke" else 8)
    return runs(sized(plan, "paper"), CIFAR, THREE, FACADE, seeds=seeds, **changes)


def balanced_jobs(plan: Plan) -> list[Job]:
    """A third of the paper's rounds with clusters of the same size."""
    rounds: dict[str, Any] = {} if plan.scale == "smoke" else {"rounds": 400}
    return [
        job
        for method in FOUR
        for job in runs(
            sized(plan, "paper"), CIFAR, "16:16", method, seeds=plan.seed_range(1), **rounds
        )
    ]


def kind_jobs(plan: Plan) -> list[Job]:
    """Clusters that differ in their labels, and in their colours, with one learning rate."""
    changes: dict[str, Any] = {}
    if plan.scale != "smoke":
        changes = {"rounds": 200, "evaluation": {"every": 20}, "local": {"lr": ONE_RATE[EL]}}
    return [
        job
        for shift, clusters in ((BY_LABEL, LABELS[-1]), (COLOURED, COLOURS[-1]))
        for method in (EL, FACADE)
        for job in runs(
            sized(plan, "paper"),
            CIFAR,
            clusters,
            method,
            shift=shift,
            seeds=plan.seed_range(1),
            **changes,
        )
    ]


def variant_jobs(variants: dict[str, dict[str, Any]], plan: Plan) -> list[Job]:
    """FACADE on rotated MNIST, 22:2, with one setting changed at a time.

    All variants start from the text of the paper, also with --fidelity code.
    """
    seeds = plan.seed_range(1 if plan.scale == "smoke" else 3)
    text = replace(sized(plan, "small"), fidelity="paper")
    return [
        job
        for name, changes in variants.items()
        for job in runs(text, MNIST, "22:2", FACADE, setting=name, seeds=seeds, **changes)
    ]


def deprl_jobs(plan: Plan) -> list[Job]:
    """DePRL with as many steps as the other methods, and with the epochs of the authors' code."""
    changes: dict[str, Any] = {}
    if plan.scale != "smoke":
        changes = {"rounds": 100, "evaluation": {"every": 10}}
    text = replace(sized(plan, "paper"), fidelity="paper")
    steps = SIZES[text.scale].recipes[CIFAR].steps
    variants = {
        f"{steps} + {steps} steps": changes,
        "1 + 1 epochs": {**changes, "local": DEPRL_EPOCHS},
    }
    return [
        job
        for name, change in variants.items()
        for job in runs(
            text, CIFAR, "30:2", DEPRL, setting=name, seeds=plan.seed_range(1), **change
        )
    ]


# Studies


def _table(number: str, figure: str, dataset: str, claim: str) -> Study:
    return Study(
        f"p3-tab{figure}",
        f"Table {number}: accuracy and fairness, {TITLES[dataset]}",
        claim,
        partial(grid, datasets=(dataset,)),
        partial(output.show_table, number),
    )


def _clusters(number: int, dataset: str, claim: str, **options: Any) -> Study:
    kind = {"shift": ROTATED, **options}["shift"]
    return Study(
        f"p3-fig{number}",
        f"Fig. {number}: accuracy of each cluster during training, {_data(dataset, kind)}",
        claim,
        partial(grid, datasets=(dataset,), **options),
        partial(output.show_clusters, number),
    )


def _highest(number: int, datasets: Sequence[str], claim: str, **options: Any) -> Study:
    kind = {"shift": ROTATED, **options}["shift"]
    names = " and ".join(_data(name, kind) for name in datasets)
    return Study(
        f"p3-fig{number}",
        f"Fig. {number}: highest fair accuracy, {names}",
        claim,
        partial(grid, datasets=datasets, **options),
        partial(output.show_highest, number),
    )


def _boxes(number: int, datasets: Sequence[str], claim: str) -> Study:
    names = " and ".join(TITLES[name] for name in datasets)
    return Study(
        f"p3-fig{number}",
        f"Fig. {number}: demographic parity and equalised odds, {names}",
        claim,
        partial(grid, datasets=datasets),
        partial(output.show_gaps, number),
    )


def _fair(number: int, dataset: str) -> Study:
    return Study(
        f"p3-fig{number}",
        f"Fig. {number}: fair accuracy during training, {TITLES[dataset]}",
        "FACADE has the highest fair accuracy for all sizes of clusters",
        partial(grid, datasets=(dataset,)),
        partial(output.show_fair_accuracy, number),
    )


def _data(dataset: str, shift: str) -> str:
    extra = {ROTATED: "", BY_LABEL: ", clusters by label", COLOURED: ", clusters by colour"}
    return TITLES[dataset] + extra[shift]


BEST = "FACADE has the highest accuracy and fair accuracy for all sizes of clusters; "
STUDIES = [
    _table(
        "II",
        "2",
        CIFAR,
        f"{BEST}with unequal clusters only DePRL, whose accuracy is low, has smaller gaps",
    ),
    _table(
        "III",
        "3",
        IMAGENETTE,
        "FACADE has the highest fair accuracy; the majority is as good as with EL, the minority "
        "better",
    ),
    _table("IV", "4", FLICKR, f"{BEST}at 14:2 only DePRL has smaller equalised odds"),
    Study(
        "p3-fig1",
        "Fig. 1: plain averaging and a minority of two nodes, CIFAR-10",
        "the minority is more than 30 points below the majority",
        partial(grid, methods=(EL, DPSGD), sizes=("30:2",)),
        output.show_averaging,
    ),
    _clusters(
        3,
        CIFAR,
        "FACADE is at least as good as the others in every cluster; with EL and DAC the minority "
        "falls behind as clusters become unequal, and DePRL soon stops improving",
    ),
    _clusters(
        4,
        IMAGENETTE,
        "FACADE is as good as the others for the majority and better for the minority: 64.1 % "
        "against 56.1 % with EL at 20:4",
    ),
    _highest(
        5,
        (CIFAR, IMAGENETTE),
        "FACADE has the highest fair accuracy: 73.3 % at 30:2 on CIFAR-10, DePRL 68.4 %, EL 60.8 "
        "%; 76.1 % at 20:4 on Imagenette, EL 70.7 %",
    ),
    _boxes(
        6,
        (CIFAR, IMAGENETTE),
        "all methods are alike with equal clusters; with unequal ones FACADE has smaller gaps than "
        "EL and DAC, and DePRL, whose accuracy is low, the smallest",
    ),
    Study(
        "p3-fig7",
        "Fig. 7: traffic until an accuracy is reached, CIFAR-10 and Imagenette",
        "at 16:16 on CIFAR-10 FACADE needs 41.3 % less than EL and 34.6 % less than DAC, at 30:2 "
        "about as much as DAC; on Imagenette it needs less than both",
        partial(grid, datasets=(CIFAR, IMAGENETTE), methods=(EL, DAC, FACADE)),
        output.show_traffic,
    ),
    Study(
        "p3-fig8",
        "Fig. 8: how many heads for three clusters, CIFAR-10",
        "three heads are best for all clusters but the largest, and more are nearly as good; with "
        "one the minority has 40.75 %",
        head_count_jobs,
        heads.show_head_counts,
    ),
    Study(
        "p3-fig9",
        "Fig. 9: which head nodes choose in the first rounds, CIFAR-10, 20:10:2",
        "the minority agrees on a head after 18 rounds, and every cluster after 42",
        choice_jobs,
        heads.show_choices,
    ),
    _fair(10, CIFAR),
    _fair(11, IMAGENETTE),
    _fair(12, FLICKR),
    _clusters(
        13,
        FLICKR,
        "FACADE is best in both clusters at 8:8; at 14:2 it is much better for the minority: 59.6 "
        "% against 49.7 % with EL",
    ),
    _highest(14, (FLICKR,), "FACADE has the highest fair accuracy for both sizes of clusters"),
    _boxes(
        15,
        (FLICKR,),
        "at 14:2 FACADE has smaller equalised odds than EL and DAC, and DePRL the smallest",
    ),
    Study(
        "p3-fig16",
        "Fig. 16: losses of the heads in a run that settled and in one that did not, CIFAR-10",
        "in a run that does not settle, two clusters share a head and another head is no longer "
        "chosen",
        settlement_jobs,
        heads.show_head_losses,
    ),
    _clusters(
        17,
        CIFAR,
        "FACADE is best for the minority at 30:2: 51.2 %, DePRL 48.1 %; EL and DAC do not converge "
        "there",
        shift=BY_LABEL,
        sizes=LABELS,
    ),
    _highest(
        18,
        (CIFAR,),
        "FACADE is among the best at 16:16 and 24:8, and best at 30:2: 67.7 %, DePRL 65.5 %",
        shift=BY_LABEL,
        sizes=LABELS,
    ),
    _highest(
        19,
        (CIFAR,),
        "FACADE is best: 69.6 % at 8:8:8:8 and 71.2 % at 20:6:4:2, DAC 68.8 % and 70.7 %",
        shift=COLOURED,
        sizes=COLOURS,
    ),
    _clusters(
        20,
        CIFAR,
        "FACADE is best in every cluster but sepia at 20:6:4:2, where DAC is half a point better",
        shift=COLOURED,
        sizes=COLOURS,
    ),
    Study(
        "p3-balanced",
        "Not in the paper: clusters of the same size, 400 rounds, CIFAR-10",
        "is FACADE ahead of plain averaging when no cluster is a minority",
        balanced_jobs,
        output.show_balanced,
    ),
    Study(
        "p3-kinds",
        "Not in the paper: clusters by label and by colour with one learning rate, CIFAR-10",
        "does FACADE help if clusters differ in something other than a rotation",
        kind_jobs,
        output.show_kinds,
    ),
    Study(
        "p3-settlement",
        "Not in the paper: how many runs settle, and when, CIFAR-10, 20:10:2",
        "how often does every cluster find a head of its own",
        settlement_jobs,
        heads.show_settlement,
    ),
    Study(
        "p3-readings",
        "Not in the paper: readings of FACADE's text, rotated MNIST, 22:2",
        "how much do results depend on what text, equations and code say differently",
        partial(variant_jobs, READINGS),
        output.show_variants,
    ),
    Study(
        "p3-deprl",
        "Not in the paper: DePRL with steps and with the code's epochs, CIFAR-10, 30:2",
        "does DePRL stop improving because of its epochs",
        deprl_jobs,
        output.show_variants,
    ),
    Study(
        "p3-curvature",
        "Not in the paper: curvature weights and the gain for FACADE's core, rotated MNIST, 22:2",
        "do the weights of P0 and the gain of P4 help a core that all clusters share",
        partial(variant_jobs, CORES),
        output.show_variants,
    ),
]
