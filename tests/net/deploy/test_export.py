"""Folders for several machines: which peer is where, what is inside, and that they work there."""

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import error_line, peerage
from support.processes import TIMEOUT

import peerage as pg
from peerage import specs
from peerage.engine.prepare import prepare
from peerage.errors import DiskError, InputError, Interrupted, PeerageWarning
from peerage.models import MODELS, default_model
from peerage.net.deploy import export as exporting
from peerage.net.deploy.collect import final_models, report_of
from peerage.net.deploy.export import export
from peerage.net.deploy.hosts import assign_hosts, parse_host, read_hosts
from peerage.net.deploy.process import PeerProcess, PeerProgress
from peerage.net.deploy.up import free_ports
from peerage.net.peer.network import Network, Timeouts
from peerage.net.trust.certs import Authority
from peerage.net.trust.identity import Identity
from peerage.net.trust.signature import sign_network
from peerage.net.wire.address import Address
from peerage.privacy import Noise, epsilon
from peerage.records.rows import RunRecord, read_metrics
from peerage.runs.facts import RunFacts
from peerage.runs.summary import digest, group_rows

SETTINGS = "--nodes 3 --topology ring --partition iid --model logistic --epochs 1 --rounds 2"
WITH_HUB = "--algorithm fedavg --nodes 2 --partition iid --model logistic --epochs 1 --rounds 2"
THREE = "10.0.0.10\n10.0.0.11\n10.0.0.12\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder, with hosts for three peers."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text(THREE)
    return tmp_path


def experiment(nodes: int = 3, algorithm: str = "decavg") -> pg.Experiment:
    hub = {} if algorithm == "fedavg" else {"topology": "complete"}
    return pg.Experiment(nodes=nodes, algorithm=algorithm, partition="iid", rounds=1, **hub)


def files(folder: Path) -> dict[str, str]:
    """All files below a folder with their modes."""
    return {
        str(path.relative_to(folder)): f"{stat.S_IMODE(path.stat().st_mode):o}"
        for path in folder.rglob("*")
        if path.is_file()
    }


# Who is where


@pytest.mark.parametrize(
    ("text", "name", "port"),
    [
        ("10.0.0.3", "10.0.0.3", 7400),
        ("10.0.0.3:81", "10.0.0.3", 81),
        ("Alpha.Example.org", "alpha.example.org", 7400),
        ("alpha:65535", "alpha", 65535),
        ("2001:DB8::7", "2001:db8::7", 7400),
        ("[2001:db8:0::7]", "2001:db8::7", 7400),
        ("[::1]:7500", "::1", 7500),
    ],
)
def test_hosts_are_names_or_addresses_with_or_without_a_port(text, name, port):
    host = parse_host(text)
    assert host == Address(name, port)
    assert parse_host(str(host), 1) == host  # what is written can be read


def test_hosts_are_assigned_in_turn_with_increasing_ports():
    hosts = [Address("a", 7400), Address("b", 9000)]
    assigned = [str(host) for host in assign_hosts(hosts, experiment(5))]
    assert assigned == ["a:7400", "b:9000", "a:7401", "b:9001", "a:7402"]


def test_a_host_in_two_lines_never_gives_a_port_twice():
    hosts = [Address("a", 7400), Address("a", 7401)]
    assert [host.port for host in assign_hosts(hosts, experiment(4))] == [7400, 7401, 7402, 7403]


ADDRESSES = st.builds(Address, st.sampled_from("abc"), st.integers(1, 9))


@settings(deadline=None, max_examples=50)
@given(st.lists(ADDRESSES, min_size=1, unique=True), st.integers(1, 40))
def test_every_peer_gets_an_address_of_its_own_on_the_host_whose_turn_it_is(hosts, nodes):
    one = experiment().model_copy(update={"nodes": nodes})
    unused = hosts[nodes:]
    hosts = hosts[:nodes]
    assigned = assign_hosts(hosts, one)
    assert len(set(assigned)) == nodes
    for number, host in enumerate(assigned):
        wanted = hosts[number % len(hosts)]
        assert (host.host, host.port >= wanted.port) == (wanted.host, True)
    assert assigned[: len(hosts)] == hosts
    if unused:
        with pytest.warns(PeerageWarning, match="will not be used"):
            assert assign_hosts([*hosts, *unused], one) == assigned


