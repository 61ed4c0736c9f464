"""FEMNIST in small: files in LEAF's format, what is read of them, bad ones, and the split."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import error_line, peerage

import peerage as pg
from peerage import specs
from peerage.data import DATASETS, fetch, status
from peerage.data.datasets import DATASET_INFO, Femnist, training_subset
from peerage.data.leaf import CHARACTERS, concatenate_parts, split_off_tests
from peerage.engine.prepare import prepare
from peerage.errors import DataError, InputError
from peerage.models.cnn import LeafCNN

SCRIPT = "preprocess.sh -s niid --sf 1.0 -k 0 -t sample"
Writer = tuple[list[list[float]], list[int]]


def writer(count: int, seed: int) -> Writer:
    """Images as LEAF has them: whole numbers / 255."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (count, 784)) / 255
    return pixels.tolist(), rng.integers(0, 62, count).tolist()


def write(path: Path, writers: dict[str, Writer], **changes: Any) -> Path:
    content = {
        "users": list(writers),
        "num_samples": [len(y) for _, y in writers.values()],
        "user_data": {name: {"x": x, "y": y} for name, (x, y) in writers.items()},
    }
    kept = {key: value for key, value in {**content, **changes}.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept))
    return path


# Not in the order of names, neither within a file nor between files.
TRAIN = {"f02": writer(3, 2), "f00": writer(5, 0), "f01": writer(4, 1)}
TEST = {"f02": writer(1, 12), "f00": writer(2, 10), "f01": writer(1, 11)}


def some(writers: dict[str, Writer], *names: str) -> dict[str, Writer]:
    return {name: writers[name] for name in names}


def files(folder: Path) -> Path:
    """Training and test files as `-t sample` leaves them, of two writers and of one."""
    for part, writers in (("train", TRAIN), ("test", TEST)):
        name = f"niid_0_keep_0_{part}_9.json"
        write(folder / part / f"all_data_0_{name}", some(writers, "f02", "f00"))
        write(folder / part / f"all_data_1_{name}", some(writers, "f01"))
    return folder


def load(folder: Path, **options: Any) -> pg.Dataset:
    return Femnist(path=str(folder), **options).load(Path("nowhere"))


def images(*parts: Writer) -> torch.Tensor:
    rows = [row for x, _ in parts for row in x]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 1, 28, 28)


def labels(*parts: Writer) -> list[int]:
    return [label for _, y in parts for label in y]


# What comes out


def test_writers_come_in_the_order_of_their_names_and_pixels_as_they_are(tmp_path):
    dataset = load(files(tmp_path))
    assert (dataset.name, dataset.shape) == ("femnist", (1, 28, 28))
    assert torch.equal(dataset.train_x, images(TRAIN["f00"], TRAIN["f01"], TRAIN["f02"]))
    assert dataset.train_y.tolist() == labels(TRAIN["f00"], TRAIN["f01"], TRAIN["f02"])
    assert torch.equal(dataset.test_x, images(TEST["f00"], TEST["f01"], TEST["f02"]))
    assert dataset.test_y.tolist() == labels(TEST["f00"], TEST["f01"], TEST["f02"])
    assert dataset.groups is not None
    assert dataset.groups.tolist() == [0] * 5 + [1] * 4 + [2] * 3
    assert dataset.groups.dtype == torch.int64
    assert dataset.train_x.stride() == (784, 1, 28, 1)


def test_digits_capitals_and_small_letters_are_the_classes():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == DATASET_INFO["femnist"].classes == 62
    assert [CHARACTERS[label] for label in (0, 9, 10, 35, 36, 61)] == [*"09AZaz"]


def test_how_writers_are_cut_into_files_does_not_matter(tmp_path):
    several = load(files(tmp_path / "several"))
    write(tmp_path / "one" / "train" / "data.json", TRAIN)
    write(tmp_path / "one" / "test" / "data.json", TEST)
    one = load(tmp_path / "one")
    assert torch.equal(one.train_x, several.train_x)
    assert torch.equal(one.test_x, several.test_x)
    assert torch.equal(one.groups, several.groups)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_the_first_writers(tmp_path, count):
    whole, part = load(files(tmp_path)), load(tmp_path, writers=count)
    train, test = [5, 9, 12][count - 1], [2, 3, 4][count - 1]
    assert torch.equal(part.train_x, whole.train_x[:train])
    assert torch.equal(part.groups, whole.groups[:train])
    assert torch.equal(part.test_x, whole.test_x[:test])
    assert part.test_y.tolist() == whole.test_y[:test].tolist()


