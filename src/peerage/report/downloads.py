"""Progress bars of downloads, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from peerage.data import Progress


@contextmanager
def download_progress() -> Iterator[Progress]:
    """Yield a callback for `peerage.data.fetch`: bytes done, total bytes, label."""
    console = Console(stderr=True)
    tasks: dict[str, progress.TaskID] = {}
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=24),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    quiet = not console.is_terminal  # otherwise a log file would end with an empty line
    with progress.Progress(*columns, console=console, redirect_stdout=False, disable=quiet) as bars:

        def report(done: int, total: int | None, label: str) -> None:
            if label not in tasks:
                if not console.is_terminal:
                    console.print(label, markup=False, highlight=False, soft_wrap=True)
                tasks[label] = bars.add_task(label, total=total, visible=console.is_terminal)
            bars.update(tasks[label], completed=done, total=total)

        yield report
