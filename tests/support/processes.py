"""Waiting for processes, in the tests that start, kill and interrupt them."""

import time
from collections.abc import Callable

import psutil

TIMEOUT = 600.0  # seconds; only a broken program takes longer


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.005)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)
