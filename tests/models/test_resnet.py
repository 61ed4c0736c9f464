"""ResNet8: its function, its sizes and its head, which is more than the last layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.networking import run_peers
from support.networks import network
from torch import Tensor, nn

import peerage as pg
from peerage.algorithm import Dimensions
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.experiment.identity import run_key
from peerage.models.start import Architecture
from peerage.testing import toy
from peerage.vectors import FlatModel, Layout, Weights, find_head
from peerage.work.candidates import Losses
from peerage.work.context import Examples, LocalContext

HEAD = ("block2", "block3", "head")
FLICKR = (3, 64, 64)


def size_of(module: nn.Module, part: str | None = None) -> int:
    layout = Layout.of(module.named_parameters(), find_head(module))
    return layout.size if part is None else layout.part_size(part)


# What it computes


def normalise(x: Tensor, norm: nn.Module, training: bool) -> Tensor:
    """Batch norm by its definition, with the biased variance of the batch in training."""
    if training:
        mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
    else:
        mean, variance = norm.running_mean, norm.running_var
    scaled = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def block(x: Tensor, layers: nn.Module, stride: int, training: bool) -> Tensor:
    h = F.conv2d(x, layers.conv1.weight, stride=stride, padding=1)
    h = normalise(h, layers.norm1, training).relu()
    h = normalise(F.conv2d(h, layers.conv2.weight, padding=1), layers.norm2, training)
    if stride > 1:
        x = F.conv2d(x, layers.shortcut.conv.weight, stride=stride)
        x = normalise(x, layers.shortcut.norm, training)
    return (h + x).relu()


@pytest.mark.parametrize("training", [True, False])
def test_forward_by_its_definition(training):
    torch.manual_seed(3)
    module, x = network("resnet8", (3, 11, 8), 4).double(), torch.randn(3, 3, 11, 8).double()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):  # neither the initial weights nor statistics
            for tensor in (layer.weight.data, layer.running_mean, layer.running_var):
                tensor.uniform_(0.5, 1.5)
    module.train(training)
    h = normalise(F.conv2d(x, module.conv1.weight, padding=1), module.norm1, training).relu()
    shapes = []
    for number, stride in enumerate((1, 2, 2), start=1):
        h = block(h, module.get_submodule(f"block{number}"), stride, training)
        shapes.append(tuple(h.shape[1:]))
    assert shapes == [(32, 11, 8), (64, 6, 4), (128, 3, 2)]
    expected = F.linear(h.mean((2, 3)), module.head.weight, module.head.bias)
    torch.testing.assert_close(module(x), expected)


# Sizes


def test_sizes_with_the_classes_of_flickr_mammals():
    module = network("resnet8", FLICKR, 41)
    assert size_of(module) == 312_649
    assert size_of(module, "head") == 293_161
    assert size_of(module, "core") == 864 + 64 + 2 * (9216 + 64)
    assert find_head(module) == HEAD
    assert module(torch.zeros(2, *FLICKR)).shape == (2, 41)


def test_statistics_belong_to_the_part_of_their_layer():
    model = Architecture("resnet8", lambda: network("resnet8", (3, 8, 8))).build_flat()
    assert model.layout.part_size("head") == size_of(model.module, "head")
    # Mean and variance of three layers of 32 filters; of three each with 64 and 128.
    assert model.buffer_layout.part_size("core") == 2 * 3 * 32
    assert model.buffer_layout.part_size("head") == 2 * 3 * (64 + 128)


# Its head is the default wherever the user names none


class OwnDefault(nn.Sequential):
    default_head = ("1", "2")


class HasSubmodule(nn.Module):
    """Its submodule happens to have the name of the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.default_head, self.last = nn.Linear(2, 2), nn.Linear(2, 2)


def test_the_class_of_a_module_may_state_its_head():
    layers = [nn.Linear(2, 2) for _ in range(4)]
    assert find_head(OwnDefault(*layers)) == ("1", "2")
    assert find_head(OwnDefault(*layers), ["0"]) == ("0",)
    assert find_head(HasSubmodule()) == ("last",)
    with pytest.raises(InputError, match="no module '2', which should be its head"):
        find_head(OwnDefault(*layers[:2]))


