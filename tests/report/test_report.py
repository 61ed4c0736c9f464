"""Reports are made from run folders alone: their numbers by hand, their pages by parsing."""

import io
import json
import math
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from peerage.errors import DiskError, InputError
from peerage.files import read_json, write_json
from peerage.records.rows import MetricWriter, RunRecord
from peerage.report import figures, groups, inline, seeds, tables, terminal
from peerage.report.export import export
from peerage.report.html import headline, notes, page, write_report
from peerage.report.pictures import CURVES, Picture
from peerage.report.series import Series, by_method

TOML = """nodes = {nodes}
seed = {seed}
[algorithm]
name = "{algorithm}"
[partition]
alpha = {alpha}
[engine]
workers = {workers}
"""


def make_run(
    folder: Path,
    accuracies: dict[int, list[float]],
    *,
    rounds: int | None = None,
    algorithm: str = "dechw",
    label: str = "DecHW",
    status: str = "finished",
    message: str = "",
    seed: int = 0,
    alpha: float = 0.2,
    workers: int = 2,
) -> RunRecord:
    """A run with the given accuracy of each node in each evaluated round; 1000 bytes per round."""
    nodes = len(next(iter(accuracies.values())))
    done = max(accuracies) if rounds is None else rounds
    folder.mkdir(parents=True)
    text = TOML.format(nodes=nodes, seed=seed, algorithm=algorithm, alpha=alpha, workers=workers)
    (folder / "experiment.toml").write_text(text)
    with MetricWriter(folder / "metrics.jsonl") as metrics:
        for r in range(done + 1):
            seconds = {"train": 1.0 * r, "wait": 0.5, "total": 2.0 * r}
            row: dict[str, Any] = {"scope": "network", "round": r, "nodes": nodes}
            row |= {"bytes": 1000, "bytes_total": 1000 * r, "seconds": seconds}
            values = accuracies.get(r)
            if values is None:
                metrics.append(row)
                continue
            loss = [2.0 - value for value in values]
            for key, of_nodes in (("accuracy", values), ("loss", loss)):
                row |= {key: np.mean(of_nodes), f"{key}_std": np.std(of_nodes)}
                row |= {f"{key}_min": min(of_nodes), f"{key}_max": max(of_nodes)}
            metrics.append({**row, "consensus": 1.0 / (r + 1)})
            for node, value in enumerate(values):
                row = {"scope": "node", "round": r, "node": node}
                metrics.append({**row, "accuracy": value, "loss": loss[node]})
    setup = {
        "allocation": [[node, 3] for node in range(nodes)],
        "classes": ["cat", "dog"],
        "examples": [node + 3 for node in range(nodes)],
        "edges": [[node, node + 1] for node in range(nodes - 1)],
        "topology": {"connected": True, "degree_min": 1, "degree_mean": 1.5, "degree_max": 2},
        "parameters": [7] * nodes,
        "test_examples": 12345,
    }
    summary = {"run": folder.name, "status": status, "algorithm": algorithm, "label": label}
    summary |= {"dataset": "digits", "nodes": nodes, "rounds": done, "rounds_planned": 4}
    summary |= {"digest": "abc123" if status == "finished" else None, "message": message}
    write_json(folder / "setup.json", setup)
    write_json(folder / "summary.json", summary)
    write_json(folder / "environment.json", {"python": "3.11", "cores": 2, "git": None})
    return RunRecord.load(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    folder = tmp_path_factory.mktemp("pair")
    good = make_run(folder / "a", {0: [0.1, 0.1], 2: [0.4, 0.6], 3: [0.7, 0.9], 4: [0.6, 0.8]})
    poor = {0: [0.1, 0.1], 4: [0.3, 0.5]}
    return [good, make_run(folder / "b", poor, algorithm="decavg", label="DecAvg")]


@pytest.fixture(scope="module")
def text(pair: list[RunRecord]) -> str:
    return page(pair)


# Tables


def test_comparison_by_hand(pair: list[RunRecord]) -> None:
    good, poor = tables.compare(pair)
    assert good["accuracy"] == pytest.approx(0.7)
    assert good["accuracy_std"] == pytest.approx(0.1)
    assert (good["accuracy_min"], good["accuracy_max"]) == (0.6, 0.8)
    assert (good["best_accuracy"], good["best_round"]) == (pytest.approx(0.8), 3)
    assert good["accuracy_last_10"] is None  # there were only four
    # The best of any run is 0.8: the targets are 0.4, 0.6 and 0.72 for both.
    for row in (good, poor):
        assert [row[f"target_{x}"] for x in (50, 75, 90)] == pytest.approx([0.4, 0.6, 0.72])
    assert [good[f"rounds_to_{x}"] for x in (50, 75, 90)] == [2, 3, 3]
    assert [poor[f"rounds_to_{x}"] for x in (50, 75, 90)] == [4, None, None]
    assert (good["bytes_total"], good["bytes_per_node"]) == (4000, 2000)
    assert good["seconds_per_round"] == pytest.approx((2 + 4 + 6 + 8) / 4)


def test_the_last_ten_rounds_are_rounds_not_evaluations(tmp_path: Path) -> None:
    record = make_run(tmp_path / "a", {0: [0.0], 5: [0.2], 10: [0.4], 15: [0.6], 20: [0.8]})
    # Rounds 11 to 20.
    assert tables.compare([record])[0]["accuracy_last_10"] == pytest.approx(0.7)


def test_the_final_accuracy_is_that_of_the_last_evaluated_round(tmp_path: Path) -> None:
    record = make_run(tmp_path / "a", {0: [0.1], 2: [0.3]}, rounds=3, status="interrupted")
    row = tables.compare([record])[0]
    assert (row["accuracy"], row["evaluated_round"], row["rounds"]) == (0.3, 2, 3)
    assert tables.cells([row])[1][0][2] == "3 of 4, interrupted"


def test_a_run_without_evaluation_has_no_numbers(tmp_path: Path) -> None:
    record = make_run(tmp_path / "a", {9: [0.5, 0.5]}, rounds=0, status="running")
    row = tables.compare([record])[0]
    assert row["accuracy"] is row["best_round"] is row["rounds_to_50"] is None
    assert tables.cells([row])[1][0][3:10] == ["-"] * 7


def test_cells_are_what_people_read(pair: list[RunRecord]) -> None:
    titles, (good, poor) = tables.cells(tables.compare(pair))
    assert dict(zip(titles, good, strict=True)) == {
        "run": "DecHW",
        "algorithm": "dechw",
        "rounds": "4",
        "accuracy ± std": "70.0 ± 10.0 %",
        "nodes min..max": "60.0..80.0 %",
        "last 10 rounds": "-",
        "best (round)": "80.0 % (3)",
        "rounds to accuracy 40.0 %": "2",
        "rounds to accuracy 60.0 %": "3",
        "rounds to accuracy 72.0 %": "3",
        "sent per node": "2.00 kB",
        "sent in total": "4.00 kB",
        "time per round": "5.00 s",
    }
    assert poor[7:10] == ["4", "-", "-"]


def test_markdown_is_a_table_with_escaped_bars(tmp_path: Path) -> None:
    record = make_run(tmp_path / "a", {0: [0.1]}, label="a|b")
    lines = tables.markdown(tables.compare([record])).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith(r"| a\|b | dechw | 0")
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {14}


def test_csv_holds_the_numbers(pair: list[RunRecord]) -> None:
    head, good, poor = tables.comma_separated(tables.compare(pair)).splitlines()
    values = dict(zip(head.split(","), poor.split(","), strict=True))
    assert float(values["accuracy"]) == pytest.approx(0.4)
    assert values["rounds_to_75"] == ""
    assert good.startswith("a,DecHW,dechw,finished,2,4,4,")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (12_345, "12.3 kB"),
        (99_960, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (2_052_610_560, "2.05 GB"),
        (3e18, "3000 PB"),
        (None, "-"),
    ],
)
def test_sizes(count: float | None, text: str) -> None:
    assert tables.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0421, "42.1 ms"), (0.9996, "1.00 s"), (11, "11.0 s"), (250.4, "250 s"), (None, "-")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert tables.duration(seconds) == text


