"""Phases of a round: the names under which rows record time and reports show it."""

from collections.abc import Iterable

# In the order of a round. Local work of the user's own may add others: `Compute.phase`.
PHASES = (
    *("train", "curvature", "losses", "synthesis", "compute"),
    *("combine", "exchange", "evaluate", "wait"),  # workers or peers wait for each other
)
OCCASIONAL = ("synthesis",)  # DESA's alone: a row leaves it out unless it took time
OTHER = "other"  # in reports: the wall time that no phase has recorded


def no_time() -> dict[str, float]:
    """Seconds of the phases that every row has, before anything was done."""
    return {phase: 0.0 for phase in PHASES if phase not in OCCASIONAL}


def in_order(phases: Iterable[str]) -> list[str]:
    """Phases without repetition, in the order of a round, then all others by name.

    >>> in_order(["wait", "my-work", "other", "train", "wait"])
    ['train', 'wait', 'my-work', 'other']
    """
    place = {phase: number for number, phase in enumerate(PHASES)} | {OTHER: len(PHASES) + 1}
    return sorted(set(phases), key=lambda phase: (place.get(phase, len(PHASES)), phase))
