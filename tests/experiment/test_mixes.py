"""Mixes: one name for several models, on the command line, in files and in Python."""

from pathlib import Path

import pytest
from support.command_line import error_line, peerage

import peerage as pg
from peerage import specs
from peerage.engine.prepare import prepare
from peerage.errors import InputError
from peerage.experiment.identity import run_key
from peerage.experiment.readers import read_models
from peerage.models import MIXES, MODELS
from peerage.records.rows import RunRecord

ONE_BY_ONE = [
    *("dfml-cnn:channels=32+64+128+256", "dfml-cnn:channels=32+64+128", "dfml-cnn"),
    *("dfml-cnn:channels=16+32+64", "dfml-cnn:channels=8+16+32+64"),
]


@pytest.mark.parametrize(
    "given", ["h2-cnn", ["h2-cnn"], {"name": "h2-cnn"}, [{"name": "h2-cnn"}], ONE_BY_ONE]
)
def test_a_name_stands_for_the_list(given):
    experiment, plain = pg.Experiment(model=given), pg.Experiment(model=ONE_BY_ONE)
    assert experiment == plain
    assert experiment.to_toml() == plain.to_toml()
    assert run_key(experiment)["model"] == ONE_BY_ONE
    assert pg.Experiment.from_toml(experiment.to_toml()) == experiment


@pytest.mark.parametrize("text", ['model = "h2-cnn"', '[model]\nname = "h2-cnn"'])
def test_in_a_file(text):
    assert pg.Experiment.from_toml(text).model == read_models(ONE_BY_ONE)


def test_among_other_models():
    found = read_models(["mlp", "h0-cnn", pg.Split("logistic", head="head")])
    assert found[:2] == (MODELS["mlp"](), MODELS["dfml-cnn"]())
    assert len(found) == 3


@pytest.mark.parametrize("name", MIXES)
def test_members_are_models_of_the_package(name):
    members = read_models(name)
    assert len(members) == {"h0-cnn": 1, "ten-architectures": 10}.get(name, 5)
    assert [specs.text(member, "model", MODELS) for member in members] == [
        specs.text(specs.parse(text, "model", MODELS), "model", MODELS)
        for text in MIXES[name].members
    ]
    assert name not in MODELS


def test_the_ten_architectures_are_the_largest_of_their_kinds():
    ten = MIXES["ten-architectures"].members
    assert ten[:2] == MIXES["h1-vit"].members[:2]
    assert ten[2:6] == MIXES["h1-resnet"].members[:4]
    assert ten[6:] == MIXES["h2-cnn"].members[:4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("h2-cnn:norm=layer", "mix 'h2-cnn' of models has no options; write h2-cnn, or list"),
        ({"name": "h2-cnn", "norm": "layer"}, "mix 'h2-cnn' of models has no options"),
        ({"name": "h2-cnn", "head": ["head"]}, "mix 'h2-cnn' of models has no options"),
        (pg.Split("h2-cnn", head="head"), "'h2-cnn'; it is a mix of several models"),
        ("h2-cn", "unknown model 'h2-cn'; did you mean 'h2-cnn'"),
        ({"name": "vitt"}, "unknown model 'vitt'; did you mean 'vit'"),
    ],
)
def test_errors(given, message):
    with pytest.raises(InputError, match=message):
        read_models(given)


def test_nodes_take_the_members_in_turn():
    wanted = pg.Experiment(
        model="h1-cnn", nodes=12, topology="ring", partition="iid", rounds=1, dataset="digits"
    )
    world = prepare(wanted)
    assert world.assignment == [f"dfml-cnn-{node % 5}" for node in range(12)]
    sizes = [world.layout(node).size for node in range(6)]
    assert sizes == [*sorted(set(sizes), reverse=True), sizes[0]]


@pytest.mark.slow
def test_a_run_stores_the_members(tmp_path: Path):
    line = "run --nodes 5 --topology ring --partition iid --rounds 1 --steps 1 --algorithm decavg"
    done = peerage(f"{line} --model h1-cnn --engine serial --out", tmp_path / "run")
    assert done.code == 0, done.err
    record = RunRecord.load(tmp_path / "run")
    assert [model["channels"] for model in record.experiment["model"]] == [
        [w, 2 * w] for w in (128, 64, 32, 16, 8)
    ]


def test_an_algorithm_with_one_model_for_all_rejects_a_mix(tmp_path: Path):
    line = "run --algorithm fedavg --model h1-cnn --out"
    assert "requires equal architectures" in error_line(peerage(line, tmp_path / "run"))
