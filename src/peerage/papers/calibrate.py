"""Measures how fast this machine trains, evaluates and averages; estimates the time of jobs."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean, harmonic_mean
from time import process_time, time
from typing import Any, NamedTuple

import torch

from peerage import specs
from peerage.aggregation import weighted_mean
from peerage.algorithm import Algorithm, Cost, Dimensions
from peerage.data import cache_folder
from peerage.data.datasets import DATASET_INFO, DATASETS, DatasetInfo, dataset_info
from peerage.data.partition import BalancedIid, ByGroup
from peerage.errors import DiskError
from peerage.experiment.experiment import Experiment, display_name
from peerage.files import write_json
from peerage.graphs.diffusion import diffuse
from peerage.graphs.faults import Faults
from peerage.graphs.graph import degrees
from peerage.graphs.topology import Complete, ErdosRenyi
from peerage.isolation import exclusive_torch
from peerage.models import MODELS
from peerage.models.start import Architecture, Split
from peerage.papers.study import Calculation, Job
from peerage.records.environment import environment
from peerage.work.context import Examples
from peerage.work.evaluation import score
from peerage.work.training import LocalSGD, train

SECONDS = 0.15  # of processor time per measurement
TRIALS = 3  # measurements, of which the fastest counts
MAX_AGE = 30 * 24 * 3600.0  # seconds until a machine is measured again
START_SECONDS = 0.5  # until the workers of a run have started
TRIAL_EXAMPLES = 500  # fewer for slow models, of which one batch can take a second
AVERAGED_SHAPE = (8, 1 << 20)  # models, parameters: too large for any cache


class Rate(NamedTuple):
    """Examples per second on one core."""

    trained: float
    evaluated: float


class Speeds:
    """Speeds of this machine, measured once in 30 days and stored in the cache folder."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time) -> None:
        self.path = path or cache_folder() / "speeds.json"
        self.clock = clock
        self.measured = clock()  # the oldest of the rates
        known = environment()
        self.machine = {key: known[key] for key in ("cpu", "cores", "torch")}
        self.rates = self._read()

    @property
    def cores(self) -> int:
        return int(self.machine["cores"])

    def seconds(self, job: Job) -> float | None:
        """Time of the whole job if it runs all of its rounds; None if unknown."""
        if isinstance(job, Calculation):
            cores = min(self.cores, len(job.seeds))
            return len(job.seeds) * job.model.products / self.products() / cores
        return self._training(job.experiment)

    def _training(self, experiment: Experiment) -> float | None:
        dataset = display_name(experiment.dataset, DATASETS)
        names = {display_name(model, MODELS) for model in experiment.model}
        if dataset not in DATASET_INFO or not names <= MODELS.keys():
            return None
        cost = mean_cost(experiment)
        if cost is None:
            return None
        known = info_of(experiment)
        rate = self.mean_rate(experiment)
        nodes = training_nodes(experiment)
        cores = min(self.cores, nodes) if experiment.engine.name == "pool" else 1
        rounds, held = experiment.rounds, examples(experiment)
        seen = share_of_clients(experiment) * held  # by the clients of a round
        trained = examples_per_round(experiment) + cost.passes * seen
        tested = experiment.evaluation.samples or known.test
        at_hub = experiment.algorithm.with_hub and experiment.algorithm.models_at == "hub"
        models = 1 if at_hub else nodes
        evaluated = tested * models * len(experiment.evaluation.evaluated_rounds(rounds))
        forward = evaluated + rounds * cost.forward * seen
        averaged = rounds * numbers_averaged(experiment, cost) / self.averaged()
        busy = rounds * trained / rate.trained + forward / rate.evaluated + averaged
        return START_SECONDS + busy / cores

    def mean_rate(self, experiment: Experiment) -> Rate:
        """The rate of all nodes together, each with its own model."""
        dataset, known = display_name(experiment.dataset, DATASETS), info_of(experiment)
        batch, counts = experiment.work.batch_size, assigned_models(experiment)
        names = [specs.text(split.model, "model", MODELS) for split in counts]
        rates = [self.rate(dataset, name, batch, known) for name in names]
        # The times of examples are averaged, and a rate is one over such a time.
        return Rate(
            harmonic_mean([rate.trained for rate in rates], list(counts.values())),
            harmonic_mean([rate.evaluated for rate in rates], list(counts.values())),
        )

    def rate(self, dataset: str, model: str, batch: int, known: DatasetInfo | None = None) -> Rate:
        """The rate of a model, such as `mlp:hidden=8`, on images of a data set.

        Options of the data set, which `known` includes, may change the shape of images.
        """
        known = known or DATASET_INFO[dataset]
        if known.shape != DATASET_INFO[dataset].shape:
            dataset += " " + "x".join(map(str, known.shape))
        return Rate(*self._once(f"{dataset} {model} {batch}", lambda: measure(known, model, batch)))

    def averaged(self) -> float:
        """Numbers per second that one core averages."""
        return self._once("averaging", measure_averaging)[0]

    def products(self) -> float:
        """Multiplications per second of the diffusion model on one core."""
        return self._once("products", measure_products)[0]

    def _once(self, key: str, trial: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        if key not in self.rates:
            with exclusive_torch():  # one thread, as in a worker
                self.rates[key] = trial()
            self._write()
        return self.rates[key]

    def _read(self) -> dict[str, tuple[float, ...]]:
        try:
            saved = json.loads(self.path.read_text())
            age = self.clock() - saved["measured"]  # without one: an earlier version, by wall time
            if saved["machine"] != self.machine or not 0 <= age < MAX_AGE:
                return {}
            self.measured = float(saved["measured"])
            return {key: tuple(map(float, values)) for key, values in saved["rates"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(
                self.path,
                {"machine": self.machine, "measured": self.measured, "rates": self.rates},
            )
        except (OSError, DiskError):
            return  # it will be measured again next time


def examples(experiment: Experiment) -> int:
    """Number of training examples of all nodes."""
    partition = experiment.partition
    if isinstance(partition, BalancedIid) and partition.items is not None:
        return experiment.nodes * partition.items
    known = info_of(experiment)
    if isinstance(partition, ByGroup) and known.groups is not None:
        return known.train * experiment.nodes // known.groups  # groups differ in size
    return int(getattr(experiment.dataset, "train", None) or known.train)


def info_of(experiment: Experiment) -> DatasetInfo:
    known = dataset_info(experiment.dataset)
    assert known is not None  # `_training` has checked
    return known


def training_nodes(experiment: Experiment) -> int:
    return 1 if experiment.pooled else experiment.nodes


def examples_per_round(experiment: Experiment) -> float:
    """Examples that all nodes train on in a round, counting repetitions."""
    work = experiment.work
    if work.steps is not None:
        return float(training_nodes(experiment) * work.steps * work.batch_size)
    return share_of_clients(experiment) * (work.epochs or 1) * examples(experiment)


def share_of_clients(experiment: Experiment) -> float:
    """The share of the nodes that take part in a round: 1 unless some are selected."""
    return experiment.algorithm.participation(experiment.nodes)


def assigned_models(experiment: Experiment) -> Counter[Split]:
    """The models of the nodes, which take them in turn, and how many nodes have each."""
    given: Sequence[Any] = experiment.model  # studies use models of the package
    splits = [model if isinstance(model, Split) else Split(model) for model in given]
    return Counter(splits[node % len(splits)] for node in range(training_nodes(experiment)))


def parameters(experiment: Experiment) -> int:
    """Number of parameters of a node's model, on average, without loading its data."""
    counts = assigned_models(experiment)
    sizes = [dimensions(experiment, split).layout.size for split in counts]
    return round(fmean(sizes, counts.values()))


def dimensions(experiment: Experiment, split: Split) -> Dimensions:
    nodes = experiment.nodes + experiment.algorithm.with_hub
    return _dimensions(split, info_of(experiment), nodes)


@cache
def _dimensions(split: Split, known: DatasetInfo, nodes: int) -> Dimensions:
    model: Any = split.model
    with torch.device("meta"):  # shapes without values, so a large model costs nothing
        module = model.build(known.shape, known.classes)
    return Dimensions.of(module, nodes, known.classes, known.shape, split.head_modules)


def numbers_averaged(experiment: Experiment, cost: Cost) -> float:
    """Numbers that all nodes average in a round."""
    if experiment.pooled:
        return 0.0
    topology: Any = experiment.topology  # studies use topologies of the package
    links = _links(topology, experiment.nodes)
    models = share_of_clients(experiment) * (experiment.nodes + links)
    whole = isinstance(experiment.topology, Complete) and experiment.faults == Faults()
    if whole and cost.shared_mean:
        models = 2 * experiment.nodes  # each worker computes the mean of all once
    return float(cost.vectors * models * parameters(experiment))


@cache
def _links(topology: Any, nodes: int) -> int:
    """Directed links of a graph with seed 0; other seeds give about as many."""
    return int(degrees(topology.build(nodes, 0)).sum())


def mean_cost(experiment: Experiment) -> Cost | None:
    """Mean cost of a round for a node; None if the algorithm does not state its cost."""
    examples_per_node = examples(experiment) / experiment.nodes
    algorithm, rounds = experiment.algorithm, experiment.rounds
    counts = assigned_models(experiment)
    costs = [
        _mean_cost(algorithm, rounds, dimensions(experiment, split), examples_per_node)
        for split in counts
    ]
    return _mean(costs, list(counts.values()))


@cache
def _mean_cost(
    algorithm: Algorithm[Any], rounds: int, dimensions: Dimensions, examples: float
) -> Cost | None:
    return _mean([algorithm.cost(round, dimensions, examples) for round in range(rounds)])


def _mean(costs: Sequence[Cost | None], weights: Sequence[int] | None = None) -> Cost | None:
    """The mean of costs; None if one of them is unknown."""
    stated = [cost for cost in costs if cost is not None]
    if len(stated) < len(costs):
        return None

    def mean(name: str) -> float:
        return fmean([getattr(cost, name) for cost in stated], weights)

    return Cost(
        mean("vectors"),
        mean("passes"),
        mean("forward"),
        mean("state"),
        shared_mean=all(cost.shared_mean for cost in stated),
    )


def measure(known: DatasetInfo, name: str, batch: int) -> Rate:
    """Train and evaluate a model on random images for a moment."""
    shape, classes = known.shape, known.classes
    options = specs.parse(name, "model", MODELS)
    architecture = Architecture(name, partial(options.build, shape, classes), "torch")
    model = architecture.build_flat()
    model.load(*architecture.initial(0, 0, gain=1.0))
    most = max(TRIAL_EXAMPLES, batch)
    images = Examples(torch.randn(most, *shape), torch.arange(most) % classes)
    work = LocalSGD(epochs=1, batch_size=batch, lr=0.001, momentum=0.9)

    def train_on(count: int) -> None:
        train(model, work, images.chunks(torch.arange(count), batch))

    train_on(batch)  # the first time is slow
    start = process_time()
    train_on(batch)
    fitting = int(SECONDS / TRIALS / max(process_time() - start, 1e-9))  # batches of one trial
    count = min(max(1, fitting) * batch, most)
    tested = images.subset(torch.arange(count))
    trained = _per_second(lambda: train_on(count))
    evaluated = _per_second(lambda: score(model, tested))
    return Rate(count * trained, count * evaluated)


def measure_averaging() -> tuple[float]:
    models = torch.zeros(AVERAGED_SHAPE)
    weights = [1 / len(models)] * len(models)
    return (models.numel() * _per_second(lambda: weighted_mean(models, weights)),)


def measure_products() -> tuple[float]:
    """The diffusion model on a graph like those of P4's Fig. 8."""
    graph = ErdosRenyi(degree=64).build(1024, 0)
    products = int(degrees(graph).sum() + graph.nodes) * 200
    return (products * _per_second(lambda: diffuse(graph, parameters=200, rounds=1)),)


def _per_second(work: Callable[[], object]) -> float:
    """How often a function can be called in a second of processor time.

    On a busy machine, a process waits for other programs: this time does not count. They also slow
    down caches and memory, so the fastest of a few trials counts.
    """
    work()
    best = 0.0
    for _ in range(TRIALS):
        start, times = process_time(), 0
        while (spent := process_time() - start) < SECONDS / TRIALS:
            work()
            times += 1
        best = max(best, times / spent)
    return best
