"""Caltech101, Oxford-IIIT Pets and Stanford Cars: photographs of objects (P1).

The paper states neither the size of images nor how they were normalised. By default they have
64 x 64 pixels, and are normalised with the mean and deviation of ImageNet; EfficientNet is usually
given 224 x 224 pixels. They are prepared as in `photos`, without the bounding boxes of cars.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peerage.data.photos import IMAGENET_SCALING, SIDE, LabelledFiles, Photos
from peerage.data.sources import CALTECH101, OXFORD_PETS, STANFORD_CARS
from peerage.data.tensors import Dataset
from peerage.errors import DataError, check_at_least

OBJECTS = 101  # classes of Caltech101
BREEDS = 37  # classes of Oxford-IIIT Pets
MODELS = 196  # classes of Stanford Cars
BACKGROUND = "BACKGROUND_Google"  # a folder of Caltech101 that is no class


@dataclass(frozen=True)
class Caltech101:
    """8677 photographs of 101 kinds of objects, at 64 x 64 pixels.

    The folder BACKGROUND_Google is left out. A fixed fifth of every class is held out. Users
    download the archive; if it is missing, the error says where to get it.
    """

    path: str | None = None  # folder of the classes; None: caltech101 in the cache folder
    side: int = SIDE  # pixels

    def __post_init__(self) -> None:
        check_at_least("side", self.side, 1, " pixel")

    def load(self, cache: Path) -> Dataset:
        photos = Photos(
            "caltech101", CALTECH101.archive, IMAGENET_SCALING, self.side, ignored=(BACKGROUND,)
        )
        [folder] = CALTECH101.find(photos.name, photos.root(self.path, cache))
        classes = photos.classes(folder, OBJECTS)
        return photos.read([photos.labelled_files(folder, classes)], tuple(classes), cache)


@dataclass(frozen=True)
class OxfordPets:
    """7349 photographs of 37 breeds of cats and dogs, at 64 x 64 pixels.

    The published lists of training and test images are used. Users download the archives; if they
    are missing, the error says where to get them.
    """

    path: str | None = None  # folder of images and annotations; None: oxford-pets in the cache
    side: int = SIDE  # pixels

    def __post_init__(self) -> None:
        check_at_least("side", self.side, 1, " pixel")

    def load(self, cache: Path) -> Dataset:
        archives = "images.tar.gz and annotations.tar.gz"
        photos = Photos("oxford-pets", archives, IMAGENET_SCALING, self.side)
        lists = OXFORD_PETS.find(photos.name, photos.root(self.path, cache))
        breeds: dict[int, str] = {}
        parts = [read_list(file, breeds, photos.remedy) for file in lists]
        if len(breeds) != BREEDS:
            raise DataError(
                f"{lists[0].parent} lists {len(breeds)} breeds, but {photos.name} has {BREEDS}; "
                f"{photos.remedy}"
            )
        check_images(parts, photos.remedy)
        return photos.read(parts, tuple(breeds[label] for label in range(BREEDS)), cache)


def read_list(file: Path, breeds: dict[int, str], remedy: str) -> LabelledFiles:
    """The images of a list such as trainval.txt; adds their breeds by label.

    A line is `Abyssinian_100 1 1 1`: the name of an image, its class from 1 on, and two other
    numbers. The name of the class is that of the image without its number.
    """
    found: LabelledFiles = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, *numbers = line.split()
        if not numbers or not numbers[0].isdecimal() or not 1 <= int(numbers[0]) <= BREEDS:
            raise DataError(
                f"{file}, line {number}: {line!r} is not an image and a class from 1 to {BREEDS}; "
                f"{remedy}"
            )
        label = int(numbers[0]) - 1
        breeds[label] = name.rpartition("_")[0]
        found.append((file.parent.parent / "images" / f"{name}.jpg", label))
    if not found:
        raise DataError(f"{file} lists no images; {remedy}")
    return found


@dataclass(frozen=True)
class StanfordCars:
    """16 185 photographs of 196 models of cars, at 64 x 64 pixels.

    The published training and test sets are used. Users download the archives; if they are missing,
    the error says where to get them.
    """

    path: str | None = None  # folder of images and annotations; None: stanford-cars in the cache
    side: int = SIDE  # pixels

    def __post_init__(self) -> None:
        check_at_least("side", self.side, 1, " pixel")

    def load(self, cache: Path) -> Dataset:
        archives = "cars_train.tgz, cars_test.tgz and car_devkit.tgz"
        photos = Photos("stanford-cars", archives, IMAGENET_SCALING, self.side)
        root = photos.root(self.path, cache)
        train, test, meta = STANFORD_CARS.find(photos.name, root)
        names = tuple(str(name) for name in read_matlab(meta, "class_names"))
        if len(names) != MODELS:
            raise DataError(
                f"{meta} has {len(names)} classes, but {photos.name} has {MODELS}; {photos.remedy}"
            )
        parts = [
            read_annotations(file, root / folder)
            for file, folder in ((train, "cars_train"), (test, "cars_test"))
        ]
        check_images(parts, photos.remedy)
        return photos.read(parts, names, cache)


def read_annotations(file: Path, folder: Path) -> LabelledFiles:
    """The images of a MATLAB file with the fields fname and class; classes are numbered from 1."""
    annotations = read_matlab(file, "annotations")
    fields = annotations.dtype.names or ()
    if missing := {"fname", "class"}.difference(fields):
        raise DataError(f"{file} has no field {min(missing)}; {download_again(file)}")
    labels = [int(label) for label in annotations["class"]]
    if wrong := [label for label in labels if not 1 <= label <= MODELS]:
        raise DataError(
            f"{file} has class {wrong[0]}, but classes are numbered 1 to {MODELS}; "
            f"{download_again(file)}"
        )
    names = [folder / str(name) for name in annotations["fname"]]
    return [(name, label - 1) for name, label in zip(names, labels, strict=True)]


def read_matlab(file: Path, variable: str) -> Any:
    """A variable of a MATLAB file, as an array of one axis."""
    from scipy.io import loadmat  # slow to import
    from scipy.io.matlab import MatReadError

    try:
        return np.atleast_1d(loadmat(file, squeeze_me=True)[variable])
    except KeyError:
        raise DataError(f"{file} has no variable {variable}; {download_again(file)}") from None
    except (OSError, ValueError, TypeError, NotImplementedError, MatReadError, zlib.error) as error:
        raise DataError(
            f"{file} cannot be read as a MATLAB file ({error}); {download_again(file)}"
        ) from None


def download_again(file: Path) -> str:
    return f"download {file.name} again"


def check_images(parts: list[LabelledFiles], remedy: str) -> None:
    """Raise an error if an image that a list names is absent."""
    for path, _ in (file for part in parts for file in part):
        if not path.is_file():
            raise DataError(f"{path} is missing; {remedy}")
