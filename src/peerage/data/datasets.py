"""The data sets by name; each is a frozen dataclass that loads its files from the cache folder."""

import functools
import gzip
from dataclasses import dataclass, replace
from importlib.util import find_spec
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
from peerage.data.leaf import CHARACTERS, Femnist
from peerage.data.partition import stratified
from peerage.data.photos import IMAGENETTE_CLASSES, MAMMALS, SIDE, FlickrMammals, Imagenette
from peerage.data.scaling import Scaling
from peerage.data.so2sat import So2Sat
from peerage.data.sources import IDX_SIZES
from peerage.data.tensors import Dataset, in_memory
from peerage.errors import InputError, check_at_least
from peerage.randomness import numpy_stream

TEN_DIGITS = tuple("0123456789")
MNIST_SCALING = Scaling((0.1307,), (0.3081,), levels=255)
DIGITS_FILE = Path("datasets/data/digits.csv.gz")  # in the folder of scikit-learn
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
}


class DatasetSpec(Protocol):
    def load(self, cache: Path) -> Dataset: ...


@dataclass(frozen=True)
class Digits:
    """1797 handwritten digits of 8 x 8 pixels, shipped with scikit-learn (no download).

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
    """Pixels [1797, 8, 8] from 0 to 16, and labels, from the file inside scikit-learn.

    Reading the file saves the import of scikit-learn, which takes a second in every peer.
    """
    found = find_spec("sklearn")  # imports nothing
    file = Path(found.origin if found and found.origin else "").parent / DIGITS_FILE
    if not file.exists():  # another version of scikit-learn
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target.astype(np.int64)
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


@dataclass(frozen=True)
class Mnist:
    """70 000 handwritten digits of 28 x 28 pixels, (x - 0.1307) / 0.3081."""

    name: ClassVar[str] = "mnist"
    classes: ClassVar[tuple[str, ...]] = TEN_DIGITS
    train: int | None = None  # number of training examples, stratified by class; None: all

    def __post_init__(self) -> None:
        check_at_least("train", self.train, 1, " example")

    def load(self, cache: Path) -> Dataset:
        files = read_files(self.name, cache)
        x, y, test_x, test_y = (read_idx(files[name], name) for name in IDX_SIZES)
        mean, deviation = MNIST_SCALING.mean[0], MNIST_SCALING.deviation[0]
        train, test = (_unit(part[:, None]).sub_(mean).div_(deviation) for part in (x, test_x))
        whole = Dataset(
            self.name,
            train,
            _labels(y),
            test,
            _labels(test_y),
            self.classes,
            scaling=MNIST_SCALING,
        )
        return training_subset(self.train, whole)


@dataclass(frozen=True)
class FashionMnist(Mnist):
    """70 000 images of clothes of 28 x 28 pixels, normalised with the numbers of MNIST (P0)."""

    name: ClassVar[str] = "fashion-mnist"
    classes: ClassVar[tuple[str, ...]] = CLOTHES


@dataclass(frozen=True)
class Cifar10:
    """60 000 colour images of 32 x 32 pixels, with values in [0, 1] (P0) or [-1, 1] (P3, P4).

    P2's logistic regression uses grey images of 28 x 28 pixels. Grey is 0.299 red + 0.587 green +
    0.114 blue; scaling is bilinear with antialiasing.
    """

    normalise: Literal["unit", "signed"] = "unit"
    train: int | None = None
    grey: bool = False  # one channel instead of red, green and blue
    side: int | None = None  # pixels; None: 32

    def __post_init__(self) -> None:
        check_at_least("train", self.train, 1, " example")
        specs.check_choices(self)
        check_at_least("side", self.side, 1, " pixel")

    def load(self, cache: Path) -> Dataset:
        files = read_files("cifar10", cache)
        batches = {name: read_cifar(content, name) for name, content in files.items()}
        test_x, test_y = batches.pop("test_batch.bin")
        train_x, train_y = (np.concatenate(parts) for parts in zip(*batches.values(), strict=True))
        whole = Dataset(
            "cifar10",
            self._pictures(train_x),
            _labels(train_y),
            self._pictures(test_x),
            _labels(test_y),
            THINGS,
            scaling=self._scaling(),
        )
        return training_subset(self.train, whole)

    def _scaling(self) -> Scaling:
        bytes_kept = not self.grey and self.side is None
        signed = Scaling((0.5,), (0.5,), levels=255 if bytes_kept else None)
        return signed if self.normalise == "signed" else Scaling()

    def _pictures(self, images: NDArray[np.uint8]) -> Tensor:
        x = _unit(images)
        if self.grey:
            x = to_grey(x)
        if self.side is not None:
            x = resize(x, self.side)
        return x.sub_(0.5).div_(0.5) if self.normalise == "signed" else x


DATASETS: dict[str, type[DatasetSpec]] = {
    "digits": Digits,
    "mnist": Mnist,
    "fashion-mnist": FashionMnist,
    "cifar10": Cifar10,
    "femnist": Femnist,
    "so2sat": So2Sat,
    "imagenette": Imagenette,
    "flickr-mammals": FlickrMammals,
    "npz": Npz,
    "idx": Idx,
    "folder": Folder,
}


def dataset_info(dataset: Any) -> DatasetInfo | None:
    """Shape and sizes of a data set with these options; None for a custom data set.

    >>> dataset_info(Cifar10()).shape, dataset_info(Cifar10(grey=True, side=28)).shape
    ((3, 32, 32), (1, 28, 28))
    """
    name = next((name for name, cls in DATASETS.items() if type(dataset) is cls), "")
    known = DATASET_INFO.get(name)
    if known and isinstance(dataset, Cifar10):
        channels, height, width = known.shape
        shape = (1 if dataset.grey else channels, dataset.side or height, dataset.side or width)
        return known._replace(shape=shape)
    return known


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
