"""Repeat a run and compare every number with its records."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerage.errors import CheckpointError, shell_command
from peerage.experiment import Experiment
from peerage.records.metrics import METRICS
from peerage.records.rows import Row, RunRecord, read_metrics
from peerage.runs.run import is_network_run, load_experiment, run
from peerage.runs.watch import STOP, Models, Watch, Watcher

# Keys that real peers do not record, as they depend on the models of all nodes.
UNSEEN = (*(m.key for m in METRICS if m.source == "network"), "layers", "moved")
# The keys that differ between equal runs: times, and what depends on the workers.
OF_ENGINE = ("seconds", "shard_bytes", "store_bytes")


@dataclass(frozen=True)
class Verdict:
    """Whether a second run gave the same numbers, and otherwise the first difference.

    >>> import peerage as pg
    >>> pg.Verdict(same=True, digest="ab", again="ab").difference
    ''
    """

    same: bool
    digest: str
    again: str
    difference: str = ""


def verify(
    folder: str | Path, *, experiment: Experiment | None = None, watch: Watch | None = None
) -> Verdict:
    """Repeat a finished run and compare every number with its records.

    A run of real peers is simulated; if no message was lost, the results are bit-identical.

    >>> import tempfile
    >>> import peerage as pg
    >>> folder = f"{tempfile.mkdtemp()}/first"
    >>> experiment = pg.Experiment(nodes=3, rounds=1, topology="ring", engine={"name": "serial"})
    >>> result = pg.run(experiment, out=folder)
    >>> pg.verify(folder).same
    True
    """
    folder = Path(folder)
    record = RunRecord.load(folder)
    real = is_network_run(folder)
    if record.status != "finished":
        remedy = f"finish it with `{shell_command('resume', folder)}`"
        if real:
            command = shell_command("up", folder / "experiment.toml")
            remedy = f"run it again with `{command}`"
        if record.status == "diverged":
            remedy = "run the experiment again with a lower --lr"
        raise CheckpointError(
            f"run {folder} is {record.status}, so it has no result to verify; {remedy}"
        )
    experiment = load_experiment(folder, experiment)
    if real and record.unrepeatable:
        raise CheckpointError(f"the network of {folder} cannot be verified: {record.unrepeatable}")
    result = run(experiment, watch=_until_round(int(record.summary["rounds"]), watch))
    old = [_without(row, OF_ENGINE) for row in read_metrics(folder / "metrics.jsonl")]
    new = [_without(row, OF_ENGINE) for row in result.rows]
    # An older version, which recorded no groups, may have begun the run.
    grouped = {_moment(row) for row in old if row["scope"] == "group"}
    new = [row for row in new if row["scope"] != "group" or _moment(row) in grouped]
    digest = str(record.summary["digest"])
    difference = network_difference(old, new) if real else first_difference(old, new)
    if not difference and digest != result.digest:
        difference = "the final parameters differ, although all metrics agree"
    return Verdict(not difference, digest, result.digest, difference)


def _until_round(last: int, watch: Watch | None) -> Watcher:
    """A watcher that ends the run after the last recorded round, where perhaps another did."""

    def look(row: Row, models: Models) -> Any:
        if isinstance(watch, Watcher):
            watch.look(row, models)
        elif watch is not None:
            watch(row)
        return STOP if row["round"] == last else None

    return Watcher(look)


def first_difference(old: list[Row], new: list[Row]) -> str:
    for a, b in zip(old, new, strict=False):
        for key in {**a, **b}:
            if a.get(key) != b.get(key):
                where = "" if a.get("scope") == "network" else f"{_source(a)}, "
                return f"{where}round {a['round']}: {key} was {a.get(key)}, is now {b.get(key)}"
    return (
        "" if len(old) == len(new) else f"{len(old)} rows were recorded, the new run has {len(new)}"
    )


def network_difference(old: list[Row], new: list[Row]) -> str:
    """The first difference between the rows of real peers and those of the simulation."""
    recorded = {_place(row): row for row in old}
    for row in new:
        found = recorded.pop(_place(row), None)
        if found is None:
            return f"{_source(row)} recorded nothing for round {row['round']}"
        difference = first_difference([found], [_without(row, UNSEEN)])
        if difference:
            return difference
    return f"{len(recorded)} recorded rows are missing from the new run" if recorded else ""


def _moment(row: Row) -> tuple[int, bool]:
    return row["round"], bool(row.get("final"))


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("scope", "round", "final", "node", "by", "group"))


def _source(row: Row) -> str:
    if row["scope"] == "group":
        return f"{row['by']} {row['group']}"
    return f"node {row['node']}" if row["scope"] == "node" else "the network"


def _without(row: Row, keys: Collection[str]) -> Row:
    return {key: value for key, value in row.items() if key not in keys}
