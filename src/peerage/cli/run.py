"""The commands that run experiments and show results: run, compare, resume, verify, report.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from peerage.cli.flags import (
    CheckpointEvery,
    Json,
    Out,
    Settings,
    experiment_flags,
    option,
    read_changes,
)
from peerage.errors import InputError, PeerageError

if TYPE_CHECKING:
    from peerage.experiment import Experiment
    from peerage.runs.watch import Watch

RUNS = Path("runs")


@experiment_flags
def run(
    settings: Settings,
    out: Out = None,
    checkpoint_every: CheckpointEvery = None,
    as_json: Json = False,
) -> None:
    """Run one experiment and write a report."""
    from peerage.runs.run import run as run_experiment

    experiment = settings.experiment()
    with run_folder(out, experiment) as folder, progress(experiment) as watch:
        result = run_experiment(experiment, folder, checkpoint_every=checkpoint_every, watch=watch)
    show_runs([folder], folder / "report.html", result.summary, as_json)


@partial(experiment_flags, without="algorithm")
def compare(
    settings: Settings,
    algorithms: Annotated[
        str, Option(help="Algorithms separated by commas, e.g. decavg,dechw:theta=30.")
    ] = "decavg,dechw",
    references: Annotated[
        str | None,
        Option(
            help="Baselines to add, separated by commas: centralised (one node has all data), "
            "isolated (no messages)."
        ),
    ] = None,
    out: Out = None,
    checkpoint_every: CheckpointEvery = None,
    as_json: Json = False,
) -> None:
    """Compare algorithms on the same data, graph and initial models.

    An algorithm with a hub, such as fedavg, uses its own star instead of the graph.
    """
    from peerage.algorithms import ALGORITHMS
    from peerage.experiment.experiment import HUB, display_name, reference
    from peerage.experiment.readers import read_algorithm
    from peerage.runs.run import check_empty
    from peerage.runs.run import run as run_experiment

    experiments = [
        settings.experiment(algorithm=one, **({"topology": HUB} if one.with_hub else {}))
        for one in map(read_algorithm, split_specs(algorithms))
    ]
    starts = {one.init.start: display_name(one.algorithm, ALGORITHMS) for one in experiments}
    if len(starts) > 1:
        known = " and ".join(f"{name} {start}" for start, name in starts.items())
        raise InputError(
            f"the algorithms start from different kinds of initial models ({known}); add --init "
            "shared or --init independent"
        )
    names = [name.strip() for name in (references or "").split(",") if name.strip()]
    experiments += [reference(name, experiments[0]) for name in names]
    results = {}
    with run_folder(out, experiments[0], "compare") as home:
        check_empty(home)
        for number, experiment in enumerate(experiments, start=1):
            folder = home / f"{number}-{display_name(experiment.algorithm, ALGORITHMS)}"
            with progress(experiment) as watch:
                results[folder] = run_experiment(
                    experiment, folder, checkpoint_every=checkpoint_every, watch=watch
                )
    runs = [result.summary for result in results.values()]
    report = home / "report.html"
    show_runs([*results], report, {"runs": runs, "report": str(report)}, as_json)


def resume(
    folder: Annotated[Path, Argument(help="Folder of an unfinished run.")],
    engine: Annotated[str | None, option("engine")] = None,
    workers: Annotated[int | None, option("workers")] = None,
    checkpoint_every: CheckpointEvery = None,
    as_json: Json = False,
) -> None:
    """Resume an interrupted run; the result is bit-identical.

    Without --engine or --workers, the settings of the run apply.
    """
    from peerage.runs.run import load_experiment
    from peerage.runs.run import resume as resume_run

    changes = read_changes({"engine": engine, "workers": workers}).get("engine", {})
    with progress(load_experiment(folder)) as watch:
        result = resume_run(folder, engine=changes, checkpoint_every=checkpoint_every, watch=watch)
    show_runs([folder], folder / "report.html", result.summary, as_json)


def verify(
    folder: Annotated[Path, Argument(help="Folder of a finished run.")],
    as_json: Json = False,
) -> None:
    """Repeat a finished run and compare all its numbers and models."""
    from peerage.runs.run import load_experiment
    from peerage.runs.verify import verify as verify_run

    with progress(load_experiment(folder)) as watch:
        verdict = verify_run(folder, watch=watch)
    if as_json:
        print(json.dumps({"run": folder.name, **vars(verdict)}))
    elif verdict.same:
        print(f"{folder}: same numbers in every round, same digest {verdict.digest}")
    if not verdict.same:
        raise PeerageError(f"{folder} was not reproduced: {verdict.difference}")


def report(
    runs: Annotated[list[Path], Argument(help="Folders of the runs to report on.")],
    out: Annotated[
        Path | None,
        Option(
            help="File to write: .html, .md, .csv, .json, .png or .svg (default: report.html in "
            "the first folder)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Report on one or several runs, as a table, page or figure."""
    target = out or runs[0] / "report.html"
    show_runs(runs, target, {"report": str(target)}, as_json)


