"""Evaluation of models: accuracy and loss on test examples, and distances between nodes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from peerage.vectors import FlatModel
from peerage.work.context import Examples

CHUNK = 500  # examples in one forward pass, at most
PIXELS = 100_000  # in one forward pass: larger results of a convolution are slow, as new memory is
FIXED_POINT = 2.0**36  # entries are summed as integers of this unit, so that order does not matter


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float


# A metric of a user's own: a function of true and predicted classes, [N] integers each.
OwnMetrics = Mapping[str, Callable[[NDArray[Any], NDArray[Any]], float]]


def scores(
    model: FlatModel, examples: Examples, own: OwnMetrics, confusion: Tensor | None = None
) -> dict[str, float]:
    """The scores of the loaded model by key, and a user's own metrics by name."""
    predicted: list[Tensor] = []
    found: dict[str, float] = dict(
        vars(score(model, examples, confusion, predicted if own else None))
    )
    if not own:
        return found
    y_true, y_pred = examples.y.numpy(), torch.cat(predicted).numpy()
    for labels in (y_true, y_pred):
        labels.flags.writeable = False  # they are used again
    return found | {name: metric(y_true, y_pred) for name, metric in own.items()}


def score(
    model: FlatModel,
    examples: Examples,
    confusion: Tensor | None = None,
    predictions: list[Tensor] | None = None,
) -> Score:
    """Accuracy and mean cross-entropy of the loaded model.

    Adds every example to `confusion`, [classes, classes] int64, at its label and the predicted one,
    and the predicted classes to `predictions`.
    """
    model.module.eval()
    right, loss = 0, 0.0
    with torch.no_grad():
        for x, y in examples.in_order(chunk_size(examples)):
            logits = model.module(x)
            predicted = logits.argmax(1)
            right += int((predicted == y).sum())
            if predictions is not None:
                predictions.append(predicted)
            if confusion is not None:
                cells = y * len(confusion) + predicted
                confusion += cells.bincount(minlength=confusion.numel()).view_as(confusion)
            loss += float(F.cross_entropy(logits, y, reduction="sum"))
    return Score(right / len(examples), loss / len(examples))


def chunk_size(examples: Examples) -> int:
    """The number of examples in one forward pass: efficient, and small enough for the cache.

    >>> chunk_size(Examples(torch.zeros(1, 3, 32, 32), torch.zeros(1)))
    97
    """
    pixels = examples.x.shape[1:3].numel() if examples.images else 1
    return max(1, min(CHUNK, PIXELS // max(1, pixels)))


class ConsensusSums:
    """Sums for the consensus distance, exact in any order of nodes and workers.

    The distance is the root mean square of |x_i - mean|; its square is mean |x_i|^2 - |mean|^2.
    Each architecture has its own sums.
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


class Deviations:
    """Standard deviations of tensors within and between nodes, one node at a time (P4 Fig. 1).

    sigma_ap is the mean over nodes of the deviation over the entries of a tensor, sigma_an the mean
    over entries of the deviation over nodes; both in double precision, by Welford's recurrence.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self.within: dict[tuple[str, str], float] = {}  # sum over nodes
        self.means: dict[tuple[str, str], Tensor] = {}
        self.squares: dict[tuple[str, str], Tensor] = {}
        self.scratch: dict[tuple[str, str], Tensor] = {}  # reused, because new memory is slow

    def add(self, architecture: str, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            key = (architecture, name)
            if key not in self.counts:
                self.counts[key], self.within[key] = 0, 0.0
                for sums in (self.means, self.squares, self.scratch):
                    sums[key] = torch.zeros_like(tensor, dtype=torch.float64)
            self.counts[key] += 1
            count, x = self.counts[key], self.scratch[key].copy_(tensor)
            self.within[key] += float(x.std(correction=0))
            x -= self.means[key]
            self.means[key].add_(x, alpha=1 / count)
            self.squares[key].addcmul_(x, x, value=(count - 1) / count)

    def layers(self) -> dict[str, dict[str, float]]:
        """`ap` and `an` of every tensor, named with its architecture if there are several."""
        several = len({architecture for architecture, _ in self.counts}) > 1
        return {
            f"{architecture}.{name}" if several else name: {
                "ap": self.within[architecture, name] / count,
                "an": float((self.squares[architecture, name] / count).sqrt().mean()),
            }
            for (architecture, name), count in self.counts.items()
        }


@dataclass(frozen=True)
class Movement:
    """How far a node's parameters moved in a round, by training and by the rest (P4 Fig. 5)."""

    train: float  # norm of the displacement
    combine: float
    total: float
    cosine: float  # between the two displacements; 0 if one of them is zero


def movement(before: Tensor, after: Tensor, trained: Iterable[tuple[Tensor, Tensor]]) -> Movement:
    """Movement from the parameters before and after a round and each training in it."""
    total = after.double() - before.double()
    train = torch.zeros_like(total)
    for start, end in trained:
        train += end.double() - start.double()
    combine = total - train
    norms = float(train.norm()), float(combine.norm())
    product = norms[0] * norms[1]
    cosine = float(train @ combine) / product if product else 0.0
    return Movement(*norms, float(total.norm()), cosine)


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
