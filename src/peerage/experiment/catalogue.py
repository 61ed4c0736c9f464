"""The catalogue: every family of named values, with the options of each and a description.

`python -m peerage.experiment.catalogue docs/algorithms.md docs/guide.md` updates the tables in
these documents.
"""

import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from peerage import specs
from peerage.algorithms import ALGORITHMS
from peerage.data import DATASETS, PARTITIONS
from peerage.data.shifts import SHIFTS
from peerage.errors import InputError, did_you_mean
from peerage.graphs.gains import GAINS
from peerage.graphs.topology import TOPOLOGIES
from peerage.models import MIXES, MODELS
from peerage.work.losses import CORRECTIONS, LOSSES

FAMILIES: dict[str, specs.Family] = {
    "algorithms": ALGORITHMS,
    "corrections": CORRECTIONS,
    "datasets": DATASETS,
    "gains": GAINS,
    "losses": LOSSES,
    "models": MODELS,
    "partitions": PARTITIONS,
    "shifts": SHIFTS,
    "topologies": TOPOLOGIES,
}
LISTS = (*FAMILIES, "mixes", "plots", "recipes")  # all that users can list
CIFAR = (3, 32, 32)  # shape for which the parameters of mixes are counted


def recipes() -> dict[str, Path]:
    """The experiment files that ship with the package, by name."""
    folder = Path(str(files("peerage.experiment") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def entries(family: str) -> list[dict[str, str]]:
    """Name, options with defaults, and description of each member of a family."""
    if family == "recipes":
        return [_recipe(name, path) for name, path in recipes().items()]
    if family == "mixes":
        return [
            {"name": name, "options": ",".join(mix.members), "about": mix.about}
            for name, mix in MIXES.items()
        ]
    if family == "plots":
        from peerage.report import plots  # matplotlib is slow to import

        return plots.entries()
    if family not in FAMILIES:
        raise InputError(f"unknown list {family!r}; {did_you_mean(family, LISTS)}")
    return [
        {"name": name, "options": _options(cls), "about": first_sentence(cls)}
        for name, cls in FAMILIES[family].items()
    ]


def first_sentence(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ")


def markdown_table(family: str) -> str:
    """A family as a Markdown table; algorithms also have a column for the paper."""
    rows = []
    for entry in entries(family):
        options = " ".join(f"`{option}`" for option in entry["options"].split(",") if option)
        rows.append([f"`{entry['name']}`", entry["about"], options or "none"])
    if family != "algorithms":
        return markdown(["name", "what it is", "options and defaults"], rows)
    papers = [paper(cls) for cls in FAMILIES[family].values()]
    rows = [[*row, source] for row, source in zip(rows, papers, strict=True)]
    return markdown(["name", "what a node does in a round", "options and defaults", "paper"], rows)


def overview() -> str:
    """A Markdown table with the names in every family but the algorithms, one row per family."""
    families = [family for family in LISTS if family != "algorithms"]
    rows = [[family, ", ".join(f"`{e['name']}`" for e in entries(family))] for family in families]
    return markdown(["", "names"], rows)


def mixes_table() -> str:
    """All mixes as a Markdown table; models with their parameters for 10 and for 100 classes."""
    rows = []
    for name, mix in MIXES.items():
        members = []
        for member in mix.members:
            counts = (f"{count_parameters(member, CIFAR, classes):,}" for classes in (10, 100))
            members.append(f"`{member}` {' / '.join(counts)}")
        rows.append([f"`{name}`", mix.about, "; ".join(members)])
    return markdown(["mix", "what it is", "models and their parameters"], rows)


def count_parameters(model: str, shape: tuple[int, ...], classes: int) -> int:
    """The number of parameters of a model by name, for examples of this shape."""
    with torch.device("meta"):  # sizes without values
        module = specs.parse(model, "model", MODELS).build(shape, classes)
    return sum(parameter.numel() for parameter in module.parameters())


def paper(cls: type[Any]) -> str:
    """The first paper (P0 to P4) and all preprints in the docstring of the class's module."""
    text = sys.modules[cls.__module__].__doc__ or ""
    preprints = re.findall(r"arXiv:(\d+\.\d+)", text)
    links = [f"[arXiv:{number}](https://arxiv.org/abs/{number})" for number in preprints]
    return ", ".join([*re.findall(r"\bP[0-4]\b(?: Eq\. \d+)?", text)[:1], *links]) or "none"


def refreshed(text: str) -> str:
    """The document with new tables between marks: `<!-- losses -->` and `<!-- /losses -->`."""
    special = {"families": overview, "mixes": mixes_table}
    for name in (*special, *FAMILIES):
        text = between_marks(text, name, special.get(name, partial(markdown_table, name)))
    return text


def between_marks(text: str, mark: str, table: Callable[[], str]) -> str:
    """The document with a new table between `<!-- mark -->` and `<!-- /mark -->`, if there."""
    before, start, rest = text.partition(f"<!-- {mark} -->")
    _, end, after = rest.partition(f"<!-- /{mark} -->")
    return f"{before}{start}\n{table()}\n{end}{after}" if end else text


def main(paths: Sequence[str]) -> None:
    for path in map(Path, paths):
        path.write_text(refreshed(path.read_text()))


def markdown(titles: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(c.replace('|', '&#124;') for c in line)} |" for line in lines)


def _options(cls: type[Any]) -> str:
    return ",".join(
        f"{field.name}="
        + ("..." if field.default is MISSING else specs.spelled(field.default).lower())
        for field in specs.options_of(cls)
    )


def _recipe(name: str, path: Path) -> dict[str, str]:
    text = path.read_text(encoding="utf-8")
    lines = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]
    table = tomllib.loads(text)
    options = f"{table['nodes']} nodes, {table['rounds']} rounds, {table['dataset']['name']}"
    return {"name": name, "options": options, "about": " ".join(lines)}


if __name__ == "__main__":
    main(sys.argv[1:])
