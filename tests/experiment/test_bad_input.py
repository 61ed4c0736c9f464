"""Bad input is one line with the value and the remedy, exit code 2, and nothing half-written."""

import errno
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from safetensors import SafetensorError
from support.command_line import TINY, error_line, flags, peerage, start
from support.processes import TIMEOUT

import peerage as pg
from peerage.data.sources import PUBLISHED
from peerage.engine import shard
from peerage.errors import Interrupted
from peerage.records.rows import MetricWriter, RunRecord, read_metrics

# What is typed, and what the one line must contain.
CASES = [
    ("run --algorithm dechv", "unknown algorithm 'dechv'; did you mean 'dechw'?"),
    ("run --algorithm dechw:bta=1", "'dechw' has no option 'bta'; did you mean 'beta'?"),
    ("run --algorithm dechw:beta=0", "beta must be a number above 0, got 0.0"),
    ("run --algorithm dechw:theta=0", "theta must be at least 1 round, got 0"),
    ("run --algorithm dechw:curvature=btch", "'btch'", "did you mean 'batch'?"),
    ("run --algorithm nothing.py:Mine", "nothing.py' does not exist"),
    ("compare --algorithms decavg,dechv", "unknown algorithm 'dechv'; did you mean 'dechw'?"),
    (
        "compare --algorithms ,",
        "--algorithms ',' names no algorithm; write --algorithms decavg,dechw",
    ),
    ("run --dataset minst", "unknown dataset 'minst'; did you mean 'mnist'?"),
    ("run --dataset npz:path=gone.npz", "gone.npz does not exist; give the path of a .npz file"),
    ("run --dataset npz", "dataset 'npz' requires path; write path=VALUE"),
    ("run --model mnist-cn", "unknown model 'mnist-cn'; did you mean 'mnist-cnn'?"),
    ("run --model h3-cnn", "unknown model 'h3-cnn'; did you mean"),
    ("run --model h2-cnn:channels=8", "mix 'h2-cnn' of models has no options; write h2-cnn"),
    ("run --model h2-efficientnet", "'efficientnet' needs images of at least 32x32", "1x8x8"),
    ("run --model mlp:hidden=8y8", "hidden must be widths", "'8y8'"),
    ("run --model mnist-cnn", "needs images of at least 16x16", "1x8x8", "choose digits-cnn"),
    ("run --topology rign", "unknown topology 'rign'; did you mean 'ring'?"),
    ("run --topology er:p=1.5", "p must lie in [0, 1], got 1.5"),
    ("run --topology er:p=-0.1", "p must lie in [0, 1], got -0.1"),
    ("run --topology er:p=nan", "p must lie in [0, 1], got nan"),
    ("run --topology er:p=0 --nodes 4", "er:p=0.0", "not connected", "choose a larger p"),
    ("run --topology regular:k=3 --nodes 5", "no 3-regular graph has 5 nodes; make k or nodes ev"),
    ("run --topology regular:k=5 --nodes 5", "k must be smaller than the 5 nodes, got 5"),
    ("run --topology torus --nodes 7", "cannot have 7 nodes; use 4 or 9 nodes"),
    ("topology er:p=2", "p must lie in [0, 1], got 2.0"),
    ("topology rign", "unknown topology 'rign'; did you mean 'ring'?"),
    ("topology ring --nodes 0", "nodes must be at least 1, got 0"),
    ("topology ring --plot ring.jpg", "'ring.jpg'; use a name ending in .png or .svg"),
    ("run --partition dirichle", "unknown partition 'dirichle'; did you mean 'dirichlet'?"),
    ("run --partition dirichlet:alpha=0", "alpha must be a positive number, got 0.0"),
    ("run --partition dirichlet:alpha=-1", "alpha must be a positive number, got -1.0"),
    ("run --nodes 1438 --topology ring", "1438 nodes cannot share 1437 samples; use at most 1437"),
    ("run --nodes 1438 --topology ring --partition iid", "1438 nodes cannot share 1437 samples"),
    ("run --nodes 500 --topology ring --partition dirichlet:min_size=10", "need 5000 samples"),
    ("run --nodes 4 --clusters 2/1:rotate", "2/1 have 3 nodes in all, but the experiment has 4"),
    ("run --nodes 4 --clusters 2/2:rotaet", "unknown shift 'rotaet'; did you mean 'rotate'?"),
    ("run --nodes 4 --clusters 2/2:colour", "colour requires images of 3 channels", "(1, 8, 8)"),
    (
        "run --nodes 4 --clusters 2/2:labels:keep=0-4+10",
        "keeps label 10, but the labels are 0 to 9",
    ),
    ("run --nodes 4 --clusters 2/2:labels:keep=0-4", "keep has 1 values for 2 clusters"),
    ("run --shuffle-clusters", "clusters requires sizes; write --clusters 30/2:rotate"),
    ("plan --nodes 4 --clusters 2/1:rotate", "2/1 have 3 nodes in all, but the experiment has 4"),
    ("run --algorithm facade:k=0", "k must be at least 1 head, got 0"),
    (
        "run --algorithm facade --model logistic",
        "facade requires a model with a core and a head",
        "is the whole model; use a model with more layers",
    ),
    (
        "run --algorithm facade:eval_head=last,test_choice_batches=5",
        "test_choice_batches=5 has no effect with eval_head=last",
        "use eval_head=train or test",
    ),
    ("run --algorithm ifca:k=0", "k must be at least 1 model, got 0"),
    ("run --algorithm ifca:k=1,restart=3", "restart=3 has no effect with k=1"),
    ("run --algorithm ifca:clients=5 --nodes 4", "cannot select 5 clients among 4 nodes"),
    (
        "run --algorithm ifca --model mlp:hidden=8 --model mlp:hidden=9",
        "ifca requires equal architectures, got 2; use one --model for all nodes",
    ),
    (
        "run --algorithm ifca:shared_core=true --model logistic",
        "ifca:shared_core=true requires a model with a core and a head",
    ),
    (
        "run --algorithm dac --nodes 3 --topology ring",
        "peers=4 is more than the 2 other nodes",
        "use peers=2 or fewer, or --nodes 5 or more",
    ),
    ("run --algorithm dac --nodes 1 --topology complete", "0 other nodes", "use --nodes 5 or more"),
    ("run --gain grph", "unknown gain 'grph'; did you mean 'graph'?"),
    ("run --gain manual:g=0", "g must be a number above 0, got 0.0"),
    ("run --optimizer sdg", "optimizer must be one of sgd, adamw; got 'sdg', did you mean 'sgd'?"),
    (
        "run --engine serail",
        "engine: name must be one of serial, pool, ray; got 'serail', did you mean 'serial'?",
    ),
    (
        "run --init shard",
        "init: start must be one of shared,",
        "got 'shard', did you mean 'shared'?",
    ),
    ("run --scheme hee", "init: scheme must be one of torch,", "got 'hee', did you mean 'he'?"),
    (
        "run --eval-at after-trainin",
        "eval-at must be one of after-training, after-aggregation; got 'after-trainin', "
        "did you mean 'after-training'?",
    ),
    ("run --eval-at exchange", "eval-at must be one of after-training, after-aggregation; got"),
    ("run demmo", "'demmo' is neither a file nor a recipe; did you mean 'demo'?"),
    ("run --epoch 3", "No such option: --epoch", "--epochs"),
    ("ran", "No such command 'ran'", "'run'"),
    ("list algorithm", "unknown list 'algorithm'; did you mean 'algorithms'?"),
    ("data get minst", "no data set to fetch is called 'minst'; did you mean 'mnist'?"),
    ("data get mnist --source sites", "unknown source 'sites'; did you mean 'site'?"),
    ("run --lr -0.1", "lr must be a number of at least 0, got -0.1"),
    ("run --lr nan", "lr must be a number of at least 0, got nan"),
    ("run --lr inf", "lr must be a number of at least 0, got inf"),
    ("run --lr abc", "--lr", "valid number", "'abc'"),
    ("run --lr=abc", "--lr", "valid number", "'abc'"),
    ("run --lr", "--lr", "requires an argument"),
    ("run --nodes 1.5", "--nodes", "valid integer", "'1.5'"),
    ("run --nodes 0", "nodes must be at least 1, got 0"),
    ("run --nodes -3", "nodes must be at least 1, got -3"),
    ("run --rounds 0", "rounds must be at least 1, got 0"),
    ("run --seed -1", "seed must be at least 0, got -1"),
    ("run --workers 0", "workers must be at least 1, got 0"),
    ("run --eval-every 0", "evaluation every must be at least 1 round, got 0"),
    ("run --eval-samples 0", "evaluation samples must be at least 1, got 0"),
    ("run --eval-samples 10000000", "10000000 is more than the 360 test examples", "use 360 or"),
    ("run --validation 1", "validation must lie in [0, 1), got 1.0"),
    ("run --checkpoint-every 0", "checkpoint-every must be at least 1 round, got 0"),
    ("run --epochs 2 --steps 3", "epochs=2 and steps=3 exclude each other; give one of them"),
    ("run --epochs 0", "epochs must be at least 1, got 0"),
    ("run --steps 0", "steps must be at least 1, got 0"),
    ("run --batch-size 0", "batch_size must be at least 1, got 0"),
    ("run --momentum 1", "momentum must lie in [0, 1), got 1.0"),
    ("run --weight-decay -1", "weight_decay must be a number of at least 0, got -1.0"),
    ("run --nesterov", "nesterov needs a momentum above 0"),
    ("run --optimizer adamw --momentum 0.5", "momentum=0.5", "belong to sgd"),
    ("run --loss cross-entrop", "unknown loss 'cross-entrop'; did you mean 'cross-entropy'?"),
    ("run --loss virtual-teacher:share=2", "share must lie in [0, 1], got 2.0"),
    ("run --algorithm decdiff-vt --loss virtual-teacher", "decdiff-vt has its own loss, got"),
    ("run --algorithm cfa:epsilon=2", "epsilon must lie in (0, 1] or be -1, got 2.0"),
    (
        "run --batch-of-one merged",
        "batch_of_one must be one of keep,",
        "got 'merged', did you mean 'merge'?",
    ),
    (
        "run --early-stop rolback",
        "early_stop must be one of none,",
        "got 'rolback', did you mean 'rollback'?",
    ),
    ("run --early-stop rollback", "early_stop=rollback needs held-out examples; add --validation"),
    ("run --early-stop rollback --steps 3 --validation 0.2", "got steps=3; give epochs instead"),
    ("run --until accurcy=0.9", "until 'accurcy=0.9'", "did you mean 'accuracy'?"),
    ("run --until accuracy", "until 'accuracy' has no number for accuracy; write accuracy=0.9"),
    ("run --until validation_loss=1", "validation_loss=1.0 needs held-out examples; add --valid"),
    ("resume gone", "'gone' holds no run; give a folder that `peerage run` made"),
    ("verify gone", "'gone' holds no run; give a folder that `peerage run` made"),
    ("report gone", "there is no run folder 'gone'; give a folder that `peerage run` made"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_one_line_names_the_value_and_the_remedy(case: tuple[str, ...], home: Path) -> None:
    line, *expected = case
    message = error_line(peerage(line))
    for part in expected:
        assert part in message
    assert list(home.iterdir()) == []  # not even the folder for runs


@pytest.mark.parametrize(
    ("clusters", "expected"),
    [
        ("2/2:rotate:angles=0+90", "images of 2 x 3 pixels by 90 degrees changes their shape"),
        (
            "2/2:labels:keep=0/1+2,fraction=false",
            "cluster 1 (labels 2) has no training examples in own; keep other labels",
        ),
    ],
)
def test_clusters_that_do_not_fit_the_data(clusters: str, expected: str, home: Path) -> None:
    x, y = np.ones((40, 1, 2, 3), dtype=np.float32), np.arange(40) % 2
    np.savez(home / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    line = f"run --nodes 4 --topology ring --partition iid --clusters {clusters}"
    message = error_line(peerage(f"{line} --dataset npz:path=own.npz,classes=3"))
    assert expected in message
    assert [file.name for file in home.iterdir()] == ["own.npz"]


@pytest.mark.parametrize("line", ["run --nodes 1438 --topology ring", "compare --model mnist-cnn"])
def test_a_named_output_folder_is_not_made(line: str, home: Path) -> None:
    error_line(peerage(line, "--out", home / "new" / "run"))
    assert list(home.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["run --algorithm dechv", "run --lr abc", "run --nodes 1438 --topology ring --out here"]
)
def test_a_real_process_prints_no_traceback(line: str, home: Path) -> None:
    process = start(line, cwd=home)
    out, err = process.communicate(timeout=TIMEOUT)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(home.iterdir()) == []


def test_a_command_without_arguments_shows_its_help() -> None:
    done = peerage("")
    assert (done.code, done.err) == (2, "")
    assert "Usage" in done.out


# Files


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"rouns = 3", "experiment has no key 'rouns'; did you mean 'rounds'?"),
        (b"[local]\nlearning_rate = 3", "local has no key 'learning_rate'; known: batch_of_one,"),
        (b"nodes = ", "file.toml is not valid TOML: Invalid value (at"),
        (b"nodes = 3 # \xff", "file.toml cannot be read: 'utf-8' codec can't decode byte 0xff"),
        (b"topology = 3", "topology cannot be 3; give a name such as 'ba'"),
        (b"[dataset]\nname = 'python-object'", "dataset is a Python object"),
    ],
)
def test_a_wrong_file(content: bytes, expected: str, home: Path) -> None:
    (home / "file.toml").write_bytes(content)
    assert expected in error_line(peerage("run file.toml --out here"))
    assert [path.name for path in home.iterdir()] == ["file.toml"]


