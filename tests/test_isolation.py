"""Runs in threads of one process, and torch's global generator, do not disturb each other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import peerage as pg
from peerage.isolation import exclusive_torch


class WithDropout(nn.Sequential):
    """Draws from torch's global generator when it is built and when it is trained."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10))


def digest(seed: int, engine: dict[str, Any]) -> str:
    experiment = pg.Experiment(
        algorithm=pg.DecAvg(),
        model=WithDropout,
        nodes=4,
        topology="ring",
        partition="iid",
        rounds=2,
        local={"epochs": 2},
        engine=engine,
        seed=seed,
    )
    return pg.run(experiment).digest


def test_four_seeds_in_threads_end_as_they_do_alone(engine):
    alone = [digest(seed, engine) for seed in range(4)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(digest, range(4), [engine] * 4))
    assert together == alone
    assert len(set(alone)) == 4


def test_a_run_leaves_the_generator_and_the_threads_as_they_were():
    torch.manual_seed(7)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    digest(0, {"name": "serial"})
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_the_state_of_the_global_generator_changes_no_run():
    torch.manual_seed(1)
    first = digest(0, {"name": "serial"})
    torch.manual_seed(2)
    assert digest(0, {"name": "serial"}) == first


def test_the_lock_holds_one_thread_and_gives_it_back():
    torch.set_num_threads(2)
    try:
        with exclusive_torch():
            assert torch.get_num_threads() == 1
            with exclusive_torch():  # by the same thread, as when a model is built in a round
                torch.rand(3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_second_thread_waits_until_the_first_has_given_it_back():
    order, inside = [], threading.Event()

    def second() -> None:
        inside.wait()
        with exclusive_torch():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with exclusive_torch():
        inside.set()
        thread.join(0.2)  # long enough to get in, if it could
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
