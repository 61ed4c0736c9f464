"""The command line as tests call it: inside this process, as starting one takes seconds."""

import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import typer
from markupsafe import Markup

from peerage.cli.app import main

# The commands and their flags are built once, not for every line.
get_command = functools.cache(typer.main.get_command)
# A very short run: four nodes on a ring, which take four steps per round.
TINY = "--nodes 4 --topology ring --partition iid --epochs 1 --batch-size 90 --model logistic"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def flags(engine: Mapping[str, Any]) -> str:
    """The settings of an engine as the command line takes them.

    >>> flags({"name": "pool", "workers": 2})
    '--engine pool --workers 2'
    """
    return " ".join(f"--{'engine' if key == 'name' else key} {engine[key]}" for key in engine)


def peerage(line: str, *more: object) -> Outcome:
    """What `peerage LINE MORE...` prints, and its exit code; other exceptions pass through.

    Only the command `report` draws: other commands write reports without pictures, each of which
    would take a second. The documents and the tests of reports draw all of them.
    """
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    before = signal.getsignal(signal.SIGTERM)
    argv = ["peerage", *line.split(), *map(str, more)]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(typer.main, "get_command", get_command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        blank_pictures("report" not in argv),
    ):
        try:
            main()
        except SystemExit as ending:
            code = ending.code or 0
        finally:
            signal.signal(signal.SIGTERM, before)
    return Outcome(code, out.getvalue(), err.getvalue())


def _blank(pictures: Sequence[Any], show: Any) -> list[Any]:
    from peerage.report.html import Figured
    from peerage.report.inline import Drawing

    return [Figured(picture, Drawing(Markup(""), "[]", frozenset())) for picture in pictures]


@contextlib.contextmanager
def blank_pictures(wanted: bool) -> Iterator[None]:
    """Write reports without drawing their figures."""
    with contextlib.ExitStack() as stack:
        if wanted:
            stack.enter_context(mock.patch("peerage.report.html.draw_all", _blank))
        yield


def start(
    line: str, *more: object, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """The same as a process of its own, in a group of its own, so that signals reach all of it."""
    with not_ignoring(signal.SIGHUP, signal.SIGINT):
        return subprocess.Popen(
            [Path(sys.executable).with_name("peerage"), *line.split(), *map(str, more)],
            cwd=cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


@contextlib.contextmanager
def not_ignoring(*numbers: signal.Signals) -> Iterator[None]:
    """Let processes started inside get these signals, even if this process ignores them."""
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def error_line(outcome: Outcome) -> str:
    """The one line on standard error that bad input gives; asserts that nothing else is printed."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("error: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    return outcome.err.removeprefix("error: ").rstrip("\n")
