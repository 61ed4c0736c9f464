"""Terminal output: a chart of accuracies, and the progress of runs."""

import math
import textwrap
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from peerage.report.tables import number as number_text
from peerage.report.tables import percent

Curves = Mapping[str, tuple[Sequence[float], Sequence[float]]]

COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan", "bright_black")
MARKERS = "●▲■◆▼★✚○△□◇▽"
PLAIN_MARKERS = "ox+*#@%&abcd"
# Bits of the 2 x 4 dots of a braille character, [row from the top][column].
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
FULL_WIDTH = 76  # characters of a progress bar with all of its text
LOG_INTERVAL = 30.0  # seconds between log lines about one run of a study
STEPS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Chart:
    """A chart that adapts to the width of the console."""

    curves: Curves
    height: int = 16

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = options.ascii_only
        yield chart(self.curves, min(options.max_width, 120), self.height, plain=plain)


def chart(curves: Curves, width: int = 80, height: int = 16, *, plain: bool = False) -> Text:
    """A chart of accuracy (fractions) over rounds; every curve has its own marker and colour.

    The legend is sorted by the last value. `plain` restricts the drawing to ASCII.
    """
    points = {
        label: [(x, y) for x, y in zip(*curve, strict=True) if math.isfinite(y)]
        for label, curve in curves.items()
    }
    known = [point for curve in points.values() for point in curve]
    if not known:
        return Text("no round has been evaluated yet")
    low, high, step = axis_range([value for _, value in known], height)
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    digits = 1 if step < 0.01 else 0
    ticks = {
        _row(low + number * step, low, high, height): percent(low + number * step, digits)
        for number in range(round((high - low) / step) + 1)
    }
    margin = max(len(text) for text in ticks.values())
    canvas = Canvas(max(width - margin - 2, 10), height, (first, last), (low, high), plain)
    for number, curve in enumerate(points.values()):
        canvas.draw(curve, number)
    for number, curve in enumerate(points.values()):
        canvas.mark(curve, number, len(points))
    drawing = Text("accuracy\n", no_wrap=True, overflow="crop")
    for row in range(height):
        corner = ("+" if plain else "┤") if row in ticks else ("|" if plain else "│")
        drawing.append(f"{ticks.get(row, ''):>{margin}} {corner}")
        drawing.append_text(canvas.line(row))
        drawing.append("\n")
    drawing.append(_round_axis(first, last, canvas.width, margin, plain=plain))
    drawing.append_text(_legend(points, width, plain=plain))
    return drawing


