"""What of each paper was run: read from the committed results, never written by hand.

`python -m peerage.papers.coverage README.md docs/results/README.md docs/papers/*.md` updates the
tables between the marks `papers`, `results` and `studies-p0` to `studies-p4` in these documents.
"""

import json
import os
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from peerage.algorithms import ALGORITHMS
from peerage.experiment.catalogue import between_marks, markdown
from peerage.experiment.catalogue import paper as paper_of
from peerage.papers.runner import PAPER_STUDIES
from peerage.papers.study import Study

RESULTS = Path("docs/results")
SCALES = ("paper", "small")  # the larger one first; scale smoke only tests the program
VARIANTS = ("", "-standard")  # of P2: inputs in [0, 1] as now, and standardised as before
AGREEMENT = {"yes", "in part", "no", "none"}
PAPERS = {
    "p0": (
        "[DecHW](https://arxiv.org/abs/2601.19938)",
        "Models from different random starts are averaged with weights by curvature.",
    ),
    "p1": (
        "[DFML](https://arxiv.org/abs/2402.01863)",
        "Models of different architectures learn from each other, without a server.",
    ),
    "p2": (
        "[HWA](https://doi.org/10.1007/s10994-022-06292-8)",
        "The ancestor of DecHW: a hub averages the models of its clients by curvature.",
    ),
    "p3": (
        "[FACADE](https://arxiv.org/abs/2410.02541)",
        "Nodes with other data than most find each other and are treated fairly.",
    ),
    "p4": (
        "[Initialisation and network effects](https://arxiv.org/abs/2403.15855)",
        "How the graph shrinks what nodes learn at first, and the gain that prevents it.",
    ),
}


@dataclass(frozen=True)
class Result:
    """A committed result: one study at one scale."""

    study: Study
    scale: str
    done: int  # finished runs
    runs: int
    seeds: int
    command: str  # from the page
    agreement: str  # a word of AGREEMENT
    page: Path

    @property
    def standardised(self) -> bool:
        """Whether inputs had mean 0 and deviation 1, an option of P2's studies."""
        return self.page.stem.endswith(VARIANTS[-1])


def results(folder: Path = RESULTS) -> list[Result]:
    """All committed results, in the order of the studies; the larger scale first."""
    words = tomllib.loads((folder / "agreement.toml").read_text())
    return [
        _read(page, study, scale, words)
        for study in PAPER_STUDIES.values()
        for scale in SCALES
        for variant in VARIANTS
        if (page := folder / study.id[:2] / f"{study.id}-{scale}{variant}.md").exists()
    ]


def _read(page: Path, study: Study, scale: str, words: dict[str, str]) -> Result:
    data = json.loads(page.with_suffix(".json").read_text())
    finished = [run for run in data["runs"] if run["status"] == "finished"]
    seeds = {seed for run in finished for seed in _seeds(run)}
    made = re.search(r"^Made by `(?P<command>[^`]+)`", page.read_text(), re.MULTILINE)
    assert made is not None, f"{page} names no command"
    assert (data["id"], data["scale"]) == (study.id, scale), page
    return Result(
        study=study,
        scale=scale,
        done=len(finished),
        runs=len(data["runs"]),
        seeds=len(seeds),
        command=made["command"],
        agreement=words[page.stem],
        page=page,
    )


def _seeds(run: dict[str, Any]) -> range:
    if "seed" in run:
        return range(run["seed"], run["seed"] + 1)
    return range(run["first_seed"], run["last_seed"] + 1)


def largest(found: Sequence[Result]) -> dict[str, Result]:
    """The result at the largest scale of each study, by its id."""
    return {result.study.id: result for result in reversed(found)}


def papers_table(found: Sequence[Result], root: Path) -> str:
    """One row per paper: what it is about, how much of it is implemented, and what was run."""
    rows = []
    run = largest(found)
    for paper, (name, about) in PAPERS.items():
        ids = [id for id in PAPER_STUDIES if id.startswith(f"{paper}-")]
        own = [cls for cls in ALGORITHMS.values() if paper_of(cls).startswith(paper.upper())]
        made = [run[id] for id in ids if id in run]
        scales = Counter(result.scale for result in made)
        counts = [f"{scales[scale]} at scale {scale}" for scale in SCALES if scales[scale]]
        words = Counter(result.agreement for result in made)
        claims = [f"{words[word]} {word}" for word in ("yes", "in part", "no") if words[word]]
        readme = RESULTS / paper / "README.md"
        link = f"[results]({_from(root, readme)})" if readme.exists() else ""
        rows.append(
            [
                paper.upper(),
                f"{name}. {about}",
                f"{len(own)} algorithms, {len(ids)} studies",
                f"{', '.join([*counts, f'{len(ids) - len(made)} not yet'])} {link}".strip(),
                ", ".join(claims) or "-",
            ]
        )
    return markdown(
        ["", "paper", "implemented", "studies run, by their largest scale", "agree with the paper"],
        rows,
    )


def results_table(found: Sequence[Result], root: Path) -> str:
    """One row per study that was run, at its largest scale, and the ids of the others."""
    run = largest(found)
    rows = [
        [
            f"[{id}]({_from(root, result.page)})",
            result.study.title.replace("Not in the paper: ", ""),
            result.scale + (", inputs standardised" if result.standardised else ""),
            f"{result.done} of {result.runs}",
            str(result.seeds),
            _agreement(result),
        ]
        for id in PAPER_STUDIES
        if (result := run.get(id)) is not None
    ]
    table = markdown(["id", "what it is", "scale", "runs", "seeds", "agrees"], rows)
    missing = ", ".join(f"`{id}`" for id in PAPER_STUDIES if id not in run)
    return f"{table}\n\nNot run yet: {missing}."


def studies_table(paper: str, found: Sequence[Result], root: Path) -> str:
    """One row per study of a paper, with its largest scale that was run."""
    run = largest(found)
    rows = []
    for id, study in PAPER_STUDIES.items():
        if not id.startswith(f"{paper}-"):
            continue
        result = run.get(id)
        name = f"[{id}]({_from(root, result.page)})" if result else id
        words = [result.scale, _agreement(result)] if result else ["not yet", ""]
        rows.append([name, study.title, *words])
    return markdown(["id", "what it is", "largest scale run", "agrees"], rows)


def refreshed(text: str, root: Path) -> str:
    """The document with new tables between its marks; links are relative to the folder `root`."""
    found = results()
    tables = {"papers": papers_table, "results": results_table}
    tables |= {f"studies-{paper}": partial(studies_table, paper) for paper in PAPERS}
    for mark, table in tables.items():
        text = between_marks(text, mark, partial(table, found, root))
    return text


def _agreement(result: Result) -> str:
    return "-" if result.agreement == "none" else result.agreement


def _from(root: Path, page: Path) -> str:
    return Path(os.path.relpath(page, root)).as_posix()


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(refreshed(path.read_text(), path.parent))
