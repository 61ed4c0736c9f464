"""A shard: runs the coroutines of some nodes, in a worker, in `serial` or in a real peer."""

import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from math import isnan
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from peerage.algorithm import Algorithm, Node
from peerage.engine.evaluated import ONLY, ScoreCache, Scores, candidates_of, models_of
from peerage.engine.groups import Tested, evaluate
from peerage.engine.router import Packet, ShardOutput
from peerage.engine.store import Store
from peerage.engine.together import SharedRequest, SharedTraining
from peerage.engine.world import World
from peerage.errors import InputError, PeerageError
from peerage.graphs.graph import Neighbours
from peerage.isolation import exclusive_torch
from peerage.privacy import PrivacyFilter
from peerage.randomness import torch_stream
from peerage.records.metrics import VALIDATION
from peerage.records.phases import no_time
from peerage.requests import (
    PRE_ROUND,
    UNNUMBERED,
    Acknowledgements,
    Compute,
    MeanCache,
    Message,
    Receive,
    Send,
    check_dtype,
)
from peerage.state import Classes, check_state, classes_in, map_tensors, pack, unpack
from peerage.vectors import Weights, all_finite
from peerage.work.context import LocalContext
from peerage.work.evaluation import ConsensusSums, Movement, movement, scores
from peerage.work.together import TrainedTogether, TrainTogether
from peerage.work.training import Train, Trained

RECEIVED = "received"  # key of a node's acknowledgements among its persistent tensors
# In the metadata of every checkpoint file, for readers that do not use Peerage.
CHECKPOINT_NOTE = {
    "layout": "flat vectors: all tensors of a model one after the other, those of four dimensions "
    "in channels-last order",
    "model": "to get a model out, use: peerage model FOLDER --out model.safetensors",
}
GRAPHS_KEPT = 8  # graphs of other rounds that `Node.graph_at` keeps

log = logging.getLogger("peerage.engine")


class InProcessStore:
    """The store of a single process: a payload is the tensor itself."""

    shards = 1

    def empty(self, size: int) -> Tensor:
        """An empty vector [size] that may be sent."""
        return torch.empty(size)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def open(self, place: Tensor) -> Tensor:
        return place

    def to_private(self, tensor: Tensor) -> Tensor:
        """A tensor that stays valid after `clear`."""
        return tensor

    def clear(self) -> None:
        """Do nothing: payloads are freed with their last reference."""

    def free(self) -> None:
        """Do nothing, as `clear`."""


@dataclass(frozen=True)
class NodeReport:
    """The result of a round of one node."""

    node: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # by key
    notes: Mapping[str, float] = field(default_factory=dict)  # of the algorithm
    moved: Movement | None = None  # if it is recorded
    tests: Mapping[int, Tested] = field(default_factory=dict)  # by cluster, if there are groups
    models: Mapping[str, Scores] = field(default_factory=dict)  # of other models, by name


@dataclass(frozen=True)
class ShardReport:
    nodes: list[NodeReport]
    broken: list[int]  # nodes whose parameters are NaN or infinite
    spread: list[tuple[str, Any]]  # (architecture, reference to the sum of parameters)
    squares: dict[str, dict[int, float]]
    seconds: dict[str, float]


