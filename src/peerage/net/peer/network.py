"""The network file: the peers of a run, their addresses and their timeouts."""

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peerage import specs
from peerage.engine.prepare import build_graph
from peerage.errors import InputError, check_choice, did_you_mean
from peerage.experiment.experiment import Experiment
from peerage.experiment.identity import content_identity, own_code
from peerage.experiment.outside import CodeGate, code_gate
from peerage.experiment.toml import toml
from peerage.graphs.faults import Faults
from peerage.net.peer.dialling import check_partners
from peerage.net.trust.identity import NAME
from peerage.net.wire.address import Address
from peerage.net.wire.header import NUMBER_LIMIT, RUN, WIRES, escaped

SETTING_LIMIT = 300  # characters of a setting in a message about differences

MAJORITY = "majority"  # more than half of the members


@dataclass(frozen=True)
class Member:
    """One peer: its identity and its address.

    A peer that dials out has no address: it opens no port, and the others call it over connections
    that it has opened.
    """

    name: str
    address: str = ""
    dials_out: bool = False
    examples: int | None = None  # training examples that it must state; None: any number

    def __post_init__(self) -> None:
        check_examples(self.examples, f"examples of {self.name}", 0)
        if not NAME.fullmatch(self.name):
            raise InputError(
                f"peer name {self.name!r} must consist of lower-case letters, digits and hyphens, "
                "such as node-3"
            )
        if not self.dials_out:
            Address.parse(self.address, of=self.name)
        elif self.address:
            raise InputError(
                f"{self.name} dials out, so nobody uses its address {self.address!r}; remove "
                "address or dials_out"
            )

    @property
    def place(self) -> str:
        """Its address, or that it has none, for people."""
        return "dials out" if self.dials_out else self.address

    @property
    def settings(self) -> dict[str, Any]:
        """Its table in the network file."""
        return {
            "name": self.name,
            **({"dials_out": True} if self.dials_out else {"address": self.address}),
            **({} if self.examples is None else {"examples": self.examples}),
        }


@dataclass(frozen=True)
class Timeouts:
    """How long a peer waits, in seconds."""

    start: float = 60.0  # for all peers, before round 1
    message: float = 60.0  # for a message of a reachable peer
    idle: float = 5.0  # of silence, until a peer counts as unreachable
    alone: float = 3600.0  # without contact to any other peer, until a peer ends; may be inf
    stay: float = 30.0  # after the last round, for a peer that was lost less than this ago

    def __post_init__(self) -> None:
        for option in fields(self):
            seconds = getattr(self, option.name)
            if not 0 < seconds < float("inf") and (option.name, seconds) != ("alone", float("inf")):
                raise InputError(
                    f"{option.name} must be a number of seconds above 0, got {seconds}"
                )


