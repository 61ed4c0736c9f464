"""A convolutional network that is small enough for the 8x8 digits."""

from dataclasses import dataclass

from torch import nn

from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class DigitsCNN:
    """Two 3x3 convolutions of 16 and 32 filters, 32 hidden units; 9 258 parameters on 8x8."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("digits-cnn", shape, least=4)
        return stack(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(32 * (height // 4) * (width // 4), 32),
            relu3=nn.ReLU(),
            head=nn.Linear(32, classes),
        )
