"""Imports point downwards only: a module may import those that stand before it, and no other."""

import ast
import importlib
from pathlib import Path

import pytest

import peerage

ROOT = Path(peerage.__file__).parent

# From the ground up. Modules in one line may not import each other, except within a package that
# stands here as a whole.
ORDER = [
    ["errors", "randomness", "isolation"],
    ["specs", "records", "environment", "aggregation", "vectors", "losses", "graph"],
    ["random_edges", "local", "state", "requests", "faults", "privacy", "backward", "persample"],
    ["topology", "mixing", "rewiring", "models", "data"],
    ["diffusion", "estimation", "evaluation"],
    ["initialise"],
    ["training", "curvature", "newton", "synthesis"],
    ["algorithm"],
    ["hub"],
    ["algorithms"],
    ["catalogue", "experiment", "sim"],
    ["fitting", "checkpoint", "summary"],
    ["prepare"],
    ["running"],
    ["verifying", "saved"],
    ["model_files"],
    ["__init__"],
    ["report", "testing"],
    ["planning"],
    ["reproduce"],
    ["graph_commands"],
    ["model_commands"],
    ["net"],
    ["cli"],
    ["__main__"],
]
PACKAGES = {"data", "models", "algorithms", "sim", "report", "reproduce", "net"}
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}

# What the mathematics of an algorithm needs; no engine, file, graph or clock.
FOR_ALGORITHMS = {
    "algorithm",
    "algorithms",
    "aggregation",
    "curvature",
    "errors",
    "hub",
    "losses",
    "newton",
    "requests",
    "synthesis",
    "training",
    "vectors",
}
# Reports are made from records, never from live objects.
NOT_FOR_REPORTS = {"algorithm", "algorithms", "sim", "running", "prepare", "experiment"}


def modules() -> dict[str, Path]:
    files = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}
    return {name.replace("/", "."): path for name, path in sorted(files.items())}


MODULES = modules()


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports when it is loaded, with their full names."""
    found = set()
    for node in loaded(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "peerage"}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module == "peerage":  # a module, or a name of the public face
                names = {alias.name for alias in node.names}
                found |= {
                    f"peerage.{n}" if n in MODULES or n in PACKAGES else "peerage" for n in names
                }
            elif node.module and node.module.startswith("peerage."):
                found.add(node.module)
    return {name.partition(".")[2] or "__init__" for name in found}


def loaded(tree: ast.AST) -> list[ast.AST]:
    """All statements but those for type checkers only."""
    nodes: list[ast.AST] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        nodes += [child, *loaded(child)]
    return nodes


def top(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_has_its_place():
    assert {top(name) for name in MODULES} == set(LEVEL)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_downwards(name):
    own = top(name)
    upwards = {
        other
        for other in imported(MODULES[name])
        if top(other) != own and LEVEL[top(other)] >= LEVEL[own]
    }
    assert not upwards


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) == "algorithms"])
def test_algorithms_import_mathematics_only(name):
    assert {top(other) for other in imported(MODULES[name])} <= FOR_ALGORITHMS


@pytest.mark.parametrize("name", [name for name in MODULES if top(name) == "report"])
def test_reports_know_records_only(name):
    assert not {top(other) for other in imported(MODULES[name])} & NOT_FOR_REPORTS


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_packages_have_no_circles_inside(package):
    graph = {
        name: {other for other in imported(MODULES[name]) if top(other) == package}
        for name in MODULES
        if top(name) == package
    }
    # A package's own name stands for its __init__.
    graph = {
        name: {other if other in MODULES else f"{other}.__init__" for other in others}
        for name, others in graph.items()
    }
    while graph:
        ground = {name for name, others in graph.items() if not others & graph.keys()}
        assert ground, f"these import each other: {sorted(graph)}"
        graph = {name: others for name, others in graph.items() if name not in ground}


def test_all_forms_of_imports_are_seen(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import numpy, peerage.state\n"
        "from peerage import specs, run\n"
        "from peerage.sim.pool import spread as deal\n"
        "if TYPE_CHECKING:\n    from peerage import cli\n"
        "def late():\n    from peerage.report import html\n"
    )
    assert imported(path) == {"state", "specs", "__init__", "sim.pool", "report"}


def test_benchmarks_find_what_they_import(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    assert importlib.import_module("run").CLAIMS
