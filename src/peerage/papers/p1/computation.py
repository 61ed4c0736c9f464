"""How much the nodes of a run compute, and how much they send.

The unit of computation is one training example that passes forward and backward through one model,
whatever the size of the model. A pass that is only forward counts as a third, because a backward
pass costs about two forward ones. Tests are not counted.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from peerage.algorithms.dfml_neighbours import DFMLNeighbours
from peerage.algorithms.rotating_hub import RotatingHub
from peerage.errors import PeerageError
from peerage.experiment.experiment import Experiment
from peerage.papers.calibrate import mean_cost

UNIT = "examples forward and backward"
FORWARD = 1 / 3  # of a pass forward and backward


def examples_per_round(experiment: Experiment, setup: Mapping[str, Any]) -> float:
    """The expected number of examples of all nodes in a round: local training and all else.

    `setup` is that of the run. If clients differ in their numbers of examples, so do rounds, by
    who takes part; this is the mean over all choices.
    """
    algorithm, work = experiment.algorithm, experiment.work
    held: int = sum(setup["examples"])
    degrees = degrees_of(setup)
    share = algorithm.participation(experiment.nodes)
    cost = mean_cost(experiment)
    if isinstance(algorithm, RotatingHub):  # an aggregator with few neighbours has few senders
        senders = fmean(min(algorithm.num_senders(experiment.nodes), k) for k in degrees)
        share = (1 + senders) / experiment.nodes
    if isinstance(algorithm, DFMLNeighbours):  # the models of neighbours learn, or only predict
        share_of_each = 1.0 if algorithm.keep == "mean" else FORWARD
        passes = algorithm.epochs_mutual * (1 + share_of_each * fmean(degrees))
    elif cost is not None:
        passes = cost.passes + FORWARD * cost.forward
    else:
        raise PeerageError(f"{type(algorithm).__name__} states no cost; add a method cost")
    if work.steps is not None:
        return share * (experiment.nodes * work.steps * work.batch_size + passes * held)
    return share * ((work.epochs or 1) + passes) * held


def degrees_of(setup: Mapping[str, Any]) -> list[int]:
    """The number of neighbours of every node."""
    counts = [0] * len(setup["examples"])
    for edge in setup["edges"]:
        for node in edge:
            if node < len(counts):  # not a hub
                counts[node] += 1
    return counts
