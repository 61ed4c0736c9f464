"""The schema of tabular data: which files fit, and what is said about those that do not."""

import numpy as np
import pytest

import peerage as pg
from peerage.data.datasets import Npz
from peerage.data.schema import Feature, Schema, read_schema
from peerage.engine.prepare import prepare
from peerage.errors import DataError, InputError, PeerageWarning
from peerage.experiment.identity import run_key
from peerage.net.peer.private_data import prepare_own

AGE = Feature("age", "years", (0, 120))
WARD = Schema(("healthy", "ill"), (AGE, Feature("weight", "kg")))
TABLE = {
    "classes": ["healthy", "ill"],
    "feature": [
        {"name": "age", "unit": "years", "range": [0, 120]},
        {"name": "weight", "unit": "kg"},
    ],
}


def ward(ages, labels=None, features=("age", "weight"), classes=None, columns=2):
    x = np.tile(np.array(ages, dtype=float)[:, None], columns)
    y = np.arange(len(ages)) % 2 if labels is None else labels
    return pg.in_memory(x, y, x, y, name="ward", features=features, classes=classes)


def test_a_schema_in_an_experiment_survives_its_file():
    assert read_schema(TABLE) == WARD
    experiment = pg.Experiment(nodes=2, data_schema=TABLE)
    assert "[[data_schema.feature]]" in experiment.to_toml()
    again = pg.Experiment.from_toml(experiment.to_toml())
    assert again.data_schema == WARD
    assert again == experiment
    assert run_key(experiment)["data_schema"] == again.table()["data_schema"]
    assert "data_schema" not in run_key(pg.Experiment(nodes=2))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("ward.toml", r"data_schema must be a table, got 'ward.toml'; write \[data_schema\]"),
        ({}, "data_schema names neither classes nor features; add some, or remove the section"),
        ({"class": ["a", "b"]}, "data_schema has no key 'class'; did you mean 'classes'"),
        ({"classes": ["a"]}, "data_schema names the single class 'a'; name at least two"),
        ({"classes": ["a", "b", "a"]}, "data_schema names the class 'a' twice"),
        ({"feature": {"name": "age"}}, r"feature must be a list; write \[\[data_schema.feature"),
        ({"feature": ["age"]}, 'feature 1 must be a table with name = "age"'),
        ({"feature": [{"name": "a"}] * 2}, "data_schema names the feature 'a' twice"),
        ({"feature": [{"unit": "kg"}]}, "data_schema: feature 1 requires name"),
        ({"feature": [{"name": "a", "units": "kg"}]}, "feature 1 has no option 'units'"),
        ({"feature": [{"name": ""}]}, "feature 1: a feature has no name"),
        (
            {"feature": [{"name": "a", "range": [3, 2]}]},
            r"range of a must be two growing numbers, got \(3.0, 2.0\)",
        ),
        ({"feature": [{"name": "a", "range": [1]}]}, "data_schema: feature 1: range"),
    ],
)
def test_schemas_that_cannot_be(table, message):
    with pytest.raises(InputError, match=message) as error:
        pg.Experiment(nodes=2, data_schema=table)
    assert "\n" not in str(error.value)


def test_data_that_fits_gets_the_names_of_the_classes():
    assert WARD.conform(ward([0, 120, 40])).classes == ("healthy", "ill")
    unnamed = ward([0, 120, 40], features=())
    assert WARD.conform(unnamed).classes == ("healthy", "ill")
    assert WARD.caveats(unnamed) == []
    turned = ward([1, 2], classes=("ill", "healthy"))
    assert WARD.conform(turned).train_y.tolist() == [1, 0]
    one = ward([1, 2], labels=[0, 0])  # other peers have the other class
    assert WARD.conform(one).classes == ("healthy", "ill")
    numbers = Schema(classes=("1", "2"))  # labels that do not begin at 0
    assert numbers.conform(ward([1, 2], labels=[2, 1])).train_y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": ("weight", "age")}, "ward: feature 1 is 'weight', but data_schema expects"),
        ({"features": ("age", "size")}, "ward has a column 'size' that data_schema lacks; known"),
        ({"features": ("age",), "columns": 1}, "ward has no column 'weight'; data_schema has age,"),
        ({"features": (), "columns": 3}, "ward has 3 columns, but data_schema has 2: age, weight"),
        ({"classes": ("ill", "dead")}, "ward has a class 'dead' that data_schema lacks; known:"),
        ({"labels": [0, 1, 2]}, "ward has 3 classes, but data_schema names 2"),
        (
            {"ages": [4599, 4600, 4601]},
            "ward: age: mean 4600 here, expected 0 to 120 years; convert this column, or correct",
        ),
    ],
)
def test_data_of_another_kind_is_refused(changes, message):
    with pytest.raises(InputError, match=message) as error:
        WARD.conform(ward(**({"ages": [20, 30, 40]} | changes)))
    assert "\n" not in str(error.value)


