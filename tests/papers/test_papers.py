"""`peerage reproduce`: every table and figure at smoke scale, and what the tables are made of."""

import csv
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from support.command_line import error_line, peerage
from support.studying import Silent, run_jobs, smoke_files

from peerage.algorithm import Algorithm
from peerage.algorithms.dechw import DecHW
from peerage.data.datasets import Cifar10, dataset_info
from peerage.data.partition import Iid
from peerage.errors import InputError, Interrupted
from peerage.experiment.catalogue import recipes
from peerage.experiment.experiment import Engine, Experiment
from peerage.experiment.identity import run_key
from peerage.experiment.toml import merged
from peerage.graphs.topology import BarabasiAlbert, ErdosRenyi
from peerage.papers import calibrate, runner
from peerage.papers.calibrate import Rate, Speeds, examples, parameters
from peerage.papers.datasets import IMAGES
from peerage.papers.listing import entries, hours
from peerage.papers.p0 import output, printed, settings
from peerage.papers.p0.settings import Setting
from peerage.papers.study import Plan, Results, Training
from peerage.records.rows import RunRecord
from peerage.runs import run as running
from peerage.runs.run import locked

pytestmark = pytest.mark.usefixtures("speeds")
SMOKE = Plan("smoke")
P0 = [id for id in runner.STUDIES if id.startswith("p0-")]
OFF = "reproduce p0-cost --scale smoke --out"


# Every study


@pytest.mark.slow
@pytest.mark.parametrize("id", P0)
def test_every_study_runs_at_smoke_scale(id, home):
    files = smoke_files(id, home)
    assert [path.name for path in files] == [
        f"{id}-smoke{suffix}" for suffix in (".md", ".csv", ".json", ".png", ".svg")
    ]
    for path in files:
        assert path.stat().st_size > 100
    saved = json.loads(files[2].read_text())
    assert saved["id"] == id
    assert saved["runs"]
    assert {run["status"] for run in saved["runs"]} == {"finished"}
    # Every method has a row with a number in the first table, unless it did not reach a target.
    rows = list(csv.DictReader(files[1].read_text().split("\n\n")[0].splitlines()))
    methods = {run["method"] for run in saved["runs"]}
    assert {row["method"] for row in rows} == methods
    if "rounds" not in saved["tables"][0]["title"].lower():
        assert all(row["ours"] for row in rows)


@pytest.mark.slow
def test_a_study_runs_as_the_authors_scripts_do(tmp_path):
    line = "reproduce p0-fig2 --scale smoke --seeds 1 --fidelity code --json --out"
    outcome = peerage(line, tmp_path)
    assert outcome.code == 0, outcome.err
    files = json.loads(outcome.lines[-1])["files"]
    assert Path(files[0]).name == "p0-fig2-smoke-code.md"
    text = Path(files[0]).read_text()
    assert "training taken back when the validation loss rises" in text
    assert "`peerage reproduce p0-fig2 --scale smoke --seeds 1 --fidelity code`" in text


def test_all_ids_are_there():
    figures = [f"p0-fig{number}" for number in (1, 2, 3, 4, 6, 7, 8, 9)]
    tables = [f"p0-tab{number}" for number in (1, 2, 3, 5, 6)]
    assert {*figures, *tables, "p0-cost"} <= set(runner.STUDIES)


@pytest.mark.slow
def test_finished_runs_are_not_repeated_and_are_shared_between_studies(tmp_path):
    first = run_jobs(tmp_path, runner.STUDIES["p0-fig3"].jobs(SMOKE))
    assert (first.done, first.skipped) == (5, 0)
    again = run_jobs(tmp_path, runner.STUDIES["p0-fig3"].jobs(SMOKE))
    assert (again.done, again.skipped) == (0, 5)
    # Digits stand in for all three data sets, so that Table I needs nothing more.
    table = run_jobs(tmp_path, runner.STUDIES["p0-tab1"].jobs(SMOKE))
    assert (table.done, table.skipped) == (0, 5)


