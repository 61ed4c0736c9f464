"""Sites with slow links: one with 50 kbit/s, and one with 6 kbit/s."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.machines import Cable, Machines, entering, host, two_rooms

from peerage import Experiment
from peerage.net.peer.network import Timeouts
from peerage.runs.summary import totals

pytestmark = pytest.mark.slow  # every peer is a process

SITES, QUORUM = range(4), 3
SLOW, SLOWEST = 2, 3


@contextmanager
def slow_sites(home: Path, rounds: int, timeouts: Timeouts) -> Iterator[tuple[Machines, Cable]]:
    """Four sites that have begun, of which two now have slow links."""
    experiment = Experiment(
        algorithm="decavg",
        nodes=len(SITES),
        topology="complete",
        partition="iid",
        model="logistic",
        rounds=rounds,
        local={"epochs": 1},
    )
    hosts = [host(me) for me in SITES]
    with (
        two_rooms(SITES, (), slow_links=True) as cable,
        Machines(home, experiment, timeouts, hosts) as network,
    ):
        for me in SITES:
            cable.limit(me, "100kbit")  # so that rounds take a while
            network.start(me, entering(cable.machines[me]))
        network.until(lambda: min(map(network.round, SITES)) >= 1)
        cable.limit(SLOW, "50kbit")
        cable.limit(SLOWEST, "6kbit")
        yield network, cable


def ending(network: Machines, me: int) -> tuple[str, int, int, str]:
    """The state of a peer that has ended, its rounds, and those that it skipped and missed."""
    summary = json.loads((network.folders[me] / "summary.json").read_text())
    return summary["state"], summary["rounds"], summary["skipped"], summary["missed"]


def contacts(network: Machines, me: int) -> list[int]:
    """With how many sites a peer was in contact in each round that it counted, itself included."""
    return [len(SITES) - len(row.get("out_of_contact", [])) for row in network.rows(me)]


def test_all_wait_for_a_slow_link_that_stays_in_contact(tmp_path):
    """The timeouts are long enough for its messages, so nobody continues without them."""
    with slow_sites(tmp_path, 4, Timeouts(start=600, message=600, idle=60)) as (network, _):
        assert network.wait() == [0] * 4
        for me in SITES:
            assert ending(network, me) == ("finished", 4, 0, "")
            assert [row["heard"] for row in network.rows(me)[2:]] == [[3, 3]] * 3
            assert "slow" not in totals(network.rows(me))["counters"]  # none was aborted


def test_the_others_continue_without_a_link_too_slow_for_signs_of_life(tmp_path):
    """The site pauses. When its link is faster again, it joins the others in their round."""
    rounds = 40
    with slow_sites(tmp_path, rounds, Timeouts(start=600)) as (network, cable):
        network.until(lambda: "in contact with " in network.log(SLOWEST))
        paused = network.round(SLOWEST)
        network.until(lambda: network.round(0) >= paused + 4)
        assert network.round(SLOWEST) == paused < 7  # it counts no round alone
        cable.limit(SLOWEST, "1mbit")
        assert network.wait() == [0] * 4
        for me in range(SLOWEST):
            assert ending(network, me) == ("finished", rounds, 0, "")
            assert min(contacts(network, me)) == QUORUM
        state, last, skipped, missed = ending(network, SLOWEST)
        assert (state, last) == ("finished", rounds)
        # Depending on how long the pause was, it catches up or skips rounds; it says which.
        run = {row["round"] for row in network.rows(SLOWEST)}
        left_out = [round for round in range(1, rounds + 1) if round not in run]
        assert (skipped, missed != "") == (len(left_out), left_out != [])
        assert min(contacts(network, SLOWEST)) >= QUORUM
        assert network.rows(SLOWEST)[-1]["heard"] == [3, 3]
