"""The networks that are shipped, with their sizes, and how tests build them."""

import torch
from torch import nn

from peerage import specs
from peerage.models import MODELS

# The shape a network was made for, its parameters there and in its output layer (ten classes).
SIZES = {
    "cifar-cnn": ((3, 32, 32), 356_810, 1_290),
    "dfml-cnn": ((3, 32, 32), 94_858, 40_970),
    "digits-cnn": ((1, 8, 8), 9_258, 330),
    "digits-mlp": ((1, 8, 8), 6_570, 330),
    "efficientnet": ((3, 32, 32), 4_020_358, 12_810),
    "fashion-cnn": ((1, 28, 28), 1_199_882, 1_290),
    "gain-cnn": ((10, 32, 32), 8_455_978, 650),
    "gain-mlp": ((1, 28, 28), 567_434, 1_290),
    "gn-lenet": ((3, 32, 32), 89_834, 10_250),
    "hwa-mlp": ((1, 28, 28), 199_210, 2_010),
    "leaf-cnn": ((1, 28, 28), 6_497_162, 20_490),
    "logistic": ((1, 28, 28), 7_850, 7_850),
    "mlp": ((1, 8, 8), 6_570, 330),
    "mnist-cnn": ((1, 28, 28), 21_840, 510),
    "preact-resnet": ((3, 32, 32), 11_172_170, 5_130),
    "resnet8": ((3, 64, 64), 308_650, 1_290),
    "vgg16": ((3, 32, 32), 33_638_218, 40_970),
    "vit": ((3, 32, 32), 3_316_730, 5_130),
}


def network(name: str, shape: tuple[int, ...] | None = None, classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return specs.parse(name, "model", MODELS).build(shape or SIZES[name][0], classes).eval()
