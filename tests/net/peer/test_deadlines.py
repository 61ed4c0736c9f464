"""How long a peer waits for another: little for silent ones, what they need for slow ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerage.net.peer.deadlines import CREDIT, LEAST, MARGIN, MEMORY, REFILL, Deadlines

LIMIT, OTHER = 60.0, 9


class Waiting:
    """A peer that waits for sender 1, and for another one that always answers in time."""

    def __init__(self, others: bool = True) -> None:
        self.deadlines = Deadlines(LIMIT)
        self.now = self.lost = 0.0
        self.round = 0
        self.others = [OTHER] if others else []

    def run(self, needs: float | None, reachable: bool = True, usual: float = 0.1) -> float:
        """Run a round in which the sender `needs` so long, None for ever; return what it got."""
        deadlines, begun = self.deadlines, self.now
        deadlines.begin(self.round, begun)
        granted = deadlines.seconds(1) if reachable else 0.0
        in_time = needs is not None and needs <= max(usual, granted)
        waited = max(usual, needs if in_time and needs is not None else granted)
        for other in self.others:
            deadlines.arrived(other, self.round, begun + usual)
        if in_time:
            deadlines.arrived(1, self.round, begun + needs)
        else:
            self.lost += waited - usual
        heard, missed = ([*self.others, 1], []) if in_time else (self.others, [1])
        deadlines.end(self.round, heard, missed, begun + waited)
        if needs is not None and not in_time:
            waited = max(waited, needs)  # the next round begins when it is here
            deadlines.arrived(1, self.round, begun + needs)
        self.now = begun + waited
        self.round += 1
        return granted


def test_a_sender_that_was_always_heard_gets_the_whole_time():
    waiting = Waiting()
    assert [waiting.run(0.2) for _ in range(3)] == [LIMIT] * 3


def test_a_silent_peer_costs_one_message_timeout_and_then_nothing():
    waiting = Waiting()
    assert [waiting.run(None) for _ in range(20)] == [LIMIT, *[0.0] * 19]


def test_a_peer_that_falls_silent_costs_its_timeout_once_then_a_tenth_and_recovers():
    waiting = Waiting()
    for _ in range(MEMORY):
        waiting.run(0.2)
    assert [waiting.run(None) for _ in range(3)] == [LIMIT, *[pytest.approx(MARGIN * 0.2)] * 2]
    begun = waiting.now
    for _ in range(5000):
        waiting.run(None)
    assert waiting.lost - LIMIT <= CREDIT * LIMIT + REFILL * (waiting.now - begun)
    waiting.now += 10
    assert waiting.run(0.2) == pytest.approx(MARGIN * 0.2)
    waiting.now += LIMIT / REFILL
    assert waiting.run(0.2) == LIMIT


def test_a_peer_that_was_absent_is_not_waited_for_until_a_message_shows_how_long_it_needs():
    waiting = Waiting()
    for _ in range(20):
        waiting.run(None, reachable=False)
    assert [waiting.run(None) for _ in range(20)] == [0.0] * 20  # it calls, and sends no message
    granted = [waiting.run(0.3) for _ in range(20)]
    assert granted[0] == 0.0
    assert pytest.approx(min(filter(None, granted))) == MARGIN * 0.3  # heard, and believed again
    assert all(granted[10:])


def test_a_peer_whose_message_comes_before_those_of_others_is_heard_without_waiting():
    waiting = Waiting()
    for _ in range(20):
        waiting.run(None, reachable=False)
    assert waiting.run(0.05) == 0.0
    assert waiting.run(0.05) > MARGIN * 0.05  # what has been added to its credit meanwhile


@pytest.mark.parametrize("absent", [0, 12, 600])  # rounds of 0.1 seconds
def test_a_slow_peer_is_heard_again_at_once_after_a_cut_or_a_restart(absent):
    waiting = Waiting()
    for _ in range(10):
        assert waiting.run(16.0) == LIMIT  # a link of 50 kbit/s
    for _ in range(absent):
        waiting.run(None, reachable=False)
    assert waiting.lost == 0
    assert waiting.run(16.0) >= MARGIN * 16.0 - 1e-9
    assert waiting.run(16.0) == LIMIT


def test_a_slow_peer_that_joins_late_is_heard_after_a_while():
    waiting = Waiting()
    waiting.run(None, reachable=False)
    granted = [waiting.run(16.0) for _ in range(20)]
    assert granted[0] == 0.0
    first = next(place for place, seconds in enumerate(granted) if seconds)
    assert 16 * first <= MARGIN * 16 / REFILL + 16
    assert all(granted[first:])


def test_a_late_message_counts_although_many_rounds_have_begun_meanwhile():
    deadlines = Deadlines(LIMIT)
    deadlines.begin(0, now=0.0)
    deadlines.end(0, [1, OTHER], [], now=0.1)
    for round in range(1, 1000):
        deadlines.begin(round, now=round * 0.01)
        deadlines.end(round, [OTHER], [1], now=round * 0.01)
    deadlines.arrived(1, 1, now=10.0)
    assert deadlines.seconds(1) == pytest.approx(MARGIN * 9.99)
    deadlines.begin(1000, now=1000.0)
    deadlines.arrived(1, 2, now=1000.0)  # too old to say anything
    assert deadlines.seconds(1) == pytest.approx(MARGIN * 9.99)


def test_a_peer_that_needs_more_than_the_timeout_gets_the_timeout_now_and_then():
    waiting = Waiting()
    waiting.run(0.1)
    granted = [waiting.run(70.0) for _ in range(50)]
    assert set(granted) == {0.0, LIMIT}
    assert waiting.lost <= CREDIT * LIMIT + REFILL * waiting.now


def test_observations_of_old_rounds_are_forgotten():
    waiting = Waiting()
    waiting.run(40.0)
    for _ in range(MEMORY):
        waiting.run(2.0)
    waiting.run(None)
    assert waiting.run(None) == MARGIN * 2


def test_messages_that_were_there_before_count_as_fast():
    waiting = Waiting()
    waiting.run(40.0)
    for _ in range(MEMORY):
        waiting.deadlines.begin(waiting.round, waiting.now)
        waiting.deadlines.end(waiting.round, [1, OTHER], [], waiting.now)
        waiting.round += 1
    waiting.run(None)
    assert waiting.run(None) == 0.0


def test_where_no_other_peer_is_heard_a_silent_one_still_gets_a_little_time():
    waiting = Waiting(others=False)
    granted = [waiting.run(None) for _ in range(20)]
    assert granted == [LIMIT, *[LEAST] * 19]


def test_a_short_message_timeout_is_the_limit():
    deadlines = Deadlines(0.5)
    deadlines.begin(0, now=0.0)
    deadlines.end(0, [], [1], now=0.5)
    assert deadlines.seconds(1) == 0.5


def test_time_that_was_spent_on_a_slower_peer_is_not_lost_by_a_silent_one():
    waiting = Waiting()
    for _ in range(MEMORY):
        waiting.run(0.2, usual=30.0)
    waiting.run(None, usual=30.0)
    for _ in range(10):
        assert waiting.run(None, usual=30.0) == pytest.approx(MARGIN * 0.2)
    assert waiting.lost == pytest.approx(30.0)


@pytest.mark.parametrize("needs", [None, 70.0, 0.3], ids=["silent", "late", "slow"])
@pytest.mark.parametrize("between", [1, 3, 10, 40])  # good rounds between two bad ones
@pytest.mark.parametrize("reachable", [True, False])
def test_a_peer_that_is_silent_now_and_then_costs_a_bounded_share_of_the_time(
    between, needs, reachable
):
    waiting = Waiting()
    for round in range(2000):
        bad = round % (between + 1) == between
        waiting.run(needs if bad else 0.1, reachable=reachable or not bad)
    assert waiting.lost <= CREDIT * LIMIT + REFILL * waiting.now


@given(st.lists(st.one_of(st.none(), st.floats(0, 100)), max_size=60), st.booleans())
def test_waits_in_vain_stay_within_the_credit_and_no_wait_exceeds_the_limit(needs, others):
    waiting = Waiting(others)
    for one in needs:
        assert 0.0 <= waiting.run(one) <= LIMIT
    least = 0.0 if others else LEAST * len(needs)
    assert waiting.lost <= CREDIT * LIMIT + REFILL * waiting.now + least + 1e-6
