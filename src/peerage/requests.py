"""The requests that an algorithm awaits, and the messages that it gets back.

`Compute` is work on the node's own data; `Send` and `Receive` are communication. An engine knows
these three kinds of request and nothing about any algorithm.
"""

from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from peerage.aggregation import (
    data_weights,
    metropolis_weights,
    uniform_weights,
    weighted_mean,
)
from peerage.errors import InputError

if TYPE_CHECKING:
    from peerage.work.context import LocalContext

PRE_ROUND = -1  # number of the round before the first, in which nodes estimate the gain
SLACK = 0.1  # share by which a value may exceed its bound: int8 moves a norm by up to 7 %
UNNUMBERED = -1  # number of a message that was not sent through a node
# The types of tensors that a message may contain, in every engine, by their safetensors names.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Shape = tuple[int | None, ...]  # None: any length
MeanCache = dict[str, tuple[Any, Tensor]]  # tensor name -> key of its last mean, and the mean
A = TypeVar("A", covariant=True)  # the answer to a request
P = ParamSpec("P")


def check_dtype(dtype: torch.dtype, subject: str) -> None:
    """Raise an InputError if messages cannot contain this type; `subject` begins its text.

    >>> check_dtype(torch.int8, "node 0 sends tensor 'x'")
    """
    if dtype not in DTYPES.values():
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES.values())
        name = str(dtype).removeprefix("torch.")
        raise InputError(
            f"{subject} of type {name}, which messages cannot contain; use one of {known}"
        )


@dataclass(frozen=True)
class TensorSpec:
    """The shape and type that a tensor in a message must have, and the bounds of its values.

    Declare every bound that the algorithm guarantees: real peers reject messages beyond it, so that
    no member can buy weight with a large number. Rounding on the wire is allowed for. Noise breaks
    bounds of floats, which are then not checked, except that `nonnegative` tensors stay so.
    """

    shape: Shape
    dtype: torch.dtype = torch.float32  # one of `DTYPES`
    low: float | None = None  # the smallest value of an entry
    high: float | None = None  # the largest
    norm: float | None = None  # the largest Euclidean norm, in round 0
    growth: float = 0.0  # of that norm per round
    total: float | None = None  # the sum of all entries, such as 1 for proportions

    def __post_init__(self) -> None:
        check_dtype(self.dtype, "message_schema declares a tensor")

    def allows(self, shape: Sequence[int]) -> bool:
        """Whether a tensor may have this shape.

        >>> TensorSpec((2, None)).allows((2, 5)), TensorSpec((2, None)).allows((2,))
        (True, False)
        """
        return len(shape) == len(self.shape) and all(
            known in (None, n) for known, n in zip(self.shape, shape, strict=True)
        )

    def fits(self, tensor: Tensor) -> bool:
        return tensor.dtype == self.dtype and self.allows(tensor.shape)

    def broken_bound(self, tensor: Tensor, round: int = 0) -> str | None:
        """Which bound a tensor exceeds, in words; None if it is within all of them.

        >>> TensorSpec((2,), norm=1.0, growth=0.5).broken_bound(torch.tensor([3.0, 4.0]), round=1)
        'norm 5, at most 1.5'
        >>> TensorSpec((2,), low=0.0, total=1.0).broken_bound(torch.tensor([0.5, 0.5]))
        """
        if not tensor.numel():
            return None
        slack = SLACK if tensor.is_floating_point() else 0.0
        if self.low is not None and float(tensor.min()) < self.low - slack * abs(self.low):
            return f"an entry {float(tensor.min()):g}, at least {self.low:g}"
        if self.high is not None and float(tensor.max()) > self.high + slack * abs(self.high):
            return f"an entry {float(tensor.max()):g}, at most {self.high:g}"
        if self.norm is not None:
            bound = self.norm + self.growth * max(round, 0)
            norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
            if norm > (1 + SLACK) * bound:
                return f"norm {norm:g}, at most {bound:g}"
        if self.total is not None:
            total = float(tensor.sum(dtype=torch.float64))
            if abs(total - self.total) > SLACK * abs(self.total):
                return f"sum {total:g}, not {self.total:g}"
        return None

    def under_noise(self, nonnegative: bool) -> "TensorSpec":
        """What holds after noise was added: bounds of integers, and that nothing is negative."""
        if not self.dtype.is_floating_point:
            return self
        low = 0.0 if nonnegative and self.low is not None and self.low >= 0 else None
        return TensorSpec(self.shape, self.dtype, low)


