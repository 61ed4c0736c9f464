"""Imagenette and Flickr-Mammals in small: files in the published layout, and bad ones."""

import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.command_line import error_line, peerage

from peerage.data import Dataset, fetch, photos, status
from peerage.data.datasets import DATASET_INFO, FlickrMammals, Imagenette
from peerage.data.photos import IMAGENETTE_CLASSES, square
from peerage.errors import DataError
from peerage.papers import runner
from peerage.papers.p3 import settings
from peerage.papers.study import Plan
from peerage.records.rows import RunRecord

WNIDS = list(IMAGENETTE_CLASSES)
SPECIES = sorted(f"species {number}" for number in range(41))  # 10 comes before 2
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(path: Path, seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> None:
    """A file of random pixels; as PNG, the pixels that are read are those that were written."""
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(path)


def imagenette(root: Path, train: int = 2, test: int = 1) -> Path:
    """Images in the layout of imagenette2-160, of the size at which nothing is resized."""
    for part, count in (("train", train), ("val", test)):
        for label, wnid in enumerate(WNIDS):
            for number in range(count):
                picture(root / part / wnid / f"ILSVRC2012_{number}.PNG", 100 * label + number)
    return root


def mammals(root: Path, *parts: str, count: int = 5, inside: str = "") -> Path:
    for part in parts:
        for label, name in enumerate(SPECIES):
            for number in range(count):
                picture(root / part / name / inside / f"{number}.png", 100 * label + number)
    return root


def load(cls: type[Imagenette] | type[FlickrMammals], root: Path) -> Dataset:
    return cls(path=str(root)).load(root.parent / "cache")


def pixels(*seeds: int) -> torch.Tensor:
    arrays = [np.random.default_rng(s).integers(0, 256, (64, 64, 3), dtype=np.uint8) for s in seeds]
    return torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)


# What comes out


def test_imagenette_is_normalised_with_the_numbers_of_imagenet(tmp_path):
    dataset = load(Imagenette, imagenette(tmp_path / "photos"))
    assert (dataset.name, dataset.shape) == ("imagenette", (3, 64, 64))
    assert dataset.classes[0] == "tench"
    assert dataset.classes[-1] == "parachute"
    assert dataset.train_y.tolist() == [label for label in range(10) for _ in range(2)]
    assert dataset.test_y.tolist() == list(range(10))
    v = pixels(*(100 * label + number for label in range(10) for number in range(2))) / 255
    mean, deviation = (torch.tensor(numbers).view(3, 1, 1) for numbers in (MEAN, DEVIATION))
    torch.testing.assert_close(dataset.train_x, (v - mean) / deviation)
    assert dataset.train_x.is_contiguous(memory_format=torch.channels_last)
    # Shifts get the pixels of the file, and an image without a shift keeps its bits.
    assert torch.equal(dataset.scaling.undo(dataset.train_x), v)
    assert torch.equal(dataset.scaling.apply(v), dataset.train_x)
    shape, classes = DATASET_INFO["imagenette"][:2]
    assert (shape, classes) == (dataset.shape, len(dataset.classes))


@pytest.mark.parametrize("parts", [("train", "test"), ("train2", "test2")])
def test_mammals_with_a_split_of_their_own(tmp_path, parts):
    """The second names are those of P3's script, which links the folders inside a class."""
    root = tmp_path / "photos"
    mammals(root / "elsewhere", "", count=1, inside="Africa")
    mammals(root, parts[1], count=2)
    for name in SPECIES:
        (root / parts[0] / name).mkdir(parents=True)
        os.symlink(root / "elsewhere" / name / "Africa", root / parts[0] / name / "Africa")
    dataset = load(FlickrMammals, root)
    assert dataset.classes == tuple(SPECIES)
    assert dataset.train_y.tolist() == list(range(41))
    assert dataset.test_y.tolist() == [label for label in range(41) for _ in range(2)]
    expected = (pixels(*(100 * label for label in range(41))) / 255 - 0.5) / 0.5
    assert torch.equal(dataset.train_x, expected)
    assert DATASET_INFO["flickr-mammals"][:2] == (dataset.shape, 41)


