"""One peer as a process: its log, its metrics, how it ends, and which input it rejects."""

import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.command_line import error_line, peerage
from support.machines import Machines
from support.processes import TIMEOUT

import peerage as pg
from peerage.net.deploy.up import free_ports
from peerage.net.peer.account import PrivacyAccount
from peerage.net.peer.metrics import Collector
from peerage.net.peer.network import Timeouts
from peerage.net.wire.admission import Admission
from peerage.net.wire.header import REASONS
from peerage.net.wire.limits import Limits
from peerage.privacy import Noise

pytestmark = pytest.mark.slow  # a peer is a process that listens

HASTY = Timeouts(start=0.2, message=1, idle=1)


def endless(**changes) -> pg.Experiment:
    settings = {"nodes": 2, "topology": "ring", "model": "logistic", "rounds": 10**6}
    return pg.Experiment(partition="iid", **(settings | changes))


# Numbers for Prometheus


def scraped(port: int) -> dict[str, dict[str, float]]:
    """Metric -> label (or nothing) -> value, as another program reads them."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT) as answer:
        text = answer.read().decode()
    return {
        family.name: {next(iter(one.labels.values()), ""): one.value for one in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_a_running_peer_serves_its_numbers(tmp_path):
    [port] = free_ports(1)
    three = endless(nodes=3)
    with Machines(tmp_path, three, Timeouts(start=600, message=20, idle=4)) as network:
        network.start(0, more=["--metrics-port", str(port)])
        network.start(1)
        network.start(2)
        network.until(lambda: network.round(0) >= 3)
        before = network.rows(0)
        found = scraped(port)
        after = network.rows(0)
        assert before[-1]["round"] <= found["peerage_round"][""] <= after[-1]["round"] + 1
        seen = {row["accuracy"] for row in network.rows(0) if "accuracy" in row}
        assert found["peerage_accuracy"][""] in seen
        assert found["peerage_peers_alive"] == {"": 2}  # also on a machine that is busy for seconds
        sent = found["peerage_bytes"]
        assert sent.keys() == {"payload_sent", "wire_sent", "wire_received"}
        assert sent["payload_sent"] >= sum(row["bytes"] for row in before) > 0
        # All send the same number of bytes in a round, and have sent the last one's or not.
        assert sent["wire_received"] > sum(row["bytes"] for row in before[:-1])
        assert sent["wire_sent"] > sum(row["bytes"] for row in before[:-1])
        assert found["peerage_messages_rejected"] == dict.fromkeys(REASONS, 0)
        # The other one hangs for a while; what it then sends is of a round that is long over.
        network.processes[1].send_signal(signal.SIGSTOP)
        network.until(lambda: scraped(port)["peerage_peers_alive"] == {"": 1})
        network.processes[1].send_signal(signal.SIGCONT)
        network.until(lambda: scraped(port)["peerage_messages_rejected"]["late"] > 0)
        network.until(lambda: scraped(port)["peerage_peers_alive"] == {"": 2})
        # A peer that has lost all others waits for them.
        for me in (1, 2):
            network.processes[me].send_signal(signal.SIGSTOP)
        network.until(lambda: scraped(port)["peerage_peers_alive"] == {"": 0})
        for me in (1, 2):
            network.processes[me].send_signal(signal.SIGCONT)
        network.until(lambda: scraped(port)["peerage_peers_alive"] == {"": 2})


PER_LABEL = ("peerage_contact", "peerage_messages_missing", "peerage_calls", "peerage_connections")


def test_every_reason_has_a_counter_even_if_it_did_not_occur():
    recorder = SimpleNamespace(
        finished=4,
        accuracy=None,
        bytes_total=10,
        error_counts=lambda: {"late": 3, "not a member": 5},
        account=PrivacyAccount(None, "run", "node-0", Noise(sigma=2.0, clip=1.0)),
        latest={"größe": 0.25}.get,
    )
    recorder.account.record(1)
    tracker = SimpleNamespace(
        other_peers=[1, 2], out_of_reach={2: "connection refused"}, name=lambda me: f"node-{me}"
    )
    peer = SimpleNamespace(
        alive=1,
        contacts=frozenset([1]),
        exchanges=SimpleNamespace(missing_by_peer=Counter({2: 4})),
        recorder=recorder,
        tracker=tracker,
        world=SimpleNamespace(own_metrics=["größe", "not_yet"]),
    )
    transport = SimpleNamespace(
        counters=Counter(bytes_sent=12),
        refused_by_peer=Counter({("node-1", "shape"): 2, ("other", "membership"): 7}),
        expires=datetime(2030, 1, 1, tzinfo=UTC),
        admission=Admission(Limits(), lambda: 0.0),
    )
    transport.admission.refuse("192.0.2.1", "handshake")
    transport.admission.closed["node-1"] = 3
    families = {one.name: one.samples for one in Collector(peer, transport).collect()}
    assert "peerage_accuracy" not in families  # it was not judged yet
    own = families["peerage_own_metric"]
    assert [(sample.labels, sample.value) for sample in own] == [({"name": "größe"}, 0.25)]
    rejected = {s.labels["reason"]: s.value for s in families["peerage_messages_rejected"]}
    assert rejected == dict.fromkeys(REASONS, 0) | {"late": 3, "not a member": 5}
    assert families["peerage_epsilon"][0].value == pytest.approx(4.377, abs=5e-4)
    sent = {sample.labels["what"]: sample.value for sample in families["peerage_bytes"]}
    assert sent == {"payload_sent": 10, "wire_sent": 12, "wire_received": 0}
    labelled = {
        name: {tuple(sample.labels.values()): sample.value for sample in families[name]}
        for name in families
        if name.startswith(PER_LABEL)
    }
    assert labelled == {
        "peerage_contact": {
            ("node-1", "to"): 1,
            ("node-1", "from"): 1,
            ("node-2", "to"): 0,
            ("node-2", "from"): 0,
        },
        "peerage_messages_missing": {("node-1",): 0, ("node-2",): 4},
        "peerage_calls_refused": {("node-1", "shape"): 2, ("other", "membership"): 7},
        "peerage_connections": {("pending",): 0, ("authenticated",): 0},
        "peerage_connections_refused": {("handshake", "private"): 1},
        "peerage_connections_closed": {("node-1",): 3},
    }
    [expiry] = families["peerage_certificate_expiry_seconds"]
    assert expiry.value == datetime(2030, 1, 1, tzinfo=UTC).timestamp()


# The log


def objects(text: str) -> list[dict]:
    """All lines as JSON, of which every one has the same fields and some have a row."""
    found = [json.loads(line) for line in text.splitlines()]
    for one in found:
        assert one.keys() - {"row"} == {"time", "level", "peer", "message"}
        assert datetime.fromisoformat(one["time"]).tzinfo is not None
        assert one["level"] in ("info", "warning", "error")
        assert "\n" not in one["message"]
    return found


def test_a_log_for_programs(tmp_path):
    """Also the warning about noise, the line about the missing peer and the end are objects."""
    noisy = endless(nodes=3, noise={"sigma": 0.01})
    with Machines(tmp_path, noisy, Timeouts(start=2, message=1, idle=1)) as network:
        network.start(0, more=["--log", "json"])
        network.start(2)
        network.until(lambda: network.round(0) >= 3)
        network.processes[2].kill()
        network.processes.pop(2).wait()
        network.until(lambda: "waits for node-1" in network.log(0))
        network.processes[0].terminate()
        assert network.wait() == [130]
        found = objects(network.log(0))
    assert {one["peer"] for one in found} == {"node-0"}
    assert not any(one["level"] == "error" for one in found)
    assert found[-1]["level"] == "info"
    assert found[-1]["message"].startswith("stopped in round ")
    warned = [one["message"] for one in found if one["level"] == "warning"]
    assert any("noise" in message for message in warned)
    assert any("round" in message and "waits for node-1" in message for message in warned)
    rows = [one["row"] for one in found if "row" in one]
    assert [row["round"] for row in rows] == list(range(len(rows)))
    assert rows[: len(network.rows(0))] == network.rows(0)[: len(rows)]
    assert {row["heard"][1] for row in rows[1:]} == {2}
    # Messages for node-1, which was never there, do not count as sent.
    simulated = endless(nodes=3, rounds=1, engine={"name": "serial"})
    to_two = pg.run(simulated).rows[-1]["bytes"] / 3
    assert {row["bytes"] for row in rows[1:]} == {to_two / 2}


def test_what_is_wrong_is_an_object_as_well(ready):
    done = peerage(f"{ready.line} --log json --data npz:path=gone.npz")
    assert (done.code, done.out) == (2, "")
    [error] = objects(done.err)
    assert (error["level"], error["peer"]) == ("error", "node-0")
    assert error["message"] == "gone.npz does not exist; give the path of a .npz file"


# The end


def test_a_peer_that_is_asked_to_stop_stops_and_goes_on_later(tmp_path):
    timeouts = Timeouts(start=600, message=3600, idle=2)  # far longer than it may take to stop
    with Machines(tmp_path, endless(), timeouts) as network:
        network.start(0)
        network.start(1)
        network.until(lambda: network.round(0) >= 3)
        network.processes[0].terminate()
        assert network.processes.pop(0).wait(TIMEOUT) == 130
        *earlier, last = network.log(0).splitlines()
        reached = network.round(0)
        # A round that was recorded but not yet saved is run again.
        endings = [
            f"node-0 stopped in round {round}; start it again to continue from its last round"
            for round in (reached, reached + 1)
        ]
        assert last.partition(" ")[2] in endings  # after the time
        assert not any("error" in line or "Traceback" in line for line in earlier)
        network.start(0)
        network.until(lambda: network.round(0) >= reached + 3)
        rounds = [row["round"] for row in network.rows(0)]
        assert rounds[: reached - 1] == list(range(reached - 1))  # nothing of before is lost
        assert rounds == sorted(set(rounds))
        assert "round 1 of" not in network.log(0).partition(last)[2]


def test_a_peer_that_trains_for_hours_stops_in_between(tmp_path):
    with Machines(tmp_path, endless(local={"epochs": 10**7}), HASTY) as network:
        network.start(0)
        network.start(1)
        network.until(lambda: all("round 0 of" in network.log(me) for me in range(2)))
        time.sleep(0.5)
        network.processes[0].terminate()
        assert network.processes[0].wait(600) == 130
        assert network.log(0).splitlines()[-1].endswith("from its last round")
        assert "stopped in round 1; start it" in network.log(0)
        assert "Traceback" not in network.log(0)


# Input that cannot be


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A network of two peers, of which only node-0 is ever started; `line` starts it."""
    monkeypatch.chdir(tmp_path)
    Machines(tmp_path, endless(rounds=1), HASTY)
    np.savez("mine.npz", x=np.zeros((10, 4)), y=np.arange(10) % 2)
    np.savez("other.npz", x=np.zeros((10, 5)), y=np.arange(10) % 2)
    return SimpleNamespace(
        home=tmp_path, line="node --network network.toml --identity node-0 --certs certs"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data npz:path=gone.npz", "gone.npz does not exist; give the path of a .npz file"),
        ("--data idx:path=gone", "gone is not a folder; give the path of a folder of IDX files"),
        ("--data npy:path=gone", "unknown dataset 'npy'; did you mean 'npz'?"),
        ("--data npz:path=mine.npz --test npz:path=gone.npz", "gone.npz does not exist"),
        ("--data npz:path=mine.npz --test npz:path=other.npz", "--test other has examples of sha"),
        ("--data npz:path=mine.npz --classes 1", "mine has 2 classes, but --classes"),
        ("--data npz:path=mine.npz --classes a,b,a", "--classes 'a,b,a' names 'a' twice"),
        ("--data npz:path=mine.npz --classes 0", "--classes must be at least 1"),
        ("--test npz:path=mine.npz", "--test requires --data"),
        ("--classes 10", "--classes requires --data"),
        ("--out mine.npz", "cannot write mine.npz: File exists; choose a folder that you may"),
        ("--out mine.npz/deeper", "cannot write mine.npz/deeper: Not a directory; choose a fol"),
        ("--out /proc/nobody/writes", "cannot write /proc/nobody/writes: "),
        ("--out /proc", "cannot write /proc: "),  # a folder in which no user can create a file
        ("--metrics-port 99999", "--metrics-port must lie in 1 to 65535, got 99999"),
        ("--metrics-port 0", "--metrics-port must lie in 1 to 65535, got 0"),
        ("--log xml", "log must be one of human, json; got 'xml'"),
        ("--rejoin none", "rejoin must be one of own, neighbour; got 'none'"),
        ("--bind nowhere", "'nowhere'"),
        ("--bind no..where:7401", "no..where:7401"),
    ],
)
def test_bad_input_is_one_line(ready, flags, message):
    assert message in error_line(peerage(f"{ready.line} {flags}"))


