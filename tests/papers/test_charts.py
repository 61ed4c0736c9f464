"""Methods over seeds beside a paper: numbers by hand, exact texts, figures by their axes."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console

from peerage.errors import InputError
from peerage.papers import charts as studies
from peerage.papers.charts import Line, NodePanel, Panel, Plot
from peerage.papers.papertable import Cell, PaperTable
from peerage.records.rows import RunRecord
from peerage.report import figures
from peerage.report.series import Estimate, Series, batches_per_round, crossing, estimate
from peerage.report.terminal import StudyProgress


def make_record(
    accuracies: dict[int, float],
    *,
    algorithm: str = "dechw",
    notes: dict[int, dict[int, float]] | None = None,
) -> RunRecord:
    """Two nodes and one link; round r takes r seconds, half of them for training, and 80 bytes."""
    rows: list[Any] = []
    for r in range(max(accuracies, default=0) + 1):
        seconds = {"train": 0.5 * r, "wait": 0.1 * r, "total": 1.0 * r}
        row: dict[str, Any] = {"scope": "network", "round": r, "nodes": 2, "bytes": 80}
        row |= {"bytes_total": 80 * r, "seconds": seconds}
        if r in accuracies:
            row |= {"accuracy": accuracies[r], "loss": 2 - accuracies[r]}
        rows.append(row)
    nodes: list[Any] = [
        {"scope": "node", "round": r, "node": n, "accuracy": 0.5, "loss": 1.0, "notes": {"h": v}}
        for r, values in (notes or {}).items()
        for n, v in values.items()
    ]
    summary = {"algorithm": algorithm, "status": "finished"}
    return RunRecord(
        Path(algorithm), {}, {"edges": [[0, 1]]}, summary, {}, tuple(rows), tuple(nodes)
    )


def make_series(*seeds: dict[int, float], label: str = "DecHW", algorithm: str = "dechw") -> Series:
    return Series(label, algorithm, tuple(make_record(s, algorithm=algorithm) for s in seeds))


TWO = make_series({0: 0.1, 2: 0.4, 4: 0.8, 6: 0.9}, {0: 0.1, 2: 0.6, 4: 0.6})
ONE = make_series({0: 0.1, 2: 0.3, 4: 0.5}, label="CFA", algorithm="cfa")
EMPTY = Series("DecDiff", "decdiff", ())


# Series


def test_curves_end_with_the_shortest_run() -> None:
    rounds, means, stds = TWO.curve("accuracy")
    assert rounds == [0, 2, 4]
    assert means == pytest.approx([0.1, 0.5, 0.7])
    assert stds == pytest.approx([0.0, 0.1, 0.1])
    assert TWO.curve("loss").means == pytest.approx([1.9, 1.5, 1.3])


def test_estimates_by_hand() -> None:
    assert TWO.final() == pytest.approx((0.7, 0.1))  # 0.8 and 0.6 in round 4
    assert TWO.best() == pytest.approx((0.75, 0.15))  # 0.9 and 0.6
    assert TWO.last_10() == pytest.approx((0.6, 0.0))  # (0.4 + 0.8) / 2, 0.6; never round 0
    assert TWO.rounds_to(0.5) == (3.0, 1.0, 2, 2)  # rounds 4 and 2
    assert TWO.rounds_to(0.7) == (None, None, 1, 2)
    assert TWO.bytes_per_node() == pytest.approx((200.0, 40.0))  # 480 / 2 and 320 / 2
    # Two directions of one link, four bytes a number: 480 / 8 and 320 / 8.
    assert TWO.scalars() == pytest.approx((50.0, 10.0))
    assert TWO.seconds_per_round() == pytest.approx((3.0, 0.5))  # (1..6) / 6 and (1..4) / 4
    assert TWO.phases() == pytest.approx({"train": 1.5, "wait": 0.3, "other": 1.2})


def test_the_last_ten_are_rounds_not_evaluations() -> None:
    series = make_series({0: 0.0, 5: 0.2, 10: 0.4, 15: 0.6, 20: 0.8})
    assert series.last_10() == (pytest.approx(0.7), None)  # rounds 11 to 20
    assert make_series({0: 0.25}).last_10() == (0.25, None)


def test_one_seed_has_no_deviation_and_no_seed_nothing() -> None:
    assert ONE.final() == (0.5, None)
    assert ONE.rounds_to(0.3) == (2.0, None, 1, 1)
    assert ONE.curve("accuracy").stds == [0.0, 0.0, 0.0]
    for nothing in (EMPTY, Series("a", "a", (make_record({}),))):
        assert nothing.curve("accuracy") == ([], [], [])
        assert nothing.final() == nothing.best() == nothing.last_10() == (None, None)
        assert nothing.seconds_per_round() == (None, None)
    assert EMPTY.rounds_to(0.5) == (None, None, 0, 0)
    assert EMPTY.phases() == {}


def test_losses_fall_to_a_level_between_evaluations() -> None:
    # The loss is 2 - accuracy: 1.9, 1.6, 1.2, 1.1 and 1.9, 1.4, 1.4.
    assert TWO.lowest() == pytest.approx((1.25, 0.15))
    assert TWO.final("loss") == pytest.approx((1.3, 0.1))  # 1.2 and 1.4 in round 4
    # 1.5 lies a quarter of the way from 1.6 to 1.2, and four fifths from 1.9 to 1.4.
    assert TWO.rounds_below(1.5) == pytest.approx((2.05, 0.45, 2, 2))
    assert TWO.rounds_below(1.3) == (None, None, 1, 2)
    assert ONE.rounds_below(1.95) == (0.0, None, 1, 1)  # from the beginning
    assert EMPTY.rounds_below(1.0) == (None, None, 0, 0)
    assert EMPTY.lowest() == (None, None)
    assert crossing({}, 1.0) is None
    assert crossing({0: 3.0, 1: 1.0, 2: 2.0, 3: 0.0}, 1.0) == 1.0


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.integers(0, 30), st.floats(0, 5), min_size=1), st.floats(0, 5))
def test_a_crossing_is_on_the_curve_and_nothing_is_below_it_before(
    curve: dict[int, float], level: float
) -> None:
    found = crossing(curve, level)
    rounds = sorted(curve)
    assert (found is None) == (min(curve.values()) > level)
    if found is not None:
        assert all(curve[r] > level for r in rounds if r < found - 1e-9)
        at = np.interp(found, rounds, [curve[r] for r in rounds])
        assert at == pytest.approx(level, abs=1e-6) or found == rounds[0]


def test_values_inside_tables_have_curves() -> None:
    record = make_record({0: 0.1, 2: 0.2})
    rows: list[Any] = list(record.network)
    rows[1]["moved"] = {"train": 3.0, "cosine": None}
    rows[2]["moved"] = {"train": 4.0, "cosine": -0.5}
    series = Series("a", "decavg", (record,))
    assert series.curve(("moved", "train")) == ([1, 2], [3.0, 4.0], [0.0, 0.0])
    assert series.curve(("moved", "cosine")).rounds == [2]
    assert series.final(("moved", "train")) == (4.0, None)
    assert series.curve(("moved", "train", "x")) == series.curve(("other",)) == ([], [], [])


def test_wall_clock_is_counted_in_batches() -> None:
    record = make_record({0: 0.1})
    record.experiment["local"] = {"steps": 8, "batch_size": 16}
    assert batches_per_round(record) == 8
    record.experiment["local"] = {"epochs": 2, "batch_size": 16}
    record.setup["examples"] = [80, 81, 16]
    assert batches_per_round(record) == pytest.approx(2 * (5 + 6 + 1) / 3)
    assert Series("a", "decavg", (record, record)).batches() == pytest.approx(8)


def test_estimates_in_other_units() -> None:
    assert Estimate(2.0, 0.5).times(3) == (6.0, 1.5)
    assert Estimate(2.0, None).times(3) == (6.0, None)
    assert Estimate(None, None).times(3) == (None, None)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
def test_estimates_are_those_of_numpy(values: list[float]) -> None:
    assert estimate(values) == pytest.approx((np.mean(values), np.std(values)), abs=1e-9)
    assert estimate([*values, None]) == (None, None)


# Tables

ROUNDS = PaperTable(
    title="Table II",
    row_titles=("Dir", "Method"),
    columns=(("MNIST", "50 %"), ("MNIST", "75 %"), ("CIFAR10", "50 %")),
    rows=(
        (("1", "CFA"), (Cell(256.4, 3.6, 256), Cell(None, None, 324), Cell(None))),
        (("1", "DecHW*"), (Cell(13.6, 1.2, 14), Cell(40, None, None), Cell(7, note="1 seed"))),
        (("0.2", "CFA"), (Cell(9.4), Cell(50), Cell(None, note="1 seed"))),
        (("0.2", "DecHW*"), (Cell(9.2), Cell(60), Cell(None))),
    ),
    unit="rounds",
    best="min",
    notes=("Two nodes.",),
)
ACCURACY = PaperTable(
    title="Table I",
    row_titles=("Method",),
    columns=(("Dir(1)",), ("a|b",)),
    rows=(
        (("CFA",), (Cell(0.9, 0.004, 0.9149, 0.013), Cell(0.5, None, 0.5))),
        (("DecHW",), (Cell(0.93514, 0.0, 0.935, 0.005), Cell(0.49999999, None, 0.6))),
    ),
    unit="percent",
    best="max",
)


def test_markdown_to_the_letter() -> None:
    assert (
        ROUNDS.markdown()
        == """## Table II

