"""`tools/keep_runs.py`: records of finished runs in an archive, from which pages are made again."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.command_line import peerage

ROOT = Path(__file__).parents[1]
STUDY = "reproduce p3-settlement --scale smoke --json --out"


def keep(home, archive):
    command = [sys.executable, ROOT / "tools" / "keep_runs.py", home, archive]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_study_continues_from_kept_records(tmp_path):
    first, second, archive = tmp_path / "first", tmp_path / "second", tmp_path / "runs.tar.xz"
    made = json.loads(peerage(STUDY, first).out.splitlines()[-1])
    unfinished = first / "runs" / "unfinished"
    unfinished.mkdir()
    (unfinished / "summary.json").write_text('{"status": "interrupted"}')

    assert keep(first, archive).stdout.startswith(f"{archive}: 2 runs added, 2 in all, ")
    before = archive.read_bytes()
    assert keep(first, archive).stdout.startswith(f"{archive}: 2 runs added, 2 in all, ")
    assert archive.read_bytes() == before  # the same records give the same bytes

    with tarfile.open(archive) as tar:
        assert not [name for name in tar.getnames() if "unfinished" in name or "checkpoint" in name]
        tar.extractall(second, filter="data")
    again = json.loads(peerage(STUDY, second).out.splitlines()[-1])
    assert (made["done"], again["done"], again["skipped"]) == (2, 0, 2)
    page = "results/p3-settlement-smoke.md"
    assert (second / page).read_text() == (first / page).read_text()


@pytest.mark.slow
def test_a_folder_without_finished_runs_is_an_error(tmp_path):
    outcome = keep(tmp_path, tmp_path / "runs.tar.xz")
    assert outcome.returncode == 2
    assert outcome.stderr.startswith(f"error: {tmp_path} has no finished runs")
    assert not (tmp_path / "runs.tar.xz").exists()
