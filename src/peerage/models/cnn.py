"""Convolutional networks, most of them from the experiments of the papers.

Where ReLU follows pooling, function and gradient are the same as before it, on fewer values.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import nn

from peerage import specs
from peerage.models.base import check_dropout, dropout, image_shape, stack

VGG_BLOCKS = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)  # filters; then a pool


def pooled_convolutions(*channels: int, kernel: int, groups: int = 0) -> dict[str, nn.Module]:
    """A convolution between any two successive numbers of channels; pooling halves the image.

    With `groups`, GroupNorm follows each convolution.
    """
    layers: dict[str, nn.Module] = {}
    for number, (inputs, outputs) in enumerate(pairwise(channels), start=1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)
        if groups:
            layers[f"norm{number}"] = nn.GroupNorm(groups, outputs)
        layers[f"pool{number}"] = nn.MaxPool2d(2)
        layers[f"relu{number}"] = nn.ReLU()
    return layers


@dataclass(frozen=True)
class CifarCNN:
    """Three 3x3 convolutions of 32, 64 and 128 filters, 128 hidden units; 356 810 parameters.

    For the CIFAR-10 experiments of DecHW (P0) and HWA (P2).
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("cifar-cnn", shape, least=8)
        return stack(
            **pooled_convolutions(channels, 32, 64, 128, kernel=3),
            flatten=nn.Flatten(),
            hidden=nn.Linear(128 * (height // 8) * (width // 8), 128),
            relu4=nn.ReLU(),
            head=nn.Linear(128, classes),
        )


@dataclass(frozen=True)
class DigitsCNN:
    """Two 3x3 convolutions of 16 and 32 filters, 32 hidden units; 9 258 parameters on 8x8."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("digits-cnn", shape, least=4)
        return stack(
            **pooled_convolutions(channels, 16, 32, kernel=3),
            flatten=nn.Flatten(),
            hidden=nn.Linear(32 * (height // 4) * (width // 4), 32),
            relu3=nn.ReLU(),
            head=nn.Linear(32, classes),
        )


@dataclass(frozen=True)
class FashionCNN:
    """Two 3x3 convolutions of 32 and 64 filters, then 128 hidden units; 1 199 882 parameters.

    For the DecHW experiments on Fashion-MNIST (P0). In the paper, ReLU follows both convolutions,
    as it does here by default. In the authors' code, it only follows the first (`relu=first`).
    """

    relu: Literal["both", "first"] = "both"

    def __post_init__(self) -> None:
        specs.check_choices(self)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("fashion-cnn", shape, least=6)
        return stack(
            conv1=nn.Conv2d(channels, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU() if self.relu == "both" else nn.Identity(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            relu3=nn.ReLU(),
            head=nn.Linear(128, classes),
        )


@dataclass(frozen=True)
class GainCNN:
    """Three 3x3 convolutions without pooling, 128 and 64 units; 8 456 433 parameters on 10x32x32.

    For the initialisation experiments on So2Sat LCZ42 (P4); the count is for its 17 classes.
    Without pooling, the first hidden layer grows with the number of pixels.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("gain-cnn", shape, least=1)
        return stack(
            conv1=nn.Conv2d(channels, 32, 3, padding=1),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(64, 64, 3, padding=1),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden1=nn.Linear(64 * height * width, 128),
            relu4=nn.ReLU(),
            hidden2=nn.Linear(128, 64),
            relu5=nn.ReLU(),
            head=nn.Linear(64, classes),
        )


@dataclass(frozen=True)
class GnLeNet:
    """Three 5x5 convolutions with GroupNorm; 89 834 parameters on 3x32x32, 120 554 on 3x64x64.

    For the FACADE experiments on CIFAR-10 and Imagenette (P3). The sizes printed in the paper
    belong to older variants; these are the layers of its code.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("gn-lenet", shape, least=8)
        return stack(
            **pooled_convolutions(channels, 32, 32, 64, kernel=5, groups=2),
            flatten=nn.Flatten(),
            head=nn.Linear(64 * (height // 8) * (width // 8), classes),
        )


@dataclass(frozen=True)
class LeafCNN:
    """Two 5x5 convolutions of 32 and 64 filters, 2048 hidden units; 6 603 710 parameters.

    For the HWA experiments on FEMNIST (P2); the count is for its 62 classes. From LEAF: Caldas et
    al., 2018. arXiv:1812.01097.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("leaf-cnn", shape, least=4)
        return stack(
            **pooled_convolutions(channels, 32, 64, kernel=5),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * (height // 4) * (width // 4), 2048),
            relu3=nn.ReLU(),
            head=nn.Linear(2048, classes),
        )


@dataclass(frozen=True)
class MnistCNN:
    """Two 5x5 convolutions of 10 and 20 filters, then 50 hidden units; 21 840 parameters.

    For the DecHW experiments on MNIST (P0).
    """

    dropout: bool = False  # not in the paper; the authors' code has 0.5 for filters and units

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("mnist-cnn", shape, least=16)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))  # 28 -> 12 -> 4
        return stack(
            conv1=nn.Conv2d(channels, 10, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            dropout2=nn.Dropout2d(0.5) if self.dropout else nn.Identity(),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(20 * rows * columns, 50),
            relu3=nn.ReLU(),
            dropout3=nn.Dropout(0.5) if self.dropout else nn.Identity(),
            head=nn.Linear(50, classes),
        )


@dataclass(frozen=True)
class VGG16:
    """Thirteen 3x3 convolutions in five blocks, 4096 units twice; 33 638 218 parameters on 3x32x32.

    For the initialisation experiments on CIFAR-10 (P4). Without batch norm. Simonyan, Zisserman,
    2015. arXiv:1409.1556.
    """

    dropout: float = 0.5  # probability in the hidden layers

    def __post_init__(self) -> None:
        check_dropout("dropout", self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("vgg16", shape, least=32)
        layers: dict[str, nn.Module] = {}
        for block, filters in enumerate(VGG_BLOCKS, start=1):
            for number, outputs in enumerate(filters, start=1):
                layers[f"conv{block}_{number}"] = nn.Conv2d(channels, outputs, 3, padding=1)
                if number == len(filters):
                    layers[f"pool{block}"] = nn.MaxPool2d(2)
                layers[f"relu{block}_{number}"] = nn.ReLU()
                channels = outputs
        return stack(
            **layers,
            flatten=nn.Flatten(),
            hidden1=nn.Linear(512 * (height // 32) * (width // 32), 4096),
            relu6=nn.ReLU(),
            dropout6=dropout(self.dropout),
            hidden2=nn.Linear(4096, 4096),
            relu7=nn.ReLU(),
            dropout7=dropout(self.dropout),
            head=nn.Linear(4096, classes),
        )
