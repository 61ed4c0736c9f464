"""The folders of peers that join a network: all that `export` gives to the first ones.

They have the new network file as the others get it.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from peerage.errors import InputError
from peerage.experiment.experiment import Experiment
from peerage.experiment.identity import own_code
from peerage.files import disk_errors, write_bytes
from peerage.net.deploy.code import ShippedCode
from peerage.net.deploy.export import (
    all_or_nothing,
    check_names,
    forgotten_on_failure,
    issue_certificates,
)
from peerage.net.deploy.guide import guides
from peerage.net.peer.network import Network
from peerage.net.trust.certs import Authority
from peerage.net.trust.keyfiles import REMEDY, read
from peerage.net.trust.signature import sign_network
from peerage.net.wire.address import Address

NETWORK = "network.toml"  # in the folder of a peer, as its README and its unit say


@contextmanager
def new_sites(
    path: Path,
    network: Network,
    first: int,
    authority: Authority,
    files: Mapping[str, bytes],
    keys_at_site: bool,
) -> Iterator[tuple[Path, ...]]:
    """Write a folder for each member from number `first` on; they stay if the block succeeds.

    `path` is the present network file. `files` are the new one and its experiment, by name.
    """
    members = network.members[first:]
    home = _home(path, network)
    folders = tuple(home / member.name for member in members)
    for folder in folders:
        if folder.exists():
            raise InputError(f"{folder} exists; move it away, or choose another name in --add")
    code, others = _own_files(network.experiment, path.parent)
    shipped = ShippedCode("", code)
    check_names(authority, members)
    serials: list[int] = []
    with forgotten_on_failure(authority, serials), all_or_nothing(home) as aside:
        for number, member in enumerate(members, start=first):
            place = None if member.dials_out else Address.parse(member.address)
            folder = aside / member.name
            serials += issue_certificates(authority, place, folder, keys_at_site)
            guide = guides(network, number, place, shipped, None, keys_at_site)
            texts = {name: text.encode() for name, text in guide.items()}
            for name, content in {**files, **texts, **code, **others}.items():
                with disk_errors(folder / name, REMEDY):
                    (folder / name).parent.mkdir(exist_ok=True, parents=True)
                write_bytes(folder / name, content, REMEDY)
            sign_network(authority, folder / NETWORK)
        yield folders


def _home(path: Path, network: Network) -> Path:
    """Where new folders go: beside the folder of a member, otherwise beside the network file."""
    parent = path.absolute().parent
    if parent.name not in {member.name for member in network.members}:
        return path.parent
    return parent.parent if path.is_absolute() else Path(os.path.relpath(parent.parent))


def _own_files(experiment: Experiment, folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The files of own code and the initial model, by their path in the folder of a peer."""
    init = experiment.init
    code = own_code(experiment)
    model = {} if init.file is None or init.sha256 is None else {init.file: init.sha256}
    return _contents(code, folder), _contents(model, folder)


def _contents(hashes: Mapping[str, str], folder: Path) -> dict[str, bytes]:
    found = {}
    for file, sha256 in hashes.items():
        path = folder.absolute() / file
        if not path.is_relative_to(folder.absolute()):
            raise InputError(
                f"{file} is not in {folder}, where a new peer would look for it; move it there, "
                "and name it by its path in that folder"
            )
        content = read(path, REMEDY)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise InputError(f"{file} has just changed; run this again")
        found[str(path.relative_to(folder.absolute()))] = content
    return found
