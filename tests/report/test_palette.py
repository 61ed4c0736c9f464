"""Pictures with a palette: frequent colours stay, rare shades move a little."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from peerage.report.palette import with_palette


def png(pixels: NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    return content.getvalue()


def pixels_of(content: bytes) -> NDArray[np.int64]:
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.mode == "P"
        return np.asarray(picture.convert("RGB")).astype(np.int64)


def test_a_picture_of_few_colours_stays_as_it_is() -> None:
    drawn = np.zeros((16, 16, 3), np.uint8)
    drawn[..., 0] = np.arange(256).reshape(16, 16)
    assert (pixels_of(with_palette(png(drawn))) == drawn).all()


def test_frequent_colours_stay_and_rare_ones_move_little() -> None:
    shades = np.random.default_rng(0).integers(0, 256, (40, 100, 3), np.uint8)
    shades[:, 50:] = (213, 94, 0)  # a colour of curves
    shades[20:, 50:] = 255
    moved = np.abs(pixels_of(with_palette(png(shades))) - shades)
    assert moved[:, 50:].max() == 0
    # 128 colours that cover a cube of 256 ^ 3 shades: the side of the part of one is 51.
    assert 0 < moved[:, :50].max() <= 64