def test_accounts_of_private_data_that_cannot_be_used(ready):
    line, file = f"{ready.line} --data npz:path=mine.npz", ready.home / "mine.npz.privacy.json"
    PrivacyAccount(file, "earlier", "node-0", Noise(sigma=2.0, clip=1.0)).record(1)
    assert error_line(peerage(line)).startswith(f"this data has a privacy account, {file}, and ")
    plain = error_line(peerage(f"{ready.line} --stop-at-epsilon 3"))
    assert "requires differential privacy; set --noise and --clip" in plain
    noisy = endless(rounds=1, noise={"sigma": 2.0, "clip": 1.0})
    (ready.home / "experiment.toml").write_text(noisy.to_toml())
    file.write_text("{")
    assert error_line(peerage(line)).startswith(f"the privacy account {file} is damaged (")
    file.unlink()
    file.mkdir()
    assert error_line(peerage(line)).startswith(f"cannot read the privacy account {file}: Is a dir")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(ready):
    (ready.home / "locked").mkdir(mode=0o500)
    for folder in ("locked", "locked/deeper"):
        message = error_line(peerage(f"{ready.line} --out {folder}"))
        assert message.startswith(f"cannot write {folder}: Permission denied; choose a folder")


def test_a_port_for_metrics_that_is_taken(ready):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = error_line(peerage(f"{ready.line} --metrics-port {port}"))
    assert message == (
        f"cannot serve metrics on port {port}: Address already in use; choose another "
        "--metrics-port"
    )


def test_an_address_that_no_machine_has(ready):
    path = ready.home / "network.toml"
    path.write_text(path.read_text().replace("127.0.0.1", "no..where", 1))
    assert "no..where" in error_line(peerage(ready.line))


# What it loads

NOT_NEEDED = {
    "fastapi",
    "matplotlib",
    "networkx",
    "pandas",
    "prometheus_client",
    "sklearn",
    "sympy",
    "torchvision",
}
LISTING = """
import atexit, sys
sys.argv = sys.argv[1:]
atexit.register(lambda: print("loaded:", *{name.partition(".")[0] for name in sys.modules}))
from peerage.cli.app import main
main()
"""


def test_a_peer_loads_only_what_it_needs(tmp_path):
    with Machines(tmp_path, endless(rounds=2), Timeouts(start=600, message=300)) as network:
        network.start(0, within=[sys.executable, "-c", LISTING])
        network.start(1)
        for process in network.processes.values():
            assert process.wait(TIMEOUT) == 0, network.log(0)
        [line] = [each for each in network.log(0).splitlines() if each.startswith("loaded:")]
    assert {"torch", "grpc"} <= set(line.split())
    assert not NOT_NEEDED.intersection(line.split())
