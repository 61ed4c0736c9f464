"""Memory of simulations: by hand, against a real run, and refused where it cannot fit."""

import json
from pathlib import Path

import pytest
from support.command_line import peerage

from peerage import Experiment
from peerage.algorithm import Cost
from peerage.errors import InputError
from peerage.runs import simulation_memory
from peerage.runs.run import run
from peerage.runs.simulation_memory import BASE, PER_NODE, SimulationMemory, machine_bytes


def test_models_state_messages_and_data_by_hand() -> None:
    plain = SimulationMemory.of(1e6, Cost(vectors=1.0), data=2e9)
    assert plain.total(100) == pytest.approx(BASE + 2e9 + 100 * (2e6 + PER_NODE))
    curvature = SimulationMemory.of(1e6, Cost(vectors=2.0, state=1.0))
    assert curvature.total(10) == pytest.approx(BASE + 10 * (4e6 + PER_NODE))
    silent = SimulationMemory.of(1e6, Cost(vectors=0.0))  # models are collected in the end
    assert silent.total(10) == pytest.approx(BASE + 10 * (2e6 + PER_NODE))
    assert SimulationMemory.of(1e6, None) == SimulationMemory.of(1e6, Cost(vectors=1.0))


def test_the_largest_number_of_nodes_fits_and_one_more_does_not() -> None:
    needed = SimulationMemory.of(1e6, Cost(vectors=1.0))
    most = needed.most_nodes(4e9)
    needed.check(most, 4e9)
    with pytest.raises(InputError, match=f"use at most {most} nodes or a smaller model"):
        needed.check(most + 1, 4e9)
    with pytest.raises(InputError, match=r"502 MB of memory, but .* has 100 MB; use another"):
        SimulationMemory.of(1e6, None).check(1, 1e8)


def test_a_container_may_have_less_memory_than_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(simulation_memory, "CGROUP_LIMIT", limit)
    whole = machine_bytes()
    limit.write_text("max\n")
    assert machine_bytes() == whole
    limit.write_text("1000000\n")
    assert machine_bytes() == 1_000_000


def test_a_run_that_cannot_fit_is_refused_before_it_writes_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(simulation_memory, "machine_bytes", lambda: 1e8)
    experiment = Experiment(nodes=3, rounds=1, topology="ring", engine={"name": "serial"})
    with pytest.raises(InputError, match="a simulation with --nodes 3 needs about"):
        run(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_plan_states_the_memory_and_refuses_what_cannot_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulation_memory, "machine_bytes", lambda: int(6e8))
    line = "plan --topology ring --dataset digits --model logistic --algorithm decavg --json"
    ended = peerage(f"{line} --nodes 100")
    assert ended.code == 0
    data = 4 * 1797 * 64
    needed = BASE + data + 100 * (2 * 4 * 650 + PER_NODE)
    assert json.loads(ended.lines[-1])["simulation_memory"] == pytest.approx(needed)
    ended = peerage(f"{line} --nodes 5000")
    assert ended.code == 2
    assert json.loads(ended.lines[-1])["simulation_memory"] > 6e8
    assert "a simulation with --nodes 5000 needs about 676 MB of memory" in ended.err
