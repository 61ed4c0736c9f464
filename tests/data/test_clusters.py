"""Clusters of nodes: who is in which, which examples they have, and what becomes of these."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import peerage as pg
from peerage.data import PARTITIONS, Dataset
from peerage.data.clusters import shift_training
from peerage.data.datasets import MNIST_SCALING
from peerage.engine.prepare import prepare
from peerage.errors import DataError, InputError

CLASSES = 10


def data(train: int = 400, test: int = 100) -> Dataset:
    """Pictures whose four pixels tell which example they are."""
    y = torch.arange(train + test) % CLASSES
    x = torch.arange((train + test) * 4, dtype=torch.float32).view(-1, 1, 2, 2) / 4000
    groups = torch.arange(train) % 20
    return pg.in_memory(x[:train], y[:train], x[train:], y[train:], classes=10, groups=groups)


def experiment(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": "local",
        "dataset": data(),
        "model": "logistic",
        "nodes": 8,
        "partition": "iid",
        "topology": "ring",
        "rounds": 1,
        "local": {"epochs": 1},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**settings | changes)


def pixels(examples: Any) -> Tensor:
    return examples.x.permute(0, 3, 1, 2)


# Which nodes


def test_nodes_are_in_order_or_drawn_from_the_seed() -> None:
    assert pg.Clusters((3, 1, 2)).assign(seed=5) == [0, 0, 0, 1, 2, 2]
    drawn = [pg.Clusters((30, 2), shuffle=True).assign(seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0]) == [0] * 30 + [1] * 2


def test_clusters_as_text_table_and_object_are_the_same() -> None:
    wanted = pg.Clusters((6, 2), "rotate")
    assert wanted.fitted == pg.Clusters((6, 2), "rotate:angles=0+180").fitted
    for given in ("6/2:rotate", {"sizes": [6, 2], "shift": {"name": "rotate"}}, wanted):
        made = experiment(dataset="digits", clusters=given)
        assert made.clusters == wanted
        assert pg.Experiment.from_toml(made.to_toml()) == made
    assert "clusters" not in experiment(dataset="digits").to_toml()
    changed = pg.Experiment.from_toml(made.to_toml(), clusters={"shuffle": True})
    assert changed.clusters == replace(wanted, shuffle=True)


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        ("6/3:rotate", "clusters 6/3 have 9 nodes in all, but the experiment has 8; .*--nodes 9"),
        ("8/0", "clusters must have at least 1 node each"),
        ("6/x", "clusters: sizes cannot be 'x'"),
        ("6/2:rotat", "unknown shift 'rotat'; did you mean 'rotate'"),
        ("6/2:rotate:angles=0", "angles has 1 values for 2 clusters"),
        ("6/2:labels", "shift 'labels' requires keep"),
        ({"shuffle": True}, "clusters requires sizes; write --clusters 30/2:rotate"),
        ({"sizes": [8], "shfit": "rotate"}, "no key 'shfit'; did you mean 'shift'"),
        ({"sizes": [8], "shift": 3}, "shift cannot be 3"),
        (7, "clusters cannot be 7"),
    ],
)
def test_what_clusters_cannot_be(clusters: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        experiment(clusters=clusters)


# Their examples


def test_every_node_has_its_part_in_the_form_of_its_cluster() -> None:
    plain = prepare(experiment())
    world = prepare(experiment(clusters="5/3:rotate"))
    for node in range(8):
        cluster = int(node >= 5)
        assert world.cluster_of(node) == cluster
        assert plain.cluster_of(node) is None
        mine, before = world.data_of(node), plain.data_of(node)
        assert torch.equal(mine.y, before.y)
        turned = pixels(before).rot90(2 * cluster, (2, 3))
        assert torch.equal(pixels(mine), turned)
        test = pixels(plain.test_of(node)).rot90(2 * cluster, (2, 3))
        assert torch.equal(pixels(world.test_of(node)), test)
    assert world.train.x.shape == plain.train.x.shape  # one tensor for all
    assert world.test_of(0) is world.test_of(4)
    assert world.setup["clusters"]["names"] == [
        "cluster 0 (0°)",
        "cluster 1 (180°)",
    ]


def test_a_shift_comes_before_normalising_to_the_last_bit() -> None:
    """Halving is not linear where numbers are normalised: (v/2 - m) / d is not x/2."""
    bytes_ = torch.arange(120 * 4, dtype=torch.float32).remainder(256).view(-1, 1, 2, 2) / 255

    def normalised(v: Tensor) -> Tensor:  # as MNIST is
        return v.clone().sub_(0.1307).div_(0.3081)

    y = torch.arange(120) % 3
    loaded = pg.in_memory(normalised(bytes_), y, normalised(bytes_), y)
    loaded = replace(loaded, scaling=MNIST_SCALING)
    clusters = pg.Clusters((4, 4), lambda x, cluster: x / 2 if cluster else x)
    world = prepare(experiment(dataset=loaded, clusters=clusters))
    for node in (0, 7):
        raw = bytes_[world.parts[node]]
        assert torch.equal(pixels(world.data_of(node)), normalised(raw / 2 if node else raw))
    assert torch.equal(pixels(world.test_of(7)), normalised(bytes_ / 2))


def test_the_users_data_set_is_left_alone() -> None:
    mine = data()
    before = mine.train_x.clone()

    def dark(x: Tensor, cluster: int) -> Tensor:
        return x.mul_(0)  # in place, on what it was given

    world = prepare(experiment(dataset=mine, clusters=pg.Clusters((4, 4), dark)))
    assert torch.equal(mine.train_x, before)
    assert not world.train.x.any()
    assert not world.test_of(0).x.any()


@dataclass(frozen=True)
class Overlapping:
    """All nodes have the first ten examples, and each two of its own."""

    def split(self, labels: Any, nodes: int, classes: int, rng: Any) -> list[Any]:
        return [np.array([*range(10), 10 + 2 * n, 11 + 2 * n]) for n in range(nodes)]


def test_an_example_of_two_clusters_is_in_both_forms() -> None:
    plain = prepare(experiment(partition=Overlapping()))
    world = prepare(experiment(partition=Overlapping(), clusters="3/3/2:rotate:angles=0+90+180"))
    for node, turns in enumerate([0, 0, 0, 1, 1, 1, 2, 2]):
        wanted = pixels(plain.data_of(node)).rot90(turns, (2, 3))
        assert torch.equal(pixels(world.data_of(node)), wanted)
        assert torch.equal(world.data_of(node).y, plain.data_of(node).y)
    assert len(world.train) == len(plain.train) + 2 * 10  # one copy for each further cluster


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("shift", ["rotate", "labels:keep=0-4+5-9,fraction=false"])
def test_every_partition_works_with_clusters(partition: str, shift: str) -> None:
    world = prepare(experiment(partition=partition, clusters=f"5/3:{shift}"))
    for node in range(8):
        assert len(world.parts[node])
        if shift != "rotate":
            low = 5 * (node >= 5)
            assert set(world.data_of(node).y.tolist()) <= set(range(low, low + 5))
    used = torch.cat(list(world.parts))
    if partition != "sample":  # whose nodes draw with replacement
        assert len(used) == len(used.unique())


def test_a_node_drops_labels_that_its_cluster_does_not_keep() -> None:
    """As in the code of P3: a node of either cluster has an eighth of its labels' examples."""
    keep = "labels:keep=0/1/8/9+2-7"
    plain, world = prepare(experiment()), prepare(experiment(clusters=f"6/2:{keep}"))
    for node in range(8):
        kept = {0, 1, 8, 9} if node < 6 else {2, 3, 4, 5, 6, 7}
        before = plain.parts[node]
        wanted = [i for i in before.tolist() if i % 10 in kept]
        assert world.parts[node].tolist() == wanted
        assert world.label_counts[node].nonzero().flatten().tolist() == sorted(kept)
        assert set(world.test_of(node).y.tolist()) == kept
    assert [len(test) for test in world.tests] == [40, 60]


