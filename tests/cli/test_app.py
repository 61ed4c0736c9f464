"""What the commands print and write, on very short runs."""

import json
import shlex
import tomllib
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from support.command_line import TINY, Outcome, error_line, flags, peerage, start
from support.processes import TIMEOUT

import peerage as peerage_package
from peerage.cli.app import app
from peerage.cli.run import split_specs
from peerage.data import PUBLISHED
from peerage.experiment import Experiment
from peerage.experiment.catalogue import FAMILIES, LISTS, entries, recipes
from peerage.models import MIXES
from peerage.net.peer.network import Timeouts
from peerage.records.rows import RunRecord, read_metrics
from peerage.report.plots import KINDS, REPLAY
from peerage.runs import run as running

QUICK = f"{TINY} --engine serial --rounds 2"
# What other programs may count on in the last line of `run --json`.
PROMISED = {
    "run",
    "algorithm",
    "dataset",
    "nodes",
    "rounds",
    "accuracy",
    "accuracy_std",
    "loss",
    "bytes_sent",
    "seconds",
    "digest",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ok(line: str, *more: object) -> Outcome:
    done = peerage(line, *more)
    assert done.code == 0, done.err
    return done


def last_json(line: str, *more: object) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(ok(line, *more).lines[-1])
    return value


# run


def test_run_prints_one_json_object(home: Path) -> None:
    done = ok(f"run {QUICK} --json --out here")
    assert len(done.lines) == 1
    summary = json.loads(done.lines[0])
    assert summary.keys() >= PROMISED
    assert (summary["run"], summary["algorithm"], summary["dataset"]) == ("here", "dechw", "digits")
    assert (summary["nodes"], summary["rounds"], summary["status"]) == (4, 2, "finished")
    # Each of 4 nodes sends 650 parameters and their curvature to 2 neighbours, twice.
    assert summary["bytes_sent"] == 2 * 4 * 2 * (650 + 650) * 4
    assert summary == json.loads((home / "here" / "summary.json").read_text())
    last = read_metrics(home / "here" / "metrics.jsonl")[-1]
    assert summary["accuracy"] == last["accuracy"]
    assert summary["loss"] == last["loss"]
    assert len(bytes.fromhex(summary["digest"])) == 32


def test_run_shows_progress_on_standard_error_only() -> None:
    done = ok(f"run {QUICK} --out here")
    assert "DecHW: round 1/2" in done.err
    assert "DecHW: round 2/2" in done.err
    assert "round 1/2" not in done.out
    assert "accuracy ± std" in done.out  # the table
    assert "└┬" in done.out  # the chart
    assert done.lines[-1] == "Report: here/report.html"
    assert Path("here/report.html").read_text().startswith("<!")


@pytest.mark.slow
def test_a_real_process_prints_the_same() -> None:
    process = start(f"run {QUICK} --json --out there", cwd=Path.cwd())
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, "round 2/2" in err) == (0, True)
    assert json.loads(out)["digest"] == last_json(f"run {QUICK} --json --out here")["digest"]


def test_flags_override_the_file() -> None:
    Path("mine.toml").write_text(
        'nodes = 4\nrounds = 9\n[topology]\nname = "ring"\n[partition]\nname = "iid"\n'
        '[model]\nname = "logistic"\n[local]\nsteps = 3\nlr = 0.3\n[engine]\nname = "serial"\n'
    )
    ok("run mine.toml --rounds 1 --lr 0.1 --algorithm decavg --out here")
    stored = tomllib.loads(Path("here/experiment.toml").read_text())
    assert (stored["nodes"], stored["rounds"]) == (4, 1)
    assert stored["algorithm"] == {"name": "decavg", "weights": "data", "order": "train-first"}
    assert (stored["local"]["steps"], stored["local"]["lr"]) == (3, 0.1)
    assert Experiment.from_toml(Path("here/experiment.toml").read_text()).nodes == 4


def test_a_recipe_runs_by_its_name() -> None:
    summary = last_json("run demo --rounds 1 --nodes 6 --epochs 1 --engine serial --json")
    assert (summary["nodes"], summary["dataset"]) == (6, "digits")
    stored = tomllib.loads((Path("runs") / summary["run"] / "experiment.toml").read_text())
    assert stored["local"]["momentum"] == 0.9


