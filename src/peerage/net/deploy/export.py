"""Prepares a network on several machines: one folder per peer with all its files.

OUT/authority/              signs the identities; its key stays here
OUT/node-0/                 to be moved to the machine of node 0
    README.txt              instructions
    network.toml  experiment.toml  network.sig
    init.safetensors        the model with which all nodes start, with --init file:...
    code/                   the files of the user's own code, if there are any
    certs/                  its key and certificate, authority.pem, revoked.pem
    peerage-node-0.service  a unit for systemd
    site.env                options of the site for that unit
    Containerfile           the same peer in a container
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
from textwrap import fill
from typing import Any

from peerage import specs
from peerage.data import DATASETS, PUBLISHED
from peerage.data.datasets import dataset_info
from peerage.engine.prepare import build_graph
from peerage.errors import InputError, PeerageWarning
from peerage.experiment.experiment import Experiment, display_name
from peerage.files import disk_errors, write_bytes
from peerage.models import MODELS, default_model
from peerage.models.files import read_file
from peerage.net.deploy.code import FOLDER, ShippedCode, ship
from peerage.net.deploy.container import container_file, run_command
from peerage.net.deploy.message_sizes import MessageSizes
from peerage.net.deploy.unit import OPTIONS, STATE, home_of, unit_files, unit_name
from peerage.net.peer.network import MAJORITY, Member, Network, Timeouts
from peerage.net.trust.certs import Authority
from peerage.net.trust.keyfiles import REMEDY, private_folder, read_certificate
from peerage.net.trust.names import is_host_name
from peerage.net.trust.signature import REQUIRED, REQUIRED_TEXT, sign_network
from peerage.net.wire.address import Address
from peerage.privacy import check_accounting, check_epsilon_limit
from peerage.runs.privacy_plan import planned_epsilon, privacy_plan
from peerage.runs.run import check_empty

PORT = 7400
START = 3600.0  # seconds to wait for all peers, which a person starts one by one
COMMAND = "venv/bin/python -m peerage node --network network.toml"
HOST = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:(?P<port>[0-9]{1,9}))?")
README = """\
{name}, {role}

This folder belongs on the machine that the others reach as

    {address}

Allow TCP connections to that port in its firewall. Anyone who has the key in certs/ can act as
{name}, so keep no other copy of it. Run all commands in this folder.

1. Install, with Python 3.11 or newer, and the same version on all machines

    python3 -m venv venv && venv/bin/python -m pip install "peerage[{extras}]"

{key}2. Data

{data}
{code}{start}. Start

    PEERAGE_DATA=data {command}

Before round 1, the peer waits up to an hour for the others. Checkpoints and results go to run/. If
you start it again, it continues from its last round.
{listens}
{privacy}
To let systemd start the peer now and after every reboot, create a user for all peers of this
machine, install the unit, and move this folder to {home} (the third line, not
needed if it is there already). Data outside this folder must be readable for that user, and not be
in /home.

    id -u peerage || sudo useradd --system --user-group --shell /usr/sbin/nologin peerage
    sudo cp {unit} /etc/systemd/system/
    sudo mkdir -p {parent} && sudo mv -T "$PWD" {home}
    sudo chown -R peerage: {home}/

    sudo systemctl enable --now {unit}
    journalctl --follow --unit {unit}

systemd restarts the peer after a failure, but not if its input is wrong (exit status 2).

To run the peer in a container instead, with podman or docker (without --userns keep-id). The
container has not been tested on the machine that wrote this file.

{container}

Options such as --data follow at the end of the last line.
"""

KEY_AT_SITE = """\
   Then make the key of {name}, which stays on this machine:

    venv/bin/python -m peerage certs request {name} --folder certs --hosts {host}

   Send certs/{name}.csr to the person who keeps the authority, and compare the fingerprint of
   the key with them, for instance by telephone. They run

    peerage certs sign {name}.csr --folder AUTHORITY

   and return {name}.pem. Put it into certs/.

"""
OWN_DATA = f"""\
To train on private data, which no other peer needs, add for instance

    --data npz:path=data/mine.npz

