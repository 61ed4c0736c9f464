"""The machines of a network: read them from a file, and assign them to the peers."""

import ipaddress
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from peerage.errors import InputError, PeerageWarning
from peerage.experiment.experiment import Experiment
from peerage.net.trust.names import is_host_name
from peerage.net.wire.address import Address

PORT = 7400
DIALS_OUT = "dials-out"  # instead of a host: the peer opens no port
HOST = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:(?P<port>[0-9]{1,9}))?")


def read_hosts(path: Path, port: int = PORT) -> list[Address | None]:
    """Read one host per line, with the first port for its peers; `port` is the default.

    None stands for `dials-out`: a peer that opens no port and needs no address.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise InputError(f"there is no {path}; write one with a host per line") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hosts in {path}: {error}") from None
    found: dict[Address, int] = {}
    hosts: list[Address | None] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if text == DIALS_OUT:
            hosts.append(None)
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
        hosts.append(host)
    if not hosts:
        raise InputError(f"{path} names no host; write one per line, such as 10.0.0.3")
    return hosts


def parse_host(text: str, port: int = PORT) -> Address:
    """Parse a host name or address, with or without a port.

    >>> parse_host("10.0.0.3")
    Address(host='10.0.0.3', port=7400)
    >>> parse_host("[2001:db8::7]:7500")
    Address(host='2001:db8::7', port=7500)
    """
    if DIALS_OUT in text.split():
        raise InputError(
            f"{text!r}: a peer that dials out needs no address; write {DIALS_OUT} alone, and the "
            "host after a #"
        )
    if text.count(":") > 1 and is_address(text):  # IPv6 without brackets and port
        text = f"[{text}]"
    found = HOST.fullmatch(text)
    if not found:
        raise InputError(f"{text!r} is not HOST or HOST:PORT, such as 10.0.0.3:7400")
    number = port if found["port"] is None else int(found["port"])
    check_port(number, f"the port of {text!r}")
    return Address(_host_name(found["six"] or found["name"]), number)


def assign_hosts(hosts: Sequence[Address | None], experiment: Experiment) -> list[Address | None]:
    """Assign the hosts to the peers in turn; each peer gets the next free port of its host.

    None stands for a peer that dials out.
    """
    count = experiment.nodes_and_hub
    extra = ", the last of them the hub" if experiment.algorithm.with_hub else ""
    peers = f"{count} peers{extra}"
    if len(hosts) > count:
        unused = ", ".join(DIALS_OUT if host is None else str(host) for host in hosts[count:])
        warnings.warn(
            f"{len(hosts)} hosts for {peers}: {unused} will not be used",
            PeerageWarning,
            stacklevel=3,
        )
    assigned: list[Address | None] = []
    for number in range(count):
        host = hosts[number % len(hosts)]
        if host is None:
            assigned.append(None)
            continue
        while host in assigned:
            host = host._replace(port=host.port + 1)
        if host.port > 65535:
            raise InputError(
                f"{peers}: node-{number} would get port {host.port} of {host.host}, and ports end "
                "at 65535; give a lower port or more hosts"
            )
        assigned.append(host)
    return assigned


def _host_name(text: str) -> str:
    if is_address(text):
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


def is_address(text: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(text)
        return "%" not in text  # an IPv6 zone is valid on one machine only
    return False


def check_port(port: int, what: str) -> None:
    if not 0 < port < 65536:
        raise InputError(f"{what} must lie between 1 and 65535, got {port}")
