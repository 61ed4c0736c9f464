"""The studies of P2: which runs and calculations each takes, and how they are shown."""

from functools import partial
from typing import Any

from peerage.papers.p2 import printed
from peerage.papers.p2.clients import Client, LastLayer, LayerCurvature
from peerage.papers.p2.output import (
    ALL_KEYS,
    show_alphas,
    show_curves,
    show_devices,
    show_last_layers,
    show_layer_curvature,
    show_noise,
    show_scopes,
    show_table,
)
from peerage.papers.p2.printed import FOUR, IID, SPLITS, TYPE_I, TYPE_II
from peerage.papers.p2.settings import (
    CIFAR,
    EPOCHS,
    FASHION,
    FEMNIST,
    FIVE,
    LINEAR_METHODS,
    METHODS,
    MNIST,
    MODELS,
    ONE_STEP,
    PARTITIONS,
    SCOPES,
    SGD,
    SIZES,
    TEN,
    Setting,
    devices,
    grid,
    linear,
    runs,
    seeds,
    shown_epochs,
)
from peerage.papers.study import (
    DIGITS,
    SMALL_MODEL,
    Calculation,
    Job,
    Plan,
    Study,
    Training,
    with_options,
)

OF_CLIENT = 10  # epochs of Fig. 2, and a guess for Fig. 1
TWO_LABELS = {"labels 0 and 1": "0+1", "labels 8 and 9": "8+9"}


def client_jobs(plan: Plan) -> list[Job]:
    """Fig. 1: the start of all is the same, so what differs is what the data has made of it."""
    jobs: list[Job] = []
    for number in (0, 1):
        place = Setting(MNIST, IID, f"{OF_CLIENT} epochs", f"client {number}")
        model = client(plan, LastLayer, PARTITIONS[IID], number)
        jobs.append(Calculation(place, model, range(1)))
    for name, labels in TWO_LABELS.items():
        place = Setting(MNIST, "non-IID", f"{OF_CLIENT} epochs", name)
        model = client(plan, LastLayer, PARTITIONS[IID], 0, labels)
        jobs.append(Calculation(place, model, range(1)))
    return jobs


def curvature_jobs(plan: Plan) -> list[Job]:
    """Fig. 2: one client, and where its curvature is."""
    place = Setting(MNIST, TYPE_I, f"{OF_CLIENT} epochs", "largest client")
    model = client(plan, LayerCurvature, PARTITIONS[TYPE_I])
    return [Calculation(place, model, range(1))]


def client(
    plan: Plan, kind: type[Client], partition: str, number: int | None = None, labels: str = ""
) -> Client:
    size = SIZES[plan.scale]
    smoke = plan.scale == "smoke"
    return kind(
        DIGITS if smoke else with_options(MNIST, train=size.train[MNIST]),
        SMALL_MODEL if smoke else MODELS[MNIST],
        partition,
        nodes=size.nodes,
        epochs=2 if smoke else OF_CLIENT,
        lr=size.learning.get("lr", SGD["lr"]),
        client=number,
        labels=labels,
    )


def linear_jobs(plan: Plan) -> list[Job]:
    """Fig. 7: FedNL beside the others, which are allowed one step."""
    return [
        Training(
            Setting(dataset, TYPE_I, ONE_STEP, name),
            linear(plan, dataset, METHODS[name], seed=seed),
        )
        for dataset in printed.DATASETS
        for name in LINEAR_METHODS
        for seed in seeds(plan, dataset)
    ]


def alpha_jobs(plan: Plan) -> list[Job]:
    """Fig. 8: from nearly the same data everywhere to two or three classes on each client."""
    return [
        job
        for alpha in SIZES[plan.scale].alphas
        for name in FOUR
        for job in runs(plan, MNIST, f"Dir {alpha:g}", name, partition=f"dirichlet:alpha={alpha}")
    ]


