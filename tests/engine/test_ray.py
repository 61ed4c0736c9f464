"""The engine `ray`, on a cluster of two machines that are processes here."""

import sys
from dataclasses import replace

import pytest
from support.command_line import TINY, peerage
from support.processes import until
from support.ray_machines import KEPT

import peerage as pg
from peerage.engine.packed import PackedStore
from peerage.engine.ray import INLINE_BYTES, Traffic
from peerage.errors import InputError, Interrupted
from peerage.runs.verify import OF_ENGINE
from peerage.testing import toy

pytestmark = [pytest.mark.slow, pytest.mark.own_engine]  # Ray starts processes

RAY = {"name": "ray", "workers": 2}


@pytest.fixture(scope="module")
def kept(machines):
    """All runs of this module use the same actors."""
    with pytest.MonkeyPatch.context() as patch:
        KEPT.use(patch)
        yield
    KEPT.release()


def without_engine(rows):
    return [{key: row[key] for key in row if key not in OF_ENGINE} for row in rows]


def check_equal(experiment, **options):
    """The run with Ray has the digest and the rows of the serial one."""
    serial = pg.run(experiment.model_copy(update={"engine": pg.Engine(name="serial")}), **options)
    result = pg.run(experiment.model_copy(update={"engine": pg.Engine(**RAY)}), **options)
    assert result.digest == serial.digest
    assert without_engine(result.rows) == without_engine(serial.rows)
    return result


# Every algorithm

SHORT = {"desa": {"ipc": 2, "iterations": 3}}  # the default is of the size of the experiments


@pytest.mark.parametrize("name", pg.ALGORITHMS)
def test_every_algorithm_has_the_bits_of_serial(kept, name):
    algorithm = pg.ALGORITHMS[name](**SHORT.get(name, {}))
    if hasattr(algorithm, "local"):
        algorithm = replace(algorithm, local=replace(algorithm.local, epochs=1))
    check_equal(toy(algorithm, rounds=2))


EXPERIMENTS = {
    # Neighbours, dropped messages, and state that survives a round.
    "dechw": {"algorithm": "dechw", "topology": "er:p=0.5", "faults": {"loss": 0.2}},
    # A hub that changes, five architectures, and models that are trained together.
    "dfml": {"algorithm": "dfml", "topology": "complete"},
    # Heads over one core, clusters, and a final step.
    "facade": {"algorithm": "facade:k=2,warmup=1", "clusters": "4/2:rotate"},
    # Images, running statistics, and rows of tensors.
    "cnn": {"model": "gn-lenet", "topology": "ring", "evaluation": {"spread": True}},
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_features_have_the_bits_of_serial(kept, name):
    check_equal(pg.Experiment(nodes=6, rounds=2, local={"epochs": 1}, **EXPERIMENTS[name]))


# Records


def test_rows_count_the_bytes_between_shards(kept):
    """Of a ring of four nodes, two per shard; the shards exchange what their nodes need."""
    settings = {"nodes": 4, "topology": "ring", "model": "logistic", "partition": "iid"}
    settings |= {"algorithm": "decavg", "rounds": 2, "local": {"epochs": 1}}
    result = check_equal(pg.Experiment(**settings))
    network = [row for row in result.rows if row["scope"] == "network"]
    # Each node sends one model of 650 numbers, in whole lines of 64 bytes, and at least one of its
    # neighbours is in the other shard; if both are, it is sent once.
    model = -(-650 * 4 // 64) * 64
    assert [row["shard_bytes"] for row in network] == [0, 4 * model, 4 * model]
    assert result.summary["shard_bytes"] == 8 * model
    assert result.summary["store_bytes"] == max(row["store_bytes"] for row in network) > 0


def test_buffers_count_on_each_machine_that_holds_them():
    traffic = Traffic(["one", "one", "two"], "one", stored_bytes=1000)
    assert traffic.take() == {"shard_bytes": 0, "store_bytes": 2000}  # data sets on two machines
    large = INLINE_BYTES + 1
    traffic.add([{1: large, 2: large}, {}, {0: 10}], [0, 0, 0])
    held = 2000 + 3 * large  # for shard 1 once, for shard 2 on both machines
    assert traffic.take() == {"shard_bytes": 2 * large + 10, "store_bytes": held}
    traffic.add([{}, {0: large}, {}], [0, 0, 0])  # those of the step before are still there
    assert traffic.take() == {"shard_bytes": large, "store_bytes": held + large}
    traffic.add([{}, {}, {}], [large, 5, large])  # for the engine, which is on machine one
    assert traffic.take() == {"shard_bytes": 0, "store_bytes": 2000 + large + 3 * large}


def test_the_stores_hold_no_more_than_the_rows_say(kept, machines):
    """Ray's own figure, as soon as it has freed what no process uses any more."""
    from ray._private.internal_api import get_memory_info_reply

    found = []

    def used():
        return get_memory_info_reply(machines.cluster.global_state).store_stats

    def look(row):
        stated = row["store_bytes"]
        until(lambda: used().object_store_bytes_used <= 1.05 * stated, "Ray freed its memory")
        found.append(used().object_store_bytes_used / stated)

    settings = {"nodes": 4, "topology": "ring", "model": "mlp:hidden=512x512"}
    pg.run(pg.Experiment(rounds=1, local={"epochs": 1}, engine=RAY, **settings), watch=look)
    assert len(found) == 2
    assert min(found) > 0


# Runs of all kinds


def test_an_interrupted_run_continues_with_another_engine(kept, tmp_path):
    def interrupt(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    experiment = toy(pg.DecHW(), rounds=3, engine=RAY)
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        pg.run(experiment, tmp_path / "run", checkpoint_every=1, watch=interrupt)
    continued = pg.resume(tmp_path / "run", experiment=experiment, engine={"name": "serial"})
    assert continued.digest == pg.run(toy(pg.DecHW(), rounds=3, engine={"name": "serial"})).digest


def test_commands_work_as_with_the_pool(kept, tmp_path):
    flags = f"{TINY} --rounds 2 --engine ray --workers 2 --quiet"
    assert peerage(f"run --algorithm decavg {flags} --out", tmp_path / "run").code == 0
    verified = peerage("verify", tmp_path / "run")
    assert verified.code == 0, verified.err
    compared = peerage(f"compare {flags} --algorithms decavg,el --out", tmp_path / "both")
    assert compared.code == 0, compared.err
    digests = {pg.load(path.parent).digest for path in tmp_path.glob("both/*/summary.json")}
    assert len(digests) == 2
    assert pg.load(tmp_path / "run").digest in digests


def test_classes_of_a_function_are_sent_too(kept):
    class Mine(pg.DecAvg):
        """An algorithm that no other process can import."""

    check_equal(toy(Mine(), rounds=2))


def test_what_cannot_be_pickled_is_refused_before_the_run_begins(machines, tmp_path):
    class Bad(pg.DecAvg):
        """Holds an open file."""

        stream = sys.stderr

    with pytest.raises(InputError, match="cannot send the experiment to its workers"):
        pg.run(toy(Bad(), rounds=1, engine=RAY), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_of_a_node_stay_in_its_shard():
    assert PackedStore(0).shards == 1