def test_writers_of_the_test_files_may_be_missing_from_the_training_files(tmp_path):
    """As `-t user` splits: other writers for testing."""
    write(tmp_path / "train" / "a.json", TRAIN)
    write(tmp_path / "test" / "a.json", {"f09": writer(3, 9), "f04": writer(2, 4)})
    dataset = load(tmp_path)
    assert dataset.test_y.tolist() == labels(writer(2, 4), writer(3, 9))
    assert dataset.groups.unique().tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=r"no test examples of the writers.* with -t sample"):
        load(tmp_path, writers=2)


def test_writers_without_examples_are_no_writers(tmp_path):
    write(tmp_path / "train" / "a.json", {**TRAIN, "a-first": ([], [])})
    write(tmp_path / "test" / "a.json", {**TEST, "a-first": writer(1, 3)})
    assert load(tmp_path).groups.unique().tolist() == [0, 1, 2]
    assert len(load(tmp_path, writers=1).train_y) == 5
    # LEAF leaves data of writers that it has dropped from the list of users.
    left = {name: {"x": [], "y": []} for name in ("f00", "f77")}
    data = {**left, "f00": {"x": TRAIN["f00"][0], "y": TRAIN["f00"][1]}}
    write(tmp_path / "train" / "a.json", some(TRAIN, "f00"), user_data=data)
    assert load(tmp_path).groups.tolist() == [0] * 5


