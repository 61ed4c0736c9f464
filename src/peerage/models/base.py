"""What every model of the library is: a frozen set of options that can build a network."""

from collections import OrderedDict
from typing import Protocol

from torch import nn

from peerage.errors import InputError


class Model(Protocol):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A network from examples of this shape to `classes` logits, as PyTorch initialises it."""


def stack(**layers: nn.Module) -> nn.Sequential:
    """Layers in the order of writing, under names that parameter names then begin with."""
    return nn.Sequential(OrderedDict(layers))


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width, or an error if they are fewer than the layers consume."""
    if len(shape) != 3:
        raise InputError(
            f"model {model!r} needs images (channels x height x width), but an example of the data "
            f"has shape {_size(shape)}; choose mlp"
        )
    channels, height, width = shape
    if min(height, width) < least:
        fitting = "digits-cnn or mlp" if min(height, width) >= 4 else "mlp"
        raise InputError(
            f"model {model!r} needs images of at least {least}x{least}, but the data has "
            f"{_size(shape)} (channels x height x width); choose {fitting}"
        )
    return channels, height, width


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
