"""What a peer writes into its folder, and what it finds there after a restart."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.memory import MemoryNetwork, MemoryTransport

from peerage import DecAvg
from peerage.engine.prepare import prepare
from peerage.engine.shard import InProcessStore, NodeReport, Shard, ShardReport
from peerage.engine.world import World
from peerage.errors import InputError
from peerage.net.peer.recorder import PAUSED, PeerRecorder
from peerage.records.rows import read_metrics
from peerage.testing import toy

ME = 1
OWNER = {"run": "test", "node": ME, "seal": "abc"}


@pytest.fixture(scope="module")
def world() -> World:
    return prepare(toy(DecAvg(), noise={"sigma": 0.1, "clip": 1.0}))


class Scene:
    """A recorder, and what it looks at."""

    def __init__(self, world: World, folder: Path | None) -> None:
        self.transport, self.counters = MemoryTransport(MemoryNetwork(), ME), Counter[str]()
        self.shard = Shard(world, [ME], InProcessStore())
        self.recorder = PeerRecorder(folder, ME, self.shard, self.transport, self.counters)

    def record(self, round: int, accuracy: float | None = None, **sent: int) -> None:
        metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 0.5}
        node = NodeReport(ME, {"train_loss": 0.25, **metrics})
        report = ShardReport([node], [], [], {}, {"train": 0.5, "wait": 0.0})
        self.transport.counters["bytes_sent"] += sent.get("wire", 0)
        self.recorder.record(round, report, sent.get("bytes", 0), (1, 2), 0.75)


@pytest.fixture
def scene(world: World, tmp_path: Path) -> Any:
    scene = Scene(world, tmp_path / "peer")
    scene.recorder.resume(OWNER)
    yield scene
    scene.recorder.close()


def again(world: World, scene: Scene) -> Scene:
    """The same peer after a restart."""
    scene.recorder.close()
    restarted = Scene(world, scene.recorder.folder)
    restarted.recorder.resume(OWNER)
    return restarted


# Rows


def test_a_row_has_what_is_new_since_the_last(scene):
    scene.record(0)
    scene.counters["late"] += 2
    scene.record(1, accuracy=0.5, bytes=40, wire=100)
    scene.counters["late"] += 1
    scene.transport.refused["not a member"] += 3
    scene.record(2, bytes=40, wire=120)
    scene.record(3)
    rows = scene.recorder.rows
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
    }
    assert [row["wire_bytes"] for row in rows] == [0, 100, 120, 0]
    assert rows[2]["troubles"] == {"late": 1, "not a member": 3}
    assert "troubles" not in rows[3]
    assert read_metrics(scene.recorder.folder / "metrics.jsonl") == rows
    recorder = scene.recorder
    assert (recorder.finished, recorder.bytes_total, recorder.accuracy) == (3, 80, 0.5)


def test_what_is_late_is_added_to_the_last_row(scene):
    scene.counters["late"] += 1
    scene.record(1, wire=100)
    scene.transport.counters["bytes_sent"] += 10
    scene.counters["late"] += 1
    scene.counters["undelivered"] += 1
    scene.recorder.add_late_counts()
    [row] = read_metrics(scene.recorder.folder / "metrics.jsonl")
    assert (row["wire_bytes"], row["troubles"]) == (110, {"late": 2, "undelivered": 1})
    assert scene.recorder.rows == [row]
    before = (scene.recorder.folder / "metrics.jsonl").read_bytes()
    scene.recorder.add_late_counts()  # nothing is counted twice
    assert (scene.recorder.folder / "metrics.jsonl").read_bytes() == before


def test_refusals_of_messages_are_not_counted_twice(scene):
    """The transport counts them too; the peer knows their reasons itself."""
    scene.counters.update({"shape": 1, "late": 0})
    scene.transport.refused.update({"shape": 5, "late": 1, "not a member": 2})
    assert scene.recorder.error_counts() == {"shape": 1, "not a member": 2}


def test_a_watcher_is_told_every_row(scene):
    told: list[Any] = []
    scene.recorder.watch = told.append
    scene.record(0)
    scene.record(1)
    assert told == scene.recorder.rows


def test_without_a_folder_rows_are_kept_and_nothing_is_written(world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scene = Scene(world, None)
    scene.recorder.resume(OWNER)
    scene.record(1, wire=5)
    scene.transport.counters["bytes_sent"] += 1
    scene.recorder.add_late_counts()
    scene.recorder.show_pause("waiting for node-2")
    scene.recorder.remember_releases()
    scene.recorder.save_checkpoint(1)
    scene.recorder.close()
    assert [row["wire_bytes"] for row in scene.recorder.rows] == [6]
    assert list(tmp_path.iterdir()) == []


# A restart


def test_a_folder_belongs_to_its_peer(world, scene):
    again(world, scene).recorder.close()
    for key, value in (("run", "other"), ("node", 2), ("seal", "xyz")):
        with pytest.raises(InputError, match="belongs to a peer of another run or experiment"):
            Scene(world, scene.recorder.folder).recorder.resume(OWNER | {key: value})
    assert json.loads((scene.recorder.folder / "peer.json").read_text()) == OWNER


def test_rows_after_the_checkpoint_are_dropped(world, scene):
    for round in range(4):
        scene.record(round)
        if round == 2:
            scene.recorder.save_checkpoint(round)
    restarted = again(world, scene)
    assert restarted.recorder.finished == 2
    restarted.record(3, wire=7)
    restarted.recorder.close()
    rows = read_metrics(scene.recorder.folder / "metrics.jsonl")
    assert [(row["round"], row["wire_bytes"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 7)]


def test_without_a_checkpoint_a_peer_begins_anew(world, scene):
    scene.record(0)
    restarted = again(world, scene)
    restarted.recorder.close()
    assert restarted.recorder.finished == 0
    assert read_metrics(scene.recorder.folder / "metrics.jsonl") == []


def test_messages_that_were_released_stay_counted(world, scene):
    scene.recorder.remember_releases()
    assert not (scene.recorder.folder / "released.json").exists()  # there were none
    (scene.recorder.folder / "released.json").write_text('{"messages": 4}')
    restarted = again(world, scene)
    assert restarted.shard.released() == {ME: 4}
    (scene.recorder.folder / "released.json").unlink()
    restarted.recorder.remember_releases()
    restarted.recorder.close()
    assert json.loads((scene.recorder.folder / "released.json").read_text()) == {"messages": 4}


def test_a_pause_is_shown_and_does_not_outlive_the_peer(world, scene):
    file = scene.recorder.folder / PAUSED
    scene.recorder.show_pause("waiting for node-2")
    assert json.loads(file.read_text()) == {"state": "waiting for node-2"}
    scene.recorder.show_pause(None)
    assert not file.exists()
    scene.recorder.show_pause(None)  # none to remove
    scene.recorder.show_pause("waiting for node-2")
    again(world, scene).recorder.close()
    assert not file.exists()
