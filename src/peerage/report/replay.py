"""A moving picture of a run: the network, with the accuracy of every node, round by round."""

import io
from pathlib import Path
from typing import Any

from PIL import Image

from peerage.errors import InputError
from peerage.files import write_bytes
from peerage.records.rows import RunRecord
from peerage.report.figures import (
    PERCENT,
    draw_graph,
    examples_of,
    literal,
    new_figure,
    positions,
)
from peerage.report.series import thinned
from peerage.report.tables import percent

FRAMES = 100  # at most; of more evaluated rounds, some are shown
SECONDS = 8.0  # of a whole replay
SHORTEST, LONGEST = 60, 500  # milliseconds of a frame
REST = 2000  # milliseconds of the last frame, before the replay begins again
SIDE = 5.0  # inches
COLOURS = 128  # of a frame


def write_replay(record: RunRecord, out: Path) -> int:
    """Write a GIF of the evaluated rounds; returns the number of its frames."""
    if Path(out).suffix.lower() != ".gif":
        raise InputError(f"a replay is a GIF, got {Path(out).name!r}; use a name that ends in .gif")
    rounds = thinned(record.curve("accuracy")[0], FRAMES)
    if not rounds or not record.nodes:
        raise InputError("a replay needs an evaluated round; wait for the first one")
    values = {round: record.node_values("accuracy", round) for round in rounds}
    known = [value for of_round in values.values() for value in of_round.values()]
    places = positions(len(record.setup["parameters"]), record.setup["edges"])
    bounds = (min(known), max(known))
    pictures = [_frame(record, round, values[round], places, bounds) for round in rounds]
    each = int(min(max(1000 * SECONDS / len(rounds), SHORTEST), LONGEST))
    file = io.BytesIO()
    pictures[0].save(
        file,
        "GIF",
        save_all=True,
        append_images=pictures[1:],
        duration=[each] * (len(rounds) - 1) + [REST],
        loop=0,
    )
    write_bytes(Path(out), file.getbuffer(), "write the replay again")
    return len(pictures)


def _frame(
    record: RunRecord,
    round: int,
    values: dict[int, float],
    places: dict[int, Any],
    bounds: tuple[float, float],
) -> Image.Image:
    with new_figure(SIDE, SIDE) as (figure, axes):
        edges = record.setup["edges"]
        dots = draw_graph(axes, places, edges, values, bounds, examples_of(record))
        axes.axis("off")
        mean = dict(zip(*record.curve("accuracy"), strict=True))[round]
        axes.set_title(f"{literal(record.label)}: round {round}, mean accuracy {percent(mean)}")
        figure.colorbar(dots, ax=axes, orientation="horizontal", format=PERCENT, shrink=0.6)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return Image.open(content).convert("RGB").quantize(COLOURS)
