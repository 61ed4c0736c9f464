"""The convolutional network of LEAF, for the HWA experiments on FEMNIST (P2).

Caldas et al., 2018. arXiv:1812.01097.
"""

from dataclasses import dataclass

from torch import nn

from peerage.models.base import image_shape, stack


@dataclass(frozen=True)
class LeafCNN:
    """Two 5x5 convolutions of 32 and 64 filters, 2048 hidden units; 6 603 710 parameters.

    The count is for the 62 classes of FEMNIST. ReLU follows pooling, which gives the same function
    and gradient as before it, on fewer values.
    """

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("leaf-cnn", shape, least=4)
        return stack(
            conv1=nn.Conv2d(channels, 32, 5, padding=2),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 5, padding=2),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * (height // 4) * (width // 4), 2048),
            relu3=nn.ReLU(),
            head=nn.Linear(2048, classes),
        )
