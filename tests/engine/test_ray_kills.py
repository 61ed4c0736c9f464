"""Workers, machines and drivers of a Ray cluster that die, and runs that end with the same bits."""

import inspect
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import TIMEOUT, gone, until

import peerage as pg
from peerage.engine import ray as ray_engine
from peerage.errors import Interrupted, WorkerDied
from peerage.records import checkpoint
from peerage.testing import toy

pytestmark = [pytest.mark.slow, pytest.mark.own_engine]

RAY = {"name": "ray", "workers": 2}
ROUNDS = 3


def kill_once(marker: str, limit: int = 1) -> None:
    """End this process as `kill -9` does, unless it happened `limit` times before."""
    file = Path(marker)
    killed = file.read_text() if file.exists() else ""
    if len(killed) < limit:
        file.write_text(killed + "x")
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class DiesInExchange(pg.DecAvg):
    """Node 3 ends its process between two exchanges, while messages are on their way to it."""

    marker: str = ""
    limit: int = 1

    async def round(self, node):
        await super().round(node)
        inbox = await node.exchange(x=node.params)
        if node.id == 3 and node.round == 1:
            kill_once(self.marker, self.limit)
        node.params = sum(inbox["x"]) / len(inbox)
        await super().round(node)


@dataclass(frozen=True)
class DiesInSave(pg.DecAvg):
    """Node 3 ends its process while its state is collected for a checkpoint."""

    marker: str = ""

    def evaluated(self, node):
        if node.id == 3 and any(frame.function == "_pack" for frame in inspect.stack()):
            kill_once(self.marker)
        return super().evaluated(node)


def serial_digest(algorithm):
    """The digest of an undisturbed run; its algorithm has already killed whom it wanted to."""
    return pg.run(toy(algorithm, rounds=ROUNDS, engine={"name": "serial"})).digest


def rounds_of(result):
    return [row["round"] for row in result.rows if row["scope"] == "network"]


@pytest.mark.parametrize(
    ("kind", "after"), [(DiesInExchange, 1), (DiesInSave, 0)], ids=["exchange", "save"]
)
def test_a_worker_that_dies_costs_the_rounds_since_the_last_checkpoint(
    machines, tmp_path, caplog, kind, after
):
    algorithm = kind(marker=str(tmp_path / "killed"))
    with caplog.at_level(logging.WARNING, "peerage.run"):
        result = pg.run(
            toy(algorithm, rounds=ROUNDS, engine=RAY), tmp_path / "run", checkpoint_every=1
        )
    assert (tmp_path / "killed").read_text() == "x"
    assert "a worker of Ray died" in caplog.text
    assert f"continuing after round {after}" in caplog.text
    assert rounds_of(result) == [0, 1, 2, 3]
    assert result.digest == serial_digest(algorithm)


def test_no_more_restarts_than_asked_for(machines, tmp_path):
    algorithm = DiesInExchange(marker=str(tmp_path / "killed"), limit=2)
    engine = RAY | {"restarts": 1}
    with pytest.raises(WorkerDied, match=r"a worker of Ray died.*continue with `peerage resume"):
        pg.run(toy(algorithm, rounds=ROUNDS, engine=engine), tmp_path / "run", checkpoint_every=1)
    assert (tmp_path / "killed").read_text() == "xx"
    experiment = toy(algorithm, rounds=ROUNDS, engine=engine)
    resumed = pg.resume(tmp_path / "run", experiment=experiment, engine={"name": "ray"})
    assert resumed.digest == serial_digest(algorithm)


# A machine


class Waiting(logging.Handler):
    """Calls a function when a run says that it waits."""

    def __init__(self, then):
        super().__init__(logging.WARNING)
        self.then, self.text = then, ""

    def emit(self, record):
        if not self.text and record.getMessage().startswith("waiting for"):
            self.text = record.getMessage()
            self.then()


@pytest.fixture
def waiting(monkeypatch):
    """Sets what is done when the run waits."""
    monkeypatch.setattr(ray_engine, "POLL_INTERVAL", 1.0)
    handlers = []

    def then(function):
        handlers.append(Waiting(function))
        logging.getLogger("peerage.engine").addHandler(handlers[-1])
        return handlers[-1]

    yield then
    for handler in handlers:
        logging.getLogger("peerage.engine").removeHandler(handler)


def killer_of_the_second(machines):
    """A watcher that kills the second machine after round 2, once."""
    left = [machines.second]

    def watch(row):
        if row["round"] == 2 and left:
            machines.kill(left.pop())

    return watch


@pytest.fixture
def machines_again(machines):
    """A second machine for later tests, too."""
    yield machines
    if machines.second not in machines.cluster.worker_nodes:
        machines.second = machines.add()
    until(lambda: machines.alive() == 2, "Ray noticed that a machine was gone")


def test_a_run_waits_for_a_machine_that_died(machines_again, tmp_path, waiting):
    machines = machines_again

    def bring_another():
        machines.second = machines.add()

    said = waiting(bring_another)
    result = pg.run(
        toy(pg.DecHW(), rounds=ROUNDS, engine=RAY),
        tmp_path / "run",
        checkpoint_every=1,
        watch=killer_of_the_second(machines),
    )
    assert said.text.startswith("waiting for 2 free cores in the Ray cluster, which has ")
    assert rounds_of(result) == [0, 1, 2, 3]
    assert result.digest == serial_digest(pg.DecHW())


def test_a_waiting_run_is_interrupted_and_resumed_elsewhere(machines_again, tmp_path, waiting):
    def interrupt():  # not with a signal: programs in the background ignore SIGINT
        raise KeyboardInterrupt

    said = waiting(interrupt)
    experiment = toy(pg.DecHW(), rounds=ROUNDS, engine=RAY)
    with pytest.raises(Interrupted, match="the last checkpoint is of round"):
        pg.run(
            experiment,
            tmp_path / "run",
            checkpoint_every=1,
            watch=killer_of_the_second(machines_again),
        )
    assert said.text
    resumed = pg.resume(tmp_path / "run", experiment=experiment, engine={"name": "serial"})
    assert resumed.digest == serial_digest(pg.DecHW())


# The driver

DRIVER = """
import os, signal, sys
from pathlib import Path
import peerage as pg
from peerage.engine.ray import RayTeam
from peerage.testing import toy

def die(row):
    if row["round"] == 2:
        os.kill(os.getpid(), signal.SIGKILL)

write = Path.write_bytes

def die_between_parts(self, content):
    if self.name == "part-1.safetensors" and "round-000002" in str(self):
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, content)

if sys.argv[3] == "save":
    Path.write_bytes, die = die_between_parts, None
engine = {"name": "ray", "workers": 2, "address": sys.argv[2]}
experiment = toy(pg.DecHW(), rounds=3, engine=engine)
pg.run(experiment, sys.argv[1], checkpoint_every=1, watch=die)
"""


@pytest.mark.parametrize("moment", ["round", "save"])
def test_a_driver_that_is_killed_leaves_a_run_to_resume(machines, tmp_path, moment):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", DRIVER, folder, machines.address, moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.latest_round(folder) == 1
    until(lambda: gone(machines.actors()), "the actors of the dead driver were gone")
    experiment = toy(pg.DecHW(), rounds=ROUNDS, engine=RAY)
    resumed = pg.resume(folder, experiment=experiment)
    assert resumed.digest == serial_digest(pg.DecHW())
    assert list(folder.glob("checkpoint/.round*")) == []
