"""The commands for real peers: node runs one peer, up and export set up a network.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Option

from peerage.cli.flags import DialsOut, Json, Out, Quiet, Settings, Wire, experiment_flags
from peerage.cli.installed import check_installed
from peerage.cli.run import run_folder, show_runs
from peerage.net.deploy.parent_pipe import VARIABLE, exit_with_parent

if TYPE_CHECKING:
    from peerage.net.deploy.process import PeerProgress
    from peerage.net.deploy.up import Show

Rejoin = Annotated[
    str, Option(help="Model that a peer continues with after missed rounds: own or neighbour.")
]
Quorum = Annotated[
    str, Option(help="Peers that must be in contact to run a round: majority, or a number.")
]
StopAtEpsilon = Annotated[
    float | None,
    Option(
        help="Largest epsilon of a peer's data, over all runs; it stops before (default: none)."
    ),
]
Pack = Annotated[bool, Option(help="Compress messages that become smaller.")]
KeepModels = Annotated[str, Option(help="Models that a peer keeps as files: best, last or both.")]
KeepEvery = Annotated[
    int | None,
    Option(help="Rounds between checkpoints that are never removed (default: none)."),
]
LOG_INTERVAL = 5.0  # seconds between two lines
COLOURS = {"finished": "green", "killed": "red", "failed": "bold red", "starting": "dim"}


def node(
    network: Annotated[Path, Option(help="Network file, the same for all peers.")],
    identity: Annotated[str, Option(help="Name of this peer, e.g. node-3.")],
    certs: Annotated[
        Path, Option(help="Folder with the key and the certificates of this peer.")
    ] = Path("certs"),
    out: Annotated[
        Path | None, Option(help="Folder for checkpoints and metrics (default: the identity).")
    ] = None,
    data: Annotated[
        str | None,
        Option(help="Private data, e.g. npz:path=FILE (default: a part of the data set)."),
    ] = None,
    test: Annotated[
        str | None,
        Option(help="Data to test on: its test set, or all of it if it has none."),
    ] = None,
    classes: Annotated[
        str | None, Option(help="Classes in the network: number or names, e.g. cat,dog,horse.")
    ] = None,
    shift: Annotated[
        bool, Option("--shift", help="Apply the shift of this peer's cluster to --data.")
    ] = False,
    rejoin: Annotated[
        str | None,
        Option(
            help="Model to continue with after missed rounds: own or neighbour "
            "(default: own; neighbour when a new member begins)."
        ),
    ] = None,
    stop_at_epsilon: StopAtEpsilon = None,
    keep: KeepModels = "both",
    keep_every: KeepEvery = None,
    allow_code: Annotated[
        list[str] | None,
        Option(
            metavar="<sha256>",
            help="SHA-256 of a file outside the package that may run here; remembered in --out.",
        ),
    ] = None,
    bind: Annotated[
        str | None, Option(help="HOST:PORT to listen on (default: as in the network file).")
    ] = None,
    metrics_port: Annotated[
        int | None, Option(help="Port to serve Prometheus metrics on (default: none).")
    ] = None,
    log: Annotated[
        str, Option(help="Format of the log: human, or json (one object per line).")
    ] = "human",
    log_file: Annotated[
        Path | None,
        Option(
            help="Log to this file and 4 older ones of at most 10 MB (default: standard error)."
        ),
    ] = None,
    check_health: Annotated[
        bool,
        Option("--check-health", help="Only ask the running peer whether it is healthy, and exit."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run one peer of a network, from its last checkpoint if any."""
    check_installed()
    exit_with_parent(os.environ.pop(VARIABLE, None))  # if `peerage up` started this process
    # Rejected callers are counted by the peer; gRPC's own log lines about them are hard to read.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if check_health:
        from peerage.net.peer.health import check_health as ask_for_health

        ask_for_health(network, identity, certs, bind)
        return
    from peerage.net.peer.logs import ending, set_up_log
    from peerage.net.peer.node import PeerConfig, run_node
    from peerage.net.peer.private_data import parse_classes
    from peerage.runs.kept_models import Keep

    set_up_log(log, identity, log_file)
    with ending(log, log_file):
        config = PeerConfig(
            network,
            identity,
            certs,
            folder=Path(identity) if out is None else out,
            bind=bind,
            metrics_port=metrics_port,
            data=data,
            test=test,
            classes=None if classes is None else parse_classes(classes),
            shift=shift,
            rejoin=rejoin,
            stop_at_epsilon=stop_at_epsilon,
            keep=Keep(keep, keep_every),
            allow_code=allow_code or (),
        )
        summary = run_node(config)
    if as_json:
        print(json.dumps(summary))


