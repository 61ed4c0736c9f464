"""How fast this machine trains and judges, from a short trial, and what a job will take."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from peerage.algorithms.dechw import ONLINE, DecHW
from peerage.algorithms.desa import DESA
from peerage.data import cache_folder
from peerage.data.datasets import DATASETS
from peerage.environment import environment
from peerage.errors import DiskError
from peerage.evaluation import score
from peerage.experiment import display_name
from peerage.initialise import Architecture
from peerage.local import Examples
from peerage.models import MODELS
from peerage.records import write_json
from peerage.reproduce.study import Job
from peerage.training import LocalSGD, train

SECONDS = 0.3  # of every measurement
SHAPES = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
}
SIZES = {"digits": 1437, "mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000}
TESTS = {"digits": 360}
EVALUATED = 10_000  # test examples of the other data sets
SAMPLE_PASS = 1.4  # a pass over single examples, measured in the study p0-curvature
START = 0.5  # seconds until the workers of a run are at work


@dataclass(frozen=True)
class Rate:
    """Examples per second on one core."""

    trained: float
    judged: float


class Speeds:
    """Measured once on a machine and kept in the cache folder."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_folder() / "speeds.json"
        known = environment()
        self.machine = {key: known[key] for key in ("cpu", "cores", "torch")}
        self.rates = self._read()

    def seconds(self, job: Job) -> float:
        """What the whole job takes, if it goes through all of its rounds."""
        experiment = job.experiment
        dataset, work = display_name(experiment.dataset, DATASETS), experiment.work
        examples = getattr(experiment.dataset, "train", None) or SIZES[dataset]
        rate = self.rate(dataset, display_name(experiment.model[0], MODELS), work.batch_size)
        passes = (work.epochs or 1) + extra_passes(job)
        tested = experiment.evaluation.samples or TESTS.get(dataset, EVALUATED)
        judged = tested * experiment.nodes / experiment.evaluation.every
        cores = self.machine["cores"] if experiment.engine.name == "pool" else 1
        a_round = (examples * passes / rate.trained + judged / rate.judged) / cores
        once = synthesis_passes(job, examples) / rate.judged / cores
        return START + once + experiment.rounds * a_round

    def rate(self, dataset: str, model: str, batch: int) -> Rate:
        key = f"{dataset} {model} {batch}"
        if key not in self.rates:
            self.rates[key] = measure(dataset, model, batch)
            self._write()
        return self.rates[key]

    def _read(self) -> dict[str, Rate]:
        try:
            saved = json.loads(self.path.read_text())
            if saved["machine"] != self.machine:
                return {}
            return {key: Rate(*values) for key, values in saved["rates"].items()}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write(self) -> None:
        rates = {key: [rate.trained, rate.judged] for key, rate in self.rates.items()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, {"machine": self.machine, "rates": rates})
        except (OSError, DiskError):
            return  # then it is measured again next time


def synthesis_passes(job: Job, examples: int) -> float:
    """Examples that DESA sends through random networks, which are about as large as the model."""
    algorithm = job.experiment.algorithm
    if not isinstance(algorithm, DESA):
        return 0.0
    made = job.experiment.nodes * algorithm.ipc * 10  # of ten classes, forwards and backwards
    return float(algorithm.iterations * (examples + 3 * made))


def extra_passes(job: Job) -> float:
    """Passes over the data beside the epochs of training, in units of one of these."""
    algorithm, rounds = job.experiment.algorithm, job.experiment.rounds
    if isinstance(algorithm, DESA):
        return float(job.experiment.work.epochs or 1)  # as many anchors as own examples
    if not isinstance(algorithm, DecHW) or algorithm.curvature == ONLINE:
        return 0.0
    share = min(1.0, (algorithm.theta or rounds) / rounds)
    return share * (SAMPLE_PASS if algorithm.curvature == "sample" else 1.0)


def measure(dataset: str, model: str, batch: int) -> Rate:
    """Train and judge random images for a moment, with one thread as the workers do."""
    shape = SHAPES[dataset]
    architecture = Architecture(model, partial(MODELS[model]().build, shape, 10), "torch")
    bench = architecture.workbench()
    bench.load(*architecture.initial(0, 0, gain=1.0))
    examples = Examples(torch.randn(500, *shape), torch.arange(500) % 10)
    work = LocalSGD(epochs=1, batch_size=batch, lr=0.001, momentum=0.9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        everything = torch.arange(500)
        trained = _rate(lambda: train(bench, work, examples.chunks(everything, batch)))
        judged = _rate(lambda: score(bench, examples))
    finally:
        torch.set_num_threads(threads)
    return Rate(trained, judged)


def _rate(work: Callable[[], object]) -> float:
    """Examples per second of something that goes over 500 of them."""
    work()
    start, times = perf_counter(), 0
    while (spent := perf_counter() - start) < SECONDS:
        work()
        times += 1
    return 500 * times / spent
