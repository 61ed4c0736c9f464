"""Quantisation of float32 tensors to int8, in blocks of consecutive values with one scale each.

A block with the largest magnitude m has the scale s of about m / 127. A value x is sent as the
integer q nearest to x / s, ties to even, and restored as q s. The error is at most s / 2: scales
have 17 significant bits and q has 7, so that their product is exact in float32.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256  # values with one scale; smaller tensors are not quantised
STEPS = 127  # the largest integer
UNUSED_BITS = 0x7F  # the last 7 bits of a scale are 0
ROWS = 1 << 12  # blocks that are divided at a time, which bounds the memory for float64
# The largest scale, of which 127 times are still finite.
LARGEST = torch.tensor(torch.finfo(torch.float32).max / STEPS).view(torch.int32) & ~UNUSED_BITS
MAX_SCALE = float(LARGEST.view(torch.float32))


def num_blocks(count: int) -> int:
    """The number of blocks, and of scales, of a tensor with this number of values.

    >>> num_blocks(256), num_blocks(257)
    (1, 2)
    """
    return -(-count // BLOCK)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """The values of a float32 tensor as int8, of the same shape, and the scales, [blocks].

    The scale of a block with NaN or infinity is NaN, so that a recipient rejects it.
    """
    flat = x.detach().reshape(-1)
    blocks = num_blocks(len(flat))
    rows = pad(flat, (0, blocks * BLOCK - len(flat))).view(blocks, BLOCK)
    scales = _scales(rows)
    divisors = torch.where(scales > 0, scales, 1.0).double()[:, None]  # in a block of zeros, 1
    values = torch.empty_like(rows, dtype=torch.int8)
    for begin in range(0, blocks, ROWS):
        part = slice(begin, begin + ROWS)
        # In float64, no quotient becomes a tie by rounding. NaN has no int8; its scale says so.
        quotients = rows[part].double().nan_to_num_() / divisors[part]
        values[part] = quotients.round_().clamp_(-STEPS, STEPS)
    return values.view(-1)[: len(flat)].view(x.shape), scales


def _scales(rows: Tensor) -> Tensor:
    """[blocks] the scales of blocks [blocks, 256]: the largest magnitude / 127, rounded up."""
    low, high = rows.aminmax(dim=1)
    peaks = torch.maximum(-low, high).double()
    bits = (peaks / STEPS).float().view(torch.int32)
    rounded = (bits + UNUSED_BITS) & ~UNUSED_BITS
    rounded[peaks > 0] = rounded[peaks > 0].clamp(min=UNUSED_BITS + 1)  # a quotient may underflow
    scales = rounded.view(torch.float32).clamp(max=MAX_SCALE)
    return torch.where(peaks.isfinite(), scales, torch.nan)


def restore(values: Tensor, scales: Tensor) -> Tensor:
    """The float32 tensor of these int8 values; not finite if a scale is not, or is too large."""
    restored = values.reshape(-1).float()
    whole = len(restored) // BLOCK
    restored[: whole * BLOCK].view(whole, BLOCK).mul_(scales[:whole, None])
    if len(scales) > whole:
        restored[whole * BLOCK :].mul_(scales[whole])
    return restored.view(values.shape)
