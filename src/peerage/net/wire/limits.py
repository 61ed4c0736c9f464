"""The limits that protect a peer from others, in one place."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits for other peers and for outsiders, which may be slow, unreachable or hostile.

    A connection is *pending* until its first call has been authenticated.
    """

    idle_timeout: float = 10.0  # seconds of silence after which a peer counts as unreachable
    min_rate: int = 1 << 16  # least bytes per second of a stream
    grace: float = 5.0  # seconds that a handshake may take, and each chunk in addition
    max_calls: int = 8  # concurrent calls of one peer
    calls_per_second: float = 200.0  # of one peer; those beyond it wait
    max_connections: int = 8  # authenticated connections of one member or observer
    max_pending: int = 128  # pending connections in all
    max_pending_per_address: int = 32  # of them, from one address
    pending_per_member: int = 4  # added to both for each member, as all may start at once
    new_per_second: float = 200.0  # new connections in all, except from addresses of members
    new_per_second_per_address: float = 50.0
    pending_files: float = 1 / 8  # most pending connections, as a share of the open files allowed

    @property
    def pending_timeout(self) -> float:
        """Seconds until a new connection must be authenticated: by a handshake, then a call."""
        return 2 * self.grace
