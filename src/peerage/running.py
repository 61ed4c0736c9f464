"""Runs: from an experiment to a folder of records, again after a crash, and once more to verify."""

import fcntl
import hashlib
import math
import os
import shutil
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor, nn

from peerage import checkpoint, specs
from peerage.algorithms import ALGORITHMS
from peerage.data.datasets import DATASETS, Dataset
from peerage.environment import environment
from peerage.errors import (
    CheckpointError,
    Diverged,
    InputError,
    Interrupted,
    PeerageError,
    WorkerDied,
)
from peerage.experiment import Engine, Experiment, display_name
from peerage.initialise import GAINS, Architecture, NoGain
from peerage.prepare import Prepared, prepare
from peerage.privacy import account
from peerage.records import (
    MetricWriter,
    Row,
    RunRecord,
    disk_errors,
    read_metrics,
    read_status,
    truncate_after,
    write_bytes,
    write_json,
)
from peerage.sim.lockstep import Lockstep, RoundReport, SerialTeam
from peerage.sim.pool import PoolTeam
from peerage.sim.shard import NodeReport
from peerage.sim.world import World
from peerage.vectors import Layout

Watch = Callable[[Row], None]  # called with the network row of every finished round

UNSEEN = ("consensus", "layers", "moved")  # what it takes all models at one place to measure
CHECKPOINT_SHARE = 0.05  # of the run's time, unless --checkpoint-every says how often


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    experiment: Experiment
    summary: dict[str, Any]
    rows: list[Row]
    parameters: Sequence[Tensor] = field(repr=False)  # node -> [d]
    buffers: Sequence[Tensor] = field(repr=False)  # node -> [b] running statistics
    architectures: Sequence[Architecture] = field(repr=False)  # of every node
    folder: Path | None = None

    @property
    def accuracy(self) -> float:
        """The final mean over the nodes, as a fraction."""
        return float(self.summary["accuracy"])

    @property
    def digest(self) -> str:
        return str(self.summary["digest"])

    def state_dict(self, node: int) -> dict[str, Tensor]:
        """The trained parameters and buffers of a node by name."""
        kind = self.architectures[node]
        views = kind.layout.views(self.parameters[node])
        views |= kind.buffer_layout.views(self.buffers[node])
        return {name: view.contiguous() for name, view in views.items()}

    def module(self, node: int) -> nn.Module:
        """The trained model of a node, in evaluation mode."""
        module = self.architectures[node].build()
        module.load_state_dict(self.state_dict(node), strict=False)  # counters stay as built
        return module.eval()

    def frame(self, scope: str = "network") -> Any:
        """The rows of one scope (`network` or `node`) as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError:
            raise InputError("result.frame() needs pandas; pip install pandas") from None
        return pd.json_normalize([row for row in self.rows if row["scope"] == scope])


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    dataset: Dataset | None = None,
    checkpoint_every: int | None = None,
    watch: Watch | None = None,
) -> Result:
    """Run an experiment; with `out`, keep its records and checkpoints in that new folder.

    `dataset` is the experiment's own, for callers that have already loaded it for another run.
    """
    check_every(checkpoint_every)
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_free(folder)
    prepared = prepare(experiment, dataset)
    if folder is None:
        return _Run(prepared, None, checkpoint_every, watch).go()
    with taken(folder):
        text = prepared.experiment.to_toml()
        write_bytes(folder / "experiment.toml", text.encode(), "run the experiment again")
        return _Run(prepared, folder, checkpoint_every, watch).go()


def resume(
    folder: str | Path,
    *,
    experiment: Experiment | None = None,
    engine: Mapping[str, Any] | None = None,
    dataset: Dataset | None = None,
    checkpoint_every: int | None = None,
    watch: Watch | None = None,
) -> Result:
    """Continue a run after its last checkpoint, with the same bits as an uninterrupted one.

    `experiment` is needed only if the run's own used Python objects; `engine` may change what runs
    the nodes, which changes no result.
    """
    check_every(checkpoint_every)
    folder = Path(folder)
    if of_network(folder):
        raise CheckpointError(
            f"{folder} is of a network of real peers, which cannot be resumed as a simulation; "
            f"run it anew with `peerage up {folder / 'experiment.toml'}`"
        )
    given = experiment is not None
    experiment = experiment or load_experiment(folder)
    if engine:
        chosen = Engine(**(experiment.engine.model_dump() | dict(engine)))
        experiment = experiment.model_copy(update={"engine": chosen})
    with locked(folder):
        if read_status(folder) == "finished":
            raise CheckpointError(f"run {folder} is finished; there is nothing to resume")
        saved = checkpoint.load(folder)
        prepared = prepare(experiment, dataset)
        if given:
            check_same(folder, prepared.experiment)
        for left in folder.glob(".*.tmp"):  # by a process that was killed while it wrote
            left.unlink(missing_ok=True)
        if (folder / "metrics.jsonl").exists():
            truncate_after(folder / "metrics.jsonl", saved.round if saved else -1)
        return _Run(prepared, folder, checkpoint_every, watch).go(saved)


@dataclass(frozen=True)
class Verdict:
    """Whether a second run gave the same numbers, and if not, where they part."""

    same: bool
    digest: str
    again: str
    difference: str = ""


def verify(
    folder: str | Path, *, experiment: Experiment | None = None, watch: Watch | None = None
) -> Verdict:
    """Run the experiment of a finished run again and compare every number with its records.

    What real peers did is simulated: with nothing lost between them, that gives the same bits.
    """
    folder = Path(folder)
    record = RunRecord.load(folder)
    real = of_network(folder)
    if record.status != "finished":
        remedy = f"finish it with `peerage resume {folder}`"
        if real:
            remedy = f"run it anew with `peerage up {folder / 'experiment.toml'}`"
        if record.status == "diverged":
            remedy = "run the experiment again with a lower --lr"
        raise CheckpointError(
            f"run {folder} is {record.status}, so there is no result to verify; {remedy}"
        )
    experiment = experiment or load_experiment(folder)
    if real:
        check_repeatable(record, experiment)
    result = run(experiment, watch=watch)
    old = [_without_time(row) for row in read_metrics(folder / "metrics.jsonl")]
    new = [_without_time(row) for row in result.rows]
    digest = str(record.summary["digest"])
    difference = network_difference(old, new) if real else first_difference(old, new)
    if not difference and digest != result.digest:
        difference = "the final parameters differ, although all metrics agree"
    return Verdict(not difference, digest, result.digest, difference)


def of_network(folder: Path) -> bool:
    """Whether real peers played in this folder, or are to play."""
    return (folder / "network.toml").exists()


def check_repeatable(record: RunRecord, experiment: Experiment) -> None:
    """Refuse to verify a network whose messages nobody can make again."""
    why = ""
    if experiment.noise.sigma > 0:
        why = "its peers drew noise from secrets of their own"
    elif record.summary.get("wire", "fp32") != "fp32":
        why = f"its messages were rounded to {record.summary['wire']}, which a simulation does not"
    if why:
        raise CheckpointError(f"the network of {record.folder} cannot be verified: {why}")


def load_experiment(folder: Path) -> Experiment:
    return Experiment.from_toml(_experiment_text(folder), str(folder / "experiment.toml"))


def _experiment_text(folder: Path) -> str:
    try:
        return (folder / "experiment.toml").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{str(folder)!r} holds no run; give a folder that `peerage run` made"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {folder / 'experiment.toml'}: {error}") from None


def check_same(folder: Path, experiment: Experiment) -> None:
    """Refuse to continue a run with another experiment than the one it began with."""
    text = _experiment_text(folder)
    with suppress(InputError):  # a Python object cannot be read back, and is compared as it is
        text = Experiment.from_toml(text).to_toml()  # with options that did not exist at the time
    old, new = (tomllib.loads(one) for one in (text, experiment.to_toml()))
    for key in {**old, **new}:
        if key != "engine" and old.get(key) != new.get(key):
            raise InputError(
                f"run {folder} began with {key} = {old.get(key)}, the experiment given now has "
                f"{new.get(key)}; resume with the same experiment"
            )


def first_difference(old: list[Row], new: list[Row]) -> str:
    for a, b in zip(old, new, strict=False):
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                where = f"node {a['node']}, " if a.get("scope") == "node" else ""
                return f"{where}round {a['round']}: {key} was {a.get(key)}, is now {b.get(key)}"
    return (
        "" if len(old) == len(new) else f"{len(old)} rows were recorded, there are now {len(new)}"
    )


def network_difference(old: list[Row], new: list[Row]) -> str:
    """The first number of real peers that a simulation does not give, or that they do not have."""
    recorded = {_place(row): row for row in old}
    for row in new:
        found = recorded.pop(_place(row), None)
        if found is None:
            who = f"node {row['node']}" if row["scope"] == "node" else "the network"
            return f"{who} recorded nothing about round {row['round']}"
        difference = first_difference([found], [_without(row, UNSEEN)])
        if difference:
            return difference
    return f"{len(recorded)} rows were recorded that there are not now" if recorded else ""


def _place(row: Row) -> tuple[str, int, int | None]:
    return row["scope"], row["round"], row.get("node")


def _without(row: Row, keys: Collection[str]) -> Row:
    return {key: value for key, value in row.items() if key not in keys}


def _without_time(row: Row) -> Row:
    return _without(row, ("seconds",))


class _Run:
    """One run on its way: the loop over rounds, and what it writes down."""

    def __init__(
        self,
        prepared: Prepared,
        folder: Path | None,
        checkpoint_every: int | None,
        watch: Watch | None,
    ) -> None:
        self.experiment, self.world = prepared.experiment, prepared.world
        self.setup = prepared.setup
        self.folder, self.every, self.watch = folder, checkpoint_every, watch
        self.rows: list[Row] = []
        self.writer: MetricWriter | None = None
        self.started = perf_counter()
        self.seconds_before = 0.0  # spent by earlier processes on this run
        self.bytes_total = 0
        self.last_save = (
            perf_counter(),
            0.0,
        )  # when the last checkpoint was done, how long it took

    def go(self, saved: checkpoint.Checkpoint | None = None) -> Result:
        if self.folder is not None:
            self._take_up(self.folder)
        self._summarise("running")
        try:
            with self._engine() as engine:
                if saved is not None:
                    engine.restore(saved.folder, saved.trees, saved.parts)
                self._rounds(engine, saved.round if saved else 0)
                keepers = [self.world.keeper(node) for node in range(self.world.nodes)]
                models = {node: engine.model(node) for node in dict.fromkeys(keepers)}
                released = engine.released()
        except BaseException as error:
            better = self._failed(error)
            if better is error:
                raise
            raise better from None
        finally:
            if self.writer is not None:
                self.writer.close()
        parameters, buffers = zip(*(models[node] for node in keepers), strict=True)
        architectures = [self.world.architecture(node) for node in range(self.world.nodes)]
        kept = [params for params, _ in models.values()]
        hashed = digest(kept, [self.world.layout(node) for node in models])
        privacy = account(self.world.noise, released) if self.world.noise.active else None
        summary = self._summarise("finished", digest=hashed, privacy=privacy)
        return Result(
            self.experiment, summary, self.rows, parameters, buffers, architectures, self.folder
        )

    def _take_up(self, folder: Path) -> None:
        """Open the metrics, and remember what an earlier process has already recorded there."""
        if not (folder / "setup.json").exists():
            write_json(folder / "setup.json", self.setup)
        if not (folder / "environment.json").exists():
            write_json(folder / "environment.json", environment())
        path = folder / "metrics.jsonl"
        if path.exists():
            self.rows = read_metrics(path)
            network = [row for row in self.rows if row["scope"] == "network"]
            self.bytes_total = network[-1]["bytes_total"] if network else 0
            self.seconds_before = sum(row["seconds"]["total"] for row in network)
        self.writer = MetricWriter(path)

    def _engine(self) -> Lockstep:
        settings = self.experiment.engine
        if settings.name == "serial":
            return Lockstep(self.world, SerialTeam(self.world))
        workers = settings.workers or len(os.sched_getaffinity(0))
        return Lockstep(self.world, PoolTeam(self.world, workers))

    def _rounds(self, engine: Lockstep, done: int) -> None:
        last = self.experiment.rounds
        judged = self.experiment.evaluation.judged(last)
        if done == 0:
            self._record(0, engine.measure(engine.prelude()), engine)
        for round in range(done, last):
            if self._enough():  # asked before a round: a resumed run may have got there already
                return
            report = engine.round(round, evaluate=round + 1 in judged)
            self._record(round + 1, report, engine)
            if self.folder is not None and (self._enough() or self._save_is_due(round + 1)):
                start = perf_counter()
                checkpoint.save(engine, self.folder, round + 1)
                self.last_save = (perf_counter(), perf_counter() - start)

    def _enough(self) -> bool:
        """Whether the last round was judged and has got as far as the run is to go."""
        until, row = self.experiment.until, self.rows[-1]
        judged = row["round"] > 0 and "accuracy" in row
        return until is not None and judged and until.reached(row)

    def _save_is_due(self, round: int) -> bool:
        if round == self.experiment.rounds:
            return True
        if self.every is not None:
            return round % self.every == 0
        when, took = self.last_save
        return (perf_counter() - when) * CHECKPOINT_SHARE >= took

    def _record(self, round: int, report: RoundReport, engine: Lockstep) -> None:
        self.bytes_total += report.bytes
        hubs = self.world.nodes - self.world.peers
        row = network_row(round, report, self.bytes_total, len(report.nodes) - hubs)
        if self.world.spread and "accuracy" in row:
            row["layers"] = engine.deviations(max(round - 1, 0))
        # The network row comes last: a round counts once all of its rows are there.
        for new in [*node_rows(round, report), row]:
            self.rows.append(new)
            if self.writer is not None:
                self.writer.append(new)
        if self.watch is not None:
            self.watch(row)

    def _failed(self, error: BaseException) -> BaseException:
        """Write down how the run ended; the error to raise, with what the user can do next."""
        round = 1 + max((row["round"] for row in self.rows), default=-1)
        if isinstance(error, KeyboardInterrupt | Interrupted):
            status, error = (
                "interrupted",
                Interrupted(f"interrupted in round {round}" + self._next()),
            )
        elif isinstance(error, WorkerDied):
            status, error = "failed", WorkerDied(f"{error} in round {round}" + self._next())
        else:
            status = "diverged" if isinstance(error, Diverged) else "failed"
            if isinstance(error, Diverged) and self.folder is not None:
                error = Diverged(f"{error}; the rounds before are kept in {self.folder}")
        # A disk that refused the run's records refuses this one as well.
        with suppress(PeerageError):
            self._summarise(status, message=str(error))
        return error

    def _next(self) -> str:
        if self.folder is None:
            return "; nothing was saved, as the run has no folder"
        last = checkpoint.latest_round(self.folder)
        kept = f"the last checkpoint is of round {last}" if last else "there is no checkpoint yet"
        return f"; {kept}; continue with `peerage resume {self.folder}`"

    def _summarise(
        self,
        status: str,
        digest: str | None = None,
        message: str = "",
        privacy: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        summary = summary_of(
            self.experiment,
            self.world,
            self.rows,
            run=self.folder.name if self.folder else None,
            status=status,
            seconds=self.seconds_before + perf_counter() - self.started,
            digest=digest,
            message=message,
            privacy=privacy,
        )
        if self.folder is not None:
            write_json(self.folder / "summary.json", summary)
        return summary


def summary_of(
    experiment: Experiment,
    world: World,
    rows: Sequence[Row],
    *,
    run: str | None,
    status: str,
    seconds: float,
    digest: str | None,
    message: str = "",
    privacy: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What a run came to so far, from its rows."""
    network = [row for row in rows if row["scope"] == "network"]
    judged = [row for row in network if row.get("accuracy") is not None]
    best = max(judged, key=lambda row: float(row["accuracy"]), default=None)
    final: Row = judged[-1] if judged else {}
    return {
        "run": run,
        "status": status,
        "algorithm": display_name(experiment.algorithm, ALGORITHMS),
        "label": label(experiment),
        "dataset": display_name(experiment.dataset, DATASETS),
        "nodes": world.peers,
        "rounds": max((row["round"] for row in network), default=0),
        "rounds_planned": experiment.rounds,
        "accuracy": final.get("accuracy"),
        "accuracy_std": final.get("accuracy_std"),
        "loss": final.get("loss"),
        "bytes_sent": network[-1]["bytes_total"] if network else 0,
        "seconds": seconds,
        "digest": digest,
        "best_accuracy": best["accuracy"] if best else None,
        "best_round": best["round"] if best else None,
        "message": message,
        **({} if privacy is None else {"privacy": privacy}),
    }


