"""Experiment trackers: every round of a run is logged as it ends, or a recorded run afterwards.

A tracker gets names and numbers from rows, and nothing that belongs to the run. If it fails, the
run continues without it, and one warning says so. Nothing is sent to another machine, unless the
user's own settings of the tracker say so.
"""

import hashlib
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from peerage.errors import InputError, did_you_mean
from peerage.experiment.experiment import Experiment
from peerage.records.rows import Row, RunRecord
from peerage.report.tables import settings
from peerage.runs.labels import label

PROJECT = "peerage"  # the project or experiment of all runs
NOT_LOGGED = ("scope", "round", "final")


@dataclass(frozen=True)
class About:
    """A run as trackers know it."""

    name: str
    settings: Mapping[str, str]
    folder: Path | None  # None: the run is not saved
    moment: int = field(default_factory=time.time_ns)

    @property
    def key(self) -> str:
        """An identifier that stays the same when a run is resumed."""
        where = self.moment if self.folder is None else self.folder.absolute()
        return hashlib.sha256(f"{where} {self.name}".encode()).hexdigest()[:16]

    def place(self, name: str) -> Path:
        """A folder for the files of a tracker: in that of the run, or else in the current one."""
        return Path(name) if self.folder is None else self.folder / name


class Tracker(Protocol):
    """Receives the numbers of rounds; `place` says where the user finds them."""

    place: str

    def log(self, round: int, values: Mapping[str, float]) -> None: ...

    def close(self, finished: bool) -> None: ...


class TensorBoard:
    """Event files in the folder of the run: `tensorboard --logdir runs`."""

    def __init__(self, about: About, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.place = str(about.place("tensorboard"))
        again: dict[str, Any] = {"purge_step": first} if first else {}
        self.writer: Any = SummaryWriter(self.place, **again)
        table = "\n".join(f"| {key} | {value} |" for key, value in about.settings.items())
        self.writer.add_text("settings", f"| setting | value |\n| --- | --- |\n{table}", first)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class MLflow:
    """A run of the experiment `peerage`, at MLFLOW_TRACKING_URI or at MLflow's own default."""

    def __init__(self, about: About, first: int) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None and find_spec("sqlalchemy") is None:  # as with mlflow-skinny alone
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = Path("mlruns").absolute().as_uri()
        self.client = MlflowClient(tracking_uri=uri)
        self.place = str(self.client.tracking_uri)
        known = self.client.get_experiment_by_name(PROJECT)
        where = self.client.create_experiment(PROJECT) if known is None else known.experiment_id
        earlier = self.client.search_runs([where], f"tags.`peerage.run` = '{about.key}'")
        if earlier and first:
            self.id = earlier[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        run = self.client.create_run(where, tags={"peerage.run": about.key}, run_name=about.name)
        self.id = run.info.run_id
        parameters = [Param(key, value[:6000]) for key, value in about.settings.items()]
        for start in range(0, len(parameters), 100):  # its limit
            self.client.log_batch(self.id, params=parameters[start : start + 100])

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, round) for name, value in values.items()]
        self.client.log_batch(self.id, metrics=metrics)

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if finished else "KILLED")


class WandB:
    """A run of the project `peerage`, offline unless WANDB_MODE says otherwise."""

    def __init__(self, about: About, first: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        where = about.folder or Path(".")
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project=PROJECT,
            name=about.name,
            id=about.key,
            resume="allow",
            dir=str(where),
            mode=mode,
            config=dict(about.settings),
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )
        self.place = str(Path(self.run.dir).parent)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=round)

    def close(self, finished: bool) -> None:
        self.run.finish(0 if finished else 1)


