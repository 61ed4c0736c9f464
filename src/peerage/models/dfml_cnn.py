"""The convolutional networks of the DFML experiments, a family of any depth and width (P1)."""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn

from peerage import specs
from peerage.models.base import check_widths, image_shape
from peerage.models.scaled import Channels, NamedAxes, layer_axes, norm_axes


class DfmlCNNLayers(nn.Sequential):
    """The layers of `DfmlCNN`; every convolution and its norm are one channel group."""

    def channel_axes(self) -> NamedAxes:
        channels, filters = None, 1  # of the last convolution; the image has no group
        for name, layer in self.named_children():
            if isinstance(layer, nn.Conv2d):
                inputs, channels, filters = channels, Channels(name), layer.out_channels
                yield from layer_axes(name, layer, inputs, channels)
            elif isinstance(layer, nn.GroupNorm | nn.LayerNorm) and channels is not None:
                yield from norm_axes(name, layer, channels)
            elif isinstance(layer, nn.Linear) and channels is not None:
                pixels = layer.in_features // filters  # of a flattened map
                yield from layer_axes(name, layer, channels._replace(block=pixels))


@dataclass(frozen=True)
class DfmlCNN:
    """5x5 convolutions, each with ReLU, pooling and layer norm; 94 858 parameters on 3x32x32.

    For the DFML experiments (P1), with one linear layer at the end. The paper says "layer
    normalization". By default, it is over a whole map with a weight and a bias per channel, so that
    it does not depend on the size of images; `norm=layer` has them per channel and pixel.
    """

    channels: tuple[int, ...] = (32, 64)  # filters of the convolutions
    norm: Literal["channel", "layer"] = "channel"

    def __post_init__(self) -> None:
        specs.check_choices(self)
        check_widths("channels", self.channels, "32+64")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        images, height, width = image_shape("dfml-cnn", shape, least=2 ** len(self.channels))
        layers: dict[str, nn.Module] = {}
        for number, (inputs, outputs) in enumerate(pairwise((images, *self.channels)), start=1):
            height, width = height // 2, width // 2
            layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 5, padding=2)
            layers[f"relu{number}"] = nn.ReLU()
            layers[f"pool{number}"] = nn.MaxPool2d(2)
            layers[f"norm{number}"] = (
                nn.GroupNorm(1, outputs)
                if self.norm == "channel"
                else nn.LayerNorm((outputs, height, width))
            )
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(self.channels[-1] * height * width, classes)
        return DfmlCNNLayers(OrderedDict(layers))
