"""What every data set becomes: four checked tensors in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.data.partition import stratified
from peerage.errors import DataError
from peerage.randomness import numpy_stream

HELD_OUT = 0.2  # share of the examples that becomes the test set of data that has none


@dataclass(frozen=True, eq=False)
class Dataset:
    """Normalised examples and labels, ready to be indexed by a training loop.

    Examples are float32, [N, C, H, W] in channels_last memory or [N, features]; labels are int64.
    Data that falls into parts by nature, such as by writer, numbers the part of every training
    example in `groups` (int64).
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        _check(f"{self.name}: training set", self.train_x, self.train_y, len(self.classes))
        _check(f"{self.name}: test set", self.test_x, self.test_y, len(self.classes))
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"{self.name}: training examples have shape {self.shape} but test examples have "
                f"shape {tuple(self.test_x.shape[1:])}; give both the same shape"
            )
        if self.groups is not None:
            _check_groups(f"{self.name}: training set", self.groups, len(self.train_y))
        object.__setattr__(self, "train_x", _laid_out(f"{self.name}: training set", self.train_x))
        object.__setattr__(self, "test_x", _laid_out(f"{self.name}: test set", self.test_x))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example, for instance (1, 28, 28)."""
        return tuple(self.train_x.shape[1:])


def in_memory(
    train_x: Any,
    train_y: Any,
    test_x: Any = None,
    test_y: Any = None,
    *,
    classes: tuple[str, ...] | None = None,
    groups: Any = None,
    name: str = "tensors",
) -> Dataset:
    """A data set from tensors, arrays or nested lists of your own.

    Examples are [N, C, H, W], [N, H, W] (one channel) or [N, features]. Bytes (uint8) are divided
    by 255, all other numbers are taken as they are. Without a test set, a fifth of the examples is
    held out, the same share of every class and always the same examples. `groups` are names or
    whole numbers, one for each example of train_x; they are numbered in their order.
    """
    if (test_x is None) != (test_y is None):
        raise DataError(f"{name}: give both test_x and test_y, or neither")
    where = f"{name}: training set"
    x, y = examples(train_x, where), labels(train_y, where)
    numbered = None if groups is None else group_numbers(groups, len(y), where)
    if test_x is None:
        train = training_part(x, y, name)
        x, y, held_x, held_y = x[train], y[train], x[~train], y[~train]
        numbered = None if numbered is None else numbered[train]
    else:
        held_x, held_y = examples(test_x, f"{name}: test set"), labels(test_y, f"{name}: test set")
    if classes is None:
        highest = max((int(part.max()) for part in (y, held_y) if len(part)), default=-1)
        classes = tuple(str(label) for label in range(highest + 1))
    return Dataset(name, x, y, held_x, held_y, tuple(classes), numbered)


def examples(values: Any, where: str) -> Tensor:
    """Float32 examples from anything that numpy understands."""
    x = _array(values, where)
    if x.dtype.kind not in "buif":
        raise DataError(f"{where}: examples must be numbers, got {x.dtype}")
    with np.errstate(
        over="ignore"
    ):  # a value beyond float32 becomes infinite and is reported later
        tensor = torch.from_numpy(np.array(x, dtype=np.float32))
    if x.dtype == np.uint8:
        tensor /= 255
    return tensor.unsqueeze(1) if tensor.ndim == 3 else tensor


def labels(values: Any, where: str) -> Tensor:
    """Int64 class numbers from anything that numpy understands."""
    y = _array(values, where)
    if y.dtype.kind not in "bui" or y.ndim != 1:
        raise DataError(
            f"{where}: labels must be one list of whole numbers, got {y.dtype} of shape {y.shape}"
        )
    return torch.from_numpy(np.array(y, dtype=np.int64))


def group_numbers(values: Any, count: int, where: str) -> Tensor:
    """Int64 numbers of groups that are given as whole numbers or names, one for each example."""
    groups = _array(values, where)
    if groups.dtype.kind not in "buiSU" or groups.ndim != 1:
        raise DataError(
            f"{where}: groups must be one list of names or whole numbers, "
            f"got {groups.dtype} of shape {groups.shape}"
        )
    numbers = torch.from_numpy(np.unique(groups, return_inverse=True)[1].astype(np.int64))
    _check_groups(where, numbers, count)
    return numbers


def held_out(x: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test part of data that has no test set."""
    train = training_part(x, y, name)
    return x[train], y[train], x[~train], y[~train]


def training_part(x: Tensor, y: Tensor, name: str) -> Tensor:
    """Which examples are to train on; the test set is always the same fifth of every class."""
    if len(x) != len(y) or len(x) < 2:
        raise DataError(
            f"{name}: {len(x)} examples and {len(y)} labels cannot be split into a training and a "
            "test set; give as many labels as examples, and at least two"
        )
    count = max(1, round(HELD_OUT * len(y)))
    test = torch.from_numpy(stratified(y.numpy(), count, numpy_stream(0, "test set")))
    train = torch.ones(len(y), dtype=torch.bool)
    train[test] = False
    return train


def _array(values: Any, where: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not an array of numbers: {error}") from None


def _check(where: str, x: Tensor, y: Tensor, classes: int) -> None:
    if x.ndim not in (2, 4):
        raise DataError(
            f"{where}: examples must be images [N, C, H, W] or rows [N, features], "
            f"got shape {tuple(x.shape)}"
        )
    if x.dtype != torch.float32 or y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(
            f"{where}: needs float32 examples and one list of int64 labels, "
            f"got {x.dtype} and {y.dtype} of shape {tuple(y.shape)}"
        )
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} examples but {len(y)} labels; give one label each")
    if x.numel() == 0:
        raise DataError(f"{where}: it is empty (shape {tuple(x.shape)})")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"{where}: label {low if low < 0 else high} is out of range; "
            f"{classes} classes are numbered 0 to {classes - 1}"
        )


def _check_groups(where: str, groups: Tensor, count: int) -> None:
    if groups.dtype != torch.int64 or groups.shape != (count,):
        raise DataError(
            f"{where}: groups must be one int64 number for each of {count} examples, "
            f"got {groups.dtype} of shape {tuple(groups.shape)}"
        )


def _laid_out(where: str, x: Tensor) -> Tensor:
    """The same values with the channels of a pixel next to each other in memory; all are finite.

    For a single channel `contiguous(memory_format=channels_last)` is free to keep the strides of
    NCHW, which sends later layers down the slow path; flattening in between makes it certain.
    """
    channels_last = x.movedim(1, -1)
    flat = channels_last.contiguous().view(-1)
    # The extremes are finite if and only if all values are, and no mask as large as x is needed.
    if not torch.stack(flat.aminmax()).isfinite().all():
        raise DataError(f"{where}: examples hold values that are not finite; replace or drop them")
    return flat.view(channels_last.shape).movedim(-1, 1)