def test_a_hub_is_one_peer_more():
    hosts = [*(Address(name, 7400) for name in "abcd"), Address("e", 1)]
    with pytest.warns(PeerageWarning) as told:
        assert assign_hosts(hosts, experiment(3, "fedavg")) == hosts[:4]
    assert str(told[0].message) == (
        "5 hosts for 4 peers, the last of them the hub: e:1 will not be used"
    )


def test_peers_that_dial_out_need_no_host(place):
    (place / "hosts.txt").write_text("dials-out # hospital A\ndials-out\n10.0.0.10\n")
    hosts = read_hosts(place / "hosts.txt")
    assert hosts == [None, None, Address("10.0.0.10", 7400)]
    made = export(experiment(2, "fedavg"), place / "hosts.txt", place / "deploy")
    assert made.network.dialling == {0, 1}
    assert "for a peer that dials out" in str(made)
    readme = (place / "deploy/node-0/README.txt").read_text()
    assert "node-0 opens no port" in readme
    assert "    10.0.0.10:7400\n" in readme
    assert "--publish" not in readme
    assert "EXPOSE" not in (place / "deploy/node-0/Containerfile").read_text()
    with pytest.raises(InputError, match="node-0 and node-1 are neighbours, but both dial out"):
        export(experiment(3), place / "hosts.txt", place / "other")
    assert not (place / "other").exists()
    with pytest.raises(InputError, match="write dials-out alone"):
        parse_host("10.0.0.3 dials-out")


def test_ports_come_to_an_end():
    with pytest.raises(InputError, match="3 peers: node-2 would get port 65536 of a, and ports"):
        assign_hosts([Address("a", 65534)], experiment(3))
    with pytest.raises(InputError, match="the last of them the hub: node-3 would get port 65536"):
        assign_hosts([Address("a", 65533)], experiment(3, "fedavg"))


def test_comments_and_blank_lines_are_for_people(tmp_path):
    path = tmp_path / "hosts.txt"
    path.write_text("# the lab\n\n  10.0.0.3   # by the window\nbeta:7500#x\n   \n")
    assert read_hosts(path, 9) == [Address("10.0.0.3", 9), Address("beta", 7500)]


# What is inside


def test_a_folder_for_every_peer_and_one_for_the_authority(place):
    done = peerage(f"export {SETTINGS} --hosts hosts.txt --out deploy --json")
    assert (done.code, done.err) == (0, "")
    facts = json.loads(done.lines[-1])
    assert facts["authority"] == "deploy/authority"
    assert facts["peers"] == [
        {
            "name": f"node-{i}",
            "address": f"10.0.0.1{i}:7400",
            "folder": f"deploy/node-{i}",
            "hub": False,
        }
        for i in range(3)
    ]
    for i in range(3):
        assert files(place / f"deploy/node-{i}") == {
            "README.txt": "644",
            "network.toml": "644",
            "network.sig": "644",
            "experiment.toml": "644",
            f"peerage-node-{i}.service": "644",
            "site.env": "644",
            "Containerfile": "644",
            f"certs/node-{i}.key": "600",
            f"certs/node-{i}.pem": "644",
            "certs/authority.pem": "644",
            "certs/revoked.pem": "644",
            "certs/require-signature": "644",
        }
    assert sorted(os.listdir("deploy")) == ["authority", "node-0", "node-1", "node-2"]
    assert list(Path().rglob("authority.key")) == [Path("deploy/authority/authority.key")]
    assert stat.S_IMODE(Path("deploy").stat().st_mode) == 0o700


