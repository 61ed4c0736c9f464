"""Groups of nodes that are reported separately: clusters, and nodes of one architecture."""

from typing import NamedTuple

import torch

from peerage.engine.world import World
from peerage.vectors import FlatModel
from peerage.work.evaluation import scores


class Tested(NamedTuple):
    """The result of a model on one test set."""

    metrics: dict[str, float]  # by key
    confusion: list[list[int]]  # examples by label and predicted label


def grouped_by(world: World) -> tuple[str, ...]:
    """What the nodes are grouped by: `cluster`, `architecture`, both or nothing."""
    kinds = {"cluster": bool(world.clusters), "architecture": len(world.experiment.model) > 1}
    return tuple(kind for kind, used in kinds.items() if used)


def evaluate(
    world: World, model: FlatModel, node: int
) -> tuple[dict[str, float], dict[int, Tested]]:
    """The scores of a node's loaded model, and those on each test set if there are groups.

    A node that serves all clusters is evaluated on the test set of each. Its score is the mean over
    all nodes, as if each of them had its model.
    """
    if not grouped_by(world):
        return scores(model, world.test, world.own_metrics), {}
    tested = {}
    for cluster, examples in world.tests_of(node).items():
        confusion = torch.zeros(len(world.classes), len(world.classes), dtype=torch.int64)
        metrics = scores(model, examples, world.own_metrics, confusion)
        tested[cluster] = Tested(metrics, confusion.tolist())
    if len(tested) == 1:
        return dict(next(iter(tested.values())).metrics), tested
    assert world.experiment.clusters is not None
    sizes = world.experiment.clusters.sizes
    means = {
        key: sum(sizes[c] * found.metrics[key] for c, found in tested.items()) / sum(sizes)
        for key in next(iter(tested.values())).metrics
    }
    return means, tested
