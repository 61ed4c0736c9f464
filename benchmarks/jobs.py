"""The jobs of the benchmarks, on random data of the real shapes, and functions that run them."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

from peerage import EL, DecAvg, Experiment, Facade, LocalSGD, in_memory
from peerage.algorithm import Algorithm
from peerage.data import Dataset
from peerage.engine.lockstep import Lockstep
from peerage.engine.pool import PoolTeam, keep_freed_memory
from peerage.engine.prepare import prepare
from peerage.models import MODELS
from peerage.vectors import FlatModel
from peerage.work.context import Examples
from peerage.work.training import train

CLASSES = 10


@dataclass(frozen=True)
class Job:
    """A model, a number of nodes with equal data, and their local training."""

    name: str
    model: str
    shape: tuple[int, ...]
    nodes: int
    examples: int  # per node
    local: LocalSGD
    rounds: int  # per measurement, for a few seconds

    def dataset(self, nodes: int | None = None) -> Dataset:
        count = (nodes or self.nodes) * self.examples
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(count, *self.shape, generator=generator)
        y = torch.arange(count) % CLASSES
        return in_memory(x, y, x[:200], y[:200], name="random")

    @property
    def work(self) -> int:
        """Training examples of all nodes per round."""
        if self.local.steps is not None:
            return self.nodes * self.local.steps * self.local.batch_size
        return self.nodes * self.examples * (self.local.epochs or 0)


P0 = Job(
    "P0 MNIST CNN, 50 nodes, 1 epoch of batches of 100",
    "mnist-cnn",
    (1, 28, 28),
    50,
    1200,
    LocalSGD(epochs=1, batch_size=100, lr=0.001, momentum=0.5),
    rounds=1,
)
GN_LENET = Job(
    "P3 GN-LeNet, EL on 32 nodes, 10 steps of 8",
    "gn-lenet",
    (3, 32, 32),
    32,
    500,
    LocalSGD(steps=10, batch_size=8, lr=0.01),
    rounds=2,
)
MLP = Job(
    "P4 MLP, 64 nodes, 8 steps of 16",
    "gain-mlp",
    (1, 28, 28),
    64,
    512,
    LocalSGD(steps=8, batch_size=16, lr=0.001, momentum=0.5),
    rounds=6,
)
HUB = Job(
    "P2 MLP, HWA with 10 clients, 5 epochs of batches of 32",
    "hwa-mlp",
    (1, 28, 28),
    10,
    6000,
    LocalSGD(epochs=5, batch_size=32, lr=0.001, momentum=0.9, weight_decay=0.001),
    rounds=1,
)


def experiment(job: Job, dataset: Dataset, algorithm: Algorithm | None = None) -> Experiment:
    algorithm = algorithm or DecAvg()
    topology = "dynamic-regular:k=4" if isinstance(algorithm, EL | Facade) else "regular:k=4"
    graph = {} if algorithm.with_hub else {"topology": topology}
    return Experiment(
        algorithm=algorithm,
        dataset=dataset,
        model=job.model,
        nodes=len(dataset.train_y) // job.examples,
        partition="iid",
        rounds=10_000,
        local=job.local,
        **graph,
    )


class Rounds:
    """Whole rounds of Peerage, without evaluation; each call of `rate` measures some."""

    def __init__(
        self, job: Job, dataset: Dataset, workers: int, algorithm=None, team=PoolTeam
    ) -> None:
        self.job, self.done = job, 0
        world = prepare(experiment(job, dataset, algorithm))
        self.engine = Lockstep(world, team(world, workers))
        self.engine.round(0, False)  # warm up

    def rate(self) -> float:
        """Training examples per second."""
        start = perf_counter()
        for _ in range(self.job.rounds):
            self.done += 1
            self.engine.round(self.done, False)
        return self.job.rounds * self.job.work / (perf_counter() - start)

    def close(self) -> None:
        self.engine.team.close()


def kernel_rate(job: Job, dataset: Dataset, workers: int, seconds: float) -> float:
    """Examples per second of forward, backward and update alone, in all workers in parallel."""
    context = multiprocessing.get_context("fork")
    queue, barrier = context.SimpleQueue(), context.Barrier(workers)
    processes = [
        context.Process(target=_kernel, args=(job, dataset, barrier, queue, seconds))
        for _ in range(workers)
    ]
    for process in processes:
        process.start()
    rates = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return sum(rates)


def _kernel(job: Job, dataset: Dataset, barrier, queue, seconds: float) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()
    model = FlatModel(MODELS[job.model]().build(job.shape, CLASSES))
    data = Examples(dataset.train_x, dataset.train_y)
    size = job.local.batch_size
    batches = list(data.chunks(torch.arange(min(job.examples, 1200) // size * size), size))

    def train_epoch() -> int:
        return train(model, job.local, iter(batches)).examples

    train_epoch()
    barrier.wait()
    start, count = perf_counter(), 0
    while perf_counter() - start < seconds:
        count += train_epoch()
    queue.put(count / (perf_counter() - start))


def naive_rate(job: Job, dataset: Dataset) -> float:
    """Examples per second of a simple loop: a DataLoader per node, NCHW, state_dict averaging."""
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    rounds = naive_rounds(job, dataset)
    next(rounds)
    start = perf_counter()
    for _ in range(job.rounds):
        next(rounds)
    torch.set_num_threads(1)
    return job.rounds * job.work / (perf_counter() - start)


def naive_rounds(job: Job, dataset: Dataset) -> Iterator[None]:
    """Run one round per iteration."""
    x = dataset.train_x.contiguous()
    models = [MODELS[job.model]().build(job.shape, CLASSES) for _ in range(job.nodes)]
    loaders = [
        torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x[i :: job.nodes], dataset.train_y[i :: job.nodes]),
            batch_size=job.local.batch_size,
            shuffle=True,
        )
        for i in range(job.nodes)
    ]
    neighbours = [[(i + j) % job.nodes for j in (-2, -1, 0, 1, 2)] for i in range(job.nodes)]
    while True:
        for model, loader in zip(models, loaders, strict=True):
            _train_naively(model, loader, job.local)
        states = [
            {key: value.clone() for key, value in model.state_dict().items()} for model in models
        ]
        for model, near in zip(models, neighbours, strict=True):
            mean = {
                key: sum(states[j][key] for j in near) / len(near) for key in model.state_dict()
            }
            model.load_state_dict(mean)
        yield


def _train_naively(model: nn.Module, loader, local: LocalSGD) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=local.lr, momentum=local.momentum)
    model.train()
    steps = 0
    for _ in range(local.epochs or 1):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps == local.steps:
                return
