"""The command ui, which serves the dashboard.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Option

from peerage.cli.flags import FLAGS, TABLE, Flag, Settings, read_changes
from peerage.cli.installed import check_installed
from peerage.cli.names import names
from peerage.cli.run import RUNS
from peerage.errors import InputError, Interrupted, PeerageError

if TYPE_CHECKING:
    from peerage.ui.form import Field, Form

PORT = 8765
PACKAGES = ("starlette", "uvicorn")
KINDS: dict[Any, str] = {int: "whole", float: "number", bool: "switch", list[str]: "list"}


def ui(
    runs: Annotated[
        Path, Option(help="Folder whose runs to show; new runs are made in it.")
    ] = RUNS,
    port: Annotated[int, Option(help="Port to listen on; 0 takes a free one.")] = PORT,
    host: Annotated[
        str, Option(help="Address to listen on; any but the default needs --token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        Option(
            help="Text that a browser must know, at least 16 characters (default: a random one).",
            envvar="PEERAGE_UI_TOKEN",
        ),
    ] = None,
    browser: Annotated[
        bool, Option("--browser/--no-browser", help="Open the dashboard in the browser.")
    ] = True,
    network: Annotated[
        Path | None, Option(help="Network file of peers on several machines to show as well.")
    ] = None,
    identity: Annotated[
        str | None, Option(help="Name of an observer, with which to ask these peers.")
    ] = None,
    certs: Annotated[Path, Option(help="Folder with its key and certificates.")] = Path("certs"),
) -> None:
    """Show runs, studies and networks in the browser, and start runs from there.

    Runs that were started in the browser go on when the dashboard ends.
    """
    for name in PACKAGES:
        if find_spec(name) is None:
            raise InputError(f'the dashboard needs {name}; pip install "peerage[ui]"')
    if (network is None) != (identity is None):
        raise InputError("--network and --identity belong together; give both or none")
    if runs.exists() and not runs.is_dir():
        raise InputError(f"--runs {runs} is a file; give a folder")
    from peerage.ui.app import Dashboard
    from peerage.ui.server import serve

    def build(host: str, port: int, token: str) -> Dashboard:
        return Dashboard(runs, form(), host, port, token, _remote(network, identity, certs))

    def announce(address: str) -> None:
        console.print(f"Dashboard of {runs}: {address}", soft_wrap=True)
        console.print("Press Ctrl-C to end it; runs that were started there go on.")

    console = Console(highlight=False, markup=False)
    try:
        serve(build, host, port, token, browser, announce)
    except (KeyboardInterrupt, Interrupted):
        console.print("dashboard ended")


def _remote(network: Path | None, identity: str | None, certs: Path) -> Any:
    if network is None or identity is None:
        return None
    check_installed()
    from peerage.ui.remote import RemoteNetwork

    return RemoteNetwork(network, identity, certs)


def form() -> "Form":
    """The form of a new run, from the table of flags."""
    from peerage.ui.form import Form

    descriptions = dict.fromkeys(names("recipes"), "")
    return Form([field(flag) for flag in TABLE], descriptions, check, starting)


def field(flag: Flag) -> "Field":
    from peerage.ui.form import Field

    choices = [name for family in flag.families for name in names(family)]
    default = "" if flag.default is None else str(flag.default)
    section = flag.key.rpartition(".")[0]
    kind = KINDS.get(flag.type, "text")
    about = flag.help.partition("; repeat the flag")[0] + "; separate several by spaces."
    return Field(flag.name, section, kind, about if kind == "list" else flag.help, default, choices)


def check(recipe: str | None, values: Mapping[str, Any]) -> dict[str, str]:
    """The error of an experiment with these values of flags, by the flag that causes it.

    That is the one without which the same error does not occur; "" if there is none.
    """
    message = _error(recipe, values)
    if message is None:
        return {}
    for name in values:
        without = {key: value for key, value in values.items() if key != name}
        if _error(recipe, without) != message:
            return {name: message}
    return {"": message}


def _error(recipe: str | None, values: Mapping[str, Any]) -> str | None:
    try:
        Settings(recipe, read_changes(values)).experiment()
    except PeerageError as error:
        return str(error)
    return None


def starting(recipe: str | None) -> dict[str, str]:
    """The values of flags that a recipe sets."""
    if recipe is None:
        return {}
    import tomllib

    from peerage.experiment.catalogue import recipes

    table = tomllib.loads(recipes()[recipe].read_text(encoding="utf-8"))
    found = {}
    for name, flag in FLAGS.items():
        value: Any = table
        for key in flag.key.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            found[name] = _text(value)
    return found


def _text(value: Any) -> str:
    """A value of an experiment file as users write it for a flag.

    >>> _text({"name": "dechw", "theta": 30}), _text(["a", "b"]), _text(True)
    ('dechw:theta=30', 'a b', 'on')
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, dict):
        options = ",".join(f"{k}={_text(v)}" for k, v in value.items() if k != "name")
        return f"{value.get('name', '')}:{options}".strip(":")
    return str(value)