def network_row(round: int, report: RoundReport, bytes_total: int, peers: int) -> Row:
    losses = [n.train_loss for n in report.nodes if n.train_loss is not None]
    row: Row = {"scope": "network", "round": round, "nodes": peers}
    if losses:
        row["train_loss"] = float(np.mean(losses))
    row |= {"bytes": report.bytes, "bytes_total": bytes_total}
    scores = [n.score for n in report.nodes if n.score is not None]
    if scores:
        row |= _moments("accuracy", [score.accuracy for score in scores])
        row |= _moments("loss", [score.loss for score in scores])
        if report.consensus is not None:
            row["consensus"] = report.consensus
    held_out = [n.validation for n in report.nodes if n.validation is not None]
    if held_out:
        row["validation_accuracy"] = float(np.mean([score.accuracy for score in held_out]))
        row["validation_loss"] = float(np.mean([score.loss for score in held_out]))
    moved = [vars(n.moved) for n in report.nodes if n.moved is not None]
    if moved:
        row["moved"] = {key: float(np.mean([one[key] for one in moved])) for key in moved[0]}
    row["seconds"] = report.seconds
    return row


def _moments(name: str, values: list[float]) -> Row:
    x = np.array(values)
    named = {"": x.mean(), "_std": x.std(), "_min": x.min(), "_max": x.max()}
    return {name + suffix: float(value) for suffix, value in named.items()}


