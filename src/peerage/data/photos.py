"""Photographs, and two data sets of them: Imagenette and Flickr-Mammals (P3).

As in the code of P3, the shorter side is resized to 64 pixels (bilinear with antialiasing), the
centre is cropped, and the orientation in EXIF is ignored. All files become red, green and blue,
also grey ones and those for printing (CMYK). `objects` has data sets with other sides.

Decoding can take minutes, so the pixels are cached as bytes in a file named by a hash of the names,
sizes and times of the files.
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from peerage.data.pictures import class_folders, decode, image_files
from peerage.data.scaling import Scaling
from peerage.data.sources import FLICKR_MAMMALS, IMAGENETTE
from peerage.data.tensors import Dataset, training_part
from peerage.errors import DataError, DiskError
from peerage.files import write_bytes

Pixels = NDArray[np.uint8]  # [N, side, side, 3]
LabelledFiles = list[tuple[Path, int]]  # images, with the numbers of their classes

SIDE = 64  # pixels
CHECKSUM = 32  # bytes of a SHA-256, at the end of a cached file
VERSION = 1  # of the preparation; a new number invalidates cached files
BLOCK = 256  # images that are normalised at a time: 13 MB of 64 x 64 pixels
MANY = 1000  # images; decoding fewer takes no time worth a progress bar

# By the name of their folder, an identifier of WordNet
IMAGENETTE_CLASSES = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}
MAMMALS = 41  # classes of Flickr-Mammals
IMAGENET_SCALING = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), levels=255)
SIGNED_SCALING = Scaling((0.5,), (0.5,), levels=255)


@dataclass(frozen=True)
class Imagenette:
    """13 394 photographs of ten classes of ImageNet, at 64 x 64 pixels, from imagenette2-160.

    Normalised with the mean and deviation of ImageNet. The folder val is the test set. Users
    download the archive; if it is missing, the error says where to get it.
    """

    path: str | None = None  # folder of the images; None: imagenette in the cache folder

    def load(self, cache: Path) -> Dataset:
        photos = Photos("imagenette", IMAGENETTE.archive, IMAGENET_SCALING)
        parts = IMAGENETTE.find(photos.name, photos.root(self.path, cache))
        files = [photos.labelled_files(part, list(IMAGENETTE_CLASSES)) for part in parts]
        return photos.read(files, tuple(IMAGENETTE_CLASSES.values()), cache)


@dataclass(frozen=True)
class FlickrMammals:
    """48 158 photographs of 41 species of mammals from Flickr, at 64 x 64 pixels.

    Values are in [-1, 1]. Images may be in folders inside the folder of a class. Without folders of
    training and test images, a fixed fifth of every class is held out. Users download the archive;
    if it is missing, the error says where to get it. The data set takes 2.4 GB of memory.
    """

    path: str | None = None  # folder of the images; None: flickr-mammals in the cache folder

    def load(self, cache: Path) -> Dataset:
        photos = Photos("flickr-mammals", FLICKR_MAMMALS.archive, SIGNED_SCALING)
        parts = FLICKR_MAMMALS.find(photos.name, photos.root(self.path, cache))
        classes = photos.classes(parts[0], MAMMALS)
        files = [photos.labelled_files(part, classes) for part in parts]
        return photos.read(files, tuple(classes), cache)


@dataclass(frozen=True)
class Photos:
    """How a data set of photographs is read."""

    name: str
    archive: str  # what users unpack, for errors
    scaling: Scaling
    side: int = SIDE
    ignored: tuple[str, ...] = ()  # folders that are no classes

    @property
    def remedy(self) -> str:
        return f"unpack {self.archive} again"

    def root(self, path: str | None, cache: Path) -> Path:
        """The folder of the data set: that of the user, or the one in the cache."""
        return cache / self.name if path is None else Path(path).expanduser()

    def read(
        self, parts: Sequence[LabelledFiles], classes: tuple[str, ...], cache: Path
    ) -> Dataset:
        """The data set of the training and the test files, or of files that are split here."""
        together = [file for part in parts for file in part]
        y = torch.tensor([label for _, label in together])
        if len(parts) == 1:
            train = training_part(y, y, self.name)  # by labels alone
        else:
            train = torch.arange(len(y)) < len(parts[0])
        files = [path for path, _ in together]
        pixels = cached_pixels(self.name, files, cache, self.side)
        return Dataset(
            self.name,
            normalised(pixels, train, self.scaling),
            y[train],
            normalised(pixels, ~train, self.scaling),
            y[~train],
            classes,
            scaling=self.scaling,
        )

    def classes(self, part: Path, count: int) -> list[str]:
        """The names of the class folders, which must be so many."""
        found = [name for name in class_folders(part) if name not in self.ignored]
        if len(found) != count:
            raise DataError(
                f"{part} has {len(found)} class folders, but {self.name} has {count} "
                f"classes; {self.remedy}"
            )
        return found

    def labelled_files(self, part: Path, classes: Sequence[str]) -> LabelledFiles:
        """The images of a part, with the numbers of their classes."""
        found = set(class_folders(part)) - set(self.ignored)
        if lacking := sorted(set(classes) - found):
            raise DataError(f"{part} has no folder for class {lacking[0]}; {self.remedy}")
        if unknown := sorted(found - set(classes)):
            raise DataError(
                f"{part / unknown[0]} is no class of {self.name}; remove it, or {self.remedy}"
            )
        files: LabelledFiles = []
        for label, name in enumerate(classes):
            folder = part / name
            images = [path for pattern in ("*", "*/*") for path in image_files(folder, pattern)]
            if not images:
                raise DataError(f"{folder} holds no images; {self.remedy}")
            files += [(path, label) for path in images]
        return files


def square(image: Image.Image, side: int = SIDE) -> Image.Image:
    """The centre of an image whose shorter side was resized, rounded as in torchvision."""
    shorter = min(image.size)
    width, height = (side * length // shorter for length in image.size)
    resized = image.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return resized.crop((left, top, left + side, top + side))


def normalised(pixels: Pixels, chosen: Tensor, scaling: Scaling) -> Tensor:
    """The chosen images [n, 3, side, side] in channels_last memory, converted block by block."""
    rows = chosen.nonzero().flatten().numpy()
    x = torch.empty(len(rows), *pixels.shape[1:]).permute(0, 3, 1, 2)
    for start in range(0, len(rows), BLOCK):
        part = torch.from_numpy(pixels[rows[start : start + BLOCK]]).permute(0, 3, 1, 2)
        x[start : start + BLOCK] = scaling.apply(part.float().div_(255))
    return x


# The cache


def cached_pixels(name: str, files: Sequence[Path], cache: Path, side: int = SIDE) -> Pixels:
    """The pixels of the files, from the cache if they were decoded before."""
    path = cache / "decoded" / f"{name}-{key_of(files, side)}.bin"
    shape = (len(files), side, side, 3)
    content = read(path, prod(shape))
    if content is None:
        content = decode_all(name, files, side)
        with suppress(OSError, DiskError):  # a run does not need the cache
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content.data)
    return content[:-CHECKSUM].reshape(shape)


def key_of(files: Sequence[Path], side: int = SIDE) -> str:
    """A hash of the names, sizes and times of the files, and of what prepares them."""
    other_side = "" if side == SIDE else f" {side}"
    hashed = sha256(f"{VERSION} {PIL.__version__}{other_side}".encode())
    for path in files:
        about = path.stat()
        hashed.update(
            f"{path.parent.name}/{path.name} {about.st_size} {about.st_mtime_ns}\n".encode()
        )
    return hashed.hexdigest()[:32]


def read(path: Path, size: int) -> NDArray[np.uint8] | None:
    """The content of a cached file of `size` bytes and a checksum; None if absent or damaged."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError:
        return None
    if len(content) != size + CHECKSUM:
        return None
    checksum = sha256(content[:-CHECKSUM].data).digest()
    return content if content[-CHECKSUM:].tobytes() == checksum else None


def decode_all(name: str, files: Sequence[Path], side: int) -> NDArray[np.uint8]:
    """The pixels of all files, followed by their checksum."""
    content = np.empty(len(files) * side * side * 3 + CHECKSUM, np.uint8)
    pixels = content[:-CHECKSUM].reshape(-1, side, side, 3)
    for i, path in enumerate(with_progress(files, f"decoding {name}, once")):
        pixels[i] = decode(path, partial(square, side=side))
    content[-CHECKSUM:] = np.frombuffer(sha256(content[:-CHECKSUM].data).digest(), np.uint8)
    return content


def with_progress(files: Sequence[Path], label: str) -> Iterable[Path]:
    """The files, with a progress bar on standard error if there are many and it is a terminal."""
    if len(files) < MANY or not sys.stderr.isatty():
        return files
    from rich.console import Console
    from rich.progress import track

    return track(files, label, console=Console(stderr=True), transient=True)
