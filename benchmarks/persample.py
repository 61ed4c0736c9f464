"""The time of squared per-example gradients, as a multiple of one ordinary gradient of the batch.

Run `python benchmarks/persample.py`: batches of 100, one thread, medians of interleaved runs, one
JSON object on standard output. Methods: `ours` is `sum_squared_gradients`, `vmap` is `torch.func`
for every network, `backpack` is BackPACK's SumGradSquared where it is installed and has a rule.

Two runs with torch 2.13.0 and BackPACK 1.7.1, on two shared (and busy) cores of an AVX-512 Xeon:

| network, memory format     | ours       | vmap         | backpack    |
|----------------------------|------------|--------------|-------------|
| mnist-cnn, contiguous      | 1.20, 1.25 | 1.78, 1.85   | 2.12, 2.13  |
| mnist-cnn, channels_last   | 1.22, 1.30 | 2.11, 2.25   | 2.10, 2.40  |
| fashion-cnn, contiguous    | 1.14, 1.00 | 4.02, 5.54   | 3.70, 3.43  |
| fashion-cnn, channels_last | 1.35, 1.33 | 10.33, 9.84  | 7.65, 7.24  |
| cifar-cnn, contiguous      | 1.11, 1.05 | 1.86, 1.69   | 3.89, 3.83  |
| cifar-cnn, channels_last   | 1.38, 1.32 | 3.16, 3.06   | 7.99, 7.94  |
| gn-lenet, contiguous       | 1.64, 1.58 | 1.71, 1.68   | no rule     |
| gn-lenet, channels_last    | 2.48, 2.40 | 2.62, 2.54   | no rule     |
| hwa-mlp                    | 1.21, 1.32 | 27.44, 53.62 | 2.95, 5.72  |
| digits-mlp                 | 1.60, 1.62 | 7.43, 16.75  | 4.79, 14.85 |

The closed forms are the fastest wherever they apply, so BackPACK is not a dependency. (For
gn-lenet, ours and vmap are the same method; the difference between them is noise.)
"""

import json
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

from peerage.models import MODELS
from peerage.work.persample import squares_by_vmap, sum_squared_gradients

try:
    import backpack
    from backpack.extensions import SumGradSquared
except ImportError:
    backpack = None

BATCH, SEED, REPETITIONS = 100, 0, 21
SHAPES = {
    "mnist-cnn": (1, 28, 28),
    "fashion-cnn": (1, 28, 28),
    "cifar-cnn": (3, 32, 32),
    "gn-lenet": (3, 32, 32),
    "hwa-mlp": (1, 28, 28),
    "digits-mlp": (1, 8, 8),
}
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

Routes = dict[str, Callable[[], object]]


def routes(name: str, memory_format: torch.memory_format) -> Routes:
    def network() -> nn.Module:
        torch.manual_seed(SEED)
        return MODELS[name]().build(SHAPES[name], 10).eval().to(memory_format=memory_format)

    module = network()
    parameters = list(module.parameters())
    x = torch.randn(BATCH, *SHAPES[name]).to(memory_format=memory_format)
    y = torch.randint(10, (BATCH,))
    compared: Routes = {
        "gradient": lambda: torch.autograd.grad(F.cross_entropy(module(x), y), parameters),
        "ours": lambda: sum_squared_gradients(module, F.cross_entropy, x, y),
        "vmap": lambda: squares_by_vmap(module, F.cross_entropy, x, y),
    }
    if backpack is not None and name != "gn-lenet":  # it has no rule for GroupNorm
        extended = backpack.extend(network())
        loss = backpack.extend(nn.CrossEntropyLoss(reduction="sum"))

        def by_backpack() -> None:
            extended.zero_grad()
            with backpack.backpack(SumGradSquared()):
                loss(extended(x), y).backward()

        compared["backpack"] = by_backpack
    return compared


def medians(compared: Routes) -> dict[str, float]:
    """Median seconds of each method; they alternate, so that noise affects all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for _ in range(REPETITIONS):
        for name, run in compared.items():
            start = perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def compare(name: str, memory_format: torch.memory_format) -> dict[str, float]:
    median = medians(routes(name, memory_format))
    gradient = median.pop("gradient")
    ratios = {route: round(seconds / gradient, 2) for route, seconds in median.items()}
    return {"gradient_ms": round(1000 * gradient, 2), **ratios}


def main() -> None:
    torch.set_num_threads(1)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if backpack is None:
        print(
            "BackPACK is not installed, so it is not compared; "
            "pip install --no-deps backpack-for-pytorch einops unfoldNd",
            file=sys.stderr,
        )
    else:
        # BackPACK hooks the first layer, whose input needs no gradient, and PyTorch warns.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        versions["backpack"] = metadata.version("backpack-for-pytorch")
    ratios = {
        f"{name}, {label}": compare(name, memory_format)
        for name in SHAPES
        for label, memory_format in FORMATS.items()
        if "cnn" in name or "lenet" in name or label == "contiguous"
    }
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "threads": 1}
    settings = {"batch": BATCH, "seed": SEED, "repetitions": REPETITIONS}
    print(json.dumps({**machine, "versions": versions, **settings, "ratios": ratios}, indent=2))


if __name__ == "__main__":
    main()