@dataclass
class NodeRuntime:
    """A node, its coroutine, and what the engine records about it."""

    node: Node[Any]
    persistent_tensors: dict[str, Tensor] = field(default_factory=dict)
    classes: Classes = field(default_factory=dict)  # allowed in its state
    local: LocalContext | None = None
    coroutine: Coroutine[Any, Any, None] | None = None
    answer: Any = None
    train_loss: float = 0.0
    train_examples: int = 0
    scores: Scores = field(default_factory=dict)  # of the headline; empty until evaluated
    tests: dict[int, Tested] = field(default_factory=dict)  # see `NodeReport`
    others: dict[str, Scores] = field(default_factory=dict)  # of other models, by name
    cache: ScoreCache = field(default_factory=ScoreCache)
    start: tuple[Tensor, ...] = ()  # parameters and buffers at the start of the round
    before: Tensor | None = None  # parameters at the start of a round whose movement is recorded
    trained: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # before, after training
    moved: Movement | None = None
    finite: tuple[Tensor, int] | None = None  # parameters from training, and their version
    broken: bool = False  # whether its parameters are NaN or infinite

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of this round, by key."""
        if not self.train_examples:
            return self.scores
        return self.scores | {"train_loss": self.train_loss / self.train_examples}


# Called with a node, its evaluated models by name, the headline first, and their scores.
EvaluationWatch = Callable[[int, Mapping[str, Weights], Mapping[str, Scores]], None]
RoundFunction = Callable[[Node[Any]], Coroutine[Any, Any, None]]
VersionedTensor = tuple[int, str, Tensor, int]  # sender, name, tensor, version when sent


class Shard:
    """Runs the coroutines of its nodes; the engine calls its public methods."""

    @exclusive_torch()
    def __init__(self, world: World, nodes: Sequence[int], store: Store) -> None:
        self.world, self.store = world, store
        self.kept: set[int] = set()  # addresses of the tensors that nodes keep after this round
        self.mean_cache: MeanCache = {}  # results that nodes of this shard share
        self.opened: dict[tuple[int, int], Message] = {}  # messages of this round by sender, number
        self.graph_of = lru_cache(GRAPHS_KEPT)(world.neighbours)
        self.models = {name: a.build_flat() for name, a in world.architectures.items()}
        self.members = {node: self._make_runtime(node) for node in sorted(nodes)}
        self.held_out = {
            node: world.train.subset(world.validation[node])
            for node in self.members
            if len(world.validation[node])
        }
        self.seconds = no_time()
        self.spread = ConsensusSums()
        self.sent: list[VersionedTensor] = []  # must not change in this round
        self.evaluating = False
        self.early = False  # whether models are evaluated after training, before the exchange
        self.round_function: RoundFunction = world.algorithm.round
        self.shared_training = SharedTraining(store, self._context_of_request)
        self.on_evaluated: EvaluationWatch | None = None

    def _make_runtime(self, node: int) -> NodeRuntime:
        world = self.world
        architecture = world.architecture(node)
        params, buffers = world.initial(node)
        if world.model_owner(node) != node:
            params, buffers = torch.empty(0), torch.empty(0)
        runtime = NodeRuntime(
            Node(
                id=node,
                num_nodes=world.nodes,
                num_examples=len(world.parts[node]),
                label_proportions=world.label_proportions(node),
                architecture=architecture.name,
                layout=architecture.layout,
                params=params,
                buffers=buffers,
                seed=world.seed,
                layouts=world.layouts,
                buffer_layouts=world.buffer_layouts,
                channels=world.channels,
                draw_initial=partial(world.draw_initial, node),
                rounds=world.rounds,
                hub=world.hub,
                graph_of=self.graph_of,
            )
        )
        self._recall_acknowledgements(runtime)
        self._begin_round(runtime.node, 0, world.neighbours(0), world.out_neighbours(0))
        # Not the streams of round 0, which would repeat these numbers.
        runtime.node.rng = torch_stream(world.seed, "init-node", node)
        runtime.node.coin = torch_stream(world.seed, "init-coin")
        runtime.node.state = world.algorithm.init(runtime.node)
        runtime.classes = classes_in(runtime.node.state)
        check_state(runtime.node.state, runtime.classes)
        self._keep(runtime)
        world.privacy_filter(node, runtime.persistent_tensors).set_reference([{"x": params}])
        return runtime

    def _recall_acknowledgements(self, runtime: NodeRuntime) -> None:
        """Begin with whose messages arrived in the last round, if the algorithm asks for it."""
        if self.world.algorithm.acknowledge:
            received = runtime.persistent_tensors.get(RECEIVED)
            runtime.node.acknowledgements = Acknowledgements(runtime.node.id, received)

    def _begin_round(
        self,
        node: Node[Any],
        round: int,
        neighbours: Neighbours,
        out_neighbours: Neighbours,
        final: bool = False,
    ) -> None:
        edge_weights = self.world.edge_weights(node.id, round - final)
        node.begin_round(round, neighbours, out_neighbours, edge_weights, self.mean_cache)

    # The round

    @exclusive_torch()
    def begin(self, round: int, evaluate: bool) -> ShardOutput:
        return self._start(round, evaluate, self.world.algorithm.round)

    @exclusive_torch()
    def final(self, rounds: int) -> ShardOutput:
        """Begin the step after `rounds` rounds, with the graph and the nodes of the last one."""
        return self._start(rounds, True, self.world.algorithm.final, final=True)

    @exclusive_torch()
    def pre_round(self) -> ShardOutput:
        """Begin the exchange before the first round, whose result scales the initial weights."""
        return self._start(PRE_ROUND, False, self._amplify)

    async def _amplify(self, node: Node[Any]) -> None:
        assert self.world.pre_round is not None
        gain = await self.world.pre_round.estimate(node)
        if self.world.model_owner(node.id) == node.id:
            node.params = self.world.architecture(node.id).amplified(node.params, gain)

    def _start(
        self, round: int, evaluate: bool, round_function: RoundFunction, final: bool = False
    ) -> ShardOutput:
        """Start the round of every present node, or the `final` step after the last round."""
        self.round_function = round_function
        self.early = self.world.experiment.evaluated_at == "exchange" and not final
        self.store.clear()
        self.mean_cache.clear()
        self.opened.clear()
        self._reset(round - final, evaluate)
        graph = self.world.neighbours(round - final)
        out_neighbours = self.world.out_neighbours(round - final)
        for runtime in self.present:
            node = runtime.node
            self._recall_acknowledgements(runtime)
            self._begin_round(node, round, graph, out_neighbours, final)
            node.evaluation_due = evaluate and self.world.is_evaluated(node.id)
            # Before the first round, messages hold nothing about the data.
            node.privacy_filter = (
                PrivacyFilter()
                if round == PRE_ROUND
                else self.world.privacy_filter(node.id, runtime.persistent_tensors)
            )
            runtime.start = (node.params, node.buffers)
            keeps_model = self.world.model_owner(node.id) == node.id
            recorded = evaluate and self.world.experiment.evaluation.spread and keeps_model
            runtime.before = node.params if recorded else None
            runtime.local = self._context(node.id, round, runtime.persistent_tensors)
            runtime.coroutine = None
        return self._advance(runtime.node.id for runtime in self.present)

    def _context(
        self, node: int, round: int, persistent_tensors: dict[str, Tensor], orders: int = 0
    ) -> LocalContext:
        return LocalContext(
            node=node,
            round=round,
            seed=self.world.seed,
            data=self.world.train,
            indices=self.world.parts[node],
            architecture=self.world.assignment[node],
            models=self.models,
            persistent_tensors=persistent_tensors,
            held_out=self.held_out.get(node),
            allocate=self.store.empty,
            cache=self.world.cache,
            orders=orders,
            label_proportions=self.world.label_proportions(node),
        )

    def _context_of_request(self, request: SharedRequest) -> LocalContext:
        """The context of a node of another shard, for which this one trains some models."""
        known = {} if request.position is None else {"position": torch.tensor(request.position)}
        return self._context(request.node, request.round, known, request.orders)

    @exclusive_torch()
    def resume(self, deliveries: Mapping[int, list[Packet]]) -> ShardOutput:
        for node, packets in deliveries.items():
            self.members[node].answer = tuple(self._timed("exchange", self._open, packets))
        return self._advance(deliveries)

    @exclusive_torch()
    def together(self, method: str, *arguments: Any) -> Any:
        """Take part in the training of several models; see `SharedTraining`."""
        return self._timed("train", getattr(self.shared_training, method), *arguments)

    @exclusive_torch()
    def resume_together(self, answers: Mapping[int, Any]) -> ShardOutput:
        """Continue nodes whose models were trained together, or are trained now (None)."""
        for node, found in answers.items():
            request, trained = self._timed("train", self.shared_training.answer, node, found)
            self.members[node].answer = trained
            self._note_together(self.members[node], request, trained)
        return self._advance(answers)

    @exclusive_torch()
    def finish(self) -> ShardReport:
        """End the round: check the rules of the contract, and report the metrics."""
        _check_unchanged(self.sent)
        self.kept.clear()
        for runtime in self.present:
            if runtime.before is not None:
                runtime.moved = movement(runtime.before, runtime.node.params, runtime.trained)
            if runtime.node.acknowledgements is not None:
                runtime.persistent_tensors[RECEIVED] = runtime.node.acknowledgements.saved()
            self._settle(runtime)
            self._evaluate_if_due(runtime, settled=True)
        return self._report()

    def free_messages(self) -> None:
        """Free the memory of all messages after the last round."""
        self.sent = []
        self.mean_cache.clear()
        self.opened.clear()
        self.store.free()

    @exclusive_torch()
    def evaluate_models(self, round: int = PRE_ROUND) -> ShardReport:
        """Evaluate the models after a round, without another one."""
        self.store.clear()
        self._reset(round, evaluate=True)
        for runtime in self.present:
            if round != PRE_ROUND:
                self._check_kept(runtime)
            self._evaluate_if_due(runtime, settled=True)
        return self._report()

    def _advance(self, nodes: Iterable[int]) -> ShardOutput:
        output = ShardOutput()
        for node in sorted(nodes):
            answer = self.members[node].answer
            received = _with_versions(answer if isinstance(answer, tuple) else ())
            try:
                self._drive(self.members[node], output)
            except PeerageError:
                raise
            except Exception as error:
                error.add_note(f"at node {node} in round {self.members[node].node.round}")
                raise
            _check_unchanged(received)
        return output

    def _drive(self, runtime: NodeRuntime, output: ShardOutput) -> None:
        """Run one node until it waits for messages or its round is over."""
        assert runtime.local is not None
        node = runtime.node
        if runtime.coroutine is None:
            runtime.coroutine = self._coroutine(node)
        while True:
            try:
                request = self._timed("combine", runtime.coroutine.send, runtime.answer)
            except StopIteration:
                _check_awaited(node)
                output.finished.append(node.id)
                return
            runtime.answer = None
            if isinstance(request, TrainTogether) and self.store.shards > 1:
                output.together[node.id] = self.shared_training.ask(request, runtime.local)
                return
            if isinstance(request, Compute):
                runtime.answer = self._timed(request.phase, request.run, runtime.local)
                if isinstance(request, TrainTogether):
                    self._note_together(runtime, request, runtime.answer)
                if isinstance(request, Train) and runtime.before is not None:
                    runtime.trained.append((request.params, runtime.answer.params))
                if isinstance(request, Train) and not self._note(runtime, runtime.answer):
                    finite_start = all(map(all_finite, runtime.start))
                    (output.diverged if finite_start else output.broken).append(node.id)
                    output.finished.append(node.id)
                    runtime.coroutine.close()
                    return
            elif isinstance(request, Send | Receive):
                if self.early and runtime.train_examples:
                    self._evaluate_if_due(runtime)
                if isinstance(request, Receive):
                    output.waiting[node.id] = request.senders
                    return
                output.packets.append(self._timed("exchange", self._packet, node, request))
                output.spoilt |= self._timed("exchange", self._spoilt, runtime, request.message)
            else:
                raise PeerageError(f"the algorithm awaited {request!r}, which is not a request")

    def _coroutine(self, node: Node[Any]) -> Coroutine[Any, Any, None]:
        coroutine: Any = self.round_function(node)
        if not isinstance(coroutine, Coroutine):
            name, step = type(self.world.algorithm).__name__, self.round_function.__name__
            raise PeerageError(
                f"{name}.{step} returned {coroutine!r} instead of a coroutine; "
                f"define it as `async def {step}(self, node)`"
            )
        return coroutine

    def _spoilt(self, runtime: NodeRuntime, message: Message) -> dict[int, str]:
        """{node: name of a tensor in its message with NaN or infinite entries}, or empty."""
        for name, tensor in message.payload.items():
            if not self._is_finite(runtime, tensor):
                return {runtime.node.id: name}
        return {}

    def _is_finite(self, runtime: NodeRuntime, tensor: Tensor) -> bool:
        """Whether no entry is NaN or infinite; a result of training was checked already."""
        known = runtime.finite
        unchanged = known is not None and tensor is known[0] and tensor._version == known[1]
        return unchanged or all_finite(tensor)

    def _note(self, runtime: NodeRuntime, trained: Trained) -> bool:
        """Record a training result; returns False if it is NaN or infinite."""
        stats = trained.stats
        runtime.finite = trained.params, trained.params._version
        if trained.finite:
            runtime.start = ()  # no longer needed, and models may be large
        runtime.train_loss += stats.loss * stats.examples
        runtime.train_examples += stats.examples
        return trained.finite

    def _note_together(
        self, runtime: NodeRuntime, request: TrainTogether, trained: TrainedTogether
    ) -> None:
        """Record the training of the node's own model, if it is among them, and log failures."""
        own = runtime.node.id
        if own in request.pupils:
            stats = trained.stats[own]
            runtime.train_loss += stats.loss * stats.examples
            runtime.train_examples += stats.examples
            if runtime.before is not None:
                runtime.trained.append((request.pupils[own].params, trained.models[own].params))
        for key in trained.diverged:
            log.warning(
                "node %d, round %d: the model of sender %d became NaN or infinite in "
                "train_together; it is left out, and returned unchanged",
                own,
                runtime.node.round + 1,
                key,
            )

    def _packet(self, node: Node[Any], request: Send) -> Packet:
        unknown = [
            other for other in request.to if not 0 <= other < self.world.nodes or other == node.id
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
        """The messages in the packets; one for several nodes of this shard is opened once."""
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

    def _settle(self, runtime: NodeRuntime) -> None:
        """Check and copy what a node keeps: payloads are freed after the round."""
        node = runtime.node
        check_state(node.state, runtime.classes)
        if self.world.model_owner(node.id) != node.id:
            node.params, node.buffers = torch.empty(0), torch.empty(0)
        elif node.params.shape != (node.layout.size,) or node.params.dtype != torch.float32:
            raise PeerageError(
                f"the algorithm gave node {node.id} parameters of shape {tuple(node.params.shape)} "
                f"and type {node.params.dtype}; its model needs ({node.layout.size},) in float32"
            )
        # Checking takes time. In other rounds, training or sending finds the error a round later.
        if self.evaluating or node.round + 1 == node.rounds:
            self._check_kept(runtime)
        self._keep(runtime)

    def _check_kept(self, runtime: NodeRuntime) -> None:
        """Note whether the parameters or buffers of a node are NaN or infinite."""
        kept = (runtime.node.params, runtime.node.buffers)
        runtime.broken = not all(self._is_finite(runtime, tensor) for tensor in kept)

    def _keep(self, runtime: NodeRuntime) -> None:
        """Give each tensor that a node keeps its own memory, which no other node can change."""
        node = runtime.node
        node.params, node.buffers = self._to_private(node.params), self._to_private(node.buffers)
        node.state = map_tensors(self._to_private, node.state)

    def _to_private(self, tensor: Tensor) -> Tensor:
        private = self.store.to_private(tensor)
        if private.numel() and private.untyped_storage().data_ptr() in self.kept:
            private = private.clone()
        self.kept.add(private.untyped_storage().data_ptr())
        return private

    # Evaluation

    def _reset(self, round: int, evaluate: bool) -> None:
        self.evaluating = evaluate
        present = set(self.world.present(round))
        self.present = [runtime for id, runtime in self.members.items() if id in present]
        self.seconds = no_time()
        self.spread = ConsensusSums()
        self.sent = []
        for runtime in self.members.values():
            runtime.answer = None
            runtime.train_loss, runtime.train_examples = 0.0, 0
            runtime.scores, runtime.tests, runtime.others = {}, {}, {}
            runtime.before, runtime.trained, runtime.moved = None, [], None
            runtime.start, runtime.finite, runtime.broken = (), None, False

    def _evaluate_if_due(self, runtime: NodeRuntime, settled: bool = False) -> None:
        """Evaluate a node once in a round with evaluation; `settled` after its end."""
        due = self.evaluating and self.world.is_evaluated(runtime.node.id)
        if due and not runtime.broken and not runtime.scores:
            self._timed("evaluate", self._evaluate, runtime, settled)

    def _evaluate(self, runtime: NodeRuntime, settled: bool) -> None:
        node = runtime.node
        models = models_of(self.world.algorithm, node)
        headline, first = next(iter(models.items()))
        results = {}
        candidates = candidates_of(self.world.algorithm, node)
        if candidates:
            tried = [(self._score(node.id, model), model) for model in candidates]
            lowest = min(tried, key=lambda pair: _comparable(pair[0][0]["loss"]))
            results[headline], models[headline] = lowest
        for name, model in models.items():
            if name in results:
                continue
            result = runtime.cache.find(name, model)
            if result is None:
                result = self._score(node.id, model)
                if settled:  # within a round, a tensor may be in memory that is reused after it
                    runtime.cache.keep(name, model, result)
            results[name] = result
        runtime.scores, runtime.tests = results.pop(headline)
        runtime.others = {name: scores for name, (scores, _) in results.items()}
        if node.id != self.world.hub_outside_means:
            self.spread.add(node.id, first.architecture, first.params)
        if self.on_evaluated is not None:
            self.on_evaluated(node.id, models, {headline: runtime.scores, **runtime.others})

    @exclusive_torch()
    def score_model(self, node: int, weights: Weights) -> Scores:
        """The scores of a model that a node does not keep, on its test set and held-out data."""
        return self._score(node, weights)[0]

    def evaluated_models(self, node: int) -> dict[str, Weights]:
        """The models of a node that metrics evaluate, as they are now; the headline first."""
        return models_of(self.world.algorithm, self.members[node].node)

    def _score(self, node: int, weights: Weights) -> tuple[Scores, dict[int, Tested]]:
        """The scores of a model on the test set and on the node's held-out examples."""
        model = self.models[weights.architecture]
        model.load(weights.params, weights.buffers)
        found, tests = evaluate(self.world, model, node)
        if node in self.held_out:
            held_out = scores(model, self.held_out[node], self.world.own_metrics)
            found |= {VALIDATION + key: value for key, value in held_out.items()}
        return found, tests

    def _report(self) -> ShardReport:
        reports = [
            NodeReport(m.node.id, m.metrics, m.node.notes, m.moved, m.tests, m.others)
            for m in self.present
        ]
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
        """The number of noisy messages that each node has released."""
        filters = {
            id: self.world.privacy_filter(id, runtime.persistent_tensors)
            for id, runtime in self.members.items()
        }
        return {id: filter.messages for id, filter in filters.items() if filter.noise.active}

    # Saving

    def model(self, node: int | None) -> tuple[list[Any], dict[str, tuple[int, int, str]]]:
        """References to a node's parameters, its buffers and other tensors of evaluated models.

        Then by name the parameters and buffers of each evaluated model, as positions in the list,
        and its architecture. Both are empty for None, a node of another shard.
        """
        self.store.clear()
        if node is None:
            return [], {}
        owner = self.members[node].node
        models = models_of(self.world.algorithm, owner)
        positions: dict[int, int] = {}  # id of a tensor -> its position
        places: list[Any] = []
        for tensor in (owner.params, owner.buffers, *_tensors(models.values())):
            if id(tensor) not in positions:
                positions[id(tensor)] = len(places)
                places.append(self.store.put(tensor))
        return places, {
            name: (positions[id(model.params)], positions[id(model.buffers)], model.architecture)
            for name, model in models.items()
        }

    def save(self, path: str) -> dict[str, Any]:
        """Write the tensors that survive a round; returns the JSON part of the state."""
        tensors, trees = self._pack()
        save_file(_with_own_storage(tensors), path, CHECKPOINT_NOTE)
        return trees

    @property
    def saved_bytes(self) -> int:
        """The bytes of tensors that `save` would write now."""
        tensors, _ = self._pack()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors that survive a round, and the JSON part of the state."""
        tensors: dict[str, Tensor] = {}
        trees = {}
        for id, runtime in self.members.items():
            tensors[f"{id}.params"] = runtime.node.params
            if runtime.node.buffers.numel():
                tensors[f"{id}.buffers"] = runtime.node.buffers
            trees[str(id)] = {
                "state": pack(runtime.node.state, tensors, f"{id}.state"),
                "memory": pack(runtime.persistent_tensors, tensors, f"{id}.memory"),
            }
            if saves_evaluated(self.world.algorithm) and self.world.model_owner(id) == id:
                models = models_of(self.world.algorithm, runtime.node)
                trees[str(id)] |= pack_models(models, runtime.node, tensors)
        return tensors, trees

    def restore(
        self,
        folder: str,
        trees: Mapping[str, Any],
        parts: Mapping[str, str],
        rounds: int = 0,
        final: bool = False,
    ) -> None:
        """Load what `save` wrote after `rounds` rounds, or after the step that follows the last.

        `parts` maps nodes to files.
        """
        for id, runtime in self.members.items():
            node, tree = runtime.node, trees[str(id)]
            with safe_open(Path(folder) / parts[str(id)], framework="pt") as file:
                keys = [key for key in file.keys() if key.startswith(f"{id}.")]  # noqa: SIM118
                tensors = {key: file.get_tensor(key) for key in keys}
            if tensors[f"{id}.params"].shape != node.params.shape:
                raise InputError(
                    f"the checkpoint holds {tensors[f'{id}.params'].numel()} parameters for node "
                    f"{id}, but the model has {node.params.numel()}; "
                    "resume with the same experiment"
                )
            node.params = tensors[f"{id}.params"]
            node.buffers = tensors.get(f"{id}.buffers", node.buffers)
            node.state = unpack(tree["state"], tensors, node.state)
            runtime.persistent_tensors = unpack(tree["memory"], tensors, {})
            self._recall_acknowledgements(runtime)
        self._begin_last_round(rounds, final)

    def take_over(self, other: "Shard", rounds: int) -> None:
        """Continue with the state that the nodes have in another shard after `rounds` rounds."""
        for id, runtime in self.members.items():
            node, known = runtime.node, other.members[id]
            node.params, node.buffers = known.node.params, known.node.buffers
            node.state, runtime.persistent_tensors = known.node.state, known.persistent_tensors
            self._recall_acknowledgements(runtime)
        self._begin_last_round(rounds, final=False)

    def _begin_last_round(self, rounds: int, final: bool) -> None:
        """Begin each node's last round again, as `evaluated` may depend on it."""
        graph = cache(
            lambda round: (self.world.neighbours(round), self.world.out_neighbours(round))
        )
        for id, runtime in self.members.items():
            present = (r for r in reversed(range(rounds)) if self.world.faults.present(id, r))
            last = next(present, 0)
            ran_final = final and self.world.algorithm.has_final
            in_final = ran_final and self.world.faults.present(id, rounds - 1)
            self._begin_round(runtime.node, last + in_final, *graph(last), final=in_final)


def _comparable(loss: float) -> float:
    """The loss, infinite if it is not a number: a comparison with that is always false."""
    return float("inf") if isnan(loss) else loss


def saves_evaluated(algorithm: Algorithm[Any]) -> bool:
    """Whether checkpoints hold the evaluated parameters besides `node.params`."""
    return type(algorithm).evaluated is not Algorithm.evaluated


def pack_models(
    models: Mapping[str, Weights], node: Node[Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Add the tensors of evaluated models for a file; returns their architectures by name.

    A single model with the buffers and the architecture of the node is stored without a name.
    """
    plain = models.get(ONLY)
    if plain and plain.buffers is node.buffers and plain.architecture == node.architecture:
        tensors[f"{node.id}.evaluated"] = plain.params
        return {}
    for name, model in models.items():
        tensors[f"{node.id}.model.{name}.params"] = model.params
        if model.buffers.numel():
            tensors[f"{node.id}.model.{name}.buffers"] = model.buffers
    return {"models": {name: model.architecture for name, model in models.items()}}


def _tensors(models: Iterable[Weights]) -> list[Tensor]:
    return [tensor for model in models for tensor in (model.params, model.buffers)]


def _with_versions(messages: Iterable[Message]) -> list[VersionedTensor]:
    return [(m.sender, name, x, x._version) for m in messages for name, x in m.payload.items()]


def _check_awaited(node: Node[Any]) -> None:
    """Raise an error if a method of the node was called without `await`."""
    forgotten = sorted({call.name for call in node.calls})
    if forgotten:
        raise PeerageError(
            f"node {node.id} called node.{forgotten[0]} without await in round {node.round + 1}, "
            f"so nothing happened; write `await node.{forgotten[0]}(...)`"
        )


def _check_unchanged(tensors: Iterable[VersionedTensor]) -> None:
    for sender, name, tensor, version in tensors:
        if tensor._version != version:
            raise PeerageError(
                f"the algorithm changed tensor {name!r} of node {sender} in place after "
                "sending it; assign a new tensor instead (x = x + dx, not x += dx)"
            )


def _with_own_storage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each with its own storage: safetensors rejects shared storage."""
    separate: dict[str, Tensor] = {}
    addresses: set[int] = set()
    for name, tensor in tensors.items():
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        alone = whole and tensor.is_contiguous() and tensor.data_ptr() not in addresses
        separate[name] = tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
        addresses.add(tensor.data_ptr())
    return separate
