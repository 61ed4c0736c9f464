"""Networks of real processes: the same digest, kill -9, and input that cannot be."""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import complaint, peerage

import peerage as pg
from peerage.net.certs import Authority
from peerage.net.network import Member, Network, Patience
from peerage.net.up import free_ports
from peerage.records import read_metrics

SETTINGS = "--nodes 3 --topology ring --partition iid --model logistic --epochs 1 --rounds 3"


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.slow
def test_real_processes_end_with_the_digest_of_a_simulation(tmp_path):
    before = children()
    done = peerage(f"up {SETTINGS} --json --out", tmp_path / "up")
    assert done.code == 0, done.err
    assert re.search(r"rounds \d+ to \d+; peers: 3 (starting|playing|finished)", done.err)
    summary = json.loads(done.lines[-1])
    simulated = peerage(f"run {SETTINGS} --engine serial --json --out", tmp_path / "run")
    wanted = json.loads(simulated.lines[-1])
    same = ("digest", "accuracy", "accuracy_std", "loss", "bytes_sent", "rounds", "nodes", "label")
    assert {key: summary[key] for key in same} == pytest.approx({key: wanted[key] for key in same})
    assert summary["digest"] == wanted["digest"]
    assert summary["wire_bytes"] > summary["bytes_sent"]
    assert children() == before
    record = pg.RunRecord.load(tmp_path / "up")
    assert record.status == "finished"
    assert record.rounds == 3
    assert (tmp_path / "up" / "report.html").exists()
    assert not list((tmp_path / "up").rglob("*.key"))  # keys are for the run, and go with it


@pytest.mark.slow
def test_a_peer_that_is_killed_and_started_again_finishes(tmp_path):
    line = (
        "up --nodes 4 --topology complete --partition iid --rounds 50 --epochs 25 "
        "--kill 2@4 --restart 2@6 --json --out"
    )
    done = peerage(line, tmp_path / "up")
    assert done.code == 0, done.err
    summary = json.loads(done.lines[-1])
    assert [peer["starts"] for peer in summary["peers"]] == [1, 1, 2, 1]
    ends = [
        read_metrics(tmp_path / "up" / "peers" / f"node-{node}" / "metrics.jsonl")[-1]
        for node in range(4)
    ]
    assert [row["round"] for row in ends] == [50] * 4
    assert all(row["heard"] == [3, 3] for row in ends)  # it is one of them again
    calm = pg.run(pg.Experiment(**_settings(), rounds=50)).accuracy
    assert summary["accuracy"] == pytest.approx(calm, abs=0.02)


def _settings() -> dict[str, Any]:
    return {"nodes": 4, "topology": "complete", "partition": "iid", "local": {"epochs": 25}}


# Input that cannot be


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kill 9@2", "kill names node 9; the nodes are 0 to 2"),
        ("--restart 1@2", "node 1 cannot be restarted in round 2 before a kill"),
        ("--kill 1@5 --restart 1@2", "node 1 cannot be restarted in round 2 before a kill"),
        ("--kill oops", "kill 'oops' is not of the form NODE@ROUND, such as 7@10"),
        ("--step-patience 0", "step must be a number of seconds above 0"),
        ("--until accuracy=0.9", "until needs the mean over all nodes"),
        ("--wire fp8", "wire must be fp32 or bf16, got 'fp8'"),
    ],
)
def test_up_complains_before_it_starts_anything(flags, message, tmp_path):
    done = peerage(f"up {SETTINGS} {flags} --out", tmp_path / "up")
    assert message in complaint(done)
    assert not (tmp_path / "up").exists()


def test_up_leaves_the_folder_of_another_run_alone(tmp_path):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "experiment.toml").write_text("of another run")
    done = peerage(f"up {SETTINGS} --out", tmp_path / "up")
    assert "already holds a run" in complaint(done)
    assert (tmp_path / "up" / "experiment.toml").read_text() == "of another run"


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A network file of two peers, with an experiment and certificates."""
    experiment = pg.Experiment(nodes=2, topology="ring", partition="iid", rounds=1)
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    members = tuple(Member(f"node-{i}", f"127.0.0.1:{p}") for i, p in enumerate(free_ports(2)))
    network = Network("demo", experiment, members, Patience(start=0.2, step=1.0))
    (tmp_path / "network.toml").write_text(network.to_toml("experiment.toml"))
    authority = Authority.create(tmp_path / "certs", "demo")
    authority.issue("node-0")
    authority.issue("node-1")
    return tmp_path


def node(home: Path, identity: str = "node-0") -> str:
    line = f"node --network {home / 'network.toml'} --identity {identity}"
    return complaint(peerage(f"{line} --certs {home / 'certs'} --out {home / 'out'}"))


def test_a_network_file_says_the_same_when_it_is_read(ready):
    network = Network.load(ready / "network.toml")
    assert network.to_toml("experiment.toml") == (ready / "network.toml").read_text()
    assert network.patience == Patience(start=0.2, step=1.0)


def test_a_name_that_is_not_in_the_network(ready):
    assert node(ready, "node-7").startswith("the network has no peer 'node-7'; did you mean")


def test_a_port_that_is_taken(ready):
    address = Network.load(ready / "network.toml").members[0].address
    host, port = address.split(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        assert port in node(ready)


def test_a_key_that_others_may_read(ready):
    os.chmod(ready / "certs" / "node-0.key", 0o644)
    assert "chmod 600" in node(ready)


def test_a_key_that_is_not_there(ready):
    (ready / "certs" / "node-0.key").unlink()
    assert "node-0.key" in node(ready)


def test_an_experiment_that_is_not_there(ready):
    (ready / "experiment.toml").unlink()
    assert "cannot read the experiment" in node(ready)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "node-1"', 'name = "node-0"', "two peers have the name 'node-0'"),
        ('name = "node-1"', 'name = "Node 1"', "must be of small letters"),
        (r'address = ".*"', 'address = "nowhere"', "is not HOST:PORT"),
        ("run = ", "ran = ", "has no key 'ran'; did you mean 'run'?"),
        (r"\[\[peer\]\]\nname = \"node-1\"\naddress = .*\n", "", "lists 1 peers"),
        ('wire = "fp32"', 'wire = "fp8"', "wire must be fp32 or bf16"),
        ("step = 1.0", "step = -1.0", "step must be a number of seconds above 0"),
        ("run = ", "run = = ", "is not valid TOML"),
    ],
)
def test_network_files_that_cannot_be(ready, old, new, message):
    path = ready / "network.toml"
    text = path.read_text()
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    path.write_text(changed)
    assert message in node(ready)


def test_real_peers_need_their_packages(ready, monkeypatch):
    from peerage.net import node_commands

    monkeypatch.setattr(node_commands, "find_spec", lambda name: None)
    assert 'pip install "peerage[net]"' in node(ready)
