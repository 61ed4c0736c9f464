"""P2 under `peerage reproduce`: every table and figure at smoke scale, and numbers by hand."""

import csv
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import f_oneway
from support.command_line import error_line, peerage
from support.studying import PAPER, SMOKE, jobs_of, run_at_smoke, run_jobs, smoke_files

from peerage.data.partition import Dirichlet
from peerage.engine.prepare import prepare
from peerage.papers import runner
from peerage.papers.calibrate import Speeds
from peerage.papers.charts import Bars, HeatMap, Line, Plot, heat_maps, plots
from peerage.papers.datasets import IMAGES
from peerage.papers.difference import difference
from peerage.papers.p2 import clients, output, printed, studies
from peerage.papers.p2.printed import FOUR, IID, SPLITS, TYPE_I, TYPE_II
from peerage.papers.p2.settings import SIZES, Setting, scalars_up
from peerage.papers.papertable import P_VALUE, Cell, PaperTable
from peerage.papers.study import Calculation, Plan, Results, Training
from peerage.records.rows import read_metrics
from peerage.report.statistics import anova, deviation, mean, significant
from peerage.work.training import LocalSGD, Train

pytestmark = pytest.mark.usefixtures("speeds")
IDS = [id for id in runner.STUDIES if id.startswith("p2-")]


# Every study


def test_all_ids_are_there():
    figures = {f"p2-fig{number}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)}
    assert set(IDS) == figures | {f"p2-tab{number}" for number in (1, 2, 3, 4)}
    assert [study.id for study in studies.STUDIES] == IDS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No differential privacy")  # Fig. 11 does not clip
@pytest.mark.parametrize("id", IDS)
def test_every_study_runs_at_smoke_scale(id, home):
    saved, page = run_at_smoke(id, home)
    for curve in saved["curves"]:
        assert len(curve["rounds"]) == len(curve["loss"]) > 1
    for table in saved["tables"]:
        rows = [cell for cell in table["cells"] if cell["row"].get("method") != printed.TEST]
        assert all(cell["ours"] is not None for cell in rows)
        assert all(cell["spread"] is None for cell in rows)  # one seed deviates from nothing
    assert "nan" not in page.lower()


@pytest.mark.slow
def test_training_losses_are_written_down_where_they_are_drawn(home):
    saved = json.loads(smoke_files("p2-fig5", home)[2].read_text())
    for curve in saved["curves"]:
        assert curve["train_loss"][0] is None  # before the first round nobody has trained
        assert len(curve["train_loss"]) == len(curve["rounds"])
        assert None not in curve["train_loss"][1:]
    plain = json.loads(smoke_files("p2-fig8", home)[2].read_text())
    assert "train_loss" not in plain["curves"][0]
    assert "pictures" not in plain


def test_data_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "nothing"))
    for id, name in (("p2-tab4", "femnist"), ("p2-fig1", "mnist"), ("p2-fig2", "mnist")):
        outcome = peerage(f"reproduce {id} --scale small --out", tmp_path / "out")
        assert outcome.code == 2
        assert f"runs on {name} were skipped because the data is missing" in outcome.err


# Parts of a table


def test_a_part_of_a_table_can_be_named():
    table = runner.STUDIES["p2-tab1"]
    part = runner.jobs_of(table, PAPER, ["non-iid-i", "Non-IID (II)", "e5"])
    assert len(part) == 2 * 4 * 3
    assert {job.place.setting for job in part} == {TYPE_I, TYPE_II}
    assert {job.place.epochs for job in part} == {"E = 5"}
    assert part == table.jobs(PAPER)[:24]  # what distinguishes methods comes first
    fewer = runner.jobs_of(table, PAPER, ["hwa", "fedavg", "iid", "e10"])
    assert {(job.place.method, job.place.setting) for job in fewer} == {
        ("HWA", IID),
        ("FedAvg", IID),
    }
    images = runner.jobs_of(runner.STUDIES["p2-fig7"], PAPER, ["mnist"])
    assert {job.dataset for job in images} == {"mnist"}
    assert len(images) == 6 * 3
    one = runner.jobs_of(runner.STUDIES["p2-fig8"], PAPER, ["dir0.05", "hwa"])
    assert {job.place.setting for job in one} == {"Dir 0.05"}
    # Other papers have coordinates as well.
    some = runner.jobs_of(runner.STUDIES["p0-tab1"], PAPER, ["cifar10", "0.2", "dechw"])
    assert {(job.place.dataset, job.place.alpha) for job in some} == {("cifar10", 0.2)}