def test_unsplit_files_give_a_tenth_of_every_writer_for_testing(tmp_path):
    sizes = {"a": 1, "b": 2, "c": 9, "d": 10, "e": 11, "f": 40}
    writers = {name: writer(size, seed) for seed, (name, size) in enumerate(sizes.items())}
    write(tmp_path / "all_data_0.json", some(writers, *"fbd"))
    write(tmp_path / "all_data_1.json", some(writers, *"ace"))
    dataset = load(tmp_path)
    # LEAF's rule: 0.9 n to train on, rounded down, but at least one.
    assert torch.bincount(dataset.groups).tolist() == [1, 1, 8, 9, 9, 36]
    assert len(dataset.test_y) == 0 + 1 + 1 + 1 + 2 + 4
    together = torch.cat([dataset.train_x, dataset.test_x]).flatten(1).tolist()
    assert sorted(together) == sorted(images(*writers.values()).flatten(1).tolist())
    known = {
        tuple(row): label for x, y in writers.values() for row, label in zip(x, y, strict=True)
    }
    for x, y in ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y)):
        rows = (x.double() * 255).round().flatten(1).tolist()
        assert [known[tuple(value / 255 for value in row)] for row in rows] == y.tolist()
    # The same examples every time, also of a part of the writers.
    part = load(tmp_path, writers=4)
    assert torch.equal(part.train_x, dataset.train_x[: 1 + 1 + 8 + 9])
    assert torch.equal(part.test_x, dataset.test_x[:3])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_every_writer_keeps_an_example_and_none_is_lost(sizes):
    """Every image is known by its first pixel."""
    numbered = np.arange(sum(sizes))
    cut = np.split(numbered, np.cumsum(sizes)[:-1])
    train = {
        f"w{i}": (np.tile(part[:, None], 784).astype(np.float32), part % 62)
        for i, part in enumerate(cut)
    }
    test = split_off_tests(train)
    for (name, (x, _)), size in zip(train.items(), sizes, strict=True):
        assert len(x) == max(1, int(size * 9 // 10))
        assert len(x) + len(test.get(name, (x[:0],))[0]) == size
        assert (np.diff(x[:, 0]) > 0).all()
    x, y = (
        torch.cat(both)
        for both in zip(concatenate_parts(train), concatenate_parts(test), strict=True)
    )
    assert sorted(x[:, 0, 0, 0].tolist()) == numbered.tolist()
    assert torch.equal(x[:, 0, 27, 27].long() % 62, y)
    assert not train  # used up, so that no second copy stays in memory
    assert not test


def test_a_smaller_training_set_keeps_the_writers(tmp_path):
    whole = load(files(tmp_path))
    part = training_subset(6, whole)
    images = whole.train_x.flatten(1).tolist()
    where = [images.index(row) for row in part.train_x.flatten(1).tolist()]
    assert part.groups.tolist() == whole.groups[where].tolist()


# Where the files lie


def test_by_default_they_are_sought_in_the_cache(tmp_path):
    assert status("femnist", tmp_path) == "missing"
    with pytest.raises(DataError) as caught:
        Femnist().load(tmp_path)
    message = str(caught.value)
    assert message == (
        f"{tmp_path / 'femnist'} does not hold train/*.json and test/*.json, or all_data*.json; "
        f"run `{SCRIPT}` in the folder data/femnist of LEAF and put its folders train and test "
        "there, or give their folder with --dataset femnist:path=FOLDER"
    )
    with pytest.raises(DataError) as asked:
        fetch("femnist", tmp_path)
    assert str(asked.value) == message
    files(tmp_path / "femnist")
    assert status("femnist", tmp_path) == "ready"
    assert fetch("femnist", tmp_path) == tmp_path / "femnist"
    assert len(Femnist().load(tmp_path).train_y) == 12


def test_training_files_alone_are_not_enough(tmp_path, monkeypatch):
    write(tmp_path / "train" / "a.json", TRAIN)
    (tmp_path / "test").mkdir()
    with pytest.raises(DataError, match=r"does not hold train/\*\.json and test/\*\.json, or"):
        load(tmp_path)
    write(tmp_path / "test" / "a.json", TEST)
    write(tmp_path / "all_data_0.json", {"other": writer(10, 0)})  # what the split was made of
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert len(load(Path("~") / tmp_path.name).train_y) == 12


def test_the_list_of_data_sets_shows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    assert "femnist         missing  (peerage data get femnist)" in peerage("data list").lines
    assert SCRIPT in error_line(peerage("data get femnist"))
    files(tmp_path / "femnist")
    assert "femnist         ready" in peerage("data list").lines


# Bad files


def data(**changes: Any) -> dict[str, Any]:
    """The user_data of a writer, with other images or labels."""
    x, y = writer(3, 2)
    return {"f02": {"x": x, "y": y, **changes}}


def change(**changes: Any) -> Callable[[Path], Path]:
    return lambda path: write(path, some(TRAIN, "f02"), **changes)


def rows(position: int, row: Any) -> dict[str, Any]:
    x, _ = writer(3, 2)
    x[position] = row
    return data(x=x)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_text("no JSON"), "cannot be read as JSON: Expecting value"),
        (lambda path: path.write_text(""), "cannot be read as JSON: Expecting value"),
        (lambda path: path.write_bytes(b'"\xff"'), "cannot be read as JSON: .* decode byte 0xff"),
        (lambda path: path.write_text("[" * 99_999), "cannot be read as JSON: .*recursion"),
        (lambda path: path.write_text(path.read_text()[:-20]), "cannot be read as JSON: "),
        (lambda path: path.write_text("[1, 2]"), "has no users; create the files"),
        (change(users=None), "has no users; create the files"),
        (change(num_samples=None), "has no num_samples; create the files"),
        (change(user_data=None), "has no user_data; create the files"),
        (change(users="f02"), "users must be a list of names, num_samples a list and user_data"),
        (change(users=[2]), "users must be a list of names"),
        (change(user_data=[]), "user_data a table"),
        (change(num_samples=[3, 4]), "has 1 users but 2 numbers in num_samples"),
        (change(user_data={"f03": {}}), "user 'f02' has no data in user_data"),
        (change(user_data={"f02": []}), "user 'f02' has no data in user_data"),
        (change(user_data={"f02": {"x": []}}), "user 'f02' needs the lists x and y"),
        (change(num_samples=[4]), "user 'f02' has 3 images but num_samples says 4"),
        (change(user_data=data(y=[1, 2])), "user 'f02' has 3 images but 2 labels"),
        (change(user_data=rows(1, [0.5] * 783)), "user 'f02': image 1 is not a list of 784 n"),
        (change(user_data=rows(2, 0.5)), "image 2 is not a list of 784 numbers"),
        (change(user_data=rows(0, [[0.5]] * 784)), "image 0 is not a list of 784 numbers"),
        (change(user_data=rows(1, ["0.5"] * 784)), "image 1 is not a list of 784 numbers"),
        (change(user_data=rows(1, [None] * 784)), "image 1 is not a list of 784 numbers"),
        (change(user_data=data(x=[[0.5] * 28] * 3)), "image 0 is not a list of 784 numbers"),
        (change(user_data=rows(1, [255] * 784)), "has a pixel of 255.0, outside \\[0, 1\\]"),
        (change(user_data=rows(1, [-0.25] * 784)), "has a pixel of -0.25, outside \\[0, 1\\]"),
        (change(user_data=rows(1, [float("nan")] * 784)), "has a pixel of nan, outside \\[0, 1\\]"),
        (change(user_data=data(y=[0, 61, 62])), "has label 62, not a whole number from 0 to 61"),
        (change(user_data=data(y=[0, -1, 2])), "'f02' has label -1, not a whole number from"),
        (change(user_data=data(y=[0, 1.0, 2])), "has label 1.0, not a whole number from"),
        (change(user_data=data(y=[0, True, 2])), "has label True, not a whole number from"),
        (change(user_data=data(y=[0, "a", 2])), "has label 'a', not a whole number from"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_bad_files_name_themselves_the_reason_and_the_remedy(tmp_path, spoil, reason, part):
    write(tmp_path / "train" / "a.json", some(TRAIN, "f02"))
    write(tmp_path / "test" / "a.json", some(TRAIN, "f02"))
    spoil(tmp_path / part / "a.json")
    with pytest.raises(DataError, match=reason) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / part / "a.json"))
    assert message.endswith("; create the files again with LEAF's preprocess.sh")
    assert "\n" not in message


