"""P3 under `peerage reproduce`: every table and figure at smoke scale, and numbers by hand."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from support.command_line import peerage
from support.studying import PAPER, SMOKE, check_titles, jobs_of, run_at_smoke, smoke_files

from peerage.experiment import Experiment
from peerage.papers import runner
from peerage.papers.charts import Boxes, plots
from peerage.papers.datasets import CIFAR, MNIST
from peerage.papers.p3 import heads, notes, output, printed_figures, studies
from peerage.papers.p3.settings import (
    CLUSTERS,
    DAC,
    DEPRL,
    DPSGD,
    EL,
    FACADE,
    FOUR,
    ROTATED,
    Setting,
)
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import Plan, Results
from peerage.report.head_choice import settlement

pytestmark = pytest.mark.usefixtures("speeds")
IDS = [id for id in runner.STUDIES if id.startswith("p3-")]
OUR_OWN = ("balanced", "kinds", "settlement", "readings", "deprl", "curvature")
SMALL = Plan("small")
# In three rounds no run settles, and initial models may be as good as any.
MAY_BE_EMPTY = ("Fig. 7: how much less", "Fig. 9: rounds", "Fig. 16", "First rounds from which")


# Every study


def test_all_ids_are_there():
    figures = {f"p3-fig{number}" for number in (1, *range(3, 21))}
    tables = {f"p3-tab{number}" for number in (2, 3, 4)}
    assert set(IDS) == figures | tables | {f"p3-{name}" for name in OUR_OWN}
    assert [study.id for study in studies.STUDIES] == IDS
    papers = list(dict.fromkeys(id[:2] for id in runner.STUDIES))
    assert papers == ["p0", "p1", "p2", "p3", "p4"]


def test_studies_of_our_own_say_so():
    check_titles(studies.STUDIES, "p3", OUR_OWN)


@pytest.mark.slow
@pytest.mark.parametrize("id", IDS)
def test_every_study_runs_at_smoke_scale(id, home):
    saved, page = run_at_smoke(id, home)
    for curve in saved["curves"]:
        assert len(curve["rounds"]) == len(curve["accuracy"]) > 1
    for table in saved["tables"]:
        assert table["cells"]
        if table["title"].startswith(MAY_BE_EMPTY):
            continue
        # A single head is not chosen, so that none is in use.
        found = [cell for cell in table["cells"] if cell["column"] != ["heads in use"]]
        assert all(cell["ours"] is not None for cell in found)
    assert "nan" not in page.lower()
    assert "A trial of the machinery" in page


@pytest.mark.slow
def test_a_study_runs_as_the_authors_code_does(tmp_path):
    outcome = peerage("reproduce p3-fig1 p3-fig9 --scale smoke --fidelity code --out", tmp_path)
    assert outcome.code == 0, outcome.err
    page = (tmp_path / "results" / "p3-fig1-smoke-code.md").read_text()
    assert "As the authors' code: nodes start from different models" in page


@pytest.mark.slow
def test_curves_of_clusters_are_written_down(home):
    saved = json.loads(smoke_files("p3-fig3", home)[2].read_text())
    assert len(saved["pictures"]) == 3 * 4
    found = saved["pictures"]["EL, cifar10, 30:2"]
    assert found["rounds"] == [0, 1, 2, 3]
    first, second = found["clusters"]
    assert len(first) == len(second) == len(found["fair_accuracy"]) == 4
    for a, b, fair in zip(first, second, found["fair_accuracy"], strict=True):
        assert fair == pytest.approx((a + b) / 3 + (1 - abs(a - b)) / 3, abs=3e-4)


@pytest.mark.slow
def test_tables_are_made_of_the_records(home):
    files = smoke_files("p3-tab2", home)
    rows = list(csv.DictReader(files[1].read_text().split("\n\n")[0].splitlines()))
    ours = {
        row["column"]: float(row["ours"])
        for row in rows
        if (row["clusters"], row["method"]) == ("30:2 (here 6:2)", EL)
    }
    [job] = [j for j in jobs_of("p3-tab2", SMOKE) if j.place[1::3] == ("30:2", EL)]
    summary = json.loads((home / "runs" / job.folder / "summary.json").read_text())
    assert ours["all nodes"] == pytest.approx(summary["accuracy"])
    assert ours["all nodes"] == pytest.approx((6 * ours["majority"] + 2 * ours["minority"]) / 8)


# The settings


def counts(id: str, plan: Plan) -> int:
    return len(jobs_of(id, plan))


def test_how_many_runs_a_study_has():
    assert counts("p3-tab2", PAPER) == 3 * 4 * 4
    assert counts("p3-fig1", PAPER) == 2 * 4
    assert counts("p3-fig8", PAPER) == 5 * 4
    assert counts("p3-fig9", PAPER) == 4
    assert counts("p3-fig17", PAPER) == 3 * 4 * 4
    assert counts("p3-fig19", PAPER) == 2 * 4 * 4
    for plan in (PAPER, SMALL):
        assert counts("p3-balanced", plan) == counts("p3-kinds", plan) == 4
        assert counts("p3-settlement", plan) == 8
        assert counts("p3-readings", plan) == 5 * 3
        assert counts("p3-curvature", plan) == 4 * 3
        assert counts("p3-deprl", plan) == 2
    assert counts("p3-fig7", SMALL) == 2 * 3 * 3  # without DePRL
    assert counts("p3-tab4", SMALL) == 2 * 4


def folders(id: str, plan: Plan) -> set[str]:
    return {job.folder for job in jobs_of(id, plan)}


@pytest.mark.parametrize("plan", [Plan("paper", seeds=1), SMALL, SMOKE])
def test_tables_and_figures_share_their_runs(plan):
    table = folders("p3-tab2", plan)
    assert table == folders("p3-fig3", plan) == folders("p3-fig10", plan)
    assert len(table & folders("p3-fig1", plan)) == 1
    assert folders("p3-fig16", plan) == folders("p3-settlement", plan)
    assert folders("p3-fig17", plan) == folders("p3-fig18", plan)
    assert folders("p3-fig19", plan) == folders("p3-fig20", plan)


def test_figures_of_two_data_sets_take_the_runs_of_both_tables():
    both = folders("p3-tab2", SMALL) | folders("p3-tab3", SMALL)
    assert both == folders("p3-fig5", SMALL) == folders("p3-fig6", SMALL)
    assert folders("p3-fig7", SMALL) < both
    # At scale small, one stand-in replaces both, but for the sizes of their clusters.
    assert folders("p3-tab4", SMALL) < folders("p3-tab3", SMALL)


def test_our_own_studies_have_one_size():
    for name in OUR_OWN:
        assert folders(f"p3-{name}", PAPER) == folders(f"p3-{name}", SMALL)
    base = [job for job in jobs_of("p3-readings", SMALL) if job.place.setting == "base"]
    assert {job.folder for job in base} >= {
        job.folder for job in jobs_of("p3-tab2", SMALL) if job.place[1::3] == ("30:2", FACADE)
    }


def test_paper_scale_is_the_published_setting():
    rates = {EL: 0.05, DAC: 0.005, DEPRL: 0.01, FACADE: 0.01, DPSGD: 0.05}
    for job in jobs_of("p3-tab2") + jobs_of("p3-fig1"):
        table = job.experiment.table()
        assert (table["nodes"], table["rounds"]) == (32, 1200)
        assert table["local"]["lr"] == rates[job.place.method]
        assert (table["local"]["steps"], table["local"]["batch_size"]) == (10, 8)
        assert table["model"]["name"] == "gn-lenet"
        assert ":".join(map(str, table["clusters"]["sizes"])) == job.place.clusters
        assert table["clusters"]["shift"]["angles"] == [0.0, 180.0]
        assert table["evaluation"]["every"] == 40
        assert table["init"]["start"] == "shared"
    for job in jobs_of("p3-fig8"):
        table = job.experiment.table()
        assert table["algorithm"]["k"] == int(job.place.setting.removeprefix("k = "))
        assert table["clusters"]["sizes"] == [20, 10, 2]
    for job in jobs_of("p3-fig20"):
        assert job.experiment.table()["clusters"]["shift"]["name"] == "colour"


def test_the_first_rounds_are_all_evaluated():
    for id, rounds in (("p3-fig9", 80), ("p3-settlement", 100)):
        for job in jobs_of(id):
            assert job.experiment.rounds == rounds
            assert (job.experiment.evaluation.every, job.experiment.evaluation.samples) == (1, 100)


def test_sizes_of_our_own_studies():
    for job in jobs_of("p3-balanced", SMALL):
        evaluation = job.experiment.evaluation
        assert (job.dataset, job.experiment.rounds) == (CIFAR, 400)
        assert (evaluation.every, evaluation.samples) == (40, 2000)
    for job in jobs_of("p3-kinds", SMALL):
        assert (job.dataset, job.experiment.rounds, job.experiment.work.lr) == (CIFAR, 200, 0.05)
    for id in ("p3-readings", "p3-curvature"):
        for job in jobs_of(id, PAPER):
            assert (job.dataset, job.experiment.rounds) == (MNIST, 150)
            assert job.experiment.clusters.sizes == (22, 2)
    steps, epochs = jobs_of("p3-deprl", SMALL)
    assert (steps.experiment.rounds, steps.experiment.work.steps) == (100, 10)
    assert (epochs.experiment.work.epochs, epochs.experiment.work.batch_size) == (1, 100)
    assert epochs.experiment.work.steps is None


def test_readings_differ_from_the_base_in_one_setting():
    for id, base in (("p3-readings", "base"), ("p3-curvature", "shared start, equal weights")):
        found: dict[str, dict[str, Any]] = {}
        for job in jobs_of(id, SMALL):
            found[job.place.setting] = flat(job.experiment.table())
        plain = found.pop(base)
        for name, table in found.items():
            changed = {key for key in {*table, *plain} if table.get(key) != plain.get(key)}
            if name == "own starts, gain":
                assert table["init.gain.name"] == "sqrt"
                changed = {key for key in changed if not key.startswith("init.gain.")}
            assert len(changed) == 1, (name, changed)
    code = Plan("small", fidelity="code")
    assert folders("p3-readings", SMALL) == folders("p3-readings", code)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        inner = flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else None
        found |= {f"{prefix}{key}": value} if inner is None else inner
    return {key: value for key, value in found.items() if key != "seed"}


# Numbers by hand

Accuracies = Mapping[int, Sequence[float]]  # round -> accuracy of each cluster


def finished_run(
    folder: Path,
    experiment: Experiment,
    accuracies: Accuracies,
    choose: Callable[[int, int, int], int] | None = None,
) -> None:
    """A run folder in which all nodes of a cluster have the same accuracy in these rounds.

    Two classes with as many examples each: right predictions are equally frequent in both.
    `choose` returns the head of a node by round, node and cluster.
    """
    clusters = experiment.clusters
    sizes = clusters.sizes
    of_node = [c for c, size in enumerate(sizes) for _ in range(size)]
    rows: list[dict[str, Any]] = []
    for round, values in accuracies.items():
        mean = sum(n * v for n, v in zip(sizes, values, strict=True)) / sum(sizes)
        sent = 10**9 * round
        rows.append(
            {"scope": "network", "round": round, "nodes": sum(sizes), "bytes_total": sent}
            | {"accuracy": mean, "loss": 1.0}
        )
        for c, value in enumerate(values):
            right = round_to_count(value)
            confusion = [[right, 100 - right], [100 - right, right]]
            rows.append(
                {"scope": "group", "round": round, "by": "cluster", "group": c, "nodes": sizes[c]}
                | {"accuracy": value, "confusion": confusion}
            )
        for node, c in enumerate(of_node):
            row = {"scope": "node", "round": round, "node": node, "accuracy": values[c]}
            if choose is not None and round > 0:
                losses = {f"head_loss_{j}": 1.0 + j for j in range(len(sizes))}
                row["notes"] = {"head": choose(round, node, c), **losses}
            rows.append(row)
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [clusters.describe(c) for c in range(len(sizes))]
    facts = {"names": names, "sizes": list(sizes), "nodes": of_node}
    (folder / "setup.json").write_text(json.dumps({"classes": ["0", "1"], "clusters": facts}))
    (folder / "environment.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))


def round_to_count(value: float) -> int:
    return round(100 * value)


def made_up(tmp_path: Path, id: str, plan: Plan, of: Callable[..., Any]) -> Results:
    """Results of a study whose runs have the accuracies that `of` returns for a job."""
    store, jobs = runner.Store(tmp_path), jobs_of(id, plan)
    for job in {job.folder: job for job in jobs}.values():
        made = of(job)
        if made is not None:
            finished_run(store.folder(job), job.experiment, *made)
    return store.results(plan, jobs)


def cells(table: PaperTable, *row: str) -> list[Cell]:
    [found] = [cells for titles, cells in table.rows if titles == row]
    return list(found)


def ours(table: PaperTable, *row: str) -> list[float | None]:
    return [cell.ours for cell in cells(table, *row)]


def equal_clusters(job: Any) -> Any:
    """Seed 0 is better in one cluster and seed 1 in the other; both were better in round 10."""
    late = (0.6, 0.4) if job.experiment.seed == 0 else (0.4, 0.6)
    return ({0: (0.5, 0.5), 10: (0.8, 0.7), 20: late},)


def only_el(job: Any) -> Any:
    return equal_clusters(job) if job.place.method == EL else None


def test_a_table_by_hand(tmp_path):
    results = made_up(tmp_path, "p3-tab2", Plan("small", seeds=2), only_el)
    table, more = output.show_table("II", results).tables
    row = ("16:16 (here 12:12)", EL)
    majority, minority, everyone, parity, odds, fair = cells(table, *row)
    assert (majority.ours, majority.spread) == pytest.approx((0.5, 0.1))
    assert (minority.ours, minority.spread) == pytest.approx((0.5, 0.1))
    assert (everyone.ours, everyone.spread) == pytest.approx((0.5, 0.0))
    # Right predictions are equally frequent in both classes, and so are the predicted classes.
    assert parity.ours == 0
    # The rates of true and of false positives both differ by 0.2.
    assert odds.ours == pytest.approx(0.4)
    # 2/3 of the mean 0.5, and 1/3, as the mean accuracies over seeds are equal.
    assert fair.ours == pytest.approx(2 / 3)
    assert (majority.paper, majority.paper_spread) == pytest.approx((0.6403, 0.0054))
    assert [parity.paper, odds.paper, fair.paper] == pytest.approx([0.0032, 0.0204, 0.7587])
    # Each seed has a gap of 0.2: 1/3 + 0.8/3. In round 10: 2/3 of 0.75 and 1/3 of 0.9.
    assert ours(more, *row) == pytest.approx([0.6, 0.8, 0.4, 0.4, 0.25 / 0.26])
    page = table.markdown()
    assert "Accuracy in percent; gaps between clusters as fractions." in page
    assert "**50.00 ± 10.00** (64.03, -14.03)" in page
    assert "**0.4000 ± 0.0000** (0.0204, +0.3796)" in page


def test_the_smallest_gap_is_the_best():
    columns = (("accuracy",), ("gap",))
    rows = (
        (("a",), (Cell(0.5), Cell(0.02, unit="gap"))),
        (("b",), (Cell(0.6), Cell(0.01, unit="gap"))),
        (("c",), (Cell(0.4), Cell(0.30, unit="gap"))),
    )
    table = PaperTable("t", ("m",), columns, rows, "percent", "max", ("gap",))
    best = [[table.is_best(row, place) for place in (0, 1)] for row in range(3)]
    assert best == [[False, False], [True, True], [False, False]]
    assert "**0.0100**" in table.markdown()
    assert "**60.00**" in table.markdown()


def test_the_highest_fair_accuracy(tmp_path):
    results = made_up(tmp_path, "p3-fig5", Plan("small", seeds=2), equal_clusters)
    [table] = output.show_highest(5, results).tables
    row = ("CIFAR-10 30:2 (here 22:2)", DEPRL)
    highest, round, last = cells(table, *row)
    assert (highest.ours, highest.paper) == pytest.approx((0.8, 0.684))
    assert (round.ours, last.ours) == (10, pytest.approx(2 / 3))
    assert "| 10 |" in table.markdown()


@pytest.mark.slow
def test_missing_runs_leave_empty_cells(tmp_path):
    results = made_up(tmp_path, "p3-tab2", SMALL, only_el)
    for id in ("p3-tab2", "p3-fig3", "p3-fig10"):
        for table in runner.STUDIES[id].show(results).tables:
            assert None in ours(table, "16:16 (here 12:12)", FACADE)
            assert None not in ours(table, "16:16 (here 12:12)", EL)
    for id in IDS:
        shown = runner.STUDIES[id].show(Results(SMALL, jobs_of(id, SMALL), {}, 0))
        found = [cell.ours for table in shown.tables for _, row in table.rows for cell in row]
        assert set(found) == {None}


def test_the_gap_of_plain_averaging(tmp_path):
    results = made_up(tmp_path, "p3-fig1", Plan("small", seeds=2), equal_clusters)
    [table] = output.show_averaging(results).tables
    assert ours(table, "30:2 (here 22:2)", EL) == pytest.approx([0.5, 0.5, 0.2])
    gap = cells(table, "30:2 (here 22:2)", EL)[2]
    assert (gap.spread, gap.paper) == (pytest.approx(0), pytest.approx(0.3322))
    assert cells(table, "30:2 (here 22:2)", DPSGD)[2].paper is None


# Traffic


def test_traffic_until_the_lowest_last_accuracy(tmp_path):
    """FACADE is there in round 10, the others in round 20: it sends half as much."""

    def of(job: Any) -> Any:
        early = 0.7 if job.place.method == FACADE else 0.3
        return ({0: (0.1, 0.1), 10: (early, early), 20: (0.7, 0.7)},)

    results = made_up(tmp_path, "p3-fig7", SMALL, of)
    volume, saved = output.show_traffic(results).tables
    assert "is 70.0 % (CIFAR-10) and 70.0 % (Imagenette)" in volume.title
    row = "CIFAR-10 16:16 (here 12:12)"
    assert ours(volume, row, FACADE) == [10]
    assert ours(volume, row, EL) == ours(volume, row, DAC) == [20]
    assert ours(saved, row) == [0.5, 0.5]
    assert [cell.paper for cell in cells(saved, row)] == [0.413, 0.346]
    assert "50.0 (41.3, +8.7)" in saved.markdown()
    assert any("The paper's target is 63 % for CIFAR-10" in note for note in volume.notes)


def test_the_printed_target_counts_if_all_reach_it(tmp_path):
    def of(job: Any) -> Any:
        late = 0.6 if job.place == missed else 0.9
        return ({0: (0.1,) * 2, 1200: (late,) * 2},)

    plan = Plan("paper", seeds=1)
    missed = None
    study = cifar_only(plan)
    results = from_jobs(tmp_path / "all", plan, study, of)
    assert output.target_of(results, CIFAR) == printed_figures.TARGETS[CIFAR]
    missed = Setting(CIFAR, "30:2", ROTATED, "", DAC)
    results = from_jobs(tmp_path / "some", plan, study, of)
    assert output.target_of(results, CIFAR) == pytest.approx(0.6)


def cifar_only(plan: Plan) -> list[Any]:
    return studies.grid(plan, methods=(EL, DAC, FACADE))


def from_jobs(tmp_path: Path, plan: Plan, jobs: list[Any], of: Callable[..., Any]) -> Results:
    store = runner.Store(tmp_path)
    for job in jobs:
        finished_run(store.folder(job), job.experiment, *of(job))
    return store.results(plan, jobs)


# Heads


def settling(job: Any) -> Any:
    """Seed 0 settles in round 5, its minority agrees in round 2; seed 1 never settles."""
    values = dict.fromkeys(range(7), (0.5, 0.5, 0.5))

    def choose(round: int, node: int, cluster: int) -> int:
        if job.experiment.seed == 1:
            return min(cluster, 1)  # the smallest clusters share a head
        if cluster == 2:
            return 2 if round >= 2 else node % 3
        return cluster if round >= 5 else (cluster + (node == 0)) % 3

    return values, choose


def test_when_clusters_agree(tmp_path):
    results = made_up(tmp_path, "p3-fig9", Plan("small", seeds=2), settling)
    [table] = heads.show_choices(results).tables
    assert ours(table, "seed 0") == [2, 5, 5, 5]
    assert ours(table, "seed 1") == [1, 1, None, None]
    minority, every, settled, _ = cells(table, "all seeds")
    assert (minority.ours, minority.paper) == (1.5, 18)
    assert (every.ours, every.paper) == (3, 42)
    assert settled.ours is None
    assert any("1 of 2 runs of FACADE had not settled" in note for note in table.notes)
    results = made_up(tmp_path / "one", "p3-fig9", Plan("small", seeds=1), settling)
    assert "All runs of FACADE had settled in the end (1 of 1)." in notes.notes_of(results)


def test_settlement_and_means_over_all_seeds(tmp_path):
    results = made_up(tmp_path, "p3-settlement", Plan("small", seeds=2), settling)
    shown = heads.show_settlement(results)
    rounds, shared, means = shown.tables
    assert ours(rounds, "seed 0") == [5, 5]
    assert ours(rounds, "seed 1") == [None, None]
    # Pairs of clusters; the two smallest share a head in one run of two.
    assert [[cell.ours for cell in found] for _, found in shared.rows] == [[0], [0], [1]]
    assert cells(means, "20:10:2", FACADE)[0].spread is not None  # two seeds, also the unsettled
    settled, separated = shown.figure.axes[0].get_lines()
    assert list(settled.get_ydata()) == list(separated.get_ydata()) == [0, 0, 0, 0, 0, 1, 1]
    assert shown.pictures["seed 0"]["rounds"] == [1, 2, 5]  # when a choice changed
    assert shown.pictures["seed 1"]["rounds"] == [1]
    assert shown.pictures["seed 1"]["nodes"] == [[[20, 0, 0], [0, 10, 0], [0, 2, 0]]]


def test_a_settled_and_an_unsettled_run_are_shown(tmp_path):
    results = made_up(tmp_path / "both", "p3-fig16", Plan("small", seeds=2), settling)
    shown = heads.show_head_losses(results)
    [table] = shown.tables
    assert ours(table, "settled: seed 0") == [5, 5, 3]
    assert ours(table, "not settled: seed 1") == [None, None, 2]
    assert len([axes for axes in shown.figure.axes if axes.get_visible()]) == 2 * 3
    results = made_up(tmp_path / "one", "p3-fig16", Plan("small", seeds=1), settling)
    [table] = heads.show_head_losses(results).tables
    assert "There is no run that did not settle (1 seed)." in table.notes
    assert [titles for titles, _ in table.rows] == [("settled: seed 0",)]


def test_how_many_heads(tmp_path):
    def of(job: Any) -> Any:
        k = job.experiment.algorithm.k
        accuracies = {0: (0.1, 0.1, 0.1), 10: (0.9, 0.2, 0.1 * k), 20: (0.5, 0.5, 0.1 * k)}
        return (accuracies, *([] if k == 1 else [lambda round, node, cluster: min(cluster, k - 1)]))

    results = made_up(tmp_path, "p3-fig8", SMALL, of)
    accuracy, use = heads.show_head_counts(results).tables
    # Each cluster's own highest; the fair accuracy is that of the last test.
    assert ours(accuracy, "k = 1")[:3] == pytest.approx([0.9, 0.5, 0.1])
    fair = 2 / 3 * (0.5 + 0.5 + 0.3) / 3 + 1 / 3 * 0.8
    assert ours(accuracy, "k = 3")[3] == pytest.approx(fair)
    assert cells(accuracy, "k = 1")[2].paper == 0.4075
    assert ours(use, "k = 1") == [0, 0, None]
    assert ours(use, "k = 2") == [0, 0, 2]
    assert ours(use, "k = 3") == [1, 1, 3]


@pytest.mark.slow
def test_the_recipe_shows_heads_that_find_clusters(tmp_path):
    root = Path(__file__).parents[2]
    record = run_path(str(root / "tools" / "heads.py"))["draw"](tmp_path / "heads.png")
    found = settlement(record)
    assert found is not None
    assert found.settled is not None
    majority, minority = (values[-1] for _, values in record.group_curves("accuracy").values())
    assert majority > minority > 0.65  # plain averaging has about 0.55
    picture = (tmp_path / "heads.png").read_bytes()
    assert picture[:24] == (root / "docs/images/heads.png").read_bytes()[:24]  # PNG, width, height


# Notes


def notes_at(id: str, plan: Plan) -> str:
    return " ".join(notes.notes_of(Results(plan, jobs_of(id, plan), {}, 0)))


def test_notes_say_what_is_smaller_or_guessed():
    paper, small = notes_at("p3-tab2", PAPER), notes_at("p3-tab2", SMALL)
    assert "MNIST instead of CIFAR-10, with 150 rounds instead of 1200" in small
    assert "one learning rate of 0.05" in small
    assert "instead of CIFAR-10" not in paper
    first = notes_at("p3-fig9", SMALL)  # as many rounds as in the paper
    assert "MNIST instead of CIFAR-10;" in first
    assert "tested on 2000 images" in paper
    assert "tested on 1000 images" in small
    assert "A tenth of each node's images is held out" in paper
    assert notes.NO_FINAL_MEAN in paper
    assert notes.SAME_STEPS in paper
    assert "16:8" in notes_at("p3-tab3", SMALL)
    assert "16:8" not in paper
    guessed = f"{notes.GUESSED} learning rates of 0.05 (EL), 0.005 (DAC), 0.01 (DePRL), 0.01"
    assert guessed in notes_at("p3-fig17", PAPER)
    assert "0.05 (EL), 0.05 (FACADE), and the warm-up" in notes_at("p3-kinds", PAPER)
    assert "100 rounds instead of 1200" in notes_at("p3-fig20", SMALL)
    assert notes.GUESSED not in paper
    assert notes.NO_FINAL_MEAN not in notes_at("p3-fig9", PAPER)
    code = notes_at("p3-tab2", Plan("paper", fidelity="code"))
    assert notes.CODE in code
    assert notes.SAME_STEPS not in code
    assert notes.AS_THE_TEXT in notes_at("p3-readings", Plan("small", fidelity="code"))
    assert notes.CODE in notes_at("p3-settlement", Plan("small", fidelity="code"))
    assert notes.AS_THE_TEXT not in notes_at("p3-readings", SMALL)


def test_studies_of_one_size_are_not_called_small():
    for name in OUR_OWN:
        assert "Scale small" not in notes_at(f"p3-{name}", SMALL)


def test_the_text_of_the_paper_is_quoted():
    for place in (*printed_figures.HIGHEST, *printed_figures.MINORITY, *printed_figures.ONE_HEAD):
        assert place.method in FOUR
        sizes = CLUSTERS[place.dataset] + ("20:10:2", "8:8:8:8", "20:6:4:2")
        assert place.clusters in sizes
    assert len(printed_figures.HIGHEST) == 3 + 2 + 2 + 2 + 2


def test_boxes_have_a_dot_for_each_value():
    figure = plots([Boxes("t", {EL: [0.1, 0.2, 0.4], FACADE: [0.3]}, ylabel="gap")])
    [axes] = figure.axes
    dots = [line for line in axes.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in dots] == [[0.1, 0.2, 0.4], [0.3]]
    assert [label.get_text() for label in axes.get_xticklabels()] == [EL, FACADE]
    assert len(axes.patches) == 1  # a single value has no box
