"""Gaussian noise on messages, and the differential privacy that it gives.

Noise alone (P2, Fig. 11) gives no guarantee, because messages can be any distance apart. With
`clip`, a node sends `r + c(m - r)` plus noise. Here `m` holds all float tensors of the algorithm's
message as one vector, and `c` shortens a vector to length `clip` at most. The reference `r` depends
on released messages only: it is the mean of the messages received last. Before that it is the
initial parameters, which must not depend on the data, or zero. So, given all released messages,

    |c(m - r) - c(m' - r)| <= 2 clip

for the messages m, m' of any two data sets of the node and for any algorithm. Each message is a
Gaussian mechanism of sensitivity 2 clip, and adding `r` is post-processing. Messages compose
adaptively: T of them are as private as one with noise sigma / sqrt(T) (Dong et al., 2022,
arXiv:1905.02383). Any two data sets of a node are adjacent. So a node's data is protected as a
whole (client level), without trust in a hub or neighbours (local model).

Not covered are the number of examples, the degree, integer tensors, which tensors a message has,
and when and to whom it is sent; adjacent data sets agree in all of these. Records, saved models and
other outputs are not covered either. A simulator draws the noise from the seed of the run, in
floating point, and anyone who knows the seed can subtract it. Its guarantee is that of a deployment
whose noise is secret. Real peers have a `NoiseSource` with a secret key, which rounds to a grid.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from peerage.errors import InputError

Payload = Mapping[str, Tensor]

RELEASE_COUNT = "veil.count"  # key in checkpoints
BLOCK = 1 << 15  # entries squared at a time; as float64 they fit into the cache
SECRET = "the noise is secret, which it is not to anyone who knows the seed of this run"
WEAK_EPSILON = 10.0  # the report calls a larger epsilon almost no protection
MIN_NOISE_MULTIPLIER = 1e-6  # below it, epsilon is above 10^11 and its digits are rounding errors


@dataclass(frozen=True)
class Noise:
    """Noise and clipping of messages before they are sent; none by default.

    Differential privacy needs both `sigma` and `clip`. A node that sends T messages has the
    privacy of one Gaussian mechanism with noise multiplier sigma / (2 clip sqrt(T)).
    """

    sigma: float = 0.0  # standard deviation of the noise on every entry
    clip: float | None = None  # largest Euclidean distance of a message from its reference
    delta: float = 1e-5  # the delta for which epsilon is computed

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise InputError(
                f"sigma must be a number of at least 0, got {self.sigma}; use 0 for no noise"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise InputError(
                f"clip must be a number above 0, got {self.clip}; leave it out to disable clipping"
            )
        if not 0 < self.delta < 1:
            raise InputError(
                f"delta must lie in (0, 1), got {self.delta}; use a small value such as 1e-5"
            )

    @property
    def active(self) -> bool:
        """Whether messages are changed at all."""
        return self.sigma > 0 or self.clip is not None

    @property
    def private(self) -> bool:
        """Whether there is a differential privacy guarantee."""
        return self.sigma > 0 and self.clip is not None

    def caveats(self) -> Iterable[str]:
        """Warnings before a run, one line each."""
        return [_no_guarantee(self)] if self.active and not self.private else []


class NoiseSource(Protocol):
    """Adds noise that nobody can reproduce; a simulation uses a `torch.Generator` instead."""

    def add_noise(self, tensor: Tensor, sigma: float) -> Tensor:
        """Return a new tensor with independent Gaussian noise on every entry."""


def perturb(
    noise: Noise,
    payload: Payload,
    references: Payload,
    rng: torch.Generator | NoiseSource,
    nonnegative: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the payload with its float tensors clipped jointly and with noise added.

    The reference of a tensor is zero if none of its shape is known. Tensors named in `nonnegative`
    are clamped at zero afterwards. References are only used with `clip`.
    """
    floats = {name: tensor for name, tensor in payload.items() if _has_floats(tensor)}
    known = {} if noise.clip is None else _matching(floats, references)
    steps = {name: t - known[name] if name in known else t for name, t in floats.items()}
    limit = math.inf if noise.clip is None else noise.clip
    length = 0.0 if noise.clip is None else norm(steps.values())
    if noise.sigma == 0 and length <= limit:
        return dict(payload)  # subtracting and adding the reference would round
    released = dict(payload)
    for name, step in steps.items():
        # Noise first: rounding the sum of step and reference could move two messages apart by a
        # little more than 2 clip.
        short = _shortened(step, length, limit)
        if isinstance(rng, torch.Generator):
            sent = torch.empty_like(floats[name]).normal_(0, noise.sigma, generator=rng)
            sent.add_(short)
        else:
            sent = rng.add_noise(short, noise.sigma)
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
    """Clips and perturbs the messages of one node, keeps the clipping reference, counts releases.

    References and counts are in `persistent_tensors`, which checkpoints contain. The first
    reference of a new node is its initial parameters: `set_reference([{"x": parameters}])`.
    """

    noise: Noise = Noise()  # by default, messages are not changed
    nonnegative: Collection[str] = ()
    persistent_tensors: dict[str, Tensor] = field(default_factory=dict)
    secret_noise: NoiseSource | None = field(default=None, repr=False)  # of a real peer

    @property
    def messages(self) -> int:
        """The number of messages released so far."""
        return int(self.persistent_tensors.get(RELEASE_COUNT, 0))

    def release(self, payload: Payload, rng: Callable[[], torch.Generator]) -> dict[str, Tensor]:
        """Return the perturbed payload; sending it to several recipients is one release.

        `rng` returns the random stream of the noise. It is called only if there is any noise, and
        not if the noise is secret.
        """
        if not self.noise.active:
            return dict(payload)
        if any(_has_floats(tensor) for tensor in payload.values()):
            self.persistent_tensors[RELEASE_COUNT] = torch.tensor(self.messages + 1)
        keys = {name: _reference_key(name, tensor) for name, tensor in payload.items()}
        known = {
            name: self.persistent_tensors[key]
            for name, key in keys.items()
            if key in self.persistent_tensors
        }
        source = rng() if self.secret_noise is None else self.secret_noise
        return perturb(self.noise, payload, known, source, self.nonnegative)

    def set_reference(self, messages: Iterable[Payload]) -> None:
        """Set the reference to the mean of these messages, for every name and shape in them.

        The node's own message may be one of them, but only as it was released.
        """
        if self.noise.clip is None:
            return
        found: dict[str, list[Tensor]] = {}
        for payload in messages:
            for name, tensor in payload.items():
                if _has_floats(tensor):
                    found.setdefault(_reference_key(name, tensor), []).append(tensor)
        self.persistent_tensors.update({key: _mean(tensors) for key, tensors in found.items()})


