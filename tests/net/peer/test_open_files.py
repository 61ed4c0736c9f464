"""Too many open files are passing trouble: a peer waits, and does not give up its disk."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.machines import Machines
from support.networking import run_peers

import peerage as pg
from peerage.algorithms.decavg import DecAvg
from peerage.errors import DiskError, TooManyOpenFiles
from peerage.files import disk_errors, write_bytes
from peerage.net.peer import node, peer
from peerage.net.peer.network import Timeouts
from peerage.records import checkpoint
from peerage.testing import toy


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_too_many_open_files_are_no_disk_error(number, tmp_path):
    wanted = pytest.raises(TooManyOpenFiles, match="raise the limit")
    with wanted as caught, disk_errors(tmp_path / "file"):
        raise OSError(number, os.strerror(number))
    assert not isinstance(caught.value, DiskError)
    assert caught.value.exit_code == 1  # systemd starts the peer again


def test_a_file_is_written_atomically_when_files_run_out(tmp_path):
    (tmp_path / "file").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        with pytest.raises(TooManyOpenFiles, match="Too many open files"):
            write_bytes(tmp_path / "file", b"new")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.filterwarnings("ignore::peerage.errors.PeerageWarning")  # the noise is weak
def test_peers_wait_while_too_many_files_are_open_and_lose_no_round(tmp_path, monkeypatch, caplog):
    experiment = toy(DecAvg(), rounds=3, noise={"sigma": 0.01, "clip": 1.0})
    wanted = [p.shard.members[p.me].node.params for p in run_peers(experiment)]
    failures = dict.fromkeys(("checkpoint", "released"), 4)

    def flaky(what: str, write: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if failures[what]:
                failures[what] -= 1
                with disk_errors(Path(what)):
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return write(*arguments, **options)

        return call

    monkeypatch.setattr(peer, "WRITE_DELAY", 0.01)
    monkeypatch.setattr(checkpoint, "save", flaky("checkpoint", checkpoint.save))
    recorder = peer.PeerRecorder
    monkeypatch.setattr(
        recorder, "remember_releases", flaky("released", recorder.remember_releases)
    )
    peers = run_peers(experiment, tmp_path)
    assert failures == {"checkpoint": 0, "released": 0}
    assert [one.finished for one in peers] == [3] * len(peers)
    assert not any(one.counters["poisoned round"] for one in peers)
    for one, params in zip(peers, wanted, strict=True):
        assert torch.equal(one.shard.members[one.me].node.params, params)
        saved = checkpoint.load(tmp_path / str(one.me))
        assert saved is not None
        assert saved.round == 3
    assert "Too many open files; raise the limit" in caplog.text


def test_the_soft_limit_becomes_the_hard_one():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 200), limits[1]))
        node.raise_open_files_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit (util-linux) is not installed")
def test_a_real_peer_raises_its_limit_logs_to_a_file_and_says_that_it_is_healthy(tmp_path):
    experiment = pg.Experiment(
        nodes=2, topology="ring", partition="iid", model="logistic", rounds=1
    )
    log = tmp_path / "logs" / "node-0.txt"
    command = [
        *(sys.executable, "-m", "peerage", "node", "--network", tmp_path / "network.toml"),
        *("--identity", "node-0", "--certs", tmp_path / "certs", "--check-health"),
    ]
    with Machines(tmp_path, experiment, Timeouts(start=3600, message=60, idle=60)) as network:
        refused = subprocess.run(command, capture_output=True, text=True)
        assert refused.returncode == 1
        assert refused.stderr.startswith("error: node-0 does not answer at 127.0.0.1:")
        limit = ["prlimit", "--nofile=300:5000"]
        network.start(0, within=limit, more=["--log-file", str(log)])
        network.until(lambda: log.exists() and "waiting for node-1" in log.read_text())
        healthy = subprocess.run(command, capture_output=True, text=True)
        assert (healthy.returncode, healthy.stdout, healthy.stderr) == (0, "", "")
        limits = Path(f"/proc/{network.processes[0].pid}/limits").read_text()
        [row] = [line for line in limits.splitlines() if line.startswith("Max open files")]
        assert row.split()[3:5] == ["5000", "5000"]
        assert network.log(0) == ""  # standard error
