"""What a peer decides from what it knows: tables, and all cases of a small network."""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerage.net.peer.progress import State, View, final_state, has_begun
from peerage.requests import PRE_ROUND

PEERS = (1, 2, 3)


def view(**known: Any) -> View:
    """All of three others take part, are reachable and of unknown rounds, unless it says else."""
    values: dict[str, Any] = {
        "round": 0,
        "rounds": {},
        "scheduled": PEERS,
        "reachable": PEERS,
        "finished": (),
        "refused": (),
        "hub": None,
        "ahead": 2,
    } | known
    for name in ("scheduled", "reachable", "finished", "refused"):
        values[name] = frozenset(values[name])
    return View(**values)


def subsets(peers: tuple[int, ...]) -> list[tuple[int, ...]]:
    sizes = range(len(peers) + 1)
    return list(chain.from_iterable(combinations(peers, size) for size in sizes))


def all_views() -> Iterator[View]:
    """Every network of two other peers, in which peer 1 may be the hub."""
    some = subsets((1, 2))
    for scheduled in some:
        for reachable in some:
            for finished in some:
                for refused in some:
                    for hub in (None, 1):
                        yield view(
                            scheduled=scheduled,
                            reachable=reachable,
                            finished=finished,
                            refused=refused,
                            hub=hub,
                        )


# Which round the others are in


@pytest.mark.parametrize(
    ("rounds", "known", "confirmed"),
    [
        ({}, {}, PRE_ROUND),  # nothing is known
        ({1: 5}, {}, PRE_ROUND),  # never the word of one of several
        ({1: 5, 2: 9}, {}, 5),  # more than half of the three others, or two
        ({1: 5, 2: 9, 3: 7}, {}, 7),
        ({1: 5, 2: 9, 3: 9}, {}, 9),
        ({1: 5, 2: 5, 3: 9}, {}, 5),
        ({1: 5, 2: 9, 3: 7}, {"reachable": (1, 3)}, 5),  # only reachable peers count
        ({1: 5, 2: 9, 3: 7}, {"reachable": (2,)}, PRE_ROUND),
        ({1: 5, 2: 9, 3: 7}, {"reachable": ()}, PRE_ROUND),
        ({1: PRE_ROUND, 2: 4, 3: PRE_ROUND}, {}, PRE_ROUND),
        ({1: 5, 2: 9, 3: 7}, {"refused": (2,)}, 5),  # only members count,
        ({1: 5, 2: 9, 3: 7}, {"scheduled": (1, 3)}, 5),
        ({1: 5, 2: 9, 3: 9}, {"finished": (2, 3)}, PRE_ROUND),  # and only those that still run
        ({1: 9}, {"scheduled": (1,)}, 9),  # with two members, there is only one to ask
        ({1: 9}, {"scheduled": (1, 2), "reachable": (1,)}, PRE_ROUND),
        ({1: 9, 2: 3}, {"scheduled": (1, 2)}, 3),  # with three, both have to agree
        ({1: 9, 2: 9, 3: 8, 4: 3}, {"scheduled": range(1, 5), "reachable": range(1, 5)}, 8),
        ({1: 9, 2: 9}, {"scheduled": range(1, 5), "reachable": (1, 2)}, 9),  # all that are left
        ({1: 9, 2: 9, 3: 3}, {"scheduled": range(1, 5)}, 3),
    ],
)
def test_the_round_that_enough_members_have_reached(rounds, known, confirmed):
    assert view(rounds=rounds, **known).confirmed_round() == confirmed


def test_with_a_hub_its_round_counts_even_if_it_is_gone():
    rounds = {1: 5, 2: 9, 3: 9}
    assert view(rounds=rounds, hub=1).confirmed_round() == 5
    assert view(rounds=rounds, hub=1, reachable=(2, 3)).confirmed_round() == 5
    assert view(rounds={2: 9, 3: 9}, hub=1).confirmed_round() == PRE_ROUND


