"""What a peer decides from what it knows: tables, and all cases of a small network."""

from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerage.net.peer.progress import State, View, has_begun
from peerage.requests import PRE_ROUND

PEERS = (1, 2, 3)


def view(**known: Any) -> View:
    """All of three others take part, are reachable and of unknown rounds, unless it says else."""
    settings: dict[str, Any] = {
        "round": 0,
        "rounds": {},
        "scheduled": PEERS,
        "reachable": PEERS,
        "finished": (),
        "mismatched": (),
        "hub": None,
        "ahead": 2,
    } | known
    for name in ("scheduled", "reachable", "finished", "mismatched"):
        settings[name] = frozenset(settings[name])
    return View(**settings)


def subsets(peers: tuple[int, ...]) -> list[tuple[int, ...]]:
    sizes = range(len(peers) + 1)
    return list(chain.from_iterable(combinations(peers, size) for size in sizes))


def all_views() -> Iterator[View]:
    """Every network of two other peers, in which peer 1 may be the hub."""
    some = subsets((1, 2))
    for scheduled in some:
        for reachable in some:
            for finished in some:
                for mismatched in some:
                    for hub in (None, 1):
                        yield view(
                            scheduled=scheduled,
                            reachable=reachable,
                            finished=finished,
                            mismatched=mismatched,
                            hub=hub,
                        )


# Which round the others are in


@pytest.mark.parametrize(
    ("rounds", "reachable", "newest"),
    [
        ({}, (1, 2, 3), PRE_ROUND),  # nothing is known
        ({1: 5}, (1, 2, 3), 5),  # with one or two, the highest
        ({1: 5, 2: 9}, (1, 2, 3), 9),
        ({1: 5, 2: 9, 3: 7}, (1, 2, 3), 7),  # with three, the second
        ({1: 5, 2: 9, 3: 9}, (1, 2, 3), 9),
        ({1: 5, 2: 5, 3: 9}, (1, 2, 3), 5),
        ({1: 5, 2: 9, 3: 7}, (1, 3), 7),  # only reachable peers count
        ({1: 5, 2: 9, 3: 7}, (), PRE_ROUND),
        ({1: PRE_ROUND, 2: 4, 3: PRE_ROUND}, (1, 2, 3), PRE_ROUND),
    ],
)
def test_the_second_highest_round_counts(rounds, reachable, newest):
    assert view(rounds=rounds, reachable=reachable).newest() == newest


def test_only_some_peers_may_be_asked_for():
    known = view(rounds={1: 5, 2: 9, 3: 7}, reachable=(1, 2))
    assert [known.newest(among) for among in ((1,), (2, 3), (3,), ())] == [
        5,
        9,
        PRE_ROUND,
        PRE_ROUND,
    ]


def test_with_a_hub_its_round_counts_even_if_it_is_gone():
    rounds = {1: 5, 2: 9, 3: 9}
    assert view(rounds=rounds, hub=1).newest() == 5
    assert view(rounds=rounds, hub=1, reachable=(2, 3)).newest((2, 3)) == 5
    assert view(rounds={2: 9, 3: 9}, hub=1).newest() == PRE_ROUND


networks = st.dictionaries(st.integers(1, 9), st.integers(-1, 30), min_size=3)


@given(networks, st.integers(0, 10**6), st.data())
def test_no_single_peer_can_mislead_the_others(rounds, lie, data):
    """Whatever one of three or more claims, the answer is a round within those of the rest."""
    liar = data.draw(st.sampled_from(sorted(rounds)))
    honest = [round for peer, round in rounds.items() if peer != liar]
    found = view(rounds=rounds | {liar: lie}, reachable=rounds.keys()).newest()
    assert found <= max(honest)
    assert found >= min(sorted(honest)[-2:])


@given(networks)
def test_at_least_two_peers_have_reached_the_round(rounds):
    found = view(rounds=rounds, reachable=rounds.keys()).newest()
    assert sum(round >= found for round in rounds.values()) >= 2
    assert sum(round > found for round in rounds.values()) <= 1


