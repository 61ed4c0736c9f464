"""Peers as processes on machines that fail."""

import os
import time

import pytest
from machines import Machines, entering, host, two_rooms

from peerage import Experiment
from peerage.net.network import Patience

CUT = float(os.environ.get("PEERAGE_CUT", "6"))  # seconds that a network is in two halves


@pytest.mark.slow
@pytest.mark.parametrize("rooms", [((0, 1), (2, 3)), ((0,), (1, 2, 3))])
def test_a_cable_between_two_rooms_is_pulled_and_mended(rooms, tmp_path):
    """Both halves go on by themselves, at their own speeds, and are one network again."""
    experiment = Experiment(nodes=4, topology="complete", partition="iid", rounds=10**6)
    everybody = range(4)
    patience = Patience(start=30, step=30, gone=2)
    hosts = [host(me) for me in everybody]
    with two_rooms(*rooms) as cable, Machines(tmp_path, experiment, patience, hosts) as network:
        for me in everybody:
            network.start(me, entering(cable.machines[me]))
        network.until(lambda: min(map(network.round, everybody)) >= 5)
        cable.cut()
        time.sleep(CUT)
        before = [network.round(me) for me in everybody]
        network.until(lambda: all(network.round(me) >= before[me] + 3 for me in everybody))
        for room in rooms:
            assert {network.heard(me) for me in room} == {(len(room) - 1, 3)}
        cable.mend()
        network.until(lambda: {network.heard(me) for me in everybody} == {(3, 3)}, 30)
        rounds = [network.round(me) for me in everybody]
        network.until(lambda: all(network.round(me) > rounds[me] + 10 for me in everybody))
        assert {network.heard(me) for me in everybody} == {(3, 3)}
