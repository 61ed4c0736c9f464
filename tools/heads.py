"""Draws the picture of heads that find clusters, from the recipe facade-quick.

    python tools/heads.py [docs/images/heads.png]

`peerage run facade-quick` makes the same run, and its report shows the same picture.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from peerage.experiment.catalogue import recipes
from peerage.experiment.experiment import Experiment
from peerage.records.rows import RunRecord
from peerage.report import fairness_figures, figures
from peerage.runs.run import run


def draw(path: Path) -> RunRecord:
    """Run the recipe, draw the picture, and return the record of the run."""
    with TemporaryDirectory() as folder:
        text = recipes()["facade-quick"].read_text()
        run(Experiment.from_toml(text), Path(folder) / "run")
        record = RunRecord.load(Path(folder) / "run")
    figures.save(fairness_figures.head_choice(record), path)
    return record


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/heads.png"))
