"""Atomic writing of files, and disk errors as one line with a remedy."""

import errno
import json
import math
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from peerage.errors import CheckpointError, DiskError, TooManyOpenFiles, shell_command

LONG_LINE = 300  # characters; a run with its digest takes fewer


def write_json(path: Path, value: Mapping[str, object], remedy: str = "") -> None:
    """Write JSON with one key per line, which stays short when a value is a long list."""
    lines = [f"  {json.dumps(key)}: {dumps(entry)}" for key, entry in value.items()]
    write_bytes(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode(), remedy)


def compact_json(value: object) -> str:
    """JSON with one line for a short value, and one per entry of a long one.

    A list of numbers stays on one line, whatever its length.
    """
    text = dumps(value)
    if len(text) <= LONG_LINE or not isinstance(value, Mapping | list | tuple):
        return text
    if isinstance(value, Mapping):
        return (
            "{" + ",\n".join(f"{json.dumps(k)}: {compact_json(v)}" for k, v in value.items()) + "}"
        )
    if not any(isinstance(entry, Mapping | list | tuple) for entry in value):
        return text
    return "[" + ",\n".join(compact_json(entry) for entry in value) + "]"


def write_bytes(path: Path, content: bytes | memoryview, remedy: str = "") -> None:
    """Replace a file atomically; after a crash it has either the old or the new content."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk_errors(path, remedy):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path, remedy: str = "") -> Iterator[None]:
    """Turn an error of the operating system about a file into one line with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = remedy or f"run `{shell_command('resume', path.parent)}`"
            raise DiskError(
                f"disk is full while writing {path}; free space and {remedy}"
            ) from error
        reason = error.strerror or str(error)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyOpenFiles(
                f"cannot write {path}: {reason}; raise the limit (ulimit -n), or end other programs"
            ) from error
        raise DiskError(
            f"cannot write {path}: {reason}; choose a folder that you may write to"
        ) from error


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(
            f"run folder {str(path.parent)!r} has no {path.name}; "
            "give a folder that `peerage run` made, or run the experiment again"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}; check its permissions"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_bytes(path))
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({error}); run the experiment again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; run the experiment again")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path).decode())
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not valid TOML ({error}); run the experiment again"
        ) from None


def dumps(value: object) -> str:
    return json.dumps(_plain(value), allow_nan=False)


def _plain(value: object) -> object:
    """Plain Python values; numbers that are not finite become null, as JSON has no NaN."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def socket_folder() -> str:
    """The folder for temporary sockets: that for temporary files, unless its path is too long.

    The path of a socket has at most 107 characters on Linux.
    """
    folder = tempfile.gettempdir()
    return folder if len(folder) <= 60 else "/tmp"
