"""Before a network is set up: what its graph, its model and its algorithm will cost and risk.

Nothing is trained: the numbers follow from the graph and the sizes, what experiments of the papers
have shown is quoted as such, and what cannot be known beforehand is called unknown.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csgraph

from peerage.algorithm import Dimensions
from peerage.errors import InputError
from peerage.experiment import Experiment
from peerage.graphs.graph import Graph, adjacency_matrix, component_labels
from peerage.graphs.mixing import describe, gains, mean_excess_degree
from peerage.report.tables import percent, size

__all__ = ["NetworkPlan", "Range", "page", "payload_factor", "plan"]

FLOAT = 4  # bytes of a number in single precision
SETTLED = 1e-3  # of the initial differences between peers are left: from then on training counts
EXCESS = 2.0  # mean excess degree; at 1 a random graph falls apart (P4 section 5)
HUB_LINKS = 10  # times the mean degree
HUB_BYTES = 1e9  # in a round
WIDTH = 80  # columns of the page

PLATEAU = (
    "if peers start independently, the loss first stays on a plateau that lasts longer the more "
    "peers there are: like n on complete and 4-regular graphs with SGD (measured for n = 8 to 64), "
    "like n^0.64 on Barabasi-Albert graphs (n = 32 to 256), like n^0.4 with AdamW (P4 Fig. 3); "
    "with the gain there was none. How many rounds it lasts here is unknown"
)


class Range(NamedTuple):
    """Over the peers."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class NetworkPlan:
    """What is worth knowing about a network before it starts; of a dynamic graph, its round 0."""

    topology: str
    model: str
    algorithm: str
    rounds: int
    nodes: int
    edges: int
    directed: bool
    dynamic: bool
    degree: Range  # how many others a peer hears
    excess_degree: float | None  # <k^2> / <k> - 1; None without links
    components: int
    largest_component: float  # share of the nodes
    strongly_connected: bool  # in every component, everyone hears of everyone
    gain: Range | None  # 1 / ||v|| of a peer's component
    spectral_gap: float | None
    mixing_time: float | None  # rounds; None if infinite or unknown
    mixing_time_exact: bool  # otherwise an upper bound
    parameters: int
    layers: int
    payload: float | None  # numbers per parameter in a message; None if unknown, as what follows
    sent: Range | None  # bytes of a peer in a round
    memory: Range | None  # bytes of a peer

    @property
    def gain_sqrt(self) -> float:
        """sqrt(n), the gain of complete and regular graphs."""
        return math.sqrt(self.nodes)

    @property
    def stabilisation(self) -> int | None:
        """Rounds after which the slowest difference between peers is a thousandth: an estimate."""
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
        """For JSON: all fields and what follows from them; ranges are tables."""
        table = asdict(self)
        for name in ("degree", "gain", "sent", "memory"):
            found: Range | None = getattr(self, name)
            table[name] = None if found is None else found._asdict()
        for name in ("gain_sqrt", "stabilisation", "sent_per_round", "sent_total"):
            table[name] = getattr(self, name)
        return {**table, "warnings": list(self.warnings)}


def plan(
    topology: str,
    graph: Graph,
    *,
    model: str,
    parameters: int,
    layers: int,
    algorithm: str,
    payload: float | None,
    rounds: int,
    optimizer_floats: int = 1,
) -> NetworkPlan:
    """The plan of a network; `topology`, `model` and `algorithm` are names to show.

    In a round a peer sends `payload` numbers per parameter to each listener, or None if that is
    unknown. It holds its model, gradients, `optimizer_floats` numbers per parameter (1 with
    momentum, 2 with Adam) and the messages of all that it hears; its data and activations come on
    top.
    """
    for name, value in (("parameters", parameters), ("layers", layers), ("rounds", rounds)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    if payload is not None and not 0 <= payload < math.inf:
        raise InputError(f"payload must be a number from 0 up, got {payload}")
    if optimizer_floats < 0:
        raise InputError(f"optimizer_floats must be at least 0, got {optimizer_floats}")
    links = adjacency_matrix(graph)  # row i: whom i hears
    heard = np.diff(links.indptr).astype(np.float64)
    out_neighbours = np.bincount(links.indices, minlength=graph.nodes)
    parts = np.bincount(component_labels(graph))
    strong = csgraph.connected_components(links, connection="strong")[0] == len(parts)
    report = describe(graph) if strong else None  # otherwise there is no stationary vector
    message = None if payload is None else FLOAT * parameters * payload
    model_bytes = FLOAT * parameters * (2 + optimizer_floats)
    return NetworkPlan(
        topology=topology,
        model=model,
        algorithm=algorithm,
        rounds=rounds,
        nodes=graph.nodes,
        edges=links.nnz if graph.directed else links.nnz // 2,
        directed=graph.directed,
        dynamic=graph.dynamic,
        degree=_range(heard),
        excess_degree=mean_excess_degree(graph) if links.nnz else None,
        components=len(parts),
        largest_component=float(parts.max()) / graph.nodes,
        strongly_connected=strong,
        gain=_range(gains(graph)) if strong else None,
        spectral_gap=_known(report.spectral_gap) if report else None,
        mixing_time=_known(report.mixing_time) if report else None,
        mixing_time_exact=report is not None and report.mixing_time_exact,
        parameters=parameters,
        layers=layers,
        payload=payload,
        sent=None if message is None else _range(message * out_neighbours),
        memory=None if message is None else _range(model_bytes + message * heard),
    )


def payload_factor(algorithm: str, dimensions: Dimensions) -> float | None:
    """Numbers per parameter that cross a link in a round; None if the algorithm does not state it.

    The second round counts, as the first may hold what is sent once.
    """
    experiment = Experiment(algorithm=algorithm, topology="complete")  # refuses one with a hub
    cost = experiment.algorithm.cost(1, dimensions, examples=0.0)
    return None if cost is None else float(cost.vectors)


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
        ("spectral gap", _or_unknown(plan.spectral_gap, "{:.4g}")),
        ("mixing time", _mixing_text(plan)),
        ("settled", _settled_text(plan)),
    ]
    if plan.dynamic:
        rows.insert(1, ("note", "the graph changes in every round; the numbers are of round 0"))
    return rows


