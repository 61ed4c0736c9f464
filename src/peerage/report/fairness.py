"""Fairness between clusters: whether models serve all clusters alike (P3).

A confusion matrix counts test examples by label (rows) and predicted label (columns), summed over
the nodes of a cluster. The cluster of a node takes the place of the sensitive attribute. A value
that is not defined is None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil, isfinite
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from peerage.records.rows import Row, RunRecord
from peerage.report.series import Curve, Estimate, estimate

Reduction = Literal["mean", "sum"]  # over classes: P3's code and its numbers; P3's Eq. 1 and 2
Terms = Literal["tpr+fpr", "tpr"]  # P3's code and its numbers; P3's Eq. 2
Place = tuple[int, bool]  # a round, and whether the models were evaluated after the final step

FAIR_WEIGHT = 2 / 3  # of the mean accuracy in P3's tables; its plotting script has 1/3
WORST_SHARE = 0.1


def demographic_parity(a: ArrayLike, b: ArrayLike, reduction: Reduction = "mean") -> float | None:
    """The gap between two clusters in how often each class is predicted (P3, Eq. 1).

    The absolute differences of P(prediction = y) are averaged or summed over the classes y. None if
    a cluster has no test examples.

    >>> demographic_parity([[3, 1], [1, 3]], [[4, 0], [2, 2]])
    0.25
    """
    a, b = _counts(a), _counts(b)
    if not (a.sum() and b.sum()):
        return None
    return _reduced(abs(a.sum(0) / a.sum() - b.sum(0) / b.sum()), reduction)


def equalised_odds(
    a: ArrayLike, b: ArrayLike, reduction: Reduction = "mean", terms: Terms = "tpr+fpr"
) -> float | None:
    """The gap between two clusters in true and false positive rates of the classes (P3, Eq. 2).

    The true positive rate of a class exists only where it has test examples: a class that is absent
    in either cluster is left out of that term. Its false positive rate is compared nonetheless, as
    it concerns the examples of other classes. Each term is averaged or summed over its own classes.
    None if no class is in both clusters.

    >>> equalised_odds([[3, 1], [1, 3]], [[4, 0], [2, 2]])
    0.5
    >>> equalised_odds([[3, 1], [1, 3]], [[4, 0], [2, 2]], terms="tpr")
    0.25
    """
    a, b = _counts(a), _counts(b)
    positives = _gaps(np.diag(a), np.diag(b), a.sum(1), b.sum(1))
    if not len(positives):
        return None
    gap = _reduced(positives, reduction)
    if terms == "tpr":
        return gap
    false_a, false_b = (counts.sum(0) - np.diag(counts) for counts in (a, b))
    negatives = _gaps(false_a, false_b, a.sum() - a.sum(1), b.sum() - b.sum(1))
    return gap + (_reduced(negatives, reduction) if len(negatives) else 0.0)


class OverPairs(NamedTuple):
    """A gap between two clusters, over all pairs of clusters."""

    largest: float | None
    mean: float | None


def over_pairs(
    measure: Callable[[Any, Any], float | None], confusions: Sequence[ArrayLike]
) -> OverPairs:
    """A gap over the pairs of clusters that define it; with two clusters, both values are equal."""
    found = [measure(a, b) for a, b in combinations(confusions, 2)]
    known = [gap for gap in found if gap is not None]
    return OverPairs(max(known), fmean(known)) if known else OverPairs(None, None)


def fair_accuracy(accuracies: Sequence[float], weight: float = FAIR_WEIGHT) -> float:
    """A weighted mean of the clusters' mean accuracy and of 1 minus their largest gap (P3).

    >>> round(fair_accuracy([0.7199, 0.3877]), 4)
    0.5918
    """
    gap = max(accuracies) - min(accuracies)
    return weight * fmean(accuracies) + (1 - weight) * (1 - gap)


def worst_share(values: Sequence[float], share: float = WORST_SHARE) -> float:
    """The mean of the lowest values; their number is rounded up, so there is at least one.

    >>> worst_share([0.75, 0.25, 1.0, 0.5], share=0.5)
    0.375
    """
    count = max(1, ceil(share * len(values) - 1e-9))  # 0.1 times 70 is a bit more than 7
    return fmean(sorted(values)[:count])


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 if all values are equal, 1/n if all but one are 0 (Jain et al., 1984).

    >>> jain([0.5, 0.5]), jain([1.0, 0.0])
    (1.0, 0.5)
    """
    squares = fmean(value * value for value in values)
    return fmean(values) ** 2 / squares if squares else 1.0


