"""The engine `ray`, on a cluster of two machines that are processes here."""

import logging
import os
import signal
import sys

import psutil
import pytest
from support.command_line import peerage

import peerage as pg
from peerage.engine.ray import MAX_WORKERS, RayTeam, check_port, load_ray
from peerage.errors import InputError, Interrupted
from peerage.testing import toy

pytestmark = [pytest.mark.slow, pytest.mark.own_engine]  # Ray starts processes

RAY = {"name": "ray", "workers": 2}
EXPERIMENTS = {
    # Neighbours, dropped messages, and state that survives a round.
    "dechw": {"algorithm": "dechw", "topology": "er:p=0.5", "faults": {"loss": 0.2}},
    # A hub that changes, five architectures, and models that are trained together.
    "dfml": {"algorithm": "dfml", "topology": "complete"},
    # Heads over one core, clusters, and a final step.
    "facade": {"algorithm": "facade:k=2,warmup=1", "clusters": "4/2:rotate"},
}


MACHINE = {"num_cpus": 1, "object_store_memory": 1 << 28, "include_dashboard": False}
ATTEMPTS = 10


def until_started(start):
    """Ray allows a machine 30 seconds to start, which are not enough if this one is busy."""
    for attempt in range(ATTEMPTS):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


@pytest.fixture(scope="module")
def cluster():
    """Two machines with one core each; runs use the connection of this process."""
    pytest.importorskip("ray", reason="needs the extra peerage[ray]")
    ray = load_ray(local=True)
    from ray.cluster_utils import Cluster

    machines = until_started(lambda: Cluster(initialize_head=True, head_node_args=MACHINE))
    until_started(lambda: machines.add_node(**MACHINE))
    ray.init(address=machines.address, log_to_driver=False, logging_level="ERROR")
    yield machines
    ray.shutdown()
    machines.shutdown()


def experiment(name, engine):
    return pg.Experiment(nodes=6, rounds=3, engine=engine, **EXPERIMENTS[name])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_two_machines_give_the_bits_of_serial(cluster, name):
    serial = pg.run(experiment(name, {"name": "serial"}))
    result = pg.run(experiment(name, RAY))
    assert result.digest == serial.digest
    timeless = [
        [{key: value for key, value in row.items() if key != "seconds"} for row in made.rows]
        for made in (result, serial)
    ]
    assert timeless[0] == timeless[1]


def test_a_worker_that_is_killed_costs_the_rounds_since_the_last_checkpoint(
    cluster, tmp_path, caplog
):
    killed = []

    def kill_one(row):
        if row["round"] == 2 and not killed:
            workers = [p for p in psutil.process_iter(["cmdline"]) if is_actor(p)]
            killed.append(workers[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    undisturbed = pg.run(experiment("dechw", {"name": "serial"}))
    with caplog.at_level(logging.WARNING, "peerage.run"):
        result = pg.run(
            experiment("dechw", RAY), tmp_path / "run", checkpoint_every=1, watch=kill_one
        )
    assert len(killed) == 1
    assert result.digest == undisturbed.digest
    assert "a worker of Ray died" in caplog.text
    assert [row["round"] for row in result.rows if row["scope"] == "network"] == [0, 1, 2, 3]


def is_actor(process):
    command = process.info["cmdline"] or [""]
    return command[0].startswith("ray::ShardActor")


def test_an_interrupted_run_continues_with_another_engine(cluster, tmp_path):
    def interrupt(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Interrupted)):
        pg.run(experiment("dechw", RAY), tmp_path / "run", checkpoint_every=1, watch=interrupt)
    continued = pg.resume(tmp_path / "run", engine={"name": "serial"})
    assert continued.digest == pg.run(experiment("dechw", {"name": "serial"})).digest


def test_classes_of_a_function_are_sent_too(cluster):
    class Mine(pg.DecAvg):
        """An algorithm that no other process can import."""

    mine = toy(Mine(), rounds=2, engine=RAY)
    assert pg.run(mine).digest == pg.run(toy(Mine(), rounds=2, engine={"name": "serial"})).digest


def test_what_cannot_be_pickled_is_refused_in_one_line(cluster):
    class Bad(pg.DecAvg):
        """Holds an open file."""

        stream = sys.stderr

    with pytest.raises(InputError, match="cannot send the experiment to its workers"):
        pg.run(toy(Bad(), rounds=1, engine=RAY))


# Errors without a cluster


def test_too_many_workers_are_refused():
    with pytest.raises(InputError, match=f"at most {MAX_WORKERS} workers, got 65"):
        RayTeam(None, 65, None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:70000"])
def test_an_address_without_a_cluster_is_refused(address):
    with pytest.raises(InputError, match=f"no Ray cluster answers at '{address}'"):
        check_port(address)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'peerage\[ray\]'"):
        load_ray(local=False)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ("--engine pool --address auto", "address and restarts need engine ray"),
        ("--engine ray --restarts -1", "restarts must be at least 0, got -1"),
    ],
)
def test_wrong_settings_are_refused(flags, error, tmp_path):
    outcome = peerage(f"run --rounds 1 {flags} --out", tmp_path / "run")
    assert outcome.code == 2
    assert error in outcome.err
    assert not (tmp_path / "run").exists()
