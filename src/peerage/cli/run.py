"""The commands that run experiments and show results: run, compare, resume, verify, report, plot.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from peerage.cli.comparison import compared_runs, open_comparison
from peerage.cli.flags import (
    CheckpointEvery,
    Json,
    LogTo,
    Out,
    Quiet,
    Settings,
    experiment_flags,
    option,
    read_changes,
)
from peerage.cli.installed import check_installed
from peerage.cli.names import beginning_with, complete_algorithms
from peerage.errors import InputError, Interrupted, PeerageError

if TYPE_CHECKING:
    from peerage.experiment import Experiment
    from peerage.records.rows import RunRecord
    from peerage.report.html import Show
    from peerage.report.pictures import Picture
    from peerage.runs.watch import Watch

RUNS = Path("runs")


@experiment_flags
def run(
    settings: Settings,
    out: Out = None,
    checkpoint_every: CheckpointEvery = None,
    log_to: LogTo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run one experiment and write a report."""
    from peerage.runs.run import run as run_experiment

    experiment = settings.experiment()
    with run_folder(out, experiment) as folder:
        result = run_experiment(
            experiment,
            folder,
            checkpoint_every=checkpoint_every,
            progress=not quiet,
            log_to=log_to,
        )
    show_runs([folder], folder / "report.html", result.summary, as_json, quiet)