def test_the_files_hold_the_requested_settings(place):
    written = export(experiment(), Path("hosts.txt"), Path("deploy"))
    for i in range(3):
        folder = Path(f"deploy/node-{i}")
        assert Network.load(folder / "network.toml") == written.network
        identity = Identity.load(folder / "certs", f"node-{i}")
        certificate = x509.load_pem_x509_certificate(identity.certificate.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert str(names.get_values_for_type(x509.IPAddress)[0]) == f"10.0.0.1{i}"
    asked = experiment().model_copy(update={"model": (MODELS["digits-mlp"](),)})
    assert written.network.experiment == asked
    assert written.network.run != export(experiment(), Path("hosts.txt"), Path("two")).network.run


def test_the_wire_format_is_written_and_the_bytes_of_messages_are_stated(place):
    """Logistic regression on 64 pixels and 10 classes has 650 parameters, 3 blocks."""
    line = f"export {SETTINGS} --algorithm decavg"
    done = peerage(f"{line} --wire int8 --pack --out one")
    assert done.code == 0, done.err
    assert done.lines[3:5] == [
        "a message of logistic takes at most 662 B with int8, 2.60 kB with fp32, 1.30 kB with bf16",
        "one message on each of the 6 links, as most algorithms send per round, takes 3.97 kB",
    ]
    network = Network.load(Path("one/node-1/network.toml"))
    assert (network.wire, network.pack) == ("int8", True)
    facts = json.loads(peerage(f"{line} --out two --json").lines[-1])
    assert (facts["wire"], facts["message_bytes"]) == ("fp32", {"logistic": 2600})
    assert facts["round_bytes"] == 6 * 2600
    network = Network.load(Path("two/node-1/network.toml"))
    assert (network.wire, network.pack) == ("fp32", False)


def test_the_last_peer_of_four_is_the_hub(place):
    done = peerage("export --algorithm fedavg --nodes 3 --out deploy")
    assert done.code == 0
    assert done.lines[3] == "deploy/node-3 for 10.0.0.10:7401, the hub"
    titles = [Path(f"deploy/node-{i}/README.txt").read_text().split(" of ")[0] for i in range(4)]
    assert titles == [*(f"node-{i}, one peer" for i in range(3)), "node-3, the hub"]


@pytest.mark.slow
def test_the_planned_epsilon_is_stated_and_its_limit_is_in_the_commands(place):
    line = "export --algorithm fedavg --nodes 2 --rounds 3 --noise 2 --clip 1 --stop-at-epsilon 9"
    done = peerage(f"{line} --out deploy")
    assert done.code == 0, done.err
    value = epsilon(Noise(sigma=2.0, clip=1.0), 3)
    plan = f"differential privacy: epsilon {value:.4g} at delta 1e-05 after 3 planned rounds"
    assert done.lines[-1].startswith(plan)
    for i, hub in enumerate((False, False, True)):
        readme = Path(f"deploy/node-{i}/README.txt").read_text()
        assert "peerage[net,privacy]" in readme
        assert (plan in " ".join(readme.split())) is not hub  # a hub adds no noise
        unit = Path(f"deploy/node-{i}/peerage-node-{i}.service").read_text()
        for text in (readme, unit):
            assert ("--out run --stop-at-epsilon 9" in text) is not hub
    facts = json.loads(peerage(f"{line} --out again --json").lines[-1])
    assert facts["privacy"] == {"epsilon": value, "delta": 1e-5}
    plain = peerage(f"export {SETTINGS} --out plain")
    assert "epsilon" not in plain.out + Path("plain/node-0/README.txt").read_text()
    assert "peerage[net]" in Path("plain/node-0/README.txt").read_text()


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("digits", "uses digits, which is built in"),
        ("mnist:train=2000", "PEERAGE_DATA=data venv/bin/python -m peerage data get mnist\n"),
        ("npz:path=all.npz", "uses npz:path=all.npz, which must exist"),
    ],
)
def test_the_readme_says_where_data_come_from(dataset, said, place):
    assert peerage(f"export --nodes 3 --topology ring --dataset {dataset}").code == 0
    text = Path("deploy/node-0/README.txt").read_text()
    assert said in text
    assert "--data npz:path=data/mine.npz" in text


@pytest.mark.parametrize(
    ("dataset", "model"),
    [
        ("digits", "digits-mlp"),
        ("mnist", "mnist-cnn"),
        ("fashion-mnist:train=100", "fashion-cnn"),
        ("cifar10", "cifar-cnn"),
        ("cifar10:grey=true,side=28", "cifar-cnn"),
        ("femnist", "leaf-cnn"),
        ("so2sat", "gain-cnn"),
        ("imagenette", "gn-lenet"),
        ("flickr-mammals", "resnet8"),
        ("cifar100", "cifar-cnn"),
        ("caltech101", "preact-resnet"),
        ("oxford-pets", "preact-resnet"),
        ("stanford-cars:side=224", "preact-resnet"),
    ],
)
def test_the_default_model_is_written_without_loading_the_data(dataset, model, place, monkeypatch):
    monkeypatch.setenv("PEERAGE_DATA", str(place / "empty"))
    one = pg.Experiment(nodes=3, topology="ring", dataset=dataset)
    written = export(one, Path("hosts.txt"), Path("deploy")).network.experiment
    assert written.model == (MODELS[model](),)
    assert tomllib.loads(Path("deploy/node-0/experiment.toml").read_text())["model"] == {
        **specs.plain(MODELS[model]()),
        "name": model,
    }
    # The user's own data set has another default, which must not be used.
    assert default_model("mine", (4,)) == "mlp" != model