Communication rounds. Each cell: ours ± standard deviation over seeds (paper, difference). \
**Bold**: best of ours per column and group. -: not reached or not run.

### MNIST

| Dir | Method | 50 % | 75 % |
| --- | --- | --: | --: |
| 1 | CFA | 256 ± 4 (256, +0) | - (324) |
|  | DecHW\\* | **14 ± 1** (14, +0) | **40** (-) |
| 0.2 | CFA | **9** (-) | **50** (-) |
|  | DecHW\\* | **9** (-) | 60 (-) |

### CIFAR10

| Dir | Method | 50 % |
| --- | --- | --: |
| 1 | CFA | - |
|  | DecHW\\* | **7** [1] |
| 0.2 | CFA | - [1] |
|  | DecHW\\* | - |

- [1] 1 seed
- Two nodes.
"""
    )
    assert (
        ACCURACY.markdown(level=3)
        == """### Table I

Accuracy in percent. Each cell: ours ± standard deviation over seeds (paper, difference). \
**Bold**: best of ours per column.

| Method | Dir(1) | a\\|b |
| --- | --: | --: |
| CFA | 90.00 ± 0.40 (91.49, -1.49) | **50.00** (50.00, +0.00) |
| DecHW | **93.51 ± 0.00** (93.50, +0.01) | **50.00** (60.00, -10.00) |
"""
    )


def test_counts_are_grouped_and_a_table_may_have_no_paper() -> None:
    rows = ((("DecHW",), (Cell(43680000.0),)),)
    table = PaperTable("Sent", ("Method",), (("scalars",),), rows, "count", "min")
    assert table.legend() == "Counts. Each cell: ours."
    assert table.markdown().splitlines()[-1] == "| DecHW | 43 680 000 |"  # alone, not the best


def test_losses_and_numbers_have_three_places_and_their_own_deviation() -> None:
    rows = ((("plateau",), (Cell(0.98765, 0.01, 1.0),)),)
    table = PaperTable("mu", ("",), (("mu",),), rows, "number", spread="standard error of the fit")
    assert table.legend() == (
        "Numbers. Each cell: ours ± standard error of the fit (paper, difference)."
    )
    assert table.markdown().splitlines()[-1] == "| plateau | 0.988 ± 0.010 (1.000, -0.012) |"
    short = PaperTable("mu", ("",), (("mu",),), rows, "number", digits=1)
    assert short.markdown().splitlines()[-1] == "| plateau | 1.0 ± 0.0 (1.0, +0.0) |"
    loss = PaperTable("loss", ("",), (("a",),), rows, "loss", "min")
    assert loss.legend().startswith("Test loss (cross-entropy). Each cell: ours")
    (axes,) = studies.against_paper(table).axes
    assert axes.get_xscale() == "linear"


def test_csv_has_a_line_per_cell() -> None:
    lines = list(csv.DictReader(io.StringIO(ROUNDS.csv())))
    assert len(lines) == 12
    assert lines[0] == {
        "Dir": "1", "Method": "CFA", "group": "MNIST", "column": "50 %", "ours": "256.4",
        "spread": "3.6", "paper": "256", "paper_spread": "",
        "difference": str(256.4 - 256), "note": "",
    }  # fmt: skip
    assert lines[5]["note"] == "1 seed"
    assert ACCURACY.csv().splitlines()[0] == (
        "Method,column,ours,spread,paper,paper_spread,difference,note"
    )


def test_json_holds_every_cell() -> None:
    table = json.loads(json.dumps(ACCURACY.as_dict(), allow_nan=False))
    assert {key: table[key] for key in ("title", "unit", "best", "notes")} == {
        "title": "Table I", "unit": "percent", "best": "max", "notes": [],
    }  # fmt: skip
    assert len(table["cells"]) == 4
    assert table["cells"][0] == {
        "row": {"Method": "CFA"}, "column": ["Dir(1)"], "ours": 0.9, "spread": 0.004,
        "paper": 0.9149, "paper_spread": 0.013, "difference": pytest.approx(-0.0149), "note": "",
    }  # fmt: skip


def printed(table: PaperTable, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None, legacy_windows=False)
    console.print(table.rich(width))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_a_terminal_gets_the_widest_layout_that_fits() -> None:
    assert printed(ACCURACY, 80).splitlines()[3:] == [
        "┏━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━┓",
        "┃ Method ┃                      Dir(1) ┃                   a|b ┃",
        "┡━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━┩",
        "│ CFA    │ 90.00 ± 0.40 (91.49, -1.49) │  50.00 (50.00, +0.00) │",
        "│ DecHW  │ 93.51 ± 0.00 (93.50, +0.01) │ 50.00 (60.00, -10.00) │",
        "└────────┴─────────────────────────────┴───────────────────────┘",
    ]
    folded = printed(ACCURACY, 50)
    assert "│ CFA    │   90.00 ± 0.40 │           50.00 │" in folded
    assert "│        │ (91.49, -1.49) │  (50.00, +0.00) │" in folded
    assert printed(ACCURACY, 40).count("CFA") == 2  # one table per column
    titles = re.compile(r"^(?:MNIST|CIFAR10) *$", re.MULTILINE)
    assert titles.findall(printed(ROUNDS, 60)) == []  # one table, with two levels in its head
    assert len(titles.findall(printed(ROUNDS, 50))) == 2


@pytest.mark.parametrize("width", [80, 120])
def test_the_largest_table_of_the_paper_fits_the_terminal(width: int) -> None:
    columns = tuple((d, f"{x} %") for d in ("MNIST", "Fashion", "CIFAR10") for x in (50, 75, 90))
    cells = tuple(Cell(777.0, 77.0, 999.0) for _ in columns)
    methods = ("DecHetero", "DecDiff (VT)")
    rows = tuple(((f"α = {a}", method), cells) for a in (1, 0.5, 0.2) for method in methods)
    text = printed(PaperTable("II", ("Dir", "Method"), columns, rows, "rounds", "min"), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert text.count("777 ± 77") == len(rows) * len(columns)
    assert text.count("(999, -222)") == len(rows) * len(columns)


def test_tables_of_uneven_shape_are_rejected() -> None:
    with pytest.raises(InputError, match=r"row \('a',\) .* has 2 cells; give 1 titles and 1 cells"):
        PaperTable("t", ("m",), (("c",),), ((("a",), (Cell(1), Cell(2))),), "count")
    with pytest.raises(InputError, match="one header level or all have two"):
        PaperTable("t", ("m",), (("c",), ("d", "e")), (), "count")


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.one_of(st.none(), st.integers(1, 5)), min_size=2, max_size=6),
    st.sampled_from(["min", "max"]),
)
def test_the_best_are_all_that_equal_the_extreme(values: list[int | None], best: Any) -> None:
    rows = tuple(((str(k),), (Cell(value),)) for k, value in enumerate(values))
    table = PaperTable("t", ("m",), (("c",),), rows, "rounds", best)
    known = [value for value in values if value is not None]
    extreme = (min if best == "min" else max)(known, default=math.nan)
    assert [table.is_best(k, 0) for k in range(len(values))] == [v == extreme for v in values]


# Figures


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_have_a_column_per_panel_and_a_row_per_key() -> None:
    figure = studies.curves([Panel("Dir(1)", (TWO, ONE)), Panel("Dir(0.2)", (ONE,), (0.3, 0.4))])
    first, second, third, fourth = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["Dir(1)", "Dir(0.2)", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == ["test accuracy", "", "test loss", ""]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "", "round", "round"]
    lines = first.get_lines()
    assert list(lines[0].get_xdata()) == [0, 2, 4]
    assert np.allclose(lines[0].get_ydata(), [0.1, 0.5, 0.7])
    assert len(first.collections) == 1  # a band around the mean of two seeds, none around one seed
    corners = first.collections[0].get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == pytest.approx((0.1, 0.8))
    assert [line.get_ydata()[0] for line in second.get_lines()] == [0.3, 0.4, 0.1]
    assert len(fourth.get_lines()) == 1  # a target is an accuracy
    assert np.allclose(third.get_lines()[0].get_ydata(), [1.9, 1.5, 1.3])
    assert legend(figure) == ["DecHW", "CFA", "± std of 2 seeds", "target"]


def test_a_method_looks_the_same_in_all_panels() -> None:
    star = make_series({0: 0.1, 2: 0.3}, label="DecHW*")
    figure = studies.curves([Panel("a", (TWO, star)), Panel("b", (star,))], keys=("accuracy",))
    plain, starred = figure.axes[0].get_lines()
    (again,) = figure.axes[1].get_lines()
    assert plain.get_color() == figures.BLUE.lower()
    for part in ("get_color", "get_marker", "get_linestyle"):
        assert getattr(plain, part)() != getattr(starred, part)() == getattr(again, part)()


def test_long_curves_have_few_markers_that_take_turns() -> None:
    long = dict.fromkeys(range(1001), 0.5)
    panel = Panel("a", tuple(make_series(long, label=f"{k}", algorithm=f"{k}") for k in range(5)))
    places = [line.get_markevery() for line in studies.curves([panel]).axes[0].get_lines()]
    assert places == [(143 * k // 5, 143) for k in range(5)]  # 1001 // 7 = 143


def test_many_panels_stand_in_lines_of_three() -> None:
    figure = studies.curves([Panel(f"{k}", (ONE,)) for k in range(5)])
    assert len(figure.axes) == 4 * 3
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["0", "1", "2", "", "", "", "3", "4", "", "", "", ""]
    assert [axes.axison for axes in figure.axes[6:9]] == [True, True, False]


def test_losses_of_many_magnitudes_get_a_logarithmic_axis() -> None:
    wide = make_series({0: -98.0, 2: 1.9})  # the loss is 2 - accuracy: 100 and 0.1
    figure = studies.curves([Panel("a", (wide,))], keys=("loss",))
    assert figure.axes[0].get_yscale() == "log"
    assert studies.curves([Panel("a", (ONE,))], keys=("loss",)).axes[0].get_yscale() == "linear"


def test_lines_of_nodes() -> None:
    notes = {r: {n: 10.0 ** (2 - r) + n for n in range(19)} for r in (1, 2, 3)}
    record = make_record({0: 0.1, 3: 0.2}, notes=notes)
    panels = [NodePanel("(a)", record, "h", "norm"), NodePanel("(b)", record, "h", "norm", False)]
    figure = studies.node_lines(panels)
    assert legend(figure) == [f"node {n}" for n in range(0, 19, 2)]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "linear"]
    lines = figure.axes[0].get_lines()
    assert len(lines) == 10
    assert list(lines[1].get_xdata()) == [1, 2, 3]
    assert np.allclose(lines[1].get_ydata(), [12.0, 3.0, 2.1])
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 10


def test_a_table_as_a_picture() -> None:
    figure = studies.against_paper(ACCURACY)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["CFA", "DecHW"]
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    assert [line.get_xdata()[0] for line in hollow] == [0.9149, 0.935, 0.5, 0.6]
    ours = [bar.lines[0].get_xdata()[0] for bar in axes.containers]
    assert ours == [0.9, 0.93514, 0.5, 0.49999999]
    first = axes.containers[0].lines[2][0].get_segments()[0]
    assert first[:, 0] == pytest.approx([0.896, 0.904])
    assert legend(figure) == ["filled: ours ± std", "hollow: paper", "Dir(1)", "a|b"]
    assert axes.get_xscale() == "linear"


def test_groups_of_rows_and_columns_in_a_picture() -> None:
    figure = studies.against_paper(ROUNDS)
    assert [axes.get_title() for axes in figure.axes] == ["MNIST", "CIFAR10"]
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log"]
    names = figure.axes[0].get_yticklabels()
    assert [(text.get_text(), text.get_fontweight()) for text in names] == [
        ("1", "bold"), ("CFA", "normal"), ("DecHW*", "normal"),
        ("0.2", "bold"), ("CFA", "normal"), ("DecHW*", "normal"),
    ]  # fmt: skip
    # The inner columns differ, so each panel has its own legend.
    assert legend(figure) == ["filled: ours ± std", "hollow: paper"]
    own = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert own == [["50 %", "75 %"], ["50 %"]]


def test_phases_stand_beside_curves() -> None:
    figure = studies.curves_and_phases(Panel("MNIST", (TWO, ONE)))
    left, right = figure.axes
    assert len(left.get_lines()) == 2
    widths = [bar.get_width() for bar in right.patches]
    assert widths == pytest.approx([1.5, 0.3, 1.2, 1.25, 0.25, 1.0])
    assert [text.get_text() for text in right.get_yticklabels()] == ["DecHW", "CFA"]


LINES = (
    Line("8 nodes", [0, 1, 10, 100], [50.0, 2.0, 1.0, 0.5], [1.0, 0.2, 0.1, 0.6]),
    Line("8 nodes", [0, 1, 10, 100], [3.0, 2.3, 2.2, 1.0], dashed=True),
    Line("16 nodes", [1, 10], [2.2, 1.2]),
)
KINDS = {"with gain": False, "without gain": True}


def test_lines_have_a_colour_per_label_and_dashes_for_a_second_kind() -> None:
    panel = Plot("(a)", LINES, log="xy", levels=(("16 nodes", 0.4), ("", 0.3)))
    figure = studies.plots([panel], kinds=KINDS, across="best")
    (axes,) = figure.axes
    colours = [line.get_linestyle() + str(line.get_color()) for line in axes.get_lines()]
    first, second = figures.BLUE, figures.RED
    assert colours[2:] == [f"-{first}", f"--{first}", f"-{second}"]
    assert [line.get_ydata()[0] for line in axes.get_lines()[:2]] == [0.4, 0.3]
    assert [line.get_color() for line in axes.get_lines()[:2]] == [second, "#444444"]
    # There is no round 0 on a logarithmic axis, and no deviation below it.
    assert list(axes.get_lines()[2].get_xdata()) == [1, 10, 100]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.2 * 0.5)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert legend(figure) == ["8 nodes", "16 nodes", "with gain", "without gain", "± std", "best"]


def test_panels_with_the_same_values_share_their_axis() -> None:
    alike = studies.plots([Plot("(a)", LINES), Plot("(b)", LINES[2:])])
    first, second = alike.axes
    assert first.get_ylim() == second.get_ylim()
    assert (first.get_ylabel(), second.get_ylabel()) == ("test loss", "")
    unlike = studies.plots([Plot("(a)", LINES), Plot("(b)", LINES[2:], ylabel="cosine")])
    first, second = unlike.axes
    assert first.get_ylim() != second.get_ylim()
    assert [axes.get_ylabel() for axes in unlike.axes] == ["test loss", "cosine"]


def test_a_label_of_dashed_lines_only_is_dashed_in_the_legend() -> None:
    figure = studies.plots([Plot("", (*LINES[:1], Line("law", [1, 2], [2.0, 1.0], dashed=True)))])
    handles = figure.legends[0].get_lines()
    assert [line.get_linestyle() for line in handles] == ["-", "--"]


def test_algorithms_look_as_everywhere() -> None:
    lines = tuple(Line(name, [0, 1], [0.1, 0.2]) for name in ("DecAvg", "DecHW"))
    figure = studies.plots([Plot("", lines, ylabel="test accuracy", floor=0.0)])
    (axes,) = figure.axes
    assert [line.get_color() for line in axes.get_lines()] == [figures.RED, figures.BLUE]
    assert axes.get_ylim()[0] == 0
    assert axes.yaxis.get_major_formatter()(0.25, None) == "25%"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.5, 2.5], ["0.5", "0.7", "1", "1.5", "2"]),
        ([0.3, 25.0], ["0.5", "1", "2", "5", "10", "20"]),
        ([0.5, 500.0], ["1", "10", "100"]),
    ],
)
def test_logarithmic_axes_have_plain_numbers(values: list[float], ticks: list[str]) -> None:
    figure = studies.plots([Plot("", (Line("a", [1, 2], values),), log="y")])
    (axes,) = figure.axes
    low, high = axes.get_ylim()
    shown = [t for t in axes.get_yticks() if low <= t <= high]
    assert [axes.yaxis.get_major_formatter()(t, None) for t in shown] == ticks


@pytest.mark.slow
def test_every_figure_can_be_saved(tmp_path: Path) -> None:
    blank = Series("$a$ <b>", "decavg", (make_record({}),))
    bare = PaperTable("t", ("m",), (("c",),), ((("$a$",), (Cell(None),)),), "rounds", "min")
    drawings = {
        "curves": studies.curves([Panel("$x$", (TWO, blank, EMPTY))]),
        "start": studies.curves([Panel("a", (make_series({0: 0.1}),))]),
        "nothing": studies.curves([]),
        "nodes": studies.node_lines([NodePanel("a", make_record({}), "h", "norm")]),
        "no-nodes": studies.node_lines([]),
        "table": studies.against_paper(bare),
        "phases": studies.curves_and_phases(Panel("a", (blank, EMPTY))),
        "plots": studies.plots([Plot("$a$", LINES, log="xy")] * 4, kinds=KINDS),
        "no-lines": studies.plots([Plot("a", (), log="xy"), Plot("b", (Line("c", [], []),))]),
        "no-plots": studies.plots([]),
    }
    for name, figure in drawings.items():
        for kind in ("png", "svg"):
            figures.save(figure, tmp_path / f"{name}.{kind}")
    assert len(list(tmp_path.iterdir())) == 2 * len(drawings)


# Progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_file_gets_few_lines() -> None:
    clock, file = Clock(), io.StringIO()
    with StudyProgress([10, 30], Console(file=file, width=40), clock) as bar:
        bar.start("CFA, seed 0", 1, 2, 10)
        for r in range(1, 11):
            clock.now += 4
            bar.advance(r / 10, f"round {r}/10")
        bar.finish()
        bar.start("DecHW, seed 0", 2, 2, 30)
        clock.now += 12
        bar.advance(0.1, "round 1/10")
        bar.finish()
    assert file.getvalue().splitlines() == [
        "run 1 of 2: CFA, seed 0",
        # 32 s of 40 s; 8 of 40 units are done, and 32 more take four times as long.
        "run 1 of 2: CFA, seed 0, round 8/10; 20 %, 0:00:32 elapsed, 0:02:08 left",
        "run 1 of 2: CFA, seed 0, round 10/10, ended after 0:00:40; "
        "25 %, 0:00:40 elapsed, 0:02:00 left",
        "run 2 of 2: DecHW, seed 0",
        "run 2 of 2: DecHW, seed 0, round 1/10, ended after 0:00:12; 100 %, 0:00:52 elapsed",
    ]


def test_the_time_left_counts_what_this_process_did() -> None:
    clock = Clock()
    bar = StudyProgress([100, 20, 10], Console(file=io.StringIO()), clock)
    assert bar.share_of_all() == 0
    bar.start("first was skipped", 2, 3, 20, done=0.5)  # and half of this one is from before
    assert bar.share_of_all() == pytest.approx(110 / 130)
    assert bar.seconds_left() is None
    clock.now += 6
    bar.advance(0.6, "round 6/10")  # 2 units in 6 s; 8 + 10 units are left
    assert bar.seconds_left() == pytest.approx(54)
    clock.now += 4
    assert bar.seconds_left() == pytest.approx(50)
    clock.now += 100
    assert bar.seconds_left() == 0


def test_a_terminal_gets_one_bar_under_what_runs_now(capsys: pytest.CaptureFixture[str]) -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with StudyProgress([1, 1], console, clock) as bar:
        for number in (1, 2):
            bar.start("DecHW [x], mnist, Dir 0.2, seed 1", number, 2, 1)
            clock.now += 60
            bar.advance(0.5, "round 12/250, accuracy 31.7 %")
            bar.bars.refresh()
            bar.finish()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    now = "run 2 of 2: DecHW [x], mnist, Dir 0.2, seed 1, round 12/250, accuracy 31.7 %"
    assert now in lines
    assert any(line.startswith("all runs") and "75 %, 0:02:00 elapsed" in line for line in lines)
    assert any("ended after 0:01:00" in line for line in lines)
    assert capsys.readouterr().out == ""
    assert StudyProgress([]).console.stderr
