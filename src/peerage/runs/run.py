"""Run an experiment, record it in a folder, and resume it after an interruption."""

import fcntl
import logging
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import IO, Any

from torch import Tensor, nn

from peerage.algorithms import ALGORITHMS
from peerage.data import DATASETS, Dataset
from peerage.engine.lockstep import Lockstep, Model, RoundReport, SerialTeam
from peerage.engine.pool import PoolTeam
from peerage.engine.prepare import prepare
from peerage.engine.world import World
from peerage.errors import (
    CheckpointError,
    Diverged,
    InputError,
    Interrupted,
    PeerageError,
    WorkerDied,
    shell_command,
)
from peerage.experiment.experiment import Engine, Experiment, display_name
from peerage.experiment.identity import identity_of, own_code
from peerage.experiment.outside import by_content, check_unchanged
from peerage.files import disk_errors, read_json, write_bytes, write_json
from peerage.models.start import Architecture
from peerage.privacy import privacy_report
from peerage.records import checkpoint
from peerage.records.environment import code_record, environment, recorded_code
from peerage.records.rows import (
    MetricWriter,
    Row,
    RunRecord,
    read_metrics,
    read_status,
    truncate_after,
)
from peerage.runs.facts import RunFacts
from peerage.runs.progress import watched
from peerage.runs.simulation_memory import check_world
from peerage.runs.summary import digest, group_rows, network_row, node_rows, summary_of
from peerage.runs.view import View
from peerage.runs.watch import Watch, call, choose
from peerage.vectors import Weights, named_tensors

log = logging.getLogger("peerage.run")
CHECKPOINT_SHARE = 0.05  # of the run's time, unless --checkpoint-every is set
RESTARTS = 3  # after a worker of Ray died, unless --restarts is set
UNSAVED = Path("not-saved")  # stands for the folder of a run that has none
ENDING = 1.0  # seconds for which the workers of a killed run may still hold its lock


@dataclass(frozen=True)
class Result(View):
    """The result of a run.

    The model of a node is the one that metrics evaluate, `Algorithm.evaluated(node)`, at the very
    end: `module` and `state_dict` return it, `evaluated` holds its vector. If there are several, it
    is the first, and `module(node, name)` returns the others. `parameters` are `node.params`, with
    which the algorithm would continue; most algorithms evaluate these. With evaluation at
    `exchange` (after local training), the last rows describe the models before the last
    aggregation; with evaluation at `end`, and after a final step, they describe these models.

    >>> import torch, peerage as pg
    >>> small = {"nodes": 3, "rounds": 2, "topology": "ring", "engine": {"name": "serial"}}
    >>> result = pg.run(pg.Experiment(**small))
    >>> list(result.frame()["round"]), result.frame("node").shape[0]
    ([0, 1, 2], 9)
    >>> result.plot("loss").axes[0].get_ylabel()
    'test loss, mean over nodes'
    >>> result.module(0)(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """

    experiment: Experiment
    summary: dict[str, Any]
    rows: list[Row]
    parameters: Sequence[Tensor] = field(repr=False)  # node -> [d] `node.params`
    evaluated: Sequence[Tensor] = field(repr=False)  # node -> [d] evaluated parameters
    buffers: Sequence[Tensor] = field(repr=False)  # node -> [b] running statistics
    architectures: Sequence[Architecture] = field(repr=False)  # of every node
    models: Sequence[dict[str, Weights]] = field(repr=False)  # node -> evaluated models by name
    known_architectures: Mapping[str, Architecture] = field(repr=False)
    folder: Path | None = None
    setup: Mapping[str, Any] = field(default_factory=dict, repr=False)  # data, graph and models

    @cached_property
    def record(self) -> RunRecord:
        """The records of the run, as its folder holds them if it has one."""
        if self.folder is not None:
            return RunRecord.load(self.folder)
        return RunRecord.of_rows(
            UNSAVED,
            self.rows,
            saved=False,
            experiment=self.experiment.table(),
            setup=dict(self.setup),
            summary=self.summary,
            environment=environment() | code_record(own_code(self.experiment)),
        )

    @property
    def records(self) -> Sequence[RunRecord]:
        return [self.record]

    @property
    def accuracy(self) -> float:
        """The final mean accuracy over the nodes, as a fraction."""
        return float(self.summary["accuracy"])

    @property
    def digest(self) -> str:
        return str(self.summary["digest"])

    def state_dict(self, node: int, name: str | None = None) -> dict[str, Tensor]:
        """The evaluated model of a node, for `load_state_dict` of a module of its architecture."""
        return named_tensors(self.module(node, name))

    def module(self, node: int, name: str | None = None) -> nn.Module:
        """The evaluated model of a node, or that with a name, in evaluation mode."""
        model = choose(self.models[node], name, node)
        return self.known_architectures[model.architecture].module(model.params, model.buffers)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    dataset: Dataset | None = None,
    checkpoint_every: int | None = None,
    watch: Watch | None = None,
    progress: bool | None = None,
    log_to: str | None = None,
) -> Result:
    """Run an experiment; with `out`, write its records and checkpoints to that new folder.

    `dataset` is the experiment's data set, if the caller has already loaded it. `watch` is called
    with the network row of every round, and ends the run if it returns `STOP`; see `Watcher`.
    `progress` shows a bar; by default only in a notebook. `log_to` names trackers that get every
    round: `tensorboard`, `mlflow`, `wandb`, `trackio`, or several, separated by commas.

    >>> import peerage as pg
    >>> experiment = pg.Experiment(nodes=3, rounds=1, topology="ring", engine={"name": "serial"})
    >>> pg.run(experiment).digest == pg.run(experiment).digest
    True
    """
    folder = None if out is None else Path(out)
    with watched(experiment, progress, watch, folder, log_to) as watch:
        return _run(experiment, out, dataset, checkpoint_every, watch)


