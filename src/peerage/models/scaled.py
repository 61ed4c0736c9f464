"""Width-scaled families: which entries of a model belong to which channel (P1, partial training).

A smaller member of such a family is a larger one from which channels were removed. A *channel
group* is a set of channels that must be cut together, because their tensors are multiplied,
normalised or added entry by entry: the outputs of a convolution, its norm and the inputs of the
next one. If the input of a block is added to its output, both are one group. Image channels,
classes and the dimension of an attention head are in no group, so they are never cut.

The class of a network states its groups in `channel_axes`. Linear layers in a row, as in `mlp`,
need no such statement.

HeteroFL (Diao, Ding, Tarokh, 2021. arXiv:2010.01264) keeps the first channels of every group,
FedRolex (Alam et al., 2022. arXiv:2212.01548) others in every round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.vectors import Layout, float_buffers, frozen_parameters, trained_parameters

Kept = Mapping[str, Tensor]  # group -> indices [k] of the channels that stay, in their new order
Index = tuple[slice, ...] | tuple[Tensor, ...]  # of a part of a tensor
MAX_BLOCKS = 16  # above it, copying block by block is slower than by positions


class Channels(NamedTuple):
    """The inputs or outputs of a layer: a group, and the adjacent entries of one channel.

    These are the pixels of a flattened map, or the dimension of an attention head.
    """

    group: str
    block: int = 1


@dataclass(frozen=True)
class ChannelAxis:
    """An axis of a tensor that is cut with a group of channels."""

    axis: int
    group: str
    block: int = 1  # see `Channels`

    def size(self, tensor: Tensor) -> int:
        """The number of channels along the axis."""
        return tensor.shape[self.axis] // self.block

    def entries(self, channels: Tensor) -> Tensor:
        """The positions of these channels along the axis."""
        return (channels[:, None] * self.block + torch.arange(self.block)).flatten()

    def cut(self, tensor: Tensor, channels: Tensor) -> Tensor:
        """The tensor with these channels only."""
        return tensor.index_select(self.axis, self.entries(channels))


NamedAxes = Iterator[tuple[str, tuple[ChannelAxis, ...]]]


@runtime_checkable
class Scalable(Protocol):
    """A module that states the channel groups of its parameters and running statistics."""

    def channel_axes(self) -> NamedAxes:
        """The names of all tensors that are cut, with the axes of each."""


@dataclass(frozen=True)
class ChannelGroups:
    """The channel groups of a model."""

    sizes: Mapping[str, int]  # group -> number of its channels
    axes: Mapping[str, tuple[ChannelAxis, ...]]  # tensor -> its axes; only those that have any

    def first(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """The first channels of every group, as many as `sizes` says (HeteroFL)."""
        return {group: torch.arange(sizes[group]) for group in self.sizes}

    def cut(self, name: str, tensor: Tensor, kept: Kept) -> Tensor:
        """The part of a named tensor that belongs to the kept channels."""
        for axis in self.axes.get(name, ()):
            tensor = axis.cut(tensor, kept[axis.group])
        return tensor

    def blocks(self, name: str, shape: Sequence[int], kept: Kept) -> list[tuple[Index, Index]]:
        """Where a named tensor of a smaller model lies in that of this one, of this shape.

        For each pair (there, here), `large[there]` and `small[here]` are the same entries. If most
        kept channels are adjacent, these are a few blocks of slices: views, and faster than
        positions.
        """
        cut = {axis.axis: axis.entries(kept[axis.group]) for axis in self.axes.get(name, ())}
        along = [
            adjacent(cut[n]) if n in cut else [(slice(size),) * 2] for n, size in enumerate(shape)
        ]
        if prod(map(len, along)) <= MAX_BLOCKS:
            pairs = [tuple(zip(*block, strict=True)) for block in product(*along)]
            return [(there, here) for there, here in pairs]
        # One axis for each, so that every position of one meets every position of the others.
        every = [cut.get(n, torch.arange(size)) for n, size in enumerate(shape)]
        outer = torch.meshgrid(*every, indexing="ij")
        return [(outer, (slice(None),) * len(shape))]

    def entries(self, layout: Layout, kept: Kept) -> Tensor:
        """Where the vector of a smaller model lies in that of this one: positions [d'].

        `layout` is that of the parameters or of the running statistics of this model. So
        `large[entries]` is the smaller vector, and `large[entries] = small` writes it back.
        """
        positions = torch.arange(layout.size)
        chosen = {
            slot.name: self.cut(slot.name, slot.view(positions), kept) for slot in layout.slots
        }
        smaller = Layout.of(chosen.items())
        vector = torch.empty(smaller.size, dtype=torch.int64)
        for slot in smaller.slots:
            slot.view(vector).copy_(chosen[slot.name])
        return vector


def adjacent(positions: Tensor) -> list[tuple[slice, slice]]:
    """Runs of adjacent, ascending positions: the positions, and where they are in the list.

    >>> adjacent(torch.tensor([3, 4, 0, 1, 2]))
    [(slice(3, 5, None), slice(0, 2, None)), (slice(0, 3, None), slice(2, 5, None))]
    """
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    ends = [0, *breaks.tolist(), len(positions)]
    first = positions[ends[:-1]].tolist()
    return [
        (slice(start, start + b - a), slice(a, b))
        for start, (a, b) in zip(first, pairwise(ends), strict=True)
    ]


def channel_groups(module: nn.Module) -> ChannelGroups:
    """The channel groups of a model; raises an InputError if it belongs to no scaled family."""
    reason = why_not_scalable(module)
    if reason is not None:
        raise InputError(
            f"{reason}; choose mlp, dfml-cnn, preact-resnet or vit, or define channel_axes in the "
            "class of your own"
        )
    axes = dict(module.channel_axes() if isinstance(module, Scalable) else row_axes(module))
    tensors = dict([*trained_parameters(module), *float_buffers(module)])
    sizes = {axis.group: axis.size(tensors[name]) for name, cut in axes.items() for axis in cut}
    return ChannelGroups(sizes, axes)


def why_not_scalable(module: nn.Module) -> str | None:
    """Why a model has no channel groups; None if it has."""
    if not isinstance(module, Scalable) and not is_row(module):
        return f"model {type(module).__name__} has no width-scaled versions"
    if frozen_parameters(module):
        # They are no part of a node's vector, so no average could make up for their differences.
        return f"model {type(module).__name__} has frozen parameters"
    return None


def is_scaled_version(small: nn.Module, large: nn.Module) -> bool:
    """Whether the small model is the large one without some of its channels."""
    return why_not_scaled(small, large) is None


def why_not_scaled(small: nn.Module, large: nn.Module) -> str | None:
    """Why the small model is not a scaled version of the large one; None if it is one."""
    for module in (small, large):
        reason = why_not_scalable(module)
        if reason is not None:
            return reason
    if type(small) is not type(large):
        return f"{type(small).__name__} and {type(large).__name__} are different families"
    here, there = shapes(small), shapes(large)
    if here.keys() != there.keys():
        one = min(here.keys() ^ there.keys())
        return f"only one of the two models has {one}, so they differ in more than their width"
    sizes, groups = channel_groups(small).sizes, channel_groups(large)
    for group, size in sizes.items():
        if size > groups.sizes[group]:
            return f"it has {size} channels in {group}, more than the {groups.sizes[group]} there"
    for name, shape in there.items():
        scaled = list(shape)
        for axis in groups.axes.get(name, ()):
            scaled[axis.axis] = axis.block * sizes[axis.group]
        if here[name] != tuple(scaled):
            return f"{name} has shape {here[name]} in one and {shape} in the other"
    return None


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all trained parameters and running statistics, by name."""
    named = [*trained_parameters(module), *float_buffers(module)]
    return {name: tuple(tensor.shape) for name, tensor in named}


# Linear layers in a row


def is_row(module: nn.Module) -> bool:
    """Whether a model is linear layers in a row, each with the outputs of the one before."""
    # Not a subclass, which may compute something else.
    kinds = {type(part) for part in module.children()}
    if type(module) is not nn.Sequential or not kinds <= {nn.Flatten, nn.Linear, nn.ReLU}:
        return False
    layers = [layer for _, layer in linear_row(module)]
    return bool(layers) and all(a.out_features == b.in_features for a, b in pairwise(layers))


def linear_row(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    """The linear layers of a model by name, from the input to the output."""
    return [(name, part) for name, part in module.named_children() if isinstance(part, nn.Linear)]


def row_axes(module: nn.Module) -> NamedAxes:
    """The axes of linear layers in a row; the outputs of each but the last are a group."""
    inputs: Channels | None = None
    *hidden, (name, last) = linear_row(module)
    for group, layer in hidden:
        outputs = Channels(group)
        yield from layer_axes(group, layer, inputs, outputs)
        inputs = outputs
    yield from layer_axes(name, last, inputs)


# For the classes of modules


def layer_axes(
    name: str,
    layer: nn.Linear | nn.Conv2d,
    inputs: Channels | None = None,
    outputs: Channels | None = None,
) -> NamedAxes:
    """The axes of a layer's weight and bias; None stands for a side that is never cut."""
    out = () if outputs is None else (ChannelAxis(0, *outputs),)
    into = () if inputs is None else (ChannelAxis(1, *inputs),)
    yield f"{name}.weight", (*out, *into)
    if layer.bias is not None and out:
        yield f"{name}.bias", out


def norm_axes(name: str, layer: nn.Module, channels: Channels) -> NamedAxes:
    """The axes of a norm layer, whose parameters and statistics follow their channel."""
    for tensor in ("weight", "bias", "running_mean", "running_var"):
        if getattr(layer, tensor, None) is not None:
            yield f"{name}.{tensor}", (ChannelAxis(0, *channels),)
