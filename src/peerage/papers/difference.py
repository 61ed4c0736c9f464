"""Panels that show curves which lie on each other: their differences to the first of them."""

from dataclasses import replace

from peerage.papers.charts import ACCURACY, Line, Plot

START = 0.1  # share of the rounds left out: early differences are large, and visible without this
POINTS = 100.0  # of accuracy


def difference(panel: Plot) -> Plot:
    """All lines of a panel minus its first, from a tenth of the rounds on.

    Only rounds that both have count. There are no bands: the deviation of a difference does not
    follow from the deviations of its two parts.

    >>> lines = (Line("FedAvg", [1, 2], [0.5, 0.75]), Line("HWA", [1, 2], [0.5, 1.0]))
    >>> found = difference(Plot("MNIST", lines, ylabel="test accuracy"))
    >>> found.title, found.ylabel, found.lines[1].y
    ('MNIST: difference to FedAvg', 'points of test accuracy', [0.0, 25.0])
    """
    reference = panel.lines[0]
    base = dict(zip(reference.x, reference.y, strict=True))
    first = START * max(reference.x, default=0.0)
    accuracy = panel.ylabel == ACCURACY
    factor = POINTS if accuracy else 1.0

    def minus_base(line: Line) -> Line:
        points = zip(line.x, line.y, strict=True)
        kept = [(x, factor * (y - base[x])) for x, y in points if x >= first and x in base]
        return replace(line, x=[x for x, _ in kept], y=[y for _, y in kept], spread=())

    return replace(
        panel,
        title=f"{panel.title}: difference to {reference.label}",
        lines=tuple(minus_base(line) for line in panel.lines),
        ylabel=f"points of {panel.ylabel}" if accuracy else panel.ylabel,
    )