@pytest.mark.slow
def test_an_interrupted_study_goes_on_and_loses_one_round_at_most(tmp_path):
    jobs = runner.STUDIES["p0-cost"].jobs(SMOKE)
    again = "in run 1 of 3, DecHetero, cifar10, Dir 0.2, seed 0; run the same command again"
    with pytest.raises(Interrupted, match=again):
        run_jobs(tmp_path / "broken", jobs, Silent(stop_at="round 3/4"))
    watcher = Silent()
    outcome = run_jobs(tmp_path / "broken", jobs, watcher)
    assert outcome.done == 3
    assert watcher.details[0].startswith("round 3/4")  # the one that was not yet saved
    assert [done for _, done in watcher.started] == [0.5, 0.0, 0.0]
    run_jobs(tmp_path / "whole", jobs)
    for job in jobs:
        broken, whole = (
            RunRecord.load(tmp_path / name / "runs" / job.folder) for name in ("broken", "whole")
        )
        assert broken.summary["digest"] == whole.summary["digest"]
        assert broken.curve("accuracy") == whole.curve("accuracy")


def test_checkpoints_of_finished_runs_are_cleared_away(tmp_path):
    job = runner.STUDIES["p0-cost"].jobs(SMOKE)[0]
    run_jobs(tmp_path, [job])
    assert not (tmp_path / "runs" / job.folder / "checkpoint").exists()


def test_a_second_process_on_the_same_folder_stops_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "ENDING", 0.01)  # seconds to wait for the lock
    with locked(tmp_path):
        text = error_line(peerage(OFF, tmp_path))
    assert text == f"another process is working in {tmp_path}; wait for it"


@pytest.mark.slow
def test_a_run_that_diverges_does_not_stop_the_others(tmp_path):
    jobs = runner.STUDIES["p0-cost"].jobs(SMOKE)
    wild = Experiment(
        algorithm="decavg", model="digits-mlp", nodes=4, rounds=2, local={"epochs": 2, "lr": 1e30}
    )
    bad = Training(Setting("mnist", 0.2, "wild"), wild)
    outcome = run_jobs(tmp_path, [bad, *jobs])
    assert outcome.diverged == ["wild, mnist, Dir 0.2, seed 0"]
    assert outcome.done == 3
    assert run_jobs(tmp_path, [bad, *jobs]).skipped == 4


# Data that is not there


@pytest.mark.slow
def test_missing_data_is_named_and_the_rest_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "nothing"))
    digits = runner.STUDIES["p0-cost"].jobs(SMOKE)
    mixed = [*digits, *runner.STUDIES["p0-fig2"].jobs(Plan("small", seeds=1))]
    study = replace(runner.STUDIES["p0-cost"], jobs=lambda plan: mixed)
    monkeypatch.setitem(runner.STUDIES, "p0-cost", study)
    outcome = peerage(f"{OFF} {tmp_path / 'out'}")
    assert outcome.code == 2
    assert "p0-cost: 3 of 4 runs finished" in outcome.out.replace("\n", " ")
    assert outcome.err.splitlines()[-1] == (
        "error: runs on mnist were skipped because the data is missing; "
        "download it with `peerage data get mnist`, then run this command again"
    )


def test_nothing_is_written_when_all_data_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "nothing"))
    outcome = peerage("reproduce p0-tab1 --scale small --seeds 1 --out", tmp_path / "out")
    assert outcome.code == 2
    assert "`peerage data get mnist fashion-mnist cifar10`" in outcome.err
    assert not (tmp_path / "out" / "results").exists()


# What the user may ask for


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("reproduce p0-tab66", "unknown table or figure 'p0-tab66'; did you mean 'p0-tab6'?"),
        (
            "reproduce p0-tab2 --scale smal",
            "scale must be one of smoke, small, paper; got 'smal', did you mean 'small'?",
        ),
        (
            "reproduce p0-tab2 --fidelity cod",
            "fidelity must be one of paper, code; got 'cod', did you mean 'code'?",
        ),
        ("reproduce p0-tab2 --seeds 0", "seeds must be at least 1, got 0"),
        ("reproduce p0-tab2 --only dechv", "p0-tab2 has no method 'dechv'; did you mean"),
        ("reproduce", "name a table or a figure"),
    ],
)
def test_bad_requests_are_one_line(line, text):
    assert error_line(peerage(line)).startswith(text)


def test_only_chooses_methods_as_people_spell_them():
    jobs = runner.jobs_of(runner.STUDIES["p0-tab1"], SMOKE, ["decdiff-vt", "DECHW"])
    assert {job.place.method for job in jobs} == {"DecDiff(VT)", "DecHW"}
    plain = runner.jobs_of(runner.STUDIES["p0-fig1"], SMOKE, ["decavg"])
    assert {job.place.method for job in plain} == {"DecHomo", "DecHetero"}
    stopped = runner.jobs_of(runner.STUDIES["p0-fig4"], SMOKE, ["dechw*"])
    assert {job.place.method for job in stopped} == {"DecHW*"}


