"""Initial models: one start for all or one for each node, and the gain that the graph asks for."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.graph import Graph
from peerage.mixing import gains
from peerage.randomness import stream_seed
from peerage.vectors import FlatModel, Layout, float_buffers


@dataclass(frozen=True)
class NoGain:
    """Leave the initial weights as they are."""

    def factors(self, graph: Graph) -> np.ndarray:
        return np.ones(graph.nodes)


@dataclass(frozen=True)
class SqrtGain:
    """The square root of the number of nodes: exact on complete and regular graphs."""

    def factors(self, graph: Graph) -> np.ndarray:
        return np.full(graph.nodes, graph.nodes**0.5)


@dataclass(frozen=True)
class GraphGain:
    """1 / |v|, with v the stationary vector of averaging on this graph (P4), per component."""

    def factors(self, graph: Graph) -> np.ndarray:
        return gains(graph)


@dataclass(frozen=True)
class ExponentGain:
    """n^a, for graphs of which only the kind is known."""

    a: float

    def factors(self, graph: Graph) -> np.ndarray:
        return np.full(graph.nodes, float(graph.nodes) ** self.a)


@dataclass(frozen=True)
class ManualGain:
    """A given factor."""

    g: float

    def __post_init__(self) -> None:
        if not 0 < self.g < float("inf"):
            raise InputError(f"g must be a number above 0, got {self.g}")

    def factors(self, graph: Graph) -> np.ndarray:
        return np.full(graph.nodes, self.g)


Gain = NoGain | SqrtGain | GraphGain | ExponentGain | ManualGain
GAINS: dict[str, type[Gain]] = {
    "none": NoGain,
    "sqrt": SqrtGain,
    "graph": GraphGain,
    "exponent": ExponentGain,
    "manual": ManualGain,
}

Scheme = Literal["torch", "he"]


@dataclass(frozen=True)
class Architecture:
    """A kind of model: how to build it, and how its initial values are drawn."""

    name: str
    build: Callable[[], nn.Module]
    scheme: Scheme = "torch"
    given: bool = False  # the built values are the user's own and are the shared start

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.build().named_parameters())

    @cached_property
    def buffer_layout(self) -> Layout:
        return Layout.of(float_buffers(self.build()))

    def workbench(self) -> FlatModel:
        return FlatModel(self.build())

    def initial(self, seed: int, start: int | None, gain: float) -> tuple[Tensor, Tensor]:
        """(params [d], buffers [b]) of the start with this number; None is the shared one."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, "init", -1 if start is None else start))
            module = self.build()
            if self.given and start is not None:
                redraw(module)
            if self.scheme == "he":
                he_uniform(module)
            if gain != 1.0:
                amplify(module, gain)
        named, buffers = list(module.named_parameters()), float_buffers(module)
        return (
            Layout.of(named).flatten(dict(named)),
            Layout.of(buffers).flatten(dict(buffers)),
        )


def own_architecture(
    model: nn.Module | Callable[[], nn.Module], name: str, scheme: Scheme
) -> Architecture:
    """An architecture from the user's module, or from a function that builds one."""
    if not isinstance(model, nn.Module):
        return Architecture(name, model, scheme)
    return Architecture(name, lambda: copy.deepcopy(model), scheme, given=True)


def redraw(module: nn.Module) -> None:
    """New random values for every layer of a module that the user built."""
    for name, layer in module.named_modules():
        if not list(layer.parameters(recurse=False)):
            continue
        reset = getattr(layer, "reset_parameters", None)
        if reset is None:
            raise InputError(
                f"layer {name or type(layer).__name__!r} of the model has no reset_parameters, so "
                "independent starts cannot be drawn; pass a function that builds the model instead"
            )
        reset()


def he_uniform(module: nn.Module) -> None:
    """He initialisation: weights uniform with variance 2 / fan-in, biases zero (P4)."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.kaiming_uniform_(parameter, nonlinearity="relu")
    for name, parameter in module.named_parameters():
        if name.endswith("bias") and parameter.dim() == 1:
            nn.init.zeros_(parameter)


def amplify(module: nn.Module, gain: float) -> None:
    """Scale weight matrices and kernels; biases and norm layers keep their values (P4)."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(gain)
