"""Architectures and the initial values of models, shared by all nodes or one for each."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod, sqrt
from typing import Literal

import torch
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.isolation import exclusive_torch
from peerage.models.base import Model
from peerage.randomness import stream_seed
from peerage.vectors import (
    FlatModel,
    Layout,
    find_head,
    float_buffers,
    frozen_parameters,
    hash_tensors,
    trained_parameters,
)

Scheme = Literal["torch", "he", "he-normal"]
Bias = Literal["zero", "default", "scaled"]


SHARED = -1  # number of the start that nodes share


@dataclass(frozen=True)
class Architecture:
    """A kind of model: how to build it, and how to draw its initial values.

    Parameters that do not require gradients are constants of the architecture. Nodes do not train
    or send them, and their vectors do not contain them. If they are random, all models get the
    values of the shared start, so that they are equal on all nodes.
    """

    name: str
    build: Callable[[], nn.Module]
    scheme: Scheme = "torch"
    # Biases are zero, have PyTorch's default values, or are drawn and multiplied by the gain like
    # the weights of their layer. By default, torch uses PyTorch's values and He uses zero.
    bias: Bias | None = None
    has_values: bool = False  # whether the user's module has values, for the shared start
    seed: int = 0  # of the experiment; constants are drawn with it
    head: tuple[str, ...] = ()  # modules of the head; by default those of `find_head`

    @cached_property
    def layout(self) -> Layout:
        module = self.specimen()
        return Layout.of(trained_parameters(module), find_head(module, self.head))

    @cached_property
    def constants(self) -> dict[str, Tensor]:
        """The frozen parameters by name."""
        with drawing(stream_seed(self.seed, "init", SHARED)):
            module = self.build()
        return {name: p.detach().clone() for name, p in frozen_parameters(module)}

    @cached_property
    def constants_hash(self) -> str | None:
        """SHA-256 over names, shapes and values of the frozen parameters; None without any."""
        return hash_tensors(self.constants) if self.constants else None

    @cached_property
    def buffer_layout(self) -> Layout:
        module = self.specimen()
        return Layout.of(float_buffers(module), find_head(module, self.head))

    @cached_property
    def amplifiable(self) -> frozenset[str]:
        """The names of the parameters that a gain multiplies."""
        module = self.specimen()
        return frozenset(weights(module)).union(biases(module) if self.bias == "scaled" else ())

    def build_flat(self) -> FlatModel:
        return FlatModel(self.specimen(), self.head)

    def initial(self, seed: int, start: int | None, gain: float = 1.0) -> tuple[Tensor, Tensor]:
        """(params [d], buffers [b]) of the start with this number; None means the shared one."""
        stream = stream_seed(seed, "init", SHARED if start is None else start)
        return self.drawn(stream, gain, redrawn=start is not None)

    def drawn(self, stream: int, gain: float, *, redrawn: bool) -> tuple[Tensor, Tensor]:
        """(params [d], buffers [b]) from a stream; a user's module keeps its values or is redrawn.

        `stream` is the seed of torch's generator.
        """
        with drawing(stream):
            module = self.build()
            if self.has_values and redrawn:
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
        """The parameters [d] with weights multiplied by a gain, except in norm layers (P4)."""
        if gain == 1.0:
            return params
        params = params.clone()
        for slot in self.layout.slots:
            if slot.name in self.amplifiable:
                params[slot.start : slot.start + slot.size] *= gain
        return params

    def state_dict(self, params: Tensor, buffers: Tensor) -> dict[str, Tensor]:
        """Parameters, buffers and constants by name, each tensor in row-major order."""
        views = self.layout.views(params) | self.buffer_layout.views(buffers)
        constants = {name: value.clone() for name, value in self.constants.items()}
        return {name: value.contiguous() for name, value in (constants | views).items()}

    def module(self, params: Tensor, buffers: Tensor) -> nn.Module:
        """A model with these values, in evaluation mode."""
        module = self.specimen()
        module.load_state_dict(self.state_dict(params, buffers), strict=False)  # without counters
        return module.eval()

    def specimen(self) -> nn.Module:
        """A new model of this kind with the right constants; its other values are arbitrary."""
        with drawing(stream_seed(self.seed, "init", SHARED)):
            module = self.build()
        for name, parameter in frozen_parameters(module):
            parameter.data.copy_(self.constants[name])
        return module


@dataclass(frozen=True)
class Split:
    """A model of which the user names the head; the rest is its core.

    The head is one or several modules by name, such as `"fc"` or `("norm", "classifier")`. By
    default it is the model's own `default_head`, or else the last linear layer, as for every model
    that is not wrapped.

    >>> import peerage as pg
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> pg.Experiment(model=pg.Split(model, head="3")).model[0].head_modules
    ('3',)
    """

    model: Model | nn.Module | Callable[[], nn.Module] | str  # text such as "mlp:hidden=8"
    head: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = tuple(self.head) if isinstance(self.head, list | tuple) else (self.head,)
        if not all(isinstance(name, str) for name in names):
            raise InputError(
                f"head must be names of modules, got {self.head!r}; write head=('norm', 'fc')"
            )
        object.__setattr__(self, "head", names)

    @property
    def head_modules(self) -> tuple[str, ...]:
        return tuple(self.head)


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed torch's global generator, and restore it at the end."""
    with exclusive_torch():
        torch.default_generator.manual_seed(seed)
        yield


