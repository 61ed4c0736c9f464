"""Networks of real processes: the same digest, kill -9, how they end, and bad input."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support import barriers
from support.command_line import error_line, peerage, start
from support.machines import Machines
from support.processes import TIMEOUT, gone, until

import peerage as pg
from peerage.errors import Diverged, Interrupted
from peerage.net.deploy.parent_pipe import interrupt_once
from peerage.net.deploy.process import DIVERGED, PeerProcess, PeerProgress
from peerage.net.deploy.up import LocalNetwork, free_ports
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.peer.recorder import PAUSED
from peerage.net.trust.certs import Authority
from peerage.privacy import Noise, epsilon
from peerage.records.rows import RunRecord, read_metrics

pytestmark = pytest.mark.slow  # every peer is a process

SETTINGS = "--nodes 3 --topology ring --partition iid --model logistic --epochs 1 --rounds 3"
PATIENT = "--start-timeout 600 --message-timeout 300"  # all are there, if slow at times


def peers_of(process: psutil.Process) -> list[psutil.Process]:
    """The peers that a process has started; another child of it forks them."""
    return [each for each in process.children(recursive=True) if each.name().startswith("node-")]


def test_real_processes_end_with_the_digest_of_a_simulation(tmp_path):
    done = peerage(f"up {SETTINGS} {PATIENT} --json --out", tmp_path / "up")
    assert done.code == 0, done.err
    assert re.search(r"rounds \d+ to \d+; peers: 3 (starting|running|finished)", done.err)
    summary = json.loads(done.lines[-1])
    simulated = peerage(f"run {SETTINGS} --engine serial --json --out", tmp_path / "run")
    wanted = json.loads(simulated.lines[-1])
    same = ("digest", "accuracy", "accuracy_std", "loss", "bytes_sent", "rounds", "nodes", "label")
    assert {key: summary[key] for key in same} == pytest.approx({key: wanted[key] for key in same})
    assert summary["digest"] == wanted["digest"]
    assert summary["wire_bytes"] > summary["bytes_sent"]
    assert peers_of(psutil.Process()) == []
    record = pg.RunRecord.load(tmp_path / "up")
    assert record.status == "finished"
    assert record.rounds == 3
    assert (tmp_path / "up" / "report.html").exists()
    assert not list((tmp_path / "up").rglob("*.key"))  # keys are for the run, and go with it
    sums = {
        key: sum(peer[key] for peer in summary["peers"]) for key in ("bytes_sent", "wire_bytes")
    }
    assert sums == {key: summary[key] for key in sums}
    assert [(peer["state"], peer["rounds"]) for peer in summary["peers"]] == [("finished", 3)] * 3
    verified = peerage("verify", tmp_path / "up")
    assert verified.code == 0, verified.err
    assert verified.out.endswith(f"same numbers in every round, same digest {wanted['digest']}\n")


def test_a_peer_that_is_killed_and_started_again_finishes(tmp_path):
    line = (
        f"up --nodes 4 --topology complete --partition iid --rounds 30 --epochs 2 {PATIENT} "
        f"--algorithm {barriers.ALGORITHM} --kill 2@4 --restart 2@6 --json --out"
    )
    with barriers.barriers(tmp_path / "starts", {2: 4}, barrier=12):
        done = peerage(line, tmp_path / "up")
    assert done.code == 0, done.err
    summary = json.loads(done.lines[-1])
    assert [peer["starts"] for peer in summary["peers"]] == [1, 1, 2, 1]
    ends = [
        read_metrics(tmp_path / "up" / "peers" / f"node-{node}" / "metrics.jsonl")[-1]
        for node in range(4)
    ]
    assert [row["round"] for row in ends] == [30] * 4
    assert all(row["heard"] == [3, 3] for row in ends)  # it is one of them again
    rows = read_metrics(tmp_path / "up" / "peers" / "node-2" / "metrics.jsonl")
    assert summary["peers"][2]["bytes_sent"] == sum(row["bytes"] for row in rows)  # of both starts
    verdict = pg.verify(tmp_path / "up", watch=(calm := []).append)
    assert not verdict.same
    missed = min(set(range(31)) - {row["round"] for row in rows})
    assert verdict.difference == f"node 2 recorded nothing for round {missed}"
    assert summary["accuracy"] == pytest.approx(calm[-1]["accuracy"], abs=0.02)


# Endings


@contextmanager
def running_network(home: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A network in the middle of its rounds in `home/up`, its peers, and `home/tmp` for secrets."""
    (home / "tmp").mkdir()
    line = f"up {SETTINGS} {PATIENT} --nodes 2 --rounds 9999 --out"
    process = start(line, home / "up", cwd=home, environment={"TMPDIR": str(home / "tmp")})
    peers: list[psutil.Process] = []
    try:
        files = [home / "up" / "peers" / f"node-{i}" / "metrics.jsonl" for i in range(2)]
        until(
            lambda: (
                all(file.exists() and len(read_metrics(file)) > 2 for file in files)
                or process.poll() is not None
            ),
            "all have run two rounds",
        )
        peers = peers_of(psutil.Process(process.pid))
        assert len(peers) == 2
        assert list((home / "tmp").rglob("node-0.pem"))
        yield process, peers
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        for peer in peers:
            if peer.is_running():
                peer.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_network_that_is_ended_leaves_its_records_and_nothing_else(number, tmp_path):
    with running_network(tmp_path) as (process, peers):
        process.send_signal(number)
        out, err = process.communicate(timeout=TIMEOUT)
        assert gone(peers)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith("rounds ")]
    assert [line for line in lines if line.startswith("error")] == lines[-1:]
    found = re.fullmatch(
        r"error: interrupted in round (\d+); the records of the peers are in (.*)", lines[-1]
    )
    assert found
    assert found[2] == str(tmp_path / "up")
    assert not list((tmp_path / "tmp").iterdir())
    record = RunRecord.load(tmp_path / "up")
    assert record.status == "interrupted"
    assert 1 <= int(found[1]) <= record.rounds + 1  # when `up` looked last
    assert 2 <= record.rounds < 9999  # peers go on until they are told, and not to the end
    assert [row["nodes"] for row in record.network] == [2] * (record.rounds + 1)
    assert record.summary["digest"] is None
    assert [peer["state"] for peer in record.summary["peers"]] == ["stopped"] * 2
    assert "is interrupted, so it has no result" in error_line(peerage("verify", record.folder))
    assert peerage("report", record.folder).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_signals_do_not_interrupt_the_cleanup(number):
    """A terminal that closes sends the signal twice."""
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with interrupt_once():
            with pytest.raises(Interrupted, match=f"ended by signal {number.name}"):
                signal.raise_signal(number)
            signal.raise_signal(number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupt_once():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_peers_end_when_the_process_that_started_them_is_killed(tmp_path):
    with running_network(tmp_path) as (process, peers):
        process.kill()
        process.communicate()
        until(lambda: gone(peers), "the peers were gone")
    # Nobody could remove the temporary files. The keys were in memory: no file has one.
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert "node-0.pem" in {path.name for path in files}
    assert not [path for path in files if b"PRIVATE KEY" in path.read_bytes()]
    log = (tmp_path / "up" / "peers" / "node-1" / "log.txt").read_text()
    assert "Traceback" not in log
    assert "node-1 stopped in round" in log.splitlines()[-1]
    record = RunRecord.load(tmp_path / "up")
    assert (record.status, record.rounds) == ("running", 0)  # it had no time to say more


def test_a_peer_killed_without_a_schedule_is_a_failure(tmp_path):
    line = f"up {SETTINGS} {PATIENT} --rounds 100 --out"
    process = start(line, tmp_path / "up", cwd=tmp_path)
    try:
        file = tmp_path / "up" / "peers" / "node-1" / "metrics.jsonl"
        # Before the first round, the others would wait for it to come back and start with them.
        until(lambda: file.exists() and len(read_metrics(file)) > 1, "node 1 has run a round")
        peers = peers_of(psutil.Process(process.pid))
        next(peer for peer in peers if peer.name() == "node-1").kill()
        _, err = process.communicate(timeout=TIMEOUT)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == 1
    assert "error: node-1 was killed by signal 9 (SIGKILL), perhaps for lack of memory; " in err
    record = RunRecord.load(tmp_path / "up")
    assert record.status == "failed"
    assert record.summary["message"].startswith("node-1 was killed by signal 9")
    assert record.summary["digest"] is None
    assert [p["state"] for p in record.summary["peers"]] == ["finished", "failed", "finished"]
    assert record.rounds == 100  # the others went on
    assert [record.network[r]["nodes"] for r in (0, 100)] == [3, 2]


def test_a_network_that_diverges(tmp_path):
    line = "up --nodes 2 --topology ring --partition iid --rounds 3 --epochs 1 --lr 1e30"
    done = peerage(f"{line} {PATIENT} --out", tmp_path / "up")
    assert done.code == 2
    assert "became NaN or infinite in round 1" in done.err.splitlines()[-1]
    record = RunRecord.load(tmp_path / "up")
    assert (record.status, record.rounds) == ("diverged", 0)
    assert "lower --lr" in error_line(peerage("verify", tmp_path / "up"))


def test_the_failure_of_a_peer_is_named_when_the_last_one_waits_for_it(tmp_path):
    network = LocalNetwork(pg.Experiment(nodes=2, topology="ring"), tmp_path)
    commands = [["sh", "-c", f"echo error: parameters {DIVERGED} >&2; exit 2"], ["sleep", "600"]]
    network.watched = []
    for number, command in enumerate(commands):
        folder = tmp_path / f"node-{number}"
        folder.mkdir()
        with open(folder / "log.txt", "wb") as log:
            process = subprocess.Popen(command, stderr=log)
        peer = PeerProcess(number, PeerProgress(folder.name), folder, process)
        network.watched.append(peer)
    failed, waiting = network.watched
    try:
        failed.process.wait()  # it was not looked at since
        (waiting.folder / PAUSED).write_text('{"state": "waiting for others"}')
        with pytest.raises(Diverged, match="node-0 failed: parameters"):
            network._check_progress()
    finally:
        waiting.kill()


def test_a_finished_peer_that_is_started_again_keeps_its_summary(tmp_path):
    settings = pg.Experiment(nodes=2, topology="ring", partition="iid", model="logistic", rounds=2)
    with Machines(tmp_path, settings, Timeouts(start=300.0, message=300.0, idle=2.0)) as machines:
        machines.start(0)
        machines.start(1)
        assert machines.wait() == [0, 0]
        file = machines.folders[0] / "summary.json"
        before = json.loads(file.read_text())
        file.unlink()
        machines.start(0)
        assert machines.wait() == [0, 0]
    assert before["rounds"] == 2
    assert before["wire_bytes"] > before["bytes_sent"] > 0
    assert json.loads(file.read_text()) == before


def test_a_network_states_its_epsilon_and_stops_at_a_limit(tmp_path):
    """Three messages would cost 8.4 and two cost 6.6, so all peers stop before the third."""
    flags = "--noise 2 --clip 1 --stop-at-epsilon 7"
    done = peerage(f"up {SETTINGS} {PATIENT} {flags} --json --out", tmp_path / "up")
    assert done.code == 0, done.err
    noise = Noise(sigma=2.0, clip=1.0)
    one, two, three = (epsilon(noise, count) for count in (1, 2, 3))
    plan = f"differential privacy: epsilon {three:.4g} at delta 1e-05 after 3 planned rounds"
    assert done.err.startswith(plan)
    summary = json.loads(done.lines[-1])
    assert (summary["status"], summary["rounds"]) == ("finished", 2)
    assert summary["privacy"]["messages"] == [2, 2, 2]
    assert summary["privacy"]["epsilon"] == two
    assert (
        summary["message"] == "node-0, node-1, node-2 stopped after round 2 at the limit of epsilon"
    )
    assert {peer["state"].split(",")[0] for peer in summary["peers"]} == {
        f"stopped: epsilon {two:.4g} at delta 1e-05"
    }
    rows = pg.RunRecord.load(tmp_path / "up").network
    assert [row["epsilon"] for row in rows] == [0.0, one, two]


# Input that cannot be


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kill 9@2", "kill names node 9; the nodes are 0 to 2"),
        ("--restart 1@2", "node 1 cannot be restarted in round 2 before it is killed"),
        ("--kill 1@3 --restart 1@2", "node 1 cannot be restarted in round 2 before it is killed"),
        ("--kill 2@500", "kill names round 500; the rounds are 1 to 3"),
        ("--kill 1@2 --restart 1@4", "restart names round 4; the rounds are 1 to 3"),
        ("--kill oops", "kill 'oops' is not of the form NODE@ROUND, such as 7@10"),
        ("--message-timeout 0", "message must be a number of seconds above 0"),
        ("--until accuracy=0.9", "until requires the mean over all nodes"),
        ("--stop-at-epsilon 3", "--stop-at-epsilon 3 requires differential privacy; set --noise"),
        ("--noise 1 --clip 1 --stop-at-epsilon 0", "--stop-at-epsilon must be a number above 0"),
        ("--wire fp8", "wire must be one of fp32, bf16, int8; got 'fp8'"),
        ("--quorum 4", "quorum must be majority or 1 to 3, the number of peers, got 4"),
        ("--quorum most", "quorum must be majority or 1 to 3, the number of peers, got 'most'"),
        ("--spread", "spread requires the models of all nodes, which no peer has"),
    ],
)
def test_up_reports_errors_before_it_starts_anything(flags, message, tmp_path):
    done = peerage(f"up {SETTINGS} {flags} --out", tmp_path / "up")
    assert message in error_line(done)
    assert not (tmp_path / "up").exists()