def _run(
    experiment: Experiment,
    out: str | Path | None,
    dataset: Dataset | None,
    checkpoint_every: int | None,
    watch: Watch | None,
) -> Result:
    check_every(checkpoint_every)
    folder = None if out is None else Path(out)
    if folder is not None:
        check_empty(folder)
    world = prepare(experiment, dataset)
    if experiment.engine.name != "ray":  # whose workers may be on other machines
        check_world(world)
    run = _Run(world, folder, checkpoint_every, watch)
    if folder is None:
        with run.connected():
            return run.go()
    with run.connected(), new_run_folder(folder):
        text = world.experiment.to_toml()
        write_bytes(folder / "experiment.toml", text.encode(), "run the experiment again")
        return run.go()


def resume(
    folder: str | Path,
    *,
    experiment: Experiment | None = None,
    engine: Mapping[str, Any] | None = None,
    dataset: Dataset | None = None,
    checkpoint_every: int | None = None,
    watch: Watch | None = None,
    progress: bool | None = None,
    log_to: str | None = None,
) -> Result:
    """Continue a run from its last checkpoint; the result is the same, bit by bit.

    `experiment` is needed only if that of the run has Python objects. `engine` replaces settings of
    the engine, which do not change the result. `progress` and `log_to` are as in `run`.

    >>> import peerage as pg
    >>> pg.resume("no-such-folder")
    Traceback (most recent call last):
        ...
    peerage.errors.CheckpointError: 'no-such-folder' holds no run; give a folder that ...
    """
    check_every(checkpoint_every)
    folder = Path(folder)
    if is_network_run(folder):
        raise CheckpointError(
            f"{folder} is a network of real peers, which cannot be resumed as a simulation; "
            f"run it again with `{shell_command('up', folder / 'experiment.toml')}`"
        )
    given = experiment is not None
    experiment = load_experiment(folder, experiment)
    if engine:
        chosen = Engine(**(experiment.engine.model_dump() | dict(engine)))
        experiment = experiment.model_copy(update={"engine": chosen})
    with locked(folder):
        if read_status(folder) == "finished":
            raise CheckpointError(f"run {folder} is finished; there is nothing to resume")
        saved = checkpoint.load(folder)
        world = prepare(experiment, dataset)
        if given:
            check_same(_experiment_text(folder), folder, world.experiment)
        if (folder / "setup.json").exists():
            check_constants(folder, read_json(folder / "setup.json"), world.setup)
        with watched(experiment, progress, watch, folder, log_to) as watch:
            run = _Run(world, folder, checkpoint_every, watch)
            with run.connected():
                for file in folder.glob(".*.tmp"):  # of a process that was killed while writing
                    file.unlink(missing_ok=True)
                if (folder / "metrics.jsonl").exists():
                    place = (saved.round, saved.final) if saved else (-1, False)
                    truncate_after(folder / "metrics.jsonl", *place)
                return run.go(saved)


def is_network_run(folder: Path) -> bool:
    """Whether the folder is of a network of real peers, started or not."""
    return (folder / "network.toml").exists()


