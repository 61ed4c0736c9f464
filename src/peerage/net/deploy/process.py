"""The process of one peer, and its progress as read from its files."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from peerage.errors import Diverged, PeerageError, WorkerDied
from peerage.files import read_json
from peerage.net.deploy.forked import Forked
from peerage.net.peer.progress import State
from peerage.net.peer.recorder import PAUSED
from peerage.records.rows import Row, read_metrics

DIVERGED = "became NaN or infinite"  # in the last log line of a peer whose model diverged


@dataclass
class PeerProgress:
    """The progress of one peer, as read from its files."""

    name: str
    state: str = State.STARTING
    round: int = 0
    accuracy: float | None = None
    received: str = "-"
    own: dict[str, float | None] = field(default_factory=dict)  # the user's own metrics, by name


@dataclass
class PeerProcess:
    """The process of one peer and its progress."""

    number: int
    seen: PeerProgress
    folder: Path
    process: subprocess.Popen[bytes] | Forked | None = None
    starts: int = 0
    read: int = 0  # bytes of its metrics that were read
    file: int = 0  # inode of that file; a restarted peer writes a new one
    old_file: int = 0  # inode at the last start
    killed: bool = False  # as planned

    @property
    def rows(self) -> list[Row]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def look(self) -> None:
        for row in self._new_rows():
            self.seen.round = row["round"]
            self.seen.received = "{} of {}".format(*row["heard"])
            self.seen.accuracy = row.get("accuracy", self.seen.accuracy)
            self.seen.own |= {name: row[name] for name in self.seen.own if name in row}
        if self.process is None:
            return
        code = self.process.poll()
        if code is None:
            new = self.read and self.file != self.old_file
            self.seen.state = self.pause or (State.RUNNING if new else State.STARTING)
        else:
            ended = "killed" if self.killed else "failed"
            state = self._final_state
            self.seen.state = state if code == 0 or state == State.SKIPPED else ended

    @property
    def _final_state(self) -> str:
        """The state in the summary: finished, or why the peer stopped."""
        with suppress(PeerageError, KeyError):  # a peer that failed has no summary
            return str(read_json(self.folder / "summary.json")["state"])
        return State.FINISHED

    @property
    def pause(self) -> str | None:
        """What the peer waits for, if it may not run its round."""
        with suppress(PeerageError):  # the file does not exist while the peer runs
            return str(read_json(self.folder / PAUSED)["state"])
        return None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> bool:
        """Kill the process with SIGKILL; return whether it was running."""
        if self.process is None or not self.alive:
            return False
        self.process.kill()
        self.killed = self.process.wait() < 0
        return self.killed

    @property
    def failure(self) -> PeerageError:
        """The error of a failed peer, in one line."""
        code = (0 if self.process is None else self.process.returncode) or 0
        if code < 0:
            hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
            return WorkerDied(f"{self.seen.name} was killed by {signal_name(-code)}{hint}")
        line = last_line(self.folder).removeprefix("error: ")
        kind = Diverged if DIVERGED in line else PeerageError
        return kind(f"{self.seen.name} failed: {line}")

    def _new_rows(self) -> Iterator[Row]:
        """The rows that the peer has written since the last check, without a partial last line."""
        with suppress(FileNotFoundError), open(self.folder / "metrics.jsonl", "rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self.file:
                self.file, self.read = number, 0
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.read += len(line)
                yield json.loads(line)


def signal_name(number: int) -> str:
    """The number and name of a signal.

    >>> signal_name(9)
    'signal 9 (SIGKILL)'
    """
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal, which has no name
        return f"signal {number}"


def last_line(folder: Path) -> str:
    try:
        lines = (folder / "log.txt").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "its log is empty"
