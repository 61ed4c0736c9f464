"""The phases of a round, whose times are recorded in rows and shown in reports."""

from collections.abc import Iterable

# In the order of a round. A user's own local work may add others: `Compute.phase`.
PHASES = (
    *("train", "curvature", "losses", "synthesis", "compute"),
    *("combine", "exchange", "evaluate", "wait"),  # workers or peers wait for each other
)
OCCASIONAL = ("synthesis",)  # only DESA's; omitted from a row unless it took time
OTHER = "other"  # in reports: the wall time outside all phases


def no_time() -> dict[str, float]:
    """Zero seconds for each phase that every row has."""
    return {phase: 0.0 for phase in PHASES if phase not in OCCASIONAL}


def in_order(phases: Iterable[str]) -> list[str]:
    """Distinct phases in the order of a round, then all others by name.

    >>> in_order(["wait", "my-work", "other", "train", "wait"])
    ['train', 'wait', 'my-work', 'other']
    """
    position = {phase: number for number, phase in enumerate(PHASES)} | {OTHER: len(PHASES) + 1}
    return sorted(set(phases), key=lambda phase: (position.get(phase, len(PHASES)), phase))