@pytest.mark.slow
def test_what_earlier_commands_ran_stays_in_the_table(tmp_path):
    for methods, count in (("dechw", 1), ("cfa", 2)):
        outcome = peerage(f"reproduce p0-fig8 --scale smoke --only {methods} --out", tmp_path)
        assert f"{count} of 5 runs finished" in outcome.out.replace("\n", " ")
    rows = list(
        csv.DictReader((tmp_path / "results" / "p0-fig8-smoke.csv").read_text().splitlines())
    )
    assert [row["method"] for row in rows if row["ours"]] == ["CFA", "DecHW"]


@pytest.mark.slow
def test_the_list_shows_data_runs_and_time(tmp_path):
    job = runner.STUDIES["p0-fig2"].jobs(SMOKE)[0]
    run_jobs(tmp_path, [job])
    outcome = peerage("reproduce --list --scale smoke --json --out", tmp_path)
    rows = {row["id"]: row for row in json.loads(outcome.lines[-1])["studies"]}
    assert list(rows) == list(runner.STUDIES)
    assert rows["p0-fig2"]["done"] == rows["p0-fig2"]["runs"] == 1
    assert rows["p0-fig2"]["hours_left"] == 0 < rows["p0-fig2"]["hours"]
    assert rows["p0-tab1"]["done"] == 1
    assert rows["p0-tab1"]["data"] == ["digits"]
    listed = peerage("reproduce p0-fig2 p0-tab1 --list --scale smoke --out", tmp_path).out
    assert "1 of 1" in listed
    assert "done" in listed


def test_the_list_marks_data_that_is_not_here(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path / "nothing"))
    outcome = peerage("reproduce p0-fig9 --list --json --out", tmp_path)
    [row] = json.loads(outcome.lines[-1])["studies"]
    assert row["lacking"] == ["fashion-mnist"]


# The settings


def test_paper_scale_is_the_published_setting():
    jobs = runner.STUDIES["p0-tab1"].jobs(Plan("paper"))
    assert len(jobs) == 3 * 3 * 5 * 5
    rates = {"mnist": (0.001, 0.5), "fashion-mnist": (0.001, 0.9), "cifar10": (0.01, 0.9)}
    for job in jobs:
        table = job.experiment.table()
        assert table["nodes"] == 50
        assert table["rounds"] == 1000
        assert job.experiment.topology == ErdosRenyi(p=0.2)
        assert table["dataset"]["name"] == job.place.dataset
        assert "train" not in table["dataset"]
        assert table["partition"]["alpha"] == job.place.alpha
        assert table["partition"]["cap_at_mean"] is True
        local = table["local"]
        assert (local["epochs"], local["batch_size"]) == (5, 100)
        assert (local["lr"], local["momentum"]) == rates[job.place.dataset]
        assert table["init"]["start"] == "independent"
        assert table["evaluation"]["at"] == "exchange"
    assert len({job.folder for job in jobs}) == len(jobs)


def test_methods_differ_in_nothing_but_the_algorithm():
    jobs = runner.STUDIES["p0-fig8"].jobs(Plan("paper", seeds=1))
    tables = [{**job.experiment.table(), "algorithm": None} for job in jobs]
    assert all(table == tables[0] for table in tables[:5])


def test_half_ends_at_the_target_and_takes_one_seed():
    jobs = runner.STUDIES["p0-half"].jobs(Plan("paper"))
    assert len(jobs) == 5
    assert {str(job.experiment.until) for job in jobs} == {"accuracy=0.469"}
    assert {job.experiment.rounds for job in jobs} == {250}


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
@pytest.mark.parametrize("id", P0)
def test_code_fidelity_holds_out_data_in_every_study(id, scale):
    for job in runner.STUDIES[id].jobs(Plan(scale, seeds=1, fidelity="code")):
        assert job.experiment.work.early_stop == "rollback"
        assert job.experiment.evaluation.validation == 0.2


def test_code_fidelity_imitates_the_scripts():
    plan = Plan("paper", fidelity="code")
    [job] = [j for j in runner.STUDIES["p0-fig2"].jobs(plan) if j.experiment.seed == 0]
    table = job.experiment.table()
    assert job.experiment.topology == BarabasiAlbert(m=5)
    assert table["evaluation"]["validation"] == 0.2
    assert table["local"]["early_stop"] == "rollback"
    assert table["model"]["dropout"] is True
    chosen = table["algorithm"]
    assert (chosen["weights"], chosen["accumulate"], chosen["include_self"]) == (
        "uniform",
        "ema",
        False,
    )
    star = settings.as_in_code("dechw:theta=30")
    assert star == (
        "dechw:weights=uniform,accumulate=ema,normalise=none,include_self=false,theta=30"
    )
    plain = runner.STUDIES["p0-fig2"].jobs(Plan("paper"))[0]
    assert plain.folder != job.folder


