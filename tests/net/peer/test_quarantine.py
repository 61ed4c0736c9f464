"""Finding the sender whose messages make rounds fail."""

from hypothesis import given
from hypothesis import strategies as st

from peerage.net.peer.quarantine import Quarantine


def admitted(quarantine: Quarantine, senders: range) -> list[int]:
    return [sender for sender in senders if quarantine.admits(sender)]


def test_without_a_failure_all_are_admitted():
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.succeeded()
        assert admitted(quarantine, range(4)) == [0, 1, 2, 3]
    assert quarantine.banned_peers == set()


def test_after_a_failure_senders_are_readmitted_one_by_one():
    quarantine = Quarantine()
    quarantine.failed({3, 1})
    assert admitted(quarantine, range(4)) == [0, 2]  # which sent nothing in that round
    quarantine.succeeded()
    assert admitted(quarantine, range(4)) == [0, 1, 2]
    quarantine.succeeded()
    assert admitted(quarantine, range(4)) == [0, 1, 2, 3]
    assert quarantine.banned_peers == set()


def test_the_sender_readmitted_last_is_banned_if_the_round_fails_again():
    quarantine = Quarantine()
    quarantine.failed({1, 2, 3})
    quarantine.succeeded()  # 1 is back
    quarantine.succeeded()  # 2 is back
    quarantine.failed({1, 2})
    assert quarantine.banned_peers == {2}
    assert admitted(quarantine, range(5)) == [0, 1, 4]  # 3 still waits
    quarantine.succeeded()
    assert admitted(quarantine, range(5)) == [0, 1, 3, 4]


def test_a_readmitted_sender_that_sent_nothing_is_not_banned():
    quarantine = Quarantine()
    quarantine.failed({1})
    quarantine.succeeded()
    quarantine.failed({2})
    assert quarantine.banned_peers == set()
    assert admitted(quarantine, range(4)) == [0, 1, 3]


def test_a_failure_without_the_suspect_ends_the_suspicion():
    quarantine = Quarantine()
    quarantine.failed({1})
    quarantine.succeeded()
    quarantine.failed({2})
    quarantine.failed({1})
    assert quarantine.banned_peers == set()


def test_a_sender_is_under_suspicion_for_one_round_only():
    quarantine = Quarantine()
    quarantine.failed({1})
    quarantine.succeeded()  # 1 is back,
    quarantine.succeeded()  # and the round with it went well
    quarantine.failed({1, 2})
    assert quarantine.banned_peers == set()
    assert admitted(quarantine, range(4)) == [0, 3]


@given(st.integers(1, 8), st.data())
def test_exactly_the_senders_that_break_rounds_are_banned(count, data):
    senders = range(count)
    breaking = data.draw(st.sets(st.sampled_from(senders)))
    quarantine, failures = Quarantine(), 0
    for _ in range(2 * count + 2):
        senders_used = set(admitted(quarantine, senders))
        if senders_used & breaking:
            failures += 1
            quarantine.failed(senders_used)
        else:
            quarantine.succeeded()
    assert quarantine.banned_peers == breaking
    assert set(admitted(quarantine, senders)) == set(senders) - breaking
    assert failures == (len(breaking) + 1 if breaking else 0)
