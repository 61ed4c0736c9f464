"""Figures and tables for papers: their sizes, fonts and content."""

import csv
import io
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from support.command_line import error_line, peerage

import peerage as pg
from peerage.errors import InputError
from peerage.report import latex, plots
from peerage.report.export import export


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms with two seeds each."""
    home = tmp_path_factory.mktemp("plots") / "compared"
    small = {"nodes": 4, "rounds": 2, "topology": "ring", "engine": {"name": "serial"}}
    pg.compare(["decavg", "local"], seeds=2, out=home, **small)
    return home


@pytest.fixture(scope="module")
def records(home: Path) -> list[pg.RunRecord]:
    return [pg.load(folder) for folder in sorted(home.glob("*-*"))]


def width(figure: Figure) -> float:
    return round(float(figure.get_figwidth()), 9)


def test_figures_have_the_width_and_fonts_of_a_paper(records: list[pg.RunRecord]) -> None:
    figure = plots.paper_plot(records, "accuracy", "column")
    assert width(figure) == 3.4
    assert figure.axes[0].xaxis.label.get_size() == 8
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["DecAvg", "Local"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["DecAvg", "Local"]
    assert width(plots.paper_plot(records, "graph", "page")) == 7.0
    assert width(plots.paper_plot(records, "traffic", "5.5")) == 5.5
    assert width(plots.plot(records, "accuracy")) == 5.6
    assert len(plots.plot(records, "accuracy", by_run=True).axes[0].get_lines()) == 4
    for wrong in ("wide", "0.1", "nan"):
        with pytest.raises(InputError, match=r"width must be column, page or 1\.5 to 20 inches"):
            plots.inches(wrong)


@pytest.mark.parametrize("kind", [kind for kind in plots.KINDS if kind != "heads"])
def test_every_kind_draws_or_says_what_it_needs(records: list[pg.RunRecord], kind: str) -> None:
    needs = plots.KINDS[kind].needs
    if not any(map(plots.KINDS[kind].known, records)):
        assert needs
        with pytest.raises(InputError, match=f"kind '{kind}' needs "):
            plots.plot(records, kind)
    else:
        assert isinstance(plots.paper_plot(records, kind, "column"), Figure)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "start"), [("a.pdf", b"%PDF"), ("a.svg", b"<?xml"), ("a.png", b"\x89PNG")]
)
def test_the_command_draws_a_file(home: Path, tmp_path: Path, name: str, start: bytes) -> None:
    runs = sorted(home.glob("*-*"))
    for target in (tmp_path / name, tmp_path / f"again-{name}"):
        outcome = peerage("plot loss", *runs, "--out", target, "--json")
        assert json.loads(outcome.out) == {"plot": str(target)}
    content = (tmp_path / name).read_bytes()
    assert content.startswith(start)
    assert content == (tmp_path / f"again-{name}").read_bytes()


def test_errors_of_the_command(home: Path, tmp_path: Path) -> None:
    run = next(home.glob("*-*"))
    wrong = peerage("plot acuracy", run, "--out", tmp_path / "a.pdf")
    assert wrong.code == 2
    assert "did you mean 'accuracy'?" in error_line(wrong)
    assert "end its name in" in error_line(peerage("plot loss", run, "--out", tmp_path / "a.gif"))
    assert "kind 'clusters' needs" in error_line(peerage("plot clusters", run))
    assert list(tmp_path.iterdir()) == []


def test_list_plots() -> None:
    names = [entry["name"] for entry in json.loads(peerage("list plots --json").out)["plots"]]
    assert names == [*plots.KINDS, plots.REPLAY]


def test_tables_as_latex(records: list[pg.RunRecord], tmp_path: Path) -> None:
    export(records, tmp_path / "table.tex")
    lines = (tmp_path / "table.tex").read_text().splitlines()
    assert lines[1].startswith(r"\begin{tabular}{lr")
    assert lines[2] == r"\toprule"
    assert lines[3].startswith(r"method & seeds & rounds & accuracy $\pm$ std")
    assert lines[5].startswith("DecAvg & 2 & 2 & ")
    columns = lines[1].count("r", len(r"\begin{tabular}")) + 1
    assert all(line.count(" & ") == columns - 1 for line in (lines[3], *lines[5:7]))
    assert latex.escape(r"50 % of a_b & {c} \ $") == (
        r"50\,\% of a\_b \& \{c\} \textbackslash{} \$"
    )


def test_tables_as_parquet_and_csv_agree(records: list[pg.RunRecord], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for name in ("table.parquet", "table.csv"):
        export(records, tmp_path / name)
    rows = pq.read_table(tmp_path / "table.parquet").to_pylist()
    texts = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(rows) == len(texts) == 4
    for row, text in zip(rows, texts, strict=True):
        assert list(row) == list(text)
        assert float(text["accuracy"]) == row["accuracy"]
        assert int(text["rounds"]) == row["rounds"] == 2


@pytest.mark.slow
def test_a_report_as_pdf(home: Path, tmp_path: Path) -> None:
    runs = sorted(home.glob("*-*"))
    outcome = peerage("report", *runs, "--pdf", "--out", tmp_path / "r.html", "--json", "--quiet")
    assert json.loads(outcome.out)["pdf"] == str(tmp_path / "r.pdf")
    content = (tmp_path / "r.pdf").read_bytes()
    assert content.startswith(b"%PDF")
    assert content.count(b"/Type /Page ") >= 4
    assert (tmp_path / "r.html").stat().st_size < 3_000_000
    export([pg.load(run) for run in runs], tmp_path / "again.pdf")
    assert (tmp_path / "again.pdf").read_bytes() == content
