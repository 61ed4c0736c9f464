"""Gaussian noise on what a node sends, and an honest account of the privacy that it gives.

Noise alone (P2, Fig. 11) gives no guarantee: messages can be any distance apart. With `clip` there
is one. A message is `r + c(m - r)` plus noise. Here `m` is what the algorithm wants to send, all
its float tensors as one vector, `c` shortens a vector to length `clip` at most, and the reference
`r` is made of released messages only: the mean of what was heard last; before that the initial
parameters, which must not depend on the data, or zero. So, given all that anybody has seen,

    |c(m - r) - c(m' - r)| <= 2 clip

for the messages m, m' of any two data sets of the node, whatever the algorithm does inside. Each
message is a Gaussian mechanism of sensitivity 2 clip, adding `r` is post-processing, and messages
compose adaptively: T of them are as private as one with noise sigma / sqrt(T) (Dong et al., 2022,
arXiv:1905.02383). Two data sets are neighbours if they belong to the same node: a node's data is
protected as a whole (client level), without trust in a hub or neighbours (local model).

Not covered: the number of examples, the degree, integer tensors, which tensors a message has, when
and to whom it is sent (the two data sets agree in all of these), and whatever leaves a node in
other ways, such as records and saved models. A simulator draws the noise from the seed of the run,
and whoever knows the seed can subtract it: its guarantee is that of a deployment whose noise is
secret. Real peers draw from a secret of their own. Both draw in floating point, and epsilon is
computed as if they drew from the real numbers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peerage.errors import InputError

Payload = Mapping[str, Tensor]

RELEASE_COUNT = "veil.count"
BLOCK = 1 << 15  # entries that are squared at a time: they fit into the cache as float64
SECRET = "the noise is secret, which it is not for whoever knows the seed of this run"
WEAK_EPSILON = 10.0  # an epsilon above it is called what it is
MIN_NOISE_MULTIPLIER = (
    1e-6  # a noise multiplier below it means an epsilon above 10^11, with digits of rounding
)


@dataclass(frozen=True)
class Noise:
    """What happens to a message before it is sent; by default nothing.

    Differential privacy needs both `sigma` and `clip`. A node that sends T messages has the
    privacy of one Gaussian mechanism with noise multiplier sigma / (2 clip sqrt(T)).
    """

    sigma: float = 0.0  # standard deviation of the noise on every entry
    clip: float | None = None  # how far a message may be from its reference, as Euclidean norm
    delta: float = 1e-5  # the delta for which epsilon is computed

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise InputError(
                f"sigma is a standard deviation, got {self.sigma}; give 0 for no noise, or more"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise InputError(
                f"clip is a length above 0, got {self.clip}; leave it out to clip nothing"
            )
        if not 0 < self.delta < 1:
            raise InputError(
                f"delta is a probability between 0 and 1, got {self.delta}; give one such as 1e-5"
            )

    @property
    def active(self) -> bool:
        """Whether anything happens to messages."""
        return self.sigma > 0 or self.clip is not None

    @property
    def private(self) -> bool:
        """Whether there is any differential privacy to account for."""
        return self.sigma > 0 and self.clip is not None

    def caveats(self) -> Iterable[str]:
        """What a user should know before a run, one line each; shown as warnings."""
        return [_no_guarantee(self)] if self.active and not self.private else []


def perturb(
    noise: Noise,
    payload: Payload,
    references: Payload,
    rng: torch.Generator,
    nonnegative: Collection[str] = (),
) -> dict[str, Tensor]:
    """What may be sent instead of the payload: float tensors clipped jointly, then with noise.

    A tensor without a reference of its shape is measured from zero. The named `nonnegative` ones
    are cut off at zero in the end. Only `clip` uses references.
    """
    floats = {name: tensor for name, tensor in payload.items() if _has_floats(tensor)}
    known = {} if noise.clip is None else _matching(floats, references)
    steps = {name: t - known[name] if name in known else t for name, t in floats.items()}
    limit = math.inf if noise.clip is None else noise.clip
    length = 0.0 if noise.clip is None else norm(steps.values())
    if noise.sigma == 0 and length <= limit:
        return dict(payload)  # to the bit: subtracting and adding the reference would round
    released = dict(payload)
    for name, step in steps.items():
        # The noise comes before the reference: a sum with the reference that is rounded first
        # would move messages apart by a little more than 2 clip.
        sent = torch.empty_like(floats[name]).normal_(0, noise.sigma, generator=rng)
        sent.add_(_shortened(step, length, limit))
        if name in known:
            sent.add_(known[name])
        released[name] = sent.clamp_(min=0) if name in nonnegative else sent
    return released


def norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all entries together, in float64.

    In float32 the norm of ten million entries is wrong in the fourth digit.
    """
    pieces = (piece for tensor in tensors for piece in torch.split(tensor.reshape(-1), BLOCK))
    return math.sqrt(sum(float(block.dot(block)) for block in map(Tensor.double, pieces)))


