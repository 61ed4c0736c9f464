"""GN-LeNet, the network of the FACADE experiments on CIFAR-10 and Imagenette (P3)."""

from dataclasses import dataclass

from torch import nn

from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class GnLeNet:
    """Three 5x5 convolutions with GroupNorm; 89 834 parameters on 3x32x32, 120 554 on 3x64x64.

    The sizes printed in the paper belong to older variants; these are the layers of its code. ReLU
    follows pooling, which gives the same function and gradient as before it, on fewer values.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("gn-lenet", shape, least=8)
        return stack(
            conv1=nn.Conv2d(channels, 32, 5, padding=2),
            norm1=nn.GroupNorm(2, 32),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 32, 5, padding=2),
            norm2=nn.GroupNorm(2, 32),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(32, 64, 5, padding=2),
            norm3=nn.GroupNorm(2, 64),
            pool3=nn.MaxPool2d(2),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            head=nn.Linear(64 * (height // 8) * (width // 8), classes),
        )
