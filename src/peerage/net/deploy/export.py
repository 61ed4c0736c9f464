"""Prepares a network on several machines: one folder per peer with all its files.

OUT/authority/              signs the identities; its key stays here
OUT/node-0/                 to be moved to the machine of node 0
    README.txt              instructions
    network.toml  experiment.toml
    certs/                  its key and certificate, authority.pem, revoked.pem
    peerage-node-0.service  a unit for systemd
"""

import ipaddress
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerage import specs
from peerage.algorithms import ALGORITHMS
from peerage.data import DATASETS, PUBLISHED
from peerage.data.datasets import dataset_info
from peerage.engine.prepare import build_graph
from peerage.errors import InputError, PeerageWarning
from peerage.experiment.experiment import Experiment, display_name
from peerage.files import disk_errors, write_bytes
from peerage.models import MODELS, default_model
from peerage.net.peer.network import MAJORITY, Member, Network, Timeouts
from peerage.net.trust.certs import Authority, is_host_name
from peerage.net.trust.keyfiles import REMEDY, private_folder, read_certificate
from peerage.net.wire.address import Address
from peerage.runs.run import check_empty

PORT = 7400
START = 3600.0  # seconds to wait for all peers, which a person starts one by one
HOST = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:(?P<port>[0-9]{1,9}))?")
# The folder of a peer, or a link to it, as the unit names it. A fixed path needs no quoting. Unlike
# the unit's own location (%Y), it also allows to copy the unit to where its peer cannot change it.
HOME = "/srv/peerage/{name}"

UNIT = """\
# One peer of a network. README.txt says how to install this file.
[Unit]
Description=Peerage peer {name}
Wants=network-online.target
After=network-online.target
# Give up after 20 failures in 10 minutes.
StartLimitIntervalSec=600
StartLimitBurst=20

[Service]
# {home} is the folder that this file was exported in, or a link to it.
WorkingDirectory={home}
Environment=PEERAGE_DATA={home}/data
ExecStart={home}/{command}
Restart=on-failure
RestartSec=10
# The exit status after SIGTERM, which is not a failure.
SuccessExitStatus=130
# The peer finishes its current computation before it stops. After this time it is killed, which is
# safe: it continues from its last round.
TimeoutStopSec=30
# Without the next line the peer runs as root. Better create a user (useradd --system peerage),
# make it the owner of the folder (chown -R peerage: {home}/), and remove the #.
# User=peerage

# The peer may read public files, write to its own folder, and use the network.
ReadWritePaths={home}
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
NoNewPrivileges=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
UMask=0077

[Install]
WantedBy=multi-user.target
"""

README = """\
{name}, {role}

This folder belongs on the machine that the others reach as

    {address}

Allow TCP connections to that port in its firewall. Anyone who has the key in certs/ can act as
{name}, so keep no other copy of it. Run all commands in this folder.

1. Install, with Python 3.11 or newer, and the same version on all machines

    python3 -m venv venv && venv/bin/python -m pip install "peerage[net]"

2. Data

{data}
3. Start

    PEERAGE_DATA=data {command}

Before round 1, the peer waits up to an hour for the others. Checkpoints and results go to run/. If
you start it again, it continues from its last round.
{listens}

To let systemd start the peer now and after every reboot, link this folder to {home} (the
first line, not needed if the folder is there already), and install the unit:

    sudo mkdir -p {parent} && sudo ln -sfnT "$PWD" {home}
    sudo cp {unit} /etc/systemd/system/
    sudo systemctl enable --now {unit}
    journalctl --follow --unit {unit}
"""

OWN_DATA = """\
To train on private data, which no other peer needs, add for instance

    --data npz:path=data/mine.npz

to the command below and to ExecStart in the unit. If the data lacks some classes of the network,
give the number or the names of all classes, as in --classes cat,dog,horse. To evaluate the model on
the test set of another data set, such as one that all peers have, add --test.
"""
HUB_DATA = """\
The hub does not train, but it evaluates the model. If the others use private data, give the hub a
test set of the same kind: --data npz:path=data/test.npz in the command below and in the unit.
"""


@dataclass(frozen=True)
class Exported:
    """The exported network and its folders."""

    out: Path
    network: Network
    authority: Path

    @property
    def facts(self) -> dict[str, Any]:
        hub = _hub(self.network.experiment)
        peers = [
            {
                "name": member.name,
                "address": member.address,
                "folder": str(self.out / member.name),
                "hub": number == hub,
            }
            for number, member in enumerate(self.network.members)
        ]
        return {"run": self.network.run, "authority": str(self.authority), "peers": peers}

    def __str__(self) -> str:
        lines = [
            f"{peer['folder']} for {peer['address']}{', the hub' if peer['hub'] else ''}"
            for peer in self.facts["peers"]
        ]
        lines += [
            "move each folder to its machine, and follow the README.txt in it",
            f"keep {self.authority} secret: anyone who has its key can create identities",
        ]
        return "\n".join(lines)