@dataclass(frozen=True)
class Fairness:
    """How alike the clusters, and the nodes, are served by the models of one evaluation.

    What compares clusters is None unless all of them were evaluated, and what compares nodes is
    None if the accuracy of any is not finite. A model of the hub counts for every node.
    """

    round: int
    final: bool  # after the step that follows the last round
    accuracies: tuple[float | None, ...]  # mean over the nodes of each cluster
    sizes: tuple[int, ...]  # evaluated nodes of each cluster
    accuracy: float | None  # mean over all nodes
    parity: float | None  # the largest over the pairs of clusters
    parity_mean: float | None
    odds: float | None
    odds_mean: float | None
    fair_accuracy: float | None
    worst_node: float | None
    worst_tenth: float | None  # mean accuracy of the worst tenth of all nodes
    jain: float | None  # of the nodes' accuracies

    @property
    def place(self) -> Place:
        return self.round, self.final

    @property
    def gap(self) -> float | None:
        """The difference between the best and the worst cluster."""
        known = _all_known(self.accuracies)
        return max(known) - min(known) if known else None


def fairness_over_rounds(record: RunRecord, weight: float = FAIR_WEIGHT) -> list[Fairness]:
    """The fairness of every evaluation in order; empty for fewer than two clusters.

    The evaluation after the final step is the last. `weight` is that of the fair accuracy.
    """
    clusters = len(record.setup.get("clusters", {}).get("sizes", ()))
    if clusters < 2:
        return []
    groups: dict[Place, dict[int, Row]] = {}
    for row in record.groups:
        if row["by"] == "cluster":
            groups.setdefault(_place(row), {})[int(row["group"])] = row
    nodes = _accuracies_of_nodes(record)
    return [
        _fairness(place, groups[place], nodes.get(place, {}), clusters, weight)
        for place in sorted(groups)
    ]


def highest_fair_accuracy(evaluations: Sequence[Fairness]) -> tuple[int, float] | None:
    """The round and the value of the highest fair accuracy; None without any."""
    known = [(e.round, e.fair_accuracy) for e in evaluations if e.fair_accuracy is not None]
    return max(known, key=lambda point: point[1], default=None)


@dataclass(frozen=True)
class FairnessOverSeeds:
    """The fairness of one method over its seeds, in the last evaluation that all seeds have.

    P3's tables compute the fair accuracy from the seeds' mean accuracies (`of_means`). The mean of
    the seeds' fair accuracies can be lower, as clusters that are ahead in turn have no mean gap.
    """

    seeds: int
    accuracies: tuple[Estimate, ...]  # of each cluster
    accuracy: Estimate
    parity: Estimate
    parity_mean: Estimate
    parity_by_seed: tuple[float | None, ...]
    odds: Estimate
    odds_mean: Estimate
    odds_by_seed: tuple[float | None, ...]
    worst_node: Estimate
    worst_tenth: Estimate
    jain: Estimate
    fair_accuracy: Estimate
    highest: Estimate  # fair accuracy of each seed in any evaluation
    fair_accuracy_of_means: float | None
    highest_of_means: tuple[int, float] | None  # its round and value


def fairness_over_seeds(
    records: Sequence[RunRecord], weight: float = FAIR_WEIGHT
) -> FairnessOverSeeds | None:
    """The fairness of runs that differ only in their seed; None without clusters.

    It is also None if the seeds have no evaluation in common.
    """
    by_seed = [{e.place: e for e in fairness_over_rounds(r, weight)} for r in records]
    places = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    if not places:
        return None
    last = [evaluations[places[-1]] for evaluations in by_seed]
    peaks = [highest_fair_accuracy(list(evaluations.values())) for evaluations in by_seed]
    of_means = {
        place: _fair([one.mean for one in _by_cluster([e[place] for e in by_seed])], weight)
        for place in places
    }
    curve = [(place[0], value) for place, value in of_means.items() if value is not None]
    return FairnessOverSeeds(
        seeds=len(records),
        accuracies=_by_cluster(last),
        accuracy=estimate([e.accuracy for e in last]),
        parity=estimate([e.parity for e in last]),
        parity_mean=estimate([e.parity_mean for e in last]),
        parity_by_seed=tuple(e.parity for e in last),
        odds=estimate([e.odds for e in last]),
        odds_mean=estimate([e.odds_mean for e in last]),
        odds_by_seed=tuple(e.odds for e in last),
        worst_node=estimate([e.worst_node for e in last]),
        worst_tenth=estimate([e.worst_tenth for e in last]),
        jain=estimate([e.jain for e in last]),
        fair_accuracy=estimate([e.fair_accuracy for e in last]),
        highest=estimate([None if peak is None else peak[1] for peak in peaks]),
        fair_accuracy_of_means=of_means[places[-1]],
        highest_of_means=max(curve, key=lambda point: point[1], default=None),
    )


def fair_accuracy_curve(records: Sequence[RunRecord], weight: float = FAIR_WEIGHT) -> Curve:
    """The fair accuracy over the rounds, from the seeds' mean accuracies, as in P3's figures.

    The deviations are those of the seeds' fair accuracies. Of a round with several evaluations, the
    last counts.
    """
    by_seed = [
        {e.round: e for e in fairness_over_rounds(r, weight) if e.fair_accuracy is not None}
        for r in records
    ]
    rounds = sorted(set.intersection(*map(set, by_seed))) if by_seed else []
    means, stds = [], []
    for round in rounds:
        found = [evaluations[round] for evaluations in by_seed]
        value = _fair([one.mean for one in _by_cluster(found)], weight)
        assert value is not None  # every cluster of every seed has an accuracy
        means.append(value)
        stds.append(estimate([e.fair_accuracy for e in found]).std or 0.0)
    return Curve(rounds, means, stds)