@dataclass(frozen=True)
class Network:
    """The settings that all peers of a run share; a peer's number is its index in the list."""

    run: str
    experiment: Experiment
    members: tuple[Member, ...]
    timeouts: Timeouts = Timeouts()
    wire: str = (
        "fp32"  # format of float32 tensors in messages; bf16 and int8 are smaller, and round
    )
    pack: bool = False  # compress messages with zstd where that makes them smaller
    ahead: int = 2  # rounds that a peer may be ahead of another
    quorum: int | str = MAJORITY  # peers that must be in contact to run a round
    revision: int = 1  # of the network file; a higher one replaces it (`revisions`)
    from_round: int | None = None  # the first round to which a revision above 1 applies
    max_examples: int | None = None  # training examples that any member may state

    def __post_init__(self) -> None:
        if not RUN.fullmatch(self.run):
            raise InputError(
                f"run {self.run!r} must be 1 to 64 letters, digits, hyphens or underscores"
            )
        check_choice("wire", self.wire, WIRES)
        if self.wire != "fp32" and self.experiment.algorithm.lossless_messages:
            raise InputError("this algorithm requires lossless messages; use wire fp32")
        if not 1 <= self.ahead <= 100:
            raise InputError(f"ahead must be 1 to 100 rounds, got {self.ahead}")
        check_quorum(self.quorum, len(self.members))
        check_examples(self.max_examples, "max_examples", 1)
        self._check_revision()
        if self.experiment.until is not None:
            raise InputError(
                "until requires the mean over all nodes, which no peer knows; remove it"
            )
        if self.experiment.evaluation.spread:
            raise InputError(
                "spread requires the models of all nodes, which no peer has; remove it"
            )
        wanted = self.experiment.nodes_and_hub
        if len(self.members) != wanted:
            extra = ", the last of them the hub" if self.experiment.algorithm.with_hub else ""
            raise InputError(
                f"the network file lists {len(self.members)} peers and the experiment has {wanted} "
                f"nodes{extra}; make them equal"
            )
        for what in ("name", "address"):
            values = list(filter(None, (getattr(member, what) for member in self.members)))
            twice = next((value for value in values if values.count(value) > 1), None)
            if twice is not None:
                raise InputError(f"two peers have the {what} {twice!r}; each needs its own")
        if self.experiment.pooled:
            raise InputError(
                "pooled trains one node on all data and cannot use a network; remove it"
            )
        if len(self.dialling) > 1:
            graph = build_graph(self.experiment, wanted)
            names = [member.name for member in self.members]
            check_partners(self.experiment.algorithm, graph, self.dialling, names)

    @property
    def dialling(self) -> frozenset[int]:
        """The peers that dial out."""
        return frozenset(i for i, member in enumerate(self.members) if member.dials_out)

    @property
    def addresses(self) -> dict[int, str]:
        """The addresses of the peers that have one."""
        return {i: m.address for i, m in enumerate(self.members) if not m.dials_out}

    def can_talk(self, a: int, b: int) -> bool:
        """Whether two peers can exchange messages: at least one of them can be reached."""
        return not {a, b} <= self.dialling

    def _check_revision(self) -> None:
        if self.revision < 1:
            raise InputError(f"revision must be at least 1, got {self.revision}")
        if (self.from_round is None) != (self.revision == 1):
            raise InputError(
                f"revision {self.revision} with from_round {self.from_round}: from_round is the "
                "first round of a revision above 1; write the file with `peerage network change`"
            )
        if self.from_round is not None and not 1 <= self.from_round <= self.experiment.rounds:
            raise InputError(
                f"from_round must lie in 1 to {self.experiment.rounds}, the number of rounds, "
                f"got {self.from_round}"
            )

    def number(self, name: str) -> int:
        """The number of the node with this name."""
        return number_of(name, self.members)

    def added_by_revision(self, number: int) -> bool:
        """Whether this revision of the network file added the peer."""
        joined = self.experiment.faults.joined.get(number, 0)
        return self.from_round is not None and joined >= self.from_round

    @property
    def shared_settings(self) -> dict[str, str]:
        """The settings that must be equal on all peers, as flat text."""
        table = content_identity(self.experiment)
        names = ", ".join(member.name for member in self.members)
        revision = {"revision": str(self.revision)} if self.revision > 1 else {}
        settings = {"run": self.run, "peers": names, "wire": self.wire}
        return {**settings, **revision, **flat(table)}

    def to_toml(self, experiment: str, code: Mapping[str, str] | None = None) -> str:
        """The network file; `experiment` is the experiment file's path relative to it.

        `code` has the hashes of own code by file, if the files are not where they were loaded.
        """
        hashes = own_code(self.experiment) if code is None else code
        files = [{"file": file, "sha256": sha256} for file, sha256 in hashes.items()]
        settings = {
            "run": self.run,
            "experiment": experiment,
            "wire": self.wire,
            "pack": self.pack,
            "ahead": self.ahead,
            "quorum": self.quorum,
            **({} if self.max_examples is None else {"max_examples": self.max_examples}),
            **(
                {"revision": self.revision, "from_round": self.from_round}
                if self.revision > 1
                else {}
            ),
            "timeouts": specs.plain(self.timeouts),
            "peer": [member.settings for member in self.members],
            **({"code": files} if files else {}),
        }
        return toml(settings)

    @staticmethod
    def table(path: Path) -> dict[str, Any]:
        """The content of a network file, with known keys only."""
        try:
            table = tomllib.loads(_text(path, f"the network file {path}"))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not valid TOML: {error}") from None
        known = {"run", "experiment", "wire", "pack", "ahead", "quorum", "timeouts", "peer", "code"}
        known |= {"revision", "from_round", "max_examples"}
        known |= {"patience"}  # of earlier versions
        for key in table:
            if key not in known:
                raise InputError(f"{path} has no key {key!r}; {did_you_mean(key, known)}")
        for key in ("run", "experiment", "peer"):
            if key not in table:
                raise InputError(f"{path} has no {key}; a network file needs run, experiment, peer")
        return table

    @staticmethod
    def load_members(path: Path) -> tuple[Member, ...]:
        """The members in a network file; nothing of its experiment is read, nor of own code."""
        return _members(Network.table(path), path)

    @classmethod
    def load(cls, path: Path, allowed: Collection[str] = ()) -> "Network":
        """Read a network file and its experiment.

        Own code that the experiment names is loaded only if its SHA-256 is allowed.
        """
        table = cls.table(path)
        source = path.parent / str(table["experiment"])
        text = _text(source, f"the experiment {source} that {path} names")
        members = _members(table, path)
        with code_gate(CodeGate.of_network(path, table, allowed)):
            experiment = Experiment.from_toml(text, str(source), source.parent)
        timeouts = specs.construct(Timeouts, _timeouts(table), f"{path}: timeouts")
        return cls(
            str(table["run"]),
            experiment,
            members,
            timeouts,
            str(table.get("wire", "fp32")),
            specs.convert(table.get("pack", False), bool, f"{path}: pack"),
            specs.convert(table.get("ahead", 2), int, f"{path}: ahead"),
            table.get("quorum", MAJORITY),
            specs.convert(table.get("revision", 1), int, f"{path}: revision"),
            specs.convert(table.get("from_round"), int | None, f"{path}: from_round"),
            specs.convert(table.get("max_examples"), int | None, f"{path}: max_examples"),
        )


