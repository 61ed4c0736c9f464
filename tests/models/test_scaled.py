"""Channel groups: a cut of a large member is a smaller member of the same family."""

import pytest
import torch
from support.networks import network
from torch import Tensor, nn

from peerage.errors import InputError
from peerage.models import MIXES
from peerage.models.scaled import (
    MAX_BLOCKS,
    ChannelAxis,
    ChannelGroups,
    channel_groups,
    is_scaled_version,
    shapes,
    why_not_scaled,
)
from peerage.vectors import FlatModel, Layout, float_buffers, trained_parameters

SMALL = {  # small members of every family, and larger ones
    "mlp:hidden=3x4": "mlp:hidden=6x5",
    "dfml-cnn:channels=3+4": "dfml-cnn:channels=6+8",
    "dfml-cnn:channels=3+4,norm=layer": "dfml-cnn:channels=6+8,norm=layer",
    "preact-resnet:widths=2+3+4": "preact-resnet:widths=4+5+8",
    "vit:width=64,dropout=0,embedding_dropout=0": ("vit:width=128,dropout=0,embedding_dropout=0"),
}
WITHOUT_OUTPUT_LAYER = "vit:width=64,output_layer=reference,dropout=0,embedding_dropout=0"
SHAPE = (3, 8, 12)


def build(name: str, shape: tuple[int, int, int] = SHAPE) -> nn.Module:
    """A network in double precision; all its values, also of norm layers, are random."""
    module = network(name, shape).double()
    generator = torch.Generator().manual_seed(1)
    for _, tensor in [*trained_parameters(module), *float_buffers(module)]:
        noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype)
        tensor.data.mul_(1 + noise).add_(0.1 * noise)  # variances stay positive
    return module


def images(count: int = 3) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(2)).double()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*trained_parameters(module), *float_buffers(module)]
    return {name: tensor.detach() for name, tensor in named}


def cut(module: nn.Module, kept: dict[str, Tensor]) -> dict[str, Tensor]:
    groups = channel_groups(module)
    return {name: groups.cut(name, tensor, kept) for name, tensor in tensors(module).items()}


# Every family has its scaled versions