# Whether to run a round


@pytest.mark.parametrize(
    ("known", "may_run", "needed"),
    [
        ({}, True, []),
        ({"reachable": (3,)}, True, []),  # one is enough
        ({"reachable": ()}, False, [1, 2, 3]),
        ({"reachable": (), "finished": (2,)}, True, []),  # finished peers may have left
        ({"reachable": (1,), "mismatched": (1,)}, False, [2, 3]),  # no contact
        ({"reachable": (), "finished": (1,), "mismatched": (1,)}, False, [2, 3]),
        ({"reachable": (), "mismatched": PEERS}, True, []),  # no peer is left to wait for
        ({"reachable": (), "scheduled": ()}, True, []),  # alone by schedule
        ({"reachable": (), "scheduled": (2,)}, False, [2]),
        ({"reachable": (3,), "scheduled": (2,)}, True, []),  # contact with one that sits it out
        ({"reachable": (), "scheduled": (2,), "mismatched": (2,)}, True, []),
        ({"hub": 1, "reachable": (1,)}, True, []),
        ({"hub": 1, "reachable": (2, 3)}, False, [1]),  # a client needs its hub
        ({"hub": 1, "reachable": (2, 3), "finished": (1,)}, True, []),
        ({"hub": 1, "reachable": (2,)}, False, [1, 3]),
    ],
)
def test_whether_a_round_may_run_and_which_peers_are_needed(known, may_run, needed):
    assert view(**known).may_run() == may_run
    assert view(**known).needed_contacts() == needed


def test_contact_in_every_network_of_three():
    for one in all_views():
        contacts = []
        for peer in (1, 2):
            there = peer in one.reachable or peer in one.finished
            if there and peer not in one.mismatched:
                contacts.append(peer)
        assert one.in_contact() == contacts
        taking_part = [peer for peer in (1, 2) if peer in one.scheduled - one.mismatched]
        has_hub = one.hub is None or one.hub in contacts
        assert one.may_run() == ((bool(contacts) and has_hub) or not taking_part)
        needed = {peer for peer in (*taking_part, one.hub) if peer is not None} - {*contacts}
        assert one.needed_contacts() == ([] if one.may_run() else sorted(needed))


def test_more_contact_never_stops_a_peer():
    for one in all_views():
        for peer in (1, 2):
            more = view(**vars(one) | {"reachable": one.reachable | {peer}})
            assert more.may_run() >= one.may_run()


# Which messages to wait for


@pytest.mark.parametrize(
    ("known", "worth"),
    [
        ({}, [1, 2, 3]),
        ({"reachable": (1, 3)}, [1, 3]),
        ({"finished": (1,)}, [2, 3]),  # what it sent is here already
        ({"reachable": ()}, []),
        ({"hub": 1, "reachable": (2, 3)}, [2, 3]),  # without their hub, clients pause
        ({"hub": 1, "reachable": (2, 3), "finished": (1,)}, [2, 3]),
        ({"hub": 1, "reachable": ()}, []),
    ],
)
def test_which_senders_are_worth_waiting_for(known, worth):
    assert view(**known).worth_waiting_for([1, 2, 3]) == worth


def test_waiting_in_every_network_of_three():
    for one in all_views():
        for senders in subsets((1, 2)):
            worth = []
            for peer in senders:
                if peer in one.reachable and peer not in one.finished:
                    worth.append(peer)
            assert one.worth_waiting_for(senders) == worth


# To which round to go


@pytest.mark.parametrize(
    ("round", "others", "next_round", "too_far_ahead"),
    [
        (10, 10, 10, False),
        (10, 11, 10, False),
        (10, 12, 10, False),  # its messages of round 10 are still of use
        (10, 13, 13, False),
        (10, 40, 40, False),
        (10, 9, 10, False),
        (10, 8, 10, False),  # the others keep messages of two rounds more
        (10, 7, 10, True),
        (10, 0, 10, True),
        (10, PRE_ROUND, 10, False),  # nothing is known, or they have not begun
        (0, 2, 0, False),
        (0, 3, 3, False),
    ],
)
def test_peers_skip_rounds_or_wait_for_the_others(round, others, next_round, too_far_ahead):
    known = view(round=round, rounds=dict.fromkeys(PEERS, others))
    assert known.next_round() == next_round
    assert known.too_far_ahead() == too_far_ahead


