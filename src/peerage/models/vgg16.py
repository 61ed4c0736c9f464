"""VGG16 for small images, the network of the initialisation experiments on CIFAR-10 (P4).

Simonyan, Zisserman, 2015. arXiv:1409.1556.
"""

from dataclasses import dataclass

from torch import nn

from peerage.errors import InputError
from peerage.models.base import image_shape, stack

BLOCKS = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)  # filters; each ends in a pool


@dataclass(frozen=True)
class VGG16:
    """Thirteen 3x3 convolutions in five blocks, 4096 units twice; 33 638 218 parameters on 3x32x32.

    Without batch norm. ReLU follows pooling, which gives the same function and gradient as before
    it, on fewer values.
    """

    dropout: float = 0.5  # probability in the hidden layers

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout must lie in [0, 1), got {self.dropout}")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        channels, height, width = image_shape("vgg16", shape, least=32)
        layers: dict[str, nn.Module] = {}
        for block, filters in enumerate(BLOCKS, start=1):
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
            dropout6=self._dropout(),
            hidden2=nn.Linear(4096, 4096),
            relu7=nn.ReLU(),
            dropout7=self._dropout(),
            head=nn.Linear(4096, classes),
        )

    def _dropout(self) -> nn.Module:
        return nn.Dropout(self.dropout) if self.dropout else nn.Identity()
