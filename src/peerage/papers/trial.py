"""What a study shows at scale smoke: no comparison with the paper, and the data that was used.

At this scale, one small data set stands in for all others. A difference to the paper's numbers
means nothing there, and the names of its data sets would be wrong.
"""

import re
from dataclasses import replace

from matplotlib.figure import Figure
from matplotlib.text import Text

from peerage.papers.datasets import TITLES
from peerage.papers.papertable import PaperTable
from peerage.papers.study import DIGITS, Results, Study, StudyOutput, Training

NAMES = sorted({*TITLES, *TITLES.values()}, key=len, reverse=True)  # Fashion-MNIST before MNIST
PATTERN = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, NAMES))})(?![\w-])")


def show(study: Study, results: Results) -> StudyOutput:
    """The tables and the figure of a study, as its scale allows."""
    shown = study.show(results)
    if results.plan.scale != "smoke":
        return shown
    trained = any(isinstance(job, Training) for job in results.jobs)
    if trained:
        _rename_in(shown.figure)
    return replace(shown, tables=tuple(_without_paper(t, trained) for t in shown.tables))


def stand_in(text: str) -> str:
    """A text in which digits are named as the data.

    >>> stand_in("accuracy, Fashion-MNIST"), stand_in("loss")
    ('accuracy, digits for Fashion-MNIST', 'loss')
    """
    return PATTERN.sub(rf"{DIGITS} for \1", text)


def _without_paper(table: PaperTable, trained: bool) -> PaperTable:
    rename = stand_in if trained else str
    rows = tuple(
        (
            tuple(map(rename, titles)),
            tuple(replace(cell, paper=None, paper_spread=None) for cell in cells),
        )
        for titles, cells in table.rows
    )
    columns = tuple(tuple(map(rename, levels)) for levels in table.columns)
    lowest = tuple(map(rename, table.lowest))
    return replace(table, title=rename(table.title), columns=columns, rows=rows, lowest=lowest)


def _rename_in(figure: Figure) -> None:
    for text in figure.findobj(Text):
        if PATTERN.search(text.get_text()):
            text.set_text(stand_in(text.get_text()))
