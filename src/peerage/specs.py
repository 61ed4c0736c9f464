"""Conversion between `er:p=0.2`, the table `{name = "er", p = 0.2}` and `ErdosRenyi(p=0.2)`.

A *family* is a dictionary from names to frozen dataclasses. Only the functions here convert text
and tables to instances of such a class and back.

The values of a tuple option are joined by + in text, `sizes=30+2`, and a list in a table,
`sizes = [30, 2]`. A single value needs no +, and `sizes=` is the empty tuple.
"""

import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from textwrap import shorten
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from peerage.errors import InputError, check_choice, did_you_mean, wrong_choice

Family = Mapping[str, type[Any]]

JOIN = "+"  # between the values of one option


def parse(text: str, kind: str, family: Family) -> Any:
    """Turn `name:key=value,key=value` into an instance of the family's class `name`."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise InputError(
                f"{kind} {text!r}: {item!r} is not of the form key=value; "
                f"write {name}:key=value,key=value"
            )
        options[key.strip()] = value.strip()
    name = registered(name.strip(), family)
    hints = get_type_hints(family[name]) if name in family else {}
    # In text, none stands for None wherever an option allows it.
    options = {k: None if _is_none(v, hints.get(k)) else v for k, v in options.items()}
    return build(name, options, kind, family)


def from_table(table: Mapping[str, Any], kind: str, family: Family) -> Any:
    """Turn a table with a `name` and options into an instance."""
    if "name" not in table:
        raise InputError(f"the {kind} table has no name; add name = one of {', '.join(family)}")
    options = {key: value for key, value in table.items() if key != "name"}
    return build(str(table["name"]), options, kind, family)


def registered(name: str, family: Family) -> str:
    """The registered name for a name, which may also be that of the class: erdos-renyi for er."""
    known = {kebab(cls.__name__): key for key, cls in family.items()}
    return name if name in family else known.get(name, name)


def kebab(name: str) -> str:
    """The name of a class as users write it in text.

    >>> kebab("ErdosRenyi"), kebab("MLP"), kebab("CifarCNN")
    ('erdos-renyi', 'mlp', 'cifar-cnn')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", name).lower()


def class_names(family: Family) -> list[str]:
    return sorted({cls.__name__ for cls in family.values()})


def class_named(name: str, kind: str, family: Family) -> type[Any]:
    """The class of a family with this name; raises an AttributeError if there is none."""
    for cls in family.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(
        f"there is no {kind} class {name!r}; {did_you_mean(name, class_names(family))}"
    )


def build(name: str, options: Mapping[str, Any], kind: str, family: Family) -> Any:
    name = registered(name, family)
    if name not in family:
        raise InputError(f"unknown {kind} {name!r}; {did_you_mean(name, family)}")
    return construct(family[name], options, f"{kind} {name!r}")


