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

import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerage.data import DATASETS
from peerage.data.datasets import dataset_info
from peerage.display import counted
from peerage.engine.prepare import build_graph
from peerage.errors import PeerageWarning
from peerage.experiment.experiment import Experiment, display_name
from peerage.files import disk_errors, write_bytes
from peerage.models import MODELS, default_model
from peerage.models.files import read_file
from peerage.net.deploy.code import FOLDER, ShippedCode, ship
from peerage.net.deploy.guide import guides
from peerage.net.deploy.hosts import PORT, assign_hosts, check_port, read_hosts
from peerage.net.deploy.message_sizes import MessageSizes
from peerage.net.peer.network import MAJORITY, Member, Network, Timeouts
from peerage.net.trust.certs import Authority
from peerage.net.trust.keyfiles import REMEDY, private_folder, read_certificate
from peerage.net.trust.signature import REQUIRED, REQUIRED_TEXT, sign_network
from peerage.net.wire.address import Address
from peerage.privacy import check_accounting, check_epsilon_limit
from peerage.runs.privacy_plan import planned_epsilon, privacy_plan
from peerage.runs.run import check_empty

START = 3600.0  # seconds to wait for all peers, which a person starts one by one


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
        hub = self.network.experiment.hub
        peers = [
            {
                "name": member.name,
                "address": None if member.dials_out else member.address,
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
            f"{peer['folder']} for {peer['address'] or 'a peer that dials out'}"
            f"{', the hub' if peer['hub'] else ''}"
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
    progress: bool = False,
) -> Exported:
    """Write a folder for every peer, all or none; `certs` is that of an existing authority.

    With `keys_at_site`, the folders have no keys: each machine makes its own. `progress` shows a
    bar in a terminal.
    """
    check_port(port, "--port")
    check_accounting(experiment.noise)
    check_epsilon_limit(stop_at_epsilon, experiment.noise)
    experiment = _with_model(experiment)
    _check_experiment(experiment)
    code = ship(_with_model_file(experiment)[0])
    check_empty(out)
    places = assign_hosts(read_hosts(hosts, port), experiment)
    members = tuple(
        Member(f"node-{i}", dials_out=True) if place is None else Member(f"node-{i}", str(place))
        for i, place in enumerate(places)
    )
    timeouts = Timeouts(start=START)
    network = Network(
        secrets.token_hex(8), experiment, members, timeouts, wire, pack, quorum=quorum
    )
    sizes = MessageSizes.of_experiment(experiment, wire)
    known = None if certs is None else Authority.load(certs)
    if known is not None:
        check_names(known, members)
    serials: list[int] = []
    with forgotten_on_failure(known, serials), all_or_nothing(out) as aside:
        authority = known or Authority.create(aside / "authority", "peerage")
        numbered = enumerate(places)
        for number, place in counted(numbered, "folders", len(places)) if progress else numbered:
            folder = aside / members[number].name
            serials += issue_certificates(authority, place, folder, keys_at_site)
            _write(folder, network, number, place, code, stop_at_epsilon, keys_at_site)
            sign_network(authority, folder / "network.toml")
    home = out / "authority" if known is None else known.folder
    return Exported(out, network, home, sizes, keys_at_site)


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


def check_names(authority: Authority, members: Sequence[Member]) -> None:
    """Warn if valid certificates with these names exist; their holders can act as the new peers."""
    names = {member.name for member in members}
    old = {issued.name: issued for issued in authority.issued() if issued.status == "valid"}
    if reused := [name for name in old if name in names]:
        warnings.warn(
            f"the authority in {authority.folder} has issued {', '.join(reused)} before, and those "
            "keys are valid in this network too; to prevent that, revoke them and run this again",
            PeerageWarning,
            stacklevel=3,
        )


# Files


@contextmanager
def forgotten_on_failure(authority: Authority | None, serials: Sequence[int]) -> Iterator[None]:
    """Remove the records of these certificates after an error, in which their keys are deleted.

    So they never have to be revoked.
    """
    try:
        yield
    except BaseException:
        if authority is not None:
            for serial in serials:
                (authority.folder / "issued" / f"{serial:x}.pem").unlink(missing_ok=True)
        raise


@contextmanager
def all_or_nothing(out: Path) -> Iterator[Path]:
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


def issue_certificates(
    authority: Authority, place: Address | None, folder: Path, keys_at_site: bool
) -> list[int]:
    """Create the folder of a peer with its certificates; return the serials that were issued."""
    certs = folder / "certs"
    with disk_errors(folder, REMEDY):
        certs.mkdir(mode=0o700, parents=True)
        folder.chmod(0o700)
    write_bytes(certs / REQUIRED, REQUIRED_TEXT.encode(), REMEDY)
    if keys_at_site:
        authority.copy_public_files(certs)
        return []
    hosts = ["localhost", "127.0.0.1"] if place is None else [place.host]
    identity = authority.issue(folder.name, hosts=hosts, into=certs)
    return [read_certificate(identity.certificate, REMEDY).serial_number]


def _write(
    folder: Path,
    network: Network,
    number: int,
    place: Address | None,
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
        **guides(network, number, place, code, limit, keys_at_site),
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
