"""The scaling of a data set: from values in [0, 1] to the numbers that a model gets, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scaling:
    """How a data set was normalised: x = (v - mean) / deviation.

    If v is a multiple of 1 / levels, `undo` returns it exactly, and `apply` gives the numbers of
    the data set again, bit by bit. Otherwise both are exact up to rounding. The default changes
    nothing: x is v.
    """

    mean: tuple[float, ...] = (0.0,)  # one number, or one per channel
    deviation: tuple[float, ...] = (1.0,)
    levels: int | None = None  # such as 255 for bytes
    precise: bool = False  # whether `apply` computes in double precision, as the loader did

    def apply(self, v: Tensor) -> Tensor:
        """The numbers for a model, as a new tensor in float32."""
        if self == Scaling():
            return v
        x = v.double() if self.precise else v.clone()
        return x.sub_(self._shaped(self.mean, x)).div_(self._shaped(self.deviation, x)).float()

    def undo(self, x: Tensor) -> Tensor:
        """The values before normalising, as a new tensor in float32."""
        if self == Scaling():
            return x
        v = x.double() if self.levels is None else x.clone()  # levels are far apart
        v.mul_(self._shaped(self.deviation, v)).add_(self._shaped(self.mean, v))
        if self.levels is None:
            return v.float()
        return v.mul_(self.levels).round_().float().div_(self.levels)

    def _shaped(self, numbers: tuple[float, ...], x: Tensor) -> float | Tensor:
        """A single number as it is; several in the shape of the channels of images."""
        if len(numbers) == 1:
            return numbers[0]
        return torch.tensor(numbers, dtype=x.dtype).view(-1, 1, 1)
