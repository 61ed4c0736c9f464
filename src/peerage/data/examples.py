"""Examples one by one, from a PyTorch data set or from other code, read once into memory."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from peerage.data.tensors import Dataset, Layout, in_memory
from peerage.display import counted
from peerage.errors import DataError

LIMIT = 8.0  # GB of float32 numbers that are read into memory
FLOAT = 4  # bytes


class Part(NamedTuple):
    """The examples and labels of one split."""

    x: NDArray[Any]
    y: list[Any]


def from_dataset(
    train: Any,
    test: Any = None,
    *,
    classes: tuple[str, ...] | int | None = None,
    groups: Any = None,
    name: str | None = None,
    layout: Layout | None = None,
    scale: bool = True,
    limit: float = LIMIT,
) -> Dataset:
    """A data set from map-style `torch.utils.data.Dataset`s, whose items are (example, label).

    All examples are read once, so random transforms are drawn once; they must fit into `limit` GB
    as float32. Examples are tensors, arrays or PIL images of one shape, and labels whole numbers.
    Names of classes are those of `train.classes`, if it has any. The other options, and what
    happens without a test set, are as in `in_memory`.

    >>> import torch
    >>> import peerage as pg
    >>> pixels, labels = torch.rand(60, 1, 8, 8), torch.arange(60) % 3
    >>> mine = pg.from_dataset(torch.utils.data.TensorDataset(pixels, labels), name="mine")
    >>> mine.shape, len(mine.train_y), len(mine.test_y), mine.classes
    ((1, 8, 8), 48, 12, ('0', '1', '2'))
    """
    name = name or type(train).__name__.lower()
    if classes is None and (known := getattr(train, "classes", None)):
        classes = tuple(map(str, known))
    first = read_map_style(train, f"{name}: training set", limit)
    second = None if test is None else read_map_style(test, f"{name}: test set", limit)
    loaded = in_memory(
        first.x,
        first.y,
        None if second is None else second.x,
        None if second is None else second.y,
        classes=classes,
        groups=groups,
        name=name,
        layout=layout,
        scale=scale,
    )
    return replace(loaded, sha256=content_hash(loaded))


def read_map_style(source: Any, where: str, limit: float = LIMIT) -> Part:
    """All items of an object with `__len__` and `__getitem__`."""
    if isinstance(source, torch.utils.data.IterableDataset) or not (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    ):
        raise DataError(
            f"{where}: {type(source).__name__} has no length or no items by number; give a "
            "map-style data set, such as a list of its (example, label) pairs"
        )

    def item(index: int) -> tuple[Any, Any]:
        found = source[index]
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(
                f"{where}: item {index} is {type(found).__name__}, not (example, label); wrap the "
                "data set so that its items are such pairs"
            )
        return found[0], found[1]

    return read_items(item, len(source), where, limit)


def read_items(
    item: Callable[[int], tuple[Any, Any]], count: int, where: str, limit: float = LIMIT
) -> Part:
    """The examples and labels of all items, with a progress bar."""
    if count == 0:
        raise DataError(f"{where}: no examples; give at least two")
    x: NDArray[Any] = np.empty(0)
    y = []
    for index in counted(range(count), where, count):
        try:
            example, label = item(index)
            values = example_array(example)
        except DataError:
            raise
        except Exception as error:  # of the user's own code
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise DataError(f"{where}: item {index} cannot be read: {reason}") from None
        if index == 0:
            check_size(count, values, where, limit)
            x = np.empty((count, *values.shape), values.dtype)
        if values.shape != x.shape[1:]:
            raise DataError(
                f"{where}: item {index} has shape {values.shape}, but item 0 has {x.shape[1:]}; "
                "bring all examples to one shape, for instance with a transform"
            )
        x[index] = values
        y.append(label.item() if hasattr(label, "item") else label)
    return Part(x, y)


def example_array(example: Any) -> NDArray[Any]:
    """One example as an array; the channels of an image come first."""
    if isinstance(example, Image.Image):
        if example.mode not in ("L", "RGB"):
            example = example.convert("RGB")
        pixels = np.asarray(example)
        return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]
    if isinstance(example, torch.Tensor):
        return example.detach().cpu().numpy()
    return np.asarray(example)


def check_size(count: int, example: NDArray[Any], where: str, limit: float) -> None:
    size = count * example.size * FLOAT / 1e9
    if size > limit:
        raise DataError(
            f"{where}: {count} examples of shape {example.shape} take {size:.3g} GB in memory, "
            f"more than {limit:g} GB; take a torch.utils.data.Subset or smaller examples, or set "
            f"limit={size:.2g} or more"
        )


def content_hash(dataset: Dataset) -> str:
    """The SHA-256 of all examples, labels, groups and names of classes."""
    hashed = sha256(repr(dataset.classes).encode())
    parts = (dataset.train_x, dataset.train_y, dataset.test_x, dataset.test_y, dataset.groups)
    for tensor in parts:
        if tensor is not None:
            hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hashed.update(np.ascontiguousarray(tensor.numpy()).data)
    return hashed.hexdigest()
