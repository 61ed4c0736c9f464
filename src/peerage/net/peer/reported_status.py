"""What a peer reports about itself to another one."""

import json
from dataclasses import dataclass
from typing import Any

from peerage.net.peer.progress import State, has_begun
from peerage.net.peer.versions import Versions
from peerage.net.wire.header import NUMBER_LIMIT


@dataclass(frozen=True)
class Status:
    """What a peer reports about itself."""

    settings_hash: str
    incarnation: str  # new after every restart
    round: int
    state: str
    awaited: bool  # whether it has not begun, or began with this incarnation of the asking peer
    versions: Versions | None = None  # None if an early version does not state them
    unreachable: str | None = None  # why it cannot reach the asking peer, if it cannot
    revision: int = 1  # of its network file

    @classmethod
    def parse(cls, raw: bytes) -> "Status | None":
        try:
            return cls.of_fields(json.loads(raw))
        except (ValueError, RecursionError):
            return None

    @classmethod
    def of_fields(cls, fields: Any) -> "Status | None":
        try:
            round, awaited = int(fields["round"]), bool(fields["awaited"])
            names = (str(fields["settings_hash"]), str(fields["incarnation"]))
            state, versions = str(fields["state"]), Versions.parse(fields.get("versions"))
            revision = int(fields.get("revision", 1))
            if not 1 <= revision < NUMBER_LIMIT:
                return None
            return cls(*names, round, state, awaited, versions, unreachable_in(fields), revision)
        except (ValueError, KeyError, TypeError, OverflowError):
            return None

    @property
    def begun(self) -> bool:
        return has_begun(self.state)

    @property
    def running(self) -> bool:
        return not self.state.startswith(State.STOPPED)


def unreachable_in(answer: Any) -> str | None:
    """Why the answering peer cannot reach the asking one, if it says so."""
    reason = answer.get("unreachable") if isinstance(answer, dict) else None
    return reason if isinstance(reason, str) else None
