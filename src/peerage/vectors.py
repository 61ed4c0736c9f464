"""Models as flat vectors, and the layout that maps names to parts of the vector.

Four-dimensional weights are stored in channels-last order, because convolutions on a CPU run
fastest that way; all other tensors are row-major. Only `Layout` depends on this: algorithms see a
vector [d]. `canonical` returns the row-major order, for digests and files for other programs.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from peerage.errors import InputError, did_you_mean

T = TypeVar("T")
# Some entries of a flat vector: a slice, or indices [k] where they are not adjacent.
Entries = slice | Tensor


PARTS = ("core", "head")
REST = {"core": "head", "head": "core"}


@dataclass(frozen=True)
class Weights:
    """One model as a value: its parameters, its running statistics and its architecture.

    >>> import peerage as pg
    >>> pg.Weights(torch.zeros(8), torch.zeros(0), "mlp").params.shape
    torch.Size([8])
    """

    params: Tensor  # [d]
    buffers: Tensor  # [b]
    architecture: str


@dataclass(frozen=True)
class Slot:
    """One named tensor inside a flat vector."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def layer(self) -> str:
        """The module that owns the tensor: `conv1` for `conv1.weight`."""
        return self.name.rpartition(".")[0]

    def view(self, vector: Tensor) -> Tensor:
        flat = vector[self.start : self.start + self.size]
        if len(self.shape) == 4:
            out, into, height, width = self.shape
            return flat.view(out, height, width, into).permute(0, 3, 1, 2)
        return flat.view(self.shape)


@dataclass(frozen=True)
class Layout:
    """The position of each tensor of a model in its flat vector.

    >>> import peerage as pg
    >>> layout = pg.Layout.of(nn.Linear(3, 2).named_parameters())
    >>> layout.size, [slot.name for slot in layout.slots]
    (8, ['weight', 'bias'])
    """

    slots: tuple[Slot, ...]
    head_modules: tuple[str, ...] = ()  # by default, the last layer with parameters

    @classmethod
    def of(
        cls, tensors: Iterable[tuple[str, Tensor]], head_modules: tuple[str, ...] = ()
    ) -> "Layout":
        """The layout of named tensors, in their order.

        >>> layout = Layout.of(nn.Linear(3, 2).named_parameters())
        >>> [(slot.name, slot.shape, slot.start) for slot in layout.slots], layout.size
        ([('weight', (2, 3), 0), ('bias', (2,), 6)], 8)
        """
        slots, start = [], 0
        for name, tensor in tensors:
            slots.append(Slot(name, tuple(tensor.shape), start))
            start += tensor.numel()
        return cls(tuple(slots), head_modules)

    @cached_property
    def size(self) -> int:
        return sum(slot.size for slot in self.slots)

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    @property
    def layers(self) -> tuple[str, ...]:
        """The modules that own parameters, from the input to the output."""
        return tuple(dict.fromkeys(slot.layer for slot in self.slots))

    @property
    def head(self) -> tuple[str, ...]:
        """The layers of the head."""
        return tuple(layer for layer in self.layers if self.in_part(f"{layer}.", "head"))

    def in_part(self, name: str, part: str) -> bool:
        """Whether the tensor of this name is in the `head` or in the `core`, which is the rest.

        A module is in a part like its tensors; its name ends with a dot here, as in `fc.`.
        """
        if part not in PARTS:
            raise InputError(f"a model has no part {part!r}; {did_you_mean(part, PARTS)}")
        modules = self.head_modules or self.layers[-1:]
        # The model itself has an empty name.
        inside = any(name.startswith(f"{module}." if module else "") for module in modules)
        return inside == (part == "head")

    def part(self, part: str) -> Entries:
        """The entries of the `head` or of the `core`, for `vector[layout.part("head")]`."""
        chosen = [slot for slot in self.slots if self.in_part(slot.name, part)]
        start = chosen[0].start if chosen else self.size
        stop = chosen[-1].start + chosen[-1].size if chosen else self.size
        if stop - start == sum(slot.size for slot in chosen):
            return slice(start, stop)
        return torch.cat([torch.arange(slot.start, slot.start + slot.size) for slot in chosen])

    def part_size(self, part: str) -> int:
        """The number of entries in a part."""
        return sum(slot.size for slot in self.slots if self.in_part(slot.name, part))

    def check_parts(self, needed_by: str) -> None:
        """Raise an InputError if the head is the whole model; `needed_by` begins its text."""
        if not self.part_size("core"):
            name = " + ".join(self.head)
            raise InputError(
                f"{needed_by} requires a model with a core and a head, but its head "
                f"{f'{name!r} ' if name else ''}is the whole model; use a model with more layers, "
                "or name a smaller head with pg.Split(model, head=...)"
            )

    def span(self, *layers: str) -> slice:
        """The part of the vector with the named layers, which must be adjacent.

        `vector[layout.span("fc2")]` is one layer.
        """
        chosen = [slot for slot in self.slots if slot.layer in layers]
        start = chosen[0].start if chosen else 0
        size = sum(slot.size for slot in chosen)
        if not chosen or chosen[-1].start + chosen[-1].size != start + size:
            raise KeyError(f"layers {layers} are not adjacent in {self.layers}")
        return slice(start, start + size)

    def view(self, vector: Tensor, name: str) -> Tensor:
        """A view of the named tensor with its shape, sharing memory with the vector."""
        return self._by_name[name].view(vector)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        return {slot.name: slot.view(vector) for slot in self.slots}

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A new vector [d] with the values of the named tensors."""
        vector = torch.empty(self.size)
        for slot in self.slots:
            slot.view(vector).copy_(tensors[slot.name].detach())
        return vector

    def canonical(self, vector: Tensor) -> Tensor:
        """The same values [d] with every tensor in row-major order."""
        if not self.slots:
            return vector
        return torch.cat([slot.view(vector).reshape(-1) for slot in self.slots])


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite.

    >>> all_finite(torch.tensor([1.0, 3e38, 3e38])), all_finite(torch.tensor([1.0, float("nan")]))
    (True, False)
    """
    if not tensor.is_floating_point():
        return True
    # One sum is enough in most cases, but it may overflow although every entry is finite.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def trained_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The names and parameters in a node's vector, in this order."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]


