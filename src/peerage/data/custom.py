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
    example.
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
        )


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(f"{path} holds one array without a name; write it with numpy.savez")
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; give the path of a .npz file") from None
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read as a .npz file: {reason}") from None


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
        if not (train.is_dir() and _folders(train)):
            classes = _folders(root)
            x, y = self._read(root, classes)
            kept = training_part(x, y, str(root))
            return Dataset(root.name, x[kept], y[kept], x[~kept], y[~kept], tuple(classes))
        if not (root / "test").is_dir():
            raise DataError(f"{root} has a train folder but no test folder; add {root / 'test'}")
        classes = _folders(train)
        unknown = sorted(set(_folders(root / "test")) - set(classes))
        if unknown:
            raise DataError(
                f"{root / 'test' / unknown[0]} is a class without training images; "
                "add some, or remove it"
            )
        parts = (*self._read(train, classes), *self._read(root / "test", classes))
        return Dataset(root.name, *parts, tuple(classes))

    def _read(self, folder: Path, classes: list[str]) -> tuple[Tensor, Tensor]:
        paths = [(path, y) for y, name in enumerate(classes) for path in _images(folder / name)]
        if not paths:
            raise DataError(f"{folder} holds no images; add a folder of images for each class")
        pixels = np.stack([_pixels(path, self.size, self.grey) for path, _ in paths])
        x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32) / 255
        return x, torch.tensor([label for _, label in paths])


def _pixels(path: Path, size: int, grey: bool) -> NDArray[np.uint8]:
    """One image as bytes [size, size, channels]."""
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(_eight_bit(image, path))
            converted = upright.convert("L" if grey else "RGB")
            square = ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image ({error}); repair or remove it"
        ) from None
    return np.asarray(square).reshape(size, size, -1)


def _eight_bit(image: Image.Image, path: Path) -> Image.Image:
    """The image with one byte per channel; Pillow would clip 16-bit grey values at 255."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{path} has 32 bits per pixel; convert it to 8 or 16 bits per channel")
    return image


def _folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def _images(folder: Path) -> list[Path]:
    """The files of a class with an image suffix; others are ignored."""
    if not folder.is_dir():  # a training class without test images
        return []
    known = Image.registered_extensions()
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix.lower() in known and path.name[0] != "." and path.is_file()
    )
