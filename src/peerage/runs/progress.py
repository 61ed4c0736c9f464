"""The progress of one run: a bar in a terminal or a notebook, lines in a log file."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from peerage.display import NotebookBar, in_notebook
from peerage.experiment.experiment import Experiment
from peerage.records.rows import Row
from peerage.report.terminal import RunProgress
from peerage.runs.labels import label
from peerage.runs.trackers import logged
from peerage.runs.watch import Models, Watch, Watcher


class NotebookProgress(RunProgress):
    """The same progress as one line in the output of a cell."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True, force_terminal=False, force_jupyter=False))

    def start(self, label: str, rounds: int, done: int = 0) -> None:
        super().start(label, rounds, done)
        self.bar = NotebookBar(label, rounds, self.clock)

    def advance(
        self,
        round: int,
        accuracy: float | None = None,
        own: Mapping[str, float | None] | None = None,
    ) -> None:
        super().advance(round, accuracy, own)
        self.bar.update(round, self._text())

    def finish(self) -> None:
        super().finish()
        self.bar.update(self.round, self._text(left=False), last=True)


@contextmanager
def run_progress(experiment: Experiment) -> Iterator[Watch]:
    """A watcher that shows the progress of one run, on standard error or in a notebook."""
    console = Console(stderr=True)
    if console.is_terminal:  # loading data and starting workers takes time
        console.print(f"{label(experiment)}: preparing {experiment.nodes} nodes", style="dim")
    with ExitStack() as stack:
        bars: list[RunProgress] = []

        def watch(row: Row) -> None:
            if not bars:  # only after the workers are forked, as the bar has a thread
                bar = NotebookProgress() if in_notebook() else RunProgress()
                bars.append(stack.enter_context(bar))
                bars[0].start(label(experiment), experiment.rounds, row["round"])
            own = {metric.name: row.get(metric.name) for metric in experiment.evaluation.metrics}
            bars[0].advance(row["round"], row.get("accuracy"), own)

        yield watch
        for bar in bars:
            bar.finish()


@contextmanager
def watched(
    experiment: Experiment,
    progress: bool | None,
    watch: Watch | None,
    folder: Path | None = None,
    log_to: str | None = None,
) -> Iterator[Watch | None]:
    """The watcher of a run, after those of its progress and of trackers.

    If `progress` is None, only notebooks show it.
    """
    with ExitStack() as stack:
        before = []
        if in_notebook() if progress is None else progress:
            before.append(stack.enter_context(run_progress(experiment)))
        before.append(stack.enter_context(logged(experiment, folder, log_to)))
        yield _after([plain for plain in before if plain is not None], watch)


def _after(before: Sequence[Any], watch: Watch | None) -> Watch | None:
    """A watcher that first calls functions of a row, whose results do not matter."""
    if not before:
        return watch

    def first(row: Row) -> None:
        for look in before:
            look(row)

    if isinstance(watch, Watcher):
        look_at = watch.look

        def with_models(row: Row, models: Models) -> Any:
            first(row)
            return look_at(row, models)

        return Watcher(with_models)

    def of_row(row: Row) -> Any:
        first(row)
        return None if watch is None else watch(row)

    return of_row
