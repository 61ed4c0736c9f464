"""A loaded data set: four checked tensors in memory."""

import warnings
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.data.partition import stratified
from peerage.data.scaling import Scaling
from peerage.errors import DataError, PeerageWarning, check_choice
from peerage.randomness import numpy_stream

HELD_OUT = 0.2  # share of the examples that is held out if there is no test set

Layout = Literal["auto", "chw", "hwc", "hw", "sequence"]
CHANNELS = (1, 3, 4)  # numbers of channels that `auto` recognises


@dataclass(frozen=True, eq=False)
class Dataset:
    """Normalised examples and labels, ready for training.

    Examples are float32: images [N, C, H, W] in channels_last memory, sequences [N, steps,
    features], or rows [N, features]; labels are int64. Whole numbers, such as token ids, are
    float32 here too; a model with an embedding converts them to int64. `groups` (int64) gives the
    group of every training example, such as its writer. `scaling` says how the examples were
    normalised; the shift of a cluster comes before it.

    >>> import peerage as pg
    >>> data = pg.in_memory(torch.rand(20, 4), torch.arange(20) % 2)
    >>> isinstance(data, pg.Dataset), data.shape, len(data.train_y), len(data.test_y)
    (True, (4,), 16, 4)
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    groups: Tensor | None = None
    inferred_classes: bool = False  # `classes` were derived from the labels
    scaling: Scaling = Scaling()
    # Mask of all examples in the order of their file, if the test set was held out from them for
    # lack of one; None if the data set has a test set of its own.
    held_out: Tensor | None = None
    features: tuple[str, ...] = ()  # names of the columns, if known
    # Of the content, for data that an experiment names by it and not by a path; see `from_dataset`.
    sha256: str | None = None

    def __post_init__(self) -> None:
        _check(f"{self.name}: training set", self.train_x, self.train_y, len(self.classes))
        _check(f"{self.name}: test set", self.test_x, self.test_y, len(self.classes))
        if self.train_x.shape[1:] != self.test_x.shape[1:]:
            raise DataError(
                f"{self.name}: training examples have shape {self.shape} but test examples have "
                f"shape {tuple(self.test_x.shape[1:])}; give both the same shape"
            )
        if self.features and self.shape != (len(self.features),):
            raise DataError(
                f"{self.name}: {len(self.features)} names of features for examples of shape "
                f"{self.shape}; give one name for each column"
            )
        if self.groups is not None:
            _check_groups(f"{self.name}: training set", self.groups, len(self.train_y))
        for field, where in (("train_x", "training set"), ("test_x", "test set")):
            x = _channels_last(f"{self.name}: {where}", getattr(self, field))
            object.__setattr__(self, field, x)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example, for instance (1, 28, 28)."""
        return tuple(self.train_x.shape[1:])

    def undivided(self) -> tuple[Tensor, Tensor] | None:
        """All examples and labels in the order of their file; None with an own test set."""
        if self.held_out is None:
            return None
        x = self.train_x.new_empty((len(self.held_out), *self.shape))
        y = self.train_y.new_empty(len(self.held_out))
        x[self.held_out], y[self.held_out] = self.test_x, self.test_y
        x[~self.held_out], y[~self.held_out] = self.train_x, self.train_y
        return x, y