def test_equal_labels_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", {0: [0.1]}, alpha=0.1, workers=1),
        make_run(tmp_path / "b", {0: [0.1]}, alpha=0.5),
        make_run(tmp_path / "c", {0: [0.1]}, algorithm="decavg", label="DecAvg", seed=3),
    ]
    assert tables.labels(runs) == ["DecHW (alpha=0.1)", "DecHW (alpha=0.5)", "DecAvg"]
    assert tables.labels(runs[1:]) == ["DecHW", "DecAvg"]


def test_runs_of_the_same_experiment_are_told_apart_by_folder(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, {0: [0.1]}) for name in ("first", "second")]
    assert tables.labels(runs) == ["DecHW (first)", "DecHW (second)"]


def test_tables_fit_the_terminal(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"{n}", {0: [0.1]}, label=f"[bold]run {n}") for n in range(5)]
    for width in (60, 90, 300):
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(tables.rich_table(tables.compare(runs), width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(f"[bold]run {n}" in text for n in range(5))
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


# Terminal


def chart_lines(curves: terminal.Curves, **options: Any) -> list[str]:
    return terminal.chart(curves, **options).plain.splitlines()


def test_values_land_in_the_right_rows() -> None:
    lines = chart_lines({"a": ([0, 1], [0.0, 1.0])}, width=28, height=11)
    plot = [line.partition("┤" if "┤" in line else "│")[2] for line in lines[1:12]]
    assert plot[0][20] == "●"  # round 1 at 100 %: first row, last column
    assert plot[10][0] == "●"  # round 0 at 0 %: last row, first column
    for row, line in enumerate(plot):  # a straight line: two columns per row
        middle = sum(k for k, mark in enumerate(line) if mark != " ") / len(line.split()[0])
        assert middle == pytest.approx(20 - 2 * row, abs=0.6)
    ticks = {row: line.split("┤")[0].strip() for row, line in enumerate(lines[1:12]) if "┤" in line}
    # 11 rows are 44 dots, 0 to 43 from the bottom: 75 % is dot 32, the 11th from the top, in row 2.
    assert ticks == {0: "100 %", 2: "75 %", 5: "50 %", 8: "25 %", 10: "0 %"}


def test_a_level_curve_stays_on_the_row_of_its_tick() -> None:
    lines = chart_lines({"low": ([0, 9], [0.2, 0.2]), "high": ([0, 9], [0.8, 0.8])}, width=40)
    for label, value in (("●", "20 %"), ("▲", "80 %")):
        rows = [line for line in lines[1:17] if label in line]
        assert len(rows) == 1
        assert rows[0].startswith(f"{value} ┤")
    assert lines[-1] == "▲ high 80.0 %   ● low 20.0 %"


def test_the_round_axis_names_rounds_below_their_columns() -> None:
    lines = chart_lines({"a": ([0, 20], [0.0, 1.0])}, width=47, height=8)
    axis, names = lines[9], lines[10]
    for text in ("0", "5", "10", "15", "20"):
        found = re.search(rf"(?<!\d){text}(?!\d)", names)
        assert found
        assert "┬" in axis[found.start() : found.end()]


def test_the_end_of_a_short_curve_is_seen() -> None:
    long = ([0, 1, 2, 3, 4, 5, 6], [0.1] * 7)
    lines = chart_lines({"long": long, "short": ([0, 1], [0.1, 0.1])}, width=20)
    assert sum("▲" in line for line in lines[1:17]) == 1


def test_charts_without_points_say_so() -> None:
    assert chart_lines({"a": ([], [])}) == ["no round has been evaluated yet"]
    lines = chart_lines({"a": ([0], [0.1]), "b": ([0], [math.nan])})
    assert lines[-1] == "● a 10.0 %   ▲ b not evaluated"


def test_a_chart_takes_the_width_of_its_console_and_is_plain_in_a_file() -> None:
    curves = {"run": (list(range(30)), [0.03 * r for r in range(30)])}
    for width in (40, 100):
        file = io.StringIO()
        Console(file=file, width=width).print(terminal.Chart(curves))
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) == width
        assert "\x1b" not in file.getvalue()
    assert terminal.chart(curves, 60, plain=True).plain.isascii()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(20, 130), st.integers(4, 30))
