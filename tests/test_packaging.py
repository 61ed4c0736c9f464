"""The wheel and the source archive work without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import peerage as pg

ROOT = Path(__file__).parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def do(*command: str | Path, at: Path) -> str:
    """Run a command outside the checkout, with nothing of this environment but the path."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(at), "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        list(map(str, command)), cwd=at, env=environment, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.mark.slow
def test_the_source_archive_gives_a_wheel_that_runs(tmp_path: Path) -> None:
    # A copy, because building writes into the folder.
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "src" / "peerage",
        copy / "src" / "peerage",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    do(sys.executable, "-c", BUILD, tmp_path, at=copy)
    [archive] = tmp_path.glob("*.tar.gz")
    assert archive.name == f"peerage-{pg.__version__}.tar.gz"
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    [source] = (tmp_path / "unpacked").iterdir()
    wheel_command = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    do(*PIP, *wheel_command, "--wheel-dir", tmp_path, source, at=tmp_path)
    [wheel] = tmp_path.glob("*.whl")

    # Nothing is missing: modules, recipes, templates, names for shells, digits.
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if name.startswith("peerage/")}
        [entries] = [name for name in packed.namelist() if name.endswith("entry_points.txt")]
        assert "peerage = peerage.cli.app:main" in packed.read(entries).decode()
    package = copy / "src"
    assert inside == {
        path.relative_to(package).as_posix()
        for path in (package / "peerage").rglob("*")
        if path.is_file()
    }

    # A new environment, which sees other packages of this one, but no editable installation.
    place = tmp_path / "env"
    venv.create(place, symlinks=True)
    [site] = place.glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    installing = ["install", "--no-deps", "--no-index", "--quiet", wheel]
    do(*PIP, "--python", place / "bin" / "python", *installing, at=tmp_path)
    program = place / "bin" / "peerage"
    found = do(
        place / "bin" / "python", "-c", "import peerage; print(peerage.__file__)", at=tmp_path
    )
    assert Path(found.strip()).is_relative_to(place)
    assert do(program, "--version", at=tmp_path).strip().endswith(pg.__version__)
    assert "facade-quick" in do(program, "list", "recipes", at=tmp_path)
    small = ["--nodes", "3", "--topology", "ring", "--rounds", "1", "--epochs", "1"]
    do(program, "run", *small, "--engine", "serial", "--out", "run", at=tmp_path)
    do(program, "report", "run", "--out", "page.html", at=tmp_path)
    assert "digits" in (tmp_path / "page.html").read_text()


def test_the_citation_names_this_version_and_the_papers() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {pg.__version__}\n" in text
    for mark in ("2601.19938", "2402.01863", "10.1007/s10994-022-06292-8", "2410.02541"):
        assert mark in text
    assert "2403.15855" in text


def test_the_container_file_installs_what_the_project_declares() -> None:
    text = (ROOT / "Containerfile").read_text()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"\.\[(\S+)\]", text)
    assert set(extras.split(",")) <= declared["optional-dependencies"].keys()
    copied = re.search(r"^COPY (.+) \./$", text, re.MULTILINE)
    assert copied is not None
    assert all((ROOT / name).exists() for name in copied[1].split())
    assert declared["readme"] in copied[1]
    assert set(declared["license-files"]) <= set(copied[1].split())


def test_the_workflow_runs_the_command_of_the_readme() -> None:
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert "run: make test" in text
    assert "$ make test" in (ROOT / "README.md").read_text()
