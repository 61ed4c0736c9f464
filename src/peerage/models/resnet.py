"""Residual networks: blocks of convolutions with a shortcut around them.

He, Zhang, Ren, Sun, 2016. arXiv:1512.03385, and with activations before convolutions,
arXiv:1603.05027.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from peerage.models.base import GlobalMean, check_widths, image_shape, stack
from peerage.models.scaled import Channels, NamedAxes, layer_axes, norm_axes

RESNET8_FILTERS = (32, 64, 128)  # of its blocks


class PostActivationBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, whose output is added to the input before ReLU.

    Where stride or number of filters change the shape, the shortcut is a 1x1 convolution with batch
    norm.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = stack(
                conv=nn.Conv2d(inputs, outputs, 1, stride, bias=False),
                norm=nn.BatchNorm2d(outputs),
            )
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.norm1(self.conv1(x)))
        out: Tensor = self.relu2(self.norm2(self.conv2(h)) + self.shortcut(x))
        return out


class ResNet8Layers(nn.Sequential):
    """The layers of `ResNet8`, all of them modules, so that its head can run alone."""

    default_head: ClassVar[tuple[str, ...]] = ("block2", "block3", "head")


@dataclass(frozen=True)
class ResNet8:
    """Three residual blocks of 32, 64 and 128 filters, with batch norm; 308 650 parameters.

    For the FACADE experiments on Flickr-Mammals (P3): 312 649 parameters with its 41 classes. The
    head is the last two blocks and the linear layer, 293 161 parameters there.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, _, _ = image_shape("resnet8", shape, least=8)
        first, last = RESNET8_FILTERS[0], RESNET8_FILTERS[-1]
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, first, 3, padding=1, bias=False),
            "norm1": nn.BatchNorm2d(first),
            "relu1": nn.ReLU(),
            "block1": PostActivationBlock(first, first, stride=1),
        }
        for number, (inputs, outputs) in enumerate(pairwise(RESNET8_FILTERS), start=2):
            layers[f"block{number}"] = PostActivationBlock(inputs, outputs, stride=2)
        layers["mean"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(last, classes)
        return ResNet8Layers(OrderedDict(layers))


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and ReLU; their output is added to the input.

    Where stride or number of filters change the shape, the shortcut is a 1x1 convolution of the
    activated input, as in the code of HeteroFL.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu1(self.norm1(x))
        if self.shortcut is not None:
            x = self.shortcut(h)
        out: Tensor = self.conv2(self.relu2(self.norm2(self.conv1(h)))) + x
        return out

    def channel_axes(self, name: str, inputs: Channels, outputs: Channels) -> NamedAxes:
        inner = Channels(f"{name}.conv1")
        yield from norm_axes(f"{name}.norm1", self.norm1, inputs)
        yield from layer_axes(f"{name}.conv1", self.conv1, inputs, inner)
        yield from norm_axes(f"{name}.norm2", self.norm2, inner)
        yield from layer_axes(f"{name}.conv2", self.conv2, inner, outputs)
        if self.shortcut is not None:
            yield from layer_axes(f"{name}.shortcut", self.shortcut, inputs, outputs)


class PreActResNetLayers(nn.Sequential):
    """The layers of `PreActResNet`; blocks without a shortcut layer share their channel group."""

    def channel_axes(self) -> NamedAxes:
        channels: Channels | None = None  # of the map; the image has no group
        for name, layer in self.named_children():
            if isinstance(layer, nn.Conv2d):
                channels = Channels(name)
                yield from layer_axes(name, layer, outputs=channels)
            elif isinstance(layer, PreActivationBlock) and channels is not None:
                outputs = channels if layer.shortcut is None else Channels(name)
                yield from layer.channel_axes(name, channels, outputs)
                channels = outputs
            elif isinstance(layer, nn.BatchNorm2d) and channels is not None:
                yield from norm_axes(name, layer, channels)
            elif isinstance(layer, nn.Linear):
                yield from layer_axes(name, layer, channels)


@dataclass(frozen=True)
class PreActResNet:
    """Pre-activated ResNet-18, two blocks for each width, with batch norm; 11 172 170 parameters.

    For the DFML experiments (P1), with the layers of HeteroFL's code but without its scaler and its
    static batch norm. The first width has stride 1, each further one stride 2.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)  # filters of the stages

    def __post_init__(self) -> None:
        check_widths("widths", self.widths, "64+128+256+512")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, _, _ = image_shape("preact-resnet", shape, least=2 ** (len(self.widths) - 1))
        layers: dict[str, nn.Module] = {
            "conv1": nn.Conv2d(channels, self.widths[0], 3, padding=1, bias=False)
        }
        inputs = self.widths[0]
        for stage, outputs in enumerate(self.widths, start=1):
            for number in (1, 2):
                stride = 2 if stage > 1 and number == 1 else 1
                layers[f"block{stage}_{number}"] = PreActivationBlock(inputs, outputs, stride)
                inputs = outputs
        layers["norm"] = nn.BatchNorm2d(inputs)
        layers["relu"] = nn.ReLU()
        layers["mean"] = GlobalMean()
        layers["flatten"] = nn.Flatten()
        layers["head"] = nn.Linear(inputs, classes)
        return PreActResNetLayers(OrderedDict(layers))
