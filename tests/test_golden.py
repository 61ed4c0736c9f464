"""The tool that compares what two states of the code compute."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.command_line import not_ignoring
from support.processes import TIMEOUT, gone, until

import peerage as pg

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "golden.py"
sys.path.append(str(TOOL.parent))

import golden_cases  # noqa: E402 (found after the line above)
import golden_facts  # noqa: E402


def run(folder: Path, seed: int = 0, **engine: Any) -> Path:
    local = pg.LocalSGD(epochs=1, lr=0.05, momentum=0.5, keep_optimizer=True)
    experiment = pg.Experiment(
        algorithm=pg.DecHW(),
        nodes=4,
        topology="ring",
        partition="iid",
        model="mlp:hidden=8",
        rounds=2,
        local=local,
        seed=seed,
        engine=engine,
    )
    pg.run(experiment, folder, checkpoint_every=1)
    return folder


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("serial") / "run", name="serial")


@pytest.mark.slow
def test_the_same_run_on_another_engine_is_equal(serial: Path, tmp_path: Path) -> None:
    pool = run(tmp_path / "pool", name="pool", workers=2)
    verdict = golden_facts.compare(
        "case", golden_facts.read_run(serial), golden_facts.read_run(pool)
    )
    assert verdict.columns == dict.fromkeys(golden_facts.COLUMNS, "equal")
    assert verdict.status == "equal"
    assert verdict.where == ""


def test_another_seed_is_found_in_everything_but_the_bytes(serial: Path, tmp_path: Path) -> None:
    other = run(tmp_path / "other", seed=1, name="serial")
    verdict = golden_facts.compare(
        "case", golden_facts.read_run(serial), golden_facts.read_run(other)
    )
    assert verdict.columns == {
        "rows": "differs",
        "bytes": "equal",
        "parameters": "differs",
        "checkpoint": "differs",
    }
    assert not verdict.passes
    assert verdict.where.startswith("round 0 node 0: accuracy ")


def test_a_checkpoint_is_every_value_of_every_node(serial: Path) -> None:
    values = golden_facts.read_run(serial).checkpoint
    for node in range(4):
        of_node = {path for path in values if path.startswith(f"{node}.")}
        assert {f"{node}.round", f"{node}.params", f"{node}.state.h"} <= of_node
        assert [path for path in of_node if path.startswith(f"{node}.memory.")]  # the momentum
    assert len({values[f"{node}.params"] for node in range(4)}) == 4


def test_one_bit_of_a_checkpoint_is_found(serial: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    shutil.copytree(serial, other)
    path = other / "checkpoint" / "round-000002" / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    verdict = golden_facts.compare(
        "case", golden_facts.read_run(serial), golden_facts.read_run(other)
    )
    different = {name for name, column in verdict.columns.items() if column == "differs"}
    assert different == {"checkpoint"}


def change_rows(serial: Path, folder: Path, change: Any) -> Any:
    """The verdict about a run whose last row was changed."""
    shutil.copytree(serial, folder)
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return golden_facts.compare(
        "case", golden_facts.read_run(serial), golden_facts.read_run(folder)
    )


def test_seconds_do_not_count_and_numbers_do(serial: Path, tmp_path: Path) -> None:
    verdict = change_rows(serial, tmp_path / "a", lambda rows: rows[-1].update(seconds={"x": 7}))
    assert (verdict.status, verdict.where) == ("equal", "")
    verdict = change_rows(serial, tmp_path / "b", lambda rows: rows[-1].update(loss=7))
    assert verdict.columns["rows"] == "differs"
    assert verdict.where.startswith("round 2: loss ")
    assert verdict.where.endswith(" before, 7 now")
    verdict = change_rows(serial, tmp_path / "c", lambda rows: rows.pop())
    assert verdict.where == "15 rows before, 14 now"


def test_a_new_entry_in_rows_is_reported_and_a_lost_one_differs(
    serial: Path, tmp_path: Path
) -> None:
    verdict = change_rows(serial, tmp_path / "a", lambda rows: rows[-1].update(gradients=7))
    assert (verdict.status, verdict.where) == ("equal", "new in rows: gradients")
    verdict = change_rows(serial, tmp_path / "b", lambda rows: rows[-1].pop("loss"))
    assert verdict.columns["rows"] == "differs"


def test_other_names_for_the_same_values_in_a_checkpoint_are_reported(serial: Path) -> None:
    facts = golden_facts.read_run(serial)
    renamed = {path.replace("state.h", "state.sum"): x for path, x in facts.checkpoint.items()}
    verdict = golden_facts.compare("case", facts, dataclasses.replace(facts, checkpoint=renamed))
    assert verdict.status == "equal"
    assert verdict.where == "names in the checkpoint changed, values did not"


def test_runs_are_found_by_name_without_numbers_and_hashes(serial: Path, tmp_path: Path) -> None:
    names = ("runs/dechw-seed0-bfea522278", "runs/dechw-seed0-aaaaaaaaaa", "3-cfa")
    for name in names:  # the second dechw is the later one, though its hash comes first
        shutil.copytree(serial, tmp_path / name)
        os.utime(tmp_path / name / "summary.json", (names.index(name), names.index(name)))
    peer = tmp_path / "3-cfa" / "peers" / "node-0"
    peer.mkdir(parents=True)
    (peer / "summary.json").write_text("{}")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "fig-smoke.json").write_text('{"title": "a", "cells": [{"ours": 3}]}')
    found = golden_facts.read_runs(tmp_path)
    assert list(found) == ["dechw-seed0", "dechw-seed0-2", "cfa", "fig-smoke"]
    assert found["fig-smoke"].rows == [{"cells.0.ours": 3}]


def test_runs_of_one_state_only_are_new_or_gone(serial: Path) -> None:
    facts = golden_facts.read_run(serial)
    verdicts = golden_facts.compare_runs("x", {"a": facts, "b": facts}, {"b": facts, "c": facts})
    found = [(verdict.case, verdict.status, verdict.passes) for verdict in verdicts]
    assert found == [("x/a", "gone", False), ("x/b", "equal", True), ("x/c", "new", True)]


def test_a_new_algorithm_is_no_difference() -> None:
    both, verdicts = golden_cases.choose("algorithm", ["local", "old"], ["new", "local"], "")
    assert both == ["local"]
    assert [(one.case, one.status) for one in verdicts] == [
        ("algorithm/old", "gone"),
        ("algorithm/new", "new"),
    ]
    assert golden_cases.choose("algorithm", ["old"], ["new"], "*/dechw") == ([], [])


def test_every_algorithm_runs_on_every_engine_with_and_without_loss(tmp_path: Path) -> None:
    from peerage.algorithms import ALGORITHMS

    jobs = golden_cases.list_jobs(list(ALGORITHMS), ["p0-fig6"], tmp_path, "")
    for loss in golden_cases.LOSSES:
        for engine in golden_cases.ENGINES:
            names = [job for job in jobs if job.name.startswith(f"{loss}/{engine}")]
            specs = [spec.partition(":")[0] for job in names for spec in job.algorithms]
            assert sorted(specs) == sorted(ALGORITHMS)
    only = golden_cases.list_jobs(list(ALGORITHMS), [], tmp_path, "lossy/*/hwa")
    assert [(job.name, job.algorithms) for job in only] == [
        (f"lossy/{engine}", ("hwa",)) for engine in golden_cases.ENGINES
    ]


def call(*words: str, **environment: str) -> "subprocess.Popen[str]":
    with not_ignoring(signal.SIGINT):
        return subprocess.Popen(
            [sys.executable, str(TOOL), *words],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def in_repository() -> bool:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True)
    return done.returncode == 0


needs_git = pytest.mark.skipif(not in_repository(), reason="needs the repository")


@needs_git
@pytest.mark.parametrize("base", ["no-such-commit", "", "-x"])
@pytest.mark.slow
def test_an_unknown_commit_is_bad_input(base: str, tmp_path: Path) -> None:
    process = call("--", base, TMPDIR=str(tmp_path))
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    remedy = "give a commit, branch or tag: BASE=main"
    assert err == f"error: unknown commit {base!r}; {remedy}\n"
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@needs_git
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.slow
def test_an_interruption_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    process = call("HEAD", TMPDIR=str(tmp_path))
    started: list[psutil.Process] = []

    def runs() -> bool:
        started[:] = psutil.Process(process.pid).children()
        return bool(list(tmp_path.glob("golden-*/head/src/peerage"))) and bool(started)

    until(runs, "it runs the code")
    process.send_signal(number)
    _, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert err == "error: interrupted\n"
    assert gone(started)
    assert list(tmp_path.iterdir()) == []