@pytest.mark.slow
def test_all_engines_print_the_same_digest() -> None:
    line = f"run {TINY} --rounds 2 --json --engine"
    engines = ["serial", "pool --workers 1", "pool --workers 2"]
    digests = [last_json(f"{line} {engine}")["digest"] for engine in engines]
    assert digests[0] == digests[1] == digests[2]


def test_starts_are_shared_or_independent() -> None:
    line = f"run {QUICK} --algorithm local --json"
    consensus = {}
    for start_kind in ("shared", "independent"):
        ok(f"{line} --init {start_kind} --out {start_kind}")
        consensus[start_kind] = read_metrics(Path(start_kind) / "metrics.jsonl")[4]["consensus"]
    assert consensus["shared"] == 0
    assert consensus["independent"] > 0.1


def test_models_are_evaluated_before_or_after_averaging() -> None:
    # One full average: at the end all nodes are the same, before it they are not.
    line = "run --nodes 4 --topology complete --partition iid --epochs 1 --model logistic"
    line += " --algorithm decavg:weights=uniform --engine serial --rounds 1 --json"
    ok(f"{line} --eval-at after-aggregation --out end")
    ok(f"{line} --eval-at after-training --out exchange")
    end, exchange = (read_metrics(Path(name) / "metrics.jsonl")[-1] for name in ("end", "exchange"))
    assert end["accuracy_std"] == 0
    assert exchange["accuracy_std"] > 0
    digests = [RunRecord.load(Path(name)).summary["digest"] for name in ("end", "exchange")]
    assert digests[0] == digests[1]


def test_validation_adds_metrics_and_takes_examples() -> None:
    ok(f"run {QUICK} --validation 0.25 --json --out here")
    record = RunRecord.load(Path("here"))
    nodes = [row for row in record.nodes if row["round"] == 2]
    values = [row["validation_accuracy"] for row in nodes]  # type: ignore[typeddict-item]
    mean = record.network[-1]["validation_accuracy"]  # type: ignore[typeddict-item]
    assert mean == pytest.approx(sum(values) / 4)
    assert all(0 <= value <= 1 for value in values)
    # 1437 examples over 4 nodes, a quarter of each held out.
    assert record.setup["examples"] == [360 - 90, 359 - 90, 359 - 90, 359 - 90]


def test_test_examples_can_be_fewer() -> None:
    ok(f"run {QUICK} --eval-samples 36 --json --out here")
    record = RunRecord.load(Path("here"))
    assert record.setup["test_examples"] == 36
    accuracies = [row["accuracy"] for row in record.nodes]
    assert all((36 * accuracy) % 1 == pytest.approx(0, abs=1e-9) for accuracy in accuracies)


def test_checkpoints_are_as_frequent_as_asked() -> None:
    ok(f"run {TINY} --engine serial --rounds 5 --checkpoint-every 2 --json --out here")
    names = sorted(path.name for path in Path("here/checkpoint").iterdir())
    assert names == ["round-000004", "round-000005"]  # the newest two, and always the last round


def test_a_run_ends_at_its_target() -> None:
    done = ok(f"run {TINY} --engine serial --rounds 30 --until accuracy=0.3 --out here")
    record = RunRecord.load(Path("here"))
    rounds, accuracies = record.curve("accuracy")
    assert 0 < rounds[-1] < 30
    assert max(accuracies[1:-1], default=0.0) < 0.3 <= accuracies[-1]
    assert f"{rounds[-1]} (target reached)" in done.out
    page = Path("here/report.html").read_text()
    assert f"stopped after reaching accuracy=0.3 in round {rounds[-1]} of 30." in page
    assert "is not finished" not in page
    assert ok("verify here").out.startswith("here: same numbers in every round")
    assert "there is nothing to resume" in peerage("resume here").err


