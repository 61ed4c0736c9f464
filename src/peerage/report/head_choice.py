"""Which head each node chose, and when the nodes of every cluster agreed on one of their own (P3).

FACADE notes the head that a node trained in an evaluated round, and the loss of every head. While
heads are tied, there is no choice and no note.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from peerage.records.rows import RunRecord

HEAD, LOSS = "head", re.compile(r"head_loss_(\d+)")  # names of notes

Choices = dict[int, dict[int, int]]  # round -> node -> head
Histogram = list[list[int]]  # nodes by cluster and head


@dataclass(frozen=True)
class Settlement:
    """From which evaluated round on heads and clusters correspond until the end; None: never.

    With more heads than clusters, a cluster may use several heads and never settle. It is then
    enough that the clusters are separated.
    """

    settled: int | None  # each cluster has one head, and no two clusters share one
    separated: int | None  # no head is shared by two clusters


def head_choices(record: RunRecord) -> Choices:
    """The head of each node in each evaluated round with a choice, in order."""
    found: Choices = {}
    for node, (rounds, heads) in record.notes(HEAD).items():
        for round, head in zip(rounds, heads, strict=True):
            found.setdefault(round, {})[node] = int(head)
    return {round: found[round] for round in sorted(found)}


def number_of_heads(record: RunRecord) -> int:
    """The number of heads that were tried or chosen; 0 without notes about heads."""
    notes = [row.get("notes", {}) for row in record.nodes]
    tried = [int(found[1]) for note in notes for name in note if (found := LOSS.fullmatch(name))]
    chosen = [int(note[HEAD]) for note in notes if note.get(HEAD) is not None]
    return max([*tried, *chosen], default=-1) + 1


def clusters_of_nodes(record: RunRecord) -> dict[int, int]:
    """The cluster of each node; empty without clusters. A hub is in none."""
    nodes = record.setup.get("clusters", {}).get("nodes", [])
    return {node: cluster for node, cluster in enumerate(nodes) if cluster is not None}


def has_head_choices(record: RunRecord) -> bool:
    """Whether there are clusters, and nodes chose heads."""
    return bool(clusters_of_nodes(record)) and bool(record.notes(HEAD))


def settlement(record: RunRecord) -> Settlement | None:
    """When the head choice settled; None without clusters or without choices."""
    if not has_head_choices(record):
        return None
    clusters = clusters_of_nodes(record)
    chosen = {
        round: _heads_of_clusters(heads, clusters) for round, heads in head_choices(record).items()
    }
    separated = {round: _is_separated(heads) for round, heads in chosen.items()}
    settled = {
        round: separated[round] and all(len(of_cluster) == 1 for of_cluster in heads.values())
        for round, heads in chosen.items()
    }
    return Settlement(_from_then_on(settled), _from_then_on(separated))


def histograms(record: RunRecord) -> dict[int, Histogram]:
    """How many nodes of each cluster chose each head, by round; absent nodes are not counted."""
    clusters, heads = clusters_of_nodes(record), number_of_heads(record)
    found = {}
    for round, choices in head_choices(record).items():
        counts = [[0] * heads for _ in range(max(clusters.values(), default=-1) + 1)]
        for node, head in choices.items():
            if node in clusters:
                counts[clusters[node]][head] += 1
        found[round] = counts
    return found


def head_losses(record: RunRecord) -> dict[int, dict[int, tuple[list[int], list[float]]]]:
    """Rounds and losses of every head, as means over the nodes of a cluster: cluster -> head."""
    clusters = clusters_of_nodes(record)
    result: dict[int, dict[int, tuple[list[int], list[float]]]] = {}
    for head in range(number_of_heads(record)):
        found: dict[int, dict[int, list[float]]] = {}  # cluster -> round -> losses of its nodes
        for node, (rounds, losses) in record.notes(f"head_loss_{head}").items():
            for round, loss in zip(rounds, losses, strict=True) if node in clusters else ():
                found.setdefault(clusters[node], {}).setdefault(round, []).append(loss)
        for cluster, curve in found.items():
            rounds = sorted(curve)
            means = [fmean(curve[round]) for round in rounds]
            result.setdefault(cluster, {})[head] = (rounds, means)
    return {cluster: result[cluster] for cluster in sorted(result)}


def _heads_of_clusters(
    heads: Mapping[int, int], clusters: Mapping[int, int]
) -> dict[int, set[int]]:
    """The heads that the nodes of each cluster chose in one round."""
    found: dict[int, set[int]] = {}
    for node, head in heads.items():
        if node in clusters:
            found.setdefault(clusters[node], set()).add(head)
    return found


def _is_separated(heads: Mapping[int, set[int]]) -> bool:
    used = [head for of_cluster in heads.values() for head in of_cluster]
    return len(used) == len(set(used))


def _from_then_on(holds: Mapping[int, bool]) -> int | None:
    """The first round from which on something holds until the last; rounds are in order."""
    start = None
    for round, true in holds.items():
        if not true:
            start = None
        elif start is None:
            start = round
    return start