class Trackio:
    """A run of the project `peerage` in Trackio's own folder: `trackio show`."""

    def __init__(self, about: About, first: int) -> None:
        os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
        import trackio

        self.run = trackio.init(
            PROJECT,
            name=f"{about.name} {about.key[:6]}",  # a name is its only identifier
            config=dict(about.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        from trackio.utils import TRACKIO_DIR

        self.place = str(TRACKIO_DIR)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=round)

    def close(self, finished: bool) -> None:
        import trackio

        trackio.finish()


# Tracker -> the package that it needs, and how it begins a run, from a round on.
TRACKERS: dict[str, tuple[str, Callable[[About, int], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "mlflow": ("mlflow", MLflow),
    "wandb": ("wandb", WandB),
    "trackio": ("trackio", Trackio),
}


def read_trackers(text: str | None) -> list[str]:
    """The names of trackers, separated by commas; each must be installed.

    >>> read_trackers(None)
    []
    """
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            raise InputError(f"unknown tracker {name!r}; {did_you_mean(name, TRACKERS)}")
        package = TRACKERS[name][0]
        if find_spec(package) is None:
            raise InputError(f'logging to {name} needs {package}; pip install "peerage[trackers]"')
    return list(dict.fromkeys(names))


def numbers(row: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a row by name; those of nested tables have names such as `seconds/train`.

    >>> numbers({"scope": "network", "round": 3, "accuracy": 0.5, "seconds": {"total": 2.0}})
    {'accuracy': 0.5, 'seconds/total': 2.0}
    """
    found: dict[str, float] = {}
    for key, value in row.items():
        name = prefix + re.sub(r"[^\w./ -]", "_", str(key))
        if isinstance(value, Mapping):
            found |= numbers(value, f"{name}/")
        elif type(value) in (int, float) and (prefix or key not in NOT_LOGGED):
            found[name] = float(value)
    return found


@dataclass
class Logging:
    """Passes rows to trackers, which are opened with the first: workers are forked before it."""

    names: list[str]
    about: About
    open: dict[str, Tracker] | None = None
    places: dict[str, str] = field(default_factory=dict)

    def __call__(self, row: Row) -> None:
        if self.open is None:
            self.open = {}
            for name in self.names:
                with self._guarded(name):
                    tracker = TRACKERS[name][1](self.about, int(row["round"]))
                    self.open[name], self.places[name] = tracker, tracker.place
        values = numbers(row)
        for name, tracker in list(self.open.items()):
            with self._guarded(name):
                tracker.log(int(row["round"]), values)

    def close(self, finished: bool) -> None:
        for name, tracker in list((self.open or {}).items()):
            with self._guarded(name):
                tracker.close(finished)
        self.open = {}

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Go on without a tracker that fails; its own output goes to standard error."""
        error: Exception | None = None
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of its libraries
            try:
                yield
            except Exception as found:
                error = found
                if self.open is not None:
                    self.open.pop(name, None)
        if error is not None:
            text = " ".join(str(error).split())[:200]
            kind = type(error).__name__
            warnings.warn(
                f"{name} failed, the run goes on without it: {kind}: {text}", stacklevel=2
            )


@contextmanager
def logged(experiment: Experiment, folder: Path | None, log_to: str | None) -> Iterator[Any]:
    """A function for the rows of a run, which passes them to trackers; None without any."""
    names = read_trackers(log_to)
    if not names:
        yield None
        return
    name = label(experiment) if folder is None else folder.name
    table = RunRecord.of_rows(
        folder or Path("."), [], experiment=experiment.table(), setup={}, summary={}, environment={}
    )
    logging = Logging(names, About(name, settings(table), folder))
    finished = False
    try:
        yield logging
        finished = True
    finally:
        with suppress(KeyboardInterrupt):  # the records of the run matter more
            logging.close(finished)


def log_record(record: RunRecord, to: str) -> dict[str, str]:
    """Log the rows of a run that has been recorded; returns where each tracker has them."""
    names = read_trackers(to)
    if not names:
        raise InputError(f"--to {to!r} names no tracker; write --to tensorboard")
    name = record.folder.absolute().name
    logging = Logging(names, About(name, settings(record), record.folder))
    for row in record.network:
        logging(row)
    logging.close(record.status == "finished")
    missing = [name for name in names if name not in logging.places]
    if missing:
        raise InputError(f"nothing was logged to {', '.join(missing)}; see the warnings above")
    return logging.places
