"""The convolutional network of the DecHW experiments on MNIST (P0)."""

from dataclasses import dataclass

from torch import nn

from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class MnistCNN:
    """Two 5x5 convolutions of 10 and 20 filters, then 50 hidden units; 21 840 parameters."""

    dropout: bool = False  # not in the paper; the authors' code has 0.5 for filters and units

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("mnist-cnn", shape, least=16)
        return stack(
            conv1=nn.Conv2d(channels, 10, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            dropout2=nn.Dropout2d(0.5) if self.dropout else nn.Identity(),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(20 * _side(height) * _side(width), 50),
            relu3=nn.ReLU(),
            dropout3=nn.Dropout(0.5) if self.dropout else nn.Identity(),
            head=nn.Linear(50, classes),
        )


def _side(side: int) -> int:
    """The side after two unpadded convolutions with pooling: 28 -> 12 -> 4."""
    return ((side - 4) // 2 - 4) // 2
