"""Names that shells complete, and `peerage list` without a family."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import peerage
from support.processes import TIMEOUT

from peerage.cli.names import FAMILIES, FILE, collect, complete_experiment, names, written
from peerage.experiment.catalogue import LISTS, entries

PROGRAM = Path(sys.executable).with_name("peerage")


@pytest.mark.slow  # the studies take seconds to load
def test_the_file_has_the_names_of_the_package() -> None:
    assert FILE.read_text() == written(collect()), "run python -m peerage.cli.names"
    assert set(FAMILIES) == set(LISTS)


def test_list_shows_all_families_with_their_sizes() -> None:
    done = peerage("list")
    assert done.code == 0
    shown = {line.split()[0]: line.split()[1:] for line in done.lines if line}
    for family, about in FAMILIES.items():
        assert shown[family] == [str(len(entries(family))), *about.split()]
    sizes = json.loads(peerage("list --json").out)["families"]
    assert sizes == {family: len(names(family)) for family in FAMILIES}


def test_experiments_are_recipes_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("demo.toml", "deep/mine.toml", "deep/data.npz", ".hidden/a.toml"):
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).touch()
    assert complete_experiment("de") == ["demo", "deep/", "demo.toml"]
    assert complete_experiment("deep/") == ["deep/mine.toml"]
    assert complete_experiment(".h") == [".hidden/"]
    assert ".hidden/" not in complete_experiment("")
    assert complete_experiment(f"{tmp_path}/dem") == [f"{tmp_path}/demo.toml"]


@pytest.mark.slow
def test_bash_completes_commands_flags_and_names(tmp_path: Path) -> None:
    """As in a terminal: the script is evaluated, and the function of the shell is called."""
    lines = {
        "peerage rew": ["rewind"],
        "peerage run --alg": ["--algorithm"],
        "peerage run --algorithm dech": ["dechw"],
        "peerage compare --algorithms local,dech": ["local,dechw"],
        "peerage run --dataset mn": ["mnist"],
        "peerage plan --model h2-": ["h2-cnn", "h2-efficientnet"],
        "peerage run dfm": ["dfml-quick"],
        "peerage reproduce p0-half": ["p0-half"],
        "peerage data get cifar": ["cifar10", "cifar100"],
        "peerage list al": ["algorithms"],
    }
    script = 'eval "$(_PEERAGE_COMPLETE=source_bash peerage)"\n'
    for line in lines:
        words = line.split()
        script += f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _peerage_completion peerage\n"
        script += 'echo "${COMPREPLY[*]}"\n'
    path = f"{PROGRAM.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.stdout.splitlines() == [" ".join(found) for found in lines.values()], done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_loads_no_torch(shell: str) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "sys.argv[0] = 'peerage'; from peerage.cli.app import main; main()"
    line = "peerage run --algorithm dechw"
    variables = {
        "_PEERAGE_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": "3",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    *found, loaded = done.stdout.splitlines()
    assert loaded == "False", done.stderr
    assert any("dechw" in line for line in found)
