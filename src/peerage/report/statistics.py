"""Statistics over seeds: mean, sample deviation, and significance of differences."""

from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.special import fdtrc

LEVEL = 0.05  # p-values below it are significant


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """The sample standard deviation, with n - 1; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def anova(groups: Sequence[Sequence[float]]) -> float | None:
    """The p-value of a one-way analysis of variance: were all groups drawn from one distribution?

    F is the variance between k groups, with k - 1 degrees of freedom, over that within them, with
    N - k. None with fewer than two groups, or two values in each. If no group varies, F is infinite
    and p is 0; None if all values are the same.

    >>> round(anova([[1, 2, 3], [2, 3, 4]]), 3)
    0.288
    """
    if len(groups) < 2 or any(len(group) < 2 for group in groups):
        return None
    kinds = [set(group) for group in groups]
    if all(len(kind) == 1 for kind in kinds):  # an exact test; sums of squares would be rounded
        return None if len(set.union(*kinds)) == 1 else 0.0
    count = sum(map(len, groups))
    middle = fmean(value for group in groups for value in group)
    between = sum(len(group) * (fmean(group) - middle) ** 2 for group in groups)
    within = sum((value - fmean(group)) ** 2 for group in groups for value in group)
    free = len(groups) - 1, count - len(groups)
    return float(fdtrc(*free, (between / free[0]) / (within / free[1])))


def significant(p: float | None) -> bool:
    """Whether a p-value is known and below the level."""
    return p is not None and p < LEVEL
