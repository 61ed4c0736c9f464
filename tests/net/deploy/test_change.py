"""The next revision of a network file: the command, and processes that take it up."""

import errno
import hashlib
import json
import os
from pathlib import Path

import pytest
from support.command_line import error_line, peerage
from support.machines import Machines

from peerage import Experiment
from peerage.errors import DiskError
from peerage.net.deploy import change, new_site
from peerage.net.deploy.change import Change, change_network
from peerage.net.deploy.up import free_ports
from peerage.net.peer.network import Member, Network, Timeouts
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity
from peerage.net.trust.signature import check_signature


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """A network file of four peers on a ring, with its experiment and authority."""
    experiment = Experiment(nodes=4, topology="ring", model="logistic", rounds=5)
    members = tuple(Member(f"node-{i}", f"10.0.0.{i}:7400") for i in range(4))
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    path = tmp_path / "network.toml"
    path.write_text(Network("test", experiment, members).to_toml("experiment.toml"))
    Authority.create(tmp_path / "certs", "tests")
    return path


def test_the_command_writes_and_signs_the_next_revision(network: Path) -> None:
    certs = network.parent / "certs"
    flags = "--add node-4=10.0.0.4:7400 --remove node-1 --rounds 9 --topology complete"
    done = peerage(f"network change {network} --from-round 6 {flags} --certs {certs} --json")
    facts = json.loads(done.out)
    second = Path(facts["network"])
    assert second == network.with_name("network-2.toml")
    assert check_signature(second, certs)
    new = Network.load(second)
    assert (new.revision, new.from_round) == (2, 6)
    assert [member.name for member in new.members] == [f"node-{i}" for i in range(5)]
    experiment = new.experiment
    assert (experiment.nodes, experiment.rounds) == (5, 9)
    assert (experiment.faults.join, experiment.faults.leave) == ("4@6", "1@6")

    third = peerage(f"network change {second} --from-round 8 --remove node-0").out
    assert "network-3.toml as network.toml and its signature as network.sig" in third
    assert "peerage certs sign-network" in third
    assert Network.load(network.with_name("network-3.toml")).experiment.faults.leave == "0@8, 1@6"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--from-round 2", "nothing changes; give --add, --remove, --rounds or --topology"),
        ("--from-round 9 --remove node-1", "from_round must lie in 1 to 5"),
        ("--from-round 2 --rounds 4", "rounds can only be raised"),
        ("--from-round 2 --remove node-7", "the network has no peer 'node-7'"),
        ("--from-round 2 --add node-4", "--add 'node-4' is not of the form NAME=HOST:PORT"),
        ("--from-round 2 --add node-4=h:1", "--add needs --certs, the folder of the authority"),
        ("--from-round 2 --add node-1=h:1 --certs CERTS", "two peers have the name 'node-1'"),
        ("--from-round 2 --add node-4=10.0.0.1:7400 --certs CERTS", "two peers have the address"),
        ("--from-round 2 --remove node-1 --keys-at-site", "--keys-at-site is about new peers"),
        (
            "--from-round 2 --remove node-0 --remove node-1 --remove node-2 --remove node-3",
            "no peer of the network would stay",
        ),
        ("--from-round 2 --rounds 6 --out other/network.toml", "must be in"),
    ],
)
def test_wrong_changes_are_named_and_nothing_is_written(
    flags: str, words: str, network: Path
) -> None:
    before = sorted(network.parent.rglob("*"))
    flags = flags.replace("CERTS", str(network.parent / "certs"))
    assert words in error_line(peerage(f"network change {network} {flags}"))
    assert sorted(network.parent.rglob("*")) == before


def test_peers_that_would_be_cut_off_are_named(network: Path) -> None:
    with pytest.warns(match="node-2 would have no path to node-0; choose another graph"):
        change_network(network, Change(2, remove=["node-1", "node-3"]))


