"""The figures of runs by name, for `result.plot(kind)`."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure

from peerage.errors import InputError, did_you_mean
from peerage.records.metrics import METRICS
from peerage.records.rows import RunRecord
from peerage.report import figures

KINDS: dict[str, Callable[[Sequence[RunRecord]], Figure]] = {
    "nodes": figures.node_accuracies,
    "traffic": figures.bytes_and_accuracy,
    "time": figures.phase_seconds,
    "graph": figures.graph,
    "data": lambda records: figures.allocation(records[0]),
    "clusters": figures.group_curves,
}


def plot(records: Sequence[RunRecord], kind: str) -> Figure:
    """A figure: a metric over the rounds, or one of `KINDS`.

    `nodes` has the accuracy of every node, `traffic` accuracy over bytes sent, `time` the seconds
    of each phase, `graph` the network, `data` the classes of every node, and `clusters` the
    accuracy of every cluster.
    """
    if kind in KINDS:
        if kind == "clusters" and not any(record.group_curves("accuracy") for record in records):
            raise InputError(
                "kind 'clusters' needs a run with clusters, such as clusters='30/2:rotate'"
            )
        if kind == "nodes" and not any(record.nodes for record in records):
            raise InputError("kind 'nodes' needs an evaluated round; wait for the first one")
        return KINDS[kind](records)
    if not any(record.curve(kind)[1] for record in records):
        raise InputError(f"there is no figure {kind!r} of these runs; {_hint(records, kind)}")
    return figures.curves(records, kind)


def _hint(records: Sequence[RunRecord], kind: str) -> str:
    own = [name for record in records for name in record.own_metrics]
    keys = dict.fromkeys([*(metric.key for metric in METRICS), *own])
    recorded = [key for key in keys if any(record.curve(key)[1] for record in records)]
    return did_you_mean(kind, [*recorded, *KINDS])
