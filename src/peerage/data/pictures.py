"""Folders of image files, one for each class, and how a file is decoded."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from peerage.errors import DataError


def class_folders(folder: Path) -> list[str]:
    """The sorted names of the folders inside, except hidden ones; none if it is no folder."""
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")


def image_files(folder: Path, pattern: str = "*") -> list[Path]:
    """The sorted files that match, if their suffix is that of an image; others are ignored."""
    if not folder.is_dir():  # a training class without test images
        return []
    known = Image.registered_extensions()
    return sorted(
        path
        for path in folder.glob(pattern)
        if path.suffix.lower() in known and path.name[0] != "." and path.is_file()
    )


def decode(path: Path, prepare: Callable[[Image.Image], Image.Image]) -> NDArray[np.uint8]:
    """The bytes of an image that was prepared; raises an error if the file cannot be read."""
    try:
        with Image.open(path) as image:
            return np.asarray(prepare(_eight_bit(image, path)))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{path} cannot be read as an image ({error}); repair or remove it"
        ) from None


def _eight_bit(image: Image.Image, path: Path) -> Image.Image:
    """The image with one byte per channel; Pillow would clip 16-bit grey values at 255."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise DataError(f"{path} has 32 bits per pixel; convert it to 8 or 16 bits per channel")
    return image