def test_the_model_for_unknown_data_is_chosen_where_they_are(place):
    one = pg.Experiment(nodes=3, topology="ring", dataset="npz:path=all.npz")
    exported = export(one, Path("hosts.txt"), Path("deploy"))
    assert exported.network.experiment.model == ()
    assert "the bytes of a message depend on the data" in str(exported)
    assert "message_bytes" not in exported.facts
    # The model needs larger images than the data set has, but the peers may have others.
    one = pg.Experiment(nodes=3, topology="ring", dataset="digits", model="mnist-cnn")
    assert export(one, Path("hosts.txt"), Path("two")).sizes is None


def test_a_model_that_was_asked_for_stays(place):
    one = pg.Experiment(nodes=3, topology="ring", model=["logistic", "mlp"])
    assert export(one, Path("hosts.txt"), Path("deploy")).network.experiment == one


def test_a_named_machine_listens_on_all_its_addresses(place):
    Path("hosts.txt").write_text("alpha:7500\nlocalhost\n10.0.0.3\n")
    export(experiment(), Path("hosts.txt"), Path("deploy"))
    commands = [analytic_gradients(Path(f"deploy/node-{i}")) for i in range(3)]
    assert ["0.0.0.0:7500" in command for command in commands] == [True, False, False]
    assert ["--bind" in command for command in commands] == [True, False, False]


def analytic_gradients(folder: Path) -> list[str]:
    """The arguments of the command in the README that starts the peer."""
    text = (folder / "README.txt").read_text()
    found = re.findall(r"^    (PEERAGE_DATA=.* node .*)$", text, re.MULTILINE)
    assert len(found) == 1
    return shlex.split(found[0])


# The unit


ODD_NAMES = [
    "plain",
    "with space",
    "R&D",
    "100%d",
    "it's",
    'say "x"',
    "a|b",
    "$HOME",
    "back\\slash",
    "-n",
    "new\nline",
    " ",
]


class Machine:
    """Where the README's commands for root are tried: with folders that stand for /var and /etc."""

    def __init__(self, home: Path) -> None:
        self.var, self.etc, self.called = home / "var", home / "etc", home / "called"
        self.etc.mkdir(parents=True)
        tools = home / "bin"
        tools.mkdir()
        record = f'#!/bin/sh\necho "$(basename "$0") $*" >> {self.called}\n'
        for tool, script in {
            "sudo": '#!/bin/sh\nexec "$@"\n',
            "id": "#!/bin/sh\nexit 1\n",  # there is no such user yet
            "useradd": record,
            "chown": record,
        }.items():
            (tools / tool).write_text(script)
            (tools / tool).chmod(0o755)
        self.path = f"{tools}:{os.environ['PATH']}"

    def install(self, folder: Path) -> Path:
        """Follow the README in a folder; the unit that is installed then."""
        text = (folder / "README.txt").read_text()
        block = text.partition("To let systemd start")[2].partition("systemd restarts the peer")[0]
        commands = [
            line
            for line in block.splitlines()
            if line.startswith(("    sudo", "    id")) and "systemctl" not in line
        ]
        assert len(commands) == 4
        script = "\n".join(commands).replace("/var/lib/", f"{self.var}/")
        script = script.replace("/etc/systemd/system/", f"{self.etc}/")
        environment = {**os.environ, "PATH": self.path, "PWD": str(folder)}
        subprocess.run(["sh", "-ec", script], cwd=folder, env=environment, check=True)
        [unit] = self.etc.iterdir()
        assert unit.read_bytes() == (self.var / "peerage/node-0" / unit.name).read_bytes()
        unit.write_text(unit.read_text().replace("/var/lib/", f"{self.var}/"))
        return unit


def service_of(unit: Path) -> dict[str, str]:
    """The settings of the section, of which only the system call filter occurs twice."""
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text().replace("SystemCallFilter=~", "SystemCallFilterNot=~"))
    return dict(parser["Service"])


@pytest.fixture
def unpacked(place: Path) -> Path:
    """The folder of node 0, with a program that prints its path and its arguments."""
    export(experiment(), Path("hosts.txt"), Path("deploy"))
    program = place / "deploy/node-0/venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\npwd -P\nprintf "%s\\n" "$PEERAGE_DATA" "$@"\n')
    program.chmod(0o755)
    return place / "deploy/node-0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_NAMES)