@pytest.mark.parametrize("where", ["geo_animal/images", "images", "."])
def test_of_unsplit_mammals_a_fixed_fifth_of_every_class_is_held_out(tmp_path, where):
    root = mammals(tmp_path / "photos", where, count=3, inside="Africa")
    mammals(root, where, count=2)  # and some directly in the folder of the class
    dataset = load(FlickrMammals, root)
    assert torch.bincount(dataset.train_y).tolist() == [4] * 41
    assert torch.bincount(dataset.test_y).tolist() == [1] * 41
    again = FlickrMammals(path=str(root)).load(tmp_path / "another cache")
    assert torch.equal(again.test_x, dataset.test_x)
    sizes = DATASET_INFO["flickr-mammals"]
    assert sizes.test == round((sizes.train + sizes.test) / 5)


# How a file is prepared


def test_the_shorter_side_is_resized_and_the_centre_cropped():
    """Three vertical stripes; only the middle one, which is a square, stays."""
    image = Image.new("RGB", (600, 200))
    for number, colour in enumerate(("red", "lime", "blue")):
        image.paste(colour, (200 * number, 0, 200 * (number + 1), 200))
    inner = np.asarray(square(image))[:, 2:-2]  # resizing mixes at the edges
    assert inner.shape == (64, 60, 3)
    assert (inner == (0, 255, 0)).all()
    assert (
        np.asarray(square(image.transpose(Image.Transpose.ROTATE_90)))[2:-2] == (0, 255, 0)
    ).all()