@dataclass
class Canvas:
    """Character cells; lines use 2 x 4 braille dots per cell, markers a whole cell."""

    width: int
    height: int
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    plain: bool
    dots: dict[tuple[int, int], int] = field(default_factory=dict)  # (row, column) -> braille bits
    marks: dict[tuple[int, int], str] = field(default_factory=dict)
    owner: dict[tuple[int, int], int] = field(default_factory=dict)  # curve that colours a cell

    def draw(self, curve: Sequence[tuple[float, float]], number: int) -> None:
        """Draw a polyline with a marker at its end."""
        fine = [self._dot(x, y) for x, y in curve]
        for (x0, y0), (x1, y1) in pairwise(fine):
            length = max(abs(x1 - x0), abs(y1 - y0), 1)
            for k in range(length + 1):
                x, y = x0 + round(k * (x1 - x0) / length), y0 + round(k * (y1 - y0) / length)
                cell = (y // 4, x // 2)
                self.dots[cell] = self.dots.get(cell, 0) | DOTS[y % 4][x % 2]
                self.owner.setdefault(cell, number)
        if fine:
            self._mark((fine[-1][1] // 4, fine[-1][0] // 2), number)

    def mark(self, curve: Sequence[tuple[float, float]], number: int, count: int) -> None:
        """Draw markers at points of the curve, shifted for each of `count` curves."""
        gap = 8  # columns between the markers of one curve
        free = gap * number // count
        for x, y in (self._dot(x, y) for x, y in curve):
            if x // 2 >= free:
                self._mark((y // 4, x // 2), number)
                free = x // 2 + gap

    def line(self, row: int) -> Text:
        text = Text()
        used = [column for at, column in [*self.dots, *self.marks] if at == row]
        for column in range(max(used, default=-1) + 1):
            cell = (row, column)
            if cell in self.marks:
                text.append(self.marks[cell], style=f"bold {_colour(self.owner[cell])}")
            elif cell in self.dots:
                mark = "." if self.plain else chr(0x2800 + self.dots[cell])
                text.append(mark, style=_colour(self.owner[cell]))
            else:
                text.append(" ")
        return text

    def _dot(self, x: float, y: float) -> tuple[int, int]:
        column = _place(x, self.x_range, 2 * self.width)
        return column, 4 * self.height - 1 - _place(y, self.y_range, 4 * self.height)

    def _mark(self, cell: tuple[int, int], number: int) -> None:
        if cell not in self.marks:
            self.marks[cell] = _marker(number, plain=self.plain)
            self.owner[cell] = number


class StatusColumn(ProgressColumn):
    """The text of a task, updated at every refresh, so that the clock runs within a round."""

    def __init__(self, *, no_wrap: bool) -> None:
        super().__init__()
        self.no_wrap = no_wrap

    def render(self, task: Task) -> Text:
        text: Callable[[], str] = task.fields["text"]
        return Text(text(), no_wrap=self.no_wrap)


class HeadedProgress(Progress):
    """Bars below a line of text, which is updated at every refresh."""

    head: Callable[[], str] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.head is not None:
            yield Text(self.head(), overflow="fold")
        yield self.make_tasks_table(self.tasks)


class ProgressDisplay:
    """Context manager for progress bars on standard error, or plain lines in a log file."""

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        ticking: bool = True,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.clock = clock
        narrow = self.console.width < FULL_WIDTH  # text is more useful than a bar
        bar = BarColumn(bar_width=min(max(self.console.width - 70, 6), 24))
        name = "{task.description}" if narrow else "{task.description:<12}"
        # Not on standard output, whose last line may be JSON for another program.
        self.bars = HeadedProgress(
            TextColumn(name, style="bold", markup=False),
            *([] if narrow else [bar]),
            StatusColumn(no_wrap=not narrow),
            console=self.console,
            redirect_stdout=False,
            auto_refresh=ticking,  # by a thread
        )

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def print_line(self, line: str) -> None:
        """Print a permanent line, above the bars or in the log."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class RunProgress(ProgressDisplay):
    """One bar per run; in a log file, a line for every tenth of it."""

    round, rounds = 0, 0
    accuracy: float | None = None
    task: TaskID | None = None

    def start(self, label: str, rounds: int, done: int = 0) -> None:
        """Begin a run of `rounds` rounds, of which an earlier process did `done`."""
        self.label, self.rounds, self.round, self.accuracy = label, rounds, done, None
        self.own: dict[str, float] = {}  # the user's own metrics by name
        self.began = self.clock()
        self.recent = deque([(done, self.began)], maxlen=11)
        self.task = None
        if self.console.is_terminal:
            self.task = self.bars.add_task(label, total=rounds, completed=done, text=self._text)

    def advance(
        self,
        round: int,
        accuracy: float | None = None,
        own: Mapping[str, float | None] | None = None,
    ) -> None:
        """Report a finished round, with its mean accuracy and own metrics if it was evaluated."""
        before, self.round = self.round, round
        self.accuracy = self.accuracy if accuracy is None else accuracy
        self.own |= {name: value for name, value in (own or {}).items() if value is not None}
        self.recent.append((round, self.clock()))
        if self.task is not None:
            self.bars.update(self.task, completed=round)
        elif 10 * round // max(self.rounds, 1) > 10 * before // max(self.rounds, 1):
            self.print_line(f"{self.label}: {self._text()}")

    def finish(self) -> None:
        """Stop the clock of this run, whether or not all rounds were run."""
        if self.task is not None:
            ending = self._text(left=False)
            self.bars.update(self.task, text=lambda: ending)
            self.bars.stop_task(self.task)
        elif self.round < self.rounds:
            self.print_line(f"{self.label}: {self._text()}")
        self.task = None

    def seconds_left(self) -> float | None:
        """Estimate from the pace of the last ten rounds, minus the time since the last."""
        (first, then), (last, recently) = self.recent[0], self.recent[-1]
        if last == first:
            return None
        left = (self.rounds - last) * (recently - then) / (last - first)
        return max(left - (self.clock() - recently), 0.0)

    def _text(self, *, left: bool = True) -> str:
        """The state in one line; shorter next to a bar, to fit 80 columns."""
        accuracy, elapsed = ("", "") if self.console.is_terminal else ("accuracy ", " elapsed")
        parts = [f"round {self.round}/{self.rounds}"]
        if self.accuracy is not None:
            parts.append(accuracy + percent(self.accuracy))
        parts += [f"{name} {number_text(value)}" for name, value in self.own.items()]
        parts.append(_clock_text(self.clock() - self.began) + elapsed)
        remaining = self.seconds_left()
        if left and remaining is not None and self.round < self.rounds:
            parts.append(f"{_clock_text(remaining)} left")
        return ", ".join(parts)


class StudyProgress(ProgressDisplay):
    """One bar for several runs; in a log file, lines at start and end and every 30 s.

    `costs` are the expected costs of the runs, in any unit. The time left is estimated from the
    cost that this process has done, without the runs of an earlier process.
    """

    def __init__(
        self,
        costs: Sequence[float],
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # No refresh thread: the next run forks its workers while the bar is shown.
        super().__init__(console, clock, ticking=False)
        self.costs = list(costs)
        self.bars.head = self._now
        self.task: TaskID | None = None
        self.number, self.title, self.detail = 0, "", ""
        self.share = 0.0  # of the current run that is done
        self.worked = 0.0  # cost that was done here
        self.began = self.run_began = self.changed = self.said = self.clock()

    def start(self, label: str, number: int, count: int, cost: float, *, done: float = 0.0) -> None:
        """Begin run `number` of `count`, of which an earlier process did the share `done`."""
        self.title, self.detail = f"run {number} of {count}: {label}", ""
        self.number, self.share, self.costs[number - 1] = number, done, cost
        self.run_began = self.changed = self.clock()
        if self.console.is_terminal:
            if self.task is None:
                self.task = self.bars.add_task("all runs", total=1.0, text=self._state)
            self.bars.update(self.task, completed=self.share_of_all(), refresh=True)
        else:
            self._note(self._now())

    def advance(self, share: float, detail: str) -> None:
        """Report the share of the run that is done, and its state in a few words."""
        self.worked += (share - self.share) * self.costs[self.number - 1]
        self.share, self.detail = share, detail
        self.changed = self.clock()
        if self.task is not None:
            self.bars.update(self.task, completed=self.share_of_all(), refresh=True)
        elif self.changed - self.said >= LOG_INTERVAL:
            self._note(f"{self._now()}; {self._state()}")

    def finish(self) -> None:
        """Report the end of the run, which may be earlier than expected."""
        self.share = 1.0
        ending = f"{self._now()}, ended after {_clock_text(self.clock() - self.run_began)}"
        if self.task is None:
            self._note(f"{ending}; {self._state()}")
        else:
            self.print_line(ending)
            self.bars.update(self.task, completed=self.share_of_all(), refresh=True)

    def share_of_all(self) -> float:
        total = sum(self.costs)
        return 1 - self._cost_left() / total if total > 0 else 0.0

    def seconds_left(self) -> float | None:
        """Estimate from the pace of this process, minus the time since the last report."""
        if self.worked <= 0 or self.changed <= self.began:
            return None
        left = self._cost_left() * (self.changed - self.began) / self.worked
        return max(left - (self.clock() - self.changed), 0.0)

    def _cost_left(self) -> float:
        after = sum(self.costs[self.number :])
        return after + (1 - self.share) * self.costs[self.number - 1] if self.number else after

    def _now(self) -> str:
        return f"{self.title}, {self.detail}" if self.detail else self.title

    def _state(self) -> str:
        elapsed = f"{_clock_text(self.clock() - self.began)} elapsed"
        parts = [f"{math.floor(100 * self.share_of_all() + 1e-9)} %", elapsed]
        left = self.seconds_left()
        if left is not None and self._cost_left() > 0:
            parts.append(f"{_clock_text(left)} left")
        return ", ".join(parts)

    def _note(self, line: str) -> None:
        self.said = self.clock()
        self.print_line(line)


def _clock_text(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _place(value: float, bounds: tuple[float, float], count: int) -> int:
    """The index of a value among `count` cells between the two bounds."""
    low, high = bounds
    share = (value - low) / (high - low) if high > low else 0.0
    return min(max(round(share * (count - 1)), 0), count - 1)


def _row(value: float, low: float, high: float, height: int) -> int:
    return (4 * height - 1 - _place(value, (low, high), 4 * height)) // 4


def axis_range(values: Sequence[float], height: int) -> tuple[float, float, float]:
    """Rounded bounds of the accuracy axis, and the step of its ticks, at least two rows apart."""
    narrow = 0.5 * max(values) <= min(values) < max(values)
    bottom = min(values) if narrow else 0.0
    span = max(max(values) - bottom, 0.01)
    step = next((s for s in STEPS if span / s <= max(2 * height // 5, 1)), STEPS[-1])
    low = math.floor(bottom / step + 1e-9) * step
    high = math.ceil(max(values) / step - 1e-9) * step
    return low, max(high, low + step), step


def _round_axis(first: float, last: float, width: int, margin: int, *, plain: bool) -> str:
    corner, rule, tick = ("+", "-", "+") if plain else ("└", "─", "┬")
    axis, names = [rule] * width, [" "] * (width + margin + 2)
    span = last - first
    count = max(min(width // 10, 10), 1)
    step = next(
        (s * 10**e for e in range(7) for s in (1, 2, 5) if span / (s * 10**e) <= count), span or 1
    )
    at = math.ceil(first / step) * step
    while at <= last:
        column = _place(at, (first, last), 2 * width) // 2
        axis[column] = tick
        text = f"{at:g}"
        start = min(margin + 2 + column - len(text) // 2, len(names) - len(text))
        names[start : start + len(text)] = text
        at += step
    title = "round"
    below = "".join(names).rstrip()
    return (
        f"{'':>{margin}} {corner}{''.join(axis)}\n{below}\n{title:^{width + 2 * margin}}".rstrip()
        + "\n"
    )


def _legend(
    points: Mapping[str, Sequence[tuple[float, float]]], width: int, *, plain: bool
) -> Text:
    """Marker, label and last value of each curve, the best first, wrapped to `width`."""
    entries = []
    for number, (label, curve) in enumerate(points.items()):
        ending = percent(curve[-1][1]) if curve else "not evaluated"
        entries.append((curve[-1][1] if curve else -1.0, number, f" {label} {ending}"))
    text, used = Text(), 0
    for _, number, entry in sorted(entries, key=lambda entry: -entry[0]):
        gap = "" if used == 0 else "   "
        if used and used + len(gap) + 1 + len(entry) > width:
            gap, used = "\n", 0
        text.append(gap)
        text.append(_marker(number, plain=plain), style=f"bold {_colour(number)}")
        text.append("\n ".join(textwrap.wrap(entry, width - 2, drop_whitespace=False)))
        used += len(gap) + 1 + len(entry)
    return text


def _marker(number: int, *, plain: bool) -> str:
    markers = PLAIN_MARKERS if plain else MARKERS
    return markers[number % len(markers)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
