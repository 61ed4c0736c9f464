"""A hub without data: what it takes from its clients, and clients without their hub."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from support.command_line import peerage
from support.machines import Machines
from support.memory import MemoryNetwork, MemoryTransport
from support.networking import network_of, run_peers, run_skipping, skip
from support.processes import until

import peerage as pg
from peerage.errors import InputError
from peerage.net.peer.hub_data import (
    ExampleFacts,
    ask_clients,
    check_flags,
    prepare_without_data,
    recorded_facts,
)
from peerage.net.peer.network import Timeouts
from peerage.net.peer.peer import shared_settings_of
from peerage.net.peer.private_data import as_test_set, describe_examples, prepare_own
from peerage.net.trust.certs import Authority

FACTS = ExampleFacts((2,), ("healthy", "ill"))
SETTINGS = {"nodes": 3, "algorithm": "fedavg", "model": "logistic", "rounds": 2}
GONE = "csv:path=gone.csv,label=ill"  # each site has its own file, and the hub has none


def ward(seed: int, count: int = 30) -> pg.Dataset:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    x = rng.normal(size=(count, 2)) + 3 * y[:, None]
    return pg.in_memory(x, y, classes=FACTS.classes, name=f"ward{seed}")


# What clients state


def test_facts_survive_encoding():
    assert ExampleFacts.parse(FACTS.encode()) == FACTS
    assert str(FACTS) == "examples of shape (2,) and 2 classes"


@pytest.mark.parametrize(
    "stated",
    [
        {},
        [],
        {"shape": [], "classes": ["a", "b"]},
        {"shape": [0], "classes": ["a", "b"]},
        {"shape": [True], "classes": ["a", "b"]},
        {"shape": [2.0], "classes": ["a", "b"]},
        {"shape": "2", "classes": ["a", "b"]},
        {"shape": [1, 2, 3, 4], "classes": ["a", "b"]},
        {"shape": [1 << 14, 1 << 14], "classes": ["a", "b"]},
        {"shape": [2], "classes": []},
        {"shape": [2], "classes": "ab"},
        {"shape": [2], "classes": [0, 1]},
    ],
)
def test_facts_that_cannot_be_true_are_not_believed(stated):
    assert ExampleFacts.parse(json.dumps(stated).encode()) is None
    assert ExampleFacts.parse(b"{" * 100_000) is None


def test_facts_of_a_schema_and_of_an_earlier_start(tmp_path):
    names = {"classes": ["healthy", "ill"], "feature": [{"name": "age"}, {"name": "weight"}]}
    assert ExampleFacts.of_schema(pg.Experiment(data_schema=names).data_schema) == FACTS
    for part in ("classes", "feature"):
        schema = pg.Experiment(data_schema={part: names[part]}).data_schema
        assert ExampleFacts.of_schema(schema) is None
    assert ExampleFacts.of_schema(None) is recorded_facts(tmp_path) is None
    setup = {"classes": ["healthy", "ill"], "example": {"shape": [2], "dtype": "float32"}}
    (tmp_path / "setup.json").write_text(json.dumps(setup))
    assert recorded_facts(tmp_path) == FACTS


class Client:
    """Answers the question for its data."""

    def __init__(self, *facts: ExampleFacts) -> None:
        self.facts = facts

    async def answer(self, question: bytes, identity: int) -> bytes:
        assert json.loads(question) == {"ask": "data"}
        return self.facts[0].encode()


OTHER = ExampleFacts((3,), ("healthy", "ill"))


@pytest.mark.parametrize(
    ("clients", "facts", "waits"),
    [
        ([FACTS, FACTS, FACTS], FACTS, False),
        ([OTHER, FACTS, FACTS], FACTS, False),
        ([None, FACTS, FACTS], FACTS, False),  # a majority is enough
        ([OTHER, FACTS, None], OTHER, True),  # else the hub waits for the third
        ([None, FACTS, None], FACTS, True),
    ],
)
def test_a_hub_takes_what_most_clients_have(clients, facts, waits):
    network = network_of(pg.Experiment(**SETTINGS))
    memory = MemoryNetwork()
    for number, known in enumerate(clients):
        if known is not None:
            memory.receivers[number] = Client(known)  # type: ignore[assignment]

    async def act() -> ExampleFacts:
        task = asyncio.create_task(ask_clients(network, 3, MemoryTransport(memory, 3)))
        if waits:
            skip(3.0)  # longer than the query of a client that is not there
            await asyncio.sleep(0.1)
            assert not task.done()
            skip(network.timeouts.start)
        while not task.done():
            skip(1.0)
            await asyncio.sleep(0.01)
        return await task

    assert run_skipping(act()) == facts


# The world of a hub without data


def test_a_hub_without_data_agrees_with_its_clients_and_does_not_evaluate():
    evaluation = {"samples": 5}
    schema = {"feature": [{"name": "age", "range": [-10, -1]}, {"name": "weight"}]}
    experiment = pg.Experiment(**SETTINGS, dataset=GONE, evaluation=evaluation, data_schema=schema)
    hub = prepare_without_data(experiment, 3, FACTS)
    client = prepare_own(experiment.model_copy(update={"data_schema": None}), 0, ward(0))
    network = network_of(experiment)
    assert shared_settings_of(network, hub) == shared_settings_of(network, client)
    assert ExampleFacts.of_world(client) == FACTS
    assert not hub.is_evaluated(3)
    assert describe_examples(hub, 3) == (
        "the hub has no test set and does not evaluate the model; to do so, add --test"
    )


def test_a_hub_without_data_merges_the_same_models():
    experiment = pg.Experiment(**SETTINGS, dataset=GONE)
    shared = ward(9)

    def run(tested: bool) -> list:
        def world(me: int):
            if me < 3:
                return prepare_own(experiment, me, ward(me))
            if tested:
                return prepare_own(experiment, 3, as_test_set(shared))
            return prepare_without_data(experiment, 3, FACTS)

        return run_peers(experiment, worlds=world)

    blind, seeing = run(tested=False), run(tested=True)
    ends = [peers[3].shard.members[3].node.params.tolist() for peers in (blind, seeing)]
    assert ends[0] == ends[1]
    assert not any("accuracy" in row for row in blind[3].rows)
    assert all("accuracy" in row for row in seeing[3].rows)
    assert seeing[3].world.setup["test_examples"] == len(shared.undivided()[1]) == 30


def test_a_hub_tests_on_one_data_set():
    assert [check_flags(*flags) for flags in ((None, None), ("a", None), (None, "b"))] == [
        None,
        "a",
        "b",
    ]
    with pytest.raises(InputError, match="the hub does not train, so it takes --data or --test"):
        check_flags("a", "b")
    split = pg.in_memory([[0.0], [1.0]], [0, 1], [[2.0]], [0])
    assert as_test_set(split) is split


# Real processes


def write_tables(folder: Path) -> None:
    for me in range(2):
        x, y = ward(me).undivided()
        rows = [f"{a:.3f},{b:.3f},{FACTS.classes[c]}" for (a, b), c in zip(x, y, strict=True)]
        (folder / f"{me}.csv").write_text("\n".join(["age,weight,ill", *rows]))


@pytest.mark.slow
def test_a_hub_without_data_whose_clients_dial_out(tmp_path):
    """It listens before it has a model, and an observer learns about the clients through it."""
    write_tables(tmp_path)
    experiment = pg.Experiment(**SETTINGS | {"nodes": 2, "rounds": 10**6}, dataset=GONE)
    timeouts = Timeouts(start=600, message=600, idle=30)
    with Machines(tmp_path, experiment, timeouts, dials_out=(0, 1)) as network:
        Authority.load(tmp_path / "certs").issue("watcher", observer=True)
        for me in range(2):
            spec = f"csv:path={tmp_path / f'{me}.csv'},label=ill"
            network.start(me, more=["--data", spec])
        network.start(2)
        network.until(lambda: all(network.round(me) >= 2 for me in range(3)))
        assert "the model is for examples of shape (2,) and 2 classes" in network.log(2)
        certs = f"--identity watcher --certs {tmp_path / 'certs'}"
        done = peerage(f"status {tmp_path / 'network.toml'} {certs} --json")
        peers = json.loads(done.lines[-1])["peers"]
    assert [peer["state"] for peer in peers] == ["running"] * 3
    assert [peer.get("by_way_of") for peer in peers] == ["node-2", "node-2", None]
    assert all(peer["round"] >= 2 and peer["revision"] == 1 for peer in peers)


@pytest.mark.slow
def test_a_hub_without_data_and_clients_that_lose_it(tmp_path):
    """Clients pause while it is gone, although they can reach each other."""
    write_tables(tmp_path)
    settings = SETTINGS | {"nodes": 2, "rounds": 10**6}
    experiment = pg.Experiment(**settings, dataset=GONE)
    with Machines(tmp_path, experiment, Timeouts(start=600, message=600, idle=2)) as network:
        network.start(2)
        until(lambda: "waiting for the clients to state" in network.log(2), "the hub asks")
        assert "does not have the data set of the experiment: gone.csv" in network.log(2)
        for me in range(2):
            spec = f"csv:path={tmp_path / f'{me}.csv'},label=ill"
            network.start(me, more=["--data", spec])
        network.until(lambda: network.round(2) >= 2)
        assert "the model is for examples of shape (2,) and 2 classes" in network.log(2)
        assert "the hub has no test set and does not evaluate the model" in network.log(2)
        assert not any("accuracy" in row for row in network.rows(2))
        network.processes[2].kill()
        network.processes.pop(2).wait()
        paused = "no contact with the hub: round"
        network.until(lambda: all(paused in network.log(me) for me in range(2)))
        rounds = [network.round(me) for me in range(2)]
        network.start(2)  # it remembers the shape
        network.until(lambda: all(network.round(me) > rounds[me] + 1 for me in range(2)))
        assert network.log(2).count("waiting for the clients to state") == 1
        assert network.rows(0)[-1]["heard"] == [1, 1]