@pytest.mark.parametrize("size", [(64, 64), (64, 101), (160, 213), (213, 160), (3, 2), (161, 160)])
def test_the_sizes_are_those_of_torchvision(size):
    """Resize(64) makes the longer side int(64 * longer / shorter); CenterCrop(64) rounds."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    scaled = tuple(64 if side == min(size) else int(64 * side / min(size)) for side in size)
    left, top = (int(round((side - 64) / 2.0)) for side in scaled)  # noqa: RUF046
    resized = np.asarray(image.resize(scaled, Image.Resampling.BILINEAR))
    expected = resized[top : top + 64, left : left + 64]
    assert np.array_equal(np.asarray(square(image)), expected)


def replaced(tmp_path: Path, write: Callable[[Path], None]) -> torch.Tensor:
    """The first training image as values in [0, 1], after another file has replaced it."""
    root = imagenette(tmp_path / "photos", train=1)
    first = root / "train" / WNIDS[0]
    shutil.rmtree(first)
    first.mkdir()
    write(first)
    dataset = load(Imagenette, root)
    assert len(dataset.train_y) == 10
    return dataset.scaling.undo(dataset.train_x)[0]


def test_grey_files_get_three_equal_channels(tmp_path):
    found = replaced(tmp_path, lambda folder: picture(folder / "a.png", 5, mode="L"))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert found.unique().numel() > 100


def test_files_for_printing_become_red_green_and_blue(tmp_path):
    cyan = Image.new("CMYK", (64, 64), (255, 0, 0, 0))
    found = replaced(tmp_path, lambda folder: cyan.save(folder / "a.JPEG"))
    torch.testing.assert_close(found.mean((1, 2)), torch.tensor([0.0, 1.0, 1.0]), atol=0.02, rtol=0)


def test_the_orientation_in_exif_is_ignored(tmp_path):
    image = Image.new("RGB", (64, 64), "black")
    image.paste("white", (0, 0, 64, 32))  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    found = replaced(tmp_path, lambda folder: image.save(folder / "a.png", exif=exif))
    assert found[:, :30].min() == 1
    assert found[:, 34:].max() == 0


def test_other_files_and_hidden_ones_are_no_images(tmp_path):
    def write(folder: Path) -> None:
        picture(folder / "a.jpg", 1)
        (folder / "notes.txt").write_text("no image")
        (folder / ".a.jpg").write_text("no image")

    replaced(tmp_path, write)


# The cache


@pytest.fixture
def decoded(monkeypatch) -> list[Path]:
    """The files that were decoded."""
    found: list[Path] = []
    real = photos.decode

    def spy(path: Path, prepare: Any) -> Any:
        found.append(path)
        return real(path, prepare)

    monkeypatch.setattr(photos, "decode", spy)
    return found


def test_images_are_decoded_once(tmp_path, decoded):
    root, cache = imagenette(tmp_path / "photos"), tmp_path / "cache"
    first = load(Imagenette, root)
    assert len(decoded) == 30
    again = load(Imagenette, root)
    assert len(decoded) == 30
    assert torch.equal(again.train_x, first.train_x)
    assert torch.equal(again.test_x, first.test_x)
    [file] = (cache / "decoded").iterdir()
    assert file.name.startswith("imagenette-")
    assert file.stat().st_size == 30 * 64 * 64 * 3 + 32
    picture(root / "val" / WNIDS[0] / "ILSVRC2012_0.PNG", 77)  # another image with the same name
    changed = load(Imagenette, root)
    assert len(decoded) == 60
    assert not torch.equal(changed.test_x[0], first.test_x[0])
    assert torch.equal(changed.test_x[1:], first.test_x[1:])


@pytest.mark.parametrize(
    "spoil", [lambda content: content[:-1], lambda content: b"x" + content[1:]]
)
def test_a_damaged_file_of_the_cache_is_replaced(tmp_path, decoded, spoil):
    root = imagenette(tmp_path / "photos")
    first = load(Imagenette, root)
    [file] = (tmp_path / "cache" / "decoded").iterdir()
    content = file.read_bytes()
    file.write_bytes(spoil(content))
    assert torch.equal(load(Imagenette, root).train_x, first.train_x)
    assert len(decoded) == 60
    assert file.read_bytes() == content


def test_without_a_cache_the_data_is_still_read(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(load(Imagenette, imagenette(tmp_path / "photos")).train_y) == 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("many", "shown"), [(30, True), (31, False)])
def test_decoding_many_images_shows_a_bar(tmp_path, monkeypatch, many, shown):
    root = imagenette(tmp_path / "photos")
    monkeypatch.setattr(photos, "MANY", many)
    monkeypatch.setattr(sys, "stderr", Terminal())
    load(Imagenette, root)
    assert ("decoding imagenette, once" in sys.stderr.getvalue()) == shown


# Where the files lie, and bad ones


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Imagenette,
            "does not hold train and val, with one folder per class; download imagenette2-160.tgz "
            "from https://github.com/fastai/imagenette and unpack it there, or give its folder "
            "with --dataset imagenette:path=FOLDER",
        ),
        (
            FlickrMammals,
            "does not hold train and test, or train2 and test2, or images, with one folder per "
            "class; download geo_animal.tar.gz from Zenodo, https://doi.org/10.5281/zenodo.3676081 "
            "and unpack it there, or give its folder with --dataset flickr-mammals:path=FOLDER",
        ),
    ],
)
def test_by_default_they_are_sought_in_the_cache(tmp_path, cls, message):
    name = "imagenette" if cls is Imagenette else "flickr-mammals"
    assert status(name, tmp_path) == "missing"
    for act in (lambda: cls().load(tmp_path), lambda: fetch(name, tmp_path)):
        with pytest.raises(DataError) as caught:
            act()
        assert str(caught.value) == f"{tmp_path / name} {message}"
    if cls is Imagenette:
        imagenette(tmp_path / name / "imagenette2-160")
    else:
        mammals(tmp_path / name / "geo_animal", "images")
    assert status(name, tmp_path) == "ready"
    assert fetch(name, tmp_path) == tmp_path / name
    assert len(cls().load(tmp_path).classes) == (10 if cls is Imagenette else 41)


def spoil_image(content: bytes) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / "train" / WNIDS[3] / "ILSVRC2012_1.PNG").write_bytes(content)

    return spoil


def truncate(root: Path) -> None:
    path = root / "train" / WNIDS[3] / "ILSVRC2012_1.PNG"
    path.write_bytes(path.read_bytes()[:3000])


def empty(root: Path) -> None:
    for path in (root / "val" / WNIDS[2]).iterdir():
        path.unlink()


BAD = {
    "missing class": (
        lambda root: shutil.rmtree(root / "val" / WNIDS[4]),
        "val has no folder for class n03028079; unpack imagenette2-160.tgz again",
    ),
    "another class": (
        lambda root: (root / "train" / "n99").mkdir(),
        "train/n99 is no class of imagenette; remove it, or unpack imagenette2-160.tgz again",
    ),
    "empty class": (empty, "val/n02979186 holds no images; unpack imagenette2-160.tgz again"),
    "no image": (
        spoil_image(b"no image"),
        "train/n03000684/ILSVRC2012_1.PNG cannot be read as an image",
    ),
    "truncated": (truncate, "train/n03000684/ILSVRC2012_1.PNG cannot be read as an image"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_one_line_with_exit_code_2(tmp_path, monkeypatch, name):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "cache"))
    root = imagenette(tmp_path / "photos")
    spoil, message = BAD[name]
    spoil(root)
    line = "run --nodes 4 --topology ring --rounds 1 --engine serial --out"
    text = error_line(peerage(line, tmp_path / "run", "--dataset", f"imagenette:path={root}"))
    assert text.startswith(f"{root}/{message}")
    assert not (tmp_path / "cache" / "decoded").exists()


def test_a_wrong_number_of_species(tmp_path):
    root = mammals(tmp_path / "photos", "train", "test", count=1)
    shutil.rmtree(root / "test" / SPECIES[7])
    with pytest.raises(DataError, match=f"test has no folder for class {SPECIES[7]}; unpack geo_"):
        load(FlickrMammals, root)
    shutil.rmtree(root / "train" / SPECIES[7])
    wrong = (
        "train has 40 class folders, but flickr-mammals has 41 classes; unpack geo_animal.tar.gz"
    )
    with pytest.raises(DataError, match=wrong):
        load(FlickrMammals, root)


# The command line, and the studies


def test_the_list_of_data_sets_shows_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    lines = peerage("data list").lines
    assert "imagenette      missing  (peerage data get imagenette)" in lines
    assert "flickr-mammals  missing  (peerage data get flickr-mammals)" in lines
    assert "imagenette2-160.tgz" in error_line(peerage("data get imagenette"))
    assert "geo_animal.tar.gz" in error_line(peerage("data get flickr-mammals"))
    imagenette(tmp_path / "imagenette" / "imagenette2-160")
    assert "imagenette      ready" in peerage("data list").lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [("--model gn-lenet", "gn-lenet"), ("--model resnet8", "resnet8"), ("", "gn-lenet")],
)
def test_a_run_with_clusters(tmp_path, monkeypatch, model, name):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "cache"))
    root = imagenette(tmp_path / "photos")
    outcome = peerage(
        f"run --algorithm facade --clusters 2/2:rotate --nodes 4 --topology ring --partition iid "
        f"--rounds 1 --steps 1 --batch-size 2 --engine serial {model} --out",
        *(tmp_path / "run", "--dataset", f"imagenette:path={root}"),
    )
    assert outcome.code == 0, outcome.err
    record = RunRecord.load(tmp_path / "run")
    assert record.rounds == 1
    assert list(record.group_curves("accuracy")) == [0, 1]
    assert record.experiment["model"]["name"] == name


@pytest.mark.parametrize(
    ("name", "clusters", "model"),
    [("imagenette", "20:4", "gn-lenet"), ("flickr-mammals", "14:2", "resnet8")],
)
def test_studies_name_the_data_that_is_missing(tmp_path, monkeypatch, name, clusters, model):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    jobs = settings.runs(Plan("paper"), name, clusters, settings.FACADE)
    assert {job.experiment.table()["model"]["name"] for job in jobs} == {model}
    assert runner.missing_datasets(jobs) == [name]
    with pytest.raises(DataError, match=f"download it with `peerage data get {name}`"):
        runner.check_data(runner.Outcome(lacking=[name]))
    if name == "imagenette":
        imagenette(tmp_path / name)
    else:
        mammals(tmp_path / name, "images")
    assert runner.missing_datasets(jobs) == []
