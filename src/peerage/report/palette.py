"""PNG files with a palette, which take a third of the bytes.

A figure has few colours, and thousands of shades at the edges of its letters and lines.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

COLOURS = 256  # of a palette
EXACT = 128  # of these, the most frequent colours, which stay as they are


def with_palette(png: bytes) -> bytes:
    """The picture, opaque and with at most 256 colours; rare shades move to the nearest of them."""
    with Image.open(io.BytesIO(png)) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    codes = pixels.astype(np.int32) @ (1 << 16, 1 << 8, 1)
    found, index, counts = np.unique(codes, return_inverse=True, return_counts=True)
    colours = np.stack([found >> 16, found >> 8 & 255, found & 255], axis=1)
    palette = _palette(colours, counts)
    nearest = np.array([np.argmin(((palette - colour) ** 2).sum(axis=1)) for colour in colours])
    small = Image.fromarray(nearest[index].reshape(codes.shape).astype(np.uint8))
    small.putpalette(palette.astype(np.uint8).tobytes())
    content = io.BytesIO()
    small.save(content, "PNG", optimize=True)
    return content.getvalue()


def _palette(colours: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """At most 256 of these colours [n, 3]: the most frequent, and some that cover the others."""
    if len(colours) <= COLOURS:
        return colours
    order = np.argsort(-counts, kind="stable")
    common, rare = colours[order[:EXACT]], colours[order[EXACT:]]
    shades = Image.fromarray(rare.astype(np.uint8)[None])
    cover = shades.quantize(COLOURS - EXACT, Image.Quantize.MAXCOVERAGE).getpalette("RGB") or []
    return np.concatenate([common, np.reshape(cover, (-1, 3))])