def common_target(methods: Sequence[Sequence[RunRecord]]) -> float | None:
    """The lowest final accuracy of any method, each a mean over seeds: all methods reach it."""
    curves = [_mean_accuracies(records) for records in methods]
    finals = [list(curve.values())[-1] for curve in curves if curve]
    return min(finals, default=None)


def bytes_to(records: Sequence[RunRecord], target: float) -> float | None:
    """Bytes that all nodes sent until their mean accuracy first reached the target, over seeds.

    The accuracy of each evaluation is averaged over the seeds first, and so are the bytes. None if
    the target was never reached.
    """
    for place, accuracy in _mean_accuracies(records).items():
        if accuracy >= target:
            rows = [row for r in records for row in r.network if _place(row) == place]
            return fmean(row["bytes_total"] for row in rows)
    return None


def _fairness(
    place: Place,
    rows: Mapping[int, Row],
    nodes: Mapping[int, float | None],
    clusters: int,
    weight: float,
) -> Fairness:
    """The fairness of one evaluation from the rows of the clusters, and the nodes' accuracies."""
    accuracies = tuple(_finite(rows.get(c, {}).get("accuracy")) for c in range(clusters))
    sizes = tuple(int(rows[c]["nodes"]) if c in rows else 0 for c in range(clusters))
    if not nodes:  # the hub has the only model, which every node of a cluster would use
        served = [value for value, n in zip(accuracies, sizes, strict=True) for _ in range(n)]
        nodes = dict(enumerate(served))
    known = _all_known(list(nodes.values()))
    confusions = [rows[c]["confusion"] for c in range(clusters) if c in rows]
    complete = len(confusions) == clusters
    parity = over_pairs(demographic_parity, confusions) if complete else OverPairs(None, None)
    odds = over_pairs(equalised_odds, confusions) if complete else OverPairs(None, None)
    return Fairness(
        *place,
        accuracies,
        sizes,
        accuracy=fmean(known) if known else None,
        parity=parity.largest,
        parity_mean=parity.mean,
        odds=odds.largest,
        odds_mean=odds.mean,
        fair_accuracy=_fair(accuracies, weight),
        worst_node=min(known, default=None),
        worst_tenth=worst_share(known) if known else None,
        jain=jain(known) if known else None,
    )


def _fair(accuracies: Sequence[float | None], weight: float) -> float | None:
    known = _all_known(accuracies)
    return fair_accuracy(known, weight) if known else None


def _by_cluster(evaluations: Sequence[Fairness]) -> tuple[Estimate, ...]:
    columns = zip(*(e.accuracies for e in evaluations), strict=True)
    return tuple(estimate(column) for column in columns)


def _accuracies_of_nodes(record: RunRecord) -> dict[Place, dict[int, float | None]]:
    """The accuracy of each node of a cluster, by evaluation; a hub belongs to none."""
    clusters = record.setup["clusters"].get("nodes", [])
    found: dict[Place, dict[int, float | None]] = {}
    for row in record.nodes:
        if row["node"] < len(clusters) and clusters[row["node"]] is not None:
            found.setdefault(_place(row), {})[row["node"]] = _finite(row.get("accuracy"))
    return found


def _mean_accuracies(records: Sequence[RunRecord]) -> dict[Place, float]:
    """The mean accuracy over nodes and seeds in each evaluation that all seeds have, in order."""
    curves = [
        {
            _place(row): row["accuracy"]
            for row in r.network
            if _finite(row.get("accuracy")) is not None
        }
        for r in records
    ]
    places = sorted(set.intersection(*map(set, curves))) if curves else []
    return {place: fmean(curve[place] for curve in curves) for place in places}


def _counts(confusion: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(confusion, dtype=np.float64)


def _gaps(
    hits_a: NDArray[np.float64],
    hits_b: NDArray[np.float64],
    of_a: NDArray[np.float64],
    of_b: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The differences of two rates, for the classes that have both."""
    both = (of_a > 0) & (of_b > 0)
    gaps: NDArray[np.float64] = abs(hits_a[both] / of_a[both] - hits_b[both] / of_b[both])
    return gaps


def _reduced(gaps: NDArray[np.float64], reduction: Reduction) -> float:
    return float(gaps.mean() if reduction == "mean" else gaps.sum())


def _place(row: Row) -> Place:
    return row["round"], bool(row.get("final"))


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and isfinite(value) else None


def _all_known(values: Sequence[float | None]) -> list[float]:
    """The values, or none of them if any is unknown."""
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else []