def test_a_client_waits_for_its_hub_even_if_that_is_refused():
    """Its certificate may have been revoked; alone, a client can do nothing useful."""
    for scheduled in ((1,), PEERS):
        known = view(scheduled=scheduled, hub=1, refused=(1,))
        assert not known.may_run()
        assert known.needed_contacts() == [1]


networks = st.dictionaries(st.integers(1, 9), st.integers(-1, 30), min_size=2)


def of(rounds: dict[int, int], **known: Any) -> View:
    """A network of these other peers, all of which are reachable."""
    return view(rounds=rounds, scheduled=rounds, reachable=rounds, **known)


@given(networks, st.data())
def test_no_minority_of_the_others_can_make_a_peer_skip(rounds, data):
    """Whatever fewer than half of them claim, at least one honest peer has reached the round."""
    most = (len(rounds) - 1) // 2 if len(rounds) > 2 else 1
    liars = data.draw(st.sets(st.sampled_from(sorted(rounds)), max_size=most))
    lies = {liar: data.draw(st.integers(0, 10**6)) for liar in liars}
    honest = [round for peer, round in rounds.items() if peer not in liars]
    found = of(rounds | lies).confirmed_round()
    assert found <= max(honest)
    assert found >= min(honest) or len(rounds) == 2  # and they cannot hold it back


@given(networks)
def test_more_than_half_of_the_others_have_reached_the_round(rounds):
    found = of(rounds).confirmed_round()
    assert 2 * sum(round >= found for round in rounds.values()) > len(rounds)
    assert 2 * sum(round > found for round in rounds.values()) <= len(rounds)


# Whether to run a round


@pytest.mark.parametrize(
    ("known", "may_run", "needed"),
    [
        ({}, True, []),
        ({"reachable": (2, 3)}, True, []),  # three of four
        ({"reachable": (3,)}, False, [1, 2]),  # two of four are no majority,
        ({"reachable": (3,), "quorum": 2}, True, []),  # but may be enough
        ({"reachable": (), "quorum": 2}, False, [1, 2, 3]),
        ({"reachable": (), "quorum": 1}, True, []),
        ({"reachable": (2, 3), "quorum": 4}, False, [1]),
        ({"reachable": (2, 3), "quorum": 4, "scheduled": (2, 3)}, True, []),  # all that there are
        ({"reachable": ()}, False, [1, 2, 3]),
        ({"reachable": (1,), "finished": (2,)}, True, []),  # finished peers may have left
        ({"reachable": (1, 2), "refused": (1,)}, True, []),  # two of three
        ({"reachable": (1,), "refused": (1,)}, False, [2, 3]),  # no contact
        ({"reachable": (), "finished": (1, 2), "refused": (1, 2)}, False, [3]),
        ({"reachable": (), "refused": PEERS}, True, []),  # no peer is left to wait for
        ({"reachable": (), "scheduled": ()}, True, []),  # alone by schedule
        ({"reachable": (), "scheduled": (2,)}, False, [2]),
        ({"reachable": (3,), "scheduled": (2,)}, False, [2]),  # 3 does not take part
        ({"reachable": (), "scheduled": (2,), "refused": (2,)}, True, []),
        ({"reachable": (1, 2, 3), "hub": 3}, True, []),
        ({"reachable": (1, 2), "hub": 3}, False, [3]),  # a client needs its hub,
        ({"reachable": (1, 2), "hub": 3, "quorum": 1}, False, [3]),
        ({"reachable": (3,), "hub": 3}, False, [1, 2]),  # and others as well,
        ({"reachable": (3,), "hub": 3, "quorum": 2}, True, []),  # unless a number says else
        ({"reachable": (1, 2), "present": False}, True, []),  # this peer sits the round out
        ({"reachable": (1,), "present": False}, False, [2, 3]),
    ],
)
def test_whether_a_round_may_run_and_which_peers_are_needed(known, may_run, needed):
    assert view(**known).may_run() == may_run
    assert view(**known).needed_contacts() == needed


