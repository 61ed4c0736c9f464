"""P1 under `peerage reproduce`: every table and figure at smoke scale, and numbers by hand."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from support.command_line import peerage
from support.studying import PAPER, SMOKE, check_titles, jobs_of, run_at_smoke

from peerage.algorithm import Algorithm, Node
from peerage.errors import PeerageError
from peerage.experiment import Experiment
from peerage.papers import runner
from peerage.papers.datasets import CIFAR, CIFAR100
from peerage.papers.p1 import costs, notes, output, printed, studies, tables
from peerage.papers.p1.calculations import ModelSizes
from peerage.papers.p1.computation import examples_per_round
from peerage.papers.p1.settings import (
    DFML,
    FEDAVG,
    FEDROLEX,
    H2_CNN,
    IID,
    MIXES,
    MUTUAL,
    NON_IID,
    TEN,
)
from peerage.papers.papertable import Cell, PaperTable
from peerage.papers.study import Calculation, Plan, Results, Training
from peerage.records.rows import RunRecord
from peerage.report.alpha_figure import accuracy_over_alpha, has_alpha
from peerage.work.training import LocalSGD

pytestmark = pytest.mark.usefixtures("speeds")
IDS = [id for id in runner.STUDIES if id.startswith("p1-")]
OUR_OWN = ("work", "peaks", "neighbours")
SMALL = Plan("small")
# Long periods have fewer than five maxima, a single cycle has no second minimum, and initial models
# may be as good as any.
MAY_BE_EMPTY = ("p1-fig11", "p1-peaks", "p1-fig14")
WITHOUT_TRAINING = ("p1-tab10", "p1-fig10", "p1-fig11", "p1-fig23")


# Every study


def test_all_ids_are_there():
    figures = {f"p1-fig{number}" for number in (1, *range(4, 29))}
    found = {f"p1-tab{number}" for number in range(3, 13)}
    assert set(IDS) == figures | found | {f"p1-{name}" for name in OUR_OWN}
    assert [study.id for study in studies.STUDIES] == IDS


def test_studies_of_our_own_say_so():
    check_titles(studies.STUDIES, "p1", OUR_OWN)


@pytest.mark.slow
@pytest.mark.parametrize("id", IDS)
def test_every_study_runs_at_smoke_scale(id, home):
    saved, page = run_at_smoke(id, home)
    if id not in WITHOUT_TRAINING:
        for curve in saved["curves"]:
            assert len(curve["rounds"]) > 1
    for table in saved["tables"]:
        # No table of this scale has the paper's numbers: they belong to other runs.
        found = [cell for cell in table["cells"] if cell["ours"] is not None]
        theirs = [cell for cell in table["cells"] if cell["ours"] is None]
        assert found
        if id == "p1-tab8":  # the paper has no third round
            assert len(found) == 6
        elif id.startswith("p1-tab"):
            assert all(cell["paper"] is None for cell in table["cells"])
        elif id not in MAY_BE_EMPTY:
            assert theirs == []
    assert "nan" not in page.lower()
    if id not in WITHOUT_TRAINING:
        assert "A trial of the machinery" in page


def test_studies_without_training():
    for id in WITHOUT_TRAINING:
        for plan in (SMOKE, SMALL, PAPER):
            assert all(isinstance(job, Calculation) for job in jobs_of(id, plan))


def test_missing_data_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "nothing"))
    outcome = peerage("reproduce p1-tab5 --scale paper --seeds 1 --out", tmp_path / "out")
    assert outcome.code == 2
    assert "runs on caltech101 oxford-pets stanford-cars were skipped" in outcome.err


# The settings


@cache
def trainings(plan: Plan) -> list[Training]:
    jobs = [job for id in IDS for job in jobs_of(id, plan)]
    return [job for job in jobs if isinstance(job, Training)]


def counts(id: str, plan: Plan) -> int:
    return len(jobs_of(id, plan))


@pytest.mark.slow
def test_how_many_runs_a_study_has():
    assert counts("p1-tab3", PAPER) == 2 * 2 * 4 * 3  # data sets, splits, methods, seeds
    assert counts("p1-tab4", PAPER) == 3 * 2 * 2 * 3 * 3  # one method for two rows
    assert counts("p1-tab5", PAPER) == 3 * 2 * 3 * 3
    assert counts("p1-tab6", PAPER) == 3 * 2 * 2 * 2 * 3
    assert counts("p1-tab9", PAPER) == 3 * 2 * 4 * 3
    assert counts("p1-tab6", SMALL) == counts("p1-tab8", SMALL) == 2 * 2
    assert counts("p1-tab5", SMALL) == 3  # one split
    assert counts("p1-fig9", SMALL) == 5
    assert counts("p1-fig19", SMALL) == 2 * 3 * 2
    assert counts("p1-work", SMALL) == 4
    assert counts("p1-neighbours", SMALL) == 4 * 2
    assert counts("p1-fig10", SMALL) == 3 * 2
    assert counts("p1-fig10", PAPER) == 2 * 3 * 2


def folders(id: str, plan: Plan) -> set[str]:
    return {job.folder for job in jobs_of(id, plan)}


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan("paper", seeds=1), SMALL, SMOKE])
def test_tables_and_figures_share_their_runs(plan):
    assert folders("p1-tab6", plan) == folders("p1-tab8", plan) == folders("p1-fig17", plan)
    assert folders("p1-tab6", plan) == folders("p1-fig18", plan)
    assert folders("p1-tab4", plan) == folders("p1-fig16", plan)
    assert folders("p1-fig15", plan) < folders("p1-tab3", plan)
    assert folders("p1-fig8", plan) == folders("p1-peaks", plan) < folders("p1-fig7", plan)
    assert folders("p1-fig1", plan) < folders("p1-fig4", plan)
    assert folders("p1-fig5", plan) <= folders("p1-tab6", plan)
    assert len(folders("p1-work", plan) & folders("p1-tab6", plan)) == 2  # DFML and Dec. FedAvg
    # The base of ablations is one run.
    base = folders("p1-fig24", plan)
    for number in (13, 14, 19, 20, 21, 22, 25, 28):
        assert base & folders(f"p1-fig{number}", plan)
    assert len(folders("p1-fig26", plan) & folders("p1-fig9", plan)) >= 2  # cyclic and 0.5
    assert len(folders("p1-fig27", plan) & folders("p1-fig26", plan)) >= 2  # the fixed one


@pytest.mark.slow
def test_few_runs_serve_all_studies_at_scale_smoke():
    assert len({job.folder for job in trainings(SMOKE)}) < 100


@pytest.mark.slow
def test_runs_of_dfml_end_at_a_maximum_of_alpha():
    for job in trainings(SMALL):
        algorithm = job.experiment.algorithm
        if job.place.method in MUTUAL and algorithm.balance == "cyclic":
            assert algorithm.cyclic_alpha.at(job.experiment.rounds - 1) == algorithm.alpha_max
    full = [job for job in trainings(SMALL) if job.place.setting == "full cycles"]
    assert {job.experiment.rounds for job in full} == {28}


def test_paper_scale_is_the_published_setting():
    for job in jobs_of("p1-tab4"):
        table = job.experiment.table()
        assert (table["nodes"], table["rounds"]) == (50, 500)
        assert len(table["model"]) == 5
        assert table["local"]["loss"]["name"] == "wsm"
        assert (table["local"]["batch_size"], table["local"]["epochs"]) == (64, 1)
        assert (table["local"]["momentum"], table["local"]["weight_decay"]) == (0.9, 5e-4)
        assert table["evaluation"]["validation"] == 0.2
        assert table["dataset"]["normalise"] == "standard"
        assert table["topology"]["name"] == "complete"
        assert job.experiment.init.start == "shared"
    assert {job.experiment.work.batch_size for job in jobs_of("p1-tab5")} == {16}
    for job in jobs_of("p1-tab7"):
        assert (job.experiment.nodes, job.experiment.work.batch_size) == (10, 8)
        assert job.experiment.dataset.side == 224
    assert {job.experiment.nodes for job in jobs_of("p1-tab6")} == {10, 50, 100}
    assert {job.experiment.evaluation.every for job in jobs_of("p1-tab8")} == {10}
    for id in ("p1-tab11", "p1-tab12"):
        for job in jobs_of(id):
            assert job.experiment.table()["topology"]["name"] == "two-group"
    for job in jobs_of("p1-fig8"):
        assert job.experiment.evaluation.every == 1


def test_non_iid_is_a_capped_dirichlet():
    for job in trainings(SMALL):
        table = job.experiment.table()["partition"]
        if job.place.split == IID:
            assert table == {"name": "iid"}
        else:
            wanted = {"name": "dirichlet", "alpha": 0.1, "cap_at_mean": True, "min_size": 10}
            assert table == wanted


def test_the_largest_alpha_follows_the_loss():
    for job in jobs_of("p1-fig25", SMALL):
        noisy = (job.place.setting, job.place.split) == ("CE", NON_IID)
        assert job.experiment.algorithm.alpha_max == (1.0 if noisy else 0.9)
    losses = {job.place.setting: job.experiment.work.loss for job in jobs_of("p1-fig25", SMALL)}
    assert {name: type(loss).__name__ for name, loss in losses.items()} == {
        "CE": "CrossEntropy", "ACE": "ACE", "WSM": "WSM",
    }  # fmt: skip
    for job in jobs_of("p1-fig27", SMALL):
        assert job.experiment.algorithm.alpha_max == (0.5 if job.place.setting == "fixed" else 1.0)
    for number in (7, 8, 9, 26, 27):
        found = {type(j.experiment.work.loss).__name__ for j in jobs_of(f"p1-fig{number}", SMALL)}
        assert found == {"CrossEntropy"}


def test_controls_have_all_images_and_the_rounds_of_dfml():
    found = {(job.place.method, job.place.setting): job for job in jobs_of("p1-work", SMALL)}
    assert {key: job.experiment.rounds for key, job in found.items()} == {
        (DFML, ""): 33, (DFML, "alpha = 0"): 33, (FEDAVG, "11 epochs"): 33, (FEDAVG, ""): 100,
    }  # fmt: skip
    assert {job.experiment.dataset.train for job in found.values()} == {None}
    assert {job.place.split for job in found.values()} == {NON_IID}
    without = found[DFML, "alpha = 0"].experiment.algorithm
    assert (without.alpha_min, without.alpha_max) == (0, 0)
    assert found[FEDAVG, "11 epochs"].experiment.work.epochs == 11


def test_only_runs_on_all_images_have_both_splits_at_scale_small():
    for job in trainings(SMALL):
        assert job.place.split == NON_IID or job.experiment.dataset.train is None
    assert {job.place.split for job in jobs_of("p1-tab6", SMALL)} == {IID, NON_IID}


def test_what_scale_small_runs():
    for job in jobs_of("p1-tab6", SMALL):
        used = job.experiment
        assert (used.nodes, used.dataset.train, used.evaluation.samples) == (10, None, None)
        assert used.rounds == (33 if job.place.method == DFML else 100)
        assert used.algorithm.num_senders(10) == 5
    for job in jobs_of("p1-fig13", SMALL):
        assert (job.experiment.nodes, job.experiment.dataset.train) == (10, 5000)
        assert job.experiment.rounds == 33
    sizes = {job.place.models: job.experiment.dataset.train for job in jobs_of("p1-tab4", SMALL)}
    assert sizes == {"H1 CNN": 10_000, "H1 ResNet": 1000, "H1 ViT": 1000}
    assert {job.dataset for job in trainings(SMALL)} == {CIFAR}


def test_fewer_senders():
    shares = {job.place.setting: job.experiment.algorithm for job in jobs_of("p1-fig19", SMALL)}
    assert {name: algorithm.num_senders(10) for name, algorithm in shares.items()} == {
        "50 % senders": 5, "20 % senders": 2, "10 % senders": 1,
    }  # fmt: skip


# Numbers by hand

Curve = Mapping[int, float]  # round -> accuracy


def finished_run(
    folder: Path,
    experiment: Experiment,
    accuracies: Curve,
    regular: Curve | None = None,
    alpha: Curve | None = None,
    groups: Mapping[str, float] | None = None,
) -> None:
    """A run folder with these accuracies; a round sends a gigabyte, and clients are alike.

    The accuracy of a group is that of the network times its factor.
    """
    rows: list[dict[str, Any]] = []
    for round, value in accuracies.items():
        row: dict[str, Any] = {"scope": "network", "round": round, "nodes": experiment.nodes}
        row |= {"bytes_total": 10**9 * round, "accuracy": value, "loss": 1.0}
        if regular is not None:
            row["models"] = {"regular": {"accuracy": regular[round]}}
        rows.append(row)
        for group, factor in (groups or {}).items():
            rows.append(
                {"scope": "group", "round": round, "by": "architecture", "group": group}
                | {"nodes": 2, "accuracy": factor * value}
            )
        if alpha is not None and round > 0:
            rows.append(
                {"scope": "node", "round": round, "node": 0, "notes": {"alpha": alpha[round]}}
            )
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "setup.json").write_text(json.dumps(setup(experiment)))
    (folder / "environment.json").write_text("{}")
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))


def setup(experiment: Experiment, examples: int = 80) -> dict[str, Any]:
    """The setup of clients with as many examples each, and of the graph."""
    graph = experiment.topology.build(experiment.nodes, 0)
    edges = [list(edge) for edge in graph.edges()]
    return {"examples": [examples] * experiment.nodes, "edges": edges}


def made_up(tmp_path: Path, id: str, plan: Plan, of: Callable[[Any], Any]) -> Results:
    """Results of a study whose runs have the records that `of` returns for a job."""
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


def test_a_table_by_hand(tmp_path):
    def of(job: Any) -> Any:
        if job.place.method == DFML:
            return None
        late = 0.5 + 0.1 * job.experiment.seed + 0.1 * (job.place.method != FEDAVG)
        return ({0: 0.1, 33: late},)

    results = made_up(tmp_path, "p1-tab4", Plan("small", seeds=2), of)
    [table] = tables.show_accuracies(4, results).tables
    assert table.columns[:4] == (
        ("CIFAR-10, H1 CNN", "IID"),
        ("CIFAR-10, H1 CNN", "non-IID"),
        ("CIFAR-100, H1 CNN", "IID"),
        ("CIFAR-100, H1 CNN", "non-IID"),
    )
    iid, skewed, other, _ = cells(table, FEDAVG)[:4]
    assert (iid.ours, iid.paper) == (None, pytest.approx(0.7209))
    assert (skewed.ours, skewed.spread) == pytest.approx((0.55, 0.05))
    assert (skewed.paper, skewed.paper_spread) == pytest.approx((0.5984, 0.0018))
    assert (other.ours, other.paper) == (None, pytest.approx(0.3359))
    # Dec. FedRolex has the runs of Dec. HeteroFL, and its own printed numbers.
    assert ours(table, FEDROLEX)[1] == pytest.approx(0.65)
    assert cells(table, FEDROLEX)[1].paper == pytest.approx(0.6430)
    assert notes.SAME in table.notes
    assert set(ours(table, DFML)) == {None}
    assert "**65.00 ± 5.00** (64.21, +0.79)" in table.markdown()


def test_other_data_sets_have_columns_of_their_own(tmp_path):
    results = made_up(tmp_path, "p1-tab5", SMALL, lambda job: ({0: 0.1, 10: 0.4},))
    [table] = tables.show_accuracies(5, results).tables
    assert "on CIFAR-10 instead of Caltech101, Oxford Pets, Stanford Cars" in table.title
    *theirs, skewed = cells(table, DFML)
    assert [cell.ours for cell in theirs] == [None] * 6
    assert (skewed.ours, skewed.paper) == (0.4, None)


def test_rounds_that_dfml_needs(tmp_path):
    def of(job: Any) -> Any:
        if job.place.method == FEDAVG:
            return ({0: 0.1, 50: 0.4, 100: 0.5},)
        late = 0.6 if job.place.split == IID else 0.45
        return ({0: 0.1, 10: 0.3, 15: 0.55, 20: 0.5, 33: late},)

    results = made_up(tmp_path, "p1-tab8", SMALL, of)
    [table] = tables.show_rounds_needed(results).tables
    first, second = table.rows
    iid, skewed, *others = first[1]
    assert (iid.ours, iid.paper) == (20, 10)  # not 15, which is no multiple of 10
    assert (skewed.ours, skewed.paper) == (20, 20)
    assert {cell.ours for cell in others} == {None}
    assert {cell.ours for cell in second[1]} == {None}  # Dec. FedAvg has 100 rounds


def at(method: str, **options: Any) -> Experiment:
    text = method + (":" + ",".join(f"{k}={v}" for k, v in options.items()) if options else "")
    return Experiment(
        algorithm=text, dataset="cifar10", model=MIXES[H2_CNN], nodes=10, topology="complete"
    )


def test_computation_by_hand():
    def examples(experiment: Experiment) -> float:
        return examples_per_round(experiment, setup(experiment))

    dfml, fedavg = at("dfml"), at("dec-fedavg")
    # Five senders and the aggregator train an epoch of 80 examples each; the aggregator then
    # trains six models for ten epochs on its 80 examples.
    assert examples(dfml) == pytest.approx(6 * 80 + 10 * 6 * 80)
    assert examples(fedavg) == pytest.approx(6 * 80)
    eleven = fedavg.model_copy(update={"local": replace(fedavg.work, epochs=11)})
    assert examples(eleven) == pytest.approx(examples(dfml))
    # Only the aggregator's model learns; the five others predict, at a third of the cost.
    vanilla = examples(at("dfml", teacher="vanilla"))
    assert vanilla == pytest.approx(6 * 80 + 10 * 80 * (1 + 5 / 3))
    # On a ring an aggregator has two senders.
    assert examples(on_ring(dfml)) == pytest.approx(3 * 80 * 11)
    # Every node trains three models.
    neighbours = on_ring(at("dfml-neighbours"))
    assert examples(neighbours) == pytest.approx(10 * 80 * (1 + 10 * 3))
    # Every node trains its own model, and two others predict.
    own = on_ring(at("dfml-neighbours", keep="own"))
    assert examples(own) == pytest.approx(10 * 80 * (1 + 10 * (1 + 2 / 3)))
    with pytest.raises(PeerageError, match="states no cost"):
        examples(Experiment(**{**dict(neighbours), "algorithm": Costless()}))


@dataclass(frozen=True)
class Costless(Algorithm[None]):
    """An algorithm that does not state its cost."""

    local: LocalSGD = LocalSGD()

    async def round(self, node: Node[None]) -> None:
        await node.train(self.local)


def on_ring(experiment: Experiment) -> Experiment:
    return Experiment(**{**dict(experiment), "topology": "ring"})


def test_the_computation_axis(tmp_path):
    results = made_up(tmp_path, "p1-work", SMALL, lambda job: ({0: 0.1, 33: 0.5},))
    shown = costs.show_work(results)
    [table] = shown.tables
    accuracy, each, whole, sent = ours(table, NON_IID, "DFML")
    assert accuracy == 0.5
    assert each == pytest.approx(5.28)
    assert whole == pytest.approx(33 * 5280e-6)
    assert sent == 33
    assert ours(table, NON_IID, "Dec. FedAvg, 11 epochs")[1:3] == pytest.approx([each, whole])
    assert ours(table, NON_IID, FEDAVG)[1] == pytest.approx(0.48)
    lines = shown.figure.axes[0].get_lines()
    ends = sorted(float(line.get_xdata()[-1]) for line in lines)
    assert ends == pytest.approx([33 * 480e-6, *[33 * 5280e-6] * 3])


def test_levels_at_maxima_and_minima(tmp_path):
    alpha = {1: 0.0, 2: 1.0, 3: 0.0, 4: 0.5, 5: 1.0}
    regular = {0: 0.1, 1: 0.2, 2: 0.6, 3: 0.2, 4: 0.4, 5: 0.8}
    peak = {0: 0.1, 1: 0.2, 2: 0.6, 3: 0.6, 4: 0.6, 5: 0.8}
    results = made_up(tmp_path, "p1-peaks", SMALL, lambda job: (peak, regular, alpha))
    [table] = output.show_levels(results).tables
    high, low, gap, spread = ours(table, NON_IID, "regular models")
    assert (high, low, gap) == pytest.approx((0.7, 0.2, 0.5))
    # 0.6, 0.2, 0.4 and 0.8 deviate from 0.5 by 0.1, 0.3, 0.1 and 0.3.
    assert spread == pytest.approx(0.05**0.5)
    assert ours(table, NON_IID, "peak models")[:3] == pytest.approx([0.7, 0.6, 0.1])


def test_architectures_by_hand(tmp_path):
    factors = {f"dfml-cnn-{n}": 1 - 0.1 * n for n in range(5)}

    def of(job: Any) -> Any:
        late = (0.8 if job.place.method == DFML else 0.4) + 0.1 * job.experiment.seed
        return ({0: 0.1, 33: late}, None, None, factors)

    results = made_up(tmp_path, "p1-fig5", Plan("small", seeds=2), of)
    shown = output.show_architectures(results)
    [table] = shown.tables
    assert table.columns[:2] == (("IID", FEDAVG), ("IID", DFML))
    first, second = cells(table, "C0 [32, 64, 128, 256]")[:2]
    assert (first.ours, first.spread) == pytest.approx((0.45, 0.05))
    assert (second.ours, second.spread) == pytest.approx((0.85, 0.05))
    assert ours(table, "C4 [8, 16, 32, 64]") == pytest.approx([0.27, 0.51] * 2)
    lines = shown.figure.axes[0].get_lines()
    assert [line.get_linestyle() for line in lines] == ["--", "-"] * 5


def test_the_cost_without_distillation(tmp_path):
    def of(job: Any) -> Any:
        slow = job.place.setting.startswith("without")
        return ({0: 0.1, 3: 0.3 if slow else 0.7, 30: 0.7, 33: 0.7},)

    results = made_up(tmp_path, "p1-fig14", SMALL, of)
    [table] = costs.show_distillation(results).tables
    assert "the accuracy is 70.0 % (non-IID)" in table.title
    # Five models to the aggregator and five back in each round.
    assert ours(table, "with distillation") == [30]
    assert ours(table, "without distillation") == [300]
    assert ours(table, "without / with") == [10]


# Sizes and printed numbers


@pytest.mark.slow
def test_sizes_of_the_architectures():
    def sizes(mix: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = ModelSizes(mix).realise(0)["setup"]["parameters"]
        return found

    assert sizes("h0-cnn") == {CIFAR: [94_858], CIFAR100: [463_588]}
    assert sizes("h1-cnn")[CIFAR] == [993_802, 292_106, 94_858, 34_634, 14_122]
    assert sizes("h2-cnn")[CIFAR] == [1_089_290, 279_562, 94_858, 75_786, 70_730]
    assert sizes("h2-cnn")[CIFAR100] == [1_181_540, 463_972, 463_588, 168_036, 93_860]
    assert sizes("h1-resnet")[CIFAR] == [11_172_170, 2_796_714, 701_018, 176_178, 44_510]
    backbone, features = 4_007_548, 1280
    assert sizes("h2-efficientnet")[CIFAR][0] == backbone + (features + 1) * 10
    assert {job.model.mix for job in jobs_of("p1-tab10", SMALL)} == {
        mix for name, mix in MIXES.items() if name != TEN
    }


def test_all_printed_numbers_are_there():
    assert {number: len(printed.lines(number)) for number in printed.TABLES} == {
        3: 4, 4: 4, 5: 4, 6: 2, 7: 2, 9: 4, 11: 4, 12: 2,
    }  # fmt: skip
    widths = {number: len(printed.cases(number)) for number in printed.TABLES}
    assert widths == {3: 4, 4: 12, 5: 6, 6: 12, 7: 6, 9: 6, 11: 4, 12: 4}
    assert {len(values) for values in printed.ROUNDS_NEEDED.values()} == {widths[6]}
    # The gains in the abstract.
    found = printed.lines(6)
    for split, gain in ((IID, 0.1720), (NON_IID, 0.1995)):
        case = printed.Case(CIFAR100, H2_CNN, 50, split)
        assert found[DFML][case][0] - found[FEDAVG][case][0] == pytest.approx(gain)
    # The last line of Table 9 is DFML in Table 4.
    for case, value in printed.lines(9)["WSM, cyclic"].items():
        assert printed.lines(4)[DFML][case] == value


@pytest.mark.slow
def test_the_recipe_shows_the_lead_of_dfml(tmp_path):
    root = Path(__file__).parents[2]
    averaged, mutual = run_path(str(root / "tools" / "mutual.py"))["draw"](tmp_path / "mutual.png")
    assert averaged.curve("accuracy")[1][-1] < 0.45
    assert mutual.curve("accuracy")[1][-1] > 0.7
    assert has_alpha(mutual)
    assert not has_alpha(averaged)
    picture = (tmp_path / "mutual.png").read_bytes()
    assert picture[:24] == (root / "docs/images/mutual.png").read_bytes()[:24]  # width, height


def test_alpha_is_drawn_below_the_accuracy(tmp_path):
    alpha = {1: 0.0, 2: 0.45, 3: 0.9}
    accuracies = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.6}
    finished_run(tmp_path / "mutual", at("dfml"), accuracies, alpha=alpha)
    finished_run(tmp_path / "averaged", at("dec-fedavg"), accuracies)
    records = [RunRecord.load(tmp_path / name) for name in ("averaged", "mutual")]
    above, below = accuracy_over_alpha(records).axes
    assert [list(line.get_ydata()) for line in above.get_lines()] == [[0.1, 0.2, 0.3, 0.6]] * 2
    [line] = below.get_lines()  # of the run that has it
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 2, 3], [0.0, 0.45, 0.9])


# Notes


def notes_at(id: str, plan: Plan) -> str:
    return " ".join(notes.notes_of(Results(plan, jobs_of(id, plan), {}, 0)))


def test_notes_say_what_is_smaller_or_guessed():
    small, paper = notes_at("p1-tab6", SMALL), notes_at("p1-tab6", PAPER)
    text = "Scale small: all training images of CIFAR-10, 10 clients, all test images (H2 CNN); "
    assert text + "33 to 100 rounds." in small
    assert "33 rounds; non-IID data alone." in notes_at("p1-fig13", SMALL)
    assert "5000 training images of CIFAR-10, 10 clients instead of 50" in notes_at(
        "p1-fig13", SMALL
    )
    assert "Scale small" not in paper
    for text in (small, paper):
        assert notes.GUESSED in text
        assert notes.GUESSED_ALPHA in text
    assert notes.LAST_MAXIMUM in paper
    assert notes.LAST_MAXIMUM not in small
    assert "mu = 0.01" in notes_at("p1-tab3", SMALL)
    assert "mu = 0.01" not in small
    assert "batch norm" in notes_at("p1-tab5", SMALL)
    assert notes.SIDES in notes_at("p1-tab5", PAPER)
    assert notes.NO_CODE in notes_at("p1-tab6", Plan("small", fidelity="code"))
    assert "pretrained weights" in notes_at("p1-tab7", SMALL)


def test_the_last_maximum_is_that_of_the_note():
    [job] = jobs_of("p1-tab12", Plan("paper", seeds=1))[1:2]
    alpha = job.experiment.algorithm.cyclic_alpha
    maxima = [t + 1 for t in range(500) if alpha.at(t) == alpha.maximum]
    assert maxima[:5] == [10, 21, 33, 46, 60]
    assert f"round {maxima[-1]}" in notes.LAST_MAXIMUM