def test_a_run_is_known_by_what_it_says_beyond_the_defaults():
    plain = settings.experiment(Plan("paper"), "mnist", 0.2, "dechw", 0)
    spelt = settings.experiment(Plan("paper"), "mnist", 0.2, "dechw:beta=1.0,accumulate=sum", 0)
    place = Setting("mnist", 0.2, "DecHW")
    engine = plain.model_copy(update={"engine": Engine(name="serial")})
    same = {Training(place, experiment).folder for experiment in (plain, spelt, engine)}
    assert len(same) == 1
    changes = [
        {"rounds": 5},
        {"seed": 1},
        {"until": "accuracy=0.5"},
        {"nodes": 20},
        {"init": {"start": "shared"}},
        {"evaluation": {"every": 2}},
        {"model": "mnist-cnn:dropout=true"},
        {"topology": "ring"},
        {"local": {"epochs": 1}},
        {"local": {"loss": "virtual-teacher"}},
        {"algorithm": "dechw:theta=3"},
        {"dataset": "mnist:train=100"},
        {"partition": "iid"},
        {"init": {"scheme": "he"}},
        {"init": {"gain": "graph"}},
        {"init": {"gain": "manual:g=2"}},
        {"init": {"bias": "zero"}},
        {"pooled": True},
        {"assortativity": 0.1},
        {"faults": {"links": 0.5}},
        {"faults": {"nodes": 0.5}},
        {"evaluation": {"growth": 1.1}},
        {"evaluation": {"spread": True}},
        {"local": {"loss_clamp": 10.0}},
        {"local": {"steps": 8, "epochs": None}},
    ]
    table = tomllib.loads(plain.to_toml())
    others = [Experiment(**merged(table, change)) for change in changes]
    folders = {Training(place, experiment).folder for experiment in [plain, *others]}
    assert len(folders) == len(changes) + 1


@pytest.mark.parametrize(
    ("scale", "folder"),
    [
        ("smoke", "digits-dir0.2-dechw-seed0-faeebb8042"),
        ("small", "mnist-dir0.2-dechw-seed0-96f65824c5"),
        ("paper", "mnist-dir1-dechw-seed0-31a06cbbfd"),
    ],
)
def test_finished_runs_of_earlier_versions_stay_found(scale, folder):
    jobs = runner.STUDIES["p0-fig8"].jobs(Plan(scale, seeds=1))
    [first, *_] = [job for job in jobs if job.place.method == "DecHW"]
    assert first.folder == folder


def test_what_came_later_is_said_only_where_it_is_used():
    said = run_key(settings.experiment(Plan("paper"), "mnist", 0.2, "dechw", 0))
    assert set(said) == {
        "algorithm", "dataset", "model", "topology", "partition", "nodes", "rounds", "until",
        "seed", "local", "loss", "start", "evaluation",
    }  # fmt: skip
    changes = {"init": {"scheme": "he", "gain": "exponent:a=0.4"}, "faults": {"links": 0.5}}
    more = run_key(settings.experiment(Plan("paper"), "mnist", 0.2, "dechw", 0, **changes))
    assert more["init"] == {"scheme": "he", "gain": "exponent:a=0.4"}
    assert more["faults"] == {"links": 0.5}
    assert {key: more[key] for key in said} == said


@pytest.mark.parametrize("fidelity", ["paper", "code"])
@pytest.mark.parametrize("dataset", IMAGES)
def test_recipes_and_studies_agree(dataset, fidelity):
    short = {"fashion-mnist": "fashion", "cifar10": "cifar"}.get(dataset, dataset)
    recipe = recipes()[f"p0-{short}" + ("-code" if fidelity == "code" else "")]
    plan = Plan("paper", fidelity=fidelity)
    study = settings.experiment(plan, dataset, 0.2, "dechw", 0)
    tables = [Experiment.from_toml(recipe.read_text()).table(), study.table()]
    for table in tables:  # a recipe is evaluated less often, as it is for people who wait
        del table["evaluation"]["every"]
    assert tables[0] == tables[1]


# The numbers