def test_a_file_that_is_a_folder(tmp_path):
    files(tmp_path)
    (tmp_path / "train" / "more.json").mkdir()
    with pytest.raises(DataError, match=r"more\.json cannot be read as JSON: .*directory"):
        load(tmp_path)


def test_a_writer_in_two_files_is_a_mixture_of_runs(tmp_path):
    write(files(tmp_path) / "train" / "copy.json", some(TRAIN, "f01"))
    with pytest.raises(DataError, match=r"copy\.json: user 'f01' is also in .*all_data_1"):
        load(tmp_path)


def test_files_without_any_example(tmp_path):
    write(tmp_path / "all_data_0.json", {})
    with pytest.raises(DataError, match="holds no training examples of the writers"):
        load(tmp_path)
    write(tmp_path / "all_data_0.json", {"f00": writer(1, 0)})
    with pytest.raises(DataError, match="holds no test examples of the writers"):
        load(tmp_path)


# Options


def test_options_survive_text_and_are_checked(tmp_path):
    for text in ("femnist", "femnist:path=far,writers=10"):
        value = specs.parse(text, "dataset", DATASETS)
        assert specs.text(value, "dataset", DATASETS) == text
    with pytest.raises(InputError, match="writers must be at least 1, got 0"):
        Femnist(writers=0)
    with pytest.raises(InputError, match="writers=4 is more than the 3 writers with training"):
        load(files(tmp_path), writers=4)


# A run


def small(folder: Path, **changes: Any) -> pg.Experiment:
    settings = {
        "algorithm": "decavg",
        "dataset": f"femnist:path={folder}",
        "partition": "by-group",
        "topology": "complete",
        "nodes": 3,
        "rounds": 1,
        "local": {"epochs": 1, "batch_size": 2, "lr": 0.01},
        "engine": {"name": "serial"},
    }
    return pg.Experiment(**{**settings, **changes})


# The few images of the files do not show every character of the test set.
UNSEEN = pytest.mark.filterwarnings("ignore:femnist. no training example has class")


@UNSEEN
@pytest.mark.slow
def test_a_run_with_a_writer_on_every_node(tmp_path):
    """Three writers of 5, 4 and 3 images; the model is LEAF's without being asked for."""
    result = pg.run(small(files(tmp_path)))
    assert [vector.numel() for vector in result.parameters] == [6_603_710] * 3
    # On a complete graph all end with the mean model.
    assert torch.allclose(result.parameters[0], result.parameters[2], atol=1e-6)
    assert result.experiment.model == (LeafCNN(),)
    written = result.experiment.to_toml()
    assert '[partition]\nname = "by-group"\n' in written
    assert pg.Experiment.from_toml(written) == result.experiment


@UNSEEN
def test_nodes_have_the_images_of_their_writers(tmp_path):
    folder = files(tmp_path)
    three = prepare(small(folder, model="logistic"))
    assert [part.tolist() for part in three.parts] == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11],
    ]
    assert three.setup["examples"] == [5, 4, 3]
    assert three.setup["test_examples"] == 4
    two = prepare(small(folder, model="logistic", nodes=2)).parts
    assert [len(part) for part in two] in ([5, 4], [5, 3], [4, 3])
    alone = prepare(small(folder, model="logistic", pooled=True)).parts
    assert [part.tolist() for part in alone] == [list(range(12))]
    with pytest.raises(InputError, match="each of 4 nodes, but the data set has 3"):
        prepare(small(folder, nodes=4))
    with pytest.raises(InputError, match="by-group requires a group for every example"):
        prepare(small(folder, dataset="digits"))
    # Other partitions ignore the writers.
    mixed = prepare(small(folder, model="logistic", partition="iid")).parts
    assert sorted(torch.cat(mixed).tolist()) == list(range(12))


def test_a_run_on_missing_files_says_how_to_make_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    message = error_line(
        peerage("run --dataset femnist --nodes 2 --rounds 1", "--out", tmp_path / "run")
    )
    assert SCRIPT in message
    assert not (tmp_path / "run").exists()


def test_a_plan_needs_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    line = "plan --dataset femnist --nodes 4 --topology ring --algorithm decavg --json"
    plan = json.loads(peerage(line).out)
    assert (plan["model"], plan["parameters"]) == ("leaf-cnn", 6_603_710)
