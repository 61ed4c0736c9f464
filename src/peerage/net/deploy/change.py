"""Writes the next revision of a network file: members that join or leave, and more rounds.

The new files are beside the old ones, `network-2.toml` and `experiment-2.toml` for revision 2, as
the experiment may name files by paths that begin in that folder. A new member gets a folder of its
own, as `export` writes it.
"""

import tomllib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peerage.engine.prepare import build_graph
from peerage.errors import InputError, PeerageWarning
from peerage.experiment.experiment import Experiment
from peerage.experiment.outside import CodeGate, code_gate
from peerage.experiment.toml import merged, toml
from peerage.files import write_bytes
from peerage.graphs.topology import DynamicGraph
from peerage.net.deploy.hosts import DIALS_OUT
from peerage.net.deploy.new_site import NETWORK, new_sites
from peerage.net.peer.network import Member, Network
from peerage.net.peer.revisions import check_successor
from peerage.net.trust.certs import Authority
from peerage.net.trust.keyfiles import REMEDY
from peerage.net.trust.signature import sign_network, signature_path
from peerage.runs.privacy_plan import privacy_plan


@dataclass(frozen=True)
class Change:
    """What a revision changes."""

    from_round: int
    add: Sequence[Member] = ()
    remove: Sequence[str] = ()
    rounds: int | None = None
    topology: str | None = None


@dataclass(frozen=True)
class Changed:
    """The files of a new revision."""

    name: str  # of the network file at the peers
    network: Path
    experiment: Path
    signature: Path | None
    revision: int
    from_round: int
    folders: tuple[Path, ...] = ()  # of new members
    privacy: str | None = None  # the planned epsilon, which grows with the rounds

    @property
    def facts(self) -> dict[str, Any]:
        paths = {"network": self.network, "experiment": self.experiment}
        signature = {} if self.signature is None else {"signature": str(self.signature)}
        numbers = {"revision": self.revision, "from_round": self.from_round}
        folders = {"folders": [str(folder) for folder in self.folders]} if self.folders else {}
        found = {key: str(path) for key, path in paths.items()}
        return {**numbers, **found, **signature, **folders}

    def __str__(self) -> str:
        sign = f"sign it with `peerage certs sign-network {self.network}`"
        signed = sign if self.signature is None else f"signed in {self.signature}"
        return "\n".join(
            [
                f"revision {self.revision} is in {self.network} and {self.experiment}; {signed}",
                f"copy {self.experiment.name} to every peer, then {self.network.name} as "
                f"{self.name} and its signature as {signature_path(Path(self.name)).name}",
                f"running peers use them from round {self.from_round} on, others when they start",
                *(
                    f"move {folder} to its machine, and follow the README.txt in it"
                    for folder in self.folders
                ),
                *(["peers without --data get other parts of the data set"] * bool(self.folders)),
                *filter(None, [self.privacy]),
            ]
        )


def parse_member(text: str) -> Member:
    """Parse NAME=HOST:PORT, or NAME=dials-out for a peer that opens no port.

    >>> parse_member("node-4=10.0.0.14:7400")
    Member(name='node-4', address='10.0.0.14:7400', dials_out=False, examples=None)
    >>> parse_member("node-4=dials-out")
    Member(name='node-4', address='', dials_out=True, examples=None)
    """
    name, sign, address = text.partition("=")
    if not sign:
        raise InputError(f"--add {text!r} is not of the form NAME=HOST:PORT or NAME={DIALS_OUT}")
    return Member(name, dials_out=True) if address == DIALS_OUT else Member(name, address)


