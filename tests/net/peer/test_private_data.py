"""Private data of peers: classes, test sets and models that they agree on."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.machines import Machines
from support.networking import CALM, run_peers

import peerage as pg
from peerage.data import Dataset
from peerage.data.classes import with_classes
from peerage.data.datasets import Folder, Idx, Npz
from peerage.errors import InputError, PeerageWarning
from peerage.models import MODELS
from peerage.net.peer.private_data import (
    describe_examples,
    parse_classes,
    prepare_own,
    unused_examples,
    with_test_set,
)
from peerage.records.rows import read_metrics
from peerage.testing import Parts


def data(labels, classes=None, name="mine", shape=(2,), test=None) -> Dataset:
    """Distinct examples: 0, 1, ... for training and 100, 101, ... for testing."""
    test = labels if test is None else test

    def examples(start, count):
        numbers = torch.arange(start, start + count, dtype=torch.float32)
        return numbers.reshape(-1, *[1] * len(shape)).expand(-1, *shape)

    x, test_x = examples(0, len(labels)), examples(100, len(test))
    return pg.in_memory(x, labels, test_x, test, classes=classes, name=name)


# Classes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", 10),
        (" 3 ", 3),
        ("cat,dog", ("cat", "dog")),
        (" cat , black dog", ("cat", "black dog")),
        ("cat", ("cat",)),
        ("0,1", ("0", "1")),
    ],
)
def test_classes_are_a_number_or_names(text, expected):
    assert parse_classes(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "--classes must be at least 1, or names like cat,dog,horse, got 0"),
        ("-2", "at least 1, .* got -2"),
        ("cat,dog,cat", "--classes 'cat,dog,cat' names 'cat' twice; write --classes cat,dog,horse"),
        ("cat,,dog", "--classes 'cat,,dog' has an empty name"),
        ("", "--classes '' has an empty name"),
        (",", "--classes ',' has an empty name"),
    ],
)
def test_classes_that_cannot_be(text, message):
    with pytest.raises(InputError, match=message):
        parse_classes(text)


def test_labels_follow_the_order_of_the_names():
    """Without the class cat, the folder alone would give dog the number 0."""
    pets = data([0, 1, 1, 0], ("dog", "horse"), test=[1, 0])
    named = with_classes(pets, ("cat", "dog", "fish", "horse"))
    assert named.train_y.tolist() == [1, 3, 3, 1]
    assert named.test_y.tolist() == [3, 1]
    assert named.classes == ("cat", "dog", "fish", "horse")
    assert torch.equal(named.train_x, pets.train_x)
    turned = with_classes(pets, ("horse", "dog"))
    assert turned.train_y.tolist() == [1, 0, 0, 1]


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_every_example_keeps_the_name_of_its_class(draw):
    names = draw.draw(st.permutations(list("abcdef")))
    own = draw.draw(st.permutations(names[: draw.draw(st.integers(1, 6))]))
    labels = draw.draw(st.lists(st.integers(0, len(own) - 1), min_size=1, max_size=9))
    named = with_classes(data(labels, tuple(own)), tuple(names))
    assert [names[y] for y in named.train_y.tolist()] == [own[y] for y in labels]
    assert [names[y] for y in named.test_y.tolist()] == [own[y] for y in labels]


def test_classes_that_have_numbers_only_take_names_in_their_order():
    numbered = data([0, 1, 1])
    assert numbered.classes == ("0", "1")
    named = with_classes(numbered, ("cat", "dog", "horse"))
    assert named.classes == ("cat", "dog", "horse")
    assert named.train_y.tolist() == [0, 1, 1]
    # But names that are these numbers are their names.
    assert with_classes(numbered, ("1", "0")).train_y.tolist() == [1, 0, 0]
    assert with_classes(numbered, 3).classes == ("0", "1", "2")
    assert with_classes(numbered, None) is numbered


@pytest.mark.parametrize(
    ("own", "classes", "message"),
    [
        (("cat", "dog"), ("cat", "dig"), "mine has a class 'dog' that --classes lacks; did you m"),
        (
            ("cat", "dog"),
            3,
            "--classes 3 does not name the classes that mine lacks besides cat, dog; n",
        ),
        (("cat", "dog"), 1, "mine has 2 classes, but --classes is 1; give the number"),
        (None, 1, "mine has 2 classes, but --classes is 1"),
        (None, ("cat",), "mine has 2 classes, but --classes names 1; name all classes"),
        (None, ("0", "2"), "mine has a class '1' that --classes lacks"),
    ],
)
def test_classes_that_do_not_fit_the_data(own, classes, message):
    with pytest.raises(InputError, match=message):
        with_classes(data([0, 1], own), classes)
    assert with_classes(data([0, 1], ("cat", "dog")), 2).classes == ("cat", "dog")


# A shared test set


def test_a_shared_test_set_replaces_the_local_one():
    own, shared = data([0, 1, 1]), data([0] * 4, name="all", test=[1, 0, 1, 1])
    tested = with_test_set(own, shared)
    assert torch.equal(tested.train_x, own.train_x)
    assert torch.equal(tested.test_x, shared.test_x)
    assert tested.test_y.tolist() == [1, 0, 1, 1]
    assert (tested.name, tested.classes) == ("mine", ("0", "1"))


def test_files_without_a_test_set_are_used_whole():
    """200 rows of x and y to train on and 200 others to test on: none is left out."""
    rows = torch.arange(400.0).reshape(200, 2)
    own = pg.in_memory(rows, torch.arange(200) % 3, groups=torch.arange(200))
    shared = pg.in_memory(rows + 1000, torch.arange(200) % 3, name="all")
    assert (len(own.train_y), len(own.test_y)) == (160, 40)
    both = with_test_set(own, shared)
    assert torch.equal(both.train_x, rows)
    assert torch.equal(both.test_x, rows + 1000)
    assert torch.equal(both.train_y, torch.arange(200) % 3)
    assert unused_examples(own, shared) == []
    world = prepare_own(pg.Experiment(nodes=2, model="logistic"), 1, own, None, shared)
    assert describe_examples(world, 1) == "training on 200 examples, testing on 200"
    evaluation = {"validation": 0.25}
    held_out = pg.Experiment(nodes=2, model="logistic", evaluation=evaluation)
    world = prepare_own(held_out, 1, own, None, shared)
    assert describe_examples(world, 1) == (
        "training on 150 examples, validating on 50, testing on 200"
    )


def test_a_split_that_a_file_has_stays_and_the_log_names_what_is_unused():
    own, shared = data([0, 1, 1]), data([0] * 4, name="all", test=[1, 0])
    assert unused_examples(own, None) == []
    assert unused_examples(own, shared) == [
        "the 3 test examples of mine are replaced by --test",
        "the 4 training examples of all are not used",
    ]
    world = prepare_own(pg.Experiment(nodes=2, model="logistic"), 1, own, None, shared)
    assert describe_examples(world, 1) == "training on 3 examples, testing on 2"
    fedavg = pg.Experiment(nodes=2, model="logistic", algorithm="fedavg")
    client = prepare_own(fedavg, 1, own)
    assert describe_examples(client, 1) == "training on 3 examples, the hub keeps the model"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            data([0, 1], name="all", shape=(3,)),
            r"--test all has examples of shape \(3,\) and mine has examples of shape \(2,\); give",
        ),
        (
            data([0, 1, 2], name="all"),
            "--test all has 3 classes and mine has 2; "
            "name all classes of the whole network with --classes",
        ),
        (
            data([0, 1], ("cat", "fox"), "all"),
            "--test all has a class 'fox' where mine has 'dog'; name all classes of the whole",
        ),
    ],
)
def test_a_test_set_of_another_kind_is_rejected(other, message):
    with pytest.raises(InputError, match=message):
        with_test_set(data([0, 1], ("cat", "dog")), other)


def test_classes_by_number_can_be_tested_on_classes_by_name_and_vice_versa():
    names, numbers = data([0, 1], ("cat", "dog")), data([0, 1])
    assert with_test_set(names, numbers).classes == ("cat", "dog")
    assert with_test_set(numbers, names).classes == ("0", "1")


def test_the_world_of_a_peer_has_the_classes_and_the_test_set_of_all():
    experiment = pg.Experiment(dataset="npz:path=gone.npz", nodes=3, evaluation={"samples": 2})
    own = data([0, 1, 1, 0], ("dog", "horse"), name="one")
    shared = data([0], ("cat",), name="all", test=[0, 0, 0])  # its training set is not looked at
    names = ("cat", "dog", "horse")
    first = prepare_own(experiment, 1, own, names, shared)
    assert first.setup["classes"] == ["cat", "dog", "horse"]
    assert first.setup["allocation"] == [[0, 0, 0], [0, 2, 2], [0, 0, 0]]
    assert first.test.y.tolist() == [0, 0]
    # Others draw the same examples of the shared test set.
    second = prepare_own(experiment, 2, data([0, 0], ("cat",), name="two"), names, shared)
    assert torch.equal(first.test.x, second.test.x)


@pytest.mark.parametrize("validation", [0.0, 0.5])
def test_a_hub_trains_on_nothing_and_evaluates_on_the_test_set(validation):
    evaluation = {"validation": validation}
    experiment = pg.Experiment(algorithm="fedavg", nodes=2, evaluation=evaluation)
    shared = data([0, 1, 2], name="all", test=[2, 1, 0, 0])
    world = prepare_own(experiment, 2, shared)
    assert world.setup["examples"] == [0, 0]
    assert [len(part) for part in world.parts] == [0, 0, 0]
    assert world.test.y.tolist() == [2, 1, 0, 0]


def test_a_class_that_only_other_peers_have_is_no_error():
    """Labels 0 and 2 of three, and a test set of all: warnings are errors here."""
    experiment = pg.Experiment(nodes=3, model="logistic")
    own = data([0, 2, 2, 0], test=[0, 1, 2])
    assert prepare_own(experiment, 1, own).setup["classes"] == ["0", "1", "2"]
    one = data([2, 2], test=[2])
    assert prepare_own(experiment, 1, one, 3).setup["allocation"][1] == [0, 0, 2]
    named = data([0, 0], ("cat",), test=[0])
    assert prepare_own(experiment, 1, named, ("cat", "dog")).setup["allocation"][1] == [2, 0]


def test_a_peer_logs_that_the_classes_of_the_network_are_a_guess():
    experiment = pg.Experiment(nodes=3, model="logistic")
    message = (
        "mine: no example has class 1, but the highest label implies 3 classes; "
        "if other peers have more classes, add --classes 3 or as many as the network has"
    )
    with pytest.warns(PeerageWarning, match=message):
        prepare_own(experiment, 1, data([0, 2, 2]))
    with pytest.raises(InputError, match=r"all examples have class '0', .*; .* add --classes 2 "):
        prepare_own(experiment, 1, data([0, 0]))
    with pytest.raises(InputError, match="add --classes cat,OTHER or all names that the network"):
        prepare_own(experiment, 1, data([0, 0], ("cat",)))


# The model


@pytest.mark.parametrize("name", ["mine", "cifar10", "digits"])
@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ("mnist", "mnist-cnn"),
        ("digits", "digits-mlp"),
        ("npz:path=gone.npz", "cifar-cnn"),
        ("folder:path=cifar10", "cifar-cnn"),
    ],
)
def test_the_model_does_not_depend_on_what_a_peer_calls_its_data(name, dataset, model):
    experiment = pg.Experiment(dataset=dataset, nodes=2, algorithm="decavg")
    own = data(list(range(10)), name=name, shape=(1, 28, 28))
    assert prepare_own(experiment, 0, own).experiment.model == (MODELS[model](),)


def test_a_model_that_the_experiment_names_stays():
    experiment = pg.Experiment(dataset="mnist", model="logistic", nodes=2)
    assert prepare_own(experiment, 0, data([0, 1])).experiment.model == (MODELS["logistic"](),)


# Through the command line


def pictures(folder: Path, seed: int, **counts: int) -> str:
    """So many pictures of each class, one colour for each and noise."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        base = {"cat": (200, 50, 50), "dog": (50, 200, 50), "horse": (50, 50, 200)}[name]
        for number in range(count):
            noise = rng.integers(-50, 50, (4, 4, 3))
            pixels = (np.array(base) + noise).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return f"folder:path={folder},size=4"


