"""The state of a node as tensors and JSON, for checkpoints without pickle.

A state may be None, a number, a text, a tensor, a tuple, list, named tuple or dataclass of states,
or a dictionary of states whose keys are texts or whole numbers. To rebuild named tuples and
dataclasses, an example of the state is needed: their classes are those in the value of
`Algorithm.init` and in the type hints of its fields.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from math import isfinite
from typing import Any, get_args, get_type_hints

from torch import Tensor

from peerage.errors import CheckpointError

ALLOWED = (
    "use tensors, numbers, texts, tuples, lists, dictionaries with texts or whole numbers as keys, "
    "named tuples or dataclasses"
)
Classes = dict[str, type[Any]]  # name -> a dataclass or named tuple that a state may hold


def map_tensors(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A copy of the state with `change` applied to every tensor."""
    if isinstance(state, Tensor):
        return change(state)
    if _is_named_tuple(state):
        return type(state)._make(map_tensors(change, item) for item in state)
    if isinstance(state, tuple | list):
        return type(state)(map_tensors(change, item) for item in state)
    if isinstance(state, dict):
        return {key: map_tensors(change, item) for key, item in state.items()}
    if _is_dataclass(state):
        items = {f.name: map_tensors(change, getattr(state, f.name)) for f in fields(state)}
        return _rebuild(type(state), items)
    return state


def check_state(state: Any, known: Classes) -> None:
    """Raise a CheckpointError if a checkpoint could not restore the state exactly.

    `known` are the classes that can be rebuilt; see `classes_in`.
    """
    pack(state, {}, "")
    for kind in _kinds(state):
        if known.get(kind.__name__) is not kind:
            raise CheckpointError(
                f"the state holds a {kind.__name__}, which init does not return; return one from "
                "init, or declare it as the type of a field of the returned state"
            )


def pack(state: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    """Return a JSON tree for the state, and add its tensors to `tensors` with this prefix."""
    if type(state) is float and not isfinite(state):
        return {"float": str(state)}  # JSON has no infinity and no NaN
    if state is None or type(state) in (
        bool,
        int,
        float,
        str,
    ):  # not a subclass, such as an enumeration
        return {"value": state}
    if isinstance(state, Tensor):
        name = f"{prefix}.{len(tensors)}"
        tensors[name] = state
        return {"tensor": name}
    if _is_named_tuple(state):
        items = {name: pack(getattr(state, name), tensors, prefix) for name in state._fields}
        return {"namedtuple": type(state).__name__, "fields": items}
    if type(state) in (tuple, list):
        kind = "tuple" if isinstance(state, tuple) else "list"
        return {kind: [pack(item, tensors, prefix) for item in state]}
    if type(state) is dict and all(type(key) is str for key in state):
        return {"dict": {key: pack(item, tensors, prefix) for key, item in state.items()}}
    if type(state) is dict and all(type(key) in (str, int) for key in state):
        return {"pairs": [[key, pack(item, tensors, prefix)] for key, item in state.items()]}
    if _is_dataclass(state):
        for name in _extra_attributes(state):
            raise CheckpointError(
                f"attribute {name!r} of {type(state).__name__} is not a field and would be lost; "
                "declare it as one"
            )
        items = {f.name: pack(getattr(state, f.name), tensors, prefix) for f in fields(state)}
        return {"dataclass": type(state).__name__, "fields": items}
    raise CheckpointError(f"a state of type {type(state).__name__} cannot be saved; {ALLOWED}")


def unpack(tree: Any, tensors: dict[str, Tensor], example: Any) -> Any:
    """Rebuild a state from the tree of `pack`; `example` contains the classes in it."""
    return _unpack(tree, tensors, classes_in(example))


def _unpack(tree: Any, tensors: dict[str, Tensor], known: Classes) -> Any:
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
        case {"pairs": pairs}:
            return {key: _unpack(item, tensors, known) for key, item in pairs}
        case {"namedtuple": name, "fields": items} if name in known:
            return known[name](**{k: _unpack(v, tensors, known) for k, v in items.items()})
        case {"dataclass": name, "fields": items} if name in known:
            return _rebuild(known[name], {k: _unpack(v, tensors, known) for k, v in items.items()})
    raise CheckpointError(
        f"the checkpoint has a state that init does not return: {str(tree)[:80]}; "
        "use the version of the algorithm that wrote it"
    )


def classes_in(state: Any) -> Classes:
    """The dataclasses and named tuples in a state and in the type hints of their fields."""
    found: Classes = {}
    for kind in _kinds(state):
        _add_declared(kind, found)
    return found


def _kinds(state: Any) -> Iterator[type[Any]]:
    if _is_named_tuple(state) or _is_dataclass(state):
        yield type(state)
    if isinstance(state, tuple | list):
        items = list(state)
    elif isinstance(state, dict):
        items = list(state.values())
    elif _is_dataclass(state):
        items = [getattr(state, f.name) for f in fields(state)]
    else:
        items = []
    for item in items:
        yield from _kinds(item)


def _add_declared(kind: Any, found: Classes) -> None:
    """Add a class and the classes in its type hints, such as `Reply` in `Reply | None`."""
    for argument in get_args(kind):
        _add_declared(argument, found)
    named_tuple = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not (named_tuple or (isinstance(kind, type) and is_dataclass(kind))):
        return
    if kind.__name__ in found:
        return
    found[kind.__name__] = kind
    try:
        hints = get_type_hints(kind)
    except NameError:  # in a class that is defined inside a function
        return
    for hint in hints.values():
        _add_declared(hint, found)


def _rebuild(kind: type[Any], values: dict[str, Any]) -> Any:
    """Create a dataclass with these fields without calling `__init__`."""
    new = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(new, name, value)
    return new


def _extra_attributes(state: Any) -> list[str]:
    """Attributes of a dataclass that are neither fields nor cached properties."""
    names = {f.name for f in fields(state)}
    left = sorted(getattr(state, "__dict__", {}).keys() - names)
    return [n for n in left if not isinstance(getattr(type(state), n, None), cached_property)]


def _is_dataclass(state: Any) -> bool:
    return is_dataclass(state) and not isinstance(state, type)


def _is_named_tuple(state: Any) -> bool:
    return isinstance(state, tuple) and hasattr(state, "_fields")
