"""What is written to a run folder comes back, whatever happened to the process or the disk."""

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.errors import CheckpointError, DiskError
from peerage.files import write_bytes, write_json
from peerage.records.rows import MetricWriter, RunRecord, read_metrics, truncate_after

ROWS: list[dict[str, Any]] = [
    {"scope": "network", "round": 0, "accuracy": 0.1},
    {"scope": "node", "round": 0, "node": 0, "accuracy": 0.05},
    {"scope": "node", "round": 0, "node": 1, "accuracy": 0.15},
    {"scope": "network", "round": 1},
    {"scope": "network", "round": 2, "accuracy": 0.5},
    {"scope": "network", "round": 3, "accuracy": 0.4},
    {"scope": "network", "round": 4, "accuracy": 0.9},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with MetricWriter(path) as metrics:
        for row in rows:
            metrics.append(row)
    return path


def make_folder(folder: Path, **replaced: str | None) -> Path:
    """A smallest possible run folder; a file is replaced by a text, or left out for None."""
    files: dict[str, str | None] = {
        "experiment.toml": 'nodes = 2\n[algorithm]\nname = "dechw"\n',
        "setup.json": "{}",
        "summary.json": '{"label": "DecHW", "status": "finished"}',
        "environment.json": "{}",
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    }
    folder.mkdir()
    for name, text in (
        files | {name.replace("_", "."): text for name, text in replaced.items()}
    ).items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


def test_rows_are_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    metrics = MetricWriter(tmp_path / "metrics.jsonl")
    metrics.append(ROWS[0])
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS[:1]
    metrics.append(ROWS[1])
    assert read_metrics(tmp_path / "metrics.jsonl") == ROWS[:2]
    metrics.close()


def test_a_second_writer_appends(tmp_path: Path) -> None:
    path = write(tmp_path / "metrics.jsonl", ROWS[:3])
    assert read_metrics(write(path, ROWS[3:])) == ROWS


numbers = st.floats() | st.integers(-(2**53), 2**53) | st.none() | st.booleans() | st.text()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.text(), numbers | st.lists(numbers)), max_size=5))
def test_any_row_comes_back_with_null_for_what_is_not_finite(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]]
) -> None:
    rows = [{**row, "scope": "node", "round": 1} for row in values]
    path = write(tmp_path_factory.mktemp("rows") / "metrics.jsonl", rows)

    def expected(value: Any) -> Any:
        if isinstance(value, list):
            return [expected(entry) for entry in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    assert read_metrics(path) == [{k: expected(v) for k, v in row.items()} for row in rows]
    for line in path.read_bytes().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # called for NaN and Infinity


def test_numbers_of_numpy_are_plain_numbers(tmp_path: Path) -> None:
    row = {
        "scope": "network",
        "round": np.int64(1),
        "accuracy": np.float32(0.5),
        "loss": np.float64("nan"),
        "list": np.array([1.5, math.inf]),
    }
    expected = {"scope": "network", "round": 1, "accuracy": 0.5, "loss": None, "list": [1.5, None]}
    assert read_metrics(write(tmp_path / "m.jsonl", [row])) == [expected]


@pytest.mark.parametrize("tail", ['{"scope": "netw', '{"scope": "node"}\n', "\0\0\0", "{"])
def test_a_half_written_last_line_is_ignored_and_then_overwritten(
    tmp_path: Path, tail: str
) -> None:
    path = write(tmp_path / "metrics.jsonl", ROWS[:2])
    with path.open("a") as file:
        file.write(tail)
    assert read_metrics(path) == ROWS[:2]
    assert read_metrics(write(path, ROWS[2:])) == ROWS


def test_a_last_line_without_a_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(ROWS[0]))
    assert read_metrics(path) == ROWS[:1]
    assert read_metrics(write(path, ROWS[1:])) == ROWS