def test_an_unknown_name_is_reported():
    text = error_line(peerage("reproduce p2-tab1 --scale smoke --only e7"))
    assert text.startswith("p2-tab1 has no method 'e7'; ")
    assert "non-iid (ii)" in text
    assert error_line(peerage("reproduce p2-tab1 --scale smoke --only ()")).startswith("p2-tab1")


@pytest.mark.slow
def test_a_part_is_shown_in_the_whole_table(tmp_path):
    line = "reproduce p2-tab1 --scale smoke --only non-iid-ii,e5,hwa --out"
    assert peerage(line, tmp_path).code == 0
    text = (tmp_path / "results" / "p2-tab1-smoke.csv").read_text()
    rows = list(csv.DictReader(text.splitlines()))
    known = [row for row in rows if row["ours"]]
    assert [(row["method"], row["column"]) for row in known] == [("HWA", TYPE_II)]
    assert len(rows) == 2 * (4 + 1) * 3


# The settings


def test_inputs_are_in_the_unit_interval_unless_they_are_to_be_standardised(tmp_path):
    standard = Plan("paper", inputs="standard")
    for id in ("p2-tab1", "p2-tab2", "p2-fig7", "p2-fig8", "p2-fig10"):
        now, before = jobs_of(id), jobs_of(id, standard)
        assert [job.place for job in now] == [job.place for job in before]
        for new, old in zip(now, before, strict=True):
            tables = [job.experiment.table()["dataset"] for job in (new, old)]
            if tables[0]["name"] == "cifar10":  # always in [0, 1]
                assert new.folder == old.folder
            else:
                assert tables[0] == tables[1] | {"normalise": "unit"}
                assert "normalise" not in tables[1]  # as the committed results were run
                assert new.folder != old.folder
    for id in ("p2-fig1", "p2-fig2"):
        assert next(job.model.data for job in jobs_of(id)) == "mnist:normalise=unit"
        assert next(job.model.data for job in jobs_of(id, standard)) == "mnist"
    outcome = peerage("reproduce p0-tab2 --inputs standard --out", tmp_path)
    assert outcome.code == 2
    assert "--inputs is for studies of P2, not for p0-tab2; remove it" in outcome.err


def test_paper_scale_is_the_published_setting():
    models = {"mnist": "hwa-mlp", "fashion-mnist": "hwa-mlp", "cifar10": "cifar-cnn"}
    for number, dataset in enumerate(IMAGES, start=1):
        jobs = jobs_of(f"p2-tab{number}")
        assert len(jobs) == 2 * 3 * 4 * (1 if dataset == "cifar10" else 3)
        assert len({job.folder for job in jobs}) == len(jobs)
        for job in jobs:
            table, local = job.experiment.table(), job.experiment.work
            assert (table["nodes"], table["rounds"]) == (10, 50)
            assert table["dataset"] == jobs[0].experiment.table()["dataset"]
            assert (table["dataset"]["name"], table["model"]["name"]) == (dataset, models[dataset])
            assert "train" not in table["dataset"]
            assert table["dataset"]["normalise"] == "unit"  # inputs in [0, 1]
            proximal = job.place.method == "FedProx"
            assert local.lr == (0.01 if proximal else 0.001)
            assert (local.batch_size, local.momentum, local.weight_decay) == (32, 0.9, 0.001)
            assert f"E = {local.epochs}" == job.place.epochs
            assert table["algorithm"]["name"] == job.place.method.lower()
    assert len(jobs_of("p2-tab1", Plan("paper", seeds=10))) == 240
    splits = {job.place.setting: job.experiment.table()["partition"] for job in jobs}
    assert splits == {
        IID: {"name": "iid"},
        TYPE_I: {"name": "dirichlet", "alpha": 0.1, "cap_at_mean": False, "min_size": 1},
        TYPE_II: {"name": "shards", "per_node": 2},
    }


