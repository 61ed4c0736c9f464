"""So2Sat LCZ42 in small: files in the published format, what is read of them, and bad ones."""

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import error_line, peerage

from peerage import specs
from peerage.data import DATASETS, fetch, status
from peerage.data.datasets import So2Sat
from peerage.data.so2sat import BLOCK, ZONES, moments, runs
from peerage.errors import DataError, InputError

TRAIN, TEST = 51, 34  # three and two images of every zone
SITE = "https://mediatum.ub.tum.de/1613658"


def images(count: int, seed: int) -> np.ndarray:
    """Reflectances, each band with a mean and a spread of its own."""
    rng = np.random.default_rng(seed)
    return rng.normal(0.1, 0.03, (count, 32, 32, 10)) * np.arange(1, 11) + np.arange(10)


def one_hot(numbers: np.ndarray) -> np.ndarray:
    return np.eye(17)[numbers]


def write(path: Path, count: int, **changes: Any) -> Path:
    """A file as it is published: float64 throughout, images with the bands last."""
    layout = changes.pop("layout", {})
    arrays = {
        "sen1": np.zeros((min(count, TRAIN), 32, 32, 8)),  # which is never read
        "sen2": images(count, seed=count) if "sen2" not in changes else None,
        "label": one_hot(np.arange(count) * 5 % 17),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for name, array in {**arrays, **changes}.items():
            if array is not None:
                file.create_dataset(name, data=array, **(layout if name == "sen2" else {}))
    return path


def files(folder: Path) -> Path:
    write(folder / "training.h5", TRAIN)
    write(folder / "testing.h5", TEST)
    return folder


def load(folder: Path, **options: Any) -> Any:
    return So2Sat(path=str(folder), **options).load(Path("nowhere"))


# What comes out


def test_all_examples_in_their_order_and_standardised(tmp_path):
    dataset = load(files(tmp_path))
    assert (dataset.name, dataset.shape, dataset.classes) == ("so2sat", (10, 32, 32), ZONES)
    assert len(ZONES) == len(set(ZONES)) == 17
    assert (ZONES[0], ZONES[9], ZONES[16]) == ("compact high-rise", "heavy industry", "water")
    assert dataset.train_y.tolist() == [number * 5 % 17 for number in range(TRAIN)]
    assert dataset.test_y.tolist() == [number * 5 % 17 for number in range(TEST)]
    train, test = images(TRAIN, seed=TRAIN), images(TEST, seed=TEST)
    mean, deviation = train.mean((0, 1, 2)), train.std((0, 1, 2))
    for found, raw in ((dataset.train_x, train), (dataset.test_x, test)):
        expected = torch.from_numpy((raw - mean) / deviation).permute(0, 3, 1, 2).float()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.is_contiguous(memory_format=torch.channels_last)
    bands = dataset.train_x.double()
    torch.testing.assert_close(bands.mean((0, 2, 3)), torch.zeros(10).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        bands.std((0, 2, 3), correction=0), torch.ones(10).double(), atol=1e-5, rtol=0
    )


def test_a_subset_has_every_class_in_proportion_and_its_own_moments(tmp_path):
    whole, part = load(files(tmp_path)), load(tmp_path, train=34, test=17)
    assert torch.bincount(part.train_y).tolist() == [2] * 17
    assert torch.bincount(part.test_y).tolist() == [1] * 17
    band_means = part.train_x.double().mean((0, 2, 3))
    torch.testing.assert_close(band_means, torch.zeros(10).double(), atol=1e-5, rtol=0)
    # Up to mean and deviation, every image of the part is one of the whole, with its label.
    a, b = whole.train_x, part.train_x
    order = [int((a[:, 0] - image[0]).square().sum((1, 2)).argmin()) for image in b]
    assert order == sorted(set(order))
    assert whole.train_y[order].tolist() == part.train_y.tolist()
    again = load(tmp_path, train=34, test=17)
    assert torch.equal(again.train_x, part.train_x)
    assert torch.equal(again.test_x, part.test_x)


@pytest.mark.parametrize(
    "layout",
    [{"chunks": (7, 32, 32, 10)}, {"chunks": (1, 8, 8, 10), "compression": "gzip"}],
    ids=["chunks", "compressed"],
)
def test_the_storage_layout_of_a_file_does_not_matter(tmp_path, layout):
    plain = load(files(tmp_path / "plain"), train=20, test=9)
    write(tmp_path / "training.h5", TRAIN, layout=layout)
    write(tmp_path / "testing.h5", TEST, layout=layout)
    stored = load(tmp_path, train=20, test=9)
    assert torch.equal(stored.train_x, plain.train_x)
    assert torch.equal(stored.test_x, plain.test_x)
    assert torch.equal(stored.train_y, plain.train_y)


def test_single_precision_and_whole_numbers_are_read_as_well(tmp_path):
    values = np.arange(TRAIN * 10_240).reshape(TRAIN, 32, 32, 10) % 251
    label = one_hot(np.arange(TRAIN) % 17)
    loaded = []
    for number, (pixels, hot) in enumerate([("f4", "f8"), ("u2", "u1"), ("f8", "?")]):
        folder = tmp_path / str(number)
        write(folder / "training.h5", TRAIN, sen2=values.astype(pixels), label=label.astype(hot))
        write(folder / "testing.h5", TEST)
        loaded.append(load(folder))
    for other in loaded[1:]:
        assert torch.equal(other.train_x, loaded[0].train_x)
        assert torch.equal(other.train_y, loaded[0].train_y)


def test_a_constant_band_becomes_zero(tmp_path):
    sen2 = images(TRAIN, seed=1)
    sen2[..., 3] = 0.25
    write(tmp_path / "training.h5", TRAIN, sen2=sen2)
    write(tmp_path / "testing.h5", TEST)
    assert not load(tmp_path).train_x[:, 3].any()


def test_fewer_test_examples_than_asked_for_are_all_taken(tmp_path):
    assert So2Sat().test == 30_000
    assert len(load(files(tmp_path)).test_y) == TEST
    assert len(load(tmp_path, test=TEST - 1).test_y) == TEST - 1


# Reading


@settings(deadline=None, max_examples=100)
@given(st.sets(st.integers(0, 4 * BLOCK), min_size=1), st.integers(1, 40))
def test_runs_hold_all_rows_without_long_gaps_or_long_reads(chosen, gap):
    rows = np.array(sorted(chosen))
    parts = runs(rows, gap)
    assert np.concatenate(parts).tolist() == rows.tolist()
    for part in parts:
        assert part[-1] - part[0] < BLOCK
        assert (np.diff(part) <= gap).all()
    for before, after in pairwise(parts):
        assert after[0] - before[-1] > gap or after[0] // BLOCK > before[-1] // BLOCK


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    count = 2000
    write(tmp_path / "training.h5", count, sen2=np.zeros((count, 32, 32, 10), dtype="u1"))
    write(tmp_path / "testing.h5", TEST)
    read = []
    original = h5py.Dataset.__getitem__

    def noted(self: Any, key: Any, *more: Any) -> Any:
        found = original(self, key, *more)
        if self.name == "/sen2":
            read.append(len(found))
        return found

    monkeypatch.setattr(h5py.Dataset, "__getitem__", noted)
    load(tmp_path, train=17, test=1)
    assert sum(read) <= 17 * 3 + 1


def test_moments_over_several_blocks():
    x = np.random.default_rng(0).normal(1000, 0.5, (2 * BLOCK + 3, 2, 2, 3)).astype(np.float32)
    mean, deviation = moments(x)
    np.testing.assert_allclose(mean, x.astype(float).mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(deviation, x.astype(float).std((0, 1, 2)), rtol=1e-9)


# Where the files lie


def test_files_may_lie_in_the_published_folder_or_without_it(tmp_path, monkeypatch):
    plain = load(files(tmp_path / "plain"))
    files(tmp_path / "published" / "random")
    assert torch.equal(load(tmp_path / "published").train_x, plain.train_x)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert torch.equal(load(Path("~/plain")).train_x, plain.train_x)
    # The split that the name promises comes before other files of that name.
    write(tmp_path / "published" / "training.h5", 17)
    write(tmp_path / "published" / "testing.h5", 17)
    assert len(load(tmp_path / "published").train_y) == TRAIN


def test_by_default_they_are_sought_in_the_cache(tmp_path):
    assert status("so2sat", tmp_path) == "missing"
    with pytest.raises(DataError) as caught:
        So2Sat().load(tmp_path)
    message = str(caught.value)
    assert message == (
        f"{tmp_path / 'so2sat'} does not hold training.h5 and testing.h5; download them from "
        f"mediaTUM, {SITE} (So2Sat LCZ42, version 3, random split, folder random) and put them "
        "there, or give their folder with --dataset so2sat:path=FOLDER"
    )
    with pytest.raises(DataError) as asked:
        fetch("so2sat", tmp_path)
    assert str(asked.value) == message
    files(tmp_path / "so2sat" / "random")
    assert status("so2sat", tmp_path) == "ready"
    assert fetch("so2sat", tmp_path) == tmp_path / "so2sat"
    assert len(So2Sat().load(tmp_path).train_y) == TRAIN


def test_half_of_the_files_is_not_enough(tmp_path):
    write(tmp_path / "training.h5", TRAIN)
    with pytest.raises(DataError, match=r"does not hold training\.h5 and testing\.h5"):
        load(tmp_path)


def test_the_list_of_data_sets_shows_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    assert "so2sat          missing  (peerage data get so2sat)" in peerage("data list").lines
    assert SITE in error_line(peerage("data get so2sat"))
    files(tmp_path / "so2sat")
    assert "so2sat          ready" in peerage("data list").lines


# Bad files


def change(**arrays: Any) -> Callable[[Path], Path]:
    return lambda path: write(path, TRAIN, **arrays)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def group(path: Path) -> None:
    with h5py.File(path, "a") as file:
        del file["sen2"]
        file.create_group("sen2")


def nothing(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["sen2"] = h5py.Empty("f8")
        file["label"] = h5py.Empty("f8")


HOT = one_hot(np.arange(TRAIN) % 17)
TWICE, HALF, NEVER, STRANGE = HOT.copy(), HOT.copy(), HOT.copy(), HOT.copy()
TWICE[7, :2] = 1
HALF[8, :] = 0
HALF[8, :2] = 0.5
NEVER[9] = 0
STRANGE[10, 3] = np.nan
HOLES = images(TRAIN, seed=0)
HOLES[40, 5, 5, 5] = np.nan
HUGE = images(TRAIN, seed=0)
HUGE[41, 5, 5, 5] = 1e300


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_bytes(b"no HDF5"), "cannot be read as HDF5: .*signature"),
        (truncate, "cannot be read as HDF5: .*truncated"),
        (lambda path: path.write_bytes(b""), "cannot be read as HDF5"),
        (change(sen2=None), "has no array 'sen2', only label, sen1"),
        (change(label=None), "has no array 'label', only sen1, sen2"),
        (group, "has no array 'sen2', only label, sen1, sen2"),
        (nothing, r"label must be numbers of shape \(N, 17\), got float64 of shape None"),
        (
            change(sen2=np.zeros((TRAIN, 32, 32, 8))),
            r"sen2 must be numbers of shape \(N, 32, 32, 10\), got float64 of shape "
            r"\(51, 32, 32, 8\)",
        ),
        (change(sen2=np.zeros((TRAIN, 10_240))), r"sen2 must .* of shape \(51, 10240\)"),
        (change(sen2=np.zeros((TRAIN, 32, 32, 10), "S3")), r"sen2 must be numbers.* got \|S3"),
        (change(label=np.arange(TRAIN)), r"label must .* of shape \(N, 17\), .* \(51,\)"),
        (change(label=np.eye(18)[:17]), r"label must .* of shape \(N, 17\), .* \(17, 18\)"),
        (change(label=HOT[:-1]), "has 51 images in sen2 but 50 labels"),
        (change(label=TWICE), "label 7 is not one-hot"),
        (change(label=HALF), "label 8 is not one-hot"),
        (change(label=NEVER), "label 9 is not one-hot"),
        (change(label=STRANGE), "label 10 is not one-hot"),
        (change(sen2=np.zeros((0, 32, 32, 10)), label=HOT[:0]), "is empty"),
        (change(sen2=HOLES), "sen2 has values that are not finite in images 0 to 50"),
        (change(sen2=HUGE), "sen2 has values that are not finite in images 0 to 50"),
    ],
)
@pytest.mark.parametrize("name", ["training.h5", "testing.h5"])
def test_bad_files_name_themselves_the_reason_and_the_remedy(tmp_path, spoil, reason, name):
    spoil(files(tmp_path) / name)
    with pytest.raises(DataError, match=reason) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert message.startswith(str(tmp_path / name))
    assert message.endswith("; download So2Sat LCZ42, version 3, random split again")
    assert "\n" not in message


