"""The documentation site: `make docs`.

The source is the checkout itself, so every link works here and on a code host. What only the site
needs, its table of contents and the reference of the public names, is added while pages are read.
"""

import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

import peerage as pg  # noqa: E402

project = "Peerage"
release = version = pg.__version__
copyright = "the authors of Peerage, under the Apache licence 2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "runs", "reproduced", "src", "tests", "examples"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"Peerage {release}"
html_extra_path = ["redirect"]  # index.html, which leads to docs/index.html
html_copy_source = False
html_show_sphinx = False
nitpicky = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True

# Page -> captions and pages of its table of contents; a star stands for all pages of a folder.
CONTENTS = {
    "docs/index": {
        "Start": ["../README", "pictures", "tutorial-researcher", "real-peers", "add-an-algorithm"],
        "Use": [
            "guide",
            "python",
            "dashboard",
            "algorithms",
            "networks",
            "cluster",
            "hubs",
            "mutual-learning",
            "privacy",
            "real-peers-reference",
            "install",
            "troubleshooting",
        ],
        "Papers": [
            "papers/p0",
            "papers/p1",
            "papers/p2",
            "papers/p3",
            "papers/p4",
            "reproduce",
            "lessons",
            "results/README",
        ],
        "Reference": ["api", "glossary", "how-it-works", "speed"],
        "Project": ["../CONTRIBUTING", "../CHANGELOG"],
        "Decisions": ["decisions/*"],
    },
    "docs/results/README": {"": [*(f"p{paper}/README" for paper in range(5)), "net/README"]},
    **{f"docs/results/p{paper}/README": {"": ["p*"]} for paper in range(5)},
    "docs/results/net/README": {"": ["attacks", "chaos", "fuzz", "size"]},
}

# Prefix of the module that defines a public name -> the heading of the reference; in this order.
PARTS = {
    "peerage.runs": "Run, compare, load",
    "peerage.experiment": "Experiments",
    "peerage.data": "Data",
    "peerage.models": "Models",
    "peerage.algorithms": "Algorithms",
    "peerage.work": "Local work and losses",
    "peerage": "The contract of an algorithm",
}


def table_of_contents(page: str) -> str:
    return "".join(
        "\n```{toctree}\n:hidden:\n:glob:\n"
        + (f":caption: {caption}\n" if caption else "")
        + "\n".join(["", *pages, "```", ""])
        for caption, pages in CONTENTS[page].items()
    )


def reference() -> str:
    """Every public name with its docstring, under the heading of the room that defines it."""
    parts: dict[str, list[str]] = {heading: [] for heading in PARTS.values()}
    for name in sorted(pg.__all__, key=str.lower):
        home = pg._HOMES[name]
        value = getattr(pg, name)
        if not callable(value):
            continue  # families and constants, which the page describes in words
        prefix = next(prefix for prefix in PARTS if home.startswith(prefix))
        directive = "autoclass" if inspect.isclass(value) else "autofunction"
        members = "   :members:\n" if inspect.isclass(value) else ""
        parts[PARTS[prefix]].append(f".. {directive}:: peerage.{name}\n{members}")
    return "".join(
        f"\n## {heading}\n\n```{{eval-rst}}\n" + "\n".join(entries) + "```\n"
        for heading, entries in parts.items()
        if entries
    )


def add_what_the_site_needs(_app: object, page: str, source: list[str]) -> None:
    if page in CONTENTS:
        source[0] += table_of_contents(page)
    if page == "docs/api":
        source[0] += reference()


def as_restructured_text(_app: object, *about: Any) -> None:
    """Make `code` in docstrings literal, and bars and stars in formulas plain; examples stay."""
    lines: list[str] = about[-1]
    blocks = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(map(_escaped, blocks)).split("\n")


def _escaped(block: str) -> str:
    if block.lstrip().startswith(">>>"):
        return block
    parts = block.split("`")  # code stands at the odd places
    plain = [re.sub(r"([|*])", r"\\\1", part) for part in parts[::2]]
    code = [f"\\ ``{part}``\\ " for part in parts[1::2]]  # a letter may follow, as in `x`s
    return "".join(p + c for p, c in zip(plain, [*code, ""], strict=True))


def setup(app: Any) -> None:
    app.connect("source-read", add_what_the_site_needs)
    app.connect("autodoc-process-docstring", as_restructured_text)