def test_the_unit_starts_the_peer_whatever_its_folder_is_called(name, unpacked, tmp_path):
    folder = tmp_path / "homes" / name
    folder.parent.mkdir()
    shutil.move(unpacked, folder)
    machine = Machine(tmp_path / "machine")
    service = service_of(machine.install(folder))
    home = machine.var / "peerage" / "node-0"
    assert not folder.exists()  # no second copy of the key is left
    assert machine.called.read_text().splitlines() == [
        "useradd --system --user-group --shell /usr/sbin/nologin peerage",
        f"chown -R peerage: {home}/",
    ]
    setting, _, value = service["Environment"].partition("=")
    *command, options = service["ExecStart"].split(" ")
    done = subprocess.run(
        command,
        cwd=service["WorkingDirectory"],
        env={setting: value},
        capture_output=True,
        text=True,
        check=True,
    )
    said = [str(home), f"{home}/data", "-m", "peerage", "node", "--network"]
    assert done.stdout.split("\n")[: len(said)] == said
    assert options == "$PEERAGE_NODE_OPTIONS"
    assert service["EnvironmentFile"] == f"-{home}/site.env"  # absent is allowed


@pytest.mark.slow
def test_a_folder_that_is_where_the_unit_expects_it_stays_as_it_is(unpacked, tmp_path):
    machine = Machine(tmp_path / "machine")
    folder = machine.var / "peerage" / "node-0"
    folder.parent.mkdir(parents=True)
    shutil.move(unpacked, folder)
    before = files(folder)
    with pytest.raises(subprocess.CalledProcessError):
        machine.install(folder)
    assert (files(folder), folder.is_symlink()) == (before, False)


def test_the_settings_of_the_unit(place):
    export(experiment(), Path("hosts.txt"), Path("deploy"))
    folder = place / "deploy/node-0"
    unit = folder / "peerage-node-0.service"
    service = service_of(unit)
    wanted = {
        "User": "peerage",
        "StateDirectory": "peerage/node-0",
        "StateDirectoryMode": "0700",
        "WorkingDirectory": "/var/lib/peerage/node-0",
        "Restart": "on-failure",
        "RestartSec": "10",
        "RestartSteps": "5",
        "RestartMaxDelaySec": "300",
        "RestartPreventExitStatus": str(InputError.exit_code),
        "SuccessExitStatus": str(Interrupted.exit_code),
        "TimeoutStopSec": "30",
        "LimitNOFILE": "65536",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "NoNewPrivileges": "yes",
        "UMask": "0077",
    }
    assert {key: service[key] for key in wanted} == wanted
    assert "StartLimitIntervalSec=600\nStartLimitBurst=20\n" in unit.read_text()
    # The command is that of the README, and site.env can add to it.
    started = analytic_gradients(folder)
    assert service["ExecStart"].split() == [
        f"{service['WorkingDirectory']}/{started[1]}",
        *started[2:],
        "$PEERAGE_NODE_OPTIONS",
    ]
    site = (folder / "site.env").read_text()
    assert all(line.startswith("#") for line in site.splitlines())  # nothing is set yet
    example = re.search("^# PEERAGE_NODE_OPTIONS=(.*)$", site, re.MULTILINE)
    assert example is not None
    assert set(flags_in(example[1].split())) <= node_flags()
    # Nothing else has a second meaning for systemd: no specifier, quote, variable or escape.
    texts = "".join(service.values()).replace("$PEERAGE_NODE_OPTIONS", "")
    assert not set("%\"'$\\;") & set(texts)


def flags_in(command: list[str]) -> list[str]:
    return [word for word in command if word.startswith("--")]


def node_flags() -> set[str]:
    """The flags that `peerage node` has."""
    return set(re.findall(r"--[a-z][a-z-]*", peerage("node --help").out))


def test_a_port_below_1024_needs_a_capability(place):
    Path("hosts.txt").write_text("10.0.0.10:443\n10.0.0.11:1024\n10.0.0.12\n")
    export(experiment(), Path("hosts.txt"), Path("deploy"))
    units = [service_of(Path(f"deploy/node-{i}/peerage-node-{i}.service")) for i in range(3)]
    for key in ("CapabilityBoundingSet", "AmbientCapabilities"):
        assert [unit[key] for unit in units] == ["CAP_NET_BIND_SERVICE", "", ""]