def change_network(
    path: Path,
    change: Change,
    *,
    out: Path | None = None,
    certs: Path | None = None,
    allowed: Collection[str] = (),
    keys_at_site: bool = False,
) -> Changed:
    """Write the next revision of a network file, and a folder for each new member; all or nothing.

    It is signed if the authority's folder is given, and new members need that. With `keys_at_site`
    their folders have no keys: each machine makes its own.
    """
    if change.add and certs is None:
        raise InputError(
            "--add needs --certs, the folder of the authority, which certifies the new peer"
        )
    if keys_at_site and not change.add:
        raise InputError("--keys-at-site is about new peers; give --add too, or remove it")
    authority = None if certs is None else Authority.load(certs)
    old = Network.load(path, allowed)
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    source = path.parent / str(table["experiment"])
    revision = old.revision + 1
    out = path.with_name(f"{_stem(path, old)}-{revision}.toml") if out is None else out
    target = out.with_name(f"{_stem(source, old)}-{revision}.toml")
    written = (target, out, signature_path(out))
    for file in written:
        if file.exists():
            raise InputError(f"{file} exists; remove it, or choose another --out")
    if out.parent.resolve() != path.parent.resolve():
        raise InputError(f"--out {out} must be in {path.parent}, beside {path.name}")
    experiment = toml(
        merged(tomllib.loads(source.read_text(encoding="utf-8")), _changes(old, change))
    )
    with code_gate(CodeGate.of_network(path, table, allowed)):
        built = Experiment.from_toml(experiment, str(target), source.parent)
    members = (*old.members, *change.add)
    new = replace(
        old,
        experiment=built,
        members=members,
        revision=revision,
        from_round=change.from_round,
    )
    check_successor(old, new)
    _check_graph(new)
    revised = table | {
        "experiment": target.name,
        "revision": revision,
        "from_round": change.from_round,
        "peer": [*table["peer"], *(member.settings for member in change.add)],
    }
    name = f"{_stem(path, old)}.toml"
    files = {NETWORK: toml(revised).encode(), target.name: experiment.encode()}
    with _removed_on_failure(written), ExitStack() as stack:
        folders: tuple[Path, ...] = ()
        if authority is not None and change.add:
            sites = new_sites(path, new, len(old.members), authority, files, keys_at_site)
            folders = stack.enter_context(sites)
        write_bytes(target, files[target.name], REMEDY)
        write_bytes(out, files[NETWORK], REMEDY)
        signature = None if authority is None else sign_network(authority, out)
    plan = privacy_plan(built)
    return Changed(name, out, target, signature, revision, change.from_round, folders, plan)


@contextmanager
def _removed_on_failure(files: Sequence[Path]) -> Iterator[None]:
    """Remove these new files again after an error."""
    try:
        yield
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise


def _stem(path: Path, old: Network) -> str:
    """The name of a file without the number of its revision."""
    return path.stem.removesuffix(f"-{old.revision}") if old.revision > 1 else path.stem


def _changes(old: Network, change: Change) -> dict[str, Any]:
    """The keys of the experiment that change."""
    experiment, faults = old.experiment, old.experiment.faults
    rounds = experiment.rounds if change.rounds is None else change.rounds
    if not (change.add or change.remove or change.topology or rounds != experiment.rounds):
        raise InputError("nothing changes; give --add, --remove, --rounds or --topology")
    if rounds < experiment.rounds:
        raise InputError(
            f"--rounds {rounds} is below the {experiment.rounds} rounds of the network; "
            "rounds can only be raised"
        )
    joined, left = dict(faults.joined), dict(faults.left)
    for number in range(len(old.members), len(old.members) + len(change.add)):
        joined[number] = change.from_round
    for name in change.remove:
        number = old.number(name)
        if number == experiment.hub:
            raise InputError(f"{name} is the hub, without which no peer can work; keep it")
        if left.get(number, change.from_round + 1) <= change.from_round:
            raise InputError(f"{name} has left already, in round {left[number]}; do not name it")
        left[number] = change.from_round
    stay = [number for number in range(len(old.members)) if number not in left]
    if not stay:
        raise InputError("no peer of the network would stay; start a new run instead")
    schedule = {"join": _schedule(joined), "leave": _schedule(left)}
    topology = change.topology
    if topology is None and change.add and experiment.hub is not None:
        topology = f"star:number={experiment.hub}"  # new members come after the hub
    return {
        "nodes": experiment.nodes + len(change.add),
        "rounds": rounds,
        **({"faults": schedule} if joined or left else {}),
        **({"topology": topology} if topology else {}),
    }


def _schedule(rounds: Mapping[int, int]) -> str:
    """The text of a schedule, as `parse_schedule` reads it.

    >>> _schedule({4: 6, 5: 9})
    '4@6, 5@9'
    """
    return ", ".join(f"{node}@{round}" for node, round in sorted(rounds.items()))


def _check_graph(network: Network) -> None:
    """Warn if the peers that take part from then on are not all connected with each other."""
    experiment, round = network.experiment, (network.from_round or 1) - 1
    graph = build_graph(experiment, experiment.nodes_and_hub)
    if isinstance(graph, DynamicGraph):
        return  # drawn anew for those who take part
    near = experiment.faults.membership(graph.neighbours(round), round)
    present = {n for n in range(len(near)) if experiment.faults.present(n, round)}
    reached: set[int] = set()
    waiting = [min(present)]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += near[node]
    if cut := sorted(present - reached):
        names = ", ".join(network.members[number].name for number in cut)
        warnings.warn(
            f"{names} would have no path to {network.members[min(present)].name}; "
            "choose another graph with --topology",
            PeerageWarning,
            stacklevel=3,
        )
