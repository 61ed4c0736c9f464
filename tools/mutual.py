"""Draws the picture of mutual learning between architectures, from the recipe dfml-quick.

    python tools/mutual.py [docs/images/mutual.png]

`peerage compare dfml-quick --algorithms dec-fedavg,dfml` makes the same runs, and its report shows
the same picture.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from peerage.experiment.catalogue import recipes
from peerage.experiment.experiment import Experiment
from peerage.records.rows import RunRecord
from peerage.report import alpha_figure, figures
from peerage.runs.run import run


def draw(path: Path) -> list[RunRecord]:
    """Run the recipe with both algorithms, draw the picture, and return the records."""
    recipe = Experiment.from_toml(recipes()["dfml-quick"].read_text())
    records = []
    with TemporaryDirectory() as folder:
        for name in ("dec-fedavg", "dfml"):
            run(Experiment(**{**dict(recipe), "algorithm": name}), Path(folder) / name)
            records.append(RunRecord.load(Path(folder) / name))
    figures.save(alpha_figure.accuracy_over_alpha(records), path)
    return records


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/mutual.png"))