def test_no_curve_leaves_its_frame(values: list[float], width: int, height: int) -> None:
    lines = chart_lines({"run": (list(range(len(values))), values)}, width=width, height=height)
    assert max(map(len, lines)) <= width
    assert sum("●" in line for line in lines[1 : height + 1]) >= 1
    assert lines[height + 1].lstrip().startswith("└")


def progress(console: Console) -> tuple[terminal.RunProgress, list[float]]:
    now = [100.0]
    return terminal.RunProgress(console, clock=lambda: now[0]), now


def test_progress_shows_own_metrics() -> None:
    file = io.StringIO()
    bars, _ = progress(Console(file=file, width=120))
    with bars:
        bars.start("DecAvg", 2)
        bars.advance(1, 0.5, {"wrong": 0.25})
        bars.advance(2, None, {"wrong": None})  # not evaluated
        bars.finish()
    assert [line.split(", ")[1:3] for line in file.getvalue().splitlines()] == [
        ["accuracy 50.0 %", "wrong 0.25"]
    ] * 2


def test_a_log_gets_a_line_about_every_tenth() -> None:
    file = io.StringIO()
    bars, now = progress(Console(file=file, width=20))
    with bars:
        bars.start("[run]", 1000)
        for r in range(1, 1001):
            now[0] += 2
            bars.advance(r, 0.5 if r == 150 else None)
        bars.finish()
    lines = file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "[run]: round 100/1000, 0:03:20 elapsed, 0:30:00 left"
    assert lines[1] == "[run]: round 200/1000, accuracy 50.0 %, 0:06:40 elapsed, 0:26:40 left"
    assert lines[9] == "[run]: round 1000/1000, accuracy 50.0 %, 0:33:20 elapsed"


def test_a_run_that_stops_early_says_where() -> None:
    file = io.StringIO()
    bars, _ = progress(Console(file=file))
    with bars:
        bars.start("run", 100, done=40)
        bars.advance(41, 0.25)
        bars.finish()
    assert file.getvalue() == "run: round 41/100, accuracy 25.0 %, 0:00:00 elapsed, 0:00:00 left\n"


def test_the_time_left_follows_recent_rounds() -> None:
    bars, now = progress(Console(file=io.StringIO()))
    bars.start("run", 100, done=20)
    assert bars.seconds_left() is None
    for r in range(21, 41):
        now[0] += 100 if r <= 30 else 3
        bars.advance(r)
    assert bars.seconds_left() == pytest.approx(60 * 3)
    now[0] += 1
    assert bars.seconds_left() == pytest.approx(60 * 3 - 1)


