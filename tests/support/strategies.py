"""Random members of the families: what hypothesis draws for experiments and their parts."""

from dataclasses import MISSING
from typing import Any, Literal, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from peerage import specs
from peerage.errors import InputError

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=9)


def values(hint: Any, text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Values of the type that an option declares."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is tuple:  # a plus sign would separate the values
        item = values(get_args(hint)[0], text.filter(lambda word: "+" not in word))
        return st.lists(item, max_size=4).map(tuple)
    if type(None) in get_args(hint):
        (other,) = [member for member in get_args(hint) if member is not type(None)]
        return st.none() | values(other, text)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(1, 30),
        float: st.floats(0, 1) | st.floats(1, 40),
        str: text,
    }
    return simple[hint]


def options(cls: type[Any], text: st.SearchStrategy[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Any options; a text with a default has its own syntax and is left out."""
    hints = get_type_hints(cls)
    chosen = {
        field.name: values(hints[field.name], text)
        for field in specs.options_of(cls)
        if field.default is MISSING or hints[field.name] is not str
    }
    required = {
        field.name: chosen.pop(field.name)
        for field in specs.options_of(cls)
        if field.default is MISSING
    }
    return st.fixed_dictionaries(required, optional=chosen)


def members(cls: type[Any], text: st.SearchStrategy[str] = ANY_TEXT) -> st.SearchStrategy[Any]:
    """Instances of a member of a family, with any options that it accepts."""

    def build(chosen: dict[str, Any]) -> Any:
        try:
            return cls(**chosen)
        except InputError:  # values that exclude each other
            return None

    return options(cls, text).map(build).filter(lambda value: value is not None)