def epsilon(noise: Noise, messages: int) -> float | None:
    """The exact epsilon of so many messages at `delta`; None without clipping."""
    return None if noise.clip is None else composed_epsilon([(noise, messages)], noise.delta)


def composed_epsilon(released: Iterable[tuple[Noise, int]], delta: float) -> float | None:
    """The exact epsilon of messages with several kinds of noise; None if some were not clipped.

    T Gaussian mechanisms with one multiplier are one with the multiplier divided by sqrt(T). Those
    with multipliers m_i are one with 1 / m^2 = sum 1 / m_i^2. Epsilon solves
    delta = Phi(s/2 - epsilon/s) - e^epsilon Phi(-s/2 - epsilon/s) with s = 1 / m, which is
    2 clip sqrt(T) / sigma (Balle and Wang, 2018, arXiv:1805.06530).
    """
    multipliers = []
    for noise, messages in released:
        if messages and noise.clip is None:
            return None
        if messages and noise.clip is not None:
            multipliers.append(noise.sigma / noise.clip / 2 / math.sqrt(messages))
    if not multipliers:
        return 0.0
    least = min(multipliers)
    if least < MIN_NOISE_MULTIPLIER:
        return math.inf
    # Relative to the smallest, so that a single multiplier is not rounded.
    multiplier = least / math.sqrt(math.fsum((least / m) ** 2 for m in multipliers))
    with np.errstate(divide="ignore"):  # the logarithm of a delta that underflows to zero
        return float(_accountant()(multiplier, delta))