def test_a_broken_line_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{json.dumps(ROWS[0])}\n{{"scope": "n\n{json.dumps(ROWS[1])}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl line 2 .*delete that line"):
        read_metrics(path)


@pytest.mark.parametrize(("last", "kept"), [(-1, 0), (0, 3), (1, 4), (3, 6), (9, 7)])
def test_truncation_keeps_rows_up_to_a_round(tmp_path: Path, last: int, kept: int) -> None:
    path = write(tmp_path / "metrics.jsonl", ROWS)
    before = path.read_bytes().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"scope": "ne')
    truncate_after(path, last)
    assert path.read_bytes() == b"".join(before[:kept])
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_json_has_one_key_per_line(tmp_path: Path) -> None:
    value = {"allocation": [[1, 2], [3, 4]], "accuracy": math.nan, "topology": {"gap": 0.5}}
    write_json(tmp_path / "setup.json", value)
    text = (tmp_path / "setup.json").read_text()
    assert json.loads(text) == {**value, "accuracy": None}
    assert len(text.splitlines()) == 5
    write_json(tmp_path / "empty.json", {})
    assert json.loads((tmp_path / "empty.json").read_text()) == {}


def fail_with(number: int) -> Any:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"round": 1})
    monkeypatch.setattr(os, function, fail_with(errno.ENOSPC))
    with pytest.raises(DiskError) as caught:
        write_json(path, {"round": 2})
    assert str(caught.value) == (
        f"disk is full while writing {path}; free space and run `peerage resume {tmp_path}`"
    )
    assert json.loads(path.read_text()) == {"round": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]


def test_a_failing_truncation_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "metrics.jsonl", ROWS)
    monkeypatch.setattr(os, "fsync", fail_with(errno.EDQUOT))
    with pytest.raises(DiskError, match="disk is full"):
        truncate_after(path, 0)
    assert read_metrics(path) == ROWS


def test_a_full_disk_stops_the_metrics_in_one_line() -> None:
    with (
        MetricWriter(Path("/dev/full")) as metrics,
        pytest.raises(DiskError, match="disk is full while writing /dev/full; free space and run"),
    ):
        metrics.append(ROWS[0])


def test_a_folder_that_does_not_exist_is_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="No such file or directory; choose a folder"):
        write_bytes(tmp_path / "nowhere" / "file", b"")


def test_a_run_comes_back(tmp_path: Path) -> None:
    record = RunRecord.load(make_folder(tmp_path / "run"))
    assert record.label == "DecHW"
    assert record.algorithm == "dechw"
    assert record.status == "finished"
    assert record.rounds == 4
    assert record.curve("accuracy") == ([0, 2, 3, 4], [0.1, 0.5, 0.4, 0.9])
    assert record.curve("consensus") == ([], [])
    assert record.node_values("accuracy", 0) == {0: 0.05, 1: 0.15}
    assert record.node_values("accuracy", 4) == {}


@pytest.mark.parametrize(
    ("target", "round"), [(0.0, 0), (0.1, 0), (0.11, 2), (0.5, 2), (0.6, 4), (0.91, None)]
)
def test_rounds_to_an_accuracy(tmp_path: Path, target: float, round: int | None) -> None:
    assert RunRecord.load(make_folder(tmp_path / "run")).rounds_to(target) == round


def test_values_that_were_not_finite_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"scope": "network", "round": 1, "accuracy": 0.2},
        {"scope": "network", "round": 2, "accuracy": math.nan},
        {"scope": "node", "round": 2, "node": 0, "accuracy": math.nan},
        {"scope": "node", "round": 2, "node": 1, "accuracy": 0.1},
        {"scope": "cluster", "round": 2, "cluster": 0, "accuracy": 0.1},
    ]
    folder = make_folder(tmp_path / "run", metrics_jsonl=None)
    write(folder / "metrics.jsonl", rows)
    record = RunRecord.load(folder)
    assert record.curve("accuracy") == ([1], [0.2])
    assert record.node_values("accuracy", 2) == {1: 0.1}
    assert record.rounds == 2


def test_a_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        RunRecord.load(tmp_path / "nothing")
    assert "nothing" in str(caught.value)
    assert "`peerage run`" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["experiment_toml", "setup_json", "summary_json", "environment_json", "metrics_jsonl"],
)
def test_a_missing_or_broken_file_is_one_line(tmp_path: Path, name: str) -> None:
    file = name.replace("_", ".")
    with pytest.raises(CheckpointError, match=f"has no {file}; .*run the experiment again") as gone:
        RunRecord.load(make_folder(tmp_path / "without", **{name: None}))
    with pytest.raises(CheckpointError, match=file) as broken:
        RunRecord.load(make_folder(tmp_path / "broken", **{name: "[1,\n2 3\n4"}))
    assert "\n" not in str(gone.value) + str(broken.value)