def test_contact_in_every_network_of_three():
    for one in all_views():
        members = [peer for peer in (1, 2) if peer in one.scheduled - one.refused]
        contacts = [peer for peer in members if peer in one.reachable | one.finished]
        assert one.in_contact() == contacts
        quorum = 2 * (len(contacts) + 1) > len(members) + 1
        quorum = quorum and (one.hub is None or one.hub in contacts)
        hub = [one.hub] if one.hub in one.scheduled & one.refused else []
        needed = sorted({*members, *hub}.difference(contacts))
        assert one.may_run() == (quorum or not [*members, *hub])
        assert one.needed_contacts() == ([] if one.may_run() else needed)


def test_more_contact_never_stops_a_peer():
    for one in all_views():
        for peer in (1, 2):
            more = view(**vars(one) | {"reachable": one.reachable | {peer}})
            assert more.may_run() >= one.may_run()


@pytest.mark.parametrize("size", range(1, 8))
def test_two_parts_of_a_network_never_both_have_a_majority(size):
    everybody = tuple(range(size))
    for part in subsets(everybody):
        rest = tuple(set(everybody) - set(part))
        may_run = [
            half
            for half in (part, rest)
            if half and alone(half, everybody).may_run()  # as its first member sees it
        ]
        assert len(may_run) <= 1
        assert may_run == [half for half in (part, rest) if 2 * len(half) > size]


def alone(part: tuple[int, ...], everybody: tuple[int, ...]) -> View:
    """What the first member of a part of the network sees."""
    others = set(everybody) - {part[0]}
    return view(scheduled=others, reachable=set(part) - {part[0]})


# Which messages to wait for


@pytest.mark.parametrize(
    ("known", "worth"),
    [
        ({}, [1, 2, 3]),
        ({"reachable": (1, 3)}, [1, 3]),
        ({"finished": (1,)}, [2, 3]),  # what it sent is here already
        ({"refused": (1,)}, [2, 3]),  # what it sends is not accepted
        ({"reachable": ()}, []),
        ({"reachable": (1,)}, []),  # it pauses, although a message of 1 may come
        ({"reachable": (1,), "quorum": 2}, [1]),
        ({"hub": 1, "reachable": (2, 3)}, []),  # without its hub, a client pauses
    ],
)
def test_which_senders_are_worth_waiting_for(known, worth):
    assert view(**known).worth_waiting_for([1, 2, 3]) == worth


def test_waiting_in_every_network_of_three():
    for one in all_views():
        for senders in subsets((1, 2)):
            worth = [p for p in senders if p in one.reachable - one.finished - one.refused]
            assert one.worth_waiting_for(senders) == (worth if one.may_run() else [])


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
        (10, PRE_ROUND, 10, True),  # they restart, and will follow
        (0, 2, 0, False),
        (0, 3, 3, False),
    ],
)
@pytest.mark.parametrize("hub", [None, 1])
def test_peers_skip_rounds_or_wait_for_the_others(round, others, next_round, too_far_ahead, hub):
    known = view(round=round, rounds=dict.fromkeys(PEERS, others), hub=hub)
    assert known.next_round() == next_round
    assert known.too_far_ahead() == too_far_ahead
    assert known.behind() == (list(PEERS) if too_far_ahead else [])
    assert known.is_in_step() == (next_round == round and not too_far_ahead)


@pytest.mark.parametrize("hub", [None, 1])
def test_a_peer_that_knows_no_round_continues(hub):
    known = view(round=10, hub=hub)
    assert (known.next_round(), known.too_far_ahead(), known.is_in_step()) == (10, False, True)


@given(st.integers(PRE_ROUND, 10**6))
def test_a_peer_need_not_ask_about_a_single_wrong_round(stated):
    """Most members are close, so nothing that the last one can say changes what this peer does."""
    known = view(round=10, rounds={1: 9, 2: 12, 3: stated})
    assert known.is_in_step()
    assert (known.next_round(), known.too_far_ahead()) == (10, False)
    client = view(round=10, rounds={1: 11, 3: stated}, hub=1)
    assert client.is_in_step()
    assert (client.next_round(), client.too_far_ahead()) == (10, False)