NEWER = ("RestartSteps", "RestartMaxDelaySec")  # keys that systemd knows since version 254


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_understands_the_unit_and_finds_it_well_protected(unpacked, tmp_path):
    unit = Machine(tmp_path / "machine").install(unpacked)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    about = [line for line in done.stderr.splitlines() if "peerage" in line]
    assert not [line for line in about if not any(key in line for key in NEWER)], done.stderr
    assert done.returncode == bool(about), done.stderr
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", unit],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    exposure = re.search(r"Overall exposure level for .*: ([0-9.]+)", rated.stdout)
    assert exposure is not None, rated.stderr
    assert float(exposure[1]) < 3


# The container


def test_the_container_file_uses_commands_and_paths_that_exist(place):
    """It cannot be built in a test, which has no network."""
    Path("hosts.txt").write_text("alpha:7500\n")
    export(experiment(1, "decavg"), Path("hosts.txt"), Path("deploy"))
    folder = place / "deploy/node-0"
    lines = (folder / "Containerfile").read_text().splitlines()
    steps = dict(line.split(" ", 1) for line in lines if not line.startswith("#"))
    assert steps["USER"] == "peerage"
    assert any(line.startswith("RUN useradd") and line.endswith(" peerage") for line in lines)
    assert 'RUN python -m pip install --no-cache-dir "peerage[net]"' in lines
    health = json.loads(steps["HEALTHCHECK"].partition("CMD ")[2])
    start = json.loads(steps["ENTRYPOINT"])
    assert "--check-health" in health
    for command in (health, start):
        assert command[:4] == ["python", "-m", "peerage", "node"]
        assert set(flags_in(command)) <= node_flags()
        options = dict(zip(command[4::2], command[5::2], strict=False))
        assert (folder / options["--network"]).is_file()
        assert (folder / "certs" / f"{options['--identity']}.key").is_file()
        assert options["--bind"] == f"0.0.0.0:{steps['EXPOSE']}" == "0.0.0.0:7500"
    root = steps["WORKDIR"]
    assert json.loads(steps["VOLUME"]) == [f"{root}/run", f"{root}/data"]
    assert steps["ENV"] == f"PEERAGE_DATA={root}/data"
    text = (folder / "README.txt").read_text()
    assert f"--volume .:{root}:ro" in text
    assert "--publish 7500:7500" in text


# An authority that is there already


def test_an_authority_may_be_used_again(place):
    authority = Authority.create(Path("certs"), "lab")
    done = peerage(f"export {SETTINGS} --certs certs --out one")
    assert (done.code, done.err) == (0, "")
    assert done.lines[-1].startswith("keep certs secret")
    assert sorted(os.listdir("one")) == ["node-0", "node-1", "node-2"]
    assert Identity.load(Path("one/node-2/certs"), "node-2").trust()
    issued = authority.issued()
    assert [(one.name, one.hosts) for one in issued] == [
        (f"node-{i}", (f"10.0.0.1{i}",)) for i in range(3)
    ]


@pytest.mark.filterwarnings("always::peerage.errors.PeerageWarning")
def test_a_name_that_was_used_before_can_be_used_again_with_a_note(place):
    authority = Authority.create(Path("certs"), "lab")
    authority.issue("node-1", into=Path("elsewhere"))
    authority.issue("guest", into=Path("elsewhere"))
    done = peerage(f"export {SETTINGS} --certs certs --out one")
    assert done.code == 0
    assert done.err.startswith("warning: the authority in certs has issued node-1 before, and")
    assert done.err.count("\n") == 1
    authority.revoke("node-1")
    authority.revoke("node-0")
    authority.revoke("node-2")
    assert peerage(f"export {SETTINGS} --certs certs --out two").err == ""


