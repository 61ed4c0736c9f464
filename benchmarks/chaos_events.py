"""The events of `chaos.py`: what disturbs a network, drawn from a seed."""

import random
from dataclasses import dataclass

from peerage.net.peer.network import MAJORITY, Timeouts, least_contacts

SITES = 5
QUORUM = least_contacts(MAJORITY, SITES)
TOGETHER = SITES - QUORUM + 1  # sites that are cut off at once, so that no quorum is left
TIMEOUTS = Timeouts(start=600)
LINK, SLOW = "100kbit", ("50kbit", "6kbit")
# Rounds before the first event, and after the last drawn one, in which all catch up.
CALM_START, CALM_END = 5, 30


@dataclass(frozen=True)
class Event:
    """One disturbance of one site; those of the same round begin together."""

    round: int  # in which it begins, or later if too many sites are disturbed
    kind: str  # cut, kill or slow
    site: int
    seconds: float  # until the link is whole again, or the killed process is started again
    rate: str = LINK  # of the link meanwhile


def draw(seed: int, count: int, rounds: int) -> list[list[Event]]:
    """Random events, in groups that begin together: all but one have a single event."""
    rng = random.Random(seed)
    groups = count - TOGETHER + 1
    span = rounds - CALM_START - CALM_END
    starts = [CALM_START + (i * span + rng.randrange(span)) // groups for i in range(groups)]
    kinds = [("cut", "kill", "slow")[i % 3] for i in range(groups)]
    rng.shuffle(kinds)
    without_quorum = rng.randrange(groups // 3, 2 * groups // 3 + 1)
    drawn: list[list[Event]] = []
    for group, (start, kind) in enumerate(zip(starts, kinds, strict=True)):
        if group == without_quorum:
            seconds = round(rng.uniform(20, 30), 1)
            sites = sorted(rng.sample(range(SITES), TOGETHER))
            drawn.append([Event(start, "cut", site, seconds) for site in sites])
        else:
            drawn.append([_single(rng, start, kind)])
    return drawn


def _single(rng: random.Random, start: int, kind: str) -> Event:
    site = rng.randrange(SITES)
    if kind == "cut":  # half of them so short that no peer should notice
        seconds = rng.uniform(1, 4) if rng.random() < 0.5 else rng.uniform(12, 20)
    else:
        seconds = rng.uniform(1, 10) if kind == "kill" else rng.uniform(8, 20)
    rate = rng.choice(SLOW) if kind == "slow" else LINK
    return Event(start, kind, site, round(seconds, 1), rate)


@dataclass
class Occurrence:
    """An event that has happened."""

    event: Event
    began: float  # seconds since 1970, as in the logs
    round: int  # the highest round that was under way
    alone: bool  # whether no other site was disturbed
    healed: float | None = None
    caught_up: int | None = None  # the round in which the site was with the others again
