"""Ratios of two measurements that alternate, as the load of a shared machine changes."""

import statistics
from collections.abc import Callable, Sequence


def alternate(
    first: Callable[[], float], second: Callable[[], float], repeats: int
) -> dict[str, float]:
    """The median ratio second / first of consecutive measurements, and the median of each."""
    return summary([(first(), second()) for _ in range(repeats)])


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """The median ratio b / a of pairs (a, b), its spread, and the medians."""
    ratios = [b / a for a, b in pairs]
    return {
        "ratio": statistics.median(ratios),
        "spread": max(ratios) - min(ratios),
        "base": statistics.median(a for a, _ in pairs),
        "measured": statistics.median(b for _, b in pairs),
    }