class Request(Generic[A]):
    """Something that an algorithm awaits and the engine answers."""

    def __await__(self) -> Generator["Request[Any]", Any, A]:
        answer: A = yield self
        return answer


class Call(Generic[A]):
    """A call of a node's method, which starts when it is awaited."""

    def __init__(
        self, name: str, begin: Callable[[], Coroutine[Any, Any, A]], calls: set["Call[Any]"]
    ) -> None:
        self.name, self.begin, self.calls = name, begin, calls
        calls.add(self)

    def __await__(self) -> Generator[Any, Any, A]:
        self.calls.discard(self)
        return self.begin().__await__()


def recorded(method: Callable[P, Coroutine[Any, Any, A]]) -> Callable[P, Awaitable[A]]:
    """Record calls of a node's method in `node.calls` until they are awaited.

    Python only warns about a forgotten `await`, and the node would continue without the result.
    """

    @wraps(method)
    def call(*arguments: P.args, **options: P.kwargs) -> Call[A]:
        node: Any = arguments[0]
        return Call(method.__name__, partial(method, *arguments, **options), node.calls)

    return call


class Compute(Request[A]):
    """Work on the node's own data. A new kind of local work is a new subclass, not a new engine.

    >>> import peerage as pg
    >>> class Count(pg.Compute[int]):
    ...     # the number of the own examples of a node
    ...     def run(self, local) -> int:
    ...         return len(local.train)
    >>> Count().phase
    'compute'
    """

    phase: ClassVar[str] = "compute"  # the phase under which its time is recorded

    def run(self, local: "LocalContext") -> A:
        raise NotImplementedError


@dataclass(frozen=True)
class Envelope:
    """The fields that accompany every payload, in every engine and on the wire."""

    sender: int
    examples: int  # number of training examples of the sender
    degree: int  # number of neighbours of the sender in this round
    architecture: str  # of the model in the payload, which may not be the sender's
    number: int = UNNUMBERED  # how many messages the sender sent before, in this round
    # Nodes whose messages the sender received in the round before, if the algorithm asks for it.
    acknowledged: tuple[int, ...] = ()


class Enveloped:
    """Anything with an envelope: a message, or the packet in which an engine carries it."""

    envelope: Envelope

    @property
    def sender(self) -> int:
        return self.envelope.sender

    @property
    def examples(self) -> int:
        return self.envelope.examples

    @property
    def degree(self) -> int:
        return self.envelope.degree

    @property
    def architecture(self) -> str:
        return self.envelope.architecture

    @property
    def number(self) -> int:
        return self.envelope.number


@dataclass(frozen=True)
class Message(Enveloped):
    """A payload and its envelope; `sender`, `examples` and the like read the envelope.

    >>> import peerage as pg
    >>> def largest(inbox: pg.Inbox) -> pg.Message:
    ...     return max(inbox.messages, key=lambda message: message.examples)
    """

    envelope: Envelope
    payload: Mapping[str, Tensor]


class Acknowledgements:
    """Whose messages arrived at a node, in this round and in the round before.

    They survive a restart as a tensor: the number of the round and the senders.
    """

    def __init__(self, owner: int, saved: Tensor | None = None) -> None:
        self.owner = owner
        numbers = [PRE_ROUND] if saved is None else saved.tolist()
        self.round, self.senders = int(numbers[0]), set(numbers[1:])  # of the latest round
        self.previous: tuple[int, ...] = ()  # senders of the round before the current one
        self.reached: set[int] = set()  # nodes that acknowledged, so far in this round

    def begin_round(self, round: int) -> None:
        self.previous = tuple(sorted(self.senders)) if self.round == round - 1 else ()
        self.round, self.senders, self.reached = round, set(), set()

    def note(self, messages: Iterable[Message]) -> None:
        """Note messages that have arrived; the node's own message is not one of them."""
        for message in messages:
            if message.payload and message.sender != self.owner:
                self.senders.add(message.sender)
            if self.owner in message.envelope.acknowledged:
                self.reached.add(message.sender)

    def saved(self) -> Tensor:
        return torch.tensor([self.round, *sorted(self.senders)])


