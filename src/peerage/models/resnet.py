"""Residual networks: blocks of convolutions with a shortcut around them.

He, Zhang, Ren, Sun, 2016. arXiv:1512.03385.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from peerage.models.base import image_shape, stack

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
