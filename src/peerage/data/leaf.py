"""FEMNIST in the format of LEAF: handwritten digits and letters, grouped by writer (P2).

A file holds users (names), num_samples (of each user) and user_data: for every user, the images x,
784 numbers each, and the labels y.
Caldas et al., 2018. arXiv:1812.01097.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.data.sources import FEMNIST
from peerage.data.tensors import Dataset
from peerage.errors import DataError, InputError, check_at_least
from peerage.randomness import numpy_stream

Images = NDArray[np.float32]  # [n, 784]
Ints = NDArray[np.int64]
Parts = dict[str, tuple[Images, Ints]]  # writer -> images and labels

SIDE = 28
PIXELS = SIDE * SIDE
CHARACTERS = tuple(digits + ascii_uppercase + ascii_lowercase)
KEYS = ("users", "num_samples", "user_data")
REMEDY = "create the files again with LEAF's preprocess.sh"


@dataclass(frozen=True)
class Femnist:
    """Digits and letters by 3550 writers: 805 263 images of 28 x 28 pixels, from LEAF's files.

    Pixels are scaled by LEAF, from 0 (ink) to 1 (paper). The test set comes from the test files;
    without them (all_data*.json), a fixed tenth of every writer's images is held out. LEAF's script
    creates the files; if they are missing, the error says how to run it. Reading all of them takes
    minutes and up to 3.5 GB of memory.
    """

    path: str | None = None  # folder of the files; None: femnist in the cache folder
    writers: int | None = None  # number of writers, the first by name; None: all

    def __post_init__(self) -> None:
        check_at_least("writers", self.writers, 1)

    def load(self, cache: Path) -> Dataset:
        root = cache / "femnist" if self.path is None else Path(self.path).expanduser()
        files = FEMNIST.find("femnist", root)
        train = read_writers(files[0], most=self.writers)
        if self.writers is not None and self.writers > len(train):
            raise InputError(
                f"writers={self.writers} is more than the {len(train)} writers with training "
                f"examples in {root}; lower it"
            )
        if len(files) == 1:
            test = split_off_tests(train)
        else:
            test = read_writers(files[1], only=None if self.writers is None else train.keys())
        for name, parts in (("training", train), ("test", test)):
            if not parts:
                raise DataError(
                    f"{root} holds no {name} examples of the writers; {REMEDY}, with -t sample"
                )
        sizes = [len(train[writer][1]) for writer in sorted(train)]
        groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return Dataset(
            "femnist", *concatenate_parts(train), *concatenate_parts(test), CHARACTERS, groups
        )


def read_writers(
    paths: Iterable[Path], *, most: int | None = None, only: Collection[str] | None = None
) -> Parts:
    """The writers of the files: the first `most` by name, or those in `only`."""
    parts: Parts = {}
    files: dict[str, Path] = {}  # writer -> the file that holds it
    for path in paths:
        # Python numbers take eight times the memory of arrays, so only one file is parsed at once.
        parts |= _read_file(path, files, only)
        parts = {writer: parts[writer] for writer in sorted(parts)[:most]}
    return parts


def split_off_tests(train: Parts) -> Parts:
    """Move a tenth of every writer's examples, rounded up, to a test set; at least one stays."""
    test: Parts = {}
    for writer, (x, y) in train.items():
        rng = numpy_stream(0, f"femnist test set of {writer}")
        kept = np.zeros(len(y), dtype=bool)
        kept[rng.permutation(len(y))[: max(1, len(y) * 9 // 10)]] = True
        train[writer] = x[kept], y[kept]
        if not kept.all():
            test[writer] = x[~kept], y[~kept]
    return test


def concatenate_parts(parts: Parts) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 28, 28] and labels [N] in the order of writers; empties `parts`.

    Parts are freed as they are copied, so the images are never held twice.
    """
    total = sum(len(y) for _, y in parts.values())
    images, labels = np.empty((total, PIXELS), np.float32), np.empty(total, np.int64)
    end = 0
    for writer in sorted(parts):
        x, y = parts.pop(writer)
        start, end = end, end + len(y)
        images[start:end], labels[start:end] = x, y
    return torch.from_numpy(images).view(-1, 1, SIDE, SIDE), torch.from_numpy(labels)


def _read_file(path: Path, files: dict[str, Path], only: Collection[str] | None) -> Parts:
    """The writers of one file that have examples; adds all of its writers to `files`."""
    content = _content(path)
    parts: Parts = {}
    for writer, count in zip(content["users"], content["num_samples"], strict=True):
        if writer in files:
            raise DataError(
                f"{path}: user {writer!r} is also in {files[writer]}; keep only the files of one "
                "run of LEAF's preprocess.sh"
            )
        files[writer] = path
        if only is not None and writer not in only:
            continue
        where = f"{path}: user {writer!r}"
        x, y = _lists(content["user_data"].get(writer), count, where)
        if x:
            parts[writer] = _images(x, where), _labels(y, where)
    return parts


def _content(path: Path) -> dict[str, Any]:
    """The parsed JSON of a file, with its outer structure checked."""
    try:
        with path.open(encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}; {REMEDY}") from None
    for key in KEYS:
        if not isinstance(content, dict) or key not in content:
            raise DataError(f"{path} has no {key}; {REMEDY}")
    users, counts, data = (content[key] for key in KEYS)
    named = isinstance(users, list) and all(isinstance(user, str) for user in users)
    if not (named and isinstance(counts, list) and isinstance(data, dict)):
        raise DataError(
            f"{path}: users must be a list of names, num_samples a list and user_data a table; "
            f"{REMEDY}"
        )
    if len(users) != len(counts):
        raise DataError(
            f"{path} has {len(users)} users but {len(counts)} numbers in num_samples; {REMEDY}"
        )
    return content


def _lists(data: Any, count: Any, where: str) -> tuple[list[Any], list[Any]]:
    """The lists of images and labels of a writer, with their lengths checked."""
    if not isinstance(data, dict):
        raise DataError(f"{where} has no data in user_data; {REMEDY}")
    x, y = data.get("x"), data.get("y")
    if not (isinstance(x, list) and isinstance(y, list)):
        raise DataError(f"{where} needs the lists x and y in user_data; {REMEDY}")
    if len(x) != count:
        raise DataError(f"{where} has {len(x)} images but num_samples says {count}; {REMEDY}")
    if len(x) != len(y):
        raise DataError(f"{where} has {len(x)} images but {len(y)} labels; {REMEDY}")
    return x, y


def _images(rows: list[Any], where: str) -> Images:
    x = _numbers(rows)
    if x is None or x.shape != (len(rows), PIXELS):
        shapes = ((number, _numbers(row)) for number, row in enumerate(rows))
        bad = next(number for number, row in shapes if row is None or row.shape != (PIXELS,))
        raise DataError(f"{where}: image {bad} is not a list of {PIXELS} numbers; {REMEDY}")
    outside = ~((x >= 0) & (x <= 1))  # true for NaN too
    if outside.any():
        raise DataError(f"{where} has a pixel of {x[outside][0]}, outside [0, 1]; {REMEDY}")
    return x.astype(np.float32)


def _numbers(values: Any) -> NDArray[Any] | None:
    """The values as an array; None unless they are numbers in a regular shape."""
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        return None
    return array if array.dtype.kind in "iuf" else None


def _labels(labels: list[Any], where: str) -> Ints:
    for label in labels:
        if type(label) is not int or not 0 <= label < len(CHARACTERS):
            raise DataError(
                f"{where} has label {label!r}, not a whole number from 0 to "
                f"{len(CHARACTERS) - 1}; {REMEDY}"
            )
    return np.array(labels, dtype=np.int64)