def test_options_of_the_methods():
    found = {job.place.method: job.experiment.table()["algorithm"] for job in jobs_of("p2-tab1")}
    assert found["FedProx"]["mu"] == 0.1
    assert found["FedCurv"]["strength"] == 1.0
    assert (found["HWA"]["scope"], found["HWA"]["normalise"]) == ("output", "parameter")


def test_figures_take_the_runs_of_the_tables():
    tables = {job.folder for number in (1, 2, 3) for job in jobs_of(f"p2-tab{number}")}
    drawn = set()
    for number in (3, 4, 5, 6):
        jobs = jobs_of(f"p2-fig{number}")
        assert len(jobs) == 4 * (3 + 3 + 1)
        drawn |= {job.folder for job in jobs}
    assert drawn < tables
    assert len(tables) - len(drawn) == 2 * 4 * (3 + 3 + 1)  # IID is in the tables only
    alpha = {job.folder for job in jobs_of("p2-fig8")}
    assert len(alpha) == 5 * 4 * 3
    assert len(alpha & tables) == 4 * 3  # Dir 0.1 is the split of type I
    scopes = jobs_of("p2-fig10")
    assert len(scopes) == 9
    assert sum(job.folder in tables for job in scopes) == 3


def test_one_step_is_one_step_with_all_data():
    jobs = jobs_of("p2-fig7", Plan("paper", seeds=1))
    assert len(jobs) == 3 * 6
    [newton, *_] = [job for job in jobs if job.place.method == "FedNL"]
    for job in jobs:
        assert job.experiment.table()["model"]["name"] == "logistic"
        assert job.experiment.partition == Dirichlet(alpha=0.1)
        if job.place.method == "FedNL":
            assert job.experiment.algorithm.rank == 2
            assert "local" not in job.experiment.table()
        else:
            work = job.experiment.work
            assert (work.epochs, work.steps, work.momentum, work.lr) == (1, None, 0.0, 0.1)
            assert work.batch_size >= 60_000  # no client has more
            assert work.weight_decay == newton.experiment.algorithm.penalty
    grey = [job.experiment.dataset for job in jobs if job.dataset == "cifar10"]
    assert {(data.grey, data.side) for data in grey} == {(True, 28)}


def test_noise_and_unlike_clients():
    jobs = jobs_of("p2-fig11")
    assert len(jobs) == 6 * 4
    assert {job.experiment.partition for job in jobs} == {Dirichlet(alpha=0.01)}
    sigmas = [job.experiment.noise.sigma for job in jobs[::4]]
    assert sigmas == [0.0, 0.01, 0.05, 0.1, 0.2, 0.5]
    labels = np.repeat(np.arange(10), 5000)
    for seed in range(3):
        parts = Dirichlet(alpha=0.01).split(labels, 10, 10, np.random.default_rng(seed))
        assert min(map(len, parts)) >= 1


def test_devices_are_as_in_leaf():
    jobs = jobs_of("p2-tab4")
    assert [job.place.method for job in jobs] == list(FOUR)
    for job in jobs:
        experiment = job.experiment
        assert (experiment.nodes, experiment.rounds, experiment.algorithm.clients) == (
            3550,
            1000,
            10,
        )
        work = experiment.work
        assert (work.epochs, work.batch_size, work.lr) == (5, 10, 0.004)
        assert set(printed.MARKS) <= experiment.evaluation.evaluated_rounds(1000)
    # Ten of 3550 clients train in a round, and one model is evaluated.
    few = jobs[0].experiment
    everyone = few.model_copy(update={"algorithm": type(few.algorithm)(local=few.work)})
    place = jobs[0].place
    share = [Speeds().seconds(Training(place, e)) for e in (few, everyone)]
    assert share[0] < 0.1 * share[1]


def test_a_client_sends_its_model_and_the_curvature_of_chosen_layers():
    found = [scalars_up(job.experiment) for job in jobs_of("p2-fig10", Plan("paper", seeds=1))]
    assert found == [201_220, 241_420, 398_420]


@pytest.mark.slow
def test_numbers_and_bytes_are_those_of_the_runs(home):
    jobs = jobs_of("p2-fig10", SMOKE)
    run_jobs(home, jobs)
    results = runner.Store(home).results(SMOKE, jobs)
    sent = {titles[0]: cells for titles, cells in output.show_scopes(results).tables[1].rows}
    # 64-64-32-10: 4160 + 2080 + 330 parameters.
    expected = {"output": 6570 + 330, "+ last hidden": 6570 + 330 + 2080, "all layers": 2 * 6570}
    assert {name: [cell.ours for cell in cells] for name, cells in sent.items()} == {
        name: [count, 4 * count] for name, count in expected.items()
    }
    assert all(cell.difference == 0 for cells in sent.values() for cell in cells)


