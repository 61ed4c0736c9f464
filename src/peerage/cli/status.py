"""The command status, which shows what the peers of a network do.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from peerage.cli.flags import Json
from peerage.cli.installed import check_installed
from peerage.cli.net import COLOURS

if TYPE_CHECKING:
    from peerage.net.deploy.status import NetworkStatus, PeerStatus

INTERVAL = 2.0  # seconds between two questions
WIDTH = 80  # characters of a line that is not shown on a terminal
MOST_NAMES = 5  # of peers in a line


def status(
    network: Annotated[Path, Argument(help="Network file, with its experiment beside it.")],
    identity: Annotated[str, Option(help="Name of an observer or of a peer.")],
    certs: Annotated[Path, Option(help="Folder with its key and certificates.")] = Path("certs"),
    watch: Annotated[
        bool, Option("--watch", help="Ask again every two seconds, until interrupted.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask all peers of a network what they do; changes nothing."""
    check_installed()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import asyncio

    from peerage.net.deploy.status import NetworkStatus

    asyncio.run(_show(NetworkStatus(network, identity, certs), watch, as_json))


async def _show(peers: "NetworkStatus", watch: bool, as_json: bool) -> None:
    import asyncio

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    async with peers.connected():
        found = await peers.ask()
        if as_json or not watch:
            while True:
                if as_json:
                    print(json.dumps({"peers": [one.facts for one in found]}), flush=True)
                else:
                    console.print(table_of(found))
                if not watch:
                    return
                await asyncio.sleep(INTERVAL)
                found = await peers.ask()
        with Live(table_of(found), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(INTERVAL)
                live.update(table_of(await peers.ask()), refresh=True)


def table_of(peers: "Sequence[PeerStatus]") -> Group:
    """A table of at most 80 columns, and lines about what it has no room for."""
    private = any(peer.report and peer.report.epsilon is not None for peer in peers)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("peer", no_wrap=True)
    table.add_column("state")
    for title in ("round", "accuracy", *["epsilon"] * private, "heard", "revision"):
        table.add_column(title, justify="right", no_wrap=True)
    for peer in peers:
        table.add_row(peer.name, *_cells(peer, private))
    return Group(table, *_remarks(peers))


def _cells(peer: "PeerStatus", private: bool) -> list[Any]:
    report = peer.report
    if report is None:
        return [Text("unreachable", "red")]
    epsilon = "-" if report.epsilon is None else f"{report.epsilon:.3g}"
    heard = len(report.heard)
    return [
        Text(report.state, COLOURS.get(report.state, "")),
        f"{report.round} of {report.rounds}",
        "-" if report.accuracy is None else f"{100 * report.accuracy:.1f} %",
        *[epsilon] * private,
        Text(f"{heard} of {heard + len(report.missing)}", "red" if report.missing else ""),
        str(report.revision),
    ]


def _remarks(peers: "Sequence[PeerStatus]") -> list[Text]:
    """Lines about single peers, then about versions and certificates."""
    lines = []
    for peer in peers:
        if peer.report is None:
            where = f" at {peer.address}" if peer.address else ""
            lines.append(Text(f"{peer.name}{where}: {peer.error}", "red"))
            continue
        if peer.by_way_of is not None:
            age = f"{peer.age:.0f} s old"
            lines.append(Text(f"{peer.name} dials out; its status is from {peer.by_way_of}, {age}"))
        if peer.report.missing:
            lines.append(Text(f"{peer.name} did not hear {_listed(peer.report.missing)}", "red"))
        if peer.report.not_reached_by:
            others = _listed(peer.report.not_reached_by)
            lines.append(Text(f"{peer.name} cannot be reached by {others}", "red"))
    reports = {peer.name: peer.report for peer in peers if peer.report is not None}
    versions: dict[str, list[str]] = {}
    for name, one in reports.items():
        text = f"peerage {one.peerage}, torch {one.torch}, wire {one.schema}"
        versions.setdefault(text, []).append(name)
    same = len(versions) == 1
    lines += [Text(f"{'all' if same else _listed(who)}: {v}") for v, who in versions.items()]
    if dated := [(one.expires, name) for name, one in reports.items() if one.expires]:
        expires, name = min(dated)
        lines.append(Text(f"the first certificate to expire is that of {name}, on {expires[:10]}"))
    return lines


def _listed(names: "Sequence[str]") -> str:
    """Some names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
