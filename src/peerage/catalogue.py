"""What there is: every family of named values, with options and a sentence about each."""

import inspect
import tomllib
from dataclasses import MISSING
from importlib.resources import files
from pathlib import Path
from typing import Any

from peerage import specs
from peerage.algorithms import ALGORITHMS
from peerage.data import DATASETS, PARTITIONS
from peerage.errors import InputError, did_you_mean
from peerage.initialise import GAINS
from peerage.models import MODELS
from peerage.topology import TOPOLOGIES

FAMILIES: dict[str, specs.Family] = {
    "algorithms": ALGORITHMS,
    "datasets": DATASETS,
    "gains": GAINS,
    "models": MODELS,
    "partitions": PARTITIONS,
    "topologies": TOPOLOGIES,
}


def recipes() -> dict[str, Path]:
    """The experiments that come with the package, by name."""
    folder = Path(str(files("peerage") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def entries(family: str) -> list[dict[str, str]]:
    """Name, options with their defaults, and the first sentence about each member of a family."""
    if family == "recipes":
        return [_recipe(name, path) for name, path in recipes().items()]
    if family not in FAMILIES:
        raise InputError(f"unknown list {family!r}; {did_you_mean(family, [*FAMILIES, 'recipes'])}")
    return [
        {"name": name, "options": _options(cls), "about": first_sentence(cls)}
        for name, cls in FAMILIES[family].items()
    ]


def first_sentence(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def _options(cls: type[Any]) -> str:
    return ",".join(
        f"{field.name}=..." if field.default is MISSING else f"{field.name}={field.default}".lower()
        for field in specs.options_of(cls)
    )


def _recipe(name: str, path: Path) -> dict[str, str]:
    text = path.read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    table = tomllib.loads(text)
    options = f"{table['nodes']} nodes, {table['rounds']} rounds, {table['dataset']['name']}"
    return {"name": name, "options": options, "about": " ".join(lines)}