# Statistics


values = st.floats(-100, 100).map(lambda value: round(value, 3))
groups = st.lists(st.lists(values, min_size=2, max_size=6), min_size=2, max_size=5)


@settings(deadline=None, max_examples=60)
@given(groups)
def test_anova_is_that_of_scipy(found):
    if all(len(set(group)) == 1 for group in found):
        return
    wanted = float(f_oneway(*found).pvalue)
    if math.isnan(wanted):  # where means agree, scipy's F may come out below zero by rounding
        wanted = 1.0
    assert anova(found) == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def test_anova_by_hand():
    # Means 2 and 3 around 2.5: between 6 * 0.25 = 1.5, within 2 + 2 = 4, F = 1.5 / (4 / 4).
    assert anova([[1, 2, 3], [2, 3, 4]]) == pytest.approx(float(f_oneway([1, 2, 3], [2, 3, 4])[1]))
    assert anova([[1, 2, 3], [1, 2, 3]]) == 1.0
    assert anova([[0.0, 0.1], [5.0, 5.1]]) < 0.001


@pytest.mark.filterwarnings("error")
def test_anova_where_there_is_nothing_to_compare():
    assert anova([]) is None
    assert anova([[1.0, 2.0]]) is None
    assert anova([[1.0], [2.0]]) is None
    assert anova([[1.0, 2.0], []]) is None
    assert anova([[0.1] * 3, [0.1] * 3]) is None  # sums of 0.1 are rounded, which must not matter
    assert anova([[0.1] * 3, [0.2] * 3]) == 0.0
    assert anova([[0.1] * 3, [0.1, 0.2, 0.3]]) == pytest.approx(
        float(f_oneway([0.1] * 3, [0.1, 0.2, 0.3])[1])
    )


def test_deviations_are_those_of_samples():
    assert deviation([1.0, 2.0, 4.0]) == pytest.approx(np.std([1, 2, 4], ddof=1))
    assert deviation([1.0]) is deviation([]) is None
    assert mean([]) is None
    assert mean([1.0, 2.0]) == 1.5
    assert [significant(p) for p in (None, 0.0, 0.049, 0.05, 1.0)] == [
        False, True, True, False, False,
    ]  # fmt: skip


def with_p(p: float | None) -> PaperTable:
    rows = (
        (("E = 5", "FedAvg"), (Cell(0.9),)),
        (("E = 5", "HWA"), (Cell(0.95),)),
        (("E = 5", "p-value"), (Cell(p, paper=0.077e-3, unit=P_VALUE),)),
    )
    return PaperTable("", ("", "method"), (("IID",),), rows, "percent", "max")


@pytest.mark.parametrize(
    ("p", "marked"), [(0.01, True), (0.05, False), (0.3, False), (None, False)]
)
def test_the_best_is_marked_only_where_it_is_significant(p, marked):
    table = with_p(p)
    assert [table.is_best(row, 0) for row in range(3)] == [False, marked, False]
    assert ("**95.00**" in table.markdown()) == marked
    assert "if p < 0.05" in table.legend()


def test_p_values_are_shown_with_their_first_digits():
    assert "6.3e-08 (7.7e-05)" in with_p(6.3e-8).markdown()
    assert "0.0432 (7.7e-05)" in with_p(0.04321).markdown()
    assert "| - (7.7e-05)" in with_p(None).markdown()
    [cell] = [c for c in with_p(0.5).as_dict()["cells"] if c["row"]["method"] == "p-value"]
    assert cell["difference"] is None
    assert "not run" not in with_p(None).legend()


# Tables by hand