def in_memory(
    train_x: Any,
    train_y: Any,
    test_x: Any = None,
    test_y: Any = None,
    *,
    classes: tuple[str, ...] | int | None = None,
    groups: Any = None,
    name: str = "tensors",
    layout: Layout | None = None,
    scale: bool = True,
    features: tuple[str, ...] = (),
) -> Dataset:
    """A data set from tensors, arrays or nested lists.

    Examples are images [N, C, H, W] (or as `layout` says), rows [N, features], or [N, a, b]: images
    of one channel with layout="hw", sequences with layout="sequence". Bytes (uint8) are divided by
    255, unless scale=False; other numbers are not changed. `classes` are names or a number; the
    default is one more than the highest label. Without a test set, a fixed stratified fifth of the
    examples is held out. `groups` are names or whole numbers, one for each example of train_x; they
    are numbered in sorted order. `features` are the names of the columns of rows.

    >>> import peerage as pg
    >>> data = pg.in_memory(torch.rand(20, 4), torch.arange(20) % 2, classes=("no", "yes"))
    >>> data.shape, len(data.train_y), len(data.test_y), data.classes
    ((4,), 16, 4, ('no', 'yes'))
    """
    if layout is not None:
        check_choice("layout", layout, get_args(Layout))
    if (test_x is None) != (test_y is None):
        raise DataError(f"{name}: give both test_x and test_y, or neither")
    where = f"{name}: training set"
    first, y = _array(train_x, where), labels(train_y, where)
    pixels = scale and first.dtype == np.uint8
    if first.ndim == 3 and layout in (None, "auto") and not pixels:
        axes = ", ".join(map(str, first.shape[1:]))
        text = (
            f"{name}: examples [{axes}] are treated as images of one channel, [1, {axes}]; "
            "set layout=hw if this is right, or layout=sequence to keep their shape"
        )
        warnings.warn(text, PeerageWarning, stacklevel=2)
    x = examples(first, where, layout, scale)
    numbered = None if groups is None else group_numbers(groups, len(y), where)
    held_out = None
    if test_x is None:
        train = training_part(x, y, name)
        held_out = ~train
        x, y, held_x, held_y = x[train], y[train], x[~train], y[~train]
        numbered = None if numbered is None else numbered[train]
    else:
        where = f"{name}: test set"
        held_x, held_y = examples(test_x, where, layout, scale), labels(test_y, where)
    inferred = classes is None
    if classes is None:
        classes = 1 + max((int(part.max()) for part in (y, held_y) if len(part)), default=-1)
    names = class_numbers(classes) if isinstance(classes, int) else tuple(classes)
    parts = (x, y, held_x, held_y)
    return Dataset(
        name, *parts, names, numbered, inferred, held_out=held_out, features=tuple(features)
    )


def examples(values: Any, where: str, layout: Layout | None = None, scale: bool = True) -> Tensor:
    """Float32 examples from anything that numpy can convert."""
    x = _array(values, where)
    if x.dtype.kind not in "buif":
        raise DataError(f"{where}: examples must be numbers, got {x.dtype}")
    if x.ndim == 4:
        x = channels_first(x, layout or "chw", where)
    elif x.ndim == 3 and layout != "sequence":
        x = x[:, None]
    with np.errstate(over="ignore"):  # values beyond float32 become infinite
        tensor = torch.from_numpy(np.array(x, dtype=np.float32))
    return tensor.div_(255) if scale and x.dtype == np.uint8 else tensor


def channels_first(x: NDArray[Any], layout: Layout, where: str) -> NDArray[Any]:
    """Images [N, C, H, W] from [N, C, H, W] or [N, H, W, C]."""
    if layout in ("hw", "sequence"):
        raise DataError(
            f"{where}: layout={layout} requires examples of two axes, got shape {x.shape}; "
            "set layout=chw or layout=hwc"
        )
    if layout == "auto":
        if x.shape[1] not in CHANNELS and x.shape[3] not in CHANNELS:
            raise DataError(
                f"{where}: no axis of shape {x.shape} has 1, 3 or 4 channels; "
                "set layout=chw or layout=hwc"
            )
        layout = "chw" if x.shape[1] in CHANNELS else "hwc"
    return x if layout == "chw" else x.transpose(0, 3, 1, 2)


def class_numbers(count: int) -> tuple[str, ...]:
    """Default names of classes: 0, 1, ..."""
    return tuple(str(number) for number in range(count))


def labels(values: Any, where: str) -> Tensor:
    """Int64 class numbers from anything that numpy can convert."""
    y = _array(values, where)
    if y.dtype.kind not in "bui" or y.ndim != 1:
        raise DataError(
            f"{where}: labels must be one list of whole numbers, got {y.dtype} of shape {y.shape}"
        )
    return torch.from_numpy(np.array(y, dtype=np.int64))


