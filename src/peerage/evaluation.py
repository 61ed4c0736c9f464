"""How good models are: accuracy and loss on held-out examples, and how far nodes are apart."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peerage.local import Examples
from peerage.vectors import FlatModel

CHUNK = (
    500  # examples in one forward pass: large enough to be efficient, small enough for the cache
)
FIXED_POINT = 2.0**36  # entries are summed as integers of this unit, so that order cannot matter


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float


def score(model: FlatModel, examples: Examples) -> Score:
    """Accuracy and mean cross-entropy of the model as it is loaded."""
    model.module.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for x, y in examples.in_order(CHUNK):
            logits = model.module(x)
            right += int((logits.argmax(1) == y).sum())
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return Score(right / len(examples), loss / len(examples))


class Spread:
    """The sums that the consensus distance needs, exact in any order of nodes and workers.

    The distance is the root mean square of |x_i - mean|, which is mean |x_i|^2 - |mean|^2. Nodes of
    different architectures have nothing to agree on and are kept apart.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}  # architecture -> [d] int64
        self.squares: dict[str, dict[int, float]] = {}  # architecture -> node -> |x|^2

    def add(self, node: int, architecture: str, params: Tensor) -> None:
        x = params.double()
        fixed = (x * FIXED_POINT).round_().long()
        if architecture in self.sums:
            self.sums[architecture] += fixed
        else:
            self.sums[architecture] = fixed
        self.squares.setdefault(architecture, {})[node] = float(x.square().sum())


def consensus_distance(
    sums: Iterable[tuple[str, Tensor]], squares: Mapping[str, Mapping[int, float]]
) -> float:
    """The root mean square distance of nodes from the mean of their architecture."""
    totals: dict[str, Tensor] = {}
    for architecture, part in sums:
        totals[architecture] = totals[architecture] + part if architecture in totals else part
    excess, nodes = 0.0, 0
    for architecture, total in sorted(totals.items()):
        norms = [squares[architecture][node] for node in sorted(squares[architecture])]
        mean = total.double() / (FIXED_POINT * len(norms))
        excess += max(0.0, sum(norms) - len(norms) * float(mean.square().sum()))
        nodes += len(norms)
    return float((excess / max(nodes, 1)) ** 0.5)
