"""Real peers in reports: what each of them did, and what its messages came to on the wire."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from peerage.records.rows import RunRecord
from peerage.report.tables import labels, size

FEW = 64  # more peers than this are not told apart
TITLES = ("peer", "state", "round", "starts", "payload", "on the wire", "troubles")


def is_network_run(record: RunRecord) -> bool:
    """Whether the run was between real peers."""
    return bool(record.summary.get("peers"))


def traffic(records: Sequence[RunRecord]) -> dict[str, str]:
    """What went over the wire in runs between real peers, in a sentence, by name."""
    pairs = zip(labels(records), records, strict=True)
    return {name: _sentence(record.summary) for name, record in pairs if is_network_run(record)}


def _sentence(summary: Mapping[str, Any]) -> str:
    text = (
        f"{len(summary['peers'])} real peers sent {size(summary['bytes_sent'])} of payload, "
        f"{size(summary.get('wire_bytes'))} on the wire"
    )
    troubles = _troubles(summary)
    return f"{text}; troubles: {troubles}." if troubles else f"{text}."


def lines(record: RunRecord) -> list[list[str]]:
    """What each peer did, as text; nothing where there are no real peers, or too many."""
    peers = record.summary.get("peers", [])
    return [_line(peer) for peer in peers] if len(peers) <= FEW else []


def _line(peer: Mapping[str, Any]) -> list[str]:
    return [
        peer["name"],
        peer.get("state", "-"),
        str(peer.get("rounds", "-")),
        str(peer["starts"]),
        size(peer.get("bytes_sent")),
        size(peer.get("wire_bytes")),
        _troubles(peer) or "-",
    ]


def _troubles(counted: Mapping[str, Any]) -> str:
    """The commonest first."""
    found = sorted(counted.get("counters", {}).items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count} {reason}" for reason, count in found)


def peer_table(record: RunRecord) -> Table | None:
    """The same for a terminal; None where there is nothing to tell."""
    found = lines(record)
    if not found:
        return None
    table = Table(header_style="bold")
    for number, title in enumerate(TITLES):
        left = number < 2 or title == TITLES[-1]
        table.add_column(title, justify="left" if left else "right")
    for line in found:
        table.add_row(*map(Text, line))
    return table
