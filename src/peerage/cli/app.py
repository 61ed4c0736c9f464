"""The command line: all commands, and one line with an exit code for each error.

A command parses, builds objects, calls functions and prints. Slow imports are inside functions, so
that `peerage --help` starts fast: it must not load torch.
"""

import signal
import sys
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from typing import Annotated, Any

import typer

import peerage
from peerage.cli import certs, data, graphs, models, net, network, papers, run, status, ui
from peerage.errors import InputError, Interrupted, PeerageError

# The base of all errors about flags; some versions of typer include click, others import it.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="peerage",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"peerage {peerage.__version__}")
        raise typer.Exit


@app.callback()
def overview(
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Decentralised federated learning, from the paper to the network."""


for command in (run.run, run.compare, run.resume, run.verify, run.report, models.model):
    app.command()(command)
for command in (run.plot, run.log):
    app.command()(command)
for command in (net.up, net.node, net.export, graphs.plan, graphs.topology, graphs.diffuse):
    app.command()(command)
app.command()(models.rewind)
app.command()(status.status)
app.command()(ui.ui)
app.command()(papers.reproduce)
app.command("list")(data.list_family)
app.add_typer(data.data_app, name="data")
app.add_typer(certs.certs_app, name="certs")
app.add_typer(network.network_app, name="network")


def main() -> None:
    """Run a command; print an error as one line and exit with its code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            app(prog_name="peerage", standalone_mode=False)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())
            sys.exit(InputError.exit_code)
        sys.exit(_fail(_describe_usage_error(error), InputError.exit_code))
    except PeerageError as error:
        sys.exit(_fail(str(error), error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(_fail("interrupted", Interrupted.exit_code))


def _describe_usage_error(error: Any) -> str:
    """The parser's message about a flag, with the value, which the message omits."""
    names = getattr(getattr(error, "param", None), "opts", [])
    values = _values_of(names, sys.argv[1:])
    given = f" (got {values[-1]!r})" if values else ""  # of a repeated flag, the last applies
    return f"{error.format_message().rstrip('.')}{given}; see --help"


def _values_of(names: Sequence[str], words: Sequence[str]) -> list[str]:
    """The values that words of a command line give to the flag with these names.

    >>> _values_of(["--nodes"], ["run", "--nodes", "4", "--lr", "1", "--nodes=x=y"])
    ['4', 'x=y']
    """
    values = []
    for word, following in zip_longest(words, words[1:]):
        flag, equals, value = word.partition("=")
        if flag in names and flag.startswith("-") and (equals or following is not None):
            values.append(value if equals else following)
    return values


def _fail(message: str, code: int) -> int:
    print(f"error: {_one_line(message)}", file=sys.stderr)
    return code


def _one_line(text: object) -> str:
    """The text in one line, with the spaces inside its lines, which paths may have."""
    return " ".join(line.strip() for line in str(text).splitlines() if line.strip())


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without its place in the code."""
    print(f"warning: {_one_line(message)}", file=sys.stderr)


def _terminate(number: int, frame: object) -> None:
    raise Interrupted("ended by signal SIGTERM")
