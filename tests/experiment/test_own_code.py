"""A user's own algorithm, models and metrics in one file: read, recorded, compared by content."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import TINY, error_line, peerage

import peerage as pg
from peerage.errors import InputError, Interrupted
from peerage.experiment import permission
from peerage.experiment.identity import content_identity, identity, own_code, run_key
from peerage.experiment.outside import CodeGate, code_gate, file_hash
from peerage.experiment.permission import allow, allowed, check_hash
from peerage.records.metrics import RESERVED
from peerage.records.rows import RunRecord
from peerage.runs.verify import OF_ENGINE

CODE = '''
from dataclasses import dataclass

import numpy as np
from torch import nn

import peerage as pg

SHARE = 0.5


@dataclass(frozen=True)
class Mine(pg.DecAvg):
    """DecAvg under another name."""

    share: float = SHARE


@dataclass(frozen=True)
class Net:
    """Linear layers with an option."""

    hidden: int = 8

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        size = int(np.prod(shape))
        layers = [nn.Flatten(), nn.Linear(size, self.hidden), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.hidden, classes))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.flatten(1))


class Sized(Plain):
    def __init__(self, size: int) -> None:
        super().__init__()


def made() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def balanced(y_true, y_pred):
    """The mean accuracy over the classes."""
    return np.mean([(y_pred[y_true == c] == c).mean() for c in np.unique(y_true)])


def greedy(y_true, y_pred):
    y_true[:] = 0


def broken(y_true, y_pred):
    return {}["nothing"]


def digest(y_true, y_pred):
    return 1.0
'''
SERIAL = {"engine": {"name": "serial"}}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


def experiment(mine: Path, **changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "algorithm": f"{mine}:Mine",
        "model": f"{mine}:Net",
        "nodes": 4,
        "topology": "ring",
        "partition": "iid",
        "rounds": 2,
        "local": {"epochs": 1, "batch_size": 90},
        "evaluation": {"metrics": [f"{mine}:balanced"]},
        **SERIAL,
    }
    return pg.Experiment(**(settings | changes))


# Models


def test_a_model_from_a_file_has_options_like_any_other(mine: Path) -> None:
    one = experiment(mine, model=f"{mine}:Net:hidden=5")
    assert one.model[0].hidden == 5
    assert one.table()["model"] == {"name": f"{mine}:Net", "hidden": 5}
    assert pg.Experiment.from_toml(one.to_toml()) == one
    with pytest.raises(InputError, match="'Net' has no option 'hiden'; did you mean 'hidden'"):
        experiment(mine, model=f"{mine}:Net:hiden=5")


@pytest.mark.parametrize("name", ["Plain", "made"])
def test_a_class_of_modules_or_a_function_is_a_model(mine: Path, name: str) -> None:
    one = experiment(mine, model=[f"{mine}:{name}", "logistic"])
    assert one.table()["model"][0] == {"name": f"{mine}:{name}"}
    assert pg.Experiment.from_toml(one.to_toml()) == one
    assert own_code(one) == {str(mine): file_hash(mine)}
    with pytest.raises(InputError, match=f"model '{name}' has no options; to give it some"):
        experiment(mine, model=f"{mine}:{name}:hidden=5")


def test_the_head_of_a_model_from_a_file_can_be_named(mine: Path) -> None:
    one = experiment(mine, model=pg.Split(f"{mine}:Plain", head="fc"))
    assert one.table()["model"] == {"name": f"{mine}:Plain", "head": ["fc"]}
    assert pg.Experiment.from_toml(one.to_toml()) == one
    assert str(mine) not in str(content_identity(one))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--model {}:Nett",
            "has no model 'Nett'; did you mean 'Net'? known: Net, Plain, Sized, made",
        ),
        ("--model {}:Sized", "model 'Sized' requires size; give it a default"),
        ("--model nowhere.py:Net", "nowhere.py' does not exist; give the path of a file"),
        ("--metric {}:balance", "has no metric 'balance'; did you mean 'balanced'?"),
        ("--metric {}:balanced:x=1", "cannot have options; write"),
        ("--metric balanced", "metric 'balanced' is not of the form file.py:function"),
        ("--metric {}:digest", "records have another use for the name of metric 'digest'"),
        ("--metric {0}:balanced --metric {0}:balanced", "another use for the name of metric"),
        ("--metric {}:broken", "metric 'broken' of {} failed: KeyError: 'nothing'"),
        ("--metric {}:greedy", "failed: ValueError: assignment destination is read-only"),
    ],
)
def test_what_a_file_does_not_have(mine: Path, flag: str, message: str, tmp_path: Path) -> None:
    line = f"run {TINY} --rounds 1 --engine serial {flag.format(mine)} --out"
    assert message.format(mine) in error_line(peerage(line, tmp_path / "out"))


@pytest.mark.slow
def test_one_file_serves_every_command(mine: Path, tmp_path: Path) -> None:
    flags = f"--model {mine}:Net:hidden=5 --metric {mine}:balanced --rounds 1 --engine serial"
    flags = f"{TINY.replace('--model logistic', '')} {flags}"
    for model in ("Net:hidden=5", "Plain"):
        line = f"plan --nodes 4 --topology ring --dataset digits --algorithm {mine}:Mine"
        assert f"{model}:" in peerage(f"{line} --model", f"{mine}:{model}").out
    compared = tmp_path / "compared"
    done = peerage(f"compare {flags} --algorithms {mine}:Mine:share=1,local --out", compared)
    assert done.code == 0
    assert "test balanced" in done.out
    run = compared / "1-Mine"
    assert peerage("verify", run).code == 0
    out = tmp_path / "model.safetensors"
    assert peerage(f"model {run} --node 0 --out", out).code == 0
    assert "test balanced" in peerage("report", run).out
    mine.write_text(CODE.replace("hidden: int = 8", "hidden: int = 9"))
    for command in (f"verify {run}", f"model {run} --node 0 --force --out {out}"):
        assert f"{mine} has changed since this run" in error_line(peerage(command))


# Metrics


@pytest.fixture
def finished(mine: Path, tmp_path: Path) -> pg.Result:
    return pg.run(
        experiment(mine, evaluation={"metrics": [f"{mine}:balanced"], "validation": 0.2}),
        tmp_path / "run",
    )


def test_an_own_metric_is_recorded_beside_accuracy(finished: pg.Result) -> None:
    nodes = [row for row in finished.rows if row["scope"] == "node" and row["round"] == 2]
    [last] = [row for row in finished.rows if row["scope"] == "network" and row["round"] == 2]
    values = [row["balanced"] for row in nodes]
    assert last["balanced"] == np.mean(values)
    assert (last["balanced_min"], last["balanced_max"]) == (min(values), max(values))
    assert last["validation_balanced"] == np.mean([row["validation_balanced"] for row in nodes])
    assert finished.summary["balanced"] == last["balanced"]
    # The classes of the test set have about equal sizes.
    assert 0 < abs(last["balanced"] - last["accuracy"]) < 0.05
    assert finished.folder is not None
    rounds, curve = RunRecord.load(finished.folder).curve("balanced")
    assert (rounds, curve[-1]) == ([0, 1, 2], last["balanced"])


def test_a_run_can_end_when_an_own_metric_is_reached(mine: Path) -> None:
    assert pg.run(experiment(mine, until="balanced>=0.01")).summary["rounds"] == 1


@pytest.mark.slow
def test_the_report_has_a_column_and_a_figure_for_an_own_metric(finished: pg.Result) -> None:
    assert finished.folder is not None
    target = finished.folder / "page.html"
    assert peerage(f"report {finished.folder} --out", target).code == 0
    page = target.read_text()
    assert "<th>balanced</th>" in page.replace(' scope="col"', "")
    assert "The metric balanced on the test set" in page
    assert f"SHA-256 of {next(iter(own_code(finished.experiment)))}" in page


def test_clusters_and_several_architectures_have_the_own_metric_too(mine: Path) -> None:
    changes = {"clusters": "2/2:rotate", "model": [f"{mine}:Net", "logistic"]}
    result = pg.run(experiment(mine, rounds=1, **changes))
    groups = [row for row in result.rows if row["scope"] == "group" and row["round"] == 1]
    assert len(groups) == 4
    assert all(0 < row["balanced"] < 1 for row in groups)


def test_no_key_of_the_records_can_be_the_name_of_a_metric(finished: pg.Result) -> None:
    keys = {key for row in finished.rows for key in row} | finished.summary.keys()
    own = {f"{prefix}balanced{end}" for prefix in ("", "validation_") for end in STATISTICS}
    assert keys - own <= RESERVED


STATISTICS = ("", "_std", "_min", "_max")


@pytest.mark.slow
def test_an_own_metric_has_equal_bits_in_the_pool(mine: Path, finished: pg.Result) -> None:
    pool = finished.experiment.model_copy(update={"engine": pg.Engine(name="pool", workers=2)})
    rows = [
        [{**row, **dict.fromkeys(OF_ENGINE)} for row in run.rows]
        for run in (finished, pg.run(pool))
    ]
    assert rows[0] == rows[1]


# Content, not paths


def test_equal_code_in_two_folders_is_the_same(mine: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "other.py"
    other.parent.mkdir()
    shutil.copy(mine, other)
    assert identity(experiment(mine)) != identity(experiment(other))
    assert content_identity(experiment(mine)) == content_identity(experiment(other))


@pytest.mark.parametrize("kind", ["algorithm", "model", "evaluation"])
def test_other_code_at_the_same_path_is_not_the_same(mine: Path, kind: str) -> None:
    plain = {"algorithm": "decavg", "model": "logistic", "evaluation": {}}
    del plain[kind]

    def known() -> dict[str, Any]:
        return content_identity(experiment(mine, **plain))

    before = known()
    mine.write_text(CODE + "# other\n")
    after = known()
    assert [key for key in before if before[key] != after[key]] == [kind]


def test_names_of_the_package_are_not_changed() -> None:
    one = pg.Experiment(model=["mlp", "logistic"])
    assert content_identity(one) == identity(one)


def test_the_key_of_a_run_with_an_own_metric_has_no_path(mine: Path, tmp_path: Path) -> None:
    plain = {"algorithm": "decavg", "model": "mlp"}
    key = run_key(experiment(mine, **plain))
    assert str(tmp_path) not in json.dumps(key)
    assert key["evaluation"].pop("metrics") == [f"balanced of SHA-256 {file_hash(mine)}"]
    assert key == run_key(experiment(mine, **plain, evaluation={}))


def interrupted(one: pg.Experiment, folder: Path) -> None:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        pg.run(one, folder, checkpoint_every=1, watch=stop)


def test_a_run_is_resumed_with_equal_code_from_another_folder(mine: Path, tmp_path: Path) -> None:
    one, folder = experiment(mine), tmp_path / "run"
    interrupted(one, folder)
    through = pg.run(one).digest
    other = tmp_path / "other.py"
    other.write_text(CODE + "# other\n")
    with pytest.raises(InputError, match=r"other\.py has changed since this run"):
        pg.resume(folder, experiment=experiment(other))
    other.write_text(CODE)
    assert pg.resume(folder, experiment=experiment(other)).digest == through


def test_records_of_earlier_versions_are_understood(mine: Path, tmp_path: Path) -> None:
    one, folder = experiment(mine, model="logistic", evaluation={}), tmp_path / "run"
    interrupted(one, folder)
    file = folder / "environment.json"
    record = json.loads(file.read_text())
    [(path, sha256)] = record.pop("code").items()
    file.write_text(json.dumps(record | {"algorithm_file": path, "algorithm_sha256": sha256}))
    mine.write_text(CODE + "# other\n")
    with pytest.raises(InputError, match="has changed since this run"):
        pg.resume(folder)
    mine.write_text(CODE)
    assert pg.resume(folder, experiment=one).summary["status"] == "finished"


# Permission


def test_nothing_of_a_file_runs_before_it_is_allowed(mine: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    mine.write_text(f"open({str(trace)!r}, 'w').close()\n{CODE}")
    sha256 = file_hash(mine)
    gate = CodeGate(tmp_path, frozenset())
    for what in ("algorithm", "model", "evaluation"):
        given = {"algorithm": "mine.py:Mine", "model": "mine.py:Net"}
        value: Any = given.get(what, {"metrics": ["mine.py:balanced"]})
        line = f"mine.py with the SHA-256 {sha256} is not allowed"
        with pytest.raises(InputError, match=line), code_gate(gate):
            pg.Experiment(**{what: value})
    wrong = replace(gate, allowed=frozenset({sha256}), expected={mine: "0" * 64})
    line = f"has the SHA-256 {sha256}, but the network file says 0"
    with pytest.raises(InputError, match=line), code_gate(wrong):
        pg.Experiment(algorithm="mine.py:Mine")
    assert not trace.exists()
    with code_gate(replace(gate, allowed=frozenset({sha256}))):
        pg.Experiment(algorithm="mine.py:Mine")
    assert trace.exists()


def test_a_permission_holds_on_the_machine_that_gave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path / "machine-id"
    machine.write_text("one")
    monkeypatch.setattr(permission, "MACHINE", machine)
    allow(tmp_path / "peer", ["a" * 64])
    allow(tmp_path / "peer", ["b" * 64])
    assert allowed(tmp_path / "peer") == {"a" * 64, "b" * 64}
    machine.write_text("two")  # the folder, with its permission, was sent to another machine
    assert allowed(tmp_path / "peer") == set()
    machine.unlink()
    assert allowed(tmp_path / "peer") == set()
    assert allowed(tmp_path / "nowhere") == set()


def test_a_hash_is_given_in_full() -> None:
    assert check_hash("A" * 64) == "a" * 64
    with pytest.raises(InputError, match="--allow-code 'abc' is not a SHA-256; give the 64 digits"):
        check_hash("abc")
