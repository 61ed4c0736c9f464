"""The contract: an algorithm is one round of one node, written as a coroutine.

Every `await` is a request that an engine answers: train, curvature, candidate losses, send,
receive. The same coroutine runs in a simulator, on a cluster and between real machines. An
algorithm is a frozen dataclass of hyperparameters. It contains only the mathematics: it uses no
device, socket, clock or file.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from peerage import specs
from peerage.errors import PeerageError
from peerage.models.scaled import ChannelGroups
from peerage.privacy import PrivacyFilter
from peerage.randomness import torch_stream
from peerage.requests import (
    UNNUMBERED,
    Acknowledgements,
    Call,
    Envelope,
    Inbox,
    MeanCache,
    Message,
    Receive,
    Send,
    TensorSpec,
    recorded,
)
from peerage.vectors import Layout, Weights, find_head, float_buffers, trained_parameters
from peerage.work.candidates import Losses, read_candidates
from peerage.work.curvature import BatchStream, Curvature, Gradient, Part
from peerage.work.mutual import MutualLoss
from peerage.work.together import TrainedTogether, TrainTogether
from peerage.work.training import LocalSGD, Train, TrainStats

S = TypeVar("S")  # the state of a node, which it keeps between rounds
# Of an architecture. The tensor, which is an error, lets type checkers accept `**payload`.
Name = str | Tensor | None
Evaluated = Tensor | Weights | Mapping[str, Tensor | Weights]  # see `Algorithm.evaluated`


@dataclass(frozen=True)
class Dimensions:
    """The sizes that determine the shapes of messages."""

    layout: Layout
    buffer_layout: Layout  # of the running statistics
    nodes: int  # including the hub, if there is one
    classes: int
    example: tuple[int, ...]  # shape of one example

    @classmethod
    def of(
        cls,
        module: nn.Module,
        nodes: int,
        classes: int,
        example: tuple[int, ...],
        head_modules: tuple[str, ...] = (),
    ) -> "Dimensions":
        """Dimensions of a network in which all nodes have this model; it may be on device meta."""
        head = find_head(module, head_modules)
        layout = Layout.of(trained_parameters(module), head)
        return cls(layout, Layout.of(float_buffers(module), head), nodes, classes, example)

    @property
    def buffers(self) -> int:
        """The number of running statistics in a model."""
        return self.buffer_layout.size


@dataclass(frozen=True)
class Cost:
    """The cost of one round for one node that takes part in it, in addition to local training."""

    vectors: float  # numbers per parameter in one message to a neighbour or to the hub
    passes: float = 0.0  # passes over the node's data, each as expensive as a local epoch
    forward: float = 0.0  # forward passes over the node's data
    state: float = 0.0  # numbers per parameter in the node's state
    shared_mean: bool = False  # nodes with the same senders share one `Inbox.mean`
    # Models of other nodes that one node has at once; None: a message of each neighbour.
    held_models: int | None = None
    together: bool = False  # whether it trains them at the same time as its own


@dataclass
class Node(Generic[S]):
    """What an algorithm can read and do on one node. Assign new tensors; never modify in place.

    >>> import peerage as pg
    >>> async def round(node: pg.Node[None]) -> None:
    ...     await node.train(pg.LocalSGD(epochs=1))
    ...     inbox = await node.exchange(x=node.params)
    ...     node.params = torch.stack([node.params, *inbox["x"]]).mean(0)
    """

    id: int
    num_nodes: int
    num_examples: int
    label_proportions: Tensor  # [classes], of the node's own training data
    architecture: str
    layout: Layout
    params: Tensor  # [d]
    buffers: Tensor  # [b] running statistics; averaged with scalar weights only
    seed: int = field(repr=False)
    # The layouts of parameters and of running statistics, by architecture.
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    buffer_layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)
    # Which entries of a model belong to which channel, by architecture, if there are several and
    # the algorithm is `width_scaled`.
    channels: Mapping[str, ChannelGroups] = field(default_factory=dict, repr=False)
    state: S = None  # type: ignore[assignment]  # Algorithm.init fills it before the first round
    # Draws initial values; arguments: stream, architecture, whether they are private to the node.
    draw_initial: Callable[[str, str, bool], Weights] | None = field(default=None, repr=False)
    hub: int | None = None  # the node without data that all others exchange with, if any
    round: int = 0  # counts from 0
    rounds: int = 0  # of the whole run
    graph: Sequence[tuple[int, ...]] = ()  # neighbours of every node in this round
    out_graph: Sequence[tuple[int, ...]] | None = None  # out-neighbours, if directed
    edge_weights: Mapping[int, float] = field(default_factory=dict)  # by sender, if weighted
    rng: torch.Generator = field(default_factory=torch.Generator, repr=False)  # private stream
    coin: torch.Generator = field(default_factory=torch.Generator, repr=False)  # public stream
    # Whether models are evaluated in this round; work that only evaluation needs can be left out
    # otherwise. If training or messages depend on it, results depend on --eval-every.
    evaluation_due: bool = True
    notes: dict[str, float] = field(default_factory=dict, repr=False)  # of this round; see `note`
    mean_cache: MeanCache = field(default_factory=dict, repr=False)  # see `Inbox.mean`
    privacy_filter: PrivacyFilter = field(default_factory=PrivacyFilter, repr=False)
    messages_sent: int = 0  # so far in this round
    graph_of: Callable[[int], Sequence[tuple[int, ...]]] | None = field(default=None, repr=False)
    acknowledgements: Acknowledgements | None = None  # if the algorithm asks for them
    calls: set[Call[Any]] = field(default_factory=set, repr=False)  # not yet awaited

    def begin_round(
        self,
        round: int,
        graph: Sequence[tuple[int, ...]],
        out_graph: Sequence[tuple[int, ...]] | None = None,
        edge_weights: Mapping[int, float] | None = None,
        mean_cache: MeanCache | None = None,
    ) -> None:
        """Begin a round; called by the engine with the public facts of this round."""
        self.round, self.graph, self.out_graph = round, graph, out_graph
        self.edge_weights = {} if edge_weights is None else edge_weights
        self.mean_cache = {} if mean_cache is None else mean_cache
        self.rng = torch_stream(self.seed, "node", self.id, round)
        # Equal on every node, so nodes can make the same random choice without a coordinator.
        self.coin = torch_stream(self.seed, "coin", round)
        self.notes, self.messages_sent, self.calls = {}, 0, set()
        if self.acknowledgements is not None:
            self.acknowledgements.begin_round(round)

    @property
    def weights(self) -> Weights:
        """The node's model as a value."""
        return Weights(self.params, self.buffers, self.architecture)

    @property
    def buffer_layout(self) -> Layout:
        """The layout of the node's running statistics."""
        return self.buffer_layouts[self.architecture]

    @property
    def neighbours(self) -> tuple[int, ...]:
        """The nodes from which this node receives."""
        return self.graph[self.id]

    @property
    def out_neighbours(self) -> tuple[int, ...]:
        """The nodes to which this node sends: its neighbours, unless the graph is directed."""
        return (self.graph if self.out_graph is None else self.out_graph)[self.id]

    def coin_at(self, round: int) -> torch.Generator:
        """The public stream of any round, as `coin` was or will be at its beginning."""
        return torch_stream(self.seed, "coin", round)

    def graph_at(self, round: int) -> Sequence[tuple[int, ...]]:
        """The neighbours of every node in any round; a node that joins late can replay the past."""
        if self.graph_of is None or round < 0:
            raise PeerageError(f"there is no graph of round {round}; rounds are counted from 0")
        return self.graph if round == self.round else self.graph_of(round)

    @property
    def reached(self) -> frozenset[int]:
        """The nodes that are known to have received a message of this node in the round before.

        A node acknowledges with its messages of this round, so it counts once one of these has
        arrived here. All others are unknown. Requires `acknowledge = True` in the algorithm.
        """
        if self.acknowledgements is None:
            raise PeerageError(
                "node.reached needs acknowledgements; set acknowledge: ClassVar[bool] = True in "
                "the algorithm"
            )
        return frozenset(self.acknowledgements.reached)

    def note(self, **values: float) -> None:
        """Add numbers to the record of this round, beside accuracy and loss."""
        self.notes.update({name: float(value) for name, value in values.items()})

    @recorded
    async def train(
        self, work: LocalSGD, *, squares: bool = False, **tensors: Tensor
    ) -> TrainStats:
        """Train the node's model; `tensors` are arguments of the gradient correction or the loss.

        With `squares`, the result includes the sum of squared batch gradients of the last pass.
        """
        trained = await Train(work, self.params, self.buffers, tensors, squares)
        self.params, self.buffers = trained.params, trained.buffers
        return trained.stats

    @recorded
    async def train_together(
        self,
        work: LocalSGD,
        pupils: Mapping[int, Weights],
        loss: MutualLoss,
        teachers: Mapping[int, Weights] | tuple[()] = (),
    ) -> TrainedTogether:
        """Train several models, by sender, each with a loss that sees the logits of all.

        The node keeps its own model until the algorithm assigns one. Teachers never change.
        """
        trained = await TrainTogether(work, dict(pupils), loss, dict(teachers))
        if trained.diverged:
            self.note(diverged=len(trained.diverged))
        return trained

    @recorded
    async def curvature(
        self, kind: str = "batch", batch_size: int = 100, part: Part = None
    ) -> Tensor:
        """[d] diagonal curvature of the loss on the local data, at the node's parameters.

        With `part`, only the curvature of these entries; see `scope_of`.
        """
        return await Curvature(self.params, self.buffers, kind, batch_size, part)

    @recorded
    async def gradient(
        self,
        batch_size: int | None = None,
        *,
        stream: str | None = None,
        at: Weights | Tensor | None = None,
        advance: bool = True,
    ) -> Tensor:
        """[d] gradient of the mean loss on the local data, at the node's parameters or `at` others.

        With a batch size, on the next batch of an endless shuffled stream of this name, which
        continues across rounds. With `advance=False`, the next call gets the same batch again.
        """
        if batch_size is None and (stream is not None or not advance):
            raise PeerageError(
                "node.gradient without a batch size uses all examples; give batch_size, or leave "
                "out stream and advance"
            )
        name = "gradient" if stream is None else stream
        batch = None if batch_size is None else BatchStream(batch_size, name, advance)
        if at is None:
            return await Gradient(self.params, self.buffers, batch=batch)
        if isinstance(at, Tensor):
            at = Weights(at, self.buffers, self.architecture)
        return await Gradient(at.params, at.buffers, at.architecture, batch)

    @recorded
    async def losses(
        self,
        candidates: Inbox | Sequence[Tensor] | Sequence[Weights],
        examples: int | None = None,
        *,
        part: str | None = None,
        buffers: Sequence[Tensor] | None = None,
        stream: str = "losses",
        batch_size: int | None = None,
    ) -> Tensor:
        """[k] mean losses of candidate models, all on the same local examples.

        A candidate is a message of an inbox (parameters `x`, and buffers `b` if the model has
        running statistics), a vector of parameters, which needs its own `buffers`, or `Weights` of
        any architecture. With `part="head"`, candidates are heads over the node's own core, whose
        features are computed once if the head is one module, or modules in a row, at the end of
        the network; otherwise the network runs once for each head. With fewer `examples` than the
        node has, each call draws others from `stream`, which no other random choice depends on.
        """
        models = read_candidates(self.id, self.architecture, candidates, buffers)
        own = None if part is None else self.weights
        return await Losses(models, examples, stream, batch_size, part, own)

    def initial(
        self, stream: str, *, architecture: str | None = None, private: bool = False
    ) -> Weights:
        """Fresh initial values by the experiment's scheme and gain, drawn from a named stream.

        They are equal on all nodes, or with `private` specific to this node. The same name gives
        the same values again. Unlike a request, it needs no `await`, so `Algorithm.init` can use
        it.
        """
        if self.draw_initial is None:
            raise PeerageError("node.initial requires an engine, which knows the models")
        return self.draw_initial(stream, architecture or self.architecture, private)

    @recorded
    async def send(
        self, to: int | Iterable[int], /, *, architecture: Name = None, **payload: Tensor
    ) -> None:
        """Send a message to one or several nodes; messages between two nodes arrive in order.

        `architecture` is that of the model in the payload, by default the node's own. It determines
        which shapes the recipient accepts.
        """
        await self._send((to,) if isinstance(to, int) else tuple(to), payload, architecture)

    @recorded
    async def receive(self, senders: int | Iterable[int] | None = None) -> Inbox:
        """Return the next message of each sender (default: each neighbour)."""
        if senders is None:
            senders = self.neighbours
        messages = await Receive((senders,) if isinstance(senders, int) else tuple(senders))
        return self._inbox(messages)

    @recorded
    async def exchange(
        self,
        *,
        to: Iterable[int] | None = None,
        architecture: Name = None,
        **payload: Tensor,
    ) -> Inbox:
        """Send to all out-neighbours and receive from all neighbours.

        The inbox includes the node's own message. With `to`, send to and receive from these nodes.
        """
        partners = None if to is None else tuple(to)
        recipients = self.out_neighbours if partners is None else partners
        sent = await self._send(recipients, payload, architecture)
        received = await Receive(self.neighbours if partners is None else partners)
        return self._inbox(sorted((*received, sent), key=lambda message: message.sender))

    @recorded
    async def swap(
        self,
        payloads: Mapping[int, Mapping[str, Tensor]],
        *,
        among: Iterable[int] | None = None,
    ) -> Inbox:
        """Send to some nodes and receive from those that chose this one in the same way.

        `among` are the nodes that swap with each other, by default all but a hub. Each of them must
        have this node in its `among`. A node that sends nothing to another one still tells it so,
        in a message without payload. So no node needs to know the choices of others: the k-th swap
        of a node ends when every node of `among` has made its k-th swap of the round or ended the
        round.
        """
        others = range(self.num_nodes) if among is None else among
        left_out = {self.id} if among is not None or self.hub is None else {self.id, self.hub}
        partners = tuple(sorted(set(others) - left_out))
        unknown = sorted(payloads.keys() - set(partners))
        if unknown:
            raise PeerageError(
                f"node {self.id} swaps with node {unknown[0]}, which is not in `among`; "
                "choose recipients from `among`"
            )
        chosen = {recipient: dict(payloads[recipient]) for recipient in sorted(payloads)}
        same: dict[Any, list[int]] = {}  # one message for those with the same tensors
        for recipient, payload in chosen.items():
            tensors = tuple((name, id(tensor)) for name, tensor in payload.items())
            same.setdefault(tensors, []).append(recipient)
        for to in same.values():
            await self._send(tuple(to), chosen[to[0]])
        await self._send(tuple(other for other in partners if other not in chosen), {})
        return self._inbox(await Receive(partners)).with_payload()

    async def _send(
        self, to: tuple[int, ...], payload: dict[str, Tensor], architecture: Name = None
    ) -> Message:
        """Send a payload and return the message as it left the node, after the privacy filter."""
        if isinstance(architecture, Tensor):
            raise PeerageError(
                f"node {self.id} sent a tensor 'architecture', which must be the name of one; give "
                "the tensor another name"
            )
        for name, value in payload.items():
            if not isinstance(value, Tensor):
                raise PeerageError(
                    f"node {self.id} sent {name}={value!r} in round {self.round + 1}; a message "
                    f"may contain only tensors: send torch.tensor({name}), or leave it out"
                )
        if to and payload:
            payload = self.privacy_filter.release(payload, self._noise_stream)
        message = Message(self.envelope(self.messages_sent, architecture), payload)
        self.messages_sent += 1
        await Send(to, message)
        return message

    def _noise_stream(self) -> torch.Generator:
        return torch_stream(self.seed, "noise", self.id, self.round, self.messages_sent)

    def _inbox(self, messages: Sequence[Message]) -> Inbox:
        if self.acknowledgements is not None:
            self.acknowledgements.note(messages)
        self.privacy_filter.set_reference(message.payload for message in messages)
        return Inbox(tuple(messages), self.id, self.edge_weights, self.mean_cache)

    def envelope(self, number: int = UNNUMBERED, architecture: str | None = None) -> Envelope:
        """The envelope of a message from this node; the architecture is its own by default."""
        kind = self.architecture if architecture is None else architecture
        acknowledged = self.acknowledgements.previous if self.acknowledgements else ()
        degree = len(self.neighbours)
        return Envelope(self.id, self.num_examples, degree, kind, number, acknowledged)


