"""The text of JSON files that people read and compare."""

import json

from peerage.files import compact_json


def test_a_short_value_is_one_line() -> None:
    value = {"id": "a", "rounds": [0, 1], "runs": [{"seed": 0}]}
    assert compact_json(value) == '{"id": "a", "rounds": [0, 1], "runs": [{"seed": 0}]}'


def test_a_long_value_has_a_line_per_entry_and_per_list_of_numbers() -> None:
    run = {"seed": 0, "digest": "0" * 64, "accuracy": 0.1 + 0.2}
    value = {"rounds": list(range(200)), "runs": [run] * 5, "loss": float("nan")}
    text = compact_json(value)
    lines = text.splitlines()
    assert len(lines) == 1 + 5 + 1
    assert lines[0].startswith('{"rounds": [0, 1, ')
    assert json.loads(lines[2].rstrip(",")) == run  # every digit is kept
    assert json.loads(text) == value | {"loss": None}