def images(count: int = 40, side: int = 32) -> pg.Dataset:
    """Random images in the shape of CIFAR-10."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
    return pg.in_memory(x, torch.arange(count) % 4, classes=4, name="noise")


def experiment(algorithm: Any, **changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "dataset": images(), "model": "resnet8", "nodes": 4, "rounds": 2, "partition": "iid",
    }  # fmt: skip
    return toy(algorithm, **settings | changes)


def test_an_experiment_uses_it_and_users_can_change_it():
    wanted = experiment(pg.DecAvg())
    world = prepare(wanted)
    layout = world.layouts["resnet8"]
    assert layout.part_size("head") == 293_161 - 37 * 129
    assert [layer.partition(".")[0] for layer in layout.head][-1] == "head"
    assert {layer.partition(".")[0] for layer in layout.head} == set(HEAD)
    assert "head" not in wanted.table()["model"]
    assert run_key(pg.Experiment(model="resnet8"))["model"] == ["resnet8"]
    other = prepare(experiment(pg.DecAvg(), model=pg.Split("resnet8", head="head")))
    assert other.layouts["resnet8"].head == ("head",)


def test_plans_and_estimates_know_it():
    found = Dimensions.of(network("resnet8", FLICKR, 41), 16, 41, FLICKR)
    assert found.layout.part_size("head") == 293_161
    assert found.buffer_layout.part_size("head") == 1152


def counting(layer: nn.Module) -> Callable[[], int]:
    seen: list[int] = []
    layer.register_forward_hook(lambda _, inputs, output: seen.append(len(inputs[0])))
    return lambda: sum(seen)


def test_the_core_runs_once_for_all_heads():
    model = FlatModel(network("resnet8", (3, 8, 8), 4))
    data, candidates = images(12, side=8), []
    for seed in range(3):
        torch.manual_seed(seed)
        head = torch.randn(model.layout.part_size("head")) / 10
        statistics = 0.5 + torch.rand(model.buffer_layout.part_size("head"))
        candidates.append(Weights(head, statistics, "net"))
    own = Weights(model.params.clone(), model.buffers.clone(), "net")
    local = LocalContext(
        node=0, round=0, seed=0, data=Examples(data.train_x, data.train_y),
        indices=torch.arange(len(data.train_y)), architecture="net", models={"net": model},
        persistent_tensors={},
    )  # fmt: skip
    core, head = counting(model.module.block1), counting(model.module.block2)
    found = Losses(tuple(candidates), batch_size=4, part="head", own=own).run(local)
    assert (core(), head()) == (len(data.train_y), 3 * len(data.train_y))
    whole = []
    for candidate in candidates:
        params, buffers = own.params.clone(), own.buffers.clone()
        params[model.layout.part("head")] = candidate.params
        buffers[model.buffer_layout.part("head")] = candidate.buffers
        whole.append(Weights(params, buffers, "net"))
    assert torch.equal(found, Losses(tuple(whole), batch_size=4).run(local))
    assert len(set(found.tolist())) == 3


WORK = pg.LocalSGD(steps=2, batch_size=4, lr=0.05)


@pytest.mark.slow
@pytest.mark.own_engine
@pytest.mark.parametrize(
    "algorithm", [pg.Facade(WORK, k=2), pg.DePRL(WORK, core_steps=1)], ids=["facade", "deprl"]
)
def test_engines_and_peers_give_the_same_bits(algorithm):
    wanted = experiment(algorithm)
    serial = pg.run(wanted)
    pool = pg.run(experiment(algorithm, engine={"name": "pool", "workers": 2}))
    assert pool.digest == serial.digest
    for peer, params in zip(run_peers(wanted), serial.parameters, strict=True):
        assert torch.equal(peer.shard.members[peer.me].node.params, params)
        assert dict(peer.counters) == {}