def test_an_output_folder_that_is_not_empty(home: Path) -> None:
    assert peerage(f"run {TINY} --rounds 1 --engine serial --out here").code == 0
    before = {path: path.read_bytes() for path in (home / "here").rglob("*") if path.is_file()}
    message = error_line(peerage(f"run {TINY} --rounds 1 --out here"))
    assert "output folder 'here' already holds a run; choose another --out" in message
    assert "peerage resume here" in message
    assert "already holds a run" in error_line(peerage(f"compare {TINY} --out here"))
    after = {path: path.read_bytes() for path in (home / "here").rglob("*") if path.is_file()}
    assert after == before
    assert "is finished; there is nothing to resume" in error_line(peerage("resume here"))


def test_an_output_folder_with_something_else_in_it(home: Path) -> None:
    (home / "here").mkdir()
    (home / "here" / "notes.txt").write_text("mine")
    assert "'here' is not empty; choose another --out" in error_line(peerage("run --out here"))
    assert "'here/notes.txt' is a file; choose" in error_line(peerage("run --out here/notes.txt"))
    message = error_line(peerage(f"run {TINY} --out here/notes.txt/run"))
    assert "cannot write here/notes.txt/run: Not a directory; choose a folder" in message
    assert [path.name for path in (home / "here").iterdir()] == ["notes.txt"]