def own_architecture(
    model: nn.Module | Callable[[], nn.Module],
    name: str,
    scheme: Scheme = "torch",
    bias: Bias | None = None,
    seed: int = 0,
    head: tuple[str, ...] = (),
) -> Architecture:
    """An architecture from the user's module, or from a function that builds one."""
    has_values = isinstance(model, nn.Module)
    build = partial(copy.deepcopy, model) if isinstance(model, nn.Module) else model
    return Architecture(name, build, scheme, bias, has_values, seed, head)


def redraw(module: nn.Module) -> None:
    """Draw new values for all trained parameters of a module that the user built.

    A layer that is frozen completely also keeps its running statistics.
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
    for parameter, value in frozen:  # in layers that are only partly frozen
        parameter.data.copy_(value)


def he(module: nn.Module, scheme: Scheme, bias: Bias = "zero") -> None:
    """He initialisation: weights of variance 2 / fan-in, uniform or normal (P4).

    Scaled biases have the distribution of the weights of their layer, as in the authors' code.
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
    """Draw values of variance 2 / inputs, bit-identical to torch's kaiming functions."""
    deviation = sqrt(2) / sqrt(inputs)
    if scheme == "he-normal":
        nn.init.normal_(tensor, std=deviation)
    else:
        nn.init.uniform_(tensor, -sqrt(3) * deviation, sqrt(3) * deviation)


def fan_in(weight: Tensor) -> int:
    return prod(weight.shape[1:])


SHAPED_NORMS = (nn.LayerNorm, nn.RMSNorm)  # their weights may have more than one dimension


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Trained parameters of more than one dimension by name, except those of norm layers."""
    norms = [layer for layer in module.modules() if isinstance(layer, SHAPED_NORMS)]
    owned = {id(parameter) for layer in norms for parameter in layer.parameters()}
    named = trained_parameters(module)
    return {name: p for name, p in named if p.dim() > 1 and id(p) not in owned}


def biases(module: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """The trained biases by name, with the fan-in of the weight of their layer.

    The biases of norm layers are left out, as their weights have one dimension.
    """
    found: dict[str, tuple[Tensor, int]] = {}
    for path, layer in module.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.dim() == 1 and name.endswith("bias"):
                weight = getattr(layer, f"{name.removesuffix('bias')}weight", None)
                if isinstance(weight, Tensor) and weight.dim() > 1:
                    found[f"{path}.{name}".removeprefix(".")] = parameter, fan_in(weight)
    return found
