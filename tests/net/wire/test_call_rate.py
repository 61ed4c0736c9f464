"""A member that calls too often waits, and others do not."""

from peerage.net.wire.server import CallRate


def test_calls_within_the_rate_never_wait():
    rate = CallRate(8.0)
    assert all(rate.wait(100 + 0.125 * call) == 0 for call in range(1000))


def test_a_burst_of_two_seconds_passes_and_the_rest_comes_at_the_rate():
    rate = CallRate(8.0)
    waits = [rate.wait(100.0) for _ in range(50)]
    assert waits[:17] == [0.0] * 17
    assert waits[17:] == [0.125 * call for call in range(1, 34)]


def test_silence_earns_one_burst_and_no_more():
    rate = CallRate(8.0)
    for _ in range(50):
        rate.wait(100.0)
    assert rate.wait(1000.0) == 0
    assert sum(rate.wait(1000.0) == 0 for _ in range(100)) == 16
