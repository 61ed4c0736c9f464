"""Initial models: one start for all nodes, or one for each."""

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.isolation import exclusive_torch
from peerage.randomness import stream_seed
from peerage.vectors import (
    FlatModel,
    Layout,
    float_buffers,
    frozen_parameters,
    trained_parameters,
)

Scheme = Literal["torch", "he", "he-normal"]
Bias = Literal["zero", "default", "scaled"]


SHARED = -1  # the number of the start that all nodes may share


@dataclass(frozen=True)
class Architecture:
    """A kind of model: how to build it, and how its initial values are drawn.

    Parameters that do not require gradients are constants of the architecture: no node trains or
    sends them, they are no part of its vector, and they are equal on all nodes. If a function draws
    them at random, all models get the values of one draw, that of the shared start.
    """

    name: str
    build: Callable[[], nn.Module]
    scheme: Scheme = "torch"
    # Biases are zero, keep PyTorch's own values, or are drawn and amplified as the weights beside
    # them are. Left open, it is what the scheme does: torch keeps its own, He takes zero.
    bias: Bias | None = None
    given: bool = False  # the built values are the user's own and are the shared start
    seed: int = 0  # of the experiment: with it, constants are drawn

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(trained_parameters(self.specimen()))

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The frozen parameters by name."""
        with drawing(stream_seed(self.seed, "init", SHARED)):
            module = self.build()
        return {name: p.detach().clone() for name, p in frozen_parameters(module)}

    @cached_property
    def constants_hash(self) -> str | None:
        """SHA-256 over names, shapes and values of the frozen parameters; None without any."""
        if not self.constants:
            return None
        hashed = hashlib.sha256()
        for name, value in sorted(self.constants.items()):
            hashed.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
            hashed.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        return hashed.hexdigest()

    @cached_property
    def buffer_layout(self) -> Layout:
        return Layout.of(float_buffers(self.specimen()))

    @cached_property
    def amplifiable(self) -> frozenset[str]:
        """The names of the parameters that a gain multiplies."""
        module = self.specimen()
        return frozenset(weights(module)).union(biases(module) if self.bias == "scaled" else ())

    def build_flat(self) -> FlatModel:
        return FlatModel(self.specimen())

    def initial(self, seed: int, start: int | None, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """(params [d], buffers [b]) of the start with this number; None is the shared one."""
        with drawing(stream_seed(seed, "init", SHARED if start is None else start)):
            module = self.build()
            if self.given and start is not None:
                redraw(module)
            if self.scheme != "torch":
                he(module, self.scheme, self.bias or "zero")
            elif self.bias == "zero":
                zero_biases(module)
        named, buffers = trained_parameters(module), float_buffers(module)
        return (
            self.amplified(Layout.of(named).flatten(dict(named)), gain),
            Layout.of(buffers).flatten(dict(buffers)),
        )

    def amplified(self, params: Tensor, gain: float) -> Tensor:
        """The parameters [d] with a gain on the weights; norm layers keep their values (P4)."""
        if gain == 1.0:
            return params
        params = params.clone()
        for slot in self.layout.slots:
            if slot.name in self.amplifiable:
                params[slot.start : slot.start + slot.size] *= gain
        return params

    def state_dict(self, params: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """The values [d] and [b] and the constants by name, each tensor in row-major order."""
        views = self.layout.views(params) | self.buffer_layout.views(buffers)
        constants = {name: value.clone() for name, value in self.constants.items()}
        return {name: value.contiguous() for name, value in (constants | views).items()}

    def module(self, params: Tensor, buffers: Tensor) -> nn.Module:
        """A model with these values, in evaluation mode."""
        module = self.specimen()
        module.load_state_dict(self.state_dict(params, buffers), strict=False)  # but for counters
        return module.eval()

    def specimen(self) -> nn.Module:
        """A new model of this kind with the constants; its other values mean nothing."""
        with drawing(stream_seed(self.seed, "init", SHARED)):
            module = self.build()
        for name, parameter in frozen_parameters(module):
            parameter.data.copy_(self.constants[name])
        return module


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Draw from torch's global generator under this seed, and leave it as it was."""
    with exclusive_torch():
        torch.default_generator.manual_seed(seed)
        yield


def own_architecture(
    model: nn.Module | Callable[[], nn.Module],
    name: str,
    scheme: Scheme = "torch",
    bias: Bias | None = None,
    seed: int = 0,
) -> Architecture:
    """An architecture from the user's module, or from a function that builds one."""
    if not isinstance(model, nn.Module):
        return Architecture(name, model, scheme, bias, seed=seed)
    return Architecture(name, lambda: copy.deepcopy(model), scheme, bias, given=True, seed=seed)


def redraw(module: nn.Module) -> None:
    """New random values for every layer of a module that the user built, but not for frozen ones.

    A layer all of whose parameters are frozen also keeps its running statistics.
    """
    frozen = [(parameter, parameter.detach().clone()) for _, parameter in frozen_parameters(module)]
    for name, layer in module.named_modules():
        if not any(parameter.requires_grad for parameter in layer.parameters(recurse=False)):
            continue
        reset = getattr(layer, "reset_parameters", None)
        if reset is None:
            raise InputError(
                f"layer {name or type(layer).__name__!r} of the model has no reset_parameters, so "
                "independent starts cannot be drawn; pass a function that builds the model instead"
            )
        reset()
    for parameter, value in frozen:  # in layers of which another parameter is trained
        parameter.data.copy_(value)


def he(module: nn.Module, scheme: Scheme, bias: Bias = "zero") -> None:
    """He initialisation: weights of variance 2 / fan-in, uniform or normal (P4).

    Scaled biases come from the distribution of the weights beside them, as in the authors' code.
    """
    for weight in weights(module).values():
        he_fill(weight, fan_in(weight), scheme)
    if bias == "zero":
        zero_biases(module)
    elif bias == "scaled":
        for parameter, inputs in biases(module).values():
            he_fill(parameter, inputs, scheme)


def zero_biases(module: nn.Module) -> None:
    for parameter, _ in biases(module).values():
        nn.init.zeros_(parameter)


def he_fill(tensor: Tensor, inputs: int, scheme: Scheme) -> None:
    """Draw values of variance 2 / inputs, to the bit those of torch's kaiming functions."""
    deviation = sqrt(2) / sqrt(inputs)
    if scheme == "he-normal":
        nn.init.normal_(tensor, std=deviation)
    else:
        nn.init.uniform_(tensor, -sqrt(3) * deviation, sqrt(3) * deviation)


def fan_in(weight: Tensor) -> int:
    return prod(weight.shape[1:])


SHAPED_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights may have more than one dimension


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Matrices, kernels and the like by name, in their order; nothing that a norm layer owns.

    Only those that are trained.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, SHAPED_NORMS)]
    owned = {id(parameter) for layer in norms for parameter in layer.parameters()}
    named = trained_parameters(module)
    return {name: p for name, p in named if p.dim() > 1 and id(p) not in owned}


def biases(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """The trained biases by name, with the fan-in of the weight beside each in its layer.

    A norm layer has no weight of more than one dimension that a bias could stand beside.
    """
    found: dict[str, tuple[Tensor, int]] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.dim() == 1 and name.endswith("bias"):
                beside = getattr(layer, f"{name.removesuffix('bias')}weight", None)
                if isinstance(beside, Tensor) and beside.dim() > 1:
                    found[f"{path}.{name}".removeprefix(".")] = parameter, fan_in(beside)
    return found
