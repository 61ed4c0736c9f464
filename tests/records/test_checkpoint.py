"""Checkpoints are read completely or rejected, whatever happened while they were written."""

import errno
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from peerage.errors import CheckpointError, DiskError
from peerage.records import checkpoint


@dataclass
class Engine:
    """Two nodes in two files of a few bytes."""

    trees: dict[str, Any] = field(default_factory=lambda: {"0": {"state": 1}, "1": {"state": None}})
    content: bytes = b"parameters"
    error: Exception | None = None

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        parts = {"0": "part-0", "1": "part-1"}
        for name in parts.values():
            (folder / name).write_bytes(self.content + name.encode())
            if self.error is not None:
                raise self.error
        return self.trees, parts


def names(run: Path) -> list[str]:
    """What is in the folder of checkpoints, hidden or not."""
    return sorted(entry.name for entry in (run / "checkpoint").iterdir())


def newest(run: Path) -> checkpoint.Checkpoint:
    found = checkpoint.load(run)
    assert found is not None
    return found


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    trees = {"0": {"state": [1, math.inf, -math.inf]}, "1": {"memory": {"a": None}}}
    checkpoint.save(Engine(trees), tmp_path, 12)
    found = newest(tmp_path)
    assert found.folder == tmp_path / "checkpoint" / "round-000012"
    assert (found.round, found.trees) == (12, trees)
    assert found.parts == {"0": "part-0", "1": "part-1"}
    assert (found.folder / found.parts["1"]).read_bytes() == b"parameterspart-1"


def test_without_a_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None
    assert checkpoint.latest_round(tmp_path) is None
    assert checkpoint.finished(tmp_path) == []


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    for round in (1, 2, 9, 10):
        checkpoint.save(Engine(), tmp_path, round)
        assert checkpoint.latest_round(tmp_path) == newest(tmp_path).round == round
    assert names(tmp_path) == ["round-000009", "round-000010"]
    assert [path.name for path in checkpoint.finished(tmp_path)] == names(tmp_path)


def test_a_round_can_be_written_again(tmp_path: Path) -> None:
    checkpoint.save(Engine(), tmp_path, 3)
    checkpoint.save(Engine({"0": "new", "1": "new"}), tmp_path, 3)
    assert newest(tmp_path).trees == {"0": "new", "1": "new"}
    assert names(tmp_path) == ["round-000003"]


def test_what_a_killed_process_left_is_removed_and_never_read(tmp_path: Path) -> None:
    left = tmp_path / "checkpoint" / ".round-000007.123"
    left.mkdir(parents=True)
    (left / "part-0").write_bytes(b"half")
    assert checkpoint.load(tmp_path) is None
    checkpoint.save(Engine(), tmp_path, 2)
    assert names(tmp_path) == ["round-000002"]


# Damage


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_round(path: Path) -> None:
    stored = json.loads(path.read_text())
    stored["content"]["round"] = 1
    path.write_text(json.dumps(stored))


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("part-1", flip, r"checkpoint file .*part-1 is corrupted"),
        ("part-0", Path.unlink, r"cannot be read \(.*No such file"),
        ("manifest.json", change_round, r"manifest\.json is corrupted"),
        ("manifest.json", Path.unlink, r"cannot be read \(.*No such file"),
        ("manifest.json", lambda path: path.write_text("{"), r"cannot be read \("),
        ("manifest.json", lambda path: path.write_text("[]"), r"cannot be read \("),
        ("manifest.json", lambda path: path.write_text('{"sha256": 1}'), r"cannot be read \("),
    ],
)
def test_a_damaged_checkpoint_is_rejected_with_a_remedy(
    tmp_path: Path, file: str, damage: Any, reason: str
) -> None:
    checkpoint.save(Engine(), tmp_path, 4)
    folder = tmp_path / "checkpoint" / "round-000004"
    damage(folder / file)
    with pytest.raises(CheckpointError, match=reason) as caught:
        checkpoint.load(tmp_path)
    remedy = f"; delete {folder} and resume again, which starts over"
    assert str(caught.value).endswith(remedy)
    assert "\n" not in str(caught.value)


def test_the_remedy_names_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(Engine(), tmp_path, 4)
    checkpoint.save(Engine(), tmp_path, 5)
    newer = tmp_path / "checkpoint" / "round-000005"
    flip(newer / "part-0")
    with pytest.raises(CheckpointError, match=f"delete {newer} and resume again from round-000004"):
        checkpoint.load(tmp_path)


# Disks


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "disk is full while writing"),
        (RuntimeError("worker 1: No space left on device"), "disk is full while writing"),
        (ValueError("I/O error: broken (os error 5)"), "cannot write .*Input/output error"),
    ],
)
def test_a_disk_that_rejects_leaves_the_checkpoint_before(
    tmp_path: Path, error: Exception, reason: str
) -> None:
    """Libraries and workers report it only in the text of their errors."""
    checkpoint.save(Engine(), tmp_path, 1)
    with pytest.raises(DiskError, match=reason):
        checkpoint.save(Engine(error=error), tmp_path, 2)
    assert names(tmp_path) == ["round-000001"]
    assert newest(tmp_path).round == 1


def test_the_remedy_can_be_another(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "full")
    with pytest.raises(DiskError, match=f"free space and run `peerage resume {tmp_path}`"):
        checkpoint.save(Engine(error=full), tmp_path, 1)
    with pytest.raises(DiskError, match="free space and start the peer again"):
        checkpoint.save(Engine(error=full), tmp_path, 1, "start the peer again")


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        checkpoint.save(Engine(error=ZeroDivisionError()), tmp_path, 1)
    assert names(tmp_path) == []