def privacy_report(noise: Noise, messages: Sequence[int], secret: bool = False) -> dict[str, Any]:
    """The privacy entry of a run's record, from the number of messages that each node released.

    `secret` means that the seed of the noise is not public, as between real peers.
    `epsilon_message` is for one message, `epsilon` for the node that released most. An infinite
    value is None, as JSON has no infinity, and the text states it.
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
    """Raise an InputError before a run if epsilon could not be computed after it."""
    if noise.private:
        _accountant()


def check_epsilon_limit(limit: float | None, noise: Noise) -> None:
    """Check the option that ends the training of a peer before epsilon exceeds a limit."""
    if limit is None:
        return
    if not 0 < limit < math.inf:
        raise InputError(f"--stop-at-epsilon must be a number above 0, got {limit}")
    if not noise.private:
        raise InputError(
            f"--stop-at-epsilon {limit:g} requires differential privacy; set --noise and --clip"
        )


def format_epsilon(value: float | None) -> str:
    """Epsilon with four digits.

    >>> format_epsilon(4.37743), format_epsilon(None)
    ('4.377', 'unbounded')
    """
    return f"{value:.4g}" if value is not None and math.isfinite(value) else "unbounded"


def _has_floats(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0


def _matching(floats: Payload, references: Payload) -> dict[str, Tensor]:
    return {
        name: references[name].to(tensor)  # its dtype
        for name, tensor in floats.items()
        if name in references and references[name].shape == tensor.shape
    }


def _shortened(step: Tensor, length: float, limit: float) -> Tensor:
    """A part of a vector of this length, scaled so that the whole is within the limit."""
    if not math.isfinite(length):  # a diverged model must not reveal itself
        return torch.zeros_like(step)
    if length <= limit:
        return step
    # A little shorter than the limit, because rounding may lengthen the result.
    return step * (limit / length * (1 - 2 * torch.finfo(step.dtype).eps))


def _mean(tensors: list[Tensor]) -> Tensor:
    """The mean as a new tensor, even of one: an engine may reuse the memory of a message."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total.add_(tensor)
    return total.div_(len(tensors))


def _reference_key(name: str, tensor: Tensor) -> str:
    """The key in checkpoints; with the shape, as other models send other shapes by this name."""
    return f"veil.{name}.{'x'.join(map(str, tensor.shape))}"


def _accountant() -> Any:
    """The function (noise multiplier, delta) -> epsilon of one Gaussian mechanism.

    It is exact and takes milliseconds. Privacy loss distributions give the same upper bound, but
    need seconds to minutes if epsilon is large. Renyi divergences give three to ten per cent more.
    """
    try:
        from dp_accounting import get_epsilon_gaussian  # a slow import that few runs need
    except ImportError:
        raise InputError(
            "noise with clip requires dp-accounting 0.6 or later to compute epsilon; "
            'run pip install "peerage[privacy]"'
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
            "can move them by any distance; set clip as well."
        )
    return "No differential privacy: messages are clipped but have no noise; set sigma as well."


def _guarantee(noise: Noise, messages: int, value: float | None, secret: bool) -> str:
    if value is None:
        return (
            "No meaningful differential privacy: sigma is so small relative to clip that epsilon "
            "has no useful bound; increase sigma."
        )
    sent = "1 message" if messages == 1 else f"{messages} messages"
    weak = ", which is almost no protection" if value > WEAK_EPSILON else ""
    condition = "" if secret else f", as long as {SECRET}"
    return (
        f"The data set of each node as a whole is protected by differential privacy with epsilon "
        f"{value:.4g} at delta {noise.delta:g} (the worst node: {sent}){weak}, against anyone who "
        f"sees all messages{condition}; example counts, degrees, integer tensors, who sends which "
        "tensors when, records and saved models are not covered."
    )