def group_numbers(values: Any, count: int, where: str) -> Tensor:
    """Int64 group numbers from whole numbers or names, one for each example."""
    groups = _array(values, where)
    if groups.dtype.kind not in "buiSU" or groups.ndim != 1:
        raise DataError(
            f"{where}: groups must be one list of names or whole numbers, "
            f"got {groups.dtype} of shape {groups.shape}"
        )
    numbers = torch.from_numpy(np.unique(groups, return_inverse=True)[1].astype(np.int64))
    _check_groups(where, numbers, count)
    return numbers


def training_part(x: Tensor, y: Tensor, name: str) -> Tensor:
    """Mask of the training examples; the test set is a fixed fifth of every class."""
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


def label_caveats(dataset: Dataset, *, share: bool = False) -> list[str]:
    """Warnings about missing classes; raises an error if all examples have one class.

    `share` means that this is the data of one peer; others may have the classes that it lacks.
    """
    count = len(dataset.classes)
    parts = (dataset.train_y, dataset.test_y)
    trained, tested = (torch.bincount(y, minlength=count) for y in parts)
    found = trained + tested > 0
    numbered = dataset.classes == class_numbers(count)
    needed = max(count, 2) if numbered else ",".join((*dataset.classes, "OTHER"))
    set_classes = (
        f"if other peers have more classes, add --classes {needed} or "
        f"{'as many as' if numbered else 'all names that'} the network has"
    )
    if count == 1 or (found.sum() == 1 and not share):
        only = dataset.classes[int(found.nonzero()[0])]
        remedy = set_classes if share else "give examples of at least two classes"
        raise DataError(
            f"{dataset.name}: all examples have class {only!r}, so every model reaches 100 %; "
            f"{remedy}"
        )
    caveats = []
    missing, unseen = ~found, (tested > 0) & (trained == 0)
    if dataset.inferred_classes and missing.any():
        renumber = (
            f"number the {int(found.sum())} that occur from 0, or set classes={count} if this is "
            "intended"
        )
        caveats.append(
            f"{dataset.name}: no example has class {_class_names(dataset.classes, missing)}, but "
            f"the highest label implies {count} classes; {set_classes if share else renumber}"
        )
    if unseen.any() and not share:
        caveats.append(
            f"{dataset.name}: no training example has class "
            f"{_class_names(dataset.classes, unseen)}, but {int(tested[unseen].sum())} of "
            f"{len(dataset.test_y)} test examples do; "
            "add training examples, or remove these test examples"
        )
    return caveats


def _class_names(classes: tuple[str, ...], mask: Tensor, most: int = 8) -> str:
    """The names of the classes in the mask, at most the first `most`."""
    names = [classes[index] for index in mask.nonzero().flatten().tolist()]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _array(values: Any, where: str) -> NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: not an array of numbers: {error}") from None


def _check(where: str, x: Tensor, y: Tensor, classes: int) -> None:
    if x.ndim not in (2, 3, 4):
        raise DataError(
            f"{where}: examples must be images [N, C, H, W], sequences [N, steps, features] or "
            f"rows [N, features], got shape {tuple(x.shape)}"
        )
    if x.dtype != torch.float32 or y.dtype != torch.int64 or y.ndim != 1:
        raise DataError(
            f"{where}: expected float32 examples and one list of int64 labels, "
            f"got {x.dtype} and {y.dtype} of shape {tuple(y.shape)}"
        )
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} examples but {len(y)} labels; give one label each")
    if x.numel() == 0:
        raise DataError(f"{where}: no examples (shape {tuple(x.shape)})")
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


def _channels_last(where: str, x: Tensor) -> Tensor:
    """The same values in channels_last memory; raises an error unless all are finite.

    For a single channel, `contiguous(memory_format=channels_last)` may keep the strides of NCHW,
    which makes later layers slow; flattening in between prevents this.
    """
    channels_last = x.movedim(1, -1) if x.ndim == 4 else x
    flat = channels_last.contiguous().view(-1)
    # The extremes are finite if and only if all values are; this needs no mask as large as x.
    if not torch.stack(flat.aminmax()).isfinite().all():
        raise DataError(f"{where}: examples hold values that are not finite; replace or drop them")
    laid_out = flat.view(channels_last.shape)
    return laid_out.movedim(-1, 1) if x.ndim == 4 else laid_out