to the command below, or to {OPTIONS} in site.env for systemd. If the data lacks
some classes of the network, give the number or the names of all classes, as in
--classes cat,dog,horse. To evaluate the model on other data, such as a test set that all peers
have, add --test; the peer then trains on all of its own data.
"""
PRIVACY = """
{plan}
The account of what your data has spent goes on over restarts and runs. It is the file
run/privacy.json, or with --data a file beside the data, such as data/mine.npz.privacy.json. Keep it
with the data. Its folder must be writable for the user peerage, and be in this folder or in
ReadWritePaths of the unit. --stop-at-epsilon 5 ends the training before the account exceeds 5.
"""
HUB_DATA = """\
The hub does not train and needs no data: without any, it takes the shape of examples and the
classes from its clients. To let it evaluate the model, give it a test set of the same kind as the
data of the clients: --test npz:path=data/test.npz in the command below, or in site.env.
"""


@dataclass(frozen=True)
class Exported:
    """The exported network and its folders."""

    out: Path
    network: Network
    authority: Path
    sizes: MessageSizes | None  # of messages; None if only the peers' data say
    keys_at_site: bool = False

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
        facts: dict[str, Any] = {
            "run": self.network.run,
            "authority": str(self.authority),
            "wire": self.network.wire,
            **({} if self.sizes is None else self.sizes.facts),
            "peers": peers,
        }
        experiment = self.network.experiment
        if experiment.noise.private:
            planned = {"epsilon": planned_epsilon(experiment), "delta": experiment.noise.delta}
            facts["privacy"] = planned
        return facts

    def __str__(self) -> str:
        lines = [
            f"{peer['folder']} for {peer['address']}{', the hub' if peer['hub'] else ''}"
            for peer in self.facts["peers"]
        ]
        if self.keys_at_site:
            sign = f"sign the requests with `peerage certs sign FILE.csr --folder {self.authority}`"
            lines.append(f"no folder has a key, as each machine makes its own; {sign}")
        lines += [
            "the bytes of a message depend on the data" if self.sizes is None else str(self.sizes),
            "move each folder to its machine, and follow the README.txt in it",
            f"keep {self.authority} secret: anyone who has its key can create identities",
            *filter(None, [privacy_plan(self.network.experiment)]),
        ]
        return "\n".join(lines)


def export(
    experiment: Experiment,
    hosts: Path,
    out: Path,
    *,
    port: int = PORT,
    certs: Path | None = None,
    stop_at_epsilon: float | None = None,
    wire: str = "fp32",
    pack: bool = False,
    keys_at_site: bool = False,
    quorum: int | str = MAJORITY,
) -> Exported:
    """Write a folder for every peer, all or none; `certs` is that of an existing authority.

    With `keys_at_site`, the folders have no keys: each machine makes its own.
    """
    _check_port(port, "--port")
    check_accounting(experiment.noise)
    check_epsilon_limit(stop_at_epsilon, experiment.noise)
    experiment = _with_model(experiment)
    _check_experiment(experiment)
    code = ship(_with_model_file(experiment)[0])
    check_empty(out)
    places = assign_hosts(read_hosts(hosts, port), experiment)
    members = tuple(Member(f"node-{i}", str(place)) for i, place in enumerate(places))
    timeouts = Timeouts(start=START)
    network = Network(
        secrets.token_hex(8), experiment, members, timeouts, wire, pack, quorum=quorum
    )
    sizes = MessageSizes.of_experiment(experiment, wire)
    known = None if certs is None else Authority.load(certs)
    if known is not None:
        _check_names(known, network)
    serials: list[int] = []
    try:
        with _all_or_nothing(out) as aside:
            authority = known or Authority.create(aside / "authority", "peerage")
            for number, place in enumerate(places):
                folder = aside / members[number].name
                serials += _issue(authority, place, folder, keys_at_site)
                _write(folder, network, number, place, code, stop_at_epsilon, keys_at_site)
                sign_network(authority, folder / "network.toml")
    except BaseException:
        if known is not None:  # the keys are deleted, so these never have to be revoked
            for serial in serials:
                (known.folder / "issued" / f"{serial:x}.pem").unlink(missing_ok=True)
        raise
    home = out / "authority" if known is None else known.folder
    return Exported(out, network, home, sizes, keys_at_site)


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


def _issue(authority: Authority, place: Address, folder: Path, keys_at_site: bool) -> list[int]:
    """Create the folder of a peer with its certificates; return the serials that were issued."""
    certs = folder / "certs"
    with disk_errors(folder, REMEDY):
        certs.mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
    write_bytes(certs / REQUIRED, REQUIRED_TEXT.encode(), REMEDY)
    if keys_at_site:
        authority.copy_public_files(certs)
        return []
    identity = authority.issue(folder.name, hosts=[place.host], into=certs)
    return [read_certificate(identity.certificate, REMEDY).serial_number]


def _write(
    folder: Path,
    network: Network,
    number: int,
    place: Address,
    code: ShippedCode,
    limit: float | None,
    keys_at_site: bool,
) -> None:
    if code.files:
        with disk_errors(folder, REMEDY):
            (folder / FOLDER).mkdir()
    texts = {
        "experiment.toml": code.experiment,
        "network.toml": network.to_toml("experiment.toml", code.hashes),
        **_guides(network, number, place, code, limit, keys_at_site),
    }
    files = {file: text.encode() for file, text in texts.items()} | code.files
    for file, content in (files | _with_model_file(network.experiment)[1]).items():
        write_bytes(folder / file, content, REMEDY)


def _with_model_file(experiment: Experiment) -> tuple[Experiment, dict[str, bytes]]:
    """The experiment with its model file beside it, and the content of that file by its name."""
    init = experiment.init
    if init.file is None or init.sha256 is None:
        return experiment, {}
    path = Path(init.file)
    name = f"init{path.suffix}"
    moved = init.model_copy(update={"file": name})
    return experiment.model_copy(update={"init": moved}), {name: read_file(path, init.sha256)}


def _guides(
    network: Network,
    number: int,
    place: Address,
    code: ShippedCode,
    limit: float | None,
    keys_at_site: bool,
) -> dict[str, str]:
    """The systemd unit, the container file and the README of one peer."""
    name = network.members[number].name
    hub = number == _hub(network.experiment)
    every = f"--bind 0.0.0.0:{place.port}"
    if _is_address(place.host) or place.host == "localhost":
        bind, listens = "", f"If the address above is that of a router, add {every}"
    else:  # many machines resolve their own name to 127.0.1.1, which others cannot reach
        bind = f" {every}"
        listens = "It listens on all addresses of the machine; to change that, edit --bind."
    stop = "" if limit is None or hub else f" --stop-at-epsilon {limit:.12g}"
    plan = None if hub else privacy_plan(network.experiment)
    command = f"{COMMAND} --identity {name} --out run{bind}{stop}"
    extras = "net,privacy" if network.experiment.noise.private else "net"
    words = {
        "name": name,
        "role": f"{'the hub' if hub else 'one peer'} of the network {network.run}",
        "address": str(place),
        "home": home_of(name),
        "parent": str(STATE),
        "unit": unit_name(name),
        "command": command,
        "extras": extras,
        "privacy": ""
        if plan is None
        else PRIVACY.format(plan=fill(f"This network has {plan}.", 96)),
        "data": _about_data(network.experiment, hub) + (HUB_DATA if hub else OWN_DATA),
        "listens": listens,
        "key": KEY_AT_SITE.format(name=name, host=place.host) if keys_at_site else "",
        "code": code.readme,
        "start": "4" if code.files else "3",
        "container": run_command(name, place.port),
    }
    return {
        **unit_files(name, command, place.port),
        "Containerfile": container_file(name, place.port, extras),
        "README.txt": README.format(**words),
    }


def _about_data(experiment: Experiment, hub: bool) -> str:
    name = display_name(experiment.dataset, DATASETS)
    spec = specs.text(experiment.dataset, "dataset", DATASETS)
    if name not in PUBLISHED and hub:
        return f"The experiment uses {spec}.\n"
    if name not in PUBLISHED:
        return f"The experiment uses {spec}, which must exist on this machine as well.\n"
    if not PUBLISHED[name].files:
        return f"The experiment uses {spec}, which is built in and needs no download.\n"
    return (
        f"The experiment uses {spec}; download it with\n\n"
        f"    PEERAGE_DATA=data venv/bin/python -m peerage data get {name}\n\n"
    )