def test_a_terminal_gets_one_bar_per_run_and_standard_output_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = io.StringIO()
    bars, _ = progress(Console(file=file, force_terminal=True, width=80))
    with bars:
        for label in ("first [x]", "second"):
            bars.start(label, 4)
            bars.advance(4, 0.75)
            bars.finish()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "first [x]" in text
    assert "second" in text
    assert "round 4/4, 75.0 %, 0:00:00" in text
    assert max(map(len, text.splitlines())) <= 80
    assert capsys.readouterr().out == ""
    assert terminal.RunProgress().console.stderr


# Figures


def test_a_curve_that_ends_at_zero_on_a_logarithmic_axis_has_a_label(
    pair: list[RunRecord],
) -> None:
    """As of runs whose nodes have equal models after a final mean."""
    record = pair[0]
    last = record.network[-1]["round"]
    network = tuple({**row, "consensus": float(last - row["round"])} for row in record.network)
    figure = figures.curves([replace(record, network=network)], "consensus")
    [label] = figure.axes[0].texts
    assert label.get_text() == record.label
    assert label.xy == (last - 1, 1.0)


ALL = (
    *(partial(figures.curves, key=key) for key in ("accuracy", "loss", "consensus")),
    figures.bytes_and_accuracy,
    figures.node_accuracies,
    figures.phase_seconds,
    figures.graph,
)


def test_every_algorithm_has_one_style_and_the_papers_groups_differ() -> None:
    assert figures.curve_style("DecHW") == figures.curve_style("dechw") == (figures.BLUE, "o")
    assert figures.curve_style("decdiff_vt") == figures.curve_style("decdiff-vt")
    assert figures.curve_style("my-own") == figures.curve_style("my-own")
    assert len(set(figures.CURVE_STYLES.values())) == len(figures.CURVE_STYLES)
    for group in (
        ("dechw", "decavg", "cfa", "decdiff", "decdiff-vt", "desa"),
        ("dfml", "fedavg", "fedprox", "def-kt", "heterofl", "fedrolex", "fml"),
        ("hwa", "fedavg", "fedprox", "fedcurv", "fednl"),
        ("facade", "el", "dpsgd", "deprl", "dac", "ifca"),
    ):
        for part in zip(*map(figures.curve_style, group), strict=True):
            assert len(set(part)) == len(group)


def test_runs_of_one_algorithm_differ_in_shade_dash_and_marker(tmp_path: Path) -> None:
    runs = figures.styled_runs([make_run(tmp_path / f"{n}", {0: [0.1]}, seed=n) for n in range(4)])
    assert runs[0].colour.lower() == figures.BLUE.lower()
    for part in ("colour", "dash", "marker", "label"):
        assert len({getattr(run, part) for run in runs}) == 4


def test_curves_hold_the_numbers(pair: list[RunRecord]) -> None:
    lines = figures.curves(pair, "accuracy").axes[0].get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[0, 2, 3, 4], [0, 4]]
    assert np.allclose(lines[0].get_ydata(), [0.1, 0.5, 0.8, 0.7])
    traffic = figures.bytes_and_accuracy(pair).axes[0].get_lines()
    assert list(traffic[0].get_xdata()) == [0, 1000, 1500, 2000]
    assert figures.curves(pair, "consensus").axes[0].get_yscale() == "log"


def test_bytes_per_node_never_become_less(pair: list[RunRecord]) -> None:
    """A node that misses rounds does not make the others have sent more, and then less again."""
    pair[0].network[1]["nodes"] = 1
    traffic = figures.bytes_and_accuracy(pair).axes[0].get_lines()
    assert list(traffic[0].get_xdata()) == [0, 1000, 1500, 2000]


def test_phases_are_means_and_the_rest_is_other(pair: list[RunRecord]) -> None:
    # Rounds 1 to 4: training 1, 2, 3, 4, waiting 0.5 each, in total 2, 4, 6, 8 seconds.
    assert figures.phases(pair[0]) == pytest.approx({"train": 2.5, "wait": 0.5, "other": 2.0})


def test_time_of_losses_and_of_own_work_is_shown_under_its_name(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", {0: [0.1, 0.1], 2: [0.4, 0.6]})
    for row in record.network:  # which also has 0.5 of waiting
        row["seconds"] |= {"train": 0.0, "my-work": 0.25, "losses": 0.5, "total": 2.0}
    means = {"losses": 0.5, "wait": 0.5, "my-work": 0.25, "other": 0.75}
    assert list(figures.phases(record)) == list(means)
    assert figures.phases(record) == pytest.approx(means)
    assert Series("DecHW", "dechw", (record,)).phases() == pytest.approx(means)
    legend = figures.phase_seconds([record]).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == list(means)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0.01, 0.2))
def test_spread_labels_keep_order_distance_and_centre(heights: list[float], gap: float) -> None:
    result = figures.space_labels(heights, gap)
    order = sorted(range(len(heights)), key=lambda k: heights[k])
    placed = [result[k] for k in order]
    assert all(b - a >= gap - 1e-9 for a, b in pairwise(placed))
    assert sum(result) == pytest.approx(sum(heights))
    if all(heights[b] - heights[a] >= gap for a, b in pairwise(order)):
        assert result == pytest.approx(heights)