def test_a_peer_asks_if_too_few_are_known_to_be_close():
    assert not view(round=10, rounds={1: 10, 3: 90}).is_in_step()
    assert not view(round=10, rounds={1: 90}, hub=1).is_in_step()


def test_a_peer_alone_in_front_waits_and_is_not_followed():
    """Four peers; the first is in round 9 and all others in round 2."""
    first = view(round=9, rounds={1: 2, 2: 2, 3: 2})
    another = view(round=2, rounds={1: 9, 2: 2, 3: 2})
    assert (first.too_far_ahead(), first.next_round()) == (True, 9)
    assert (another.too_far_ahead(), another.next_round()) == (False, 2)


def test_the_smaller_part_of_a_network_never_decides_for_the_larger_one():
    """With quorum 2, two of five ran ahead; they wait for the three, or follow them."""
    for small, large in ((50, 20), (20, 50)):
        rounds = {0: small, 1: small, 2: large, 3: large, 4: large}
        views = {me: seen_by(me, rounds, quorum=2) for me in rounds}
        assert {views[me].next_round() for me in (2, 3, 4)} == {large}
        assert {views[me].next_round() for me in (0, 1)} == {50}
        assert {me for me in rounds if views[me].too_far_ahead()} == (
            {0, 1} if small > 20 else set()
        )


def seen_by(me: int, rounds: dict[int, int], reachable: Any = None, **known: Any) -> View:
    others = {peer: round for peer, round in rounds.items() if peer != me}
    reachable = others.keys() if reachable is None else reachable
    return view(
        round=rounds[me], rounds=others, scheduled=others.keys(), reachable=reachable, **known
    )


def test_peers_in_front_do_not_wait_for_one_that_is_gone_or_has_finished():
    rounds = {1: 2, 2: 9, 3: 2}
    assert view(round=9, rounds=rounds).too_far_ahead()
    assert not view(round=9, rounds=rounds, reachable=(2,)).too_far_ahead()
    assert not view(round=9, rounds=rounds, finished=(3,)).too_far_ahead()


@given(networks, st.integers(0, 30), st.integers(1, 5))
def test_a_peer_never_goes_back_and_never_skips_and_waits_at_once(rounds, round, ahead):
    known = of(rounds, round=round, ahead=ahead)
    assert known.next_round() in (round, known.confirmed_round())
    assert known.next_round() >= round
    assert not (known.too_far_ahead() and known.next_round() > round)
    assert known.start_round() == round  # which began together with the others
    assert known.next_round() - round not in range(1, ahead + 1)
    if known.is_in_step():
        assert (known.next_round(), known.too_far_ahead()) == (round, False)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=6), st.integers(1, 5))
def test_at_least_one_peer_can_always_continue(rounds, ahead):
    """Of peers that all know the rounds of all, not every one waits for the others."""
    all_peers = dict(enumerate(rounds))
    assert not all(seen_by(me, all_peers, ahead=ahead).too_far_ahead() for me in all_peers)


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
        ({"rounds": {1: 5, 2: 4, 3: 4}, "finished": (2,)}, True),
        ({"rounds": {1: 5, 2: 4}, "scheduled": (2,)}, False),  # only peers that take part count
        ({"rounds": {1: 4, 2: 5}, "scheduled": (2,)}, True),
        ({"rounds": {2: 5}, "scheduled": (2,), "reachable": (1,)}, False),
        ({"rounds": {}, "scheduled": ()}, True),  # no peer takes part
        ({"rounds": {1: 5, 2: 4, 3: 4}, "hub": 1}, True),
    ],
)
def test_an_absent_peer_waits_until_the_others_have_left_the_round(known, is_over):
    assert view(round=4, present=False, **known).is_over() == is_over


# Whole networks


