"""Runs that the dashboard starts: processes of their own, which outlive it.

Every run has a small file and a log in `.ui` of the home, so that a dashboard that is started later
can still stop it. A process is signalled only if it still is the one that was started: its number
alone may belong to another program by then.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from peerage.errors import InputError, PeerageError
from peerage.files import disk_errors, read_json, write_json
from peerage.ui.listing import is_locked, is_run
from peerage.ui.peers import tail

FOLDER = ".ui"  # in the home


@dataclass
class Jobs:
    """Starts, stops and resumes runs below a home."""

    home: Path

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, arguments: Sequence[str], name: str) -> str:
        """Start `peerage run` with these arguments in a new folder; returns the path of the run."""
        with self._lock:
            path = self._new_path(name)
            self._spawn(path, ["run", *arguments, "--out", str(self.home / path)])
        return path

    def resume(self, path: str) -> None:
        """Start `peerage resume` of an unfinished run."""
        folder = self.home / path
        with self._lock:
            if is_locked(folder) or self.is_alive(path):
                raise InputError(f"{path} is running already; wait for its end, or stop it")
            if (folder / "network.toml").exists():
                raise InputError(f"{path} is a network of real peers, which cannot be resumed")
            self._spawn(path, ["resume", str(folder)])

    def stop(self, path: str) -> None:
        """Interrupt a run that a dashboard started; it ends with a checkpoint-based resume hint."""
        facts = self._facts(path)
        if not self.is_alive(path):
            raise InputError(
                f"{path} is not a running run of this dashboard; stop it where it was started"
            )
        os.kill(int(facts["pid"]), signal.SIGINT)

    def is_alive(self, path: str) -> bool:
        """Whether the process that was started for a run still runs."""
        child = self._children.get(path)
        if child is not None and child.poll() is not None:
            del self._children[path]  # it has ended, and is no longer a zombie
            return False
        facts = self._facts(path)
        try:
            began = begin_of(int(facts["pid"]))
        except (KeyError, TypeError, ValueError):
            return False
        return began != "" and began == facts.get("began")

    def waiting(self) -> list[dict[str, Any]]:
        """The runs that were started and have no folder yet, or never got one."""
        found = []
        for file in (self.home / FOLDER).glob("*.json"):
            path = file.stem.replace("__", "/")
            if not is_run(self.home / path):
                found.append(self.waiting_for(path) | {"started": file.stat().st_mtime})
        return found

    def waiting_for(self, path: str) -> dict[str, Any]:
        """The state of a run without a folder: it starts, or could not start."""
        alive = self.is_alive(path)
        errors = [line for line in tail(self.log(path)) if line.startswith("error: ")]
        message = (
            errors[-1].removeprefix("error: ") if errors else "it ended before its first round"
        )
        return {
            "path": path,
            "status": "running" if alive else "failed",
            "message": "preparing data and models" if alive else message,
        }

    def knows(self, path: str) -> bool:
        return self._file(path).is_file()

    def log(self, path: str) -> Path:
        return self._file(path).with_suffix(".log")

    def _file(self, path: str) -> Path:
        return self.home / FOLDER / f"{path.replace('/', '__')}.json"

    def _facts(self, path: str) -> dict[str, Any]:
        try:
            return read_json(self._file(path))
        except PeerageError:
            return {}

    def _new_path(self, name: str) -> str:
        base = path = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
        number = 1
        while (self.home / path).exists() or self.knows(path):
            number += 1
            path = f"{base}-{number}"
        return path

    def _spawn(self, path: str, arguments: Sequence[str]) -> None:
        file, log = self._file(path), self.log(path)
        with disk_errors(file, "start the run again"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(log, "wb") as out:
                child = subprocess.Popen(
                    [sys.executable, "-m", "peerage", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the terminal of the dashboard is not for it
                )
        self._children[path] = child
        write_json(file, {"pid": child.pid, "began": begin_of(child.pid)})


def begin_of(pid: int) -> str:
    """When a process began, in ticks since the start of the machine; empty if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]
