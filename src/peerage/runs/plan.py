"""Plan a network before it is set up: costs and risks of its graph, model and algorithm.

Nothing is trained. The numbers follow from the graph and the sizes, results of the papers are cited
as such, and whatever cannot be known in advance is shown as unknown.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peerage.algorithm import Cost, Dimensions
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.graphs.graph import Graph, adjacency_matrix, component_labels, first_not_strong
from peerage.graphs.mixing import describe, gains, mean_excess_degree
from peerage.report.tables import percent, size
from peerage.runs.node_memory import FLOAT, NodeMemory
from peerage.runs.simulation_memory import SimulationMemory

SETTLED = 1e-3  # share of the initial differences below which training dominates
MIN_EXCESS_DEGREE = 2.0  # mean excess degree; at 1 a random graph disconnects (P4 section 5)
HUB_LINKS = 10  # times the mean degree
HUB_BYTES = 1e9  # per round
WIDTH = 80  # columns of the page

PLATEAU = (
    "with independent initial models, the loss first stays on a plateau that grows with the number "
    "of nodes: as n on complete and 4-regular graphs with SGD (measured for n = 8 to 64), as "
    "n^0.64 on Barabasi-Albert graphs (n = 32 to 256), as n^0.4 with AdamW (P4 Fig. 3). With the "
    "gain there was none. Its length for this network is unknown"
)


class Range(NamedTuple):
    """Minimum, mean and maximum over the nodes."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class NetworkPlan:
    """Facts about a network before it starts; for a dynamic graph, those of round 0."""

    topology: str
    model: str
    algorithm: str
    rounds: int
    nodes: int
    edges: int
    directed: bool
    dynamic: bool
    degree: Range  # number of neighbours
    excess_degree: float | None  # <k^2> / <k> - 1; None without links
    components: int
    largest_component: float  # share of the nodes
    strongly_connected: bool  # every component is strongly connected
    gain: Range | None  # 1 / ||v|| of a node's component
    spectral_gap: float | None
    mixing_time: float | None  # rounds; None if infinite or unknown
    mixing_time_exact: bool  # otherwise an upper bound
    parameters: int  # of a mix, the mean over the nodes
    layers: int  # of a mix, those of its deepest model
    # None if the algorithm does not state its cost:
    payload: float | None  # numbers per parameter in a message
    sent: Range | None  # bytes per node and round
    memory: Range | None  # bytes per node; of an aggregator, where there is one
    batch_size: int | None = None  # whose activations `memory` includes
    held_models: int | None = None  # models of other nodes that an aggregator has at once
    mix: tuple[int, ...] = ()  # parameters of several models, which nodes take in turn
    clusters: tuple[int, ...] = ()  # nodes in each cluster
    links_within: float | None = None  # share of the links that join nodes of one cluster
    simulation_memory: float | None = None  # bytes of a simulation of all nodes on one machine

    @property
    def gain_sqrt(self) -> float:
        """sqrt(n), the gain of complete and regular graphs."""
        return math.sqrt(self.nodes)

    @property
    def stabilisation(self) -> int | None:
        """Estimated rounds until the slowest difference between nodes is a thousandth."""
        if not self.spectral_gap:
            return None
        if self.spectral_gap >= 1:
            return 1
        return math.ceil(math.log(SETTLED) / math.log(1 - self.spectral_gap))

    @property
    def sent_per_round(self) -> float | None:
        return None if self.sent is None else self.sent.mean * self.nodes

    @property
    def sent_total(self) -> float | None:
        return None if self.sent_per_round is None else self.sent_per_round * self.rounds

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(_warnings(self))

    def as_dict(self) -> dict[str, Any]:
        """All fields and derived values, for JSON; ranges are tables."""
        derived = ("gain_sqrt", "stabilisation", "sent_per_round", "sent_total")
        table = asdict(self) | {name: getattr(self, name) for name in derived}
        ranges = {key: x._asdict() for key, x in table.items() if isinstance(x, Range)}
        return {**table, **ranges, "warnings": list(self.warnings)}


