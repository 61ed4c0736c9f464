"""The experiments of P4: Table A1 and section 5 at three scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.p4.printed import ACTIVITIES, ERRORS
from peerage.papers.study import SMOKE_RATE, Job, Plan, Scale, Training, built, with_options

WITH, WITHOUT, CENTRAL = "with gain", "without gain", "centralised"
DECAVG = "decavg:order=combine-first"  # as in the authors' code
STEPS, BATCH = 8, 16  # mini-batches between two exchanges, examples in each
SGD: dict[str, Any] = {"lr": 0.001, "momentum": 0.5}
ADAMW: dict[str, Any] = {"lr": 0.001, "optimizer": "adamw", "weight_decay": 0.01}


class Setting(NamedTuple):
    """The coordinates of a job in P4's figures."""

    panel: str
    setting: str  # one colour of a figure
    method: str

    @property
    def title(self) -> str:
        return ", ".join(word for word in self if word)


@dataclass(frozen=True)
class Configuration:
    """A row of Table A1 without the settings that depend on the scale."""

    dataset: str
    model: str
    partition: str
    work: Mapping[str, Any]
    exact: str  # a gain that is exact on the graph
    bias: str  # in the authors' code; here it is zero, so that none is compressed


BALANCED = "balanced-iid:items={items}"
CONFIGURATIONS = {
    "A": Configuration("mnist", "gain-mlp", BALANCED, SGD, "sqrt", "default"),
    "B": Configuration("so2sat", "gain-cnn", "zipf:a=1.8", SGD, "graph", "scaled"),
    "C": Configuration("cifar10:normalise=signed", "vgg16", BALANCED, SGD, "sqrt", "scaled"),
    "D": Configuration("mnist", "gain-mlp", BALANCED, ADAMW, "sqrt", "default"),
}


class Scaling(NamedTuple):
    """Fig. 3: the length of the plateau on networks of these sizes."""

    topology: str
    nodes: tuple[int, ...]
    items: int
    rounds: int
    samples: int | None = None  # test examples, if fewer than those of the scale


class Activity(NamedTuple):
    """Fig. 4: links or nodes that are active with these probabilities."""

    nodes: int
    chances: tuple[float, ...]
    items: int
    rounds: int


class Start(NamedTuple):
    """Fig. 5: the first rounds on a regular graph, in training and in the numerical model."""

    nodes: int
    degree: int
    items: int
    rounds: int
    realisations: int


class Erring(NamedTuple):
    """Fig. 7: gains from wrong numbers of nodes, and from wrong exponents."""

    nodes: int
    errors: tuple[float, ...]
    items: int
    rounds: int


class Compression(NamedTuple):
    """Fig. 8: the numerical model on graphs of many sizes, or rewired to many assortativities."""

    nodes: tuple[int, ...]
    degree: int
    parameters: int
    rounds: int
    realisations: int
    together: int  # realisations per job
    assortativities: tuple[float, ...]


class Environment(NamedTuple):
    """Fig. 9: regular graphs, with one setting varied at a time."""

    nodes: int
    degree: int
    items: int
    batches: int  # per node in the whole run
    epochs: int  # of the centralised reference


class Sharing(NamedTuple):
    """Fig. 10: a fixed number of items, split among more and more nodes."""

    items: int
    nodes: tuple[int, ...]
    degree: int
    batches: int


@dataclass(frozen=True)
class Size:
    """The settings that differ between scales."""

    scaling: Mapping[str, Scaling]  # by configuration
    activity: Activity
    start: Start
    erring: Erring
    compression: Compression
    rewired: Compression
    environment: Environment
    varied: Mapping[str, tuple[int, ...]]  # setting of the environment -> its values
    sharing: Sharing
    samples: int | None = None  # test examples; None for all
    seeds: int = 1