def test_many_nodes_become_a_heat_map(tmp_path: Path) -> None:
    few = make_run(tmp_path / "few", {0: [0.1] * 100})
    many = make_run(tmp_path / "many", {0: [0.1] * 101})
    assert not figures.allocation(few).axes[0].images
    assert figures.allocation(many).axes[0].images[0].get_array().shape == (2, 101)


def test_bubble_areas_are_proportional_to_examples(tmp_path: Path) -> None:
    bubbles = figures.allocation(make_run(tmp_path / "a", {0: [0.1] * 5})).axes[0].collections[0]
    counts = [3, 1, 3, 2, 3, 3, 3, 4, 3]  # node by node; a class without examples has no bubble
    assert np.allclose(bubbles.get_sizes() / bubbles.get_sizes()[0], np.array(counts) / 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg"])
def test_saved_figures_are_reproducible(pair: list[RunRecord], tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        figures.save(figures.curves(pair, "accuracy"), tmp_path / f"{name}.{kind}")
    content = (tmp_path / f"one.{kind}").read_bytes()
    assert content == (tmp_path / f"two.{kind}").read_bytes()
    assert content.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    assert b"matplotlib.org" not in content
    if kind == "png":
        with Image.open(io.BytesIO(content)) as picture:
            assert picture.mode == "P"  # a palette, which keeps files small


def test_other_kinds_of_figures_are_rejected(pair: list[RunRecord], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"end its name in \.png, \.svg or \.pdf"):
        figures.save(figures.curves(pair, "accuracy"), tmp_path / "figure.gif")


@pytest.mark.slow
@pytest.mark.parametrize(("values", "rounds"), [([0.1], 0), ([1.0, 1.0], 1)])
def test_figures_of_tiny_runs_can_be_drawn(
    tmp_path: Path, values: list[float], rounds: int
) -> None:
    run = make_run(tmp_path / "run", {0: values}, rounds=rounds, label="$a$ <b>")
    for draw in ALL:
        assert figures.render(draw([run]), "svg").endswith(b"</svg>\n")
    assert figures.render(figures.allocation(run), "svg").endswith(b"</svg>\n")


def test_figures_of_a_run_without_evaluation_can_be_drawn(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {9: [0.5, 0.5]}, rounds=2, status="running")
    for draw in ALL:
        assert figures.render(draw([run]), "svg").endswith(b"</svg>\n")


# Pages


class Page(HTMLParser):
    """Checks that tags are balanced and collects what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.sources: list[str] = []
        self.ids: list[str] = []
        self.curves: list[Any] = []  # of each figure, for the script
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [value or "" for key, value in attrs if key in ("src", "href")]
        self.ids += [value or "" for key, value in attrs if key == "id"]
        self.curves += [json.loads(value or "") for key, value in attrs if key == "data-curves"]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def test_a_page_holds_everything_and_needs_nothing(pair: list[RunRecord], text: str) -> None:
    folder = pair[0].folder.parent
    parsed = Page(text)
    assert parsed.seen.count("figure") == parsed.seen.count("svg") == 10
    assert len(text) < 3_000_000
    assert all(source.startswith(("#", "data:image/png;base64,")) for source in parsed.sources)
    # The name of the elements of a drawing is no address that a browser opens.
    assert set(re.findall(r"https?://[^\"'<> ]*", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|url\((?!#)|@import", text)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r"url\(#([^)]+)", text)) <= set(parsed.ids)
    words = parsed.words
    for expected in (
        "2 runs on digits with 2 nodes. DecHW is ahead with a mean test accuracy of 70.0 % after 4 "
        "rounds, 30.0 percentage points more than DecAvg (40.0 %).",
        "70.0 ± 10.0 %",
        "rounds to accuracy 60.0 %",
        "differs between the runs DecHW DecAvg algorithm.name dechw decavg",
        "partition.alpha 0.2",
        f"peerage run {folder}/a/experiment.toml",
        f"peerage verify {folder}/b",
        "digest abc123",
        "python 3.11",
        "test examples 12 345",
    ):
        assert expected in words, expected


@pytest.mark.slow
def test_the_same_runs_give_the_same_bytes(
    pair: list[RunRecord], text: str, tmp_path: Path
) -> None:
    out = tmp_path / "new folder" / "report.html"
    write_report(pair, out)
    assert out.read_bytes() == text.encode()


def test_only_differing_settings_are_highlighted(text: str) -> None:
    changed = re.findall(r'<tr class="changed"><th scope="row">([^<]*)', text)
    assert changed == ["algorithm.name"]


def test_everything_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture("<b>", "<b>", "Nodes", lambda: figures.curves([run], "accuracy"))
    monkeypatch.setattr("peerage.report.html.pictures", lambda records: [picture])
    evil = "<script>alert('&')</script>"
    run = make_run(tmp_path / "a&b <i>", {0: [0.1], 1: [0.2]}, label=evil, message=evil)
    text = page([run])
    assert Page(text).seen.count("script") == 1
    assert '<tr class="changed"' not in text  # one run differs from nothing
    assert "<i>" not in text
    assert "<b>" not in text
    assert evil in Page(text).words
    assert f"peerage verify '{tmp_path}/a&b <i>'" in Page(text).words


def test_large_networks_show_the_ends_of_their_node_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerage.report.html.pictures", lambda records: [])
    values = [k / 200 for k in range(150)]
    words = Page(page([make_run(tmp_path / "a", {0: values}, rounds=0)])).words
    assert "the 10 lowest and 10 highest of 150 nodes" in words
    first = words.index("examples neighbours parameters accuracy loss")
    shown = re.findall(r"(\d+) (\d+) ([12]) 7 ", words[first:])
    assert [int(node) for node, _, _ in shown] == [*range(10), *range(140, 150)]


def test_headlines(tmp_path: Path) -> None:
    runs = {
        "good": make_run(tmp_path / "1", {0: [0.1], 4: [0.7]}, label="Good"),
        "same": make_run(tmp_path / "2", {0: [0.1], 4: [0.7001]}, label="Same"),
        "short": make_run(tmp_path / "3", {2: [0.5]}, label="Short", status="interrupted"),
        "burst": make_run(tmp_path / "4", {2: [0.9]}, label="Burst", rounds=3, status="diverged"),
        "empty": make_run(tmp_path / "5", {9: [0.5]}, label="Empty", rounds=0, status="running"),
    }

    def said(*names: str) -> str:
        return headline(tables.compare([runs[name] for name in names]), "digits")

    assert said("good") == (
        "1 run on digits. Good reached a mean test accuracy of 70.0 % after 4 rounds; "
        "this is also its best."
    )
    assert said("good", "same") == (
        "2 runs on digits. Same and Good are tied at 70.0 % mean test accuracy."
    )
    assert said("short", "good", "burst") == (
        "3 runs on digits. Good is ahead with a mean test accuracy of 70.0 % after 4 rounds, "
        "20.0 percentage points more than Short (50.0 % after 2 rounds). Burst diverged in round "
        "3 of 4; its last known accuracy is 90.0 % after 2 rounds."
    )
    assert said("empty") == "1 run on digits. Empty: no round has been evaluated yet."
    assert notes([runs["short"]]) == ["Short was interrupted: 2 of 4 rounds are done."]


def test_a_run_that_ended_at_its_target_is_not_called_unfinished(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {0: [0.1], 3: [0.5]})  # of 4 rounds
    text = (tmp_path / "a" / "experiment.toml").read_text()
    (tmp_path / "a" / "experiment.toml").write_text('until = "accuracy=0.469"\n' + text)
    record = RunRecord.load(tmp_path / "a")
    assert tables.cells(tables.compare([record]))[1][0][2] == "3 (target reached)"
    assert notes([record]) == ["DecHW stopped after reaching accuracy=0.469 in round 3 of 4."]
    assert headline(tables.compare([record]), "digits") == (
        "1 run on digits. DecHW reached a mean test accuracy of 50.0 % after 3 rounds; "
        "this is also its best."
    )
    stopped = make_run(tmp_path / "b", {0: [0.1], 3: [0.5]}, status="interrupted")
    assert tables.cells(tables.compare([stopped]))[1][0][2] == "3 of 4, interrupted"
    through = make_run(tmp_path / "c", {0: [0.1], 4: [0.5]})
    assert tables.cells(tables.compare([through]))[1][0][2] == "4"
    assert notes([through]) == []


def test_a_graph_that_is_not_connected_is_noted(tmp_path: Path) -> None:
    make_run(tmp_path / "a", {0: [0.1]})
    setup = json.loads((tmp_path / "a" / "setup.json").read_text())
    write_json(tmp_path / "a" / "setup.json", {**setup, "topology": {"connected": False}})
    assert "not connected" in notes([RunRecord.load(tmp_path / "a")])[0]


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    pair: list[RunRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peerage.report.html.page", lambda *_: "new")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DiskError, match=r"disk is full .*write the report again"):
        write_report(pair, out)
    assert out.read_text() == "old"


def test_a_report_about_nothing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one run"):
        write_report([], tmp_path / "report.html")


# Groups


def grouped(folder: Path, **changes: Any) -> RunRecord:
    """Three nodes in two clusters; the minority is best before the end."""
    make_run(folder, {0: [0.1, 0.1, 0.1], 4: [0.7, 0.9, 0.2]}, **changes)
    curves = {0: {0: 0.1, 2: 0.6, 4: 0.8}, 1: {0: 0.1, 2: 0.3, 4: 0.2}}
    with MetricWriter(folder / "metrics.jsonl") as metrics:
        for cluster, curve in curves.items():
            for round, accuracy in curve.items():
                row = {"scope": "group", "round": round, "by": "cluster", "group": cluster}
                spread = 0.1 if cluster == 0 and round else 0.0
                metrics.append(
                    row
                    | {"nodes": 2 - cluster, "accuracy": accuracy, "accuracy_std": spread}
                    | {"accuracy_min": accuracy - spread, "accuracy_max": accuracy + spread}
                    | {"loss": 1.5, "confusion": [[1, 2], [3, 4]]}
                )
    setup = read_json(folder / "setup.json")
    names = ["cluster 0 (0°)", "cluster 1 (180°)"]
    setup["clusters"] = {"names": names, "sizes": [2, 1], "test_examples": [7, 7]}
    write_json(folder / "setup.json", setup)
    return RunRecord.load(folder)


@pytest.fixture(scope="module")
def in_groups(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return grouped(tmp_path_factory.mktemp("groups") / "run")


LINES = [
    ["cluster 0 (0°)", "2", "80.0 %", "70.0..90.0 %", "80.0 % (4)", "1.5"],
    ["cluster 1 (180°)", "1", "20.0 %", "20.0..20.0 %", "30.0 % (2)", "1.5"],
]


def test_the_table_by_hand(in_groups: RunRecord) -> None:
    assert groups.lines(in_groups) == LINES
    console = Console(width=120, file=io.StringIO())
    for table in groups.group_tables([in_groups]):
        console.print(table)
    text = console.file.getvalue()
    assert all(cell in text for line in LINES for cell in line)


@pytest.mark.parametrize("width", [44, 80, 120])
def test_nothing_is_cut_in_a_narrow_terminal(in_groups: RunRecord, width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    whole = tables.rich_table(tables.compare([in_groups]), width)
    for table in (whole, *groups.group_tables([in_groups], width)):
        console.print(table)
    label = "DecAvg (weights=uniform, noise 0.01, clip 1)"
    console.print(terminal.Chart({label: ([0, 1], [0.1, 0.5])}))
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert all(cell in text for line in LINES for cell in line)
    assert f"{label} 50.0 %" in " ".join(text.split())


@pytest.mark.parametrize("width", [44, 80, 120])
def test_progress_is_not_cut_in_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    now = [0.0]
    with terminal.RunProgress(console, lambda: now[0], ticking=False) as bar:
        bar.start("DecHW (theta=30)", 300)
        now[0] = 3600.0
        bar.advance(12, 0.9312)
    shown = " ".join(console.file.getvalue().split())
    assert "round 12/300, 93.1 %," in shown
    assert "1:00:00, 1 day, 0:00:00 left" in shown
    assert "…" not in shown


def drawn(record: RunRecord) -> list[str]:
    return [curves.title for curves in CURVES if curves.known(record)]


def test_the_page_and_the_files_show_the_groups(
    in_groups: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerage.report.html.pictures", lambda records: [])  # they take seconds
    text = page([in_groups])
    assert all(cell in text for line in LINES for cell in line)
    assert "Clusters" in drawn(in_groups)
    assert "Architectures" not in drawn(in_groups)
    assert "Fair accuracy" in drawn(in_groups)
    assert "<h2>Fairness between clusters" in text
    export([in_groups], tmp_path / "out.md")
    assert "| cluster 1 (180°) | 1 | 20.0 % |" in (tmp_path / "out.md").read_text()
    export([in_groups], tmp_path / "out.json")
    [run] = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert run["groups"] == list(in_groups.groups)
    assert len(run["fairness"]["evaluations"]) == 3


def test_runs_without_groups_have_neither_table_nor_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peerage.report.html.pictures", lambda records: [])
    plain = make_run(tmp_path / "run", {0: [0.1, 0.1], 4: [0.3, 0.5]})
    assert groups.group_tables([plain]) == groups.lines(plain) == []
    assert "Clusters" not in drawn(plain)
    text = page([plain])
    assert "<h2>Groups" not in text
    assert "<h2>Fairness" not in text


def test_every_group_has_a_curve(in_groups: RunRecord, tmp_path: Path) -> None:
    [axes] = figures.group_curves([in_groups]).axes
    assert [line.get_label() for line in axes.get_lines()] == [line[0] for line in LINES]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [
        [0.1, 0.6, 0.8],
        [0.1, 0.3, 0.2],
    ]
    assert len({line.get_color() for line in axes.get_lines()}) == 2
    other = grouped(tmp_path / "other", algorithm="decavg", label="DecAvg")
    [axes] = figures.group_curves([in_groups, other]).axes
    styles = [(line.get_color(), line.get_linestyle()) for line in axes.get_lines()]
    assert len(set(styles)) == 4
    assert len({colour for colour, _ in styles}) == 2  # one for each run


# Seeds


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> list[RunRecord]:
    """Two methods with three seeds each; of the last seed of the second, round 2 is missing."""
    folder = tmp_path_factory.mktemp("seeded")
    finals = {"dechw": (0.5, 0.6, 0.7), "decavg": (0.4, 0.4, 0.4)}
    return [
        make_run(
            folder / f"{algorithm}-{seed}",
            {0: [0.1, 0.1], 2: [final / 2, final / 2], 4: [final - 0.1, final + 0.1]},
            algorithm=algorithm,
            label=algorithm,
            seed=seed,
        )
        for algorithm, values in finals.items()
        for seed, final in enumerate(values)
    ]


def test_runs_that_differ_in_their_seed_are_one_method(seeded: list[RunRecord]) -> None:
    found = by_method(seeded)
    assert [(method.label, method.seeds) for method in found] == [("dechw", 3), ("decavg", 3)]
    assert len(by_method([seeded[0], seeded[0]])) == 2  # the same run twice is no second seed
    mean = seeds.averaged(found[0])
    assert mean.curve("accuracy") == ([0, 2, 4], pytest.approx([0.1, 0.3, 0.6]))
    assert mean.network[-1]["accuracy_std"] == pytest.approx(np.std([0.5, 0.6, 0.7]))
    assert mean.network[-1]["seconds"]["total"] == 8.0
    assert len(mean.node_values("accuracy", 4)) == 6
    assert seeds.averaged(by_method(seeded[:1])[0]) is seeded[0]


def test_differences_are_between_runs_with_the_same_seed(seeded: list[RunRecord]) -> None:
    found = by_method([*seeded[3:], *seeded[:3]])
    [one] = seeds.differences(found)
    assert (one.method, one.reference, one.round) == ("dechw", "decavg", 4)
    assert one.by_seed == pytest.approx({0: 0.1, 1: 0.2, 2: 0.3})
    # Student's t with two degrees of freedom, 0.975: 4.303; standard deviation 0.1.
    assert one.half_width == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert not one.clear
    titles, line = seeds.difference_lines(found)
    assert dict(zip(titles, line, strict=True)) == {
        "difference in accuracy": "dechw - decavg",
        "seeds": "3",
        "mean, in points": "+20.0",
        "95 % confidence interval": "-4.8 to +44.8",
        "excludes 0": "no",
        "of each seed": "+10.0, +20.0, +30.0",
    }
    drawn = seeds.accuracy_differences([*seeded[3:], *seeded[:3]]).axes[0].get_lines()
    assert list(drawn[1].get_ydata()) == pytest.approx([0.0, 10.0, 20.0])
    assert not seeds.comparable(seeded[:3])


def test_targets_name_rounds_and_bytes(seeded: list[RunRecord]) -> None:
    titles, first, second = seeds.MethodTable.of(by_method(seeded)).targets()
    # The best accuracy is 0.7, so the targets are 0.35, 0.525 and 0.63; 1000 bytes per round.
    assert titles[1:3] == ["rounds to accuracy 35.0 %", "sent to 35.0 %"]
    assert first == ["dechw", "3.3 ± 0.9", "1.67 kB", "2 of 3 seeds", "-", "1 of 3 seeds", "-"]
    assert second == ["decavg", "4 ± 0", "2.00 kB", "-", "-", "-", "-"]


@pytest.mark.slow
def test_a_page_about_seeds(seeded: list[RunRecord]) -> None:
    parsed = Page(page(seeded))
    assert (
        "6 runs of 2 methods on digits with 2 nodes. dechw is ahead with a mean test accuracy of "
        "60.0 ± 8.2 %, over its seeds: 20.0 percentage points more than decavg with the same "
        "seeds; the 95 % confidence interval -4.8 to +44.8 includes 0, so the order may be chance."
    ) in parsed.words
    accuracy = parsed.curves[0]
    assert [curve["name"] for curve in accuracy[0]["curves"]] == ["dechw", "decavg"]
    assert [point[2:] for point in accuracy[0]["curves"][0]["points"]] == [
        ["round 0", "10.0 %"],
        ["round 2", "30.0 %"],
        ["round 4", "60.0 %"],
    ]
    left, top, right, bottom = accuracy[0]["box"]
    for curve in accuracy[0]["curves"]:
        assert all(left <= x <= right and top <= y <= bottom for x, y, *_ in curve["points"])
        assert [x for x, *_ in curve["points"]] == sorted(x for x, *_ in curve["points"])


def test_colours_of_curves_can_be_seen_in_the_dark() -> None:
    for colour in inline.PALETTE - {"#c2c2c2", "#b2b2b2"}:  # light greys are quiet in both
        assert inline.contrast(inline.in_the_dark(colour), inline.DARK_PAGE) >= 3
    assert inline.in_the_dark("#ffffff") == inline.DARK_PAGE
    assert inline.contrast(inline.in_the_dark("#222222"), inline.DARK_PAGE) > 10
    assert not inline.changes("#440154")  # the lowest of a colour scale


def test_bands_are_one_standard_deviation(pair: list[RunRecord]) -> None:
    band = figures.curves(pair[:1], "accuracy").axes[0].collections[0].get_paths()[0]
    corners = {(round(x, 6), round(y, 6)) for x, y in band.vertices}
    assert {(3.0, 0.7), (3.0, 0.9), (2.0, 0.4), (2.0, 0.6)} <= corners  # mean ± std, by hand


def test_logarithmic_axes_have_plain_numbers() -> None:
    with figures.new_figure() as (figure, axes):
        figures.log_axis(axes, [0.6, 6.0])
        axes.plot([0, 1], [0.6, 6.0])
    figures.render(figure, "png")
    names = {text.get_text() for text in axes.get_yticklabels()}
    assert {"1", "2", "5"} <= names
    assert not any("10^" in name for name in names)