def export(
    experiment: Experiment,
    hosts: Path,
    out: Path,
    *,
    port: int = PORT,
    certs: Path | None = None,
    quorum: int | str = MAJORITY,
) -> Exported:
    """Write a folder for every peer, all or none; `certs` is that of an existing authority."""
    _check_port(port, "--port")
    experiment = _with_model(experiment)
    _check_experiment(experiment)
    check_empty(out)
    places = assign_hosts(read_hosts(hosts, port), experiment)
    members = tuple(Member(f"node-{i}", str(place)) for i, place in enumerate(places))
    timeouts = Timeouts(start=START)
    network = Network(secrets.token_hex(8), experiment, members, timeouts, quorum=quorum)
    known = None if certs is None else Authority.load(certs)
    if known is not None:
        _check_names(known, network)
    serials: list[int] = []
    try:
        with _all_or_nothing(out) as aside:
            authority = known or Authority.create(aside / "authority", "peerage")
            for number, place in enumerate(places):
                folder = aside / members[number].name
                serials.append(_issue(authority, place, folder))
                _write(folder, network, number, place)
    except BaseException:
        if known is not None:  # the keys are deleted, so these never have to be revoked
            for serial in serials:
                (known.folder / "issued" / f"{serial:x}.pem").unlink(missing_ok=True)
        raise
    return Exported(out, network, out / "authority" if known is None else known.folder)


# Hosts


