"""The experiments of P1 at three scales."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.datasets import CALTECH, CARS, CIFAR, CIFAR100, PETS
from peerage.papers.study import DIGITS, Job, Plan, Scale, Training, with_options

FEDAVG, FEDPROX, DEFKT, DFML = ("Dec. FedAvg", "Dec. FedProx", "Def-KT", "DFML")
HETEROFL, FEDROLEX, FML = ("Dec. HeteroFL", "Dec. FedRolex", "Dec. FML")
SERVER, NEIGHBOURS = "FedAvg with a server", "DFML with neighbours"
ALGORITHMS = {
    FEDAVG: "dec-fedavg", FEDPROX: "dec-fedprox", DEFKT: "def-kt", DFML: "dfml",
    HETEROFL: "dec-heterofl", FML: "dec-fml", SERVER: "fedavg", NEIGHBOURS: "dfml-neighbours",
}  # fmt: skip
MUTUAL = (DFML, NEIGHBOURS)  # methods with alpha and peak models
IID, NON_IID = SPLITS = ("IID", "non-IID")
PARTITIONS = {IID: "iid", NON_IID: "dirichlet:alpha=0.1,cap_at_mean=true,min_size=10"}
CE, ACE, WSM = "cross-entropy", "ace", "wsm"
H0_CNN, H1_CNN, H1_RESNET, H1_VIT = ("H0 CNN", "H1 CNN", "H1 ResNet", "H1 ViT")
H2_CNN, H2_EFFICIENTNET, TEN = ("H2 CNN", "H2 EfficientNet", "ten architectures")
MIXES = {
    H0_CNN: "h0-cnn", H1_CNN: "h1-cnn", H1_RESNET: "h1-resnet", H1_VIT: "h1-vit",
    H2_CNN: "h2-cnn", H2_EFFICIENTNET: "h2-efficientnet", TEN: "ten-architectures",
}  # fmt: skip
MEME = "dfml-cnn:channels=32+64"  # of Dec. FML: the median of the CNNs
OBJECTS = (CALTECH, PETS, CARS)
TWO_GROUPS = "two-group"
LEARNING_RATE = 0.01  # guess, of 0.1, 0.01 and 0.001
MAX_ALPHA, MAX_ALPHA_NOISY = 0.9, 1.0  # the second with cross-entropy and non-IID data
CLIENTS = 50
ROUNDS = 500  # guess


class Setting(NamedTuple):
    """The coordinates of a run in P1's tables and figures."""

    dataset: str  # that of the run
    models: str
    clients: int  # of the paper, also where fewer are run
    split: str
    setting: str  # the value that a study varies; empty for the paper's
    method: str

    @property
    def title(self) -> str:
        data = f"{self.dataset} {self.split}"
        words = (self.method, self.setting, self.models, data, f"N = {self.clients}")
        return ", ".join(word for word in words if word)


class Amount(NamedTuple):
    """How much a kind of run trains and tests."""

    rounds: int
    seeds: int
    every: int  # rounds between tests
    clients: int | None = None  # None: as many as in the paper
    train: int | None = None  # training images; None: all
    samples: int | None = None  # test images; None: all
    baseline_rounds: int | None = None  # of Dec. FedAvg, if not those of DFML
    splits: tuple[str, ...] = SPLITS


# Kinds of runs, which differ in their amounts at scale small: those of Tables 6 and 8, ablations
# with CNNs, the same with one seed, CNNs in the modes H0 and H1, larger networks, and ten
# architectures at once. All runs of DFML end where alpha is at its maximum. Only the first kind has
# both splits there, because the questions of the others are about non-IID data.
FULL, ABLATION, SINGLE, WIDTHS, LARGE, MANY = KINDS = (
    "full", "ablation", "single", "widths", "large", "many",
)  # fmt: skip
_ABLATION = Amount(33, seeds=2, every=1, clients=10, train=5000, samples=2000, splits=(NON_IID,))
AMOUNTS: dict[Scale, dict[str, Amount]] = {
    "paper": dict.fromkeys(KINDS, Amount(ROUNDS, seeds=3, every=10)),
    "small": {
        FULL: Amount(33, seeds=1, every=5, clients=10, baseline_rounds=100),
        ABLATION: _ABLATION,
        SINGLE: _ABLATION._replace(seeds=1),
        WIDTHS: _ABLATION._replace(seeds=1, every=3, train=10_000),
        LARGE: _ABLATION._replace(rounds=10, seeds=1, every=5, train=1000, samples=500),
        MANY: _ABLATION._replace(rounds=10, seeds=1, every=5, clients=20, train=2000, samples=500),
    },
    "smoke": dict.fromkeys(KINDS, Amount(3, seeds=1, every=1, clients=6)),
}
KIND_OF = {H0_CNN: WIDTHS, H1_CNN: WIDTHS, H2_CNN: ABLATION, TEN: MANY}  # LARGE for all others