@experiment_flags
def up(
    settings: Settings,
    kill: Annotated[str | None, Option(help="Peers to kill: NODE@ROUND,...")] = None,
    restart: Annotated[str | None, Option(help="Killed peers to restart: NODE@ROUND,...")] = None,
    rejoin: Rejoin = "own",
    stop_at_epsilon: StopAtEpsilon = None,
    keep: KeepModels = "both",
    keep_every: KeepEvery = None,
    message_timeout: Annotated[float, Option(help="Seconds to wait for a message.")] = 60.0,
    start_timeout: Annotated[
        float, Option(help="Seconds to wait for all peers before round 1.")
    ] = 60.0,
    wire: Wire = "fp32",
    pack: Pack = False,
    quorum: Quorum = "majority",
    dials_out: DialsOut = "",
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run an experiment as a network of processes on this machine.

    The peers authenticate each other and encrypt their messages.
    """
    experiment = settings.experiment()
    with run_folder(out, experiment, "up") as home:
        check_installed()
        from peerage.graphs.faults import parse_schedule
        from peerage.net.deploy.up import LocalNetwork
        from peerage.net.peer.dialling import parse_numbers
        from peerage.net.peer.network import Timeouts, parse_quorum
        from peerage.runs.kept_models import Keep
        from peerage.runs.privacy_plan import privacy_plan

        network = LocalNetwork(
            experiment,
            home,
            Timeouts(start=start_timeout, message=message_timeout),
            wire,
            pack,
            parse_schedule("kill", kill or ""),
            parse_schedule("restart", restart or ""),
            rejoin,
            stop_at_epsilon,
            quorum=parse_quorum(quorum),
            dials_out=parse_numbers(dials_out, experiment.nodes_and_hub),
            keep=Keep(keep, keep_every),
            announce=lambda text: print(text, file=sys.stderr, flush=True),
        )
        if plan := privacy_plan(experiment):
            print(plan, file=sys.stderr, flush=True)
        with live_table() as network.show:
            summary = network.run()
    show_runs([home], home / "report.html", summary, as_json)


@experiment_flags
def export(
    settings: Settings,
    hosts: Annotated[
        Path,
        Option(help="File with one HOST, HOST:PORT or dials-out per line; peers take turns."),
    ] = Path("hosts.txt"),
    port: Annotated[int, Option(help="First port on hosts without a port.")] = 7400,
    certs: Annotated[
        Path | None, Option(help="Folder of a certificate authority (default: a new one).")
    ] = None,
    stop_at_epsilon: StopAtEpsilon = None,
    wire: Wire = "fp32",
    pack: Pack = False,
    quorum: Quorum = "majority",
    out: Annotated[Path, Option(help="New folder for the peers' folders.")] = Path("deploy"),
    keys_at_site: Annotated[
        bool, Option("--keys-at-site", help="Write no keys: each machine makes its own.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a folder for each peer of a network of machines.

    It holds the peer's files, key and systemd unit, and the files of your own code.
    """
    check_installed()
    from peerage.net.deploy.export import export as write_folders
    from peerage.net.peer.network import parse_quorum

    exported = write_folders(
        settings.experiment(),
        hosts,
        out,
        port=port,
        certs=certs,
        wire=wire,
        pack=pack,
        stop_at_epsilon=stop_at_epsilon,
        keys_at_site=keys_at_site,
        quorum=parse_quorum(quorum),
        progress=not quiet,
    )
    print(json.dumps(exported.facts) if as_json else exported)


@contextmanager
def live_table() -> "Iterator[Show]":
    """Show a table of all peers on standard error, or lines if that is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    with Live(console=console, refresh_per_second=5, transient=True) as live:
        yield lambda peers: live.update(table_of(peers))


class Lines:
    """Prints a line about all peers when something has changed, at most every LOG_INTERVAL."""

    def __init__(self) -> None:
        self.next, self.last = 0.0, ""

    def __call__(self, peers: "Sequence[PeerProgress]") -> None:
        rounds = [peer.round for peer in peers]
        states = Counter(peer.state for peer in peers)
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        line = f"rounds {min(rounds)} to {max(rounds)}; peers: {counts}"
        if line != self.last and monotonic() >= self.next:
            print(line, file=sys.stderr, flush=True)
            self.next, self.last = monotonic() + LOG_INTERVAL, line


def table_of(peers: "Sequence[PeerProgress]") -> Table:
    from peerage.report.tables import number

    table = Table("peer", "state")
    own = list(peers[0].own) if peers else []
    for title in ("round", "accuracy", *own, "received"):
        table.add_column(Text(title), justify="right")
    for peer in peers:
        accuracy = "-" if peer.accuracy is None else f"{100 * peer.accuracy:.1f} %"
        state = Text(peer.state, COLOURS.get(peer.state, ""))
        values = [number(peer.own[name]) for name in own]
        table.add_row(peer.name, state, str(peer.round), accuracy, *values, peer.received)
    return table
