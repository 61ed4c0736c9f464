"""The experiments of P0: section V-A at three scales, and the methods by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.datasets import CIFAR, FASHION, MNIST
from peerage.papers.study import SMOKE_RATE, Job, Plan, Scale, Training, built, with_options

FIVE = ("DecHetero", "CFA", "DecDiff", "DecDiff(VT)", "DecHW")
CURVATURES = {
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


class Work(NamedTuple):
    """The settings of a data set that differ between scales; the defaults are the paper's."""

    rounds: int = 1000
    train: int | None = None  # training examples; None for all
    epochs: int = 5
    batch: int = 100
    every: int = 1  # rounds between evaluations


@dataclass(frozen=True)
class Size:
    """All settings that differ between scales; the defaults are the paper's."""

    work: Mapping[str, Work]  # by data set
    seeds: int = 5
    alphas: tuple[float, ...] = (1.0, 0.5, 0.2)
    nodes: int = 50
    topology: str = "er:p=0.2"
    hubs: str = "ba:m=5"  # topology of the authors' scripts
    samples: int | None = None  # test examples; None for all
    theta: int = 30  # rounds with curvature in DecHW*
    half: tuple[int, float] = (250, HALF)  # rounds at most, accuracy to reach
    desa: str = "ipc=50,iterations=1000"  # its options


SIZES: dict[Scale, Size] = {
    # Ten nodes take 50 steps per round, as in the paper, on a fraction of its data. With 100
    # examples a node learns nothing on CIFAR-10, so it has 500 there and one epoch per round.
    "small": Size(
        work={
            MNIST: Work(60, 2000, 5, 20, 1),
            FASHION: Work(40, 1000, 5, 10, 2),
            CIFAR: Work(60, 5000, 1, 10, 5),
        },
        seeds=1,
        alphas=(0.2,),
        nodes=10,
        topology="er:p=0.5",
        hubs="ba:m=3",
        samples=1000,
        half=(60, HALF),
        desa="ipc=10,iterations=50",
    ),
    "paper": Size(work=dict.fromkeys(RATES, Work())),
    "smoke": Size(
        work=dict.fromkeys(RATES, Work(4, epochs=1, batch=16)),
        seeds=1,
        alphas=(0.2,),
        nodes=6,
        topology="er:p=0.6",
        hubs="ba:m=2",
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
    work = size.work[dataset]
    rates = {"lr": SMOKE_RATE} if plan.scale == "smoke" else RATES[dataset]
    local: dict[str, Any] = {"epochs": work.epochs, "batch_size": work.batch, **rates}
    evaluation: dict[str, Any] = {"every": work.every, "samples": size.samples}
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "dataset": with_options(dataset, train=work.train),
        "model": model_of(dataset, plan),
        "nodes": size.nodes,
        "topology": size.topology,
        "partition": f"dirichlet:alpha={alpha},cap_at_mean=true,min_size=10",
        "rounds": work.rounds,
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
        **CURVATURES,
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
