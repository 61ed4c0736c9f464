"""The convolutional network of the DecHW experiments on Fashion-MNIST (P0)."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from peerage import specs
from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class FashionCNN:
    """Two 3x3 convolutions of 32 and 64 filters, then 128 hidden units; 1 199 882 parameters.

    In the paper, ReLU follows both convolutions, as it does here by default. In the authors' code,
    it only follows the first (`relu=first`).
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
