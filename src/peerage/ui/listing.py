"""The runs, networks and studies below a folder, read from their summaries only."""

import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from time import time
from typing import Any

from peerage.errors import InputError, PeerageError
from peerage.files import read_json
from peerage.records.rows import Row
from peerage.ui.metrics import NODE, last_row

DEPTH = 4  # folders below the home in which runs are looked for
SETTLED = 2.0  # seconds after which the time of a folder tells a later change apart
NEEDED = ("experiment.toml", "setup.json", "metrics.jsonl", "environment.json")
STATUSES = ("running", "finished", "failed", "diverged", "interrupted", "damaged")
FACTS = (
    "algorithm",
    "label",
    "dataset",
    "nodes",
    "rounds",
    "rounds_planned",
    "accuracy",
    "message",
)


@dataclass(frozen=True)
class Entry:
    """A run, a network of real peers, or a study, which is a folder with several runs."""

    path: str  # relative to the home, with slashes
    kind: str  # run, network or study
    status: str  # one of STATUSES; of a study, the first of them that one of its runs has
    started: float  # seconds since 1970
    facts: Mapping[str, Any] = field(default_factory=dict)  # some of FACTS; of a study, counts

    @property
    def table(self) -> dict[str, Any]:
        return asdict(self)


class Listing:
    """Finds the entries below a home; summaries are read again only after a change."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._known: dict[str, tuple[int, Entry]] = {}  # folder -> time of its last change, entry

    def entries(self, within: str = "") -> list[Entry]:
        """The entries of the home, or the runs of the study `within`, newest first."""
        found = list(self._walk(resolve(self.home, within), within, 0))
        return sorted(found, key=lambda entry: (-entry.started, entry.path))

    def entry(self, path: str) -> Entry | None:
        """The run or network in a folder; None if there is none."""
        folder = resolve(self.home, path)
        return self._run(folder, path) if folder.is_dir() and is_run(folder) else None

    def _walk(self, folder: Path, path: str, depth: int) -> Iterator[Entry]:
        """The runs directly in a folder; folders with runs in them become one study each."""
        for item in _folders(folder):
            inner = f"{path}/{item.name}" if path else item.name
            known = self._known.get(inner)
            if known is not None or is_run(Path(item.path)):
                yield self._run(Path(item.path), inner)
            elif depth < DEPTH:
                members = list(self._walk(Path(item.path), inner, depth + 1))
                runs = [one for one in members if one.kind != "study"]
                yield from (one for one in members if one.kind == "study")
                if runs:
                    yield _study(inner, runs)

    def _run(self, folder: Path, path: str) -> Entry:
        try:
            changed = folder.stat().st_mtime_ns
            known = self._known.get(path)
            if known is not None and known[0] == changed:
                return known[1]
            entry = read_entry(folder, path)
        except OSError as error:  # it was removed, or may not be read
            self._known.pop(path, None)
            return Entry(path, "run", "damaged", 0.0, {"message": str(error.strerror)})
        # A run that goes on changes without a change of its folder. Neither do two changes in one
        # tick of the clock differ.
        if entry.status != "running" and time() - changed / 1e9 > SETTLED:
            self._known[path] = (changed, entry)
        else:
            self._known.pop(path, None)
        return entry


def resolve(home: Path, path: str) -> Path:
    """The folder with this path below the home; a path that leaves it is an InputError."""
    parts = path.split("/") if path else []
    if any(part in ("", ".", "..") or "\0" in part or "\\" in part for part in parts):
        raise InputError(f"{path!r} is not the path of a run; choose one of the list")
    folder = home.joinpath(*parts)
    if not folder.resolve().is_relative_to(home.resolve()):
        raise InputError(f"{path!r} leads out of {home}; choose one of the list")
    return folder


def is_run(folder: Path) -> bool:
    """Whether a folder is of a run or network, perhaps a damaged one."""
    if (folder / "experiment.toml").is_file():
        return True
    return (folder / "summary.json").is_file() and (folder / "metrics.jsonl").is_file()


def read_entry(folder: Path, path: str) -> Entry:
    """The status of a run from its summary; of one that goes on, also from its last row."""
    network = (folder / "network.toml").exists()
    kind = "network" if network else "run"
    begun = folder / "experiment.toml"
    started = (begun if begun.exists() else folder).stat().st_mtime
    busy = is_locked(folder)
    try:
        summary = read_json(folder / "summary.json")
    except PeerageError as error:
        missing = not (folder / "summary.json").exists()
        if busy or missing:  # a run that has just begun, or was killed before its first round
            return Entry(path, kind, "running" if busy else "interrupted", started)
        return Entry(path, kind, "damaged", started, {"message": str(error)})
    facts = {key: summary.get(key) for key in FACTS}
    status = str(summary.get("status", "running"))
    lost = [name for name in NEEDED if not (folder / name).exists()]
    if not busy and lost:
        message = f"{', '.join(lost)} missing"
        return Entry(path, kind, "damaged", started, facts | {"message": message})
    if status == "running":
        row = _last_row_of_peers(folder) if network else last_row(folder / "metrics.jsonl")
        facts |= {key: row[key] for key in ("accuracy",) if row.get(key) is not None}
        facts["rounds"] = row.get("round", facts["rounds"])
        status = "running" if busy else "interrupted"  # killed: nothing wrote the summary again
    if status not in STATUSES:
        facts["message"], status = f"unknown status {status!r}", "damaged"
    return Entry(path, kind, status, started, facts)


def _last_row_of_peers(folder: Path) -> Row:
    """The round of a network that goes on, and the mean accuracy of its peers."""
    rows = [last_row(path, NODE) for path in folder.glob("peers/*/metrics.jsonl")]
    rounds = [row["round"] for row in rows if row]
    values = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    return {
        **({"round": max(rounds)} if rounds else {}),
        **({"accuracy": fmean(values)} if values else {}),
    }


def is_locked(folder: Path) -> bool:
    """Whether a process works in the folder; it holds the lock of the folder."""
    try:
        with open(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _study(path: str, runs: list[Entry]) -> Entry:
    counts = {status: sum(run.status == status for run in runs) for status in STATUSES}
    status = next((one for one in ("running", *STATUSES[2:]) if counts[one]), "finished")
    names = sorted({str(run.facts.get("label") or "") for run in runs} - {""})
    datasets = sorted({str(run.facts.get("dataset") or "") for run in runs} - {""})
    best = max((run.facts.get("accuracy") or 0.0 for run in runs), default=0.0)
    facts = {
        "label": ", ".join(names),
        "dataset": ", ".join(datasets),
        "rounds": counts["finished"],
        "rounds_planned": len(runs),
        "accuracy": best or None,
    }
    return Entry(path, "study", status, max(run.started for run in runs), facts)


def _folders(folder: Path) -> list[os.DirEntry[str]]:
    """The folders in a folder; hidden ones and links are left out."""
    try:
        with os.scandir(folder) as items:
            return [
                item
                for item in items
                if not item.name.startswith(".") and item.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