def load_experiment(folder: Path, given: Experiment | None = None) -> Experiment:
    """The experiment of a run, or the given one; files of own code must be unchanged."""
    check_unchanged(code_of_run(folder), own_code(given) if given else None)
    where = str(folder / "experiment.toml")
    return given or Experiment.from_toml(_experiment_text(folder), where, folder)


def code_of_run(folder: Path) -> dict[str, str]:
    """The files of own code that a run began with, and their hashes."""
    file = folder / "environment.json"
    return recorded_code(read_json(file)) if file.exists() else {}


def _experiment_text(folder: Path) -> str:
    try:
        return (folder / "experiment.toml").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{str(folder)!r} holds no run; give a folder that `peerage run` made"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {folder / 'experiment.toml'}: {error}") from None


def check_same(text: str, folder: Path, experiment: Experiment) -> None:
    """Raise an error if the experiment is not the one that the run began with, as TOML."""
    with suppress(InputError):  # a Python object cannot be read; its text is compared
        text = Experiment.from_toml(text).to_toml()  # adds options of later versions
    old = by_content(identity_of(tomllib.loads(text)), code_of_run(folder))
    new = by_content(identity_of(tomllib.loads(experiment.to_toml())), own_code(experiment))
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            raise InputError(
                f"run {folder} began with {key} = {old.get(key)}, but the given experiment has "
                f"{new.get(key)}; resume with the same experiment"
            )


