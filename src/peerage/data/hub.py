"""Data sets in the format of Hugging Face `datasets`: from the hub, or from a folder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from peerage.data.examples import Part, read_items
from peerage.data.tensors import Dataset, in_memory
from peerage.errors import DataError, check_at_least

TEST_SPLITS = ("test", "validation", "valid")  # the first that exists


@dataclass(frozen=True)
class HuggingFace:
    """A data set of the Hugging Face hub by name, or a folder that `save_to_disk` wrote.

    Columns of images and labels are found by their features, unless `image` and `label` name them;
    `image` may also name a column of numbers. The splits are train and test (or validation);
    without a test split, a fifth of the examples is held out. Needs `peerage[hub]`.
    """

    path: str
    image: str | None = None  # column of the examples
    label: str | None = None  # column of the classes
    config: str | None = None  # part of a data set of the hub that has several
    size: int | None = None  # scale and centre-crop images to size x size pixels
    grey: bool = False  # one channel instead of red, green and blue

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1, " pixel")

    def load(self, cache: Path) -> Dataset:
        splits = self._splits()
        name = Path(self.path).name
        if "train" not in splits:
            raise DataError(
                f"{self.path} has the splits {', '.join(splits)}, but no train; save one with "
                "that name"
            )
        train = splits["train"]
        image, label = self._columns(train.features)
        test = next((splits[split] for split in TEST_SPLITS if split in splits), None)
        first = self._read(train, image, label, f"{name}: training set")
        second = None if test is None else self._read(test, image, label, f"{name}: test set")
        classes = class_names(train.features[label], [first, *([second] if second else [])])
        numbers = [labels_of(part, classes) for part in (first, second) if part is not None]
        return in_memory(
            first.x,
            numbers[0],
            *(() if second is None else (second.x, numbers[1])),
            classes=classes,
            name=name,
        )

    def _splits(self) -> Mapping[str, Any]:
        try:
            import datasets
        except ImportError:
            raise DataError(
                "data set 'hf' needs the package datasets; pip install 'peerage[hub]'"
            ) from None
        folder = Path(self.path).expanduser()
        local = folder.exists() or self.path.startswith((".", "/", "~"))
        if local and not folder.is_dir():
            raise DataError(f"{folder} is not a folder; give one that save_to_disk wrote")
        try:
            if local:
                found = datasets.load_from_disk(os.fspath(folder))
            else:
                found = datasets.load_dataset(self.path, self.config)
        except Exception as error:  # of many kinds: files, network, formats
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            remedy = "give a folder that save_to_disk wrote" if local else "check its name"
            raise DataError(f"{self.path} cannot be read: {reason}; {remedy}") from None
        return found if isinstance(found, Mapping) else {"train": found}

    def _columns(self, features: Mapping[str, Any]) -> tuple[str, str]:
        """The names of the columns of examples and of labels."""
        kinds = {column: type(feature).__name__ for column, feature in features.items()}
        image = self._column("image", self.image, kinds, "Image")
        return image, self._column("label", self.label, kinds, "ClassLabel")

    def _column(self, option: str, given: str | None, kinds: Mapping[str, str], kind: str) -> str:
        listed = ", ".join(f"{column} ({found})" for column, found in kinds.items())
        if given is not None:
            if given not in kinds:
                raise DataError(f"{self.path} has no column {given!r}; its columns are {listed}")
            return given
        fitting = [column for column, found in kinds.items() if found == kind]
        if len(fitting) != 1:
            number = "no column" if not fitting else "several columns"
            raise DataError(
                f"{self.path} has {number} of type {kind}; set {option}=COLUMN, one of {listed}"
            )
        return fitting[0]

    def _read(self, split: Any, image: str, label: str, where: str) -> Part:
        def item(index: int) -> tuple[Any, Any]:
            row = split[index]
            example = row[image]
            if isinstance(example, Image.Image):
                return self._picture(example), row[label]
            return np.asarray(example), row[label]

        return read_items(item, len(split), where)

    def _picture(self, picture: Image.Image) -> Image.Image:
        if self.grey or picture.mode not in ("L", "RGB"):
            picture = picture.convert("L" if self.grey else "RGB")
        if self.size is None:
            return picture
        return ImageOps.fit(picture, (self.size, self.size), Image.Resampling.BILINEAR)


def class_names(feature: Any, parts: list[Part]) -> tuple[str, ...] | None:
    """The names of the classes; None for plain numbers, whose names are the numbers."""
    if names := getattr(feature, "names", None):
        return tuple(names)
    values = {label for part in parts for label in part.y}
    return tuple(sorted(values)) if all(isinstance(value, str) for value in values) else None


def labels_of(part: Part, classes: tuple[str, ...] | None) -> list[Any]:
    """The numbers of the labels, which may be names."""
    if classes is None or not any(isinstance(label, str) for label in part.y):
        return part.y
    numbers = {name: number for number, name in enumerate(classes)}
    return [numbers[label] for label in part.y]