def construct(cls: type[Any], options: Mapping[str, Any], where: str) -> Any:
    """Build a frozen dataclass from loosely typed options; errors begin with `where`."""
    hints = get_type_hints(cls)
    known = {field.name: field for field in options_of(cls)}
    values = {}
    for key, value in options.items():
        if key not in known:
            raise InputError(f"{where} has no option {key!r}; {did_you_mean(key, known)}")
        values[key] = convert(value, hints[key], f"{where}: {key}")
    missing = [
        key
        for key, field in known.items()
        if key not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise InputError(f"{where} requires {missing[0]}; write {missing[0]}=VALUE")
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def convert(value: Any, hint: Any, where: str) -> Any:
    """Convert one option to the type of its field.

    The word none stands for None, unless the option accepts any text. A table omits options that
    are None, so there the word may be, for example, the name of a folder.
    """
    if _is_none(value, hint) and str not in _members(hint):
        return None
    is_tuple = _takes_several(hint)
    if is_tuple and isinstance(value, str):
        value = tuple(item.strip() for item in value.split(JOIN)) if value else ()
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        key = where.rpartition(" ")[2]
        remedy = f"; join values by {JOIN}, as in {key}=A{JOIN}B" if is_tuple else ""
        raise InputError(f"{where} {describe_error(error)}{remedy}") from None


def check_choices(value: Any) -> None:
    """Raise an InputError if a `Literal` field of a dataclass has none of its choices."""
    cls: Any = type(value)
    for name, (choices, optional) in _choices(cls).items():
        option = getattr(value, name)
        if option is not None or not optional:
            check_choice(name, option, choices)


@cache
def _choices(cls: Any) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """The choices of every `Literal` field, and whether it may also be None."""
    try:
        hints = get_type_hints(cls)
    except NameError:  # a user's class may have types that only type checkers import
        return {}
    kinds = {field.name: (hints[field.name], *_members(hints[field.name])) for field in fields(cls)}
    return {
        name: (get_args(kind), type(None) in several)
        for name, several in kinds.items()
        for kind in several
        if get_origin(kind) is Literal
    }


def describe_error(error: ValidationError) -> str:
    """What is wrong with a value, in one line; a misspelt choice gets its nearest match."""
    last = error.errors()[-1]
    if last["type"] == "literal_error":
        choices = re.findall("'([^']*)'", last["ctx"]["expected"])
        return wrong_choice(last["input"], choices)
    reason = last["msg"][0].lower() + last["msg"][1:]
    return f"cannot be {shorten(repr(last['input']), 80)}: {reason}"


def to_table(value: Any, kind: str, family: Family) -> dict[str, Any]:
    """The table from which `from_table` builds an equal value, with every option."""
    for name, cls in family.items():
        if type(value) is cls:
            return {"name": name, **plain(value)}
    raise InputError(
        f"{kind} {value!r} is not one of the registered ones and cannot be written to a file"
    )


def plain(value: Any) -> dict[str, Any]:
    """The options of a frozen dataclass, without those that are None, as TOML has no null."""
    pairs = {field.name: getattr(value, field.name) for field in options_of(type(value))}
    return {key: _plain(option) for key, option in pairs.items() if option is not None}


def text(value: Any, kind: str, family: Family) -> str:
    """The shortest text from which `parse` builds an equal value."""
    return table_text(to_table(value, kind, family), kind, family)


def table_text(table: Mapping[str, Any], kind: str, family: Family) -> str:
    """As `text`, from a table with every option."""
    if table["name"] not in family:
        raise InputError(f"{kind} {table['name']!r} is not one of the registered ones")
    defaults = {field.name: _plain(field.default) for field in options_of(family[table["name"]])}
    options = [
        f"{key}={spelled(option)}"
        for key, option in table.items()
        if key != "name" and option != defaults[key]
    ]
    return str(table["name"]) + (":" + ",".join(options) if options else "")


def spelled(option: Any) -> str:
    """The text of an option, as `parse` reads it."""
    if isinstance(option, tuple | list):
        # 1e+16 becomes 1e16, because + separates values.
        items = (str(x).replace("e+", "e") if isinstance(x, float) else str(x) for x in option)
        return JOIN.join(items)
    return str(option)


def options_of(cls: type[Any]) -> list[Field[Any]]:
    """The fields that a user may set, except dataclasses, which have their own section."""
    return [field for field in fields(cls) if field.init and not is_dataclass(field.default)]


def _plain(option: Any) -> Any:
    if isinstance(option, np.generic):  # for example from a loop over numpy.linspace
        return option.item()
    return [_plain(item) for item in option] if isinstance(option, tuple) else option


def _is_none(value: Any, hint: Any) -> bool:
    """Whether a value is the word none, for an option that allows None."""
    word = isinstance(value, str) and value.lower() in ("none", "null")
    return word and type(None) in _members(hint)


def _takes_several(hint: Any) -> bool:
    """Whether an option is a tuple and does not also accept any text."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return str not in kinds and any(tuple in (kind, get_origin(kind)) for kind in kinds)


def _members(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__args__", ())


def _adapter(hint: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    except Exception:  # pydantic forbids a config for types that have their own
        return TypeAdapter(hint)