def read_hosts(path: Path, port: int = PORT) -> list[Address]:
    """Read one host per line, with the first port for its peers; `port` is the default."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"there is no {path}; write one with a host per line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hosts in {path}: {error}") from None
    found: dict[Address, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            host = parse_host(text, port)
        except InputError as error:
            raise InputError(f"{path} line {number}: {error}") from None
        if host in found:
            raise InputError(
                f"{path} line {number}: {host} is already in line {found[host]}; "
                "name it once, or give it another port"
            )
        found[host] = number
    if not found:
        raise InputError(f"{path} names no host; write one per line, such as 10.0.0.3")
    return list(found)


def parse_host(text: str, port: int = PORT) -> Address:
    """Parse a host name or address, with or without a port.

    >>> parse_host("10.0.0.3")
    Address(host='10.0.0.3', port=7400)
    >>> parse_host("[2001:db8::7]:7500")
    Address(host='2001:db8::7', port=7500)
    """
    if text.count(":") > 1 and _is_address(text):  # IPv6 without brackets and port
        text = f"[{text}]"
    found = HOST.fullmatch(text)
    if not found:
        raise InputError(f"{text!r} is not HOST or HOST:PORT, such as 10.0.0.3:7400")
    number = port if found["port"] is None else int(found["port"])
    _check_port(number, f"the port of {text!r}")
    return Address(_host_name(found["six"] or found["name"]), number)


def assign_hosts(hosts: Sequence[Address], experiment: Experiment) -> list[Address]:
    """Assign the hosts to the peers in turn; each peer gets the next free port of its host."""
    count = experiment.nodes_and_hub
    extra = ", the last of them the hub" if experiment.algorithm.with_hub else ""
    peers = f"{count} peers{extra}"
    if len(hosts) > count:
        unused = ", ".join(map(str, hosts[count:]))
        warnings.warn(
            f"{len(hosts)} hosts for {peers}: {unused} will not be used",
            PeerageWarning,
            stacklevel=3,
        )
    assigned: dict[Address, None] = {}  # an ordered set
    for number in range(count):
        host = hosts[number % len(hosts)]
        while host in assigned:
            host = host._replace(port=host.port + 1)
        if host.port > 65535:
            raise InputError(
                f"{peers}: node-{number} would get port {host.port} of {host.host}, and ports end "
                "at 65535; give a lower port or more hosts"
            )
        assigned[host] = None
    return list(assigned)


def _host_name(text: str) -> str:
    if _is_address(text):
        address = ipaddress.ip_address(text)
        if address.is_unspecified or address.is_multicast:
            raise InputError(f"{text} is not the address of a machine; give one like 192.0.2.7")
        return str(address)
    name = text.lower()
    if not is_host_name(name):
        raise InputError(
            f"{text!r} is not a host; give a name such as peer.example.org, or an address such as "
            "192.0.2.7"
        )
    return name


def _is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return "%" not in text  # an IPv6 zone is valid on one machine only
    return False


def _check_port(port: int, what: str) -> None:
    if not 0 < port < 65536:
        raise InputError(f"{what} must lie between 1 and 65535, got {port}")


def _hub(experiment: Experiment) -> int | None:
    return experiment.nodes if experiment.algorithm.with_hub else None


# Checks


def _with_model(experiment: Experiment) -> Experiment:
    """The experiment with its default model, so that peers with private data use the same one.

    For a data set that is not published, the peers choose it by the shape of their examples, which
    is the same for all.
    """
    known = dataset_info(experiment.dataset)
    if experiment.model or known is None:
        return experiment
    name = default_model(display_name(experiment.dataset, DATASETS), known.shape)
    return experiment.model_copy(update={"model": (MODELS[name](),)})


def _check_experiment(experiment: Experiment) -> None:
    """Check the experiment without its data, which may exist only on the machines of the peers."""
    if type(experiment.algorithm) not in ALGORITHMS.values():
        raise InputError(
            f"the algorithm {display_name(experiment.algorithm, ALGORITHMS)!r} is not part of the "
            "package, so other machines lack it; run it with `peerage up`"
        )
    Experiment.from_toml(experiment.to_toml())
    build_graph(experiment, experiment.nodes_and_hub)


def _check_names(authority: Authority, network: Network) -> None:
    """Warn if valid certificates with these names exist; their holders can act as the new peers."""
    names = {member.name for member in network.members}
    old = {issued.name: issued for issued in authority.issued() if issued.status == "valid"}
    if reused := [name for name in old if name in names]:
        warnings.warn(
            f"the authority in {authority.folder} has issued {', '.join(reused)} before, and those "
            "keys are valid in this network too; to prevent that, revoke them and export again",
            PeerageWarning,
            stacklevel=3,
        )


# Files


@contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A temporary folder whose content is moved to `out` on success, and deleted otherwise."""
    placed: list[Path] = []
    with private_folder(out):
        with disk_errors(out, REMEDY):
            aside = Path(tempfile.mkdtemp(prefix=".", suffix=".tmp", dir=out))
        try:
            yield aside
            for path in sorted(aside.iterdir()):
                with disk_errors(out / path.name, REMEDY):
                    os.rename(path, out / path.name)
                placed.append(out / path.name)
        except BaseException:
            for path in placed:
                shutil.rmtree(path, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _issue(authority: Authority, place: Address, folder: Path) -> int:
    """Create the folder of a peer and an identity of the same name; return its serial number."""
    with disk_errors(folder, REMEDY):
        folder.mkdir(mode=0o700)
    identity = authority.issue(folder.name, hosts=[place.host], into=folder / "certs")
    return read_certificate(identity.certificate, REMEDY).serial_number


def _write(folder: Path, network: Network, number: int, place: Address) -> None:
    files = {
        "experiment.toml": network.experiment.to_toml(),
        "network.toml": network.to_toml("experiment.toml"),
        **_guides(network, number, place),
    }
    for file, text in files.items():
        write_bytes(folder / file, text.encode(), REMEDY)


def _guides(network: Network, number: int, place: Address) -> dict[str, str]:
    """The systemd unit and the README of one peer."""
    name = network.members[number].name
    hub = number == _hub(network.experiment)
    every = f"--bind 0.0.0.0:{place.port}"
    if _is_address(place.host) or place.host == "localhost":
        bind, listens = "", f"If the address above is that of a router, add {every}"
    else:  # many machines resolve their own name to 127.0.1.1, which others cannot reach
        bind = f" {every}"
        listens = "It listens on all addresses of the machine; to change that, edit --bind."
    words = {
        "name": name,
        "role": f"{'the hub' if hub else 'one peer'} of the network {network.run}",
        "address": str(place),
        "home": HOME.format(name=name),
        "parent": str(Path(HOME).parent),
        "unit": f"peerage-{name}.service",
        "command": "venv/bin/python -m peerage node --network network.toml --identity "
        f"{name} --out run{bind}",
        "data": _about_data(network.experiment) + (HUB_DATA if hub else OWN_DATA),
        "listens": listens,
    }
    return {words["unit"]: UNIT.format(**words), "README.txt": README.format(**words)}


def _about_data(experiment: Experiment) -> str:
    name = display_name(experiment.dataset, DATASETS)
    spec = specs.text(experiment.dataset, "dataset", DATASETS)
    if name not in PUBLISHED:
        return f"The experiment uses {spec}, which must exist on this machine as well.\n"
    if not PUBLISHED[name].files:
        return f"The experiment uses {spec}, which is built in and needs no download.\n"
    return (
        f"The experiment uses {spec}; download it with\n\n"
        f"    PEERAGE_DATA=data venv/bin/python -m peerage data get {name}\n\n"
    )
