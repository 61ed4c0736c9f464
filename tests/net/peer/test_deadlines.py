"""How long a peer waits for another: less for silent ones, never less than they needed."""

from hypothesis import given
from hypothesis import strategies as st

from peerage.net.peer.deadlines import LEAST, MARGIN, MEMORY, SHORTEST, Deadlines


def test_a_silent_peer_gets_half_as_long_each_time_and_recovers():
    deadlines = Deadlines(60.0)
    found = []
    for _ in range(8):
        found.append(deadlines.seconds(1))
        deadlines.missed(1)
    assert found == [60, 30, 15, 7.5, 3.75, 1.875, LEAST, LEAST]
    assert deadlines.seconds(2) == 60  # of a peer that was never silent
    for _ in range(8):
        deadlines.heard(1)
    assert deadlines.seconds(1) == 60


def test_a_peer_gets_the_time_that_it_was_observed_to_need():
    deadlines = Deadlines(60.0)
    deadlines.begin(3, now=100.0)
    deadlines.arrived(1, 3, now=108.0)
    for _ in range(20):
        deadlines.missed(1)
    assert deadlines.seconds(1) == MARGIN * 8


def test_a_late_message_shows_how_long_its_sender_needs():
    deadlines = Deadlines(60.0)
    for _ in range(20):
        deadlines.missed(1)
    deadlines.begin(3, now=100.0)
    deadlines.begin(4, now=101.0)  # without it
    deadlines.arrived(1, 3, now=120.0)
    assert deadlines.seconds(1) == MARGIN * 20
    deadlines.arrived(1, 4, now=500.0)
    assert deadlines.seconds(1) == 60  # never more than the message timeout


def test_a_silent_peer_costs_no_more_time_than_the_slowest_of_the_others():
    deadlines = Deadlines(60.0)
    for _ in range(20):
        deadlines.missed(3)
    deadlines.begin(3, now=100.0)
    deadlines.arrived(1, 3, now=100.125)
    deadlines.arrived(2, 3, now=100.25)
    assert deadlines.seconds(3) == MARGIN * 0.25
    assert deadlines.seconds(2) == 60
    deadlines.begin(4, now=101.0)
    deadlines.arrived(2, 4, now=109.0)
    assert deadlines.seconds(3) == LEAST


def test_where_all_others_are_fast_a_silent_peer_gets_the_shortest_time():
    deadlines = Deadlines(60.0)
    for _ in range(20):
        deadlines.missed(3)
    deadlines.begin(3, now=100.0)
    deadlines.arrived(1, 3, now=100.0)
    assert deadlines.seconds(3) == SHORTEST


def test_observations_of_old_rounds_are_forgotten():
    deadlines = Deadlines(60.0)
    for round in range(MEMORY + 1):
        deadlines.begin(round, now=100.0 * round)
        deadlines.arrived(1, round, now=100.0 * round + (40 if round == 0 else 2))
    for _ in range(20):
        deadlines.missed(1)
    assert deadlines.seconds(1) == MARGIN * 2
    deadlines.arrived(1, 0, now=10**6)  # nobody waits for that round any more
    assert deadlines.seconds(1) == MARGIN * 2


def test_a_short_message_timeout_is_the_limit():
    deadlines = Deadlines(0.5)
    deadlines.missed(1)
    assert deadlines.seconds(1) == 0.5


@given(st.lists(st.one_of(st.just("missed"), st.just("heard"), st.floats(0, 100)), max_size=40))
def test_deadlines_stay_between_what_was_needed_and_the_limit(events):
    deadlines, needed = Deadlines(60.0), []
    for round, event in enumerate(events):
        if event == "missed":
            deadlines.missed(1)
        elif event == "heard":
            deadlines.heard(1)
        else:
            deadlines.begin(round, now=0.0)
            deadlines.arrived(1, round, now=event)
            needed.append(event)
        assert min(60.0, max([LEAST, *needed[-MEMORY:]])) <= deadlines.seconds(1) <= 60.0