def frozen_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters without gradients: constants of the architecture, equal on all nodes."""
    return [(name, p) for name, p in module.named_parameters() if not p.requires_grad]


def find_head(module: nn.Module, names: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules of the head: those of these names, or else the default.

    The class of a module may state its default, as a tuple of names in `default_head`. Otherwise it
    is the last linear layer that is trained; without one, the last layer with parameters.
    """
    # Of the class, because a module may have a submodule of that name.
    names = names or getattr(type(module), "default_head", ())
    known = dict(module.named_modules())
    for name in names:
        if name not in known:
            hint = did_you_mean(name, tuple(filter(None, known)))
            raise InputError(f"the model has no module {name!r}, which should be its head; {hint}")
    layout = Layout.of(trained_parameters(module), tuple(names))
    if names:
        if not layout.head:
            raise InputError(
                f"the head {' + '.join(names)} has no parameters that are trained; name a layer "
                f"that has some, as {', '.join(layout.layers[-3:])}"
            )
        return tuple(names)
    layers = layout.layers
    linear = [name for name in layers if isinstance(known[name], nn.Linear)]
    return tuple((linear or layers)[-1:])


def head_layer(module: nn.Module) -> nn.Linear:
    """The output layer of a network; its inputs are the features of an example."""
    layers = Layout.of(module.named_parameters()).layers
    layer = module.get_submodule(layers[-1]) if layers else None
    if not isinstance(layer, nn.Linear):
        raise InputError(
            f"model {type(module).__name__} has no linear layer at the end, whose inputs would be "
            "its features; choose a model that ends with one"
        )
    return layer


