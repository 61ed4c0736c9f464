"""Forked workers: what they inherit, and how their end is reported."""

import gc
from multiprocessing.connection import Connection
from typing import Any

import pytest

from peerage.errors import InputError, WorkerDied
from peerage.workers import ENDED, Workers

pytestmark = pytest.mark.slow  # processes

FINALISED: list[str] = []


class Finalised:
    """An object that is part of a cycle, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        FINALISED.append("object")


def collect(pipe: Connection) -> None:
    own = Finalised()
    del own
    gc.collect()
    pipe.send((True, len(FINALISED)))


def answers(work: Any, *arguments: Any) -> list[Any]:
    workers = Workers(work, [arguments])
    try:
        return [answer for _, answer in workers.receive([0])]
    finally:
        workers.close()


def test_a_worker_finalises_its_own_garbage_and_none_that_it_inherits():
    gc.collect()
    FINALISED.clear()
    gc.disable()
    try:
        inherited = Finalised()
        del inherited
        assert answers(collect) == [1, ENDED]
    finally:
        gc.enable()
    gc.collect()
    assert FINALISED == ["object"]  # here, it is freed once


def fail(pipe: Connection) -> None:
    raise InputError("degree must be positive, got -1")


def end_early(pipe: Connection) -> None:
    raise SystemExit(3)


def test_errors_of_a_worker_are_raised_here():
    with pytest.raises(InputError, match="degree must be positive, got -1"):
        answers(fail)
    with pytest.raises(WorkerDied, match=r"^worker 0 \(process \d+\) ended \(3\)$"):
        answers(end_early)
