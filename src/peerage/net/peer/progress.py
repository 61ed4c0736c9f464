"""The decisions of a peer about rounds and waiting: pure functions of what it knows.

The *members* of a round are the peers that take part in it by schedule, without those that this
peer refuses (they run another experiment, their messages made rounds fail, or their certificates
were revoked).

- **Quorum.** A peer runs a round only while it is in contact with a quorum: more than half of the
  members, itself included, or the number in the network file. Finished peers are contacts. A client
  also needs its hub, without which it cannot do anything useful.
- **Skipping.** A peer skips to the highest round that more than half of the other members have
  reached. If fewer are reachable, all of these must have reached it, and at least two. So one
  member among three or more cannot make the others skip rounds, and the smaller part of a divided
  network does not decide for the larger one. Where only one other member exists, its word counts.
  A client goes where its hub is: it uses the hub's models, so it trusts the hub anyway.
- **Waiting in front.** A peer waits if fewer than half of the members that it knows of are close
  behind it. A peer in the last round never waits for this, so one can always continue.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from peerage.net.peer.network import MAJORITY, least_contacts
from peerage.requests import PRE_ROUND


class State(StrEnum):
    """What a peer is doing, as users and other peers read it."""

    STARTING = "starting"
    MEETING = "waiting for others"  # before the first round
    RUNNING = "running"
    WAITING = "waiting for "  # followed by the names of the peers; too few are in contact
    AHEAD = "waiting for the others to catch up"
    ABSENT = "absent"  # as scheduled by the experiment
    FINISHED = "finished"
    SKIPPED = "skipped rounds"  # at the end, and most rounds were skipped
    ALONE = "out of contact"  # at the end, which it did not reach: it lost all others for long
    STOPPED = "stopped: "  # followed by the error; training has stopped, but it answers others


def has_begun(state: str) -> bool:
    """Whether a peer in this state no longer waits for the others to start."""
    return state not in (State.STARTING, State.MEETING)


def final_state(skipped: int, scheduled: int) -> State:
    """The state of a peer after the last round, if it skipped so many rounds while it ran."""
    return State.SKIPPED if 2 * skipped > scheduled else State.FINISHED


@dataclass(frozen=True)
class View:
    """What one peer knows about the others when it decides about a round."""

    round: int  # the current or next round of this peer
    rounds: Mapping[int, int]  # peer -> the round in which it was last seen
    scheduled: frozenset[int]  # other peers that take part in the round
    reachable: frozenset[int]
    finished: frozenset[int]  # peers that reported that they have run all rounds
    refused: frozenset[int]  # peers of another experiment, banned ones, and revoked certificates
    hub: int | None  # None also for the hub itself
    ahead: int  # rounds that a peer may be ahead of another
    awaited: bool = True  # whether the others began together with this peer
    present: bool = True  # whether this peer takes part in the round
    quorum: int | str = MAJORITY  # members that must be in contact

    @property
    def others(self) -> frozenset[int]:
        """The members without this peer."""
        return self.scheduled - self.refused

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.others) + self.present

    # Contact

    @property
    def least(self) -> int:
        """The number of members that must be in contact, this one included."""
        return least_contacts(self.quorum, self.size)

    def in_contact(self) -> list[int]:
        """The other members that are reachable or have finished."""
        return sorted(self.others & (self.reachable | self.finished))

    def out_of_contact(self) -> list[int]:
        """The other members that are not in contact."""
        return sorted(self.others.difference(self.in_contact()))

    def may_run(self) -> bool:
        """Whether this peer may run the round: it has a quorum, or no other peer takes part."""
        contacts = self.in_contact()
        with_hub = self.hub is None or self.hub in contacts
        alone = not self.others and self.hub not in self.scheduled
        return alone or (with_hub and len(contacts) + self.present >= self.least)

    def needed_contacts(self) -> list[int]:
        """The peers that this one must wait for before the round; empty if it may run."""
        if self.may_run():
            return []
        hub = self.scheduled & {self.hub}  # even if it was refused
        return sorted((self.others | hub).difference(self.in_contact()))

    def worth_waiting_for(self, senders: Iterable[int]) -> list[int]:
        """The senders that may still send a message; none if the peer must pause instead.

        All messages of a finished peer have arrived.
        """
        possible = self.reachable - self.refused - self.finished
        return [peer for peer in senders if peer in possible] if self.may_run() else []

    # Rounds

    def _known_rounds(self) -> list[int]:
        """The rounds of the reachable members that still run, the highest first."""
        running = self.others & self.reachable & self.rounds.keys() - self.finished
        return sorted((self.rounds[peer] for peer in running), reverse=True)

    def confirmed_round(self) -> int:
        """The highest round that enough other members have reached; PRE_ROUND if none is known."""
        if self.hub is not None:
            return self.rounds.get(self.hub, PRE_ROUND)
        return self._reached_by_enough(self._known_rounds())

    def _reached_by_enough(self, known: list[int]) -> int:
        """The highest of these rounds, in falling order, that enough members have reached."""
        count = len(self.others)
        enough = max(min(least_contacts(MAJORITY, count), len(known)), min(2, count))
        return known[enough - 1] if 0 < enough <= len(known) else PRE_ROUND

    def start_round(self) -> int:
        """The round to start with: a restarted peer does not run the rounds that it missed."""
        return self.round if self.awaited else max(self.round, self.confirmed_round())

    def next_round(self) -> int:
        """The round to run next: that of the others if they no longer wait for this peer."""
        confirmed = self.confirmed_round()
        return confirmed if confirmed > self.round + self.ahead else self.round

    def is_in_step(self) -> bool:
        """Whether this peer need not ask the others for their rounds before it decides.

        If most members are known to be close, no other can change what this peer does. So a member
        that states a wrong round costs no time.
        """
        known = self._known_rounds()
        if self.hub is not None:
            known = [self.rounds[peer] for peer in {self.hub} & self.rounds.keys()]
        close = sum(abs(round - self.round) <= self.ahead for round in known)
        return close == len(known) or close + self.present >= least_contacts(MAJORITY, self.size)

    def too_far_ahead(self) -> bool:
        """Whether most others could not accept the messages of this peer yet."""
        if self.hub is not None:
            return self.confirmed_round() < self.round - self.ahead and self.hub in self.rounds
        known = self._known_rounds() + [self.round] * len(self.others & self.finished)
        close = self.present + sum(round >= self.round - self.ahead for round in known)
        return close < min(least_contacts(MAJORITY, self.size), len(known) + self.present)

    def behind(self) -> list[int]:
        """The other members that are too far behind to accept the messages of this peer."""
        running = self.others & self.reachable & self.rounds.keys() - self.finished
        return sorted(p for p in running if self.rounds[p] < self.round - self.ahead)

    def is_over(self) -> bool:
        """Whether the peers that take part in the round have left it; true if there are none."""
        if self.hub is not None or not self.others:
            return not self.others or self.confirmed_round() > self.round
        gone = [self.round + 1] * len(self.others & self.finished)
        known = sorted(gone + self._known_rounds(), reverse=True)
        return self._reached_by_enough(known) > self.round
