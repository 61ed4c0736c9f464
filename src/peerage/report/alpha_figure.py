"""The accuracy over the rounds, with alpha of mutual learning underneath (P1)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from peerage.records.rows import RunRecord
from peerage.report.figures import SIZE, blank_figure, draw_curves, styled_runs

ALPHA = "alpha"  # the name of the note


def has_alpha(record: RunRecord) -> bool:
    return bool(record.notes(ALPHA))


def accuracy_over_alpha(records: Sequence[RunRecord]) -> Figure:
    """Accuracies of all runs, and below them alpha, which is the same on all nodes of a run."""
    width, height = SIZE
    with blank_figure(width, 1.25 * height) as figure:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        draw_curves(above, records, "accuracy")
        above.set_xlabel("")
        for run in styled_runs(records):
            notes = run.record.notes(ALPHA)
            if notes:
                below.plot(*notes[min(notes)], color=run.colour, linestyle=run.dash)
        below.set(xlabel="round", ylabel="alpha", ylim=(-0.05, 1.05), yticks=(0, 0.5, 1))
    return figure