def split_specs(text: str) -> list[str]:
    """Split specs at commas, except at those between options of one spec.

    >>> split_specs("decavg,dechw:beta=1,theta=30,local")
    ['decavg', 'dechw:beta=1,theta=30', 'local']
    """
    found: list[str] = []
    for item in filter(None, text.split(",")):
        if "=" in item and ":" not in item and found:
            found[-1] += f",{item}"
        else:
            found.append(item)
    if not found:
        raise InputError(
            f"--algorithms {text!r} names no algorithm; write --algorithms decavg,dechw"
        )
    return found


@contextmanager
def run_folder(
    out: Path | None, experiment: "Experiment", what: str | None = None
) -> Iterator[Path]:
    """The folder that the user named, or a new one, which is removed if it stays empty."""
    from peerage.runs.run import new_folder

    if out is not None:
        yield out
        return
    folder = new_folder(experiment, RUNS, what)
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()
            RUNS.rmdir()


@contextmanager
def progress(experiment: "Experiment") -> "Iterator[Watch]":
    """A progress bar for one run, on standard error."""
    from peerage.report.terminal import RunProgress
    from peerage.runs.summary import label

    console = Console(stderr=True)
    if console.is_terminal:  # loading data and starting workers takes time
        console.print(f"{label(experiment)}: preparing {experiment.nodes} nodes", style="dim")
    with ExitStack() as stack:
        bars: list[RunProgress] = []

        def watch(row: dict[str, Any]) -> None:
            if not bars:  # only after the workers are forked, as the bar has a thread
                bars.append(stack.enter_context(RunProgress()))
                bars[0].start(label(experiment), experiment.rounds, row["round"])
            bars[0].advance(row["round"], row.get("accuracy"))

        yield watch
        for bar in bars:
            bar.finish()


def show_runs(folders: list[Path], report: Path, facts: Mapping[str, Any], as_json: bool) -> None:
    """Write a report of runs; print their table and chart, or only the facts as JSON."""
    from peerage.records.rows import RunRecord
    from peerage.report import fairness_tables
    from peerage.report.export import export
    from peerage.report.groups import group_tables
    from peerage.report.html import headline, privacy, where
    from peerage.report.peers import peer_table, traffic
    from peerage.report.tables import compare as compare_runs
    from peerage.report.tables import labels, rich_table
    from peerage.report.terminal import Chart

    records = [RunRecord.load(folder) for folder in folders]
    export(records, report)
    if as_json:
        found = fairness_tables.summaries(records)
        print(json.dumps({**facts, **({"fairness": found} if found else {})}))
        return
    console = Console(highlight=False)
    rows = compare_runs(records)
    peers = peer_table(records[0]) if len(records) == 1 else None
    if peers is not None:
        console.print(peers)
    console.print(rich_table(rows, console.width))
    for table in group_tables(records):
        console.print(table)
    fairness = fairness_tables.terminal_table(records, console.width)
    if fairness is not None:
        console.print(fairness)
    curves = [record.curve("accuracy") for record in records]
    console.print(Chart(dict(zip(labels(records), curves, strict=True))))
    console.print(f"\n{headline(rows, where(records))}")
    for sentences in (traffic(records), privacy(records)):
        for name, sentence in sentences.items():
            console.print(f"{name}: {sentence}" if len(records) > 1 else sentence)
    console.print(f"Report: {report}", soft_wrap=True)
