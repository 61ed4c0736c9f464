"""So2Sat LCZ42, version 3, random split: satellite images labelled with local climate zones (P4).

A file holds sen1 [N, 32, 32, 8], sen2 [N, 32, 32, 10] and label [N, 17], which is one-hot.
Zhu et al., 2020. arXiv:1912.12171.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.data.partition import stratified
from peerage.data.scaling import Scaling
from peerage.data.sources import SO2SAT
from peerage.data.tensors import Dataset
from peerage.errors import DataError, InputError, check_at_least
from peerage.randomness import numpy_stream

Ints = NDArray[np.int64]
Images = NDArray[np.float32]  # [N, 32, 32, 10]
Bands = NDArray[np.float64]  # [10]

IMAGE = (32, 32, 10)
ZONES = (
    "compact high-rise",
    "compact mid-rise",
    "compact low-rise",
    "open high-rise",
    "open mid-rise",
    "open low-rise",
    "lightweight low-rise",
    "large low-rise",
    "sparsely built",
    "heavy industry",
    "dense trees",
    "scattered trees",
    "bush or scrub",
    "low plants",
    "bare rock or paved",
    "bare soil or sand",
    "water",
)
BLOCK = 256  # images that are read or summed at a time: 20 MB
GAP = 2  # reading one image more takes no longer than a second read
REMEDY = f"download {SO2SAT.title} again"


@dataclass(frozen=True)
class So2Sat:
    """Satellite images of 32 x 32 pixels, with the ten bands of Sentinel-2, in 17 climate zones.

    Every band is standardised with its mean and deviation in the training examples. The files are
    too large to be fetched; if they are missing, the error says where to get them. Only the
    requested examples are read; one takes 40 kB of memory.
    """

    path: str | None = None  # folder of the files; None: so2sat in the cache folder
    train: int | None = None  # number of training examples, stratified by class; None: all
    test: int = 30_000  # number of test examples, or fewer if there are fewer; 30 000 in P4

    def __post_init__(self) -> None:
        check_at_least("train", self.train, 1, " example")
        check_at_least("test", self.test, 1, " example")

    def load(self, cache: Path) -> Dataset:
        _import_h5py()  # an error about the package comes before one about the files
        root = cache / "so2sat" if self.path is None else Path(self.path).expanduser()
        training, testing = SO2SAT.find("so2sat", root)
        with _open(training) as file:
            y = _labels(file, training)
            if self.train is not None and self.train > len(y):
                raise InputError(
                    f"train={self.train} is more than the {len(y)} training examples of "
                    f"{training}; lower it"
                )
            rows = _choose_rows(y, self.train or len(y), "training subset")
            train_x, train_y = _images(file, training, rows), torch.from_numpy(y[rows])
        with _open(testing) as file:
            y = _labels(file, testing)
            rows = _choose_rows(y, min(self.test, len(y)), "test subset")
            test_x, test_y = _images(file, testing, rows), torch.from_numpy(y[rows])
        mean, deviation = moments(train_x)
        return Dataset(
            "so2sat",
            _standardise(train_x, mean, deviation),
            train_y,
            _standardise(test_x, mean, deviation),
            test_y,
            ZONES,
            # A shift gets the reflectances of the files, most of which lie in [0, 1].
            scaling=Scaling(
                tuple(map(float, mean)), tuple(map(float, _divisor(deviation))), precise=True
            ),
        )


def runs(rows: Ints, gap: int) -> list[Ints]:
    """Sorted rows, split into parts for one read each; none crosses a block.

    >>> [part.tolist() for part in runs(np.array([3, 4, 6, 9, 255, 256]), gap=2)]
    [[3, 4, 6], [9], [255], [256]]
    """
    far = np.diff(rows) > gap
    return np.split(rows, np.flatnonzero(far | (np.diff(rows // BLOCK) > 0)) + 1)


def moments(x: Images) -> tuple[Bands, Bands]:
    """Mean and deviation of every band, summed in double precision block by block."""
    parts = range(0, len(x), BLOCK)
    pixels = x.size // x.shape[-1]
    mean = sum(_pixels(x, start).sum(0) for start in parts) / pixels
    squares = sum(((_pixels(x, start) - mean) ** 2).sum(0) for start in parts)
    return mean, np.sqrt(squares / pixels)


def _pixels(x: Images, start: int) -> NDArray[np.float64]:
    return x[start : start + BLOCK].reshape(-1, x.shape[-1]).astype(np.float64)


def _standardise(x: Images, mean: Bands, deviation: Bands) -> Tensor:
    """Standardised images [N, 10, 32, 32]; changes x in place. A constant band becomes zero."""
    x -= mean
    x /= _divisor(deviation)
    return torch.from_numpy(x).permute(0, 3, 1, 2)


def _divisor(deviation: Bands) -> Bands:
    return np.where(deviation > 0, deviation, 1.0)


def _import_h5py() -> Any:
    """The optional package h5py, which only this data set needs."""
    try:
        import h5py
    except ImportError:
        raise InputError("so2sat requires h5py; pip install 'peerage[so2sat]'") from None
    return h5py


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    h5py = _import_h5py()
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:  # errors of HDF5 on opening and on reading
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be read as HDF5: {reason}; {REMEDY}") from None


def _array(file: Any, path: Path, key: str, shape: tuple[int, ...]) -> Any:
    """The array of a file, not yet read, with its shape checked."""
    found = file.get(key)
    if not isinstance(found, _import_h5py().Dataset):
        raise DataError(
            f"{path} has no array {key!r}, only {', '.join(sorted(file)) or 'nothing'}; {REMEDY}"
        )
    if found.dtype.kind not in "buif" or not found.shape or found.shape[1:] != shape:
        wanted = ", ".join(map(str, ("N", *shape)))
        raise DataError(
            f"{path}: {key} must be numbers of shape ({wanted}), "
            f"got {found.dtype} of shape {found.shape}; {REMEDY}"
        )
    return found


def _labels(file: Any, path: Path) -> Ints:
    """The class numbers of all examples."""
    hot = _array(file, path, "label", (len(ZONES),))[:]
    if len(hot) == 0:
        raise DataError(f"{path} is empty; {REMEDY}")
    bad = np.flatnonzero(((hot != 0) & (hot != 1)).any(1) | (hot.sum(1) != 1))
    if len(bad):
        raise DataError(f"{path}: label {bad[0]} is not one-hot; {REMEDY}")
    numbers: Ints = hot.argmax(1).astype(np.int64)
    return numbers


def _choose_rows(y: Ints, count: int, purpose: str) -> Ints:
    """Sorted rows of `count` stratified examples, the same for every seed."""
    if count == len(y):
        return np.arange(count)
    return stratified(y, count, numpy_stream(0, purpose))


def _images(file: Any, path: Path, rows: Ints) -> Images:
    """The images in these rows, read in the order of the file."""
    data = _array(file, path, "sen2", IMAGE)
    labels = len(file["label"])
    if len(data) != labels:
        raise DataError(f"{path} has {len(data)} images in sen2 but {labels} labels; {REMEDY}")
    x = np.empty((len(rows), *IMAGE), dtype=np.float32)
    done = 0
    # HDF5 reads whole chunks, if the file has chunks.
    for run in runs(rows, gap=data.chunks[0] if data.chunks else GAP):
        part = x[done : done + len(run)]
        with np.errstate(over="ignore"):  # values beyond float32 become infinite
            part[:] = data[run[0] : run[-1] + 1][run - run[0]]
        if not np.isfinite(part).all():
            raise DataError(
                f"{path}: sen2 has values that are not finite in images {run[0]} to {run[-1]}; "
                f"{REMEDY}"
            )
        done += len(run)
    return x
