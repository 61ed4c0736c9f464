"""GN-LeNet with its convolutions in channels-last memory, compared with PyTorch's default order."""

from collections.abc import Callable
from time import process_time

import jobs
import torch
import torch.nn.functional as F
from ratios import alternate

from peerage.models import MODELS

NAME = "P3 GN-LeNet, batches of 8"
BOUND = 1.0
STEPS = 60  # per measurement, about half a second


def measure(repeats: int) -> dict[str, float]:
    """The median ratio of processor seconds of a training step, channels-last / default."""
    default, channels_last = (
        _step(form) for form in (torch.contiguous_format, torch.channels_last)
    )
    default(), channels_last()  # warm up
    return alternate(default, channels_last, repeats)


def _step(form: torch.memory_format) -> Callable[[], float]:
    """A function that returns the seconds of forward and backward passes in this format."""
    torch.manual_seed(0)
    job = jobs.GN_LENET
    model = MODELS[job.model]().build(job.shape, jobs.CLASSES).to(memory_format=form)
    x = torch.randn(job.local.batch_size, *job.shape).contiguous(memory_format=form)
    y = torch.arange(len(x)) % jobs.CLASSES
    parameters = list(model.parameters())

    def seconds() -> float:
        start = process_time()
        for _ in range(STEPS):
            torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
        return (process_time() - start) / STEPS

    return seconds