def test_printed_numbers_are_the_papers():
    final = printed.accuracies()
    assert len(final) == 45 + 3
    assert final["mnist", 0.2, "DecHW"] == (0.9389, 0.009)
    assert final["cifar10", 0.5, "DecDiff(VT)"] == (0.5354, 0.025)
    best = printed.rounds(printed.OF_BEST)
    halves = [best["mnist", 0.2, method][0] for method in settings.FIVE]
    assert halves == [189, 77, 37, 36, 14]
    assert best["cifar10", 1.0, "DecDiff"] == (98, 278, 804, None)
    own = printed.rounds(printed.OF_OWN)
    assert own["mnist", 0.2, "CFA"] == (934, 958, 973, 986)
    # The paper's own check: DecHW is the best method, so both tables agree on it nearly everywhere.
    assert all(own[k] == v for k, v in best.items() if k[2] == "DecHW")
    absolute = printed.rounds(printed.TO_ABSOLUTE)
    assert absolute["mnist", 1.0, "DecHW"] == (11, 34, 120, 327)
    assert [final["cifar10", a, "DESA"][0] for a in (1.0, 0.5, 0.2)] == [0.3518, 0.301, 0.2346]


def written(folder: Path, algorithm: str, seed: int, accuracies: list[float]) -> RunRecord:
    """A run folder with these accuracies, round by round."""
    folder.mkdir(parents=True)
    experiment = Experiment(algorithm=algorithm, seed=seed, rounds=len(accuracies) - 1)
    (folder / "experiment.toml").write_text(experiment.to_toml())
    rows = [
        {
            "scope": "network",
            "round": number,
            "nodes": 2,
            "bytes": 0,
            "bytes_total": 80 * number,
            "accuracy": value,
            "loss": 1.0,
            "seconds": {"total": 1.0},
        }
        for number, value in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "setup.json").write_text(json.dumps({"edges": [[0, 1]], "parameters": [10, 10]}))
    (folder / "environment.json").write_text("{}")
    summary = {"status": "finished", "algorithm": algorithm, "rounds": len(rows) - 1}
    (folder / "summary.json").write_text(json.dumps(summary))
    return RunRecord.load(folder)


@pytest.fixture
def two_methods(tmp_path) -> Results:
    """DecHetero climbs to 0.4, DecHW to 0.8; two seeds each, fourteen rounds."""
    plan = Plan("small", seeds=2)
    jobs = settings.grid(plan, ["DecHetero", "DecHW"], ["mnist"])
    store = runner.Store(tmp_path)
    slow = [0.1, 0.1, 0.2] + [0.4] * 12
    fast = [0.1, 0.5, 0.5] + [0.8] * 12
    for job in jobs:
        values = slow if job.place.method == "DecHetero" else fast
        if job.experiment.seed == 1:  # a round later, and 0.1 higher in the end
            values = [0.1, *values[:3], *[v + 0.1 for v in values[4:]]]
        name = "decavg" if job.place.method == "DecHetero" else "dechw"
        written(store.folder(job), name, job.experiment.seed, values)
    return store.results(plan, jobs)


def cells(table) -> dict[str, list[float | None]]:
    return {titles[-1]: [cell.ours for cell in row] for titles, row in table.rows}


def test_final_accuracy_is_the_mean_over_ten_rounds_and_seeds(two_methods):
    [slow], [fast] = cells(output.final_accuracy(two_methods)).values()
    assert slow == pytest.approx(0.45)
    assert fast == pytest.approx(0.85)
    table = output.final_accuracy(two_methods)
    spread = [row[0].spread for _, row in table.rows]
    assert spread == pytest.approx([0.05, 0.05])
    assert [row[0].paper for _, row in table.rows] == [0.8814, 0.9389]


def test_rounds_to_shares_of_the_best_of_any_method(two_methods):
    # 50, 75, 90, 95 % of 0.85 are 0.425, 0.6375, 0.765 and 0.8075.
    table = output.rounds_table("", printed.OF_BEST, output.of_best, two_methods)
    assert cells(table)["DecHW"] == [1.5, 3.5, 3.5, None]
    assert cells(table)["DecHetero"] == [None] * 4
    notes = {titles[-1]: [cell.note for cell in row] for titles, row in table.rows}
    assert notes["DecHetero"][0] == "1 of 2 seeds"
    assert notes["DecHW"][3] == "1 of 2 seeds"


def test_rounds_to_shares_of_each_methods_own_best(two_methods):
    # Of 0.45: 0.225, 0.3375, 0.405, 0.4275.
    table = output.rounds_table("", printed.OF_OWN, output.of_own, two_methods)
    assert cells(table)["DecHetero"] == [3.5, 3.5, None, None]


