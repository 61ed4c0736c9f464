"""The table of flags: every row sets a key of the experiment, and some exclude others."""

from dataclasses import fields, is_dataclass
from typing import Any, get_args

import pytest

import peerage as pg
from peerage.cli.flags import FLAGS, read_changes
from peerage.errors import InputError


@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_sets_a_key_that_exists(name: str) -> None:
    section, _, key = FLAGS[name].key.rpartition(".")
    experiment = pg.Experiment(nodes=2, clusters="1/1:rotate")
    table: Any = getattr(experiment, section) if section else experiment
    known = [f.name for f in fields(table)] if is_dataclass(table) else type(table).model_fields
    rest = FLAGS[name].after_colon
    assert {key, *FLAGS[name].excludes, *([] if rest is None else [rest])} <= set(known)


def test_no_two_flags_set_the_same_key() -> None:
    assert len({flag.key for flag in FLAGS.values()}) == len(FLAGS)


def test_flags_become_the_tables_of_a_file() -> None:
    given = {"nodes": 3, "lr": 0.5, "centralised": False, "scheme": "he", "seed": None}
    expected = {"nodes": 3, "local": {"lr": 0.5}, "pooled": False, "init": {"scheme": "he"}}
    assert read_changes(given) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("30/2", {"sizes": "30/2"}),
        ("30/2:rotate", {"sizes": "30/2", "shift": "rotate"}),
        ("3/1:rotate:angles=0+90", {"sizes": "3/1", "shift": "rotate:angles=0+90"}),
    ],
)
def test_clusters_are_sizes_and_a_shift(text: str, expected: dict[str, Any]) -> None:
    assert read_changes({"clusters": text}) == {"clusters": expected}
    both = {"clusters": {**expected, "shuffle": True}}
    assert read_changes({"clusters": text, "shuffle-clusters": True}) == both


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"steps": 3}, {"local": {"steps": 3, "epochs": None}}),
        ({"epochs": 2}, {"local": {"epochs": 2, "steps": None}}),
        ({"epochs": 2, "steps": 3}, {"local": {"epochs": 2, "steps": 3}}),
        ({"init": "shared"}, {"init": {"start": "shared", "file": None, "sha256": None}}),
        ({"init": "file:a:b.pt"}, {"init": {"start": "file", "file": "a:b.pt", "sha256": None}}),
        ({"eval-every": 2}, {"evaluation": {"every": 2, "growth": None}}),
        ({"eval-growth": 1.1}, {"evaluation": {"growth": 1.1, "every": 1}}),
        ({"eval-growth": 1.1, "eval-every": 2}, {"evaluation": {"growth": 1.1, "every": 2}}),
    ],
)
def test_what_a_flag_rules_out_gives_way_unless_it_is_given_too(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read_changes(given) == expected
    assert read_changes(dict(reversed(given.items()))) == expected


def test_values_of_the_command_line_are_stored_as_in_files() -> None:
    values = FLAGS["eval-at"].values
    words, _ = get_args(pg.Evaluation.model_fields["at"].annotation)  # or None
    assert set(values.values()) == set(get_args(words))
    for word, stored in values.items():
        assert read_changes({"eval-at": word}) == {"evaluation": {"at": stored}}
    with pytest.raises(
        InputError, match="eval-at must be one of after-training, after-aggregation; got 'end'"
    ):
        read_changes({"eval-at": "end"})
