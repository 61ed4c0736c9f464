"""Some of the nodes, driven in lockstep: what a worker does, and what `serial` does for all."""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from peerage.algorithm import Algorithm, Node
from peerage.engine.router import Packet, ShardOutput
from peerage.engine.world import World
from peerage.errors import InputError, PeerageError
from peerage.graphs.graph import Neighbours
from peerage.isolation import exclusive_torch
from peerage.privacy import PrivacyFilter
from peerage.randomness import torch_stream
from peerage.records.metrics import VALIDATION
from peerage.records.phases import no_time
from peerage.requests import UNNUMBERED, Compute, MeanCache, Message, Receive, Send, check_dtype
from peerage.state import Classes, check_state, classes_in, map_tensors, pack, unpack
from peerage.vectors import all_finite
from peerage.work.context import LocalContext
from peerage.work.evaluation import ConsensusSums, Movement, movement, score
from peerage.work.training import Train, Trained

PRE_ROUND = -1  # the round before the first, in which nodes learn about the network


class Store(Protocol):
    """Where payloads lie between sending and receiving."""

    def empty(self, size: int) -> Tensor: ...
    def put(self, tensor: Tensor) -> Any: ...
    def open(self, place: Any) -> Tensor: ...
    def to_private(self, tensor: Tensor) -> Tensor: ...
    def clear(self) -> None: ...


class InProcessStore:
    """The store of a single process: a payload is the tensor itself."""

    def empty(self, size: int) -> Tensor:
        """Room for a vector [size] that may be sent."""
        return torch.empty(size)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def open(self, place: Tensor) -> Tensor:
        return place

    def to_private(self, tensor: Tensor) -> Tensor:
        """A tensor that stays as it is after `clear`."""
        return tensor

    def clear(self) -> None:
        """Forget all payloads: here, they go when nobody holds them any more."""


@dataclass(frozen=True)
class NodeReport:
    """What one node's round came to."""

    node: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # by key, those that it has
    notes: Mapping[str, float] = field(default_factory=dict)  # the algorithm's own
    moved: Movement | None = None  # if it was asked for


@dataclass(frozen=True)
class ShardReport:
    nodes: list[NodeReport]
    broken: list[int]  # nodes whose parameters are no longer finite numbers
    spread: list[tuple[str, Any]]  # (architecture, place of the sum of parameters)
    squares: dict[str, dict[int, float]]
    seconds: dict[str, float]


