"""Laws that every algorithm should satisfy, as tests for the built-in ones and for your own.

One line is enough, and takes a few seconds:

    from peerage.testing import check_algorithm

    def test_my_algorithm():
        check_algorithm(MyAlgorithm())

It raises an AssertionError that names the first law that does not hold. Laws that do not apply to
an algorithm are listed as exceptions. With a hub, for example, no node is without neighbours, so
use `check_algorithm(FedAvg(), exceptions=["isolated"])`. `LAWS` contains all laws. To test each
law separately, parametrise a test over `LAWS` and call `check_law`.

The laws run on five nodes with unequal parts of an easy problem. They set the learning rate and the
batches in the algorithm's field `local`, a `LocalSGD`. An algorithm that trains in another way
lists exceptions. An algorithm that requires a linear model gets one.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peerage.algorithm import Algorithm
from peerage.algorithms.local import Local
from peerage.data import Dataset, in_memory
from peerage.data.clusters import Clusters
from peerage.engine.lockstep import Lockstep, SerialTeam
from peerage.engine.prepare import prepare
from peerage.engine.router import Packet
from peerage.engine.world import World
from peerage.errors import InputError, did_you_mean
from peerage.experiment import Experiment
from peerage.models.mlp import MLP
from peerage.randomness import torch_stream
from peerage.records.rows import Row
from peerage.runs.run import resume, run
from peerage.vectors import Layout
from peerage.work.training import LocalSGD

__all__ = ["LAWS", "check_algorithm", "check_law"]

NODES = 5
CLASSES = 3
EXAMPLES = 60
# Rounding depends on the order of sums; a broken law shows in the first digits.
RTOL, ATOL = 1e-3, 1e-5


def check_algorithm(algorithm: Algorithm[Any], *, exceptions: Collection[str] = ()) -> None:
    """Raise an AssertionError that names the first law that the algorithm breaks.

    `exceptions` are the names of laws that do not apply.

    >>> from peerage import DecAvg
    >>> check_algorithm(DecAvg(weights="uniform"))
    """
    for name in exceptions:
        if name not in LAWS:
            raise InputError(f"unknown law {name!r}; {did_you_mean(name, LAWS)}")
    for name in LAWS:
        if name not in exceptions:
            check_law(name, algorithm)


def check_law(name: str, algorithm: Algorithm[Any]) -> None:
    """Raise an AssertionError if the algorithm breaks the law of this name."""
    try:
        LAWS[name](algorithm)
    except Exception as error:
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        raise AssertionError(f"{algorithm!r} breaks the law {name!r}: {kind}{error}") from error


# The laws


def consensus(algorithm: Algorithm[Any]) -> None:
    """Nodes with the same model keep it when the learning rate is zero."""
    work = replace(work_of(algorithm), lr=0.0)
    ended = simulate(toy(algorithm, local=work, init={"start": "shared"}))
    for node, (start, end) in enumerate(zip(ended.start, ended.end, strict=True)):
        require_close(end, start, f"node {node} changed the model that all nodes share")


def isolated(algorithm: Algorithm[Any]) -> None:
    """A node without neighbours does the same as local training."""
    alone = {"topology": nx.empty_graph(NODES), "init": {"start": algorithm.initial_models}}
    ended = simulate(toy(algorithm, **alone))
    trained = simulate(toy(Local(work_of(algorithm)), **alone))
    for node in range(NODES):
        about = f"node {node} has no neighbours, but differs from local training"
        require_close(ended.end[node], trained.end[node], about)


def relabelling(algorithm: Algorithm[Any]) -> None:
    """Renumbering the nodes does not change their final models.

    The order of batches depends on a node's number, so all its examples are one batch here.
    """
    new = [3, 0, 4, 1, 2]
    # Different degrees, so different weights.
    graph = nx.Graph([(0, 1), (1, 2), (2, 3), (3, 4), (1, 3)])
    parts = unequal_parts()
    moved = [parts[new.index(node)] for node in range(NODES)]
    work = replace(work_of(algorithm), epochs=2, steps=None, batch_size=EXAMPLES)
    settings: dict[str, Any] = {"local": work, "init": {"start": "shared"}}
    old = simulate(toy(algorithm, topology=graph, **settings))
    permuted = nx.relabel_nodes(graph, dict(enumerate(new)))
    other = simulate(toy(algorithm, topology=permuted, partition=Parts(tuple(moved)), **settings))
    for node in range(NODES):
        about = f"node {node} has a different final model as node {new[node]}"
        require_close(other.end[new[node]], old.end[node], about)


def engines(algorithm: Algorithm[Any]) -> None:
    """The serial engine and the pool with one and two workers give bit-identical models."""
    # On a complete graph, nodes in one process share means, which must not change the result.
    for topology, pools in {"ring": (1, 2), "complete": () if algorithm.with_hub else (2,)}.items():
        serial = run(toy(algorithm, topology=topology)).digest if pools else ""
        for workers in pools:
            engine = {"name": "pool", "workers": workers}
            pool = run(toy(algorithm, topology=topology, engine=engine)).digest
            about = f"on a {topology} graph, a pool of {workers} gives {pool[:8]}"
            require(pool == serial, f"{about}, serial gives {serial[:8]}")


def architectures(algorithm: Algorithm[Any]) -> None:
    """Nodes of different architectures can be in one network, or are rejected clearly."""
    require_same_bits(algorithm, model=[model_for(algorithm), other_model_for(algorithm)])


def directed(algorithm: Algorithm[Any]) -> None:
    """A directed graph works, or is rejected clearly."""
    cycle = [(node, (node + 1) % NODES) for node in range(NODES)]
    require_same_bits(algorithm, topology=nx.DiGraph([*cycle, (0, 2), (3, 1)]))


def lost_messages(algorithm: Algorithm[Any]) -> None:
    """Engines agree when messages are lost and links are down."""
    require_same_bits(algorithm, faults={"loss": 0.4, "links": 0.7})


def clusters(algorithm: Algorithm[Any]) -> None:
    """Engines agree when groups of nodes have different data and test sets."""
    split = Clusters((NODES - 2, 2), shift=mirrored)
    require_same_bits(algorithm, clusters=split)


def require_same_bits(algorithm: Algorithm[Any], **changes: Any) -> None:
    """Serial and pool give the same models, unless the experiment is rejected."""
    try:
        serial = run(toy(algorithm, **changes)).digest
    except InputError:
        return
    pool = run(toy(algorithm, **changes, engine={"name": "pool", "workers": 2})).digest
    require(pool == serial, f"a pool of 2 gives {pool[:8]}, serial gives {serial[:8]}")


def resuming(algorithm: Algorithm[Any]) -> None:
    """A run that was interrupted and resumed equals an uninterrupted run."""
    experiment = toy(algorithm, rounds=4)
    uninterrupted = run(experiment).digest
    with TemporaryDirectory() as home:
        folder = Path(home) / "run"
        with suppress(Stopped):
            run(experiment, folder, checkpoint_every=2, watch=stop_in_round_three)
        engine = {"name": "pool", "workers": 2}
        resumed = resume(folder, experiment=experiment, engine=engine).digest
    about = f"resumed gives {resumed[:8]}, uninterrupted {uninterrupted[:8]}"
    require(resumed == uninterrupted, about)


def short_inbox(algorithm: Algorithm[Any]) -> None:
    """Parameters stay finite when half of the messages are lost."""
    # The centre of a star loses half of its inbox; each other node loses all of it in some rounds.
    for node, params in enumerate(simulate(toy(algorithm, topology="star"), lossy=True).end):
        finite = bool(torch.isfinite(params).all())
        require(finite, f"node {node} has parameters that are not finite")


def convex(algorithm: Algorithm[Any]) -> None:
    """The loss of logistic regression on easily separable data falls."""
    work = replace(work_of(algorithm), lr=0.1)
    # From a shared start, because averaging different models lowers the loss without training.
    result = run(toy(algorithm, model="logistic", local=work, init={"start": "shared"}))
    losses = [row["loss"] for row in result.rows if row["scope"] == "network"]
    require(losses[-1] < 0.9 * losses[0], f"the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")


def unchanged(algorithm: Algorithm[Any]) -> None:
    """Tensors are never changed in place after sending, as neighbours may still use them."""
    for topology in ("ring", "complete"):
        for name, sender, tensor, copy in simulate(toy(algorithm, topology=topology)).tap.sent:
            about = f"tensor {name!r} of node {sender} changed after it had been sent"
            require(torch.equal(tensor, copy), about)


def value(algorithm: Algorithm[Any]) -> None:
    """The algorithm is a frozen, hashable dataclass that can be stored in a TOML file."""
    parameters = getattr(type(algorithm), "__dataclass_params__", None)
    frozen = parameters is not None and parameters.frozen
    require(frozen, "it is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    same = replace(_any(algorithm))
    equal = same == algorithm and hash(same) == hash(algorithm)
    require(equal, "a copy with the same values is not equal")
    experiment = Experiment(algorithm=algorithm)
    again = Experiment.from_toml(experiment.to_toml())
    require(again.to_toml() == experiment.to_toml(), "it changes when stored in a TOML file")
    # Compared by field, because reading the file loads the class again, as a different class.
    for field in fields(_any(algorithm)):
        old, new = getattr(algorithm, field.name), getattr(again.algorithm, field.name)
        require(new == old, f"{field.name}={old!r} comes back from a TOML file as {new!r}")


def traffic(algorithm: Algorithm[Any]) -> None:
    """The bytes counted as sent are those of the tensors that nodes receive."""
    ended = simulate(toy(algorithm))
    for round, (counted, arrived) in enumerate(zip(ended.bytes, ended.tap.arrived, strict=True)):
        about = f"{counted} bytes were sent in round {round}, but {arrived} were received"
        require(counted == arrived, about)


def declared(algorithm: Algorithm[Any]) -> None:
    """`message_schema` declares every tensor that nodes send, with its shape and type.

    `TensorSpec` and the engine reject types that messages cannot contain.
    """
    experiment = toy(algorithm)
    ended = simulate(experiment)
    world = prepare(experiment)
    kinds = world.architectures.items()
    schemas = {kind: algorithm.message_schema(world.dimensions(it)) for kind, it in kinds}
    for (name, sender, tensor, _), kind in zip(ended.tap.sent, ended.tap.kinds, strict=True):
        known = schemas[kind]
        require(name in known, f"node {sender} sends a tensor {name!r}, which it does not declare")
        about = f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {known[name]}"
        require(known[name].fits(tensor), about)
        broken = known[name].broken_bound(tensor, experiment.rounds)
        require(broken is None, f"{name!r} has {broken} as it declares")


LAWS: dict[str, Callable[[Algorithm[Any]], None]] = {
    "consensus": consensus,
    "isolated": isolated,
    "relabelling": relabelling,
    "engines": engines,
    "architectures": architectures,
    "directed": directed,
    "lost-messages": lost_messages,
    "clusters": clusters,
    "resuming": resuming,
    "short-inbox": short_inbox,
    "convex": convex,
    "unchanged": unchanged,
    "value": value,
    "traffic": traffic,
    "declared": declared,
}


# The experiments of the laws


def toy(algorithm: Algorithm[Any], **changes: Any) -> Experiment:
    """Five nodes on a ring with unequal parts of an easy problem, three rounds."""
    settings: dict[str, Any] = {
        "dataset": blobs(),
        "model": model_for(algorithm),
        "nodes": NODES,
        "topology": "ring",
        "partition": Parts(unequal_parts()),
        "rounds": 3,
        "evaluation": {"at": "end"},
        "engine": {"name": "serial"},
    }
    settings |= changes
    if algorithm.with_hub:  # the graph is always a star
        del settings["topology"]
    if not hasattr(algorithm, "local"):
        settings.pop("local", None)
    return Experiment(algorithm=algorithm, **settings)


def model_for(algorithm: Algorithm[Any]) -> str:
    """A network with a hidden layer, or a linear model if the algorithm does not accept it.

    An algorithm that accepts neither raises its error when it runs.
    """
    module = MLP(hidden="8").build((4,), CLASSES)
    try:
        algorithm.check_layout(Layout.of(module.named_parameters()))
    except InputError:
        return "logistic"
    return "mlp:hidden=8"


def other_model_for(algorithm: Algorithm[Any]) -> str:
    """A model of another size; a linear model has none."""
    return "mlp:hidden=6" if model_for(algorithm).startswith("mlp") else "logistic"


def mirrored(x: Tensor, cluster: int) -> Tensor:
    """A shift: the examples of all clusters but the first are mirrored."""
    return 1 - x if cluster else x


def work_of(algorithm: Algorithm[Any]) -> LocalSGD:
    return Experiment(algorithm=algorithm).work


def blobs() -> Dataset:
    """One Gaussian cloud per class, separable by a linear model."""
    y = torch.arange(EXAMPLES + EXAMPLES // 2) % CLASSES
    centres = 2.0 * torch.eye(CLASSES, 4)
    x = centres[y] + torch.randn(len(y), 4, generator=torch_stream(0, "testing"))
    return in_memory(x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:])


def unequal_parts() -> tuple[tuple[int, ...], ...]:
    """4, 8, 12, 16 and 20 examples of all classes for the five nodes."""
    bounds = np.cumsum([0, *(4 * node for node in range(1, NODES + 1))]).tolist()
    return tuple(tuple(range(bounds[node], bounds[node + 1])) for node in range(NODES))


@dataclass(frozen=True)
class Parts:
    """A partition that assigns these examples to each node."""

    indices: tuple[tuple[int, ...], ...]

    def split(
        self, labels: Any, nodes: int, classes: int, rng: np.random.Generator
    ) -> list[NDArray[np.int64]]:
        return [np.array(part, dtype=np.int64) for part in self.indices]


class Tap(SerialTeam):
    """The serial engine's team, recording all messages; it may lose half of them."""

    def __init__(self, world: World, lossy: bool) -> None:
        super().__init__(world)
        self.lossy = lossy
        self.sent: list[tuple[str, int, Tensor, Tensor]] = []  # name, sender, tensor, copy
        self.kinds: list[str] = []  # the architecture of the payload of each
        self.arrived: list[int] = []  # round -> bytes; then those of a final step

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method in ("begin", "final"):
            self.arrived.append(0)
        elif method == "resume":
            deliveries: dict[int, list[Packet]] = arguments[0][0]
            self.arrived[-1] += sum(_size(p) for packets in deliveries.values() for p in packets)
            if self.lossy:  # even-numbered in one round, odd-numbered in the next
                first = len(self.arrived) % 2
                deliveries = {node: packets[first::2] for node, packets in deliveries.items()}
            arguments = [(deliveries,)]
        answers = super().call(method, arguments)
        if method in ("begin", "final", "resume"):
            for packet in answers[0].packets:
                for name, tensor in packet.payload.items():
                    self.sent.append((name, packet.sender, tensor, tensor.clone()))
                    self.kinds.append(packet.architecture)
        return answers


