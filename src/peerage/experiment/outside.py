"""A user's own code: load an algorithm, a model or a metric from a file, and detect a change.

Code is identified by the SHA-256 of its file and the name in it, not by the path of the file.
"""

import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from numpy.typing import NDArray
from torch import nn

from peerage.algorithm import Algorithm
from peerage.errors import CheckpointError, InputError, did_you_mean

BY_CONTENT = "of SHA-256 "  # between the name of own code and its hash
OUTSIDE = re.compile(r"(?P<file>.+\.py):(?P<name>\w+)(?::(?P<options>.*))?")


# Loading


@dataclass(frozen=True)
class CodeGate:
    """Which files may be loaded: those of a network need the permission of this machine."""

    folder: Path  # where relative paths begin
    allowed: frozenset[str]  # SHA-256 of files
    expected: Mapping[Path, str] = field(default_factory=dict)  # SHA-256 in the network file

    @classmethod
    def of_network(
        cls, network: Path, table: Mapping[str, Any], allowed: Iterable[str]
    ) -> "CodeGate":
        """The gate of a network file, which lists its code; relative paths begin in its folder."""
        folder, entries = network.parent.absolute(), table.get("code", [])
        try:
            expected = {folder / str(entry["file"]): str(entry["sha256"]) for entry in entries}
        except (TypeError, KeyError):
            raise InputError(
                f"{network}: code must be tables; write [[code]] with file and sha256"
            ) from None
        return cls(folder, frozenset(allowed), expected)

    def check(self, file: Path, sha256: str) -> None:
        """Raise an InputError if the file must not be loaded."""
        expected = self.expected.get(file, sha256)
        if sha256 != expected:
            raise InputError(
                f"{file} has the SHA-256 {sha256}, but the network file says {expected}; "
                "copy the exported file again"
            )
        if sha256 not in self.allowed:
            raise InputError(
                f"{file} with the SHA-256 {sha256} is not allowed to run here; read it, then "
                f"start the peer once with `peerage node --allow-code {sha256}` and its other flags"
            )


_gate: ContextVar[CodeGate | None] = ContextVar("code gate", default=None)


@contextmanager
def code_gate(gate: CodeGate) -> Iterator[None]:
    """Load only files that the gate lets through; experiments are read deep inside other calls."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def load_class(path: Path, name: str) -> type[Algorithm[Any]]:
    """The algorithm class of this name from a Python file."""
    found: type[Algorithm[Any]] = _load("algorithm", path, name, _is_algorithm)[0]
    return found


def load_model(path: Path, name: str) -> Any:
    """A class with `build`, a class of modules, or a function that returns a module."""
    return _load("model", path, name, _is_model)[0]


@dataclass(frozen=True)
class OwnMetric:
    """A metric from a user's file: a function of true and predicted classes, [N] integers each."""

    name: str
    file: Path
    sha256: str
    function: Callable[[NDArray[Any], NDArray[Any]], float] = field(repr=False, compare=False)

    def __call__(self, y_true: NDArray[Any], y_pred: NDArray[Any]) -> float:
        try:
            return float(self.function(y_true, y_pred))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"metric {self.name!r} of {self.file} failed: {reason}") from error

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def load_metric(path: Path, name: str) -> OwnMetric:
    function, sha256 = _load("metric", path, name, callable)
    return OwnMetric(name, path, sha256, function)


def own_path(file: str) -> Path:
    """The absolute path of a file that an experiment names."""
    gate = _gate.get()
    return (Path() if gate is None else gate.folder).absolute() / file


WANTED = {
    "algorithm": "subclass of Algorithm",
    "model": "class with a method build, class of modules, or function that returns a module",
    "metric": "function of y_true and y_pred",
}


def _load(kind: str, path: Path, name: str, accepts: Callable[[Any], bool]) -> tuple[Any, str]:
    """The value of this name in a file, and the SHA-256 of the file."""
    if not path.is_file():
        raise InputError(f"{kind} file {str(path)!r} does not exist; give the path of a file")
    try:
        source = path.read_bytes()
        sha256 = hashlib.sha256(source).hexdigest()
        if (gate := _gate.get()) is not None:
            gate.check(path, sha256)  # nothing of the file may run before
        module = load_module(path, source)
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"{kind} file {str(path)!r} cannot be loaded: {reason}") from error
    # Records name a model by the file that defines it, and metrics by the file that was given.
    known = {
        key: value
        for key, value in vars(module).items()
        if accepts(value) and (kind != "model" or loaded_file(value) == path)
    }
    if name in known:
        return known[name], sha256
    own = [key for key in known if kind == "algorithm" or loaded_file(known[key]) == path]
    hint = did_you_mean(name, own) if own else f"it defines no {WANTED[kind]}"
    raise InputError(f"{str(path)!r} has no {kind} {name!r}; {hint}")