@dataclass(frozen=True)
class Send(Request[None]):
    """Send one message to every recipient; messages between two nodes arrive in order."""

    to: tuple[int, ...]
    message: Message


@dataclass(frozen=True)
class Receive(Request[tuple[Message, ...]]):
    """Receive the next message of each sender; lost and absent messages are left out."""

    senders: tuple[int, ...]


@dataclass(frozen=True)
class Inbox:
    """Messages ordered by sender. Some may be missing; weights cover the messages that arrived.

    >>> import peerage as pg
    >>> envelope = Envelope(sender=3, examples=100, degree=2, architecture="mlp")
    >>> inbox = pg.Inbox((pg.Message(envelope, {"x": torch.ones(2)}),), owner=0)
    >>> inbox.senders, inbox["x"], inbox.stack("x").shape
    ((3,), [tensor([1., 1.])], torch.Size([1, 2]))
    """

    messages: tuple[Message, ...]
    owner: int
    edge_weights: Mapping[int, float] = field(default_factory=dict)  # those of the owner
    mean_cache: MeanCache = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.messages)

    def __getitem__(self, name: str) -> list[Tensor]:
        """The named tensor of every message, without copying."""
        return [message.payload[name] for message in self.messages]

    def stack(self, name: str) -> Tensor:
        """The named vectors as one new matrix [k, d]."""
        return torch.stack(self[name])

    @property
    def senders(self) -> tuple[int, ...]:
        return tuple(message.sender for message in self.messages)

    def others(self) -> "Inbox":
        """The inbox without the owner's own message."""
        return self._only(message for message in self.messages if message.sender != self.owner)

    def alike(self, architecture: str) -> "Inbox":
        """Only the messages of this architecture; vectors of other models are not comparable."""
        return self._only(m for m in self.messages if m.architecture == architecture)

    def with_payload(self) -> "Inbox":
        """Only the messages that contain tensors."""
        return self._only(message for message in self.messages if message.payload)

    def _only(self, messages: Iterable[Message]) -> "Inbox":
        return replace(self, messages=tuple(messages))

    def mean(self, name: str, weights: Tensor) -> Tensor:
        """[d] the weighted mean of the named vectors.

        Nodes in one process that receive the same messages with the same weights share the work.
        On a complete graph the mean is computed once, and each node gets a copy. Only the last
        mean is kept, because models may be large and such nodes run one after another.
        """
        sources = tuple((message.sender, message.number) for message in self.messages)
        if any(number == UNNUMBERED for _, number in sources):
            return weighted_mean(self[name], weights)
        key = (sources, tuple(weights.tolist()))
        last_key, last = self.mean_cache.get(name, (None, torch.empty(0)))
        # The node that computed it owns the tensor and may have changed it in place since.
        if last_key == (key, last._version):
            return last.clone()
        mean = weighted_mean(self[name], weights)
        self.mean_cache[name] = (key, mean._version), mean
        return mean

    def weights(self, kind: str) -> Tensor:
        """[k] the `data`, `uniform`, `metropolis` or `graph` weights."""
        kinds = {
            "data": self.data_weights,
            "uniform": self.uniform_weights,
            "metropolis": self.metropolis_weights,
            "graph": self.graph_weights,
        }
        return kinds[kind]()

    def data_weights(self) -> Tensor:
        """[k] weights proportional to the senders' numbers of examples."""
        return data_weights([message.examples for message in self.messages])

    def uniform_weights(self) -> Tensor:
        return uniform_weights(len(self))

    def graph_weights(self) -> Tensor:
        """[k] weights proportional to the edge weights; uniform if the graph is unweighted."""
        weights = torch.tensor([self.edge_weights.get(sender, 1.0) for sender in self.senders])
        return weights / weights.sum()

    def metropolis_weights(self) -> Tensor:
        """[k] weights from the degrees of the senders; the owner's own message gets the rest.

        They are meant for undirected graphs. If the inbox has more messages than the owner has
        neighbours, as after an all-reduce, the number of other senders replaces its degree.
        """
        if self.owner not in self.senders:
            raise InputError(
                f"metropolis weights require node {self.owner}'s own message in its inbox; "
                "use node.exchange, or other weights"
            )
        own = self.senders.index(self.owner)
        return metropolis_weights([message.degree for message in self.messages], own)
