"""A user's own code in an exported network: which files peers get, and whether these suffice."""

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from peerage.errors import InputError
from peerage.experiment.experiment import Experiment
from peerage.experiment.identity import own_code
from peerage.experiment.outside import renamed
from peerage.experiment.toml import PYTHON_OBJECT, toml

FOLDER = "code"  # of a peer's folder, with the files

README = """\
3. Code

The experiment runs code that is not part of peerage:

{files}
It can do all that the user of the peer can, so read it. If you agree, add

    {flags}

to the command below when you start the peer for the first time. The peer remembers it in run/, also
for systemd, and refuses any other code. Start it once like this before you install the unit; you
can end it with Ctrl-C as soon as it logs something.

"""


@dataclass(frozen=True)
class ShippedCode:
    """The files that every peer gets, and the experiment that names them there."""

    experiment: str  # as TOML
    files: dict[str, bytes]  # path in the folder of a peer -> content

    @property
    def hashes(self) -> dict[str, str]:
        return {path: hashlib.sha256(text).hexdigest() for path, text in self.files.items()}

    @property
    def readme(self) -> str:
        """What the administrator of a machine has to know; empty without code."""
        if not self.files:
            return ""
        listed = "".join(f"    {path}, SHA-256 {h}\n" for path, h in self.hashes.items())
        flags = " ".join(f"--allow-code {h}" for h in dict.fromkeys(self.hashes.values()))
        return README.format(files=listed, flags=flags)


def ship(experiment: Experiment) -> ShippedCode:
    """The files of an experiment's own code; raise an InputError if they do not stand alone."""
    table = experiment.table()
    _check_files(table)
    places: dict[str, str] = {}
    files: dict[str, bytes] = {}
    for file, sha256 in own_code(experiment).items():
        place = f"{FOLDER}/{Path(file).name}"
        if place in files:
            raise InputError(
                f"two files of the experiment are called {Path(file).name}; rename one of them"
            )
        content = Path(file).read_bytes()
        if hashlib.sha256(content).hexdigest() != sha256:
            raise InputError(f"{file} has just changed; export again")
        _check_alone(Path(file), content)
        places[file], files[place] = place, content
    moved = renamed(table, lambda file, name: f"{places[file]}:{name}")
    return ShippedCode(toml(moved), files)


def _check_files(table: dict[str, object]) -> None:
    """Raise an InputError if an algorithm or a model is an object, which is in no file."""
    for kind in ("algorithm", "model"):
        members = table[kind] if isinstance(table[kind], list) else [table[kind]]
        for member in members:  # type: ignore[attr-defined]
            if member.get("name") == PYTHON_OBJECT:
                raise InputError(
                    f"the {kind} {member['value']!r} is a Python object, which other machines "
                    f"lack; put it into a file of its own and name it as my_file.py:NAME"
                )


def _check_alone(file: Path, content: bytes) -> None:
    """Raise an InputError if a file imports another one of its folder, which peers do not get."""
    for line, name in _imports(ast.parse(content)):
        sibling = not name or _is_sibling(name, file.parent)
        if sibling:
            raise InputError(
                f"{file} line {line} imports {name or 'its own package'}, a file beside it that "
                "other machines lack; a file of your own may import only installed packages, so "
                "put all into one file"
            )


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the top-level module of each import; an empty name for a relative import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "" if node.level else str(node.module).partition(".")[0]


def _is_sibling(name: str, folder: Path) -> bool:
    """Whether a module is a file or folder beside the importing file, and not installed."""
    if name in sys.stdlib_module_names or not (
        (folder / f"{name}.py").exists() or (folder / name).is_dir()
    ):
        return False
    try:
        spec = find_spec(name)
    except ValueError:  # a module without a spec
        spec = None
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    found = [Path(place).absolute() for place in places if place]
    return not found or any(place.is_relative_to(folder.absolute()) for place in found)
