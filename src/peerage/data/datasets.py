"""The data sets by name; each is a frozen dataclass that loads its files from the cache folder."""

import functools
from dataclasses import dataclass, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from peerage import specs
from peerage.data.custom import Folder, Idx, Npz
from peerage.data.fetch import read_files
from peerage.data.formats import read_cifar, read_idx
from peerage.data.hub import HuggingFace
from peerage.data.leaf import CHARACTERS, Femnist
from peerage.data.objects import BREEDS, MODELS, OBJECTS, Caltech101, OxfordPets, StanfordCars
from peerage.data.partition import stratified
from peerage.data.photos import (
    IMAGENETTE_CLASSES,
    MAMMALS,
    SIDE,
    SIGNED_SCALING,
    FlickrMammals,
    Imagenette,
)
from peerage.data.scaling import Scaling
from peerage.data.so2sat import So2Sat
from peerage.data.sources import CIFAR100, IDX_SIZES
from peerage.data.tables import Csv
from peerage.data.tensors import Dataset, in_memory
from peerage.errors import DataError, InputError, check_at_least
from peerage.randomness import numpy_stream

TEN_DIGITS = tuple("0123456789")
MNIST_SCALING = Scaling((0.1307,), (0.3081,), levels=255)
# The images of scikit-learn's `load_digits`, as bytes; see NOTICE for their origin.
DIGITS_FILE = Path(__file__).with_name("digits.npz")
DIGITS_SHA256 = "6f801551877abf69fbf3711373bb642a18dc933430a3385cd6febc235225ea6f"
CLOTHES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
THINGS = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
# Mean and deviation of red, green and blue in the training images
CIFAR10_SCALING = Scaling((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), levels=255)
CIFAR100_SCALING = Scaling((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), levels=255)
BLOCK = 1000  # images that are normalised at a time: 12 MB


class DatasetInfo(NamedTuple):
    """Shape and sizes of a published data set, known without loading it."""

    shape: tuple[int, ...]  # of an example
    classes: int
    train: int  # examples
    test: int
    groups: int | None = None  # such as writers


DATASET_INFO = {
    "digits": DatasetInfo((1, 8, 8), 10, 1437, 360),
    "mnist": DatasetInfo((1, 28, 28), 10, 60_000, 10_000),
    "fashion-mnist": DatasetInfo((1, 28, 28), 10, 60_000, 10_000),
    "cifar10": DatasetInfo((3, 32, 32), 10, 50_000, 10_000),
    # 805 263 in all; the exact split into training and test needs the files.
    "femnist": DatasetInfo((1, 28, 28), len(CHARACTERS), 723_000, 82_000, groups=3550),
    "so2sat": DatasetInfo((10, 32, 32), 17, 352_366, 30_000),
    "imagenette": DatasetInfo((3, SIDE, SIDE), len(IMAGENETTE_CLASSES), 9469, 3925),
    # 48 158 in all, of which a fifth is held out.
    "flickr-mammals": DatasetInfo((3, SIDE, SIDE), MAMMALS, 38_526, 9632),
    "cifar100": DatasetInfo((3, 32, 32), 100, 50_000, 10_000),
    # 8677 in all, of which a fifth is held out.
    "caltech101": DatasetInfo((3, SIDE, SIDE), OBJECTS, 6942, 1735),
    "oxford-pets": DatasetInfo((3, SIDE, SIDE), BREEDS, 3680, 3669),
    "stanford-cars": DatasetInfo((3, SIDE, SIDE), MODELS, 8144, 8041),
}


class DatasetSpec(Protocol):
    def load(self, cache: Path) -> Dataset: ...


@dataclass(frozen=True)
class Digits:
    """1797 handwritten digits of 8 x 8 pixels, part of the package (no download).

    Pixels (0 to 16) are scaled to [0, 1] and standardised with the mean and deviation of all
    training pixels. A stratified test set of 360 images, the same for every seed, is held out; 1437
    images are for training.
    """

    def load(self, cache: Path) -> Dataset:
        pixels, y = _read_digits()
        x = pixels[:, None] / 16.0
        test = np.zeros(len(y), dtype=bool)
        test[stratified(y, 360, numpy_stream(0, "digits test set"))] = True
        mean, deviation = float(x[~test].mean()), float(x[~test].std())
        x = (x - mean) / deviation
        loaded = in_memory(x[~test], y[~test], x[test], y[test], classes=TEN_DIGITS, name="digits")
        return replace(loaded, scaling=Scaling((mean,), (deviation,), levels=16, precise=True))


