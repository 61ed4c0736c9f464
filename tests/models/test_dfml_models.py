"""The networks of P1: sizes in all modes, functions by their definitions, and dropout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.mutual import RotatingMutual
from support.networking import run_peers
from support.networks import network
from torch import Tensor, nn

import peerage as pg
from peerage.errors import InputError
from peerage.models import MIXES, efficientnet
from peerage.models.vit import patches, shifted
from peerage.runs.model_files import write_model
from peerage.runs.saved import open_run
from peerage.testing import toy
from peerage.vectors import FlatModel, find_head

CIFAR = (3, 32, 32)

# Parameters with 10 and with 100 classes
SIZES = {
    "dfml-cnn:channels=128+256": (993_802, 2_468_452),
    "dfml-cnn:channels=64+128": (292_106, 1_029_476),
    "dfml-cnn:channels=32+64": (94_858, 463_588),
    "dfml-cnn:channels=16+32": (34_634, 219_044),
    "dfml-cnn:channels=8+16": (14_122, 106_372),
    "dfml-cnn:channels=32+64+128+256": (1_089_290, 1_181_540),
    "dfml-cnn:channels=32+64+128": (279_562, 463_972),
    "dfml-cnn:channels=16+32+64": (75_786, 168_036),
    "dfml-cnn:channels=8+16+32+64": (70_730, 93_860),
    "preact-resnet:widths=64+128+256+512": (11_172_170, 11_218_340),
    "preact-resnet:widths=32+64+128+256": (2_796_714, 2_819_844),
    "preact-resnet:widths=16+32+64+128": (701_018, 712_628),
    "preact-resnet:widths=8+16+32+64": (176_178, 182_028),
    "preact-resnet:widths=4+8+16+32": (44_510, 47_480),
    "vit:width=512": (3_316_730, 3_362_900),
    "vit:width=256": (872_178, 895_308),
    "vit:width=128": (239_726, 251_336),
    "vit:width=64": (62_636 + 2 * 4160, 68_486 + 2 * 4160),
    "vit:width=32": (31_628, 34_598),
}
# The reference code leaves out attention's output layer (4160 parameters in each of two blocks) if
# there is one head as wide as the tokens.
AS_IN_REFERENCE = SIZES | {"vit:width=64": (62_636, 68_486)}
WITH_FULL_LAYER_NORM = {
    "128+256": (1_091_338, 2_565_988),
    "64+128": (340_874, 1_078_244),
    "32+64": (119_242, 487_972),
    "16+32": (46_826, 231_236),
    "8+16": (20_218, 112_468),
    "32+64+128+256": (1_119_050, 1_211_300),
    "32+64+128": (307_786, 492_196),
    "16+32+64": (89_898, 182_148),
    "8+16+32+64": (78_170, 101_300),
}
EFFICIENTNETS = {  # parameters without the classifier, and its inputs
    "b0": (4_007_548, 1280),
    "b1": (6_513_184, 1280),
    "b2": (7_700_994, 1408),
    "b3": (10_696_232, 1536),
    "b4": (17_548_616, 1792),
}


def count(name: str, classes: int, shape: tuple[int, ...] = CIFAR) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in network(name, shape, classes).parameters())


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    assert (count(name, 10), count(name, 100)) == SIZES[name]


@pytest.mark.parametrize("name", [name for name in SIZES if name.startswith("vit")])
def test_sizes_with_the_output_layers_of_the_reference(name):
    found = tuple(count(f"{name},output_layer=reference", classes) for classes in (10, 100))
    assert found == AS_IN_REFERENCE[name]


@pytest.mark.parametrize("channels", WITH_FULL_LAYER_NORM)
def test_sizes_with_weights_for_every_pixel(channels):
    name = f"dfml-cnn:channels={channels},norm=layer"
    assert (count(name, 10), count(name, 100)) == WITH_FULL_LAYER_NORM[channels]


@pytest.mark.parametrize("variant", EFFICIENTNETS)
def test_sizes_of_efficientnet(variant):
    backbone, features = EFFICIENTNETS[variant]
    for classes in (10, 101):
        expected = backbone + (features + 1) * classes
        assert count(f"efficientnet:variant={variant}", classes, (3, 224, 224)) == expected


def test_the_members_of_mixes_have_these_sizes():
    known = {*SIZES, *(f"efficientnet:variant={variant}" for variant in EFFICIENTNETS)}
    assert {member for mix in MIXES.values() for member in mix.members} == known


@pytest.mark.parametrize(
    "name", ["dfml-cnn", "preact-resnet:widths=4+8", "vit:width=32", "efficientnet"]
)
def test_the_head_is_the_last_linear_layer(name):
    with torch.device("meta"):
        assert find_head(network(name, CIFAR)) == ("head",)


def randomised(name: str, shape: tuple[int, ...], classes: int = 4) -> nn.Module:
    """A network in double precision, with random weights and statistics of norm layers."""
    module = network(name, shape, classes).double()
    torch.manual_seed(4)
    for layer in module.modules():
        for tensor in ("weight", "bias", "running_mean", "running_var"):
            if "Norm" in type(layer).__name__ and getattr(layer, tensor, None) is not None:
                getattr(layer, tensor).data.uniform_(0.5, 1.5)
    return module


def examples(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


# DfmlCNN


@pytest.mark.parametrize("norm", ["channel", "layer"])
def test_convolution_relu_pooling_and_norm_in_this_order(norm):
    module = randomised(f"dfml-cnn:channels=3+5,norm={norm}", (2, 9, 8))
    h = x = examples(3, 2, 9, 8)
    for number in (1, 2):
        conv, layer = (module.get_submodule(f"{kind}{number}") for kind in ("conv", "norm"))
        h = F.max_pool2d(F.conv2d(h, conv.weight, conv.bias, padding=2).relu(), 2)
        mean, variance = h.mean((1, 2, 3)), h.var((1, 2, 3), correction=0)
        h = (h - mean.view(-1, 1, 1, 1)) / (variance.view(-1, 1, 1, 1) + 1e-5).sqrt()
        axes = (-1, 1, 1) if norm == "channel" else layer.weight.shape
        h = h * layer.weight.view(axes) + layer.bias.view(axes)
    assert h.shape == (3, 5, 2, 2)
    expected = F.linear(h.flatten(1), module.head.weight, module.head.bias)
    torch.testing.assert_close(module(x), expected)


# PreActResNet


def normalise(x: Tensor, norm: nn.Module, training: bool) -> Tensor:
    statistics = (None, None) if training else (norm.running_mean, norm.running_var)
    return F.batch_norm(x, *statistics, norm.weight, norm.bias, training)


@pytest.mark.parametrize("training", [True, False])
def test_activations_come_before_convolutions(training):
    module = randomised("preact-resnet:widths=3+4+6", (2, 11, 8)).train(training)
    x = examples(3, 2, 11, 8)
    h, shapes = F.conv2d(x, module.conv1.weight, padding=1), []
    for stage in (1, 2, 3):
        for number in (1, 2):
            block = module.get_submodule(f"block{stage}_{number}")
            stride = 2 if (stage > 1 and number == 1) else 1
            active = normalise(h, block.norm1, training).relu()
            inner = F.conv2d(active, block.conv1.weight, stride=stride, padding=1)
            inner = normalise(inner, block.norm2, training).relu()
            if stride == 2:
                h = F.conv2d(active, block.shortcut.weight, stride=2)
            h = h + F.conv2d(inner, block.conv2.weight, padding=1)
        shapes.append(tuple(h.shape[1:]))
    assert shapes == [(3, 11, 8), (4, 6, 4), (6, 3, 2)]
    h = normalise(h, module.norm, training).relu().mean((2, 3))
    expected = F.linear(h, module.head.weight, module.head.bias)
    torch.testing.assert_close(module(x), expected)


def test_running_statistics_are_in_a_vector_of_their_own():
    model = FlatModel(network("preact-resnet:widths=2+4", (3, 8, 8)))
    # Mean and variance of all norms: those of blocks with 2 + 2, 2 + 2, 2 + 4 and 4 + 4, and 4.
    assert model.buffers.numel() == 2 * (4 + 4 + 6 + 8 + 4)
    before = model.buffers.clone()
    model.begin_training()
    model.module(torch.randn(4, 3, 8, 8))
    assert (model.buffers != before).all()


# ViT


def test_shifted_copies_of_an_image():
    x = torch.arange(1.0, 17).view(1, 1, 4, 4)
    copies = shifted(x, 2)[0]
    assert torch.equal(copies[0], x[0, 0])
    assert copies[1].tolist() == [[0] * 4, [0] * 4, [0, 0, 1, 2], [0, 0, 5, 6]]
    assert copies[2].tolist() == [[0, 0, 9, 10], [0, 0, 13, 14], [0] * 4, [0] * 4]
    assert copies[3].tolist() == [[0] * 4, [0] * 4, [3, 4, 0, 0], [7, 8, 0, 0]]
    assert copies[4].tolist() == [[11, 12, 0, 0], [15, 16, 0, 0], [0] * 4, [0] * 4]


@pytest.mark.parametrize("channels_last", [True, False])
def test_patches_are_rows(channels_last):
    x = torch.randn(2, 3, 4, 6)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    found = patches(x, 2)
    assert found.shape == (2, 6, 12)
    # The fifth patch is the middle one of the second row.
    expected = x[1, :, 2:4, 2:4].permute(1, 2, 0).flatten()
    assert torch.equal(found[1, 4], expected)


def attention(x: Tensor, layers: nn.Module, heads: int) -> Tensor:
    """Token by token: softmax over all other tokens."""
    found = torch.zeros_like(x)
    for b in range(len(x)):
        for token in range(x.shape[1]):
            others = [other for other in range(x.shape[1]) if other != token]
            outputs = []
            for head in range(heads):
                rows = slice(64 * head, 64 * (head + 1))
                q = layers.query.weight[rows] @ x[b, token]
                k, v = (x[b, others] @ layer.weight[rows].T for layer in (layers.key, layers.value))
                outputs.append((k @ q * layers.scale[head]).softmax(0) @ v)
            together = torch.cat(outputs)
            found[b, token] = together if layers.out is None else layers.out(together)
    return found


@pytest.mark.parametrize(
    ("name", "width", "heads"),
    [
        ("vit:width=128,mlp=2,patch=2", 128, 2),
        ("vit:width=64,mlp=4,patch=2,output_layer=reference", 64, 1),
    ],
)
def test_vision_transformer_by_its_definition(name, width, heads):
    module = randomised(name, (2, 4, 6))
    module.block1.attention.scale.data = torch.tensor([0.3, 0.7][:heads]).double()
    assert (module.block1.attention.out is None) == ("reference" in name)
    x = examples(2, 2, 4, 6)
    rows = patches(shifted(x, 1), 2)
    tokens = module.tokens
    h = tokens.linear(F.layer_norm(rows, (40,), tokens.norm.weight, tokens.norm.bias))
    h = torch.cat([tokens.class_token.expand(2, 1, width), h], 1) + tokens.positions
    assert h.shape == (2, 1 + 6, width)
    for name in ("block1", "block2"):
        block = module.get_submodule(name)
        assert block.hidden.out_features == 256
        h = h + attention(block.norm1(h), block.attention, heads)
        h = h + block.out(F.gelu(block.hidden(block.norm2(h))))
    torch.testing.assert_close(module(x), module.head(module.norm(h)[:, 0]))


def test_without_an_output_layer_attention_has_no_dropout_after_it():
    for layer, left_out in (("reference", True), ("always", False)):
        module = network(f"vit:width=64,depth=1,output_layer={layer}", CIFAR)
        assert isinstance(module.block1.attention.drop, nn.Identity) == left_out


def test_scales_start_at_one_over_the_root_of_the_dimension():
    module = network("vit:width=256", CIFAR)
    assert torch.equal(module.block2.attention.scale, torch.full((4,), 1 / 8))
    assert module.block2.attention.scale.requires_grad
    positions = module.tokens.positions.detach()
    assert positions.shape == (65, 256)
    assert float(positions.std()) == pytest.approx(1, abs=0.02)


def test_images_must_consist_of_whole_patches():
    with pytest.raises(InputError) as caught:
        network("vit", (1, 28, 30))
    assert str(caught.value) == (
        "model 'vit' cuts images into patches of 4x4, but the data has images of 28x30; choose a "
        "patch that divides both sides, as in vit:patch=2"
    )
    assert network("vit:width=32,patch=2", (1, 28, 30))(torch.zeros(1, 1, 28, 30)).shape == (1, 10)


# EfficientNet


def test_the_stages_of_efficientnet():
    """Output channels and blocks of B0 and B4, as published."""
    found = {
        name: [(stage.outputs, stage.blocks) for stage in efficientnet.scaled_stages(variant)]
        for name, variant in efficientnet.VARIANTS.items()
    }
    channels, blocks = zip(*found["b0"], strict=True)
    assert channels == (16, 24, 40, 80, 112, 192, 320)
    assert blocks == (1, 2, 2, 3, 3, 4, 1)
    channels, blocks = zip(*found["b4"], strict=True)
    assert channels == (24, 32, 56, 112, 160, 272, 448)
    assert blocks == (2, 4, 4, 6, 6, 8, 2)


def test_a_block_of_efficientnet_by_its_definition():
    module = randomised("efficientnet", (3, 32, 32))
    block = module.get_submodule("block2_2")
    x = examples(2, 24, 5, 5)

    def conv(h: Tensor, layers: nn.Module, **options: Any) -> Tensor:
        return normalise(F.conv2d(h, layers.conv.weight, **options), layers.norm, training=False)

    h = F.silu(conv(x, block.expand))
    h = F.silu(conv(h, block.depthwise, padding=1, groups=144))
    weigh = block.weigh
    assert weigh.squeeze.out_channels == 24 // 4
    factors = F.conv2d(h.mean((2, 3), keepdim=True), weigh.squeeze.weight, weigh.squeeze.bias)
    factors = F.conv2d(F.silu(factors), weigh.excite.weight, weigh.excite.bias)
    expected = x + conv(h * factors.sigmoid(), block.project)
    torch.testing.assert_close(block(x), expected)
    first = module.get_submodule("block2_1")
    assert first(examples(2, 16, 9, 8)).shape == (2, 24, 5, 4)
    names = [name for name, _ in module.named_children()]
    h = module[: names.index("last")](examples(1, 3, 64, 64))
    assert h.shape == (1, 320, 2, 2)


@pytest.mark.slow
def test_blocks_are_left_out_for_single_examples():
    module = network("efficientnet", (3, 32, 32))
    blocks = [layer for name, layer in module.named_children() if name.startswith("block")]
    assert [block.skip for block in blocks] == pytest.approx([0.2 * n / 16 for n in range(16)])
    block = module.get_submodule("block6_4")  # number 14 of 0 to 15
    x, last = torch.randn(400, 192, 1, 1), block.project.norm
    last.weight.data.fill_(0)
    last.bias.data.fill_(1)  # the output without the input is 1
    with torch.no_grad():
        torch.manual_seed(0)
        factors = (block.train()(x) - x).mean((1, 2, 3))
        torch.testing.assert_close(block.eval()(x), x + 1)
    skipped = factors.abs() < 1e-4
    torch.testing.assert_close(factors[~skipped], torch.full_like(factors[~skipped], 1 / 0.825))
    assert float(skipped.float().mean()) == pytest.approx(0.175, abs=0.05)


@pytest.mark.parametrize(("variant", "probability"), [("b0", 0.2), ("b3", 0.3), ("b4", 0.4)])
def test_dropout_before_the_classifier(variant, probability):
    with torch.device("meta"):
        module = network(f"efficientnet:variant={variant}", CIFAR)
    assert module.drop.p == probability


def test_initial_values_of_efficientnet():
    module = network("efficientnet", CIFAR, 25).requires_grad_(False)
    depthwise = module.get_submodule("block5_2").depthwise.conv.weight  # 672 filters of 5x5
    assert float(depthwise.std()) == pytest.approx((2 / (672 * 25)) ** 0.5, rel=0.05)
    assert float(module.head.weight.abs().max()) == pytest.approx(1 / 5, rel=0.01)
    assert not module.head.bias.any()


# In runs


def images(count: int = 40, side: int = 8) -> pg.Dataset:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
    return pg.in_memory(x, torch.arange(count) % 4, classes=4, name="noise")


MIXED = [
    "dfml-cnn:channels=4+8",
    "preact-resnet:widths=4+8",
    "vit:width=16",
]


def experiment(algorithm: Any, **changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "dataset": images(), "model": MIXED, "nodes": 6, "rounds": 2, "partition": "iid",
        "local": pg.LocalSGD(steps=2, batch_size=4, lr=0.05),
    }  # fmt: skip
    return toy(algorithm, **settings | changes)


@pytest.mark.slow
def test_dropout_follows_the_seed():
    first, again = (pg.run(experiment(pg.DecAvg(), model="vit:width=16")) for _ in range(2))
    assert first.digest == again.digest
    without = experiment(pg.DecAvg(), model="vit:width=16,dropout=0,embedding_dropout=0")
    assert pg.run(without).digest != first.digest
    other = pg.run(experiment(pg.DecAvg(), model="vit:width=16", seed=1))
    assert other.digest != first.digest


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize(
    "algorithm", [pg.DecHW(), pg.DecAvg(), RotatingMutual()], ids=["dechw", "decavg", "mutual"]
)
def test_engines_and_peers_give_the_same_bits(algorithm):
    wanted = experiment(algorithm, topology="complete")
    serial = pg.run(wanted)
    pool = pg.run(wanted.model_copy(update={"engine": pg.Engine(name="pool", workers=2)}))
    assert pool.digest == serial.digest
    for peer, params in zip(run_peers(wanted), serial.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
        assert dict(peer.counters) == {}


@pytest.mark.slow
@pytest.mark.own_engine
def test_efficientnet_with_two_engines():
    """Its stochastic depth draws from the same stream as dropout."""
    settings = {"dataset": images(16, side=32), "model": "efficientnet", "nodes": 2, "rounds": 1}
    digests = {
        pg.run(experiment(pg.DecAvg(), **settings, engine={"name": engine})).digest
        for engine in ("serial", "pool")
    }
    assert len(digests) == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", MIXED)
def test_they_can_be_written_as_onnx(tmp_path, model):
    """The writer itself compares the outputs for another number of examples."""
    wanted = experiment(pg.DecAvg(), model=model, nodes=2, rounds=1)
    pg.run(wanted, tmp_path / "run")
    chosen = open_run(tmp_path / "run", experiment=wanted).choose(0)
    assert write_model(chosen, tmp_path / "model.onnx") == "onnx"
