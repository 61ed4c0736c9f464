"""The experiments of P2: section 5 at three scales, and the methods by name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.calibrate import mean_cost, parameters
from peerage.papers.datasets import CIFAR, FASHION, FEMNIST, MNIST
from peerage.papers.p2 import printed
from peerage.papers.p2.printed import IID, TYPE_I, TYPE_II
from peerage.papers.study import DIGITS, SMOKE_RATE, Job, Plan, Scale, Training, built, with_options

GREY = "cifar10:grey=true,side=28"  # the shape of the other two, for logistic regression
MODELS = {MNIST: "hwa-mlp", FASHION: "hwa-mlp", CIFAR: "cifar-cnn"}
LINEAR = "logistic"  # of Fig. 7
PARTITIONS = {IID: "iid", TYPE_I: "dirichlet:alpha=0.1", TYPE_II: "shards"}
METHODS = {
    "FedAvg": "fedavg",
    "FedProx": "fedprox:mu=0.1",
    "FedCurv": "fedcurv:strength=1",
    "HWA": "hwa",
    "HWA (examples)": "hwa:curvature=sample",  # not in the paper: see LINEAR_METHODS
    "FedNL": "fednl:rank=2",
}
# Of Fig. 7. There a batch is all data of a client, so the curvature over batches is one squared
# gradient. The curvature over single examples is shown beside it.
LINEAR_METHODS = (*printed.FOUR, "HWA (examples)", "FedNL")
SCOPES = {"output": "output", "+ last hidden": "last-hidden", "all layers": "all"}  # Fig. 10
FIVE, TEN = EPOCHS = (5, 10)  # per round, as the tables name them
BYTES = 4  # per number sent

SGD: dict[str, Any] = {"batch_size": 32, "lr": 0.001, "momentum": 0.9, "weight_decay": 0.001}
PROXIMAL_RATE = 0.01
# Fig. 7 allows one local step with all data of a client. The rate is a guess.
STEP: dict[str, Any] = {"epochs": 1, "batch_size": 60_000, "lr": 0.1, "weight_decay": 0.001}
# The paper has "the same settings as used in LEAF"; these are the settings of its FedAvg.
LEAF: dict[str, Any] = {"epochs": 5, "batch_size": 10, "lr": 0.004}
ONE_STEP = "one step"


class Setting(NamedTuple):
    """The coordinates of a run in P2's tables."""

    dataset: str
    setting: str  # a split, or the value that a figure varies
    epochs: str
    method: str

    @property
    def title(self) -> str:
        return f"{self.method}, {self.dataset}, {self.setting}, {self.epochs}"


class Devices(NamedTuple):
    """Table 4: writers, those of them in a round, and the evaluated rounds."""

    dataset: str = FEMNIST
    nodes: int = 3550
    clients: int = 10
    rounds: int = 1000
    every: int = 25
    marks: tuple[int, ...] = printed.MARKS  # our rounds beside those of the paper


class Work(NamedTuple):
    """The settings of a data set that differ between scales; the defaults are the paper's.

    The paper has ten seeds everywhere. With an MLP three seeds take hours; on CIFAR-10 one seed
    takes two days.
    """

    seeds: int = 3
    train: int | None = None  # training examples; None for all
    rounds: int = 50
    epochs: Mapping[int, int] = {FIVE: 5, TEN: 10}  # of the tables -> ours
    samples: int | None = None  # test examples; None for all


@dataclass(frozen=True)
class Size:
    """All settings that differ between scales; the defaults are the paper's."""

    work: Mapping[str, Work]  # by data set
    devices: Devices
    linear: int = 50  # rounds of logistic regression
    alphas: tuple[float, ...] = printed.ALPHAS
    sigmas: tuple[float, ...] = printed.SIGMAS
    learning: Mapping[str, Any] = field(default_factory=dict)  # replaces the paper's rates
    nodes: int = 10


SIZES: dict[Scale, Size] = {
    "paper": Size({MNIST: Work(), FASHION: Work(), CIFAR: Work(seeds=1)}, Devices()),
    # A client takes a few hundred steps instead of 50 000, so it needs a larger learning rate.
    "small": Size(
        work={
            MNIST: Work(3, 2000, 15),
            FASHION: Work(3, 2000, 15),
            CIFAR: Work(1, 2000, 10, {FIVE: 5}, 2000),
        },
        linear=10,
        alphas=(10.0, 0.2, 0.05),
        sigmas=(0.0, 0.05, 0.2),
        devices=Devices(f"{FEMNIST}:writers=100", 100, 10, 20, 4, (4, 8, 12, 16, 20)),
        learning={"lr": 0.01},
    ),
    "smoke": Size(
        work=dict.fromkeys(MODELS, Work(1, None, 2, {FIVE: 1, TEN: 2})),
        linear=2,
        alphas=(10.0, 0.1),
        sigmas=(0.0, 0.1),
        devices=Devices(DIGITS, 6, 2, 5, 1, (1, 2, 3, 4, 5)),
        learning={"lr": SMOKE_RATE},
        nodes=6,
    ),
}


