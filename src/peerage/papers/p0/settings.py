"""The experiments of P0: section V-A at three scales, and the methods by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.datasets import CIFAR, FASHION, MNIST
from peerage.papers.study import SMOKE_RATE, Job, Plan, Scale, Training, built, with_options

FIVE = ("DecHetero", "CFA", "DecDiff", "DecDiff(VT)", "DecHW")
DECHW_VARIANTS = {
    f"DecHW, {kind}": f"dechw:curvature={kind}" for kind in ("batch", "sample", "full", "online")
}
HALF = 0.469  # half of DecHW's accuracy on MNIST with Dir 0.2, a target of Table II

# Rates and momenta of section V-A; DESA has those of its own paper.
RATES = {
    MNIST: {"lr": 0.001, "momentum": 0.5},
    FASHION: {"lr": 0.001, "momentum": 0.9},
    CIFAR: {"lr": 0.01, "momentum": 0.9},
}
DESA_RATES = {"lr": 0.01, "momentum": 0.0, "batch_size": 32}


class Setting(NamedTuple):
    """The coordinates of a run in P0's tables."""

    dataset: str
    alpha: float
    method: str

    @property
    def title(self) -> str:
        return f"{self.method}, {self.dataset}, Dir {self.alpha:g}"


@dataclass(frozen=True)
class Size:
    """The settings that differ between scales."""

    seeds: int
    alphas: tuple[float, ...]
    nodes: int
    topology: str
    hubs: str  # topology of the authors' scripts
    rounds: Mapping[str, int]  # by data set
    train: Mapping[str, int | None]  # training examples; None for all
    epochs: Mapping[str, int]
    batch: Mapping[str, int]
    every: Mapping[str, int]  # rounds between evaluations
    samples: int | None  # test examples; None for all
    theta: int  # rounds with curvature in DecHW*
    half: tuple[int, float]  # rounds at most, accuracy to reach
    desa: str  # its options


SIZES: dict[Scale, Size] = {
    # Ten nodes take 50 steps per round, as in the paper, on a fraction of its data. With 100
    # examples a node learns nothing on CIFAR-10, so it has 500 there and one epoch per round.
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
        desa="ipc=10,iterations=50",
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
        desa="ipc=50,iterations=1000",
    ),
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
        desa="ipc=2,iterations=2",
    ),
}


def experiment(
    plan: Plan, dataset: str, alpha: float, algorithm: str, seed: int, **changes: Any
) -> Experiment:
    """The setting of section V-A at a scale, with `changes` merged into it."""
    size = SIZES[plan.scale]
    work = {"epochs": size.epochs[dataset], "batch_size": size.batch[dataset]}
    rates = {"lr": SMOKE_RATE} if plan.scale == "smoke" else RATES[dataset]
    local: dict[str, Any] = {**work, **rates}
    evaluation: dict[str, Any] = {"every": size.every[dataset], "samples": size.samples}
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "dataset": with_options(dataset, train=size.train.get(dataset)),
        "model": model_of(dataset, plan),
        "nodes": size.nodes,
        "topology": size.topology,
        "partition": f"dirichlet:alpha={alpha},cap_at_mean=true,min_size=10",
        "rounds": size.rounds[dataset],
        "seed": seed,
    }
    if algorithm.startswith("desa"):
        local |= DESA_RATES
    if plan.fidelity == "code":
        settings |= {"algorithm": as_in_code(algorithm), "topology": size.hubs}
        local["early_stop"] = "rollback"
        evaluation["validation"] = 0.2
    settings |= {"local": local, "evaluation": evaluation}
    return built(plan, merged(settings, changes))


def model_of(dataset: str, plan: Plan) -> str:
    name = {MNIST: "mnist-cnn", FASHION: "fashion-cnn", CIFAR: "cifar-cnn"}[dataset]
    in_code = {MNIST: "mnist-cnn:dropout=true", FASHION: "fashion-cnn:relu=first"}
    return in_code.get(dataset, name) if plan.fidelity == "code" else name


def as_in_code(algorithm: str) -> str:
    """The algorithm with the options of the authors' scripts."""
    name, _, text = algorithm.partition(":")
    options = {"weights": "uniform"} if name in ("decavg", "decdiff", "decdiff-vt", "dechw") else {}
    if name == "dechw":
        options |= {"accumulate": "ema", "normalise": "none", "include_self": "false"}
    options |= dict(item.split("=") for item in text.split(",") if item)
    return with_options(name, **options)


def method(name: str, size: Size) -> tuple[str, dict[str, Any]]:
    """The algorithm and the changed settings behind the paper's name of a method."""
    algorithms = {
        "DecHomo": "decavg",
        "DecHetero": "decavg",
        "CFA": "cfa",
        "DecDiff": "decdiff",
        "DecDiff(VT)": "decdiff-vt",
        "DecHW": "dechw",
        "DecHW*": f"dechw:theta={size.theta}",
        "DecHW* (frozen)": f"dechw:theta={size.theta},after_stop=frozen",
        "DecHW, no accumulation": "dechw:accumulate=none",
        "DecHW, raw accumulation": "dechw:normalise=none",
        "DESA": f"desa:{size.desa}",
        **DECHW_VARIANTS,
    }
    return algorithms[name], {"init": {"start": "shared"}} if name == "DecHomo" else {}


def grid(
    plan: Plan,
    methods: Iterable[str],
    datasets: Iterable[str],
    alphas: Iterable[float] | None = None,
    seeds: int | None = None,
    **changes: Any,
) -> list[Job]:
    """One job per data set, alpha, method and seed."""
    size = SIZES[plan.scale]
    return [
        Training(
            Setting(dataset, alpha, name),
            experiment(plan, dataset, alpha, algorithm, seed, **defaults | changes),
        )
        for dataset in datasets
        for alpha in alphas or size.alphas
        for name in methods
        for algorithm, defaults in [method(name, size)]
        for seed in (range(seeds) if seeds else plan.seed_range(size.seeds))
    ]