def test_an_empty_output_folder_is_used(home: Path) -> None:
    (home / "here").mkdir()
    assert peerage(f"run {TINY} --rounds 1 --engine serial --json --out here").code == 0
    assert RunRecord.load(home / "here").status == "finished"


def test_a_data_set_that_is_missing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERAGE_DATA", str(home / "data"))
    message = error_line(peerage("run --dataset mnist --out here"))
    assert "is missing; fetch it with: peerage data get mnist" in message
    assert list(home.iterdir()) == []


def test_a_data_file_with_the_wrong_hash(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERAGE_DATA", str(home / "data"))
    folder_of_mnist = home / "data" / "mnist"
    folder_of_mnist.mkdir(parents=True)
    for content in PUBLISHED["mnist"].files:
        (folder_of_mnist / content.name).write_bytes(
            bytes(content.size)
        )  # the right size, other bytes
    message = error_line(peerage("run --dataset mnist --out here"))
    assert str(folder_of_mnist / PUBLISHED["mnist"].files[0].name) in message
    assert "was altered; fetch it again with: peerage data get mnist --again" in message
    assert not (home / "here").exists()


# Checkpoints


def tiny(**changes: Any) -> pg.Experiment:
    settings: dict[str, Any] = {
        "model": "logistic",
        "nodes": 4,
        "topology": "ring",
        "partition": "iid",
        "rounds": 3,
        "local": {"epochs": 1, "batch_size": 90},
        "engine": {"name": "pool", "workers": 2},
    }
    return pg.Experiment(**settings | changes)


def stop_in_round_three(row: dict[str, Any]) -> None:
    if row["round"] == 3:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of rounds 1 and 2."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Interrupted):
        pg.run(tiny(), folder, checkpoint_every=1, watch=stop_in_round_three)
    return folder


@pytest.fixture(scope="module")
def digest() -> str:
    """Of the same run without an interruption."""
    return pg.run(tiny()).digest


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position % len(content)] ^= 1
    path.write_bytes(content)


