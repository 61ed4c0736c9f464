"""Checkpoints of a run: written to a temporary folder after a round, hashed, then renamed.

`checkpoint/round-000012/` holds one safetensors file per worker and `manifest.json`. The manifest
holds the hashes of the files, the file of each node, the JSON part of each node's state, and its
own hash. The newest two checkpoints are kept, and on request one every few rounds.
`round-000012-final` is the state after the step that follows the last round, if the algorithm has
one.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peerage.errors import CheckpointError, shell_command
from peerage.files import disk_errors, write_bytes

KEPT = 2  # checkpoints
FINAL = "-final"  # ending of the folder after the step that follows the last round


class Checkpointable(Protocol):
    """An object with nodes to save: an engine, or a real peer."""

    def save(self, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Write files; returns the JSON part of each node's state, and the file of each node."""


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    round: int  # number of finished rounds
    trees: dict[str, Any]
    parts: dict[str, str]
    final: bool = False  # whether the step after the last round is done
    stopped: bool = False  # whether a watcher ended the run after this round


def save(
    engine: Checkpointable,
    run: Path,
    round: int,
    remedy: str = "",
    *,
    final: bool = False,
    stopped: bool = False,
    keep_every: int | None = None,
) -> None:
    """Write the state after `round` rounds; older checkpoints stay readable if this fails.

    `final` and `stopped` are those of `Checkpoint`. Checkpoints of rounds that are multiples of
    `keep_every` are never removed.
    """
    home = run / "checkpoint"
    name = f"round-{round:06d}" + (FINAL if final else "")
    target = home / name
    temporary = home / f".{name}.{os.getpid()}"
    remedy = remedy or f"run `{shell_command('resume', run)}`"
    marks = {key: True for key, value in (("final", final), ("stopped", stopped)) if value}
    with disk_errors(target, remedy):
        for folder in home.glob(".round-*"):  # of a process that was killed while writing
            shutil.rmtree(folder, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            trees, parts = _save_parts(engine, temporary)
            names = sorted(set(parts.values()))
            hashes = {name: _hash_and_sync(temporary / name) for name in names}
            manifest = {"round": round, "files": hashes, "parts": parts, "trees": trees, **marks}
            hashed = {"sha256": _hash_of(manifest), "content": manifest}
            # Not write_json, which turns infinities in a state into null.
            write_bytes(temporary / "manifest.json", json.dumps(hashed).encode(), remedy)
            if target.exists():  # a round that is written again after an earlier resume
                shutil.rmtree(target)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in finished(run)[:-KEPT]:
            if keep_every is None or round_of(old) % keep_every:
                remove(old)


def remove(folder: Path) -> None:
    """Remove a checkpoint; first its name, so that a killed process leaves no half of it."""
    hidden = folder.with_name(f".{folder.name}.removed")
    with suppress(OSError):
        os.replace(folder, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def finished(run: Path) -> list[Path]:
    """The folders of complete checkpoints, oldest first."""
    return sorted(path for path in (run / "checkpoint").glob("round-*") if path.is_dir())


def latest_round(run: Path) -> int | None:
    folders = finished(run)
    return round_of(folders[-1]) if folders else None


def latest_size(run: Path) -> int:
    """The bytes of the newest checkpoint; 0 if there is none."""
    return sum(file.stat().st_size for folder in finished(run)[-1:] for file in folder.iterdir())


def round_of(folder: Path) -> int:
    """The number of finished rounds of a checkpoint, from the name of its folder."""
    return int(folder.name.removeprefix("round-").removesuffix(FINAL))


def load(run: Path) -> Checkpoint | None:
    """The newest checkpoint, with all hashes verified; None if there is none yet."""
    folders = finished(run)
    if not folders:
        return None
    remedy = f"delete {folders[-1]} and resume again"
    remedy += f" from {folders[-2].name}" if len(folders) > 1 else ", which starts over"
    return read(folders[-1], remedy)


def load_whole(run: Path) -> tuple[Checkpoint | None, dict[Path, str]]:
    """The newest checkpoint that is not damaged, and why each newer one is, by its folder.

    Raises CheckpointError if all are damaged; (None, {}) if there is none yet.
    """
    damaged: dict[Path, str] = {}
    for folder in reversed(finished(run)):
        try:
            return read(folder), damaged
        except CheckpointError as error:
            damaged[folder] = str(error)
    if damaged:
        raise CheckpointError(
            f"all checkpoints are damaged: {'; '.join(damaged.values())}; delete "
            f"{run / 'checkpoint'} to start over"
        )
    return None, {}


def read(folder: Path, remedy: str = "") -> Checkpoint:
    """The checkpoint in a folder, with all hashes verified."""
    remedy = f"; {remedy}" if remedy else ""
    try:
        hashed = json.loads((folder / "manifest.json").read_bytes())
        manifest = hashed["content"]
        if _hash_of(manifest) != hashed["sha256"]:
            raise CheckpointError(f"{folder / 'manifest.json'} is corrupted{remedy}")
        for name, sha256 in manifest["files"].items():
            if _hash(folder / name) != sha256:
                raise CheckpointError(f"checkpoint file {folder / name} is corrupted{remedy}")
        marks = {key: bool(manifest.get(key)) for key in ("final", "stopped")}
        return Checkpoint(folder, manifest["round"], manifest["trees"], manifest["parts"], **marks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder} cannot be read ({error}){remedy}") from None


def _save_parts(engine: Checkpointable, folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Call `engine.save`, and raise every disk error as OSError."""
    try:
        return engine.save(folder)
    except Exception as error:
        # Safetensors and workers report the error number only in the text.
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.ENOSPC if "No space left" in str(error) else None
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