SMOKE_WIDTHS = [f"dfml-cnn:channels={w}+{2 * w}" for w in (8, 4, 2)]
SMOKE_DEPTHS = ["mlp:hidden=16", "mlp:hidden=8x8", "dfml-cnn:channels=4+8"]
SMOKE_MEME = "mlp:hidden=8"
SMOKE_OPTIONS: dict[str, Any] = {"epochs_mutual": 2, "period": 3}  # alpha rises to its maximum once
# The options of DFML that adaptive methods instead of cycles do not have.
CYCLIC = ("alpha_max", "period")


def experiment(
    plan: Plan,
    method: str,
    *,
    seed: int,
    dataset: str = CIFAR,
    models: str = H2_CNN,
    split: str = NON_IID,
    clients: int = CLIENTS,
    kind: str | None = None,
    loss: str = WSM,
    topology: str = "complete",
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """A run; `options` are of the algorithm, `changes` are merged into the settings."""
    amount = amount_of(plan, models, kind)
    rounds = amount.rounds
    if method not in MUTUAL:
        rounds = amount.baseline_rounds or rounds
    nodes = amount.clients or clients
    settings: dict[str, Any] = {
        "algorithm": algorithm(plan, method, nodes, loss, split, options or {}),
        "dataset": data_of(plan, dataset, models, amount.train),
        "model": models_of(plan, models),
        "nodes": nodes,
        "rounds": rounds,
        "partition": PARTITIONS[split],
        "local": {
            "epochs": 1,
            "batch_size": batch_size(dataset, models),
            "lr": LEARNING_RATE,
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "loss": {"name": loss},
        },
        "init": {"start": "shared"},
        "evaluation": {"every": amount.every, "samples": amount.samples, "validation": 0.2},
        "seed": seed,
    }
    if method != SERVER:  # which has its own graph
        settings["topology"] = topology
    if plan.scale == "smoke":
        settings["engine"] = {"name": "serial"}
    return Experiment(**merged(settings, changes))


def amount_of(plan: Plan, models: str, kind: str | None = None) -> Amount:
    return AMOUNTS[plan.scale][kind or KIND_OF.get(models, LARGE)]


def algorithm(
    plan: Plan, method: str, nodes: int, loss: str, split: str, options: Mapping[str, Any]
) -> str:
    """The algorithm of a method as text; `options` override those of the paper."""
    known: dict[str, Any] = {}
    smoke = plan.scale == "smoke"
    if method in MUTUAL:
        noisy = (loss, split) == (CE, NON_IID)
        known = {"alpha_max": MAX_ALPHA_NOISY if noisy else MAX_ALPHA}
        known |= SMOKE_OPTIONS if smoke else {}
        if options.get("balance", "cyclic") != "cyclic":
            known = {name: value for name, value in known.items() if name not in CYCLIC}
    elif method == DEFKT:
        known = {"pairs": nodes // 2}
        known |= {"epochs_mutual": SMOKE_OPTIONS["epochs_mutual"]} if smoke else {}
    elif method == FML:
        known = {"meme": SMOKE_MEME if smoke else MEME}
    elif method == SERVER:
        known = {"clients": (nodes + 1) // 2}
    return with_options(ALGORITHMS[method], **{**known, **options})


def data_of(plan: Plan, dataset: str, models: str, train: int | None) -> str:
    """The data set as text, with images of the size that the models take."""
    if plan.scale == "smoke":
        return DIGITS
    if dataset in (CIFAR, CIFAR100):
        return with_options(f"{dataset}:normalise=standard", train=train)
    return with_options(dataset, side=224 if models == H2_EFFICIENTNET else 64)


def models_of(plan: Plan, models: str) -> str | list[str]:
    """The mix of models that clients take in turn; at scale smoke a tiny one."""
    if plan.scale != "smoke":
        return MIXES[models]
    if models == H0_CNN:
        return SMOKE_WIDTHS[1]
    return SMOKE_WIDTHS if models.startswith("H1") else SMOKE_DEPTHS


def batch_size(dataset: str, models: str) -> int:
    if models == H2_EFFICIENTNET:
        return 8
    return 16 if dataset in OBJECTS else 64


def runs(
    plan: Plan,
    method: str,
    *,
    dataset: str = CIFAR,
    models: str = H2_CNN,
    split: str = NON_IID,
    clients: int = CLIENTS,
    setting: str = "",
    kind: str | None = None,
    **changes: Any,
) -> list[Job]:
    """One job per seed; `changes` are arguments of `experiment`."""
    place = Setting(dataset, models, clients, split, setting, method)
    seeds = plan.seed_range(amount_of(plan, models, kind).seeds)
    case: dict[str, Any] = {"dataset": dataset, "models": models, "split": split, "kind": kind}
    return [
        Training(place, experiment(plan, method, seed=seed, clients=clients, **case, **changes))
        for seed in seeds
    ]