SIZES: dict[Scale, Size] = {
    # The paper has 32 repetitions of A, 128 of B (64 with 256 nodes), 16 of C and D. The default
    # here is one, which takes days. The rounds of B and C, and the values and rounds of section 5,
    # are guesses, because the paper does not state them.
    "paper": Size(
        scaling={
            "A": Scaling("complete", (8, 16, 32, 64), 512, 3000),
            "B": Scaling("ba:m=8", (32, 64, 128, 256), 1024, 3000),
            "C": Scaling("regular:k=4", (8, 16, 32, 64), 512, 3000),
            "D": Scaling("complete", (8, 16, 32, 64), 512, 3000),
        },
        activity=Activity(64, ACTIVITIES, 512, 3000),
        start=Start(256, 32, 80, 24, 5),
        erring=Erring(64, ERRORS, 512, 3000),
        compression=Compression(
            (256, 376, 553, 813, 1194, 1756, 2580, 3793, 5573, 8192), 64, 200, 40, 128, 8, ()
        ),
        rewired=Compression((2048,), 64, 200, 40, 8, 2, (-0.8, -0.4, 0.0, 0.4, 0.8)),
        environment=Environment(nodes=64, degree=32, items=80, batches=20_000, epochs=200),
        varied={
            "neighbours": (2, 4, 8, 16, 32),
            "examples": (40, 80, 160, 320),
            "nodes": (64, 128, 256, 512),
            "epochs": (1, 2, 4, 8),
        },
        sharing=Sharing(40_960, (64, 128, 256, 512), 32, 20_000),
    ),
    "small": Size(
        samples=1000,
        scaling={
            "A": Scaling("complete", (4, 8, 16), 512, 800),
            "B": Scaling("ba:m=2", (4, 8, 16), 128, 20, samples=300),
            "C": Scaling("regular:k=4", (5, 10), 128, 6, samples=200),
            "D": Scaling("complete", (4, 8, 16), 512, 60),
        },
        activity=Activity(16, (0.3, 0.1), 512, 800),
        start=Start(64, 16, 80, 24, 5),
        erring=Erring(16, (-0.2, -0.1, 0.0, 0.1, 0.2), 512, 800),
        compression=Compression((256, 388, 588, 891, 1351, 2048), 64, 200, 40, 8, 4, ()),
        rewired=Compression((512,), 32, 200, 40, 4, 2, (-0.6, -0.3, 0.0, 0.3, 0.6)),
        environment=Environment(nodes=16, degree=8, items=80, batches=2000, epochs=60),
        varied={
            "neighbours": (2, 4, 8),
            "examples": (40, 80, 160),
            "nodes": (10, 16, 32),
            "epochs": (1, 2, 8),
        },
        sharing=Sharing(2560, (10, 16, 32), 8, 2000),
    ),
    "smoke": Size(
        scaling={
            "A": Scaling("complete", (4, 6, 8), 80, 6),
            "B": Scaling("ba:m=2", (4, 6, 8), 80, 6),
            "C": Scaling("regular:k=3", (4, 6, 8), 80, 6),
            "D": Scaling("complete", (4, 6, 8), 80, 6),
        },
        activity=Activity(6, (0.5, 0.2), 80, 6),
        start=Start(8, 3, 40, 4, 2),
        erring=Erring(6, (-0.2, 0.0, 0.2), 80, 6),
        compression=Compression((32, 64, 128), 8, 64, 10, 2, 2, ()),
        rewired=Compression((128,), 16, 64, 10, 2, 2, (-0.3, 0.0, 0.3)),
        environment=Environment(nodes=6, degree=3, items=40, batches=40, epochs=2),
        varied={"neighbours": (2, 3), "examples": (20, 40), "nodes": (4, 6), "epochs": (1, 2)},
        sharing=Sharing(240, (4, 6), 3, 40),
    ),
}


def experiment(
    plan: Plan, letter: str, nodes: int, items: int, *, gain: str, seed: int, **changes: Any
) -> Experiment:
    """One configuration of Table A1 at a scale, with `changes` merged into it.

    A node has `items` examples, exactly or on average.
    """
    configuration, size = CONFIGURATIONS[letter], SIZES[plan.scale]
    local = {"steps": STEPS, "batch_size": BATCH, "loss_clamp": 10.0, **configuration.work}
    init = {"scheme": "he", "gain": gain}
    if plan.fidelity == "code":
        init["bias"] = configuration.bias
    # A Zipf partition distributes the whole data set, so its size is set.
    total = nodes * items if configuration.dataset == "so2sat" else None
    settings: dict[str, Any] = {
        "algorithm": DECAVG,
        "dataset": with_options(configuration.dataset, train=total),
        "partition": configuration.partition.format(items=items),
        "model": configuration.model,
        "nodes": nodes,
        "seed": seed,
        "local": local,
        "init": init,
        "evaluation": {"growth": 1.1, "at": "end", "samples": size.samples},
    }
    if plan.scale == "smoke":
        local["lr"] = SMOKE_RATE if configuration.work is SGD else 0.005
    return built(plan, merged(settings, changes))


def runs(
    plan: Plan,
    place: Setting,
    nodes: int,
    items: int,
    *,
    letter: str = "A",
    gain: str | None = None,
    **changes: Any,
) -> list[Job]:
    """One job per seed; the gain is by default exact with the gain, and none otherwise."""
    if gain is None:
        gain = CONFIGURATIONS[letter].exact if place.method == WITH else "none"
    return [
        Training(place, experiment(plan, letter, nodes, items, gain=gain, seed=seed, **changes))
        for seed in plan.seed_range(SIZES[plan.scale].seeds)
    ]
