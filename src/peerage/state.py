"""What a node remembers, as tensors and JSON: for checkpoints, without pickle.

A state may be None, a number, a text, a tensor, a tuple, list or dictionary of states, or a
dataclass of them. Dataclasses are rebuilt from an example of the state: what `Algorithm.init` gave.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from peerage.errors import CheckpointError


def map_tensors(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """The same state with every tensor replaced; an untouched state is returned as it is."""
    if isinstance(state, Tensor):
        return change(state)
    if type(state) in (tuple, list):
        return type(state)(map_tensors(change, item) for item in state)
    if isinstance(state, dict):
        return {key: map_tensors(change, item) for key, item in state.items()}
    if is_dataclass(state) and not isinstance(state, type):
        items = {f.name: map_tensors(change, getattr(state, f.name)) for f in fields(state)}
        return type(state)(**items)
    return state


def pack(state: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    """A JSON tree for the state; its tensors go into `tensors` under names with the prefix."""
    if isinstance(state, float) and not isfinite(state):
        return {"float": str(state)}  # JSON has no infinity and no NaN
    if state is None or isinstance(state, bool | int | float | str):
        return {"value": state}
    if isinstance(state, Tensor):
        name = f"{prefix}.{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if type(state) in (tuple, list):  # not a named tuple, which could not be rebuilt
        kind = "tuple" if isinstance(state, tuple) else "list"
        return {kind: [pack(item, tensors, prefix) for item in state]}
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        return {"dict": {key: pack(item, tensors, prefix) for key, item in state.items()}}
    if is_dataclass(state) and not isinstance(state, type):
        items = {f.name: pack(getattr(state, f.name), tensors, prefix) for f in fields(state)}
        return {"dataclass": type(state).__name__, "fields": items}
    raise CheckpointError(
        f"a state of type {type(state).__name__} cannot be saved; "
        "use tensors, numbers, texts, tuples, lists, dictionaries with text keys or dataclasses"
    )


def unpack(tree: Any, tensors: dict[str, Tensor], example: Any) -> Any:
    """The state that `pack` described; `example` shows which dataclasses occur in it."""
    return _unpack(tree, tensors, _dataclasses(example))


def _unpack(tree: Any, tensors: dict[str, Tensor], known: dict[str, type[Any]]) -> Any:
    match tree:
        case {"value": value}:
            return value
        case {"float": text}:
            return float(text)
        case {"tensor": name}:
            return tensors[name]
        case {"tuple": items}:
            return tuple(_unpack(item, tensors, known) for item in items)
        case {"list": items}:
            return [_unpack(item, tensors, known) for item in items]
        case {"dict": items}:
            return {key: _unpack(item, tensors, known) for key, item in items.items()}
        case {"dataclass": name, "fields": items} if name in known:
            return known[name](**{k: _unpack(v, tensors, known) for k, v in items.items()})
    raise CheckpointError(
        f"the checkpoint holds a state that the algorithm does not start with: {str(tree)[:80]}; "
        "it was written by another version of the algorithm"
    )


def _dataclasses(state: Any) -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    if isinstance(state, tuple | list):
        for item in state:
            found |= _dataclasses(item)
    elif isinstance(state, dict):
        for item in state.values():
            found |= _dataclasses(item)
    elif is_dataclass(state) and not isinstance(state, type):
        found[type(state).__name__] = type(state)
        for f in fields(state):
            found |= _dataclasses(getattr(state, f.name))
    return found