def test_a_trace_beyond_the_model_is_one_line(engine: dict[str, Any]) -> None:
    line = f"run {TINY} --rounds 1 {flags(engine)} --json --out"
    message = error_line(peerage(f"{line} wrong --algorithm dechw:trace=650"))
    assert message == "trace=650 is not a parameter in scope=all, which has 0 to 649"
    ok(f"{line} right --algorithm dechw:trace=649")
    assert sorted(RunRecord.load(Path("right")).notes("weight")) == [0, 1, 2, 3]


def test_default_folders_do_not_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Frozen":
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(running, "datetime", Frozen)
    runs = [running.new_folder(Experiment(), Path("runs")) for _ in range(3)]
    base = "runs/dechw-digits-20260102-030405"
    assert [str(path) for path in runs] == [base, f"{base}-2", f"{base}-3"]
    assert all(path.is_dir() for path in runs)  # taken at once, so that nobody else takes it
    summary = last_json(f"run {QUICK} --json")
    assert summary["run"] == "dechw-digits-20260102-030405-4"


# compare and report


def test_compare_prints_table_and_chart() -> None:
    done = ok(f"compare {QUICK} --algorithms decavg,dechw:theta=1,local --out here")
    for text in ("DecAvg", "DecHW (theta=1)", "Local", "accuracy ± std", "round", "└┬"):
        assert text in done.out
    assert done.lines[-1] == "Report: here/report.html"
    assert sorted(path.name for path in Path("here").glob("[!.]*")) == [
        "1-decavg",
        "2-dechw",
        "3-local",
        "comparison.json",
        "report.html",
    ]
    assert "DecAvg: round 2/2" in done.err


def test_compare_uses_the_same_data_and_graph_and_start() -> None:
    value = last_json(
        "compare --nodes 5 --epochs 1 --model logistic --rounds 1 --topology er:p=0.6 "
        "--engine serial --algorithms decavg,dechw --json --out here"
    )
    assert [run["algorithm"] for run in value["runs"]] == ["decavg", "dechw"]
    assert all(run.keys() >= PROMISED for run in value["runs"])
    assert value["report"] == "here/report.html"
    first, second = (RunRecord.load(Path("here") / name) for name in ("1-decavg", "2-dechw"))
    assert first.setup == second.setup
    assert first.nodes[:5] == second.nodes[:5]  # before the first round


def test_compare_keeps_two_runs_of_one_algorithm_apart() -> None:
    done = ok(f"compare {QUICK} --algorithms decavg,decavg --out here")
    chart = done.out[done.out.index("└┬") :]
    assert chart.count("DecAvg (") >= 2


@pytest.mark.slow
def test_report_compares_runs() -> None:
    ok(f"run {QUICK} --json --out one")
    ok(f"run {QUICK} --seed 1 --json --out two")
    done = ok("report one two --out page.html")
    assert "seed" in done.out
    assert done.lines[-1] == "Report: page.html"
    assert Path("page.html").read_text().count("<svg") >= 3
    assert last_json("report one --json") == {"report": "one/report.html"}


@pytest.mark.slow
def test_reports_of_clusters_show_their_fairness() -> None:
    quick = QUICK.replace("logistic", "mlp:hidden=8")  # FACADE needs a core
    clusters = f"{quick} --clusters 3/1:rotate --init shared"
    done = ok(f"run {clusters} --algorithm facade:k=2 --out one")
    table = done.out[done.out.index("Fairness between clusters") :]
    assert all(title in table for title in ("parity", "odds", "fair accuracy", "settled from"))
    assert "Head choice" in Path("one/report.html").read_text()
    ok(f"run {clusters} --algorithm el --topology dynamic-regular:k=2 --json --out two")
    found = last_json("report one two --json --out both.html")["fairness"]
    assert [row["run"] for row in found] == ["one", "two"]
    lowest = min(RunRecord.load(Path(name)).network[-1]["accuracy"] for name in ("one", "two"))
    assert {row["common_target"] for row in found} == {lowest}
    assert all(row["bytes_to_target"] > 0 for row in found)
    page = Path("both.html").read_text()
    assert "Demographic parity and equalised odds" in page
    assert "Fair accuracy, final and highest" in page