# All or nothing


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk without space for the network file of node 2."""
    write = exporting.write_bytes

    def fail(path: Path, content: bytes, remedy: str = "") -> None:
        if path.parent.name == "node-2" and path.name == "network.toml":
            raise DiskError(f"disk is full while writing {path}; free space and {remedy}")
        write(path, content, remedy)

    monkeypatch.setattr(exporting, "write_bytes", fail)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("empty_before", [False, True])
def test_what_cannot_be_written_completely_is_not_there_at_all(empty_before, place):
    Authority.create(Path("certs"), "lab")
    if empty_before:
        Path("deploy").mkdir(mode=0o755)
    for flags in ("", "--certs certs"):
        assert "disk is full" in error_line(peerage(f"export {SETTINGS} {flags}"))
        assert Path("deploy").exists() == empty_before
        assert not list(Path().glob("deploy/*"))
    assert Authority.load(Path("certs")).issued() == []


def test_a_move_that_fails_takes_the_others_back(place, monkeypatch):
    Authority.create(Path("certs"), "lab")
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if Path(target).name == "node-1":
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    assert "cannot write deploy/node-1" in error_line(peerage(f"export {SETTINGS} --certs certs"))
    assert not Path("deploy").exists()
    assert Authority.load(Path("certs")).issued() == []


def test_an_empty_current_folder_can_be_the_target(place):
    Path("here").mkdir(mode=0o755)
    os.chdir("here")
    assert peerage(f"export {SETTINGS} --hosts ../hosts.txt --out .").code == 0
    assert sorted(os.listdir()) == ["authority", "node-0", "node-1", "node-2"]


def test_a_folder_that_holds_something_is_left_alone(place):
    Path("deploy").mkdir()
    Path("deploy/mine").write_text("x")
    assert error_line(peerage(f"export {SETTINGS}")) == (
        "output folder 'deploy' is not empty; choose another --out"
    )
    assert os.listdir("deploy") == ["mine"]


# Input that cannot be


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("", "hosts.txt names no host; write one per line, such as 10.0.0.3"),
        ("# nobody\n", "hosts.txt names no host"),
        ("a\nb c\n", "hosts.txt line 2: 'b c' is not a host; give a name such as"),
        ("a\n\nb:\n", "hosts.txt line 3: 'b:' is not HOST or HOST:PORT, such as 10.0.0.3:7400"),
        ("a:b:c\n", "hosts.txt line 1: 'a:b:c' is not HOST or HOST:PORT"),
        ("a:x1\n", "hosts.txt line 1: 'a:x1' is not HOST or HOST:PORT"),
        ("a:0\n", "hosts.txt line 1: the port of 'a:0' must lie between 1 and 65535, got 0"),
        ("a:65536\n", "hosts.txt line 1: the port of 'a:65536' must lie between 1 and 65535"),
        ("10.0.0.300\n", "hosts.txt line 1: '10.0.0.300' is not a host"),
        ("https://a\n", "hosts.txt line 1: 'https://a' is not HOST or HOST:PORT"),
        ("fe80::1%eth0\n", "hosts.txt line 1: 'fe80::1%eth0' is not HOST or HOST:PORT"),
        ("0.0.0.0\n", "hosts.txt line 1: 0.0.0.0 is not the address of a machine"),
        ("a\nb\nA:7400\n", "hosts.txt line 3: a:7400 is already in line 1; name it once, or"),
        ("[::1]\n0::1\n", "hosts.txt line 2: [::1]:7400 is already in line 1"),
    ],
)
def test_hosts_that_cannot_be(hosts, message, place):
    Path("hosts.txt").write_text(hosts)
    assert error_line(peerage(f"export {SETTINGS}")).startswith(message)
    assert not Path("deploy").exists()


def test_hosts_that_cannot_be_read(place):
    Path("hosts.txt").write_bytes(b"\xff\xfe")
    assert "cannot read the hosts in hosts.txt" in error_line(peerage(f"export {SETTINGS}"))
    assert "cannot read the hosts in ." in error_line(peerage(f"export {SETTINGS} --hosts ."))
    gone = error_line(peerage(f"export {SETTINGS} --hosts gone.txt"))
    assert gone == "there is no gone.txt; write one with a host per line"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 0", "--port must lie between 1 and 65535, got 0"),
        ("--port 65536", "--port must lie between 1 and 65535, got 65536"),
        ("--nodes 4 --port 65535", "4 peers: node-3 would get port 65536 of 10.0.0.10"),
        ("--until accuracy=0.9", "until requires the mean over all nodes"),
        ("--centralised", "pooled trains one node on all data and cannot use a network"),
        ("--topology regular:k=7", "k must be smaller than the 3 nodes, got 7"),
        ("--wire int4", "wire must be one of fp32, bf16, int8; got 'int4'"),
        ("--certs nowhere", "peerage certs init --folder nowhere"),
        ("--stop-at-epsilon 3", "requires differential privacy; set --noise and --clip"),
        ("--out hosts.txt", "output folder 'hosts.txt' is a file"),
        ("--algorithm own.py:Own", "own.py line 2 imports beside, a file beside it"),
    ],
)
def test_export_reports_errors_before_it_writes_anything(flags, message, place):
    Path("own.py").write_text(
        "from dataclasses import dataclass\n"
        "def later(): import beside\n"
        "import peerage as pg\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Own(pg.DecAvg):\n    pass\n"
    )
    Path("beside.py").touch()
    before = set(os.listdir())
    assert message in error_line(peerage(f"export {SETTINGS} {flags}"))
    assert set(os.listdir()) - {"__pycache__"} == before


# They work elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("line", [SETTINGS, WITH_HUB, f"{SETTINGS} --clusters 2/1:rotate"])
def test_folders_that_were_moved_end_with_the_digest_of_a_simulation(line, place):
    ports = free_ports(3)
    Path("hosts.txt").write_text("".join(f"127.0.0.1:{port}\n" for port in ports))
    assert peerage(f"export {line}").code == 0
    homes = [place / f"machine {number}" / "peer" for number in range(3)]
    for number, home in enumerate(homes):
        home.parent.mkdir()
        shutil.move(f"deploy/node-{number}", home)
        file = home / "network.toml"  # the machine may be busy
        file.write_text(
            re.sub("^(start|message) = .*", r"\1 = 300.0", file.read_text(), flags=re.M)
        )
        assert Network.load(file).timeouts == Timeouts(start=300.0, message=300.0)
        sign_network(Authority.load(Path("deploy/authority")), file)
        (home / "venv").symlink_to(Path(sys.executable).parent.parent)
    shutil.rmtree("deploy")
    processes = [started(home) for home in homes]
    try:
        ends = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], ends
    world = prepare(Network.load(homes[0] / "network.toml").experiment)
    peers = [
        PeerProcess(i, PeerProgress(f"node-{i}"), home / "run") for i, home in enumerate(homes)
    ]
    simulated = peerage(f"run {line} --engine serial --json --out", place / "simulated")
    assert digest(*final_models(peers, world)) == json.loads(simulated.lines[-1])["digest"]
    by_round = zip(*(read_metrics(home / "run" / "metrics.jsonl") for home in homes), strict=True)
    facts = RunFacts.of(world)
    found = [g for rows in by_round for g in group_rows(facts, rows[0]["round"], report_of(rows))]
    assert found == list(RunRecord.load(place / "simulated").groups)


@pytest.mark.slow
def test_keys_are_made_where_the_peers_run(place):
    """The authority never has a key; a changed network file is refused until it is signed again."""
    Path("hosts.txt").write_text("".join(f"127.0.0.1:{port}\n" for port in free_ports(2)))
    flags = "--nodes 2 --topology ring --partition iid --model logistic --epochs 1 --rounds 1"
    assert "each machine makes its own" in peerage(f"export {flags} --keys-at-site").out
    assert list(Path("deploy").rglob("*.key")) == [Path("deploy/authority/authority.key")]
    homes = [place / f"deploy/node-{number}" for number in range(2)]
    for home in homes:
        (home / "venv").symlink_to(Path(sys.executable).parent.parent)
        text = (home / "README.txt").read_text()
        [request] = re.findall("-m peerage (certs request .*)", text)
        with contextlib.chdir(home):
            made = peerage(request)
        assert made.code == 0, made.err
        [sign] = re.findall("^    peerage (certs sign .*) --folder AUTHORITY", text, flags=re.M)
        with contextlib.chdir(home / "certs"):
            signed = peerage(sign, "--folder", place / "deploy/authority")
        assert signed.code == 0, signed.err
        assert signed.lines[-1].split(": ")[1] == made.lines[-1].split(": ")[1]  # the fingerprint
        shutil.move(f"deploy/authority/{home.name}.pem", home / "certs")
    network = homes[0] / "network.toml"
    network.write_text(network.read_text().replace("start = 3600", "start = 300"))
    changed = started(homes[0])
    assert (
        "has changed since it was signed; sign it with" in changed.communicate(timeout=TIMEOUT)[0]
    )
    assert changed.returncode == 2
    assert peerage("certs sign-network --folder deploy/authority", network).code == 0
    processes = [started(home) for home in homes]
    try:
        ends = [process.communicate(timeout=TIMEOUT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], ends
    assert not any("is not signed" in said for said, _ in ends)


def started(home: Path) -> subprocess.Popen[str]:
    """A peer, started as its README says."""
    setting, *command = analytic_gradients(home)
    name, _, value = setting.partition("=")
    return subprocess.Popen(
        command,
        cwd=home,
        env={**os.environ, name: value, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
