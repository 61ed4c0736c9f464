"""The versions that a peer runs, and whether peers of other versions can take part."""

from dataclasses import dataclass
from typing import Any

from peerage.net.wire.header import SCHEMA, format_value
from peerage.records.environment import package_version

UNKNOWN = "unknown"  # a package that is not installed, such as a checkout in PYTHONPATH
REMEDY = "install the same version of Peerage on both machines"


@dataclass(frozen=True)
class Versions:
    """What a peer runs. Patch releases of Peerage go together; nothing here is in the settings."""

    peerage: str
    torch: str
    schema: int  # of the messages

    @classmethod
    def here(cls) -> "Versions":
        peerage, torch = (package_version(name) or UNKNOWN for name in ("peerage", "torch"))
        return cls(peerage, torch, SCHEMA)

    @classmethod
    def parse(cls, fields: Any) -> "Versions | None":
        """The versions that a peer states; None if it does not, as early ones did not."""
        if not isinstance(fields, dict) or type(fields.get("schema")) is not int:
            return None
        peerage, torch = (fields.get(name) for name in ("peerage", "torch"))
        if not isinstance(peerage, str) or not isinstance(torch, str):
            return None
        return cls(peerage, torch, fields["schema"])

    def refusal(self, other: "Versions | None") -> str | None:
        """Why a peer with other versions cannot take part, as in `runs ...`; None if it can."""
        if other is None:
            return None
        if other.schema != self.schema:
            return (
                f"schema {format_value(other.schema)} of messages (Peerage "
                f"{_shown(other.peerage)}), this peer {self.schema} (Peerage {self.peerage})"
            )
        known = UNKNOWN not in (self.peerage, other.peerage)
        if known and _minor(other.peerage) != _minor(self.peerage):
            return f"Peerage {_shown(other.peerage)}, this peer {self.peerage}"
        return None

    def caution(self, other: "Versions | None") -> str | None:
        """Why results of a peer with other versions may differ; None if they should not."""
        if other is None or other.torch == self.torch or UNKNOWN in (self.torch, other.torch):
            return None
        return f"torch {_shown(other.torch)}, this peer {self.torch}"


def _minor(version: str) -> list[str]:
    """The major and the minor version.

    >>> _minor("0.1.7") == _minor("0.1.0.dev3"), _minor("0.1.0") == _minor("0.2.0")
    (True, False)
    """
    return version.split(".")[:2]


def _shown(version: str) -> str:
    """A version of another peer for a log line, shortened and escaped."""
    return format_value(version).strip("'\"")
