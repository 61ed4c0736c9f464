"""The experiments of P3: Table I and the appendix at three scales."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peerage.experiment.experiment import Experiment
from peerage.experiment.toml import merged
from peerage.papers.datasets import CIFAR, FASHION, FLICKR, IMAGENETTE, MNIST
from peerage.papers.study import SMOKE_RATE, Job, Plan, Scale, Training, built, with_options

EL, DAC, DEPRL, FACADE = FOUR = ("EL", "DAC", "DePRL", "FACADE")
DPSGD = "D-PSGD"
RANDOM, STATIC = "dynamic-regular:k=4", "regular:k=4"  # a new graph in each round, or one for all
ANGLES = {2: "0+180", 3: "0+90+180", 4: "0+90+180+270"}  # degrees, by number of clusters
VEHICLES, ANIMALS = "0/1/8/9", "2-7"  # labels of CIFAR-10
ROTATED, BY_LABEL, COLOURED = "rotations", "labels", "colours"  # how clusters differ
BATCH = 8
TEST_BATCHES = 100  # of the head choice after a test, in the authors' code


class Setting(NamedTuple):
    """The coordinates of a run in P3's tables and figures."""

    dataset: str  # of the paper, also where another one replaces it
    clusters: str  # sizes as the paper prints them
    shift: str
    setting: str  # the value that a study varies; empty for the paper's
    method: str

    @property
    def title(self) -> str:
        shift = "" if self.shift == ROTATED else self.shift
        return ", ".join(
            word for word in (self.method, self.dataset, self.clusters, shift, self.setting) if word
        )


class Recipe(NamedTuple):
    """A line of Table I: what a data set is trained with."""

    dataset: str
    model: str
    steps: int
    rounds: int
    every: int  # rounds between tests
    rates: Mapping[str, float]  # learning rate by method
    warmup: int  # rounds with tied heads; from the authors' scripts
    core_steps: int | None = None  # of DePRL, if fewer than of the head


SIGNED = "cifar10:normalise=signed"
# D-PSGD, which the paper does not train, has the learning rate of EL.
TABLE_1 = {
    CIFAR: Recipe(
        SIGNED, "gn-lenet", 10, 1200, 40,
        {EL: 0.05, DPSGD: 0.05, DAC: 0.005, DEPRL: 0.01, FACADE: 0.01}, 10,
    ),
    IMAGENETTE: Recipe(
        IMAGENETTE, "gn-lenet", 10, 800, 80,
        {EL: 0.001, DPSGD: 0.001, DAC: 0.001, DEPRL: 0.0005, FACADE: 0.0003}, 0, 1,
    ),
    FLICKR: Recipe(
        FLICKR, "resnet8", 40, 1200, 300,
        {EL: 0.1, DPSGD: 0.1, DAC: 0.3, DEPRL: 0.1, FACADE: 0.3}, 200, 1,
    ),
}  # fmt: skip
ONE_RATE = dict.fromkeys((*FOUR, DPSGD), 0.05)
THREE = "20:10:2"  # the clusters of Fig. 8, 9 and 16
LABELS = ("16:16", "24:8", "30:2")  # Fig. 17 and 18
COLOURS = ("8:8:8:8", "20:6:4:2")  # Fig. 19 and 20
CLUSTERS = {CIFAR: LABELS, IMAGENETTE: ("12:12", "16:8", "20:4"), FLICKR: ("8:8", "14:2")}


@dataclass(frozen=True)
class Size:
    """All settings that differ between scales; the defaults are the paper's.

    Tests on all images would take as long as training, so they have 2000.
    """

    seeds: int = 4
    samples: int | None = 2000  # test images
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: TABLE_1)  # of rotated images
    other: Recipe = TABLE_1[CIFAR]  # of label and colour clusters; guessed, as no script has them
    sizes: Mapping[str, str] = field(default_factory=dict)  # printed -> ours, where they differ
    heads: tuple[int, ...] = (1, 2, 3, 4, 5)  # Fig. 8
    choices: int = 80  # rounds of Fig. 9


def stand_in(dataset: str) -> Recipe:
    """Small images instead of the paper's; one learning rate, because none was tuned for them."""
    return Recipe(dataset, "gn-lenet", 10, 150, 10, ONE_RATE, 10)


