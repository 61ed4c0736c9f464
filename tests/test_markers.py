"""The marker `slow` is enforced: what needs it is blocked in tests without it."""

import os
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest

from peerage import Experiment, run
from peerage.data import cache_folder


def listen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))


def work_in_a_pool() -> None:
    run(Experiment(nodes=2, topology="ring", rounds=1, model="logistic", engine={"name": "pool"}))


BLOCKED = {
    "a command": (lambda: subprocess.run([sys.executable, "-c", ""]), "starts a process"),
    "a fork": (lambda: os._exit(0) if os.fork() == 0 else os.wait(), "starts a process"),
    "the pool": (work_in_a_pool, "starts a process"),
    "a server": (listen, "uses the network"),
    "a name": (lambda: socket.getaddrinfo("localhost", 80), "uses the network"),
    "data": ((cache_folder() / "mnist" / "none").read_bytes, "which belongs to the user"),
}


@pytest.mark.own_engine
@pytest.mark.parametrize("name", BLOCKED)
def test_fast_tests_stay_in_their_process(name: str, guard: Any) -> None:
    act, expected = BLOCKED[name]
    with pytest.raises(RuntimeError, match="without the marker slow") as caught:
        act()
    assert expected in str(caught.value)
    assert len(guard.blocked) == 1
    guard.blocked.clear()


def test_a_caught_error_of_the_guard_is_remembered(guard: Any) -> None:
    with suppress(RuntimeError):
        subprocess.run([sys.executable, "-c", ""])
    assert guard.blocked == ["starts a process (subprocess.Popen)"]
    guard.blocked.clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKED)
def test_slow_tests_may_do_all_of_it(name: str) -> None:
    with suppress(FileNotFoundError):  # of data that was never fetched
        BLOCKED[name][0]()


def test_the_pool_as_a_parameter_is_marked(
    engine: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    marked = request.node.get_closest_marker("slow") is not None
    assert marked == (engine["name"] == "pool")
