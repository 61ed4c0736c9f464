"""The commands about real peers: node runs one, up runs a whole network on this machine."""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from peerage.cli.graphs import Json
from peerage.errors import InputError
from peerage.net.deploy.parent_pipe import VARIABLE, end_with

if TYPE_CHECKING:
    from peerage.experiment import Experiment
    from peerage.net.deploy.up import Seen, Show

PAUSE = 5.0  # seconds between two lines
COLOURS = {"finished": "green", "killed": "red", "failed": "bold red", "starting": "dim"}
NEEDED = ("cryptography", "grpc", "grpc_health", "prometheus_client", "zstandard")


def check_installed() -> None:
    for name in NEEDED:
        if find_spec(name) is None:
            raise InputError(f'real peers need {name}; pip install "peerage[net]"')


def node(
    network: Annotated[Path, typer.Option(help="The network file, the same for all peers.")],
    identity: Annotated[str, typer.Option(help="Which of its peers this is, e.g. node-3.")],
    certs: Annotated[Path, typer.Option(help="Folder with its key and certificates.")] = Path(
        "certs"
    ),
    out: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints and metrics; by default its name.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Data of its own, e.g. npz:path=FILE, folder:path=FOLDER.")
    ] = None,
    test: Annotated[
        str | None, typer.Option(help="Data whose test set judges it, in place of its own.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="Of the whole network: how many, or their names, e.g. cat,dog,horse."),
    ] = None,
    rejoin: Annotated[
        str, typer.Option(help="own, or neighbour: whose model to go on with after missed rounds.")
    ] = "own",
    bind: Annotated[
        str | None, typer.Option(help="HOST:PORT to listen on, if not its address for others.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve numbers for Prometheus on this port.")
    ] = None,
    log: Annotated[str, typer.Option(help="human, or json: one object per line.")] = "human",
    as_json: Json = False,
) -> None:
    """Run one peer of a real network, from its last checkpoint if it has one."""
    check_installed()
    end_with(os.environ.pop(VARIABLE, None))  # with the `peerage up` that started it
    # What gRPC has to say about strangers is in our own counters, and its lines are not for people.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from peerage.net.peer.node import Place, ending, run_node, set_up_log
    from peerage.net.peer.private_data import parse_classes

    set_up_log(log, identity)
    with ending(log):
        place = Place(
            network,
            identity,
            certs,
            folder=Path(identity) if out is None else out,
            bind=bind,
            metrics_port=metrics_port,
            data=data,
            test=test,
            classes=None if classes is None else parse_classes(classes),
            rejoin=rejoin,
        )
        summary = run_node(place)
    if as_json:
        print(json.dumps(summary))


def run_up(experiment: "Experiment", home: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """`peerage up`, whose flags are those of run and stand in cli.py."""
    check_installed()
    from peerage.graphs.faults import moments
    from peerage.net.deploy.up import Up
    from peerage.net.peer.network import Patience

    given = {key: settings[key] for key in ("start", "step") if settings[key] is not None}
    patience = Patience(**given)
    with live_table() as show:
        return Up(
            experiment,
            home,
            patience,
            settings["wire"],
            settings["pack"],
            moments("kill", settings["kill"] or ""),
            moments("restart", settings["restart"] or ""),
            settings["rejoin"],
            show,
        ).run()


@contextmanager
def live_table() -> "Iterator[Show]":
    """One table of all peers on standard error while they run, or lines where it is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield lambda seen: live.update(table_of(seen))


class Lines:
    """A line about all peers now and then, once something has changed."""

    def __init__(self) -> None:
        self.next, self.last = 0.0, ""

    def __call__(self, seen: "Sequence[Seen]") -> None:
        rounds = [one.round for one in seen]
        states = Counter(one.state for one in seen)
        known = ", ".join(f"{count} {state}" for state, count in states.items())
        line = f"rounds {min(rounds)} to {max(rounds)}; peers: {known}"
        if line != self.last and monotonic() >= self.next:
            print(line, file=sys.stderr, flush=True)
            self.next, self.last = monotonic() + PAUSE, line


def table_of(seen: "Sequence[Seen]") -> Table:
    table = Table("peer", "state")
    for title in ("round", "accuracy", "heard"):
        table.add_column(title, justify="right")
    for one in seen:
        accuracy = "-" if one.accuracy is None else f"{100 * one.accuracy:.1f} %"
        state = Text(one.state, COLOURS.get(one.state, ""))
        table.add_row(one.name, state, str(one.round), accuracy, one.heard)
    return table