@dataclass
class PrivacyFilter:
    """What stands between one node and its listeners: it perturbs, remembers and counts.

    What lasts from message to message is in `persistent_tensors`, which checkpoints hold. Tell
    a new node's veil the initial parameters with `heard([{"x": parameters}])`.
    """

    noise: Noise = Noise()  # without any, messages stay as they are
    nonnegative: Collection[str] = ()
    persistent_tensors: dict[str, Tensor] = field(default_factory=dict)
    noise_seed: int | None = field(default=None, repr=False)  # seed of the noise, if not the run's

    @property
    def messages(self) -> int:
        """How many messages were released so far."""
        return (
            int(self.persistent_tensors[RELEASE_COUNT])
            if RELEASE_COUNT in self.persistent_tensors
            else 0
        )

    def release(self, payload: Payload, rng: Callable[[], torch.Generator]) -> dict[str, Tensor]:
        """What to send instead of the payload; to several recipients, it is one release.

        `rng` makes the stream of its noise, where there is any.
        """
        if not self.noise.active:
            return dict(payload)
        if any(_has_floats(tensor) for tensor in payload.values()):
            self.persistent_tensors[RELEASE_COUNT] = torch.tensor(self.messages + 1)
        places = {name: _place(name, tensor) for name, tensor in payload.items()}
        known = {
            name: self.persistent_tensors[key]
            for name, key in places.items()
            if key in self.persistent_tensors
        }
        return perturb(self.noise, payload, known, rng(), self.nonnegative)

    def set_reference(self, messages: Iterable[Payload]) -> None:
        """Take the mean of these messages as reference, for every name and shape among them.

        The own message may be one of them as it was released, never as it was before `send`.
        """
        if self.noise.clip is None:
            return
        found: dict[str, list[Tensor]] = {}
        for payload in messages:
            for name, tensor in payload.items():
                if _has_floats(tensor):
                    found.setdefault(_place(name, tensor), []).append(tensor)
        self.persistent_tensors.update({place: _mean(tensors) for place, tensors in found.items()})


def epsilon(noise: Noise, messages: int) -> float | None:
    """The epsilon of so many messages at `delta`: exact, or None where nothing is clipped.

    T Gaussian mechanisms with one multiplier are one with the multiplier divided by sqrt(T), and
    epsilon solves delta = Phi(s/2 - epsilon/s) - e^epsilon Phi(-s/2 - epsilon/s) with
    s = 2 clip sqrt(T) / sigma (Balle and Wang, 2018, arXiv:1805.06530).
    """
    if noise.clip is None:
        return None
    if messages == 0:
        return 0.0
    multiplier = noise.sigma / noise.clip / 2 / math.sqrt(messages)
    if multiplier < MIN_NOISE_MULTIPLIER:
        return math.inf
    with np.errstate(divide="ignore"):  # the logarithm of a delta that is zero
        return float(_accountant()(multiplier, noise.delta))