def plan(
    topology: str,
    graph: Graph,
    *,
    model: str,
    parameters: int | Sequence[int],
    layers: int,
    algorithm: str,
    payload: float | Sequence[float] | None,
    rounds: int,
    optimizer_floats: int = 1,
    held_models: int | None = None,
    together: bool = False,
    activations: Sequence[int] = (),
    batch_size: int | None = None,
    clusters: Sequence[int] = (),
    number_bytes: float = FLOAT,
    simulation: SimulationMemory | None = None,
) -> NetworkPlan:
    """The plan of a network; `topology`, `model` and `algorithm` are names to show.

    In a round, a node sends `payload` numbers per parameter to each out-neighbour, or None if that
    is unknown. `NodeMemory` says what it holds; `activations` are the bytes of a batch of
    `batch_size`, if they are known. For a mix of models, `parameters`, `payload` and `activations`
    have a number for each model. `clusters` gives the cluster of every node, if there are any.
    `number_bytes` are those of a number in a message, `simulation` the memory of a simulated node.
    """
    sizes = [parameters] if isinstance(parameters, int) else list(parameters)
    factors = [payload] if isinstance(payload, int | float) else list(payload or ())
    for name, value in (("parameters", min(sizes)), ("layers", layers), ("rounds", rounds)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    for factor in factors:
        if not 0 <= factor < math.inf:
            raise InputError(f"payload must be a number of at least 0, got {factor}")
    if optimizer_floats < 0:
        raise InputError(f"optimizer_floats must be at least 0, got {optimizer_floats}")
    links = adjacency_matrix(graph)  # row i: neighbours of i
    neighbours = np.diff(links.indptr).astype(np.float64)
    out_neighbours = np.bincount(links.indices, minlength=graph.nodes)
    parts = np.bincount(component_labels(graph))
    strong = first_not_strong(graph) is None
    report = describe(graph).as_dict() if strong else {}  # otherwise, no stationary vector exists

    def in_turn(values: Sequence[float]) -> NDArray[np.float64]:
        return np.resize(np.array(values, dtype=np.float64), graph.nodes)

    own = in_turn(sizes)
    numbers = memory = None  # numbers in a message
    if payload is not None:
        numbers = own * in_turn(factors)
        needed = NodeMemory(
            own,
            in_turn(activations or (0.0,)),
            FLOAT * numbers,  # messages are restored to single precision
            optimizer_floats,
            held_models,
            together,
        )
        memory = _range(needed.of_nodes(links))
    return NetworkPlan(
        topology=topology,
        model=model,
        algorithm=algorithm,
        rounds=rounds,
        nodes=graph.nodes,
        edges=links.nnz if graph.directed else links.nnz // 2,
        directed=graph.directed,
        dynamic=graph.dynamic,
        degree=_range(neighbours),
        excess_degree=mean_excess_degree(graph) if links.nnz else None,
        components=len(parts),
        largest_component=float(parts.max()) / graph.nodes,
        strongly_connected=strong,
        gain=_range(gains(graph)) if strong else None,
        spectral_gap=report.get("spectral_gap"),
        mixing_time=report.get("mixing_time"),
        mixing_time_exact=report.get("mixing_time_exact", False),
        parameters=round(own.mean()),
        layers=layers,
        payload=None if numbers is None else float(numbers.sum() / own.sum()),
        sent=None if numbers is None else _range(number_bytes * numbers * out_neighbours),
        memory=memory,
        batch_size=batch_size if activations else None,
        held_models=held_models,
        mix=tuple(sizes) if len(sizes) > 1 else (),
        clusters=tuple(np.bincount(clusters).tolist()) if clusters else (),
        links_within=_links_within(links, clusters) if clusters and links.nnz else None,
        simulation_memory=None if simulation is None else simulation.total(graph.nodes),
    )


def _links_within(links: Any, clusters: Sequence[int]) -> float:
    """The share of the links that join two nodes of the same cluster."""
    number, pairs = np.array(clusters), links.tocoo()
    return float((number[pairs.row] == number[pairs.col]).mean())


def typical_cost(algorithm: str, dimensions: Dimensions) -> Cost | None:
    """The cost of a round; None if the algorithm does not state it.

    It is that of the second round, as the first may include data that are sent only once.
    """
    experiment = Experiment(algorithm=algorithm, topology="complete")  # rejects one with a hub
    return experiment.algorithm.cost(1, dimensions, examples=0.0)


def page(plan: NetworkPlan) -> str:
    """The plan as text for a terminal."""
    sections = [_graph_rows(plan), _start_rows(plan), _cost_rows(plan)]
    warnings = plan.warnings
    sections.append([("warning", text) for text in warnings] or [("warnings", "none")])
    width = 2 + max(len(name) for rows in sections for name, _ in rows)
    return "\n\n".join(
        "\n".join(_row(name, text, width) for name, text in rows) for rows in sections
    )


def _graph_rows(plan: NetworkPlan) -> list[tuple[str, str]]:
    connected = "yes"
    if plan.components > 1:
        share = percent(plan.largest_component)
        connected = f"no: {plan.components:,} components, the largest with {share} of the nodes"
    elif not plan.strongly_connected:
        connected = "not in both directions"
    links = f"{plan.edges:,} {'one-way links' if plan.directed else 'edges'}"
    rows = [
        ("network", f"{plan.topology}: {plan.nodes:,} nodes, {links}"),
        ("degree", _spread(plan.degree, lambda value: f"{value:.4g}")),
        ("connected", connected),
        ("spectral gap", "unknown" if plan.spectral_gap is None else f"{plan.spectral_gap:.4g}"),
        ("mixing time", _mixing_text(plan)),
        ("settled", _settled_text(plan)),
    ]
    if plan.links_within is not None:
        sizes = "/".join(map(str, plan.clusters))
        share = percent(plan.links_within)
        rows.append(("clusters", f"{sizes} nodes; {share} of the links are within a cluster"))
    if plan.dynamic:
        rows.insert(1, ("note", "the graph changes every round; the numbers are those of round 0"))
    return rows


def _start_rows(plan: NetworkPlan) -> list[tuple[str, str]]:
    if plan.gain is None:
        return [("gain", "none, as the network has no common model")]
    gain = plan.gain.mean
    comparison = f"1 / |v|; sqrt(n) = {plan.gain_sqrt:.4g}"
    if plan.gain.most - plan.gain.least > 1e-9 * plan.gain.most:
        each = f"{plan.gain.least:.4g} to {plan.gain.most:.4g}, by component"
        return [("gain", f"{each} ({comparison})"), ("plateau", PLATEAU)]
    if gain < 1 + 1e-9:
        return [("gain", "1, as no node has a neighbour to average with")]
    effect = (
        f"averaging shrinks the deviation of independent initial weights to 1/{gain:.4g}, and a "
        f"signal through {plan.layers} layers of them to about {gain**-plan.layers:.2g} (weights "
        "only; biases and normalisation change this)"
    )
    return [("gain", f"{gain:.4g} ({comparison})"), ("without it", effect), ("plateau", PLATEAU)]


def _cost_rows(plan: NetworkPlan) -> list[tuple[str, str]]:
    model = f"{plan.model}: {plan.parameters:,} parameters, {size(FLOAT * plan.parameters)}"
    if plan.mix:
        counts = ", ".join(f"{count:,}" for count in plan.mix)
        model = (
            f"{plan.model}: nodes take in turn {len(plan.mix)} models of {counts} parameters; "
            f"{size(FLOAT * plan.parameters)} on average"
        )
    simulated = []
    if plan.simulation_memory is not None:
        needed = f"about {size(plan.simulation_memory)} of memory on one machine"
        simulated.append(("simulation", needed))
    if plan.sent is None or plan.memory is None:
        unknown = f"{plan.algorithm}: unknown payload; its method `cost` can state it"
        names = ("sent per node", "sent in total", "memory per node")
        missing = [(name, "unknown") for name in names]
        return [("model", model), ("algorithm", unknown), *missing, *simulated]
    per_round = plan.sent.mean * plan.nodes
    plural = "" if plan.payload == 1 else "s"
    sends = f"sends {plan.payload:.3g} number{plural} per parameter and link"
    if plan.payload == 0:
        sends = "sends no parameters; other tensors are not counted"
    return [
        ("model", model),
        ("algorithm", f"{plan.algorithm}: {sends}"),
        ("sent per node", f"{_spread(plan.sent, size)} per round"),
        (
            "sent in total",
            f"{size(per_round)} per round, "
            f"{size(per_round * plan.rounds)} in {plan.rounds:,} rounds",
        ),
        ("memory per node", f"{_spread(plan.memory, size)}: {_memory_text(plan)}"),
        *simulated,
    ]


def _memory_text(plan: NetworkPlan) -> str:
    """What the memory of a node includes."""
    parts = ["model", "gradients", "optimiser"]
    if plan.held_models is None:
        parts.append("messages")
    else:
        parts.append(f"as an aggregator the {plan.held_models} largest models that it may receive")
    if plan.batch_size is None:
        return f"{', '.join(parts[:-1])} and {parts[-1]}, without data and activations"
    batch = f"activations of a batch of {plan.batch_size}"
    return f"{', '.join(parts)} and {batch}, without data"


def _warnings(plan: NetworkPlan) -> Iterator[str]:
    if plan.components > 1:
        yield (
            f"the graph has {plan.components:,} components, the largest with "
            f"{percent(plan.largest_component)} of the nodes, and components never learn from each "
            "other; add links or choose a denser graph"
        )
    if not plan.strongly_connected:
        yield (
            "the graph is not strongly connected: messages of some nodes do not reach all others, "
            "so there is no common model and no gain; add links in the other direction"
        )
    complete = plan.degree.least == plan.nodes - 1
    if plan.excess_degree is not None and plan.excess_degree < MIN_EXCESS_DEGREE and not complete:
        yield (
            f"the mean excess degree is {plan.excess_degree:.3g}: random graphs disconnect at 1, "
            f"and a few lost links may split this one; aim for {MIN_EXCESS_DEGREE:g} or more"
        )
    yield from _hub_warnings(plan)
    if _mixing_at_least(plan) > plan.rounds:
        yield (
            f"mixing takes more than the planned {plan.rounds:,} rounds: distant nodes will hardly "
            "influence each other; plan more rounds or add links"
        )


def _hub_warnings(plan: NetworkPlan) -> Iterator[str]:
    if plan.degree.most > HUB_LINKS * plan.degree.mean:
        yield (
            f"the busiest node has {plan.degree.most:.0f} neighbours, "
            f"{plan.degree.most / plan.degree.mean:.0f} times the mean: it limits the speed of "
            "rounds, and the network depends on it; choose a more even graph"
        )
    if plan.sent is not None and plan.sent.most > HUB_BYTES:
        yield (
            f"the busiest node sends {size(plan.sent.most)} per round; "
            "choose fewer links, a smaller model or compression"
        )


def _mixing_at_least(plan: NetworkPlan) -> float:
    """A lower bound on the mixing time; 0 if it is unknown or infinite.

    If only an upper bound is known: (1 / gap - 1) ln 2 (Levin, Peres, Wilmer, theorem 12.5).
    """
    if plan.mixing_time is None or not plan.spectral_gap:
        return 0.0
    if plan.mixing_time_exact:
        return plan.mixing_time
    return (1 / plan.spectral_gap - 1) * math.log(2)


def _mixing_text(plan: NetworkPlan) -> str:
    if plan.mixing_time is None:
        return "infinite" if plan.components > 1 else "unknown"
    bound = "" if plan.mixing_time_exact else "at most "
    return f"{bound}{plan.mixing_time:,.0f} rounds"


def _settled_text(plan: NetworkPlan) -> str:
    if plan.stabilisation is None:
        return "unknown"
    return (
        f"after about {plan.stabilisation:,} rounds (estimate: initial differences have then "
        "shrunk to a thousandth, and training moves models more than averaging does)"
    )


def _spread(found: Range, text: Callable[[float], str]) -> str:
    if found.least == found.most:
        return text(found.mean)
    return f"{text(found.mean)} on average ({text(found.least)} to {text(found.most)})"


def _row(name: str, text: str, width: int) -> str:
    lines = wrap(text, WIDTH - width)
    return "\n".join(
        f"{start:<{width}}{line}" for start, line in zip_longest([name], lines, fillvalue="")
    )


def _range(values: NDArray[Any]) -> Range:
    return Range(float(values.min()), float(values.mean()), float(values.max()))
