"""Networks of fully connected layers, which flatten examples of any shape."""

import re
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import nn

from peerage.errors import InputError
from peerage.models.base import stack


def perceptron(shape: tuple[int, ...], hidden: tuple[int, ...], classes: int) -> nn.Sequential:
    """Linear layers with ReLU between them; a single linear layer without hidden widths."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    widths = (prod(shape), *hidden)
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        layers[f"hidden{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
    return stack(**layers, head=nn.Linear(widths[-1], classes))


@dataclass(frozen=True)
class MLP:
    """Hidden layers of any widths."""

    hidden: str = "64x32"  # widths of the hidden layers, joined by x

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9][0-9]{0,4}(x[1-9][0-9]{0,4})*", self.hidden):
            raise InputError(
                f"hidden must be widths from 1 to 99999 joined by x, such as 64x32, "
                f"got {self.hidden!r}; use the model logistic for no hidden layer"
            )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return perceptron(shape, tuple(map(int, self.hidden.split("x"))), classes)


@dataclass(frozen=True)
class DigitsMLP:
    """The default for the 8x8 digits: 64-64-32-10, 6 570 parameters."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return perceptron(shape, (64, 32), classes)


@dataclass(frozen=True)
class HwaMLP:
    """The network of the HWA experiments on MNIST and Fashion-MNIST (P2): 784-200-200-10."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return perceptron(shape, (200, 200), classes)


@dataclass(frozen=True)
class GainMLP:
    """The network of the initialisation experiments on MNIST (P4): 784-512-256-128-10."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return perceptron(shape, (512, 256, 128), classes)


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression (P2): convex, the setting of the comparison with FedNL."""

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return perceptron(shape, (), classes)
