"""The convolutional network of the CIFAR-10 experiments of DecHW (P0) and HWA (P2)."""

from dataclasses import dataclass

from torch import nn

from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class CifarCNN:
    """Three 3x3 convolutions of 32, 64 and 128 filters, 128 hidden units; 356 810 parameters.

    ReLU follows pooling, which gives the same function and gradient as before it, on fewer values.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("cifar-cnn", shape, least=8)
        return stack(
            conv1=nn.Conv2d(channels, 32, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(64, 128, 3, padding=1),
            pool3=nn.MaxPool2d(2),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(128 * (height // 8) * (width // 8), 128),
            relu4=nn.ReLU(),
            head=nn.Linear(128, classes),
        )