def test_rounds_to_absolute_accuracies(two_methods):
    table = output.rounds_table("", printed.TO_ABSOLUTE, output.absolute, two_methods)
    assert cells(table)["DecHW"] == [1.5, 3.5, None, None]
    assert [c[1] for c in table.columns] == ["50 %", "75 %", "85 %", "90 %"]


def test_scalars_are_counted_per_link(two_methods):
    table = output.scalars_table(two_methods)
    # 80 bytes a round over two directed links are 10 numbers each way: one model of 10 parameters.
    assert [row[0].ours for _, row in table.rows] == pytest.approx([140, 140])
    assert [row[0].paper for _, row in table.rows] == [140, 280]


def test_an_estimate_grows_with_rounds_and_examples():
    [job] = runner.STUDIES["p0-fig2"].jobs(Plan("paper", seeds=1))
    seconds = Speeds().seconds(job)
    longer = Training(job.place, job.experiment.model_copy(update={"rounds": 2000}))
    assert Speeds().seconds(longer) - 0.5 == pytest.approx(2 * (seconds - 0.5))
    online = settings.experiment(Plan("paper"), "mnist", 0.2, "dechw:curvature=online", 0)
    cores = Speeds().machine["cores"]
    saved = seconds - Speeds().seconds(Training(job.place, online))
    assert saved == pytest.approx(1000 * 60_000 / 1000 / cores)  # a pass of every round


SHORT = Experiment(
    algorithm="decavg",
    model="digits-mlp",  # 6570 parameters
    nodes=4,
    topology="complete",
    partition="balanced-iid:items=80",
    rounds=100,
    local={"steps": 8, "batch_size": 16},
    evaluation={"growth": 1.5, "samples": 100},
    engine={"name": "serial"},
)


def estimate(**changes) -> float:
    experiment = Experiment(**merged(tomllib.loads(SHORT.to_toml()), changes))
    return Speeds().seconds(Training(Setting("digits", 0.2, "DecAvg"), experiment))


def test_an_estimate_counts_steps_evaluations_and_averages():
    # Evaluated after rounds 1, 2, 3, 5, 8, 12, 18, 27, 41, 62, 93 and 100.
    evaluated = 12 * 4 * 100 / 5000
    # Two workers average four models each, for all of their nodes.
    averaged = 100 * 8 * 6570 / 1e9
    assert estimate() == pytest.approx(0.5 + 100 * 4 * 8 * 16 / 1000 + evaluated + averaged)
    # On a ring four nodes average three models each, and where messages may get lost, four each.
    ring = estimate(topology="ring") - estimate()
    assert ring == pytest.approx(100 * (12 - 8) * 6570 / 1e9)
    lossy = estimate(faults={"loss": 0.1}) - estimate()
    assert lossy == pytest.approx(100 * (16 - 8) * 6570 / 1e9)
    epochs = estimate(local={"steps": None, "epochs": 2})
    assert epochs == pytest.approx(0.5 + 100 * 2 * 4 * 80 / 1000 + evaluated + averaged)
    # One node with the data of four: as many steps as one of them takes, and no model to average.
    assert estimate(pooled=True) == pytest.approx(0.5 + 100 * 8 * 16 / 1000 + evaluated / 4)
    cores = min(Speeds().cores, 4)
    pool = estimate(engine={"name": "pool"})
    assert pool - 0.5 == pytest.approx((estimate() - 0.5) / cores)


def test_an_estimate_of_a_mix_is_a_mean_over_the_nodes(monkeypatch):
    """Five nodes take two models in turn: three have the first."""
    rates = {"mlp:hidden=8": Rate(100.0, 500.0), "digits-mlp": Rate(400.0, 1000.0)}
    monkeypatch.setattr(Speeds, "rate", lambda self, dataset, model, *about: rates[model])
    table = tomllib.loads(SHORT.to_toml()) | {"nodes": 5, "topology": {"name": "ring"}}
    table |= {"algorithm": {"name": "local"}, "model": [{"name": "mlp", "hidden": "8"}]}
    table["model"].append({"name": "digits-mlp"})
    both = Experiment(**table)
    found = Speeds().mean_rate(both)
    assert found.trained == pytest.approx(5 / (3 / 100 + 2 / 400))
    assert found.evaluated == pytest.approx(5 / (3 / 500 + 2 / 1000))
    assert parameters(both) == round((3 * 610 + 2 * 6570) / 5)
    trained = 100 * 8 * 16 * (3 / 100 + 2 / 400)
    evaluated = 12 * 100 * (3 / 500 + 2 / 1000)
    estimated = Speeds().seconds(Training(Setting("digits", 0.2, "DecAvg"), both))
    assert estimated == pytest.approx(0.5 + trained + evaluated)
    alone = both.model_copy(update={"pooled": True})
    assert Speeds().mean_rate(alone).trained == pytest.approx(100)


