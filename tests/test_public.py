"""The public names: complete, sorted, importable and documented."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import TIMEOUT

import peerage
import peerage.aggregation
import peerage.testing

MODULES = [peerage, peerage.testing, peerage.aggregation]


def public(module: ModuleType) -> list[str]:
    """The names in `__all__`, or the functions and classes that the module defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def test_all_is_sorted_complete_and_importable():
    # As the linter sorts: constants, of which CFA looks like one, come first.
    assert peerage.__all__ == sorted(peerage.__all__, key=lambda name: (not name.isupper(), name))
    for name, home in peerage._HOMES.items():
        value = getattr(peerage, name)
        assert getattr(value, "__module__", home).startswith(home)
    assert set(peerage.__all__) <= set(dir(peerage))
    with pytest.raises(AttributeError, match="no attribute 'Experimant'"):
        peerage.Experimant  # noqa: B018


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(peerage.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {
        alias.asname: node.module
        for node in imports
        for alias in node.names
        if node.module.startswith("peerage")
    }
    assert seen == peerage._HOMES


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_class_and_function_has_a_docstring(module):
    silent = [
        name
        for name in public(module)
        if callable(getattr(module, name)) and not said(module, name)
    ]
    assert not silent


def test_every_public_class_and_function_has_an_example():
    """`test_doctests.py` runs them."""
    values = {name: getattr(peerage, name) for name in peerage.__all__}
    explained = {n: v for n, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}
    assert len(explained) > 60
    assert [name for name, value in explained.items() if ">>> " not in value.__doc__] == []


def said(module: ModuleType, name: str) -> bool:
    """Whether there is a docstring; a dataclass without one gets its signature instead."""
    text = getattr(module, name).__doc__ or ""
    return bool(text.strip()) and not text.startswith(f"{name}(")


def test_the_laws_of_the_contract_have_docstrings():
    assert all(inspect.getdoc(law) for law in peerage.testing.LAWS.values())


@pytest.mark.slow
def test_importing_the_package_does_not_load_what_only_reports_need():
    code = "import sys, peerage; print({'matplotlib', 'pandas', 'typer'} & sys.modules.keys())"
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, check=True, timeout=TIMEOUT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
