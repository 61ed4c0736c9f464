"""The decisions of a peer about rounds and waiting: pure functions of what it knows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from peerage.requests import PRE_ROUND


class State(StrEnum):
    """What a peer is doing, as users and other peers read it."""

    STARTING = "starting"
    MEETING = "waiting for others"  # before the first round
    RUNNING = "running"
    WAITING = "waiting for "  # followed by the names of the peers; none is reachable
    AHEAD = "waiting for the others to catch up"
    ABSENT = "absent"  # as scheduled by the experiment
    FINISHED = "finished"
    STOPPED = "stopped: "  # followed by the error; training has stopped, but it answers others


def has_begun(state: str) -> bool:
    """Whether a peer in this state no longer waits for the others to start."""
    return state not in (State.STARTING, State.MEETING)


@dataclass(frozen=True)
class View:
    """What one peer knows about the others when it decides about a round."""

    round: int  # the current or next round of this peer
    rounds: Mapping[int, int]  # peer -> the round in which it was last seen
    scheduled: frozenset[int]  # peers that take part in the round
    reachable: frozenset[int]
    finished: frozenset[int]  # peers that reported that they have run all rounds
    mismatched: frozenset[int]  # peers that run another experiment
    hub: int | None  # None also for the hub itself
    ahead: int  # rounds that a peer may be ahead of another
    awaited: bool = True  # whether the others began together with this peer

    def newest(self, among: Iterable[int] | None = None) -> int:
        """The second-highest round of the reachable peers: a single peer may lie.

        If fewer than three are known, the highest; with a hub, that of the hub.
        """
        if self.hub is not None:
            return self.rounds.get(self.hub, PRE_ROUND)
        peers = self.reachable if among is None else self.reachable.intersection(among)
        known = sorted(self.rounds[peer] for peer in peers if peer in self.rounds)
        return known[-2] if len(known) > 2 else max(known, default=PRE_ROUND)

    # Contact

    def in_contact(self) -> list[int]:
        """The peers of this experiment that are reachable or have finished."""
        return sorted((self.reachable | self.finished) - self.mismatched)

    def may_run(self) -> bool:
        """Whether this peer may run the round: it is in contact, or no other peer takes part.

        A client needs contact with its hub: without it, it would run rounds that change nothing.
        """
        contacts = self.in_contact()
        with_hub = self.hub is None or self.hub in contacts
        return (bool(contacts) and with_hub) or self.scheduled <= self.mismatched

    def needed_contacts(self) -> list[int]:
        """The peers that this one must wait for before the round; empty if it may run."""
        wanted = self.scheduled.difference(self.mismatched, self.in_contact())
        hub = () if self.hub is None else (self.hub,)
        return [] if self.may_run() else sorted(wanted.union(hub))

    def worth_waiting_for(self, senders: Iterable[int]) -> list[int]:
        """The senders that may still send a message: all of a finished peer's have arrived."""
        possible = self.reachable - self.finished
        return [peer for peer in senders if peer in possible]

    # Rounds

    def start_round(self) -> int:
        """The round to start with: a restarted peer does not run the rounds that it missed."""
        return self.round if self.awaited else max(self.round, self.newest())

    def next_round(self) -> int:
        """The round to run next: that of the others if they no longer wait for this peer."""
        newest = self.newest()
        return newest if newest > self.round + self.ahead else self.round

    def too_far_ahead(self) -> bool:
        """Whether the others could not accept the messages of this peer yet."""
        return PRE_ROUND < self.newest() < self.round - self.ahead

    def is_over(self) -> bool:
        """Whether the peers that take part in the round have left it; true if there are none."""
        return not self.scheduled or self.newest(self.scheduled) > self.round