def test_a_file_that_is_cut_off_in_the_data_is_noticed_on_reading(tmp_path):
    """Compressed chunks that hold something else: opening succeeds, reading does not."""
    layout = {"chunks": (1, 32, 32, 10), "compression": "gzip"}
    path = write(files(tmp_path) / "training.h5", TRAIN, layout=layout)
    with h5py.File(path) as file:
        chunk = file["sen2"].id.get_chunk_info(30)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"x" * chunk.size
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"training\.h5 cannot be read as HDF5: .* again"):
        load(tmp_path)


# Options


def test_options_survive_text_and_are_checked(tmp_path):
    for text in ("so2sat", "so2sat:path=far,train=99,test=7"):
        value = specs.parse(text, "dataset", DATASETS)
        assert specs.text(value, "dataset", DATASETS) == text
        assert specs.from_table(specs.to_table(value, "dataset", DATASETS), "", DATASETS) == value
    for name in ("train", "test"):
        with pytest.raises(InputError, match=f"{name} must be at least 1 example, got 0"):
            So2Sat(**{name: 0})
    with pytest.raises(InputError, match="train=52 is more than the 51 training examples of"):
        load(files(tmp_path), train=52)


def test_without_h5py_the_remedy_comes_before_the_download(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    assert str(caught.value) == "so2sat requires h5py; pip install 'peerage[so2sat]'"


# A run


@pytest.mark.slow
def test_a_run_from_the_command_line(tmp_path):
    folder = files(tmp_path / "data")
    options = "--nodes 2 --rounds 1 --epochs 1 --topology complete --partition iid --model mlp"
    done = peerage(
        f"run {options} --out {tmp_path / 'run'} --dataset so2sat:path={folder},train=34"
    )
    assert done.code == 0, done.err
    written = (tmp_path / "run" / "experiment.toml").read_text()
    assert f'name = "so2sat"\npath = "{folder}"\ntrain = 34\ntest = 30000\n' in written


def test_a_run_on_missing_files_says_where_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    message = error_line(
        peerage("run --dataset so2sat --nodes 2 --rounds 1", "--out", tmp_path / "run")
    )
    assert SITE in message
    assert not (tmp_path / "run").exists()
