"""Reports about real peers: progress, traffic and errors of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from peerage.privacy import format_epsilon
from peerage.records.rows import RunRecord
from peerage.report.tables import duration, labels, size, tables_of_columns

FEW = 64  # no table for more peers than this
# Columns by title, and whether all tables have them; others only if a peer has a value.
COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str], bool], ...] = (
    ("peer", lambda peer: str(peer["name"]), True),
    ("state", lambda peer: _state(peer), True),
    ("round", lambda peer: str(peer.get("rounds", "-")), True),
    ("starts", lambda peer: str(peer.get("starts", "-")), False),
    ("epsilon", lambda peer: _epsilon(peer), False),
    ("payload", lambda peer: size(peer.get("bytes_sent")), True),
    ("on the wire", lambda peer: size(peer.get("wire_bytes")), True),
    ("errors", lambda peer: _errors(peer) or "-", True),
)
UNHEARD = ("peer", "did not hear", "in rounds")


def is_network_run(record: RunRecord) -> bool:
    """Whether the run was between real peers."""
    return bool(record.summary.get("peers"))


def traffic(records: Sequence[RunRecord]) -> dict[str, str]:
    """A sentence about the traffic of each run between real peers, by name."""
    pairs = zip(labels(records), records, strict=True)
    return {name: _sentence(record.summary) for name, record in pairs if is_network_run(record)}


def _sentence(summary: Mapping[str, Any]) -> str:
    known = [peer for peer in summary["peers"] if "bytes_sent" in peer]
    text = (
        f"{len(known)} real peers sent {size(summary['bytes_sent'])} of payload, "
        f"{size(summary.get('wire_bytes'))} on the wire"
    )
    errors = _errors(summary)
    return f"{text}; errors: {errors}." if errors else f"{text}."


def table(record: RunRecord) -> list[list[str]]:
    """Titles, and one row per peer, as text; empty if there are no real peers, or too many."""
    peers = record.summary.get("peers", [])
    if not 0 < len(peers) <= FEW:
        return []
    columns = [
        [title, *texts]
        for title, text, always in COLUMNS
        if (texts := [text(peer) for peer in peers]) and (always or set(texts) != {"-"})
    ]
    return [list(line) for line in zip(*columns, strict=True)]


def unheard(record: RunRecord) -> list[list[str]]:
    """Which peers did not hear which others in which rounds, if the peers recorded it."""
    return [
        [peer["name"], sender, rounds]
        for peer in record.summary.get("peers", [])
        for sender, rounds in peer.get("unheard", {}).items()
    ]


def is_joined(record: RunRecord) -> bool:
    """Whether the record was made from the folders of single peers."""
    return bool(record.summary.get("joined"))


def name_of(record: RunRecord, node: int) -> str:
    """The name of a peer, or the number of a node of a simulation."""
    peers = record.summary.get("peers", [])
    return str(peers[node]["name"]) if node < len(peers) else str(node)


def caveats(record: RunRecord) -> list[str]:
    """What to know about the numbers of a record that was made from the folders of peers."""
    if not is_joined(record):
        return []
    peers = record.summary["peers"]
    given = [peer for peer in peers if "versions" in peer]
    found = []
    missing = [peer["name"] for peer in peers if peer not in given]
    if missing:
        found.append(
            f"There is no folder of {', '.join(missing)}: all numbers are about the other "
            f"{len(given)} of {len(peers)} peers."
        )
    planned = record.summary.get("rounds_planned")
    open_ends = [peer for peer in given if peer["state"] != "finished"]
    if open_ends:
        states = ", ".join(f"{peer['name']} after round {peer['rounds']}" for peer in open_ends)
        found.append(f"Not finished, with {planned} rounds planned: {states}.")
    for package, effect in (("peerage", ""), ("torch", "; the last digits of results may differ")):
        by_version = _grouped({peer["name"]: peer["versions"][package] for peer in given})
        if len(by_version) > 1:
            found.append(f"The peers ran different versions of {package}: {by_version}{effect}.")
    by_revision = _grouped({peer["name"]: str(peer["revision"]) for peer in given})
    if len(by_revision) > 1:
        found.append(f"The peers had different revisions of the network file: {by_revision}.")
    unsigned = [peer["name"] for peer in given if not peer["signed"]]
    if unsigned:
        found.append(f"The network file was not signed at {', '.join(unsigned)}.")
    return found


class _Groups(dict[str, list[str]]):
    """Names of peers by a value, as in `2.4.0 at node-0, node-1 and 2.5.0 at node-2`."""

    def __str__(self) -> str:
        return " and ".join(f"{value} at {', '.join(names)}" for value, names in self.items())


def _grouped(values: Mapping[str, str]) -> _Groups:
    found = _Groups()
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return found


def _state(peer: Mapping[str, Any]) -> str:
    """The state of a peer, with the rounds that it missed, and those in which it had paused."""
    texts = [str(peer.get("state", "-"))]
    if peer.get("missed"):
        texts.append(f"missed rounds {peer['missed']}")
    if peer.get("skipped"):
        texts.append(f"of them {peer['skipped']} skipped to catch up")
    if peer.get("paused"):
        seconds = duration(peer["paused_seconds"])
        texts.append(f"paused for {seconds} in rounds {peer['paused']}")
    return ", ".join(texts)


def _epsilon(peer: Mapping[str, Any]) -> str:
    return format_epsilon(peer["epsilon"]) if "epsilon" in peer else "-"


def _errors(counted: Mapping[str, Any]) -> str:
    """Error counts by reason, the most frequent first."""
    found = sorted(counted.get("counters", {}).items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count} {reason}" for reason, count in found)


def peer_tables(record: RunRecord, width: int = 80) -> list[Table]:
    """The table of peers for a terminal, in parts if it is too wide; none if it has no rows."""
    found = table(record)
    if not found:
        return []
    titles, *rows = found
    return tables_of_columns(titles, rows, width, (0, 1, len(titles) - 1))