def test_an_algorithm_that_does_not_state_its_cost_has_no_estimate(tmp_path, monkeypatch):
    study = runner.STUDIES["p0-fig2"]
    [job] = study.jobs(SMOKE)
    monkeypatch.setattr(DecHW, "cost", Algorithm.cost)
    monkeypatch.setattr(calibrate, "_mean_cost", calibrate._mean_cost.__wrapped__)
    assert Speeds().seconds(job) is None
    assert runner.checkpoint_interval(job, 1.0) is None
    rows = entries([study], runner.Store(tmp_path), SMOKE, Speeds())
    assert rows[0]["hours"] is rows[0]["hours_left"] is None
    assert hours(None) == "unknown"
    assert run_jobs(tmp_path, [job]).done == 1


def test_large_models_and_short_rounds_are_saved_less_often():
    place = Setting("cifar10", 0.2, "DecAvg")
    table = tomllib.loads(SHORT.to_toml())
    large = Experiment(**merged(table, {"dataset": "cifar10", "model": "vgg16"}))
    # 4 models of 33 638 218 numbers take 2.7 s to write, so a round must take 27 s.
    assert runner.checkpoint_interval(Training(place, large), 100 * 26.0) is None
    assert runner.checkpoint_interval(Training(place, large), 100 * 28.0) == 1
    assert runner.checkpoint_interval(Training(place, SHORT), 1.0) == 1
    alone = large.model_copy(update={"pooled": True})
    assert runner.checkpoint_interval(Training(place, alone), 100 * 7.0) == 1


def test_options_that_change_the_images_change_the_estimate():
    table = tomllib.loads(SHORT.to_toml())
    colour = Experiment(**merged(table, {"dataset": "cifar10", "model": "logistic"}))
    small = "cifar10:grey=true,side=28"
    grey = Experiment(**merged(table, {"dataset": small, "model": "logistic"}))
    assert parameters(colour) == 3072 * 10 + 10
    assert parameters(grey) == 784 * 10 + 10


def test_fewer_writers_than_there_are_have_fewer_examples():
    table = {"dataset": "femnist", "model": "leaf-cnn", "partition": "by-group"}
    some = Experiment(**merged(tomllib.loads(SHORT.to_toml()), {**table, "nodes": 71}))
    assert examples(some) == 14_460  # of 723 000 by 3550 writers
    assert examples(some.model_copy(update={"partition": Iid()})) == 723_000