def node_rows(round: int, report: RoundReport) -> Iterator[Row]:
    """Those that were judged."""
    return (node_row(round, n) for n in report.nodes if n.score is not None)


def node_row(round: int, n: NodeReport) -> Row:
    row: Row = {"scope": "node", "round": round, "node": n.node}
    if n.score is not None:
        row |= {"accuracy": n.score.accuracy, "loss": n.score.loss}
    if n.train_loss is not None:
        row["train_loss"] = n.train_loss
    if n.validation is not None:
        row["validation_accuracy"] = n.validation.accuracy
        row["validation_loss"] = n.validation.loss
    if n.notes:
        # As a file holds them: what is not finite is null there.
        row["notes"] = {k: v if math.isfinite(v) else None for k, v in n.notes.items()}
    return row


def digest(parameters: Sequence[Tensor], layouts: Sequence[Layout]) -> str:
    """SHA-256 over the parameters of all nodes in order, each tensor row-major as float32."""
    sha = hashlib.sha256()
    for params, layout in zip(parameters, layouts, strict=True):
        sha.update(layout.canonical(params).numpy().tobytes())
    return sha.hexdigest()


def label(experiment: Experiment) -> str:
    """A short name for tables and legends: the class, and the options that are not the defaults."""
    algorithm = experiment.algorithm
    cls = type(algorithm)
    options = specs.text(algorithm, "algorithm", {"": cls}).removeprefix(":")
    shared = "shared start" if experiment.init.start == "shared" else ""
    pooled = "centralised" if experiment.pooled else ""
    extra = ", ".join(
        filter(
            None,
            [
                options.replace(",", ", "),
                shared,
                gain_label(experiment),
                noise_label(experiment),
                pooled,
            ],
        )
    )
    return f"{cls.__name__} ({extra})" if extra else cls.__name__


