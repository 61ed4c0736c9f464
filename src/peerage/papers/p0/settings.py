"""The experiments of P0: what section V-A says, at three scales, and the methods by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.p0 import printed
from peerage.papers.study import SMOKE_RATE, Job, Plan, Scale, Training, built, with_options

MNIST, FASHION, CIFAR = printed.DATASETS
FIVE = ("DecHetero", "CFA", "DecDiff", "DecDiff(VT)", "DecHW")
KINDS = ("batch", "sample", "full", "online")  # of curvature
HALF = 0.469  # half of DecHW's accuracy on MNIST with Dir 0.2, which the paper counts rounds to

# Rates and momenta of section V-A; DESA keeps those of its own paper.
RATES = {
    MNIST: {"lr": 0.001, "momentum": 0.5},
    FASHION: {"lr": 0.001, "momentum": 0.9},
    CIFAR: {"lr": 0.01, "momentum": 0.9},
}
DESA_RATES = {"lr": 0.01, "momentum": 0.0, "batch_size": 32}


class Setting(NamedTuple):
    """Where a run belongs in P0's tables."""

    dataset: str
    alpha: float
    method: str

    @property
    def title(self) -> str:
        return f"{self.method}, {self.dataset}, Dir {self.alpha:g}"


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
    """The setting of section V-A at a scale; `changes` are laid over it."""
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
    jobs: list[Job] = []
    for dataset in datasets:
        for alpha in alphas or size.alphas:
            for name in methods:
                algorithm, own = method(name, size)
                for seed in range(seeds) if seeds else plan.seed_range(size.seeds):
                    made = experiment(plan, dataset, alpha, algorithm, seed, **own | changes)
                    jobs.append(Training(Setting(dataset, alpha, name), made))
    return jobs
