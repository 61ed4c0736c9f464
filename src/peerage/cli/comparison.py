"""The runs of one `peerage compare`, which the same command continues after an interruption.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerage.errors import CheckpointError, InputError, Interrupted

if TYPE_CHECKING:
    from peerage.experiment import Experiment

FILE = "comparison.json"  # which runs belong to the comparison
Start = Callable[["Experiment", Path, bool], dict[str, Any]]  # experiment, folder, resume; summary


@dataclass(frozen=True)
class Comparison:
    """Experiments by the names of their folders in `home`."""

    home: Path
    experiments: "Mapping[str, Experiment]"

    @property
    def folders(self) -> list[Path]:
        return [self.home / name for name in self.experiments]

    def run(self, start: Start) -> dict[Path, dict[str, Any]]:
        """Start or continue the runs that are not finished; returns all summaries.

        If the user interrupts them, `Interrupted` says how to continue.
        """
        from peerage.files import read_json
        from peerage.records.rows import read_status

        summaries = {}
        for number, (name, experiment) in enumerate(self.experiments.items(), start=1):
            folder = self.home / name
            if read_status(folder) == "finished":
                summaries[folder] = read_json(folder / "summary.json")
                continue
            try:
                begun = (folder / "experiment.toml").exists()
                summaries[folder] = start(experiment, folder, begun)
            except (KeyboardInterrupt, Interrupted):
                raise Interrupted(
                    f"interrupted in run {number} of {len(self.experiments)}, {name}; run the same "
                    "command again to continue"
                ) from None
        return summaries

    def recorded(self) -> list[Path]:
        """The folders of the runs with at least one row."""
        return recorded(self.folders)


def recorded(folders: Sequence[Path]) -> list[Path]:
    """The folders of runs with at least one row."""
    from peerage.records.rows import RunRecord

    found = []
    for folder in folders:
        with suppress(CheckpointError):
            if folder.is_dir() and RunRecord.load(folder).network:
                found.append(folder)
    return found


def compared_runs(folders: Sequence[Path]) -> list[Path]:
    """The folders, with the recorded runs of a comparison instead of its own folder."""
    found: list[Path] = []
    for folder in folders:
        names = _keys_in(folder)
        runs = [folder] if names is None else recorded([folder / name for name in names])
        if not runs:
            raise InputError(
                f"the comparison {str(folder)!r} has no recorded round yet; run it again"
            )
        found += runs
    return found


@contextmanager
def open_comparison(
    out: Path | None, experiments: "Mapping[str, Experiment]", runs: Path
) -> Iterator[Comparison]:
    """The comparison in the folder `out`, or else in a new folder in `runs`.

    If the same comparison was interrupted, it is that one. The folder is locked, and removed if no
    run has begun in it.
    """
    from peerage.files import disk_errors, write_json
    from peerage.runs.run import check_empty, locked, new_folder

    keys = {name: key_of(experiment) for name, experiment in experiments.items()}
    place = runs if out is None else out
    existed = {folder for folder in (place, *place.parents) if folder.exists()}
    with ExitStack() as stack:
        home = out
        if out is None:
            first = next(iter(experiments.values()))
            home = _interrupted(runs, keys, stack) or new_folder(first, runs, "compare")
        assert home is not None
        comparison = Comparison(home, experiments)
        known = _keys_in(home)
        if known is None:
            check_empty(home)
            with disk_errors(home):
                home.mkdir(parents=True, exist_ok=True)
        elif known != keys:
            raise InputError(
                f"output folder {str(home)!r} holds a comparison with other settings; choose "
                "another --out"
            )
        else:
            done = len([folder for folder in comparison.folders if _finished(folder)])
            state = f"{done} of {len(keys)} runs finished"
            print(f"continuing the comparison in {home}, {state}", file=sys.stderr)
        if out is not None or known is None:
            stack.enter_context(locked(home))
        if known is None:
            write_json(home / FILE, {"runs": keys})
        try:
            yield comparison
        finally:
            made = [folder for folder in (home, *home.parents) if folder not in existed]
            _remove_if_unused(comparison, made)


def key_of(experiment: "Experiment") -> str:
    """A hash of the settings that determine the result."""
    from peerage.experiment.identity import run_key

    return sha256(json.dumps(run_key(experiment), sort_keys=True).encode()).hexdigest()


def _interrupted(runs: Path, keys: Mapping[str, str], stack: ExitStack) -> Path | None:
    """The newest folder with the same, unfinished comparison, which is then locked."""
    from peerage.runs.run import locked

    homes = [path.parent for path in runs.glob(f"compare-*/{FILE}")]
    for home in sorted(homes, key=lambda path: path.stat().st_mtime, reverse=True):
        if _keys_in(home) == keys and not all(_finished(home / name) for name in keys):
            with suppress(CheckpointError):  # another process is working there
                stack.enter_context(locked(home))
                return home
    return None


def _keys_in(home: Path) -> dict[str, str] | None:
    from peerage.files import read_json

    path = home / FILE
    return dict(read_json(path)["runs"]) if path.exists() else None


def _finished(folder: Path) -> bool:
    from peerage.records.rows import read_status

    return read_status(folder) == "finished"


def _remove_if_unused(comparison: Comparison, made: Sequence[Path]) -> None:
    """Remove a comparison in which no run has begun, and the folders that were made for it."""
    home = comparison.home
    if any(folder.exists() for folder in comparison.folders):
        return
    for file in (home / FILE, home / ".lock"):
        file.unlink(missing_ok=True)
    with suppress(OSError):  # not empty
        for folder in made:
            folder.rmdir()