class Algorithm(Generic[S]):
    """A frozen dataclass of hyperparameters; a subclass must implement `round`.

    >>> from dataclasses import dataclass
    >>> import peerage as pg
    >>> @dataclass(frozen=True)
    ... class Gossip(pg.Algorithm[None]):
    ...     local: pg.LocalSGD = pg.LocalSGD(epochs=1)
    ...
    ...     async def round(self, node: pg.Node[None]) -> None:
    ...         await node.train(self.local)
    ...         inbox = await node.exchange(x=node.params)
    ...         node.params = torch.stack([node.params, *inbox["x"]]).mean(0)
    >>> small = {"nodes": 3, "rounds": 1, "topology": "ring", "engine": {"name": "serial"}}
    >>> pg.run(pg.Experiment(algorithm=Gossip(), **small)).accuracy > 0.1
    True
    """

    with_hub: ClassVar[bool] = False  # whether the network has a hub; see `peerage.hub`
    nonnegative: ClassVar[frozenset[str]] = frozenset()  # tensors that noise must not make negative
    # Whether sender and recipient must hold exactly the same numbers, so messages must not round.
    lossless_messages: ClassVar[bool] = False
    # Whether models are specific to their node: no use to a neighbour, nor in a mean over nodes.
    personal: ClassVar[bool] = False
    # Whether messages say whose messages arrived in the round before; see `Node.reached`.
    acknowledge: ClassVar[bool] = False
    # When models are evaluated in a round, unless the experiment sets it (`--eval-at`).
    evaluated_at: ClassVar[Literal["after-training", "after-aggregation"]] = "after-training"
    # Whether nodes of one architecture start with equal models, unless the experiment sets it
    # (`--init`).
    initial_models: ClassVar[Literal["shared", "independent"]] = "independent"
    # Whether the models of nodes may differ in their width alone; see `Node.channels`.
    width_scaled: ClassVar[bool] = False
    # Which nodes keep and evaluate models if there is a hub: see `peerage.hub`.
    models_at: ClassVar[Literal["hub", "clients", "both"]] = "hub"

    def __post_init__(self) -> None:
        specs.check_choices(self)

    def check_layout(self, layout: Layout) -> None:
        """Raise an InputError if the algorithm cannot work with models of this layout."""

    def check_network(self, nodes: int, directed: bool, architectures: Sequence[str]) -> None:
        """Raise an InputError if the algorithm cannot work in such a network.

        A hub is not counted; `architectures` are those of the nodes' own models.
        """

    def check_start(self, start: str) -> None:
        """Raise an InputError if the algorithm has no use for this kind of initial models.

        `start` is `shared`, `independent` or `file`.
        """

    def further_models(self) -> Mapping[str, str]:
        """Models that nodes use beside their own, as text such as `mlp:hidden=8`, by name.

        Each adds an architecture of this name, unless the text is the name of another one.
        """
        return {}

    def init(self, node: Node[S]) -> S:
        """Return the initial state of a node: tensors, numbers, or a dataclass of them."""
        return None  # type: ignore[return-value]

    def extend_state(self, known: S, fresh: S) -> S:
        """Return the state of a node after others have joined a network of real peers.

        `fresh` is what `init` returns now. An algorithm whose state has an entry per node takes
        the entries of new nodes from it.
        """
        return known

    async def round(self, node: Node[S]) -> None:
        """Run one round on one node."""
        raise NotImplementedError

    async def final(self, node: Node[S]) -> None:
        """Run once after the last round, even if a target or a watcher ends the run early.

        It may exchange messages with any node. Models are evaluated again after it.
        """

    @property
    def has_final(self) -> bool:
        """Whether there is a final step; False if it does nothing with these hyperparameters."""
        return type(self).final is not Algorithm.final

    def may_meet(self, a: int, b: int) -> bool:
        """Whether one of two nodes that are not neighbours may send to the other or wait for it.

        Real peers that only dial out cannot reach each other, so they must never meet.
        """
        return self.has_final

    def message_schema(self, dimensions: Dimensions) -> dict[str, TensorSpec]:
        """Every tensor that a message may contain, with its shape and type.

        Real peers reject messages with other tensors.
        """
        return {"x": TensorSpec((dimensions.layout.size,)), "b": TensorSpec((dimensions.buffers,))}

    def participation(self, nodes: int) -> float:
        """The share of the nodes with data that take part in a round, on average."""
        return 1.0

    def max_messages(self, round: int | None, nodes: int) -> int:
        """The most messages with floats that a node sends in a round, for the planned epsilon.

        One message may have many recipients. The final step is round None.
        """
        return 1

    def cost(self, round: int, dimensions: Dimensions, examples: float) -> Cost | None:
        """The cost of this round for a node with so many examples; None if unknown."""
        return None

    def caveats(self) -> Iterable[str]:
        """Warnings about these hyperparameters, one line each."""
        return ()

    def evaluated(self, node: Node[S]) -> Evaluated:
        """The model that metrics evaluate and that a run returns as the node's model.

        Parameters [d] have the buffers and the architecture of the node; `Weights` have their own.
        Several models are a mapping from their names; accuracy and loss of the node are those of
        the first. It may read everything that the node holds after a round, but must not change it.
        """
        return node.params

    def test_candidates(self, node: Node[S]) -> Sequence[Weights]:
        """Models of which the one with the lowest loss on the node's test set gets evaluated.

        Its scores replace those of the headline. Such scores are optimistic; use it only to compare
        with published results that were measured in this way. By default there are none.
        """
        return ()
