"""The names that users can write, for `peerage list` and for the completion in shells.

A shell waits for every completion, so it must not load torch, which the tables of names do. The
names are therefore also in names.json; `python -m peerage.cli.names` writes it.
"""

import json
from collections.abc import Callable
from functools import cache
from glob import escape
from pathlib import Path

FILE = Path(__file__).with_name("names.json")
# What each family is, in the order of `peerage list`.
FAMILIES = {
    "algorithms": "what a node does in a round",
    "datasets": "the examples, and your own as npz, csv, idx or folder",
    "models": "the networks that nodes train",
    "mixes": "several models, which the nodes take in turn",
    "topologies": "the graph between the nodes",
    "partitions": "how the examples are split between the nodes",
    "shifts": "how the examples of a cluster differ",
    "losses": "what training minimises",
    "corrections": "terms that training adds to a gradient",
    "gains": "factors on the initial weights",
    "plots": "the figures of peerage plot KIND RUN...",
    "recipes": "complete experiments, for peerage run NAME",
}
STUDIES = "studies"  # ids for `peerage reproduce`, which lists them itself
DOWNLOADS = "downloads"  # data sets for `peerage data get`

Complete = Callable[[str], list[str]]


@cache
def names(kind: str) -> tuple[str, ...]:
    """All names of a family, or of STUDIES or DOWNLOADS."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))[kind])


def beginning_with(*kinds: str) -> Complete:
    """A function for Typer: the names of these kinds that begin with a text."""

    def complete(incomplete: str) -> list[str]:
        return [name for kind in kinds for name in names(kind) if name.startswith(incomplete)]

    return complete


def complete_algorithms(incomplete: str) -> list[str]:
    """Completions of the last of several algorithms separated by commas.

    >>> complete_algorithms("local,dech")
    ['local,dechw']
    """
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in names("algorithms") if name.startswith(last)]


def complete_experiment(incomplete: str) -> list[str]:
    """Recipes, and TOML files and folders that begin with a text."""
    folder, slash, start = incomplete.rpartition("/")
    paths = sorted(Path(folder + slash).glob(f"{escape(start)}*"))
    shown = [path for path in paths if start or not path.name.startswith(".")]
    folders = [f"{folder}{slash}{path.name}/" for path in shown if path.is_dir()]
    files = [f"{folder}{slash}{path.name}" for path in shown if path.suffix == ".toml"]
    return [*beginning_with("recipes")(incomplete), *folders, *files]


def complete_family(incomplete: str) -> list[tuple[str, str]]:
    """Families and what they are."""
    return [(name, about) for name, about in FAMILIES.items() if name.startswith(incomplete)]


def collect() -> dict[str, list[str]]:
    """All names, from the tables that define them."""
    from peerage.data import PUBLISHED
    from peerage.experiment.catalogue import entries
    from peerage.papers.runner import STUDIES as studies

    found = {family: [entry["name"] for entry in entries(family)] for family in FAMILIES}
    downloads = [name for name, published in PUBLISHED.items() if published.files]
    return {**found, DOWNLOADS: downloads, STUDIES: list(studies)}


def written(found: dict[str, list[str]]) -> str:
    """The content of names.json, with one kind per line."""
    lines = [f"  {json.dumps(kind)}: {json.dumps(members)}" for kind, members in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(written(collect()), encoding="utf-8")