def scope_jobs(plan: Plan) -> list[Job]:
    """Fig. 10: curvature of the output layer, of two layers, of all."""
    return [
        job
        for name, scope in SCOPES.items()
        for job in runs(
            plan, MNIST, TYPE_I, name, f"hwa:scope={scope}", partition=PARTITIONS[TYPE_I]
        )
    ]


def noise_jobs(plan: Plan) -> list[Job]:
    """Fig. 11: Gaussian noise on everything that a client sends.

    With so small an alpha many draws leave a client without data; those are drawn again.
    """
    jobs: list[Job] = []
    for sigma in SIZES[plan.scale].sigmas:
        changes: dict[str, Any] = {"noise": {"sigma": sigma}} if sigma else {}
        changes["partition"] = "dirichlet:alpha=0.01"
        for name in FOUR:
            jobs += runs(plan, CIFAR, f"sigma = {sigma:g}", name, **changes)
    return jobs


def device_jobs(plan: Plan) -> list[Job]:
    """Table 4 and Fig. 9: thousands of writers, of whom ten take part in a round."""
    return [
        Training(
            Setting(FEMNIST, "by writer", shown_epochs(FIVE), name),
            devices(plan, METHODS[name], seed=seed),
        )
        for name in FOUR
        for seed in seeds(plan, FEMNIST)
    ]


def _table(number: int, dataset: str, title: str, claim: str) -> Study:
    return Study(
        f"p2-tab{number}",
        f"Table {number}: accuracy on {title}",
        claim,
        partial(grid, datasets=(dataset,), splits=SPLITS, epochs=EPOCHS),
        partial(show_table, number),
    )


def _curves(number: int, split: str, epochs: int) -> Study:
    return Study(
        f"p2-fig{number}",
        f"Fig. {number}: accuracy and losses over the rounds, {split}, E = {epochs}",
        "HWA converges faster and to a better model"
        + ("; the others do worse than with 5 epochs" if epochs == TEN else ""),
        partial(grid, datasets=printed.DATASETS, splits=(split,), epochs=(epochs,)),
        partial(show_curves, number, ALL_KEYS),
    )


STUDIES = [
    _table(
        1,
        MNIST,
        "MNIST",
        "equal on IID data; HWA is best on the others, significantly on non-IID (II)",
    ),
    _table(
        2,
        FASHION,
        "Fashion-MNIST",
        "equal on IID data; HWA is best on the others, significantly so",
    ),
    _table(
        3,
        CIFAR,
        "CIFAR-10",
        "equal on IID data; HWA is best on the others, significantly in three of four cases",
    ),
    Study(
        "p2-tab4",
        "Table 4 and Fig. 9: accuracy on FEMNIST, 10 writers in a round",
        "HWA is best at all times, and far ahead in the beginning",
        device_jobs,
        show_devices,
    ),
    Study(
        "p2-fig1",
        "Fig. 1: weights of the last layer of two clients, MNIST",
        "with other labels the weights become others, which a plain mean treats alike",
        client_jobs,
        show_last_layers,
    ),
    Study(
        "p2-fig2",
        "Fig. 2: curvature of a client, layer by layer, MNIST",
        "in contrast with the output layer, the curvature of the hidden layers is nearly zero",
        curvature_jobs,
        show_layer_curvature,
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
        partial(show_curves, 7, ("accuracy", "loss")),
    ),
    Study(
        "p2-fig8",
        "Fig. 8: from like to unlike clients, MNIST",
        "all are equal with Dir 10; the lead of HWA grows as alpha falls",
        alpha_jobs,
        show_alphas,
    ),
    Study(
        "p2-fig10",
        "Fig. 10: curvature of more layers, MNIST",
        "the last hidden layer adds little, all layers are worse, and both cost more",
        scope_jobs,
        show_scopes,
    ),
    Study(
        "p2-fig11",
        "Fig. 11: Gaussian noise on what clients send, CIFAR-10",
        "HWA is best at every level of noise; FedCurv breaks above 0.1",
        noise_jobs,
        show_noise,
    ),
]
