"""Output in a notebook: HTML that is shown once and then updated, and bars for loops.

IPython is never imported unless a kernel already runs.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from importlib import import_module
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

T = TypeVar("T")

INTERVAL = 0.2  # seconds between updates of a bar in a notebook
KERNEL = "ZMQInteractiveShell"  # the shell of Jupyter and of editors that show notebooks


def shell() -> Any:
    """The shell of the notebook in which this process runs; None if it is not a notebook."""
    ipython = sys.modules.get("IPython")
    found = ipython.get_ipython() if ipython is not None else None
    names = {cls.__name__ for cls in type(found).__mro__}
    return found if KERNEL in names else None


def in_notebook() -> bool:
    return shell() is not None


class NotebookBar:
    """One line with a bar in the output of a cell, which is replaced and never repeated."""

    def __init__(self, label: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        notebook: Any = import_module("IPython.display")  # it has no types
        self.label, self.total, self._html, self._clock = label, total, notebook.HTML, clock
        self._updated = clock()
        self._handle = notebook.display(notebook.HTML(self.html(0, "")), display_id=True)

    def update(self, done: int, text: str, *, last: bool = False) -> None:
        """Show a state; states that follow within a fraction of a second are left out."""
        now = self._clock()
        if last or done >= self.total or now - self._updated >= INTERVAL:
            self._updated = now
            self._handle.update(self._html(self.html(done, text)))

    def html(self, done: int, text: str) -> str:
        return (
            '<div style="font-variant-numeric: tabular-nums; white-space: nowrap">'
            f"<b>{escape(self.label)}</b> "
            f'<progress value="{done}" max="{self.total}" style="vertical-align: middle">'
            f"</progress> {escape(text)}</div>"
        )


@contextmanager
def stages(names: Sequence[str], *, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """A bar in a terminal for a few stages of work; call the result when each of them begins.

    Nothing is shown in a log file or if `quiet`.
    """
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
        task = bars.add_task("", total=len(names))
        rest = iter(enumerate(names))

        def begin() -> None:
            done, name = next(rest)
            bars.update(task, completed=done, description=name, refresh=True)

        yield begin


def counted(items: Iterable[T], label: str, total: int, *, quiet: bool = False) -> Iterator[T]:
    """The items, with a bar in a notebook or in a terminal.

    Nothing is shown in a log file or if `quiet`.
    """
    if in_notebook() and not quiet:
        bar = NotebookBar(label, total)
        for done, item in enumerate(items, start=1):
            yield item
            bar.update(done, f"{done:,} of {total:,}", last=done == total)
        return
    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as bars:
        yield from bars.track(items, total=total, description=label)