@functools.cache
def _read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels [1797, 8, 8] from 0 to 16, and labels."""
    try:
        content = DIGITS_FILE.read_bytes()
    except OSError as error:
        raise DataError(f"{DIGITS_FILE} cannot be read: {error}; install peerage again") from None
    if sha256(content).hexdigest() != DIGITS_SHA256:
        raise DataError(f"{DIGITS_FILE} was altered; install peerage again")
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        return arrays["x"].astype(np.float64), arrays["y"].astype(np.int64)


@dataclass(frozen=True)
class Mnist:
    """70 000 handwritten digits of 28 x 28 pixels, (x - 0.1307) / 0.3081, or in [0, 1] (P2)."""

    name: ClassVar[str] = "mnist"
    classes: ClassVar[tuple[str, ...]] = TEN_DIGITS
    train: int | None = None  # number of training examples, stratified by class; None: all
    normalise: Literal["unit"] | None = None  # unit: values in [0, 1]; None: as P0 does

    def __post_init__(self) -> None:
        check_at_least("train", self.train, 1, " example")
        specs.check_choices(self)

    def load(self, cache: Path) -> Dataset:
        files = read_files(self.name, cache)
        x, y, test_x, test_y = (read_idx(files[name], name) for name in IDX_SIZES)
        scaling = MNIST_SCALING if self.normalise is None else Scaling()
        train, test = (scaling.apply(_unit(part[:, None])) for part in (x, test_x))
        whole = Dataset(
            self.name,
            train,
            _labels(y),
            test,
            _labels(test_y),
            self.classes,
            scaling=scaling,
        )
        return training_subset(self.train, whole)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """70 000 images of clothes of 28 x 28 pixels, normalised with the numbers of MNIST (P0)."""

    name: ClassVar[str] = "fashion-mnist"
    classes: ClassVar[tuple[str, ...]] = CLOTHES


Batch = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # images and labels


@dataclass(frozen=True)
class Cifar10:
    """60 000 colour images of 32 x 32 pixels, with values in [0, 1] (P0) or [-1, 1] (P3, P4).

    P2's logistic regression uses grey images of 28 x 28 pixels. Grey is 0.299 red + 0.587 green +
    0.114 blue; scaling is bilinear with antialiasing. P1 has `normalise=standard`: mean 0 and
    deviation 1 in every channel of the training images.
    """

    name: ClassVar[str] = "cifar10"
    standard: ClassVar[Scaling] = CIFAR10_SCALING
    normalise: Literal["unit", "signed", "standard"] = "unit"
    train: int | None = None
    grey: bool = False  # one channel instead of red, green and blue
    side: int | None = None  # pixels; None: 32

    def __post_init__(self) -> None:
        check_at_least("train", self.train, 1, " example")
        specs.check_choices(self)
        check_at_least("side", self.side, 1, " pixel")
        if self.grey and self.normalise == "standard":
            raise InputError(
                "normalise=standard is for red, green and blue; remove grey, or use unit or signed"
            )

    def load(self, cache: Path) -> Dataset:
        (train_x, train_y), (test_x, test_y), classes = self._read(cache)
        whole = Dataset(
            self.name,
            self._pictures(train_x),
            _labels(train_y),
            self._pictures(test_x),
            _labels(test_y),
            classes,
            scaling=self._scaling(),
        )
        return training_subset(self.train, whole)

    def _read(self, cache: Path) -> tuple[Batch, Batch, tuple[str, ...]]:
        """The training batch, the test batch and the names of the classes."""
        files = read_files(self.name, cache)
        batches = {name: read_cifar(content, name) for name, content in files.items()}
        test = batches.pop("test_batch.bin")
        x, y = (np.concatenate(parts) for parts in zip(*batches.values(), strict=True))
        return (x, y), test, THINGS

    def _scaling(self) -> Scaling:
        if self.normalise == "unit":
            return Scaling()
        scaling = self.standard if self.normalise == "standard" else SIGNED_SCALING
        bytes_kept = not self.grey and self.side is None
        return scaling if bytes_kept else replace(scaling, levels=None)

    def _pictures(self, images: NDArray[np.uint8]) -> Tensor:
        x = _unit(images)
        if self.grey:
            x = to_grey(x)
        if self.side is not None:
            x = resize(x, self.side)
        if self.normalise != "unit":
            for block in torch.split(x, BLOCK):
                block.copy_(self._scaling().apply(block))
        return x


@dataclass(frozen=True)
class Cifar100(Cifar10):
    """60 000 colour images of 32 x 32 pixels in 100 classes, with values in [0, 1].

    From the files of the binary version. Users download the archive; if it is missing, the error
    says where to get it. The options are those of `cifar10` (P1: `normalise=standard`).
    """

    name: ClassVar[str] = "cifar100"
    standard: ClassVar[Scaling] = CIFAR100_SCALING
    path: str | None = None  # folder of the files; None: cifar100 in the cache folder

    def _read(self, cache: Path) -> tuple[Batch, Batch, tuple[str, ...]]:
        root = cache / self.name if self.path is None else Path(self.path).expanduser()
        *batches, names = CIFAR100.find(self.name, root)
        train, test = (
            read_cifar(np.fromfile(file, np.uint8), str(file), labels=2) for file in batches
        )
        classes = tuple(names.read_text(encoding="utf-8").split())
        if len(classes) != DATASET_INFO[self.name].classes:
            raise DataError(
                f"{names} has {len(classes)} names of classes, but there are "
                f"{DATASET_INFO[self.name].classes}; unpack the archive again"
            )
        return train, test, classes


DATASETS: dict[str, type[DatasetSpec]] = {
    "digits": Digits,
    "mnist": Mnist,
    "fashion-mnist": FashionMnist,
    "cifar10": Cifar10,
    "femnist": Femnist,
    "so2sat": So2Sat,
    "imagenette": Imagenette,
    "flickr-mammals": FlickrMammals,
    "cifar100": Cifar100,
    "caltech101": Caltech101,
    "oxford-pets": OxfordPets,
    "stanford-cars": StanfordCars,
    "npz": Npz,
    "csv": Csv,
    "idx": Idx,
    "folder": Folder,
    "hf": HuggingFace,
}


def dataset_info(dataset: Any) -> DatasetInfo | None:
    """Shape and sizes of a data set with these options; None for a custom data set.

    >>> dataset_info(Cifar10()).shape, dataset_info(Cifar10(grey=True, side=28)).shape
    ((3, 32, 32), (1, 28, 28))
    """
    name = next((name for name, cls in DATASETS.items() if type(dataset) is cls), "")
    known = DATASET_INFO.get(name)
    if known is None or len(known.shape) != 3:
        return known
    channels, height, width = known.shape
    side = getattr(dataset, "side", None)
    shape = (1 if getattr(dataset, "grey", False) else channels, side or height, side or width)
    return known._replace(shape=shape)


def training_subset(count: int | None, whole: Dataset) -> Dataset:
    """The data set with `count` stratified training examples, the same for every seed."""
    if count is None:
        return whole
    if count > len(whole.train_y):
        raise InputError(
            f"train={count} is more than the {len(whole.train_y)} training examples of "
            f"{whole.name}; lower it"
        )
    rng = numpy_stream(0, "training subset")
    kept = torch.from_numpy(stratified(whole.train_y.numpy(), count, rng))
    groups = None if whole.groups is None else whole.groups[kept]
    return replace(whole, train_x=whole.train_x[kept], train_y=whole.train_y[kept], groups=groups)


def to_grey(x: Tensor) -> Tensor:
    """The brightness [N, 1, H, W] of red, green and blue [N, 3, H, W]."""
    return (0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2])[:, None]


def resize(x: Tensor, side: int) -> Tensor:
    return functional.interpolate(x, (side, side), mode="bilinear", antialias=True)


def _unit(images: NDArray[np.uint8]) -> Tensor:
    """x / 255 in channels_last memory; bytes are rearranged before the conversion."""
    x = torch.from_numpy(images).contiguous(memory_format=torch.channels_last).to(torch.float32)
    return x.div_(255)


def _labels(labels: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))