def noise_label(experiment: Experiment) -> str:
    noise = experiment.noise
    clip = "" if noise.clip is None else f"clip {noise.clip:g}"
    return ", ".join(filter(None, [f"noise {noise.sigma:g}" if noise.sigma else "", clip]))


def gain_label(experiment: Experiment) -> str:
    gain = experiment.init.gain
    if gain == NoGain():
        return ""
    known = type(gain) in GAINS.values()
    return f"gain {specs.text(gain, 'gain', GAINS) if known else type(gain).__name__}"


def new_folder(experiment: Experiment, home: Path, what: str | None = None) -> Path:
    """Make a folder that nobody has taken yet, with a name that says what ran, and when."""
    names = (
        what or display_name(experiment.algorithm, ALGORITHMS),
        display_name(experiment.dataset, DATASETS),
        datetime.now().strftime("%Y%m%d-%H%M%S"),
    )
    base = folder = home / "-".join(names)
    number = 1
    with disk_errors(base):
        home.mkdir(parents=True, exist_ok=True)
        while not _made(folder):
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
    return folder


def _made(folder: Path) -> bool:
    """Unlike a look before, this cannot give one folder to two processes."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def check_every(checkpoint_every: int | None) -> None:
    if checkpoint_every is not None and checkpoint_every < 1:
        raise InputError(f"checkpoint-every must be at least 1 round, got {checkpoint_every}")


def check_free(folder: Path) -> None:
    if (folder / "experiment.toml").exists():
        remedy = "choose another --out"
        if not of_network(folder):
            remedy += f", or continue that one with `peerage resume {folder}`"
        raise InputError(f"output folder {str(folder)!r} already holds a run; {remedy}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output folder {str(folder)!r} is a file; choose another --out")
    if folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        raise InputError(f"output folder {str(folder)!r} is not empty; choose another --out")


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Make and lock a run folder; take it away again if nothing of the run got that far."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_free(folder)  # once more: another process may have been faster
        try:
            yield
        finally:
            if not (folder / "experiment.toml").exists():
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder while this one works in it."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no run folder {str(folder)!r}")
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is working in {folder}; wait for it") from None
        yield
