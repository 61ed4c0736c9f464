"""The runs of each study of P1."""

from collections.abc import Mapping, Sequence
from typing import Any

from peerage.papers.datasets import CIFAR, CIFAR100
from peerage.papers.p1.calculations import Allocation, AlphaCycles, Cycle, Links, ModelSizes
from peerage.papers.p1.printed import SIGNALS
from peerage.papers.p1.settings import (
    ABLATION,
    ACE,
    AMOUNTS,
    CE,
    CLIENTS,
    DFML,
    FEDAVG,
    FULL,
    H0_CNN,
    H1_CNN,
    H1_RESNET,
    H1_VIT,
    H2_CNN,
    LARGE,
    MIXES,
    NEIGHBOURS,
    SINGLE,
    SPLITS,
    TEN,
    TWO_GROUPS,
    WSM,
    Setting,
    amount_of,
    data_of,
    runs,
)
from peerage.papers.study import Calculation, Job, Plan

Variants = Mapping[str, Mapping[str, Any]]  # name -> arguments of `runs`


def fixed(alpha: float) -> dict[str, Any]:
    """Options of DFML with the same alpha in all rounds."""
    return {"alpha_min": alpha, "alpha_max": alpha}


FIXED = fixed(0.5)
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
    kind: str | None = None,
    **changes: Any,
) -> list[Job]:
    """All methods with all models on all data sets that are available, in all splits."""
    return [
        job
        for count in clients
        for name in models
        for dataset in available(plan, *datasets)
        for split in amount_of(plan, name, kind).splits
        for method in methods
        for job in runs(
            plan,
            method,
            dataset=dataset,
            models=name,
            split=split,
            clients=count,
            kind=kind,
            **changes,
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
        for split in amount_of(plan, models, LARGE).splits
        for setting in SIGNALS
        for job in runs(
            plan,
            DFML,
            dataset=dataset,
            models=models,
            split=split,
            setting=setting,
            kind=LARGE,
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


def variants(plan: Plan, named: Variants, kind: str = ABLATION) -> list[Job]:
    """DFML with one thing changed at a time, in all splits."""
    return [
        job
        for split in ablation_splits(plan)
        for name, changes in named.items()
        for job in runs(plan, DFML, split=split, setting=name, kind=kind, **changes)
    ]


def ablation_splits(plan: Plan) -> tuple[str, ...]:
    return amount_of(plan, H2_CNN, ABLATION).splits


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
    shapes: tuple[tuple[Cycle, int], ...] = (("half", 1), ("full", 1), ("half", 0), ("half", 10))
    return [
        Calculation(
            Setting(CIFAR, "", CLIENTS, "", f"{cycle} cycles, period + {increment}", "alpha"),
            AlphaCycles(cycle, increment, rounds=100),
            range(1),
        )
        for cycle, increment in shapes
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
    return variants(plan, named, SINGLE)


def sender_jobs(plan: Plan) -> list[Job]:
    """Fig. 19: a half, a fifth and a tenth of the clients send."""
    return [
        job
        for split in ablation_splits(plan)
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
    baselines = [job for split in ablation_splits(plan) for job in runs(plan, FEDAVG, split=split)]
    return [*variants(plan, named), *baselines]


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
    return variants(plan, {**named, "fixed": {"loss": CE, "options": FIXED}}, SINGLE)


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
    """The same computation in three ways, and plain averaging, with the runs of Table 6."""
    mutual = 2 if plan.scale == "smoke" else 10
    case: dict[str, Any] = {"clients": 10, "kind": FULL}
    # As many rounds as DFML, where Dec. FedAvg otherwise has more.
    rounds = amount_of(plan, H2_CNN, FULL).rounds
    longer: dict[str, Any] = {"local": {"epochs": 1 + mutual}, "rounds": rounds}
    return [
        *runs(plan, DFML, **case),
        *runs(plan, DFML, setting="alpha = 0", options=fixed(0.0), **case),
        *runs(plan, FEDAVG, setting=f"{1 + mutual} epochs", **longer, **case),
        *runs(plan, FEDAVG, **case),
    ]


def neighbour_jobs(plan: Plan) -> list[Job]:
    """Mutual learning with an aggregator, and between neighbours of a sparse graph.

    A round in which all nodes train with their neighbours costs five times as much on a ring, and
    eight times with four neighbours. So scale small has fewer of them.
    """
    fewer = ending(plan, 10)
    return [
        *runs(plan, DFML, setting="complete graph"),
        *runs(plan, DFML, setting="ring", topology="ring"),
        *runs(plan, NEIGHBOURS, setting="ring", topology="ring", **fewer),
        *runs(plan, NEIGHBOURS, setting="4 neighbours", topology="regular:k=4", **fewer),
    ]
