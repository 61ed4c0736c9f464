import gzip
import struct
import sys
from hashlib import sha256

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from peerage.data import DATASETS, PUBLISHED, Dataset, cache_folder, datasets, in_memory, status
from peerage.data.datasets import (
    DATASET_INFO,
    Cifar10,
    Digits,
    FashionMnist,
    Folder,
    Idx,
    Mnist,
    Npz,
    dataset_info,
    resize,
    to_grey,
    training_subset,
)
from peerage.data.formats import read_cifar, read_idx
from peerage.data.sources import Published
from peerage.data.store import ExpectedFile
from peerage.data.tensors import label_caveats
from peerage.engine.prepare import prepare
from peerage.errors import DataError, InputError, PeerageWarning
from peerage.experiment import Experiment
from peerage.specs import parse, text


def tiny(**changes):
    parts = {
        "name": "tiny",
        "train_x": torch.zeros(4, 1, 2, 2),
        "train_y": torch.tensor([0, 1, 0, 1]),
        "test_x": torch.zeros(2, 1, 2, 2),
        "test_y": torch.tensor([0, 1]),
        "classes": ("a", "b"),
    }
    return Dataset(**{**parts, **changes})


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts small files in the place of a published data set."""

    def put(name, files):
        folder = tmp_path / name
        folder.mkdir()
        for key, content in files.items():
            (folder / key).write_bytes(content)
        contents = tuple(
            ExpectedFile(key, len(content), sha256(content).hexdigest())
            for key, content in files.items()
        )
        monkeypatch.setitem(PUBLISHED, name, Published(contents, ()))
        return tmp_path

    return put


def real(family, name):
    """The data set itself, if it is in the cache of this machine."""
    if status(name) == "missing":
        pytest.skip(f"{name} is not here; fetch it with: peerage data get {name}")
    return family().load(cache_folder())


# --- Dataset ------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_images_lie_in_memory_with_their_channels_together(channels):
    x = torch.arange(4.0 * channels * 6).reshape(4, channels, 2, 3)
    dataset = tiny(train_x=x, test_x=x[:2])
    assert dataset.shape == (channels, 2, 3)
    assert dataset.train_x.stride() == (6 * channels, 1, 3 * channels, channels)
    assert_close(dataset.train_x, x, rtol=0, atol=0, check_stride=False)


def test_rows_stay_rows():
    dataset = tiny(train_x=torch.zeros(5, 4).t(), test_x=torch.zeros(2, 5))
    assert dataset.shape == (5,)
    assert dataset.train_x.stride() == (5, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_y": torch.tensor([0, 1])}, "training set: 4 examples but 2 labels"),
        ({"test_y": torch.tensor([0, 2])}, "test set: label 2 is out of range; 2 classes"),
        ({"train_y": torch.tensor([0, -1, 0, 0])}, "label -1 is out of range"),
        ({"train_x": torch.full((4, 1, 2, 2), torch.nan)}, "training set: .* not finite"),
        ({"test_x": torch.full((2, 1, 2, 2), torch.inf)}, "test set: .* not finite"),
        ({"train_x": torch.zeros(4)}, r"got shape \(4,\)"),
        ({"train_x": torch.zeros(4, 1, 1, 2, 2)}, r"got shape \(4, 1, 1, 2, 2\)"),
        ({"train_x": torch.zeros(4, 1, 2, 2, dtype=torch.float64)}, "got torch.float64"),
        ({"train_y": torch.zeros(4)}, "int64 labels, got torch.float32 and torch.float32"),
        ({"test_x": torch.zeros(2, 1, 3, 3)}, r"shape \(1, 2, 2\) but test .* \(1, 3, 3\)"),
        ({"groups": torch.zeros(3, dtype=torch.int64)}, r"each of 4 examples, got .* shape \(3,\)"),
        ({"groups": torch.zeros(4)}, "groups must be one int64 number .* got torch.float32"),
        (
            {"test_x": torch.zeros(0, 1, 2, 2), "test_y": torch.zeros(0, dtype=torch.int64)},
            "test set: no examples",
        ),
    ],
)
def test_a_wrong_data_set_is_rejected_in_one_line(changes, message):
    with pytest.raises(DataError, match=message) as error:
        tiny(**changes)
    one_line(error)


def test_in_memory_takes_arrays_lists_and_tensors():
    dataset = in_memory(
        np.array([[[0, 51], [102, 255]]] * 3, dtype=np.uint8),
        np.array([0, 2, 1], dtype=np.int32),
        torch.full((1, 1, 2, 2), 0.25, dtype=torch.float64, requires_grad=True),
        [1],
    )
    assert dataset.shape == (1, 2, 2)
    assert_close(dataset.train_x[2, 0], torch.tensor([[0.0, 0.2], [0.4, 1.0]]))
    assert_close(dataset.test_x, torch.full((1, 1, 2, 2), 0.25), check_stride=False)
    assert dataset.train_y.tolist() == [0, 2, 1]
    assert dataset.classes == ("0", "1", "2")
    assert not dataset.test_x.requires_grad


def test_in_memory_copies_so_that_later_changes_do_not_matter():
    x = np.zeros((10, 3), dtype=np.float32)
    dataset = in_memory(x[::-1], np.arange(10) % 2)
    x += 1
    assert dataset.train_x.sum() == 0


def test_without_a_test_set_a_fifth_of_every_class_is_held_out():
    y = np.repeat([0, 1], [20, 10])
    x = np.arange(30.0)[:, None]
    dataset = in_memory(x, y, classes=("cat", "dog"), name="pets")
    assert torch.bincount(dataset.test_y).tolist() == [4, 2]
    together = torch.cat([dataset.train_x, dataset.test_x])[:, 0]
    assert together.sort().values.tolist() == list(range(30))
    assert (y[dataset.test_x[:, 0].int().numpy()] == dataset.test_y.numpy()).all()
    assert torch.equal(in_memory(x, y).test_x, dataset.test_x)
    assert dataset.classes == ("cat", "dog")


@pytest.mark.parametrize("kind", ["names", "numbers", "bytes"])
def test_groups_are_numbered_in_their_order_and_follow_their_examples(kind):
    names = np.array(["bob", "eve", "ann"] * 10)
    groups = {"names": names, "numbers": [7, 40, -2] * 10, "bytes": names.astype("S")}[kind]
    x = np.arange(30.0)[:, None]
    held = in_memory(x, np.zeros(30, int), groups=groups)
    expected = [[1, 2, 0][number % 3] for number in held.train_x[:, 0].int().tolist()]
    assert held.groups.tolist() == expected
    assert held.groups.dtype == torch.int64
    assert len(held.groups) == 24
    own = in_memory(x, np.zeros(30, int), x[:1], [0], groups=groups)
    assert own.groups.tolist() == [1, 2, 0] * 10
    part = training_subset(5, own)
    expected = [[1, 2, 0][number % 3] for number in part.train_x[:, 0].int().tolist()]
    assert part.groups.tolist() == expected
    assert in_memory(x, np.zeros(30, int)).groups is None


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([0, 1], r"each of 3 examples, got torch.int64 of shape \(2,\)"),
        ([[0], [1], [2]], r"one list of names or whole numbers, got int64 of shape \(3, 1\)"),
        ([0.5, 1.0, 2.0], "one list of names or whole numbers, got float64"),
        ([0, [1, 2], 3], "not an array of numbers"),
    ],
)
def test_bad_groups_are_rejected_in_one_line(groups, message):
    for test in ({}, {"test_x": [[1.0]], "test_y": [0]}):
        with pytest.raises(DataError, match=message) as error:
            in_memory([[1.0], [2.0], [3.0]], [0, 0, 0], groups=groups, **test)
        one_line(error)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]], [0], [[1.0]]), "give both test_x and test_y, or neither"),
        (([["a"], ["b"]], [0, 1]), "examples must be numbers"),
        (([[1.0], [2.0, 3.0]], [0, 1]), "not an array of numbers"),
        (([[1.0], [2.0]], [0.0, 1.0]), "labels must be one list of whole numbers, got float64"),
        (([[1.0], [2.0]], [[0], [1]]), r"whole numbers, got int64 of shape \(2, 1\)"),
        (([[1.0], [2.0]], [0]), "2 examples and 1 labels cannot be split"),
        (([[1.0]], [0]), "1 examples and 1 labels cannot be split"),
        (([[1e300], [0.0]], [0, 1]), "not finite"),
    ],
)
def test_in_memory_explains_what_it_cannot_take(arguments, message):
    with pytest.raises(DataError, match=message) as error:
        in_memory(*arguments)
    one_line(error)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_examples_of_two_axes_need_a_layout(dtype, tmp_path):
    x, y = np.arange(4 * 2 * 3).reshape(4, 2, 3).astype(dtype), [0, 1, 0, 1]
    message = (
        r"tensors: examples \[2, 3\] are treated as images of one channel, \[1, 2, 3\]; "
        "set layout=hw if this is right, or layout=sequence to keep their shape"
    )
    with pytest.warns(PeerageWarning, match=message):
        assert in_memory(x, y, x, y).shape == (1, 2, 3)
    for layout, shape in (("hw", (1, 2, 3)), ("sequence", (2, 3))):
        dataset = in_memory(x, y, x, y, layout=layout)
        assert dataset.shape == shape
        assert dataset.train_x.flatten().tolist() == dataset.test_x.flatten().tolist()
        assert dataset.train_x.is_contiguous()
        assert dataset.train_x.flatten().tolist() == list(range(24))
    path = save(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.warns(PeerageWarning, match="own: examples .* set layout=hw if .* layout=sequence"):
        assert Npz(path).load(tmp_path).shape == (1, 2, 3)
    for layout, shape in (("hw", (1, 2, 3)), ("chw", (1, 2, 3)), ("sequence", (2, 3))):
        assert Npz(path, layout).load(tmp_path).shape == shape


def test_bytes_are_pixels_unless_the_user_says_otherwise():
    x, y = np.full((4, 2, 3), 51, dtype=np.uint8), [0, 1, 0, 1]
    assert_close(in_memory(x, y).train_x, torch.full((3, 1, 2, 3), 0.2), check_stride=False)
    raw = in_memory(x, y, layout="sequence", scale=False)
    assert raw.train_x.tolist() == [[[51.0] * 3] * 2] * 3
    with pytest.warns(PeerageWarning, match="treated as images of one channel"):
        in_memory(x, y, scale=False)


def test_a_layout_must_suit_the_examples():
    y = [0, 1]
    for layout in ("hw", "sequence"):
        with pytest.raises(DataError, match=rf"layout={layout} requires examples of two axes, got"):
            in_memory(np.zeros((2, 1, 3, 3)), y, layout=layout)
    assert in_memory(np.zeros((2, 4, 5, 3)), y, layout="hwc").shape == (3, 4, 5)
    with pytest.raises(
        InputError, match="layout must be one of auto, chw, hwc, hw, sequence; got 'hc'"
    ):
        in_memory(np.zeros((2, 3)), y, layout="hc")


def test_classes_may_be_a_number():
    x = np.zeros((4, 1))
    assert in_memory(x, [0, 1, 0, 1], classes=4).classes == ("0", "1", "2", "3")
    with pytest.raises(DataError, match="label 5 is out of range; 3 classes are numbered 0 to 2"):
        in_memory(x, [0, 5, 0, 5], classes=3)


# --- what labels show --------------------------------------------------------------------------


def rows(train, test, **options):
    return in_memory(np.zeros((len(train), 1)), train, np.zeros((len(test), 1)), test, **options)


def test_classes_without_examples_are_named():
    """Labels 0, 5 and 10 are three classes and not eleven."""
    dataset = rows([0, 5, 10], [10, 5, 0])
    (caveat,) = label_caveats(dataset)
    assert caveat == (
        "tensors: no example has class 1, 2, 3, 4, 6, 7, 8, 9, but the highest label implies 11 "
        "classes; number the 3 that occur from 0, or set classes=11 if this is intended"
    )
    (caveat,) = label_caveats(rows([0, 99], [0, 99]))
    assert (
        "class 1, 2, 3, 4, 5, 6, 7, 8 and 90 more, but the highest label implies 100 classes"
        in caveat
    )
    for names in (11, tuple("abcdefghijk")):
        assert label_caveats(rows([0, 5, 10], [10, 5, 0], classes=names)) == []
    assert label_caveats(rows([0, 1, 2], [1])) == []


def test_classes_of_the_test_set_only_are_named():
    for names in (None, 3, ("cat", "dog", "fox")):
        dataset = rows([0, 1, 1], [0, 2, 2, 1], classes=names)
        (caveat,) = label_caveats(dataset)
        name = "fox" if isinstance(names, tuple) else "2"
        assert caveat == (
            f"tensors: no training example has class {name}, but 2 of 4 test examples do; "
            "add training examples, or remove these test examples"
        )
        assert label_caveats(dataset, share=True) == []  # others may have them


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("names", [None, 2, ("cat", "dog")])
def test_examples_of_one_class_are_rejected(label, names):
    dataset = rows([label] * 3, [label] * 2, classes=names)
    name = ("cat", "dog")[label] if isinstance(names, tuple) else str(label)
    message = f"tensors: all examples have class '{name}', so every model reaches 100 %; give ex"
    with pytest.raises(DataError, match=message) as error:
        label_caveats(dataset)
    one_line(error)
    if names is None and label == 0:
        with pytest.raises(DataError, match="add --classes 2 or as many"):
            label_caveats(dataset, share=True)
    elif names is not None:
        assert label_caveats(dataset, share=True) == []


def test_a_run_reports_what_its_labels_show(tmp_path):
    settings = {
        "nodes": 2,
        "topology": "ring",
        "rounds": 1,
        "model": "logistic",
        "partition": "iid",
    }
    x, y = np.zeros((20, 2)), np.array([0, 5, 10, 10] * 5)
    with pytest.warns(PeerageWarning, match="implies 11 classes; number the 3 that occur"):
        prepare(Experiment(dataset=in_memory(x, y), **settings))
    path = save(tmp_path / "own.npz", x=x, y=y)
    with pytest.warns(PeerageWarning, match="own: no example has class 1, .* or set classes=11"):
        prepare(Experiment(dataset=f"npz:path={path}", **settings))
    world = prepare(Experiment(dataset=f"npz:path={path},classes=11", **settings))
    assert world.label_counts.shape == (2, 11)
    with pytest.raises(InputError, match="classes must be at least 2, got 1"):
        Experiment(dataset=f"npz:path={path},classes=1")
    with pytest.raises(DataError, match="all examples have class '0', so every model reaches"):
        prepare(Experiment(dataset=in_memory(x, y * 0), **settings))


# --- formats --------------------------------------------------------------------------------------


def test_idx_by_hand():
    content = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])
    array = read_idx(np.frombuffer(content, np.uint8), "file")
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]]
    for wrong in (content[:-1], content + b"!", b"", content[:7], b"\0\0\x0d" + content[3:]):
        with pytest.raises(DataError, match="file: "):
            read_idx(np.frombuffer(wrong, np.uint8), "file")


def test_cifar_records_must_be_whole():
    record = bytes([7]) + bytes(range(256)) * 12
    x, y = read_cifar(np.frombuffer(record * 2, np.uint8), "file")
    assert y.tolist() == [7, 7]
    assert x[1, 0, 1].tolist() == list(range(32, 64))  # second row of the red plane
    assert x[1, 1, 0, 0] == 1024 % 256
    with pytest.raises(DataError, match="3072 bytes are not whole records"):
        read_cifar(np.frombuffer(record[1:], np.uint8), "file")


# --- published data sets --------------------------------------------------------------------------


def test_digits_split_is_fixed_and_standardised(tmp_path):
    from sklearn.datasets import load_digits

    raw = load_digits()
    digits = Digits().load(tmp_path)
    assert digits.shape == (1, 8, 8)
    assert (len(digits.train_x), len(digits.test_x)) == (1437, 360)
    assert_close(digits.train_x.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    assert_close(digits.train_x.std(correction=0), torch.tensor(1.0))
    share = np.bincount(raw.target) * 360 / 1797
    assert (abs(torch.bincount(digits.test_y).numpy() - share) < 1).all()
    # Undo the standardisation: 0 and 16 are the extremes of the raw pixels.
    low, high = digits.train_x.aminmax()
    images = torch.cat([digits.train_x, digits.test_x])
    restored = ((images - low) / (high - low) * 16).round().flatten(1).numpy()
    assert sorted(map(tuple, restored)) == sorted(map(tuple, raw.data))
    assert digits.classes == tuple("0123456789")
    # The split is part of every published number: it must never change.
    assert digits.test_y[:12].tolist() == [1, 7, 8, 5, 5, 5, 2, 2, 7, 5, 2, 8]


def test_digits_are_those_of_scikit_learn(tmp_path, monkeypatch):
    from sklearn.datasets import load_digits

    raw = load_digits()
    pixels, labels = datasets._read_digits()
    assert (pixels.dtype, labels.dtype) == (np.float64, np.int64)
    assert np.array_equal(pixels, raw.images)
    assert np.array_equal(labels, raw.target)
    # The bits of the tensors, and so the digests of runs, are those of scikit-learn's arrays.
    found = Digits().load(tmp_path)
    arrays = (raw.images, raw.target.astype(np.int64))
    monkeypatch.setattr(datasets, "_read_digits", lambda: arrays)
    official = Digits().load(tmp_path)
    for part in ("train_x", "test_x", "train_y", "test_y"):
        assert torch.equal(getattr(found, part), getattr(official, part))


def test_digits_need_no_scikit_learn_and_are_checked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    datasets._read_digits.cache_clear()
    assert len(Digits().load(tmp_path).train_x) == 1437
    datasets._read_digits.cache_clear()
    altered = tmp_path / "digits.npz"
    altered.write_bytes(datasets.DIGITS_FILE.read_bytes()[:-1])
    monkeypatch.setattr(datasets, "DIGITS_FILE", altered)
    with pytest.raises(DataError, match=r"digits.npz was altered; install peerage again"):
        Digits().load(tmp_path)


@pytest.mark.parametrize(
    ("family", "name", "first"),
    [(Mnist, "mnist", "0"), (FashionMnist, "fashion-mnist", "T-shirt/top")],
)
def test_idx_data_sets_are_normalised_with_the_numbers_of_mnist(family, name, first, cached):
    images = np.array([[[0, 255], [51, 102]]] * 3)
    cache = cached(
        name,
        {
            "train-images-idx3-ubyte": idx(images),
            "train-labels-idx1-ubyte": idx(np.array([9, 0, 5])),
            "t10k-images-idx3-ubyte": idx(images[:2]),
            "t10k-labels-idx1-ubyte": idx(np.array([1, 2])),
        },
    )
    dataset = family().load(cache)
    expected = (torch.tensor([[0.0, 1.0], [0.2, 0.4]]) - 0.1307) / 0.3081
    assert_close(dataset.train_x[2, 0], expected, check_stride=False)
    assert dataset.train_x.stride() == (4, 1, 2, 1)
    assert_close(dataset.scaling.undo(dataset.train_x)[2, 0], expected * 0.3081 + 0.1307)
    unit = family(normalise="unit").load(cache)
    expected = torch.tensor([[0.0, 1.0], [0.2, 0.4]])
    assert_close(unit.train_x[2, 0], expected, check_stride=False)
    assert unit.scaling.undo(unit.train_x) is unit.train_x
    assert dataset.train_y.tolist() == [9, 0, 5]
    assert len(dataset.test_x) == 2
    assert (dataset.name, dataset.classes[0], len(dataset.classes)) == (name, first, 10)
    (cache / name / "t10k-labels-idx1-ubyte").write_bytes(idx(np.array([1, 3])))
    with pytest.raises(
        DataError, match=f"altered; fetch it again with: peerage data get {name} --a"
    ):
        family().load(cache)


def test_cifar10_is_scaled_as_asked(cached):
    def record(label, red):
        return bytes([label]) + bytes([red]) * 1024 + bytes([0]) * 1024 + bytes([255]) * 1024

    batches = {f"data_batch_{number}.bin": record(number, 51 * number) for number in range(1, 6)}
    cache = cached("cifar10", {**batches, "test_batch.bin": record(0, 0)})
    unit, signed = Cifar10().load(cache), Cifar10("signed").load(cache)
    assert unit.shape == (3, 32, 32)
    assert unit.train_y.tolist() == [1, 2, 3, 4, 5]
    assert_close(unit.train_x[:, 0, 7, 7], torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0]))
    assert unit.train_x[:, :, 3, 4].tolist()[0][1:] == [0.0, 1.0]
    assert_close(signed.train_x, 2 * unit.train_x - 1)
    assert unit.train_x.stride() == (3072, 1, 96, 3)
    assert unit.test_y.tolist() == [0]
    with pytest.raises(
        InputError, match="normalise must be one of unit, signed, standard; got 'cen"
    ):
        Cifar10("centred")


def test_grey_is_luma_and_scaling_keeps_even_pictures_even(cached):
    def record(label, red, green, blue):
        planes = (bytes([value]) * 1024 for value in (red, green, blue))
        return bytes([label]) + b"".join(planes)

    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (51, 102, 204)]
    batches = {f"data_batch_{n}.bin": record(n, *colour) for n, colour in enumerate(colours, 1)}
    cache = cached("cifar10", {**batches, "test_batch.bin": record(0, 0, 0, 0)})
    unit = Cifar10(grey=True, side=28).load(cache)
    assert unit.shape == dataset_info(Cifar10(grey=True, side=28)).shape == (1, 28, 28)
    luma = torch.tensor([0.299, 0.587, 0.114, 1.0, 0.2 * 0.299 + 0.4 * 0.587 + 0.8 * 0.114])
    assert_close(unit.train_x, luma[:, None, None, None].expand(5, 1, 28, 28), check_stride=False)
    assert not unit.test_x.any()
    assert unit.train_y.tolist() == [1, 2, 3, 4, 5]
    assert unit.train_x.stride() == (784, 1, 28, 1)
    signed = Cifar10("signed", train=2, grey=True).load(cache)
    assert signed.shape == (1, 32, 32)
    assert len(signed.train_y) == 2
    kept = luma[signed.train_y - 1]
    assert_close(signed.train_x[:, 0, 5, 6], 2 * kept - 1)
    small = Cifar10(side=3).load(cache)
    assert small.shape == (3, 3, 3)
    assert_close(small.train_x[4, :, 1, 2], torch.tensor([0.2, 0.4, 0.8]))
    assert small.train_x.stride() == (27, 1, 9, 3)
    with pytest.raises(InputError, match="side must be at least 1 pixel, got 0"):
        Cifar10(side=0)


def test_pictures_are_scaled_bilinearly_with_antialiasing():
    """A second, plain implementation: triangles as wide as a new pixel, cut off at the edges."""
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    luma = np.einsum("c,nchw->nhw", [0.299, 0.587, 0.114], x.double().numpy())
    scale = 32 / 28
    centres = (np.arange(28) + 0.5) * scale
    distance = abs(np.arange(32) + 0.5 - centres[:, None]) / scale  # [28, 32]
    weights = np.maximum(0, 1 - distance)
    weights /= weights.sum(1, keepdims=True)
    expected = torch.from_numpy(weights @ luma @ weights.T).float()[:, None]
    assert_close(resize(to_grey(x), 28), expected)
    assert_close(to_grey(resize(x, 28)), expected)
    assert_close(to_grey(x), torch.from_numpy(luma).float()[:, None])


def test_dataset_info_follows_the_options():
    assert dataset_info(Cifar10("signed", train=10)) == DATASET_INFO["cifar10"]
    assert dataset_info(Cifar10(grey=True)) == DATASET_INFO["cifar10"]._replace(shape=(1, 32, 32))
    assert dataset_info(Cifar10(side=5)) == DATASET_INFO["cifar10"]._replace(shape=(3, 5, 5))
    assert dataset_info(Mnist()) == DATASET_INFO["mnist"]
    assert dataset_info(Npz("own.npz")) is None


@pytest.mark.slow
def test_the_real_mnist():
    mnist = real(Mnist, "mnist")
    assert mnist.train_x.shape == (60_000, 1, 28, 28)
    assert mnist.train_x.stride() == (784, 1, 28, 1)
    assert mnist.train_y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert mnist.test_y[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(mnist.train_y).tolist() == counts
    assert abs(mnist.train_x.mean()) < 1e-3  # the constants are the mean and deviation of MNIST
    assert abs(mnist.train_x.std() - 1) < 1e-3


@pytest.mark.slow
def test_the_real_fashion_mnist():
    fashion = real(FashionMnist, "fashion-mnist")
    assert torch.bincount(fashion.train_y).tolist() == [6000] * 10
    assert fashion.classes[int(fashion.train_y[0])] == "Ankle boot"
    assert_close(fashion.train_x.mean() * 0.3081 + 0.1307, torch.tensor(0.2860), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_real_cifar10():
    cifar = real(Cifar10, "cifar10")
    assert cifar.train_x.shape == (50_000, 3, 32, 32)
    assert torch.bincount(cifar.test_y).tolist() == [1000] * 10
    assert cifar.classes[int(cifar.train_y[0])] == "frog"
    mean = torch.tensor([0.4914, 0.4822, 0.4465])  # the known channel means
    assert_close(cifar.train_x.mean((0, 2, 3)), mean, atol=1e-4, rtol=0)


# --- data of one's own ----------------------------------------------------------------------------


def test_every_family_has_a_spec_that_round_trips():
    for spec in [
        *["digits", "mnist", "fashion-mnist", "cifar10", "cifar10:normalise=signed"],
        *["mnist:train=2000", "cifar10:normalise=signed,train=10"],
        *["cifar10:grey=True,side=28", "femnist:writers=3"],
        *["imagenette", "imagenette:path=photos", "flickr-mammals:path=photos"],
        *["cifar100", "cifar100:normalise=standard,train=10,path=files", "caltech101:side=224"],
        *["oxford-pets:path=photos,side=224", "stanford-cars:path=photos"],
        *["npz:path=a.npz", "idx:path=files", "folder:path=pictures,size=64,grey=True"],
    ]:
        assert text(parse(spec, "data set", DATASETS), "data set", DATASETS) == spec
    with pytest.raises(InputError, match="requires path"):
        parse("npz", "data set", DATASETS)
    with pytest.raises(InputError, match="size must be at least 1 pixel, got 0"):
        parse("folder:path=x,size=0", "data set", DATASETS)


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((5, 7), "auto", (7,)),
        ((5, 6, 7), "auto", (1, 6, 7)),
        ((5, 3, 6, 7), "auto", (3, 6, 7)),
        ((5, 6, 7, 3), "auto", (3, 6, 7)),
        ((5, 6, 7, 1), "auto", (1, 6, 7)),
        ((5, 3, 3, 3), "hwc", (3, 3, 3)),
        ((5, 10, 6, 7), "chw", (10, 6, 7)),
        ((5, 6, 7, 10), "hwc", (10, 6, 7)),
    ],
)
def test_npz_images_in_every_layout(tmp_path, shape, layout, expected):
    x = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    path = save(tmp_path / "own.npz", x_train=x, y_train=[0, 1, 2, 0, 1], x_test=x, y_test=[0] * 5)
    dataset = Npz(path, layout).load(tmp_path)
    assert dataset.shape == expected
    assert dataset.name == "own"
    channels_last = (
        len(shape) == 4 and (layout == "hwc" or shape[1] not in (1, 3, 4)) and layout != "chw"
    )
    reference = np.moveaxis(x, 3, 1) if channels_last else x
    values = torch.from_numpy(reference / 255.0).float().reshape(5, *expected)
    assert_close(dataset.train_x, values, check_stride=False)


def test_npz_without_a_test_part_holds_out_a_fifth(tmp_path):
    x = np.linspace(-3, 3, 20).reshape(10, 2)
    dataset = Npz(save(tmp_path / "own.npz", x=x, y=np.arange(10) % 2)).load(tmp_path)
    assert (len(dataset.train_x), len(dataset.test_x)) == (8, 2)
    assert dataset.test_y.sort().values.tolist() == [0, 1]
    both = torch.cat([dataset.train_x, dataset.test_x]).sort(0).values
    assert_close(both, torch.from_numpy(x).float())  # numbers that are not bytes are left alone


def test_npz_groups(tmp_path):
    x, y = np.arange(10.0)[:, None], np.arange(10) % 2
    whole = Npz(save(tmp_path / "a.npz", x=x, y=y, groups=np.array(["b", "a"] * 5))).load(tmp_path)
    assert whole.groups.tolist() == [1 - int(value) % 2 for value in whole.train_x[:, 0].tolist()]
    parts = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    split = Npz(save(tmp_path / "b.npz", **parts, groups_train=[3] * 4 + [5] * 6)).load(tmp_path)
    assert split.groups.tolist() == [0] * 4 + [1] * 6
    assert Npz(save(tmp_path / "c.npz", **parts)).load(tmp_path).groups is None
    with pytest.raises(DataError, match=r"d: training set: groups must be .* each of 10 example"):
        Npz(save(tmp_path / "d.npz", x=x, y=y, groups=[1, 2])).load(tmp_path)


def test_npz_errors_name_the_file(tmp_path):
    y = [0, 1]
    cases = {
        "has no channels": (
            {"x": np.zeros((2, 5, 6, 7)), "y": y},
            "own: training set: no axis of shape",
        ),
        "other names": ({"a": y, "b": y}, "own.npz holds a, b; it needs x and y, or x_train"),
        "objects": (
            {"x": np.array([{}, {}]), "y": y},
            "own.npz: x holds Python objects, which are not loaded",
        ),
        "labels": ({"x": np.zeros((2, 3)), "y": [0.5, 1.0]}, "own: training set: labels must be"),
        "length": ({"x": np.zeros((2, 3)), "y": [0]}, "own: 2 examples and 1 labels"),
    }
    for arrays, message in cases.values():
        with pytest.raises(DataError, match=message) as error:
            Npz(save(tmp_path / "own.npz", **arrays)).load(tmp_path)
        one_line(error)
    with pytest.raises(DataError, match=r"none.npz does not exist"):
        Npz(str(tmp_path / "none.npz")).load(tmp_path)
    for content in (b"", b"PK\x03\x04 not a zip", b"text"):
        (tmp_path / "own.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"own.npz cannot be read as a .npz file") as error:
            Npz(str(tmp_path / "own.npz")).load(tmp_path)
        assert "pickle" not in one_line(error)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="holds one array without a name"):
        Npz(str(tmp_path / "one.npy")).load(tmp_path)
    with pytest.raises(
        InputError, match="layout must be one of auto, chw, hwc, hw, sequence; got 'nhwc'"
    ):
        Npz("x.npz", "nhwc")


IMAGES = np.arange(60).reshape(15, 2, 2)
LABELS = np.arange(15) % 3


def idx_folder(folder, **changes):
    """A training set of 15 images and a test set of 3; `changes` replace files, None drops one."""
    files = {
        "train_images": ("train-images-idx3-ubyte", idx(IMAGES)),
        "train_labels": ("train-labels-idx1-ubyte", idx(LABELS)),
        "test_images": ("t10k-images-idx3-ubyte", idx(IMAGES[:3])),
        "test_labels": ("t10k-labels-idx1-ubyte", idx(LABELS[:3])),
    }
    folder.mkdir(exist_ok=True)
    for key, (name, content) in files.items():
        content = changes.get(key, content)
        if content is not None:
            (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_idx_files_by_any_of_their_names(tmp_path, packed, dotted):
    for path in list(idx_folder(tmp_path / "own").iterdir()):
        name = path.name.replace("-idx", ".idx") if dotted else path.name
        content = path.read_bytes()
        path.unlink()
        path.with_name(f"{name}.gz" if packed else name).write_bytes(
            gzip.compress(content) if packed else content
        )
    dataset = Idx(str(tmp_path / "own")).load(tmp_path)
    assert (dataset.name, dataset.shape, dataset.classes) == ("own", (1, 2, 2), ("0", "1", "2"))
    assert_close(dataset.train_x * 255, torch.from_numpy(IMAGES[:, None]).float())
    assert dataset.train_y.tolist() == LABELS.tolist()
    assert_close(dataset.test_x, dataset.train_x[:3])
    assert dataset.test_y.tolist() == [0, 1, 2]


def test_idx_without_a_test_part_holds_out_a_fifth(tmp_path):
    dataset = Idx(str(idx_folder(tmp_path, test_images=None, test_labels=None))).load(tmp_path)
    assert (len(dataset.train_x), len(dataset.test_x)) == (12, 3)
    assert dataset.test_y.sort().values.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": None}, "has no file train-images-idx3-ubyte or .*ubyte.gz; add it"),
        ({"test_labels": None}, "has no file t10k-labels-idx1-ubyte or "),
        ({"test_images": b"GIF89a"}, "t10k-images-idx3-ubyte: not an IDX file of unsigned bytes"),
        ({"train_labels": idx(LABELS)[:-1]}, "train-labels-idx1-ubyte: 14 bytes .* shape .15,"),
        ({"train_labels": idx(LABELS[:9])}, "training set: 15 examples but 9 labels; give one"),
        ({"test_images": idx(np.zeros((3, 2, 4)))}, r"shape \(1, 2, 2\) but test .* \(1, 2, 4\)"),
        ({"train_labels": idx(IMAGES)}, r"one list of whole numbers, got uint8 of shape \(15, 2"),
    ],
)
def test_idx_errors_name_the_file(tmp_path, changes, message):
    folder = idx_folder(tmp_path / "own", **changes)
    with pytest.raises(DataError, match=message) as error:
        Idx(str(folder)).load(tmp_path)
    one_line(error)
    assert "own" in str(error.value)


def test_idx_files_that_cannot_be_unpacked(tmp_path):
    whole = gzip.compress(idx(IMAGES))
    for wrong in (b"plain", whole[:-9], whole[:12] + b"\xff" * 9 + whole[21:]):
        folder = idx_folder(tmp_path / "own", train_images=None)
        (folder / "train-images-idx3-ubyte.gz").write_bytes(wrong)
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz cannot be read") as error:
            Idx(str(folder)).load(tmp_path)
        one_line(error)
    with pytest.raises(DataError, match="none is not a folder; give the path of a folder of IDX"):
        Idx(str(tmp_path / "none")).load(tmp_path)


def picture(path, colour, size=(8, 8), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_a_folder_with_train_and_test(tmp_path):
    picture(tmp_path / "pets/train/cat/1.png", (255, 0, 51))
    picture(tmp_path / "pets/train/cat/2.JPEG", (0, 0, 0))
    picture(tmp_path / "pets/train/dog/1.png", (0, 255, 0), size=(20, 10))
    picture(tmp_path / "pets/test/dog/9.png", (0, 0, 255))
    (tmp_path / "pets/train/dog/notes.txt").write_text("not a picture")
    (tmp_path / "pets/train/.hidden").mkdir()
    dataset = Folder(str(tmp_path / "pets"), size=4).load(tmp_path)
    assert dataset.shape == (3, 4, 4)
    assert (dataset.name, dataset.classes) == ("pets", ("cat", "dog"))
    assert dataset.train_y.tolist() == [0, 0, 1]
    assert dataset.test_y.tolist() == [1]
    assert_close(dataset.train_x[:, :, 2, 2], torch.tensor([[1, 0, 0.2], [0, 0, 0], [0, 1, 0]]))
    assert dataset.train_x.stride() == (48, 1, 12, 3)


def test_a_folder_of_classes_only_holds_out_a_fifth(tmp_path):
    for label, name in enumerate(["bus", "train"]):  # a class may be called train
        for number in range(10):
            picture(tmp_path / f"{name}/{number}.png", 25 * label + number, mode="L")
    dataset = Folder(str(tmp_path), size=2, grey=True).load(tmp_path)
    assert dataset.shape == (1, 2, 2)
    assert dataset.classes == ("bus", "train")
    assert torch.bincount(dataset.test_y).tolist() == [2, 2]
    values = (torch.cat([dataset.train_x, dataset.test_x])[:, 0, 0, 0] * 255).round()
    assert values.sort().values.tolist() == [*range(10), *range(25, 35)]


def test_wide_pictures_are_cropped_in_the_centre(tmp_path):
    pixels = np.zeros((2, 6, 3), dtype=np.uint8)
    pixels[:, 2:4] = 255
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / "1.png")
    dataset = Folder(str(tmp_path), size=2).load(tmp_path)
    assert (dataset.train_x == 1).all()


def test_sixteen_bit_pictures_are_scaled_not_clipped(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((2, 2), 0x8000, dtype=np.uint16)).save(tmp_path / name / "1.png")
    dataset = Folder(str(tmp_path), size=2, grey=True).load(tmp_path)
    assert_close(dataset.train_x[0, 0, 0, 0], torch.tensor(0x80 / 255))


def test_folder_errors_name_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="none is not a folder"):
        Folder(str(tmp_path / "none")).load(tmp_path)
    with pytest.raises(DataError, match="holds no images"):
        Folder(str(tmp_path)).load(tmp_path)
    picture(tmp_path / "train/cat/1.png", (1, 2, 3))
    with pytest.raises(DataError, match="has a train folder but no test folder"):
        Folder(str(tmp_path)).load(tmp_path)
    picture(tmp_path / "test/dog/1.png", (1, 2, 3))
    with pytest.raises(DataError, match="test/dog is a class without training images"):
        Folder(str(tmp_path)).load(tmp_path)
    picture(tmp_path / "train/dog/1.png", (1, 2, 3))
    whole = (tmp_path / "train/dog/1.png").read_bytes()
    for broken in (b"nonsense", whole[: len(whole) // 2], b""):
        (tmp_path / "train/dog/2.png").write_bytes(broken)
        with pytest.raises(DataError, match=r"train/dog/2.png cannot be read as an image") as error:
            Folder(str(tmp_path)).load(tmp_path)
        one_line(error)


def test_fewer_training_examples_keep_the_proportions_of_the_classes():
    x = torch.arange(30.0).reshape(30, 1)
    y = torch.tensor([0] * 20 + [1] * 10)
    whole = in_memory(x, y, x[:3], y[:3])
    part = training_subset(6, whole)
    assert torch.bincount(part.train_y).tolist() == [4, 2]
    assert torch.equal(y[part.train_x.flatten().long()], part.train_y)
    assert len(part.train_x.unique()) == 6
    assert torch.equal(part.test_x, whole.test_x)
    assert torch.equal(training_subset(6, whole).train_x, part.train_x)
    assert training_subset(None, whole) is whole


def test_more_training_examples_than_there_are_is_an_error():
    whole = in_memory(torch.zeros(4, 1), torch.tensor([0, 1, 0, 1]), torch.zeros(1, 1), [0])
    with pytest.raises(InputError, match=r"train=5 is more than the 4 training examples"):
        training_subset(5, whole)
    with pytest.raises(InputError, match="train must be at least 1 example, got 0"):
        Mnist(train=0)
