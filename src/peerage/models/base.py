"""The interface of models: options that can build a network."""

from collections import OrderedDict
from typing import Protocol

from torch import Tensor, nn

from peerage.errors import InputError


class Model(Protocol):
    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A network from examples of this shape to `classes` logits, initialised by PyTorch."""


def stack(**layers: nn.Module) -> nn.Sequential:
    """A sequence of named layers; their names are the prefixes of parameter names."""
    return nn.Sequential(OrderedDict(layers))


def image_shape(model: str, shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width; raise an InputError if an image is too small."""
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


class GlobalMean(nn.Module):
    """The mean of every map, [B, C, 1, 1].

    As `nn.AdaptiveAvgPool2d(1)`, which torch.func cannot batch for images with channels last.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True)


def check_widths(option: str, widths: tuple[int, ...], example: str) -> None:
    """Raise an InputError unless there are widths, all of at least 1."""
    if not widths or min(widths) < 1:
        raise InputError(
            f"{option} must be positive numbers joined by +, such as {example}, got "
            f"{'+'.join(map(str, widths)) or 'none'}"
        )


def check_dropout(option: str, probability: float) -> None:
    if not 0 <= probability < 1:
        raise InputError(f"{option} must lie in [0, 1), got {probability}")


def dropout(probability: float) -> nn.Module:
    """A dropout layer, or none if the probability is 0."""
    return nn.Dropout(probability) if probability else nn.Identity()


def _size(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"
