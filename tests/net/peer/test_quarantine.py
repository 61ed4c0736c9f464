"""Finding the sender whose messages make rounds fail."""

from hypothesis import given
from hypothesis import strategies as st

from peerage.net.peer.quarantine import Doubts


def admitted(doubts: Doubts, senders: range) -> list[int]:
    return [sender for sender in senders if doubts.admits(sender)]


def test_without_a_failure_all_are_admitted():
    doubts = Doubts()
    for _ in range(3):
        doubts.succeeded()
        assert admitted(doubts, range(4)) == [0, 1, 2, 3]
    assert doubts.guilty == set()


def test_after_a_failure_senders_are_readmitted_one_by_one():
    doubts = Doubts()
    doubts.failed({3, 1})
    assert admitted(doubts, range(4)) == [0, 2]  # which sent nothing in that round
    doubts.succeeded()
    assert admitted(doubts, range(4)) == [0, 1, 2]
    doubts.succeeded()
    assert admitted(doubts, range(4)) == [0, 1, 2, 3]
    assert doubts.guilty == set()


def test_the_sender_readmitted_last_is_banned_if_the_round_fails_again():
    doubts = Doubts()
    doubts.failed({1, 2, 3})
    doubts.succeeded()  # 1 is back
    doubts.succeeded()  # 2 is back
    doubts.failed({1, 2})
    assert doubts.guilty == {2}
    assert admitted(doubts, range(5)) == [0, 1, 4]  # 3 still waits
    doubts.succeeded()
    assert admitted(doubts, range(5)) == [0, 1, 3, 4]


def test_a_readmitted_sender_that_sent_nothing_is_not_banned():
    doubts = Doubts()
    doubts.failed({1})
    doubts.succeeded()
    doubts.failed({2})
    assert doubts.guilty == set()
    assert admitted(doubts, range(4)) == [0, 1, 3]


def test_a_failure_without_the_suspect_ends_the_suspicion():
    doubts = Doubts()
    doubts.failed({1})
    doubts.succeeded()
    doubts.failed({2})
    doubts.failed({1})
    assert doubts.guilty == set()


def test_a_sender_is_under_suspicion_for_one_round_only():
    doubts = Doubts()
    doubts.failed({1})
    doubts.succeeded()  # 1 is back,
    doubts.succeeded()  # and the round with it went well
    doubts.failed({1, 2})
    assert doubts.guilty == set()
    assert admitted(doubts, range(4)) == [0, 3]


@given(st.integers(1, 8), st.data())
def test_those_who_break_every_round_are_found_and_nobody_else(count, data):
    senders = range(count)
    breaking = data.draw(st.sets(st.sampled_from(senders)))
    doubts, failures = Doubts(), 0
    for _ in range(2 * count + 2):
        heard = set(admitted(doubts, senders))
        if heard & breaking:
            failures += 1
            doubts.failed(heard)
        else:
            doubts.succeeded()
    assert doubts.guilty == breaking
    assert set(admitted(doubts, senders)) == set(senders) - breaking
    assert failures == (len(breaking) + 1 if breaking else 0)
