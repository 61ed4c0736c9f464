"""The command status, which shows what the peers of a network do.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from peerage.cli.flags import Json
from peerage.cli.net import COLOURS, check_installed

if TYPE_CHECKING:
    from peerage.net.deploy.status import NetworkStatus, PeerStatus

INTERVAL = 2.0  # seconds between two questions
WIDTH = 160  # characters of a table that is not shown on a terminal


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
    from peerage.net.deploy.status import NetworkStatus

    asyncio.run(_show(NetworkStatus(network, identity, certs), watch, as_json))


async def _show(peers: "NetworkStatus", watch: bool, as_json: bool) -> None:
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


def table_of(peers: "Sequence[PeerStatus]") -> Table:
    table = Table("peer", "state")
    for title in ("round", "accuracy", "epsilon"):
        table.add_column(title, justify="right")
    for title in ("heard", "versions", "certificate until"):
        table.add_column(title)
    for peer in peers:
        table.add_row(peer.name, *_cells(peer))
    return table


def _cells(peer: "PeerStatus") -> list[Any]:
    report = peer.report
    if report is None:
        return [Text(f"unreachable at {peer.address}: {peer.error}", "red")]
    state = Text(report.state, COLOURS.get(report.state, ""))
    if report.not_reached_by:
        state.append(f", not reached by {', '.join(report.not_reached_by)}", "red")
    heard = Text(", ".join(report.heard) or "-")
    if report.missing:
        heard.append(f", not {', '.join(report.missing)}", "red")
    return [
        state,
        f"{report.round} of {report.rounds}",
        "-" if report.accuracy is None else f"{100 * report.accuracy:.1f} %",
        "-" if report.epsilon is None else f"{report.epsilon:.3g}",
        heard,
        Text(f"peerage {report.peerage}, torch {report.torch}, wire {report.schema}"),
        Text("-" if report.expires is None else report.expires[:10]),
    ]
