"""Networks: exact sizes, shapes, memory formats, and errors that name the remedy."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import SIZES, network
from torch import nn

from peerage import specs
from peerage.errors import InputError
from peerage.models import MODELS, default_model
from peerage.models.start import he
from peerage.vectors import Layout, head_layer

LEAST_SIDE = {
    "cifar-cnn": 8,
    "dfml-cnn": 4,
    "digits-cnn": 4,
    "efficientnet": 32,
    "fashion-cnn": 6,
    "gain-cnn": 1,
    "gn-lenet": 8,
    "leaf-cnn": 4,
    "mnist-cnn": 16,
    "preact-resnet": 8,
    "resnet8": 8,
    "vgg16": 32,
    "vit": 4,
}
MULTIPLES = {"vit": 4}  # of which the sides of images must be multiples


def head_parameters(module: nn.Module) -> list[str]:
    head_layer(module)  # raises an error for a network without one
    layout = Layout.of(module.named_parameters())
    return [slot.name for slot in layout.slots if slot.layer in layout.head]


def count(module: nn.Module, names: list[str] | None = None) -> int:
    return sum(p.numel() for name, p in module.named_parameters() if names is None or name in names)


def test_every_model_is_listed_here():
    assert SIZES.keys() == MODELS.keys()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "efficientnet" else [])
        for name in SIZES
    ],
)
def test_parameter_counts(name):
    shape, parameters, head = SIZES[name]
    module = network(name)
    assert count(module) == parameters
    assert count(module, head_parameters(module)) == head
    assert module(torch.zeros(3, *shape)).shape == (3, 10)


def test_counts_in_other_settings():
    imagenette = network("gn-lenet", (3, 64, 64))
    assert count(imagenette) == 120_554
    assert count(imagenette, head_parameters(imagenette)) == 40_970
    assert count(network("hwa-mlp"), ["hidden2.weight", "hidden2.bias"]) == 40_200
    assert count(network("mlp:hidden=5", (3,), 2)) == 3 * 5 + 5 + 5 * 2 + 2
    assert count(network("mnist-cnn:dropout=true", (1, 28, 28))) == 21_840
    assert count(network("fashion-cnn:relu=first", (1, 28, 28))) == 1_199_882
    assert count(network("gain-cnn", (10, 32, 32), 17)) == 8_456_433  # So2Sat, as in P4
    assert count(network("leaf-cnn", (1, 28, 28), 62)) == 6_603_710  # FEMNIST, as in P2
    assert count(network("gain-cnn", (1, 2, 3), 4)) == 320 + 18_496 + 36_928 + 49_280 + 8_256 + 260


def test_vgg16_grows_with_the_image():
    with torch.device("meta"):
        larger = network("vgg16:dropout=0", (3, 64, 96), 1000)
    layers = {name: count(larger, [f"{name}.weight", f"{name}.bias"]) for name in larger._modules}
    convolutions = [size for name, size in layers.items() if name.startswith("conv")]
    assert sum(convolutions) == 14_714_688  # of the thirteen, whatever the image
    assert len(convolutions) == 13
    assert layers["hidden1"] == (512 * 2 * 3 + 1) * 4096
    assert layers["head"] == 4097 * 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_memory_format_does_not_change_the_logits(name):
    module, x = network(name), torch.randn(4, *SIZES[name][0])
    expected = module(x)
    torch.testing.assert_close(module(x.to(memory_format=torch.channels_last)), expected)
    last = network(name).to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(x.to(memory_format=torch.channels_last)), expected)


def test_logistic_is_one_affine_map():
    module = network("logistic", (1, 1, 2), 2)
    module.load_state_dict(
        {
            "head.weight": torch.tensor([[1.0, 2.0], [3.0, -4.0]]),
            "head.bias": torch.tensor([5.0, 6.0]),
        }
    )
    x = torch.tensor([[[[1.0, 1.0]]], [[[2.0, 0.5]]]])
    torch.testing.assert_close(module(x), torch.tensor([[8.0, 5.0], [8.0, 10.0]]))


def test_perceptron_forward_by_hand():
    module = network("mlp:hidden=2", (2,), 1)
    module.load_state_dict(
        {
            "hidden1.weight": torch.tensor([[1.0, 1.0], [1.0, -1.0]]),
            "hidden1.bias": torch.tensor([0.0, 1.0]),
            "head.weight": torch.tensor([[10.0, 100.0]]),
            "head.bias": torch.tensor([0.5]),
        }
    )
    x = torch.tensor([[1.0, 2.0], [-3.0, 1.0]])  # hidden: (3, 0) and (0, 0) after ReLU
    torch.testing.assert_close(module(x), torch.tensor([[30.5], [0.5]]))


def test_vgg16_is_five_blocks_that_each_halve_the_image():
    module, x = network("vgg16"), torch.randn(2, 3, 32, 32)
    he(module, "he")  # or the logits would be little more than biases
    h, sides = x, []
    for block, convolutions in enumerate([2, 2, 3, 3, 3], start=1):
        for number in range(1, convolutions + 1):
            h = torch.relu(module.get_submodule(f"conv{block}_{number}")(h))
        h = torch.max_pool2d(h, 2)
        sides.append(tuple(h.shape[1:]))
    assert sides == [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1)]
    for name in ("hidden1", "hidden2"):
        h = torch.relu(module.get_submodule(name)(h.flatten(1)))
    torch.testing.assert_close(module(x), module.get_submodule("head")(h))


def test_gain_cnn_pools_nothing():
    module, x = network("gain-cnn", (2, 4, 5), 3), torch.randn(2, 2, 4, 5)
    he(module, "he")
    h = x
    for name in ("conv1", "conv2", "conv3"):
        h = torch.relu(module.get_submodule(name)(h))
    assert h.shape == (2, 64, 4, 5)
    for name in ("hidden1", "hidden2"):
        h = torch.relu(module.get_submodule(name)(h.flatten(1)))
    torch.testing.assert_close(module(x), module.get_submodule("head")(h))


@pytest.mark.parametrize(
    ("name", "convolutions"),
    [("cifar-cnn", ["conv1", "conv2", "conv3"]), ("leaf-cnn", ["conv1", "conv2"])],
)
def test_relu_before_or_after_pooling_is_the_same_network(name, convolutions):
    module, x = network(name), torch.randn(4, *SIZES[name][0])
    h = x
    for name in convolutions:
        h = torch.max_pool2d(torch.relu(module.get_submodule(name)(h)), 2)
    h = torch.relu(module.get_submodule("hidden")(h.flatten(1)))
    expected = module.get_submodule("head")(h)
    assert torch.equal(module(x), expected)
    parameters = list(module.parameters())
    there = torch.autograd.grad(expected.square().sum(), parameters)
    here = torch.autograd.grad(module(x).square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(there, here, strict=True))


def test_dropout_only_where_asked_and_only_in_training():
    x = torch.randn(2, 1, 28, 28)
    plain, dropping = network("mnist-cnn"), network("mnist-cnn:dropout=true", (1, 28, 28))
    assert torch.equal(plain(x), dropping(x))
    assert torch.equal(plain.train()(x), plain(x))
    assert not torch.equal(dropping.train()(x), dropping(x))


def test_vgg16_drops_the_share_that_is_asked_for():
    """A quarter of the units of a hidden layer; the others grow to make up for it."""
    module = network("vgg16:dropout=0.25", (3, 32, 32)).train()
    kept = module.get_submodule("dropout6")(torch.ones(200, 4096))
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.005)
    assert kept.max() == pytest.approx(1 / 0.75)
    assert isinstance(module.get_submodule("dropout7"), nn.Dropout)
    with torch.device("meta"):
        never = network("vgg16:dropout=0", (3, 32, 32))
    assert not any(isinstance(layer, nn.Dropout) for layer in never.modules())


def test_fashion_relu_option():
    x = torch.randn(2, 1, 28, 28)
    both, first = network("fashion-cnn"), network("fashion-cnn:relu=first", (1, 28, 28))
    assert not torch.allclose(both(x), first(x))
    bias = {"conv2.bias": both.get_parameter("conv2.bias") + 100}  # then the second ReLU is idle
    torch.testing.assert_close(
        torch.func.functional_call(both, bias, (x,)), torch.func.functional_call(first, bias, (x,))
    )


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(sorted(LEAST_SIDE)),
    channels=st.integers(1, 4),
    extra=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    classes=st.integers(1, 12),
)
def test_networks_adapt_to_channels_size_and_classes(name, channels, extra, classes):
    step = MULTIPLES.get(name, 1)
    shape = (channels, LEAST_SIDE[name] + step * extra[0], LEAST_SIDE[name] + step * extra[1])
    with torch.device("meta"):  # shapes without values: the large networks cost nothing
        assert network(name, shape, classes)(torch.zeros(2, *shape)).shape == (2, classes)


@pytest.mark.parametrize("name", [name for name, least in LEAST_SIDE.items() if least > 1])
def test_images_below_the_least_size_are_rejected(name):
    least = LEAST_SIDE[name]
    with pytest.raises(
        InputError, match=f"{name}.*at least {least}x{least}.*1x{least}x{least - 1}"
    ):
        network(name, (1, least, least - 1))


def test_misfits_name_the_need_the_data_and_a_remedy():
    with pytest.raises(InputError) as small:
        network("mnist-cnn", (1, 8, 8))
    assert str(small.value) == (
        "model 'mnist-cnn' needs images of at least 16x16, but the data has 1x8x8 "
        "(channels x height x width); choose digits-cnn or mlp"
    )
    with pytest.raises(InputError) as flat:
        network("cifar-cnn", (64,))
    assert str(flat.value) == (
        "model 'cifar-cnn' needs images (channels x height x width), but an example of the data "
        "has shape 64; choose mlp"
    )
    with pytest.raises(InputError, match=r"choose mlp$"):
        network("digits-cnn", (1, 3, 3))


@pytest.mark.parametrize("hidden", ["", "64x", "x64", "0", "64x-1", "64*32", "1.5", "100000", "٣"])
def test_bad_widths_are_rejected(hidden):
    with pytest.raises(InputError, match="such as 64x32"):
        MODELS["mlp"](hidden=hidden)


def test_bad_options_are_rejected():
    with pytest.raises(InputError, match="relu must be one of both, first; got 'none'"):
        MODELS["fashion-cnn"](relu="none")
    with pytest.raises(InputError, match="relu must be one of both, first; got 'none'"):
        specs.parse("fashion-cnn:relu=none", "model", MODELS)
    for dropout in (-0.1, 1.0, float("nan")):
        with pytest.raises(InputError, match=rf"dropout must lie in \[0, 1\), got {dropout}"):
            MODELS["vgg16"](dropout=dropout)
    for option, text in [
        (
            "dfml-cnn:channels=",
            "channels must be positive numbers joined by +, such as 32+64, got ",
        ),
        ("dfml-cnn:channels=8+0", "such as 32+64, got 8+0"),
        ("dfml-cnn:norm=batch", "norm must be one of channel, layer; got 'batch'"),
        ("preact-resnet:widths=-1", "such as 64+128+256+512, got -1"),
        ("vit:width=96", "width must be a multiple of 64, the dimension of a head, or at most 64"),
        ("vit:depth=0", "depth must be at least 1, got 0"),
        ("vit:embedding_dropout=1", r"embedding_dropout must lie in [0, 1), got 1.0"),
        ("efficientnet:variant=b5", "variant must be one of b0, b1, b2, b3, b4; got 'b5'"),
    ]:
        with pytest.raises(InputError, match=re.escape(text)):
            specs.parse(option, "model", MODELS)
    with pytest.raises(InputError, match="did you mean 'mnist-cnn'"):
        specs.parse("mnist-cn", "model", MODELS)


@pytest.mark.parametrize(
    "text",
    [
        *MODELS,
        *["mlp:hidden=9", "mnist-cnn:dropout=True", "vgg16:dropout=0.1"],
        *["dfml-cnn:channels=8+16+32+64,norm=layer", "preact-resnet:widths=4+8"],
        *["vit:width=64,depth=3,patch=2,mlp=2,dropout=0.0", "efficientnet:variant=b4"],
    ],
)
def test_options_survive_text_and_table(text):
    model = specs.parse(text, "model", MODELS)
    assert specs.text(model, "model", MODELS) == text
    assert specs.from_table(specs.to_table(model, "model", MODELS), "model", MODELS) == model


def test_initialisation_follows_the_seed_of_torch():
    a, b = network("digits-cnn"), network("digits-cnn")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_default_models():
    assert default_model("digits") == "digits-mlp"
    assert default_model("mnist") == "mnist-cnn"
    assert default_model("fashion-mnist") == "fashion-cnn"
    assert default_model("cifar10") == "cifar-cnn"
    assert default_model("femnist") == "leaf-cnn"
    assert default_model("so2sat", (10, 32, 32)) == "gain-cnn"
    assert default_model("imagenette", (3, 64, 64)) == "gn-lenet"
    assert default_model("flickr-mammals", (3, 64, 64)) == "resnet8"
    assert default_model("cifar100") == "cifar-cnn"
    for name in ("caltech101", "oxford-pets", "stanford-cars"):
        assert default_model(name, (3, 64, 64)) == "preact-resnet"
    assert default_model("mine.npz", (40,)) == "mlp"
    assert default_model("mine.npz", (3, 15, 64)) == "mlp"
    assert default_model("mine.npz", (1, 16, 16)) == "cifar-cnn"


def test_head_of_other_modules():
    assert head_parameters(nn.Linear(2, 2, bias=False)) == ["weight"]
    nested = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert head_parameters(nested) == ["1.1.weight", "1.1.bias"]
    with pytest.raises(InputError, match="no linear layer"):
        head_parameters(nn.Conv2d(1, 1, 1))
