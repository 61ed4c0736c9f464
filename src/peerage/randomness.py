"""Random streams: one for each (seed, purpose, index...), independent of the order of use.

Nothing draws from a global generator. A stream depends only on its name, so all algorithms get the
same graph, partition, initial models and batch order. Every engine draws the same numbers, and a
checkpoint has no generator state to save.
"""

from hashlib import blake2b

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *index: int) -> int:
    """The 63-bit seed of one stream.

    >>> stream_seed(0, "batches", 3, 1) == stream_seed(0, "batches", 3, 1)
    True
    >>> stream_seed(0, "batches", 3, 1) == stream_seed(0, "batches", 1, 3)
    False
    """
    name = "/".join([str(seed), purpose, *map(str, index)])
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def numpy_stream(seed: int, purpose: str, *index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(stream_seed(seed, purpose, *index)))


def torch_stream(seed: int, purpose: str, *index: int) -> torch.Generator:
    return torch.Generator().manual_seed(stream_seed(seed, purpose, *index))
