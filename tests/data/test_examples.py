"""Data from PyTorch data sets and from Hugging Face folders."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import peerage as pg
from peerage.data.hub import HuggingFace
from peerage.experiment.identity import run_key

SMALL: dict[str, Any] = {"nodes": 3, "rounds": 1, "topology": "ring", "engine": {"name": "serial"}}


class Pictures(Dataset):
    """PIL images, as data sets of torchvision without a transform have them."""

    classes = ("black", "white")

    def __init__(self, count: int = 20, mode: str = "RGB") -> None:
        self.count, self.mode = count, mode

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels = np.full((4, 6, 3), 255 * (index % 2), dtype=np.uint8)
        return Image.fromarray(pixels).convert(self.mode), index % 2


def rows(count: int = 30, shift: float = 0.0) -> TensorDataset:
    x = torch.arange(count * 4, dtype=torch.float32).reshape(count, 4) / count + shift
    return TensorDataset(x, torch.arange(count) % 3)


def test_a_data_set_is_read_as_it_is():
    train, test = rows(), rows(6)
    data = pg.from_dataset(train, test=test, name="mine")
    assert torch.equal(data.train_x, train.tensors[0])
    assert torch.equal(data.train_y, train.tensors[1])
    assert torch.equal(data.test_x, test.tensors[0])
    assert data.name == "mine"


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("P", 3)])
def test_pictures_become_channels_first_in_the_unit_interval(mode, channels):
    data = pg.from_dataset(Pictures(mode=mode))
    assert data.shape == (channels, 4, 6)
    assert data.classes == ("black", "white")
    assert data.train_x[data.train_y == 1].eq(1).all()
    assert data.train_x[data.train_y == 0].eq(0).all()


def test_the_run_key_depends_on_the_content(tmp_path):
    one, same, other = (
        pg.Experiment(dataset=pg.from_dataset(rows(shift=shift)), **SMALL) for shift in (0, 0, 1)
    )
    assert run_key(one) == run_key(same)
    assert run_key(one) != run_key(other)
    memory = pg.in_memory(*rows().tensors)
    assert run_key(pg.Experiment(dataset=memory, **SMALL)) == run_key(one)
    assert "sha256" not in pg.Experiment(dataset=memory, **SMALL).table()["dataset"]  # as before

    def interrupt(row: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(pg.PeerageError, match="interrupted"):
        pg.run(one, out=tmp_path / "run", watch=interrupt)
    with pytest.raises(pg.PeerageError, match="began with dataset"):
        pg.resume(tmp_path / "run", experiment=other)
    assert pg.resume(tmp_path / "run", experiment=same).digest == pg.run(one).digest


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


class Broken(Pictures):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise OSError("no such picture")
        return super().__getitem__(index)


MIXED = [(torch.zeros(3), 0), (torch.zeros(4), 1)]
WRONG = [
    (Endless(), {}, "Endless has no length or no items by number"),
    (Broken(), {}, "item 3 cannot be read: no such picture"),
    (MIXED, {}, r"item 1 has shape \(4,\), but item 0 has \(3,\)"),
    ([torch.zeros(3)], {}, r"item 0 is Tensor, not \(example, label\)"),
    ([], {}, "no examples"),
    (rows(), {"limit": 1e-7}, "take 4.8e-07 GB in memory, more than 1e-07 GB"),
    ([(torch.zeros(3), 0.5)] * 4, {}, "labels must be one list of whole numbers"),
]


@pytest.mark.parametrize(("source", "options", "message"), WRONG)
def test_what_cannot_be_read_is_one_line(source, options, message):
    with pytest.raises(pg.PeerageError, match=message) as error:
        pg.from_dataset(source, **options)
    assert "\n" not in str(error.value)


# Hugging Face


def save(folder: Path, features: bool = True, **splits: int) -> Path:
    """A folder of `save_to_disk` with black and white pictures."""
    datasets = pytest.importorskip("datasets")
    kinds = {
        "picture": datasets.Image(),
        "colour": datasets.ClassLabel(names=["black", "white"]),
        "row": datasets.Sequence(datasets.Value("float32")),
        "word": datasets.Value("string"),
    }

    def columns(count: int) -> dict[str, list[Any]]:
        source = Pictures(count)
        return {
            "picture": [source[index][0] for index in range(count)],
            "colour": [index % 2 for index in range(count)],
            "row": [[index % 2, 1.0] for index in range(count)],
            "word": [("night", "day")[index % 2] for index in range(count)],
        }

    made = {
        name: datasets.Dataset.from_dict(columns(count), features=datasets.Features(kinds))
        for name, count in splits.items()
    }
    if not features:
        made = {name: one.remove_columns(["picture", "colour"]) for name, one in made.items()}
    datasets.DatasetDict(made).save_to_disk(folder)
    return folder


@pytest.mark.slow
def test_columns_and_splits_are_found_by_their_features(tmp_path):
    folder = save(tmp_path / "saved", train=20, test=8)
    data = pg.Experiment(dataset=f"hf:path={folder}").dataset.load(tmp_path)
    assert (data.shape, data.classes) == ((3, 4, 6), ("black", "white"))
    assert (len(data.train_y), len(data.test_y)) == (20, 8)
    assert data.train_x[data.train_y == 1].eq(1).all()
    scaled = HuggingFace(str(folder), size=2, grey=True).load(tmp_path)
    assert scaled.shape == (1, 2, 2)
    named = HuggingFace(str(folder), image="row", label="word").load(tmp_path)
    assert (named.shape, named.classes) == ((2,), ("day", "night"))
    assert torch.equal(named.train_x[:, 0].long(), 1 - named.train_y)
    result = pg.run(pg.Experiment(dataset=f"hf:path={folder}", model="logistic", **SMALL))
    assert result.accuracy > 0.5


@pytest.mark.slow
def test_without_a_test_split_a_fifth_is_held_out(tmp_path):
    data = HuggingFace(str(save(tmp_path / "saved", train=20))).load(tmp_path)
    assert (len(data.train_y), len(data.test_y)) == (16, 4)


@pytest.mark.slow
def test_what_a_folder_lacks_is_one_line(tmp_path):
    plain = str(save(tmp_path / "plain", features=False, train=4))
    wrong = {
        HuggingFace(plain): "no column of type Image; set image=COLUMN, one of row",
        HuggingFace(plain, image="pixels"): "no column 'pixels'",
        HuggingFace(str(save(tmp_path / "other", test=4))): "has the splits test, but no train",
        HuggingFace(str(tmp_path)): "give a folder that save_to_disk wrote",
        HuggingFace("./nothing"): "nothing is not a folder",
    }
    for spec, message in wrong.items():
        with pytest.raises(pg.PeerageError, match=message) as error:
            spec.load(tmp_path)
        assert "\n" not in str(error.value)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(pg.PeerageError, match=r"pip install 'peerage\[hub\]'"):
        HuggingFace("mnist").load(tmp_path)
