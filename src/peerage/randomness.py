"""Random streams: one for each (seed, purpose, index...), independent of who asks first.

Nothing draws from a global generator. A stream depends on its name only, so compared algorithms
see the same graph, partition, initial models and batch order, every engine draws the same numbers,
and a checkpoint has no generator state to save.
"""

from hashlib import blake2b

import numpy as np
import torch


def stream_seed(seed: int, purpose: str, *index: int) -> int:
    """A 63-bit number that names one stream.

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
