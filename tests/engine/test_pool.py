"""Worker processes and the memory they share."""

import multiprocessing
import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerage import DecHW, Local
from peerage.engine.lockstep import Lockstep
from peerage.engine.pool import (
    ALIGNMENT,
    LEAST_ARENA,
    Arena,
    PoolTeam,
    SharedStore,
    balance_nodes,
    reserve,
)
from peerage.engine.prepare import prepare
from peerage.errors import DiskError, InputError, PeerageError, WorkerDied
from peerage.testing import NODES, toy
from peerage.work.training import LocalSGD
from peerage.workers import _rebuild

SIZE = 1 << 16

# Dealing nodes out


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 8))
@settings(deadline=None, max_examples=100)
def test_every_node_is_assigned_once_and_loads_are_balanced(work, workers):
    assigned = balance_nodes(work, workers)
    assert len(assigned) == min(workers, len(work))
    assert sorted(node for nodes in assigned for node in nodes) == list(range(len(work)))
    assert all(nodes == sorted(nodes) for nodes in assigned)
    loads = [sum(work[node] for node in nodes) for nodes in assigned]
    assert max(loads) - min(loads) <= max(work)  # what longest-first guarantees


def test_equal_nodes_are_balanced_evenly():
    assert [len(nodes) for nodes in balance_nodes([1] * 50, 4)] == [13, 13, 12, 12]


# Shared memory


def stores(workers: int = 2) -> list[SharedStore]:
    arenas = [Arena(SIZE) for _ in range(workers)]
    return [SharedStore(arenas, worker) for worker in range(workers)]