def finished(network: Machines, flags: list[list[str]]) -> None:
    for me, more in enumerate(flags):
        network.start(me, more=more)
    assert network.wait() == [0] * len(flags), "\n".join(map(network.log, range(len(flags))))


@pytest.mark.slow
def test_folders_with_different_classes_train_as_one_simulation(tmp_path):
    specs = [
        pictures(tmp_path / "zero", 0, dog=10, horse=15),
        pictures(tmp_path / "one", 1, cat=20, dog=5),
    ]
    shared = pictures(tmp_path / "shared", 2, cat=10, dog=10, horse=10)
    names = ("cat", "dog", "horse")
    common = {"nodes": 2, "topology": "ring", "model": "logistic", "rounds": 2}
    experiment = pg.Experiment(dataset="folder:path=nobody-has-this", **common)
    with Machines(tmp_path, experiment, CALM) as network:
        more = ["--test", shared, "--classes", ",".join(names)]
        finished(network, [["--data", spec, *more] for spec in specs])
        rows = [network.rows(me) for me in range(2)]
        for me in range(2):  # no picture is left out
            assert "training on 25 examples, testing on 30\n" in network.log(me)
    # The same with all data in one place. cat is missing in the first folder, horse in the second.
    (x0, y0), (x1, y1), (test_x, test_y) = (
        Folder(str(tmp_path / name), size=4).load(tmp_path).undivided()
        for name in ("zero", "one", "shared")
    )
    x, y = torch.cat([x0, x1]), torch.cat([y0 + 1, y1])
    parts = (tuple(range(len(y0))), tuple(range(len(y0), len(y))))
    whole = pg.in_memory(x, y, test_x, test_y, classes=names)
    simulated = pg.Experiment(
        dataset=whole, partition=Parts(parts), engine={"name": "serial"}, **common
    )
    pg.run(simulated, tmp_path / "simulated")
    expected = read_metrics(tmp_path / "simulated" / "metrics.jsonl")
    for me, own in enumerate(rows):
        assert [row["round"] for row in own] == [0, 1, 2]
        theirs = {row["round"]: row for row in expected if row.get("node") == me}
        for row in own[1:]:
            assert row["loss"] == theirs[row["round"]]["loss"]
            assert row["accuracy"] == theirs[row["round"]]["accuracy"]


def idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(header + values.astype(np.uint8).tobytes())


@pytest.mark.slow
def test_an_archive_that_lacks_a_class_and_idx_files_train_together(tmp_path):
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 90)
    x = (80 * np.eye(3, 16)[y] + rng.integers(0, 100, (90, 16))).astype(np.uint8).reshape(90, 4, 4)
    few = y[:45] < 2
    np.savez(tmp_path / "own.npz", x=x[:45][few], y=y[:45][few])
    (tmp_path / "files").mkdir()
    idx(tmp_path / "files" / "train-images-idx3-ubyte", x[45:])
    idx(tmp_path / "files" / "train-labels-idx1-ubyte", y[45:])
    own = [Npz(str(tmp_path / "own.npz")), Idx(str(tmp_path / "files"))]
    experiment = pg.Experiment(nodes=2, topology="ring", model="logistic", rounds=2)
    with Machines(tmp_path, experiment, CALM) as network:
        flags = [f"npz:path={own[0].path}", f"idx:path={own[1].path}"]
        finished(network, [["--data", spec, "--classes", "3"] for spec in flags])
        rows = [network.rows(me) for me in range(2)]
        digests = [json.loads((f / "summary.json").read_text())["digest"] for f in network.folders]
    assert len(set(digests)) == 1  # two neighbours end with one model
    peers = run_peers(
        experiment, worlds=lambda me: prepare_own(experiment, me, own[me].load(tmp_path), 3)
    )
    for peer, found in zip(peers, rows, strict=True):
        assert [row["heard"] for row in found[1:]] == [[1, 1], [1, 1]]
        for key in ("round", "accuracy", "loss", "bytes"):
            assert [row.get(key) for row in found] == [row.get(key) for row in peer.rows]