def float_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers such as running statistics; integer buffers, such as counters, are left out."""
    return [(name, b) for name, b in module.named_buffers() if b.is_floating_point()]


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The state dictionary of a module, as new row-major tensors."""
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names, shapes, types and values of tensors, whatever their order."""
    hashed = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        hashed.update(f"{name} {tuple(value.shape)} {value.dtype} ".encode())
        hashed.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


class FlatModel:
    """A module whose trained parameters and float buffers are views into two flat vectors.

    Frozen parameters stay with the module. One object serves all nodes of an architecture in a
    process: a node's model is loaded by one copy into `params`.
    """

    def __init__(self, module: nn.Module, head: Sequence[str] = ()) -> None:
        self.module = module
        named = trained_parameters(module)
        head_modules = find_head(module, head)
        self.layout = Layout.of(named, head_modules)
        self.params = self.layout.flatten(dict(named))
        self.tensors = [parameter for _, parameter in named]
        self.scratch: dict[str, Tensor] = {}  # temporary tensors for the current computation
        self._batch_statistics: dict[str | None, bool] = {}  # by trained part
        self.frozen = [parameter for _, parameter in frozen_parameters(module)]
        for parameter in self.frozen:
            if parameter.dim() == 4:  # the order of the flat vector
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        buffers = float_buffers(module)
        self.buffer_layout = Layout.of(buffers, head_modules)
        self.buffers = self.buffer_layout.flatten(dict(buffers))
        self.viewed = [*self.tensors, *(buffer for _, buffer in buffers)]
        self.views = self.make_views()
        self.activate()

    def begin_training(self, only: str | None = None) -> None:
        """Put the module into training mode; with `only`, all but this part into evaluation mode.

        A frozen part is thus a fixed function: its dropout is off, and its statistics stay.
        """
        self.module.train()  # a module may exclude layers here, to keep their statistics
        if only is not None:
            for name, layer in self.module.named_modules():
                if not self.layout.in_part(f"{name}.", only):
                    layer.training = False

    def batch_statistics(self, only: str | None = None) -> bool:
        """Whether a layer normalises by batch statistics in training (of this part)."""
        if only not in self._batch_statistics:
            self.begin_training(only)
            layers = self.module.modules()
            found = any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)
            self._batch_statistics[only] = found
        return self._batch_statistics[only]

    def sibling(self, params: Tensor, buffers: Tensor) -> "FlatModel":
        """Another model with the same module and its own vectors; activate it before each use."""
        other = copy(self)
        other.params, other.buffers, other.scratch = params, buffers, {}
        other.views = other.make_views()
        return other

    def activate(self) -> None:
        """Let the module compute with the vectors of this model.

        A graph that autograd recorded for a sibling needs that sibling again, because it refers to
        the parameters of the module. The values of parameters are not copied.
        """
        for tensor, view in zip(self.viewed, self.views, strict=True):
            tensor.data = view

    def make_views(self) -> list[Tensor]:
        """Views of the two vectors, one for each trained parameter and each float buffer."""
        buffers = [slot.view(self.buffers) for slot in self.buffer_layout.slots]
        return [*self.like_tensors(self.params), *buffers]

    def load(self, params: Tensor, buffers: Tensor | None = None) -> None:
        self.params.copy_(params)
        if buffers is not None and buffers.numel():
            self.buffers.copy_(buffers)

    def like_tensors(self, vector: Tensor, part: str | None = None) -> list[Tensor]:
        """Views of a vector [d], one for each trained parameter (of a part), with its strides."""
        return self.of_part([slot.view(vector) for slot in self.layout.slots], part)

    def of_part(self, items: Sequence[T], part: str | None) -> list[T]:
        """The items of one part, of a list with one item for each trained parameter."""
        pairs = zip(self.layout.slots, items, strict=True)
        return [x for slot, x in pairs if part is None or self.layout.in_part(slot.name, part)]
