"""CIFAR-100, Caltech101, Oxford-IIIT Pets and Stanford Cars in small, and bad files."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat
from support.command_line import error_line, peerage

import peerage as pg
from peerage.data import Dataset, fetch, status
from peerage.data.datasets import (
    DATASET_INFO,
    DATASETS,
    Caltech101,
    Cifar10,
    Cifar100,
    OxfordPets,
    StanfordCars,
    dataset_info,
)
from peerage.errors import DataError, InputError

OBJECTS = sorted(f"object {number}" for number in range(101))  # 10 comes before 2
BREEDS = sorted(f"breed_{number}" for number in range(37))
CARS = [f"Car {number}" for number in range(1, 197)]


def picture(path: Path, colour: int) -> None:
    """A small file of one colour. It is PNG whatever its name, so that the pixels stay exact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        Image.new("RGB", (8, 6), (colour, 0, 255)).save(file, "PNG")


def caltech(root: Path, count: int = 5) -> Path:
    folder = root / "caltech-101" / "101_ObjectCategories"
    for label, name in enumerate([*OBJECTS, "BACKGROUND_Google"]):
        for number in range(count):
            picture(folder / name / f"image_{number:04}.jpg", label)
    return root


def pets(root: Path) -> Path:
    """Two training images and one test image of every breed, in another order than the classes."""
    lines: dict[str, list[str]] = {"trainval": ["# Image CLASS-ID SPECIES BREED ID"], "test": []}
    for label, name in reversed(list(enumerate(BREEDS))):
        for number, part in enumerate(("trainval", "trainval", "test")):
            picture(root / "images" / f"{name}_{number}.jpg", 4 * label + number)
            lines[part].append(f"{name}_{number} {label + 1} 1 1")
    (root / "annotations").mkdir()
    for part, found in lines.items():
        (root / "annotations" / f"{part}.txt").write_text("\n".join(found) + "\n")
    (root / "images" / "Abyssinian_100.mat").write_bytes(b"")  # is in the published archive
    return root


def annotations(labels: list[int]) -> dict[str, Any]:
    """The variable of an annotation file, with the published fields."""
    fields = [*(f"bbox_{side}" for side in ("x1", "y1", "x2", "y2")), "class", "fname"]
    rows = [(1, 1, 5, 5, label, f"{n:05}.jpg") for n, label in enumerate(labels, start=1)]
    return {"annotations": np.array(rows, dtype=[(field, "O") for field in fields])}


def cars(root: Path, train: tuple[int, ...] = (196, 1, 7), test: tuple[int, ...] = (7, 1)) -> Path:
    (root / "devkit").mkdir(parents=True)
    savemat(root / "devkit" / "cars_meta.mat", {"class_names": np.array(CARS, dtype=object)})
    savemat(root / "devkit" / "cars_train_annos.mat", annotations(list(train)))
    savemat(root / "cars_test_annos_withlabels.mat", annotations(list(test)))
    for part, labels in (("cars_train", train), ("cars_test", test)):
        for number, label in enumerate(labels, start=1):
            picture(root / part / f"{number:05}.jpg", label)
    return root


def cifar(root: Path, folder: str = "cifar-100-binary") -> Path:
    """Three training images and one test image; the first label byte is the superclass."""
    files = root / folder
    files.mkdir(parents=True)
    for name, labels in (("train.bin", (3, 99, 0)), ("test.bin", (42,))):
        for label in labels:
            planes = b"".join(bytes([value]) * 1024 for value in (label, 0, 255))
            with (files / name).open("ab") as file:
                file.write(bytes([19, label]) + planes)
    (files / "fine_label_names.txt").write_text("\n".join(f"name_{n}" for n in range(100)) + "\n")
    return root


WRITERS: dict[str, Callable[[Path], Path]] = {
    "cifar100": cifar,
    "caltech101": caltech,
    "oxford-pets": pets,
    "stanford-cars": cars,
}


def load(name: str, root: Path, **options: Any) -> Dataset:
    return DATASETS[name](path=str(root), **options).load(root.parent / "cache")


def colours(x: torch.Tensor, dataset: Dataset) -> list[int]:
    """The red value of every image, which has one colour."""
    pixels = dataset.scaling.undo(x)
    assert torch.equal(pixels.amin((2, 3)), pixels.amax((2, 3)))
    assert not pixels[:, 1].any()
    assert (pixels[:, 2] == 1).all()
    return (pixels[:, 0, 0, 0] * 255).round().int().tolist()


# What comes out


