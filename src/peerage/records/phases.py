"""Phases of a round: the names under which rows record time and reports show it."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    name: str  # the key in `seconds` of a row, and the label in reports
    always: bool = True  # whether a row has it even if it took no time


# In the order of a round. Local work of the user's own may add others: `Compute.phase`.
PHASES = (
    Phase("train"),
    Phase("curvature"),
    Phase("losses"),
    Phase("synthesis", always=False),  # DESA alone
    Phase("compute"),
    Phase("combine"),
    Phase("exchange"),
    Phase("evaluate"),
    Phase("wait"),  # workers or peers for each other
)
OTHER = "other"  # in reports: the wall time that no phase has recorded


def no_time() -> dict[str, float]:
    """Seconds of the phases that every row has, before anything was done."""
    return {phase.name: 0.0 for phase in PHASES if phase.always}


def in_order(names: Iterable[str]) -> list[str]:
    """Names of phases without repetition, in the order of a round, then all others by name.

    >>> in_order(["wait", "my-work", "other", "train", "wait"])
    ['train', 'wait', 'my-work', 'other']
    """
    place = {phase.name: number for number, phase in enumerate(PHASES)} | {OTHER: len(PHASES) + 1}
    return sorted(set(names), key=lambda name: (place.get(name, len(PHASES)), name))
