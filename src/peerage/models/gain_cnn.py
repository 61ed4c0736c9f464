"""The convolutional network of the initialisation experiments on So2Sat LCZ42 (P4)."""

from dataclasses import dataclass

from torch import nn

from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class GainCNN:
    """Three 3x3 convolutions without pooling, 128 and 64 units; 8 456 433 parameters on 10x32x32.

    The count is for the 17 classes of So2Sat. Without pooling, the first hidden layer grows with
    the number of pixels.
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
