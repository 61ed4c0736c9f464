"""The list of runs: their status, order and filters, read from summaries only."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.dashboards import ask, dashboard, lines, make_run

from peerage.ui import listing
from peerage.ui.listing import Listing


def statuses(home: Path) -> dict[str, str]:
    return {entry.path: entry.status for entry in Listing(home).entries()}


@contextmanager
def working(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, as a process that works in it."""
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def settle(home: Path) -> None:
    """Make all folders old enough that their times tell later changes."""
    for folder in home.iterdir():
        os.utime(folder, (1e9, 1e9))


def test_every_status_is_told(tmp_path: Path) -> None:
    for status in ("finished", "failed", "diverged", "interrupted"):
        make_run(tmp_path, status, status=status)
    make_run(tmp_path, "killed", status="running")
    make_run(tmp_path, "half-written").joinpath("summary.json").write_text('{"run": "ha')
    make_run(tmp_path, "without-setup").joinpath("setup.json").unlink()
    make_run(tmp_path, "odd", status="odd")
    early = make_run(tmp_path, "killed-early")
    for name in ("summary.json", "setup.json", "metrics.jsonl"):
        (early / name).unlink()
    (tmp_path / "no-run").mkdir()
    assert statuses(tmp_path) == {
        **{status: status for status in ("finished", "failed", "diverged", "interrupted")},
        "killed": "interrupted",
        "killed-early": "interrupted",
        "half-written": "damaged",
        "without-setup": "damaged",
        "odd": "damaged",
    }


def test_a_run_that_goes_on_shows_its_last_complete_round(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "now", status="running", rounds=9, accuracy=None)
    (folder / "metrics.jsonl").write_text("".join(lines(range(5))) + lines([5])[0] + '{"scope": "n')
    with working(folder):
        (entry,) = Listing(tmp_path).entries()
    assert (entry.status, entry.facts["rounds"]) == ("running", 4)
    assert entry.facts["accuracy"] == pytest.approx(0.05)


def test_networks_and_studies_are_told_apart(tmp_path: Path) -> None:
    (make_run(tmp_path, "net") / "network.toml").write_text("")
    make_run(tmp_path, "study/1-decavg", accuracy=0.3)
    make_run(tmp_path, "study/2-dechw", accuracy=0.5, label="DecHW", status="failed")
    found = {entry.path: entry for entry in Listing(tmp_path).entries()}
    assert {path: entry.kind for path, entry in found.items()} == {
        "net": "network",
        "study": "study",
    }
    study = found["study"]
    assert (study.status, study.facts["label"]) == ("failed", "DecAvg, DecHW")
    assert (study.facts["rounds"], study.facts["rounds_planned"]) == (1, 2)
    members = Listing(tmp_path).entries("study")
    assert {entry.path for entry in members} == {"study/1-decavg", "study/2-dechw"}


def test_a_summary_is_read_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        make_run(tmp_path, f"run-{number}")
    settle(tmp_path)
    read: list[Path] = []
    original = listing.read_json

    def counted(path: Path) -> dict[str, Any]:
        read.append(path)
        return original(path)

    monkeypatch.setattr(listing, "read_json", counted)
    known = Listing(tmp_path)
    assert (len(known.entries()), len(read)) == (30, 30)
    assert (len(known.entries()), len(read)) == (30, 30)
    summary = tmp_path / "run-7" / "summary.json"
    changed = json.loads(summary.read_text()) | {"status": "failed"}
    summary.with_name("new").write_text(json.dumps(changed))
    summary.with_name("new").rename(summary)
    found = {entry.path: entry.status for entry in known.entries()}
    assert (found["run-7"], len(read)) == ("failed", 31)


def test_the_list_is_sorted_filtered_and_limited(tmp_path: Path) -> None:
    for number in range(5):
        folder = make_run(tmp_path, f"run-{number}", status="failed" if number == 3 else "finished")
        os.utime(folder / "experiment.toml", (1e9 + number, 1e9 + number))
    make_run(tmp_path, "other", label="DecHW", dataset="mnist")
    os.utime(tmp_path / "other" / "experiment.toml", (1e9 - 1, 1e9 - 1))
    app = dashboard(tmp_path).app()

    def paths(**query: Any) -> list[str]:
        return [entry["path"] for entry in ask(app, "/api/list", query).json["entries"]]

    assert paths() == ["run-4", "run-3", "run-2", "run-1", "run-0", "other"]
    assert paths(q="dechw MNIST") == ["other"]
    assert paths(status="failed") == ["run-3"]
    assert paths(kind="study") == []
    assert paths(limit=2) == ["run-4", "run-3"]
    found = ask(app, "/api/list", {"limit": 2}).json
    assert (found["total"], found["statuses"]["finished"]) == (6, 5)


def test_a_missing_home_is_empty(tmp_path: Path) -> None:
    assert Listing(tmp_path / "none").entries() == []
