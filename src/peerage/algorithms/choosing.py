"""The choice of the candidate with the lowest loss, which several algorithms share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peerage.algorithm import Node


def lowest(losses: Tensor, rng: torch.Generator) -> tuple[int, list[float]]:
    """The position of the lowest of the losses [k], and all of them, infinite where not a number.

    Ties are broken at random.

    >>> lowest(torch.tensor([0.5, float("nan"), 0.25]), torch.Generator())
    (2, [0.5, inf, 0.25])
    """
    losses = losses.nan_to_num(nan=torch.inf, posinf=torch.inf)
    best = torch.nonzero(losses == losses.min()).flatten()
    place = torch.randint(len(best), (1,), generator=rng) if len(best) > 1 else 0
    return int(best[place]), losses.tolist()


def note_choice(node: Node[Any], index: int, losses: Sequence[float]) -> None:
    """Record which head, or which model, a node trains, and the losses of all that it tried."""
    node.note(head=index, **{f"head_loss_{j}": loss for j, loss in enumerate(losses)})
