"""The form for a new run: its fields, and the arguments of the command that it stands for.

The command line knows the flags of an experiment and passes them in as `Field`s, with a function
that checks values as `peerage run` would.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from peerage.errors import InputError

LONGEST = 2000  # characters of a value
OWN_CODE = re.compile(r"\.py:")


@dataclass(frozen=True)
class Field:
    """One field: a flag of `peerage run`."""

    name: str
    section: str  # "" for the main one
    kind: str  # text, whole, number, switch or list
    help: str
    default: str = ""
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Form:
    """The fields, the recipes to start from, and the checks of an experiment.

    `check` returns messages by field, with "" for one about no single field. `starting` returns the
    values that a recipe sets.
    """

    fields: Sequence[Field]
    recipes: Mapping[str, str]  # name -> description
    check: Callable[[str | None, Mapping[str, Any]], dict[str, str]]
    starting: Callable[[str | None], dict[str, str]]
    by_name: dict[str, Field] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_name", {one.name: one for one in self.fields})

    def read(self, body: Any) -> tuple[str | None, dict[str, str]]:
        """The recipe and the filled fields of a request."""
        if not isinstance(body, dict) or not isinstance(body.get("values", {}), dict):
            raise InputError("a form must be an object with recipe and values")
        recipe = body.get("recipe") or None
        if recipe is not None and recipe not in self.recipes:
            raise InputError(f"there is no recipe {recipe!r}; choose one of the list")
        values = {}
        for name, value in body.get("values", {}).items():
            if name not in self.by_name:
                raise InputError(f"there is no field {name!r}")
            if not isinstance(value, str) or len(value) > LONGEST or "\0" in value:
                raise InputError(f"{name} must be text of at most {LONGEST} characters")
            if value.strip():
                values[name] = value.strip()
        return recipe, values

    def messages(self, recipe: str | None, values: Mapping[str, str]) -> dict[str, str]:
        """What is wrong, by field; values that name code are left to the run's own process."""
        parsed: dict[str, Any] = {}
        wrong: dict[str, str] = {}
        for name, text in values.items():
            try:
                parsed[name] = parse(self.by_name[name], text)
            except InputError as error:
                wrong[name] = str(error)
        if wrong or any(OWN_CODE.search(text) for text in values.values()):
            return wrong
        return self.check(recipe, parsed)

    def arguments(self, recipe: str | None, values: Mapping[str, str]) -> list[str]:
        """The arguments of `peerage run`; a value is never taken for a flag."""
        found = [] if recipe is None else [recipe]
        for name, text in values.items():
            if self.by_name[name].kind == "switch":
                found += [f"--{name}"] if text == "on" else [f"--no-{name}"]
            elif self.by_name[name].kind == "list":
                found += [f"--{name}={one}" for one in text.split()]
            else:
                found.append(f"--{name}={text}")
        return found


def parse(field: Field, text: str) -> Any:
    """The value of a field.

    >>> parse(Field("nodes", "", "whole", ""), "many")
    Traceback (most recent call last):
        ...
    peerage.errors.InputError: nodes must be a whole number, got 'many'
    """
    try:
        if field.kind == "whole":
            return int(text)
        if field.kind == "number":
            return float(text)
    except ValueError:
        kind = "a whole number" if field.kind == "whole" else "a number"
        raise InputError(f"{field.name} must be {kind}, got {text!r}") from None
    if field.kind == "switch":
        if text not in ("on", "off"):
            raise InputError(f"{field.name} must be on or off, got {text!r}")
        return text == "on"
    if field.kind == "list":
        return text.split()
    return text
