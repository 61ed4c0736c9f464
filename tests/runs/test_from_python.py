"""What Python users call: compare, load, tables, figures and reports of results."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import peerage as pg
from peerage.cli import app as cli
from peerage.experiment.identity import run_key

SMALL: dict[str, Any] = {
    "nodes": 3,
    "rounds": 2,
    "topology": "ring",
    "model": "logistic",
    "local": {"epochs": 1},
    "engine": {"name": "serial"},
}


@pytest.fixture(scope="module")
def compared() -> pg.Comparison:
    return pg.compare(["decavg", pg.DecHW(theta=30)], seeds=2, **SMALL)


@pytest.fixture(scope="module")
def result() -> pg.Result:
    return pg.run(pg.Experiment(**SMALL))


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: v for key, v in row.items() if key != "seconds_per_round"} for row in rows]


def test_compare_runs_what_the_command_line_runs(compared, tmp_path, monkeypatch, capsys):
    flags = "--seeds 2 --nodes 3 --rounds 2 --topology ring --model logistic --epochs 1"
    out = tmp_path / "out"
    words = ["peerage", "compare", "--algorithms", "decavg,dechw:theta=30", *flags.split()]
    monkeypatch.setattr("sys.argv", [*words, "--engine", "serial", "--out", str(out), "--json"])
    cli.main()
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["digest"] for run in printed["runs"]] == [one.digest for one in compared]
    records = [pg.load(folder) for folder in sorted(out.glob("*/"))]
    for record, one in zip(records, compared, strict=True):
        text = (record.folder / "experiment.toml").read_text()
        assert run_key(pg.Experiment.from_toml(text)) == run_key(one.experiment)
    from peerage.report.tables import compare as table

    assert without_times(compared.table()) == without_times(table(records))


def test_compare_takes_experiments_and_a_folder(tmp_path):
    experiments = [pg.Experiment(algorithm=name, **SMALL) for name in ("local", "decavg")]
    compared = pg.compare(experiments, out=tmp_path / "out")
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == ["1-local", "2-decavg"]
    assert [one.digest for one in compared] == [pg.run(one).digest for one in experiments]
    with pytest.raises(pg.PeerageError, match="own rounds; set it in them"):
        pg.compare(experiments, rounds=3)
    with pytest.raises(pg.PeerageError, match=r"is not empty|already holds"):
        pg.compare(experiments, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one algorithm"),
        ((["decavg", "dfml"],), "different kinds of initial models"),
        ((["decavgg"],), "did you mean 'decavg'"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_one_line(arguments, message):
    with pytest.raises(pg.PeerageError, match=message) as error:
        pg.compare(*arguments, **SMALL)
    assert "\n" not in str(error.value)


def test_references_and_seeds_of_a_comparison():
    with pytest.raises(pg.PeerageError, match="seeds must be at least 1, got 0"):
        pg.compare(["decavg"], seeds=0, **SMALL)
    compared = pg.compare("decavg", references=["centralised"], **SMALL)
    assert [one.experiment.pooled for one in compared] == [False, True]


def test_the_frame_of_a_comparison_is_tidy(compared):
    frame = compared.frame()
    assert list(frame.columns[:3]) == ["run", "algorithm", "seed"]
    assert len(frame) == 4 * 3
    ends = frame[frame["round"] == 2]
    assert list(ends["accuracy"]) == [one.accuracy for one in compared]
    assert set(frame.groupby("run")["seed"].first()) == {0, 1}
    with pytest.raises(pg.PeerageError, match="scope must be one of network, node, group"):
        compared.frame("nodes")


KINDS = ("accuracy", "loss", "consensus", "nodes", "traffic", "time", "graph", "data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plot_is_a_figure(compared, kind):
    assert isinstance(compared.plot(kind), Figure)


def test_unknown_plots_name_the_known_ones(result):
    with pytest.raises(pg.PeerageError, match=r"'acuracy'.*did you mean 'accuracy'"):
        result.plot("acuracy")
    with pytest.raises(pg.PeerageError, match="needs a run with clusters"):
        result.plot("clusters")


@pytest.mark.slow
def test_a_run_without_a_folder_has_the_same_report(tmp_path, result):
    saved = pg.run(result.experiment, out=tmp_path / "run")
    pages = [
        one.report(tmp_path / name).read_text()
        for one, name in ((result, "a.html"), (saved, "b.html"))
    ]
    assert all(result.digest in page for page in pages)
    assert "peerage verify" not in pages[0]  # there is no folder to verify
    assert "peerage verify" in pages[1]
    with pytest.raises(pg.PeerageError, match=r"use a name that ends in \.html"):
        result.report(tmp_path / "report.doc")


def test_load_returns_what_run_returned(tmp_path):
    result = pg.run(pg.Experiment(**SMALL), out=tmp_path / "run")
    loaded = pg.load(str(tmp_path / "run"))
    assert (loaded.status, loaded.digest, loaded.accuracy) == (
        "finished",
        result.digest,
        result.accuracy,
    )
    assert loaded.frame("node").equals(result.frame("node"))
    assert loaded.table() == result.table()
    for name, values in result.state_dict(1).items():
        assert values.equal(loaded.state_dict(1)[name])


def test_load_of_a_run_that_is_not_finished(tmp_path):
    folder, seen = tmp_path / "run", []

    def interrupt(row):
        seen.append(pg.load(folder))
        if row["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(pg.PeerageError, match="interrupted in round 2"):
        pg.run(pg.Experiment(**SMALL), out=folder, checkpoint_every=1, watch=interrupt)
    assert [(one.status, one.rounds, one.digest) for one in seen] == [
        ("running", 0, None),
        ("running", 1, None),
    ]
    loaded = pg.load(folder)
    assert (loaded.status, loaded.rounds) == ("interrupted", 1)
    assert loaded.accuracy == seen[-1].accuracy
    assert "was interrupted: 1 of 2 rounds are done" in loaded._repr_html_()


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    with pytest.raises(pg.PeerageError, match="there is no run folder"):
        pg.load(tmp_path / "nothing")
    with pytest.raises(pg.PeerageError, match="give a folder that `peerage run` made"):
        pg.load(tmp_path)
    pg.compare(["local"], out=tmp_path / "several", **SMALL)
    with pytest.raises(pg.PeerageError, match=r"the folders of several.*1-local") as error:
        pg.load(tmp_path / "several")
    assert "\n" not in str(error.value)


def test_frames_need_pandas(compared, monkeypatch):
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(pg.PeerageError, match="pip install pandas"):
        compared.frame()


def test_results_and_experiments_show_themselves(result, compared):
    page = result._repr_html_()
    assert page.count("<svg") == 2  # the chart and its legend
    assert "currentColor" in page  # for light and dark themes
    assert "background" not in page
    assert "DecHW reached a mean test accuracy" in page
    assert compared._repr_html_().count("<polyline") == 4
    assert "4 runs of 2 methods" in compared._repr_html_()  # seeds are not compared with each other
    shown = result.experiment._repr_html_()
    assert "<td" in shown
    assert "3 nodes, 2 rounds" in shown
    assert "logistic" in shown


def test_what_is_shown_is_escaped(result):
    evil = "<script>alert(1)</script>"
    record = result.record
    from dataclasses import replace

    from peerage.report.notebook import experiment_html, runs_html

    page = runs_html([replace(record, summary={**record.summary, "label": evil, "message": evil})])
    page += experiment_html(evil, {evil: {"name": evil, "path": [evil]}})
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_members_are_classes_with_the_same_keys():
    pairs = [
        (pg.topologies.ErdosRenyi(p=0.3), "topology", "er:p=0.3"),
        (pg.topologies.ErdosRenyi(p=0.3), "topology", "erdos-renyi:p=0.3"),
        (pg.partitions.Dirichlet(alpha=0.5), "partition", "dirichlet:alpha=0.5"),
        (pg.datasets.Npz(path="x.npz"), "dataset", "npz:path=x.npz"),
        (pg.models.MLP(), "model", "mlp"),
        (pg.algorithms.DecHW(theta=30), "algorithm", "dechw:theta=30"),
    ]
    for value, key, text in pairs:
        one, other = (pg.Experiment(**{key: each}) for each in (value, text))
        assert one == other
        assert run_key(one) == run_key(other)


def test_members_are_those_of_the_registries(monkeypatch):
    from peerage.algorithms import ALGORITHMS
    from peerage.data import DATASETS, PARTITIONS
    from peerage.graphs.topology import TOPOLOGIES
    from peerage.models import MODELS

    families = {
        "algorithms": ALGORITHMS,
        "datasets": DATASETS,
        "models": MODELS,
        "partitions": PARTITIONS,
        "topologies": TOPOLOGIES,
    }
    for name, family in families.items():
        members = getattr(pg, name)
        for cls in family.values():
            assert getattr(members, cls.__name__) is cls
            assert cls.__name__ in dir(members)
        mine = type("Mine", (), {})
        monkeypatch.setitem(family, "mine", mine)
        assert "Mine" in dir(members)
        assert members.Mine is mine
        with pytest.raises(AttributeError):
            members.Mien  # noqa: B018
    assert pg.topologies.__all__ == dir(pg.topologies)


class Handle:
    def __init__(self, shown: list[str]) -> None:
        self.shown = shown

    def update(self, page: str) -> None:
        self.shown.append(page)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A kernel without processes: what is displayed is collected here, also updates."""
    import sys
    from types import ModuleType

    shown: list[str] = []
    shell = type("ZMQInteractiveShell", (), {})()
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell
    display.HTML = str
    display.display = lambda page, display_id: shown.append(f"new {page}") or Handle(shown)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    return shown


