"""Experiment trackers get the numbers of every round, and cannot disturb a run."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import error_line, peerage

import peerage as pg
from peerage.errors import InputError
from peerage.runs import trackers

ALL = "tensorboard,mlflow,wandb,trackio"
SMALL: Any = {"nodes": 3, "rounds": 2, "topology": "ring", "engine": {"name": "serial"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pg.Result, Path]]:
    """One run that is logged to all trackers, each the real library."""
    home = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("TRACKIO_DIR", str(home / "trackio"))
        for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
            patch.setenv(name, "true")
        yield pg.run(pg.Experiment(**SMALL), out=home / "run", log_to=ALL), home


def expected(result: pg.Result) -> list[float]:
    return [row["accuracy"] for row in result.rows if row["scope"] == "network"]


@pytest.mark.slow
def test_tensorboard_has_every_round(run: tuple[pg.Result, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result, home = run
    events = EventAccumulator(str(home / "run" / "tensorboard"))
    events.Reload()
    found = events.Scalars("accuracy")
    assert [event.step for event in found] == [0, 1, 2]
    assert [event.value for event in found] == pytest.approx(expected(result))
    assert {"seconds/train", "bytes_total", "loss"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_mlflow_has_every_round(run: tuple[pg.Result, Path]) -> None:
    from mlflow import MlflowClient

    result, home = run
    client = MlflowClient(tracking_uri=(home / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("peerage")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "accuracy")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(expected(result)))
    assert found.info.status == "FINISHED"
    assert found.data.params["topology.name"] == "ring"


@pytest.mark.slow
def test_wandb_has_every_round_offline(run: tuple[pg.Result, Path]) -> None:
    from wandb.proto import wandb_internal_pb2

    result, home = run
    [file] = (home / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert len(content) < 32768  # one block of its format, a log of LevelDB after 7 bytes
    values, place = [], 7
    while place < len(content):
        size = int.from_bytes(content[place + 4 : place + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + size])
        place += 7 + size
        items = {"/".join(item.nested_key) or item.key: item for item in record.history.item}
        values += [json.loads(items["accuracy"].value_json)] if "accuracy" in items else []
    assert values == pytest.approx(expected(result))


@pytest.mark.slow
def test_trackio_has_every_round(run: tuple[pg.Result, Path]) -> None:
    import sqlite3

    result, home = run
    [file] = (home / "trackio").glob("peerage*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    found = [(step, json.loads(text)["accuracy"]) for step, text in rows]
    assert found == [(n, pytest.approx(value)) for n, value in enumerate(expected(result))]


@pytest.mark.slow
def test_a_finished_run_can_be_logged(run: tuple[pg.Result, Path]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result, home = run
    copy = home / "copy"
    os.makedirs(copy)
    for file in (home / "run").glob("*.*"):
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    outcome = peerage("log", copy, "--to", "tensorboard", "--json")
    place = json.loads(outcome.out)["logged"][str(copy)]["tensorboard"]
    events = EventAccumulator(place)
    events.Reload()
    assert [event.value for event in events.Scalars("accuracy")] == pytest.approx(expected(result))


class Failing:
    place = "nowhere"

    def __init__(self, about: trackers.About, first: int) -> None:
        self.rounds: list[int] = []

    def log(self, round: int, values: Any) -> None:
        raise OSError("no\n room")

    def close(self, finished: bool) -> None:
        raise AssertionError("it was given up")


def test_a_tracker_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trackers.TRACKERS, "broken", ("json", Failing))
    with pytest.warns(UserWarning, match="broken failed, the run goes on without it") as caught:
        logged = pg.run(pg.Experiment(**SMALL), log_to="broken")
    assert len(caught) == 1
    assert "OSError: no room" in str(caught[0].message)
    assert logged.digest == pg.run(pg.Experiment(**SMALL)).digest


def test_unknown_and_missing_trackers_are_named_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = peerage("run --rounds 1 --log-to tensorbord --out", tmp_path / "run")
    assert outcome.code == 2
    assert "unknown tracker 'tensorbord'; did you mean 'tensorboard'?" in error_line(outcome)
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(trackers.TRACKERS, "none", ("no_such_package", Failing))
    with pytest.raises(InputError, match=r'needs no_such_package; pip install "peerage\[trackers'):
        pg.run(pg.Experiment(**SMALL), log_to="none")


def test_rows_become_numbers_with_names() -> None:
    row = {"scope": "network", "round": 1, "final": True, "accuracy": None, "loss": 2}
    row |= {"models": {"a:b": {"accuracy": 0.5}}, "dynamic": True}
    assert trackers.numbers(row) == {"loss": 2.0, "models/a_b/accuracy": 0.5}
