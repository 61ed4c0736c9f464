"""The studies of P2: the runs and calculations of each, and how they are shown."""

from functools import partial
from typing import Any

from peerage.papers import study
from peerage.papers.datasets import CIFAR, FASHION, FEMNIST, IMAGES, MNIST, TITLES
from peerage.papers.p2 import output, settings
from peerage.papers.p2.clients import Client, LastLayer, LayerCurvature
from peerage.papers.p2.printed import FOUR, IID, SPLITS, TYPE_I, TYPE_II
from peerage.papers.p2.settings import FIVE, METHODS, PARTITIONS, SIZES, TEN, Setting, grid, runs
from peerage.papers.study import Calculation, Job, Plan, Study, Training

OF_CLIENT = 10  # epochs of Fig. 2, and a guess for Fig. 1
TWO_LABELS = {"labels 0 and 1": "0+1", "labels 8 and 9": "8+9"}


def client_jobs(plan: Plan) -> list[Job]:
    """Fig. 1: clients with the same start; their weights differ only because of their data."""
    iid = [(IID, f"client {number}", number, "") for number in (0, 1)]
    non_iid = [("non-IID", name, 0, labels) for name, labels in TWO_LABELS.items()]
    return [
        calculation(plan, LastLayer, setting, name, IID, number, labels)
        for setting, name, number, labels in (*iid, *non_iid)
    ]


def curvature_jobs(plan: Plan) -> list[Job]:
    """Fig. 2: the curvature of one client, by layer."""
    return [calculation(plan, LayerCurvature, TYPE_I, "largest client", TYPE_I)]


def calculation(
    plan: Plan,
    kind: type[Client],
    setting: str,
    name: str,
    split: str,
    number: int | None = None,
    labels: str = "",
) -> Job:
    size, smoke = SIZES[plan.scale], plan.scale == "smoke"
    client = kind(
        study.DIGITS if smoke else settings.images(plan, MNIST),
        study.SMALL_MODEL if smoke else settings.MODELS[MNIST],
        PARTITIONS[split],
        nodes=size.nodes,
        epochs=2 if smoke else OF_CLIENT,
        lr=size.learning.get("lr", settings.SGD["lr"]),
        client=number,
        labels=labels,
    )
    return Calculation(Setting(MNIST, setting, f"{OF_CLIENT} epochs", name), client, range(1))


def linear_jobs(plan: Plan) -> list[Job]:
    """Fig. 7: FedNL, and the others with one step per round."""
    return [
        Training(
            Setting(dataset, TYPE_I, settings.ONE_STEP, name),
            settings.linear(plan, dataset, METHODS[name], seed=seed),
        )
        for dataset in IMAGES
        for name in settings.LINEAR_METHODS
        for seed in settings.seeds(plan, dataset)
    ]


def alpha_jobs(plan: Plan) -> list[Job]:
    """Fig. 8: clients with nearly equal data, down to two or three classes per client."""
    return [
        job
        for alpha in SIZES[plan.scale].alphas
        for name in FOUR
        for job in runs(plan, MNIST, f"Dir {alpha:g}", name, partition=f"dirichlet:alpha={alpha}")
    ]


def scope_jobs(plan: Plan) -> list[Job]:
    """Fig. 10: curvature of the output layer, of two layers or of all."""
    return [
        job
        for name, scope in settings.SCOPES.items()
        for job in runs(
            plan, MNIST, TYPE_I, name, f"hwa:scope={scope}", partition=PARTITIONS[TYPE_I]
        )
    ]


def noise_jobs(plan: Plan) -> list[Job]:
    """Fig. 11: Gaussian noise on everything that a client sends.

    With so small an alpha, partitions that leave a client without data are drawn again.
    """
    jobs: list[Job] = []
    for sigma in SIZES[plan.scale].sigmas:
        changes: dict[str, Any] = {"noise": {"sigma": sigma}} if sigma else {}
        changes["partition"] = "dirichlet:alpha=0.01"
        for name in FOUR:
            jobs += runs(plan, CIFAR, f"sigma = {sigma:g}", name, **changes)
    return jobs


def device_jobs(plan: Plan) -> list[Job]:
    """Table 4 and Fig. 9: thousands of writers, ten of them in each round."""
    return [
        Training(
            Setting(FEMNIST, "by writer", settings.shown_epochs(FIVE), name),
            settings.devices(plan, METHODS[name], seed=seed),
        )
        for name in FOUR
        for seed in plan.seed_range(1)
    ]


def _table(number: int, dataset: str, claim: str) -> Study:
    return Study(
        f"p2-tab{number}",
        f"Table {number}: accuracy on {TITLES[dataset]}",
        f"equal on IID data; HWA is best on the others, significantly {claim}",
        partial(grid, datasets=(dataset,), splits=SPLITS, epochs=settings.EPOCHS),
        partial(output.show_table, number),
    )


def _curves(number: int, split: str, epochs: int) -> Study:
    return Study(
        f"p2-fig{number}",
        f"Fig. {number}: accuracy and losses over the rounds, {split}, E = {epochs}",
        "HWA converges faster and to a better model"
        + ("; the others do worse than with 5 epochs" if epochs == TEN else ""),
        partial(grid, datasets=IMAGES, splits=(split,), epochs=(epochs,)),
        partial(output.show_curves, number, output.ALL_KEYS),
    )


STUDIES = [
    _table(1, MNIST, "on non-IID (II)"),
    _table(2, FASHION, "so"),
    _table(3, CIFAR, "in three of four cases"),
    Study(
        "p2-tab4",
        "Table 4 and Fig. 9: accuracy on FEMNIST, 10 writers in a round",
        "HWA is best at all times, and far ahead in the beginning",
        device_jobs,
        output.show_devices,
    ),
    Study(
        "p2-fig1",
        "Fig. 1: weights of the last layer of two clients, MNIST",
        "with other labels the weights become others, which a plain mean treats alike",
        client_jobs,
        output.show_last_layers,
    ),
    Study(
        "p2-fig2",
        "Fig. 2: curvature of a client, layer by layer, MNIST",
        "in contrast with the output layer, the curvature of the hidden layers is nearly zero",
        curvature_jobs,
        output.show_layer_curvature,
    ),
    _curves(3, TYPE_I, FIVE),
    _curves(4, TYPE_I, TEN),
    _curves(5, TYPE_II, FIVE),
    _curves(6, TYPE_II, TEN),
    Study(
        "p2-fig7",
        "Fig. 7: logistic regression with one local step, and FedNL",
        "HWA is best, FedNL second on MNIST; on harder data FedNL struggles to converge",
        linear_jobs,
        partial(output.show_curves, 7, ("accuracy", "loss")),
    ),
    Study(
        "p2-fig8",
        "Fig. 8: from like to unlike clients, MNIST",
        "all are equal with Dir 10; the lead of HWA grows as alpha falls",
        alpha_jobs,
        output.show_alphas,
    ),
    Study(
        "p2-fig10",
        "Fig. 10: curvature of more layers, MNIST",
        "the last hidden layer adds little, all layers are worse, and both cost more",
        scope_jobs,
        output.show_scopes,
    ),
    Study(
        "p2-fig11",
        "Fig. 11: Gaussian noise on what clients send, CIFAR-10",
        "HWA is best at every level of noise; FedCurv breaks above 0.1",
        noise_jobs,
        output.show_noise,
    ),
]