def images(plan: Plan, dataset: str) -> str:
    """The data set of a scale. Its inputs are in [0, 1], with which Table 2 fits the paper best."""
    train = SIZES[plan.scale].work[dataset].train
    if dataset == CIFAR:  # in [0, 1] by default
        return with_options(dataset, train=train)
    return with_options(dataset, train=train, normalise="unit" if plan.inputs == "paper" else None)


def experiment(
    plan: Plan, dataset: str, algorithm: str, *, seed: int, epochs: int = FIVE, **changes: Any
) -> Experiment:
    """The setting of section 5 at a scale, with `changes` merged into it."""
    size = SIZES[plan.scale]
    work = size.work[dataset]
    local: dict[str, Any] = {"epochs": work.epochs[epochs], **SGD}
    if algorithm.startswith("fedprox"):
        local["lr"] = PROXIMAL_RATE
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "dataset": images(plan, dataset),
        "model": MODELS[dataset],
        "nodes": size.nodes,
        "rounds": work.rounds,
        "local": {**local, **size.learning},
        "evaluation": {"samples": work.samples},
        "seed": seed,
    }
    return built(plan, merged(settings, changes))


def linear(plan: Plan, dataset: str, algorithm: str, *, seed: int) -> Experiment:
    """Fig. 7: logistic regression with one step per round, or FedNL.

    FedNL takes no such steps, and its penalty replaces weight decay.
    """
    size = SIZES[plan.scale]
    train = size.work[dataset].train
    settings: dict[str, Any] = {
        "algorithm": algorithm,
        "dataset": with_options(GREY, train=train) if dataset == CIFAR else images(plan, dataset),
        "model": LINEAR,
        "nodes": size.nodes,
        "partition": PARTITIONS[TYPE_I],
        "rounds": size.linear,
        "seed": seed,
    }
    if not algorithm.startswith("fednl"):
        settings["local"] = STEP
    return built(plan, settings, stand_in=LINEAR)


def devices(plan: Plan, algorithm: str, *, seed: int) -> Experiment:
    """Table 4: a node is a writer, and a few of them are drawn in each round."""
    size = SIZES[plan.scale].devices
    settings: dict[str, Any] = {
        "algorithm": with_options(algorithm, clients=size.clients),
        "dataset": size.dataset,
        "model": "leaf-cnn",
        "nodes": size.nodes,
        "partition": "by-group",
        "rounds": size.rounds,
        "local": LEAF,
        "evaluation": {"every": size.every},
        "seed": seed,
    }
    if plan.scale == "smoke":
        settings["partition"] = PARTITIONS[TYPE_I]
        settings["local"] = {**LEAF, "epochs": 1, "lr": SMOKE_RATE}
    return built(plan, settings)


def seeds(plan: Plan, dataset: str) -> range:
    return plan.seed_range(SIZES[plan.scale].work[dataset].seeds)


def shown_epochs(epochs: int) -> str:
    return f"E = {epochs}"


def runs(
    plan: Plan,
    dataset: str,
    setting: str,
    name: str,
    algorithm: str | None = None,
    *,
    epochs: int = FIVE,
    **changes: Any,
) -> list[Job]:
    """One job per seed; the algorithm is that of METHODS by default."""
    place = Setting(dataset, setting, shown_epochs(epochs), name)
    algorithm = algorithm or METHODS[name]
    return [
        Training(place, experiment(plan, dataset, algorithm, seed=seed, epochs=epochs, **changes))
        for seed in seeds(plan, dataset)
    ]


def grid(
    plan: Plan,
    datasets: Iterable[str],
    splits: Iterable[str],
    epochs: Iterable[int],
    methods: Iterable[str] = printed.FOUR,
) -> list[Job]:
    """One job per data set, number of epochs, split, method and seed.

    Fewer epochs and non-IID splits come first, so that an interrupted study has them.
    """
    return [
        job
        for dataset in datasets
        for number in epochs
        if number in SIZES[plan.scale].work[dataset].epochs
        for split in sorted(splits, key=lambda split: split == IID)
        for name in methods
        for job in runs(plan, dataset, split, name, epochs=number, partition=PARTITIONS[split])
    ]


def scalars_up(experiment: Experiment) -> int:
    """Numbers that a client of HWA sends per round: its model and the curvature of some layers."""
    cost = mean_cost(experiment)
    assert cost is not None  # HWA states it
    return round(cost.vectors * parameters(experiment))
