"""Custom data sets: NumPy archives, IDX files, and folders of images."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from peerage import specs
from peerage.data.formats import read_idx
from peerage.data.pictures import class_folders, decode, image_files
from peerage.data.sources import TEST_IMAGES, TEST_LABELS, TRAIN_IMAGES, TRAIN_LABELS
from peerage.data.tensors import Dataset, Layout, in_memory, training_part
from peerage.errors import DataError, check_at_least


@dataclass(frozen=True)
class Npz:
    """A .npz file with x and y, or with x_train, y_train, x_test and y_test.

    x is [N, features]; [N, H, W] or [N, steps, features] (layout `hw` or `sequence`); or images
    with the channels first or last (`chw` or `hwc`; `auto` takes the first axis of size 1, 3 or 4).
    Bytes are scaled to [0, 1]; other numbers are not changed. Without a test set, a fifth of the
    examples is held out. An array groups (or groups_train) may give the group of every training
    example, and an array features the names of the columns.
    """

    path: str
    layout: Layout = "auto"
    scale: bool = True  # false: bytes are not scaled, for example token ids
    classes: int | None = None  # if there are more than the highest label suggests

    def __post_init__(self) -> None:
        specs.check_choices(self)
        check_at_least("classes", self.classes, 2)

    def load(self, cache: Path) -> Dataset:
        path = Path(self.path).expanduser()
        arrays = _read_npz(path)
        if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
            names = ("x_train", "y_train", "x_test", "y_test", "groups_train")
        elif {"x", "y"} <= arrays.keys():
            names = ("x", "y", "", "", "groups")
        else:
            raise DataError(
                f"{path} holds {', '.join(sorted(arrays)) or 'no arrays'}; "
                "it needs x and y, or x_train, y_train, x_test and y_test"
            )
        x, y, test_x, test_y, groups = (arrays.get(name) for name in names)
        features = arrays.get("features", np.empty(0, dtype=str))
        if features.dtype.kind not in "SU" or features.ndim != 1:
            raise DataError(
                f"{path}: features must be one list of names, got {features.dtype} of shape "
                f"{features.shape}"
            )
        return in_memory(
            x,
            y,
            test_x,
            test_y,
            classes=self.classes,
            groups=groups,
            name=path.stem,
            layout=self.layout,
            scale=self.scale,
            features=tuple(features.astype(str).tolist()),
        )


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(f"{path} holds one array without a name; write it with numpy.savez")
            return {name: _read_array(path, archive, name) for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a .npz file") from None
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "pickle" in reason:  # for any unknown file; numpy's advice to trust it is unsafe
            reason = "it is not an archive that numpy.savez wrote"
        raise DataError(f"{path} cannot be read as a .npz file: {reason}") from None


def _read_array(path: Path, archive: Any, name: str) -> NDArray[Any]:
    try:
        array: NDArray[Any] = archive[name]
    except ValueError as error:
        if "Object arrays" not in str(error):
            raise
        raise DataError(
            f"{path}: {name} holds Python objects, which are not loaded, as they can run code; "
            "write it as an array of numbers or texts"
        ) from None
    return array


@dataclass(frozen=True)
class Idx:
    """A folder of IDX files of bytes, named as those of MNIST, with or without .gz.

    train-images-idx3-ubyte and train-labels-idx1-ubyte, and t10k- instead of train- for the test
    set; a dot before idx is accepted. Without a test set, a fifth of the examples is held out.
    Values are scaled to [0, 1].
    """

    path: str
    scale: bool = True  # false: bytes are not scaled, for example token ids
    classes: int | None = None  # if there are more than the highest label suggests

    def __post_init__(self) -> None:
        check_at_least("classes", self.classes, 2)

    def load(self, cache: Path) -> Dataset:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; give the path of a folder of IDX files")
        train = (TRAIN_IMAGES, TRAIN_LABELS)
        test = (TEST_IMAGES, TEST_LABELS)
        names = (*train, *test) if any(_idx_path(root, name) for name in test) else train
        return in_memory(
            *(_read_idx_file(root, name) for name in names),
            classes=self.classes,
            name=root.resolve().name,
            layout="chw",
            scale=self.scale,
        )


def _idx_path(root: Path, name: str) -> Path | None:
    """The file with this name or a common variant of it; None if there is none."""
    spellings = (name, name.replace("-idx", ".idx"))
    paths = (root / f"{spelling}{suffix}" for spelling in spellings for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _read_idx_file(root: Path, name: str) -> NDArray[np.uint8]:
    path = _idx_path(root, name)
    if path is None:
        raise DataError(f"{root} has no file {name} or {name}.gz; add it")
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}; repair or replace it") from None
    return read_idx(np.frombuffer(content, np.uint8), str(path))


@dataclass(frozen=True)
class Folder:
    """A folder of images, path/train/CLASS/* and path/test/CLASS/*, or path/CLASS/*.

    Images are scaled and centre-cropped to size x size pixels, with values in [0, 1]. Without train
    and test folders, a fifth of the images is held out.
    """

    path: str
    size: int = 32
    grey: bool = False  # one channel instead of red, green and blue

    def __post_init__(self) -> None:
        check_at_least("size", self.size, 1, " pixel")

    def load(self, cache: Path) -> Dataset:
        root = Path(self.path).expanduser()
        if not root.is_dir():
            raise DataError(f"{root} is not a folder; give the path of a folder of images")
        train = root / "train"
        # If train holds images and no folders, it is a class.
        if not class_folders(train):
            classes = class_folders(root)
            x, y = self._read(root, classes)
            kept = training_part(x, y, str(root))
            parts = (x[kept], y[kept], x[~kept], y[~kept])
            return Dataset(root.name, *parts, tuple(classes), held_out=~kept)
        if not (root / "test").is_dir():
            raise DataError(f"{root} has a train folder but no test folder; add {root / 'test'}")
        classes = class_folders(train)
        unknown = sorted(set(class_folders(root / "test")) - set(classes))
        if unknown:
            raise DataError(
                f"{root / 'test' / unknown[0]} is a class without training images; "
                "add some, or remove it"
            )
        parts = (*self._read(train, classes), *self._read(root / "test", classes))
        return Dataset(root.name, *parts, tuple(classes))

    def _read(self, folder: Path, classes: list[str]) -> tuple[Tensor, Tensor]:
        paths = [(path, y) for y, name in enumerate(classes) for path in image_files(folder / name)]
        if not paths:
            raise DataError(f"{folder} holds no images; add a folder of images for each class")
        pixels = np.stack([_pixels(path, self.size, self.grey) for path, _ in paths])
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32) / 255
        return x, torch.tensor([label for _, label in paths])


def _pixels(path: Path, size: int, grey: bool) -> NDArray[np.uint8]:
    """One image as bytes [size, size, channels]."""

    def square(image: Image.Image) -> Image.Image:
        converted = ImageOps.exif_transpose(image).convert("L" if grey else "RGB")
        return ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)

    return decode(path, square).reshape(size, size, -1)