def test_caltech_without_the_background(tmp_path):
    dataset = load("caltech101", caltech(tmp_path / "photos"))
    assert dataset.classes == tuple(OBJECTS)
    assert torch.bincount(dataset.train_y).tolist() == [4] * 101
    assert torch.bincount(dataset.test_y).tolist() == [1] * 101
    assert colours(dataset.train_x, dataset) == dataset.train_y.tolist()
    assert colours(dataset.test_x, dataset) == dataset.test_y.tolist()
    mean, deviation = dataset.scaling.mean, dataset.scaling.deviation
    assert (mean, deviation) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    sizes = DATASET_INFO["caltech101"]
    assert sizes.train + sizes.test == 8677
    assert sizes.test == round(8677 / 5)


@pytest.mark.parametrize("inside", ["caltech-101", "caltech-101/101_ObjectCategories"])
def test_other_folders_of_caltech(tmp_path, inside):
    root = caltech(tmp_path / "photos", count=2)
    assert load("caltech101", root / inside).classes == tuple(OBJECTS)


def test_pets_are_split_by_their_lists(tmp_path):
    dataset = load("oxford-pets", pets(tmp_path / "photos"))
    assert dataset.classes == tuple(BREEDS)
    order = list(reversed(range(37)))
    assert dataset.train_y.tolist() == [label for label in order for _ in range(2)]
    assert dataset.test_y.tolist() == order
    assert colours(dataset.train_x, dataset) == [4 * n + i for n in order for i in (0, 1)]
    assert colours(dataset.test_x, dataset) == [4 * label + 2 for label in order]


def test_cars_are_numbered_from_one_in_their_files(tmp_path):
    dataset = load("stanford-cars", cars(tmp_path / "photos"))
    assert dataset.classes == tuple(CARS)
    assert dataset.train_y.tolist() == [195, 0, 6]
    assert dataset.test_y.tolist() == [6, 0]
    assert colours(dataset.train_x, dataset) == [196, 1, 7]
    assert colours(dataset.test_x, dataset) == [7, 1]


def test_a_single_car_of_a_part(tmp_path):
    """MATLAB files do not distinguish a number from a list of one."""
    dataset = load("stanford-cars", cars(tmp_path / "photos", train=(5,), test=(4,)))
    assert (dataset.train_y.tolist(), dataset.test_y.tolist()) == ([4], [3])


@pytest.mark.parametrize("folder", ["cifar-100-binary", "."])
def test_cifar100_has_the_label_of_the_class(tmp_path, folder):
    root = cifar(tmp_path / "files", folder)
    dataset = load("cifar100", root)
    assert (dataset.name, dataset.shape) == ("cifar100", (3, 32, 32))
    assert dataset.train_y.tolist() == [3, 99, 0]
    assert dataset.test_y.tolist() == [42]
    assert dataset.classes[99] == "name_99"
    assert colours(dataset.train_x, dataset) == [3, 99, 0]
    assert colours(dataset.test_x, dataset) == [42]
    assert load("cifar100", root, side=8, grey=True).shape == (1, 8, 8)
    assert len(load("cifar100", root, train=2).train_y) == 2


def test_standard_normalisation_of_both_cifars(tmp_path):
    root = cifar(tmp_path / "files")
    unit, standard = load("cifar100", root), load("cifar100", root, normalise="standard")
    mean = torch.tensor([0.5071, 0.4865, 0.4409]).view(3, 1, 1)
    deviation = torch.tensor([0.2673, 0.2564, 0.2762]).view(3, 1, 1)
    torch.testing.assert_close(standard.train_x, (unit.train_x - mean) / deviation)
    assert torch.equal(standard.scaling.undo(standard.train_x), unit.train_x)
    assert Cifar10(normalise="standard").standard.mean == (0.4914, 0.4822, 0.4465)
    for cls in (Cifar10, Cifar100):
        with pytest.raises(InputError, match="normalise=standard is for red, green and blue; rem"):
            cls(normalise="standard", grey=True)


@pytest.mark.parametrize("name", ["caltech101", "oxford-pets", "stanford-cars"])
def test_other_sides(tmp_path, name):
    root = WRITERS[name](tmp_path / "photos")
    small = load(name, root, side=5)
    assert small.shape == (3, 5, 5)
    assert load(name, root).shape == (3, 64, 64)
    assert torch.equal(load(name, root, side=5).train_x, small.train_x)  # from the cache
    assert len(list((tmp_path / "cache" / "decoded").iterdir())) == 2
    known = dataset_info(DATASETS[name](side=224))
    assert known is not None
    assert known.shape == (3, 224, 224)
    assert dataset_info(DATASETS[name]()).shape == (3, 64, 64)
    with pytest.raises(InputError, match="side must be at least 1 pixel, got 0"):
        DATASETS[name](side=0)


