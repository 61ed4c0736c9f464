"""Weighted means of the vectors of several nodes: pure functions on k vectors of length d.

Every function takes a matrix [k, d] or a sequence of k vectors [d]. They process pieces that fit
into the cache, so that each input is read from memory once. They add in the order of the vectors,
so that the result does not depend on their memory layout.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from peerage.errors import InputError

Vectors = Tensor | Sequence[Tensor]

PIECE = 1 << 16  # entries; a piece of three float32 vectors stays inside a 1 MB cache


def uniform_weights(k: int) -> Tensor:
    """[k] equal weights 1 / k."""
    return torch.full((k,), 1.0 / k)


def data_weights(examples: Sequence[int]) -> Tensor:
    """[k] weights proportional to the numbers of examples; uniform if all are zero.

    >>> data_weights([30, 10]).tolist()
    [0.75, 0.25]
    """
    total = sum(examples)
    if total == 0:
        return uniform_weights(len(examples))
    return torch.tensor([count / total for count in examples])


def metropolis_weights(degrees: Sequence[int], own: int) -> Tensor:
    """Metropolis-Hastings weights: symmetric and doubly stochastic using only the two degrees.

    1 / (1 + max(k_i, k_j)) for a neighbour j of i, and the rest for i, at position `own`. If i
    receives from more nodes than its neighbours, their number replaces k_i. So weights are never
    negative and sum to one, and are 1 / n if each node receives from all n.

    >>> metropolis_weights([1, 2, 1], own=1).tolist()
    [0.3333333432674408, 0.3333333432674408, 0.3333333432674408]
    >>> metropolis_weights([2, 2, 2, 2], own=0).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    k = max(degrees[own], len(degrees) - 1)
    weights = [1.0 / (1 + max(k, degree)) for degree in degrees]
    weights[own] = 0.0
    weights[own] = 1.0 - sum(weights)
    return torch.tensor(weights)


def weighted_mean(x: Vectors, weights: Tensor | Sequence[float]) -> Tensor:
    """[d] the sum of `weights[j] * x[j]`, with weights that should sum to one.

    >>> weighted_mean(torch.tensor([[0.0, 2.0], [4.0, 6.0]]), [0.25, 0.75]).tolist()
    [3.0, 5.0]
    """
    factors = _floats(weights, len(x))
    mean = torch.empty_like(x[0])
    for piece in _pieces(mean):
        total = torch.mul(x[0][piece], factors[0], out=mean[piece])
        for vector, factor in zip(x[1:], factors[1:], strict=True):
            total.add_(vector[piece], alpha=factor)
    return mean


def curvature_weighted(
    x: Vectors, h: Vectors, otherwise: Tensor | Sequence[float], part: slice | None = None
) -> Tensor:
    """[d] every entry of `x` averaged with its own weights, in proportion to the curvature `h`.

    Entry p is sum_j h[j, p] x[j, p] / s_p with s_p = sum_j h[j, p] (Eq. 6-8 of P0). The weights
    `otherwise` are used where s_p is zero, where it leaves the range of float32 (below 1.2e-38 or
    above 3.4e38), and outside of the `part` of the vectors that `h` covers. The scale of `h` does
    not matter: multiplying all of it by a power of two changes no bit.

    >>> x, h = torch.tensor([[1.0, 1.0], [5.0, 5.0]]), torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    >>> curvature_weighted(x, h, otherwise=[0.5, 0.5]).tolist()
    [2.0, 3.0]
    """
    factors = _floats(otherwise, len(x))
    if part is not None and h[0].numel() < x[0].numel():
        mean = weighted_mean(x, factors)
        mean[part] = curvature_weighted([vector[part] for vector in x], h, factors)
        return mean
    total, mean = torch.empty_like(x[0]), torch.empty_like(x[0])
    for piece in _pieces(mean):
        s = total[piece].copy_(h[0][piece])
        m = torch.mul(x[0][piece], s, out=mean[piece])
        for j in range(1, len(x)):
            s.add_(h[j][piece])
            m.addcmul_(x[j][piece], h[j][piece])
        m.div_(s)
    limits = torch.finfo(total.dtype)
    valid = (total >= limits.tiny).logical_and_(total <= limits.max).logical_and_(mean.isfinite())
    rest = torch.nonzero(valid.logical_not_()).squeeze(1)
    if rest.numel():
        mean[rest] = weighted_mean([vector[rest] for vector in x], factors)
    return mean


def check_share(share: float | None) -> None:
    """Raise an InputError if this is no share of one sender."""
    if share is not None and not 0 < share < 1:
        raise InputError(f"max_share must lie between 0 and 1, got {share}")


def capped(h: Sequence[Tensor], share: float | None) -> Sequence[Tensor]:
    """Weights in proportion to `h`, of which none is above `share` of the sum of its entry.

    What exceeds it goes to the others in proportion, or in equal parts if they are zero. With
    1 / share vectors or fewer, this is impossible, and all get the same weight. An entry that is
    zero in all vectors stays so. Without a share, `h` itself is returned.

    >>> h = [torch.tensor([8.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    >>> torch.stack(list(capped(h, 0.5))).squeeze(1).tolist()
    [0.5, 0.25, 0.25]
    """
    if share is None:
        return h
    largest = torch.stack(list(h)).amax(0)
    # Relative to the largest, so that no sum overflows; zeros stay zeros.
    weights = torch.stack(list(h)) / torch.where(largest > 0, largest, 1.0)
    weights = weights / weights.sum(0).clamp(min=1.0)
    if share * len(weights) <= 1:
        return list(torch.where(largest > 0, 1.0 / len(weights), 0.0).repeat(len(weights), 1))
    fixed = torch.zeros_like(weights, dtype=torch.bool)
    for _ in weights:
        over = (weights > share) & ~fixed
        if not over.any():
            break
        fixed |= over
        rest = torch.where(fixed, 0.0, weights)
        rest = torch.where(~fixed & (rest.sum(0) == 0), 1.0, rest)
        left = 1.0 - share * fixed.sum(0)
        scaled = rest * (left / rest.sum(0).clamp(min=torch.finfo(rest.dtype).tiny))
        weights = torch.where(fixed, share, torch.where(fixed.any(0), scaled, weights))
    return list(weights)


def unit(vector: Tensor) -> Tensor:
    """The vector divided by its Euclidean norm; zeros if the norm is zero or not finite.

    >>> unit(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]
    """
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if norm == 0.0 or norm != norm or norm == float("inf"):
        return torch.zeros_like(vector)
    return vector / norm


def _floats(weights: Tensor | Sequence[float], k: int) -> list[float]:
    values = weights.tolist() if isinstance(weights, Tensor) else [float(w) for w in weights]
    if len(values) != k or k == 0:
        raise ValueError(
            f"{len(values)} weights for {k} vectors; their numbers must be equal and above zero"
        )
    return values


def _pieces(vector: Tensor) -> Iterator[slice]:
    for start in range(0, vector.numel(), PIECE):
        yield slice(start, start + PIECE)
