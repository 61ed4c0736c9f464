"""Mutual learning of many models on one node: time beside separate passes, and memory."""

import multiprocessing
import resource
from time import process_time

import torch
import torch.nn.functional as F
from ratios import summary

from peerage import LocalSGD, MutualKL, Weights, specs
from peerage.engine.pool import keep_freed_memory
from peerage.models import MIXES, MODELS
from peerage.vectors import FlatModel
from peerage.work.context import Examples, LocalContext
from peerage.work.together import TrainTogether

NAME = "26 models (CIFAR CNN, GN-LeNet), batches of 64"
BOUND = 1.15
PARTICIPANTS = 26  # 25 senders and the aggregator
PAIR, FAMILY = ("cifar-cnn", "gn-lenet"), MIXES["h2-cnn"].members
MEMORY_NAME, MEMORY_BOUND = f"{PARTICIPANTS} models of P1's mode H2, batches of 64", 1.5
SHAPE, CLASSES, BATCHES = (3, 32, 32), 10, 3
WORK = LocalSGD(steps=BATCHES, batch_size=64, lr=0.001, momentum=0.9, weight_decay=5e-4)


def measure(repeats: int) -> dict[str, float]:
    """The median ratio of processor seconds per batch, and the peak memory of a new process."""
    pairs, before, peak = _in_process("fork", _compare, repeats)
    return {**summary(pairs), "gigabytes": (peak - before) / 1e9}


def hub_memory(repeats: int) -> dict[str, float]:
    """The peak memory of a new process, with Python, torch and the models that it has received."""
    gigabytes = _in_process("spawn", _train_family) / 1e9
    return {"ratio": gigabytes, "gigabytes": gigabytes}


def _in_process(method: str, target, *arguments):
    """What `target` puts into the queue that it gets, in a process of its own."""
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=target, args=(*arguments, queue))
    process.start()
    found = queue.get()
    process.join()
    return found


def _participants(names: tuple[str, ...]) -> tuple[LocalContext, dict[int, Weights]]:
    """An aggregator with random images, and the models of all participants."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as in the workers of a pool
    torch.manual_seed(0)
    count = WORK.batch_size * BATCHES
    x, y = torch.randn(count, *SHAPE), torch.arange(count) % CLASSES
    models = {
        name: FlatModel(specs.parse(name, "model", MODELS).build(SHAPE, CLASSES)) for name in names
    }
    local = LocalContext(
        node=0,
        round=0,
        seed=0,
        data=Examples(x, y),
        indices=torch.arange(count),
        architecture=names[0],
        models=models,
        persistent_tensors={},
        label_proportions=torch.full((CLASSES,), 1 / CLASSES),
    )
    turns = [names[key % len(names)] for key in range(PARTICIPANTS)]
    pupils = {
        key: Weights(models[name].params.clone(), models[name].buffers, name)
        for key, name in enumerate(turns)
    }
    return local, pupils


def _train_family(queue) -> None:
    local, pupils = _participants(FAMILY)
    TrainTogether(WORK, pupils, MutualKL(gamma=0.5, alpha=0.5)).run(local)
    queue.put(_peak_memory())


def _compare(repeats: int, queue) -> None:
    local, pupils = _participants(PAIR)
    models, before = local.models, _peak_memory()

    def separate() -> float:
        start = process_time()
        for x, y in WORK.batches(local):
            for pupil in pupils.values():
                model = models[pupil.architecture]
                loss = F.cross_entropy(model.module(x), y)
                torch.autograd.grad(loss, model.tensors)
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