def number_of(name: str, members: Sequence[Member]) -> int:
    """The number of the member with this name."""
    names = [member.name for member in members]
    if name not in names:
        raise InputError(f"the network has no peer {name!r}; {did_you_mean(name, names)}")
    return names.index(name)


def _members(table: Mapping[str, Any], path: Path) -> tuple[Member, ...]:
    return tuple(
        specs.construct(Member, entry, f"{path}: peer {number}")
        for number, entry in enumerate(_tables(table["peer"], path))
    )


def check_rejoin(rejoin: str) -> None:
    """Check the option that says whose model a peer continues with after missed rounds."""
    check_choice("rejoin", rejoin, ("own", "neighbour"))


def check_examples(count: int | None, what: str, least: int) -> None:
    """Check a number of training examples in the network file."""
    if count is not None and not least <= count <= NUMBER_LIMIT:
        raise InputError(f"{what} must be {least} to {NUMBER_LIMIT}, got {count}")


def check_quorum(quorum: object, members: int) -> None:
    """Check the number of peers that must be in contact with each other."""
    if quorum != MAJORITY and (type(quorum) is not int or not 1 <= quorum <= members):
        raise InputError(
            f"quorum must be {MAJORITY} or 1 to {members}, the number of peers, got {quorum!r}"
        )


def least_contacts(quorum: int | str, members: int) -> int:
    """The number of members that must be in contact, out of all members of a round.

    >>> least_contacts("majority", 4), least_contacts(2, 5), least_contacts(3, 2)
    (3, 2, 2)
    """
    return min(quorum, members) if isinstance(quorum, int) else members // 2 + 1


def parse_quorum(text: str) -> int | str:
    """The quorum from the command line; `check_quorum` checks it.

    >>> parse_quorum("majority"), parse_quorum("2")
    ('majority', 2)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text


def settings_hash(shared_settings: Mapping[str, str]) -> str:
    """A hash of the shared settings, 32 hexadecimal digits."""
    return hashlib.sha256(json.dumps(shared_settings, sort_keys=True).encode()).hexdigest()[:32]


def unrevised(shared_settings: Mapping[str, str]) -> dict[str, str]:
    """The shared settings without those that a revision of the network file may change.

    >>> unrevised({"run": "a", "rounds": "20", "topology.name": "ring", "faults.join": "4@9"})
    {'run': 'a'}
    """
    names = ("peers", "revision", "nodes", "rounds", "faults.join", "faults.leave")
    unset = flat({"faults": specs.plain(Faults())})  # a section of defaults may be left out
    return {
        key: value
        for key, value in shared_settings.items()
        if key not in names and not key.startswith("topology.") and unset.get(key) != value
    }


def differing(own: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The settings in which two experiments differ, with both values, escaped and shortened."""

    def of(settings: Mapping[str, str], key: str) -> str:
        return escaped(settings.get(key, "not set"), SETTING_LIMIT)

    keys = [key for key in {**own, **other} if own.get(key) != other.get(key)]
    return [
        f"{escaped(key, SETTING_LIMIT)} is {of(own, key)} here and {of(other, key)} there"
        for key in keys
    ]


def remedy_for(own: Mapping[str, str], other: Mapping[str, str]) -> str:
    """What to do if the settings of two peers differ."""
    by_data = {"classes", "example", "models"}  # depend on the data of a peer, not on its files
    keys = {key for key in {**own, **other} if own.get(key) != other.get(key)}
    if "example" in keys and keys <= by_data:
        return "give all peers data of the same kind, also the hub, with --test"
    here, there = (len(known.get("classes", "").split(", ")) for known in (own, other))
    if here == there or not keys <= by_data:
        return "give all peers the same files"
    which = "this peer" if here < there else "that peer"
    return f"if {which} lacks classes of the network, start it with --classes {max(here, there)}"


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"local": {"lr": 0.1}}` as `{"local.lr": "0.1"}`."""
    found: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = json.dumps(value)
    return found


def _text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {what}: {error}") from None


def _tables(value: Any, path: Path) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise InputError(f"{path}: peer must be tables; write [[peer]] with a name and an address")
    return value


def _timeouts(table: Mapping[str, Any]) -> Any:
    """The section `timeouts`, called `patience` in network files of earlier versions."""
    if "timeouts" in table or not isinstance(table.get("patience"), Mapping):
        return table.get("timeouts", table.get("patience", {}))
    names = {"step": "message", "gone": "idle"}
    return {names.get(key, key): value for key, value in table["patience"].items()}
