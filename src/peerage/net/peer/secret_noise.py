"""The noise of a real peer: Gaussian, from a secret key, on a grid.

Other peers know the seed of the run. A generator for simulations, such as PyTorch's, uses so few
bits of its seed that trying all of them takes minutes. So a peer takes 256 bits from the operating
system when its process starts, and expands them with ChaCha20. It never stores them, and every draw
replaces the key by the first bytes of its own stream. No draw can be repeated, neither by a round
that runs again nor by a restarted peer, and a key that is stolen later does not tell earlier noise.

Noise in floating point has gaps: which numbers can occur depends on the number to which noise is
added (Mironov, 2012, doi:10.1145/2382196.2382264; Holohan and Braghin, 2021, arXiv:2107.10138).
Here all numbers are multiples of a step g, a power of two of at most sigma / 2^20. The input x is
rounded towards zero, so no vector gets longer. The noise N is rounded to the nearest multiple, and
the sum is exact. As x is on the grid, x + round(N) = round(x + N): a released number is a function
of the Gaussian mechanism's real-valued result, and the same numbers can occur for all inputs.
"""

import math
import os
from collections.abc import Callable

import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

KEY_BYTES = 32
NONCE = bytes(16)  # each key is used for one stream only
GRID_BITS = 20  # the grid has at least 2^20 steps per standard deviation
BLOCK = 1 << 15  # entries drawn at a time, even; their float64 numbers fit into the cache
MIN_EXPONENT = -1022  # of a normal float64


class SecretNoise:
    """Adds Gaussian noise from a key that only this process knows."""

    def __init__(self, entropy: Callable[[int], bytes] = os.urandom) -> None:
        self._entropy = entropy
        self._key, self._process = self._new_key()

    def __repr__(self) -> str:
        return "SecretNoise()"  # without the key

    def __reduce__(self) -> str:
        raise TypeError("secret noise stays in its process; create another source of noise")

    def add_noise(self, tensor: Tensor, sigma: float) -> Tensor:
        """Return a new tensor with independent noise of this deviation on every entry."""
        result = torch.empty_like(tensor)
        if sigma == 0:
            return result.copy_(tensor)
        grid = grid_step(sigma)
        flat = tensor.reshape(-1)
        noisy = torch.empty(len(flat), dtype=tensor.dtype)
        for start in range(0, len(flat), BLOCK):
            x = flat[start : start + BLOCK].double()
            # The quotients are exact, as the grid is a power of two.
            sums = x.div(grid).trunc_()
            sums += self._normal(len(x)).mul_(sigma / grid).round_()
            noisy[start : start + BLOCK] = sums.mul_(grid)
        return result.copy_(noisy.view(tensor.shape))

    def _normal(self, count: int) -> Tensor:
        """Standard Gaussian numbers in float64, by Box and Muller from 63-bit uniform ones."""
        half = (count + 1) // 2
        words = torch.frombuffer(self._bytes(16 * half), dtype=torch.int64)
        # Uniform in (0, 1]: numbers near 0, which give the largest results, keep all their bits.
        u = words[:half].double().abs_().mul_(2.0**-63).clamp_(min=2.0**-64)
        radius = u.log_().mul_(-2.0).sqrt_()
        angle = words[half:].double().mul_(math.pi * 2.0**-63)
        return torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)])[:count]

    def _bytes(self, count: int) -> bytearray:
        """Bytes of a stream that is used once; its first bytes are the next key."""
        if os.getpid() != self._process:  # a fork, whose parent draws from the same key
            self._key, self._process = self._new_key()
        stream = Cipher(ChaCha20(self._key, NONCE), mode=None).encryptor()
        self._key = stream.update(bytes(KEY_BYTES))
        return bytearray(stream.update(bytes(count)))

    def _new_key(self) -> tuple[bytes, int]:
        """A key, and the process that it belongs to."""
        return self._entropy(KEY_BYTES), os.getpid()


def grid_step(sigma: float) -> float:
    """The distance between the numbers that noise of this deviation can give.

    >>> grid_step(1.0) == 2.0**-20 and grid_step(0.99) == 2.0**-21
    True
    """
    exponent = math.frexp(sigma)[1] - 1  # 2^exponent <= sigma
    return math.ldexp(1.0, max(exponent - GRID_BITS, MIN_EXPONENT))
