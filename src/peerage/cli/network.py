"""The command about network files: network change.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from peerage.cli.flags import Json
from peerage.cli.installed import check_installed

network_app = Typer(help="Change the members or rounds of a network.", no_args_is_help=True)


@network_app.callback()
def network() -> None:
    """Change the members or rounds of a network."""


@network_app.command()
def change(
    file: Annotated[Path, Argument(help="The present network file, e.g. network.toml.")],
    from_round: Annotated[int, Option(help="First round to which the change applies.")],
    add: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=HOST:PORT",
            help="Peer that joins, or NAME=dials-out; repeatable. It gets a folder.",
        ),
    ] = None,
    remove: Annotated[
        list[str] | None, Option(metavar="NAME", help="Peer that leaves; repeatable.")
    ] = None,
    rounds: Annotated[int | None, Option(help="New number of rounds (default: as before).")] = None,
    topology: Annotated[
        str | None, Option(help="Graph from then on, e.g. complete (default: as before).")
    ] = None,
    certs: Annotated[
        Path | None,
        Option(help="Folder of the authority, to sign the new file (default: do not sign)."),
    ] = None,
    keys_at_site: Annotated[
        bool, Option("--keys-at-site", help="Write no keys for new peers: they make their own.")
    ] = False,
    out: Annotated[
        Path | None,
        Option(help="New network file, in the same folder (default: with the revision's number)."),
    ] = None,
    allow_code: Annotated[
        list[str] | None,
        Option(metavar="<sha256>", help="SHA-256 of a file outside the package that may run here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the next revision of a network file and its experiment, which running peers take up.

    A new peer also gets a folder with all its files, as from `peerage export`.
    """
    check_installed()
    from peerage.experiment.permission import check_hash
    from peerage.net.deploy.change import Change, change_network, parse_member

    wanted = Change(from_round, [*map(parse_member, add or ())], remove or (), rounds, topology)
    allowed = {*map(check_hash, allow_code or ())}
    changed = change_network(
        file, wanted, out=out, certs=certs, allowed=allowed, keys_at_site=keys_at_site
    )
    print(json.dumps(changed.facts) if as_json else changed)