def test_a_notebook_gets_one_bar_for_each_run(notebook, capsys):
    pg.compare(["local", "decavg"], **SMALL)
    assert sum(page.startswith("new") for page in notebook) == 2
    assert "round 2/2" in notebook[-1]
    assert 'value="2" max="2"' in notebook[-1]
    assert capsys.readouterr() == ("", "")
    notebook.clear()
    pg.run(pg.Experiment(**SMALL), progress=False)
    assert not notebook


def test_progress_and_a_watcher_work_together(notebook):
    rounds = []
    pg.run(pg.Experiment(**SMALL), watch=lambda row: rounds.append(row["round"]))
    look = pg.Watcher(lambda row, models: pg.STOP if row["round"] == 1 else None)
    stopped = pg.run(pg.Experiment(**SMALL), watch=look)
    assert (rounds, stopped.summary["rounds"]) == ([0, 1, 2], 1)
    assert "round 1/2" in notebook[-1]


def test_a_script_has_no_bar_unless_it_asks(capsys):
    pg.run(pg.Experiment(**SMALL))
    assert capsys.readouterr() == ("", "")
    pg.run(pg.Experiment(**SMALL), progress=True)
    assert "round 2/2" in capsys.readouterr().err


def test_the_folder_of_a_comparison_is_not_in_its_runs(compared):
    assert [record.folder for record in compared.records][:2] == [
        Path("1-decavg"),
        Path("2-decavg"),
    ]
