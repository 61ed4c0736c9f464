"""What the administrator of a machine gets: README, systemd unit and container file of a peer."""

from textwrap import fill

from peerage import specs
from peerage.data import DATASETS, PUBLISHED
from peerage.experiment.experiment import Experiment, display_name
from peerage.net.deploy.code import ShippedCode
from peerage.net.deploy.container import container_file, run_command
from peerage.net.deploy.hosts import PORT, is_address
from peerage.net.deploy.unit import OPTIONS, STATE, home_of, unit_files, unit_name
from peerage.net.peer.network import Network
from peerage.net.wire.address import Address
from peerage.runs.privacy_plan import privacy_plan

COMMAND = "venv/bin/python -m peerage node --network network.toml"
README = """\
{name}, {role}

{place}Anyone who has the key in certs/ can act as {name}, so keep no other copy of
it. Run all commands in this folder.

1. Install, with Python 3.11 or newer, and the same version on all machines

    python3 -m venv venv && venv/bin/python -m pip install "peerage[{extras}]"

{key}2. Data

{data}
{code}{start}. Start

    PEERAGE_DATA=data {command}

{waits} Checkpoints and results go to run/. If
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

REACHED = """\
This folder belongs on the machine that the others reach as

    {address}

Allow TCP connections to that port in its firewall.
"""
DIALS_OUT = """\
{name} opens no port: it connects to the others, and they answer over these connections. Its machine
must be able to connect, for as long as the network runs, to

    {addresses}

"""

KEY_AT_SITE = """\
   Then make the key of {name}, which stays on this machine:

    venv/bin/python -m peerage certs request {name} --folder certs{hosts}

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


def guides(
    network: Network,
    number: int,
    place: Address | None,
    code: ShippedCode,
    limit: float | None,
    keys_at_site: bool,
) -> dict[str, str]:
    """The systemd unit, the container file and the README of one peer."""
    name = network.members[number].name
    hub = number == network.experiment.hub
    port = PORT if place is None else place.port
    every = f"--bind 0.0.0.0:{port}"
    if place is None:
        health = f"--bind 127.0.0.1:{port}"
        bind, listens = "", f"It does not listen. If `--check-health` is to work, add {health}"
    elif is_address(place.host) or place.host == "localhost":
        bind, listens = "", f"If the address above is that of a router, add {every}"
    else:  # many machines resolve their own name to 127.0.1.1, which others cannot reach
        bind = f" {every}"
        listens = "It listens on all addresses of the machine; to change that, edit --bind."
    hosts = "" if place is None else f" --hosts {place.host}"
    stop = "" if limit is None or hub else f" --stop-at-epsilon {limit:.12g}"
    plan = None if hub else privacy_plan(network.experiment)
    command = f"{COMMAND} --identity {name} --out run{bind}{stop}"
    extras = "net,privacy" if network.experiment.noise.private else "net"
    words = {
        "name": name,
        "role": f"{'the hub' if hub else 'one peer'} of the network {network.run}",
        "place": _place(network, number),
        "home": home_of(name),
        "parent": str(STATE),
        "unit": unit_name(name),
        "command": command,
        "extras": extras,
        "privacy": ""
        if plan is None
        else PRIVACY.format(plan=fill(f"This network has {plan}.", 96)),
        "data": _about_data(network.experiment, hub) + (HUB_DATA if hub else OWN_DATA),
        "waits": _waits(network, number),
        "listens": listens,
        "key": KEY_AT_SITE.format(name=name, hosts=hosts) if keys_at_site else "",
        "code": code.readme,
        "start": "4" if code.files else "3",
        "container": run_command(name, port, published=place is not None),
    }
    return {
        **unit_files(name, command, port),
        "Containerfile": container_file(name, port, extras, published=place is not None),
        "README.txt": README.format(**words),
    }


def _place(network: Network, number: int) -> str:
    member = network.members[number]
    if not member.dials_out:
        return REACHED.format(address=member.address)
    others = "\n    ".join(m.address for m in network.members if not m.dials_out)
    return DIALS_OUT.format(name=member.name, addresses=others)


def _waits(network: Network, number: int) -> str:
    if network.added_by_revision(number):
        joined = network.experiment.faults.joined[number]
        return f"The peer joins the others in round {joined}, or later."
    return "Before round 1, the peer waits up to an hour for the others."


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
