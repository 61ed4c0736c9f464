"""Mutual learning of many models on one node, compared with separate passes of each model."""

import multiprocessing
import resource
from time import process_time

import torch
import torch.nn.functional as F
from ratios import summary

from peerage import LocalSGD, MutualKL, Weights
from peerage.engine.pool import keep_freed_memory
from peerage.models import MODELS
from peerage.vectors import FlatModel
from peerage.work.context import Examples, LocalContext
from peerage.work.together import TrainTogether

NAME = "26 models (CIFAR CNN, GN-LeNet), batches of 64"
BOUND = 1.15
SHAPE, CLASSES, COPIES, BATCHES = (3, 32, 32), 10, 13, 3
WORK = LocalSGD(steps=BATCHES, batch_size=64, lr=0.001, momentum=0.9, weight_decay=5e-4)


def measure(repeats: int) -> dict[str, float]:
    """The median ratio of processor seconds per batch, and the peak memory of a new process."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_measure, args=(repeats, queue))
    process.start()
    pairs, before, peak = queue.get()
    process.join()
    return {**summary(pairs), "gigabytes": (peak - before) / 1e9}


def _measure(repeats: int, queue) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as in the workers of a pool
    torch.manual_seed(0)
    count = WORK.batch_size * BATCHES
    x, y = torch.randn(count, *SHAPE), torch.arange(count) % CLASSES
    models = {
        name: FlatModel(MODELS[name]().build(SHAPE, CLASSES)) for name in ("cifar-cnn", "gn-lenet")
    }
    local = LocalContext(
        node=0,
        round=0,
        seed=0,
        data=Examples(x, y),
        indices=torch.arange(count),
        architecture="cifar-cnn",
        models=models,
        persistent_tensors={},
        label_proportions=torch.full((CLASSES,), 1 / CLASSES),
    )
    names = list(models) * COPIES
    pupils = {
        key: Weights(models[name].params.clone(), models[name].buffers, name)
        for key, name in enumerate(names)
    }
    before = _peak_memory()

    def separate() -> float:
        start = process_time()
        for x, y in WORK.batches(local):
            for name in names:
                loss = F.cross_entropy(models[name].module(x), y)
                torch.autograd.grad(loss, models[name].tensors)
        return (process_time() - start) / BATCHES

    def mutual() -> float:
        start = process_time()
        TrainTogether(WORK, pupils, MutualKL(gamma=0.5, alpha=0.5)).run(local)
        return (process_time() - start) / BATCHES

    separate(), mutual()  # warm up
    queue.put(([(separate(), mutual()) for _ in range(repeats)], before, _peak_memory()))


def _peak_memory() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
