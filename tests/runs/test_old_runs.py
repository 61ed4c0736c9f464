"""Runs that were interrupted under an older version can be resumed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import peerage as pg
from peerage.records.rows import RunRecord, read_metrics

OLD = Path(__file__).parent / "interrupted"
NAMES = ("dechw", "fedcurv")
ROUNDS = 4


@pytest.fixture(scope="module")
def through() -> dict[str, pg.Result]:
    """The same experiments without the interruption."""
    texts = {name: (OLD / name / "experiment.toml").read_text() for name in NAMES}
    serial = {"engine": {"name": "serial"}}
    return {name: pg.run(pg.Experiment.from_toml(text, **serial)) for name, text in texts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_old_run_is_resumed(
    name: str, engine: dict[str, Any], tmp_path: Path, through: dict[str, pg.Result]
) -> None:
    folder = tmp_path / name
    shutil.copytree(OLD / name, folder)
    before = read_metrics(folder / "metrics.jsonl")
    assert RunRecord.load(folder).status == "interrupted"
    assert max(row["round"] for row in before) == 2
    resumed = pg.resume(folder, engine=engine)
    record = RunRecord.load(folder)
    assert (record.status, record.rounds) == ("finished", ROUNDS)
    rows, whole = read_metrics(folder / "metrics.jsonl"), through[name].rows
    assert rows[: len(before)] == before  # what the old version wrote stays
    # The checkpoint holds numbers of another processor: everything that is counted is the same,
    # everything that is computed nearly.
    assert [exact(row) for row in rows] == [exact(row) for row in whole]
    for row, expected in zip(rows, whole, strict=True):
        for key in {"accuracy", "loss", "train_loss", "consensus"} & expected.keys():
            assert row[key] == pytest.approx(expected[key], rel=1e-2, abs=1e-2), key
    for node in range(3):
        mine, expected = resumed.state_dict(node), through[name].state_dict(node)
        assert mine.keys() == expected.keys()
        for key in mine:
            torch.testing.assert_close(mine[key], expected[key], rtol=1e-2, atol=1e-2)


def exact(row: dict[str, Any]) -> dict[str, Any]:
    keys = ("scope", "round", "node", "nodes", "bytes", "bytes_total")
    return {key: row[key] for key in keys if key in row}


def test_old_runs_have_no_facts_about_the_machine() -> None:
    for path in OLD.rglob("*.json*"):
        assert "/home" not in path.read_text()
        assert "/tmp" not in path.read_text()