TENSORS = [
    torch.arange(5.0),
    torch.tensor(3),
    torch.empty(0),
    torch.ones(2, 3, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.arange(12.0).view(3, 4).T,  # not contiguous
    torch.zeros(1).expand(4),
]


def test_a_worker_opens_tensors_of_another_one():
    one, other = stores()
    places = [one.put(tensor) for tensor in TENSORS] + [other.put(tensor) for tensor in TENSORS]
    for store in (one, other):
        for place, tensor in zip(places, TENSORS * 2, strict=True):
            opened = store.open(place)
            assert opened.dtype == tensor.dtype
            assert torch.equal(opened, tensor)
    assert all(place.offset % ALIGNMENT == 0 for place in places)


def test_opened_tensors_are_views_of_the_arena():
    one, other = stores()
    place = one.put(torch.zeros(3))
    one.open(place)[1] = 7.0
    assert other.open(place).tolist() == [0, 7, 0]


def test_opened_tensors_count_their_own_changes():
    [store] = stores(1)
    tensor = store.open(store.put(torch.zeros(3)))
    before = tensor._version
    store.put(torch.ones(3))  # writes elsewhere in the same arena
    assert tensor._version == before
    tensor += 1
    assert tensor._version > before


def test_to_private_copies_only_tensors_in_shared_memory():
    one, other = stores()
    place = one.put(torch.arange(3.0))
    for store in (one, other):
        opened = store.open(place)
        kept, part = store.to_private(opened), store.to_private(opened[1:])
        assert kept.data_ptr() != opened.data_ptr()
        mine = torch.ones(3)
        assert store.to_private(mine) is mine
        one.arenas[0].view(place).fill_(9.0)
        assert kept.tolist() == [0, 1, 2]
        assert part.tolist() == [1, 2]
        one.arenas[0].view(place).copy_(torch.arange(3.0))


def test_clearing_uses_the_memory_again():
    [store] = stores(1)
    first = store.put(torch.ones(100))
    store.put(torch.ones(100))
    store.clear()
    assert store.put(torch.ones(100)).offset == first.offset


def test_too_large_messages_are_an_error():
    [store] = stores(1)
    store.put(torch.zeros(SIZE // 8))
    with pytest.raises(PeerageError, match=f"need more than {SIZE} bytes of shared memory"):
        store.put(torch.zeros(SIZE // 4))


@pytest.mark.slow
def test_shared_memory_has_no_name_that_could_be_left_behind():
    world = prepare(toy(DecHW()))
    team = PoolTeam(world, 2)
    with Lockstep(world, team) as engine:
        engine.round(0, evaluate=True)
        for pid in [os.getpid(), *(process.pid for process in team.workers.processes)]:
            maps = Path(f"/proc/{pid}/maps").read_text()
            # Libraries have semaphores there, whose names are deleted at once.
            shared = [line for line in maps.splitlines() if "/dev/shm/" in line]
            assert [line for line in shared if not line.endswith("(deleted)")] == []
            assert "/dev/zero (deleted)" in maps  # how the kernel shows memory without a name


# Processes


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_workers_are_gone_after_the_run():
    world = prepare(toy(Local()))
    team = PoolTeam(world, 3)
    pids = [process.pid for process in team.workers.processes]
    assert len(pids) == 3
    with Lockstep(world, team) as engine:
        engine.round(0, evaluate=False)
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


@pytest.mark.slow
def test_there_are_no_more_workers_than_nodes():
    world = prepare(toy(Local()))
    with Lockstep(world, PoolTeam(world, 50)) as engine:
        assert len(engine.team.shard_nodes) == NODES


@pytest.mark.slow
def test_a_worker_that_dies_is_named():
    world = prepare(toy(Local()))
    team = PoolTeam(world, 2)
    with Lockstep(world, team) as engine:
        engine.round(0, evaluate=False)
        pid = team.workers.processes[1].pid
        team.workers.processes[1].kill()
        expected = rf"worker 1 \(process {pid}\) was killed by signal 9, perhaps for lack of memory"
        with pytest.raises(WorkerDied, match=expected):
            engine.round(1, evaluate=False)
    assert not alive(pid)


def test_work_is_spread_by_examples_or_evenly_by_steps():
    by_epochs = prepare(toy(Local(LocalSGD(epochs=1))))
    by_steps = prepare(toy(Local(LocalSGD(steps=1))))
    assert [by_epochs.expected_cost(node) for node in range(NODES)] == [4, 8, 12, 16, 20]
    assert len({by_steps.expected_cost(node) for node in range(NODES)}) == 1


@pytest.mark.slow
def test_parameters_come_back_from_every_worker():
    world = prepare(toy(Local()))
    expected: list[Tensor] = []
    for node in range(NODES):
        architecture = world.architectures[world.assignment[node]]
        expected.append(architecture.initial(world.seed, node, 1.0)[0])
    with Lockstep(world, PoolTeam(world, 2)) as engine:
        found = [engine.parameters(node) for node in range(NODES)]
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_errors_of_workers_keep_their_kind():
    assert isinstance(_rebuild(0, "InputError", "m", "t"), InputError)
    assert isinstance(_rebuild(0, "OSError", "No space left on device", "t"), DiskError)
    other = _rebuild(3, "ZeroDivisionError", "m", "the trace")
    assert str(other) == "ZeroDivisionError in worker 3: m"
    assert other.__notes__ == ["the trace"]
    assert type(_rebuild(0, "did_you_mean", "m", "t")) is RuntimeError  # a name, but no error


def reserved_under_a_limit(limit, answers):
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answers.put([len(arena.bytes) for arena in reserve(2)])
    except PeerageError as error:
        answers.put(str(error))


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [4, 0])
def test_arenas_are_as_large_as_the_system_lets_them(gigabytes):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    answers = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(
        target=reserved_under_a_limit, args=(used + (gigabytes << 30) + LEAST_ARENA // 2, answers)
    )
    child.start()
    answer = answers.get()
    child.join()
    if gigabytes:
        assert len(answer) == 2
        assert LEAST_ARENA <= sum(answer) <= 4 << 30
    else:
        assert "use --engine serial" in answer