@dataclass
class NodeRuntime:
    """A node with the machinery around it."""

    node: Node[Any]
    persistent_tensors: dict[str, Tensor] = field(default_factory=dict)
    classes: Classes = field(default_factory=dict)  # of which its state may be made
    local: LocalContext | None = None
    coroutine: Coroutine[Any, Any, None] | None = None
    answer: Any = None
    train_loss: float = 0.0
    train_examples: int = 0
    scores: dict[str, float] = field(default_factory=dict)  # by key of a metric; empty until judged
    start: tuple[Tensor, ...] = ()  # parameters and buffers at the start of the round
    before: Tensor | None = None  # parameters at the start of a round whose movement is measured
    trained: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # before, after training
    moved: Movement | None = None
    finite: tuple[Tensor, int] | None = None  # parameters that training left, and their version
    broken: bool = False  # whether its parameters are no longer finite numbers

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured in this round, by key."""
        if not self.train_examples:
            return self.scores
        return self.scores | {"train_loss": self.train_loss / self.train_examples}


RoundFunction = Callable[[Node[Any]], Coroutine[Any, Any, None]]
VersionedTensor = tuple[
    int, str, Tensor, int
]  # sender, name, tensor, how often it had been changed


class Shard:
    """Drives the coroutines of its nodes; every method is one order of the lockstep engine."""

    @exclusive_torch()
    def __init__(self, world: World, nodes: Sequence[int], store: Store) -> None:
        self.world, self.store = world, store
        self.kept: set[int] = set()  # addresses of what nodes keep after this round
        self.mean_cache: MeanCache = {}  # results that nodes of this shard have in common
        self.opened: dict[tuple[int, int], Message] = {}  # messages of this round by sender, number
        self.models = {name: a.build_flat() for name, a in world.architectures.items()}
        self.members = {node: self._member(node) for node in sorted(nodes)}
        self.held_out = {
            node: world.train.subset(world.validation[node])
            for node in self.members
            if len(world.validation[node])
        }
        self.seconds = no_time()
        self.spread = ConsensusSums()
        self.sent: list[VersionedTensor] = []  # what must not change in this round
        self.evaluating = False
        self.round_function: RoundFunction = (
            world.algorithm.round
        )  # what a node does from beginning to end

    def _member(self, node: int) -> NodeRuntime:
        world = self.world
        architecture = world.architecture(node)
        start = None if world.experiment.init.start == "shared" else node
        params, buffers = architecture.initial(world.seed, start, float(world.gains[node]))
        if world.model_owner(node) != node:
            params, buffers = torch.empty(0), torch.empty(0)
        counts = world.label_counts[node]
        member = NodeRuntime(
            Node(
                id=node,
                num_nodes=world.nodes,
                num_examples=len(world.parts[node]),
                label_proportions=counts / counts.sum().clamp(min=1),
                architecture=architecture.name,
                layout=architecture.layout,
                params=params,
                buffers=buffers,
                seed=world.seed,
                rounds=world.rounds,
                hub=world.hub,
            )
        )
        self._begin_round(member.node, 0, world.neighbours(0), world.out_neighbours(0))
        # Not the streams of round 0: there, the same numbers would come again.
        member.node.rng = torch_stream(world.seed, "init-node", node)
        member.node.coin = torch_stream(world.seed, "init-coin")
        member.node.state = world.algorithm.init(member.node)
        member.classes = classes_in(member.node.state)
        check_state(member.node.state, member.classes)
        self._keep(member)
        world.privacy_filter(node, member.persistent_tensors).set_reference([{"x": params}])
        return member

    def _begin_round(
        self, node: Node[Any], round: int, neighbours: Neighbours, out_neighbours: Neighbours
    ) -> None:
        edge_weights = self.world.edge_weights(node.id, round)
        node.begin_round(round, neighbours, out_neighbours, edge_weights, self.mean_cache)

    # The round

    @exclusive_torch()
    def begin(self, round: int, evaluate: bool) -> ShardOutput:
        return self._start(round, evaluate, self.world.algorithm.round)

    @exclusive_torch()
    def pre_round(self) -> ShardOutput:
        """As `begin`, for what comes before the first round: its answer scales initial weights."""
        return self._start(PRE_ROUND, False, self._amplify)

    async def _amplify(self, node: Node[Any]) -> None:
        assert self.world.pre_round is not None
        gain = await self.world.pre_round.estimate(node)
        if self.world.model_owner(node.id) == node.id:
            node.params = self.world.architecture(node.id).amplified(node.params, gain)

    def _start(self, round: int, evaluate: bool, round_function: RoundFunction) -> ShardOutput:
        """Let everyone who is there begin to play."""
        self.round_function = round_function
        self.store.clear()
        self.mean_cache.clear()
        self.opened.clear()
        self._reset(round, evaluate)
        graph, out_neighbours = self.world.neighbours(round), self.world.out_neighbours(round)
        for member in self.present:
            node = member.node
            self._begin_round(node, round, graph, out_neighbours)
            # Before the first round, nobody says anything about data.
            node.privacy_filter = (
                PrivacyFilter()
                if round == PRE_ROUND
                else self.world.privacy_filter(node.id, member.persistent_tensors)
            )
            member.start = (node.params, node.buffers)
            measured = evaluate and self.world.experiment.evaluation.spread
            member.before = node.params if measured else None
            member.local = LocalContext(
                node=node.id,
                round=round,
                seed=self.world.seed,
                data=self.world.train,
                indices=self.world.parts[node.id],
                architecture=node.architecture,
                models=self.models,
                persistent_tensors=member.persistent_tensors,
                held_out=self.held_out.get(node.id),
                allocate=self.store.empty,
                cache=self.world.cache,
            )
            member.coroutine = None
        return self._advance(member.node.id for member in self.present)

    @exclusive_torch()
    def resume(self, deliveries: Mapping[int, list[Packet]]) -> ShardOutput:
        for node, packets in deliveries.items():
            self.members[node].answer = tuple(self._timed("exchange", self._open, packets))
        return self._advance(deliveries)

    @exclusive_torch()
    def finish(self) -> ShardReport:
        """Close the round: check what the contract promises, and say what was measured."""
        _check_unchanged(self.sent)
        self.kept.clear()
        for member in self.present:
            if member.before is not None:
                member.moved = movement(member.before, member.node.params, member.trained)
            self._settle(member)
            self._evaluate_if_due(member)
        return self._report()

    @exclusive_torch()
    def evaluate_models(self) -> ShardReport:
        """Judge the models as they are, without a round."""
        self.store.clear()
        self._reset(PRE_ROUND, evaluate=True)
        for member in self.present:
            self._evaluate_if_due(member)
        return self._report()

    def _advance(self, nodes: Iterable[int]) -> ShardOutput:
        step = ShardOutput()
        for node in sorted(nodes):
            received = _with_versions(self.members[node].answer or ())
            try:
                self._drive(self.members[node], step)
            except PeerageError:
                raise
            except Exception as error:
                error.add_note(f"at node {node} in round {self.members[node].node.round}")
                raise
            _check_unchanged(received)
        return step

    def _drive(self, member: NodeRuntime, step: ShardOutput) -> None:
        """Run one node until it waits for messages or its round is over."""
        assert member.local is not None
        node = member.node
        if member.coroutine is None:
            member.coroutine = self._coroutine(node)
        while True:
            try:
                request = self._timed("combine", member.coroutine.send, member.answer)
            except StopIteration:
                _check_awaited(node)
                step.finished.append(node.id)
                return
            member.answer = None
            if isinstance(request, Compute):
                member.answer = self._timed(request.phase, request.run, member.local)
                if isinstance(request, Train) and member.before is not None:
                    member.trained.append((request.params, member.answer.params))
                if isinstance(request, Train) and not self._note(member, member.answer):
                    began_well = all(map(all_finite, member.start))
                    (step.diverged if began_well else step.broken).append(node.id)
                    step.finished.append(node.id)
                    member.coroutine.close()
                    return
            elif isinstance(request, Send | Receive):
                if self.world.experiment.evaluation.at == "exchange" and member.train_examples:
                    self._evaluate_if_due(member)
                if isinstance(request, Receive):
                    step.waiting[node.id] = request.senders
                    return
                step.packets.append(self._timed("exchange", self._post, node, request))
                step.spoilt |= self._timed("exchange", self._spoilt, member, request.message)
            else:
                raise PeerageError(f"the algorithm awaited {request!r}, which is not a request")

    def _coroutine(self, node: Node[Any]) -> Coroutine[Any, Any, None]:
        coroutine: Any = self.round_function(node)
        if not isinstance(coroutine, Coroutine):
            name = type(self.world.algorithm).__name__
            raise PeerageError(
                f"{name}.round gave {coroutine!r} instead of a coroutine; "
                "define it as `async def round(self, node)`"
            )
        return coroutine

    def _spoilt(self, member: NodeRuntime, message: Message) -> dict[int, str]:
        """The node and the name of a tensor that it sends, if that has NaN or infinite entries."""
        for name, tensor in message.payload.items():
            if not self._is_finite(member, tensor):
                return {member.node.id: name}
        return {}

    def _is_finite(self, member: NodeRuntime, tensor: Tensor) -> bool:
        """Whether no entry is NaN or infinite; training has looked at its result already."""
        known = member.finite
        unchanged = known is not None and tensor is known[0] and tensor._version == known[1]
        return unchanged or all_finite(tensor)

    def _note(self, member: NodeRuntime, trained: Trained) -> bool:
        """Record a training result; False if it is no longer made of finite numbers."""
        stats = trained.stats
        member.finite = trained.params, trained.params._version
        if trained.finite:
            member.start = ()  # nothing asks for it any more, and models may be large
        member.train_loss += stats.loss * stats.examples
        member.train_examples += stats.examples
        return trained.finite

    def _post(self, node: Node[Any], request: Send) -> Packet:
        unknown = [
            peer for peer in request.to if not 0 <= peer < self.world.nodes or peer == node.id
        ]
        if unknown:
            raise PeerageError(f"node {node.id} sent to {unknown[0]}, which is not another node")
        message = request.message
        if message.architecture not in self.models:
            raise PeerageError(
                f"node {node.id} sent a payload of architecture {message.architecture!r}, which no "
                f"node has; use one of {', '.join(self.models)}"
            )
        for name, tensor in message.payload.items():
            check_dtype(tensor.dtype, f"node {node.id} sends tensor {name!r}")
        self.sent += _with_versions([message])
        places = {name: self.store.put(tensor) for name, tensor in message.payload.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in message.payload.values())
        return Packet(message.envelope, request.to, places, size)

    def _open(self, packets: list[Packet]) -> list[Message]:
        """The messages in the parcels; one that several nodes of this shard get is opened once."""
        messages = []
        for p in packets:
            message = self.opened.get((p.sender, p.number))
            if message is None:
                payload = {name: self.store.open(place) for name, place in p.payload.items()}
                message = Message(p.envelope, payload)
                if p.number != UNNUMBERED:
                    self.opened[p.sender, p.number] = message
            messages.append(message)
        return messages

    def _settle(self, member: NodeRuntime) -> None:
        """What a node keeps must be whole and its own: payloads are forgotten after the round."""
        node = member.node
        check_state(node.state, member.classes)
        if self.world.model_owner(node.id) != node.id:
            node.params, node.buffers = torch.empty(0), torch.empty(0)
        elif node.params.shape != (node.layout.size,) or node.params.dtype != torch.float32:
            raise PeerageError(
                f"the algorithm gave node {node.id} parameters of shape {tuple(node.params.shape)} "
                f"and type {node.params.dtype}; its model needs ({node.layout.size},) in float32"
            )
        # A look at every model costs time. Without one, training or sending finds it a round later.
        if self.evaluating or node.round + 1 == node.rounds:
            kept = (node.params, node.buffers)
            member.broken = not all(self._is_finite(member, tensor) for tensor in kept)
        self._keep(member)

    def _keep(self, member: NodeRuntime) -> None:
        """Give what a node keeps memory of its own, so that no other node can change it."""
        node = member.node
        node.params, node.buffers = self._to_private(node.params), self._to_private(node.buffers)
        node.state = map_tensors(self._to_private, node.state)

    def _to_private(self, tensor: Tensor) -> Tensor:
        own = self.store.to_private(tensor)
        if own.numel() and own.untyped_storage().data_ptr() in self.kept:
            own = own.clone()
        self.kept.add(own.untyped_storage().data_ptr())
        return own

    # Measuring

    def _reset(self, round: int, evaluate: bool) -> None:
        self.evaluating = evaluate
        there = set(self.world.present(round))
        self.present = [member for id, member in self.members.items() if id in there]
        self.seconds = no_time()
        self.spread = ConsensusSums()
        self.sent = []
        for member in self.members.values():
            member.answer = None
            member.train_loss, member.train_examples = 0.0, 0
            member.scores = {}
            member.before, member.trained, member.moved = None, [], None
            member.start, member.finite, member.broken = (), None, False

    def _evaluate_if_due(self, member: NodeRuntime) -> None:
        """Once in a round that is judged, and only those who keep a model."""
        keeps = self.world.model_owner(member.node.id) == member.node.id
        if self.evaluating and keeps and not member.broken and not member.scores:
            self._timed("evaluate", self._evaluate, member)

    def _evaluate(self, member: NodeRuntime) -> None:
        node = member.node
        params = self.world.algorithm.evaluated(node)
        model = self.models[node.architecture]
        model.load(params, node.buffers)
        member.scores = dict(vars(score(model, self.world.test)))
        if node.id in self.held_out:
            held_out = vars(score(model, self.held_out[node.id]))
            member.scores |= {VALIDATION + key: value for key, value in held_out.items()}
        self.spread.add(node.id, node.architecture, params)

    def _report(self) -> ShardReport:
        reports = [NodeReport(m.node.id, m.metrics, m.node.notes, m.moved) for m in self.present]
        spread = [(name, self.store.put(total)) for name, total in self.spread.sums.items()]
        broken = [m.node.id for m in self.present if m.broken]
        return ShardReport(reports, broken, spread, self.spread.squares, self.seconds)

    def _timed(self, phase: str, call: Any, *arguments: Any) -> Any:
        start = perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + perf_counter() - start

    def released(self) -> dict[int, int]:
        """How many messages each node has released, of those that noise was laid over."""
        veils = {
            id: self.world.privacy_filter(id, member.persistent_tensors)
            for id, member in self.members.items()
        }
        return {
            id: privacy_filter.messages
            for id, privacy_filter in veils.items()
            if privacy_filter.noise.active
        }

    # Saving

    def model(self, node: int) -> tuple[Any, Any, Any]:
        """Where copies of the node's parameters, evaluated parameters and buffers lie.

        The first two are the same object where the algorithm evaluates the parameters themselves.
        """
        self.store.clear()
        held = self.members[node].node
        params, evaluated = held.params, self.world.algorithm.evaluated(held)
        place = self.store.put(params)
        other = place if evaluated is params else self.store.put(evaluated)
        return place, other, self.store.put(held.buffers)

    def save(self, path: str) -> dict[str, Any]:
        """Write everything that survives a round; the answer is the JSON part of it."""
        tensors: dict[str, Tensor] = {}
        trees = {}
        for id, member in self.members.items():
            tensors[f"{id}.params"] = member.node.params
            if member.node.buffers.numel():
                tensors[f"{id}.buffers"] = member.node.buffers
            trees[str(id)] = {
                "state": pack(member.node.state, tensors, f"{id}.state"),
                "memory": pack(member.persistent_tensors, tensors, f"{id}.memory"),
            }
            if saves_evaluated(self.world.algorithm) and self.world.model_owner(id) == id:
                tensors[f"{id}.evaluated"] = self.world.algorithm.evaluated(member.node)
        save_file(_apart(tensors), path)
        return trees

    def restore(
        self, folder: str, trees: Mapping[str, Any], parts: Mapping[str, str], rounds: int = 0
    ) -> None:
        """Take over what `save` wrote after so many rounds; `parts` says where each node is."""
        for id, member in self.members.items():
            node, tree = member.node, trees[str(id)]
            with safe_open(Path(folder) / parts[str(id)], framework="pt") as file:
                own = [key for key in file.keys() if key.startswith(f"{id}.")]  # noqa: SIM118
                tensors = {key: file.get_tensor(key) for key in own}
            if tensors[f"{id}.params"].shape != node.params.shape:
                raise InputError(
                    f"the checkpoint holds {tensors[f'{id}.params'].numel()} parameters for node "
                    f"{id}, the model has {node.params.numel()}; the experiment was changed"
                )
            node.params = tensors[f"{id}.params"]
            node.buffers = tensors.get(f"{id}.buffers", node.buffers)
            node.state = unpack(tree["state"], tensors, node.state)
            member.persistent_tensors = unpack(tree["memory"], tensors, {})
        self._begin_last_round(rounds)

    def _begin_last_round(self, rounds: int) -> None:
        """Put every node into the last round that it took part in: `evaluated` may depend on it."""
        graph = cache(
            lambda round: (self.world.neighbours(round), self.world.out_neighbours(round))
        )
        for id, member in self.members.items():
            present = (r for r in reversed(range(rounds)) if self.world.faults.present(id, r))
            last = next(present, 0)
            self._begin_round(member.node, last, *graph(last))


def saves_evaluated(algorithm: Algorithm[Any]) -> bool:
    """Whether checkpoints hold what metrics evaluate, beside `node.params`."""
    return type(algorithm).evaluated is not Algorithm.evaluated


def _with_versions(messages: Iterable[Message]) -> list[VersionedTensor]:
    return [(m.sender, name, x, x._version) for m in messages for name, x in m.payload.items()]


def _check_awaited(node: Node[Any]) -> None:
    """A method of a node that was called without `await` has done nothing."""
    forgotten = sorted({call.name for call in node.calls})
    if forgotten:
        raise PeerageError(
            f"node {node.id} called node.{forgotten[0]} without await in round {node.round + 1}, "
            f"so nothing happened; write `await node.{forgotten[0]}(...)`"
        )


def _check_unchanged(stamped: Iterable[VersionedTensor]) -> None:
    for sender, name, tensor, version in stamped:
        if tensor._version != version:
            raise PeerageError(
                f"the algorithm changed tensor {name!r} of node {sender} in place after "
                "sending it; assign a new tensor instead (x = x + dx, not x += dx)"
            )


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor with a storage of its own: the file format refuses any that share one."""
    apart: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        alone = whole and tensor.is_contiguous() and tensor.data_ptr() not in taken
        apart[name] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        taken.add(tensor.data_ptr())
    return apart
