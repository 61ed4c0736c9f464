"""Shifts: how the examples of one cluster of nodes differ from those of another.

A shift is called with examples and the number of a cluster, and returns examples of the same shape.
Their values lie in [0, 1]: a shift comes before normalising. It gets several examples at once and
must treat each on its own. A user's function or object with `__call__` is a shift, too.

A shift may also have
- `kept_labels(cluster)`: the labels that a cluster keeps; None means all;
- `fit(clusters)`: the shift for that many clusters, with defaults filled in, or an error;
- `describe(cluster)`: a few words for reports.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from peerage.errors import InputError, check_choice

RED, GREEN, BLUE = 0, 1, 2  # channels
LUMA = (0.299, 0.587, 0.114)
SEPIA = ((0.393, 0.769, 0.189), (0.349, 0.686, 0.168), (0.272, 0.534, 0.131))
LABELS = re.compile(r"(\d+)(?:-(\d+))?")  # one label, or a range


class Shift(Protocol):
    def __call__(self, x: Tensor, cluster: int) -> Tensor: ...


@dataclass(frozen=True)
class NoShift:
    """All clusters have the same kind of examples."""

    def __call__(self, x: Tensor, cluster: int) -> Tensor:
        return x


@dataclass(frozen=True)
class Rotate:
    """Images of cluster c are rotated counterclockwise, by default by 360 c / k degrees (P3).

    Multiples of 90 degrees move pixels and change no value. Other angles interpolate between
    pixels; corners from outside the image are 0.
    """

    angles: tuple[float, ...] = ()  # degrees, one per cluster

    def fit(self, clusters: int) -> "Rotate":
        if not all(map(math.isfinite, self.angles)):
            raise InputError(f"angles must be numbers of degrees, got {self.angles}")
        angles = self.angles or tuple(360.0 * c / clusters for c in range(clusters))
        _check_count("angles", angles, clusters, "0+180")
        return replace(self, angles=angles)

    def __call__(self, x: Tensor, cluster: int) -> Tensor:
        angle = self.angles[cluster] % 360
        _check_images("rotate", x)
        if angle == 0:
            return x
        if angle % 90:
            return _rotated(x, angle)
        if angle != 180 and x.shape[2] != x.shape[3]:
            raise InputError(
                f"rotating images of {x.shape[2]} x {x.shape[3]} pixels by {angle:g} degrees "
                "changes their shape; use angles=0+180, or square images"
            )
        return torch.rot90(x, int(angle // 90), (2, 3))

    def describe(self, cluster: int) -> str:
        return f"{self.angles[cluster]:g}°"


def _rotated(x: Tensor, angle: float) -> Tensor:
    """Images rotated about their centre, with bilinear interpolation."""
    cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    height, width = x.shape[2:]
    # From pixels of the result to those of the image, in coordinates from -1 to 1, y downwards.
    matrix = torch.tensor([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    grid = functional.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", align_corners=False)


def _saturated(x: Tensor) -> Tensor:
    grey = _mixed(x, LUMA)
    return (grey + 2 * (x - grey)).clamp_(0, 1)


def _sepia(x: Tensor) -> Tensor:
    return torch.cat([_mixed(x, row) for row in SEPIA], 1).clamp_(0, 1)


def _grey(x: Tensor) -> Tensor:
    return x.mean(1, keepdim=True).expand(x.shape)


def _tint(channel: int) -> Callable[[Tensor], Tensor]:
    factors = torch.full((3, 1, 1), 0.5)
    factors[channel] = 1.0
    return lambda x: x * factors


def _mixed(x: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """A weighted sum of the three channels, [N, 1, H, W]."""
    return weights[0] * x[:, :1] + weights[1] * x[:, 1:2] + weights[2] * x[:, 2:]


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "saturated": _saturated,  # twice as far from grey
    "sepia": _sepia,
    "grey": _grey,  # mean of the channels, three times
    "red": _tint(RED),  # the other two channels halved
    "green": _tint(GREEN),
    "blue": _tint(BLUE),
}


@dataclass(frozen=True)
class Colour:
    """Images of each cluster have a colour filter, in turn none, saturated, sepia, grey (P3).

    Further filters are red, green and blue. Images must have three channels.
    """

    filters: tuple[str, ...] = ()  # one per cluster

    def fit(self, clusters: int) -> "Colour":
        for name in self.filters:
            check_choice("filters", name, FILTERS)
        filters = self.filters or tuple(FILTERS)[:clusters]
        _check_count("filters", filters, clusters, "none+sepia")
        return replace(self, filters=filters)

    def __call__(self, x: Tensor, cluster: int) -> Tensor:
        _check_images("colour", x)
        if x.shape[1] != 3:
            raise InputError(
                f"colour requires images of 3 channels, got shape {tuple(x.shape[1:])}; use "
                "colour images, or --clusters SIZES:rotate"
            )
        return FILTERS[self.filters[cluster]](x)

    def describe(self, cluster: int) -> str:
        return self.filters[cluster] if self.filters[cluster] != "none" else "no filter"


@dataclass(frozen=True)
class Labels:
    """Each cluster keeps only some labels, in training and in its test set (P3).

    With `fraction`, the partition splits all examples between all nodes, and a node drops the
    labels that its cluster does not keep. Without it, the partition splits the examples with the
    labels of a cluster between the nodes of that cluster alone, so that small clusters have more.
    """

    keep: tuple[str, ...]  # labels of each cluster, as in ("0/1/8/9", "2-7")
    fraction: bool = True

    def fit(self, clusters: int) -> "Labels":
        for text in self.keep:
            parse_labels(text)
        _check_count("keep", self.keep, clusters, "0-4+5-9")
        return self

    def __call__(self, x: Tensor, cluster: int) -> Tensor:
        return x

    def kept_labels(self, cluster: int) -> tuple[int, ...]:
        return parse_labels(self.keep[cluster])

    def describe(self, cluster: int) -> str:
        return f"labels {self.keep[cluster]}"


SHIFTS: dict[str, type[Any]] = {
    "none": NoShift,
    "rotate": Rotate,
    "colour": Colour,
    "labels": Labels,
}


def parse_labels(text: str) -> tuple[int, ...]:
    """The labels in a text, in ascending order.

    >>> parse_labels("8/0-2")
    (0, 1, 2, 8)
    """
    labels: set[int] = set()
    for part in text.split("/"):
        found = LABELS.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise InputError(f"labels {text!r} must be numbers and ranges, such as 0/1/8/9 or 2-7")
        labels.update(range(first, last + 1))
    return tuple(sorted(labels))


def _check_count(name: str, values: tuple[Any, ...], clusters: int, example: str) -> None:
    if len(values) != clusters:
        raise InputError(
            f"{name} has {len(values)} values for {clusters} clusters; give one per cluster, as in "
            f"{name}={example}"
        )


def _check_images(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise InputError(
            f"{name} requires images, got examples of shape {tuple(x.shape[1:])}; use another "
            "shift, or a data set of images"
        )