def test_or_its_cluster_divides_all_examples_that_it_keeps() -> None:
    """As in the text of P3: both clusters use all examples of their labels."""
    keep = "labels:keep=0/1/8/9+2-7,fraction=false"
    world = prepare(experiment(clusters=f"6/2:{keep}"))
    sizes = [len(part) for part in world.parts]
    assert sum(sizes[:6]) == 160
    assert sizes[6:] == [120, 120]


@pytest.mark.parametrize(
    ("clusters", "changes", "message"),
    [
        ("4/4:labels:keep=0-4+5-12", {}, "keeps label 10, but the labels are 0 to 9; remove it"),
        (
            "4/4:labels:keep=0-4+5-9",
            {"partition": "shards:per_node=1"},
            r"node \d of cluster . \(labels .-.\) has no examples with labels that its cluster",
        ),
        (
            "4/4:labels:keep=0-3/5-9+4",
            {"evaluation": {"samples": 2}},
            r"cluster 1 \(labels 4\) has no examples in the test set of tensors",
        ),
        ("4/4:colour", {}, "colour requires images of 3 channels"),
        (pg.Clusters((4, 4), lambda x, c: x[:, :, :1]), {}, r"<lambda> turned .* into .*, 1, 1, 2"),
        (pg.Clusters((4, 4), lambda x, c: x[1:]), {}, "must return as many examples of the same"),
        (pg.Clusters((4, 4), lambda x, c: None), {}, "into NoneType"),
    ],
)
def test_what_becomes_of_examples_that_cannot_be(
    clusters: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        prepare(experiment(clusters=clusters, **changes))


def test_a_cluster_without_examples_is_refused() -> None:
    y = torch.arange(40) % 2
    two = pg.in_memory(torch.rand(40, 1, 2, 2), y, torch.rand(9, 1, 2, 2), y[:9], classes=3)
    for fraction in ("true", "false"):
        shift = f"labels:keep=0/1+2,fraction={fraction}"
        with pytest.raises(DataError, match=r"cluster 1 \(labels 2\) has no training examples in"):
            prepare(experiment(dataset=two, clusters=f"4/4:{shift}"))


def test_held_out_examples_are_shifted_and_samples_are_those_of_all() -> None:
    changes = {"evaluation": {"validation": 0.25, "samples": 30}}
    plain = prepare(experiment(**changes))
    world = prepare(experiment(clusters="4/4:rotate", **changes))
    for node, turns in ((0, 0), (7, 2)):
        assert torch.equal(world.validation[node], plain.validation[node])
        held_out = [pixels(w.train.subset(w.validation[node])) for w in (plain, world)]
        assert torch.equal(held_out[1], held_out[0].rot90(turns, (2, 3)))
    assert len(world.test_of(7)) == 30
    assert torch.equal(pixels(world.test_of(7)), pixels(plain.test_of(7)).rot90(2, (2, 3)))


def test_shifting_in_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, parts = data(), [np.arange(250), np.arange(250, 400)]
    clusters = pg.Clusters((1, 1), "rotate:angles=30+45")
    whole, _ = shift_training(clusters, mine, parts, 0)
    monkeypatch.setattr("peerage.data.clusters.BLOCK", 7)
    blocks, _ = shift_training(clusters, mine, parts, 0)
    torch.testing.assert_close(whole.train_x, blocks.train_x)
