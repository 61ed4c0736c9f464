"""Noise on messages: clipping by hand, laws of sensitivity, and epsilon by three other methods."""

import json
import math
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr
from torch import Tensor

from peerage.errors import InputError
from peerage.privacy import (
    Noise,
    PrivacyFilter,
    check_accounting,
    epsilon,
    norm,
    perturb,
    privacy_report,
)
from peerage.randomness import torch_stream
from peerage.specs import construct, plain
from peerage.state import pack, unpack

FLOATS = st.floats(-1e6, 1e6, width=32)
VECTOR = st.lists(FLOATS, min_size=3, max_size=3).map(torch.tensor)
PAYLOAD = st.fixed_dictionaries({"x": VECTOR, "h": VECTOR})
CLIP = st.floats(1e-3, 1e3)


def rng(index: int = 0) -> torch.Generator:
    return torch_stream(5, "test of privacy", index)


def clipped(
    payload: Mapping[str, Tensor], references: Mapping[str, Tensor], clip: float
) -> dict[str, Tensor]:
    """The message before noise."""
    return perturb(Noise(clip=clip), payload, references, rng())


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Euclidean, of all tensors together, the slow way."""
    pairs = [(p, q) for name in a for p, q in zip(a[name].tolist(), b[name].tolist(), strict=True)]
    return math.sqrt(math.fsum((p - q) ** 2 for p, q in pairs))


def rounding(*payloads: Mapping[str, Tensor]) -> float:
    """How far the last addition in float32 may move a message, at most."""
    return sum(2.0**-23 * float(t.abs().sum()) for payload in payloads for t in payload.values())


def test_noise_alone_is_gaussian_and_independent() -> None:
    x, b = torch.full((40_000,), 3.0), torch.zeros(40_000)
    sent = perturb(Noise(sigma=0.5), {"x": x, "b": b}, {}, rng())
    noise = {"x": sent["x"] - x, "b": sent["b"]}
    for drawn in noise.values():  # five standard errors
        assert abs(float(drawn.mean())) < 5 * 0.5 / 200
        assert float(drawn.std()) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(80_000))
        assert float((drawn.abs() < 0.5).float().mean()) == pytest.approx(0.6827, abs=5 * 0.0024)
    both = torch.stack([noise["x"], noise["b"]])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 5 / 200


def test_noise_depends_on_the_stream_only() -> None:
    payload = {"x": torch.arange(20.0)}
    first, same, other = (perturb(Noise(1.0), payload, {}, rng(i))["x"] for i in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_clipping_by_hand() -> None:
    # The difference is (3, 4 | 12), of length 13; to length 6.5 it is halved.
    payload = {"x": torch.tensor([4.0, 6.0]), "h": torch.tensor([12.0])}
    sent = clipped(payload, {"x": torch.tensor([1.0, 2.0])}, 6.5)
    torch.testing.assert_close(sent["x"], torch.tensor([2.5, 4.0]))
    torch.testing.assert_close(sent["h"], torch.tensor([6.0]))


def test_noise_is_added_to_the_clipped_message() -> None:
    payload, references = {"x": torch.tensor([4.0, 6.0])}, {"x": torch.tensor([1.0, 2.0])}
    sent = perturb(Noise(sigma=2.0, clip=1.0), payload, references, rng())
    drawn = torch.empty(2).normal_(0, 2.0, generator=rng())
    torch.testing.assert_close(sent["x"], torch.tensor([1.6, 2.8]) + drawn)


def test_noise_on_clipped_messages_has_the_stated_deviation() -> None:
    payload = {"x": torch.full((40_000,), 9.0)}  # of length 1800, clipped to 200: each entry 1
    drawn = perturb(Noise(sigma=0.5, clip=200.0), payload, {}, rng())["x"] - 1
    assert abs(float(drawn.mean())) < 5 * 0.5 / 200
    assert float(drawn.std()) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(80_000))


def test_a_clip_out_of_reach_changes_nothing() -> None:
    payload = {"x": torch.randn(50, generator=rng()), "n": torch.tensor(3)}
    references = {"x": torch.randn(50, generator=rng(1))}
    for noise in (Noise(), Noise(clip=1e6)):
        sent = perturb(noise, payload, references, rng())
        assert all(torch.equal(sent[name], payload[name]) for name in payload)


def test_references_mean_nothing_without_clip() -> None:
    payload = {"x": torch.ones(4)}
    with_one = perturb(Noise(0.1), payload, {"x": torch.full((4,), 7.0)}, rng())
    assert torch.equal(with_one["x"], perturb(Noise(0.1), payload, {}, rng())["x"])


@given(payload=PAYLOAD, clip=CLIP)
@settings(deadline=None, max_examples=100)
def test_joint_norm_is_never_above_clip(payload: dict[str, Tensor], clip: float) -> None:
    zero = {name: torch.zeros(3) for name in payload}
    length = distance(clipped(payload, {}, clip), zero)
    # Not even by a rounding: the reference is zero, so nothing is rounded after clipping.
    assert length <= clip * (1 + 1e-15)
    assert length == pytest.approx(min(clip, distance(payload, zero)), rel=1e-6)


@given(first=PAYLOAD, second=PAYLOAD, reference=PAYLOAD, clip=CLIP)
@settings(deadline=None, max_examples=100)
def test_any_two_messages_are_within_the_sensitivity(
    first: dict[str, Tensor],
    second: dict[str, Tensor],
    reference: dict[str, Tensor],
    clip: float,
) -> None:
    a, b = (clipped(payload, reference, clip) for payload in (first, second))
    assert distance(a, b) <= 2 * clip + rounding(a, b, reference)


@given(payload=PAYLOAD, reference=PAYLOAD, clip=CLIP)
@settings(deadline=None, max_examples=50)
def test_the_reference_is_added_to_what_is_private_already(
    payload: dict[str, Tensor], reference: dict[str, Tensor], clip: float
) -> None:
    """To the bit: rounding beside a large reference happens after the noise, and is harmless."""
    noise = Noise(sigma=clip, clip=clip)
    steps = {name: payload[name] - reference[name] for name in payload}
    private = perturb(noise, steps, {}, rng())
    sent = perturb(noise, payload, reference, rng())
    assert all(torch.equal(sent[name], private[name] + reference[name]) for name in sent)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_model_that_diverged_does_not_stand_out(bad: float) -> None:
    reference = {"x": torch.ones(3)}
    noise = Noise(sigma=0.1, clip=1.0)
    sent = perturb(noise, {"x": torch.tensor([0.0, bad, 0.0])}, reference, rng())
    still = perturb(noise, reference, reference, rng())
    assert torch.equal(sent["x"], still["x"])


def test_norm_is_exact_for_long_vectors() -> None:
    x = torch.rand(300_001, generator=rng())
    slow = math.sqrt(math.fsum(value * value for value in x.tolist()))
    assert norm([x[:100_000], x[100_000:]]) == pytest.approx(slow, rel=1e-13)
    assert norm([]) == 0


def test_named_quantities_stay_nonnegative() -> None:
    payload = {"x": torch.zeros(1000), "h": torch.zeros(1000)}
    for noise in (Noise(sigma=1.0), Noise(sigma=1.0, clip=1.0)):
        sent = perturb(noise, payload, {}, rng(), nonnegative={"h"})
        free = perturb(noise, payload, {}, rng())
        assert torch.equal(sent["x"], free["x"])
        assert torch.equal(sent["h"], free["h"].clamp(min=0))
        assert 400 < int((sent["h"] == 0).sum()) < 600


def test_integers_and_empty_tensors_are_left_alone() -> None:
    payload = {
        "n": torch.tensor([5, 7]),
        "b": torch.empty(0),
        "x": torch.ones(3),
        "y": torch.ones(()),
    }
    sent = perturb(Noise(sigma=1.0, clip=0.1), payload, {}, rng())
    assert list(sent) == list(payload)
    assert sent["n"] is payload["n"]
    assert sent["b"] is payload["b"]
    assert sent["y"].shape == ()
    assert not torch.equal(sent["y"], payload["y"])


@pytest.mark.parametrize("noise", [Noise(1.0), Noise(1.0, clip=0.5), Noise(clip=0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_are_new_tensors_of_the_same_kind(noise: Noise, dtype: torch.dtype) -> None:
    payload = {
        "x": torch.ones(40, dtype=dtype),
        "w": torch.ones(5, 8, dtype=dtype).t(),
        "i": torch.ones(2, 3, 4, 4, dtype=dtype).to(memory_format=torch.channels_last),
    }
    references = {name: torch.full(t.shape, 0.5) for name, t in payload.items()}
    before = {name: t.clone() for name, t in payload.items()}
    sent = perturb(noise, payload, references, rng(), nonnegative={"x"})
    for name, tensor in payload.items():
        assert torch.equal(tensor, before[name])
        assert torch.all(references[name] == 0.5)
        assert sent[name].dtype == dtype
        assert sent[name].shape == tensor.shape
        assert sent[name].stride() == tensor.stride()
        assert sent[name].data_ptr() not in (tensor.data_ptr(), references[name].data_ptr())


def test_the_reference_is_the_mean_of_the_last_received_messages() -> None:
    privacy_filter = PrivacyFilter(Noise(clip=1.0))
    far = {"x": torch.tensor([100.0, 0.0]), "h": torch.tensor([0.0, 0.0])}
    torch.testing.assert_close(
        privacy_filter.release(far, rng)["x"], torch.tensor([1.0, 0.0])
    )  # from zero
    privacy_filter.set_reference([{"x": torch.tensor([10.0, 0.0])}])
    torch.testing.assert_close(privacy_filter.release(far, rng)["x"], torch.tensor([11.0, 0.0]))
    privacy_filter.set_reference(
        [{"x": torch.tensor([50.0, 0.0])}, {"x": torch.tensor([70.0, 0.0])}]
    )
    torch.testing.assert_close(privacy_filter.release(far, rng)["x"], torch.tensor([61.0, 0.0]))
    privacy_filter.set_reference([])  # nothing arrived: the last reference stays
    privacy_filter.set_reference([{"b": torch.zeros(2)}])
    torch.testing.assert_close(privacy_filter.release(far, rng)["x"], torch.tensor([61.0, 0.0]))


def test_other_shapes_are_other_references() -> None:
    privacy_filter = PrivacyFilter(Noise(clip=1.0))
    privacy_filter.set_reference([{"x": torch.full((2,), 9.0)}, {"x": torch.full((3,), 5.0)}])
    privacy_filter.set_reference([{"x": torch.full((2,), 7.0)}])
    for size, value in ((2, 7.0), (3, 5.0)):
        sent = privacy_filter.release({"x": torch.full((size,), value)}, rng)
        assert torch.equal(sent["x"], torch.full((size,), value))
    far = torch.tensor([9.0, 0.0, 0.0, 0.0])  # no message had four entries: measured from zero
    torch.testing.assert_close(privacy_filter.release({"x": far}, rng)["x"], far / 9)
    torch.testing.assert_close(clipped({"x": far}, {"x": torch.ones(1)}, 1.0)["x"], far / 9)


def test_messages_may_be_overwritten_after_the_reference_was_set() -> None:
    privacy_filter = PrivacyFilter(Noise(clip=1.0))
    message = torch.full((2,), 5.0)
    privacy_filter.set_reference([{"x": message}])
    message.zero_()
    assert torch.equal(
        privacy_filter.release({"x": torch.full((2,), 5.0)}, rng)["x"], torch.full((2,), 5.0)
    )


def test_a_chain_of_messages_moves_by_clip_at_most() -> None:
    """Two neighbours: whatever a node does, a message starts from the last mean."""
    privacy_filter, received = PrivacyFilter(Noise(clip=0.25)), torch.zeros(4)
    for step in range(5):
        privacy_filter.set_reference([{"x": received}, {"x": received + 2.0}])
        sent = privacy_filter.release(
            {"x": torch.full((4,), 1e4 * (-1.0) ** step)}, partial(rng, step)
        )["x"]
        assert float((sent - received - 1.0).norm()) == pytest.approx(0.25, rel=1e-4)
        received = sent


def test_releases_are_counted() -> None:
    privacy_filter = PrivacyFilter(Noise(sigma=1.0))
    assert privacy_filter.messages == 0
    for _ in range(3):
        privacy_filter.release({"x": torch.ones(2)}, rng)
    privacy_filter.release(
        {"n": torch.tensor(1)}, rng
    )  # without a float there is nothing to account for
    privacy_filter.set_reference([{"x": torch.ones(2)}])
    assert privacy_filter.messages == 3
    assert set(privacy_filter.persistent_tensors) == {"veil.count"}  # no clip, no references
    assert privacy_filter.persistent_tensors["veil.count"].dtype == torch.int64


def test_nothing_happens_by_default() -> None:
    privacy_filter, payload = PrivacyFilter(Noise()), {"x": torch.ones(2)}
    privacy_filter.set_reference([payload])
    assert privacy_filter.release(payload, rng)["x"] is payload["x"]
    assert privacy_filter.persistent_tensors == {}

    def never() -> torch.Generator:
        raise AssertionError("without noise, nothing is drawn")

    assert PrivacyFilter().release(payload, never) == payload


def test_a_privacy_filter_continues_from_a_checkpoint() -> None:
    noise, payload = Noise(sigma=0.1, clip=1.0), {"x": torch.full((3,), 9.0)}
    privacy_filter = PrivacyFilter(noise, {"h"})
    privacy_filter.set_reference([{"x": torch.full((3,), 4.0), "h": torch.ones(3)}])
    privacy_filter.release(payload, rng)
    tensors: dict[str, Tensor] = {}
    tree = json.loads(json.dumps(pack(privacy_filter.persistent_tensors, tensors, "veil")))
    again = PrivacyFilter(noise, {"h"}, unpack(tree, tensors, {}))
    assert again.messages == 1
    assert torch.equal(
        privacy_filter.release(payload, partial(rng, 1))["x"],
        again.release(payload, partial(rng, 1))["x"],
    )


def analytic(noise: Noise, messages: int) -> float:
    """Epsilon by bisection of the exact delta(epsilon) of one Gaussian mechanism."""
    assert noise.clip is not None
    s = 2 * noise.clip * math.sqrt(messages) / noise.sigma

    def delta(value: float) -> float:
        first, second = log_ndtr(s / 2 - value / s), value + log_ndtr(-s / 2 - value / s)
        return float(np.exp(first) - np.exp(second))

    low, high = 0.0, s * s + 20 * s
    if delta(0) <= noise.delta:
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if delta(middle) > noise.delta else (low, middle)
    return high


CASES = [
    (Noise(sigma=2.0, clip=1.0), 1),  # multiplier 1
    (Noise(sigma=2.0, clip=1.0), 30),
    (Noise(sigma=10.0, clip=0.5, delta=1e-6), 200),
    (Noise(sigma=0.4, clip=0.2, delta=1e-3), 1),
    (Noise(sigma=100.0, clip=0.1), 1),
]


@pytest.mark.parametrize(("noise", "messages"), CASES)
def test_epsilon_against_the_formula(noise: Noise, messages: int) -> None:
    assert epsilon(noise, messages) == pytest.approx(analytic(noise, messages), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "messages"), CASES)
def test_epsilon_against_two_accountants(noise: Noise, messages: int) -> None:
    assert noise.clip is not None
    value = epsilon(noise, messages)
    assert value is not None
    one = dp_accounting.GaussianDpEvent(noise.sigma / (2 * noise.clip))
    event = dp_accounting.SelfComposedDpEvent(one, messages)
    above = pld.PLDAccountant().compose(event).get_epsilon(noise.delta)  # rounds upwards
    assert value - 1e-9 <= above <= value + 1e-4
    with warnings.catch_warnings():  # the orders it tries do not all suit every case
        warnings.simplefilter("ignore")
        loose = rdp.RdpAccountant().compose(event).get_epsilon(noise.delta)
    assert value <= loose <= 1.5 * value + 0.05


def test_a_known_number() -> None:
    # Multiplier 1 and delta 1e-5, as others compute it too.
    assert epsilon(Noise(sigma=2.0, clip=1.0), 1) == pytest.approx(4.377, abs=5e-4)
    # Four messages with twice the noise are as private as one.
    assert epsilon(Noise(sigma=4.0, clip=1.0), 4) == pytest.approx(4.377, abs=5e-4)


@pytest.mark.slow
def test_an_attack_achieves_the_stated_delta_and_no_more() -> None:
    """Two data sets at opposite ends: P[message in S] - e^epsilon P'[message in S] is delta.

    S holds the messages that are e^epsilon times likelier under the first: the best attack.
    """
    noise, trials = Noise(sigma=1.0, clip=0.5, delta=0.2), 10_000
    value = epsilon(noise, 1)
    assert value is not None
    generator = rng()
    shares = []
    for far in (90.0, -90.0):
        payload = {"x": torch.tensor([far])}
        sent = [float(perturb(noise, payload, {}, generator)["x"]) for _ in range(trials)]
        shares.append(float(np.mean([x > value for x in sent])))  # sigma^2 epsilon / (2 clip)
    error = math.sqrt(0.25 / trials) * math.hypot(1, math.exp(value))
    assert shares[0] - math.exp(value) * shares[1] == pytest.approx(noise.delta, abs=4 * error)


@given(
    sigma=st.floats(0.1, 100),
    clip=st.floats(0.05, 10),
    messages=st.integers(1, 1000),
    factor=st.floats(1.01, 3),
)
@settings(deadline=None, max_examples=40)
def test_more_messages_cost_and_more_noise_helps(
    sigma: float, clip: float, messages: int, factor: float
) -> None:
    value = epsilon(Noise(sigma, clip), messages)
    more = epsilon(Noise(sigma, clip), messages + 1)
    quieter = epsilon(Noise(sigma * factor, clip), messages)
    wider = epsilon(Noise(sigma, clip * factor), messages)
    assert value is not None
    assert more is not None
    assert quieter is not None
    assert wider is not None
    assert quieter <= value <= more
    assert value <= wider


def test_ends_of_the_scale() -> None:
    assert epsilon(Noise(sigma=1.0), 5) is None
    assert epsilon(Noise(sigma=1.0, clip=1.0), 0) == 0.0
    assert epsilon(Noise(clip=1.0), 5) == math.inf
    assert epsilon(Noise(sigma=1e-200, clip=1.0), 5) == math.inf
    assert epsilon(Noise(sigma=1e-320, clip=1e300), 5) == math.inf
    assert epsilon(Noise(sigma=1e30, clip=1.0), 5) == 0.0
    assert epsilon(Noise(sigma=1e-4, clip=1.0), 1) == pytest.approx(2e8, rel=1e-3)


def test_the_account_of_a_private_run() -> None:
    noise = Noise(sigma=2.0, clip=1.0)
    record = privacy_report(noise, [3, 0, 12])
    assert record["epsilons"] == [epsilon(noise, 3), 0.0, epsilon(noise, 12)]
    assert record["epsilon"] == epsilon(noise, 12)
    assert record["epsilon_message"] == epsilon(noise, 1)
    assert record["messages"] == [3, 0, 12]
    assert f"epsilon {record['epsilon']:.4g} at delta 1e-05" in record["guarantee"]
    assert "12 messages" in record["guarantee"]
    assert "seed" in record["guarantee"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert privacy_report(noise, [])["epsilon"] == 0.0


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (Noise(), "messages are sent as they are"),
        (Noise(sigma=0.1), "not clipped"),
        (Noise(clip=1.0), "have no noise"),
    ],
)
def test_the_account_of_a_run_without_guarantee(noise: Noise, reason: str) -> None:
    record = privacy_report(noise, [7, 7])
    assert record["guarantee"].startswith("No differential privacy:")
    assert reason in record["guarantee"]
    assert set(record) == {"sigma", "clip", "delta", "guarantee"}
    json.dumps(record, allow_nan=False)


def test_an_infinite_epsilon_is_none_with_an_explanation() -> None:
    record = privacy_report(Noise(sigma=1e-9, clip=1.0), [4])
    assert (record["epsilon"], record["epsilons"]) == (None, [None])
    assert "no useful bound" in record["guarantee"]


def test_a_missing_package_is_found_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    remedy = r'dp-accounting 0.6 or later to compute epsilon; run pip install "peerage\[privacy\]"'
    with pytest.raises(InputError, match=remedy):
        check_accounting(Noise(sigma=1.0, clip=1.0))
    for noise in (Noise(), Noise(sigma=1.0), Noise(clip=1.0)):
        check_accounting(noise)
        privacy_report(noise, [3])
    perturb(Noise(sigma=1.0, clip=1.0), {"x": torch.ones(2)}, {}, rng())


def test_an_old_package_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dp_accounting, "get_epsilon_gaussian")
    with pytest.raises(InputError, match=r"0\.6 or later"):
        check_accounting(Noise(sigma=1.0, clip=1.0))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sigma": -0.1}, "sigma must be a number of at least 0, got -0.1; use 0"),
        ({"sigma": math.inf}, "sigma must be a number of at least 0, got inf"),
        ({"sigma": math.nan}, "sigma must be a number of at least 0, got nan"),
        ({"clip": 0.0}, "clip must be a number above 0, got 0.0; leave it out"),
        ({"clip": -1.0}, "clip must be a number above 0, got -1.0"),
        ({"clip": math.inf}, "clip must be a number above 0, got inf"),
        ({"clip": math.nan}, "clip must be a number above 0, got nan"),
        ({"delta": 0.0}, "delta must lie in (0, 1), got 0.0"),
        ({"delta": 1.0}, "delta must lie in (0, 1), got 1.0"),
        ({"delta": math.nan}, "delta must lie in (0, 1), got nan"),
    ],
)
def test_bad_values_are_rejected(options: dict[str, float], error: str) -> None:
    with pytest.raises(InputError) as caught:
        Noise(**options)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{}, {"sigma": 0.5}, {"sigma": 0.5, "clip": 2.0, "delta": 1e-6}]
)
def test_noise_survives_a_table(options: dict[str, Any]) -> None:
    noise = Noise(**options)
    assert construct(Noise, plain(noise), "noise") == noise
    assert construct(Noise, {"sigma": "0.5", "clip": "none"}, "noise") == Noise(sigma=0.5)
