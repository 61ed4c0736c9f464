"""One bucket limits new connections, which it refuses, and calls, which it lets wait."""

from functools import partial

import pytest

from peerage.net.wire.rates import TokenBucket


def test_events_within_the_rate_are_never_refused_and_never_wait():
    taken, waited = TokenBucket(), TokenBucket()
    for event in range(1000):
        now = 100 + 0.125 * event
        assert taken.take(8.0, 1.0, now)
        assert waited.wait(8.0, 1.0, now) == 0


def test_a_burst_passes_and_the_rest_comes_at_the_rate():
    wait = partial(TokenBucket().wait, 8.0, 16.0)
    waits = [wait(100.0) for _ in range(50)]
    assert waits[:16] == [0.0] * 16
    assert waits[16:] == [0.125 * event for event in range(1, 35)]


def test_a_burst_passes_and_the_rest_is_refused():
    take = partial(TokenBucket().take, 8.0, 16.0)
    assert [take(100.0) for _ in range(20)] == [True] * 16 + [False] * 4
    assert [take(100.25) for _ in range(4)] == [True] * 2 + [False] * 2  # refused ones are free


@pytest.mark.parametrize("kind", ["take", "wait"])
def test_silence_earns_one_burst_and_no_more(kind):
    event = partial(getattr(TokenBucket(), kind), 8.0, 16.0)
    passes = True if kind == "take" else 0.0
    for _ in range(50):
        event(100.0)
    assert sum(event(1000.0) == passes for _ in range(100)) == 16