@pytest.mark.parametrize("family", ["h1-cnn", "h1-resnet", "h1-vit"])
@pytest.mark.parametrize("member", range(5))
def test_a_cut_of_the_largest_has_names_and_shapes_of_the_members(family, member):
    with torch.device("meta"):
        large, small = (network(MIXES[family].members[n], (3, 32, 32)) for n in (0, member))
    groups = channel_groups(large)
    sizes = channel_groups(small).sizes
    assert sizes.keys() == groups.sizes.keys()
    kept = groups.first(sizes)
    found = {
        name: tuple(groups.cut(name, torch.empty(shape), kept).shape)
        for name, shape in shapes(large).items()
    }
    assert list(found.items()) == list(shapes(small).items())
    assert is_scaled_version(small, large)
    assert is_scaled_version(large, small) == (member == 0)
    ratio = 2**member
    for group, size in sizes.items():
        most = groups.sizes[group]
        whole_heads = group.endswith("heads")
        assert size == (max(1, most // ratio) if whole_heads else most / ratio)


def test_the_groups_of_linear_layers_in_a_row():
    groups = channel_groups(network("mlp:hidden=6x5", (4,), 3))
    assert groups.sizes == {"hidden1": 6, "hidden2": 5}
    first, second = ChannelAxis(0, "hidden1"), ChannelAxis(0, "hidden2")
    assert groups.axes == {
        "hidden1.weight": (first,),
        "hidden1.bias": (first,),
        "hidden2.weight": (second, ChannelAxis(1, "hidden1")),
        "hidden2.bias": (second,),
        "head.weight": (ChannelAxis(1, "hidden2"),),
    }
    assert channel_groups(network("logistic", (4,), 3)).sizes == {}


def test_the_groups_of_a_convolutional_network():
    groups = channel_groups(network("dfml-cnn:channels=6+8", SHAPE))
    assert groups.sizes == {"conv1": 6, "conv2": 8}
    described = {
        name: [(axis.axis, axis.group, axis.block) for axis in axes]
        for name, axes in groups.axes.items()
    }
    first, second = [(0, "conv1", 1)], [(0, "conv2", 1)]
    assert described == {
        "conv1.weight": first,  # not the image channels
        "conv1.bias": first,
        "norm1.weight": first,
        "norm1.bias": first,
        "conv2.weight": [(0, "conv2", 1), (1, "conv1", 1)],
        "conv2.bias": second,
        "norm2.weight": second,
        "norm2.bias": second,
        "head.weight": [(1, "conv2", 2 * 3)],  # not the classes; six pixels of each channel
    }


def test_shortcuts_use_the_groups_of_their_ends():
    groups = channel_groups(network("preact-resnet:widths=4+6", SHAPE))
    inner = {f"block{stage}_{number}.conv1": 2 + 2 * stage for stage in (1, 2) for number in (1, 2)}
    assert groups.sizes == {"conv1": 4, "block2_1": 6, **inner}

    def axes(name: str) -> list[tuple[int, str]]:
        return [(axis.axis, axis.group) for axis in groups.axes[name]]

    # Both blocks of the first stage add to the output of the first convolution.
    for name in ("conv1", "block1_1.conv2", "block1_2.conv2"):
        assert axes(f"{name}.weight")[0] == (0, "conv1")
    assert axes("block2_1.shortcut.weight") == [(0, "block2_1"), (1, "conv1")]
    assert axes("block2_2.conv2.weight") == [(0, "block2_1"), (1, "block2_2.conv1")]
    for tensor in ("weight", "bias", "running_mean", "running_var"):
        assert axes(f"block2_1.norm1.{tensor}") == [(0, "conv1")]
        assert axes(f"block2_1.norm2.{tensor}") == [(0, "block2_1.conv1")]
    assert axes("head.weight") == [(1, "block2_1")]


def test_a_transformer_keeps_the_dimension_of_its_heads():
    large = network("vit:width=256,depth=1", SHAPE)
    groups = channel_groups(large)
    assert groups.sizes == {"width": 256, "block1.attention.heads": 4, "block1.hidden": 256}
    kept = groups.first({"width": 5, "block1.attention.heads": 2, "block1.hidden": 7})
    kept["block1.attention.heads"] = torch.tensor([3, 1])
    found = {name: groups.cut(name, t, kept) for name, t in tensors(large).items()}
    query = large.get_parameter("block1.attention.query.weight")
    expected = torch.cat([query[192:256, :5], query[64:128, :5]])
    assert torch.equal(found["block1.attention.query.weight"], expected)
    assert found["block1.attention.out.weight"].shape == (5, 128)
    assert found["block1.attention.scale"].shape == (2,)
    assert found["tokens.norm.weight"].shape == (240,)  # pixels are never cut
    assert found["tokens.linear.weight"].shape == (5, 240)
    assert found["tokens.positions"].shape == (1 + 2 * 3, 5)
    assert found["head.weight"].shape == (10, 5)
    assert found["head.bias"].shape == (10,)


# Cutting is consistent: all tensors of a group mean the same channels


@pytest.mark.parametrize("name", [*SMALL.values(), WITHOUT_OUTPUT_LAYER])
@pytest.mark.parametrize("training", [True, False])
def test_another_order_of_channels_is_the_same_function(name, training):
    """A wrong axis, group or block would mix channels."""
    module, x = build(name), images()
    generator = torch.Generator().manual_seed(3)
    order = {
        group: torch.randperm(size, generator=generator)
        for group, size in channel_groups(module).sizes.items()
    }
    other = build(name).train(training)
    other.load_state_dict(cut(module, order), strict=False)
    assert not torch.equal(next(other.parameters()), next(module.parameters()))
    torch.testing.assert_close(other(x), module.train(training)(x))


@pytest.mark.parametrize("kept", ["first", "others"])
def test_channels_of_zeros_can_be_cut(kept):
    """Batch norm treats channels alone, so the other channels of the large network stay zero."""
    small_name, large_name = "preact-resnet:widths=2+3+4", "preact-resnet:widths=4+5+8"
    small, large = build(small_name), build(large_name)
    groups, sizes = channel_groups(large), channel_groups(small).sizes
    chosen = groups.first(sizes)
    if kept == "others":  # the last ones, backwards
        chosen = {group: groups.sizes[group] - 1 - index for group, index in chosen.items()}
    embed(small, large, groups, chosen)
    assert torch.equal(cut(large, chosen)["conv1.weight"], small.get_parameter("conv1.weight"))
    torch.testing.assert_close(large(images()), small(images()))


def embed(
    small: nn.Module, large: nn.Module, groups: ChannelGroups, kept: dict[str, Tensor]
) -> None:
    """Write the small network into the large one, whose other entries become zero.

    This uses vectors, as algorithms do.
    """
    for parts in (trained_parameters, float_buffers):
        layout, smaller = Layout.of(parts(large)), Layout.of(parts(small))
        vector = torch.zeros(layout.size, dtype=torch.float64)
        values = torch.empty(smaller.size, dtype=torch.float64)
        for slot in smaller.slots:
            slot.view(values).copy_(tensors(small)[slot.name])
        vector[groups.entries(layout, kept)] = values
        for slot in layout.slots:
            tensors(large)[slot.name].copy_(slot.view(vector))


@pytest.mark.parametrize(("small", "large"), SMALL.items())
def test_entries_of_the_flat_vector(small, large):
    """Four-dimensional weights are in channels-last order there, in both models."""
    big, little = (FlatModel(network(name, SHAPE)) for name in (large, small))
    groups, sizes = channel_groups(big.module), channel_groups(little.module).sizes
    kept = groups.first(sizes)
    expected = cut(big.module, kept)
    for layout, own, vector in (
        (big.layout, little.layout, big.params),
        (big.buffer_layout, little.buffer_layout, big.buffers),
    ):
        entries = groups.entries(layout, kept)
        assert len(entries) == own.size
        assert len(entries.unique()) == len(entries)
        for name, view in own.views(vector[entries]).items():
            assert torch.equal(view, expected[name])


@pytest.mark.parametrize(("small", "large"), SMALL.items())
@pytest.mark.parametrize("kept", ["first", "wrapped", "scattered"])
def test_blocks_are_the_cut(small, large, kept):
    module = build(large)
    groups, sizes = channel_groups(module), channel_groups(build(small)).sizes
    chosen = {
        group: {
            "first": torch.arange(count),
            "wrapped": (groups.sizes[group] - 1 + torch.arange(count)) % groups.sizes[group],
            "scattered": torch.arange(groups.sizes[group]).flip(0)[:count],
        }[kept]
        for group, count in sizes.items()
    }
    expected = cut(module, chosen)
    for name, tensor in tensors(module).items():
        found = torch.full_like(expected[name], torch.nan)
        blocks = groups.blocks(name, tensor.shape, chosen)
        for there, here in blocks:
            assert found[here].isnan().all()  # no entry twice
            found[here] = tensor[there]
        assert torch.equal(found, expected[name])
        assert len(blocks) <= {"first": 1, "wrapped": 4, "scattered": MAX_BLOCKS}[kept]


# Models that are no scaled versions


@pytest.mark.parametrize(
    ("small", "large", "reason"),
    [
        ("digits-cnn", "dfml-cnn", "model Sequential has no width-scaled versions"),
        ("mlp", "dfml-cnn", "Sequential and DfmlCNNLayers are different families"),
        (
            "mlp:hidden=8",
            "mlp:hidden=8x4",
            "only one of the two models has hidden2.bias, so they differ in more than their width",
        ),
        (
            "vit:width=64,output_layer=reference",
            "vit:width=128",
            "only one of the two models has block1.attention.out.bias, so they differ in more than "
            "their width",
        ),
        ("dfml-cnn", "efficientnet", "model Sequential has no width-scaled versions"),
        ("vit:width=32", "dfml-cnn", "ViTLayers and DfmlCNNLayers are different families"),
        (
            "dfml-cnn:channels=8+16+32",
            "dfml-cnn",
            "only one of the two models has conv3.bias, so they differ in more than their width",
        ),
        (
            "dfml-cnn:channels=16+65",
            "dfml-cnn",
            "it has 65 channels in conv2, more than the 64 there",
        ),
        (
            "dfml-cnn:norm=layer",
            "dfml-cnn",
            "norm1.weight has shape (32, 16, 16) in one and (32,) in the other",
        ),
        (
            "vit:width=64,patch=8",
            "vit:width=128",
            "tokens.positions has shape (17, 64) in one and (65, 128) in the other",
        ),
    ],
)
def test_reasons(small, large, reason):
    with torch.device("meta"):
        modules = [network(name, (3, 32, 32)) for name in (small, large)]
    assert why_not_scaled(*modules) == reason
    assert not is_scaled_version(*modules)


def test_other_classes_or_images_are_no_scaled_version():
    with torch.device("meta"):
        large = network("dfml-cnn", (3, 32, 32), 10)
        for shape, classes in (((3, 32, 32), 9), ((1, 32, 32), 10), ((3, 40, 32), 10)):
            small = network("dfml-cnn:channels=16+32", shape, classes)
            assert "in one and" in str(why_not_scaled(small, large))


def test_a_model_without_groups_is_an_error():
    with pytest.raises(
        InputError, match="Sequential has no width-scaled versions; choose mlp, dfml-cnn"
    ):
        channel_groups(network("digits-cnn"))


def test_layers_that_are_no_row():
    mixed = nn.Sequential(nn.Linear(4, 8), nn.Flatten(), nn.Linear(3 * 8, 2))  # of [B, 3, 4]
    tanh = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for module in (mixed, tanh, nn.Sequential(nn.ReLU())):
        with pytest.raises(InputError, match="has no width-scaled versions"):
            channel_groups(module)


def test_frozen_parameters_cannot_be_cut():
    small, large = (network(f"mlp:hidden={width}", (4,)) for width in (3, 6))
    small.hidden1.requires_grad_(False)
    assert why_not_scaled(small, large) == "model Sequential has frozen parameters"