def test_algorithms_are_separated_by_commas() -> None:
    text = "decavg,dechw:beta=1,theta=30,local,my.py:Mine:a=1,b=2"
    assert split_specs(text) == [
        "decavg",
        "dechw:beta=1,theta=30",
        "local",
        "my.py:Mine:a=1,b=2",
    ]


# verify


@pytest.fixture
def finished() -> Path:
    ok(f"run {QUICK} --json --out here")
    return Path("here")


def test_verify_confirms_a_run(finished: Path) -> None:
    digest = RunRecord.load(finished).summary["digest"]
    assert ok("verify here").out == f"here: same numbers in every round, same digest {digest}\n"
    verdict = last_json("verify here --json")
    assert verdict == {
        "run": "here",
        "same": True,
        "digest": digest,
        "again": digest,
        "difference": "",
    }


def refuted(expected: str) -> None:
    done = peerage("verify here")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1] == f"error: here was not reproduced: {expected}"
    assert "Traceback" not in done.err
    in_json = peerage("verify here --json")
    assert (in_json.code, json.loads(in_json.out)["same"]) == (1, False)


def test_verify_finds_a_number_that_was_changed(finished: Path) -> None:
    path = finished / "metrics.jsonl"
    rows = read_metrics(path)
    assert (rows[7]["scope"], rows[7]["round"], rows[7]["node"]) == ("node", 1, 2)
    true, rows[7]["accuracy"] = rows[7]["accuracy"], 0.999
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refuted(f"node 2, round 1: accuracy was 0.999, is now {true}")


def test_verify_finds_a_missing_row(finished: Path) -> None:
    path = finished / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    refuted("14 rows were recorded, the new run has 15")


