"""The record of a whole network, from the folders that its sites have shared.

Only records are needed: `peer.json`, `setup.json` and `metrics.jsonl`, and `summary.json` of a peer
that has ended. Nothing of own code is loaded, and no model is read.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from peerage import specs
from peerage.errors import InputError
from peerage.experiment.identity import identity_of
from peerage.experiment.outside import by_content
from peerage.files import read_json
from peerage.net.deploy.collect import joined_rows
from peerage.net.peer.network import differing, flat, unrevised
from peerage.net.peer.progress import State
from peerage.net.peer.recorder import PAUSED
from peerage.net.trust.identity import NAME
from peerage.privacy import Noise, format_epsilon, privacy_report
from peerage.records.environment import CODE, code_record, recorded_code
from peerage.records.rows import OWNER, Row, RunRecord, is_peer_folder, read_metrics
from peerage.runs.facts import RunFacts
from peerage.runs.saved import EXPERIMENT
from peerage.runs.summary import missed_rounds, spans, summary_of, totals

UNFINISHED = "not finished"  # the state of a peer without a summary: it runs, or was ended
SHARED = (  # keys of `setup.json` with facts about the whole network
    "classes",
    "example",
    "constants",
    "models_at",
    "hub",
    "edges",
    "topology",
    "parameters",
    "clusters",
    "allocation",
)
ABSENT = "no folder"  # the state of a member whose folder was not given


def joint_record(folders: Sequence[Path]) -> RunRecord:
    """The record of the network whose peers made these folders; some may be missing."""
    peers = [PeerFolder.load(Path(folder)) for folder in folders]
    if not peers:
        raise InputError("a joint report needs the folder of at least one peer")
    newest = max(peers, key=lambda peer: peer.revision)
    for peer in peers:
        _check_same_network(newest, peer)
    by_node: dict[int, PeerFolder] = {}
    for peer in peers:
        if peer.node in by_node:
            raise InputError(
                f"{by_node[peer.node].folder} and {peer.folder} are both of {peer.name}; give one "
                "of them"
            )
        by_node[peer.node] = peer
    return _Joint(newest, dict(sorted(by_node.items()))).record()


@dataclass(frozen=True)
class PeerFolder:
    """The records in the folder of one peer."""

    folder: Path
    owner: dict[str, Any]
    setup: dict[str, Any]
    summary: dict[str, Any]  # empty if the peer has not ended
    rows: list[Row]
    experiment: dict[str, Any]  # as a table
    facts: RunFacts

    @classmethod
    def load(cls, folder: Path) -> "PeerFolder":
        if not is_peer_folder(folder):
            raise InputError(
                f"{folder} is not the folder of a peer, as it has no {OWNER}; give folders that "
                "`peerage node` made"
            )
        owner, setup = read_json(folder / OWNER), read_json(folder / "setup.json")
        if "facts" not in setup:
            raise InputError(
                f"{folder} was made by an earlier version, which did not record what a report "
                "needs; start that peer once more with this version"
            )
        summary, metrics = folder / "summary.json", folder / "metrics.jsonl"
        rows = read_metrics(metrics) if metrics.exists() else []
        with _damaged(folder):
            found = cls(
                folder,
                owner,
                setup,
                read_json(summary) if summary.exists() else {},
                [row for row in rows if row["scope"] == "node"],
                tomllib.loads(setup[EXPERIMENT]),
                specs.construct(RunFacts, setup["facts"], "facts"),
            )
            found.check()
        return found

    def check(self) -> None:
        """Raise ValueError if the files do not fit together; they come from other machines."""
        names = self.setup["peers"]
        if not all(isinstance(name, str) and NAME.fullmatch(name) for name in names):
            raise ValueError("a name of a peer is not valid")
        if self.node not in range(len(names)) or names[self.node] != self.setup["name"]:
            raise ValueError(f"node {self.node} is not {self.setup['name']}")
        if any(row["node"] != self.node for row in self.rows):
            raise ValueError(f"a row is not of node {self.node}")
        _ = self.revision, self.settings, self.state  # these raise it too

    @property
    def run(self) -> str:
        return str(self.owner["run"])

    @property
    def node(self) -> int:
        return int(self.owner["node"])

    @property
    def name(self) -> str:
        return str(self.setup["name"])

    @property
    def revision(self) -> int:
        return int(self.owner.get("revision", 1))

    @cached_property
    def settings(self) -> dict[str, str]:
        """The settings that all peers share, as flat text; own code by its hash."""
        code = recorded_code(self.setup["environment"])
        table = flat(by_content(identity_of(self.experiment), code))
        shared = {key: self.setup.get(key) for key in ("peers", "wire", "classes", "example")}
        return {**table, **flat(shared), **flat({"constants": self.setup.get("constants")})}

    @property
    def ended(self) -> bool:
        """Whether the summary is about the last row; a peer may have been started again."""
        last = max((row["round"] for row in self.rows), default=0)
        return bool(self.summary) and int(self.summary["rounds"]) >= last

    @property
    def state(self) -> str:
        if (self.folder / PAUSED).is_file():
            return str(read_json(self.folder / PAUSED)["state"])
        return str(self.summary["state"]) if self.ended else UNFINISHED


@contextmanager
def _damaged(folder: Path) -> Iterator[None]:
    """Turn errors about the content of files into one line."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, InputError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            f"the records in {folder} are damaged ({reason}); copy the folder again"
        ) from None


