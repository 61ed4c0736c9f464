"""EfficientNet, from B0 to B4 (P1).

Tan, Le, 2019. arXiv:1905.11946. The layers are those of torchvision, whose weights are the usual
pretrained ones; Peerage has no pretrained weights.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerage import specs
from peerage.models.base import GlobalMean, dropout, image_shape, stack

STEM = 32  # filters of the first convolution, before scaling
SQUEEZE = 4  # input channels of a block per hidden unit of its squeeze-and-excitation
STOCHASTIC_DEPTH = 0.2  # probability that the last block is left out; it grows from 0 linearly


class Stage(NamedTuple):
    """A stage of B0: `blocks` blocks, of which the first has the stride and the change of width."""

    expansion: int  # inner channels per input channel
    kernel: int
    stride: int
    outputs: int
    blocks: int


STAGES = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)


class Variant(NamedTuple):
    width: float  # factor on the channels of B0
    depth: float  # factor on the blocks of B0
    dropout: float  # before the classifier


VARIANTS = {
    "b0": Variant(1.0, 1.0, 0.2),
    "b1": Variant(1.0, 1.1, 0.2),
    "b2": Variant(1.1, 1.2, 0.3),
    "b3": Variant(1.2, 1.4, 0.3),
    "b4": Variant(1.4, 1.8, 0.4),
}


class SqueezeExcitation(nn.Module):
    """Multiply every channel by a factor in (0, 1) that depends on the means of all channels."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.mean = GlobalMean()
        self.squeeze = nn.Conv2d(channels, hidden, 1)
        self.silu = nn.SiLU()
        self.excite = nn.Conv2d(hidden, channels, 1)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.sigmoid(self.excite(self.silu(self.squeeze(self.mean(x)))))
        return out


class MBConv(nn.Module):
    """An inverted residual block: widen, convolve every channel, weight the channels, narrow.

    If its shape does not change, its input is added to its output, which is left out for each
    example with the probability `skip` in training (stochastic depth).
    """

    def __init__(self, inputs: int, stage: Stage, skip: float) -> None:
        super().__init__()
        inner = rounded(inputs * stage.expansion)
        self.expand = (
            nn.Identity() if inner == inputs else stack(**convolution(inputs, inner, kernel=1))
        )
        self.depthwise = stack(
            **convolution(inner, inner, stage.kernel, stage.stride, groups=inner)
        )
        self.weigh = SqueezeExcitation(inner, max(1, inputs // SQUEEZE))
        self.project = stack(**convolution(inner, stage.outputs, kernel=1, activate=False))
        self.residual = stage.stride == 1 and inputs == stage.outputs
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.project(self.weigh(self.depthwise(self.expand(x))))
        if not self.residual:
            return h
        if self.training and self.skip:
            h = h * F.dropout(h.new_ones(len(h), 1, 1, 1), self.skip)  # 0 or 1 / (1 - skip)
        return x + h


def convolution(
    inputs: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activate: bool = True,
) -> dict[str, nn.Module]:
    """A convolution with batch norm and, if `activate`, SiLU."""
    conv = nn.Conv2d(
        inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False
    )
    layers: dict[str, nn.Module] = {"conv": conv, "norm": nn.BatchNorm2d(outputs)}
    return {**layers, "silu": nn.SiLU()} if activate else layers


def rounded(channels: float) -> int:
    """The nearest multiple of 8, or the next one if that is more than a tenth below."""
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest + 8 if nearest < 0.9 * channels else nearest


def scaled_stages(variant: Variant) -> Iterator[Stage]:
    """The stages of B0 with the channels and blocks of a variant."""
    for stage in STAGES:
        yield stage._replace(
            outputs=rounded(stage.outputs * variant.width),
            blocks=ceil(stage.blocks * variant.depth),
        )


@dataclass(frozen=True)
class EfficientNet:
    """EfficientNet B0 to B4, without pretrained weights; 4 020 358 parameters for b0.

    For the DFML experiments on Caltech101, Oxford Pets and Stanford Cars (P1), where images of
    224 x 224 pixels are usual. The paper does not say whether its models were pretrained.
    """

    variant: Literal["b0", "b1", "b2", "b3", "b4"] = "b0"

    def __post_init__(self) -> None:
        specs.check_choices(self)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        images, _, _ = image_shape("efficientnet", shape, least=32)
        variant = VARIANTS[self.variant]
        stages = list(scaled_stages(variant))
        channels = rounded(STEM * variant.width)
        layers: dict[str, nn.Module] = {
            "stem": stack(**convolution(images, channels, kernel=3, stride=2))
        }
        total, before = sum(stage.blocks for stage in stages), 0
        for number, stage in enumerate(stages, start=1):
            for block in range(stage.blocks):
                one = stage if block == 0 else stage._replace(stride=1)
                skip = STOCHASTIC_DEPTH * before / total
                layers[f"block{number}_{block + 1}"] = MBConv(channels, one, skip)
                channels, before = stage.outputs, before + 1
        layers["last"] = stack(**convolution(channels, 4 * channels, kernel=1))
        layers["mean"] = GlobalMean()
        layers["flatten"] = nn.Flatten()
        layers["drop"] = dropout(variant.dropout)
        layers["head"] = nn.Linear(4 * channels, classes)
        network = nn.Sequential(OrderedDict(layers))
        network.apply(initialise)
        return network


@torch.no_grad()
def initialise(layer: nn.Module) -> None:
    """The initial values of torchvision; those of batch norm are PyTorch's own."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    elif isinstance(layer, nn.Linear):
        bound = 1 / sqrt(layer.out_features)
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.zeros_(layer.bias)