def test_up_leaves_the_folder_of_another_run_alone(tmp_path):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "experiment.toml").write_text("of another run")
    done = peerage(f"up {SETTINGS} --out", tmp_path / "up")
    assert "already holds a run" in error_line(done)
    assert (tmp_path / "up" / "experiment.toml").read_text() == "of another run"


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """A network file of two peers, with an experiment and certificates."""
    experiment = pg.Experiment(nodes=2, topology="ring", partition="iid", rounds=1)
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    members = tuple(Member(f"node-{i}", f"127.0.0.1:{p}") for i, p in enumerate(free_ports(2)))
    network = Network("demo", experiment, members, Timeouts(start=0.2, message=1.0))
    (tmp_path / "network.toml").write_text(network.to_toml("experiment.toml"))
    authority = Authority.create(tmp_path / "certs", "demo")
    authority.issue("node-0")
    authority.issue("node-1")
    return tmp_path


def node(home: Path, identity: str = "node-0") -> str:
    line = f"node --network {home / 'network.toml'} --identity {identity}"
    return error_line(peerage(f"{line} --certs {home / 'certs'} --out {home / 'out'}"))


def test_a_network_file_keeps_its_values_when_it_is_read(ready):
    network = Network.load(ready / "network.toml")
    assert network.to_toml("experiment.toml") == (ready / "network.toml").read_text()
    assert network.timeouts == Timeouts(start=0.2, message=1.0)


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
        ('name = "node-1"', 'name = "Node 1"', "must consist of lower-case letters"),
        (r'address = ".*"', 'address = "nowhere"', "is not HOST:PORT"),
        ("run = ", "ran = ", "has no key 'ran'; did you mean 'run'?"),
        (r"\[\[peer\]\]\nname = \"node-1\"\naddress = .*\n", "", "lists 1 peers"),
        ('wire = "fp32"', 'wire = "fp8"', "wire must be one of fp32, bf16, int8"),
        ("message = 1.0", "message = -1.0", "message must be a number of seconds above 0"),
        ('quorum = "majority"', "quorum = 3", "quorum must be majority or 1 to 2, the number"),
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
    from peerage.cli import installed

    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    assert 'pip install "peerage[net]"' in node(ready)