@pytest.mark.slow
def test_calibration_measures_and_remembers(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real thing
    fresh = Speeds(tmp_path / "speeds.json")
    rate = fresh.rate("digits", "digits-mlp", 16)
    assert rate.trained > 0
    assert rate.evaluated > rate.trained
    assert Speeds(tmp_path / "speeds.json").rates == {"digits digits-mlp 16": rate}
    assert fresh.rate("digits", "mlp:hidden=8", 16) == fresh.rates["digits mlp:hidden=8 16"]
    grey = dataset_info(Cifar10(grey=True, side=9))
    assert fresh.rate("cifar10", "logistic", 16, grey) == fresh.rates["cifar10 1x9x9 logistic 16"]
    assert fresh.averaged() > 1e6
    assert fresh.products() > 1e6
    assert Speeds(tmp_path / "speeds.json").averaged() == fresh.averaged()
    day = 24 * 3600
    later = Speeds(tmp_path / "speeds.json", lambda: fresh.measured + 29 * day)
    assert (later.rates, later.measured) == (fresh.rates, fresh.measured)
    assert Speeds(tmp_path / "speeds.json", lambda: fresh.measured + 31 * day).rates == {}
    saved = json.loads((tmp_path / "speeds.json").read_text())
    del saved["measured"]  # as an earlier version wrote it, by wall time
    (tmp_path / "speeds.json").write_text(json.dumps(saved))
    assert Speeds(tmp_path / "speeds.json").rates == {}
    (tmp_path / "speeds.json").write_text("damaged")
    assert Speeds(tmp_path / "speeds.json").rates == {}


# Studies from outside the package


OUTSIDE = """
from dataclasses import replace

from peerage.papers.runner import STUDIES

MINE = replace(STUDIES["p0-fig2"], id="mine", title="Not in the paper: mine")
TAKEN = STUDIES["p0-fig3"]
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(runner, "STUDIES", dict(runner.STUDIES))
    path = tmp_path / "outside.py"
    path.write_text(OUTSIDE)
    return path


@pytest.mark.slow
def test_a_study_from_a_file_is_run_listed_and_written(outside, tmp_path):
    outcome = peerage(f"reproduce {outside}:MINE --scale smoke --json --out", tmp_path / "home")
    written = json.loads(outcome.lines[-1])
    assert written["done"] == 1
    page = tmp_path / "home" / "results" / "mine-smoke.md"
    assert str(page) in written["files"]
    assert "Made by `peerage reproduce outside.py:MINE --scale smoke`" in page.read_text()
    listed = peerage(f"reproduce {outside}:MINE --list --scale smoke --out", tmp_path / "home").out
    assert "1 of 1" in listed
    assert runner.find("mine") is runner.find(f"{outside}:MINE")


def test_a_study_can_be_registered_from_python(outside):
    study = replace(runner.STUDIES["p0-fig2"], id="ours")
    runner.register(study)
    runner.register(study)
    assert runner.find("ours") is study
    with pytest.raises(InputError, match="already a study 'ours'; choose another id"):
        runner.register(replace(study, title="another"))


def test_files_without_the_study_are_rejected(outside, tmp_path):
    with pytest.raises(InputError, match="has no study 'MIND'; did you mean 'MINE'"):
        runner.find(f"{outside}:MIND")
    with pytest.raises(InputError, match="already a study 'p0-fig3'"):
        runner.find(f"{outside}:TAKEN")
    with pytest.raises(InputError, match="does not exist"):
        runner.find(f"{tmp_path}/nothing.py:MINE")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(InputError, match="cannot be loaded: ZeroDivisionError"):
        runner.find(f"{tmp_path}/broken.py:MINE")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(InputError, match="it defines no Study"):
        runner.find(f"{tmp_path}/empty.py:MINE")


OWN_CODE = """
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from peerage import DecAvg
from peerage.papers.runner import STUDIES
from peerage.papers.study import Training
from peerage.experiment import Experiment


@dataclass(frozen=True)
class Here(DecAvg):
    pass


def jobs(plan):
    settings = {"dataset": "digits", "nodes": 3, "rounds": 1, "topology": "ring"}
    settings |= {"partition": "iid", "local": {"epochs": 1}, "engine": {"name": "serial"}}
    place = STUDIES["p0-fig2"].jobs(plan)[0].place
    algorithms = {"mine": "mine.py:Mine:weights=uniform", "here": Here()}
    return [
        Training(place, Experiment(**settings, algorithm=one, model="mine.py:Net"))
        for one in algorithms.values()
    ]


MINE = replace(STUDIES["p0-fig2"], id="own-code", jobs=jobs)
"""
MINE = """
from dataclasses import dataclass
from math import prod

from torch import nn

from peerage import DecAvg


@dataclass(frozen=True)
class Mine(DecAvg):
    pass


@dataclass(frozen=True)
class Net:
    def build(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), classes))
"""


@pytest.mark.slow
def test_a_study_may_use_own_algorithms_and_models(outside, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outside.write_text(OWN_CODE)
    (tmp_path / "mine.py").write_text(MINE)
    line = f"reproduce {outside}:MINE --scale smoke --json --out home"
    outcome = peerage(line)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.lines[-1])["done"] == 2
    folders = sorted(path.name for path in (tmp_path / "home" / "runs").iterdir())
    assert [name.rpartition("-")[0] for name in folders] == [
        "digits-iid-Here-seed0",
        "digits-iid-Mine-seed0",
    ]
    again = json.loads(peerage(line).lines[-1])
    assert (again["done"], again["skipped"]) == (0, 2)
    (tmp_path / "mine.py").write_text(MINE + "# changed\n")  # also the model of the other
    assert json.loads(peerage(line).lines[-1])["done"] == 2


def test_speeds_do_not_count_the_time_of_other_programs(monkeypatch):
    """A call takes 10 ms of this process; the machine lets it wait for a minute in between."""
    clock = {"own": 0.0, "wall": 0.0}

    def work():
        clock["own"] += 0.01
        clock["wall"] += 60.0

    monkeypatch.setattr(calibrate, "process_time", lambda: clock["own"])
    monkeypatch.setattr("time.perf_counter", lambda: clock["wall"])
    assert calibrate._per_second(work) == pytest.approx(100)