def privacy_report(noise: Noise, messages: Sequence[int], secret: bool = False) -> dict[str, Any]:
    """What the record of a run says about privacy, given how many messages every node released.

    `secret` says that nobody could know the noise, as between real peers.
    `epsilon_message` is of one message, `epsilon` of the node that released most. One that is
    infinite is None, as JSON has no infinity, and the sentence says so.
    """
    record: dict[str, Any] = {"sigma": noise.sigma, "clip": noise.clip, "delta": noise.delta}
    if not noise.private:
        return {**record, "guarantee": _no_guarantee(noise)}
    most = max(messages, default=0)
    known = {count: _finite(epsilon(noise, count)) for count in {1, most, *messages}}
    return {
        **record,
        "guarantee": _guarantee(noise, most, known[most], secret),
        "messages": list(messages),
        "epsilon_message": known[1],
        "epsilon": known[most],
        "epsilons": [known[count] for count in messages],
    }


def check_accounting(noise: Noise) -> None:
    """Refuse before a run what could not be accounted for after it."""
    if noise.private:
        _accountant()


def _has_floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _matching(floats: Payload, references: Payload) -> dict[str, Tensor]:
    return {
        name: references[name].to(tensor)  # of its type
        for name, tensor in floats.items()
        if name in references and references[name].shape == tensor.shape
    }


def _shortened(step: Tensor, length: float, limit: float) -> Tensor:
    """The part of a vector of this length that keeps the whole within the limit."""
    if not math.isfinite(length):  # a model that diverged must not stand out by being infinite
        return torch.zeros_like(step)
    if length <= limit:
        return step
    # A little shorter than asked, as rounding of the factor and the product may lengthen it.
    return step * (limit / length * (1 - 2 * torch.finfo(step.dtype).eps))


def _mean(tensors: list[Tensor]) -> Tensor:
    """A new tensor, even for one: an engine may use the memory of a message again."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.div_(len(tensors))


def _place(name: str, tensor: Tensor) -> str:
    """The key of a reference: nodes with other models send other shapes under the same name."""
    return f"veil.{name}.{'x'.join(map(str, tensor.shape))}"


def _accountant() -> Any:
    """The function (noise multiplier, delta) -> epsilon of one Gaussian mechanism.

    It is exact and takes milliseconds. Privacy loss distributions give the same, from above, in
    seconds to minutes where epsilon is large; Renyi divergences give three to ten percent more.
    """
    try:
        from dp_accounting import get_epsilon_gaussian  # takes a second; few runs need it
    except ImportError:
        raise InputError(
            "noise with clip needs dp-accounting 0.6 or later to compute epsilon; "
            'pip install "peerage[privacy]"'
        ) from None
    return get_epsilon_gaussian


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _no_guarantee(noise: Noise) -> str:
    if not noise.active:
        return "No differential privacy: messages are sent as they are."
    if noise.clip is None:
        return (
            "No differential privacy: messages have noise but are not clipped, so one data set "
            "can move them by any distance; give clip as well."
        )
    return "No differential privacy: messages are clipped but have no noise; give sigma as well."


def _guarantee(noise: Noise, messages: int, value: float | None, secret: bool) -> str:
    if value is None:
        return (
            "No differential privacy worth the name: the noise is so faint beside clip that "
            "epsilon is beyond all bounds; give more sigma."
        )
    sent = "1 message" if messages == 1 else f"{messages} messages"
    weak = ", which is next to nothing" if value > WEAK_EPSILON else ""
    known = "" if secret else f", as long as {SECRET}"
    return (
        f"The data set of each node as a whole is protected by differential privacy with epsilon "
        f"{value:.4g} at delta {noise.delta:g} (the worst node: {sent}){weak}, against everybody "
        f"who sees all messages{known}; example counts, degrees, integer tensors, who sends which "
        "tensors when, records and saved models are not covered."
    )
