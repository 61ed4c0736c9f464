"""What a peer tells members and observers about itself."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from peerage.net.wire.header import SCHEMA
from peerage.records.environment import package_version

if TYPE_CHECKING:
    from peerage.net.peer.peer import Peer

MAX_NAMES = 200  # of a list in a report, which is a small answer
MAX_TEXT = 500  # characters of a text that is shown


@dataclass(frozen=True)
class Report:
    """The progress, contacts and versions of one peer."""

    round: int  # finished rounds
    rounds: int
    state: str
    accuracy: float | None  # at the last evaluation
    epsilon: float | None  # of the last row, if messages have noise
    heard: tuple[str, ...]  # peers whose messages were used in the last round
    missing: tuple[str, ...]  # peers whose messages did not arrive
    not_reached_by: tuple[str, ...]  # peers that cannot reach this one
    peerage: str  # version
    torch: str  # version
    schema: int  # of messages on the wire
    expires: str | None  # when the certificate of the peer expires
    revision: int = 1  # of its network file

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, raw: bytes) -> "Report | None":
        """The report in an answer; None if it is not one."""
        try:
            table = {"revision": 1, **json.loads(raw)}
            values = {field.name: table[field.name] for field in fields(cls)}
            for name in ("round", "rounds", "schema", "revision"):
                values[name] = int(values[name])
            for name in ("accuracy", "epsilon"):
                values[name] = None if values[name] is None else float(values[name])
            for name in ("heard", "missing", "not_reached_by"):
                values[name] = tuple(printable(one) for one in list(values[name])[:MAX_NAMES])
            for name in ("state", "peerage", "torch"):
                values[name] = printable(values[name])
            values["expires"] = None if values["expires"] is None else printable(values["expires"])
            return cls(**values)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


def report_on(peer: "Peer") -> Report:
    recorder, tracker = peer.recorder, peer.tracker
    heard, missing = peer.last_round
    row: dict[str, Any] = recorder.rows[-1] if recorder.rows else {}
    expires = peer.transport.expires

    def names(nodes: Iterable[int]) -> tuple[str, ...]:
        return tuple(tracker.name(node) for node in sorted(nodes)[:MAX_NAMES])

    return Report(
        round=recorder.finished,
        rounds=peer.world.rounds,
        state=peer.state,
        accuracy=recorder.accuracy,
        epsilon=row.get("epsilon"),
        heard=names(heard),
        missing=names(missing),
        not_reached_by=names(tracker.out_of_reach),
        peerage=str(package_version("peerage")),
        torch=str(package_version("torch")),
        schema=SCHEMA,
        expires=None if expires is None else expires.isoformat(),
        revision=peer.network.revision,
    )


def printable(text: Any) -> str:
    """A text of another peer without control characters, which could change a terminal."""
    return "".join(one if one.isprintable() else "?" for one in str(text)[:MAX_TEXT])