def test_a_peer_alone_in_front_waits_and_is_not_followed():
    """Four peers; the first is in round 9 and all others in round 2."""
    first = view(round=9, rounds={1: 2, 2: 2, 3: 2})
    another = view(round=2, rounds={1: 9, 2: 2, 3: 2})
    assert (first.too_far_ahead(), first.next_round()) == (True, 9)
    assert (another.too_far_ahead(), another.next_round()) == (False, 2)


@given(networks, st.integers(0, 30), st.integers(1, 5))
def test_a_peer_never_goes_back_and_never_skips_and_waits_at_once(rounds, round, ahead):
    known = view(rounds=rounds, reachable=rounds.keys(), round=round, ahead=ahead)
    assert known.next_round() in (round, known.newest())
    assert known.next_round() >= round
    assert not (known.too_far_ahead() and known.next_round() > round)
    assert known.start_round() == round  # which began together with the others
    assert known.next_round() - round not in range(1, ahead + 1)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=6), st.integers(1, 5))
def test_at_least_one_peer_can_always_continue(rounds, ahead):
    """Of peers that all know the rounds of all, not every one waits for the others."""
    all_peers = dict(enumerate(rounds))
    waiting = []
    for me, round in all_peers.items():
        others = {peer: known for peer, known in all_peers.items() if peer != me}
        one = view(round=round, rounds=others, reachable=others.keys(), ahead=ahead)
        waiting.append(one.too_far_ahead())
    assert not all(waiting)


@pytest.mark.parametrize(
    ("awaited", "others", "start"),
    [
        (True, 9, 4),
        (False, 9, 9),
        (False, 5, 5),
        (False, 4, 4),
        (False, 2, 4),
        (False, PRE_ROUND, 4),
    ],
)
def test_a_peer_that_comes_back_starts_where_the_others_are(awaited, others, start):
    known = view(round=4, rounds=dict.fromkeys(PEERS, others), awaited=awaited)
    assert known.start_round() == start


@pytest.mark.parametrize(
    ("known", "is_over"),
    [
        ({"rounds": {1: 4, 2: 4, 3: 4}}, False),
        ({"rounds": {1: 5, 2: 4, 3: 4}}, False),  # a single peer does not count
        ({"rounds": {1: 5, 2: 5, 3: 4}}, True),
        ({"rounds": {1: 5, 2: 4}, "scheduled": (2,)}, False),  # only peers that take part count
        ({"rounds": {1: 4, 2: 5}, "scheduled": (2,)}, True),
        ({"rounds": {2: 5}, "scheduled": (2,), "reachable": (1,)}, False),
        ({"rounds": {}, "scheduled": ()}, True),  # no peer takes part
        ({"rounds": {1: 5, 2: 4, 3: 4}, "hub": 1}, True),
    ],
)
def test_an_absent_peer_waits_until_the_others_have_left_the_round(known, is_over):
    assert view(round=4, **known).is_over() == is_over


# States


def test_states_have_the_texts_that_users_read():
    assert [str(state) for state in State] == [
        "starting",
        "waiting for others",
        "running",
        "waiting for ",
        "waiting for the others to catch up",
        "absent",
        "finished",
        "stopped: ",
    ]


@pytest.mark.parametrize(
    ("state", "begun"),
    [
        ("starting", False),
        ("waiting for others", False),
        ("waiting for the others to catch up", True),
        ("waiting for node-1, node-2", True),
        ("running", True),
        ("absent", True),
        ("finished", True),
        ("stopped: disk is full", True),
        ("something of a later version", True),
    ],
)
def test_which_states_come_before_the_first_round(state, begun):
    assert has_begun(state) == begun
