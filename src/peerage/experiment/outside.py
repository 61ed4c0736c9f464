"""Algorithms outside the package: load a class from its file, and detect a changed file."""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from peerage.algorithm import Algorithm
from peerage.errors import CheckpointError, InputError, did_you_mean

FILE, HASH = "algorithm_file", "algorithm_sha256"  # keys of `environment.json`


def load_class(path: Path, name: str) -> type[Algorithm[Any]]:
    """The algorithm class of this name from a Python file."""
    if not path.is_file():
        raise InputError(f"algorithm file {str(path)!r} does not exist; give the path of a file")
    module = _load_module(path, path.read_bytes())
    known = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm
    }
    if name not in known:
        hint = did_you_mean(name, known) if known else "it defines no subclass of Algorithm"
        raise InputError(f"{str(path)!r} has no algorithm {name!r}; {hint}")
    return known[name]


@cache  # a changed file is loaded again
def _load_module(path: Path, source: bytes) -> ModuleType:
    # The module is named by its path: two files, or a file and a module, may have the same name.
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception as error:
        del sys.modules[spec.name]
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"algorithm file {str(path)!r} cannot be loaded: {reason}") from error
    for cls in vars(module).values():
        if isinstance(cls, type) and cls.__module__ == spec.name:
            source_hash(cls)  # cached now, as the file may change later
    return module


def source_file(cls: type[Any]) -> Path | None:
    """The file from which another program can import the class; None for a class of a script."""
    try:
        file = Path(inspect.getfile(cls)).absolute()
    except (OSError, TypeError):
        return None
    return file if file.is_file() and cls.__module__ != "__main__" else None


@cache  # the file may change after it was loaded
def source_hash(cls: Any) -> str | None:
    """SHA-256 over the file of a class outside the package; None for a class of the package."""
    file = source_file(cls)
    in_package = cls.__module__.partition(".")[0] == "peerage"
    return None if file is None or in_package else file_hash(file)


def file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def algorithm_record(algorithm: Algorithm[Any]) -> dict[str, str]:
    """Path and hash of the file of a user's own algorithm; empty for one of the package."""
    cls: Any = type(algorithm)
    known = source_hash(cls)
    return {} if known is None else {FILE: str(source_file(cls)), HASH: known}


def check_unchanged(record: Mapping[str, Any], algorithm: Algorithm[Any] | None) -> None:
    """Raise an error if the algorithm's file has changed since the run.

    Without the algorithm, the file at the recorded path is checked; it might no longer load.
    """
    if HASH not in record:
        return
    file = Path(str(record[FILE]))
    if algorithm is not None:
        now = algorithm_record(algorithm)
    else:
        now = {FILE: str(file), HASH: file_hash(file)} if file.is_file() else {}
    if now and now[HASH] != record[HASH]:
        raise CheckpointError(
            f"algorithm file {now[FILE]} has changed since this run; "
            "restore it, or run the experiment again"
        )
