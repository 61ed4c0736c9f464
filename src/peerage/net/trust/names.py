"""The names of hosts in certificates."""

import ipaddress
import re
from contextlib import suppress

from cryptography import x509

from peerage.errors import InputError
from peerage.net.trust.identity import DOMAIN

LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")


def is_host_name(name: str) -> bool:
    """Whether this is a valid host name, and not an IP address."""
    labels = name.split(".")
    well_formed = all(map(LABEL.fullmatch, labels))
    return len(name) <= 253 and well_formed and not labels[-1].isdigit()


def general_name(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    name = host.lower()
    if not is_host_name(name):
        raise InputError(
            "a host must be a name such as peer.example.org or an address such as 192.0.2.7, "
            f"without a port; got {host!r}"
        )
    if name == DOMAIN or name.endswith(f".{DOMAIN}"):
        raise InputError(
            f"host {host!r} is in {DOMAIN}, which is reserved for identities; choose another"
        )
    return x509.DNSName(name)
