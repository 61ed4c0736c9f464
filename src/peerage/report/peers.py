"""Reports about real peers: progress, traffic and errors of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from peerage.records.rows import RunRecord
from peerage.report.tables import labels, size, text_table

FEW = 64  # no table for more peers than this
TITLES = ("peer", "state", "round", "starts", "payload", "on the wire", "errors")


def is_network_run(record: RunRecord) -> bool:
    """Whether the run was between real peers."""
    return bool(record.summary.get("peers"))


def traffic(records: Sequence[RunRecord]) -> dict[str, str]:
    """A sentence about the traffic of each run between real peers, by name."""
    pairs = zip(labels(records), records, strict=True)
    return {name: _sentence(record.summary) for name, record in pairs if is_network_run(record)}


def _sentence(summary: Mapping[str, Any]) -> str:
    text = (
        f"{len(summary['peers'])} real peers sent {size(summary['bytes_sent'])} of payload, "
        f"{size(summary.get('wire_bytes'))} on the wire"
    )
    errors = _errors(summary)
    return f"{text}; errors: {errors}." if errors else f"{text}."


def lines(record: RunRecord) -> list[list[str]]:
    """One table row per peer, as text; empty if there are no real peers, or too many."""
    peers = record.summary.get("peers", [])
    return [
        [
            peer["name"],
            _state(peer),
            str(peer.get("rounds", "-")),
            str(peer["starts"]),
            size(peer.get("bytes_sent")),
            size(peer.get("wire_bytes")),
            _errors(peer) or "-",
        ]
        for peer in (peers if len(peers) <= FEW else ())
    ]


def _state(peer: Mapping[str, Any]) -> str:
    """The state of a peer, with the rounds that it missed."""
    state = str(peer.get("state", "-"))
    return f"{state}, missed rounds {peer['missed']}" if peer.get("missed") else state


def _errors(counted: Mapping[str, Any]) -> str:
    """Error counts by reason, the most frequent first."""
    found = sorted(counted.get("counters", {}).items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count} {reason}" for reason, count in found)


def peer_table(record: RunRecord) -> Table | None:
    """The table of peers for a terminal; None if it has no rows."""
    found = lines(record)
    return text_table(TITLES, found, left=(0, 1, len(TITLES) - 1)) if found else None