def test_verify_finds_another_digest(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    (finished / "summary.json").write_text(json.dumps(summary | {"digest": "0" * 64}))
    refuted("the final parameters differ, although all metrics agree")


def test_verify_finds_another_seed(finished: Path) -> None:
    path = finished / "experiment.toml"
    path.write_text(path.read_text().replace("seed = 0", "seed = 1"))
    done = peerage("verify here")
    assert done.code == 1
    assert "error: here was not reproduced: node 0, round 0: accuracy was" in done.err


# list, data and topology


@pytest.mark.parametrize("family", LISTS)
def test_list_describes_every_entry(family: str) -> None:
    known: Any = {**FAMILIES, "mixes": MIXES, "plots": [*KINDS, REPLAY], "recipes": recipes()}[
        family
    ]
    listed = last_json(f"list {family} --json")[family]
    assert [entry["name"] for entry in listed] == list(known)
    assert listed == entries(family)
    done = ok(f"list {family}")
    for entry in listed:
        assert len(entry["about"]) > 10
        assert entry["about"].rstrip().endswith((".", ":", ")")), entry
        assert f"{entry['name']}  {entry['about']}" in done.lines
        if entry["options"]:
            assert f"    {entry['options']}" in done.lines


def test_options_are_listed_with_their_defaults() -> None:
    options = {entry["name"]: entry["options"] for entry in entries("topologies")}
    assert options["ring"] == ""
    assert options["regular"] == "attempts=100,connected=true,k=4"
    assert options["edge-list"] == "path=...,directed=false,weighted=false"


def test_data_list_shows_the_state_of_every_data_set(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEERAGE_DATA", str(home / "data"))
    listed = last_json("data list --json")
    assert listed["cache"] == str(home / "data")
    assert listed["datasets"]["digits"] == "built in"
    fetched = {name: listed["datasets"][name] for name in ("mnist", "fashion-mnist", "cifar10")}
    assert set(fetched.values()) == {"missing"}
    folder_of_mnist = home / "data" / "mnist"
    folder_of_mnist.mkdir(parents=True)
    for content in PUBLISHED["mnist"].files:
        (folder_of_mnist / content.name).write_bytes(b"something else")
    lines = ok("data list").lines
    assert "mnist           altered  (peerage data get mnist --again)" in lines
    assert "cifar10         missing  (peerage data get cifar10)" in lines


def test_topology_gives_the_numbers_of_a_graph(home: Path) -> None:
    facts = last_json("topology ring --nodes 6 --json")
    assert (facts["topology"], facts["seed"], facts["nodes"], facts["edges"]) == ("ring", 0, 6, 6)
    assert (facts["degree_min"], facts["degree_max"], facts["connected"]) == (2, 2, True)
    # Averaging over three: eigenvalues (1 + 2 cos(2 pi k / 6)) / 3, the second is 2/3.
    assert facts["spectral_gap"] == pytest.approx(1 / 3)
    assert facts["gain"] == pytest.approx(6**0.5)
    for name in ("graph.png", "graph.svg"):
        done = ok("topology er:p=0.5 --nodes 8 --seed 3 --plot", home / name)
        assert (home / name).stat().st_size > 1000
        assert "spectral gap" in done.out
    seeds = [last_json(f"topology er:p=0.5 --nodes 9 --json --seed {s}")["edges"] for s in range(9)]
    assert len(set(seeds)) > 1


# Help


def test_the_version() -> None:
    done = ok("--version")
    assert done.out == f"peerage {peerage_package.__version__}\n"
    assert peerage_package.__version__ == version("peerage")


@pytest.mark.parametrize("line", ["", "data ", "run ", "certs add "])
def test_short_and_long_help_are_the_same(line: str) -> None:
    assert ok(f"{line}-h").out == ok(f"{line}--help").out


@pytest.mark.parametrize("line", ["--nodes 4 --nodes x", "--nodes=4 --lr 1 --nodes=x"])
def test_errors_about_repeated_flags_name_the_value_that_applies(line: str) -> None:
    assert "'--nodes'" in (message := error_line(peerage(f"run {line}")))
    assert message.endswith("(got 'x'); see --help")


@pytest.mark.parametrize("name", ["a b", "it's;echo no", "c:*"])
def test_hints_can_be_pasted_into_a_shell(home: Path, name: str) -> None:
    folder = home / f"{name}  1"  # two spaces are kept
    folder.mkdir()
    (folder / "experiment.toml").touch()
    message = error_line(peerage(f"run {QUICK} --out", folder))
    command = message.rpartition("with `")[2].removesuffix("`")
    assert shlex.split(command) == ["peerage", "resume", str(folder)]


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")
        else:
            yield f"{path}{name}", command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_all_commands_are_there() -> None:
    assert sorted(COMMANDS) == [
        "certs add",
        "certs init",
        "certs list",
        "certs request",
        "certs revoke",
        "certs rotate",
        "certs sign",
        "certs sign-network",
        "compare",
        "data get",
        "data list",
        "diffuse",
        "export",
        "list",
        "log",
        "model",
        "network change",
        "node",
        "plan",
        "plot",
        "report",
        "reproduce",
        "resume",
        "rewind",
        "run",
        "status",
        "topology",
        "ui",
        "up",
        "verify",
    ]


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_and_flag_has_help(name: str) -> None:
    text = ok(f"{name} --help").out
    command = COMMANDS[name]
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{name}: {parameter.name}"
        if parameter.param_type_name == "option":
            assert parameter.opts[0] in text


def test_run_has_the_promised_flags() -> None:
    text = ok("run --help").out
    flags = "algorithm dataset model nodes topology partition rounds epochs steps batch-size lr "
    flags += "momentum weight-decay optimizer init gain eval-every eval-samples eval-at engine "
    flags += "workers seed out json checkpoint-every until loss early-stop batch-of-one"
    for flag in flags.split():
        assert f"--{flag} " in text


def test_the_help_of_up_states_how_long_peers_wait() -> None:
    shown = {option.name: option.default for option in COMMANDS["up"].params}
    assert Timeouts(start=shown["start_timeout"], message=shown["message_timeout"]) == Timeouts()


def test_the_overview_names_every_command() -> None:
    text = ok("--help").out
    for name in ("run", "compare", "resume", "verify", "report", "list", "topology", "data"):
        assert f"  {name} " in text


def test_a_data_set_of_the_package_has_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(tmp_path))
    assert peerage("data get digits").out == "digits is part of the package\n"
    assert list(tmp_path.iterdir()) == []