@dataclass(frozen=True)
class Simulated:
    """Parameters of every node before and after a run, and its messages."""

    start: list[Tensor]
    end: list[Tensor]
    bytes: list[int]  # round -> bytes as the engine counts them; then those of a final step
    tap: Tap


def simulate(experiment: Experiment, *, lossy: bool = False) -> Simulated:
    world = prepare(experiment)
    tap = Tap(world, lossy)
    with Lockstep(world, tap) as engine:
        owners = [world.model_owner(node) for node in range(world.nodes)]
        start = [engine.parameters(node) for node in owners]
        sent = [engine.round(round, evaluate=False).bytes for round in range(world.rounds)]
        end = [engine.parameters(node) for node in owners]
        if world.steps > world.rounds:  # a final step, which `end` does not include
            sent.append(engine.final(world.rounds).bytes)
    return Simulated(start, end, sent, tap)


class Stopped(Exception):
    """The interruption in the law `resuming`."""


def stop_in_round_three(row: Row) -> None:
    if row["round"] == 3:
        raise Stopped


def require(condition: bool, message: str) -> None:
    if not condition:  # unlike `assert`, also checked under `python -O`
        raise AssertionError(message)


def require_close(found: Tensor, expected: Tensor, about: str) -> None:
    worst = float((found - expected).abs().max())
    require(torch.allclose(found, expected, rtol=RTOL, atol=ATOL), f"{about} (by {worst:.2g})")


def _size(packet: Packet) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in packet.payload.values())


def _any(algorithm: Algorithm[Any]) -> Any:
    """The algorithm without its type, because only subclasses of `Algorithm` are dataclasses."""
    return algorithm