# The folder of a new peer


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network of three peers with own code and an initial model, as `export` writes it."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "from dataclasses import dataclass\nimport peerage as pg\n"
        "@dataclass(frozen=True)\nclass Mine(pg.DecAvg):\n    pass\n"
    )
    Path("hosts.txt").write_text("10.0.0.0\n10.0.0.1\n10.0.0.2\n")
    peerage("run --nodes 2 --rounds 1 --model logistic --partition iid --out first")
    peerage("model first --node 0 --out start.safetensors")
    peerage(
        "export --algorithm mine.py:Mine --nodes 3 --rounds 9 --model logistic --topology complete "
        "--init file:start.safetensors --hosts hosts.txt --out deploy"
    )
    return Path("deploy/node-0/network.toml")


def files_of(folder: Path, name: str) -> set[str]:
    return {str(p.relative_to(folder)).replace(name, "NAME") for p in folder.rglob("*")}


ADD = "--from-round 5 --add node-3=10.0.0.3:7400 --certs deploy/authority --allow-code {}"


@pytest.mark.slow
@pytest.mark.parametrize("keys_at_site", [False, True])
def test_a_new_peer_gets_the_same_files_as_the_first_ones(
    exported: Path, keys_at_site: bool
) -> None:
    sha256 = hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()
    flag = " --keys-at-site" * keys_at_site
    done = peerage(f"network change {exported} {ADD.format(sha256)}{flag}")
    assert "move deploy/node-3 to its machine, and follow the README.txt in it" in done.out
    site, first = Path("deploy/node-3"), Path("deploy/node-1")
    keys = {"certs/NAME.key", "certs/NAME.pem"} if keys_at_site else set()
    wanted = files_of(first, "node-1") - keys - {"experiment.toml"} | {"experiment-2.toml"}
    assert files_of(site, "node-3") == wanted
    assert site.stat().st_mode & 0o077 == 0
    assert check_signature(site / "network.toml", site / "certs")
    for name in ("code/mine.py", "init.safetensors", "certs/authority.pem"):
        assert (site / name).read_bytes() == (first / name).read_bytes()
    assert (site / "network.toml").read_bytes() == exported.with_name("network-2.toml").read_bytes()
    new = Network.load(site / "network.toml", {sha256})
    assert new.members[3] == Member("node-3", "10.0.0.3:7400")
    readme = (site / "README.txt").read_text()
    assert "node-3, one peer of the network" in readme
    assert "The peer joins the others in round 5, or later." in readme
    assert f"--allow-code {sha256}" in readme
    assert ("certs request node-3 --folder certs --hosts 10.0.0.3" in readme) == keys_at_site
    if not keys_at_site:
        assert Identity.load(site / "certs", "node-3").name == "node-3"


