"""The command line: all commands, and one line with an exit code for each error.

A command parses, builds objects, calls functions and prints. Slow imports are inside functions, so
that `peerage --help` starts fast: it must not load torch.
"""

import signal
import sys
import warnings
from typing import Any

import typer

from peerage.cli import certs, data, graphs, models, net, network, papers, run, status
from peerage.errors import InputError, Interrupted, PeerageError

# The base of all errors about flags; some versions of typer include click, others import it.
USAGE_ERROR: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="peerage",
    help="Decentralised federated learning, from the paper to the network.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 100},
)
for command in (run.run, run.compare, run.resume, run.verify, run.report, models.model):
    app.command()(command)
for command in (net.up, net.node, net.export, graphs.plan, graphs.topology, graphs.diffuse):
    app.command()(command)
app.command()(models.rewind)
app.command()(status.status)
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
            app(standalone_mode=False)
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
    words = [word for argument in sys.argv for word in argument.split("=", 1)]
    values = [words[words.index(name) + 1] for name in names if name in words[:-1]]
    given = f" (got {values[0]!r})" if values else ""
    return f"{error.format_message().rstrip('.')}{given}; see --help"


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """Print a warning as one line, without its place in the code."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _terminate(number: int, frame: object) -> None:
    raise Interrupted("ended by signal SIGTERM")