def check_constants(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise an error if frozen parameters differ from the run's: no checkpoint holds them."""
    if old.get("constants") != new.get("constants"):
        raise CheckpointError(
            f"run {folder} began with other frozen parameters than the model has now; "
            "use the same pretrained values"
        )


class _Run:
    """One run: the loop over its rounds, and its records."""

    def __init__(
        self,
        world: World,
        folder: Path | None,
        checkpoint_every: int | None,
        watch: Watch | None,
    ) -> None:
        self.experiment, self.world = world.experiment, world
        self.facts = RunFacts.of(world)
        self.folder, self.every, self.watch = folder, checkpoint_every, watch
        self.rows: list[Row] = []
        self.writer: MetricWriter | None = None
        self.started = perf_counter()
        self.seconds_before = 0.0  # spent by earlier processes on this run
        self.bytes_total = 0
        self.last_save = (perf_counter(), 0.0)  # end and duration of the last checkpoint
        self.stopped = False  # by a watcher
        self.cluster: Any = None  # of the engine ray

    @property
    def settings(self) -> Engine:
        return self.experiment.engine

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster of the engine, if it has one, before anything is written."""
        if self.settings.name != "ray":
            yield
            return
        from peerage.engine.ray_cluster import open_cluster  # only here: most users have no Ray

        with open_cluster(self.world, self.settings.workers, self.settings.address) as cluster:
            self.cluster = cluster
            yield

    def go(self, saved: checkpoint.Checkpoint | None = None) -> Result:
        if self.folder is not None:
            self._open_records(self.folder)
        self._summarise("running")
        try:
            models, released = self._run_with_restarts(saved)
        except BaseException as error:
            explained = self._record_failure(error)
            if explained is error:
                raise
            raise explained from None
        finally:
            if self.writer is not None:
                self.writer.close()
        owners = [self.world.model_owner(node) for node in range(self.world.nodes)]
        parameters, buffers, evaluated = zip(*(models[node] for node in owners), strict=True)
        architectures = [self.world.architecture(node) for node in range(self.world.nodes)]
        final = [model.params for model in models.values()]
        sha256 = digest(final, [self.world.layout(node) for node in models])
        privacy = privacy_report(self.world.noise, released) if self.world.noise.active else None
        summary = self._summarise("finished", digest=sha256, privacy=privacy)
        return Result(
            self.experiment,
            summary,
            self.rows,
            parameters,
            [next(iter(named.values())).params for named in evaluated],
            buffers,
            architectures,
            evaluated,
            self.world.architectures,
            self.folder,
            self.setup,
        )

    def _run_with_restarts(
        self, saved: checkpoint.Checkpoint | None
    ) -> tuple[dict[int, Model], list[int]]:
        """Run to the end; after the death of a Ray worker, again from the last checkpoint."""
        restarts = self.settings.restarts
        left = RESTARTS if restarts is None else restarts
        while True:
            try:
                return self._run_engine(saved)
            except WorkerDied as error:
                if self.settings.name != "ray" or not left:
                    raise
                left -= 1
                saved = self._return_to_checkpoint()
                log.warning("%s; continuing after round %d", error, saved.round if saved else 0)

    def _run_engine(
        self, saved: checkpoint.Checkpoint | None
    ) -> tuple[dict[int, Model], list[int]]:
        """Run to the end; returns the models, and how many noisy messages each node released."""
        with self._engine() as engine:
            if saved is not None:
                engine.restore(saved)
                self.stopped = saved.stopped
            if saved is None or not saved.final:
                self._rounds(engine, saved.round if saved else 0)
                self._finish(engine)
            engine.free_messages()  # before the models take as much here
            owners = dict.fromkeys(map(self.world.model_owner, range(self.world.nodes)))
            return {node: engine.model(node) for node in owners}, engine.released()

    def _return_to_checkpoint(self) -> checkpoint.Checkpoint | None:
        """Forget what was recorded after the last checkpoint, which is returned."""
        self.rows, self.bytes_total, self.stopped = [], 0, False
        if self.folder is None:
            return None
        assert self.writer is not None
        self.writer.close()
        saved = checkpoint.load(self.folder)
        place = (saved.round, saved.final) if saved else (-1, False)
        truncate_after(self.folder / "metrics.jsonl", *place)
        self._open_records(self.folder)
        return saved

    @cached_property
    def setup(self) -> dict[str, Any]:
        return self.world.setup

    def _open_records(self, folder: Path) -> None:
        """Open the metrics, and read the rows that an earlier process recorded."""
        if not (folder / "setup.json").exists():
            write_json(folder / "setup.json", self.setup)
        if not (folder / "environment.json").exists():
            where = environment() | code_record(own_code(self.experiment))
            write_json(folder / "environment.json", where)
        path = folder / "metrics.jsonl"
        if path.exists():
            self.rows = read_metrics(path)
            network = [row for row in self.rows if row["scope"] == "network"]
            self.bytes_total = network[-1]["bytes_total"] if network else 0
            self.seconds_before = sum(row["seconds"]["total"] for row in network)
        self.writer = MetricWriter(path)

    def _engine(self) -> Lockstep:
        if self.settings.name == "serial":
            return Lockstep(self.world, SerialTeam(self.world))
        if self.settings.name == "ray":
            from peerage.engine.ray import RayTeam

            return Lockstep(self.world, RayTeam(self.world, self.cluster))
        workers = self.settings.workers or len(os.sched_getaffinity(0))
        return Lockstep(self.world, PoolTeam(self.world, workers))

    def _rounds(self, engine: Lockstep, done: int) -> None:
        last = self.experiment.rounds
        evaluated = self.experiment.evaluation.evaluated_rounds(last)
        if done == 0:
            self._record(0, engine.evaluate_models(engine.pre_round()), engine)
        for round in range(done, last):
            if round > 0 and self._is_over():  # before the round: a resumed run may be over
                return
            report = engine.round(round, evaluate=round + 1 in evaluated)
            self._record(round + 1, report, engine)
            if self._is_over() or self._save_is_due(round + 1):
                self._save(engine, round + 1)

    def _finish(self, engine: Lockstep) -> None:
        """Run the step after the last round, and evaluate final models that were not yet."""
        done = self.rows[-1]["round"]
        if self.world.algorithm.has_final:
            report = engine.final(done)
        elif self.stopped and "accuracy" not in self.rows[-1]:  # final models are always evaluated
            report = engine.evaluate_models(round=done - 1)
            # A resumed run does not have the notes of the round.
            report = replace(report, nodes=[replace(n, notes={}) for n in report.nodes])
        else:
            return
        self._record(done, report, engine, final=True)
        self._save(engine, done, final=True)

    def _save(self, engine: Lockstep, round: int, *, final: bool = False) -> None:
        if self.folder is not None:
            start = perf_counter()
            checkpoint.save(engine, self.folder, round, final=final, stopped=self.stopped)
            self.last_save = (perf_counter(), perf_counter() - start)

    def _is_over(self) -> bool:
        """Whether a watcher ended the run, or the last evaluated round met the stop condition."""
        until, row = self.experiment.until, self.rows[-1]
        if self.stopped or until is None or row["round"] == 0 or "accuracy" not in row:
            return self.stopped
        others = [r for r in self.rows if r["round"] == row["round"] and r is not row]
        if until.value_in(row, others) is None:
            until.check_recorded(self.rows)
        return until.reached(row, others)

    def _save_is_due(self, round: int) -> bool:
        if round == self.experiment.rounds:
            return True
        if self.every is not None:
            return round % self.every == 0
        when, took = self.last_save
        return (perf_counter() - when) * CHECKPOINT_SHARE >= took

    def _record(
        self, round: int, report: RoundReport, engine: Lockstep, final: bool = False
    ) -> None:
        self.bytes_total += report.bytes
        hubs = self.world.nodes - len(self.world.data_nodes)
        nodes, hub = len(report.nodes) - hubs, self.world.hub_outside_means
        row = network_row(round, report, self.bytes_total, nodes, without=hub, final=final)
        if self.experiment.evaluation.spread and "accuracy" in row:
            row["layers"] = engine.deviations(max(round - 1, 0))
        groups = group_rows(self.facts, round, report, final)
        # The network row comes last: it marks the rows of the round as complete.
        for new in [*node_rows(self.facts, round, report, final), *groups, row]:
            self.rows.append(new)
            if self.writer is not None:
                self.writer.append(new)
        if self.watch is not None and call(self.watch, row, engine):
            self.stopped = True

    def _record_failure(self, error: BaseException) -> BaseException:
        """Record how the run ended; returns the error to raise, with a remedy."""
        round = 1 + max((row["round"] for row in self.rows), default=-1)
        if isinstance(error, KeyboardInterrupt | Interrupted):
            status = "interrupted"
            error = Interrupted(f"interrupted in round {round}" + self._remedy())
        elif isinstance(error, WorkerDied):
            status, error = "failed", WorkerDied(f"{error} in round {round}" + self._remedy())
        else:
            status = "diverged" if isinstance(error, Diverged) else "failed"
            if isinstance(error, Diverged) and self.folder is not None:
                error = Diverged(f"{error}; the earlier rounds are in {self.folder}")
        # If the disk failed for other records of the run, it fails for this one too.
        with suppress(PeerageError):
            self._summarise(status, message=str(error))
        return error

    def _remedy(self) -> str:
        if self.folder is None:
            return "; nothing was saved, as the run has no folder"
        last = checkpoint.latest_round(self.folder)
        saved = f"the last checkpoint is of round {last}" if last else "there is no checkpoint yet"
        return f"; {saved}; continue with `{shell_command('resume', self.folder)}`"

    def _summarise(
        self,
        status: str,
        digest: str | None = None,
        message: str = "",
        privacy: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        summary = summary_of(
            self.facts,
            self.rows,
            run=self.folder.name if self.folder else None,
            status=status,
            seconds=self.seconds_before + perf_counter() - self.started,
            digest=digest,
            message=message,
            privacy=privacy,
        )
        summary |= {"stopped": True} if self.stopped else {}
        if self.folder is not None:
            write_json(self.folder / "summary.json", summary)
        return summary


def new_folder(experiment: Experiment, home: Path, what: str | None = None) -> Path:
    """Create a new folder, named by the algorithm (or `what`), the data set and the time."""
    names = (
        what or display_name(experiment.algorithm, ALGORITHMS),
        display_name(experiment.dataset, DATASETS),
        datetime.now().strftime("%Y%m%d-%H%M%S"),
    )
    base = folder = home / "-".join(names)
    number = 1
    with disk_errors(base):
        home.mkdir(parents=True, exist_ok=True)
        while not _created(folder):
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
    return folder


def _created(folder: Path) -> bool:
    """Create a folder; returns False if it exists, so that no two processes share one."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def check_every(checkpoint_every: int | None) -> None:
    if checkpoint_every is not None and checkpoint_every < 1:
        raise InputError(f"checkpoint-every must be at least 1 round, got {checkpoint_every}")


def check_empty(folder: Path) -> None:
    if (folder / "experiment.toml").exists():
        remedy = "choose another --out"
        if not is_network_run(folder):
            remedy += f", or continue that one with `{shell_command('resume', folder)}`"
        raise InputError(f"output folder {str(folder)!r} already holds a run; {remedy}")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output folder {str(folder)!r} is a file; choose another --out")
    if folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir()):
        raise InputError(f"output folder {str(folder)!r} is not empty; choose another --out")


@contextmanager
def new_run_folder(folder: Path) -> Iterator[None]:
    """Create and lock a run folder; remove it if no experiment file was written."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_empty(folder)  # again: another process may have been faster
        try:
            yield
        finally:
            if not (folder / "experiment.toml").exists():
                shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes."""
    if not folder.is_dir():
        raise CheckpointError(f"there is no run folder {str(folder)!r}")
    with open(folder / ".lock", "w") as file:
        deadline = monotonic() + ENDING
        while not _locked(file):
            if monotonic() > deadline:
                raise CheckpointError(f"another process is working in {folder}; wait for it")
            sleep(ENDING / 50)
        yield


def _locked(file: IO[str]) -> bool:
    """Try to take the lock; returns whether this process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
