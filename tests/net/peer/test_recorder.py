"""What a peer writes into its folder, and what it finds there after a restart."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.memory import MemoryNetwork, MemoryTransport

from peerage import DecAvg
from peerage.engine.prepare import prepare
from peerage.engine.shard import InProcessStore, NodeReport, Shard, ShardReport
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.account import ACCOUNT, PrivacyAccount, released_messages
from peerage.net.peer.recorder import PAUSED, PeerRecorder
from peerage.privacy import RELEASE_COUNT, epsilon
from peerage.records.rows import read_metrics
from peerage.runs.kept_models import find_model
from peerage.testing import toy

ME = 1
OWNER = {"run": "test", "node": ME, "seal": "abc"}


@pytest.fixture(scope="module")
def world() -> World:
    return prepare(toy(DecAvg(), noise={"sigma": 0.1, "clip": 1.0}))


class Setup:
    """A recorder, and the objects that it reads."""

    def __init__(self, world: World, folder: Path | None) -> None:
        self.transport, self.counters = MemoryTransport(MemoryNetwork(), ME), Counter[str]()
        self.shard = Shard(world, [ME], InProcessStore())
        path = None if folder is None else folder / ACCOUNT
        account = PrivacyAccount(path, "test", "node-1", world.noise)
        self.recorder = PeerRecorder(folder, ME, self.shard, self.transport, self.counters, account)

    def record(self, round: int, accuracy: float | None = None, **sent: int) -> None:
        metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 0.5}
        node = NodeReport(ME, {"train_loss": 0.25, **metrics})
        report = ShardReport([node], [], [], {}, {"train": 0.5, "wait": 0.0})
        self.transport.counters["bytes_sent"] += sent.get("wire", 0)
        self.recorder.record(round, report, sent.get("bytes", 0), (1, 2), 0.75)


@pytest.fixture
def setup(world: World, tmp_path: Path) -> Any:
    setup = Setup(world, tmp_path / "peer")
    setup.recorder.resume(OWNER)
    yield setup
    setup.recorder.close()


def again(world: World, setup: Setup) -> Setup:
    """The same peer after a restart."""
    setup.recorder.close()
    restarted = Setup(world, setup.recorder.folder)
    restarted.recorder.resume(OWNER)
    return restarted


# Rows


def test_a_row_has_what_is_new_since_the_last(setup):
    setup.record(0)
    setup.counters["late"] += 2
    setup.record(1, accuracy=0.5, bytes=40, wire=100)
    setup.counters["late"] += 1
    setup.transport.refused["not a member"] += 3
    setup.record(2, bytes=40, wire=120)
    setup.record(3)
    rows = setup.recorder.rows
    assert rows[1] == {
        "scope": "node",
        "round": 1,
        "node": ME,
        "accuracy": 0.5,
        "loss": 0.5,
        "train_loss": 0.25,
        "bytes": 40,
        "heard": [1, 2],
        "seconds": {"train": 0.5, "total": 0.75},
        "wire_bytes": 100,
        "troubles": {"late": 2},
        "epsilon": 0.0,
    }
    assert [row["wire_bytes"] for row in rows] == [0, 100, 120, 0]
    assert rows[2]["troubles"] == {"late": 1, "not a member": 3}
    assert "troubles" not in rows[3]
    assert read_metrics(setup.recorder.folder / "metrics.jsonl") == rows
    recorder = setup.recorder
    assert (recorder.finished, recorder.bytes_total, recorder.accuracy) == (3, 80, 0.5)


def test_a_row_names_the_members_that_were_not_in_contact(setup):
    report = ShardReport([NodeReport(ME)], [], [], {}, {})
    for round, away in enumerate([[], [0, 3]], 1):
        setup.recorder.record(round, report, 0, (1, 2), 0.5, out_of_contact=away)
    rows = read_metrics(setup.recorder.folder / "metrics.jsonl")
    assert [row.get("out_of_contact") for row in rows] == [None, [0, 3]]


def test_what_is_late_is_added_to_the_last_row(setup):
    setup.counters["late"] += 1
    setup.record(1, wire=100)
    setup.transport.counters["bytes_sent"] += 10
    setup.counters["late"] += 1
    setup.counters["undelivered"] += 1
    setup.recorder.add_late_counts()
    [row] = read_metrics(setup.recorder.folder / "metrics.jsonl")
    assert (row["wire_bytes"], row["troubles"]) == (110, {"late": 2, "undelivered": 1})
    assert setup.recorder.rows == [row]
    before = (setup.recorder.folder / "metrics.jsonl").read_bytes()
    setup.recorder.add_late_counts()  # nothing is counted twice
    assert (setup.recorder.folder / "metrics.jsonl").read_bytes() == before


def test_bytes_that_did_not_leave_are_taken_from_the_last_row(setup):
    setup.record(1, bytes=40)
    setup.recorder.add_late_counts(-30)
    [row] = read_metrics(setup.recorder.folder / "metrics.jsonl")
    assert row["bytes"] == setup.recorder.bytes_total == 10
    setup.recorder.add_late_counts(-30)
    assert setup.recorder.rows[0]["bytes"] == setup.recorder.bytes_total == 0


def test_rejections_of_messages_are_not_counted_twice(setup):
    """The transport counts them too; the peer knows their reasons itself."""
    setup.counters.update({"shape": 1, "late": 0})
    setup.transport.refused.update({"shape": 5, "late": 1, "not a member": 2})
    assert setup.recorder.error_counts() == {"shape": 1, "not a member": 2}


def test_a_watcher_gets_every_row(setup):
    told: list[Any] = []
    setup.recorder.watch = told.append
    setup.record(0)
    setup.record(1)
    assert told == setup.recorder.rows


def test_without_a_folder_rows_are_kept_and_nothing_is_written(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    setup = Setup(world, None)
    setup.recorder.resume(OWNER)
    setup.record(1, wire=5)
    setup.transport.counters["bytes_sent"] += 1
    setup.recorder.add_late_counts()
    setup.recorder.show_pause("waiting for node-2")
    setup.recorder.remember_releases()
    setup.recorder.save_checkpoint(1)
    setup.recorder.close()
    assert [row["wire_bytes"] for row in setup.recorder.rows] == [6]
    assert list(tmp_path.iterdir()) == []


# Models


def test_the_models_of_a_failed_round_are_forgotten(setup):
    models, scores = setup.shard.evaluated_models(ME), {"": {"accuracy": 0.5}}
    setup.shard.on_evaluated(ME, models, scores)
    setup.recorder.models.forget()
    setup.recorder.save_models(1)
    assert find_model(setup.recorder.folder, "best") is None
    setup.shard.on_evaluated(ME, models, scores)
    setup.recorder.save_models(2)
    best = find_model(setup.recorder.folder, "best")
    assert (best.round, best.accuracies) == (2, {"accuracy": 0.5})


def test_a_lower_or_equal_accuracy_is_not_the_best_even_after_a_restart(world, setup):
    for round, accuracy in enumerate([0.5, 0.75, 0.75, float("nan"), 0.25]):
        if round == 2:
            setup = again(world, setup)
        models = setup.shard.evaluated_models(ME)
        setup.shard.on_evaluated(ME, models, {"": {"accuracy": accuracy}})
        setup.recorder.save_models(round)
    setup.recorder.close()
    best = find_model(setup.recorder.folder, "best")
    assert (best.round, best.accuracies) == (1, {"accuracy": 0.75})


def test_more_disk_than_stated_is_stated_again(world, tmp_path, caplog):
    setup = Setup(world, tmp_path / "peer")
    with caplog.at_level(logging.INFO, logger="peerage.peer"):
        setup.recorder.resume(OWNER)
        setup.recorder.save_checkpoint(1)
        assert caplog.text.count("checkpoints need at most 0.2 MB, model files included") == 1
        setup.shard.members[ME].persistent_tensors["grown"] = torch.zeros(1_000_000)
        setup.recorder.save_checkpoint(2)
        setup.recorder.save_checkpoint(3)
    setup.recorder.close()
    assert caplog.text.count("checkpoints need at most") == 2
    assert "checkpoints need at most 12.2 MB" in caplog.text  # three of 4 MB, and model files


# A restart


def test_a_folder_belongs_to_its_peer(world, setup):
    again(world, setup).recorder.close()
    for key, value in (("run", "other"), ("node", 2), ("seal", "xyz")):
        with pytest.raises(InputError, match="belongs to a peer of another run or experiment"):
            Setup(world, setup.recorder.folder).recorder.resume(OWNER | {key: value})
    assert json.loads((setup.recorder.folder / "peer.json").read_text()) == OWNER


def test_rows_after_the_checkpoint_are_dropped(world, setup):
    for round in range(4):
        setup.record(round)
        if round == 2:
            setup.recorder.save_checkpoint(round)
    restarted = again(world, setup)
    assert restarted.recorder.finished == 2
    restarted.record(3, wire=7)
    restarted.recorder.close()
    rows = read_metrics(setup.recorder.folder / "metrics.jsonl")
    assert [(row["round"], row["wire_bytes"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 7)]


def test_without_a_checkpoint_a_peer_starts_over(world, setup):
    setup.record(0)
    restarted = again(world, setup)
    restarted.recorder.close()
    assert restarted.recorder.finished == 0
    assert read_metrics(setup.recorder.folder / "metrics.jsonl") == []


def test_messages_that_were_released_stay_counted(world, setup):
    folder = setup.recorder.folder
    setup.recorder.remember_releases()
    assert released_messages(folder) == 0
    (folder / "released.json").write_text('{"messages": 4}')  # as an earlier version stored it
    restarted = again(world, setup)
    assert restarted.shard.released() == {ME: 4}
    assert released_messages(folder) == 4
    (folder / "released.json").unlink()
    third = again(world, restarted)
    assert third.shard.released() == {ME: 4}
    third.shard.members[ME].persistent_tensors[RELEASE_COUNT] = torch.tensor(6)
    third.recorder.remember_releases()
    third.record(1)
    third.recorder.close()
    assert released_messages(folder) == 6
    assert third.recorder.rows[-1]["epsilon"] == epsilon(world.noise, 6)


def test_a_pause_is_shown_and_does_not_outlive_the_peer(world, setup):
    file = setup.recorder.folder / PAUSED
    setup.recorder.show_pause("waiting for node-2")
    assert json.loads(file.read_text()) == {"state": "waiting for node-2"}
    setup.recorder.show_pause(None)
    assert not file.exists()
    setup.recorder.show_pause(None)  # none to remove
    setup.recorder.show_pause("waiting for node-2")
    again(world, setup).recorder.close()
    assert not file.exists()
