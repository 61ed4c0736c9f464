"""The runs that somebody looks at: their files, read again only after a change."""

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from peerage.errors import PeerageError
from peerage.files import read_json, read_toml
from peerage.ui.metrics import MetricsFile
from peerage.ui.peers import PeersMetrics


@dataclass
class OpenRun:
    """A run that somebody looks at."""

    folder: Path
    file: MetricsFile | PeersMetrics = field(init=False)
    peers: PeersMetrics | None = field(init=False)  # of a network on this machine
    frames: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # see `drawing`

    def __post_init__(self) -> None:
        path = self.folder / "metrics.jsonl"
        network = (self.folder / "peers").is_dir()
        self.peers = PeersMetrics(self.folder) if network else None
        self.file = (
            self.peers if self.peers and not is_collected(self.folder) else MetricsFile(path)
        )

    def has_ended_since(self) -> bool:
        """Whether the rows of peers were collected after the run was opened."""
        return isinstance(self.file, PeersMetrics) and is_collected(self.folder)

    def refresh(self) -> None:
        self.file.refresh()
        if self.peers is not None and self.peers is not self.file:
            self.peers.refresh()

    def summary(self) -> dict[str, Any]:
        return _table(self.folder / "summary.json")

    def setup(self) -> dict[str, Any]:
        return _table(self.folder / "setup.json")

    def experiment(self) -> dict[str, Any]:
        return _table(self.folder / "experiment.toml")


def is_collected(folder: Path) -> bool:
    """Whether a network has metrics of its own: they are empty until its end."""
    try:
        return (folder / "metrics.jsonl").stat().st_size > 0
    except OSError:
        return False


class OpenRuns:
    """The runs that were looked at last; the others are forgotten."""

    def __init__(self, most: int = 32) -> None:
        self._runs: dict[Path, OpenRun] = {}
        self._most = most
        self._lock = Lock()

    def get(self, folder: Path) -> OpenRun:
        with self._lock:
            run = self._runs.pop(folder, None)
            if run is None or run.has_ended_since():
                run = OpenRun(folder)
            self._runs[folder] = run
            while len(self._runs) > self._most:
                del self._runs[next(iter(self._runs))]
        run.refresh()
        return run


def _table(path: Path) -> dict[str, Any]:
    """A JSON or TOML file of a run; empty if it is missing or damaged, which the status says."""
    try:
        about = path.stat()
    except OSError:
        return {}
    return _read(path, about.st_mtime_ns, about.st_ino)


@lru_cache(maxsize=64)
def _read(path: Path, changed: int, inode: int) -> dict[str, Any]:
    try:
        return read_toml(path) if path.suffix == ".toml" else read_json(path)
    except PeerageError:
        return {}