@partial(experiment_flags, without="algorithm")
def compare(
    settings: Settings,
    algorithms: Annotated[
        str,
        Option(
            help="Algorithms separated by commas, e.g. decavg,dechw:theta=30.",
            autocompletion=complete_algorithms,
        ),
    ] = "decavg,dechw",
    references: Annotated[
        str | None,
        Option(
            help="Baselines to add, separated by commas: centralised (one node has all data), "
            "isolated (no messages)."
        ),
    ] = None,
    seeds: Annotated[
        int, Option(help="Seeds with which every algorithm runs, from --seed on.")
    ] = 1,
    out: Out = None,
    checkpoint_every: CheckpointEvery = None,
    log_to: LogTo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare algorithms on the same data, graph and initial models.

    An algorithm with a hub, such as fedavg, uses its own star instead of the graph. After an
    interruption, the same command continues the comparison.
    """
    from peerage.records.rows import RunRecord
    from peerage.runs.comparison import comparable, run_names
    from peerage.runs.run import resume as resume_run
    from peerage.runs.run import run as run_experiment

    names = [name.strip() for name in (references or "").split(",") if name.strip()]
    experiments = comparable(split_specs(algorithms), names, seeds, settings.experiment)
    named = dict(zip(run_names(experiments), experiments, strict=True))

    def start(experiment: "Experiment", folder: Path, begun: bool) -> dict[str, Any]:
        how: dict[str, Any] = {"checkpoint_every": checkpoint_every, "log_to": log_to}
        how["progress"] = not quiet
        if begun:
            engine = experiment.engine.model_dump()
            return resume_run(folder, engine=engine, **how).summary
        return run_experiment(experiment, folder, **how).summary

    with open_comparison(out, named, RUNS) as comparison:
        report = comparison.home / "report.html"
        try:
            summaries = comparison.run(start)
        except Interrupted:
            folders = comparison.recorded()
            if folders:
                runs = [RunRecord.load(folder).summary for folder in folders]
                show_runs(folders, report, {"runs": runs, "report": str(report)}, as_json, quiet)
            raise
    runs = [*summaries.values()]
    show_runs([*summaries], report, {"runs": runs, "report": str(report)}, as_json, quiet)


def resume(
    folder: Annotated[Path, Argument(help="Folder of an unfinished run.")],
    engine: Annotated[str | None, option("engine")] = None,
    workers: Annotated[int | None, option("workers")] = None,
    checkpoint_every: CheckpointEvery = None,
    log_to: LogTo = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Resume an interrupted run; the result is bit-identical.

    Without --engine or --workers, the settings of the run apply.
    """
    from peerage.runs.run import resume as resume_run

    changes = read_changes({"engine": engine, "workers": workers}).get("engine", {})
    result = resume_run(
        folder,
        engine=changes,
        checkpoint_every=checkpoint_every,
        progress=not quiet,
        log_to=log_to,
    )
    show_runs([folder], folder / "report.html", result.summary, as_json, quiet)


def verify(
    folder: Annotated[Path, Argument(help="Folder of a finished run.")],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Repeat a finished run and compare all its numbers and models."""
    from peerage.runs.run import load_experiment
    from peerage.runs.verify import verify as verify_run

    with progress(load_experiment(folder)) if not quiet else nullcontext() as watch:
        verdict = verify_run(folder, watch=watch)
    if as_json:
        print(json.dumps({"run": folder.name, **vars(verdict)}))
    elif verdict.same:
        print(f"{folder}: same numbers in every round, same digest {verdict.digest}")
    if not verdict.same:
        raise PeerageError(f"{folder} was not reproduced: {verdict.difference}")


def report(
    runs: Annotated[
        list[Path],
        Argument(help="Folders of runs, of a comparison, or of peers of one network."),
    ],
    out: Annotated[
        Path | None,
        Option(
            help="File to write: .html, .pdf, .md, .csv, .tex (LaTeX with booktabs), .parquet, "
            ".json, .png or .svg (default: report.html in the first folder)."
        ),
    ] = None,
    pdf: Annotated[
        bool, Option("--pdf", help="Write a PDF of the same name beside the report.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Report on one or several runs, as a page, table or figure.

    Runs that differ only in their seed are averaged. Folders of peers, which `peerage node` made,
    give one report about their network. `peerage plot` draws single figures.
    """
    target = out or runs[0] / "report.html"
    if pdf:
        from peerage.report.pdf import write_pdf

        beside = target.with_suffix(".pdf")
        write_pdf(load_records(runs), beside, _bar(quiet))
        show_runs(runs, target, {"report": str(target), "pdf": str(beside)}, as_json, quiet)
        return
    show_runs(runs, target, {"report": str(target)}, as_json, quiet)


def plot(
    kind: Annotated[
        str,
        Argument(
            help="Figure, e.g. accuracy, traffic or graph; see `peerage list plots`.",
            autocompletion=beginning_with("plots"),
        ),
    ],
    runs: Annotated[list[Path], Argument(help="Folders of the runs to show.")],
    out: Annotated[
        Path | None,
        Option(help="File to write: .pdf, .svg or .png; a replay is a .gif (default: KIND.pdf)."),
    ] = None,
    width: Annotated[
        str,
        Option(help="Width of the figure: column (3.4 inches), page (7 inches) or inches."),
    ] = "column",
    by_run: Annotated[
        bool, Option("--by-run", help="Draw every run, instead of means over seeds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Draw one figure for a paper, with fonts of the size of captions in LaTeX.

    Runs that differ only in their seed are one curve, with a band of one standard deviation.
    """
    from peerage.report.figures import check_format, save
    from peerage.report.plots import DPI, REPLAY, paper_plot

    if kind == REPLAY:
        from peerage.report.replay import write_replay

        target = out or Path("replay.gif")
        write_replay(load_records(runs)[0], target)
    else:
        target = out or Path(f"{kind}.pdf")
        check_format(target)
        save(paper_plot(load_records(runs), kind, width, by_run=by_run), target, DPI)
    print(json.dumps({"plot": str(target)}) if as_json else target)


def log(
    runs: Annotated[list[Path], Argument(help="Folders of runs, finished or not.")],
    to: Annotated[
        str,
        Option(
            help="Tracker: tensorboard, mlflow, wandb (offline) or trackio, or several, separated "
            "by commas."
        ),
    ] = "tensorboard",
    as_json: Json = False,
) -> None:
    """Log recorded runs to an experiment tracker."""
    from peerage.runs.trackers import log_record

    folders = compared_runs(runs)
    logged = {str(folder): log_record(load_records([folder])[0], to) for folder in folders}
    if as_json:
        print(json.dumps({"logged": logged}))
        return
    for folder, places in logged.items():
        for tracker, place in places.items():
            print(f"{folder}: {tracker} in {place}")


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


def progress(experiment: "Experiment") -> "AbstractContextManager[Watch]":
    """A progress bar for one run, on standard error."""
    from peerage.runs.progress import run_progress

    return run_progress(experiment)


def load_records(folders: list[Path]) -> "list[RunRecord]":
    """The record of each run, or one record if the folders are those of peers."""
    from peerage.records.rows import RunRecord, is_peer_folder

    folders = compared_runs(folders)
    if not any(map(is_peer_folder, folders)):
        return [RunRecord.load(folder) for folder in folders]
    check_installed()
    from peerage.net.deploy.joint import joint_record

    return [joint_record(folders)]


def _bar(quiet: bool) -> "Show[Picture] | None":
    """A bar for the figures of a report; none without a terminal."""
    from peerage.display import counted

    return None if quiet else counted


def show_runs(
    folders: list[Path],
    report: Path,
    facts: Mapping[str, Any],
    as_json: bool,
    quiet: bool = False,
) -> None:
    """Write a report of runs; print their table and chart, or only the facts as JSON."""
    from peerage.report import fairness_tables
    from peerage.report.export import export
    from peerage.report.groups import group_tables
    from peerage.report.html import headline, lead, privacy, where
    from peerage.report.peers import peer_tables, traffic
    from peerage.report.series import by_method
    from peerage.report.tables import compare as compare_runs
    from peerage.report.tables import labels, rich_table
    from peerage.report.terminal import Chart

    records = load_records(folders)
    export(records, report, _bar(quiet))
    if as_json:
        found = fairness_tables.summaries(records)
        print(json.dumps({**facts, **({"fairness": found} if found else {})}))
        return
    console = Console(highlight=False)
    rows = compare_runs(records)
    for table in peer_tables(records[0], console.width) if len(records) == 1 else ():
        console.print(table)
    console.print(rich_table(rows, console.width))
    for table in group_tables(records, console.width):
        console.print(table)
    fairness = fairness_tables.terminal_table(records, console.width)
    if fairness is not None:
        console.print(fairness)
    curves = [record.curve("accuracy") for record in records]
    console.print(Chart(dict(zip(labels(records), curves, strict=True))))
    series = by_method(records)
    several = any(method.seeds > 1 for method in series)
    text = lead(series, records) if several else headline(rows, where(records))
    console.print(f"\n{text}")
    for sentences in (traffic(records), privacy(records)):
        for name, sentence in sentences.items():
            console.print(f"{name}: {sentence}" if len(records) > 1 else sentence)
    console.print(f"Report: {report}", soft_wrap=True)
