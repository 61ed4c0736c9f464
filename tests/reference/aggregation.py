"""Slow and obvious versions of `peerage.aggregation`: one entry at a time, in double precision."""

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def weighted_mean(x: Matrix, weights: Sequence[float]) -> list[float]:
    return [
        sum(weight * row[p] for weight, row in zip(weights, x, strict=True))
        for p in range(len(x[0]))
    ]


def curvature_weighted(x: Matrix, h: Matrix, otherwise: Sequence[float]) -> list[float]:
    """P_j = H_j / s where s, the sum of the H_j, is not zero; else `otherwise`."""
    result = []
    for p in range(len(x[0])):
        s = sum(row[p] for row in h)
        weights = [row[p] / s for row in h] if s > 0 else otherwise
        result.append(sum(w * row[p] for w, row in zip(weights, x, strict=True)))
    return result


def unit(vector: Sequence[float]) -> list[float]:
    norm = sum(value * value for value in vector) ** 0.5
    return [value / norm if norm else 0.0 for value in vector]


def metropolis(degrees: Sequence[int], own: int) -> list[float]:
    received = len(degrees) - 1
    weights = {
        j: 1 / (1 + max(degree, degrees[own], received))
        for j, degree in enumerate(degrees)
        if j != own
    }
    return [weights[j] if j != own else 1 - sum(weights.values()) for j in range(len(degrees))]