@pytest.mark.slow
def test_a_change_that_fails_leaves_nothing(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is written last: the folder, the network file or the signature."""
    sha256 = hashlib.sha256(Path("mine.py").read_bytes()).hexdigest()
    before = sorted(Path("deploy").rglob("*"))
    for module, name in ((change, "sign_network"), (new_site, "sign_network"), (os, "rename")):
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(module, name, fail)
            with pytest.raises((OSError, DiskError)):
                change_network(
                    exported,
                    Change(5, [Member("node-3", "10.0.0.3:7400")]),
                    certs=Path("deploy/authority"),
                    allowed={sha256},
                )
        assert sorted(Path("deploy").rglob("*")) == before
    Path("deploy/node-3").mkdir()
    assert "deploy/node-3 exists" in error_line(
        peerage(f"network change {exported} {ADD.format(sha256)}")
    )


def revise(machines: Machines, first: int, flags: str) -> None:
    """Change the network from this round on, and give the running peers the new files."""
    home = machines.home
    network = home / "network.toml"
    peerage(f"network change {network} --from-round {first} {flags} --certs {home / 'certs'}")
    (home / "network-2.sig").rename(home / "network.sig")
    (home / "network-2.toml").rename(network)


def start_new(machines: Machines, me: int) -> None:
    """Start a new peer with the files in its own folder."""
    site = machines.home / f"node-{me}"
    machines.folders.append(site / "run")
    own = ["--network", str(site / "network.toml"), "--certs", str(site / "certs")]
    machines.start(me, more=own)


@pytest.mark.slow
def test_processes_take_up_a_revision_while_they_run(tmp_path: Path) -> None:
    """A fourth peer joins, one leaves, and the network ends later."""
    experiment = Experiment(
        nodes=3, topology="complete", partition="iid", model="logistic", rounds=100_000
    )
    timeouts = Timeouts(start=600, message=300, idle=30)
    with Machines(tmp_path, experiment, timeouts) as machines:
        for me in range(3):
            machines.start(me)
        machines.until(lambda: min(map(machines.round, range(3))) >= 3)
        first = max(map(machines.round, range(3))) + 60
        [port] = free_ports(1)
        revise(machines, first, f"--add node-3=127.0.0.1:{port} --remove node-1 --rounds 100001")
        start_new(machines, 3)
        left = machines.processes.pop(1)
        assert left.wait(300) == 0
        machines.until(lambda: min(map(machines.round, (0, 2, 3))) >= first + 20)
    summary = json.loads((tmp_path / "node-1" / "summary.json").read_text())
    assert (summary["state"], summary["rounds"]) == ("finished", first - 1)
    assert "continuing with the model of node-" in machines.log(3)
    for me in (0, 2, 3):
        assert f"{first + 20} of 100001" in machines.log(me)
        rows = [row for row in machines.rows(me) if row["round"] > first]
        assert all(row["heard"][1] == 2 for row in rows)  # nobody waits for node-1
        assert [2, 2] in [row["heard"] for row in rows]


@pytest.mark.slow
def test_peers_join_while_others_dial_out(tmp_path: Path) -> None:
    """Node 2 opens a tunnel to the new node 3, and the new node 4 dials out as well."""
    experiment = Experiment(
        nodes=3, topology="ring", partition="iid", model="logistic", rounds=100_000
    )
    timeouts = Timeouts(start=600, message=300, idle=30)
    with Machines(tmp_path, experiment, timeouts, dials_out={2}) as machines:
        for me in range(3):
            machines.start(me)
        machines.until(lambda: min(map(machines.round, range(3))) >= 3)
        first = max(map(machines.round, range(3))) + 60
        [port] = free_ports(1)
        revise(machines, first, f"--add node-3=127.0.0.1:{port} --add node-4=dials-out")
        for me in (3, 4):
            start_new(machines, me)
        machines.until(lambda: min(map(machines.round, range(5))) >= first + 20)
    for me in range(5):
        heard = [row["heard"] for row in machines.rows(me) if row["round"] > first]
        assert [2, 2] in heard


@pytest.mark.slow
def test_a_client_joins_a_running_hub(tmp_path: Path) -> None:
    """The hub keeps its number, and its model goes on."""
    experiment = Experiment(
        nodes=2, algorithm="fedavg", partition="iid", model="logistic", rounds=100_000
    )
    timeouts = Timeouts(start=600, message=300, idle=30)
    with Machines(tmp_path, experiment, timeouts) as machines:
        for me in range(3):
            machines.start(me)
        machines.until(lambda: min(map(machines.round, range(3))) >= 3)
        first = max(map(machines.round, range(3))) + 60
        [port] = free_ports(1)
        revise(machines, first, f"--add node-3=127.0.0.1:{port}")
        start_new(machines, 3)
        machines.until(lambda: min(map(machines.round, range(4))) >= first + 20)
    new = Network.load(tmp_path / "network.toml").experiment
    assert (new.nodes, new.hub, new.faults.join) == (3, 2, f"3@{first}")
    heard = {me: [r["heard"] for r in machines.rows(me) if r["round"] > first] for me in range(4)}
    assert [3, 3] in heard[2]
    assert [1, 1] in heard[3]