def test_images_do_not_fit_a_table():
    images = pg.in_memory(np.zeros((2, 1, 3, 3)), [0, 1])
    with pytest.raises(DataError, match=r"examples of shape \(1, 3, 3\), but data_schema has age"):
        WARD.conform(images)


def test_single_values_outside_the_range_are_a_warning():
    """Half of them at most: two of three would be refused."""
    odd = ward([-1, 30, 121, 40])
    assert WARD.conform(odd).classes == ("healthy", "ill")
    assert WARD.caveats(odd) == [
        "ward: age: 4 of 8 values are outside 0 to 120 years (-1 to 121 here); check them"
    ]
    with pytest.raises(DataError, match="ward: age: mean 50 here"):
        WARD.conform(ward([-1, 30, 121]))
    exact = Schema(feature=(Feature("age", range=(0.1, 0.3)), Feature("weight")))
    assert exact.caveats(ward([0.1, 0.3])) == []


def test_simulations_and_peers_check_their_data():
    experiment = pg.Experiment(nodes=2, topology="ring", model="logistic", data_schema=WARD)
    far = ward([4600] * 6)
    with pytest.raises(DataError, match="mean 4600 here"):
        prepare(experiment.model_copy(update={"dataset": far}))
    with pytest.raises(DataError, match="mean 4600 here"):
        prepare_own(experiment, 1, far)
    with pytest.warns(PeerageWarning, match="2 of 8 values are outside 0 to 120 years"):
        prepare_own(experiment, 1, ward([500, 1, 2, 3]))
    # A peer with one class needs no --classes.
    world = prepare_own(experiment, 1, ward([1, 2, 3], labels=[1, 1, 1]))
    assert list(world.classes) == ["healthy", "ill"]
    prepare_own(experiment, 1, ward([1, 2, 3]), 2)
    with pytest.raises(InputError, match="--classes differs from the classes of data_schema, heal"):
        prepare_own(experiment, 1, ward([1, 2, 3]), ("ill", "healthy"))
    unknown = ward([1, 2], classes=("ill", "dead"))
    with pytest.raises(InputError, match="ward has a class 'dead' that data_schema lacks"):
        prepare_own(experiment, 1, unknown)


def test_a_test_set_with_other_columns_is_refused():
    experiment = pg.Experiment(nodes=2, topology="ring", model="logistic")
    own, other = ward([1, 2, 3]), ward([1, 2, 3], features=("weight", "age"))
    with pytest.raises(InputError, match="has the columns weight, age and ward has age, weight; g"):
        prepare_own(experiment, 1, own, None, other)


def test_names_of_features_in_an_archive(tmp_path):
    x, y = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "ward.npz", x=x, y=y, features=np.array(["age", "weight"]))
    assert Npz(str(tmp_path / "ward.npz")).load(tmp_path).features == ("age", "weight")
    np.savez(tmp_path / "ward.npz", x=x, y=y)
    assert Npz(str(tmp_path / "ward.npz")).load(tmp_path).features == ()
    for features, message in (
        (np.array(["age"]), r"1 names of features for examples of shape \(2,\); give one name"),
        (np.array([1, 2]), r"features must be one list of names, got int64 of shape \(2,\)"),
    ):
        np.savez(tmp_path / "ward.npz", x=x, y=y, features=features)
        with pytest.raises(DataError, match=message):
            Npz(str(tmp_path / "ward.npz")).load(tmp_path)