class Simulation:
    """Peers that decide with `View`, and know what the reachable ones say.

    A liar says that it is in any round, and answers each peer differently.
    """

    def __init__(self, size: int, last: int, liars: frozenset[int], quorum: int | str) -> None:
        self.last, self.liars, self.quorum = last, liars, quorum
        self.rounds = dict.fromkeys(range(size), 0)
        self.ran: dict[int, list[int]] = {me: [] for me in self.rounds}
        self.honest = [me for me in self.rounds if me not in liars]
        self.fooled = False  # whether a cut left a peer with liars only, and it followed them

    def step(self, reachable: Mapping[int, Collection[int]], lie: Callable[[], int]) -> None:
        """All honest peers decide at the same time; `reachable` has the contacts of each."""
        before = dict(self.rounds)
        for me in self.honest:
            if before[me] == self.last:
                continue
            known = {p: lie() if p in self.liars else r for p, r in before.items()} | {
                me: before[me]
            }
            one = seen_by(me, known, reachable[me], quorum=self.quorum)
            if one.may_run() and one.next_round() > one.round:
                self.rounds[me] = min(one.next_round(), self.last)
                # Somebody honest was there before, unless a cut left it with liars only.
                honest = self.rounds[me] <= max(before[peer] for peer in self.honest)
                assert honest or self.liars.issuperset(reachable[me])
                self.fooled = self.fooled or not honest
            elif one.may_run() and not one.too_far_ahead():
                # No round counts below the quorum.
                assert len(reachable[me]) + 1 >= one.least
                self.ran[me].append(before[me])
                self.rounds[me] += 1


@pytest.mark.parametrize("quorum", ["majority", 2])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_networks_with_cuts_and_liars_end_in_the_same_round(quorum, data):
    """Liars are fewer than half of the others of each peer, and cuts end at some time."""
    size = data.draw(st.integers(2, 7))
    most = {2: 0, 3: 1, 4: 1}.get(size, 2)
    liars = data.draw(st.frozensets(st.integers(0, size - 1), max_size=most))
    rng = data.draw(st.randoms(use_true_random=False))
    last = 12
    network = Simulation(size, last, liars, quorum)
    everybody = set(network.rounds)
    for _ in range(data.draw(st.integers(0, 4))):  # cuts
        part = {me for me in everybody if rng.random() < 0.5}
        cut = {me: (part if me in part else everybody - part) - {me} for me in everybody}
        before = dict(network.rounds)
        for _ in range(rng.randrange(6)):
            network.step(cut, lambda: rng.choice((-1, 0, rng.randrange(last), last - 1)))
        for me in network.honest:  # those without a quorum have stayed
            least = size // 2 + 1 if quorum == "majority" else min(2, size)
            assert len(cut[me]) + 1 >= least or network.rounds[me] == before[me]
    whole = {me: everybody - {me} for me in everybody}
    for _ in range(3 * last):
        network.step(whole, lambda: rng.choice((-1, 0, rng.randrange(last), last - 1)))
    if size == 3 and liars:  # one of the two others may hold a peer back, and not more
        assert max(network.rounds[me] for me in network.honest) <= last
    else:
        assert {network.rounds[me] for me in network.honest} == {last}
    ran = set().union(*(network.ran[me] for me in network.honest))
    if (size > 3 or not liars) and not network.fooled:  # others may follow a fooled peer
        assert ran == set(range(last))  # every round was run by some honest peer


@pytest.mark.parametrize(
    ("skipped", "scheduled", "state"),
    [
        (0, 200, "finished"),
        (100, 200, "finished"),
        (101, 200, "skipped rounds"),
        (0, 0, "finished"),
    ],
)
def test_a_peer_that_skipped_most_rounds_did_not_finish(skipped, scheduled, state):
    assert final_state(skipped, scheduled) == state


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
        "skipped rounds",
        "out of contact",
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
        ("skipped rounds", True),
        ("stopped: disk is full", True),
        ("something of a later version", True),
    ],
)
def test_which_states_come_before_the_first_round(state, begun):
    assert has_begun(state) == begun
