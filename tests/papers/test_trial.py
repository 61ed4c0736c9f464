"""At scale smoke, studies show no paper's numbers and name the data that was used."""

from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from peerage.experiment import Experiment
from peerage.papers.p0.settings import Setting
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import Plan, Results, Study, StudyOutput, Training
from peerage.papers.trial import show

TABLE = PaperTable(
    "Accuracy on CIFAR-10",
    ("data", "method"),
    (("MNIST", "50 %"), ("Fashion-MNIST", "50 %")),
    ((("cifar10", "DecHW"), (Cell(0.5, 0.1, 0.9, 0.2), Cell(0.5, 0.1, 0.8, 0.2))),),
    "percent",
)


def shown(scale: Any) -> StudyOutput:
    figure = Figure()
    figure.subplots().set_title("Accuracy, MNIST")
    study = Study("s", "Study", "claim", lambda plan: [], lambda _: StudyOutput((TABLE,), figure))
    job = Training(Setting("mnist", 0.2, "DecHW"), Experiment())
    return show(study, Results(Plan(scale), [job], {}, 0))


def test_smoke_shows_no_paper_and_the_data_that_was_used() -> None:
    output = shown("smoke")
    (table,) = output.tables
    assert table.title == "Accuracy on digits for CIFAR-10"
    assert [levels[0] for levels in table.columns] == [
        "digits for MNIST",
        "digits for Fashion-MNIST",
    ]
    assert table.rows[0][0] == ("digits for cifar10", "DecHW")
    for text in (table.markdown(), table.csv(), str(table.as_dict())):
        assert "90" not in text.replace("90 %", "")
        assert "0.9" not in text
    assert "difference" not in table.markdown()
    assert all((c.difference, c.paper, c.ours) == (None, None, 0.5) for c in table.rows[0][1])
    assert output.figure.axes[0].get_title() == "Accuracy, digits for MNIST"


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_other_scales_show_the_paper(scale: str) -> None:
    output = shown(scale)
    assert output.tables == (replace(TABLE),)
    assert output.figure.axes[0].get_title() == "Accuracy, MNIST"