@pytest.mark.parametrize("name", WRITERS)
def test_shapes_and_classes_are_known_without_loading(tmp_path, name):
    dataset = load(name, WRITERS[name](tmp_path / "photos"))
    assert DATASET_INFO[name][:2] == (dataset.shape, len(dataset.classes))


def test_published_sizes():
    known = {name: DATASET_INFO[name][2:4] for name in WRITERS}
    assert sum(known["cifar100"]) == 60_000
    assert known["oxford-pets"] == (3680, 3669)
    assert known["stanford-cars"] == (8144, 8041)


# Where the files lie


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "cifar100",
            "does not hold train.bin and test.bin and fine_label_names.txt; download them from "
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz (CIFAR-100, binary version, "
            "folder cifar-100-binary) and put them there, or give their folder with --dataset "
            "cifar100:path=FOLDER",
        ),
        (
            "caltech101",
            "does not hold 101_ObjectCategories, with one folder per class; download "
            "101_ObjectCategories.tar.gz from CaltechDATA, https://doi.org/10.22002/D1.20086 (in "
            "caltech-101.zip) and unpack it there, or give its folder with --dataset "
            "caltech101:path=FOLDER",
        ),
        (
            "oxford-pets",
            "does not hold annotations/trainval.txt and annotations/test.txt; download them from "
            "https://www.robots.ox.ac.uk/~vgg/data/pets/ (images.tar.gz and annotations.tar.gz, "
            "unpacked into folders images and annotations) and put them there, or give their "
            "folder with --dataset oxford-pets:path=FOLDER",
        ),
        (
            "stanford-cars",
            "does not hold devkit/cars_train_annos.mat and cars_test_annos_withlabels.mat and "
            "devkit/cars_meta.mat; download them from "
            "https://ai.stanford.edu/~jkrause/cars/car_dataset.html or a copy of these files "
            "(cars_train.tgz, cars_test.tgz and car_devkit.tgz, unpacked, and "
            "cars_test_annos_withlabels.mat) and put them there, or give their folder with "
            "--dataset stanford-cars:path=FOLDER",
        ),
    ],
)
def test_by_default_they_are_sought_in_the_cache(tmp_path, name, message):
    assert status(name, tmp_path) == "missing"
    for act in (lambda: DATASETS[name]().load(tmp_path), lambda: fetch(name, tmp_path)):
        with pytest.raises(DataError) as caught:
            act()
        assert str(caught.value) == f"{tmp_path / name} {message}"
    WRITERS[name](tmp_path / name)
    assert status(name, tmp_path) == "ready"
    assert fetch(name, tmp_path) == tmp_path / name
    assert DATASETS[name]().load(tmp_path).name == name


# Bad files


