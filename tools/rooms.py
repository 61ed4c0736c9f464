"""The levels of the package, and the drawing of them in docs/how-it-works.md.

    python tools/rooms.py [docs/images/rooms.png]

A module may import modules of lower levels and of its own room, which is a subpackage. Rooms and
modules of one level do not import each other. tests/test_imports.py checks this.
"""

import sys
from pathlib import Path

# Contents of each room, and of each module at the top level, from the lowest level up.
LEVELS: list[dict[str, str]] = [
    {
        "errors": "all errors, with exit codes",
        "randomness": "streams named by seed and purpose",
        "isolation": "one run at a time uses torch's global state",
    },
    {
        "specs": "name:key=value",
        "files": "atomic writes",
        "workers": "forked processes",
        "display": "bars in notebooks",
        "vectors": "a flat vector per model",
        "aggregation": "means of vectors",
    },
    {"requests": "messages, inbox, what an engine is asked for"},
    {
        "state": "kept by a node",
        "privacy": "noise, epsilon",
        "graphs": "topologies, faults, gains",
        "data": "data sets, splits",
        "records": "rows, checkpoints",
        "net.trust": "certificates, keys",
    },
    {
        "work": "training, losses, gradients, curvature, evaluation",
        "models": "networks and initial weights",
        "report": "tables, figures, pages: from records alone",
    },
    {"algorithm": "THE CONTRACT: Algorithm and Node; read this first"},
    {"hub": "algorithms with a server"},
    {"algorithms": "one file per algorithm"},
    {"experiment": "the value, its readers, TOML, catalogue, recipes"},
    {"engine": "world, shards, message routing; serial and pool"},
    {
        "runs": "run, resume, verify, plan, saved runs",
        "net.wire": "headers, payloads, gRPC",
    },
    {"__init__": "import peerage as pg", "net": ""},
    {
        "papers": "studies of P0 to P4",
        "testing": "the laws, for your own algorithms",
        "net.peer": "one real peer",
    },
    {"net.deploy": "networks of peers: up, export, collect"},
    {"ui": "the dashboard in the browser"},
    {"cli": "the command line"},
    {"__main__": "python -m peerage"},
]
HIDDEN = {"net", "__main__"}  # not drawn
SOURCE = Path(__file__).parents[1] / "src" / "peerage"
ROOMS = {
    name for level in LEVELS for name in level if (SOURCE / name.replace(".", "/")).is_dir()
} - HIDDEN


def draw(path: Path) -> None:
    """Draw one row per level, the lowest at the bottom; rooms are filled, modules outlined."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import FancyBboxPatch

    levels = [
        {name: about for name, about in level.items() if name not in HIDDEN} for level in LEVELS
    ]
    levels = [level for level in levels if level]
    fig, axes = plt.subplots(figsize=(12, 0.66 * len(levels) + 0.5))
    width, gap, height = 100.0, 0.7, 0.8
    for number, level in enumerate(levels):
        weights = [max(len(name) * 1.5, len(about)) + 4 for name, about in level.items()]
        room = width - gap * (len(level) - 1)
        left = 0.0
        for (name, about), weight in zip(level.items(), weights, strict=True):
            span = room * weight / sum(weights)
            inside = name in ROOMS
            axes.add_patch(
                FancyBboxPatch(
                    (left, number),
                    span,
                    height,
                    boxstyle="round,pad=0,rounding_size=0.12",
                    mutation_aspect=0.1,
                    facecolor="#dbe7f3" if inside else "white",
                    edgecolor="#4a6f96",
                    linewidth=1.0,
                )
            )
            title = {"__init__": "peerage"}.get(name, name.replace(".", "/"))
            title += "/" if inside else "" if name == "__init__" else ".py"
            middle = left + span / 2
            axes.text(middle, number + 0.53, title, ha="center", va="center", weight="bold", size=9)
            axes.text(middle, number + 0.23, about, ha="center", va="center", size=7.5)
            left += span + gap
    axes.annotate(
        "",
        xy=(-2, 0),
        xytext=(-2, len(levels) - 0.2),
        arrowprops={"arrowstyle": "-|>", "color": "#4a6f96"},
    )
    axes.text(
        -3.2, len(levels) / 2, "imports point down", rotation=90, ha="center", va="center", size=9
    )
    axes.set_xlim(-5, width + 0.5)
    axes.set_ylim(-0.1, len(levels))
    axes.axis("off")
    fig.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/rooms.png"))
