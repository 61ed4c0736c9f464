"""The cost of secret noise: seconds of one message's noise / those of a node's round.

Run `python benchmarks/noise.py`. The round is that of a node in P0 (one epoch of 1200 examples in
batches of 100, MNIST CNN) without waiting and transport, the shortest round that P0 has. The
message has all parameters, and is clipped as well. One thread.
"""

import json
from time import perf_counter

import jobs
import torch
from ratios import alternate

from peerage.models import MODELS
from peerage.net.peer.secret_noise import SecretNoise
from peerage.privacy import Noise, perturb
from peerage.vectors import FlatModel
from peerage.work.context import Examples
from peerage.work.training import train

BOUND = 0.1
DRAWS = 10  # messages per measurement


def measure(repeats: int) -> dict[str, float]:
    """Seconds of a round of training, and of the noise on one message."""
    job = jobs.P0
    dataset = job.dataset(nodes=1)
    model = FlatModel(MODELS[job.model]().build(job.shape, jobs.CLASSES))
    data = Examples(dataset.train_x, dataset.train_y)
    batches = list(data.chunks(torch.arange(job.examples), job.local.batch_size))
    source, noise = SecretNoise(), Noise(sigma=0.1, clip=1.0)
    payload = {"x": model.params.detach().clone()}
    references = {"x": torch.zeros_like(payload["x"])}

    def seconds_of_training() -> float:
        start = perf_counter()
        train(model, job.local, iter(batches))
        return perf_counter() - start

    def seconds_of_noise() -> float:
        start = perf_counter()
        for _ in range(DRAWS):
            perturb(noise, payload, references, source)
        return (perf_counter() - start) / DRAWS

    seconds_of_training()  # warm up
    seconds_of_noise()
    return alternate(seconds_of_training, seconds_of_noise, repeats)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(repeats=5), indent=2))
