"""Imports point down only: a module may import modules of lower levels and of its own room."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import peerage

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import rooms

ROOT = Path(peerage.__file__).parent

LEVEL = {name: number for number, level in enumerate(rooms.LEVELS) for name in level}
ROOMS = sorted(rooms.ROOMS)

# What the mathematics of an algorithm needs; no engine, file, graph or clock.
FOR_ALGORITHMS = {
    "algorithm",
    "algorithms",
    "aggregation",
    "errors",
    "hub",
    "requests",
    "vectors",
    "work",
}


def modules() -> dict[str, Path]:
    """Every module by its name below `peerage`; a room's own name stands for its `__init__`."""
    files = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}
    names = {name.replace("/", "."): path for name, path in sorted(files.items())}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = modules()


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, at once or inside a function."""
    found = set()
    for node in loaded(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "peerage"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            if module.split(".")[0] == "peerage":  # a module of the room, or a name in its __init__
                names = [f"{module}.{alias.name}" for alias in node.names]
                found |= {n if n.partition(".")[2] in MODULES else module for n in names}
    return {name.partition(".")[2] or "__init__" for name in found}


def loaded(tree: ast.AST) -> list[ast.AST]:
    """All statements but those for type checkers only."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        nodes += [child, *loaded(child)]
    return nodes


def room(module: str) -> str:
    """The room that a module is in; the one below, where rooms have rooms; or its own name.

    >>> room("net.peer.mailbox"), room("work.losses"), room("hub")
    ('net.peer', 'work', 'hub')
    """
    first, second, *_ = [*module.split("."), ""]
    return f"{first}.{second}" if first == "net" and second else first


def test_every_module_has_a_level():
    assert {room(name) for name in MODULES} == set(LEVEL)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    own = room(name)
    upwards = {
        other
        for other in imported(MODULES[name])
        if room(other) != own and LEVEL[room(other)] >= LEVEL[own]
    }
    assert not upwards


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "algorithms"])
def test_algorithms_import_mathematics_only(name):
    assert {room(other) for other in imported(MODULES[name])} <= FOR_ALGORITHMS


def test_rooms_import_nothing_by_themselves():
    """To import one module of a room must not load the whole room, with a few known exceptions."""
    known = {"__init__", "algorithms", "data", "experiment", "models"}
    assert {name for name in ROOMS if imported(MODULES[name])} <= known


@pytest.mark.parametrize("name", ROOMS)
def test_rooms_have_no_import_cycles(name):
    graph = {
        module: {other for other in imported(path) if room(other) == name}
        for module, path in MODULES.items()
        if room(module) == name
    }
    while graph:
        ground = {module for module, others in graph.items() if not others & graph.keys()}
        assert ground, f"these import each other: {sorted(graph)}"
        graph = {module: others for module, others in graph.items() if module not in ground}


def test_all_forms_of_imports_are_seen(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import numpy, peerage.state\n"
        "from peerage import specs, run\n"
        "from peerage.engine.pool import Pool as other\n"
        "if TYPE_CHECKING:\n    from peerage import cli\n"
        "def late():\n    from peerage.report import html\n"
    )
    assert imported(path) == {"state", "specs", "__init__", "engine.pool", "report.html"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "also"),
    [
        (["--help"], {"asyncio"}),
        (["-h"], set()),
        (["--version"], set()),
        (["run", "--help"], set()),
        (["data", "get", "--help"], set()),
        (["reproduce", "--help"], set()),
        (["list"], set()),
    ],
)
def test_help_does_not_load_slow_packages(arguments, also):
    slow = {"torch", "numpy", "matplotlib", "pandas", "scipy", "networkx", "sklearn", *also}
    check = f"import atexit, sys; atexit.register(lambda: print({slow} & sys.modules.keys())); "
    code = check + "from peerage.cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "set()"), done.stderr


def test_benchmarks_find_what_they_import(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    assert importlib.import_module("run").CLAIMS