def _is_algorithm(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm


def _is_model(value: Any) -> bool:
    if not isinstance(value, type):
        return isinstance(value, FunctionType) and not required(value)
    return hasattr(value, "build") or issubclass(value, nn.Module)


def required(value: Callable[..., Any]) -> list[str]:
    """The names of the arguments that a class or function requires."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in inspect.signature(value).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in kinds
    ]


@cache  # a changed file is loaded again
def load_module(path: Path, source: bytes) -> ModuleType:
    """Execute a file whose content has been read, once."""
    # The module is named by its path: two files, or a file and a module, may have the same name.
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        exec(compile(source, path, "exec"), vars(module))
    except Exception:
        del sys.modules[spec.name]
        raise
    for value in vars(module).values():
        if isinstance(value, type | FunctionType) and value.__module__ == spec.name:
            source_hash(value)  # cached now, as the file may change later
    return module


# Identity


def source_file(value: Any) -> Path | None:
    """The file from which another program can import a class; None for a class of a script."""
    if (loaded := loaded_file(value)) is not None:
        return loaded
    try:
        file = Path(inspect.getfile(value)).absolute()
    except (OSError, TypeError):
        return None
    return file if file.is_file() and value.__module__ != "__main__" else None


def loaded_file(value: Any) -> Path | None:
    """The file from which this module has loaded a class or function; None for any other."""
    name = getattr(value, "__module__", None)
    return Path(name) if name and name.endswith(".py") and Path(name).is_absolute() else None


@cache  # the file may change after it was loaded
def source_hash(value: Any) -> str | None:
    """SHA-256 of the file of a class outside the package; None for a class of the package."""
    file = source_file(value)
    in_package = value.__module__.partition(".")[0] == "peerage"
    return None if file is None or in_package else file_hash(file)


def file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def defined_by(value: Any) -> Any:
    """The class or function that an algorithm or model comes from."""
    return value if isinstance(value, type | FunctionType) else type(value)


def renamed(table: Mapping[str, Any], rename: Callable[[str, str], str]) -> dict[str, Any]:
    """The table of an experiment, with `rename(file, name)` for every `file.py:name` in it."""

    def new(text: Any) -> Any:
        found = OUTSIDE.fullmatch(text) if isinstance(text, str) else None
        return rename(found["file"], found["name"]) if found else text

    def member(value: Any) -> Any:
        if isinstance(value, list):
            return [member(one) for one in value]
        return {**value, "name": new(value.get("name"))} if isinstance(value, Mapping) else value

    evaluation = dict(table.get("evaluation", {}))
    if "metrics" in evaluation:
        evaluation["metrics"] = [new(text) for text in evaluation["metrics"]]
    parts = {key: member(table[key]) for key in ("algorithm", "model") if key in table}
    return {**table, **parts, **({"evaluation": evaluation} if "evaluation" in table else {})}


def by_content(table: Mapping[str, Any], hashes: Mapping[str, str]) -> dict[str, Any]:
    """The table of an experiment, in which own code is named by its hash instead of its path."""

    def rename(file: str, name: str) -> str:
        return f"{name} {BY_CONTENT}{hashes[file]}" if file in hashes else f"{file}:{name}"

    return renamed(table, rename)


def is_by_content(name: str) -> bool:
    """Whether this is the name of own code in a table that `by_content` returned."""
    return f" {BY_CONTENT}" in name


# Records of runs


def check_unchanged(record: Mapping[str, str], given: Mapping[str, str] | None = None) -> None:
    """Raise an error if a file of own code has changed since the run.

    `record` has the hashes of the run by file, and `given` those of an experiment that was given.
    Without it, the files at the recorded paths are checked; they might no longer load.
    """
    if given is None:
        now = {file: file_hash(Path(file)) for file in record if Path(file).is_file()}
        changed = [file for file in now if now[file] != record[file]]
    else:
        changed = [file for file in given if given[file] not in record.values()] if record else []
    if changed:
        raise CheckpointError(
            f"{changed[0]} has changed since this run; restore it, or run the experiment again"
        )