def rewrite(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def spoil(root: Path) -> None:
        (root / file).write_bytes(change((root / file).read_bytes()))

    return spoil


def rewrite_mat(file: str, content: dict[str, Any]) -> Callable[[Path], None]:
    return lambda root: savemat(root / file, content)


TRAIN, META = "devkit/cars_train_annos.mat", "devkit/cars_meta.mat"
TWO = np.array([(1, 2), (3, 4)], dtype=[("class", "O"), ("other", "O")])
BINARY = "cifar-100-binary"
FOLDER = "caltech-101/101_ObjectCategories"
PET_ARCHIVES = "unpack images.tar.gz and annotations.tar.gz again"
CAR_ARCHIVES = "unpack cars_train.tgz, cars_test.tgz and car_devkit.tgz again"
BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "half a record": (
        "cifar100",
        rewrite(f"{BINARY}/train.bin", lambda content: content[:-1]),
        f"{BINARY}/train.bin: 9221 bytes are not whole records of 3074 bytes",
    ),
    "too few names": (
        "cifar100",
        rewrite(f"{BINARY}/fine_label_names.txt", lambda content: content[: content.rindex(b"n")]),
        f"{BINARY}/fine_label_names.txt has 99 names of classes, but there are 100; unpack the arc",
    ),
    "missing class": (
        "caltech101",
        lambda root: shutil.rmtree(root / FOLDER / OBJECTS[3]),
        f"{FOLDER} has 100 class folders, but caltech101 has 101 classes; unpack 101_ObjectCat",
    ),
    "no image": (
        "caltech101",
        rewrite(f"{FOLDER}/object 7/image_0001.jpg", lambda content: b"no image"),
        f"{FOLDER}/object 7/image_0001.jpg cannot be read as an image",
    ),
    "bad line": (
        "oxford-pets",
        rewrite("annotations/trainval.txt", lambda content: content + b"breed_1_9 38 1 1\n"),
        "annotations/trainval.txt, line 76: 'breed_1_9 38 1 1' is not an image and a class from 1 "
        f"to 37; {PET_ARCHIVES}",
    ),
    "line of one word": (
        "oxford-pets",
        rewrite("annotations/test.txt", lambda content: b"\nbreed\n"),
        "annotations/test.txt, line 2: 'breed' is not an image and a class",
    ),
    "empty list": (
        "oxford-pets",
        rewrite("annotations/test.txt", lambda content: b"# nothing\n"),
        f"annotations/test.txt lists no images; {PET_ARCHIVES}",
    ),
    "too few breeds": (
        "oxford-pets",
        lambda root: [
            (root / "annotations" / f"{part}.txt").write_text("breed_1_0 2 1 1\n")
            for part in ("trainval", "test")
        ],
        f"annotations lists 1 breeds, but oxford-pets has 37; {PET_ARCHIVES}",
    ),
    "missing image": (
        "oxford-pets",
        lambda root: (root / "images" / "breed_5_2.jpg").unlink(),
        f"images/breed_5_2.jpg is missing; {PET_ARCHIVES}",
    ),
    "no MATLAB file": (
        "stanford-cars",
        rewrite(TRAIN, lambda content: b"no matrix" * 50),
        f"{TRAIN} cannot be read as a MATLAB file",
    ),
    "truncated MATLAB file": (
        "stanford-cars",
        rewrite(TRAIN, lambda content: content[:300]),
        f"{TRAIN} cannot be read as a MATLAB file",
    ),
    "empty MATLAB file": (
        "stanford-cars",
        rewrite(META, lambda content: b""),
        f"{META} cannot be read as a MATLAB file",
    ),
    "another variable": (
        "stanford-cars",
        rewrite_mat(TRAIN, {"boxes": np.arange(3)}),
        f"{TRAIN} has no variable annotations; download cars_train_annos.mat again",
    ),
    "no fields": (
        "stanford-cars",
        rewrite_mat(TRAIN, {"annotations": np.arange(3)}),
        f"{TRAIN} has no field class; download cars_train_annos.mat again",
    ),
    "without labels": (
        "stanford-cars",
        rewrite_mat(TRAIN, {"annotations": TWO}),
        f"{TRAIN} has no field fname; download cars_train_annos.mat again",
    ),
    "another class": (
        "stanford-cars",
        rewrite_mat("cars_test_annos_withlabels.mat", annotations([1, 197])),
        "cars_test_annos_withlabels.mat has class 197, but classes are numbered 1 to 196; download",
    ),
    "too few classes": (
        "stanford-cars",
        rewrite_mat(META, {"class_names": np.array(CARS[:3], dtype=object)}),
        f"{META} has 3 classes, but stanford-cars has 196; {CAR_ARCHIVES}",
    ),
    "missing car": (
        "stanford-cars",
        lambda root: (root / "cars_test" / "00002.jpg").unlink(),
        f"cars_test/00002.jpg is missing; {CAR_ARCHIVES}",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_line_with_exit_code_2(tmp_path, monkeypatch, case):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "cache"))
    name, spoil, message = BAD[case]
    root = WRITERS[name](tmp_path / "photos")
    spoil(root)
    line = "run --nodes 2 --topology ring --rounds 1 --engine serial --model logistic --out"
    text = error_line(peerage(line, tmp_path / "run", "--dataset", f"{name}:path={root}"))
    assert text.startswith(f"{root}/{message}"), text


# In runs


def test_they_are_listed(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    lines = peerage("data list").lines
    for name in WRITERS:
        assert f"{name:15} missing  (peerage data get {name})" in lines
        assert f"--dataset {name}:path=FOLDER" in error_line(peerage(f"data get {name}"))


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Caltech101, OxfordPets, StanfordCars])
def test_a_run(tmp_path, cls):
    name = next(name for name, found in DATASETS.items() if found is cls)
    data = load(name, WRITERS[name](tmp_path / "photos"), side=8)
    experiment = pg.Experiment(
        dataset=data, model="preact-resnet:widths=4+8", nodes=2, topology="ring", partition="iid",
        rounds=1, local=pg.LocalSGD(steps=1, batch_size=2), engine={"name": "serial"},
    )  # fmt: skip
    assert pg.run(experiment).parameters[0].isfinite().all()
