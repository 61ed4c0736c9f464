"""Checkpoints of a run: written aside, hashed, and renamed into place at a round boundary.

`checkpoint/round-000012/` holds one safetensors file per worker and `manifest.json`, which lists
their hashes, which file holds which node, and the JSON part of every node's state, under a hash of
its own. The newest two are kept.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peerage.errors import CheckpointError
from peerage.files import disk_errors, write_bytes

KEPT = 2


class Checkpointable(Protocol):
    """An engine, or one node's: whatever has nodes to save."""

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Write files; the JSON part of every node, and which file holds it."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    round: int  # rounds that are finished
    trees: dict[str, Any]
    parts: dict[str, str]


def save(engine: Checkpointable, run: Path, round: int, remedy: str = "") -> None:
    """Write the state after `round` rounds; whatever happens, older checkpoints stay readable."""
    home = run / "checkpoint"
    final = home / f"round-{round:06d}"
    aside = home / f".round-{round:06d}.{os.getpid()}"
    remedy = remedy or f"run `peerage resume {run}`"
    with disk_errors(final, remedy):
        for left in home.glob(".round-*"):  # by a process that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        try:
            aside.mkdir(parents=True)
            trees, parts = _save_parts(engine, aside)
            hashes = {name: _hash_and_sync(aside / name) for name in sorted(set(parts.values()))}
            manifest = {"round": round, "files": hashes, "parts": parts, "trees": trees}
            sealed = {"sha256": _hash_of(manifest), "content": manifest}
            # Not through write_json: a state may hold an infinity, which must come back as one.
            write_bytes(aside / "manifest.json", json.dumps(sealed).encode(), remedy)
            if final.exists():  # a round that is written again after an earlier resume
                shutil.rmtree(final)
            os.replace(aside, final)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    for old in finished(run)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def finished(run: Path) -> list[Path]:
    """The folders of whole checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoint").glob("round-*") if path.is_dir())


def latest_round(run: Path) -> int | None:
    folders = finished(run)
    return int(folders[-1].name.removeprefix("round-")) if folders else None


def load(run: Path) -> Checkpoint | None:
    """The newest checkpoint, every file checked against its hash; None if there is none yet."""
    folders = finished(run)
    if not folders:
        return None
    folder = folders[-1]
    remedy = f"delete {folder} and resume again"
    remedy += f" from {folders[-2].name}" if len(folders) > 1 else ", which starts over"
    try:
        sealed = json.loads((folder / "manifest.json").read_bytes())
        manifest = sealed["content"]
        if _hash_of(manifest) != sealed["sha256"]:
            raise CheckpointError(f"{folder / 'manifest.json'} is corrupted; {remedy}")
        for name, digest in manifest["files"].items():
            if _hash(folder / name) != digest:
                raise CheckpointError(f"checkpoint file {folder / name} is corrupted; {remedy}")
        return Checkpoint(folder, manifest["round"], manifest["trees"], manifest["parts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({error}); {remedy}") from None


def _save_parts(engine: Checkpointable, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """`engine.save`, with one kind of error for whatever the disk refuses."""
    try:
        return engine.save(folder)
    except Exception as error:
        # The library that writes tensors, and a worker, tell of it in their text only.
        told = re.search(r"os error (\d+)", str(error))
        number = int(told[1]) if told else errno.ENOSPC if "No space left" in str(error) else None
        if number is None:
            raise
        raise OSError(number, os.strerror(number)) from error


def _hash_of(manifest: Any) -> str:
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_and_sync(path: Path) -> str:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