SMALL_SIZES = {
    "16:16": "12:12", "24:8": "18:6", "30:2": "22:2", "12:12": "12:12", "16:8": "18:6",
    "20:4": "22:2", "8:8": "12:12", "14:2": "22:2", "20:10:2": "14:8:2",
}  # fmt: skip
SMOKE_SIZES = {
    "16:16": "4:4", "24:8": "6:2", "30:2": "6:2", "12:12": "4:4", "16:8": "6:2", "20:4": "6:2",
    "8:8": "4:4", "14:2": "6:2", "22:2": "6:2", "20:10:2": "4:2:2", "8:8:8:8": "2:2:2:2",
    "20:6:4:2": "3:2:2:1",
}  # fmt: skip
SMOKE = Recipe("digits", "digits-mlp", 2, 3, 1, dict.fromkeys(ONE_RATE, SMOKE_RATE), 1)
SIZES: dict[Scale, Size] = {
    # The paper prints 16:8 for Imagenette. Its mean over all nodes is that of 18:6, and so are its
    # scripts.
    "paper": Size(sizes={"16:8": "18:6"}),
    "small": Size(
        seeds=1,
        samples=1000,
        recipes={
            **dict.fromkeys((CIFAR, MNIST), stand_in(MNIST)),
            **dict.fromkeys((IMAGENETTE, FLICKR), stand_in(FASHION)),
        },
        other=TABLE_1[CIFAR]._replace(rounds=100, every=10, rates=ONE_RATE),
        sizes=SMALL_SIZES,
    ),
    "smoke": Size(
        seeds=1,
        samples=None,
        recipes=dict.fromkeys((*TABLE_1, MNIST), SMOKE),
        other=SMOKE,
        sizes=SMOKE_SIZES,
        heads=(1, 2),
        choices=3,
    ),
}


def experiment(
    plan: Plan,
    dataset: str,
    clusters: str,
    method: str,
    *,
    seed: int,
    shift: str = ROTATED,
    options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Experiment:
    """A run of a table; `options` are of the algorithm, `changes` are merged into the settings."""
    size = SIZES[plan.scale]
    recipe = size.recipes[dataset] if shift == ROTATED else size.other
    sizes = [int(number) for number in size.sizes.get(clusters, clusters).split(":")]
    code = plan.fidelity == "code"
    settings: dict[str, Any] = {
        "algorithm": algorithm(recipe, method, len(sizes), code, options or {}),
        "dataset": recipe.dataset,
        "model": recipe.model,
        "nodes": sum(sizes),
        "rounds": recipe.rounds,
        "partition": "iid",
        "topology": topology(method, code),
        "clusters": {"sizes": sizes, "shift": shift_of(plan, shift, len(sizes)), "shuffle": True},
        "init": {"start": "independent" if code else "shared"},
        "local": {"steps": recipe.steps, "batch_size": BATCH, "lr": recipe.rates[method]},
        # Held out as in the paper, which tuned learning rates on it.
        "evaluation": {"every": recipe.every, "samples": size.samples, "validation": 0.1},
        "seed": seed,
    }
    if code and method == DEPRL and dataset == CIFAR:
        settings["local"] = {"epochs": 1, "batch_size": 100, "lr": recipe.rates[method]}
    return built(plan, merged(settings, changes))


def algorithm(
    recipe: Recipe, method: str, clusters: int, code: bool, options: Mapping[str, Any]
) -> str:
    """The algorithm of a method as text; FACADE has one head per cluster unless options differ."""
    steps = recipe.steps
    paper: dict[str, dict[str, Any]] = {
        EL: {},
        DPSGD: {},
        # The authors' port trains first, estimates nothing over two hops and has no final mean.
        DAC: {"two_hop": False, "examples": steps * BATCH},
        DEPRL: {"core_steps": None if code else recipe.core_steps},
        FACADE: {"k": clusters, "warmup": recipe.warmup},
    }
    if code:
        paper[FACADE] |= {
            "choice_samples": "different",
            "test_choice_batches": TEST_BATCHES,
            "eval_head": "test",
            "head_init": None if recipe.warmup else "own",  # tied heads start from one model
        }
    names = {DPSGD: "dpsgd", **{name: name.lower() for name in FOUR}}
    return with_options(names[method], **{**paper[method], **options})


def topology(method: str, code: bool) -> str:
    """DePRL and D-PSGD keep one graph; in the authors' code, DePRL has a new one in each round."""
    static = method == DPSGD or (method == DEPRL and not code)
    return STATIC if static else RANDOM


def shift_of(plan: Plan, shift: str, clusters: int) -> str:
    """How the images of clusters differ; at scale smoke, the grey digits are always rotated."""
    if shift == ROTATED or plan.scale == "smoke":
        return f"rotate:angles={ANGLES[clusters]}"
    return f"labels:keep={VEHICLES}+{ANIMALS}" if shift == BY_LABEL else "colour"


def runs(
    plan: Plan,
    dataset: str,
    clusters: str,
    method: str,
    *,
    shift: str = ROTATED,
    setting: str = "",
    seeds: range | None = None,
    **changes: Any,
) -> list[Job]:
    """One job per seed; `changes` are arguments of `experiment`."""
    place = Setting(dataset, clusters, shift, setting, method)
    chosen = plan.seed_range(SIZES[plan.scale].seeds) if seeds is None else seeds
    return [
        Training(
            place, experiment(plan, dataset, clusters, method, seed=seed, shift=shift, **changes)
        )
        for seed in chosen
    ]