def _check_same_network(newest: PeerFolder, peer: PeerFolder) -> None:
    """Raise InputError if two folders are not of one network."""
    if peer.run != newest.run:
        raise InputError(
            f"{newest.folder} is of run {newest.run} and {peer.folder} of run {peer.run}; give "
            "folders of one network"
        )
    ours, theirs = newest.settings, peer.settings
    if peer.revision != newest.revision:
        members = newest.setup["peers"]
        if members[: len(peer.setup["peers"])] != peer.setup["peers"]:
            raise InputError(
                f"{peer.folder} has revision {peer.revision} of the network file and "
                f"{newest.folder} revision {newest.revision}, which lists other members under the "
                "same numbers; give folders of one network"
            )
        ours, theirs = unrevised(ours), unrevised(theirs)
    found = differing(ours, theirs)
    if found:
        raise InputError(
            f"{newest.folder} and {peer.folder} have the same run but different settings: "
            f"{'; '.join(found[:3])}; give folders of one network"
        )


@dataclass(frozen=True)
class _Joint:
    """The peers of one network whose folders were given."""

    newest: PeerFolder  # with the highest revision
    peers: Mapping[int, PeerFolder]  # by node

    def record(self) -> RunRecord:
        newest, peers = self.newest, self.peers.values()
        rows = [row for peer in peers for row in peer.rows]
        done = all(peer.state == State.FINISHED for peer in peers)
        with _damaged(newest.folder):
            joined = list(joined_rows(newest.facts, rows, all_rounds=done))
            summary = summary_of(
                newest.facts,
                joined,
                run=newest.run,
                status="finished" if done else "running",
                seconds=max((_seconds(peer.rows) for peer in peers), default=0.0),
                digest=None,
                privacy=self._privacy(rows),
            )
            sums = totals(rows)
            summary |= {key: sums[key] for key in ("bytes_sent", "wire_bytes", "counters")}
            members = [self._member(node) for node in range(len(self.names))]
            summary |= {"wire": newest.setup["wire"], "peers": members, "joined": True}
            return RunRecord(
                folder=newest.folder,
                experiment=newest.experiment,
                setup=self._setup(),
                summary=summary,
                environment=self._environment(),
                network=tuple(row for row in joined if row["scope"] == "network"),
                nodes=tuple(row for row in joined if row["scope"] == "node"),
                groups=tuple(row for row in joined if row["scope"] == "group"),
                peers=tuple(rows),
            )

    @property
    def names(self) -> list[str]:
        names: list[str] = self.newest.setup["peers"]
        return names

    def _member(self, node: int) -> dict[str, Any]:
        """The entry of a member in the summary."""
        if node not in self.peers:
            return {"name": self.names[node], "state": ABSENT}
        peer, facts = self.peers[node], self.newest.facts
        scheduled = [r for r in range(1, facts.rounds + 1) if facts.is_present(node, r)]
        missed = missed_rounds(peer.rows, scheduled)
        skipped = sum(row.get("skipped", 0) for row in peer.rows)
        paused = [row for row in peer.rows if row.get("paused")]
        spent = [row["epsilon"] for row in peer.rows if "epsilon" in row]
        versions = peer.setup["environment"]
        return {
            "name": peer.name,
            "state": peer.state,
            **({"missed": missed} if missed else {}),
            **({"skipped": skipped} if skipped else {}),
            **({"paused": spans(row["round"] for row in paused)} if paused else {}),
            **({"paused_seconds": sum(row["paused"] for row in paused)} if paused else {}),
            **({"epsilon": spent[-1]} if spent else {}),
            "unheard": self._unheard(peer),
            "revision": peer.revision,
            "signed": bool(peer.setup["signed"]),
            "versions": {key: str(versions.get(key)) for key in ("peerage", "torch")},
            **totals(peer.rows),
        }

    def _unheard(self, peer: PeerFolder) -> dict[str, str]:
        """The rounds in which messages of other members were missing, by their names."""
        found: dict[int, list[int]] = {}
        for row in peer.rows:
            for sender in row.get("missing", []):
                found.setdefault(sender, []).append(row["round"])
        return {self.names[sender]: spans(set(found[sender])) for sender in sorted(found)}

    def _setup(self) -> dict[str, Any]:
        """The setup as a simulation has it; unknown numbers are None."""
        setup = {key: self.newest.setup[key] for key in SHARED if key in self.newest.setup}
        if any("allocation" not in peer.setup for peer in self.peers.values()):  # private data
            setup.pop("allocation", None)

        def of_each(key: str) -> list[int | None]:
            known = {node: int(peer.setup[key]) for node, peer in self.peers.items()}
            return [known.get(node) for node in sorted(self.newest.facts.data_nodes)]

        tests = {count for count in of_each("test_examples") if count is not None}
        same = tests.pop() if len(tests) == 1 else of_each("test_examples")
        return {**setup, "examples": of_each("examples"), "test_examples": same}

    def _environment(self) -> dict[str, Any]:
        """The environment; a value that differs between peers names them."""
        tables = {peer.name: dict(peer.setup["environment"]) for peer in self.peers.values()}
        # Own code is the same everywhere, in another folder of each machine.
        code = {
            Path(file).name: sha256
            for table in tables.values()
            for file, sha256 in table.pop(CODE, {}).items()
        }
        keys = dict.fromkeys(key for table in tables.values() for key in table)
        common = {
            key: _common({name: table.get(key) for name, table in tables.items()}) for key in keys
        }
        return common | code_record(code)

    def _privacy(self, rows: Sequence[Row]) -> dict[str, Any] | None:
        noise = specs.construct(Noise, self.newest.experiment.get("noise", {}), "noise")
        if not noise.active:
            return None
        if not noise.private:
            return privacy_report(noise, [], secret=True)
        last = {row["node"]: row["epsilon"] for row in rows if "epsilon" in row}
        worst = None if None in last.values() else max(last.values(), default=0.0)
        return {
            "sigma": noise.sigma,
            "clip": noise.clip,
            "delta": noise.delta,
            "epsilon": worst,
            "guarantee": f"The accounts of the peers state an epsilon of at most "
            f"{format_epsilon(worst)} at delta {noise.delta:g} for the data of each, over all "
            "runs on it.",
        }


def _common(values: Mapping[str, Any]) -> Any:
    """The value that all peers have, or each value with the peers that have it."""
    texts = {name: "-" if value is None else str(value) for name, value in values.items()}
    if len(set(texts.values())) == 1:
        return next(iter(values.values()))
    by_value: dict[str, list[str]] = {}
    for name, text in texts.items():
        by_value.setdefault(text, []).append(name)
    return "; ".join(f"{text} ({', '.join(names)})" for text, names in by_value.items())


def _seconds(rows: Sequence[Row]) -> float:
    return float(sum(row["seconds"]["total"] for row in rows))