def damage(checkpoint: Path, how: str) -> None:
    manifest, part = checkpoint / "manifest.json", max(checkpoint.glob("part-*"))
    if how == "flipped":
        flip(part, 1000)
    elif how == "truncated":
        os.truncate(part, part.stat().st_size - 1)
    elif how == "missing":
        part.unlink()
    elif how == "manifest truncated":
        os.truncate(manifest, manifest.stat().st_size // 2)
    elif how == "manifest missing":
        manifest.unlink()
    else:
        manifest.write_text("[]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["flipped", "truncated", "missing", "manifest truncated", "manifest missing", "manifest else"],
)
def test_a_damaged_checkpoint(how: str, stopped: Path, digest: str, home: Path) -> None:
    shutil.copytree(stopped, "run")
    newest = Path("run/checkpoint/round-000002")
    damage(newest, how)
    metrics = Path("run/metrics.jsonl").read_bytes()
    message = error_line(peerage("resume run"))
    assert str(newest) in message
    assert f"delete {newest} and resume again from round-000001" in message
    assert Path("run/metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(newest)  # the remedy
    assert pg.resume("run").digest == digest


@pytest.mark.slow
def test_no_byte_of_a_manifest_can_change_unseen(stopped: Path, home: Path) -> None:
    shutil.copytree(stopped, "run")
    manifest = Path("run/checkpoint/round-000002/manifest.json")
    whole = manifest.read_bytes()
    for position in range(0, len(whole), 97):
        manifest.write_bytes(whole)
        flip(manifest, position)
        assert "round-000002" in error_line(peerage("resume run"))


@pytest.mark.slow
def test_the_only_checkpoint_is_damaged(stopped: Path, digest: str, home: Path) -> None:
    shutil.copytree(stopped, "run")
    shutil.rmtree("run/checkpoint/round-000001")
    newest = Path("run/checkpoint/round-000002")
    damage(newest, "flipped")
    message = error_line(peerage("resume run"))
    assert f"delete {newest} and resume again, which starts over" in message
    shutil.rmtree(newest)
    assert pg.resume("run").digest == digest


@pytest.mark.slow
def test_resuming_with_a_wrong_engine(stopped: Path, home: Path) -> None:
    shutil.copytree(stopped, "run")
    assert "got 'serail', did you mean 'serial'" in error_line(
        peerage("resume run --engine serail")
    )
    assert "workers must be at least 1, got 0" in error_line(peerage("resume run --workers 0"))
    assert "at least 1 round, got 0" in error_line(peerage("resume run --checkpoint-every 0"))


@pytest.mark.slow
def test_verifying_a_run_that_is_not_finished(stopped: Path) -> None:
    message = error_line(peerage("verify", stopped))
    assert "is interrupted, so it has no result to verify; finish it with `peerage res" in message


# Losses that become NaN


def test_a_loss_that_became_nan(engine: dict[str, Any], home: Path) -> None:
    line = "run --nodes 4 --topology ring --partition iid --rounds 3 --lr 1e6 --json --out here"
    message = error_line(peerage(f"{line} {flags(engine)}"))
    assert "of nodes 0, 1, 2, 3 became NaN or infinite in round 1; lower --lr" in message
    assert "the earlier rounds are in here" in message
    rows = read_metrics(home / "here" / "metrics.jsonl")
    assert [row["scope"] for row in rows] == ["node"] * 4 + ["network"]
    assert {row["round"] for row in rows} == {0}
    summary = json.loads((home / "here" / "summary.json").read_text())
    assert (summary["status"], summary["digest"], summary["rounds"]) == ("diverged", None, 0)
    assert summary["accuracy"] == rows[-1]["accuracy"]
    assert summary["message"] in message
    verdict = error_line(peerage("verify here"))
    assert "is diverged, so it has no result to verify; run the experiment again with" in verdict


# A disk that is full


class Full:
    """A file on a disk that takes nothing more."""

    def __init__(self, file: IO[bytes]) -> None:
        self.close = file.close

    def write(self, line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
def test_metrics_that_the_disk_rejects(
    home: Path, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    append = MetricWriter.append

    def full_in_round_two(writer: MetricWriter, row: dict[str, Any]) -> None:
        if row["round"] == 2:
            monkeypatch.setattr(writer, "_file", Full(writer._file))
        append(writer, row)

    with monkeypatch.context() as patch:
        patch.setattr(MetricWriter, "append", full_in_round_two)
        line = f"run {TINY} --rounds 3 --workers 2 --checkpoint-every 1 --out here"
        outcome = peerage(line)
    assert (outcome.code, outcome.out) == (2, "")
    message = outcome.err.splitlines()[-1]
    assert message == (
        "error: disk is full while writing here/metrics.jsonl; "
        "free space and run `peerage resume here`"
    )
    assert "Traceback" not in outcome.err
    assert RunRecord.load(Path("here")).status == "failed"
    assert pg.resume("here").digest == digest


@pytest.mark.slow
def test_a_checkpoint_that_the_disk_rejects(
    home: Path, monkeypatch: pytest.MonkeyPatch, digest: str, engine: dict[str, Any]
) -> None:
    save_file = shard.save_file

    def full_in_round_two(tensors: Any, path: str, metadata: dict[str, str]) -> None:
        if "round-000002" in path:  # the very words of the library
            raise SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            )
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(shard, "save_file", full_in_round_two)  # workers inherit it
        outcome = peerage(f"run {TINY} --rounds 3 {flags(engine)} --checkpoint-every 1 --out here")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1] == (
        "error: disk is full while writing here/checkpoint/round-000002; "
        "free space and run `peerage resume here`"
    )
    assert "Traceback" not in outcome.err
    assert [path.name for path in Path("here/checkpoint").iterdir()] == ["round-000001"]
    assert pg.resume("here").digest == digest


def test_a_checkpoint_that_cannot_be_written_for_another_reason(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(tensors: Any, path: str, metadata: Any) -> None:  # the very words of the library
        raise SafetensorError("Error while serializing: I/O error: Input/output error (os error 5)")

    monkeypatch.setattr(shard, "save_file", broken)
    outcome = peerage(f"run {TINY} --rounds 3 --engine serial --checkpoint-every 1 --out here")
    assert outcome.code == 2
    message = "cannot write here/checkpoint/round-000001: Input/output error; choose a folder"
    assert message in outcome.err.splitlines()[-1]


def test_a_disk_that_is_really_full(small_disk: Path, engine: dict[str, Any]) -> None:
    folder = small_disk / "run"
    line = f"run {TINY} --rounds 9 {flags(engine)} --checkpoint-every 1 --out"
    outcome = peerage(line, folder)
    assert (outcome.code, outcome.out) == (2, "")
    message = outcome.err.splitlines()[-1]
    assert message.startswith(f"error: disk is full while writing {folder}/")
    assert message.endswith(f"; free space and run `peerage resume {folder}`")
    assert "Traceback" not in outcome.err
    rounds = [row["round"] for row in read_metrics(folder / "metrics.jsonl")]
    assert rounds == sorted(rounds)
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    resumed = pg.resume(folder)
    assert resumed.digest == pg.run(tiny(rounds=9)).digest


@pytest.mark.slow
def test_a_disk_that_is_full_before_the_first_round(small_disk: Path) -> None:
    folder = small_disk / "run"
    line = f"run {TINY} --rounds 1 --engine serial --out"
    (small_disk / "full").write_bytes(bytes(64 * 1024))
    message = error_line(peerage(line, folder))
    assert message == (
        f"disk is full while writing {folder}/experiment.toml; "
        "free space and run the experiment again"
    )
    assert not folder.exists()
    os.truncate(small_disk / "full", 60 * 1024)  # room for one small file
    message = error_line(peerage(line, folder))
    assert message == (
        f"disk is full while writing {folder}/setup.json; "
        f"free space and run `peerage resume {folder}`"
    )
    (small_disk / "full").unlink()
    assert pg.resume(folder).digest == pg.run(tiny(rounds=1)).digest
