"""CSV files: what is read, and which cell an error names."""

import numpy as np
import pytest
import torch

import peerage as pg
from peerage.data.tables import Csv
from peerage.errors import DataError, InputError


def load(folder, text, label="ill", **options):
    path = folder / "ward.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Csv(str(path), label, **options).load(folder)


def test_columns_names_and_labels(tmp_path):
    text = "age,ill,weight\n" + "".join(f"{20 + i},{i % 2},{50.5 + i}\n" for i in range(10))
    ward = load(tmp_path, text)
    x, y = ward.undivided()
    assert x.tolist() == [[20 + i, 50.5 + i] for i in range(10)]
    assert y.tolist() == [i % 2 for i in range(10)]
    assert (ward.name, ward.features, ward.classes) == ("ward", ("age", "weight"), ("0", "1"))
    assert (len(ward.train_y), len(ward.test_y)) == (8, 2)
    assert load(tmp_path, text, classes=3).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("labels", "numbers", "classes"),
    [
        (["0.0", "1.0"], [0, 1], ("0", "1")),  # as some programs write whole numbers
        (["2", "1"], [2, 1], ("0", "1", "2")),
        (["-1", "1"], [0, 1], ("-1", "1")),
        (["0.5", "b"], [0, 1], ("0.5", "b")),
    ],
)
def test_labels_are_whole_numbers_or_names(tmp_path, labels, numbers, classes):
    ward = load(tmp_path, "ill,age\n" + "".join(f"{label},3\n" for label in labels))
    assert (ward.undivided()[1].tolist(), ward.classes) == (numbers, classes)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_files_of_spreadsheets(tmp_path, separator):
    """A byte order mark, quotes, other ends of lines, spaces, and an empty line at the end."""
    lines = ['\ufeffage,"ill", weight ', '"20",no, 1e1', "30,yes,2", ""]
    ward = load(tmp_path, "\r\n".join(lines).replace(",", separator) + "\r\n")
    assert ward.undivided()[0].tolist() == [[20, 10], [30, 2]]
    assert (ward.features, ward.classes) == (("age", "weight"), ("no", "yes"))
    assert ward.undivided()[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age,ill\n1,0\nx,1\n", "row 3, column 'age': 'x' is not a number; write one, such as 3"),
        ("age;ill\n1;0\n3,5;1\n", "row 3, column 'age': '3,5' is not a number"),
        ("age,ill\n\n1,0\n\nx,1\n", "row 5, column 'age': 'x' is not a number"),
        ("age,ill\n1,0\n2,123456\n", "the label 123456 in column 'ill'; number the classes fr"),
        ("age,ill\n1,0\n ,1\n", "row 3, column 'age': no value; fill it in, or remove the row"),
        ("age,ill\n1,0\n2,\n", "row 3, column 'ill': no label; add it, or remove the row"),
        ("age,ill\nnan,0\n2,1\n", "row 2, column 'age': 'nan' is not finite; replace it"),
        ("age,ill\n1,0\n2\n", "row 3 has 1 cells and the header has 2; write one cell per column"),
        ("age,sick\n1,0\n", "has no column 'ill' for label; known: age, sick"),
        ("age,age,ill\n1,2,0\n", "has two columns 'age'; each needs its own name"),
        ("ill\n0\n1\n", "has a single column, 'ill'; add columns of numbers"),
        ("age,ill\n", "has no examples; write a header and one row per example"),
        ("", "has no examples"),
        (b"age,ill\n\xff,0\n", "cannot be read: .*; save it as CSV in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_named_by_row_and_column(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as error:
        load(tmp_path, text)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_too_few_classes(tmp_path):
    with pytest.raises(DataError, match=r"gone.csv does not exist; give the path of a CSV file"):
        Csv("gone.csv", "ill").load(tmp_path)
    with pytest.raises(InputError, match="classes must be at least 2, got 1"):
        Csv("gone.csv", "ill", classes=1)


def test_an_experiment_reads_csv(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in rng.normal(size=(60, 2))]
    (tmp_path / "ward.csv").write_text("\n".join(["a,b,y", *rows]))
    dataset = f"csv:path={tmp_path / 'ward.csv'},label=y"
    experiment = pg.Experiment(dataset=dataset, nodes=2, topology="ring", partition="iid")
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment
    loaded = experiment.dataset.load(tmp_path)
    assert torch.equal(loaded.undivided()[1], (loaded.undivided()[0].diff(dim=1) < 0)[:, 0].long())