def finished_run(folder: Path, job: Training, accuracies: list[float]) -> None:
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(job.experiment.to_toml())
    rows = [
        {"scope": "network", "round": r, "nodes": 10, "bytes_total": 0, "accuracy": a, "loss": 1.0}
        for r, a in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup = {"classes": [str(c) for c in range(10)], "allocation": [[7] * 10] * 10}
    (folder / "setup.json").write_text(json.dumps(setup))
    (folder / "environment.json").write_text("{}")
    summary = {"status": "finished", "algorithm": job.place.method.lower()}
    (folder / "summary.json").write_text(json.dumps(summary))


def made_up(tmp_path: Path, id: str, plan: Plan, ends: Any) -> Results:
    """Runs whose accuracy climbs to what `ends` says."""
    store, jobs = runner.Store(tmp_path), jobs_of(id, plan)
    for job in {job.folder: job for job in jobs}.values():
        finished_run(store.folder(job), job, [0.1, 0.5, ends(job)])
    return store.results(plan, jobs)


def cells_of(table: PaperTable) -> dict[tuple[str, ...], tuple[Cell, ...]]:
    return dict(table.rows)


def test_a_table_with_its_test(tmp_path):
    """HWA is 0.1 ahead, with three seeds that are 0.02 apart."""

    def ends(job) -> float:
        return 0.7 + 0.02 * job.experiment.seed + 0.1 * (job.place.method == "HWA")

    results = made_up(tmp_path, "p2-tab2", Plan("small", seeds=3), ends)
    [table] = output.show_table(2, results).tables
    cells = cells_of(table)
    own, other = cells["E = 5", "HWA"], cells["E = 5", "FedAvg"]
    assert [cell.ours for cell in own] == pytest.approx([0.82] * 3)
    assert [cell.spread for cell in own] == pytest.approx([0.02] * 3)  # of a sample
    assert [cell.paper for cell in own] == pytest.approx([0.8739, 0.7660, 0.7825])
    assert [cell.paper_spread for cell in other] == pytest.approx([0.00162, 0.05368, 0.03332])
    seeds = np.array([0.7, 0.72, 0.74])
    p = float(f_oneway(seeds, seeds, seeds, seeds + 0.1)[1])
    assert [cell.ours for cell in cells["E = 10", "p-value"]] == pytest.approx([p] * 3)
    assert [cell.paper for cell in cells["E = 10", "p-value"]] == [0.857, 0.049, 0.029]
    assert p < 0.05
    assert [table.is_best(row, 0) for row in range(5)] == [False, False, False, True, False]
    assert [column for (column,) in table.columns] == list(SPLITS)


@pytest.mark.filterwarnings("error")
def test_one_seed_has_no_deviation_no_test_and_no_best(tmp_path):
    results = made_up(tmp_path, "p2-tab1", Plan("small", seeds=1), lambda job: 0.7)
    [table] = output.show_table(1, results).tables
    for cells in cells_of(table).values():
        assert {cell.spread for cell in cells} == {None}
    assert {cell.ours for cell in cells_of(table)["E = 5", "p-value"]} == {None}
    assert not any(table.is_best(row, place) for row in range(10) for place in range(3))
    assert "**" not in table.markdown().replace("**Bold**", "")


@pytest.mark.filterwarnings("error")
def test_equal_seeds_give_a_page_without_warnings(tmp_path):
    results = made_up(tmp_path, "p2-fig3", Plan("small", seeds=2), lambda job: 0.7)
    seen = output.show_curves(3, output.ALL_KEYS, results)
    [table] = seen.tables
    assert {cell.ours for cell in cells_of(table)["E = 5", "p-value"]} == {None}
    assert "nan" not in table.markdown().lower()
    assert len(seen.figure.axes) == 18  # three data sets, three metrics and their differences


def test_a_missing_method_leaves_no_test(tmp_path):
    plan = Plan("small", seeds=2)
    store, jobs = runner.Store(tmp_path), jobs_of("p2-tab1", plan)
    some = [job for job in jobs if job.place.method != "FedCurv"]
    for job in some:
        accuracies = [0.1, 0.5 + 0.1 * job.experiment.seed]
        finished_run(store.folder(job), job, accuracies)
    [table] = output.show_table(1, store.results(plan, jobs)).tables
    assert {cell.ours for cell in cells_of(table)["E = 5", "p-value"]} == {None}


@pytest.mark.slow
def test_tables_are_made_of_the_records(home):
    run_jobs(home, jobs_of("p2-tab1", SMOKE))
    store = runner.Store(home)
    results = store.results(SMOKE, jobs_of("p2-tab1", SMOKE))
    [table] = output.show_table(1, results).tables
    for job in results.jobs:
        rows = read_metrics(store.folder(job) / "metrics.jsonl")
        last = [row["accuracy"] for row in rows if row["scope"] == "network"][-1]
        place: Any = job.place
        cell = cells_of(table)[place.epochs, place.method][SPLITS.index(place.setting)]
        assert cell.ours == last


def test_the_lead_of_hwa(tmp_path):
    def ends(job) -> float:
        return {"HWA": 0.9, "FedProx": 0.85}.get(job.place.method, 0.8)

    results = made_up(tmp_path, "p2-fig8", Plan("small", seeds=1), ends)
    accuracies, lead = output.show_alphas(results).tables
    [[*_, (_, cells)]] = [lead.rows]
    assert [cell.ours for cell in cells] == pytest.approx([0.05] * 3)
    assert accuracies.best is None  # one seed, and no test in the paper


def test_curves_that_lie_on_each_other_are_shown_as_differences(tmp_path):
    def ends(job) -> float:
        return {"FedAvg": 0.8, "HWA": 0.9}.get(job.place.method, 0.75)

    for id, show in (
        ("p2-fig3", partial(output.show_curves, 3, ("accuracy",))),
        ("p2-fig8", output.show_alphas),
    ):
        results = made_up(tmp_path / id, id, Plan("small", seeds=1), ends)
        last = [axes for axes in show(results).figure.axes if "difference" in axes.get_title()]
        assert len(last) == 3
        for axes in last:
            assert axes.get_title().endswith(": difference to FedAvg")
            assert axes.get_ylabel() == "points of test accuracy"
            found = [line.get_ydata()[-1] for line in axes.get_lines()]
            assert found == pytest.approx([0, -5, -5, 10])  # FedAvg, FedProx, FedCurv, HWA


def test_one_method_alone_has_no_differences(tmp_path):
    results = made_up(tmp_path, "p2-fig3", Plan("small", seeds=1), lambda job: 0.7)
    only = {place: series for place, series in results.series.items() if place.method == "HWA"}
    figure = output.draw_curves(("accuracy",), replace(results, series=only))
    assert [axes.get_title() for axes in figure.axes] == ["MNIST", "Fashion-MNIST", "CIFAR-10"]


def test_differences_leave_out_the_first_rounds_and_those_that_one_line_lacks():
    first = Line("FedAvg", [1, 2, 5, 20], [0.1, 0.2, 0.5, 0.6], [0.1] * 4)
    other = Line("HWA", [1, 5, 10, 20], [0.4, 0.75, 0.8, 0.5], [0.1] * 4)
    found = difference(Plot("MNIST", (first, other), ylabel="test loss"))
    assert (found.lines[1].x, found.lines[1].y) == ([5, 20], pytest.approx([0.25, -0.1]))
    assert {line.spread for line in found.lines} == {()}
    assert found.ylabel == "test loss"


def test_marks_of_table_4(tmp_path):
    plan = Plan("smoke", seeds=2)
    store, jobs = runner.Store(tmp_path), jobs_of("p2-tab4", plan)
    for job in jobs:
        finished_run(
            store.folder(job), job, [0.1 * r + 0.02 * job.experiment.seed for r in range(6)]
        )
    table = output.show_devices(store.results(plan, jobs)).tables[0]
    row = cells_of(table)[("HWA",)]
    assert [cell.ours for cell in row] == pytest.approx([0.11, 0.21, 0.31, 0.41, 0.51])
    assert [cell.spread for cell in row] == pytest.approx([0.02 / np.sqrt(2)] * 5)
    assert [cell.paper for cell in row] == pytest.approx([0.4385, 0.7316, 0.7766, 0.7783, 0.7802])


def test_the_paper_is_quoted_in_full():
    accuracies, tests = printed.accuracies(), printed.tests()
    assert len(accuracies) == 3 * 2 * 3 * 4
    assert len(tests) == 3 * 2 * 3
    assert accuracies["mnist", TYPE_I, "E = 10", "FedAvg"] == pytest.approx((0.9, 0.02415))
    assert accuracies["cifar10", TYPE_II, "E = 5", "HWA"] == pytest.approx((0.6326, 0.00947))
    assert tests["mnist", TYPE_II, "E = 5", "p-value"] == pytest.approx(7.7e-5)
    assert tests["mnist", TYPE_II, "E = 10", "p-value"] == pytest.approx(6e-8)
    assert len(printed.femnist()) == 4 * 5
    assert tuple(SIZES["paper"].devices.marks) == printed.MARKS


# Single clients


def test_a_client_trains_as_in_a_run():
    """Epoch by epoch with one momentum, from the hub's model: as a single call would."""
    model = jobs_of("p2-fig1", SMOKE)[1].model
    found = model.realise(3)
    experiment = model.experiment.model_copy(update={"seed": 3})
    world = prepare(experiment)
    local = model.local(world)
    assert local.indices.tolist() == world.parts[1].tolist()
    params, buffers = world.architecture(6).initial(3, 6)
    work = LocalSGD(epochs=2, batch_size=32, lr=0.05, momentum=0.9, weight_decay=0.001)
    trained = Train(work, params, buffers, {}).run(local)
    layout = local.models[local.architecture].layout
    weights = layout.view(trained.params, "head.weight")[:, :25]
    assert torch.tensor(found["setup"]["weights"]).allclose(weights, rtol=1e-3, atol=1e-6)
    assert len(found["curves"]["accuracy"]) == 3
    assert sum(found["setup"]["examples"]) == len(world.parts[1])


def test_clients_of_two_labels_have_no_others():
    *_, job = jobs_of("p2-fig1", SMOKE)
    counts = job.model.realise(0)["setup"]["examples"]
    assert sum(counts) == 1437 // 6
    assert sum(counts[8:]) == sum(counts)
    assert min(counts[8:]) > 0.4 * sum(counts)


def test_curvature_is_that_of_the_largest_client():
    [job] = jobs_of("p2-fig2", SMOKE)
    assert job.dataset == "digits"
    found = job.model.realise(0)["setup"]
    world = prepare(job.model.experiment)
    assert sum(found["examples"]) == max(len(part) for part in world.parts)
    layers = found["layers"]
    assert list(layers) == ["head", "hidden2", "hidden1"]
    assert [layers[name]["shape"] for name in layers] == [[10, 32], [32, 64], [64, 64]]
    pictures = [np.array(layers[name]["picture"]) for name in layers]
    assert max(picture.max() for picture in pictures) <= 1
    assert [picture.shape for picture in pictures] == [(10, 32), (32, 32), (32, 32)]


def test_small_pictures_keep_what_stands_out():
    values = np.zeros((120, 61), dtype=np.float32)
    values[119, 60] = 2.0
    small = clients.largest_of_blocks(values)
    assert small.shape == (60, 31)
    assert small[-1, -1] == 2.0
    assert small.sum() == 2.0


@pytest.mark.slow
def test_what_is_drawn_is_in_the_file(home):
    saved = json.loads(smoke_files("p2-fig1", home)[2].read_text())
    assert len(saved["pictures"]) == 4
    for picture in saved["pictures"].values():
        assert np.shape(picture) == (10, 25)
    assert all(isinstance(job, Calculation) for job in jobs_of("p2-fig1"))


# Figures


def test_bars_are_stacked():
    figure = plots([Bars("", ("0", "1"), {"a": [1, 2], "b": [3, 4]}, "client", "examples")])
    [axes] = figure.axes
    heights = [(bar.get_y(), bar.get_height()) for bar in axes.patches]
    assert heights == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert [text.get_text() for text in figure.legends[-1].get_texts()] == ["a", "b"]


def test_heat_maps_share_a_scale_and_count_in_units_of_the_real_matrix():
    panels = [
        HeatMap("a", [[1.0, -3.0]], "x", "y"),
        HeatMap("b", [[0.5, 0.5]], "x", "y", shape=(10, 40)),
    ]
    first, second, _ = heat_maps(panels, "weight").axes
    assert first.images[0].get_clim() == second.images[0].get_clim() == (-3.0, 3.0)
    assert second.get_xlim() == (-0.5, 39.5)
    assert heat_maps(panels[1:], "curvature").axes[0].images[0].get_clim() == (0.0, 0.5)


def test_places_have_titles():
    assert Setting("mnist", TYPE_I, "E = 5", "HWA").title == "HWA, mnist, non-IID (I), E = 5"