def _start_rows(plan: NetworkPlan) -> list[tuple[str, str]]:
    if plan.gain is None:
        return [("gain", "there is none, as the network has no common model")]
    gain = plan.gain.mean
    comparison = f"1 / |v|; sqrt(n) = {plan.gain_sqrt:.4g}"
    if plan.gain.most - plan.gain.least > 1e-9 * plan.gain.most:
        each = f"{plan.gain.least:.4g} to {plan.gain.most:.4g}, by component"
        return [("gain", f"{each} ({comparison})"), ("plateau", PLATEAU)]
    if gain < 1 + 1e-9:
        return [("gain", "1: there is nobody to average with")]
    shrunk = (
        f"averaging shrinks independent initial weights to 1/{gain:.4g} of their deviation, and a "
        f"signal through {plan.layers} layers of them to about {gain**-plan.layers:.2g} (weights "
        "only: biases and normalisation change that)"
    )
    return [("gain", f"{gain:.4g} ({comparison})"), ("without it", shrunk), ("plateau", PLATEAU)]


def _cost_rows(plan: NetworkPlan) -> list[tuple[str, str]]:
    model = f"{plan.model}: {plan.parameters:,} parameters, {size(FLOAT * plan.parameters)}"
    if plan.sent is None or plan.memory is None:
        unknown = f"{plan.algorithm}: unknown what it sends; its method `cost` can state that"
        named = ("sent per peer", "sent in total", "memory per peer")
        return [("model", model), ("algorithm", unknown), *((name, "unknown") for name in named)]
    per_round = plan.sent.mean * plan.nodes
    plural = "" if plan.payload == 1 else "s"
    sends = f"sends {plan.payload:.3g} number{plural} per parameter and link"
    if plan.payload == 0:
        sends = "sends no parameters; what else it may send is not counted here"
    return [
        ("model", model),
        ("algorithm", f"{plan.algorithm}: {sends}"),
        ("sent per peer", f"{_spread(plan.sent, size)} in a round"),
        (
            "sent in total",
            f"{size(per_round)} in a round, "
            f"{size(per_round * plan.rounds)} in {plan.rounds:,} rounds",
        ),
        (
            "memory per peer",
            f"{_spread(plan.memory, size)}: model, gradients, optimiser and messages, without data "
            "and activations",
        ),
    ]


def _warnings(plan: NetworkPlan) -> Iterator[str]:
    if plan.components > 1:
        yield (
            f"the graph has {plan.components:,} components, the largest with "
            f"{percent(plan.largest_component)} of the nodes: components never learn from each "
            "other; add links or choose a denser graph"
        )
    if not plan.strongly_connected:
        yield (
            "the graph is not strongly connected: some peers are not heard by all, so there is no "
            "common model and no gain; add links in the other direction"
        )
    complete = plan.degree.least == plan.nodes - 1
    if plan.excess_degree is not None and plan.excess_degree < EXCESS and not complete:
        yield (
            f"the mean excess degree is {plan.excess_degree:.3g}: random graphs fall apart at 1, "
            f"and a few lost links may split this one; aim for {EXCESS:g} or more"
        )
    yield from _hub_warnings(plan)
    if _mixing_at_least(plan) > plan.rounds:
        yield (
            f"mixing takes more than the {plan.rounds:,} rounds planned: distant peers will hardly "
            "hear of each other; plan more rounds or add links"
        )


def _hub_warnings(plan: NetworkPlan) -> Iterator[str]:
    if plan.degree.most > HUB_LINKS * plan.degree.mean:
        yield (
            f"the busiest peer hears {plan.degree.most:.0f} others, "
            f"{plan.degree.most / plan.degree.mean:.0f} times the mean: it decides how fast a "
            "round is, and the network depends on it; choose a more even graph"
        )
    if plan.sent is not None and plan.sent.most > HUB_BYTES:
        yield (
            f"the busiest peer sends {size(plan.sent.most)} in a round; "
            "choose fewer links, a smaller model or compression"
        )


def _mixing_at_least(plan: NetworkPlan) -> float:
    """What the mixing time certainly is; 0 where nothing is known or it is infinite.

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
        f"after about {plan.stabilisation:,} rounds (estimate: by then initial differences have "
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


def _or_unknown(value: float | None, form: str) -> str:
    return "unknown" if value is None else form.format(value)


def _range(values: NDArray[Any]) -> Range:
    return Range(float(values.min()), float(values.mean()), float(values.max()))


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
